//! Log-probabilities and entropies, with their gradients, equal candle's operations in f64.

mod common;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::ops::log_softmax;
use candle_nn::{VarBuilder, VarMap};
use common::case::Tensors;
use common::check::{assert_central_differences, assert_near, gradients};
use common::given::Given;
use common::problem::Problem;
use common::values::{gradient, numbers, uniform};
use common::{dtypes, exact, on_each_device};
use mos_head::decode::{Sampler, Sampling};
use mos_head::distill::{DistillOptions, Teacher};
use mos_head::parts::LogitFunction::{Sigsoftmax, Softcap};
use mos_head::policy::{PolicyBatch, PolicyOptions};
use mos_head::score::{ChunkScores, ChunkTerms, ScoreOptions, Scores};
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{
    Distributions, Error, LossOptions, Mixture, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Result, SoftmaxConfig,
    SoftmaxHead,
};

/// The relative tolerance of scores.
fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F64 {
        1e-12
    } else {
        1e-5
    }
}

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

#[test]
fn scores_and_gradients_equal_composed_operations() -> Result<()> {
    for (positions, components, d, vocab) in
        [(1, 1, 1, 1), (2, 1, 3, 2), (5, 3, 7, 37), (3, 1, 16, 600), (70, 4, 9, 131), (4, 15, 20, 1030)]
    {
        for dtype in DTYPES {
            let case = Problem::new(positions, components, d, vocab);
            for (n, entropy) in [(1, true), (0, true), (3, true), (3, false), (1, false)] {
                Problem { n, entropy, ..case }.check(dtype, tolerance(dtype))?;
                // With one id, or two, nothing may be outside.
                Problem { n, entropy, outside: vocab > 3, ..case }.check(dtype, tolerance(dtype))?;
            }
            for temperature in [0.4, 3.0] {
                Problem { temperature, n: 2, ..case }.check(dtype, tolerance(dtype))?;
                Problem { temperature, entropy: false, ..case }.check(dtype, tolerance(dtype))?;
                Problem { temperature, outside: vocab > 3, ..case }.check(dtype, tolerance(dtype))?;
            }
        }
    }
    Ok(())
}

#[test]
fn so_they_do_with_every_kind_of_logits() -> Result<()> {
    let case = Problem { n: 2, ..Problem::new(6, 3, 8, 50) };
    for dtype in [DType::F64, DType::F32] {
        for temperature in [1.0, 0.7] {
            let case = Problem { temperature, ..case };
            for function in [Softcap(1.5), Sigsoftmax] {
                Problem { function, logit_scale: 0.6, ..case }.check(dtype, tolerance(dtype))?;
                Problem { function, components: 1, ..case }.check(dtype, tolerance(dtype))?;
            }
            Problem { masked: true, ..case }.check(dtype, tolerance(dtype))?;
            Problem { masked: true, components: 1, ..case }.check(dtype, tolerance(dtype))?;
            for entropy in [false, true] {
                let case = Problem { outside: true, entropy, ..case };
                for function in [Softcap(1.5), Sigsoftmax] {
                    Problem { function, logit_scale: 0.6, ..case }.check(dtype, tolerance(dtype))?;
                }
                Problem { masked: true, ..case }.check(dtype, tolerance(dtype))?;
                Problem { transposed: true, components: 1, ..case }.check(dtype, tolerance(dtype))?;
                Problem { spread: 30.0, ..case }.check(dtype, 4.0 * tolerance(dtype))?;
                Problem { n: 37, ..case }.check(dtype, 4.0 * tolerance(dtype))?;
            }
            Problem { transposed: true, ..case }.check(dtype, tolerance(dtype))?;
            Problem { spread: 30.0, ..case }.check(dtype, 4.0 * tolerance(dtype))?;
        }
    }
    Ok(())
}

/// All scores of no positions can be read, saved and computed with, whatever they are computed by.
#[test]
fn scores_of_no_positions_can_be_read() -> Result<()> {
    let weight = Tensor::ones((20, 6), DType::F32, &Device::Cpu)?;
    let options = ScoreOptions::new().with_entropy(true).with_outside(true).with_collision(true).with_is_argmax(true);
    for components in [1, 2] {
        let log_priors = Tensor::zeros((0, components), DType::F32, &Device::Cpu)?;
        let log_priors = Some(&log_priors).filter(|_| components > 1);
        let contexts = Tensor::zeros((0, components, 6), DType::F32, &Device::Cpu)?;
        let mixture = Mixture::new(&contexts, log_priors, &weight, None)?;
        for n in [0, 1, 3] {
            let ids = Tensor::zeros((0, n), DType::U32, &Device::Cpu)?;
            let shared = mixture.restricted(&AllowedIds::new(&[3, 5]))?;
            let each = mixture.restricted(&AllowedIds::per_position(&[], &[0])?)?;
            let log_probs = Tensor::zeros((0, 20), DType::F32, &Device::Cpu)?;
            for scores in [
                mixture.score(&ids, &options)?,
                shared.score(&ids, &options)?,
                each.score(&ids, &options)?,
                Scores::from_log_probs(&log_probs, &ids, &options)?,
            ] {
                let per_position = [scores.entropy, scores.log_outside, scores.log_collision];
                for scores in per_position.map(|scores| scores.expect("asked for")) {
                    assert_eq!(scores.to_vec1::<f32>()?, [0f32; 0]);
                    assert_eq!((scores.neg()? + 1.0)?.to_vec1::<f32>()?, [0f32; 0]);
                }
                assert_eq!(scores.log_prob.flatten_all()?.to_vec1::<f32>()?, [0f32; 0]);
                assert_eq!(scores.is_argmax.expect("asked for").flatten_all()?.to_vec1::<u8>()?, [0u8; 0]);
            }
        }
    }
    Ok(())
}

/// Whatever a head returns of no positions can be read, as a file of tensors reads it too.
#[test]
fn results_of_no_positions_can_be_read() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let softmax = SoftmaxHead::new(&SoftmaxConfig::new(6, 20), vb.pp("softmax"))?;
    let lists = AllowedIds::per_position(&[], &[0])?;
    let heads: [Box<dyn OutputLayer>; 7] = [
        Box::new(softmax.clone()),
        Box::new(MixtureOfSoftmaxes::new(&MixtureConfig::new(6, 20, 3), vb.pp("mos"))?),
        Box::new(AdaptiveSoftmax::new(&AdaptiveConfig::new(6, 20, vec![4]), vb.pp("adaptive"))?),
        Box::new(HierarchicalSoftmax::new(&HierarchicalConfig::new(6, 20), vb.pp("hierarchical"))?),
        Box::new(Restricted::new(softmax.clone(), AllowedIds::new(&[1, 3]))?),
        Box::new(Restricted::new(softmax, lists)?),
        Box::new(Given(Tensor::zeros((0, 20), DType::F32, &Device::Cpu)?)),
    ];
    for (i, head) in heads.iter().enumerate() {
        let hidden = Tensor::zeros((0, head.hidden_size()), DType::F32, &Device::Cpu)?;
        let ids = Tensor::zeros(0, DType::U32, &Device::Cpu)?;
        let top = head.top_k(&hidden, 2)?;
        let mut results = vec![
            head.log_probs(&hidden)?,
            head.log_probs_as(&hidden, DType::F64)?,
            top.token_ids,
            top.log_probs,
            head.argmax(&hidden)?,
            head.sample(&hidden, &mut Sampler::new(Sampling::new(), 1)?)?,
        ];
        let options =
            ScoreOptions::new().with_entropy(true).with_outside(true).with_collision(true).with_is_argmax(true);
        let scores = head.score(&hidden, &ids, &options)?;
        let per_position = [scores.entropy, scores.log_outside, scores.log_collision, scores.is_argmax];
        results.push(scores.log_prob);
        results.extend(per_position.map(|scores| scores.expect("asked for")));
        let batch = PolicyBatch::new(ids.clone(), Tensor::zeros(0, DType::F32, &Device::Cpu)?);
        let mut losses = vec![head.policy_loss(&hidden, &batch, &PolicyOptions::new().with_entropy(0.1))?];
        // The last one has no loss.
        if i < 6 {
            results.push(head.log_prob(&hidden, &ids)?);
            losses.push(head.loss(&hidden, &ids, &LossOptions::new())?);
        }
        for loss in losses {
            assert_eq!(loss.value.to_scalar::<f32>()?, 0.0, "{head:?}");
            loss.backward()?;
            results.extend([loss.nll, loss.sum.unsqueeze(0)?.narrow(0, 0, 0)?]);
        }
        for result in results {
            let numbers = result.flatten_all()?.to_dtype(DType::F64)?;
            assert_eq!((&numbers + 1.0)?.to_vec1::<f64>()?, [0f64; 0], "{head:?}");
            let mut file = Vec::new();
            result.write_bytes(&mut file)?;
            assert!(file.is_empty(), "{head:?}");
        }
        assert!(head.next_tokens(&hidden, &[])?.is_empty());
    }
    Ok(())
}

#[test]
fn raw_logits_have_no_scores() -> Result<()> {
    let ids = Tensor::new(&[0u32, 1], &Device::Cpu)?;
    for dtype in DTYPES {
        for (number, is_wrong) in [(3.75, true), (f64::INFINITY, true), (f64::NAN, false), (0.0, false)] {
            let log_probs = Tensor::new(&[[-1.0, -0.5], [-1.5, number]], &Device::Cpu)?.to_dtype(dtype)?;
            let scores = Scores::from_log_probs(&log_probs, &ids, &ScoreOptions::new());
            if is_wrong {
                assert!(matches!(scores, Err(Error::Value { position: 1, index: 1, .. })), "{scores:?}")
            } else {
                assert_eq!(scores?.log_prob.dims(), [2])
            }
        }
    }
    Ok(())
}

/// A certain distribution has an entropy of zero, not minus zero.
#[test]
fn no_entropy_is_minus_zero() -> Result<()> {
    for dtype in [DType::F32, DType::F64] {
        let weight = Tensor::new(&[[3f64], [0.0], [1.0]], &Device::Cpu)?.to_dtype(dtype)?;
        let hidden = Tensor::ones((1, 1), dtype, &Device::Cpu)?;
        let head = SoftmaxHead::from_tensors(weight.clone(), None)?;
        let ids = Tensor::zeros((1, 0), DType::U32, &Device::Cpu)?;
        let contexts = Tensor::ones((1, 2, 1), dtype, &Device::Cpu)?;
        let log_priors = (contexts.squeeze(2)? * 0.5)?.log()?;
        let mixture = Mixture::new(&contexts, Some(&log_priors), &weight, None)?;
        for temperature in [1e-6, 1e-3] {
            let options = ScoreOptions::new().with_entropy(true).with_temperature(temperature);
            let composed = Scores::from_log_probs(&head.log_probs(&hidden)?, &ids, &options)?;
            for scores in [head.score(&hidden, &ids, &options)?, mixture.score(&ids, &options)?, composed] {
                let entropy = scores.entropy.expect("asked for").to_dtype(DType::F64)?.to_vec1::<f64>()?[0];
                assert_eq!(entropy.to_bits(), 0f64.to_bits(), "{dtype:?} T = {temperature}");
            }
        }
    }
    Ok(())
}

/// Long rows are added up in blocks: sums in f32 of so many ids, one after the other, lose the small beside the large.
#[test]
fn long_rows_keep_their_small_probabilities() -> Result<()> {
    const VOCAB: usize = 128_256;
    let (contexts, weight) = (Tensor::ones((1, 2, 1), DType::F32, &Device::Cpu)?, [0f32; VOCAB]);
    let weight = Tensor::new(&weight[..], &Device::Cpu)?.unsqueeze(1)?;
    let log_priors = (contexts.squeeze(2)? * 0.5)?.log()?;
    let hidden = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
    let ids = Tensor::new(&[[1u32]], &Device::Cpu)?;
    // The logit of the first id; those of all others are zero.
    for (peak, temperature) in [(0f64, 1.0), (17.0, 1.0), (34.0, 2.0)] {
        let mut bias = vec![0f32; VOCAB];
        bias[0] = peak as f32;
        let bias = Tensor::new(bias, &Device::Cpu)?;
        let head = SoftmaxHead::from_tensors(weight.clone(), Some(bias.clone()))?;
        let mixture = Mixture::new(&contexts, Some(&log_priors), &weight, Some(&bias))?;
        let others = (VOCAB - 1) as f64;
        let log_sum = ((peak / temperature).exp() + others).ln();
        let (log_first, log_other) = (peak / temperature - log_sum, -log_sum);
        let entropy = -log_first.exp() * log_first - others * log_other.exp() * log_other;
        let options = ScoreOptions::new().with_entropy(true).with_temperature(temperature);
        let composed = Scores::from_log_probs(&head.log_probs(&hidden)?, &ids, &options)?;
        for scores in [head.score(&hidden, &ids, &options)?, mixture.score(&ids, &options)?, composed] {
            let found = numbers(&scores.entropy.expect("asked for"))[0];
            assert_relative_eq!(found, entropy, max_relative = 2e-5, epsilon = 0.0);
            assert_abs_diff_eq!(numbers(&scores.log_prob)[0], log_other, epsilon = 5e-6);
        }
        let divergence = |student: &SoftmaxHead, log_teacher: &Tensor| -> Result<f64> {
            let options = DistillOptions::default().with_temperature(temperature);
            Ok(numbers(&student.distill(&hidden, &Teacher::from_log_probs(log_teacher), &options)?.value)[0])
        };
        let uniform = Tensor::full(-(VOCAB as f32).ln(), (1, VOCAB), &Device::Cpu)?;
        let expected = -(VOCAB as f64).ln() - (log_first + others * log_other) / VOCAB as f64;
        assert_abs_diff_eq!(divergence(&head, &uniform)?, expected, epsilon = 1e-4);
    }
    Ok(())
}

/// The gradient of `log Q(outside)` by the logits z of a softmax at temperature T, `(softmax(z | outside) - softmax(z))
/// / T`.
fn gradient_of_the_mass_outside(logits: &[f64], scored: usize, temperature: f64) -> Vec<f64> {
    let softmax = |is_in: &dyn Fn(usize) -> bool| {
        let scaled_logits =
            || logits.iter().enumerate().map(|(v, z)| if is_in(v) { z / temperature } else { f64::NEG_INFINITY });
        let largest = scaled_logits().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scaled_logits().map(|z| (z - largest).exp()).sum();
        scaled_logits().map(|z| (z - largest).exp() / sum).collect::<Vec<_>>()
    };
    let (all, outside) = (softmax(&|_| true), softmax(&|v| v != scored));
    outside.iter().zip(all).map(|(outside, all)| (outside - all) / temperature).collect()
}

on_each_device! {
    fn the_mass_outside_has_its_gradient_where_it_underflows_on_each_device(device: &Device) -> Result<()> {
        for &dtype in dtypes(device).iter().filter(|dtype| matches!(dtype, DType::F32 | DType::F64)) {
            // A single softmax in one pass, with an entropy or a temperature in two, and two components.
            for (components, entropy, temperature) in
                [(1, false, 1.0), (1, true, 1.0), (1, true, 0.1), (2, false, 1.0), (2, true, 1.0), (2, false, 0.1)]
            {
                for (x, other) in [(3.0, 1.0), (12.0, 0.1), (80.0, 1.0), (90.0, 1.0), (200.0, 0.5), (1500.0, 1.0)] {
                    let logits = [0.0, x, other];
                    let bias = Tensor::new(&logits, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
                    let bias = Var::from_tensor(&bias)?;
                    let (contexts, weight) =
                        (Tensor::ones((1, components, 1), dtype, device)?, Tensor::zeros((3, 1), dtype, device)?);
                    let log_priors = (contexts.squeeze(2)? * 0.5)?.log()?;
                    let log_priors = Some(&log_priors).filter(|_| components > 1);
                    let mixture = Mixture::new(&contexts, log_priors, &weight, Some(&bias))?;
                    let ids = Tensor::new(&[[1u32]], device)?;
                    let options = ScoreOptions::new().with_entropy(entropy).with_outside(true);
                    let options = options.with_temperature(temperature);

                    let fused = mixture.score(&ids, &options)?;
                    let loss = mixture.score_loss(&ids, &options, |scores| {
                        let nothing = scores.log_prob.zeros_like()?;
                        let by_outside = scores.log_outside.ones_like()?;
                        Ok(ChunkTerms::new(scores.log_outside, nothing).with_by_outside(by_outside))
                    })?;
                    let composed = Scores::from_log_probs(&mixture.log_probs()?, &ids, &options)?;
                    let value = |scores: Scores| scores.log_outside.expect("asked for").sum_all();
                    let expected = gradient_of_the_mass_outside(&logits, 1, temperature);
                    // What a log-probability is rounded by.
                    let tolerance = if dtype == DType::F64 { 1e-10 } else { 1e-6 + 1e-7 * x / temperature };
                    for (name, value) in [("fused", value(fused)?), ("loss", loss.value), ("composed", value(composed)?)] {
                        let found = gradient(&value.backward()?, &bias).expect("a gradient");
                        let case = format!("{name} K = {components}, entropy {entropy}, T = {temperature}, {x}");
                        assert_abs_diff_eq!(found.named(case), expected, epsilon = 10.0 * tolerance);
                    }
                }
            }
        }
        Ok(())
    }

    fn scores_of_each_device_equal_composed_operations(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for (positions, components, vocab) in [(5, 3, 37), (1, 1, 1), (3, 2, 1030)] {
                for temperature in [0.7, 1.0, 1.8] {
                    let case = Problem { temperature, ..Problem::new(positions, components, 6, vocab) };
                    for (n, entropy) in [(1, true), (1, false), (3, true), (3, false), (0, true)] {
                        Problem { n, entropy, ..case }.check_on(device, dtype, tolerance(dtype))?;
                        Problem { n, entropy, outside: vocab > 1, ..case }.check_on(device, dtype, tolerance(dtype))?;
                    }
                    Problem { n: 2, masked: true, ..case }.check_on(device, dtype, tolerance(dtype))?;
                    for function in [Softcap(1.5), Sigsoftmax] {
                        Problem { function, logit_scale: 0.6, ..case }.check_on(device, dtype, tolerance(dtype))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn an_empty_batch_of_each_device_has_scores_without_positions(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let weight = Var::from_tensor(&Tensor::ones((20, 6), dtype, device)?)?;
        let mixture = Mixture::new(&Tensor::zeros((0, 1, 6), dtype, device)?, None, &weight, None)?;
        let options = ScoreOptions::new().with_entropy(true);
        let scores = mixture.score(&Tensor::zeros((0, 3), DType::U32, device)?, &options)?;
        assert_eq!((scores.log_prob.dims(), scores.entropy.expect("asked for").dims()), (&[0, 3][..], &[0][..]));
        let nothing = |_| -> Result<ChunkTerms> { unreachable!("no chunk") };
        let loss = mixture.score_loss(&Tensor::zeros(0, DType::U32, device)?, &options, nothing)?;
        assert_eq!(numbers(&loss.value), numbers(&Tensor::zeros((), dtype, device)?));
        assert_eq!(gradient(&loss.backward()?, &weight).expect("a gradient"), [0.0; 120]);
        Ok(())
    }

    fn chunks_of_each_device_do_not_change_them(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let case = Problem { n: 2, temperature: 0.8, ..Problem::new(13, 3, 12, 300) };
        let least = least_workspace(|bytes| Problem { workspace_bytes: Some(bytes), ..case }.check_on(device, dtype, 1e-5))?;
        for factor in [1, 2, 4] {
            Problem { workspace_bytes: Some(factor * least), ..case }.check_on(device, dtype, 1e-5)?;
        }
        Ok(())
    }
}

/// The least workspace with which the passes run, each of which names what it needs.
fn least_workspace(run: impl Fn(usize) -> Result<()>) -> Result<usize> {
    let mut bytes = 0;
    loop {
        match run(bytes) {
            Err(Error::Workspace { least, got, .. }) if got == bytes && least > bytes => bytes = least,
            result => return result.map(|()| bytes),
        }
    }
}

#[test]
fn chunks_do_not_change_them() -> Result<()> {
    let case = Problem { n: 2, ..Problem::new(61, 3, 12, 300) };
    // The backward pass needs more than the scores do, and must fit too.
    let contexts = |is_variable: bool| -> Result<usize> {
        let mut operands = case.drawn(DType::F32).constants(DType::F32, &Device::Cpu)?;
        if is_variable {
            operands.insert("contexts", case.variables(DType::F32)?["contexts"].clone());
        }
        match (Problem { workspace_bytes: Some(0), ..case }).scores(&operands) {
            Err(Error::Workspace { least, .. }) => Ok(least),
            other => panic!("a workspace of 0 bytes: {other:?}"),
        }
    };
    let least = contexts(true)?;
    assert!(contexts(false)? < least);
    // The bias needs a gradient as well.
    let all = least_workspace(|bytes| Problem { workspace_bytes: Some(bytes), ..case }.check(DType::F32, 1e-5))?;
    assert!(least <= all);
    let least = all;
    for factor in [1, 2, 4] {
        Problem { workspace_bytes: Some(factor * least), ..case }.check(DType::F32, 1e-5)?;
    }
    Ok(())
}

/// Guards against a gradient that is dropped in silence: each score has one by itself.
#[test]
fn each_score_has_its_gradient_alone() -> Result<()> {
    let case = Problem { n: 2, outside: true, collision: true, ..Problem::new(5, 3, 7, 37) };
    let vars = case.variables(DType::F64)?;
    let (scores, expected) = (case.scores(&vars)?, case.composed_scores(&vars)?);
    let found = [
        scores.log_prob.narrow(1, 0, 1)?,
        scores.log_prob.narrow(1, 1, 1)?,
        scores.entropy.clone().expect("asked for"),
        scores.log_outside.clone().expect("asked for"),
        scores.log_collision.clone().expect("asked for"),
    ];
    for (i, found) in found.into_iter().enumerate() {
        let value = found.sum_all()?;
        let (found, expected) = (value.backward()?, expected.narrow(1, i, 1)?.sum_all()?.backward()?);
        // The same with a copy less.
        let aside = scores.backward(&value)?;
        let expected = gradients(&expected, &vars);
        assert_eq!(expected.len(), 4);
        assert_near("a gradient", &gradients(&found, &vars), &expected, 1e-12);
        assert_near("aside", &gradients(&aside, &vars), &expected, 1e-12);
    }
    Ok(())
}

/// A loss of several candidates, from three products, equals the same function of scores.
#[test]
fn losses_of_candidates_equal_functions_of_scores() -> Result<()> {
    for (components, n, entropy, temperature) in
        [(1, 3, false, 1.0), (1, 1, false, 0.7), (3, 3, true, 1.0), (3, 3, false, 0.7), (3, 0, true, 1.0)]
    {
        let case = Problem { n, entropy, temperature, ..Problem::new(11, components, 6, 40) };
        let vars = case.variables(DType::F64)?;
        let mixture = case.mixture(&vars)?;
        let (token_ids, options) = (case.token_ids()?, case.options());
        let terms = move |scores: ChunkScores| {
            let id_part = (scores.log_prob.sqr()? * 0.5)?.sum(1)?;
            let by_entropy = scores.entropy.ones_like()?.affine(0.3, 0.0)?;
            let values = (id_part + scores.entropy.affine(0.3, 0.0)?)?;
            Ok(ChunkTerms::new(values, scores.log_prob).with_by_entropy(by_entropy))
        };
        let scores = mixture.score(&token_ids, &options)?;
        let entropy_part = match &scores.entropy {
            Some(entropy) => entropy.affine(0.3, 0.0)?.sum_all()?,
            None => Tensor::zeros((), DType::F64, &Device::Cpu)?,
        };
        let value = ((scores.log_prob.sqr()? * 0.5)?.sum_all()? + entropy_part)?;
        let expected = value.backward()?;
        let Err(Error::Workspace { least, .. }) =
            mixture.score_loss(&token_ids, &options.clone().with_workspace_bytes(0), terms)
        else {
            panic!("a budget of zero")
        };
        for options in [options.clone().with_workspace_bytes(2 * least), options] {
            let loss = mixture.score_loss(&token_ids, &options, terms)?;
            assert_relative_eq!(numbers(&loss.value), numbers(&value), max_relative = 1e-12);
            let nll = match n {
                0 => Tensor::zeros(11, DType::F64, &Device::Cpu)?,
                _ => scores.log_prob.narrow(1, 0, 1)?.squeeze(1)?.affine(-1.0, 0.0)?,
            };
            assert_relative_eq!(numbers(&loss.nll), numbers(&nll), max_relative = 1e-12);
            let expected = gradients(&expected, &vars);
            assert_eq!(expected.len(), vars.len());
            assert_near("gradient", &gradients(&loss.backward()?, &vars), &expected, 1e-12);
        }
    }
    Ok(())
}

/// Guards against an upstream gradient that is read as if it were contiguous.
#[test]
fn upstream_gradients_may_be_strided_or_broadcast() -> Result<()> {
    let case = Problem { n: 3, ..Problem::new(4, 2, 5, 30) };
    let vars = case.variables(DType::F64)?;
    let upstream = Tensor::from_vec((0..12).map(|i| f64::from(i) - 4.5).collect(), (3, 4), &Device::Cpu)?;
    let value = |log_prob: &Tensor, entropy: &Tensor| -> Result<Tensor> {
        let strided = (log_prob.t()? * &upstream)?.sum_all()?;
        let broadcast = (log_prob.mean_all()? + entropy.broadcast_as((7, 4))?.sum_all()?)?;
        Ok((strided + broadcast)?)
    };
    let (scores, expected) = (case.scores(&vars)?, case.composed_scores(&vars)?);
    let found = value(&scores.log_prob, &scores.entropy.expect("asked for"))?.backward()?;
    let expected = value(&expected.narrow(1, 0, 3)?, &expected.narrow(1, 3, 1)?.squeeze(1)?)?.backward()?;
    let expected = gradients(&expected, &vars);
    assert_eq!(expected.len(), 4);
    assert_near("a gradient", &gradients(&found, &vars), &expected, 1e-12);
    Ok(())
}

/// Log-probabilities are at most 0, entropies from 0 to ln V, wherever the logits lie: a maximum that starts at zero,
/// or a difference of large numbers, would show.
#[test]
fn scores_keep_their_bounds_at_large_offsets() -> Result<()> {
    for (offset, spread) in [(-100.0, 1.0), (1000.0, 1.0), (1e6, 0.0), (0.0, 1e4), (-1e4, 300.0)] {
        for components in [1, 3] {
            let case = Problem { n: 2, spread, ..Problem::new(20, components, 6, 50) };
            let mut operands = case.drawn(DType::F32).constants(DType::F32, &Device::Cpu)?;
            let bias = operands["decoder.bias"].affine(spread.min(1.0), offset)?;
            operands.insert("decoder.bias", bias);
            let scores = case.scores(&operands)?;
            let (log_prob, entropy) = (
                scores.log_prob.flatten_all()?.to_vec1::<f32>()?,
                scores.entropy.expect("asked for").to_vec1::<f32>()?,
            );
            assert!(log_prob.iter().all(|&x| x <= 0.0), "{offset} {spread}: {log_prob:?}");
            assert!(entropy.iter().all(|&h| (0.0..=50f32.ln()).contains(&h)), "{offset} {spread}: {entropy:?}");
            if spread == 0.0 {
                entropy.iter().for_each(|&h| assert_abs_diff_eq!(h, 50f32.ln(), epsilon = 1e-5));
            }
        }
    }
    Ok(())
}

/// The entropy of a distribution near a single id is the sum of small terms, not a difference of large ones.
#[test]
fn small_entropies_are_precise() -> Result<()> {
    let logits: Vec<f32> = (0..40).map(|v| if v == 7 { 900.0 } else { 892.0 - v as f32 * 0.1 }).collect();
    let exact: Vec<f64> = logits.iter().map(|&z| f64::from(z) - 900.0).collect();
    let log_sum = exact.iter().map(|z| z.exp()).sum::<f64>().ln();
    let expected: f64 = exact.iter().map(|z| -(z - log_sum) * (z - log_sum).exp()).sum();
    let weight = Tensor::from_vec(logits, (40, 1), &Device::Cpu)?;
    let entropy = Mixture::new(&Tensor::ones((1, 1, 1), DType::F32, &Device::Cpu)?, None, &weight, None)?.entropy()?;
    let found = f64::from(entropy.to_vec1::<f32>()?[0]);
    assert_abs_diff_eq!(found, expected, epsilon = 1e-4 * expected);
    Ok(())
}

#[test]
fn equal_components_are_one_and_a_temperature_of_one_changes_nothing() -> Result<()> {
    let one = Problem { n: 2, ..Problem::new(9, 1, 6, 40) };
    let operands = one.drawn(DType::F64).constants(DType::F64, &Device::Cpu)?;
    let three = Problem { components: 3, ..one };
    let mut repeated = operands.clone();
    repeated.insert("contexts", operands["contexts"].repeat((1, 3, 1))?);
    let priors = Tensor::from_vec((0..27).map(|i| f64::from(i % 5)).collect(), (9, 3), &Device::Cpu)?;
    repeated.insert("log_priors", priors);
    assert_same(three.scores(&repeated)?, one.scores(&operands)?, 1e-14);
    // For one softmax the temperature divides the logits.
    let mixture = one.mixture(&operands)?;
    let (ids, options) = (one.token_ids()?, ScoreOptions::new().with_entropy(true));
    let tempered = mixture.score(&ids, &options.clone().with_temperature(0.25))?;
    assert_same(tempered, mixture.with_logit_scale(4.0)?.score(&ids, &options)?, 1e-13);
    Ok(())
}

/// Demands equal log-probabilities and entropies.
fn assert_same(found: Scores, expected: Scores, tolerance: f64) {
    assert_relative_eq!(numbers(&found.log_prob), numbers(&expected.log_prob), max_relative = tolerance);
    let [found, expected] = [found, expected].map(|scores| numbers(&scores.entropy.expect("asked for")));
    assert_relative_eq!(found, expected, max_relative = tolerance);
}

/// Central differences of all operands, the log-priors before their softmax included.
#[test]
fn gradients_equal_central_differences() -> Result<()> {
    for temperature in [1.0, 0.6] {
        let case = Problem { n: 2, temperature, outside: true, collision: true, ..Problem::new(3, 2, 4, 11) };
        let upstream = case.upstream()?;
        let value = |tensors: &Tensors| -> Result<Tensor> {
            let scores = case.scores(tensors)?;
            let per_position = [scores.entropy, scores.log_outside, scores.log_collision];
            let per_position = per_position.map(|x| x.expect("asked for"));
            let scores = Tensor::cat(&[scores.log_prob, Tensor::stack(&per_position, 1)?], 1)?;
            Ok((scores * &upstream)?.sum_all()?)
        };
        assert_central_differences(&case.drawn(DType::F64), value)?;
    }
    Ok(())
}

/// A head that only has what an output layer must have composes them.
#[test]
fn heads_and_log_probabilities_have_them_too() -> Result<()> {
    let head = SoftmaxHead::from_tensors(uniform(&[30, 6], 1.7, 1)?, None)?;
    let hidden = uniform(&[2, 4, 6], 1.7, 2)?;
    let ids = Tensor::from_vec((0..24u32).collect::<Vec<_>>(), (2, 4, 3), &Device::Cpu)?;
    for temperature in [1.0, 2.0] {
        let options = ScoreOptions::new().with_entropy(true).with_temperature(temperature);
        let scores = head.score(&hidden, &ids, &options)?;
        assert_eq!(scores.entropy.as_ref().expect("asked for").dims(), [2, 4]);
        assert_same(scores, Scores::from_log_probs(&head.log_probs(&hidden)?, &ids, &options)?, 1e-13);
    }
    let one = ids.narrow(2, 0, 1)?;
    assert_eq!(head.log_prob(&hidden, &one)?.dims(), [2, 4, 1]);
    let log_probs = log_softmax(&head.log_probs(&hidden)?, D::Minus1)?.gather(&one.contiguous()?, 2)?;
    assert_relative_eq!(numbers(&head.log_prob(&hidden, &one)?), numbers(&log_probs), max_relative = 1e-13);
    Ok(())
}

#[test]
fn wrong_arguments_are_errors() -> Result<()> {
    let weight = Tensor::zeros((30, 6), DType::F32, &Device::Cpu)?;
    let head = SoftmaxHead::from_tensors(weight, None)?;
    let hidden = Tensor::zeros((2, 4, 6), DType::F32, &Device::Cpu)?;
    let ids = |dims: &[usize]| Tensor::zeros(dims, DType::U32, &Device::Cpu);
    let message = |result: Result<Scores>| result.map(|_| ()).unwrap_err().to_string();
    let options = ScoreOptions::new().with_entropy(true);
    assert_eq!(message(head.score(&hidden, &ids(&[4, 2])?, &options)), "token_ids: expected shape [2, 4], got [4, 2]");
    let cold = options.clone().with_temperature(0.0);
    assert_eq!(message(head.score(&hidden, &ids(&[2, 4])?, &cold)), "temperature: expected from 1e-6 to 1e6, got 0");
    let outside = (ids(&[2, 4])? + 30.0)?;
    let expected = "token_ids: 30 at position 0 is not in 0..30, the vocabulary";
    assert_eq!(message(head.score(&hidden, &outside, &options)), expected);
    let floats = Tensor::zeros((2, 4), DType::F32, &Device::Cpu)?;
    assert_eq!(message(head.score(&hidden, &floats, &options)), "token_ids: expected dtype u8, u32 or i64, got F32");
    let nothing = head.score(&hidden.narrow(0, 0, 0)?, &ids(&[0, 4, 5])?, &options)?;
    assert_eq!((nothing.log_prob.dims(), nothing.entropy.expect("asked for").dims()), (&[0, 4, 5][..], &[0, 4][..]));
    Ok(())
}

/// Scores have no dropout, and those of two levels equal their log-probabilities; both have gradients.
#[test]
fn every_head_scores_without_dropout() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let config = MixtureConfig::new(6, 30, 3).with_dropout(0.5);
    let heads: [Box<dyn OutputLayer>; 2] = [
        Box::new(MixtureOfSoftmaxes::new(&config, vb.pp("mixture"))?),
        Box::new(AdaptiveSoftmax::new(&AdaptiveConfig::new(6, 30, vec![10]), vb.pp("adaptive"))?),
    ];
    let hidden = Var::from_tensor(&uniform(&[2, 4, 6], 1.7, 2)?)?;
    let ids = Tensor::from_vec((0..16u32).collect::<Vec<_>>(), (2, 4, 2), &Device::Cpu)?;
    let one = ids.narrow(2, 1, 1)?.squeeze(2)?.contiguous()?;
    for head in heads {
        let log_probs = head.log_probs(&hidden)?;
        let expected = log_probs.gather(&ids, 2)?;
        let entropy = (log_probs.exp()? * &log_probs)?.sum(2)?.neg()?;
        let scores = head.score(&hidden, &ids, &ScoreOptions::new().with_entropy(true))?;
        let log_prob = head.log_prob(&hidden, &one)?;
        let first_ids = expected.narrow(2, 1, 1)?.squeeze(2)?;
        let found_entropy = scores.entropy.expect("asked for");
        for (found, expected) in [(&scores.log_prob, &expected), (&found_entropy, &entropy), (&log_prob, &first_ids)] {
            assert_relative_eq!(numbers(found), numbers(expected), max_relative = 1e-12);
        }
        let found = (log_prob.sum_all()? + found_entropy.sum_all()?)?.backward()?;
        let expected = (first_ids.sum_all()? + entropy.sum_all()?)?.backward()?;
        let expected = gradient(&expected, &hidden).expect("a gradient");
        assert_relative_eq!(gradient(&found, &hidden).expect("a gradient"), expected, max_relative = 1e-12);
    }
    Ok(())
}
