//! Locked dropout of the contexts: one mask per sequence, shared by its positions; it preserves the mean, and is off in
//! evaluation.

mod common;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor, Var};
use common::on_each_device;
use common::values::{numbers, Numbers};
use mos_head::{
    ContextActivation, Distributions, DropoutMasks, LossOptions, MixtureConfig, MixtureLayer, MixtureOfContexts,
    MixtureOfSoftmaxes, MixtureTensors, OutputLayer, Reduction, Result,
};

/// The only context before dropout, and so the logit of id 0 relative to id 1.
const CONTEXT: f64 = 1.25;

/// Heads whose context is always the one number `CONTEXT`, and whose two ids have the logits `context` and 0, so that
/// the loss of id 0 determines the context.
fn heads(dropout: f64, device: &Device) -> Result<[Box<dyn OutputLayer>; 2]> {
    let bias = Tensor::new(&[CONTEXT as f32], device)?;
    heads_with(&bias, dropout)
}

fn heads_with(latent_bias: &Tensor, dropout: f64) -> Result<[Box<dyn OutputLayer>; 2]> {
    let tensor = |values: &[f32], shape: &[usize]| Tensor::from_slice(values, shape, latent_bias.device());
    let tensors = || -> Result<MixtureTensors> {
        Ok(MixtureTensors {
            prior_weight: tensor(&[0.0], &[1, 1])?,
            prior_bias: None,
            latent_weight: tensor(&[0.0], &[1, 1])?,
            latent_bias: latent_bias.clone(),
            decoder_weight: tensor(&[1.0, 0.0], &[2, 1])?,
            decoder_bias: None,
        })
    };
    let identity = ContextActivation::Identity;
    Ok([
        Box::new(MixtureOfContexts::from_tensors(tensors()?, identity)?.with_dropout(dropout)?),
        Box::new(MixtureOfSoftmaxes::from_tensors(tensors()?, identity)?.with_dropout(dropout)?),
    ])
}

/// The context at every position, `[batch, seq]`, that the loss used.
fn contexts(
    head: &dyn OutputLayer,
    (batch, seq): (usize, usize),
    options: &LossOptions,
    device: &Device,
) -> Result<Vec<Vec<f64>>> {
    let hidden = Tensor::ones((batch, seq, 1), DType::F32, device)?;
    let targets = Tensor::zeros((batch, seq), DType::U32, device)?;
    let loss = head.loss(&hidden, &targets, options)?;
    let seen: Vec<f64> = numbers(&loss.nll).into_iter().map(context).collect();
    Ok(seen.chunks(seq).map(<[f64]>::to_vec).collect())
}

/// The context for which id 0 has this negative log-likelihood.
fn context(nll: f64) -> f64 {
    -(nll.exp() - 1.0).ln()
}

on_each_device! {
    fn one_mask_is_shared_over_time_but_not_between_sequences(device: &Device) -> Result<()> {
        const DROPOUT: f64 = 0.3;
        let (batch, seq) = (4000, 5);
        let options = [LossOptions::new(), LossOptions::new().with_dropout(DropoutMasks::Seeded(7))];
        for (head, options) in heads(DROPOUT, device)?.iter().flat_map(|head| options.iter().map(move |o| (head, o))) {
            let seen = contexts(head.as_ref(), (batch, seq), options, device)?;
            let mut dropped = 0;
            for sequence in &seen {
                let is_shared = sequence.iter().all(|&c| c == sequence[0]);
                assert!(is_shared, "{head:?}: several masks in one sequence: {sequence:?}");
                let kept = CONTEXT / (1.0 - DROPOUT);
                dropped += usize::from(sequence[0].abs() < 1e-4);
                let is_masked = sequence[0].abs() < 1e-4 || (sequence[0] - kept).abs() < 1e-4;
                assert!(is_masked, "{head:?}: {} is neither 0 nor {kept}", sequence[0]);
            }
            // Binomial, within six standard deviations: the mean of the contexts is preserved too.
            let rate = dropped as f64 / batch as f64;
            let deviation = (DROPOUT * (1.0 - DROPOUT) / batch as f64).sqrt();
            assert_abs_diff_eq!(rate, DROPOUT, epsilon = 6.0 * deviation);
        }
        Ok(())
    }

    fn every_call_draws_a_new_mask(device: &Device) -> Result<()> {
        for head in heads(0.5, device)? {
            let ask = || contexts(head.as_ref(), (200, 1), &LossOptions::new(), device);
            assert_ne!(ask()?, ask()?, "{head:?}");
        }
        Ok(())
    }

    fn a_seed_draws_the_same_mask_on_every_device(device: &Device) -> Result<()> {
        for (head, on_cpu) in heads(0.5, device)?.iter().zip(heads(0.5, &Device::Cpu)?) {
            let ask = |head: &dyn OutputLayer, seed, device: &Device| {
                let seen = contexts(head, (200, 2), &LossOptions::new().with_dropout(DropoutMasks::Seeded(seed)), device)?;
                Ok::<_, mos_head::Error>(seen.into_iter().map(|c| c.iter().map(|c| *c > 1.0).collect::<Vec<_>>()).collect::<Vec<_>>())
            };
            assert_eq!(ask(head.as_ref(), 7, device)?, ask(on_cpu.as_ref(), 7, &Device::Cpu)?, "{head:?}");
            assert_ne!(ask(head.as_ref(), 7, device)?, ask(head.as_ref(), 8, device)?, "{head:?}");
        }
        Ok(())
    }

    fn elements_of_a_context_are_dropped_independently(device: &Device) -> Result<()> {
        // 2 components of width 3 with every context 1: the logits of one-hot decoder rows show the masks.
        let config = MixtureConfig::new(1, 4, 2).with_context_dim(3);
        assert_eq!(config.dropout, 0.0);
        let eye: Vec<f32> = (0..12).map(|i| if i % 4 == 0 { 1.0 } else { 0.0 }).collect();
        let tensors = MixtureTensors {
            prior_weight: Tensor::zeros((2, 1), DType::F32, device)?,
            prior_bias: Some(Tensor::new(&[0_f32, -1e9], device)?),
            latent_weight: Tensor::zeros((6, 1), DType::F32, device)?,
            latent_bias: Tensor::ones(6, DType::F32, device)?,
            decoder_weight: Tensor::from_vec(eye, (4, 3), device)?,
            decoder_bias: None,
        };
        let head = MixtureOfSoftmaxes::from_tensors(tensors, ContextActivation::Identity)?.with_dropout(0.5)?;
        let (batch, hidden) = (500, Tensor::ones((500, 2, 1), DType::F32, device)?);
        let log_probs = head.mixture(&hidden, DropoutMasks::Random)?.log_probs()?;
        let rows: Vec<Vec<f32>> = log_probs.narrow(1, 0, 1)?.squeeze(1)?.to_vec2()?;
        // Ids 0, 1, 2 depend on one element each, id 3 on none: those above id 3 are the mask of component 0.
        let mask = |row: &Vec<f32>| (0..3).map(|v| u8::from(row[v] > row[3] + 1.0) << v).sum::<u8>();
        let mut counts = [0; 8];
        rows.iter().for_each(|row| counts[usize::from(mask(row))] += 1);
        let expected = batch as f64 / 8.0;
        let limit = 6.0 * (expected * 7.0 / 8.0).sqrt();
        assert_abs_diff_eq!(Numbers::from_iter(counts.map(f64::from)), [expected; 8], epsilon = limit);
        Ok(())
    }

    fn the_gradient_uses_the_mask_of_its_loss(device: &Device) -> Result<()> {
        let bias = Var::from_tensor(&Tensor::new(&[CONTEXT as f32], device)?)?;
        for reduction in [Reduction::Sum, Reduction::None] {
            for head in heads_with(bias.as_tensor(), 0.5)? {
                let hidden = Tensor::ones((20, 1, 1), DType::F32, device)?;
                let targets = Tensor::zeros((20, 1), DType::U32, device)?;
                let loss = head.loss(&hidden, &targets, &LossOptions::new().with_reduction(reduction))?;
                let got = numbers(loss.backward()?.get(bias.as_tensor()).expect("a gradient of the latent bias"))[0];
                // The loss is log(1 + exp(-c)) with c the bias times its mask.
                let slope = |nll: f64| -(1.0 - (-nll).exp()) * context(nll) / CONTEXT;
                let expected: f64 = numbers(&loss.nll).into_iter().map(slope).sum();
                assert_abs_diff_eq!(got, expected, epsilon = 1e-4);
            }
        }
        Ok(())
    }

    fn dropout_is_off_in_evaluation_and_in_log_probs(device: &Device) -> Result<()> {
        for head in heads(0.5, device)? {
            let seen = contexts(head.as_ref(), (50, 2), &LossOptions::evaluation(), device)?;
            assert_abs_diff_eq!(Numbers::from(seen.concat()), [CONTEXT; 100], epsilon = 1e-5);
            let gradients_alone = LossOptions::new().with_dropout(DropoutMasks::Off);
            assert_eq!(contexts(head.as_ref(), (50, 2), &gradients_alone, device)?, seen, "{head:?}");
            let log_probs = head.log_probs(&Tensor::ones((50, 2, 1), DType::F32, device)?)?;
            let expected = -(1.0 + (-CONTEXT).exp()).ln();
            assert_abs_diff_eq!(numbers(&log_probs.narrow(2, 0, 1)?), [expected; 100], epsilon = 1e-5);
        }
        Ok(())
    }

    fn without_dropout_the_contexts_are_unchanged(device: &Device) -> Result<()> {
        for head in heads(0.0, device)? {
            let seen = contexts(head.as_ref(), (50, 2), &LossOptions::new(), device)?;
            assert_abs_diff_eq!(Numbers::from(seen.concat()), [CONTEXT; 100], epsilon = 1e-5);
        }
        Ok(())
    }
}
