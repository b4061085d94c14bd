//! Sums and means of log-probabilities by sequence equal plain loops in f64, and the losses that are made of them equal
//! their formulas: that of the example of direct preference optimization, and that of several future tokens.

mod common;
#[path = "../examples/dpo.rs"]
#[allow(dead_code)]
mod dpo;

use std::collections::BTreeMap;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::{DType, Device, Tensor, Var};
use common::values::{central_differences, gradient, gradients, numbers, uniform};
use common::{dtypes, exact, on_each_device};
use mos_head::score::{ScoreOptions, Scores};
use mos_head::{Error, LossOptions, OutputLayer, Reduction, Result, SoftmaxHead};

const BATCH: usize = 4;
const SEQ: usize = 5;
const HIDDEN: usize = 3;
const VOCAB: usize = 7;

/// The last sequence has no position that counts. A mask may have any number in place of one.
const MASK: [[u8; SEQ]; BATCH] = [[1, 1, 1, 1, 1], [0, 0, 1, 2, 1], [0, 255, 0, 0, 0], [0, 0, 0, 0, 0]];

fn token_ids() -> Result<Tensor> {
    let ids = (0..BATCH * SEQ).map(|i| (i * 5 % VOCAB) as u32).collect();
    Ok(Tensor::from_vec(ids, (BATCH, SEQ), &Device::Cpu)?)
}

fn mask() -> Result<Tensor> {
    Ok(Tensor::new(&MASK, &Device::Cpu)?)
}

/// The scores of the ids under a softmax of this weight.
fn scores(hidden: &Tensor, weight: &Tensor) -> Result<Scores> {
    let ids = token_ids()?.to_device(hidden.device())?;
    SoftmaxHead::from_tensors(weight.clone(), None)?.score(hidden, &ids, &ScoreOptions::new())
}

/// Sums and means in plain loops.
fn expected(log_prob: &Tensor) -> (Vec<f64>, Vec<f64>) {
    let (mut sums, mut means) = (Vec::new(), Vec::new());
    for (row, mask) in numbers(log_prob).chunks(SEQ).zip(MASK) {
        let (mut sum, mut count) = (0.0, 0.0);
        for (x, counts) in row.iter().zip(mask) {
            if counts != 0 {
                sum += x;
                count += 1.0;
            }
        }
        sums.push(sum);
        means.push(if count == 0.0 { 0.0 } else { sum / count });
    }
    (sums, means)
}

on_each_device! {
    fn sums_and_means_equal_plain_loops(device: &Device) -> Result<()> {
        let (hidden, weight) = (uniform(&[BATCH, SEQ, HIDDEN], 2.0, 1)?, uniform(&[VOCAB, HIDDEN], 2.0, 2)?);
        for &dtype in dtypes(device) {
            let tolerance = if dtype == DType::F64 { 1e-14 } else { 1e-6 };
            let converted = |tensor: &Tensor| tensor.to_dtype(dtype)?.to_device(device);
            let scores = scores(&converted(&hidden)?, &converted(&weight)?)?;
            let (sums, means) = expected(&scores.log_prob);
            assert!(sums[..3].iter().all(|&x| x < -0.1) && sums[3] == 0.0, "{sums:?}");
            for mask_dtype in [DType::U8, DType::U32, DType::I64] {
                let mask = mask()?.to_dtype(mask_dtype)?.to_device(device)?;
                let strided = mask.t()?.contiguous()?.t()?;
                for mask in [mask, strided] {
                    let (found_sums, found_means) = (scores.sum_by_sequence(&mask)?, scores.mean_by_sequence(&mask)?);
                    assert_eq!([found_sums.dtype(), found_means.dtype()], [scores.log_prob.dtype(); 2]);
                    assert_eq!([found_sums.dims(), found_means.dims()], [[BATCH]; 2]);
                    assert_relative_eq!(numbers(&found_sums), sums, max_relative = tolerance);
                    assert_relative_eq!(numbers(&found_means), means, max_relative = tolerance);
                }
            }
        }
        Ok(())
    }

    fn there_may_be_no_sequences_and_no_positions(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let head = SoftmaxHead::from_tensors(Tensor::ones((VOCAB, HIDDEN), dtype, device)?, None)?;
        for (batch, seq) in [(0, 3), (2, 0), (0, 0)] {
            let hidden = Tensor::zeros((batch, seq, HIDDEN), dtype, device)?;
            let ids = Tensor::zeros((batch, seq), DType::U32, device)?;
            let scores = head.score(&hidden, &ids, &ScoreOptions::new())?;
            for found in [scores.sum_by_sequence(&ids)?, scores.mean_by_sequence(&ids)?] {
                assert_eq!((found.dims(), found.dtype()), (&[batch][..], dtype));
                assert!(batch == 0 || numbers(&found) == vec![0.0; batch]);
            }
        }
        Ok(())
    }
}

#[test]
fn gradients_equal_central_differences() -> Result<()> {
    let shapes = [("hidden", vec![BATCH, SEQ, HIDDEN]), ("weight", vec![VOCAB, HIDDEN])];
    let mut values = BTreeMap::new();
    for (seed, (name, shape)) in (1..).zip(&shapes) {
        values.insert(*name, numbers(&uniform(shape, 2.0, seed)?).into_vec());
    }
    let factors = uniform(&[BATCH], 2.0, 3)?;
    for is_mean in [false, true] {
        let value = |scores: &Scores| -> Result<Tensor> {
            let mask = mask()?;
            let by_sequence = if is_mean { scores.mean_by_sequence(&mask)? } else { scores.sum_by_sequence(&mask)? };
            Ok((by_sequence * &factors)?.sum_all()?)
        };
        let variables = |values: &BTreeMap<&str, Vec<f64>>| -> Result<Vec<Var>> {
            let tensor = |(name, shape): &(&str, Vec<usize>)| {
                Ok(Var::from_tensor(&Tensor::from_vec(values[name].clone(), &shape[..], &Device::Cpu)?)?)
            };
            shapes.iter().map(tensor).collect()
        };
        let objective_at = |values: &BTreeMap<&str, Vec<f64>>| {
            let variables = variables(values)?;
            Ok(value(&scores(&variables[0], &variables[1])?)?.to_scalar::<f64>()?)
        };
        let slopes = central_differences(&values, 1e-5, objective_at)?;
        let variables = variables(&values)?;
        let scores = scores(&variables[0], &variables[1])?;
        for store in [value(&scores)?.backward()?, scores.backward(&value(&scores)?)?] {
            for (variable, (name, _)) in variables.iter().zip(&shapes) {
                let found = gradient(&store, variable).expect("a gradient").named(*name);
                assert_abs_diff_eq!(found, slopes[name], epsilon = 1e-8);
            }
        }
    }
    Ok(())
}

/// Many equal log-probabilities have the mean of each.
#[test]
fn a_long_sequence_is_summed_in_f64() -> Result<()> {
    let n = 2_000_000;
    let log_probs = Tensor::full(-2.3_f32, (1, n, 1), &Device::Cpu)?;
    let token_ids = Tensor::zeros((1, n), DType::U32, &Device::Cpu)?;
    let scores = Scores::from_log_probs(&log_probs, &token_ids, &ScoreOptions::new())?;
    let mean = scores.mean_by_sequence(&Tensor::ones((1, n), DType::U8, &Device::Cpu)?)?;
    assert_eq!(mean.to_vec1::<f32>()?, [-2.3_f32]);
    Ok(())
}

/// What is impossible where it does not count changes neither a value nor a gradient.
#[test]
fn a_position_that_does_not_count_may_be_impossible() -> Result<()> {
    let weight = Var::from_tensor(&uniform(&[VOCAB, HIDDEN], 2.0, 2)?)?;
    let bias = Tensor::new(&[f64::NEG_INFINITY, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], &Device::Cpu)?;
    let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), Some(bias))?;
    let hidden = Var::from_tensor(&uniform(&[2, 2, HIDDEN], 2.0, 1)?)?;
    let mask = Tensor::new(&[[0u8, 1], [1, 1]], &Device::Cpu)?;
    let by_sequence = |ids: &[[u32; 2]; 2]| -> Result<_> {
        let scores = head.score(&hidden, &Tensor::new(ids, &Device::Cpu)?, &ScoreOptions::new())?;
        let both = (scores.sum_by_sequence(&mask)? + scores.mean_by_sequence(&mask)?)?;
        let store = scores.backward(&both.sum_all()?)?;
        Ok((scores.log_prob.to_vec2::<f64>()?, numbers(&both), gradients(&store, [&*hidden, &*weight])))
    };
    let (log_prob, impossible, gradients_of_impossible) = by_sequence(&[[0, 1], [2, 3]])?;
    let (_, possible, gradients_of_possible) = by_sequence(&[[5, 1], [2, 3]])?;
    assert_eq!(log_prob[0][0], f64::NEG_INFINITY);
    assert!(impossible.iter().all(|x| x.is_finite()), "{impossible:?}");
    assert_eq!(impossible, possible);
    for (found, expected) in gradients_of_impossible.iter().zip(&gradients_of_possible) {
        assert_abs_diff_eq!(*found, **expected, epsilon = 1e-14);
    }
    let (_, counted, _) = by_sequence(&[[5, 0], [2, 3]])?;
    assert_eq!((counted[0], counted[1]), (f64::NEG_INFINITY, possible[1]));
    Ok(())
}

#[test]
fn errors_name_what_does_not_fit() -> Result<()> {
    let (hidden, weight) = (uniform(&[BATCH, SEQ, HIDDEN], 2.0, 1)?, uniform(&[VOCAB, HIDDEN], 2.0, 2)?);
    let scores = scores(&hidden, &weight)?;
    let head = SoftmaxHead::from_tensors(weight, None)?;
    let candidates = Tensor::zeros((BATCH, SEQ, 2), DType::U32, &Device::Cpu)?;
    let candidate_scores = head.score(&hidden, &candidates, &ScoreOptions::new())?;
    let short = mask()?.narrow(1, 0, SEQ - 1)?;
    let float = mask()?.to_dtype(DType::F32)?;
    for (scores, mask, message) in [
        (&scores, short, "mask: expected shape [4, 5], got [4, 4]"),
        (&scores, float, "mask: expected dtype u8, u32 or i64, got F32"),
        (&candidate_scores, mask()?, "log_prob: expected shape [batch, seq], got [4, 5, 2]"),
    ] {
        for result in [scores.sum_by_sequence(&mask), scores.mean_by_sequence(&mask)] {
            let error = result.expect_err(message);
            assert!(matches!(error, Error::Shape { .. } | Error::DType { .. }), "{error:?}");
            assert_eq!(error.to_string(), message);
        }
    }
    Ok(())
}

/// The loss of the example equals the formula, also where it would overflow, and where the policy is the reference.
#[test]
fn the_loss_of_preferences_is_the_formula() -> Result<()> {
    let beta = 0.3;
    let policy = [-3.0, -1.0, -2.0, -900.0, -5.0, -1.5, -4.0, -2.0, -7.0, -5.0];
    let reference = [-2.5, -1.0, -8000.0, -1.0, -5.0, -1.0, -6.0, -1.0, -2.0, -5.0];
    let policy = Var::from_tensor(&Tensor::new(&policy, &Device::Cpu)?)?;
    let (loss, rewards) = dpo::dpo_loss(&policy, &Tensor::new(&reference, &Device::Cpu)?, beta)?;
    let (policy_sums, pairs) = (policy.to_vec1::<f64>()?, 5);
    let rewarded: Vec<f64> = policy_sums.iter().zip(reference).map(|(p, r)| beta * (p - r)).collect();
    assert_abs_diff_eq!(numbers(&rewards), rewarded, epsilon = 1e-12);
    let (mut sum, mut slopes) = (0.0, vec![0.0; 2 * pairs]);
    for i in 0..pairs {
        let margin = rewarded[i] - rewarded[pairs + i];
        // The logarithm of the sigmoid, as far as numbers in f64 have it.
        sum += if margin < -30.0 { -margin } else { (-margin).exp().ln_1p() };
        let slope = beta / (1.0 + margin.exp()) / pairs as f64;
        slopes[i] = -slope;
        slopes[pairs + i] = slope;
    }
    assert!((rewarded[4], rewarded[9]) == (0.0, 0.0) && rewarded[2] > 2000.0 && rewarded[3] < -200.0, "{rewarded:?}");
    assert_relative_eq!(loss.to_scalar::<f64>()?, sum / pairs as f64, max_relative = 1e-12);
    let found = gradient(&loss.backward()?, &policy).expect("a gradient");
    assert_abs_diff_eq!(found, slopes, epsilon = 1e-14);
    Ok(())
}

/// One call over the rows of all depths, weighted by position, has the value and the gradients of the separate losses
/// (DeepSeek-V3, arXiv 2412.19437, equations 24 and 25, with the loss of the next token).
#[test]
fn several_future_tokens_are_one_loss() -> Result<()> {
    const DEPTHS: usize = 2;
    let (lambda, tokens) = (0.3, (BATCH * (SEQ - 1)) as f64);
    let weight = Var::from_tensor(&uniform(&[VOCAB, HIDDEN], 2.0, 2)?)?;
    let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
    let ids = token_ids()?;
    // Depth 0 predicts the next token; each depth has a position less than the one before.
    let (mut hidden, mut targets, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    for depth in 0..=DEPTHS {
        let length = SEQ - 1 - depth;
        let states = uniform(&[BATCH, length, HIDDEN], 2.0, 10 + depth as u64)?;
        hidden.push(Var::from_tensor(&states)?);
        targets.push(ids.narrow(1, 1 + depth, length)?);
        let factor = if depth == 0 { 1.0 } else { lambda / DEPTHS as f64 };
        weights.push(vec![factor / tokens; BATCH * length]);
    }

    let mut separate = Tensor::zeros((), DType::F64, &Device::Cpu)?;
    for (depth, (hidden, targets)) in hidden.iter().zip(&targets).enumerate() {
        let loss = head.loss(hidden, targets, &LossOptions::new().with_denominator(tokens))?.value;
        separate = (separate + (loss * if depth == 0 { 1.0 } else { lambda / DEPTHS as f64 })?)?;
    }

    let rows = hidden.iter().map(|hidden| hidden.flatten(0, 1)).collect::<candle_core::Result<Vec<_>>>()?;
    let ids = targets.iter().map(Tensor::flatten_all).collect::<candle_core::Result<Vec<_>>>()?;
    let options = LossOptions::new()
        .with_position_weights(Tensor::new(weights.concat(), &Device::Cpu)?)
        .with_reduction(Reduction::Sum);
    let together = head.loss(&Tensor::cat(&rows, 0)?, &Tensor::cat(&ids, 0)?, &options)?;

    assert_relative_eq!(together.value.to_scalar::<f64>()?, separate.to_scalar::<f64>()?, max_relative = 1e-13);
    let variables: Vec<&Tensor> = hidden.iter().chain([&weight]).map(Var::as_tensor).collect();
    let found = gradients(&together.backward()?, variables.iter().copied());
    let expected = gradients(&separate.backward()?, variables.iter().copied());
    for (found, expected) in found.iter().zip(&expected) {
        assert!(found.len() >= VOCAB * HIDDEN, "{found:?}");
        assert_abs_diff_eq!(*found, **expected, epsilon = 1e-14);
    }
    Ok(())
}
