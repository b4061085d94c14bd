//! A low-rank adapter is the decoder with the weight `W + s B A`: in losses, gradients, decoding and after merging.

mod common;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use common::case::Head::{MixtureOfSoftmaxes as SOFTMAXES, Softmax as SOFTMAX};
use common::case::{self, Case, Sizes, Tensors, HEADS};
use common::check::{gradients, parts};
use common::compare::{assert_close, Tolerance};
use common::values::{numbers, uniform};
use common::{dtypes, exact, on, on_each_device};
use mos_head::decode::{Sampler, Sampling};
use mos_head::parts::{CharCnn, CharCnnConfig, Decoder, DecoderConfig, Identity, LowRankAdapter, LowRankConfig};
use mos_head::sampled::NoiseDistribution;
use mos_head::{
    ContextActivation, Distributions, Error, GradientSum, Head, LossOptions, MixtureLayer, MixtureOfContexts,
    MixtureOfSoftmaxes, MixtureTensors, OptionName, OutputLayer, Reduction, Result, SoftmaxHead,
};

const VOCAB: usize = 41;
const HIDDEN: usize = 7;
const RANK: usize = 3;
const SCALE: f64 = 0.75;

/// The parameters of a head and of an adapter, and hidden states.
struct Parameters {
    case: Case,
    tensors: Tensors,
}

impl Parameters {
    fn random(head: case::Head, positions: usize, dtype: DType, device: &Device) -> Result<Self> {
        let case = Case::random(head, Sizes::new(HIDDEN, HIDDEN, 2, VOCAB), &[positions], 1);
        let case = if head == case::Head::Softmax { case } else { case.without("prior.bias") };
        let mut tensors = case.variables(dtype, device)?;
        for (seed, (name, shape)) in [("a", [RANK, HIDDEN]), ("b", [VOCAB, RANK])].into_iter().enumerate() {
            let factor = on(device, &uniform(&shape, 1.2, seed as u64)?.to_dtype(dtype)?)?;
            tensors.insert(name, Var::from_tensor(&factor)?.into_inner());
        }
        Ok(Parameters { case, tensors })
    }

    fn hidden(&self) -> &Tensor {
        &self.tensors["hidden"]
    }

    fn weight(&self) -> &Tensor {
        &self.tensors["decoder.weight"]
    }

    fn adapter(&self) -> Result<LowRankAdapter> {
        LowRankAdapter::from_tensors(self.tensors["a"].clone(), self.tensors["b"].clone(), SCALE)
    }

    /// `W + s B A`, as a function of all three.
    fn sum(&self) -> Result<Tensor> {
        Ok((self.weight() + (self.tensors["b"].matmul(&self.tensors["a"])? * SCALE)?)?)
    }

    /// The head with this weight, and with the adapter if there is one.
    fn head(&self, weight: Tensor, adapter: Option<LowRankAdapter>) -> Result<Box<dyn MixtureLayer>> {
        fn adapted<P: mos_head::parts::Projection + 'static>(
            head: Head<P>,
            adapter: Option<LowRankAdapter>,
        ) -> Result<Box<dyn MixtureLayer>> {
            let head = head.with_logit_scale(0.9)?;
            Ok(Box::new(match adapter {
                Some(adapter) => head.with_adapter(adapter)?,
                None => head,
            }))
        }
        let (bias, activation) = (self.tensors["decoder.bias"].clone(), ContextActivation::Tanh);
        let parts = || MixtureTensors { decoder_weight: weight.clone(), ..parts(&self.tensors) };
        match self.case.head {
            case::Head::Softmax => adapted(SoftmaxHead::from_tensors(weight, Some(bias))?, adapter),
            case::Head::MixtureOfContexts => adapted(MixtureOfContexts::from_tensors(parts(), activation)?, adapter),
            _ => adapted(MixtureOfSoftmaxes::from_tensors(parts(), activation)?, adapter),
        }
    }

    /// The head with the adapter, and the head with the sum.
    fn heads(&self) -> Result<[Box<dyn MixtureLayer>; 2]> {
        let adapted = self.head(self.weight().clone(), Some(self.adapter()?))?;
        Ok([adapted, self.head(self.sum()?, None)?])
    }

    /// Checks that both heads have the same loss and the same gradients.
    fn check(&self, options: &LossOptions, tolerance: f64) -> Result<()> {
        let dtype = self.weight().dtype();
        let positions = self.hidden().dim(0)?;
        let targets: Vec<u32> = (0..positions).map(|t| [(t * 11 % VOCAB) as u32, 5][usize::from(t % 4 == 3)]).collect();
        let targets = on(self.hidden().device(), &Tensor::from_vec(targets, positions, &Device::Cpu)?)?;
        let [found, expected] = self.heads()?.map(|head| head.loss(self.hidden(), &targets, options));
        let (found, expected) = (found?, expected?);
        let value = Tolerance::value(dtype).condition(tolerance);
        assert_close("value", &numbers(&found.value), &numbers(&expected.value), None, value);
        assert_close("nll", &numbers(&found.nll), &numbers(&expected.nll), None, value);
        let expected = gradients(&expected.value.sum_all()?.backward()?, &self.tensors);
        // The loss as the root of the backward pass, and as a part of another value.
        let mut stores = Vec::new();
        if found.value.rank() == 0 {
            stores.push(found.backward()?);
        }
        stores.push(found.value.sum_all()?.backward()?);
        for store in &stores {
            let found = gradients(store, &self.tensors);
            assert!(found.keys().eq(expected.keys()), "{:?}: {:?} {:?}", self.case.head, found.keys(), expected.keys());
            for (name, found) in &found {
                assert_close(name, found, &expected[name], None, Tolerance::gradient(dtype).condition(tolerance));
            }
        }
        Ok(())
    }
}

on_each_device! {
    fn an_adapter_equals_the_sum(device: &Device) -> Result<()> {
        let plain = LossOptions::new;
        let all = [
            plain(),
            plain().with_reduction(Reduction::None),
            plain().with_reduction(Reduction::Sum).with_ignore_index(5),
            plain().with_label_smoothing(0.1).with_z_loss(0.01),
            plain().with_workspace_bytes(1 << 20),
        ];
        for positions in [1, 5, 70] {
            for head in HEADS {
                let parameters = Parameters::random(head, positions, exact(device), device)?;
                for options in &all {
                    parameters.check(options, 10.0)?;
                }
            }
        }
        Ok(())
    }

    fn an_empty_batch_has_gradients_of_zero(device: &Device) -> Result<()> {
        let parameters = Parameters::random(SOFTMAXES, 0, exact(device), device)?;
        parameters.check(&LossOptions::new().with_reduction(Reduction::Sum), 1.0)
    }

    fn every_dtype_is_served(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            // The sum is rounded to the dtype, and the contexts of the adapter are.
            for head in HEADS {
                Parameters::random(head, 6, dtype, device)?.check(&LossOptions::new(), 40.0)?;
            }
        }
        Ok(())
    }

    /// Results are those of the adapter rounded to the weight's dtype, and its gradients are the same, in f32.
    fn an_adapter_in_f32_trains_on_a_weight_in_half_precision(device: &Device) -> Result<()> {
        let targets = Tensor::new(&[1u32, 7, 40, 3, 0, 9], device)?;
        for &dtype in dtypes(device).iter().filter(|dtype| matches!(dtype, DType::F16 | DType::BF16)) {
            for head in HEADS {
                let mut parameters = Parameters::random(head, 6, dtype, device)?;
                let results = |parameters: &Parameters, adapter: &LowRankAdapter| {
                    let head = parameters.head(parameters.weight().clone(), Some(adapter.clone()))?;
                    let loss = head.loss(parameters.hidden(), &targets, &LossOptions::default())?;
                    let gradients = loss.backward()?;
                    let found = [
                        loss.nll,
                        head.log_probs(parameters.hidden())?,
                        head.frozen()?.top_k(parameters.hidden(), 5)?.log_probs,
                    ];
                    let adapter_gradients = [adapter.a(), adapter.b()].map(|factor| gradients.get(factor).cloned());
                    Ok::<_, Error>((found.map(|tensor| numbers(&tensor)), adapter_gradients.map(|found| found.expect("a gradient"))))
                };
                let half = parameters.adapter()?;
                for name in ["a", "b"] {
                    let wide = parameters.tensors[name].to_dtype(DType::F32)?;
                    parameters.tensors.insert(name, Var::from_tensor(&wide)?.into_inner());
                }
                let (found, gradients) = results(&parameters, &parameters.adapter()?)?;
                let (expected, half_gradients) = results(&parameters, &half)?;
                assert_eq!(found, expected);
                for (found, expected) in gradients.iter().zip(&half_gradients) {
                    assert_eq!(found.dtype(), DType::F32);
                    assert_eq!(numbers(found), numbers(expected));
                }
            }
        }
        Ok(())
    }

    fn a_sampled_loss_computes_the_rows_of_the_sample(device: &Device) -> Result<()> {
        let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(12, 3)?;
        let options = LossOptions::new().with_sampled_softmax(negatives.clone());
        for head in HEADS {
            Parameters::random(head, 9, exact(device), device)?.check(&options, 10.0)?;
        }
        let parameters = Parameters::random(SOFTMAX, 9, exact(device), device)?;
        parameters.check(&LossOptions::new().with_nce(negatives.clone()), 10.0)?;
        let [adapted, _] = parameters.heads()?;
        let targets = Tensor::zeros(9, DType::U32, device)?;
        let error = adapted.loss(parameters.hidden(), &targets, &options.with_decoder_rows(true)).expect_err("rows");
        assert!(matches!(error, Error::Unsupported { option: OptionName::DecoderRows, .. }), "{error}");
        Ok(())
    }

    fn decoding_sees_the_sum(device: &Device) -> Result<()> {
        for positions in [1, 3, 80] {
            for kind in HEADS {
                let parameters = Parameters::random(kind, positions, exact(device), device)?;
                let (hidden, [adapted, whole]) = (parameters.hidden(), parameters.heads()?);
                let tolerance = Tolerance::value(exact(device)).condition(10.0);
                let [found, expected] = [&adapted, &whole].map(|head| head.log_probs(hidden));
                assert_close("log_probs", &numbers(&found?), &numbers(&expected?), None, tolerance);
                let [found, expected] = [&adapted, &whole].map(|head| head.top_k(hidden, 4));
                let (found, expected) = (found?, expected?);
                assert_eq!(numbers(&found.token_ids), numbers(&expected.token_ids), "{kind:?}");
                assert_close("top_k", &numbers(&found.log_probs), &numbers(&expected.log_probs), None, tolerance);
                for sampling in [Sampling::default(), Sampling::new().with_ancestral(true)] {
                    let draw = |head: &dyn MixtureLayer| head.sample(hidden, &mut Sampler::new(sampling.clone(), 4)?);
                    assert_eq!(numbers(&draw(&*adapted)?), numbers(&draw(&*whole)?), "{kind:?}");
                }
                let pruned = |head: &dyn MixtureLayer| {
                    let mixture = head.mixture(hidden, mos_head::DropoutMasks::Off)?;
                    assert_eq!(mixture.contexts()?.dims().last(), Some(&HIDDEN));
                    mixture.prune(0.8)?.mixture.log_probs()
                };
                let [found, expected] = [pruned(&*adapted)?, pruned(&*whole)?];
                assert_close("pruned", &numbers(&found), &numbers(&expected), None, tolerance);
                let found = numbers(&adapted.frozen()?.log_probs(hidden)?);
                assert_close("frozen", &found, &numbers(&whole.log_probs(hidden)?), None, tolerance);
            }
        }
        Ok(())
    }

    fn a_merged_head_has_no_adapter(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            let parameters = Parameters::random(SOFTMAX, 4, dtype, device)?;
            let weight = parameters.weight().clone();
            let head = SoftmaxHead::from_tensors(weight.clone(), None)?.with_adapter(parameters.adapter()?)?;
            let merged = head.merged()?;
            assert!(merged.decoder().adapter().is_none() && !merged.weight()?.track_op());
            assert_eq!(merged.weight()?.dtype(), dtype);
            let tolerance = Tolerance::value(dtype);
            assert_close("merged", &numbers(&merged.weight()?), &numbers(&parameters.sum()?), None, tolerance.condition(8.0));
            assert_eq!(numbers(&head.weight()?), numbers(&weight), "the weight itself has no adapter");
            let plain = SoftmaxHead::from_tensors(weight, None)?;
            assert_eq!(numbers(&plain.merged()?.weight()?), numbers(&plain.weight()?));
        }
        Ok(())
    }

    fn what_is_frozen_has_no_gradient(device: &Device) -> Result<()> {
        let tensors = Parameters::random(SOFTMAX, 5, exact(device), device)?.tensors;
        let targets = Tensor::zeros(5, DType::U32, device)?;
        let names = ["a", "b", "decoder.weight", "hidden"];
        for (a, b) in [(true, true), (true, false), (false, true)] {
            let trained = |name, is_trained| if is_trained { tensors[name].clone() } else { tensors[name].detach() };
            let [a_factor, b_factor, weight, hidden] =
                [trained("a", a), trained("b", b), trained("decoder.weight", false), trained("hidden", false)];
            let adapter = LowRankAdapter::from_tensors(a_factor, b_factor, SCALE)?;
            let head = SoftmaxHead::from_tensors(weight, None)?.with_adapter(adapter)?;
            let found = head.loss(&hidden, &targets, &LossOptions::new())?.backward()?;
            assert_eq!(names.map(|name| found.get(&tensors[name]).is_some()), [a, b, false, false]);
        }
        Ok(())
    }

    fn gradients_accumulate(device: &Device) -> Result<()> {
        let parameters = Parameters::random(SOFTMAXES, 6, exact(device), device)?;
        let targets = Tensor::new(&[1u32, 3, 5, 7, 9, 11], device)?;
        let [head, _] = parameters.heads()?;
        let options = LossOptions::new().with_reduction(Reduction::Sum);
        let expected = head.loss(parameters.hidden(), &targets, &options)?.backward()?;
        let sum = GradientSum::new();
        for first in [0, 2, 4] {
            let hidden = parameters.hidden().narrow(0, first, 2)?;
            let options = options.clone().with_gradient_sum(&sum);
            sum.add(&head.loss(&hidden, &targets.narrow(0, first, 2)?, &options)?)?;
        }
        let (found, expected) = (gradients(&sum.take(), &parameters.tensors), gradients(&expected, &parameters.tensors));
        assert_eq!((found.len(), expected.len()), (parameters.tensors.len(), parameters.tensors.len()));
        for (name, found) in &found {
            assert_close(name, found, &expected[name], None, Tolerance::gradient(exact(device)));
        }
        Ok(())
    }

    fn computed_rows_take_an_adapter(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let spellings: Vec<String> = (0..VOCAB).map(|id| format!("w{id}")).collect();
        let vars = candle_nn::VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, device);
        let cnn = CharCnn::new(&CharCnnConfig::new(HIDDEN), &spellings, vb.pp("cnn"))?;
        let decoder = Decoder::with_char_cnn(&DecoderConfig::new(VOCAB, HIDDEN), cnn, vb.clone())?;
        let parameters = Parameters::random(SOFTMAX, 4, dtype, device)?;
        let adapted = decoder.with_adapter(parameters.adapter()?)?;
        let merged = adapted.merged()?;
        let contexts = parameters.hidden().unsqueeze(1)?;
        let [found, expected] = [adapted, merged].map(|decoder| decoder.mixture(&contexts, None)?.log_probs());
        assert_close("log_probs", &numbers(&found?), &numbers(&expected?), None, Tolerance::value(dtype).condition(10.0));
        Ok(())
    }

    fn names_and_initial_values_are_those_of_peft(device: &Device) -> Result<()> {
        let vars = candle_nn::VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, device);
        let config = LowRankConfig::new(VOCAB, HIDDEN, 4).with_alpha(8.0);
        let adapter = LowRankAdapter::new(&config, vb.pp("lm_head"))?;
        assert_eq!((adapter.rank(), adapter.scale()), (4, 2.0));
        let mut names: Vec<String> = vars.data().lock().expect("a lock").keys().cloned().collect();
        names.sort();
        assert_eq!(names, ["lm_head.lora_A.weight", "lm_head.lora_B.weight"]);
        assert!(numbers(adapter.b()).iter().all(|&x| x == 0.0));
        let within = 1.0 / (HIDDEN as f64).sqrt();
        let a = numbers(adapter.a());
        assert!(a.iter().all(|x| x.abs() <= within + 1e-6) && a.iter().any(|x| x.abs() > within / 4.0));
        Ok(())
    }

    fn what_does_not_fit_is_refused(device: &Device) -> Result<()> {
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device);
        let adapter = |a: &[usize], b: &[usize], dtype| -> Result<LowRankAdapter> {
            LowRankAdapter::from_tensors(zeros(a, DType::F32)?, zeros(b, dtype)?, 1.0)
        };
        let error = adapter(&[2, 6, 1], &[9, 2], DType::F32).expect_err("three dimensions");
        assert!(matches!(error, Error::Shape { argument: "lora_A", .. }), "{error}");
        let error = adapter(&[2, 6], &[9, 3], DType::F32).expect_err("two ranks");
        assert!(matches!(error, Error::Shape { argument: "lora_B", .. }), "{error}");
        let error = adapter(&[2, 6], &[9, 2], DType::BF16).expect_err("two dtypes");
        assert!(matches!(error, Error::DType { argument: "lora_B", .. }), "{error}");
        let error = adapter(&[0, 6], &[9, 0], DType::F32).expect_err("no rank");
        assert!(matches!(error, Error::Config { argument: "rank", .. }), "{error}");
        let (a, b) = (zeros(&[2, 6], DType::F32)?, zeros(&[9, 2], DType::F32)?);
        let error = LowRankAdapter::from_tensors(a, b, f64::NAN).expect_err("no number");
        assert!(matches!(error, Error::Config { argument: "scale", .. }), "{error}");
        for (shape, dtype) in [([9, 5], DType::F32), ([8, 6], DType::F32), ([9, 6], DType::F64)] {
            let head: Head<Identity> = SoftmaxHead::from_tensors(zeros(&shape, dtype)?, None)?;
            let error = head.with_adapter(adapter(&[2, 6], &[9, 2], DType::F32)?).expect_err("another weight");
            match dtype {
                DType::F32 => assert!(matches!(error, Error::Config { argument: "adapter", .. }), "{error}"),
                _ => assert!(matches!(error, Error::DType { argument: "adapter", .. }), "{error}"),
            }
        }
        let vb = VarBuilder::from_varmap(&candle_nn::VarMap::new(), DType::F32, device);
        let config = LowRankConfig::new(VOCAB, HIDDEN, 0);
        let error = LowRankAdapter::new(&config, vb).expect_err("no rank");
        assert!(matches!(error, Error::Config { argument: "rank", .. }), "{error}");
        Ok(())
    }
}

/// A is a matrix that multiplies hidden states, whatever the projection is.
#[test]
fn a_nan_at_an_ignored_position_reaches_no_gradient() -> Result<()> {
    let variable = |dims: &[usize], seed| Var::from_tensor(&uniform(dims, 1.0, seed)?.to_dtype(DType::F32)?);
    let (weight, hidden) = (variable(&[VOCAB, HIDDEN], 1)?, uniform(&[4, HIDDEN], 1.0, 2)?.to_dtype(DType::F32)?);
    let (a, b) = (variable(&[RANK, HIDDEN], 3)?, variable(&[VOCAB, RANK], 4)?);
    let adapter = LowRankAdapter::from_tensors(a.as_tensor().clone(), b.as_tensor().clone(), SCALE)?;
    let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?.with_adapter(adapter)?;
    let targets = Tensor::new(&[3i64, -100, 7, 20], &Device::Cpu)?;
    let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(9, 3)?;
    let ignoring = LossOptions::new().with_ignore_index(-100);
    for options in [ignoring.clone(), ignoring.with_sampled_softmax(negatives)] {
        let ask = |spoiler: f32| -> Result<_> {
            let spoiled = Tensor::new(&[[0f32], [spoiler], [0.0], [0.0]], &Device::Cpu)?;
            let states = Var::from_tensor(&hidden.broadcast_add(&spoiled)?)?;
            let loss = head.loss(&states, &targets, &options)?;
            let gradients = loss.backward()?;
            let found = [&states, &weight, &a, &b].map(|var| numbers(gradients.get(var).expect("a gradient")));
            Ok((numbers(&loss.value), found))
        };
        let expected = ask(0.0)?;
        assert!(expected.1.iter().flatten().all(|g| g.is_finite()));
        for spoiler in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(ask(spoiler)?, expected, "{spoiler}");
        }
    }
    Ok(())
}
