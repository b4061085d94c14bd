//! A head made outside of the crate: four methods are enough, and all others, pointers, and beam search work with it.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor, Var, D};
use common::case::{upstream, weights, Case, Head, Logits, Sizes, HEADS};
use common::check::{backward, build, gradients};
use common::compare::{assert_close, Tolerance};
use common::objective::Objective;
use common::reference::truth;
use common::values::{numbers, tensor};
use common::{exact, on_each_device};
use mos_head::decode::{BeamSearch, Hypothesis, Sampler, Sampling, TopK};
use mos_head::parts::LogitFunction;
use mos_head::{
    ContextActivation, Distributions, DropoutMasks, Error, Loss, LossOptions, MixtureLayer, OptionName, OutputLayer,
    Reduction, Result, SoftmaxHead,
};

/// An ordinary softmax of candle's operations.
#[derive(Debug)]
struct Plain {
    weight: Tensor,
    bias: Tensor,
}

impl OutputLayer for Plain {
    fn hidden_size(&self) -> usize {
        self.weight.dims()[1]
    }

    fn vocab_size(&self) -> usize {
        self.weight.dims()[0]
    }

    fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
        let logits = hidden.broadcast_matmul(&self.weight.t()?)?.broadcast_add(&self.bias)?;
        Ok(candle_nn::ops::log_softmax(&logits, D::Minus1)?)
    }

    fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let (hidden, ids) = options.mask_ignored(hidden, targets)?;
        let log_probs_at = self.log_probs(&hidden)?.gather(&ids.unsqueeze(D::Minus1)?, D::Minus1)?;
        Loss::from_nll(&log_probs_at.squeeze(D::Minus1)?.neg()?, targets, options)
    }
}

const SIZES: Sizes = Sizes::new(6, 6, 1, 23);

fn plain(case: &Case, dtype: DType, device: &Device) -> Result<(Plain, Tensor)> {
    let tensors = case.variables(dtype, device)?;
    let head = Plain { weight: tensors["decoder.weight"].clone(), bias: tensors["decoder.bias"].clone() };
    Ok((head, tensors["hidden"].clone()))
}

#[test]
fn masked_targets_are_i64_even_if_there_are_none() -> Result<()> {
    for dtype in [DType::U8, DType::U32, DType::I64] {
        for n in [0, 2] {
            let (hidden, targets) =
                (Tensor::zeros((n, 3), DType::F32, &Device::Cpu)?, Tensor::zeros(n, dtype, &Device::Cpu)?);
            let (_, ids) = LossOptions::new().mask_ignored(&hidden, &targets)?;
            assert_eq!((ids.dtype(), ids.dims()), (DType::I64, &[n][..]));
        }
    }
    Ok(())
}

on_each_device! {
    fn its_losses_and_gradients_equal_the_reference(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
            for has_weights in [false, true] {
                let mut case = Case::random(Head::Softmax, SIZES, &[2, 5], 130);
                case.targets[3] = -100;
                let objective = Objective {
                    reduction,
                    ignore_index: Some(-100),
                    position_weights: has_weights.then(|| weights(10, 1)),
                    class_weights: has_weights.then(|| weights(SIZES.vocab, 2)),
                    ..Objective::default()
                };
                let upstream = upstream(if reduction == Reduction::None { 10 } else { 1 }, 3);
                let truth = truth(&case, &objective, &upstream);
                let tensors = case.variables(dtype, device)?;
                let head = Plain { weight: tensors["decoder.weight"].clone(), bias: tensors["decoder.bias"].clone() };
                let options = objective.options(&case.lead, device)?;
                let targets = case.target_tensor(device)?;
                let loss = head.loss(&tensors["hidden"], &targets, &options)?;
                let tolerance = Tolerance::value(dtype);
                assert_close("value", &numbers(&loss.value), &truth.value, None, tolerance);
                assert_close("nll", &numbers(&loss.nll), &truth.nll, None, tolerance);
                assert_close("sum", &numbers(&loss.sum), &[truth.sum], None, tolerance);
                assert_close("count", &numbers(&loss.count), &[truth.count], None, tolerance);
                for (name, found) in gradients(&backward(&loss.value, &upstream)?, &tensors) {
                    assert_close(name, &found, &truth.gradients[name], None, Tolerance::gradient(dtype));
                }
                let evaluation = objective.apply(LossOptions::evaluation(), &case.lead, device)?;
                assert!(!head.loss(&tensors["hidden"], &targets, &evaluation)?.value.track_op());
            }
        }
        Ok(())
    }

    fn what_an_ignored_position_holds_reaches_no_gradient_of_it(device: &Device) -> Result<()> {
        // As u8, where -100 is 156 unless the index is compared as i64.
        for (ignored, dtype) in [(-100, DType::I64), (5, DType::U32), (5, DType::U8)] {
            let case = Case::random(Head::Softmax, SIZES, &[3], 136);
            let tensors = case.variables(exact(device), device)?;
            let head = Plain { weight: tensors["decoder.weight"].clone(), bias: tensors["decoder.bias"].clone() };
            let targets = Tensor::new(&[3i64, ignored, 7], device)?.to_dtype(dtype)?;
            let spoiled = Tensor::new(&[[1.0f32], [f32::NAN], [1.0]], device)?.to_dtype(exact(device))?;
            let hidden = tensors["hidden"].broadcast_mul(&spoiled)?;
            let options = LossOptions::new().with_ignore_index(ignored);
            let loss = head.loss(&hidden, &targets, &options)?;
            assert!(numbers(&loss.value)[0].is_finite() && numbers(&loss.count) == [2.0]);
            let found = gradients(&loss.backward()?, &tensors);
            for name in ["decoder.weight", "decoder.bias"] {
                assert!(found[name].iter().all(|g| g.is_finite()), "{name}: {:?}", found[name]);
            }
        }
        Ok(())
    }

    fn a_weight_of_zero_removes_an_infinite_loss_of_it(device: &Device) -> Result<()> {
        let nll = Tensor::new(&[f32::INFINITY, 1.0], device)?;
        let targets = Tensor::new(&[0u32, 1], device)?;
        let options = LossOptions::new().with_position_weights(Tensor::new(&[0f32, 1.0], device)?);
        assert_eq!(numbers(&Loss::from_nll(&nll, &targets, &options)?.value), [1.0]);
        let bad = LossOptions::new().with_position_weights(Tensor::new(&[0u32, 1], device)?);
        let error = Loss::from_nll(&nll, &targets, &bad).expect_err("integers");
        assert!(matches!(error, Error::DType { argument: "position_weights", .. }), "{error:?}");
        let bad = LossOptions::new().with_class_weights(Tensor::ones((3, 1), DType::F32, device)?);
        let error = Loss::from_nll(&nll, &targets, &bad).expect_err("a matrix");
        assert!(matches!(error, Error::Shape { argument: "class_weights", .. }), "{error:?}");
        // A target without a class weight is named.
        let options = LossOptions::new().with_class_weights(Tensor::ones(2, DType::F32, device)?).with_ignore_index(7);
        for (ids, expected) in [([0i64, 9], Some(9)), ([0, -1], Some(-1)), ([0, 7], None)] {
            let result = Loss::from_nll(&nll, &Tensor::new(&ids, device)?, &options);
            match (result, expected) {
                (Err(Error::Target { argument: "targets", position: 1, got, vocab_size: 2 }), Some(id)) => {
                    assert_eq!(got, id)
                }
                (Ok(_), None) => {}
                (result, _) => panic!("{ids:?}: {result:?}"),
            }
        }
        Ok(())
    }

    fn a_loss_from_nlls_is_summed_in_f32_or_better(device: &Device) -> Result<()> {
        let n = 5000;
        let targets = Tensor::zeros(n, DType::U32, device)?;
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let nll = Tensor::from_iter((0..n).map(|i| (i % 7) as f32), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
            let nll = Var::from_tensor(&nll)?;
            let loss = Loss::from_nll(&nll, &targets, &LossOptions::new())?;
            let sum: f64 = (0..n).map(|i| (i % 7) as f64).sum();
            assert_eq!(numbers(&loss.sum), [sum], "{dtype:?}");
            assert_eq!(numbers(&loss.count), [n as f64], "{dtype:?}");
            assert_abs_diff_eq!(numbers(&loss.value)[0], sum / n as f64, epsilon = 1e-6);
            let gradient = numbers(loss.backward()?.get(&nll).expect("a gradient"));
            let expected = numbers(&Tensor::new(1.0 / n as f32, &Device::Cpu)?.to_dtype(dtype)?)[0];
            assert!(gradient.iter().all(|g| (g - expected).abs() <= 1e-2 * expected), "{dtype:?}");
        }
        Ok(())
    }

    fn its_decoding_follows_from_its_log_probabilities(device: &Device) -> Result<()> {
        let case = Case::random(Head::Softmax, SIZES, &[2, 5], 131);
        let (head, hidden) = plain(&case, DType::F32, device)?;
        let fused = SoftmaxHead::from_tensors(head.weight.clone(), Some(head.bias.clone()))?;
        let (mine, theirs) = (head.top_k(&hidden, 4)?, fused.top_k(&hidden, 4)?);
        assert_eq!(mine.token_ids.to_vec3::<u32>()?, theirs.token_ids.to_vec3::<u32>()?);
        let tolerance = Tolerance::value(DType::F32);
        assert_close("top_k", &numbers(&mine.log_probs), &numbers(&theirs.log_probs), None, tolerance);
        assert_eq!(head.argmax(&hidden)?.to_vec2::<u32>()?, fused.argmax(&hidden)?.to_vec2::<u32>()?);
        let targets = case.target_tensor(device)?;
        let (mine, theirs) = (head.log_prob(&hidden, &targets)?, fused.log_prob(&hidden, &targets)?);
        assert_close("log_prob", &numbers(&mine), &numbers(&theirs), None, tolerance);
        let sampler = || Sampler::new(Sampling::new().with_temperature(0.7).with_top_p(0.8), 5);
        let (mine, theirs) = (head.sample(&hidden, &mut sampler()?)?, fused.sample(&hidden, &mut sampler()?)?);
        assert_eq!(mine.to_vec2::<u32>()?, theirs.to_vec2::<u32>()?);
        assert_eq!(head.log_probs_as(&hidden, DType::F16)?.dtype(), DType::F16);
        // One position without leading dimensions.
        let one = hidden.narrow(0, 0, 1)?.narrow(1, 0, 1)?.reshape(SIZES.hidden)?.unsqueeze(0)?;
        let log_probs = head.log_probs(&one)?.squeeze(0)?;
        assert_eq!(TopK::from_log_probs(&log_probs, 2)?.token_ids.dims(), [2]);
        Ok(())
    }

    fn what_it_does_not_support_is_an_error_that_names_both(device: &Device) -> Result<()> {
        let case = Case::random(Head::Softmax, SIZES, &[4], 132);
        let (head, hidden) = plain(&case, DType::F32, device)?;
        let targets = case.target_tensor(device)?;
        let options = [
            (OptionName::LabelSmoothing, LossOptions::new().with_label_smoothing(0.1)),
            (OptionName::ZLoss, LossOptions::new().with_z_loss(0.1)),
            (OptionName::Correct, LossOptions::new().with_correct(true)),
        ];
        for (name, options) in options {
            let error = head.loss(&hidden, &targets, &options).expect_err("unsupported");
            assert!(matches!(error, Error::Unsupported { option, .. } if option == name), "{error:?}");
            assert_eq!(error.to_string(), format!("{name}: not supported by Loss::from_nll"));
        }
        for (name, sampling) in [
            (OptionName::Ancestral, Sampling::new().with_ancestral(true)),
            (OptionName::ComponentTemperature, Sampling::new().with_component_temperature(0.5)),
        ] {
            let error = head.sample(&hidden, &mut Sampler::new(sampling, 1)?).expect_err("unsupported");
            let Error::Unsupported { option, head } = error else { panic!("{error:?}") };
            assert!(option == name && head.ends_with("Plain"), "{option} {head}");
        }
        let nan = (hidden * f64::NAN)?;
        assert!(matches!(head.top_k(&nan, 1), Err(Error::Distribution { position: 0 })));
        assert!(matches!(head.top_k(&nan, 24), Err(Error::Config { argument: "k", .. })));
        Ok(())
    }

    fn beam_search_takes_any_head_or_none(device: &Device) -> Result<()> {
        let case = Case::random(Head::Softmax, SIZES, &[1], 133);
        let (head, _) = plain(&case, DType::F32, device)?;
        let fused = SoftmaxHead::from_tensors(head.weight.clone(), Some(head.bias.clone()))?;
        let states = tensor(&[SIZES.vocab, SIZES.hidden], 1, DType::F32)?.to_device(device)?;
        let start = Tensor::new(&[3i64, 7], device)?;
        let search = BeamSearch::new(0).with_width(3).with_n_best(2).with_max_length(6);
        let step = |tokens: &Tensor, _: &Tensor| -> Result<Tensor> { Ok(states.index_select(tokens, 0)?) };
        let (mine, theirs) = (search.run(&head, &start, step)?, search.run(&fused, &start, step)?);
        let without = search.search(SIZES.vocab, &start, |tokens, parents, k| {
            TopK::from_log_probs(&head.log_probs(&step(tokens, parents)?)?, k)
        })?;
        for ((mine, theirs), without) in mine.iter().zip(&theirs).zip(&without) {
            let tokens = |found: &Vec<Hypothesis>| found.iter().map(|h| h.token_ids.clone()).collect::<Vec<_>>();
            assert_eq!(tokens(mine), tokens(theirs));
            assert_eq!(mine, without);
        }
        Ok(())
    }

    fn every_way_to_ask_a_head_agrees_under_every_configuration(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let tolerance = Tolerance::value(dtype);
        for head in HEADS {
            type Change = fn(Case) -> Case;
            let variants: [(&str, Change); 9] = [
                ("plain", |case| case),
                ("scale", |case| Case { logits: Logits { scale: 0.4, function: LogitFunction::Identity }, ..case }),
                ("softcap", |case| Case { logits: Logits { scale: 1.0, function: LogitFunction::Softcap(1.5) }, ..case }),
                ("both", |case| Case { logits: Logits { scale: 2.5, function: LogitFunction::Softcap(1.5) }, ..case }),
                ("sigsoftmax", |case| Case { logits: Logits { scale: 1.5, function: LogitFunction::Sigsoftmax }, ..case }),
                ("no decoder bias", |case| case.without("decoder.bias")),
                ("no prior bias", |case| match case.head {
                    Head::Softmax => case,
                    _ => case.without("prior.bias"),
                }),
                ("identity", |case| Case { activation: ContextActivation::Identity, ..case }),
                ("one component", |case| Case::random(case.head, Sizes::new(6, 5, 1, 23), &case.lead, 135)),
            ];
            for (variant, change) in variants {
                let case = change(Case::random(head, Sizes::new(6, 5, 3, 23), &[8], 134)).rounded(DType::F32)?;
                let truth = truth(&case, &Objective::default(), &[1.0]);
                let tensors = case.constants(dtype, device)?;
                let (head, hidden) = (build(&case, &tensors)?, &tensors["hidden"]);
                let targets = case.target_tensor(device)?;
                let close = |name: &str, got: &Tensor, truth: &[f64]| {
                    assert_close(&format!("{name}, {variant}"), &numbers(got), truth, None, tolerance);
                };
                close("loss", &head.loss(hidden, &targets, &LossOptions::new())?.nll, &truth.nll);
                close("log_prob", &head.log_prob(hidden, &targets)?.neg()?, &truth.nll);
                close("log_probs", &head.log_probs(hidden)?, &truth.log_probs);
                let in_f32 = numbers(&head.log_probs_as(hidden, DType::F32)?);
                assert_close("log_probs_as", &in_f32, &truth.log_probs, None, Tolerance::value(DType::F32));
                assert_eq!(head.argmax(hidden)?.to_vec1::<u32>()?, truth.argmax);
                let greedy = &mut Sampler::new(Sampling::greedy(), 1)?;
                assert_eq!(head.sample(hidden, greedy)?.to_vec1::<u32>()?, truth.argmax);
                let rows = truth.argmax.iter().zip(truth.log_probs.chunks(23));
                let best: Vec<f64> = rows.map(|(&id, row)| row[id as usize]).collect();
                close("top_k", &head.top_k(hidden, 1)?.log_probs, &best);
                close("mixture", &head.mixture(hidden, DropoutMasks::Off)?.log_probs()?, &truth.log_probs);
                // An end that is never among the best: one step gives the most probable id of each position.
                let end = (0..23).find(|id| !truth.argmax.contains(id)).expect("an id that is never the best");
                let start = Tensor::zeros(8, DType::U32, device)?;
                let search = BeamSearch::new(end).with_width(1).with_max_length(1);
                let found = search.run(&head, &start, |_, _| -> Result<Tensor> { Ok(hidden.clone()) })?;
                for ((found, &id), &log_prob) in found.iter().zip(&truth.argmax).zip(&best) {
                    assert_eq!(found[0].token_ids, [id]);
                    assert_close("beam search", &[found[0].log_prob], &[log_prob], None, tolerance);
                }
            }
        }
        Ok(())
    }
}

/// Counts how often its own method is called.
#[derive(Debug)]
struct Counting(SoftmaxHead, AtomicUsize);

impl OutputLayer for Counting {
    fn hidden_size(&self) -> usize {
        self.0.hidden_size()
    }
    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }
    fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
        self.0.log_probs(hidden)
    }
    fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        self.0.loss(hidden, targets, options)
    }
    fn top_k(&self, hidden: &Tensor, k: usize) -> Result<TopK> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.top_k(hidden, k)
    }
}

#[test]
fn behind_a_pointer_a_heads_own_methods_are_called() -> Result<()> {
    fn generic(head: impl OutputLayer) -> Result<Vec<u32>> {
        let hidden = Tensor::ones((2, 1), DType::F32, &Device::Cpu)?;
        Ok(head.argmax(&hidden)?.to_vec1()?)
    }
    fn components(layer: impl MixtureLayer) -> usize {
        layer.components()
    }
    let weight = Tensor::new(&[[0f32], [2.0], [1.0]], &Device::Cpu)?;
    let softmax = SoftmaxHead::from_tensors(weight, None)?;
    let head = Arc::new(Counting(softmax.clone(), AtomicUsize::new(0)));
    assert_eq!(generic(&*head)?, [1, 1]);
    assert_eq!(generic(head.clone())?, [1, 1]);
    assert_eq!(generic(Box::new(head.clone()) as Box<dyn OutputLayer>)?, [1, 1]);
    assert_eq!(generic(&(head.clone() as Arc<dyn OutputLayer>))?, [1, 1]);
    assert_eq!(head.1.load(Ordering::Relaxed), 4);
    let layers: [Box<dyn MixtureLayer>; 2] = [Box::new(softmax.clone()), Box::new(Arc::new(softmax))];
    for layer in layers {
        assert_eq!(generic(&layer)?, [1, 1]);
        assert_eq!(components(layer), 1);
    }
    Ok(())
}
