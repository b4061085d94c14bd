//! A low-rank adapter is the decoder with the weight `W + s B A`: in losses, gradients, decoding and after merging.

mod common;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use common::check::numbers;
use common::compare::{assert_close, Tolerance};
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

/// The parameters of each head and of an adapter.
struct Parameters {
    weight: Var,
    bias: Var,
    prior: Var,
    latent: Var,
    latent_bias: Var,
    a: Var,
    b: Var,
    hidden: Var,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Softmax,
    Contexts,
    Softmaxes,
}

const KINDS: [Kind; 3] = [Kind::Softmax, Kind::Contexts, Kind::Softmaxes];

impl Parameters {
    fn random(positions: usize, dtype: DType, device: &Device) -> Result<Self> {
        let var = |shape: &[usize]| -> Result<Var> {
            let values = Tensor::randn(0f32, 0.7, shape, &Device::Cpu)?.to_dtype(dtype)?;
            Ok(Var::from_tensor(&on(device, &values)?)?)
        };
        Ok(Parameters {
            weight: var(&[VOCAB, HIDDEN])?,
            bias: var(&[VOCAB])?,
            prior: var(&[2, HIDDEN])?,
            latent: var(&[2 * HIDDEN, HIDDEN])?,
            latent_bias: var(&[2 * HIDDEN])?,
            a: var(&[RANK, HIDDEN])?,
            b: var(&[VOCAB, RANK])?,
            hidden: var(&[positions, HIDDEN])?,
        })
    }

    fn adapter(&self) -> Result<LowRankAdapter> {
        LowRankAdapter::from_tensors(self.a.as_tensor().clone(), self.b.as_tensor().clone(), SCALE)
    }

    /// `W + s B A`, as a function of all three.
    fn sum(&self) -> Result<Tensor> {
        Ok((self.weight.as_tensor() + (self.b.matmul(&self.a)? * SCALE)?)?)
    }

    /// The head with this weight, and with the adapter if there is one.
    fn head(&self, kind: Kind, weight: Tensor, adapter: Option<LowRankAdapter>) -> Result<Box<dyn MixtureLayer>> {
        let tensors = |weight| MixtureTensors {
            prior_weight: self.prior.as_tensor().clone(),
            prior_bias: None,
            latent_weight: self.latent.as_tensor().clone(),
            latent_bias: self.latent_bias.as_tensor().clone(),
            decoder_weight: weight,
            decoder_bias: Some(self.bias.as_tensor().clone()),
        };
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
        match kind {
            Kind::Softmax => adapted(SoftmaxHead::from_tensors(weight, Some(self.bias.as_tensor().clone()))?, adapter),
            Kind::Contexts => {
                adapted(MixtureOfContexts::from_tensors(tensors(weight), ContextActivation::Tanh)?, adapter)
            }
            Kind::Softmaxes => {
                adapted(MixtureOfSoftmaxes::from_tensors(tensors(weight), ContextActivation::Tanh)?, adapter)
            }
        }
    }

    /// The head with the adapter, and the head with the sum.
    fn heads(&self, kind: Kind) -> Result<[Box<dyn MixtureLayer>; 2]> {
        let adapted = self.head(kind, self.weight.as_tensor().clone(), Some(self.adapter()?))?;
        Ok([adapted, self.head(kind, self.sum()?, None)?])
    }

    fn named(&self) -> [(&'static str, &Var); 8] {
        let Parameters { weight, bias, prior, latent, latent_bias, a, b, hidden } = self;
        [
            ("weight", weight),
            ("bias", bias),
            ("prior", prior),
            ("latent", latent),
            ("latent_bias", latent_bias),
            ("a", a),
            ("b", b),
            ("hidden", hidden),
        ]
    }

    /// Checks that both heads have the same loss and the same gradients.
    fn check(&self, kind: Kind, options: &LossOptions, tolerance: f64) -> Result<()> {
        let dtype = self.weight.dtype();
        let [of_adapter, of_sum] = self.heads(kind)?;
        let targets: Vec<u32> =
            (0..self.hidden.dim(0)?).map(|t| [(t * 11 % VOCAB) as u32, 5][usize::from(t % 4 == 3)]).collect();
        let targets = on(self.hidden.device(), &Tensor::from_vec(targets, self.hidden.dim(0)?, &Device::Cpu)?)?;
        let [found, expected] = [of_adapter, of_sum].map(|head| head.loss(&self.hidden, &targets, options));
        let (found, expected) = (found?, expected?);
        let value = Tolerance::value(dtype).condition(tolerance);
        assert_close("value", &numbers(&found.value), &numbers(&expected.value), None, value);
        assert_close("nll", &numbers(&found.nll), &numbers(&expected.nll), None, value);
        let expected = expected.value.sum_all()?.backward()?;
        // The loss as the root of the backward pass, and as a part of another value.
        let mut stores = Vec::new();
        if found.value.rank() == 0 {
            stores.push(found.backward()?);
        }
        stores.push(found.value.sum_all()?.backward()?);
        for found in &stores {
            for (name, variable) in self.named() {
                let [found, expected] = [found, &expected].map(|store| store.get(variable).map(numbers));
                assert_eq!(found.is_some(), expected.is_some(), "{name} of {kind:?}");
                if let (Some(found), Some(expected)) = (found, expected) {
                    let slope = Tolerance::gradient(dtype).condition(tolerance);
                    assert_close(name, &found, &expected, None, slope);
                }
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
            let parameters = Parameters::random(positions, exact(device), device)?;
            for kind in KINDS {
                for options in &all {
                    parameters.check(kind, options, 10.0)?;
                }
            }
        }
        Ok(())
    }

    fn an_empty_batch_has_gradients_of_zero(device: &Device) -> Result<()> {
        let parameters = Parameters::random(0, exact(device), device)?;
        parameters.check(Kind::Softmaxes, &LossOptions::new().with_reduction(Reduction::Sum), 1.0)
    }

    fn every_dtype_is_served(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            let parameters = Parameters::random(6, dtype, device)?;
            // The sum is rounded to the dtype, and the contexts of the adapter are.
            for kind in KINDS {
                parameters.check(kind, &LossOptions::new(), 40.0)?;
            }
        }
        Ok(())
    }

    fn a_sampled_loss_computes_the_rows_of_the_sample(device: &Device) -> Result<()> {
        let parameters = Parameters::random(9, exact(device), device)?;
        let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(12, 3)?;
        let options = LossOptions::new().with_sampled_softmax(negatives.clone());
        for kind in KINDS {
            parameters.check(kind, &options, 10.0)?;
        }
        parameters.check(Kind::Softmax, &LossOptions::new().with_nce(negatives.clone()), 10.0)?;
        let [adapted, _] = parameters.heads(Kind::Softmax)?;
        let targets = Tensor::zeros(9, DType::U32, device)?;
        let error = adapted.loss(&parameters.hidden, &targets, &options.with_decoder_rows(true)).expect_err("rows");
        assert!(matches!(error, Error::Unsupported { option: OptionName::DecoderRows, .. }), "{error}");
        Ok(())
    }

    fn decoding_sees_the_sum(device: &Device) -> Result<()> {
        for positions in [1, 3, 80] {
            let parameters = Parameters::random(positions, exact(device), device)?;
            let hidden = parameters.hidden.as_tensor();
            for kind in KINDS {
                let [adapted, whole] = parameters.heads(kind)?;
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
                assert_close(
                    "frozen",
                    &numbers(&adapted.frozen()?.log_probs(hidden)?),
                    &numbers(&whole.log_probs(hidden)?),
                    None,
                    tolerance,
                );
            }
        }
        Ok(())
    }

    fn a_merged_head_has_no_adapter(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            let parameters = Parameters::random(4, dtype, device)?;
            let weight = parameters.weight.as_tensor().clone();
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
        let parameters = Parameters::random(5, exact(device), device)?;
        let targets = Tensor::zeros(5, DType::U32, device)?;
        let weight = parameters.weight.as_detached_tensor();
        for (a, b) in [(true, true), (true, false), (false, true)] {
            let trained = |var: &Var, is_trained| if is_trained { var.as_tensor().clone() } else { var.as_detached_tensor() };
            let adapter = LowRankAdapter::from_tensors(trained(&parameters.a, a), trained(&parameters.b, b), SCALE)?;
            let head = SoftmaxHead::from_tensors(weight.clone(), None)?.with_adapter(adapter)?;
            let hidden = parameters.hidden.as_detached_tensor();
            let found = head.loss(&hidden, &targets, &LossOptions::new())?.backward()?;
            let parts = [&parameters.a, &parameters.b, &parameters.weight, &parameters.hidden];
            assert_eq!(parts.map(|var| found.get(var).is_some()), [a, b, false, false]);
        }
        Ok(())
    }

    fn gradients_accumulate(device: &Device) -> Result<()> {
        let parameters = Parameters::random(6, exact(device), device)?;
        let targets = Tensor::new(&[1u32, 3, 5, 7, 9, 11], device)?;
        let [head, _] = parameters.heads(Kind::Softmaxes)?;
        let options = LossOptions::new().with_reduction(Reduction::Sum);
        let expected = head.loss(&parameters.hidden, &targets, &options)?.backward()?;
        let sum = GradientSum::new();
        for first in [0, 2, 4] {
            let hidden = parameters.hidden.narrow(0, first, 2)?;
            let options = options.clone().with_gradient_sum(&sum);
            sum.add(&head.loss(&hidden, &targets.narrow(0, first, 2)?, &options)?)?;
        }
        let found = sum.take();
        for (name, variable) in parameters.named() {
            let [found, expected] = [&found, &expected].map(|store| numbers(store.get(variable).expect(name)));
            assert_close(name, &found, &expected, None, Tolerance::gradient(exact(device)));
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
        let parameters = Parameters::random(4, dtype, device)?;
        let adapted = decoder.with_adapter(parameters.adapter()?)?;
        let merged = adapted.merged()?;
        let contexts = parameters.hidden.unsqueeze(1)?;
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
        for (shape, dtype) in [([9, 5], DType::F32), ([8, 6], DType::F32), ([9, 6], DType::BF16)] {
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
