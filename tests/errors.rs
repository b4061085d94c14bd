//! Invalid input gives a typed error that names the argument, what was expected and what was passed.

mod common;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Embedding, VarBuilder, VarMap};
use common::case::{Case, Head, Sizes, ENTRIES, HEADS};
use common::check::{build, Layer};
use common::on_each_device;
use common::values::numbers;
use mos_head::decode::{BeamSearch, NextToken, Sampler, Sampling, TokenRequest, TopK};
use mos_head::distill::{DistillOptions, MissingIds, Teacher};
use mos_head::parts::{CharCnn, CharCnnConfig, LowRankAdapter};
use mos_head::sampled::NoiseDistribution;
use mos_head::score::{ScoreOptions, Scores};
use mos_head::sets::AllowedIds;
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, Classes, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{
    linear_cross_entropy, ContextActivation, Error, GradientSum, Loss, LossOptions, Mixture, MixtureConfig,
    MixtureLayer, MixtureOfContexts, MixtureOfSoftmaxes, MixtureTensors, OutputLayer, Reduction, Result, SoftmaxConfig,
    SoftmaxHead,
};

const SIZES: Sizes = Sizes::new(5, 3, 2, 7);
const POSITIONS: usize = 4;

fn case(head: Head) -> Case {
    Case::random(head, SIZES, &[POSITIONS], 80)
}

/// Asserts that the message of `error` contains all `parts`.
fn assert_message(error: &Error, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not contain {part:?}");
    }
}

fn assert_shape<T: std::fmt::Debug>(result: Result<T>, name: &str, parts: &[&str]) {
    let error = result.expect_err(name);
    assert!(matches!(error, Error::Shape { argument, .. } if argument == name), "{name}: {error:?}");
    assert_message(&error, &[&[name], parts].concat());
}

fn assert_dtype<T: std::fmt::Debug>(result: Result<T>, name: &str, parts: &[&str]) {
    let error = result.expect_err(name);
    assert!(matches!(error, Error::DType { argument, .. } if argument == name), "{name}: {error:?}");
    assert_message(&error, &[&[name], parts].concat());
}

fn assert_config<T: std::fmt::Debug>(result: Result<T>, name: &str, parts: &[&str]) {
    let error = result.expect_err(name);
    assert!(matches!(error, Error::Config { argument, .. } if argument == name), "{name}: {error:?}");
    assert_message(&error, &[&[name], parts].concat());
}

/// The loss of every entry, with these targets and options.
fn losses(device: &Device, targets: &Tensor, options: &LossOptions) -> Result<Vec<(Head, Result<Loss>)>> {
    let ask = |head| -> Result<_> {
        let case = case(head);
        let layer = Layer::new(&case, &case.variables(DType::F32, device)?)?;
        Ok((head, layer.loss(targets, options)))
    };
    ENTRIES.into_iter().map(ask).collect()
}

fn targets(device: &Device) -> Result<Tensor> {
    Ok(Tensor::zeros(POSITIONS, DType::U32, device)?)
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("zeros")
}

/// Parameters that fit each other: K = 2, d = 3, hidden 5, vocab 7.
fn parameters() -> MixtureTensors {
    MixtureTensors {
        prior_weight: zeros(&[2, 5]),
        prior_bias: Some(zeros(&[2])),
        latent_weight: zeros(&[6, 5]),
        latent_bias: zeros(&[6]),
        decoder_weight: zeros(&[7, 3]),
        decoder_bias: Some(zeros(&[7])),
    }
}

/// Both mixtures from changed parameters, or their errors.
fn both(change: impl Fn(&mut MixtureTensors)) -> [Result<Box<dyn OutputLayer>>; 2] {
    let changed = || {
        let mut tensors = parameters();
        change(&mut tensors);
        tensors
    };
    let boxed = |head| -> Box<dyn OutputLayer> { Box::new(head) };
    let contexts =
        MixtureOfContexts::from_tensors(changed(), ContextActivation::Tanh).map(|head| Box::new(head) as Box<_>);
    [contexts, MixtureOfSoftmaxes::from_tensors(changed(), ContextActivation::Tanh).map(boxed)]
}

on_each_device! {
    fn hidden_states_of_another_size_are_refused(device: &Device) -> Result<()> {
        for head in HEADS {
            let layer = build(&case(head), &case(head).constants(DType::F32, device)?)?;
            let wrong = Tensor::zeros((POSITIONS, SIZES.hidden + 1), DType::F32, device)?;
            let parts = ["5", "[4, 6]"];
            assert_shape(layer.loss(&wrong, &targets(device)?, &LossOptions::new()), "hidden", &parts);
            assert_shape(layer.log_probs(&wrong), "hidden", &parts);
            assert_shape(layer.argmax(&wrong), "hidden", &parts);
            assert_shape(layer.plan(&wrong, &LossOptions::new()), "hidden", &parts);
            assert_shape(layer.log_probs(&Tensor::new(0_f32, device)?), "hidden", &["5", "[]"]);
        }
        Ok(())
    }

    fn hidden_states_of_another_dtype_are_refused(device: &Device) -> Result<()> {
        for head in HEADS {
            let layer = build(&case(head), &case(head).constants(DType::F32, device)?)?;
            for (dtype, name) in [(DType::F16, "F16"), (DType::BF16, "BF16"), (DType::U32, "U32")] {
                let wrong = Tensor::zeros((POSITIONS, SIZES.hidden), dtype, device)?;
                assert_dtype(layer.loss(&wrong, &targets(device)?, &LossOptions::new()), "hidden", &["F32", name]);
                assert_dtype(layer.log_probs(&wrong), "hidden", &["F32", name]);
            }
        }
        Ok(())
    }

    fn targets_of_another_shape_are_refused(device: &Device) -> Result<()> {
        for shape in [&[POSITIONS + 1][..], &[], &[POSITIONS, 1], &[2, 2]] {
            let wrong = Tensor::zeros(shape, DType::U32, device)?;
            for (_, loss) in losses(device, &wrong, &LossOptions::new())? {
                assert_shape(loss, "targets", &["[4]", &format!("{shape:?}")]);
            }
        }
        Ok(())
    }

    fn targets_of_a_float_dtype_are_refused(device: &Device) -> Result<()> {
        for (_, loss) in losses(device, &Tensor::zeros(POSITIONS, DType::F32, device)?, &LossOptions::new())? {
            assert_dtype(loss, "targets", &["u32", "i64", "F32"]);
        }
        Ok(())
    }

    fn targets_outside_the_vocabulary_are_refused(device: &Device) -> Result<()> {
        for reduction in [Reduction::Mean, Reduction::None] {
            for base in [LossOptions::new(), LossOptions::evaluation()] {
                for (bad, shown) in [(7, "7"), (i64::MAX, "9223372036854775807"), (-1, "-1"), (-100, "-100")] {
                    let targets = Tensor::new(&[0, 6, bad, 8], device)?;
                    // An ignored index changes nothing for other targets.
                    let options = base.clone().with_reduction(reduction).with_ignore_index(-2);
                    for (head, loss) in losses(device, &targets, &options)? {
                        if device.is_cuda() {
                            // An error here would need a synchronization.
                            let nll = loss.as_ref().expect("a loss").nll.to_vec1::<f32>()?;
                            assert!(nll[2].is_nan() && !nll[0].is_nan() && !nll[1].is_nan(), "{head:?}: {nll:?}");
                        }
                        let error = loss.and_then(|loss| loss.sum_and_count()).expect_err("a target outside");
                        let is_right = matches!(error, Error::Target { argument: "targets", position: 2, got, vocab_size: 7 } if got == bad);
                        assert!(is_right, "{head:?}: {error:?}");
                        assert_message(&error, &["target", shown, "0..7, the vocabulary", "2"]);
                        assert_eq!(error.to_string().contains("with_ignore_index"), bad < 0, "{error}");
                    }
                }
            }
        }
        Ok(())
    }

    fn the_message_names_a_large_unsigned_target_unchanged(device: &Device) -> Result<()> {
        let targets = Tensor::new(&[0, 1, 2, u32::MAX], device)?;
        for (_, loss) in losses(device, &targets, &LossOptions::new().with_ignore_index(-1))? {
            let error = loss.and_then(|loss| loss.sum_and_count()).expect_err("a target outside");
            assert_message(&error, &["4294967295"]);
        }
        Ok(())
    }

    fn a_negative_target_in_u32_is_told_that_i64_holds_it(device: &Device) -> Result<()> {
        let targets = Tensor::new(&[0, 1, 2, -100_i32 as u32], device)?;
        for (_, loss) in losses(device, &targets, &LossOptions::new().with_ignore_index(-100))? {
            let error = loss.and_then(|loss| loss.sum_and_count()).expect_err("a target outside");
            assert_message(&error, &["targets: 4294967196 at position 3", "-100 as u32", "i64", "with_ignore_index"]);
        }
        Ok(())
    }

    fn token_ids_outside_the_vocabulary_are_named_without_a_hint_on_targets(device: &Device) -> Result<()> {
        if device.is_cuda() {
            // A log-probability there is NaN.
            return Ok(());
        }
        let token_ids = Tensor::new(&[0, 1, -100_i64, 3], device)?;
        for head in HEADS {
            let case = case(head);
            let layer = build(&case, &case.constants(DType::F32, device)?)?;
            let hidden = Tensor::zeros((POSITIONS, SIZES.hidden), DType::F32, device)?;
            let several = token_ids.reshape((POSITIONS, 1))?;
            let entropy = ScoreOptions::new().with_entropy(true);
            for result in [
                layer.log_prob(&hidden, &token_ids).map(|_| ()),
                layer.score(&hidden, &token_ids, &ScoreOptions::new()).map(|_| ()),
                layer.score(&hidden, &several, &entropy).map(|_| ()),
            ] {
                let error = result.expect_err("an id outside");
                let is_right = matches!(error, Error::Target { argument: "token_ids", position: 2, got: -100, vocab_size: 7 });
                assert!(is_right, "{head:?}: {error:?}");
                assert_eq!(error.to_string(), "token_ids: -100 at position 2 is not in 0..7, the vocabulary");
            }
        }
        Ok(())
    }

    fn an_evaluation_says_that_it_has_no_gradients(device: &Device) -> Result<()> {
        for reduction in [Reduction::Mean, Reduction::Sum] {
            let options = LossOptions::evaluation().with_reduction(reduction);
            for (head, loss) in losses(device, &targets(device)?, &options)? {
                let loss = loss?;
                assert_config(loss.backward().map(|_| ()), "loss", &["a training step", "evaluation()"]);
                let penalty = loss.value.zeros_like()?;
                assert_config(loss.backward_with(&penalty).map(|_| ()), "loss", &["evaluation()"]);
                assert_config(GradientSum::new().add(&loss), "loss", &["evaluation()"]);
                let training = LossOptions::new().with_reduction(reduction);
                let case = case(head);
                let layer = Layer::new(&case, &case.variables(DType::F32, device)?)?;
                assert!(layer.loss(&targets(device)?, &training)?.backward().is_ok(), "{head:?}");
            }
        }
        // Without positions, there are no gradients in any case.
        let nothing = Tensor::zeros(0, DType::F32, device)?;
        let no_targets = Tensor::zeros(0, DType::U32, device)?;
        assert!(Loss::from_nll(&nothing, &no_targets, &LossOptions::evaluation())?.backward().is_ok());
        let nll = Tensor::ones(POSITIONS, DType::F32, device)?;
        let loss = Loss::from_nll(&nll, &targets(device)?, &LossOptions::evaluation())?;
        assert_config(loss.backward().map(|_| ()), "loss", &["evaluation()"]);
        Ok(())
    }

    fn weights_of_another_length_are_refused(device: &Device) -> Result<()> {
        let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, device);
        for shape in [&[POSITIONS - 1][..], &[POSITIONS, 1], &[]] {
            let options = LossOptions::new().with_position_weights(ones(shape)?);
            for (_, loss) in losses(device, &targets(device)?, &options)? {
                assert_shape(loss, "position_weights", &["[4]", &format!("{shape:?}")]);
            }
        }
        for shape in [&[SIZES.vocab + 1][..], &[1, SIZES.vocab], &[]] {
            let options = LossOptions::new().with_class_weights(ones(shape)?);
            for (_, loss) in losses(device, &targets(device)?, &options)? {
                assert_shape(loss, "class_weights", &["[7]", &format!("{shape:?}")]);
            }
        }
        Ok(())
    }

    fn weights_of_an_integer_dtype_are_refused(device: &Device) -> Result<()> {
        let ones = |length| Tensor::ones(length, DType::U32, device);
        let options = LossOptions::new().with_position_weights(ones(POSITIONS)?);
        for (_, loss) in losses(device, &targets(device)?, &options)? {
            assert_dtype(loss, "position_weights", &["f32", "U32"]);
        }
        let options = LossOptions::new().with_class_weights(ones(SIZES.vocab)?);
        for (_, loss) in losses(device, &targets(device)?, &options)? {
            assert_dtype(loss, "class_weights", &["f32", "U32"]);
        }
        Ok(())
    }

    fn options_out_of_range_are_refused(device: &Device) -> Result<()> {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        type With = fn(LossOptions, f64) -> LossOptions;
        let cases: [(&str, With, &[f64]); 2] = [
            ("label_smoothing", LossOptions::with_label_smoothing, &[-0.1, 1.0, 1.5, inf, nan]),
            ("z_loss", LossOptions::with_z_loss, &[-1e-4, -inf, inf, nan]),
        ];
        for (name, with, values) in cases {
            for &value in values {
                for base in [LossOptions::new(), LossOptions::evaluation()] {
                    for (_, loss) in losses(device, &targets(device)?, &with(base.clone(), value))? {
                        assert_config(loss, name, &["expected", &format!("got {value}")]);
                    }
                }
            }
        }
        Ok(())
    }

    fn the_error_names_the_least_workspace_and_it_is_enough(device: &Device) -> Result<()> {
        for base in [LossOptions::new(), LossOptions::evaluation()] {
            for (head, loss) in losses(device, &targets(device)?, &base.clone().with_workspace_bytes(5))? {
                let error = loss.expect_err("five bytes are not enough");
                let Error::Workspace { least, fixed, got: 5, .. } = error else { panic!("{head:?}: {error:?}") };
                assert!(fixed < least, "{fixed} {least}");
                let parts = format!("at least {least} ({fixed} fixed, {} for one position), got 5", least - fixed);
                assert_message(&error, &["workspace_bytes", &parts]);
                let case = case(head);
                let tensors = case.variables(DType::F32, device)?;
                let ask = |bytes| {
                    Layer::new(&case, &tensors)?.loss(&targets(device)?, &base.clone().with_workspace_bytes(bytes))
                };
                assert!(ask(least).is_ok(), "{head:?}: {least} bytes are enough");
                let short = ask(least - 1).expect_err("one byte less is not enough");
                assert!(matches!(short, Error::Workspace { least: l, got, .. } if l == least && got == least - 1));
            }
        }
        Ok(())
    }

    fn a_refused_call_does_not_change_the_head(device: &Device) -> Result<()> {
        for head in ENTRIES {
            let case = case(head);
            let layer = Layer::new(&case, &case.variables(DType::F32, device)?)?;
            let (good, bad) = (case.target_tensor(device)?, Tensor::new(&[0, 1, 2, 99_i64], device)?);
            let before = numbers(&layer.loss(&good, &LossOptions::new())?.value);
            // A GPU may check the targets only when a result is read back.
            let refusal = layer.loss(&bad, &LossOptions::new()).and_then(|loss| loss.sum_and_count());
            assert!(matches!(refusal, Err(Error::Target { argument: "targets", position: 3, got: 99, vocab_size: 7 })), "{refusal:?}");
            assert_eq!(numbers(&layer.loss(&good, &LossOptions::new())?.value), before);
        }
        Ok(())
    }
}

#[test]
fn hidden_states_of_another_size_are_told_what_they_are_compared_with() -> Result<()> {
    // A transposed weight: [hidden, vocab].
    let (hidden, ids) = (zeros(&[4, 5]), Tensor::zeros(4, DType::U32, &Device::Cpu)?);
    let softmax = SoftmaxHead::from_tensors(zeros(&[5, 7]), None)?;
    let parts = ["[.., 7]", "the decoder's weight [5, 7]", "[4, 5]"];
    assert_shape(softmax.loss(&hidden, &ids, &LossOptions::new()), "hidden", &parts);
    assert_shape(softmax.log_probs(&hidden), "hidden", &parts);
    let weight = zeros(&[5, 7]);
    let loss = linear_cross_entropy(&hidden, &weight, None, &ids, &LossOptions::new());
    assert_shape(loss, "hidden", &["[.., 7]", "weight [5, 7]", "[4, 5]"]);
    // The decoder's width is not that of hidden states.
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let mixture = MixtureOfSoftmaxes::new(&MixtureConfig::new(6, 7, 3).with_context_dim(5), vb.clone())?;
    assert_shape(mixture.log_probs(&hidden), "hidden", &["[.., 6]", "hidden_size of the projection", "[4, 5]"]);
    let adaptive = AdaptiveSoftmax::new(&AdaptiveConfig::new(6, 7, vec![3]), vb.clone())?;
    assert_shape(adaptive.log_probs(&hidden), "hidden", &["[.., 6]", "projection [1, 6]", "[4, 5]"]);
    let hierarchical = HierarchicalSoftmax::new(&HierarchicalConfig::new(6, 7), vb)?;
    assert_shape(hierarchical.log_probs(&hidden), "hidden", &["[.., 6]", "weight [2, 6]", "[4, 5]"]);
    Ok(())
}

#[test]
fn sizes_of_zero_are_refused() {
    let variables = VarMap::new();
    let vb = || VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    assert_config(SoftmaxHead::new(&SoftmaxConfig::new(0, 7), vb()), "hidden_size", &["got 0"]);
    assert_config(SoftmaxHead::new(&SoftmaxConfig::new(5, 0), vb()), "vocab_size", &["got 0"]);
    let configs = [
        ("hidden_size", MixtureConfig::new(0, 7, 2).with_context_dim(3)),
        ("context_dim", MixtureConfig::new(5, 7, 2).with_context_dim(0)),
        ("vocab_size", MixtureConfig::new(5, 0, 2).with_context_dim(3)),
        ("components", MixtureConfig::new(5, 7, 0).with_context_dim(3)),
    ];
    for (name, config) in configs {
        assert_config(MixtureOfContexts::new(&config, vb()), name, &["got 0"]);
        assert_config(MixtureOfSoftmaxes::new(&config, vb()), name, &["got 0"]);
    }
    assert!(variables.all_vars().is_empty(), "a refused head leaves no variables");
}

#[test]
fn tensors_with_a_dimension_of_zero_are_refused() {
    assert!(matches!(
        SoftmaxHead::from_tensors(zeros(&[0, 5]), None),
        Err(Error::Config { argument: "vocab_size", .. })
    ));
    assert!(SoftmaxHead::from_tensors(zeros(&[7, 0]), None).is_err());
    let mixture = |contexts: &[usize], weight: &[usize]| {
        let log_priors = zeros(&contexts[..2]);
        Mixture::new(&zeros(contexts), Some(&log_priors), &zeros(weight), None)
    };
    assert_config(mixture(&[4, 0, 3], &[7, 3]), "components", &["got 0"]);
    assert_config(mixture(&[4, 2, 0], &[7, 0]), "context_dim", &["got 0"]);
    assert_config(mixture(&[4, 2, 3], &[0, 3]), "vocab_size", &["got 0"]);
    assert!(both(|t| t.prior_weight = zeros(&[0, 5])).iter().all(Result::is_err));
}

#[test]
fn dropout_out_of_range_is_refused() {
    for dropout in [-0.1, 1.0, f64::NAN] {
        let got = format!("got {dropout}");
        let variables = VarMap::new();
        let vb = || VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
        let config = MixtureConfig::new(5, 7, 2).with_context_dim(3).with_dropout(dropout);
        assert_config(MixtureOfContexts::new(&config, vb()), "dropout", &[&got]);
        assert_config(MixtureOfSoftmaxes::new(&config, vb()), "dropout", &[&got]);
        let head = MixtureOfSoftmaxes::from_tensors(parameters(), ContextActivation::Tanh).expect("a head");
        assert_config(head.with_dropout(dropout), "dropout", &[&got]);
    }
}

#[test]
fn parameters_that_do_not_fit_each_other_are_refused() {
    type Change = fn(&mut MixtureTensors);
    let cases: [(&str, Change, &[&str]); 7] = [
        ("prior.weight", |t| t.prior_weight = zeros(&[2]), &["[2]"]),
        ("prior.bias", |t| t.prior_bias = Some(zeros(&[3])), &["[2]", "[3]"]),
        ("latent.weight", |t| t.latent_weight = zeros(&[5, 5]), &["[6, 5]", "[5, 5]"]),
        ("latent.bias", |t| t.latent_bias = zeros(&[5]), &["[6]", "[5]"]),
        ("latent.weight", |t| t.decoder_weight = zeros(&[7, 4]), &["[8, 5]", "[6, 5]"]),
        ("decoder.weight", |t| t.decoder_weight = zeros(&[7]), &["[7]"]),
        ("decoder.bias", |t| t.decoder_bias = Some(zeros(&[3])), &["[7]", "[3]"]),
    ];
    for (name, change, parts) in cases {
        both(change).into_iter().for_each(|head| assert_shape(head, name, parts));
    }
    assert!(both(|_| ()).iter().all(Result::is_ok), "they fit each other unchanged");
    assert_shape(SoftmaxHead::from_tensors(zeros(&[7]), None), "decoder.weight", &["[7]"]);
    assert_shape(SoftmaxHead::from_tensors(zeros(&[7, 5]), Some(zeros(&[5]))), "decoder.bias", &["[7]", "[5]"]);
}

#[test]
fn parameters_of_different_dtypes_are_refused() {
    let hidden = zeros(&[4, 5]);
    let double = |tensor: &Tensor| tensor.to_dtype(DType::F64).expect("f64");
    let changes: [fn(&mut MixtureTensors, Tensor); 3] = [
        |t, double| t.prior_weight = double,
        |t, double| t.latent_weight = double,
        |t, double| t.decoder_weight = double,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let fitting = parameters();
        let tensor = [&fitting.prior_weight, &fitting.latent_weight, &fitting.decoder_weight][i];
        for head in both(|t| change(t, double(tensor))) {
            let error = match head {
                Err(error) => error,
                Ok(head) => head.log_probs(&hidden).expect_err("mixed dtypes"),
            };
            assert!(matches!(error, Error::DType { .. }), "parameter {i}: {error:?}");
            assert_message(&error, &["F64", "F32"]);
        }
    }
}

#[test]
fn an_embedding_of_another_shape_is_refused() {
    let variables = VarMap::new();
    let vb = || VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let embedding = Embedding::new(zeros(&[7, 4]), 4);
    let got = ["[7, 4]"];
    let mixture = MixtureConfig::new(5, 7, 2).with_context_dim(3);
    let [softmax, mixed] = [["[7, 5]"], ["[7, 3]"]].map(|expected| [expected, got].concat());
    assert_shape(SoftmaxHead::tied(&SoftmaxConfig::new(5, 7), &embedding, vb()), "embedding", &softmax);
    assert_shape(MixtureOfContexts::tied(&mixture, &embedding, vb()), "embedding", &mixed);
    assert_shape(MixtureOfSoftmaxes::tied(&mixture, &embedding, vb()), "embedding", &mixed);
}

#[test]
fn operands_of_a_mixture_that_do_not_fit_are_refused() {
    let (contexts, log_priors) = (zeros(&[4, 2, 3]), zeros(&[4, 2]));
    let (weight, bias) = (zeros(&[7, 3]), zeros(&[7]));
    let half = |tensor: &Tensor| tensor.to_dtype(DType::F16).expect("f16");
    let long = |tensor: &Tensor| tensor.to_dtype(DType::I64).expect("i64");
    assert!(Mixture::new(&contexts, Some(&log_priors), &weight, Some(&bias)).is_ok());
    assert_shape(Mixture::new(&zeros(&[3]), None, &weight, None), "contexts", &["[3]"]);
    assert_shape(Mixture::new(&contexts, Some(&zeros(&[4, 3])), &weight, None), "log_priors", &["[4, 2]", "[4, 3]"]);
    assert_shape(Mixture::new(&contexts, Some(&log_priors), &zeros(&[7, 4]), None), "weight", &["3", "[7, 4]"]);
    assert_shape(Mixture::new(&contexts, Some(&log_priors), &weight, Some(&zeros(&[3]))), "bias", &["[7]", "[3]"]);
    assert_config(Mixture::new(&contexts, None, &weight, None), "log_priors", &["none"]);
    assert_dtype(Mixture::new(&contexts, Some(&log_priors), &half(&weight), None), "weight", &["F32", "F16"]);
    assert_dtype(Mixture::new(&contexts, Some(&long(&log_priors)), &weight, None), "log_priors", &["f32", "I64"]);
    assert_dtype(Mixture::new(&contexts, Some(&log_priors), &weight, Some(&long(&bias))), "bias", &["f32", "I64"]);
    assert_dtype(Mixture::new(&long(&contexts), Some(&log_priors), &long(&weight), None), "contexts", &["f32", "I64"]);
}

/// A tensor of one element that claims to have this shape.
fn broadcast(shape: &[usize]) -> Tensor {
    zeros(&[]).broadcast_as(shape).expect("a broadcast")
}

#[test]
fn sizes_that_no_machine_holds_are_refused() {
    let variables = VarMap::new();
    let vb = || VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let huge = usize::MAX / 2;
    assert_config(SoftmaxHead::new(&SoftmaxConfig::new(4, huge), vb()), "vocab_size", &["got 9223372036854775807"]);
    assert_config(SoftmaxHead::new(&SoftmaxConfig::new(4, 1 << 32), vb()), "vocab_size", &["4294967295", "4294967296"]);
    // 2^62 x 4 is 0 in 64 bits.
    assert_config(
        SoftmaxHead::new(&SoftmaxConfig::new(1 << 62, 4), vb()),
        "vocab_size * hidden_size",
        &["4 * 46116860184"],
    );
    let products = "components * context_dim * hidden_size";
    let configs = [
        ("vocab_size", MixtureConfig::new(4, huge, 2)),
        ("vocab_size * context_dim", MixtureConfig::new(4, 16, 2).with_context_dim(1 << 60)),
        (products, MixtureConfig::new(1 << 62, 7, 2).with_context_dim(2)),
        // 2^61 + 1 components of 8 rows each are 8 rows in 64 bits.
        (products, MixtureConfig::new(8, 7, (1 << 61) + 1).with_context_dim(8)),
        (products, MixtureConfig::new(1 << 17, 7, 1 << 24).with_context_dim(1)),
    ];
    for (name, config) in configs {
        assert_config(MixtureOfContexts::new(&config, vb()), name, &["at most"]);
        assert_config(MixtureOfSoftmaxes::new(&config, vb()), name, &["at most"]);
        assert_config(config.similar_components(&zeros(&[6, 5]), 0.5), name, &["at most"]);
    }
    assert!(variables.all_vars().is_empty(), "a refused head leaves no variables");
}

/// The error of one element of a list says which it is.
#[test]
fn an_element_of_a_list_is_named_by_its_index() {
    assert_config(NoiseDistribution::unigram(&[1.0, 2.0, -1.0]), "counts", &["at least 0, got -1 at index 2"]);
    assert_config(NoiseDistribution::unigram(&[f64::NAN, 1.0]), "counts", &["got NaN at index 0"]);
    assert_config(NoiseDistribution::unigram(&[0.0; 3]), "counts", &["a positive, finite sum, got 0"]);
    assert_config(Classes::from_frequencies(&[1.0, f64::NAN], 2), "frequencies", &["got NaN at index 1"]);
    let vb = || VarBuilder::zeros(DType::F32, &Device::Cpu);
    let adaptive = |cutoffs: &[usize]| AdaptiveSoftmax::new(&AdaptiveConfig::new(8, 100, cutoffs.to_vec()), vb());
    assert_config(adaptive(&[]), "cutoffs", &["got none"]);
    assert_config(adaptive(&[10, 20, 20]), "cutoffs", &["got 20 at index 2 of [10, 20, 20]"]);
    assert_config(adaptive(&[10, 100]), "cutoffs", &["below vocab_size 100, got 100 at index 1"]);
    assert_config(adaptive(&[0, 5]), "cutoffs", &["got 0 at index 0"]);
    let config = CharCnnConfig::new(8).with_alphabet("abc");
    assert_config(CharCnn::new(&config, &["ab", "c", "ad"], vb()), "spellings", &["'d' in \"ad\" at index 2"]);
    let cnn = CharCnn::new(&config, &["ab", "c"], vb()).expect("letters of the alphabet");
    assert_config(cnn.rows_of_spellings(&["a", "x"]), "spellings", &["'x' in \"x\" at index 1"]);
    let filters = config.with_filters(&[(1, 4), (2, 4), (1, 8)]);
    assert_config(CharCnn::new(&filters, &["ab"], vb()), "filters", &["got (1, 8) at index 2"]);
    let noise = NoiseDistribution::unigram(&[1.0, 0.0, 1.0]).and_then(|noise| noise.draw(1, 1)).expect("negatives");
    let head = SoftmaxHead::from_tensors(zeros(&[3, 2]), None).expect("a head");
    let targets = Tensor::new(&[2u32, 0, 1], &Device::Cpu).expect("targets");
    let loss = head.loss(&zeros(&[3, 2]), &targets, &LossOptions::new().with_nce(noise));
    assert_config(loss, "noise", &["the target 1 at position 2"]);
}

#[test]
fn two_levels_that_no_machine_holds_are_refused() {
    let variables = VarMap::new();
    let vb = || VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let adaptive = |hidden, vocab, cutoffs: &[usize]| {
        let config = AdaptiveConfig::new(hidden, vocab, cutoffs.to_vec()).with_div_value(1.0);
        // Not 0, as it is in 64 bits.
        assert!(config.head_size() > cutoffs.len());
        AdaptiveSoftmax::new(&config, vb())
    };
    assert_config(adaptive(4, usize::MAX, &[10]), "vocab_size", &["got 18446744073709551615"]);
    assert_config(adaptive(4, 7, &[usize::MAX]), "cutoffs", &["18446744073709551615"]);
    assert_config(adaptive(1 << 62, 4, &[2]), "vocab_size * hidden_size", &["at most", "4 * 4611686018427387904"]);
    assert_config(adaptive(1 << 32, 4, &[2]), "context_dim * hidden_size", &["at most", "4294967296 * 4294967296"]);
    let hierarchical = |config| HierarchicalSoftmax::new(&config, vb());
    assert_config(hierarchical(HierarchicalConfig::new(4, usize::MAX)), "vocab_size", &["got 18446744073709551615"]);
    assert_config(hierarchical(HierarchicalConfig::new(1 << 62, 4)), "vocab_size * hidden_size", &["at most"]);
    // A variable for each class.
    let classes = HierarchicalConfig::new(4, 1 << 31).with_classes(Classes::Consecutive(1 << 31));
    assert_config(classes.class_count(), "classes", &["at most", "got 2147483648"]);
    assert_config(hierarchical(classes), "classes", &["at most", "got 2147483648"]);
    assert!(variables.all_vars().is_empty(), "a refused head leaves no variables");
}

#[test]
fn tensors_whose_elements_overflow_are_refused() {
    let (hidden, targets) = (zeros(&[2, 4]), Tensor::zeros(2, DType::U32, &Device::Cpu).expect("zeros"));
    let options = LossOptions::new();
    // Both have 0 elements in 64 bits; the first is contiguous, the second one row again and again.
    for weight in [zeros(&[1 << 62, 4]), zeros(&[1, 4]).broadcast_as((1 << 62, 4)).expect("a broadcast")] {
        let shape = ["at most", "[4611686018427387904, 4]"];
        assert_shape(SoftmaxHead::from_tensors(weight.clone(), None), "decoder.weight", &shape);
        assert_shape(linear_cross_entropy(&hidden, &weight, None, &targets, &options), "weight", &shape);
        assert_shape(Mixture::new(&zeros(&[2, 1, 4]), None, &weight, None), "weight", &shape);
        let linear = candle_nn::Linear::new(weight.clone(), None);
        assert_shape(SoftmaxHead::try_from(linear), "decoder.weight", &shape);
        type Change = fn(&mut MixtureTensors, Tensor);
        let changes: [(&str, Change); 3] = [
            ("prior.weight", |t, weight| t.prior_weight = weight),
            ("latent.weight", |t, weight| t.latent_weight = weight),
            ("decoder.weight", |t, weight| t.decoder_weight = weight),
        ];
        for (name, change) in changes {
            both(|t| change(t, weight.clone())).into_iter().for_each(|head| assert_shape(head, name, &shape));
        }
        let head = SoftmaxHead::from_tensors(zeros(&[7, 4]), None).expect("a head");
        assert_shape(head.log_probs(&weight), "hidden", &shape);
        assert_shape(head.loss(&weight, &targets, &options), "hidden", &shape);
        assert_shape(head.loss(&hidden, &weight, &options), "targets", &["[2]", "[4611686018427387904, 4]"]);
        let mixed = MixtureOfSoftmaxes::from_tensors(parameters(), ContextActivation::Tanh).expect("a head");
        assert_shape(mixed.log_probs(&broadcast(&[1 << 62, 4, 5])), "hidden", &["at most"]);
        assert_shape(TopK::from_log_probs(&weight, 1), "log_probs", &shape);
        let sampler = Sampler::new(Sampling::new(), 1);
        assert_shape(sampler.expect("a sampler").sample(&weight), "log_probs", &shape);
    }
    let (wide, tall) = (broadcast(&[1 << 62, 4]), broadcast(&[10, 1 << 62]));
    assert_shape(LowRankAdapter::from_tensors(wide, tall, 1.0), "lora_A", &["at most"]);
    let (low, tall) = (zeros(&[1 << 9, 4]), broadcast(&[u32::MAX as usize, 1 << 9]));
    assert_shape(LowRankAdapter::from_tensors(low, tall, 1.0), "lora_B", &["at most"]);
    let scalar = |dtype| Tensor::zeros((), dtype, &Device::Cpu).expect("a tensor");
    let mask = scalar(DType::U8).broadcast_as(1 << 62).expect("a broadcast");
    assert_config(AllowedIds::from_mask(&mask), "vocab_size", &["4294967295", "got 4611686018427387904"]);
    let ids = scalar(DType::U32).broadcast_as((2, 1 << 62)).expect("a broadcast");
    let softmax = SoftmaxHead::from_tensors(zeros(&[7, 4]), None).expect("a head");
    assert_shape(softmax.score(&hidden, &ids, &ScoreOptions::new()), "token_ids", &["at most"]);
    let teacher = Teacher::from_top_k(&ids, &broadcast(&[2, 1 << 62]), MissingIds::Zero);
    assert_shape(
        softmax.distill(&hidden, &teacher, &DistillOptions::default()),
        "token_ids of the teacher",
        &["at most"],
    );
    let contexts = broadcast(&[1 << 31, 1 << 31, 1, 4]);
    assert_shape(Mixture::new(&contexts, None, &zeros(&[7, 4]), None), "contexts", &["at most", "[2147483648, "]);
    let weight = broadcast(&[1 << 32, 4]);
    assert_config(
        Mixture::new(&zeros(&[2, 1, 4]), None, &weight, None),
        "vocab_size",
        &["4294967295", "got 4294967296"],
    );
    assert_config(SoftmaxHead::from_tensors(weight, None), "vocab_size", &["4294967295", "got 4294967296"]);
    // A result of more elements than a tensor has, from operands that are small.
    let head = SoftmaxHead::from_tensors(broadcast(&[1 << 20, 1]), None).expect("a head");
    assert_config(head.log_probs(&broadcast(&[1 << 21, 1])), "positions * vocab", &["2097152 * 1048576"]);
    let start = Tensor::zeros((), DType::U32, &Device::Cpu).expect("a tensor").broadcast_as(1 << 62);
    let found =
        BeamSearch::new(0).search(7, &start.expect("a broadcast"), |_, _, _| -> Result<TopK> { unreachable!() });
    assert_shape(found, "start", &["at most", "[4611686018427387904]"]);
}

#[test]
fn a_dimension_of_zero_leaves_no_elements_whatever_the_others() {
    let hidden = zeros(&[1 << 40, 0, 1 << 40, 5]);
    let targets = Tensor::zeros((1 << 40, 0, 1 << 40), DType::U32, &Device::Cpu).expect("zeros");
    let head = SoftmaxHead::from_tensors(zeros(&[7, 5]), None).expect("a head");
    let loss = head.loss(&hidden, &targets, &LossOptions::new()).expect("an empty batch");
    assert_eq!(numbers(&loss.value), [0.0]);
    // Nothing is drawn from, so that no numbers are drawn either.
    let mut sampler = Sampler::new(Sampling::new(), 1).expect("a sampler");
    assert_shape(sampler.sample(&zeros(&[1 << 40, 0])), "log_probs", &["[.., vocab]"]);
    assert_shape(sampler.sample(&zeros(&[1 << 40, 1 << 40, 0])), "log_probs", &["[.., vocab]"]);
    assert_eq!(sampler.uniform(1), Sampler::new(Sampling::new(), 1).expect("a sampler").uniform(1));
}

#[test]
fn log_probabilities_of_no_ids_are_errors() -> Result<()> {
    let log_probs = Tensor::zeros((2, 0), DType::F32, &Device::Cpu)?;
    for ids in [vec![2], vec![2, 0]] {
        let ids = Tensor::zeros(ids, DType::U32, &Device::Cpu)?;
        let options = ScoreOptions::new();
        let all = [
            options.clone(),
            options.clone().with_is_argmax(true),
            options.clone().with_temperature(2.0),
            options.clone().with_entropy(true),
            options.with_outside(true).with_collision(true),
        ];
        for options in all {
            assert_config(Scores::from_log_probs(&log_probs, &ids, &options), "vocab_size", &["got 0"]);
        }
    }
    Ok(())
}

/// Log-probabilities that are given are floats: every function of them says so.
#[test]
fn log_probabilities_that_are_integers_are_errors() -> Result<()> {
    let (log_probs, ids) =
        (Tensor::zeros((2, 3), DType::I64, &Device::Cpu)?, Tensor::zeros(2, DType::U32, &Device::Cpu)?);
    let parts = ["f16, bf16, f32 or f64", "I64"];
    assert_dtype(Scores::from_log_probs(&log_probs, &ids, &ScoreOptions::new()), "log_probs", &parts);
    assert_dtype(TopK::from_log_probs(&log_probs, 1), "log_probs", &parts);
    assert_dtype(Sampler::new(Sampling::new(), 1)?.sample(&log_probs), "log_probs", &parts);
    let request = TokenRequest::new(Sampling::new(), 1)?;
    assert_dtype(NextToken::from_log_probs(&log_probs, &[&request, &request]), "log_probs", &parts);
    Ok(())
}
