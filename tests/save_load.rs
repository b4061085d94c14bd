//! Parameters by their documented names, saved to a file and loaded from it.

mod common;

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_core::DType;
use candle_nn::{Embedding, VarBuilder, VarMap};
use common::on_each_device;
use common::values::{numbers, tensor};
use mos_head::{MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, Result, SoftmaxConfig, SoftmaxHead};

const HIDDEN: usize = 9;
const CONTEXT: usize = 4;
const VOCAB: usize = 13;
const COMPONENTS: usize = 3;

type Build = fn(VarBuilder) -> Result<Box<dyn OutputLayer>>;

fn mixture() -> MixtureConfig {
    MixtureConfig::new(HIDDEN, VOCAB, COMPONENTS).with_context_dim(CONTEXT)
}

fn softmax() -> SoftmaxConfig {
    SoftmaxConfig::new(HIDDEN, VOCAB)
}

const BUILDS: [(&str, Build); 4] = [
    ("softmax", |vb| Ok(Box::new(SoftmaxHead::new(&softmax(), vb)?))),
    ("moc", |vb| Ok(Box::new(MixtureOfContexts::new(&mixture(), vb)?))),
    ("mos", |vb| Ok(Box::new(MixtureOfSoftmaxes::new(&mixture(), vb)?))),
    ("mos-prior-bias", |vb| {
        let config = mixture().with_prior_bias(true).with_decoder_bias(false);
        Ok(Box::new(MixtureOfSoftmaxes::new(&config, vb)?))
    }),
];

/// Names and shapes of all variables.
fn shapes(variables: &VarMap) -> BTreeMap<String, Vec<usize>> {
    let variables = variables.data().lock().expect("the variables");
    let shape = |(name, variable): (&String, &candle_core::Var)| (name.clone(), variable.dims().to_vec());
    variables.iter().map(shape).collect()
}

fn expected(parts: &[(&str, &[usize])]) -> BTreeMap<String, Vec<usize>> {
    let part = |(name, shape): &(&str, &[usize])| (name.to_string(), shape.to_vec());
    parts.iter().map(part).collect()
}

/// A file that is removed when the value is dropped.
struct TemporaryFile(PathBuf);

impl TemporaryFile {
    fn new(name: &str) -> Self {
        let name = format!("mos-head-{}-{name}.safetensors", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

on_each_device! {
    fn a_loaded_head_equals_the_saved_one(device: &Device) -> Result<()> {
        let hidden = tensor(&[2, 5, HIDDEN], 1, DType::F32)?.to_device(device)?;
        for (name, build) in BUILDS {
            let file = TemporaryFile::new(name);
            let saved = VarMap::new();
            let head = build(VarBuilder::from_varmap(&saved, DType::F32, device))?;
            saved.save(&file.0)?;

            let mut loaded = VarMap::new();
            let other = build(VarBuilder::from_varmap(&loaded, DType::F32, device))?;
            let expected = numbers(&head.log_probs(&hidden)?);
            assert_ne!(numbers(&other.log_probs(&hidden)?), expected, "{name}: heads start at random");
            loaded.load(&file.0)?;
            assert_eq!(numbers(&other.log_probs(&hidden)?), expected, "{name}");

            // The same without variables, as for inference.
            let tensors = candle_core::safetensors::load(&file.0, device)?;
            let frozen = build(VarBuilder::from_tensors(tensors, DType::F32, device))?;
            assert_eq!(numbers(&frozen.log_probs(&hidden)?), expected, "{name} frozen");
        }
        Ok(())
    }

    fn parameters_have_their_documented_names_and_shapes(device: &Device) -> Result<()> {
        let latent = COMPONENTS * CONTEXT;
        let mixture = [
            ("prior.weight", &[COMPONENTS, HIDDEN][..]),
            ("latent.weight", &[latent, HIDDEN]),
            ("latent.bias", &[latent]),
            ("decoder.weight", &[VOCAB, CONTEXT]),
            ("decoder.bias", &[VOCAB]),
        ];
        let with_prior_bias = [&mixture[..4], &[("prior.bias", &[COMPONENTS][..])]].concat();
        let softmax = [("decoder.weight", &[VOCAB, HIDDEN][..]), ("decoder.bias", &[VOCAB])];
        let parts = [&softmax[..], &mixture, &mixture, &with_prior_bias];
        for ((name, build), parts) in BUILDS.into_iter().zip(parts) {
            let variables = VarMap::new();
            let head = build(VarBuilder::from_varmap(&variables, DType::F32, device))?;
            assert_eq!(shapes(&variables), expected(parts), "{name}");
            assert_eq!((head.hidden_size(), head.vocab_size()), (HIDDEN, VOCAB), "{name}");
        }
        Ok(())
    }

    fn a_tied_head_has_no_decoder_weight_of_its_own(device: &Device) -> Result<()> {
        let embedding = |width| -> Result<_> {
            Ok(Embedding::new(tensor(&[VOCAB, width], 2, DType::F32)?.to_device(device)?, width))
        };
        let names = |variables: &VarMap| shapes(variables).into_keys().collect::<Vec<_>>();

        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, DType::F32, device);
        SoftmaxHead::tied(&softmax().with_decoder_bias(false), &embedding(HIDDEN)?, vb.pp("softmax"))?;
        assert!(names(&variables).is_empty());
        MixtureOfContexts::tied(&mixture(), &embedding(CONTEXT)?, vb.pp("moc"))?;
        MixtureOfSoftmaxes::tied(&mixture(), &embedding(CONTEXT)?, vb.pp("mos"))?;
        let own = ["decoder.bias", "latent.bias", "latent.weight", "prior.weight"];
        let all = ["moc", "mos"].map(|head| own.map(|name| format!("{head}.{name}")));
        assert_eq!(names(&variables), all.concat());
        Ok(())
    }

    fn parameters_start_as_in_the_released_code(device: &Device) -> Result<()> {
        let variables = VarMap::new();
        let config = MixtureConfig::new(100, 500, 5).with_context_dim(40).with_prior_bias(true);
        MixtureOfSoftmaxes::new(&config, VarBuilder::from_varmap(&variables, DType::F32, device))?;
        let variables = variables.data().lock().expect("the variables");
        let bounds = [
            ("decoder.weight", 0.1),
            ("prior.weight", 0.1),
            ("prior.bias", 0.1),
            ("latent.weight", 0.1),
            ("latent.bias", 0.1),
        ];
        for (name, bound) in bounds {
            let values = numbers(variables[name].as_tensor());
            // In f32 the bound itself, which may occur, is not this f64.
            assert!(values.iter().all(|x| x.abs() as f32 <= bound as f32), "{name} is within {bound}");
            if values.len() > 100 {
                // Uniform: standard deviation bound / sqrt(3), mean zero, each within six standard errors.
                let n = values.len() as f64;
                let mean = values.iter().sum::<f64>() / n;
                let deviation = (values.iter().map(|x| x * x).sum::<f64>() / n).sqrt();
                assert!(mean.abs() < 6.0 * bound / (3.0 * n).sqrt(), "{name}: mean {mean}");
                let ratio = deviation * 3.0_f64.sqrt() / bound;
                assert!((ratio - 1.0).abs() < 6.0 * 0.45 / n.sqrt(), "{name}: {deviation}");
            }
        }
        assert!(numbers(variables["decoder.bias"].as_tensor()).iter().all(|&x| x == 0.0));
        Ok(())
    }
}
