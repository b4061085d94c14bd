//! The logarithm of the collision probability, `log sum_v P(v)^2`: values and gradients against candle's operations in
//! f64, its bounds and edges, and those of every head.

mod common;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::{VarBuilder, VarMap};
use common::check::{assert_near, gradients};
use common::given::{places, Given};
use common::problem::Problem;
use common::values::{gradient, numbers, uniform};
use common::{dtypes, exact, on_each_device};
use mos_head::parts::LogitFunction;
use mos_head::score::{ChunkScores, ChunkTerms, ScoreOptions, Scores};
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{
    Distributions, Error, Mixture, MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, Result,
    SoftmaxConfig, SoftmaxHead,
};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// The relative tolerance of scores.
fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F64 {
        1e-12
    } else {
        1e-5
    }
}

/// A problem with the collision probability and no other score of a position.
fn problem(positions: usize, components: usize, d: usize, vocab: usize) -> Problem {
    Problem { collision: true, entropy: false, ..Problem::new(positions, components, d, vocab) }
}

fn options() -> ScoreOptions {
    ScoreOptions::new().with_collision(true)
}

#[test]
fn it_and_its_gradient_equal_composed_operations() -> Result<()> {
    for (positions, components, d, vocab) in
        [(1, 1, 1, 1), (2, 1, 3, 2), (5, 3, 7, 37), (3, 1, 16, 600), (70, 4, 9, 131), (4, 15, 20, 1030)]
    {
        for dtype in DTYPES {
            for temperature in [1.0, 0.4, 3.0] {
                let case = Problem { temperature, ..problem(positions, components, d, vocab) };
                for (n, entropy, outside) in [(0, false, false), (1, false, false), (3, true, false), (2, true, true)] {
                    // With one id, or two, nothing may be outside.
                    let outside = outside && vocab > 3;
                    Problem { n, entropy, outside, ..case }.check(dtype, tolerance(dtype))?;
                }
                Problem { outside: vocab > 3, ..case }.check(dtype, tolerance(dtype))?;
            }
        }
    }
    Ok(())
}

#[test]
fn so_they_do_with_every_kind_of_logits() -> Result<()> {
    for dtype in [DType::F64, DType::F32] {
        for (components, temperature, outside) in [(1, 1.0, false), (1, 0.7, true), (3, 1.0, true), (3, 0.7, false)] {
            let case = Problem { n: 2, temperature, outside, ..problem(6, components, 8, 50) };
            for function in [LogitFunction::Softcap(1.5), LogitFunction::Sigsoftmax] {
                Problem { function, logit_scale: 0.6, ..case }.check(dtype, tolerance(dtype))?;
            }
            Problem { masked: true, ..case }.check(dtype, tolerance(dtype))?;
            Problem { transposed: true, ..case }.check(dtype, tolerance(dtype))?;
            Problem { spread: 30.0, ..case }.check(dtype, 4.0 * tolerance(dtype))?;
        }
    }
    Ok(())
}

on_each_device! {
    fn it_equals_composed_operations_on_each_device(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for (positions, components, vocab) in [(5, 3, 37), (1, 1, 1), (3, 2, 1030)] {
                for temperature in [0.7, 1.0, 1.8] {
                    for (n, entropy, outside) in [(0, false, false), (1, true, false), (3, false, true)] {
                        let outside = outside && vocab > 1;
                        let case = Problem { n, entropy, outside, ..problem(positions, components, 6, vocab) };
                        Problem { temperature, ..case }.check_on(device, dtype, tolerance(dtype))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn chunks_of_each_device_do_not_change_it(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let case = Problem { n: 2, temperature: 0.8, ..problem(13, 3, 12, 300) };
        let mut bytes = 0;
        // Each pass names what it needs.
        while let Err(Error::Workspace { least, .. }) =
            (Problem { workspace_bytes: Some(bytes), ..case }).check_on(device, dtype, 1e-5)
        {
            assert!(least > bytes);
            bytes = least;
        }
        assert!(bytes > 0);
        for factor in [1, 2, 4] {
            Problem { workspace_bytes: Some(factor * bytes), ..case }.check_on(device, dtype, 1e-5)?;
        }
        Ok(())
    }

    /// The probabilities of f32 underflow from a logit of -104 on, and their squares from -52 on.
    fn its_gradient_is_that_of_the_formula_where_squares_underflow(device: &Device) -> Result<()> {
        for &dtype in dtypes(device).iter().filter(|dtype| dtype.size_in_bytes() >= 4) {
            for (components, offset, temperature) in
                [(1, 0.0, 1.0), (2, -100.0, 1.0), (1, 1000.0, 1.0), (2, 1000.0, 0.5), (1, -100.0, 0.5)]
            {
                let logits = [0.0, 1.0, -60.0, -300.0];
                let bias = Tensor::new(&logits.map(|z| z + offset), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
                let bias = Var::from_tensor(&bias)?;
                let contexts = Tensor::ones((1, components, 1), dtype, device)?;
                let log_priors = (contexts.squeeze(2)? * 0.5)?.log()?;
                let log_priors = Some(&log_priors).filter(|_| components > 1);
                let mixture = Mixture::new(&contexts, log_priors, &Tensor::zeros((4, 1), dtype, device)?, Some(&bias))?;
                let options = options().with_temperature(temperature);
                let found = mixture.score(&Tensor::new(&[2u32], device)?, &options)?.log_collision.expect("asked for");
                let powers = |factor: f64| logits.map(|z| (factor * z / temperature).exp());
                let sum = |powers: [f64; 4]| powers.iter().sum::<f64>();
                let (norm, squares) = (sum(powers(1.0)), sum(powers(2.0)));
                let expected = squares.ln() - 2.0 * norm.ln();
                assert_abs_diff_eq!(numbers(&found), [expected].to_vec(), epsilon = 1e-5);
                let expected = [0, 1, 2, 3].map(|v| {
                    2.0 / temperature * (powers(2.0)[v] / squares - powers(1.0)[v] / norm)
                });
                let found = gradient(&found.sum_all()?.backward()?, &bias).expect("a gradient");
                assert_abs_diff_eq!(found.named(format!("{components} {offset}")), expected.to_vec(), epsilon = 1e-5);
            }
        }
        Ok(())
    }
}

/// Each logarithm is from minus that of the vocabulary's size to zero, wherever the logits lie, and NaN stays at its
/// position.
#[test]
fn it_keeps_its_bounds_at_large_offsets() -> Result<()> {
    for (offset, spread) in [(-100.0, 1.0), (1000.0, 1.0), (1e6, 0.0), (0.0, 1e4), (-1e4, 300.0)] {
        for components in [1, 3] {
            let case = Problem { n: 2, spread, ..problem(20, components, 6, 50) };
            let mut operands = case.drawn(DType::F32).constants(DType::F32, &Device::Cpu)?;
            let bias = operands["decoder.bias"].affine(spread.min(1.0), offset)?;
            operands.insert("decoder.bias", bias);
            let found = case.scores(&operands)?.log_collision.expect("asked for").to_vec1::<f32>()?;
            assert!(found.iter().all(|c| (-50f32.ln() - 1e-5..=0.0).contains(c)), "{offset} {spread}: {found:?}");
            if spread == 0.0 {
                found.iter().for_each(|&c| assert_abs_diff_eq!(c, -50f32.ln(), epsilon = 1e-5));
            }
        }
    }
    let contexts = Tensor::new(&[[[1f32, f32::NAN]], [[1.0, 2.0]]], &Device::Cpu)?;
    let mixture = Mixture::new(&contexts, None, &Tensor::ones((9, 2), DType::F32, &Device::Cpu)?, None)?;
    let found = mixture.score(&Tensor::zeros(2, DType::U32, &Device::Cpu)?, &options())?.log_collision;
    let found = found.expect("asked for").to_vec1::<f32>()?;
    assert!(found[0].is_nan() && (found[1] + 9f32.ln()).abs() < 1e-6, "{found:?}");
    Ok(())
}

/// A loss of scores from three products equals the same function of scores, for a mixture and what is composed.
#[test]
fn losses_of_it_equal_functions_of_scores() -> Result<()> {
    for (components, temperature, outside) in [(1, 1.0, false), (1, 0.7, true), (3, 1.0, true), (3, 0.7, false)] {
        let case = Problem { n: 2, temperature, outside, ..problem(11, components, 6, 40) };
        let vars = case.variables(DType::F64)?;
        let mixture = case.mixture(&vars)?;
        let (token_ids, options) = (case.token_ids()?, case.options());
        let terms = |scores: ChunkScores| {
            let squared = (scores.log_collision.sqr()? * 0.5)?;
            Ok(ChunkTerms::new((squared + scores.log_prob.sum(1)?)?, scores.log_prob.ones_like()?)
                .with_by_collision(scores.log_collision))
        };
        let scores = mixture.score(&token_ids, &options)?;
        let squared = (scores.log_collision.expect("asked for").sqr()? * 0.5)?;
        let value = (squared.sum_all()? + scores.log_prob.sum_all()?)?;
        let expected = gradients(&value.backward()?, &vars);
        assert_eq!(expected.len(), vars.len());
        let everything: Vec<u32> = (0..40).collect();
        let restricted = mixture.restricted(&AllowedIds::new(&everything))?;
        for loss in
            [mixture.score_loss(&token_ids, &options, terms)?, restricted.score_loss(&token_ids, &options, terms)?]
        {
            assert_relative_eq!(numbers(&loss.value), numbers(&value), max_relative = 1e-12);
            assert_near("gradient", &gradients(&loss.backward()?, &vars), &expected, 1e-12);
        }
        let wrong = |scores: ChunkScores| {
            Ok(ChunkTerms::new(scores.log_collision.clone(), scores.log_prob.zeros_like()?)
                .with_by_collision(scores.log_collision.unsqueeze(0)?))
        };
        let error = mixture.score_loss(&token_ids, &options, wrong).expect_err("a matrix");
        assert!(error.to_string().starts_with("by_collision: expected shape [11]"), "{error}");
    }
    Ok(())
}

/// Those of every head equal the sum over its log-probabilities, and have the gradients.
#[test]
fn every_head_has_it() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let config = MixtureConfig::new(6, 30, 3).with_dropout(0.5);
    let softmax = SoftmaxHead::new(&SoftmaxConfig::new(6, 30), vb.pp("softmax"))?;
    let mixture = MixtureOfSoftmaxes::new(&config, vb.pp("mixture"))?;
    let allowed: Vec<u32> = (0..30).filter(|id| id % 4 != 3).collect();
    // All ids but one of each position.
    let lists: Vec<u32> = (0..8).flat_map(|i| (0..30).filter(move |&id| id != 29 - i)).collect();
    let ends: Vec<usize> = (0..=8).map(|i| i * 29).collect();
    let lists = AllowedIds::per_position(&lists, &ends)?;
    let heads: Vec<Box<dyn OutputLayer>> = vec![
        Box::new(softmax.clone()),
        Box::new(MixtureOfContexts::new(&config, vb.pp("contexts"))?),
        Box::new(mixture.clone()),
        Box::new(AdaptiveSoftmax::new(&AdaptiveConfig::new(6, 30, vec![13]), vb.pp("adaptive"))?),
        Box::new(HierarchicalSoftmax::new(&HierarchicalConfig::new(6, 30), vb.pp("hierarchical"))?),
        Box::new(Restricted::new(softmax.clone(), AllowedIds::new(&allowed))?),
        Box::new(Restricted::new(softmax, lists.clone())?),
        Box::new(Restricted::new(mixture.clone(), AllowedIds::new(&allowed))?),
        Box::new(Restricted::new(mixture, lists)?),
    ];
    let hidden = Var::from_tensor(&uniform(&[2, 4, 6], 1.7, 2)?)?;
    let ids = Tensor::from_vec((0..8u32).collect::<Vec<_>>(), (2, 4), &Device::Cpu)?;
    let ids = (ids.to_dtype(DType::F64)? * 0.4)?.to_dtype(DType::U32)?;
    for head in heads {
        for temperature in [1.0, 1.6] {
            let log_probs = (head.log_probs(&hidden)? / temperature)?;
            // An id that is not allowed has no probability, and its logarithm no gradient.
            let is_possible = log_probs.gt(f64::NEG_INFINITY)?;
            let powers = is_possible.where_cond(&log_probs, &log_probs.zeros_like()?)?.exp()?;
            let powers = is_possible.where_cond(&powers, &powers.zeros_like()?)?;
            let norm = powers.sum(D::Minus1)?.log()?;
            let expected = (powers.sqr()?.sum(D::Minus1)?.log()? - (norm * 2.0)?)?;
            let options = options().with_temperature(temperature);
            let found = head.score(&hidden, &ids, &options)?.log_collision.expect("asked for");
            assert_relative_eq!(numbers(&found).named(format!("{head:?}")), numbers(&expected), max_relative = 1e-11);
            let [found, expected] = [found, expected].map(|value| value.sum_all()?.backward());
            let expected = gradient(&expected?, &hidden).expect("a gradient");
            let found = gradient(&found?, &hidden).expect("a gradient");
            assert_relative_eq!(found.named(format!("{head:?}")), expected, max_relative = 1e-9, epsilon = 1e-12);
        }
    }
    Ok(())
}

/// Log-probabilities that are given have it too: some ids are impossible, and all of one position are.
#[test]
fn given_log_probabilities_have_it() -> Result<()> {
    let none = f64::NEG_INFINITY;
    let log_probs = [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.25, 0.25, 0.5], [f64::NAN, 0.5, 0.5]];
    let log_probs = Tensor::new(&log_probs, &Device::Cpu)?.log()?;
    let expected = [0.5f64.ln(), 0.0, 0.375f64.ln()];
    let ids = Tensor::zeros(4, DType::U32, &Device::Cpu)?;
    let given = Given(log_probs.clone()).score(&places(&[4, 1])?, &ids, &options())?;
    for scores in [given, Scores::from_log_probs(&log_probs, &ids, &options())?] {
        let found = scores.log_collision.expect("asked for").to_vec1::<f64>()?;
        found.iter().zip(expected).for_each(|(found, expected)| assert_abs_diff_eq!(*found, expected, epsilon = 1e-14));
        assert!(found[3].is_nan(), "{found:?}");
    }
    let impossible = Tensor::new(&[[none, none]], &Device::Cpu)?;
    let ids = Tensor::zeros(1, DType::U32, &Device::Cpu)?;
    let scores = Scores::from_log_probs(&impossible, &ids, &options())?;
    assert_eq!(scores.log_collision.expect("asked for").to_vec1::<f64>()?, [none]);
    Ok(())
}

/// What is not asked for is not there, and the other scores are the same.
#[test]
fn it_changes_no_other_score() -> Result<()> {
    for components in [1, 3] {
        let case = Problem { n: 2, outside: true, ..problem(9, components, 6, 40) };
        let operands = case.drawn(DType::F64).constants(DType::F64, &Device::Cpu)?;
        for entropy in [false, true] {
            let with = Problem { entropy, ..case }.scores(&operands)?;
            let without = Problem { entropy, collision: false, ..case }.scores(&operands)?;
            assert!(with.log_collision.is_some() && without.log_collision.is_none() && without.mean_logit.is_none());
            assert_eq!((with.entropy.is_some(), without.entropy.is_some()), (entropy, entropy));
            let all = |scores: Scores| {
                [Some(scores.log_prob), scores.entropy, scores.log_outside].into_iter().flatten().collect::<Vec<_>>()
            };
            for (with, without) in all(with).iter().zip(&all(without)) {
                assert_relative_eq!(numbers(with), numbers(without), max_relative = 1e-12);
            }
        }
    }
    Ok(())
}
