//! A low-rank adapter in the files of Hugging Face's PEFT: what is written is read again, and what does not fit is an
//! error.

#[path = "common/values.rs"]
mod values;

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use mos_head::parts::{Decoder, LowRankAdapter};
use mos_head::{Error, OutputLayer, Result, SoftmaxHead};
use serde_json::{json, Value};
use values::{numbers, tensor};

const VOCAB: usize = 11;
const HIDDEN: usize = 5;

/// A folder that is removed when the value is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        Folder(std::env::temp_dir().join(format!("mos-head-{}-peft-{name}", std::process::id())))
    }

    /// A file as it stands in a folder of PEFT's.
    fn write(&self, config: &Value, tensors: &[(&str, Tensor)]) {
        std::fs::create_dir_all(&self.0).expect("a folder");
        std::fs::write(self.0.join("adapter_config.json"), config.to_string()).expect("a file");
        let tensors: HashMap<String, Tensor> =
            tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
        candle_core::safetensors::save(&tensors, self.0.join("adapter_model.safetensors")).expect("a file");
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn random(rows: usize, columns: usize) -> Tensor {
    tensor(&[rows, columns], rows, DType::F32).expect("a tensor")
}

fn decoder(dtype: DType) -> Decoder {
    let weight = random(VOCAB, HIDDEN).to_dtype(dtype).expect("a dtype");
    Decoder::from_tensors(weight, None).expect("a decoder")
}

/// The message of an error of a file, which it names.
fn message<T: std::fmt::Debug>(result: Result<T>, file: &str) -> String {
    match result {
        Err(error @ Error::Checkpoint { .. }) => {
            assert!(error.to_string().contains(file), "{error} does not name {file}");
            error.to_string()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_adapter_that_is_saved_is_read_again() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        for scale in [2.0, 0.75, 1.0 / 3.0] {
            let folder = Folder::new(&format!("round-{}-{scale}", dtype.as_str()));
            let adapter = LowRankAdapter::from_tensors(
                random(3, HIDDEN).to_dtype(dtype)?,
                random(VOCAB, 3).to_dtype(dtype)?,
                scale,
            )?;
            // A second save takes the place of the first.
            LowRankAdapter::from_tensors(random(2, HIDDEN), random(VOCAB, 2), 1.0)?.save(&folder.0)?;
            adapter.save(&folder.0)?;
            let head = SoftmaxHead::from_tensors(random(VOCAB, HIDDEN).to_dtype(dtype)?, None)?;
            let loaded = LowRankAdapter::load(&folder.0, head.decoder())?;
            assert_eq!((numbers(loaded.a()), numbers(loaded.b())), (numbers(adapter.a()), numbers(adapter.b())));
            assert_eq!((loaded.a().dtype(), loaded.b().dtype()), (dtype, dtype));
            assert_eq!(loaded.scale(), scale);
            let hidden = random(4, HIDDEN).to_dtype(dtype)?;
            let adapted =
                |adapter| -> Result<_> { Ok(numbers(&head.clone().with_adapter(adapter)?.log_probs(&hidden)?)) };
            assert_eq!(adapted(loaded)?, adapted(adapter)?);
        }
    }
    Ok(())
}

/// The file has the product of scale and rank, which is rounded.
#[test]
fn a_scale_is_read_to_rounding() -> Result<()> {
    let folder = Folder::new("scales");
    for scale in (1..100).map(|i| f64::from(i) * 0.0137) {
        LowRankAdapter::from_tensors(random(3, HIDDEN), random(VOCAB, 3), scale)?.save(&folder.0)?;
        let loaded = LowRankAdapter::load(&folder.0, &decoder(DType::F32))?.scale();
        assert!((loaded - scale).abs() <= f64::EPSILON * scale, "{loaded} {scale}");
    }
    Ok(())
}

#[test]
fn a_scale_that_peft_cannot_hold_is_an_error() -> Result<()> {
    let folder = Folder::new("large-scale");
    let adapter = LowRankAdapter::from_tensors(random(3, HIDDEN), random(VOCAB, 3), 1e308)?;
    let error = adapter.save(&folder.0).expect_err("3e308");
    assert!(matches!(error, Error::Config { argument: "scale", .. }), "{error:?}");
    Ok(())
}

#[test]
fn the_files_have_the_names_and_fields_of_peft() -> Result<()> {
    let folder = Folder::new("names");
    LowRankAdapter::from_tensors(random(8, HIDDEN), random(VOCAB, 8), 2.0)?.save(&folder.0)?;
    let config = std::fs::read_to_string(folder.0.join("adapter_config.json")).expect("a file");
    let config: Value = serde_json::from_str(&config).expect("an object");
    for (field, expected) in [
        ("peft_type", json!("LORA")),
        ("task_type", json!("CAUSAL_LM")),
        ("r", json!(8)),
        ("lora_alpha", json!(16)),
        ("target_modules", json!(["lm_head"])),
        ("bias", json!("none")),
    ] {
        assert_eq!(config[field], expected, "{field}");
    }
    let tensors = candle_core::safetensors::load(folder.0.join("adapter_model.safetensors"), &Device::Cpu)?;
    let mut shapes: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.dims())).collect();
    shapes.sort();
    let expected = [
        ("base_model.model.lm_head.lora_A.weight", &[8, HIDDEN][..]),
        ("base_model.model.lm_head.lora_B.weight", &[VOCAB, 8]),
    ];
    assert_eq!(shapes, expected);
    Ok(())
}

#[test]
fn an_adapter_among_those_of_other_modules_is_read() -> Result<()> {
    let folder = Folder::new("others");
    let (a, b) = (random(4, HIDDEN), random(VOCAB, 4));
    let others = random(4, 7);
    let tensors = [
        ("base_model.model.lm_head.lora_A.weight", a.clone()),
        ("base_model.model.lm_head.lora_B.weight", b.clone()),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", others.clone()),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", others),
        ("base_model.model.model.layers.0.self_attn.q_proj.bias", random(1, 7)),
    ];
    let config = json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "lm_head"] });
    folder.write(&config, &tensors);
    let loaded = LowRankAdapter::load(&folder.0, &decoder(DType::F64))?;
    assert_eq!((numbers(loaded.a()), numbers(loaded.b()), loaded.scale()), (numbers(&a), numbers(&b), 1.5));
    assert_eq!(loaded.a().dtype(), DType::F64);
    // Rank-stabilized: alpha over the square root of r. Initial values that leave the weight as it is.
    let config = json!({
        "peft_type": "LORA", "r": 4, "lora_alpha": 6.0, "use_rslora": true, "init_lora_weights": "gaussian"
    });
    folder.write(&config, &tensors);
    assert_eq!(LowRankAdapter::load(&folder.0, &decoder(DType::F32))?.scale(), 3.0);
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error_that_names_both() {
    let folder = Folder::new("errors");
    let names = ["base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"];
    let good = json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8 });
    let load = |config: &Value, tensors: &[(&str, Tensor)], file: &str| {
        folder.write(config, tensors);
        message(LowRankAdapter::load(&folder.0, &decoder(DType::F32)), file)
    };
    let tensors = |a: Tensor, b: Tensor| [(names[0], a), (names[1], b)];
    let file = "adapter_model.safetensors";
    for (a, b, expected) in [
        // Another rank, another width, another vocabulary.
        (random(3, HIDDEN), random(VOCAB, 3), "expected shape [4, 5] of base_model.model.lm_head.lora_A.weight"),
        (random(4, HIDDEN), random(VOCAB, 3), "expected shape [11, 4] of base_model.model.lm_head.lora_B.weight"),
        (random(4, 6), random(VOCAB, 4), "expected shape [4, 5] of base_model.model.lm_head.lora_A.weight"),
        (random(4, HIDDEN), random(12, 4), "expected shape [11, 4] of base_model.model.lm_head.lora_B.weight"),
    ] {
        let got = if expected.contains("lora_A") { a.dims() } else { b.dims() };
        let got = format!("got {got:?}");
        let found = load(&good, &tensors(a, b), file);
        assert!(found.contains(expected) && found.ends_with(&got), "{found}");
    }
    let (a, b) = (random(4, HIDDEN), random(VOCAB, 4));
    let found = load(&good, &[(names[0], a.clone())], file);
    assert!(found.ends_with("expected a tensor base_model.model.lm_head.lora_B.weight, got none"), "{found}");
    let twice = [tensors(a.clone(), b.clone()).to_vec(), vec![("lm_head.lora_A.weight", a.clone())]].concat();
    assert!(load(&good, &twice, file).contains("expected one tensor"));
    // PEFT names the bias of the decoder itself with and without `base_layer`.
    for name in ["lora_B.bias", "bias", "base_layer.bias"] {
        let bias = format!("base_model.model.lm_head.{name}");
        let biased = [tensors(a.clone(), b.clone()).to_vec(), vec![(bias.as_str(), b.clone())]].concat();
        assert!(load(&good, &biased, file).contains(&format!("{name} too")));
    }
    let integers = Tensor::zeros((4, HIDDEN), DType::U32, &Device::Cpu).expect("a tensor");
    assert!(load(&good, &tensors(integers, b.clone()), file).contains("in f32, got U32"));

    for (config, expected) in [
        (json!([1]), "a configuration of PEFT's, got no object"),
        (json!({ "peft_type": "IA3", "r": 4, "lora_alpha": 8 }), "peft_type \"LORA\", got \"IA3\""),
        (json!({ "r": 4, "lora_alpha": 8 }), "peft_type \"LORA\", got null"),
        (json!({ "peft_type": "LORA", "lora_alpha": 8 }), "r, a rank of at least 1, got null"),
        (json!({ "peft_type": "LORA", "r": 0, "lora_alpha": 8 }), "r, a rank of at least 1, got 0"),
        (json!({ "peft_type": "LORA", "r": 4 }), "lora_alpha, a number, got null"),
        (json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_dora": true }), "use_dora false"),
        (
            json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": "pissa_niter_4" }),
            "or an adapter that PEFT has converted, got pissa_niter_4",
        ),
        (
            json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": { "lm_head": 2 } }),
            "no alpha_pattern, got {\"lm_head\":2}",
        ),
    ] {
        let found = load(&config, &tensors(a.clone(), b.clone()), "adapter_config.json");
        assert!(found.contains(expected), "{found}");
    }
    let nothing = Folder::new("nothing");
    message(LowRankAdapter::load(&nothing.0, &decoder(DType::F32)), "adapter_config.json");
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error() -> Result<()> {
    let folder = Folder::new("file");
    std::fs::write(&folder.0, "not a folder").expect("a file");
    let adapter = LowRankAdapter::from_tensors(random(4, HIDDEN), random(VOCAB, 4), 1.0)?;
    message(adapter.save(folder.0.join("adapter")), "adapter");
    let _ = std::fs::remove_file(&folder.0);
    Ok(())
}
