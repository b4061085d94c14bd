//! The mean logit of each position, `sum_k pi_k 1/V sum_v z_kv`: values and gradients of every head and kind of decoder
//! against the mean of all logits from candle's operations, and what has none.

mod common;

use approx::assert_abs_diff_eq;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::{VarBuilder, VarMap};
use common::case::{Case, Logits, Sizes, Tensors, HEADS};
use common::check::{assert_central_differences, assert_near, build, gradients};
use common::composed::Operands;
use common::given::{places, Given};
use common::problem::Problem;
use common::quantised::{quantised, rows};
use common::values::{fill, gradient, numbers, uniform, Numbers};
use common::{dtypes, exact, on, on_each_device};
use mos_head::parts::{CharCnn, CharCnnConfig, Decoder, DecoderConfig, LogitFunction, LowRankAdapter};
use mos_head::score::{ChunkTerms, ScoreOptions, Scores};
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{Distributions, Error, Mixture, OptionName, OutputLayer, Result, SoftmaxHead};

fn options() -> ScoreOptions {
    ScoreOptions::new().with_mean_logit(true)
}

/// The mean logits from all logits, `[positions]`.
fn composed(operands: &Operands, logits: Logits) -> candle_core::Result<Tensor> {
    let means = operands.logits(logits)?.mean(2)?;
    match &operands.log_priors {
        Some(log_priors) => (means * log_priors.exp()?)?.sum(1),
        None => means.squeeze(1),
    }
}

/// The mean logits of the crate at the temperature of a problem, beside the other scores of its options.
fn found(problem: &Problem, tensors: &Tensors) -> Result<Scores> {
    let ids = on(tensors["contexts"].device(), &problem.token_ids()?)?;
    let ids = if problem.n == 1 { ids.squeeze(1)? } else { ids };
    problem.mixture(tensors)?.score(&ids, &problem.options().with_mean_logit(true))
}

on_each_device! {
    fn it_and_its_gradient_equal_those_of_all_logits(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for (positions, components, d, vocab) in
                [(1, 1, 1, 1), (5, 3, 7, 37), (3, 1, 4, 2500), (4, 2, 6, 1024), (2, 4, 3, 1025)]
            {
                let case = Problem { logit_scale: 0.6, ..Problem::new(positions, components, d, vocab) };
                // One pass without another score, two passes, and several candidates.
                for problem in [
                    Problem { entropy: false, ..case },
                    Problem { temperature: 0.5, transposed: true, ..case },
                    Problem { n: 2, bias: false, ..case },
                ] {
                    let drawn = problem.drawn(dtype);
                    let (vars, truth) = (drawn.variables(dtype, device)?, drawn.variables(DType::F64, &Device::Cpu)?);
                    let scores = found(&problem, &vars)?;
                    let value = scores.mean_logit.as_ref().expect("asked for");
                    let expected = composed(&problem.operands(&truth)?, problem.logits())?;
                    assert_eq!(value.dims(), [positions]);
                    let name = format!("{problem:?} in {dtype:?}");
                    let tolerance = if dtype == DType::F64 { 1e-13 } else { 2e-6 };
                    assert_abs_diff_eq!(numbers(value).named(&name), numbers(&expected), epsilon = tolerance);
                    let upstream = uniform(&[positions], 1.5, 3)?;
                    let expected = gradients(&(expected * &upstream)?.sum_all()?.backward()?, &truth);
                    let upstream = on(device, &upstream.to_dtype(value.dtype())?)?;
                    let value = (value * upstream)?.sum_all()?;
                    let rounding = if dtype.size_in_bytes() < 4 { 1e-2 } else { 0.0 };
                    for store in [value.backward()?, scores.backward(&value)?] {
                        let found = gradients(&store, &vars);
                        assert_near(&name, &found, &expected, 10.0 * tolerance + rounding);
                    }
                }
            }
        }
        Ok(())
    }

    fn every_head_has_it(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for head in HEADS {
            let mut case = Case::random(head, Sizes::new(7, 6, 3, 33), &[2, 5], 9).rounded(dtype)?;
            case.logits = Logits { scale: 0.7, function: LogitFunction::Identity };
            let (vars, truth) = (case.variables(dtype, device)?, case.variables(DType::F64, &Device::Cpu)?);
            let ids = on(device, &Tensor::zeros((2, 5), DType::U32, &Device::Cpu)?)?;
            let scores = build(&case, &vars)?.score(&vars["hidden"], &ids, &options())?;
            let found = scores.mean_logit.as_ref().expect("asked for");
            let expected = composed(&case.operands(&truth)?, case.logits)?;
            let tolerance = if dtype == DType::F64 { 1e-13 } else { 1e-5 };
            let name = format!("{head:?}");
            assert_eq!(found.dims(), [2, 5]);
            let flat = numbers(&found.flatten_all()?).named(&name);
            assert_abs_diff_eq!(flat, numbers(&expected), epsilon = tolerance);
            // Beside the log-probabilities, whose gradients are added.
            let log_probs = case.operands(&truth)?.log_probs(case.logits)?.0.narrow(1, 0, 1)?;
            let expected = gradients(&(expected.sqr()?.sum_all()? + log_probs.sum_all()?)?.backward()?, &truth);
            let value = (found.sqr()?.sum_all()? + scores.log_prob.sum_all()?)?;
            for store in [value.backward()?, scores.backward(&value)?] {
                assert_near(&name, &gradients(&store, &vars), &expected, 100.0 * tolerance);
            }
        }
        Ok(())
    }

    fn no_positions_have_no_mean_logits(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for components in [1, 2] {
            let weight = Var::from_tensor(&Tensor::ones((20, 6), dtype, device)?)?;
            let log_priors = Tensor::zeros((0, components), dtype, device)?;
            let log_priors = Some(&log_priors).filter(|_| components > 1);
            let mixture = Mixture::new(&Tensor::zeros((0, components, 6), dtype, device)?, log_priors, &weight, None)?;
            let scores = mixture.score(&Tensor::zeros(0, DType::U32, device)?, &options())?;
            let mean_logit = scores.mean_logit.expect("asked for");
            assert_eq!(mean_logit.dims(), [0]);
            if device.is_cpu() {
                // candle's GPU backends do not add up empty tensors.
                let store = mean_logit.sum_all()?.backward()?;
                assert_eq!(gradient(&store, &weight).expect("a gradient"), [0.0; 120]);
            }
        }
        Ok(())
    }
}

#[test]
fn its_gradients_equal_central_differences() -> Result<()> {
    let case = Problem { logit_scale: 0.8, entropy: false, ..Problem::new(3, 2, 4, 11) };
    let value = |tensors: &Tensors| -> Result<Tensor> {
        Ok(found(&case, tensors)?.mean_logit.expect("asked for").sqr()?.sum_all()?)
    };
    assert_central_differences(&case.drawn(DType::F64), value)
}

/// The scores and all gradients of `sum u m`, where m are the mean logits.
fn with_gradients(head: &dyn OutputLayer, hidden: &Tensor, vars: &[&Tensor]) -> Result<(Numbers, Vec<Numbers>)> {
    let ids = Tensor::zeros(&hidden.dims()[..hidden.rank() - 1], DType::U32, &Device::Cpu)?;
    let mean_logit = head.score(hidden, &ids, &options())?.mean_logit.expect("asked for");
    let store = mean_logit.sqr()?.sum_all()?.backward()?;
    let found = vars.iter().map(|var| gradient(&store, var).expect("a gradient")).collect();
    Ok((numbers(&mean_logit), found))
}

/// Demands the same numbers and gradients.
fn assert_same(found: (Numbers, Vec<Numbers>), expected: (Numbers, Vec<Numbers>), tolerance: f64) {
    assert_abs_diff_eq!(found.0, expected.0, epsilon = tolerance);
    assert_eq!(found.1.len(), expected.1.len());
    for (i, (found, expected)) in found.1.into_iter().zip(expected.1).enumerate() {
        assert_abs_diff_eq!(found.named(format!("gradient {i}")), expected, epsilon = 10.0 * tolerance);
    }
}

#[test]
fn an_adapter_is_part_of_the_decoder() -> Result<()> {
    let var = |shape: &[usize], seed| Ok::<_, Error>(Var::from_tensor(&uniform(shape, 1.2, seed)?)?);
    let (weight, bias) = (var(&[41, 7], 1)?, var(&[41], 2)?);
    let (a, b, hidden) = (var(&[3, 7], 3)?, var(&[41, 3], 4)?, var(&[2, 5, 7], 5)?);
    let vars: Vec<&Tensor> = [&weight, &bias, &a, &b, &hidden].map(|var| var.as_tensor()).to_vec();
    let head =
        |weight: Tensor| SoftmaxHead::from_tensors(weight, Some(bias.as_tensor().clone()))?.with_logit_scale(0.9);
    let adapter = LowRankAdapter::from_tensors(a.as_tensor().clone(), b.as_tensor().clone(), 0.75)?;
    let sum = (weight.as_tensor() + (b.matmul(&a)? * 0.75)?)?;
    let expected = with_gradients(&head(sum)?, &hidden, &vars)?;
    let found = with_gradients(&head(weight.as_tensor().clone())?.with_adapter(adapter)?, &hidden, &vars)?;
    assert_same(found, expected, 1e-13);
    Ok(())
}

#[test]
fn quantised_rows_have_that_of_the_dequantised() -> Result<()> {
    for dtype in [GgmlDType::Q8_0, GgmlDType::Q4_0, GgmlDType::F16] {
        let weight = quantised(dtype, 1100, 64, 7)?;
        let var = |shape: &[usize], seed| {
            Ok::<_, Error>(Var::from_tensor(&uniform(shape, 0.8, seed)?.to_dtype(DType::F32)?)?)
        };
        let (bias, hidden) = (var(&[1100], 1)?, var(&[3, 64], 2)?);
        let vars: Vec<&Tensor> = vec![&bias, &hidden];
        let bias = Some(bias.as_tensor().clone());
        let expected = SoftmaxHead::from_tensors(rows(&weight)?, bias.clone())?;
        let expected = with_gradients(&expected, &hidden, &vars)?;
        let found = with_gradients(&SoftmaxHead::from_quantised(weight, bias)?, &hidden, &vars)?;
        assert_same(found, expected, 1e-6);
    }
    Ok(())
}

#[test]
fn rows_from_spellings_have_gradients() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let config = CharCnnConfig::new(5).with_embedding(3).with_filters(&[(1, 2), (3, 4)]).with_correction(2);
    let cnn = CharCnn::new(&config, &["", "a", "banana", "bandana", "cab"], vb.pp("cnn"))?;
    let decoder = Decoder::with_char_cnn(&DecoderConfig::new(5, 5), cnn, vb)?;
    fill(&vars, 0.8)?;
    let contexts = Var::from_tensor(&uniform(&[4, 1, 5], 1.0, 5)?)?;
    let variables = vars.all_vars();
    let all: Vec<&Tensor> = variables.iter().map(|var| var.as_tensor()).chain([contexts.as_tensor()]).collect();
    let ids = Tensor::zeros(4, DType::U32, &Device::Cpu)?;
    let found = decoder.mixture(&contexts, None)?.score(&ids, &options())?.mean_logit.expect("asked for");
    let logits = contexts.squeeze(1)?.matmul(&decoder.weight()?.t()?)?;
    let expected = logits.broadcast_add(decoder.bias().expect("a bias"))?.mean(D::Minus1)?;
    assert_abs_diff_eq!(numbers(&found), numbers(&expected), epsilon = 1e-13);
    let [found, expected] = [found, expected].map(|value| value.sqr()?.sum_all()?.backward());
    let (found, expected) = (found?, expected?);
    for tensor in all {
        let expected = gradient(&expected, tensor).expect("a gradient");
        assert_abs_diff_eq!(gradient(&found, tensor).expect("a gradient"), expected, epsilon = 1e-12);
    }
    Ok(())
}

/// A frozen head gives the hidden states their gradient, and no parameter one.
#[test]
fn a_frozen_operand_has_no_gradient() -> Result<()> {
    let (weight, hidden) =
        (Var::from_tensor(&uniform(&[30, 6], 1.0, 1)?)?, Var::from_tensor(&uniform(&[3, 6], 1.0, 2)?)?);
    let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
    let ids = Tensor::zeros(3, DType::U32, &Device::Cpu)?;
    let gradients = |head: &dyn OutputLayer, hidden: &Tensor| -> Result<_> {
        let mean_logit = head.score(hidden, &ids, &options())?.mean_logit.expect("asked for");
        let store = mean_logit.sum_all()?.backward()?;
        Ok((gradient(&store, &weight).is_some(), gradient(&store, hidden).is_some()))
    };
    assert_eq!(gradients(&head, &hidden)?, (true, true));
    assert_eq!(gradients(&*head.frozen()?, &hidden)?, (false, true));
    assert_eq!(gradients(&head, &hidden.detach())?, (true, false));
    Ok(())
}

/// A mean is minus infinity or NaN where a logit is; a component without a prior takes no part.
#[test]
fn infinite_logits_have_infinite_means() -> Result<()> {
    let none = f64::NEG_INFINITY;
    let bias = Var::from_tensor(&Tensor::new(&[0.5, none, 1.0], &Device::Cpu)?)?;
    let contexts = Tensor::new(&[[[1f64], [2.0]], [[f64::NAN], [3.0]], [[4.0], [5.0]]], &Device::Cpu)?;
    let log_priors = Tensor::new(&[[0.5f64.ln(), 0.5f64.ln()], [0.5f64.ln(), 0.5f64.ln()], [0.0, none]], &Device::Cpu)?;
    let log_priors = Var::from_tensor(&log_priors)?;
    let weight = Var::from_tensor(&Tensor::new(&[[1f64], [2.0], [3.0]], &Device::Cpu)?)?;
    let ids = Tensor::zeros(3, DType::U32, &Device::Cpu)?;
    let score = |bias: Option<&Tensor>| -> Result<(Vec<f64>, Tensor)> {
        let mixture = Mixture::new(&contexts, Some(&log_priors), &weight, bias)?;
        let mean_logit = mixture.score(&ids, &options())?.mean_logit.expect("asked for");
        Ok((mean_logit.to_vec1()?, mean_logit))
    };
    let (found, mean_logit) = score(None)?;
    assert!((found[0] - 3.0).abs() < 1e-14 && found[1].is_nan() && (found[2] - 8.0).abs() < 1e-14, "{found:?}");
    // The NaN stays at its position: another one's derivatives are its contexts, and means times priors.
    let store = mean_logit.narrow(0, 0, 1)?.sum_all()?.backward()?;
    assert_abs_diff_eq!(gradient(&store, &weight).expect("a gradient"), [0.5; 3].to_vec(), epsilon = 1e-15);
    let found_priors = gradient(&store, &log_priors).expect("a gradient");
    assert_abs_diff_eq!(found_priors, [1.0, 2.0, 0.0, 0.0, 0.0, 0.0].to_vec(), epsilon = 1e-15);
    let (found, mean_logit) = score(Some(&bias))?;
    assert!(found[0] == none && found[1].is_nan() && found[2] == none, "{found:?}");
    // The derivative by a bias is a third of the prior's sum, whatever the logits are.
    let store = mean_logit.narrow(0, 2, 1)?.sum_all()?.backward()?;
    let found = gradient(&store, &bias).expect("a gradient");
    assert_abs_diff_eq!(found, [1.0 / 3.0; 3].to_vec(), epsilon = 1e-15);
    Ok(())
}

/// What has no mean of its decoder says so by name, before any computation.
#[test]
fn what_has_no_mean_of_its_decoder_says_so() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let weight = uniform(&[20, 6], 1.0, 1)?.to_dtype(DType::F32)?;
    let softmax = SoftmaxHead::from_tensors(weight.clone(), None)?;
    let hidden = Tensor::zeros((2, 6), DType::F32, &Device::Cpu)?;
    let ids = Tensor::zeros(2, DType::U32, &Device::Cpu)?;
    let log_probs = softmax.log_probs(&hidden)?;
    let heads: Vec<(Box<dyn OutputLayer>, &str)> = vec![
        (Box::new(softmax.clone().with_softcap(30.0)?), "a mixture with a function of the logits"),
        (Box::new(AdaptiveSoftmax::new(&AdaptiveConfig::new(6, 20, vec![4]), vb.pp("adaptive"))?), "AdaptiveSoftmax"),
        (Box::new(HierarchicalSoftmax::new(&HierarchicalConfig::new(6, 20), vb.pp("h"))?), "HierarchicalSoftmax"),
        (Box::new(Restricted::new(softmax.clone(), AllowedIds::new(&[0, 3]))?), "allowed ids"),
    ];
    let assert_refused = |found: Result<Scores>, expected: &str| {
        let error = found.expect_err("no mean logit");
        assert!(matches!(error, Error::Unsupported { option: OptionName::MeanLogit, .. }), "{error:?}");
        assert!(error.to_string().starts_with("mean_logit: not supported by "), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    };
    for (head, name) in &heads {
        assert_refused(head.score(&hidden, &ids, &options()), name);
        assert!(head.score(&hidden, &ids, &ScoreOptions::new())?.mean_logit.is_none());
    }
    assert_refused(Given(log_probs.clone()).score(&places(&[2, 1])?, &ids, &options()), "Given");
    assert_refused(Scores::from_log_probs(&log_probs, &ids, &options()), "log-probabilities that are given");
    let mixture = Mixture::new(&hidden.unsqueeze(1)?, None, &weight, None)?;
    let terms = |_| -> Result<ChunkTerms> { unreachable!("no chunk") };
    let error = mixture.score_loss(&ids, &options(), terms).expect_err("a loss of scores");
    assert_eq!(error.to_string(), "mean_logit: not supported by a loss of scores");
    Ok(())
}
