//! The next token id of several texts: its log-probabilities, the best ids and the entropy equal plain loops in f64,
//! draws have the frequencies of the constrained distribution, and they do not depend on the batch or the threads.

mod common;

use std::collections::HashMap;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor};
use common::case::Case;
use common::given::{places, Given};
use common::on_each_device;
use common::problem::Problem;
use common::reference::distributions;
use common::values::{uniform, Numbers};
use mos_head::decode::{Constraints, NextToken, Sampling, TokenRequest};
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::{Distributions, Error, OutputLayer, Result, SoftmaxHead};

const VOCAB: usize = 23;

fn case(positions: usize, components: usize, vocab: usize) -> Case {
    Problem::new(positions, components, 6, vocab).drawn(DType::F64)
}

/// The log-probabilities of each position, and what logits exceed them by.
fn truth(case: &Case) -> Vec<(Vec<f64>, f64)> {
    let offset = |lse: Vec<f64>| if lse.len() == 1 { lse[0] } else { 0.0 };
    distributions(case).into_iter().map(|(log_probs, lse)| (log_probs, offset(lse))).collect()
}

/// The constraints that are tested, with a prompt and generated ids.
fn all_constraints(vocab: usize) -> Vec<Constraints> {
    let none = Constraints::new;
    let words = vocab.div_ceil(32);
    vec![
        none(),
        none().with_bias(&[(3, 2.5), (4, -1.0), (3, 0.5), (5, f64::NEG_INFINITY)]),
        none().with_repetition_penalty(1.7),
        none().with_frequency_penalty(0.6).with_presence_penalty(0.3),
        none().with_allowed(&[1, 4, 7, 7, 9, 20]),
        none().with_banned(&[0, 2, 4, 22]),
        none().with_processor(|first, z| {
            let ids = first..;
            ids.zip(z).filter(|(id, _)| id % 3 == 0).for_each(|(_, z)| *z = z.max(-0.5) + 1.0);
        }),
        none()
            .with_bias(&[(1, 1.0)])
            .with_repetition_penalty(0.8)
            .with_frequency_penalty(-0.2)
            .with_processor(|_, z| z.iter_mut().for_each(|z| *z *= 0.9))
            .with_allowed(&[0, 1, 2, 3, 4, 5, 6, 7])
            .with_banned(&[2]),
        // The last three ids are 2, 9 and 0.
        none()
            .with_repetition_penalty(1.7)
            .with_frequency_penalty(0.6)
            .with_presence_penalty(0.3)
            .with_penalty_window(3),
        // The last eight have two of the prompt among them.
        none().with_repetition_penalty(1.7).with_frequency_penalty(0.6).with_penalty_window(8),
        none().with_allowed_mask([0b0101_1010_0000_1111u32, 0].into_iter().cycle().take(words).collect()),
        // It makes an id possible that is not allowed, in vain, and sees the masks and the text.
        none().with_allowed(&[0, 1, 2, 3, 4, 5, 6, 7]).with_banned(&[2]).with_logits_processor(|text, z| {
            assert_eq!(text, [&PROMPT[..], &GENERATED].concat());
            assert!(z[2] == f64::NEG_INFINITY && z[8..].iter().all(|&z| z == f64::NEG_INFINITY));
            let largest = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            z.iter_mut().filter(|z| **z < largest - 1.0).for_each(|z| *z = f64::NEG_INFINITY);
            (z[2], z[9]) = (50.0, 50.0);
        }),
    ]
}

const PROMPT: [u32; 4] = [4, 9, 4, 1];
const GENERATED: [u32; 6] = [2, 7, 2, 2, 9, 0];

fn request(sampling: &Sampling, seed: u64, constraints: &Constraints) -> Result<TokenRequest> {
    let request = TokenRequest::new(sampling.clone(), seed)?.with_constraints(constraints.clone())?;
    let mut request = request.with_prompt(&PROMPT).with_best(4).with_entropy(true);
    GENERATED.iter().for_each(|&id| request.push(id));
    Ok(request)
}

/// The logits that one id is drawn from, by the formulas of the documentation.
fn constrained(log_probs: &[f64], offset: f64, which: usize) -> Vec<f64> {
    let mut z: Vec<f64> = log_probs.iter().map(|log_p| log_p + offset).collect();
    let generated = |v: usize| GENERATED.iter().filter(|&&id| id as usize == v).count() as f64;
    let is_repeated = |v: usize| generated(v) > 0.0 || PROMPT.contains(&(v as u32));
    let repetition = |z: &mut Vec<f64>, penalty: f64| {
        (0..z.len()).filter(|&v| is_repeated(v)).for_each(|v| z[v] *= if z[v] > 0.0 { 1.0 / penalty } else { penalty });
    };
    let keep = |z: &mut Vec<f64>, is_kept: &dyn Fn(usize) -> bool| {
        (0..z.len()).filter(|&v| !is_kept(v)).for_each(|v| z[v] = f64::NEG_INFINITY);
    };
    match which {
        0 => {}
        1 => [(3, 3.0), (4, -1.0), (5, f64::NEG_INFINITY)].iter().for_each(|&(v, bias)| z[v] += bias),
        2 => repetition(&mut z, 1.7),
        3 => (0..z.len()).for_each(|v| z[v] -= 0.6 * generated(v) + if generated(v) > 0.0 { 0.3 } else { 0.0 }),
        4 => keep(&mut z, &|v| [1, 4, 7, 9, 20].contains(&v)),
        5 => keep(&mut z, &|v| ![0, 2, 4, 22].contains(&v)),
        6 => (0..z.len()).step_by(3).for_each(|v| z[v] = z[v].max(-0.5) + 1.0),
        7 => {
            z[1] += 1.0;
            repetition(&mut z, 0.8);
            (0..z.len()).for_each(|v| z[v] = (z[v] + 0.2 * generated(v)) * 0.9);
            keep(&mut z, &|v| v < 8 && v != 2);
        }
        8 => {
            for v in [2, 9, 0] {
                z[v] = z[v] * if z[v] > 0.0 { 1.0 / 1.7 } else { 1.7 } - 0.9;
            }
        }
        9 => {
            // Once for each occurrence: prompt 4 and 1, then 2, 7, 2, 2, 9, 0.
            for (v, n) in [(4, 0.0), (1, 0.0), (2, 3.0), (7, 1.0), (9, 1.0), (0, 1.0)] {
                z[v] = z[v] * if z[v] > 0.0 { 1.0 / 1.7 } else { 1.7 } - 0.6 * n;
            }
        }
        10 => keep(&mut z, &|v| v / 32 % 2 == 0 && [0, 1, 2, 3, 9, 11, 12, 14].contains(&(v % 32))),
        _ => {
            keep(&mut z, &|v| v < 8 && v != 2);
            let largest = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let least = largest - 1.0;
            z.iter_mut().filter(|z| **z < least).for_each(|z| *z = f64::NEG_INFINITY);
        }
    }
    z
}

fn samplings() -> Vec<Sampling> {
    let new = Sampling::new;
    vec![
        new(),
        new().with_temperature(0.7),
        new().with_top_k(5).with_temperature(1.4),
        new().with_top_p(0.6),
        new().with_min_p(0.15).with_temperature(1.2),
        new().with_top_k(9).with_top_p(0.8).with_min_p(0.05),
        Sampling::greedy(),
    ]
}

/// The probabilities of a draw from logits.
fn probabilities(z: &[f64], sampling: &Sampling) -> Vec<f64> {
    let mut order: Vec<usize> = (0..z.len()).collect();
    order.sort_by(|&a, &b| z[b].total_cmp(&z[a]).then(a.cmp(&b)));
    let mut p = vec![0.0; z.len()];
    if sampling.temperature == 0.0 {
        p[order[0]] = 1.0;
        return p;
    }
    let largest = z[order[0]];
    let mass = |v: usize| ((z[v] - largest) / sampling.temperature).exp();
    order.truncate(sampling.top_k.unwrap_or(usize::MAX));
    let total: f64 = order.iter().map(|&v| mass(v)).sum();
    let mut sum = 0.0;
    for v in order {
        if sum >= sampling.top_p * total && sum > 0.0 || mass(v) < sampling.min_p {
            break;
        }
        p[v] = mass(v);
        sum += mass(v);
    }
    p.iter().map(|p| p / sum).collect()
}

fn check(case: &Case, dtype: DType, device: &Device, tolerance: f64) -> Result<()> {
    let (mixture, truth) = (case.mixture(dtype, device)?, truth(case));
    for (which, constraints) in all_constraints(case.sizes.vocab).iter().enumerate() {
        for sampling in samplings() {
            let requests: Vec<TokenRequest> =
                (0..truth.len()).map(|t| request(&sampling, t as u64, constraints)).collect::<Result<_>>()?;
            let tokens = mixture.next_tokens(&requests.iter().collect::<Vec<_>>())?;
            assert_eq!(tokens.len(), truth.len());
            for (token, (log_probs, offset)) in tokens.iter().zip(&truth) {
                let id = token.token_id as usize;
                let p = probabilities(&constrained(log_probs, *offset, which), &sampling);
                let entropy: f64 = log_probs.iter().map(|log_p| -log_p.exp() * log_p).sum();
                let mut order: Vec<usize> = (0..log_probs.len()).collect();
                order.sort_by(|&a, &b| log_probs[b].total_cmp(&log_probs[a]));
                let (best, best_log_probs): (Vec<u32>, Vec<f64>) = token.best.iter().copied().unzip();
                assert!(best.iter().map(|&id| id as usize).eq(order[..4].iter().copied()), "{best:?} {order:?}");
                let found = [token.log_prob, token.sampled_log_prob, token.entropy.expect("asked for")];
                let found: Numbers = found.into_iter().chain(best_log_probs).collect();
                let mut expected = vec![log_probs[id], p[id].ln(), entropy];
                expected.extend(order[..4].iter().map(|&id| log_probs[id]));
                assert_abs_diff_eq!(found.named(format!("{which} {sampling:?}")), expected, epsilon = tolerance);
            }
        }
    }
    Ok(())
}

#[test]
fn values_equal_plain_loops() -> Result<()> {
    for components in [1, 3] {
        check(&case(5, components, VOCAB), DType::F64, &Device::Cpu, 1e-12)?;
        check(&case(5, components, VOCAB), DType::F32, &Device::Cpu, 1e-5)?;
    }
    // Several tiles.
    check(&case(2, 2, 1500), DType::F64, &Device::Cpu, 1e-12)
}

on_each_device! {
    fn so_they_do_on_each_device(device: &Device) -> Result<()> {
        for components in [1, 3] {
            check(&case(5, components, VOCAB), DType::F32, device, 1e-4)?;
        }
        Ok(())
    }
}

/// 40,000 draws of equal distributions with other seeds, and 40,000 draws of one request, under every constraint.
#[test]
fn draws_have_the_frequencies_of_the_constrained_distribution() -> Result<()> {
    const DRAWS: usize = 40_000;
    for components in [1, 3] {
        let case = case(1, components, VOCAB);
        let (log_probs, offset) = &truth(&case)[0];
        let (one, many) = (case.mixture(DType::F64, &Device::Cpu)?, 2000);
        let many_positions = case.at(vec![0; many]).mixture(DType::F64, &Device::Cpu)?;
        for (which, constraints) in all_constraints(VOCAB).iter().enumerate() {
            for sampling in samplings() {
                let p = probabilities(&constrained(log_probs, *offset, which), &sampling);
                let mut counts = vec![0usize; VOCAB];
                for batch in 0..DRAWS / many {
                    let requests: Vec<TokenRequest> = (0..many)
                        .map(|i| request(&sampling, (batch * many + i) as u64, constraints))
                        .collect::<Result<_>>()?;
                    let tokens = many_positions.next_tokens(&requests.iter().collect::<Vec<_>>())?;
                    tokens.iter().for_each(|token| counts[token.token_id as usize] += 1);
                }
                check_frequencies(&counts, &p, &format!("{which} {sampling:?}"));
            }
        }
        // Each step of one request draws anew.
        let mut request = TokenRequest::new(Sampling::new(), 1)?;
        let mut counts = vec![0usize; VOCAB];
        for _ in 0..DRAWS / 4 {
            let id = one.next_tokens(&[&request])?[0].token_id;
            counts[id as usize] += 1;
            request.push(id);
        }
        assert_eq!(request.generated(), DRAWS as u64 / 4);
        check_frequencies(&counts, &log_probs.iter().map(|log_p| log_p.exp()).collect::<Vec<_>>(), "one request");
    }
    Ok(())
}

/// Pearson's chi-square, below its mean plus five standard deviations; an id without probability is never drawn.
fn check_frequencies(counts: &[usize], p: &[f64], name: &str) {
    let n: usize = counts.iter().sum();
    let mut chi_square = 0.0;
    for (&count, &p) in counts.iter().zip(p) {
        assert!(p > 0.0 || count == 0, "{name}: {counts:?}");
        if p > 0.0 {
            let expected = n as f64 * p;
            chi_square += (count as f64 - expected).powi(2) / expected;
        }
    }
    let degrees = p.iter().filter(|&&p| p > 0.0).count() as f64 - 1.0;
    assert!(chi_square <= degrees + 5.0 * (2.0 * degrees).sqrt(), "{name}: {chi_square} of {degrees}");
}

#[test]
fn a_request_draws_the_same_alone_in_any_batch_and_on_any_threads() -> Result<()> {
    for components in [1, 4] {
        let all = case(70, components, 1300);
        let mut constraints = all_constraints(1300);
        constraints.push(Constraints::new().with_repetition_penalty(1.2).with_banned(&[5, 600]));
        let samplings = samplings();
        let request =
            |t: usize| request(&samplings[t % samplings.len()], 100 + t as u64, &constraints[t % constraints.len()]);
        let requests: Vec<TokenRequest> = (0..70).map(request).collect::<Result<_>>()?;
        let tokens_in = |first: usize, n: usize| -> Result<Vec<NextToken>> {
            let requests: Vec<_> = requests[first..first + n].iter().collect();
            all.at(first..first + n).mixture(DType::F32, &Device::Cpu)?.next_tokens(&requests)
        };
        let expected = tokens_in(0, 70)?;
        for (first, n) in (0..70).map(|t| (t, 1)).chain([(3, 2), (11, 9), (20, 50)]) {
            assert_eq!(tokens_in(first, n)?, expected[first..first + n], "K = {components}: {n} from {first}");
        }
        for threads in [1, 2, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            assert_eq!(pool.install(|| tokens_in(0, 70))?, expected, "{threads} threads");
            assert_eq!(pool.install(|| tokens_in(7, 1))?, expected[7..8], "{threads} threads");
        }
    }
    Ok(())
}

/// The steps of a text draw with noise of their own.
#[test]
fn equal_distributions_draw_other_ids_at_other_steps() -> Result<()> {
    let mixture = case(1, 1, 700).mixture(DType::F32, &Device::Cpu)?;
    let mut request = TokenRequest::new(Sampling::new().with_temperature(3.0), 5)?;
    let mut ids = std::collections::BTreeSet::new();
    for _ in 0..30 {
        let id = mixture.next_tokens(&[&request])?[0].token_id;
        request.push(id);
        ids.insert(id);
    }
    assert!(ids.len() > 20, "{ids:?}");
    Ok(())
}

/// 32 threads with requests of their own, at once.
#[test]
fn threads_with_their_own_requests_do_not_disturb_each_other() -> Result<()> {
    let mixture = case(1, 3, 700).mixture(DType::F32, &Device::Cpu)?;
    let text = |seed: u64| -> Result<Vec<u32>> {
        let mut request = TokenRequest::new(Sampling::new().with_top_p(0.9), seed)?;
        (0..40)
            .map(|_| {
                let id = mixture.next_tokens(&[&request])?[0].token_id;
                request.push(id);
                Ok(id)
            })
            .collect()
    };
    let alone: Vec<Vec<u32>> = (0..32).map(text).collect::<Result<_>>()?;
    let text = &text;
    let together: Vec<Vec<u32>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..32).map(|seed| scope.spawn(move || text(seed))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<_>>()
    })?;
    assert_eq!(together, alone);
    assert!(alone.iter().collect::<std::collections::HashSet<_>>().len() > 30);
    Ok(())
}

#[test]
fn the_entropy_of_one_possible_id_is_zero_and_not_minus_zero() -> Result<()> {
    for values in [vec![0.0f64], vec![f64::NEG_INFINITY, 0.0, f64::NEG_INFINITY]] {
        let request = TokenRequest::new(Sampling::new(), 0)?.with_entropy(true);
        let log_probs = Tensor::new(&values[..], &Device::Cpu)?.unsqueeze(0)?;
        let token = &NextToken::from_log_probs(&log_probs, &[&request])?[0];
        assert_eq!(token.entropy.map(f64::to_bits), Some(0.0f64.to_bits()), "{values:?}");
    }
    Ok(())
}

/// The lowest of equal ids comes first, and ids of probability zero come last.
#[test]
fn the_best_ids_are_those_of_a_full_sort() -> Result<()> {
    let values = [-1.0, f64::NEG_INFINITY, -1.0, 0.5, -1.0, f64::NEG_INFINITY, 0.5f64];
    let log_probs = candle_nn::ops::log_softmax(&Tensor::new(&[values], &Device::Cpu)?, 1)?;
    let request = TokenRequest::new(Sampling::greedy(), 0)?.with_best(7);
    let token = &NextToken::from_log_probs(&log_probs, &[&request])?[0];
    assert_eq!(token.token_id, 3);
    assert_eq!(token.best.iter().map(|best| best.0).collect::<Vec<_>>(), [3, 6, 0, 2, 4, 1, 5]);
    assert_eq!((token.sampled_log_prob, token.entropy), (0.0, None));
    let drawn: HashMap<u32, usize> = (0..300)
        .map(|seed| {
            let request = TokenRequest::new(Sampling::new(), seed)?;
            Ok(NextToken::from_log_probs(&log_probs, &[&request])?[0].token_id)
        })
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .fold(HashMap::new(), |mut counts, id| {
            *counts.entry(id).or_default() += 1;
            counts
        });
    assert!(!drawn.contains_key(&1) && !drawn.contains_key(&5) && drawn.len() == 5, "{drawn:?}");
    Ok(())
}

/// A head that is a mixture, through a pointer, and the log-probabilities of all ids.
#[test]
fn heads_have_them_too() -> Result<()> {
    let head: Box<dyn OutputLayer> = Box::new(SoftmaxHead::from_tensors(uniform(&[30, 6], 1.7, 1)?, None)?);
    let hidden = uniform(&[2, 4, 6], 1.7, 2)?;
    let constraints = Constraints::new().with_presence_penalty(0.5).with_banned(&[1]);
    let requests: Vec<TokenRequest> =
        (0..8).map(|seed| request(&Sampling::new(), seed, &constraints)).collect::<Result<_>>()?;
    let requests: Vec<_> = requests.iter().collect();
    let tokens = head.next_tokens(&hidden, &requests)?;
    let composed = NextToken::from_log_probs(&head.log_probs(&hidden)?, &requests)?;
    for (token, composed) in tokens.iter().zip(&composed) {
        assert_eq!(token.token_id, composed.token_id);
        assert_abs_diff_eq!(token.sampled_log_prob, composed.sampled_log_prob, epsilon = 1e-12);
    }
    Ok(())
}

/// The requests that draw and what they give, of a head with these logits and of another model with the same
/// log-probabilities.
fn next_of(logits: &[f32], requests: &[&TokenRequest]) -> Result<Vec<NextToken>> {
    let weight = Tensor::from_slice(logits, (logits.len(), 1), &Device::Cpu)?;
    SoftmaxHead::from_tensors(weight, None)?
        .next_tokens(&Tensor::ones((requests.len(), 1), DType::F32, &Device::Cpu)?, requests)
}

#[test]
fn ids_of_the_text_outside_the_vocabulary_change_nothing() -> Result<()> {
    for components in [1, 3] {
        let mixture = case(6, components, VOCAB).mixture(DType::F32, &Device::Cpu)?;
        let log_probs = mixture.log_probs()?;
        // Those ids have a place in a window, and a processor sees them.
        for constraints in all_constraints(VOCAB).into_iter().take(8) {
            for sampling in samplings() {
                let new = |seed| TokenRequest::new(sampling.clone(), seed)?.with_constraints(constraints.clone());
                let (mut plain, mut with_images) = (Vec::new(), Vec::new());
                for seed in 0..6 {
                    // The first half has no other ids.
                    let prompt: &[u32] = if seed < 3 { &[] } else { &PROMPT };
                    plain.push(new(seed)?.with_prompt(prompt));
                    with_images.push(new(seed)?.with_prompt(&[23, u32::MAX]).with_prompt(prompt).with_prompt(&[23]));
                }
                let answers = |requests: &[TokenRequest]| -> Result<[Vec<NextToken>; 2]> {
                    let requests: Vec<&TokenRequest> = requests.iter().collect();
                    Ok([mixture.next_tokens(&requests)?, NextToken::from_log_probs(&log_probs, &requests)?])
                };
                assert_eq!(answers(&plain)?, answers(&with_images)?, "{constraints:?} {sampling:?}");
                // One that was generated has its place in the text.
                with_images.iter_mut().for_each(|request| request.push(1000));
                assert!(with_images.iter().all(|request| request.generated() == 1));
                answers(&with_images)?;
            }
        }
    }
    Ok(())
}

/// Divided by these temperatures, logits or their differences are infinite.
#[test]
fn the_smallest_temperatures_draw_the_best_id() -> Result<()> {
    let logits: Vec<f32> = (0..700).map(|v| if v == 613 { 31.0 } else { (v % 61) as f32 / 2.0 - 0.5 }).collect();
    let flat: Vec<f32> = (0..700).map(|v| if v == 613 { -0.5 } else { -30.0 }).collect();
    let samplings = [
        Sampling::new(),
        Sampling::new().with_top_k(5),
        Sampling::new().with_top_p(0.7),
        Sampling::new().with_min_p(0.3),
        Sampling::new().with_top_k(40).with_top_p(0.9).with_min_p(0.01),
    ];
    for temperature in [1e-3, 1e-12, 1e-40, 1e-300, 1e-307, f64::MIN_POSITIVE, 5e-324] {
        for sampling in &samplings {
            for penalty in [1.0, 1.01] {
                let constraints = Constraints::new().with_repetition_penalty(penalty);
                let request = TokenRequest::new(sampling.clone().with_temperature(temperature), 3)?;
                let request = request.with_constraints(constraints)?.with_prompt(&[613, 5]);
                for logits in [&logits, &flat] {
                    let token = &next_of(logits, &[&request])?[0];
                    assert_eq!(token.token_id, 613, "{temperature} {sampling:?} {penalty}");
                    assert_eq!(token.sampled_log_prob, 0.0, "{temperature} {sampling:?} {penalty}");
                }
            }
        }
    }
    Ok(())
}

/// The noise, not the order of the ids, decides among equals.
#[test]
fn equals_are_drawn_evenly_at_the_smallest_temperatures() -> Result<()> {
    let logits = [31.0f32, -3.0, 31.0, 30.0, 31.0];
    for temperature in [1.0, 1e-12, 1e-20, 1e-307] {
        for sampling in [Sampling::new(), Sampling::new().with_top_k(3), Sampling::new().with_top_p(0.99)] {
            let sampling = sampling.with_temperature(temperature);
            let requests: Vec<TokenRequest> =
                (0..6000).map(|seed| TokenRequest::new(sampling.clone(), seed)).collect::<Result<_>>()?;
            let mut counts = [0; 5];
            for token in next_of(&logits, &requests.iter().collect::<Vec<_>>())? {
                counts[token.token_id as usize] += 1;
            }
            let z: Vec<f64> = logits.iter().map(|&z| f64::from(z)).collect();
            check_frequencies(&counts, &probabilities(&z, &sampling), &format!("{sampling:?}"));
        }
    }
    Ok(())
}

#[test]
fn an_error_names_the_request_and_a_request_is_checked_alone() -> Result<()> {
    let good = TokenRequest::new(Sampling::new(), 1)?;
    let logits = [0f32, 1.0, 2.0];
    let with = |constraints| good.clone().with_constraints(constraints);
    let none = Constraints::new;
    for (bad, message) in [
        (
            with(none().with_bias(&[(1, 5.0), (191_222, -100.0)]))?,
            "bias: expected token ids below vocab_size 3, got 191222 at index 1",
        ),
        (with(none().with_allowed(&[0, 1, 3]))?, "allowed: expected token ids below vocab_size 3, got 3 at index 2"),
        (with(none().with_banned(&[7]))?, "banned: expected token ids below vocab_size 3, got 7 at index 0"),
        (good.clone().with_best(4), "best: expected at most vocab_size 3, got 4"),
    ] {
        let requests = [&good, &good, &bad, &good, &bad];
        let log_probs = Tensor::full(-(3f32.ln()), (5, 3), &Device::Cpu)?;
        for result in [next_of(&logits, &requests), NextToken::from_log_probs(&log_probs, &requests)] {
            let error = result.expect_err("ids outside the vocabulary");
            assert_eq!(error.to_string(), format!("request 2: {message}"));
            let Error::Request { index: 2, error } = error else { panic!("{error:?}") };
            assert!(matches!(*error, Error::Config { .. }), "{error:?}");
        }
        assert_eq!(bad.check(3).expect_err("the same").to_string(), message);
        bad.check(191_223)?;
    }
    good.check(3)?;
    good.clone().with_prompt(&[99]).check(3)?;
    let bias = with(none().with_bias(&[(0, 1.0), (2, f64::NAN)])).expect_err("NaN");
    assert_eq!(bias.to_string(), "bias: expected finite numbers or minus infinity, got NaN at index 1");
    Ok(())
}

#[test]
fn logits_that_constraints_make_nan_or_infinite_are_errors_that_say_so() -> Result<()> {
    let good = TokenRequest::new(Sampling::new(), 1)?;
    for (bad, name) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
        for sampling in samplings() {
            let constraints = Constraints::new().with_processor(move |first, z| {
                if first == 512 {
                    z[3] = bad;
                }
            });
            let request = TokenRequest::new(sampling, 1)?.with_constraints(constraints)?;
            let error = next_of(&[0.5; 600], &[&good, &request]).expect_err(name);
            assert!(matches!(error, Error::Value { position: 1, index: 515, .. }), "{error:?}");
            let expected = "logits after constraints: expected numbers or minus infinity";
            assert_eq!(error.to_string(), format!("{expected}, got {name} at index 515 of position 1"));
        }
    }
    // A penalty whose quotient overflows.
    let constraints = Constraints::new().with_repetition_penalty(1e-308);
    let request = good.with_constraints(constraints)?.with_prompt(&[1]);
    let error = next_of(&[3.0, 30.0], &[&request]).expect_err("30 / 1e-308");
    assert!(matches!(error, Error::Value { position: 0, index: 1, got: f64::INFINITY, .. }), "{error:?}");
    Ok(())
}

#[test]
fn numbers_that_are_no_log_probabilities_are_refused() -> Result<()> {
    let rows = |values: &[[f32; 4]; 2]| Tensor::new(values, &Device::Cpu);
    for sampling in samplings() {
        let request = TokenRequest::new(sampling, 1)?.with_best(2).with_entropy(true);
        let error = |log_probs: &Tensor| {
            NextToken::from_log_probs(log_probs, &[&request, &request]).expect_err("no log-probabilities")
        };
        for bad in [f32::NAN, f32::INFINITY] {
            let error = error(&rows(&[[-1.0; 4], [0.0, -1.0, bad, -0.5]])?);
            assert!(matches!(error, Error::Distribution { position: 1 }), "{error}");
        }
        let error_of_raw = error(&rows(&[[-1.0; 4], [3.75, 3.72, -1.0, 0.5]])?);
        let expected = "log_probs: expected log-probabilities, at most 0, got 3.75 at index 0 of position 1";
        assert_eq!(error_of_raw.to_string(), expected);
        let nothing = error(&rows(&[[-1.0; 4], [f32::NEG_INFINITY; 4]])?);
        assert!(matches!(nothing, Error::Impossible { position: 1 }), "{nothing}");
        // Rounding in half precision is known of the tensor alone.
        let rounded = rows(&[[0.015, -9.0, -9.0, -9.0]; 2])?;
        assert!(matches!(error(&rounded), Error::Value { position: 0, index: 0, .. }));
        NextToken::from_log_probs(&rounded.to_dtype(DType::BF16)?, &[&request, &request])?;
    }
    Ok(())
}

#[test]
fn rounding_of_a_head_of_your_own_is_that_of_its_dtype() -> Result<()> {
    let hidden = places(&[1, 1])?.to_dtype(DType::BF16)?;
    let head = |first: f32| -> Result<Given> {
        Ok(Given(Tensor::new(&[[first, -6.0, -7.0]], &Device::Cpu)?.to_dtype(DType::BF16)?))
    };
    let request = TokenRequest::new(Sampling::greedy(), 1)?;
    assert_eq!(head(0.0078)?.next_tokens(&hidden, &[&request])?[0].token_id, 0);
    assert_eq!(head(0.0078)?.argmax(&hidden)?.to_vec1::<u32>()?, [0]);
    let error = head(2.0)?.next_tokens(&hidden, &[&request]).expect_err("a logit");
    assert!(matches!(error, Error::Value { argument: "log_probs", position: 0, index: 0, .. }), "{error}");
    assert!(matches!(head(2.0)?.argmax(&hidden), Err(Error::Value { .. })));
    Ok(())
}

#[test]
fn a_request_says_what_it_holds_and_takes_other_constraints_in_place() -> Result<()> {
    let sampling = Sampling::new().with_top_p(0.9);
    let mut request = TokenRequest::new(sampling.clone(), 42)?.with_best(2).with_entropy(true).with_prompt(&[1]);
    assert_eq!((request.sampling(), request.seed(), request.best(), request.entropy()), (&sampling, 42, 2, true));
    assert!(request.constraints().allowed.is_none());
    // The ids that a grammar allows, step by step.
    for step in 0..4 {
        let allowed = [step, step + 1];
        let penalty = Constraints::new().with_repetition_penalty(1.5);
        request.set_constraints(penalty.clone().with_allowed(&allowed))?;
        assert_eq!(request.constraints().allowed.as_deref(), Some(&allowed[..]));
        let refused = request.set_constraints(Constraints::new().with_repetition_penalty(0.0));
        assert!(matches!(refused, Err(Error::Config { argument: "repetition_penalty", .. })));
        let expected = request.clone().with_constraints(penalty.with_allowed(&allowed))?;
        let tokens = next_of(&[0.0; 6], &[&request, &expected])?;
        assert!(allowed.contains(&tokens[0].token_id));
        assert_eq!(tokens[0], tokens[1], "an error leaves the request as it was");
        request.push(tokens[0].token_id);
        assert_eq!(request.generated(), u64::from(step) + 1);
    }
    Ok(())
}

#[test]
fn bad_arguments_are_errors() -> Result<()> {
    let mixture = case(2, 1, VOCAB).mixture(DType::F32, &Device::Cpu)?;
    let new = || TokenRequest::new(Sampling::new(), 0);
    let with = |constraints: Constraints| new()?.with_constraints(constraints);
    let none = Constraints::new;
    let draws = |request: TokenRequest| mixture.next_tokens(&[&request, &request]);
    let message = |result: Result<Vec<NextToken>>| result.expect_err("an error").to_string();
    assert_eq!(message(mixture.next_tokens(&[&new()?])), "requests: expected one for each of 2 positions, got 1");
    assert_eq!(message(draws(new()?.with_best(24))), "request 0: best: expected at most vocab_size 23, got 24");
    for (constraints, argument) in [
        (none().with_banned(&[23]), "banned"),
        (none().with_allowed(&[99]), "allowed"),
        (none().with_bias(&[(23, 0.0)]), "bias"),
    ] {
        let message = message(draws(with(constraints)?));
        let expected = format!("request 0: {argument}: expected token ids below vocab_size 23");
        assert!(message.starts_with(&expected), "{message}");
    }
    for constraints in [
        none().with_repetition_penalty(0.0),
        none().with_repetition_penalty(f64::INFINITY),
        none().with_frequency_penalty(f64::NAN),
        none().with_presence_penalty(f64::INFINITY),
        none().with_bias(&[(0, f64::NAN)]),
        none().with_bias(&[(0, f64::INFINITY)]),
    ] {
        assert!(matches!(with(constraints), Err(Error::Config { .. })));
    }
    let all: Vec<u32> = (0..VOCAB as u32).collect();
    for constraints in [
        none().with_banned(&all),
        none().with_allowed(&[]),
        none().with_allowed(&[3, 4]).with_banned(&[4, 3]),
        none().with_allowed(&[3]).with_bias(&[(3, f64::NEG_INFINITY)]),
    ] {
        assert!(matches!(draws(with(constraints)?), Err(Error::EmptySet { position: 0 })));
    }
    for sampling in [Sampling::new().with_ancestral(true), Sampling::new().with_component_temperature(0.5)] {
        assert!(matches!(TokenRequest::new(sampling, 0), Err(Error::Unsupported { .. })));
    }
    assert!(matches!(TokenRequest::new(Sampling::new().with_top_p(0.0), 0), Err(Error::Config { .. })));
    // A NaN in one text.
    let mut log_probs = vec![vec![-1.0f32; 3]; 2];
    log_probs[1][2] = f32::NAN;
    let request = new()?;
    let result = NextToken::from_log_probs(&Tensor::new(log_probs, &Device::Cpu)?, &[&request, &request]);
    assert!(matches!(result, Err(Error::Distribution { position: 1 })));
    // No texts.
    let nothing = Tensor::zeros((0, 3), DType::F32, &Device::Cpu)?;
    assert!(NextToken::from_log_probs(&nothing, &[])?.is_empty());
    Ok(())
}

/// The places of ids among all, by a sort; forced ids are taken as they are, even impossible ones.
#[test]
fn prompts_have_log_probabilities_ranks_and_the_best_ids() -> Result<()> {
    for (components, vocab) in [(1, VOCAB), (3, 1500)] {
        let case = case(6, components, vocab);
        let mixture = case.mixture(DType::F64, &Device::Cpu)?;
        for id in [0, 7, vocab as u32 - 1] {
            let forced = TokenRequest::forced(id).with_best(3).with_rank(true);
            for (token, (log_probs, _)) in mixture.next_tokens(&[&forced; 6])?.iter().zip(truth(&case)) {
                let log_p = log_probs[id as usize];
                assert_eq!((token.token_id, token.sampled_log_prob), (id, 0.0));
                assert_abs_diff_eq!(token.log_prob, log_p, epsilon = 1e-12);
                assert_eq!(token.rank, Some(1 + log_probs.iter().filter(|&&other| other > log_p).count()));
                assert_eq!(token.best.len(), 3);
            }
        }
    }
    // Equal ids are ranked in their order, and so are impossible ones.
    let none = f64::NEG_INFINITY;
    let log_probs = Tensor::new(&[[0.25f64.ln(), none, 0.5f64.ln(), 0.25f64.ln(), none]], &Device::Cpu)?;
    for (id, rank) in [(0, 2), (1, 4), (2, 1), (3, 3), (4, 5)] {
        let token = &NextToken::from_log_probs(&log_probs, &[&TokenRequest::forced(id).with_rank(true)])?[0];
        assert_eq!((token.token_id, token.rank), (id, Some(rank)));
    }
    // The head, and the same head among some ids.
    let head = SoftmaxHead::from_tensors(uniform(&[40, 6], 1.7, 1)?, None)?;
    let hidden = uniform(&[2, 3, 6], 1.7, 2)?;
    let ids = [4u32, 0, 39, 12, 4, 7];
    let log_probs = head.log_probs(&hidden)?.reshape((6, 40))?.to_vec2::<f64>()?;
    for ((token, &id), log_probs) in head.prompt_log_probs(&hidden, &ids, 5)?.iter().zip(&ids).zip(&log_probs) {
        let log_p = log_probs[id as usize];
        assert_abs_diff_eq!(token.log_prob, log_p, epsilon = 1e-12);
        assert_eq!(token.rank, Some(1 + log_probs.iter().filter(|&&other| other > log_p).count()));
        assert_eq!((token.token_id, token.best.len()), (id, 5));
    }
    let within = Restricted::new(&head, AllowedIds::new(&[12, 3, 39]))?;
    let ranks: Vec<_> = within.prompt_log_probs(&hidden, &ids, 2)?.iter().map(|token| token.rank).collect();
    // Impossible ids: 0, 4 and 7 come after the three, in the order of all that are not allowed.
    assert_eq!([ranks[0], ranks[1], ranks[4], ranks[5]], [Some(7), Some(4), Some(7), Some(10)]);
    assert!(ranks[2] <= Some(3) && ranks[3] <= Some(3));
    let error = head.prompt_log_probs(&hidden, &ids[..5], 1).unwrap_err().to_string();
    assert_eq!(error, "requests: expected one for each of 6 positions, got 5");
    let error = head.prompt_log_probs(&hidden, &[4, 0, 40, 1, 1, 1], 1).unwrap_err().to_string();
    assert_eq!(error, "request 2: forced: expected token ids below vocab_size 40, got 40 at index 0");
    Ok(())
}

/// Several requests of one position answer as they do alone.
#[test]
fn several_requests_share_a_position() -> Result<()> {
    for components in [1, 3] {
        let case = case(3, components, 1300);
        let mixture = case.mixture(DType::F32, &Device::Cpu)?;
        let constraints = all_constraints(1300);
        let requests: Vec<TokenRequest> = (0..24)
            .map(|i| request(&samplings()[i % 7], i as u64, &constraints[i % constraints.len()]))
            .collect::<Result<_>>()?;
        let requests: Vec<&TokenRequest> = requests.iter().collect();
        let lists = [&requests[..11], &[], &requests[11..]];
        let drawn = mixture.next_tokens_per_position(&lists)?;
        for (position, (tokens, requests)) in drawn.iter().zip(lists).enumerate() {
            let alone = case.at([position]).mixture(DType::F32, &Device::Cpu)?;
            let expected: Vec<_> =
                requests.iter().map(|request| Ok(alone.next_tokens(&[request])?.remove(0))).collect::<Result<_>>()?;
            assert_eq!(*tokens, expected);
        }
    }
    Ok(())
}

/// An end is not drawn before its time, and then it is.
#[test]
fn a_text_does_not_end_too_early() -> Result<()> {
    let weight = Tensor::new(&[[5f32], [4.], [3.], [0.]], &Device::Cpu)?;
    let head = SoftmaxHead::from_tensors(weight, None)?;
    let hidden = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
    let mut request = TokenRequest::new(Sampling::greedy(), 1)?.with_ends(&[0, 1]).with_min_tokens(3).with_prompt(&[0]);
    let mut text = Vec::new();
    while !request.has_ended() {
        let id = head.next_tokens(&hidden, &[&request])?[0].token_id;
        request.push(id);
        text.push(id);
    }
    assert_eq!((text, request.generated()), (vec![2, 2, 2, 0], 4));
    // No other id is allowed.
    let request = TokenRequest::new(Sampling::greedy(), 1)?.with_ends(&[0, 1]).with_min_tokens(1);
    let request = request.with_constraints(Constraints::new().with_allowed(&[0, 1]))?;
    assert!(matches!(head.next_tokens(&hidden, &[&request]), Err(Error::EmptySet { position: 0 })));
    let error = TokenRequest::new(Sampling::greedy(), 1)?.with_ends(&[0, 4]).check(4).unwrap_err().to_string();
    assert_eq!(error, "ends: expected token ids below vocab_size 4, got 4 at index 1");
    for words in [0, 2] {
        let constraints = Constraints::new().with_allowed_mask(vec![u32::MAX; words].into());
        let error = TokenRequest::new(Sampling::greedy(), 1)?.with_constraints(constraints)?.check(4).unwrap_err();
        assert_eq!(error.to_string(), format!("allowed_mask: expected 1 words for vocab_size 4, got {words}"));
    }
    Ok(())
}

/// Constraints of requests within sets: those of an unrestricted head whose other ids are banned.
#[test]
fn constraints_within_a_set_are_those_of_the_whole_head() -> Result<()> {
    let (vocab, ids) = (1300u32, [1u32, 2, 4, 7, 9, 20, 512, 513, 1299]);
    let outside: Vec<u32> = (0..vocab).filter(|id| !ids.contains(id)).collect();
    let head = SoftmaxHead::from_tensors(uniform(&[vocab as usize, 6], 1.7, 1)?, None)?;
    let within = Restricted::new(&head, AllowedIds::new(&ids))?;
    let hidden = uniform(&[1, 6], 1.7, 2)?;
    for (which, constraints) in all_constraints(vocab as usize).into_iter().take(11).enumerate() {
        for (seed, sampling) in samplings().iter().enumerate() {
            let banned = [&constraints.banned[..], &outside].concat();
            let whole = request(sampling, seed as u64, &constraints.clone().with_banned(&banned))?;
            let restricted = request(sampling, seed as u64, &constraints)?;
            let whole = &head.next_tokens(&hidden, &[&whole])?[0];
            let restricted = &within.next_tokens(&hidden, &[&restricted])?[0];
            assert_eq!(restricted.token_id, whole.token_id, "{which} {sampling:?}");
            assert_abs_diff_eq!(restricted.sampled_log_prob, whole.sampled_log_prob, epsilon = 1e-12);
        }
    }
    Ok(())
}
