//! Losses and log-probabilities of heads with a vocabulary of two levels: against the formula in `f64`, central
//! differences, and PyTorch's `AdaptiveLogSoftmaxWithLoss`.

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use approx::assert_relative_eq;
use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::{VarBuilder, VarMap};
use common::case::{upstream, weights};
use common::check::backward;
use common::factorised::{build, Kind, HIDDEN, KINDS, VOCAB};
use common::objective::Objective;
use common::values::{central_differences, numbers, Numbers, Values};
use common::{dtypes, exact, on, on_each_device};
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{
    ContextActivation, DropoutMasks, Loss, LossOptions, MixtureLayer, MixtureOfSoftmaxes, MixtureTensors, OutputLayer,
    Reduction, Result, SoftmaxHead,
};
use serde_json::Value;

const LEAD: [usize; 2] = [3, 4];
const TARGETS: [i64; 12] = [0, 22, 5, 3, -100, 9, 14, 15, 1, 5, 21, 8];
const POSITIONS: usize = TARGETS.len();

/// Demands that numbers differ by at most a share of the largest, which counts as at least one.
fn assert_near(name: &str, found: &Numbers, expected: &(impl Values + ?Sized), tolerance: f64) {
    assert_relative_eq!(found.clone().named(name), *expected, epsilon = tolerance, max_relative = tolerance);
}

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 5e-3,
        _ => 5e-2,
    }
}

/// Without dropout, which the mixtures have.
fn training() -> LossOptions {
    LossOptions::new().with_dropout(DropoutMasks::Off)
}

fn objectives() -> Vec<Objective> {
    let mut objectives = Vec::new();
    for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
        for has_weights in [false, true] {
            let mut position_weights = weights(POSITIONS, 1);
            position_weights[2] = 0.0;
            objectives.push(Objective {
                reduction,
                ignore_index: Some(-100),
                position_weights: has_weights.then_some(position_weights),
                class_weights: has_weights.then(|| weights(VOCAB, 2)),
                ..Objective::default()
            });
        }
    }
    objectives
}

fn assert_fields(loss: &Loss, kind: Kind, expected: &common::factorised::Expected, tolerance: f64) {
    let near = |field: &str, got: &Tensor, expected: &[f64]| {
        assert_near(&format!("{field} of {kind:?}"), &numbers(got), expected, tolerance);
    };
    near("value", &loss.value, &expected.value);
    near("sum", &loss.sum, &[expected.sum]);
    near("count", &loss.count, &[expected.count]);
    near("nll", &loss.nll, &expected.nll);
    assert_eq!(loss.nll.dims(), LEAD);
    assert!(loss.correct.is_none());
}

on_each_device! {
    fn losses_and_gradients_equal_the_formula(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for (seed, kind) in (0..).zip(KINDS) {
            let random = kind.random(&LEAD, seed)?;
            let (head, hidden, tensors) = build(kind, &random, dtype, device)?;
            let targets = on(device, &Tensor::from_slice(&TARGETS, &LEAD, &Device::Cpu)?)?;
            for objective in objectives() {
                let upstream = upstream(if objective.reduction == Reduction::None { POSITIONS } else { 1 }, 3);
                let expected = kind.loss(&random.values, &TARGETS, &objective, &upstream);
                let options = objective.apply(training(), &LEAD, device)?;
                let loss = head.loss(&hidden, &targets, &options)?;
                assert_fields(&loss, kind, &expected, tolerance(dtype));
                let options = objective.apply(LossOptions::evaluation(), &LEAD, device)?;
                let evaluation = head.loss(&hidden, &targets, &options)?;
                assert_fields(&evaluation, kind, &expected, tolerance(dtype));
                assert!(!evaluation.value.track_op());

                let slopes = central_differences(&random.values, 1e-5, |values| {
                    Ok(kind.loss(values, &TARGETS, &objective, &upstream).total)
                })?;
                let gradients = backward(&loss.value, &upstream)?;
                for (name, tensor) in &tensors {
                    let got = numbers(gradients.get(tensor).unwrap_or_else(|| panic!("no gradient of {name}")));
                    let name = format!("gradient of {name} of {kind:?} under {objective:?}");
                    assert_near(&name, &got, &slopes[name.split(' ').nth(2).expect("a name")], tolerance(dtype).max(1e-8));
                }
            }
        }
        Ok(())
    }

    fn log_probs_and_their_gradients_equal_the_formula(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for (seed, kind) in (10..).zip(KINDS) {
            let random = kind.random(&LEAD, seed)?;
            let (head, hidden, tensors) = build(kind, &random, dtype, device)?;
            let log_probs = head.log_probs(&hidden)?;
            assert_eq!(log_probs.dims(), [3, 4, VOCAB]);
            assert_near("log_probs", &numbers(&log_probs), &kind.log_probs(&random.values).concat(), tolerance(dtype));
            let upstream = upstream(POSITIONS * VOCAB, 4);
            let slopes = central_differences(&random.values, 1e-5, |values| {
                Ok(kind.log_probs(values).concat().iter().zip(&upstream).map(|(x, u)| x * u).sum())
            })?;
            let gradients = backward(&log_probs, &upstream)?;
            for (name, tensor) in &tensors {
                let got = numbers(gradients.get(tensor).unwrap_or_else(|| panic!("no gradient of {name}")));
                assert_near(&format!("{name} of {kind:?}"), &got, &slopes[name], tolerance(dtype).max(1e-7));
            }
        }
        Ok(())
    }

    fn probabilities_sum_to_one_in_every_dtype(device: &Device) -> Result<()> {
        for (seed, kind) in (20..).zip(KINDS) {
            let random = kind.random(&LEAD, seed)?;
            let expected = kind.log_probs(&random.values).concat();
            for &dtype in dtypes(device) {
                let (head, hidden, tensors) = build(kind, &random, dtype, device)?;
                assert_eq!((head.hidden_size(), head.vocab_size()), (HIDDEN, VOCAB));
                let log_probs = head.log_probs(&hidden)?;
                assert_eq!(log_probs.dtype(), dtype);
                assert_near("log_probs", &numbers(&log_probs), &expected, tolerance(dtype));
                let sums = head.log_probs_as(&hidden, DType::F32)?.exp()?.sum(D::Minus1)?;
                assert_near("sums", &numbers(&sums), &[1.0; POSITIONS], 2e-6);
                let targets = on(device, &Tensor::from_slice(&TARGETS, &LEAD, &Device::Cpu)?)?;
                let loss = head.loss(&hidden, &targets, &training().with_ignore_index(-100))?;
                let objective = Objective { ignore_index: Some(-100), ..Objective::default() };
                let expected = kind.loss(&random.values, &TARGETS, &objective, &[1.0]);
                assert_near("loss", &numbers(&loss.value), &expected.value, tolerance(dtype));
                let gradients = loss.backward()?;
                for (name, tensor) in &tensors {
                    let gradient = gradients.get(tensor).unwrap_or_else(|| panic!("no gradient of {name}"));
                    assert!(gradient.dtype() == dtype && numbers(gradient).iter().all(|x| x.is_finite()), "{name}");
                }
            }
        }
        Ok(())
    }

    fn log_prob_is_that_of_the_given_ids(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for (seed, kind) in (30..).zip(KINDS) {
            let (head, hidden, _) = build(kind, &kind.random(&[VOCAB], seed)?, dtype, device)?;
            for ids in [DType::U8, DType::U32, DType::I64] {
                let tokens = Tensor::arange(0u32, VOCAB as u32, device)?.to_dtype(ids)?;
                let log_probs_at = head.log_probs(&hidden)?.gather(&tokens.to_dtype(DType::U32)?.unsqueeze(1)?, 1)?.squeeze(1)?;
                assert_near("log_prob", &numbers(&head.log_prob(&hidden, &tokens)?), &numbers(&log_probs_at), tolerance(dtype));
            }
        }
        Ok(())
    }

    fn every_way_to_the_gradients_gives_the_same(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for (seed, kind) in (40..).zip(KINDS) {
            let (head, hidden, tensors) = build(kind, &kind.random(&LEAD, seed)?, dtype, device)?;
            let targets = on(device, &Tensor::from_slice(&TARGETS, &LEAD, &Device::Cpu)?)?;
            let options = training().with_ignore_index(-100);
            let loss = head.loss(&hidden, &targets, &options)?;
            // The same, bit for bit.
            assert_eq!(numbers(&loss.value), numbers(&head.loss(&hidden, &targets, &options)?.value));
            // One cluster at a time.
            let other = head.loss(&hidden, &targets, &options.clone().with_workspace_bytes(1 << 20))?;
            let penalty = hidden.sqr()?.sum_all()?;
            let with_penalty = loss.backward_with(&penalty)?;
            let (own, again, candles) = (loss.backward()?, loss.backward()?, other.value.backward()?);
            for (name, tensor) in &tensors {
                let gradient = |store: &candle_core::backprop::GradStore| numbers(store.get(tensor).expect(name));
                assert_near(name, &gradient(&again), &gradient(&own), tolerance(dtype));
                assert_near(name, &gradient(&candles), &gradient(&own), tolerance(dtype));
                let mut expected = gradient(&own);
                if name == "hidden" {
                    expected.iter_mut().zip(numbers(tensor)).for_each(|(g, x)| *g += 2.0 * x);
                }
                assert_near(name, &gradient(&with_penalty), &expected, tolerance(dtype));
            }
        }
        Ok(())
    }

    fn a_cluster_without_a_target_gets_no_gradient(device: &Device) -> Result<()> {
        let (head, hidden, tensors) = build(Kind::Adaptive, &Kind::Adaptive.random(&[3], 50)?, DType::F32, device)?;
        let targets = Tensor::new(&[2u32, 16, 0], device)?;
        let gradients = head.loss(&hidden, &targets, &LossOptions::new())?.backward()?;
        for (name, tensor) in &tensors {
            let is_absent = name.starts_with("tail.0") || name.starts_with("tail.1");
            assert_eq!(gradients.get(tensor).is_none(), is_absent, "{name}");
        }
        Ok(())
    }

    fn what_an_ignored_position_holds_reaches_no_gradient(device: &Device) -> Result<()> {
        for (seed, kind) in (60..).zip(KINDS) {
            for reduction in [Reduction::Mean, Reduction::None] {
                let (head, hidden, tensors) = build(kind, &kind.random(&[4], seed)?, DType::F32, device)?;
                let spoiled = Tensor::new(&[[1f32], [f32::NAN], [1.0], [1.0]], device)?;
                let hidden = hidden.broadcast_mul(&spoiled)?;
                let options = training().with_ignore_index(22).with_reduction(reduction);
                let loss = head.loss(&hidden, &Tensor::new(&[1u32, 22, 21, 9], device)?, &options)?;
                assert!(numbers(&loss.value).iter().all(|x| x.is_finite()) && numbers(&loss.count) == [3.0]);
                let gradients = loss.value.sum_all()?.backward()?;
                for (name, tensor) in tensors.iter().filter(|(name, _)| *name != "hidden") {
                    let finite = |gradient| numbers(gradient).iter().all(|x| x.is_finite());
                    assert!(gradients.get(tensor).is_none_or(finite), "{name} of {kind:?}");
                }
            }
        }
        Ok(())
    }

    fn a_batch_without_targets_has_no_loss(device: &Device) -> Result<()> {
        for (seed, kind) in (70..).zip(KINDS) {
            for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                let (head, hidden, tensors) = build(kind, &kind.random(&[3], seed)?, DType::F32, device)?;
                let options = training().with_ignore_index(7).with_reduction(reduction);
                let loss = head.loss(&hidden, &Tensor::new(&[7u32, 7, 7], device)?, &options)?;
                assert!(numbers(&loss.value).iter().all(|&x| x == 0.0) && loss.sum_and_count()? == (0.0, 0.0));
                let gradients = loss.value.sum_all()?.backward()?;
                for (name, tensor) in &tensors {
                    let zero = |gradient| numbers(gradient).iter().all(|&x| x == 0.0);
                    assert!(gradients.get(tensor).is_none_or(zero), "{name} of {kind:?}");
                }
                // No positions at all.
                let (head, hidden, _) = build(kind, &kind.random(&[0, 2], seed)?, DType::F32, device)?;
                let targets = Tensor::zeros((0, 2), DType::U32, device)?;
                let loss = head.loss(&hidden, &targets, &options)?;
                assert_eq!((loss.nll.dims(), loss.sum_and_count()?), (&[0, 2][..], (0.0, 0.0)));
                assert_eq!(head.log_probs(&hidden)?.dims(), [0, 2, VOCAB]);
                assert_eq!(head.top_k(&hidden, 2)?.token_ids.dims(), [0, 2, 2]);
            }
        }
        Ok(())
    }

    fn hidden_states_need_not_be_contiguous(device: &Device) -> Result<()> {
        for (seed, kind) in (80..).zip(KINDS) {
            let (head, hidden, tensors) = build(kind, &kind.random(&LEAD, seed)?, DType::F32, device)?;
            let targets = Tensor::new(&[[0u32, 22, 5, 3], [1, 9, 14, 15], [1, 5, 21, 8]], device)?;
            let (strided, strided_targets) = (hidden.transpose(0, 1)?, targets.t()?);
            let loss = head.loss(&strided, &strided_targets, &training())?;
            let expected = head.loss(&hidden, &targets, &training())?;
            assert_near("value", &numbers(&loss.value), &numbers(&expected.value), 1e-6);
            assert_near("nll", &numbers(&loss.nll), &numbers(&expected.nll.t()?.contiguous()?), 1e-6);
            let (mine, theirs) = (loss.backward()?, expected.backward()?);
            let gradient = |store: &candle_core::backprop::GradStore| numbers(store.get(&tensors["hidden"]).expect("one"));
            assert_near("gradient", &gradient(&mine), &gradient(&theirs), 1e-5);
            let (mine, theirs) = (head.log_probs(&strided)?, head.log_probs(&hidden)?.transpose(0, 1)?);
            assert_near("log_probs", &numbers(&mine), &numbers(&theirs.contiguous()?), 1e-6);
        }
        Ok(())
    }

    fn the_dropout_of_a_mixture_is_that_of_the_options(device: &Device) -> Result<()> {
        let (head, hidden, _) = build(Kind::AdaptiveMixture, &Kind::AdaptiveMixture.random(&LEAD, 90)?, DType::F32, device)?;
        let targets = Tensor::zeros(&LEAD, DType::U32, device)?;
        let nll = |dropout| -> Result<_> {
            Ok(numbers(&head.loss(&hidden, &targets, &LossOptions::new().with_dropout(dropout))?.nll))
        };
        assert_eq!(nll(DropoutMasks::Seeded(1))?, nll(DropoutMasks::Seeded(1))?);
        assert_ne!(nll(DropoutMasks::Seeded(1))?, nll(DropoutMasks::Off)?);
        Ok(())
    }

    fn one_component_equals_the_plain_head(device: &Device) -> Result<()> {
        let (plain, hidden, tensors) = build(Kind::AdaptiveWithBias, &Kind::AdaptiveWithBias.random(&LEAD, 100)?, exact(device), device)?;
        let zeros = |shape: &[usize]| Tensor::zeros(shape, exact(device), device);
        let parts = MixtureTensors {
            prior_weight: zeros(&[1, HIDDEN])?,
            prior_bias: None,
            latent_weight: Tensor::eye(HIDDEN, exact(device), device)?,
            latent_bias: zeros(&[HIDDEN])?,
            decoder_weight: tensors["head.weight"].clone(),
            decoder_bias: Some(tensors["head.bias"].clone()),
        };
        let one: Arc<dyn MixtureLayer> = Arc::new(MixtureOfSoftmaxes::from_tensors(parts, ContextActivation::Identity)?);
        let same = SoftmaxHead::from_tensors(tensors["head.weight"].clone(), Some(tensors["head.bias"].clone()))?;
        for head in [one, Arc::new(same)] {
            let vb = VarBuilder::from_tensors(tensors.clone(), exact(device), device);
            let config = Kind::AdaptiveWithBias.adaptive().with_head_bias(false);
            let head = AdaptiveSoftmax::with_head(&config, head, vb)?;
            assert_eq!(head.head().vocab_size(), 7);
            let (found, expected) = (head.log_probs(&hidden)?, plain.log_probs(&hidden)?);
            assert_near("log_probs", &numbers(&found), &numbers(&expected), tolerance(exact(device)));
        }
        Ok(())
    }

    fn a_state_dict_of_pytorch_gives_its_results(device: &Device) -> Result<()> {
        let golden: Value = serde_json::from_str(include_str!("golden/adaptive.json")).expect("JSON");
        let list = |value: &Value| -> Vec<f64> {
            value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
        };
        let sizes = |value: &Value| -> Vec<usize> { list(value).into_iter().map(|x| x as usize).collect() };
        let dtype = exact(device);
        let variable = |value: &Value| -> Result<Tensor> {
            let tensor = Tensor::from_vec(list(&value["values"]), sizes(&value["shape"]), &Device::Cpu)?;
            Ok(Var::from_tensor(&tensor.to_dtype(dtype)?.to_device(device)?)?.into_inner())
        };
        for case in golden["cases"].as_array().expect("cases") {
            let mut tensors = HashMap::new();
            for (name, value) in case["state_dict"].as_object().expect("a state dict") {
                tensors.insert(name.clone(), variable(value)?);
            }
            let config = AdaptiveConfig::new(
                case["hidden"].as_u64().expect("a size") as usize,
                golden["vocab"].as_u64().expect("a size") as usize,
                sizes(&golden["cutoffs"]),
            );
            let config = config
                .with_div_value(case["div_value"].as_f64().expect("a number"))
                .with_head_bias(case["head_bias"].as_bool().expect("a bool"));
            let head = AdaptiveSoftmax::new(&config, VarBuilder::from_tensors(tensors.clone(), dtype, device))?;
            let states = variable(&case["states"])?;
            tensors.insert("states".into(), states.clone());
            let near = |name: &str, got: &Tensor, expected: &[f64]| {
                assert_near(name, &numbers(got), expected, tolerance(dtype));
            };
            near("log_probs", &head.log_probs(&states)?, &list(&case["log_probs"]["values"]));
            let targets: Vec<u32> = list(&case["targets"]).into_iter().map(|x| x as u32).collect();
            let loss = head.loss(&states, &Tensor::new(targets, device)?, &LossOptions::new())?;
            near("loss", &loss.value, &[case["loss"].as_f64().expect("a number")]);
            near("output", &loss.nll.neg()?, &list(&case["output"]["values"]));
            near("argmax", &head.argmax(&states)?, &list(&case["argmax"]));
            let gradients = loss.backward()?;
            for (name, value) in case["gradients"].as_object().expect("gradients") {
                near(name, gradients.get(&tensors[name]).expect(name), &list(&value["values"]));
            }
        }
        Ok(())
    }
}

#[test]
fn initial_values_are_those_of_linear_layers() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    AdaptiveSoftmax::new(&AdaptiveConfig::new(64, 2000, vec![200, 1000]).with_head_bias(true), vb.pp("a"))?;
    HierarchicalSoftmax::new(&HierarchicalConfig::new(64, 2000), vb.pp("h"))?;
    for (name, var) in vars.data().lock().expect("variables").iter() {
        let values = numbers(var);
        let largest = values.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        let inputs = if name.starts_with("a.") { var.dims().last().copied().unwrap_or(64) } else { 64 };
        let inputs = if var.rank() == 1 { 64 } else { inputs };
        let bound = (inputs as f64).powf(-0.5);
        let is_zero = name.starts_with("h.") && name.ends_with("bias");
        if is_zero {
            assert!(largest == 0.0, "{name}")
        } else {
            assert!(largest <= bound && largest > 0.8 * bound, "{name}: {largest}, {bound}")
        }
    }
    Ok(())
}
