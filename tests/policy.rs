//! Policy losses: values and gradients equal formulas written out in f64, and the composed loss of an output layer.

mod common;

use std::collections::BTreeMap;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use common::given::{places, Given};
use common::values::{fill, gradients, numbers, uniform, Numbers};
use common::{exact, on, on_each_device};
use mos_head::policy::{PolicyBatch, PolicyNormalization, PolicyOptions};
use mos_head::score::{ChunkTerms, ScoreOptions};
use mos_head::{
    Distributions, Loss, LossOptions, MixtureConfig, MixtureLayer, MixtureOfSoftmaxes, OutputLayer, Result, SoftmaxHead,
};

const LEADING: (usize, usize) = (4, 7);

struct Problem {
    vars: VarMap,
    head: MixtureOfSoftmaxes,
    hidden: Var,
    batch: PolicyBatch,
}

impl Problem {
    /// Old and reference policies differ from the present one by log-ratios of about `spread`.
    fn new(dtype: DType, spread: f64, components: usize) -> Result<Self> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, &Device::Cpu);
        let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(8, 50, components).with_context_dim(6), vb)?;
        fill(&vars, 0.4)?;
        let hidden = Var::from_tensor(&uniform(&[LEADING.0, LEADING.1, 8], 1.7, 1)?.to_dtype(dtype)?)?;
        let ids: Vec<u32> = (0..28).map(|i| i * 13 % 50).collect();
        let token_ids = Tensor::from_vec(ids, LEADING, &Device::Cpu)?;
        let log_probs = head.log_prob(&hidden, &token_ids)?.detach();
        let random = |bound: f64, seed: u64| uniform(&[LEADING.0, LEADING.1], bound, seed);
        let near = |seed: u64| -> Result<Tensor> {
            Ok((&log_probs + random(1.7 * spread, seed)?.to_dtype(log_probs.dtype())?)?)
        };
        let mask: Vec<u8> = (0..28u8).map(|i| u8::from(i % 7 > i / 7)).collect();
        let batch = PolicyBatch::new(token_ids, random(1.7, 2)?)
            .with_old_log_probs(near(3)?)
            .with_reference_log_probs(near(4)?)
            .with_sampler_log_probs(near(5)?)
            .with_mask(Tensor::from_vec(mask, LEADING, &Device::Cpu)?);
        Ok(Problem { vars, head, hidden, batch })
    }

    /// The same on a device.
    fn on(&self, device: &Device) -> Result<Self> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, self.hidden.dtype(), device);
        let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(8, 50, 3).with_context_dim(6), vb)?;
        for (name, var) in vars.data().lock().expect("no panic").iter() {
            let cpu_var = self.vars.data().lock().expect("no panic")[name].clone();
            var.set(&cpu_var.to_device(device)?)?;
        }
        let float = |tensor: &Tensor| on(device, &tensor.to_dtype(self.hidden.dtype())?);
        let floats = |tensor: &Option<Tensor>| float(tensor.as_ref().expect("given"));
        let PolicyBatch { token_ids, advantages, old_log_probs, reference_log_probs, sampler_log_probs, mask, .. } =
            &self.batch;
        let batch = PolicyBatch::new(on(device, token_ids)?, float(advantages)?)
            .with_old_log_probs(floats(old_log_probs)?)
            .with_reference_log_probs(floats(reference_log_probs)?)
            .with_sampler_log_probs(floats(sampler_log_probs)?)
            .with_mask(on(device, mask.as_ref().expect("given"))?);
        Ok(Problem { vars, head, hidden: Var::from_tensor(&on(device, &self.hidden)?)?, batch })
    }

    /// The policy loss that is composed of the head's log-probabilities.
    fn composed(&self, batch: &PolicyBatch, options: &PolicyOptions) -> Result<Loss> {
        let given = Given(self.head.log_probs(&self.hidden)?.reshape((28, 50))?);
        given.policy_loss(&places(&[LEADING.0, LEADING.1, 1])?, batch, options)
    }

    /// The gradients of all variables, by their names, and of the hidden states.
    fn gradients(&self, store: &GradStore) -> Vec<Numbers> {
        let vars = self.vars.data().lock().expect("no panic");
        let vars: BTreeMap<_, _> = vars.iter().map(|(name, var)| (name.as_str(), var.as_tensor())).collect();
        let gradients = gradients(store, vars.into_values().chain([self.hidden.as_tensor()]));
        assert!(gradients.iter().all(|gradient| !gradient.is_empty()), "no gradient: {gradients:?}");
        gradients
    }
}

/// Demands that losses and their gradients differ by at most a share of the largest number, which counts as at least a
/// hundredth.
fn assert_near(found: (&Loss, &Problem), expected: (&Loss, &Problem), tolerance: f64) -> Result<()> {
    let read = |(loss, problem): (&Loss, &Problem)| -> Result<_> {
        Ok([vec![numbers(&loss.value), numbers(&loss.nll)], problem.gradients(&loss.backward()?)].concat())
    };
    let (found, expected) = (read(found)?, read(expected)?);
    assert_relative_eq!(found[..], expected[..], epsilon = 0.01 * tolerance, max_relative = tolerance);
    Ok(())
}

#[test]
fn losses_and_gradients_equal_composed_ones() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
        for normalization in
            [PolicyNormalization::Tokens, PolicyNormalization::Sequences, PolicyNormalization::Constant(3.0)]
        {
            for (kl, entropy, temperature, components) in [
                (0.0, 0.0, 1.0, 3),
                (0.1, 0.0, 1.0, 1),
                (0.1, 0.0, 0.7, 1),
                (0.1, 0.0, 0.7, 3),
                (0.1, 0.02, 1.0, 3),
                (0.1, 0.02, 0.7, 3),
            ] {
                let problem = Problem::new(dtype, 0.3, components)?;
                let options = PolicyOptions::new()
                    .with_clip(0.2, 0.28)
                    .with_kl(kl)
                    .with_entropy(entropy)
                    .with_temperature(temperature)
                    .with_normalization(normalization);
                let found = problem.head.policy_loss(&problem.hidden, &problem.batch, &options)?;
                let expected = problem.composed(&problem.batch, &options)?;
                assert_near((&found, &problem), (&expected, &problem), tolerance)?;
            }
        }
    }
    Ok(())
}

on_each_device! {
    fn losses_of_each_device_equal_those_of_the_cpu(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let problem = Problem::new(dtype, 0.3, 3)?;
        let device_problem = problem.on(device)?;
        for (entropy, temperature) in [(0.0, 1.0), (0.02, 1.0), (0.02, 0.7)] {
            let options = PolicyOptions::new().with_kl(0.1).with_entropy(entropy).with_temperature(temperature);
            let expected = problem.head.policy_loss(&problem.hidden, &problem.batch, &options)?;
            let found = device_problem.head.policy_loss(&device_problem.hidden, &device_problem.batch, &options)?;
            assert_near((&found, &device_problem), (&expected, &problem), 1e-5)?;
        }
        Ok(())
    }
}

/// The formulas, token by token.
#[test]
fn values_equal_the_formulas() -> Result<()> {
    let problem = Problem::new(DType::F64, 0.5, 3)?;
    let Problem { head, hidden, batch, .. } = &problem;
    let scores = head.score(hidden, &batch.token_ids, &ScoreOptions::new().with_entropy(true))?;
    let (log_prob, entropy) = (numbers(&scores.log_prob), numbers(&scores.entropy.expect("asked for")));
    let given = |tensor: &Option<Tensor>| numbers(tensor.as_ref().expect("given"));
    let (old, reference) = (given(&batch.old_log_probs), given(&batch.reference_log_probs));
    let (sampler, mask, advantages) = (given(&batch.sampler_log_probs), given(&batch.mask), numbers(&batch.advantages));
    let token = |t: usize| {
        let (ratio, x) = ((log_prob[t] - old[t]).exp(), reference[t] - log_prob[t]);
        let free = ratio * advantages[t];
        let clipped = ratio.clamp(0.8, 1.28) * advantages[t];
        let importance = (old[t] - sampler[t]).exp().min(1.5);
        -importance * free.min(clipped) + 0.1 * (x.exp() - x - 1.0) - 0.02 * entropy[t]
    };
    let counted: Vec<usize> = (0..28).filter(|&t| mask[t] != 0.0).collect();
    let options = PolicyOptions::new().with_clip(0.2, 0.28).with_kl(0.1).with_entropy(0.02).with_importance_cap(1.5);
    let mean = counted.iter().map(|&t| token(t)).sum::<f64>() / counted.len() as f64;
    let sequence_means: Vec<f64> = (0..4)
        .map(|s| counted.iter().filter(|&&t| t / 7 == s).map(|&t| token(t)).collect::<Vec<_>>())
        .map(|values| values.iter().sum::<f64>() / values.len() as f64)
        .collect();
    for (normalization, expected) in [
        (PolicyNormalization::Tokens, mean),
        (PolicyNormalization::Sequences, sequence_means.iter().sum::<f64>() / 4.0),
        (PolicyNormalization::Constant(5.0), mean * counted.len() as f64 / 5.0),
    ] {
        let loss = head.policy_loss(hidden, batch, &options.clone().with_normalization(normalization))?;
        assert_abs_diff_eq!(numbers(&loss.value), [expected], epsilon = 1e-12);
        assert_eq!(numbers(&loss.count), [counted.len() as f64]);
    }
    Ok(())
}

/// On the policy itself every ratio is one: the gradient is that of a cross-entropy weighted by the advantages.
#[test]
fn the_first_step_is_a_weighted_cross_entropy() -> Result<()> {
    let problem = Problem::new(DType::F64, 0.1, 3)?;
    let Problem { head, hidden, batch, .. } = &problem;
    let batch = PolicyBatch::new(batch.token_ids.clone(), batch.advantages.clone());
    let options = PolicyOptions::new().with_normalization(PolicyNormalization::Constant(1.0));
    let found = head.policy_loss(hidden, &batch, &options)?.backward()?;
    let options =
        LossOptions::new().with_position_weights(batch.advantages.clone()).with_reduction(mos_head::Reduction::Sum);
    let expected = head.loss(hidden, &batch.token_ids, &options)?.backward()?;
    let (found, expected) = (problem.gradients(&found), problem.gradients(&expected));
    assert_relative_eq!(found[..], expected[..], max_relative = 1e-12);
    Ok(())
}

/// Log-ratios of hundreds neither overflow nor lose their gradients.
#[test]
fn large_ratios_stay_finite() -> Result<()> {
    let problem = Problem::new(DType::F32, 300.0, 3)?;
    let Problem { head, hidden, batch, .. } = &problem;
    let loss = head.policy_loss(hidden, batch, &PolicyOptions::new().with_kl(0.1).with_entropy(0.02))?;
    assert!(numbers(&loss.value)[0].is_finite());
    let gradients = loss.backward()?;
    for gradient in problem.gradients(&gradients) {
        assert!(gradient.iter().all(|x| x.is_finite()) && gradient.iter().any(|x| *x != 0.0), "{gradient:?}");
    }
    Ok(())
}

/// A token that the policy or the reference makes impossible has the loss of the formula.
#[test]
fn impossible_tokens_have_the_loss_of_the_formula() -> Result<()> {
    let weight = Tensor::zeros((3, 2), DType::F64, &Device::Cpu)?;
    let hidden = Var::from_tensor(&Tensor::ones((2, 2), DType::F64, &Device::Cpu)?)?;
    let row = |x: [f64; 2]| Tensor::new(&x, &Device::Cpu);
    let loss = |bias: [f64; 3], advantages, old: Option<[f64; 2]>, reference: Option<[f64; 2]>, kl| -> Result<_> {
        let head = SoftmaxHead::from_tensors(weight.clone(), Some(Tensor::new(&bias, &Device::Cpu)?))?;
        let mut batch = PolicyBatch::new(Tensor::new(&[1u32, 0], &Device::Cpu)?, row(advantages)?);
        if let Some(old) = old {
            batch = batch.with_old_log_probs(row(old)?);
        }
        if let Some(reference) = reference {
            batch = batch.with_reference_log_probs(row(reference)?);
        }
        let loss = head.policy_loss(&hidden, &batch, &PolicyOptions::new().with_kl(kl))?;
        let gradients = numbers(loss.backward()?.get(&hidden).expect("a gradient"));
        assert!(gradients.iter().all(|x| x.is_finite()), "{gradients:?}");
        Ok(numbers(&loss.value)[0])
    };
    let (impossible, old) = ([0.0, f64::NEG_INFINITY, 0.0], Some([-1.0, -1.0]));
    let ratio = (0.5f64.ln() + 1.0).exp();
    // The ratio of the first token is 0, and that of the second is clipped at 1.2.
    assert_abs_diff_eq!(loss(impossible, [1.0, 1.0], old, None, 0.0)?, -0.5 * ratio.min(1.2), epsilon = 1e-12);
    assert_abs_diff_eq!(loss(impossible, [-1.0, -1.0], old, None, 0.0)?, 0.5 * (0.8 + ratio), epsilon = 1e-12);
    for (bias, reference) in [([0.0; 3], [f64::NEG_INFINITY, -1.0]), (impossible, [-1.0, -1.0])] {
        assert_eq!(loss(bias, [1.0, 1.0], None, Some(reference), 0.1)?, f64::INFINITY, "{reference:?}");
    }
    // What is not a number stays so.
    let head = SoftmaxHead::from_tensors(weight, None)?;
    let batch = PolicyBatch::new(Tensor::new(&[1u32, 0], &Device::Cpu)?, row([1.0, 1.0])?);
    let nan = row([f64::NAN, -1.0])?;
    for (batch, kl) in
        [(batch.clone().with_old_log_probs(nan.clone()), 0.0), (batch.with_reference_log_probs(nan), 0.1)]
    {
        let loss = head.policy_loss(&hidden, &batch, &PolicyOptions::new().with_kl(kl))?;
        assert!(numbers(&loss.value)[0].is_nan());
    }
    Ok(())
}

/// A position that does not count has neither a value nor a gradient, whatever its numbers are.
#[test]
fn masked_tokens_take_no_part() -> Result<()> {
    let problem = Problem::new(DType::F64, 0.2, 3)?;
    let Problem { head, hidden, batch, .. } = &problem;
    let mask = batch.mask.clone().expect("given");
    let is_masked = mask.eq(0u8)?;
    let nan = Tensor::full(f64::NAN, LEADING, &Device::Cpu)?;
    let spoilt = PolicyBatch::new(
        is_masked.where_cond(&Tensor::full(1000u32, LEADING, &Device::Cpu)?, &batch.token_ids)?,
        is_masked.where_cond(&nan, &batch.advantages)?,
    )
    .with_mask(mask.clone());
    let clean = PolicyBatch::new(batch.token_ids.clone(), batch.advantages.clone()).with_mask(mask);
    let options = PolicyOptions::new().with_entropy(0.1);
    let (found, expected) = (head.policy_loss(hidden, &spoilt, &options)?, head.policy_loss(hidden, &clean, &options)?);
    assert_eq!(numbers(&found.value), numbers(&expected.value));
    let nothing = clean.clone().with_mask(Tensor::zeros(LEADING, DType::U8, &Device::Cpu)?);
    assert_eq!(numbers(&head.policy_loss(hidden, &nothing, &options)?.value), [0.0]);
    Ok(())
}

#[test]
fn what_an_option_needs_must_be_there() -> Result<()> {
    let problem = Problem::new(DType::F32, 0.1, 3)?;
    let Problem { head, hidden, batch, .. } = &problem;
    let plain = PolicyBatch::new(batch.token_ids.clone(), batch.advantages.clone());
    let message = |batch: &PolicyBatch, options: PolicyOptions| {
        head.policy_loss(hidden, batch, &options).map(|_| ()).unwrap_err().to_string()
    };
    let options = PolicyOptions::new;
    assert!(message(&plain, options().with_kl(0.1)).starts_with("reference_log_probs: expected the reference's"));
    assert_eq!(message(&plain, options().with_clip(1.5, 0.2)), "clip_low: expected from 0 to 1, got 1.5");
    let sampler = plain.clone().with_sampler_log_probs(batch.advantages.clone());
    assert!(message(&sampler, options()).starts_with("old_log_probs: expected log-probabilities"));
    let short = PolicyBatch::new(batch.token_ids.clone(), Tensor::zeros(28, DType::F32, &Device::Cpu)?);
    assert_eq!(message(&short, options()), "advantages: expected shape [4, 7], got [28]");
    let mixture = head.mixture(hidden, mos_head::DropoutMasks::Off)?;
    let wrong = mixture.score_loss(&batch.token_ids, &ScoreOptions::new(), |scores| {
        Ok(ChunkTerms::new(scores.log_prob.sum_all()?, scores.log_prob))
    });
    assert_eq!(wrong.map(|_| ()).unwrap_err().to_string(), "values: expected shape [28], got []");
    Ok(())
}

#[test]
fn a_mask_that_is_nan_is_an_error_that_names_the_position() -> Result<()> {
    let problem = Problem::new(DType::F32, 0.1, 3)?;
    let mask = |values: Vec<f32>| Tensor::from_vec(values, LEADING, &Device::Cpu);
    let mut values = vec![1f32; 28];
    values[9] = f32::NAN;
    let batch = problem.batch.clone().with_mask(mask(values)?);
    let options = PolicyOptions::new();
    for loss in [problem.head.policy_loss(&problem.hidden, &batch, &options), problem.composed(&batch, &options)] {
        assert_eq!(loss.unwrap_err().to_string(), "mask: expected numbers, got NaN at position 9");
    }
    Ok(())
}

#[test]
fn a_token_outside_the_vocabulary_is_named_by_its_position_among_all() -> Result<()> {
    let problem = Problem::new(DType::F32, 0.1, 3)?;
    // The first tokens do not count.
    let mask = Tensor::from_iter((0..28).map(|i| u8::from(i >= 5)), &Device::Cpu)?.reshape(LEADING)?;
    let ids: Vec<u32> = (0..28).map(|i| if i == 11 { 50 } else { i }).collect();
    let batch = PolicyBatch::new(Tensor::from_vec(ids, LEADING, &Device::Cpu)?, problem.batch.advantages.clone());
    let batch = batch.with_mask(mask);
    for options in [PolicyOptions::new(), PolicyOptions::new().with_entropy(0.1)] {
        for loss in [problem.head.policy_loss(&problem.hidden, &batch, &options), problem.composed(&batch, &options)] {
            let error = loss.unwrap_err().to_string();
            assert_eq!(error, "token_ids: 50 at position 11 is not in 0..50, the vocabulary");
        }
    }
    Ok(())
}
