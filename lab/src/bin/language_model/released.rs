//! Checkpoints of the released PyTorch code of the mixture of softmaxes (and of AWD-LSTM, on which it is built), with
//! its own names, as `scripts/resave-released.py` writes them.

use candle_core::Tensor;
use lab::layers::{Checkpoint, HeadKind};
use lab::Result;
use std::collections::HashMap;

/// A tensor's name here, and there.
const NAMES: [(&str, &str); 6] = [
    ("embedding.weight", "encoder.weight"),
    ("head.decoder.weight", "decoder.weight"),
    ("head.decoder.bias", "decoder.bias"),
    ("head.prior.weight", "prior.weight"),
    ("head.latent.weight", "latent.0.weight"),
    ("head.latent.bias", "latent.0.bias"),
];

/// The tensors of an LSTM layer. The recurrent weight comes with and without weight dropout.
const LAYER_NAMES: [(&str, &[&str]); 4] = [
    ("weight_ih_l0", &["module.weight_ih_l0", "weight_ih_l0"]),
    ("weight_hh_l0", &["module.weight_hh_l0_raw", "weight_hh_l0_raw", "module.weight_hh_l0", "weight_hh_l0"]),
    ("bias_ih_l0", &["module.bias_ih_l0", "bias_ih_l0"]),
    ("bias_hh_l0", &["module.bias_hh_l0", "bias_hh_l0"]),
];

/// Returns whether this file has the names of the released code.
pub(crate) fn is_released(file: &Checkpoint) -> bool {
    file.tensors.keys().any(|name| name.ends_with("encoder.weight"))
}

/// Returns the checkpoint with the names and settings of this program, without a state of training.
pub(crate) fn read(file: &Checkpoint) -> Result<Checkpoint> {
    // DataParallel puts a prefix before every name.
    let tensors: HashMap<&str, &Tensor> =
        file.tensors.iter().map(|(name, tensor)| (name.strip_prefix("module.").unwrap_or(name), tensor)).collect();
    let get = |names: &[String]| {
        let found = names.iter().find_map(|name| Some((name.clone(), (*tensors.get(name.as_str())?).clone())));
        found.ok_or_else(|| format!("the checkpoint has no tensor {}", names.join(" or ")))
    };
    let one = |name: &str| get(&[name.to_owned()]);
    let mut checkpoint = Checkpoint::default();

    let (name, encoder) = one("encoder.weight")?;
    let (vocab, embedding) = matrix(&name, &encoder)?;
    let layers = (0..).take_while(|layer| tensors.keys().any(|name| name.starts_with(&format!("rnns.{layer}."))));
    let mut units = vec![];
    for layer in layers {
        for (here, there) in LAYER_NAMES {
            let there: Vec<String> = there.iter().map(|name| format!("rnns.{layer}.{name}")).collect();
            let (name, tensor) = get(&there)?;
            if here == "weight_hh_l0" {
                units.push(matrix(&name, &tensor)?.1);
            }
            checkpoint.tensors.insert(format!("lstm.{layer}.{here}"), tensor);
        }
    }
    let Some((&hidden, inner)) = units.split_last() else { return Err("the checkpoint has no tensor rnns.0.*".into()) };
    let inner_units = inner.first().copied().unwrap_or(hidden);
    if inner.iter().any(|units| *units != inner_units) {
        return Err(format!("the layers below the last have {inner:?} units, expected equal numbers").into());
    }

    // Both names of a tied matrix may be there, or one.
    let decoder = tensors.get("decoder.weight").filter(|decoder| !is_same(decoder, &encoder));
    let width = decoder
        .map_or(Ok(embedding), |decoder| Ok::<_, Box<dyn std::error::Error>>(matrix("decoder.weight", decoder)?.1))?;
    let head = if tensors.contains_key("prior.weight") { HeadKind::Mos } else { HeadKind::Softmax };
    let mut wanted = vec!["encoder.weight", "decoder.bias"];
    if decoder.is_some() {
        wanted.push("decoder.weight");
    }
    if head == HeadKind::Mos {
        wanted.extend(["prior.weight", "latent.0.weight", "latent.0.bias"]);
    }
    for (here, there) in NAMES.into_iter().filter(|(_, there)| wanted.contains(there)) {
        checkpoint.tensors.insert(here.into(), one(there)?.1);
    }
    let mut settings = vec![
        ("head", head.name().to_owned()),
        ("vocab", vocab.to_string()),
        ("embedding", embedding.to_string()),
        ("hidden", hidden.to_string()),
        ("inner", inner_units.to_string()),
        ("layers", units.len().to_string()),
        ("tied", decoder.is_none().to_string()),
    ];
    if head == HeadKind::Mos {
        let (components, _) = matrix("prior.weight", &one("prior.weight")?.1)?;
        settings.extend([("components", components.to_string()), ("context", width.to_string())]);
        settings.push(("activation", "tanh".into()));
    }
    checkpoint.metadata.extend(settings.into_iter().map(|(key, value)| (key.to_owned(), value)));
    Ok(checkpoint)
}

/// Returns the model of a checkpoint of this program with the names of the released code.
pub(crate) fn write(checkpoint: &Checkpoint) -> Result<Checkpoint> {
    let lacking = match HeadKind::from_checkpoint(checkpoint)? {
        HeadKind::Moc => Some("mixture of contexts"),
        HeadKind::Mixtape => Some("Mixtape"),
        HeadKind::Softmax | HeadKind::Mos => None,
    };
    if let Some(head) = lacking {
        return Err(
            format!("the released code has no {head}: --export needs a softmax or a mixture of softmaxes").into()
        );
    }
    if checkpoint.tensors.keys().any(|name| name.ends_with("weight_hr_l0")) {
        return Err("the released code has no projected LSTM (--cells), which --export would lose".into());
    }
    if let Some(function) = checkpoint.optional::<String>("logit-function")? {
        return Err(format!("the released code has no --logit-function {function}, which --export would lose").into());
    }
    if checkpoint.optional::<String>("activation")?.is_some_and(|activation| activation != "tanh") {
        return Err("the contexts of the released code are tanh: --export needs --activation tanh".into());
    }
    let mut file = Checkpoint::default();
    for (name, tensor) in &checkpoint.tensors {
        let there = NAMES.iter().find(|(here, _)| here == name).map(|(_, there)| (*there).to_owned());
        let there = there.or_else(|| {
            let (layer, weight) = name.strip_prefix("lstm.")?.split_once('.')?;
            let (_, there) = LAYER_NAMES.iter().find(|(here, _)| *here == weight)?;
            Some(format!("rnns.{layer}.{}", there[0]))
        });
        if let Some(there) = there {
            file.tensors.insert(there, tensor.clone());
        }
    }
    if let Some(encoder) = file.tensors.get("encoder.weight").filter(|_| !file.tensors.contains_key("decoder.weight")) {
        file.tensors.insert("decoder.weight".into(), encoder.clone());
    }
    Ok(file)
}

fn matrix(name: &str, tensor: &Tensor) -> Result<(usize, usize)> {
    match tensor.dims() {
        &[rows, columns] => Ok((rows, columns)),
        dims => Err(format!("the checkpoint's {name} is {dims:?}, expected a matrix").into()),
    }
}

fn is_same(a: &Tensor, b: &Tensor) -> bool {
    let difference = || -> candle_core::Result<f32> { (a - b)?.abs()?.max_all()?.to_scalar() };
    a.dims() == b.dims() && difference().is_ok_and(|difference| difference == 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{nlls, readable, run, Evaluation, Method};
    use candle_core::{DType, Device};
    use lab::training::{LanguageModel, Model};
    use lab::{data::Corpus, layers::init::sorted};
    use serde_json::Value;
    use std::path::{Path, PathBuf};

    fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin/language_model/golden")
    }

    fn golden() -> Value {
        let text = std::fs::read_to_string(folder().join("golden.json")).expect("the golden file");
        serde_json::from_str(&text).expect("JSON")
    }

    /// Returns the text of the golden file as a corpus, in a folder of this name that is removed again.
    fn corpus(name: &str) -> Corpus {
        let golden = golden();
        let sentences: Vec<&str> = golden["sentences"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        let folder = std::env::temp_dir().join(format!("released_{name}_{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("creates");
        for file in ["train.txt", "valid.txt"] {
            std::fs::write(folder.join(file), sentences.join("\n")).expect("writes");
        }
        let corpus = Corpus::from_folder(&folder, None).expect("reads");
        std::fs::remove_dir_all(folder).expect("was just written");
        corpus
    }

    fn model(checkpoint: &Checkpoint) -> LanguageModel {
        LanguageModel::from_checkpoint(checkpoint, 9, &Device::Cpu).expect("a model").1
    }

    const METHOD: Method = Method { steps: 7, dynamic: None, cache: None, floor: 0.0 };

    #[test]
    fn the_likelihood_of_every_target_is_that_of_pytorch() {
        let (golden, corpus) = (golden(), corpus("likelihood"));
        for name in ["tied", "untied", "softmax"] {
            let file = folder().join(format!("{name}.safetensors"));
            let model = model(&readable(&file, &corpus, &Device::Cpu).expect("readable"));
            for (key, floor) in [("nll", 0.0), ("with_floor", 1e-8)] {
                let found = nlls(&model, &corpus.data.valid, Method { floor, ..METHOD }, "").expect("evaluates").plain;
                let expected: Vec<f64> =
                    golden[name][key].as_array().unwrap().iter().filter_map(Value::as_f64).collect();
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(&expected) {
                    assert!((found - expected).abs() < 1e-5, "{name} {key}: {found} is not {expected}");
                }
            }
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        for name in ["tied", "untied", "softmax"] {
            let file = Checkpoint::load(&folder().join(format!("{name}.safetensors")), &Device::Cpu).expect("loads");
            let first = read(&file).expect("reads");
            let written = write(&first).expect("writes");
            let raw = written.tensors.contains_key("rnns.0.module.weight_hh_l0_raw");
            assert!(raw && written.tensors.contains_key("decoder.weight") && is_released(&written), "{name}");
            let second = read(&written).expect("reads");
            assert_eq!(first.metadata, second.metadata);
            assert_eq!(first.tensors.len(), second.tensors.len());
            for (name, tensor) in &first.tensors {
                assert!(is_same(tensor, &second.tensors[name]), "{name}");
            }
            if name != "softmax" {
                let mut linear = read(&file).expect("reads");
                linear.metadata.insert("activation".into(), "identity".into());
                assert!(write(&linear).err().expect("not the released architecture").to_string().contains("tanh"));
                linear.metadata.insert("head".into(), "mixtape".into());
                assert!(write(&linear).err().expect("not the released architecture").to_string().contains("Mixtape"));
                linear.metadata.insert("head".into(), "softmax".into());
                linear.metadata.insert("activation".into(), "tanh".into());
                linear.metadata.insert("logit-function".into(), "sigsoftmax".into());
                assert!(write(&linear).err().expect("another function").to_string().contains("sigsoftmax"));
                linear.metadata.insert("head".into(), "moc".into());
                assert!(write(&linear).err().expect("not the released architecture").to_string().contains("contexts"));
            }
            // A model of this program has the same tensors.
            assert_eq!(sorted(model(&first).varmap()).len(), first.tensors.len());
        }
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let corpus = corpus("errors");
        let tied = || Checkpoint::load(&folder().join("tied.safetensors"), &Device::Cpu).expect("loads");
        let error = |change: &dyn Fn(&mut Checkpoint)| {
            let mut file = tied();
            change(&mut file);
            let model =
                |checkpoint: Checkpoint| LanguageModel::from_checkpoint(&checkpoint, 9, &Device::Cpu).map(|_| ());
            read(&file).and_then(model).expect_err("must fail").to_string()
        };
        for missing in ["latent.0.bias", "decoder.bias", "rnns.1.module.bias_hh_l0"] {
            let error = error(&|file| {
                file.tensors.remove(missing);
            });
            assert!(error.contains(missing), "{missing}: {error}");
        }
        let wrong = error(&|file| {
            let tensor = Tensor::zeros((3, 3), DType::F32, &Device::Cpu).unwrap();
            file.tensors.insert("latent.0.weight".into(), tensor);
        });
        assert!(wrong.contains("latent.weight") && wrong.contains("[3, 3]"), "{wrong}");
        let wrong = error(&|file| {
            file.tensors.insert("encoder.weight".into(), Tensor::zeros(9, DType::F32, &Device::Cpu).unwrap());
        });
        assert!(wrong.contains("encoder.weight") && wrong.contains("[9]"), "{wrong}");

        // Files: of another vocabulary, a pickle, not there; what --export names is not touched.
        let path = std::env::temp_dir().join(format!("released_{}.safetensors", std::process::id()));
        let export = path.with_extension("export");
        std::fs::write(&export, "before").unwrap();
        let evaluation = Evaluation {
            file: path.clone(),
            export: Some(export.clone()),
            steps: 5,
            dynamic: None,
            cache: None,
            floor: 0.0,
            json: false,
        };
        let error = |what: &dyn Fn()| {
            what();
            run(&evaluation, &corpus, &Device::Cpu).expect_err("must fail").to_string()
        };
        let missing = error(&|| ());
        assert!(missing.contains("cannot read"), "{missing}");
        let pickle = error(&|| std::fs::write(&path, b"PK\x03\x04 and more").unwrap());
        assert!(pickle.contains("pickle") && pickle.contains("resave-released.py"), "{pickle}");
        let legacy = error(&|| std::fs::write(&path, b"\x80\x02\x8a\nl\xfc\x9cF\xf9").unwrap());
        assert!(legacy.contains("pickle"), "{legacy}");
        let other = error(&|| {
            let mut file = tied();
            file.tensors.insert("encoder.weight".into(), Tensor::zeros((12, 6), DType::F32, &Device::Cpu).unwrap());
            file.tensors.remove("decoder.weight");
            file.save(&path).unwrap();
        });
        assert!(other.contains("vocabulary of 12") && other.contains('9'), "{other}");
        assert_eq!(std::fs::read_to_string(&export).unwrap(), "before");
        std::fs::remove_file(path).unwrap();
        std::fs::remove_file(export).unwrap();
    }
}
