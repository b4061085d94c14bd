//! The decoder in all forms that it comes in: a linear layer, a transposed view, a tensor that is computed.

mod common;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Tensor, Var};
use candle_nn::Linear;
use common::case::{upstream, Case, Head, Sizes, ENTRIES, HEADS};
use common::check::{backward, build, gradients, Layer};
use common::compare::{assert_close, Tolerance};
use common::values::{numbers, tensor};
use common::{dtypes, exact, on_each_device};
use mos_head::{
    linear_cross_entropy, ContextActivation, Distributions, DropoutMasks, Error, LossOptions, Mixture, MixtureLayer,
    MixtureOfSoftmaxes, MixtureTensors, OutputLayer, Reduction, Result, SoftmaxHead,
};

on_each_device! {
    fn a_transposed_view_equals_its_copy(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for head in ENTRIES {
                // Few rows and many, and sizes on either side of a tile's.
                let (small, large) = (Sizes::new(7, 6, 3, 33), Sizes::new(9, 70, 2, 401));
                for (rows, sizes) in [(2, small), (70, small), (70, large)] {
                    let case = Case::random(head, sizes, &[rows], 140).rounded(dtype)?;
                    let targets = case.target_tensor(device)?;
                    let copies = case.variables(dtype, device)?;
                    let weight = Var::from_tensor(&copies["decoder.weight"].t()?.contiguous()?)?;
                    let mut views = copies.clone();
                    views.insert("decoder.weight", weight.t()?);
                    let (with_view, with_copy) = (Layer::new(&case, &views)?, Layer::new(&case, &copies)?);
                    let (value, slope) = (Tolerance::value(dtype), Tolerance::gradient(dtype));
                    for reduction in [Reduction::Mean, Reduction::None] {
                        let options = LossOptions::new().with_reduction(reduction).with_label_smoothing(0.1);
                        let (got, expected) = (with_view.loss(&targets, &options)?, with_copy.loss(&targets, &options)?);
                        assert_close("nll", &numbers(&got.nll), &numbers(&expected.nll), None, value);
                        let upstream = upstream(got.value.elem_count(), 4);
                        let (got, expected) = (backward(&got.value, &upstream)?, backward(&expected.value, &upstream)?);
                        let weight_gradient = got.get(&weight).expect("a gradient").t()?;
                        let mut found = gradients(&got, &copies);
                        found.insert("decoder.weight", numbers(&weight_gradient));
                        let expected = gradients(&expected, &copies);
                        assert_eq!(found.len(), expected.len());
                        for (name, expected) in expected {
                            assert_close(name, &found[name], &expected, None, slope);
                        }
                    }
                    let evaluation = LossOptions::evaluation();
                    let (got, expected) = (with_view.loss(&targets, &evaluation)?, with_copy.loss(&targets, &evaluation)?);
                    assert_close("evaluation", &numbers(&got.nll), &numbers(&expected.nll), None, value);
                    let (got, expected) = (with_view.log_probs()?, with_copy.log_probs()?);
                    assert_close("log_probs", &numbers(&got), &numbers(&expected), None, value);
                }
            }
        }
        Ok(())
    }

    fn a_fused_linear_cross_entropy_is_that_of_a_linear_layer(device: &Device) -> Result<()> {
        let hidden = Var::from_tensor(&tensor(&[12, 6], 1, DType::F32)?.to_device(device)?)?;
        let weight = Var::from_tensor(&tensor(&[31, 6], 2, DType::F32)?.to_device(device)?)?;
        let bias = Var::from_tensor(&tensor(&[31], 3, DType::F32)?.to_device(device)?)?;
        let targets = Tensor::new((0..12u32).map(|i| i * 5 % 31).collect::<Vec<_>>(), device)?;
        for bias in [None, Some(&bias)] {
            let linear = Linear::new(weight.as_tensor().clone(), bias.map(|bias| bias.as_tensor().clone()));
            let logits = candle_nn::Module::forward(&linear, &hidden)?;
            let expected = candle_nn::loss::cross_entropy(&logits, &targets)?;
            let bias = bias.map(Var::as_tensor);
            let function_loss = linear_cross_entropy(&hidden, &weight, bias, &targets, &LossOptions::new())?;
            let head = SoftmaxHead::try_from(linear)?;
            assert_eq!((head.weight()?.dims(), head.bias().is_some()), (&[31, 6][..], bias.is_some()));
            let head_loss = head.loss(&hidden, &targets, &LossOptions::new())?;
            for loss in [function_loss, head_loss] {
                let (value, slope) = (Tolerance::value(DType::F32), Tolerance::gradient(DType::F32));
                assert_close("value", &numbers(&loss.value), &numbers(&expected), None, value);
                let (found, expected) = (loss.backward()?, expected.backward()?);
                for variable in [Some(hidden.as_tensor()), Some(weight.as_tensor()), bias].into_iter().flatten() {
                    let (got, truth) = (found.get(variable), expected.get(variable));
                    let (got, truth) = (got.expect("a gradient"), truth.expect("a gradient"));
                    assert_close("gradient", &numbers(got), &numbers(truth), None, slope);
                }
            }
        }
        Ok(())
    }

    /// A head is a module in a model, as the linear layer is whose place it takes.
    fn a_softmax_is_the_module_of_its_logits(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            let on = |shape: &[usize], seed| Ok::<_, Error>(Var::from_tensor(&tensor(shape, seed, dtype)?.to_device(device)?)?);
            let (weight, bias, hidden) = (on(&[33, 7], 1)?, on(&[33], 2)?, on(&[2, 3, 7], 3)?);
            let linear = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
            let head = SoftmaxHead::try_from(linear.clone())?;
            let (logits, expected) = (hidden.apply(&head)?, hidden.apply(&linear)?);
            assert_eq!((logits.dims(), logits.dtype()), (expected.dims(), dtype));
            assert_close("logits", &numbers(&logits), &numbers(&expected), None, Tolerance::value(dtype));
            let (found, expected) = (logits.sqr()?.sum_all()?.backward()?, expected.sqr()?.sum_all()?.backward()?);
            for var in [&weight, &bias, &hidden] {
                let [found, expected] = [&found, &expected].map(|store| numbers(store.get(var).expect("a gradient")));
                assert_close("gradient", &found, &expected, None, Tolerance::gradient(dtype));
            }
            let error = on(&[2, 8], 4)?.apply(&head).unwrap_err().to_string();
            assert!(error.contains("hidden: expected shape [.., 7]"), "{error}");
        }
        Ok(())
    }

    fn a_malformed_linear_layer_is_an_error_that_names_its_weight(device: &Device) -> Result<()> {
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device);
        let bad = [
            (zeros(&[6], DType::F32)?, None, "weight"),
            (zeros(&[6, 6, 6], DType::F32)?, None, "weight"),
            (zeros(&[0, 6], DType::F32)?, None, "vocab"),
            (zeros(&[5, 6], DType::U32)?, None, "weight"),
            (zeros(&[5, 6], DType::F32)?, Some(zeros(&[6], DType::F32)?), "bias"),
        ];
        for (weight, bias, name) in bad {
            let error = SoftmaxHead::try_from(Linear::new(weight, bias)).expect_err("malformed");
            assert!(error.to_string().contains(name), "{error}");
        }
        Ok(())
    }

    fn scales_that_single_precision_does_not_hold_are_refused(device: &Device) -> Result<()> {
        let head = SoftmaxHead::from_tensors(Tensor::zeros((5, 6), DType::F32, device)?, None)?;
        let hidden = Tensor::zeros((2, 6), DType::F32, device)?;
        for bad in [0.0, -1.0, 1e60, 1e-60, f64::INFINITY, f64::NAN] {
            let error = head.clone().with_softcap(bad).expect_err("out of range");
            assert!(matches!(error, Error::Config { argument: "softcap", .. }), "{error:?}");
            let error = head.clone().with_logit_scale(bad).expect_err("out of range");
            assert!(matches!(error, Error::Config { argument: "logit_scale", .. }), "{error:?}");
            let error = head.mixture(&hidden, DropoutMasks::Off)?.with_component_temperature(bad).expect_err("out of range");
            assert!(matches!(error, Error::Config { argument: "component_temperature", .. }), "{error:?}");
        }
        Ok(())
    }

    fn parameters_that_are_no_floats_are_refused_where_they_are_given(device: &Device) -> Result<()> {
        let integers = |shape: &[usize]| Tensor::zeros(shape, DType::U32, device);
        let floats = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device);
        let error = SoftmaxHead::from_tensors(integers(&[5, 6])?, None).expect_err("no floats");
        assert!(matches!(error, Error::DType { argument: "decoder.weight", got: DType::U32, .. }), "{error:?}");
        let error = SoftmaxHead::from_tensors(floats(&[5, 6])?, Some(integers(&[5])?)).expect_err("no floats");
        assert!(matches!(error, Error::DType { argument: "decoder.bias", got: DType::U32, .. }), "{error:?}");
        let tensors = MixtureTensors {
            prior_weight: integers(&[2, 6])?,
            prior_bias: None,
            latent_weight: integers(&[6, 6])?,
            latent_bias: integers(&[6])?,
            decoder_weight: integers(&[5, 3])?,
            decoder_bias: None,
        };
        let error = MixtureOfSoftmaxes::from_tensors(tensors, ContextActivation::Tanh).expect_err("no floats");
        assert!(matches!(error, Error::DType { argument: "decoder.weight", .. }), "{error:?}");
        Ok(())
    }

    fn a_computed_decoder_passes_its_gradient_on(device: &Device) -> Result<()> {
        // A low-rank adapter, W + s B A, beside the same weight as a variable.
        let dtype = exact(device);
        let case = Case::random(Head::MixtureOfSoftmaxes, Sizes::new(5, 6, 3, 29), &[7], 141);
        let targets = case.target_tensor(device)?;
        let mut tensors = case.constants(dtype, device)?;
        let a = Var::from_tensor(&tensor(&[2, 6], 1, dtype)?.to_device(device)?)?;
        let b = Var::from_tensor(&tensor(&[29, 2], 2, dtype)?.to_device(device)?)?;
        let frozen = tensors["decoder.weight"].clone();
        let adapted = (&frozen + (b.matmul(&a)? * 0.5)?)?;
        let whole = Var::from_tensor(&adapted.detach())?;
        let mut loss_of = |weight: &Tensor| {
            tensors.insert("decoder.weight", weight.clone());
            Layer::new(&case, &tensors)?.loss(&targets, &LossOptions::new())
        };
        let found = loss_of(&adapted)?.backward()?;
        let expected = loss_of(&whole)?.backward()?;
        let weight_gradient = expected.get(&whole).expect("a gradient");
        let a_gradient = (b.t()?.matmul(weight_gradient)? * 0.5)?;
        let b_gradient = (weight_gradient.matmul(&a.t()?)? * 0.5)?;
        for (variable, truth) in [(&a, a_gradient), (&b, b_gradient)] {
            let got = found.get(variable).expect("a gradient");
            assert_close("adapter", &numbers(got), &numbers(&truth), None, Tolerance::gradient(dtype));
        }
        Ok(())
    }

    fn tempered_logits_of_half_precision_are_not_rounded_again(device: &Device) -> Result<()> {
        for (dtype, temperature) in [(DType::BF16, 0.7), (DType::F16, 1e-5)] {
            let case = Case::random(Head::Mixture, Sizes::new(8, 16, 3, 40), &[20], 142).rounded(dtype)?;
            let mixture = |dtype| -> Result<Mixture> {
                let tensors = case.constants(dtype, device)?;
                let Layer::Mixture(mixture) = Layer::new(&case, &tensors)? else { unreachable!() };
                mixture.with_component_temperature(temperature)
            };
            let got = numbers(&mixture(dtype)?.log_probs_as(DType::F32)?);
            let expected = numbers(&mixture(exact(device))?.log_probs()?);
            // Both in f32, from the same numbers: what is left is the rounding of the priors.
            let tolerance = Tolerance::value(DType::F32).condition(1e3 / temperature);
            assert_close("log_probs", &got, &expected, None, tolerance);
            if temperature >= 0.1 {
                assert_abs_diff_eq!(got, expected, epsilon = 0.02);
            }
        }
        Ok(())
    }

    fn log_probabilities_of_half_precision_are_given_in_single(device: &Device) -> Result<()> {
        for dtype in [DType::BF16, DType::F16] {
            for head in HEADS {
                let case = Case::random(head, Sizes::new(8, 6, 3, 40), &[5], 143).rounded(dtype)?;
                let tensors = case.variables(dtype, device)?;
                let log_probs = build(&case, &tensors)?.log_probs_as(&tensors["hidden"], DType::F32)?;
                assert_eq!(log_probs.dtype(), DType::F32);
                assert_abs_diff_eq!(numbers(&log_probs.exp()?.sum(1)?), [1.0; 5], epsilon = 1e-5);
                let found = gradients(&backward(&log_probs, &upstream(5 * 40, 6))?, &tensors);
                assert_eq!(found.len(), tensors.len(), "{head:?}");
            }
        }
        Ok(())
    }
}
