//! Every parameter of every head gets the right gradient: against the `f64` reference, against central differences of
//! the library's own loss, and for any upstream gradient.

mod common;

use std::sync::{Arc, Mutex};

use approx::assert_abs_diff_eq;
use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var, D};
use candle_nn::ops::log_softmax;
use candle_nn::{Embedding, VarBuilder, VarMap};
use common::case::{upstream, weights, Case, Head, Sizes, Tensors, ENTRIES, HEADS};
use common::check::{backward, central_differences, gradients, Check, Gradients, Layer};
use common::compare::{assert_close, Tolerance};
use common::composed::Operands;
use common::objective::Objective;
use common::reference::truth;
use common::values::numbers;
use common::{dtypes, exact, on_each_device};
use mos_head::{
    ContextActivation, Distributions, LossOptions, Mixture, MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes,
    OutputLayer, Reduction, Result, SoftmaxConfig, SoftmaxHead,
};

const SIZES: Sizes = Sizes::new(5, 3, 3, 7);
const REDUCTIONS: [Reduction; 3] = [Reduction::Mean, Reduction::Sum, Reduction::None];

/// The gradients of every operand of `case`, under `upstream`.
fn found(case: &Case, tensors: &Tensors, objective: &Objective, upstream: &[f64]) -> Result<Gradients> {
    let device = tensors["decoder.weight"].device();
    let options = objective.options(&case.lead, device)?;
    let loss = Layer::new(case, tensors)?.loss(&case.target_tensor(device)?, &options)?;
    Ok(gradients(&backward(&loss.value, upstream)?, tensors))
}

on_each_device! {
    fn every_gradient_of_every_head_equals_the_reference(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for head in ENTRIES {
                for reduction in REDUCTIONS {
                    let case = Case::random(head, Sizes::new(21, 13, 4, 37), &[3, 5], 11);
                    Check::new(dtype).run(&case, &Objective::reduced(reduction), device)?;
                }
            }
        }
        Ok(())
    }

    fn heads_without_biases_and_with_identity_contexts_equal_the_reference(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for head in HEADS {
                let mut case = Case::random(head, Sizes::new(9, 10, 3, 23), &[7], 12).without("decoder.bias");
                Check::new(dtype).run(&case, &Objective::default(), device)?;
                if head != Head::Softmax {
                    case.activation = ContextActivation::Identity;
                    case = case.without("prior.bias");
                    Check::new(dtype).run(&case, &Objective::default(), device)?;
                }
            }
        }
        Ok(())
    }

    fn every_gradient_equals_central_differences(device: &Device) -> Result<()> {
        if exact(device) != DType::F64 {
            return Ok(());
        }
        for head in ENTRIES {
            for reduction in REDUCTIONS {
                let case = Case::random(head, SIZES, &[4], 13);
                let objective = Objective::reduced(reduction);
                let upstream = upstream(if reduction == Reduction::None { 4 } else { 1 }, 1);
                let options = objective.apply(LossOptions::evaluation(), &case.lead, device)?;
                let expected = central_differences(&case, |case| {
                    let layer = Layer::new(case, &case.constants(DType::F64, device)?)?;
                    let value = numbers(&layer.loss(&case.target_tensor(device)?, &options)?.value);
                    Ok(value.iter().zip(&upstream).map(|(a, b)| a * b).sum())
                })?;
                let tensors = case.variables(DType::F64, device)?;
                for (name, gradient) in found(&case, &tensors, &objective, &upstream)? {
                    let gradient = gradient.named(format!("{name} of {head:?}, {reduction:?}"));
                    assert_abs_diff_eq!(gradient, expected[name], epsilon = 1e-8);
                }
            }
        }
        Ok(())
    }

    fn scaling_the_value_scales_every_gradient(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for head in ENTRIES {
            let case = Case::random(head, SIZES, &[6], 14);
            let tensors = case.variables(dtype, device)?;
            let loss = Layer::new(&case, &tensors)?.loss(&case.target_tensor(device)?, &LossOptions::new())?;
            let plain = gradients(&loss.backward()?, &tensors);
            let scaled = gradients(&(&loss.value * 3.7)?.backward()?, &tensors);
            assert_eq!(plain.len(), case.values.len(), "{head:?}: every operand has a gradient");
            for (name, gradient) in scaled {
                let expected: Vec<f64> = plain[name].iter().map(|g| g * 3.7).collect();
                assert_close(name, &gradient, &expected, None, Tolerance::gradient(dtype));
            }
        }
        Ok(())
    }

    fn a_loss_scale_preserves_small_gradients_in_half_precision(device: &Device) -> Result<()> {
        // Gradients of 2^-20 are subnormal in f16. Scaled by 2^20, as in mixed-precision training, they are normal
        // numbers if the scale is applied before the rounding.
        const SCALE: f64 = (1 << 20) as f64;
        let dtype = DType::F16;
        for head in ENTRIES {
            let case = Case::random(head, SIZES, &[10], 23).rounded(dtype)?;
            let tensors = case.variables(dtype, device)?;
            let objective =
                Objective { position_weights: Some(vec![1.0 / SCALE; 10]), ..Objective::reduced(Reduction::Sum) };
            let got = found(&case, &tensors, &objective, &[SCALE])?;
            for (name, expected) in truth(&case, &objective, &[SCALE]).gradients {
                assert_close(&format!("{head:?} {name}"), &got[name], &expected, None, Tolerance::gradient(dtype));
            }
        }
        Ok(())
    }

    fn a_value_inside_a_larger_objective_adds_its_gradient(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for head in ENTRIES {
            let case = Case::random(head, SIZES, &[6], 15);
            let tensors = case.variables(dtype, device)?;
            let loss = Layer::new(&case, &tensors)?.loss(&case.target_tensor(device)?, &LossOptions::new())?;
            let penalty = (tensors["decoder.weight"].sqr()?.sum_all()? * 0.5)?;
            let both = (penalty + (&loss.value * 2.0)?)?.backward()?;
            let plain = gradients(&loss.backward()?, &tensors);
            let weight = &case.values["decoder.weight"];
            let expected: Vec<f64> = plain["decoder.weight"].iter().zip(weight).map(|(g, w)| 2.0 * g + w).collect();
            let got = &gradients(&both, &tensors)["decoder.weight"];
            assert_close("decoder.weight", got, &expected, None, Tolerance::gradient(dtype));
        }
        Ok(())
    }

    fn backward_with_a_penalty_gives_the_gradients_of_the_sum(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for head in ENTRIES {
            let case = Case::random(head, SIZES, &[6], 15);
            let tensors = case.variables(dtype, device)?;
            let loss = Layer::new(&case, &tensors)?.loss(&case.target_tensor(device)?, &LossOptions::new())?;
            let input = if tensors.contains_key("hidden") { "hidden" } else { "contexts" };
            let penalty = (tensors["decoder.weight"].sqr()?.mean_all()? + (tensors[input].sqr()?.mean_all()? * 2.0)?)?;
            let got = gradients(&loss.backward_with(&penalty)?, &tensors);
            let expected = gradients(&(&loss.value + &penalty)?.backward()?, &tensors);
            let plain = gradients(&loss.backward()?, &tensors);
            assert_eq!(got.len(), case.values.len(), "{head:?}: every operand has a gradient");
            for (name, gradient) in got {
                assert_close(name, &gradient, &expected[name], None, Tolerance::gradient(dtype));
                assert_eq!(gradient != plain[name], ["decoder.weight", input].contains(&name), "{head:?} {name}");
            }
            // A penalty of the loss itself.
            let penalty = (loss.value.sqr()? * 0.5)?;
            let expected = gradients(&(&loss.value + &penalty)?.backward()?, &tensors);
            for (name, gradient) in gradients(&loss.backward_with(&penalty)?, &tensors) {
                assert_close(name, &gradient, &expected[name], None, Tolerance::gradient(dtype));
                assert_ne!(gradient, plain[name], "{head:?} {name}");
            }
            let error = loss.backward_with(&tensors["decoder.weight"]).expect_err("not a scalar");
            assert!(error.to_string().contains("penalty"), "{error}");
        }
        Ok(())
    }

    fn backward_twice_gives_the_same(device: &Device) -> Result<()> {
        for head in ENTRIES {
            for reduction in REDUCTIONS {
                let case = Case::random(head, SIZES, &[6], 16);
                let tensors = case.variables(DType::F32, device)?;
                let options = LossOptions::new().with_reduction(reduction);
                let loss = Layer::new(&case, &tensors)?.loss(&case.target_tensor(device)?, &options)?;
                let first = gradients(&loss.backward()?, &tensors);
                let second = gradients(&loss.backward()?, &tensors);
                assert_eq!(first.len(), case.values.len());
                assert_eq!(first, second, "{head:?} {reduction:?}");
            }
        }
        Ok(())
    }

    fn a_loss_gives_the_gradients_that_its_value_gives(device: &Device) -> Result<()> {
        for head in ENTRIES {
            for reduction in REDUCTIONS {
                let case = Case::random(head, SIZES, &[6], 17);
                let mut tensors = case.variables(DType::F32, device)?;
                let options = LossOptions::new().with_reduction(reduction);
                let decoder = tensors["decoder.weight"].clone();
                // The decoder is a variable; computed from one; a variable that is used elsewhere too.
                for (name, use_of_decoder) in [("leaf", 0), ("computed", 1), ("tied", 2)] {
                    if use_of_decoder == 1 {
                        tensors.insert("decoder.weight", (&decoder * 2.0)?);
                    } else {
                        tensors.insert("decoder.weight", decoder.clone());
                    }
                    if use_of_decoder == 2 {
                        let shift = decoder.sum_all()?;
                        let input = if tensors.contains_key("hidden") { "hidden" } else { "contexts" };
                        tensors.insert(input, tensors[input].broadcast_add(&shift)?);
                    }
                    let mut loss = Layer::new(&case, &tensors)?.loss(&case.target_tensor(device)?, &options)?;
                    let loss_gradients = loss.backward()?;
                    loss.value = loss.value.sum_all()?;
                    let value_gradients = loss.value.backward()?;
                    tensors.insert("decoder.weight", decoder.clone());
                    let (loss_gradients, value_gradients) = (gradients(&loss_gradients, &tensors), gradients(&value_gradients, &tensors));
                    assert!(loss_gradients.contains_key("decoder.weight"), "{head:?} {name}");
                    assert_eq!(loss_gradients.keys().collect::<Vec<_>>(), value_gradients.keys().collect::<Vec<_>>());
                    for (operand, expected) in &value_gradients {
                        let label = format!("{head:?} {reduction:?} {name} {operand}");
                        assert_close(&label, &loss_gradients[operand], expected, None, Tolerance::gradient(DType::F32));
                    }
                }
            }
        }
        Ok(())
    }

    fn a_backward_pass_within_another_keeps_its_gradients(device: &Device) -> Result<()> {
        // As when both are rayon jobs, and the thread that waits in one steals the other.
        struct Within(Mutex<Option<Tensor>>, Arc<Mutex<Option<GradStore>>>);
        impl CustomOp1 for Within {
            fn name(&self) -> &'static str {
                "within"
            }
            fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
                Ok((storage.try_clone(layout)?, layout.shape().clone()))
            }
            fn bwd(&self, _: &Tensor, _: &Tensor, upstream: &Tensor) -> candle_core::Result<Option<Tensor>> {
                if let Some(other) = self.0.lock().expect("a lock").take() {
                    *self.1.lock().expect("a lock") = Some(other.backward()?);
                }
                Ok(Some(upstream.clone()))
            }
        }
        if !device.is_cpu() {
            return Ok(());
        }
        for head in HEADS {
            let case = Case::random(head, SIZES, &[4], 24);
            let mut tensors = case.variables(DType::F64, device)?;
            let targets = case.target_tensor(device)?;
            let loss = |tensors: &Tensors| Layer::new(&case, tensors)?.loss(&targets, &LossOptions::new());
            let expected = gradients(&loss(&tensors)?.backward()?, &tensors);
            let found = Arc::new(Mutex::new(None));
            let within = Within(Mutex::new(Some(loss(&tensors)?.value)), found.clone());
            let hidden = tensors["hidden"].clone();
            tensors.insert("hidden", hidden.apply_op1(within)?);
            let outer = loss(&tensors)?.backward()?;
            tensors.insert("hidden", hidden);
            assert_eq!(gradients(&outer, &tensors), expected, "{head:?} without");
            let inner = found.lock().expect("a lock").take().expect("a backward pass");
            assert_eq!(gradients(&inner, &tensors), expected, "{head:?} within");
        }
        Ok(())
    }

    fn a_gradient_keeps_no_graph_alive(device: &Device) -> Result<()> {
        for head in ENTRIES {
            for reduction in REDUCTIONS {
                let case = Case::random(head, SIZES, &[4], 25);
                let tensors = case.variables(DType::F32, device)?;
                let layer = Layer::new(&case, &tensors)?;
                let options = LossOptions::new().with_reduction(reduction);
                let loss = layer.loss(&case.target_tensor(device)?, &options)?;
                let log_probs = layer.log_probs()?;
                for store in [loss.backward()?, loss.value.backward()?, log_probs.backward()?] {
                    for (name, tensor) in &tensors {
                        assert!(!store.get(tensor).expect(name).track_op(), "{head:?} {reduction:?} {name}");
                    }
                }
            }
        }
        Ok(())
    }

    fn a_pruned_mixture_gives_the_gradients_of_the_kept_components(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let mut case = Case::random(Head::Mixture, SIZES, &[4], 26);
        // The last component is pruned.
        for priors in case.values.get_mut("log_priors").expect("log_priors").chunks_mut(3) {
            priors.copy_from_slice(&[0.5_f64.ln(), 0.48_f64.ln(), 0.02_f64.ln()]);
        }
        let tensors = case.variables(dtype, device)?;
        let (contexts, log_priors) = (&tensors["contexts"], &tensors["log_priors"]);
        let mixture = |contexts: &Tensor, log_priors: &Tensor| {
            Mixture::new(contexts, Some(log_priors), &tensors["decoder.weight"], tensors.get("decoder.bias"))
        };
        let pruned = mixture(contexts, log_priors)?.prune(0.1)?.mixture;
        let kept = log_softmax(&log_priors.narrow(1, 0, 2)?, D::Minus1)?;
        let expected = mixture(&contexts.narrow(1, 0, 2)?, &kept)?;
        let targets = case.target_tensor(device)?;
        let ask = |mixture: Mixture| -> Result<_> {
            Ok(gradients(&mixture.loss(&targets, &LossOptions::new())?.backward()?, &tensors))
        };
        let (found, expected) = (ask(pruned)?, ask(expected)?);
        for (name, truth) in &expected {
            assert!(truth.iter().any(|&g| g != 0.0), "{name}");
            let got = found.get(name).unwrap_or_else(|| panic!("no gradient of {name}"));
            assert_close(name, got, truth, None, Tolerance::gradient(dtype));
        }
        Ok(())
    }

    fn frozen_operands_get_no_gradient_and_change_no_other(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for head in ENTRIES {
            for reduction in REDUCTIONS {
                let case = Case::random(head, SIZES, &[6], 18);
                let objective = Objective { label_smoothing: 0.1, z_loss: 0.01, ..Objective::reduced(reduction) };
                let upstream = upstream(if reduction == Reduction::None { 6 } else { 1 }, 2);
                let free = case.variables(dtype, device)?;
                let all = found(&case, &free, &objective, &upstream)?;
                let fixed = case.constants(dtype, device)?;
                let names: Vec<&str> = case.values.keys().copied().collect();
                // Every non-empty set of frozen operands except all of them.
                for frozen in 1..(1_usize << names.len()) - 1 {
                    let is_frozen = |name: &str| frozen >> names.iter().position(|n| *n == name).expect(name) & 1 == 1;
                    let choose = |name: &'static str| {
                        let from = if is_frozen(name) { &fixed } else { &free };
                        (name, from[name].clone())
                    };
                    let tensors: Tensors = free.keys().map(|name| choose(name)).collect();
                    let some = found(&case, &tensors, &objective, &upstream)?;
                    for (&name, expected) in &all {
                        let Some(got) = some.get(name) else {
                            assert!(is_frozen(name), "{head:?}: {name} has no gradient with {frozen:b} frozen");
                            continue;
                        };
                        assert!(!is_frozen(name), "{head:?}: {name} has a gradient with {frozen:b} frozen");
                        assert_close(name, got, expected, None, Tolerance::gradient(dtype));
                    }
                }
            }
        }
        Ok(())
    }

    fn layers_before_the_head_get_their_gradients(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for head in HEADS {
            let case = Case::random(head, SIZES, &[6], 19);
            let mut tensors = case.variables(dtype, device)?;
            let half = Var::from_tensor(&(&tensors["hidden"] * 0.5)?)?;
            tensors.insert("hidden", (half.as_tensor() * 2.0)?);
            let loss = Layer::new(&case, &tensors)?.loss(&case.target_tensor(device)?, &LossOptions::new())?;
            let store = loss.backward()?;
            let got = numbers(store.get(half.as_tensor()).expect("a gradient before the head"));
            let expected: Vec<f64> = truth(&case, &Objective::default(), &[2.0]).gradients["hidden"].clone();
            assert_close("before the head", &got, &expected, None, Tolerance::gradient(dtype));
        }
        Ok(())
    }

    fn a_tied_embedding_gets_the_gradients_of_both_uses(device: &Device) -> Result<()> {
        let dtype = exact(device);
        const WIDTH: usize = 4;
        let ids = [3_u32, 0, 3, 6, 1];
        for head in HEADS {
            let mut case = Case::random(head, Sizes::new(WIDTH, WIDTH, 3, 7), &[ids.len()], 20);
            let matrix = case.values["decoder.weight"].clone();
            let row = |&id: &u32| matrix[id as usize * WIDTH..][..WIDTH].to_vec();
            case.values.insert("hidden", ids.iter().flat_map(row).collect());

            let embedding = Var::from_tensor(&case.constants(dtype, device)?["decoder.weight"])?;
            let embedding = Embedding::new(embedding.into_inner(), WIDTH);
            let variables = VarMap::new();
            let layer = tied(&case, &embedding, VarBuilder::from_varmap(&variables, dtype, device))?;
            for (name, variable) in variables.data().lock().expect("the variables").iter() {
                let values = Tensor::from_slice(&case.values[name.as_str()], variable.dims(), &Device::Cpu)?;
                variable.set(&values.to_dtype(dtype)?.to_device(device)?)?;
            }
            let hidden = embedding.embeddings().index_select(&Tensor::new(&ids, device)?, 0)?;
            let loss = layer.loss(&hidden, &case.target_tensor(device)?, &LossOptions::new())?;

            let truth = truth(&case, &Objective::default(), &[1.0]);
            let mut expected = truth.gradients["decoder.weight"].clone();
            for (id, slopes) in ids.iter().zip(truth.gradients["hidden"].chunks(WIDTH)) {
                let row = &mut expected[*id as usize * WIDTH..][..WIDTH];
                row.iter_mut().zip(slopes).for_each(|(x, s)| *x += s);
            }
            let store = loss.backward()?;
            let got = numbers(store.get(embedding.embeddings()).expect("a gradient of the embedding"));
            assert_close(&format!("{head:?}"), &got, &expected, None, Tolerance::gradient(dtype));
        }
        Ok(())
    }

    fn log_probs_is_differentiable(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for head in ENTRIES {
                let case = Case::random(head, SIZES, &[2, 3], 21).rounded(dtype)?;
                let upstream = upstream(6 * SIZES.vocab, 3);
                let composed = |dtype| -> Result<_> {
                    let tensors = case.variables(dtype, &Device::Cpu)?;
                    let operands = Operands::project(head, &tensors, case.activation)?;
                    Ok(gradients(&backward(&operands.log_probs(case.logits)?.0, &upstream)?, &tensors))
                };
                let (truth, rounded) = (composed(DType::F64)?, composed(dtype)?);
                let tensors = case.variables(dtype, device)?;
                let log_probs = Layer::new(&case, &tensors)?.log_probs()?;
                let found = gradients(&backward(&log_probs, &upstream)?, &tensors);
                for (name, truth) in &truth {
                    let got = found.get(name).unwrap_or_else(|| panic!("{head:?}: no gradient of {name}"));
                    let rounded = Some(&*rounded[name]);
                    assert_close(&format!("{head:?} {name}"), got, truth, rounded, Tolerance::gradient(dtype));
                }
            }
        }
        Ok(())
    }

    fn chosen_log_probs_give_the_gradients_of_the_loss(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for head in ENTRIES {
            let case = Case::random(head, SIZES, &[6], 22);
            let tensors = case.variables(dtype, device)?;
            let layer = Layer::new(&case, &tensors)?;
            let weights = weights(6, 4);
            let objective = Objective::reduced(Reduction::None);
            let expected = found(&case, &tensors, &objective, &weights)?;
            let chosen = layer.log_probs()?.gather(&case.target_tensor(device)?.unsqueeze(1)?, 1)?.squeeze(1)?;
            let got = gradients(&backward(&chosen.neg()?, &weights)?, &tensors);
            for (name, expected) in expected {
                assert_close(name, &got[name], &expected, None, Tolerance::gradient(dtype));
            }
        }
        Ok(())
    }
}

/// The head of `case` with its decoder tied to `embedding`; the rest comes from `vb`.
fn tied(case: &Case, embedding: &Embedding, vb: VarBuilder) -> Result<Box<dyn OutputLayer>> {
    let Sizes { hidden, context, components, vocab } = case.sizes;
    let mixture = MixtureConfig::new(hidden, vocab, components).with_context_dim(context).with_prior_bias(true);
    Ok(match case.head {
        Head::MixtureOfContexts => Box::new(MixtureOfContexts::tied(&mixture, embedding, vb)?),
        Head::MixtureOfSoftmaxes => Box::new(MixtureOfSoftmaxes::tied(&mixture, embedding, vb)?),
        _ => Box::new(SoftmaxHead::tied(&SoftmaxConfig::new(hidden, vocab), embedding, vb)?),
    })
}
