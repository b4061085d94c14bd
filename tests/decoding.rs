//! Decoding: ranked and sampled token ids, and pruned mixtures.

mod common;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor};
use common::case::{Case, Head, Sizes, ENTRIES, HEADS};
use common::check::{build, Layer};
use common::on_each_device;
use common::values::{numbers, Numbers};
use mos_head::decode::{Sampler, Sampling, TopK};
use mos_head::parts::LogitFunction;
use mos_head::{
    Distributions, DropoutMasks, Error, LossOptions, Mixture, MixtureLayer, OutputLayer, Result, SoftmaxHead,
};

const SIZES: Sizes = Sizes::new(5, 3, 4, 30);

fn sampler(sampling: Sampling, seed: u64) -> Sampler {
    Sampler::new(sampling, seed).expect("valid options")
}

fn ids(tokens: &Tensor) -> Result<Vec<u32>> {
    Ok(tokens.flatten_all()?.to_vec1()?)
}

/// A head whose only hidden state `[1]` = 1 gives these log-probabilities.
fn head_of(log_probs: &[f32], device: &Device) -> Result<SoftmaxHead> {
    SoftmaxHead::from_tensors(Tensor::new(log_probs, device)?.unsqueeze(1)?, None)
}

fn ones(positions: usize, device: &Device) -> Result<Tensor> {
    Ok(Tensor::ones((positions, 1), DType::F32, device)?)
}

/// Whether an error says that no id of the first position is possible. On a GPU the log-probabilities are NaN then.
fn has_no_outcome(error: &Error, device: &Device) -> bool {
    match error {
        Error::Impossible { position: 0 } => true,
        Error::Distribution { position: 0 } => !device.is_cpu(),
        _ => false,
    }
}

/// The distribution of `log_probs` after temperature and truncation, in plain loops.
fn truncated(log_probs: &[f64], temperature: f64, top_k: usize, top_p: f64, min_p: f64) -> Vec<f64> {
    let softmax = |logits: Vec<f64>| {
        let sum: f64 = logits.iter().map(|x| x.exp()).sum();
        logits.into_iter().map(|x| x.exp() / sum).collect::<Vec<f64>>()
    };
    let mut p = softmax(log_probs.iter().map(|x| x / temperature).collect());
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[b].total_cmp(&p[a]).then(a.cmp(&b)));
    order[top_k.min(p.len())..].iter().for_each(|&v| p[v] = 0.0);
    let sum: f64 = p.iter().sum();
    let mut before = 0.0;
    for &v in &order {
        let mass = p[v] / sum;
        if before >= top_p {
            p[v] = 0.0;
        }
        before += mass;
    }
    let least = min_p * p[order[0]];
    p.iter_mut().filter(|p| **p < least).for_each(|p| *p = 0.0);
    let sum: f64 = p.iter().sum();
    p.into_iter().map(|p| p / sum).collect()
}

/// Asserts that Pearson's chi-square statistic of the draws is not far above its degrees of freedom. Ids with few
/// expected draws are pooled.
fn assert_drawn_from(draws: &[u32], probabilities: &[f64]) {
    let n = draws.len() as f64;
    let mut counts = vec![0f64; probabilities.len()];
    draws.iter().for_each(|&v| counts[v as usize] += 1.0);
    let (mut statistic, mut freedom) = (0f64, -1f64);
    let (mut rest, mut rest_expected) = (0.0, 0.0);
    for (&count, &p) in counts.iter().zip(probabilities) {
        assert!(p > 0.0 || count == 0.0, "drew an id of probability zero");
        if n * p >= 8.0 {
            statistic += (count - n * p).powi(2) / (n * p);
            freedom += 1.0;
        } else {
            (rest, rest_expected) = (rest + count, rest_expected + n * p);
        }
    }
    if rest_expected >= 1.0 {
        statistic += (rest - rest_expected).powi(2) / rest_expected;
        freedom += 1.0;
    }
    assert!(freedom > 0.0 || statistic < 1e-6, "{statistic} for one id");
    assert!(statistic < freedom + 4.0 * (2.0 * freedom + 1.0).sqrt(), "chi-square {statistic} with {freedom} degrees");
}

on_each_device! {
    fn top_k_is_the_start_of_the_sorted_log_probabilities(device: &Device) -> Result<()> {
        for (seed, vocab) in (0..).zip([1, 7, 513, 2001]) {
            for head in ENTRIES {
                for &dtype in common::dtypes(device) {
                    let case = Case::random(head, Sizes { vocab, ..SIZES }, &[2, 3], seed).rounded(dtype)?;
                    let layer = Layer::new(&case, &case.constants(dtype, device)?)?;
                    let log_probs = layer.log_probs()?.reshape((6, vocab))?;
                    for k in [1, 2, 50, vocab] {
                        if k > vocab {
                            continue;
                        }
                        let top = match &layer {
                            Layer::Head(head, hidden) => head.top_k(hidden, k)?,
                            Layer::Mixture(mixture) => mixture.top_k(k)?,
                        };
                        assert_eq!((top.token_ids.dims(), top.log_probs.dims()), (&[2, 3, k][..], &[2, 3, k][..]));
                        let found = top.log_probs.to_dtype(dtype)?.reshape((6, k))?;
                        let gathered = log_probs.gather(&top.token_ids.reshape((6, k))?, 1)?;
                        assert_eq!(numbers(&found), numbers(&gathered), "{head:?} {dtype:?}");
                        if !matches!(dtype, DType::F32 | DType::F64) {
                            // Rounding makes different log-probabilities equal.
                            continue;
                        }
                        for (t, row) in numbers(&log_probs).chunks(vocab).enumerate() {
                            let mut order: Vec<u32> = (0..vocab as u32).collect();
                            order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
                            assert_eq!(ids(&top.token_ids)?[t * k..(t + 1) * k], order[..k], "{head:?} {dtype:?} {k}");
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn ties_are_ranked_by_the_lower_id(device: &Device) -> Result<()> {
        let head = head_of(&[0.0; 2000], device)?;
        let top = head.top_k(&ones(2, device)?, 3)?;
        assert_eq!(ids(&top.token_ids)?, [0, 1, 2, 0, 1, 2]);
        Ok(())
    }

    fn a_k_outside_the_vocabulary_is_refused(device: &Device) -> Result<()> {
        let head = head_of(&[0.0; 5], device)?;
        for k in [0, 6] {
            let error = head.top_k(&ones(1, device)?, k).expect_err("k out of range").to_string();
            assert!(error.contains("k: ") && error.contains("1 to vocab_size 5"), "{error}");
            assert!(error.ends_with(&k.to_string()), "{error}");
        }
        Ok(())
    }

    fn log_prob_of_given_ids_equals_log_probs(device: &Device) -> Result<()> {
        for head in HEADS {
            let dtype = common::exact(device);
            let case = Case::random(head, SIZES, &[2, 3], 3);
            let tensors = case.constants(dtype, device)?;
            let layer = build(&case, &tensors)?;
            let given = case.target_tensor(device)?;
            let all = layer.log_probs(&tensors["hidden"])?;
            let expected = all.gather(&given.unsqueeze(2)?.to_dtype(DType::U32)?, 2)?.squeeze(2)?;
            let got = layer.log_prob(&tensors["hidden"], &given)?;
            assert_abs_diff_eq!(numbers(&got), numbers(&expected), epsilon = 1e-5);
            let error = layer.log_prob(&tensors["hidden"], &given.flatten_all()?).expect_err("another shape");
            assert!(matches!(error, Error::Shape { argument: "token_ids", .. }), "{error:?}");
        }
        Ok(())
    }

    fn greedy_is_argmax(device: &Device) -> Result<()> {
        for head in HEADS {
            let case = Case::random(head, Sizes { vocab: 1300, ..SIZES }, &[2, 9], 4);
            let tensors = case.constants(DType::F32, device)?;
            let layer = build(&case, &tensors)?;
            let argmax = ids(&layer.argmax(&tensors["hidden"])?)?;
            let greedy = layer.sample(&tensors["hidden"], &mut sampler(Sampling::greedy(), 1))?;
            assert_eq!(greedy.dims(), [2, 9]);
            assert_eq!(ids(&greedy)?, argmax);
            let one = layer.sample(&tensors["hidden"], &mut sampler(Sampling::new().with_top_k(1), 1))?;
            assert_eq!(ids(&one)?, argmax);
        }
        Ok(())
    }

    fn frequencies_of_samples_are_the_probabilities(device: &Device) -> Result<()> {
        // A GPU returns the probabilities; the host draws from them on every device.
        let positions = if device.is_cpu() { 20_000 } else { 2_000 };
        for (seed, vocab) in [(5, 30), (6, 1200)] {
            let case = Case::random(Head::MixtureOfSoftmaxes, Sizes { vocab, ..SIZES }, &[1], seed);
            let tensors = case.constants(DType::F32, device)?;
            let layer = build(&case, &tensors)?;
            let hidden = tensors["hidden"].broadcast_as((positions, 5))?;
            let log_probs = numbers(&layer.log_probs(&tensors["hidden"])?);
            for (temperature, top_k, top_p, min_p) in [
                (1.0, vocab, 1.0, 0.0),
                (0.7, vocab, 1.0, 0.0),
                (2.5, vocab, 1.0, 0.0),
                (1.0, 7, 1.0, 0.0),
                (1.3, vocab, 0.8, 0.0),
                (1.0, vocab, 1.0, 0.1),
                (0.8, 20, 0.9, 0.05),
                (1.0, 5000, 0.999, 0.0),
                (1.0, vocab, 1e-9, 0.0),
            ] {
                let mut sampling = Sampling::new().with_temperature(temperature).with_top_p(top_p).with_min_p(min_p);
                if top_k != vocab {
                    sampling = sampling.with_top_k(top_k);
                }
                let draws = ids(&layer.sample(&hidden, &mut sampler(sampling.clone(), 11))?)?;
                assert_drawn_from(&draws, &truncated(&log_probs, temperature, top_k, top_p, min_p));
            }
            let probabilities: Vec<f64> = log_probs.iter().map(|x| x.exp()).collect();
            let ancestral = Sampling::new().with_ancestral(true);
            let draws = ids(&layer.sample(&hidden, &mut sampler(ancestral.clone(), 12))?)?;
            assert_drawn_from(&draws, &probabilities);
            // The head computes only the contexts of the drawn components, the mixture has all: the draws agree.
            let mixture_draws = layer.mixture(&hidden, DropoutMasks::Off)?.sample(&mut sampler(ancestral, 12))?;
            let differing = ids(&mixture_draws)?.iter().zip(&draws).filter(|(a, b)| a != b).count();
            assert!(differing <= positions / 1000, "{differing} draws differ by more than rounding");

            let sampling = Sampling::new().with_component_temperature(0.5);
            let draws = ids(&layer.sample(&hidden, &mut sampler(sampling, 13))?)?;
            let tempered = layer.mixture(&tensors["hidden"], DropoutMasks::Off)?.with_component_temperature(0.5)?;
            let probabilities: Vec<f64> = numbers(&tempered.log_probs()?).iter().map(|x| x.exp()).collect();
            assert_drawn_from(&draws, &probabilities);
        }
        Ok(())
    }

    fn a_component_temperature_divides_the_logits_of_each_softmax(device: &Device) -> Result<()> {
        let dtype = common::exact(device);
        let case = Case::random(Head::Mixture, SIZES, &[3], 7);
        let tensors = case.constants(dtype, device)?;
        let mixture = case.mixture(dtype, device)?;
        let got = numbers(&mixture.clone().with_softcap(2.0)?.with_component_temperature(0.3)?.log_probs()?);
        let logits = tensors["contexts"].flatten(0, 1)?.matmul(&tensors["decoder.weight"].t()?)?;
        let logits = logits.broadcast_add(&tensors["decoder.bias"])?.reshape((3, 4, 30))?;
        let logits = ((logits / 2.0)?.tanh()? * (2.0 / 0.3))?;
        let components = candle_nn::ops::log_softmax(&logits, 2)?;
        let joint = components.broadcast_add(&tensors["log_priors"].unsqueeze(2)?)?;
        assert_abs_diff_eq!(got, numbers(&joint.log_sum_exp(1)?), epsilon = 1e-5);
        for bad in [0.0, -1.0, f64::NAN] {
            assert!(mixture.with_component_temperature(bad).is_err());
        }
        let error = mixture.with_logit_function(LogitFunction::Sigsoftmax)?.with_component_temperature(0.3).unwrap_err();
        assert_eq!(error.to_string(), "component_temperature: not supported by logits with sigsoftmax");
        Ok(())
    }

    fn a_seed_fixes_the_draws_for_any_number_of_threads(device: &Device) -> Result<()> {
        let case = Case::random(Head::MixtureOfSoftmaxes, Sizes { vocab: 3000, ..SIZES }, &[40], 8);
        let tensors = case.constants(DType::F32, device)?;
        let layer = build(&case, &tensors)?;
        // On CUDA, the threads of a pool use other streams than the one that has made the tensors.
        device.synchronize()?;
        let draw = |seed, threads| -> Result<Vec<u32>> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            let sampling = Sampling::new().with_temperature(1.2).with_top_p(0.9);
            pool.install(|| ids(&layer.sample(&tensors["hidden"], &mut sampler(sampling, seed))?))
        };
        assert_eq!(draw(1, 1)?, draw(1, 3)?);
        assert_ne!(draw(1, 1)?, draw(2, 1)?);
        // A sampler advances: the second call draws other ids.
        let mut advancing = sampler(Sampling::new(), 1);
        let first = ids(&layer.sample(&tensors["hidden"], &mut advancing)?)?;
        assert_ne!(first, ids(&layer.sample(&tensors["hidden"], &mut advancing)?)?);
        Ok(())
    }

    fn an_invalid_distribution_is_an_error_and_never_an_id(device: &Device) -> Result<()> {
        for bad in [f32::NAN, f32::INFINITY] {
            let head = head_of(&[0.0, 1.0, 2.0], device)?;
            let hidden = Tensor::new(&[[1f32], [bad], [1.0]], device)?;
            let samplings = [
                Sampling::new(),
                Sampling::greedy(),
                Sampling::new().with_top_k(2),
                Sampling::new().with_ancestral(true),
            ];
            for sampling in samplings {
                let error = head.sample(&hidden, &mut sampler(sampling.clone(), 1)).expect_err("no distribution");
                assert!(matches!(error, Error::Distribution { position: 1 }), "{sampling:?}: {error:?}");
                assert!(error.to_string().contains("position 1"), "{error}");
            }
            assert!(matches!(head.top_k(&hidden, 1), Err(Error::Distribution { position: 1 })));
            assert!(matches!(head.argmax(&hidden), Err(Error::Distribution { position: 1 })));
        }
        let nothing = head_of(&[f32::NEG_INFINITY; 3], device)?;
        for positions in [1, 100] {
            let drawn = nothing.sample(&ones(positions, device)?, &mut sampler(Sampling::new(), 1));
            assert!(has_no_outcome(&drawn.expect_err("nothing"), device));
            let best = nothing.top_k(&ones(positions, device)?, 2);
            assert!(has_no_outcome(&best.expect_err("nothing"), device));
        }
        // One of two components has no possible id.
        let bias = Tensor::zeros(3, DType::F32, device)?;
        let contexts = Tensor::new(&[[[1f32], [f32::NEG_INFINITY]]], device)?;
        let log_priors = Tensor::full(0.5f32.ln(), (1, 2), device)?;
        let weight = Tensor::ones((3, 1), DType::F32, device)?;
        let mixture = Mixture::new(&contexts, Some(&log_priors), &weight, Some(&bias))?;
        assert!(has_no_outcome(&mixture.top_k(1).expect_err("nothing in one component"), device));
        Ok(())
    }

    fn numbers_that_are_no_log_probabilities_are_refused(device: &Device) -> Result<()> {
        let samplings = [
            Sampling::new(),
            Sampling::greedy(),
            Sampling::new().with_temperature(0.5),
            Sampling::new().with_top_k(3),
            Sampling::new().with_top_p(0.5),
        ];
        let errors = |log_probs: &Tensor| -> Vec<Error> {
            let drawn = samplings.iter().map(|sampling| sampler(sampling.clone(), 1).sample(log_probs).map(|_| ()));
            let drawn: Vec<Result<()>> = drawn.chain([TopK::from_log_probs(log_probs, 2).map(|_| ())]).collect();
            drawn.into_iter().map(|result| result.expect_err("no log-probabilities")).collect()
        };
        for bad in [f32::NAN, f32::INFINITY] {
            // An infinity is named before raw logits of another position.
            let rows = Tensor::new(&[[3.75f32, 3.72, -1.0], [0.0, bad, -1.0]], device)?;
            for error in errors(&rows) {
                assert!(matches!(error, Error::Distribution { position: 1 }), "{error}");
                assert_eq!(error.to_string(), "the distribution at position 1 is NaN or infinite");
            }
        }
        let raw = Tensor::new(&[[-0.1f32, -3.0, -4.0], [-1.0, 3.75, 0.5]], device)?;
        for error in errors(&raw) {
            assert!(matches!(error, Error::Value { argument: "log_probs", position: 1, index: 1, .. }), "{error}");
            let expected = "log_probs: expected log-probabilities, at most 0, got 3.75 at index 1 of position 1";
            assert_eq!(error.to_string(), expected);
        }
        for error in errors(&Tensor::full(f32::NEG_INFINITY, (2, 3), device)?) {
            assert!(matches!(error, Error::Impossible { position: 0 }), "{error}");
            assert_eq!(error.to_string(), "no outcome of the distribution at position 0 is possible");
        }
        Ok(())
    }

    /// Rounding may bring a log-probability above zero: by 2^-6 in half precision, which is known of the tensor alone.
    fn log_probabilities_that_are_rounded_above_zero_are_taken(device: &Device) -> Result<()> {
        for (dtype, taken, refused) in [
            (DType::F32, 9e-5, 1.2e-4),
            (DType::F64, 9e-5, 1.2e-4),
            (DType::F16, 0.0156, 0.0158),
            (DType::BF16, 0.0156, 0.0158),
        ] {
            if dtype == DType::F64 && !device.is_cpu() {
                continue;
            }
            let rows = |first: f64| -> Result<Tensor> {
                let rows = Tensor::new(&[[first, -9.0, -9.5]], &Device::Cpu)?;
                Ok(rows.to_dtype(dtype)?.to_device(device)?)
            };
            let best = TopK::from_log_probs(&rows(taken)?, 2)?;
            assert_eq!(ids(&best.token_ids)?, [0, 1], "{dtype:?}");
            assert_eq!(ids(&sampler(Sampling::greedy(), 1).sample(&rows(taken)?)?)?, [0], "{dtype:?}");
            let is_refused = |result: Result<()>| matches!(result, Err(Error::Value { position: 0, index: 0, .. }));
            assert!(is_refused(TopK::from_log_probs(&rows(refused)?, 2).map(|_| ())), "{dtype:?}");
            assert!(is_refused(sampler(Sampling::greedy(), 1).sample(&rows(refused)?).map(|_| ())), "{dtype:?}");
        }
        Ok(())
    }

    /// Logits are small integers, which are exact in every dtype, so that most ids have equals: the lower id comes
    /// first.
    fn many_positions_have_the_best_ids_of_a_full_sort(device: &Device) -> Result<()> {
        for (vocab, positions) in [(1, 100), (70, 65), (3001, 131)] {
            let integer = |i: usize| ((i * 7919 + i / 13) % 5) as f64 - 2.0;
            let (d, impossible) = (4, |id: usize| id % 11 == 3 && vocab > 1);
            let contexts: Vec<f64> = (0..positions * d).map(|i| integer(i + 5)).collect();
            let weights: Vec<f64> = (0..vocab * d).map(integer).collect();
            let bias: Vec<f64> =
                (0..vocab).map(|id| if impossible(id) { f64::NEG_INFINITY } else { integer(id) }).collect();
            for dtype in [DType::F32, DType::F64, DType::BF16] {
                if dtype == DType::F64 && !device.is_cpu() {
                    continue;
                }
                let tensor = |values: &[f64], shape: &[usize]| -> Result<Tensor> {
                    let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
                    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
                };
                let weight = tensor(&weights, &[vocab, d])?;
                let bias_tensor = tensor(&bias, &[vocab])?;
                let mixture =
                    Mixture::new(&tensor(&contexts, &[positions, 1, d])?, None, &weight, Some(&bias_tensor))?;
                for k in [1, 7, 64, 65, 200].map(|k| k.min(vocab)) {
                    let best = mixture.top_k(k)?;
                    let (found, log_probs) = (ids(&best.token_ids)?, numbers(&best.log_probs));
                    for t in 0..positions {
                        let dot = |id: usize| -> f64 {
                            (0..d).map(|j| contexts[t * d + j] * weights[id * d + j]).sum()
                        };
                        let z: Vec<f64> = (0..vocab).map(|id| dot(id) + bias[id]).collect();
                        let largest = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                        let lse = largest + z.iter().map(|z| (z - largest).exp()).sum::<f64>().ln();
                        let mut order: Vec<usize> = (0..vocab).collect();
                        order.sort_by(|&a, &b| z[b].total_cmp(&z[a]).then(a.cmp(&b)));
                        let what = format!("{dtype:?} {vocab} {k} {t}");
                        assert!(order[..k].iter().map(|&id| id as u32).eq(found[t * k..][..k].iter().copied()), "{what}");
                        let expected: Vec<f64> = order[..k].iter().map(|&id| z[id] - lse).collect();
                        let got = Numbers::from(log_probs[t * k..][..k].to_vec()).named(what);
                        assert_abs_diff_eq!(got, expected, epsilon = 2e-2);
                    }
                }
            }
        }
        Ok(())
    }

    fn the_first_of_many_invalid_distributions_is_named(device: &Device) -> Result<()> {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut hidden = vec![1f32; 100];
            (hidden[67], hidden[90]) = (bad, bad);
            let hidden = Tensor::from_vec(hidden, (100, 1), device)?;
            let head = head_of(&[0.0, 1.0, 2.0], device)?;
            assert!(matches!(head.top_k(&hidden, 2), Err(Error::Distribution { position: 67 })));
        }
        let nothing = head_of(&[f32::NEG_INFINITY; 3], device)?;
        assert!(has_no_outcome(&nothing.argmax(&ones(100, device)?).expect_err("nothing"), device));
        Ok(())
    }

    fn a_nan_among_the_priors_is_an_error(device: &Device) -> Result<()> {
        let contexts = Tensor::ones((2, 2, 1), DType::F32, device)?;
        let priors = Tensor::new(&[[-0.5f32, -1.0], [f32::NAN, -1.0]], device)?;
        let mixture = Mixture::new(&contexts, Some(&priors), &Tensor::ones((4, 1), DType::F32, device)?, None)?;
        for sampling in [Sampling::new(), Sampling::new().with_ancestral(true)] {
            assert!(matches!(mixture.sample(&mut sampler(sampling, 1)), Err(Error::Distribution { position: 1 })));
        }
        assert!(matches!(mixture.prune(0.1), Err(Error::Distribution { position: 1 })));
        Ok(())
    }

    fn the_only_possible_id_is_drawn(device: &Device) -> Result<()> {
        let mut log_probs = [f32::NEG_INFINITY; 1030];
        log_probs[1027] = 3.0;
        let head = head_of(&log_probs, device)?;
        let hidden = ones(50, device)?;
        for sampling in [
            Sampling::new(),
            Sampling::new().with_temperature(0.1),
            Sampling::new().with_temperature(100.0),
            Sampling::greedy(),
            Sampling::new().with_top_k(3),
            Sampling::new().with_top_p(1e-6),
            Sampling::new().with_min_p(1.0),
            Sampling::new().with_ancestral(true),
        ] {
            let draws = ids(&head.sample(&hidden, &mut sampler(sampling.clone(), 2))?)?;
            assert!(draws.iter().all(|&id| id == 1027), "{sampling:?}");
        }
        let top = head.top_k(&ones(1, device)?, 3)?;
        assert_eq!(ids(&top.token_ids)?, [1027, 0, 1]);
        assert_eq!(numbers(&top.log_probs), [0.0, f64::NEG_INFINITY, f64::NEG_INFINITY]);
        Ok(())
    }

    fn low_temperatures_do_not_underflow(device: &Device) -> Result<()> {
        let log_probs: Vec<f32> = (0..2000).map(|i| -(i as f32 % 977.0) / 100.0).collect();
        let head = head_of(&log_probs, device)?;
        let draws = head.sample(&ones(20, device)?, &mut sampler(Sampling::new().with_temperature(1e-4), 3))?;
        assert!(ids(&draws)?.iter().all(|&id| id % 977 == 0));
        Ok(())
    }

    fn an_empty_batch_gives_empty_results(device: &Device) -> Result<()> {
        for head in HEADS {
            let case = Case::random(head, SIZES, &[0, 3], 9);
            let tensors = case.constants(DType::F32, device)?;
            let (layer, hidden) = (build(&case, &tensors)?, &tensors["hidden"]);
            let top = layer.top_k(hidden, 2)?;
            assert_eq!((top.token_ids.dims(), top.log_probs.dims()), (&[0, 3, 2][..], &[0, 3, 2][..]));
            for sampling in [Sampling::new(), Sampling::new().with_ancestral(true)] {
                assert_eq!(layer.sample(hidden, &mut sampler(sampling, 1))?.dims(), [0, 3]);
            }
            let pruned = layer.mixture(hidden, DropoutMasks::Off)?.prune(0.1)?;
            assert_eq!(pruned.total_variation.dims(), [0, 3]);
            assert_eq!(pruned.mixture.log_probs()?.dims(), [0, 3, 30]);
        }
        Ok(())
    }

    fn pruning_changes_the_distribution_by_at_most_the_reported_bound(device: &Device) -> Result<()> {
        let case = Case::random(Head::Mixture, Sizes::new(5, 3, 9, 40), &[2, 3], 10).scaled("log_priors", 3.0);
        let tensors = case.constants(DType::F32, device)?;
        let priors = candle_nn::ops::log_softmax(&tensors["log_priors"], 2)?;
        let bias = tensors.get("decoder.bias");
        let mixture = Mixture::new(&tensors["contexts"], Some(&priors), &tensors["decoder.weight"], bias)?;
        let whole = numbers(&mixture.log_probs()?);
        for mass in [0.0, 1e-3, 0.05, 0.3, 0.999] {
            let pruned = mixture.prune(mass)?;
            let rest = numbers(&pruned.mixture.log_probs()?);
            let bounds = numbers(&pruned.total_variation);
            assert_eq!(pruned.total_variation.dims(), [2, 3]);
            for ((p, q), bound) in whole.chunks(40).zip(rest.chunks(40)).zip(bounds) {
                let variation: f64 = p.iter().zip(q).map(|(p, q)| (p.exp() - q.exp()).abs()).sum::<f64>() / 2.0;
                assert!(variation <= bound + 1e-6 && bound <= mass + 1e-6, "{variation} {bound} {mass}");
            }
            let options = LossOptions::evaluation();
            let rows = pruned.mixture.plan(&options)?.rows_per_chunk;
            match mass {
                0.0 => assert_eq!(rows, 6 * 9),
                0.999 => assert!(rows < 6 * 9),
                _ => {}
            }
        }
        let none = Tensor::new(&[[0f32, f32::NEG_INFINITY], [f32::NEG_INFINITY; 2]], device)?;
        let contexts = Tensor::zeros((2, 2, 5), DType::F32, device)?;
        let impossible = Mixture::new(&contexts, Some(&none), &Tensor::zeros((7, 5), DType::F32, device)?, None)?;
        assert!(matches!(impossible.prune(0.1), Err(Error::Impossible { position: 1 })));
        for sampling in [Sampling::new(), Sampling::new().with_ancestral(true)] {
            let error = impossible.sample(&mut sampler(sampling, 1)).expect_err("impossible");
            assert!(matches!(error, Error::Impossible { position: 1 }), "{error}");
        }
        // Unnormalised logits in place of log-priors.
        let logits = Tensor::new(&[[-1f32, -0.5], [-0.5, 2.0]], device)?;
        let contexts = Tensor::zeros((2, 2, 5), DType::F32, device)?;
        let unnormalised = Mixture::new(&contexts, Some(&logits), &Tensor::zeros((7, 5), DType::F32, device)?, None)?;
        let expected = "log_priors: expected log-probabilities, at most 0, got 2 at index 1 of position 1";
        assert_eq!(unnormalised.prune(0.1).expect_err("above zero").to_string(), expected);
        let drawn = unnormalised.sample(&mut sampler(Sampling::new().with_ancestral(true), 1));
        assert_eq!(drawn.expect_err("above zero").to_string(), expected);
        for mass in [-0.1, 1.0, f64::NAN] {
            assert!(matches!(mixture.prune(mass), Err(Error::Config { argument: "mass", .. })));
        }
        Ok(())
    }

    fn options_out_of_range_are_refused(_device: &Device) -> Result<()> {
        let new = Sampling::new;
        for (sampling, argument) in [
            (new().with_temperature(-0.1), "temperature"),
            (new().with_temperature(f64::NAN), "temperature"),
            (new().with_component_temperature(0.0), "component_temperature"),
            (new().with_top_k(0), "top_k"),
            (new().with_top_p(0.0), "top_p"),
            (new().with_top_p(1.1), "top_p"),
            (new().with_min_p(-0.1), "min_p"),
            (new().with_min_p(f64::NAN), "min_p"),
            (new().with_ancestral(true).with_top_k(3), "ancestral"),
            (new().with_ancestral(true).with_temperature(0.5), "ancestral"),
        ] {
            let error = Sampler::new(sampling.clone(), 1).expect_err("out of range").to_string();
            assert!(error.starts_with(&format!("{argument}: expected")), "{sampling:?}: {error}");
        }
        Ok(())
    }
}

/// Priors that sum to a little more than one: no log-probability is above zero, however many positions there are.
#[test]
fn a_log_probability_of_top_k_is_never_above_zero() -> Result<()> {
    for positions in [1, 64, 65, 200] {
        let contexts = Tensor::ones((positions, 1, 1), DType::F32, &Device::Cpu)?;
        let log_priors = Tensor::full(5e-5f32, (positions, 1), &Device::Cpu)?;
        let mixture =
            Mixture::new(&contexts, Some(&log_priors), &Tensor::ones((1, 1), DType::F32, &Device::Cpu)?, None)?;
        assert_eq!(mixture.top_k(1)?.log_probs.flatten_all()?.max(0)?.to_scalar::<f32>()?, 0.0, "{positions}");
    }
    Ok(())
}
