//! The files of a low-rank adapter, as Hugging Face's PEFT writes and reads them.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use safetensors::tensor::TensorInfo;
use serde_json::{json, Map, Value};

use super::adapter::LowRankAdapter;
use super::Decoder;
use crate::error::{Error, Result};
use crate::tensors::checks::check_number;
use crate::tensors::tensor_file::{tensor_from_bytes, write_error, write_values, PendingFile, TensorEntry, TensorFile};

/// PEFT's name of the file of tensors.
const TENSORS: &str = "adapter_model.safetensors";
/// PEFT's name of the file of the configuration.
const CONFIG: &str = "adapter_config.json";

/// The decoder's name in language models of Hugging Face.
const MODULE: &str = "lm_head";

/// PEFT's methods of initial values that leave the weight as it is. Others, such as PiSSA, subtract the initial adapter
/// from it.
const KEEPS_WEIGHT: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// The prefix that PEFT puts before the names of a model's tensors.
const PREFIX: &str = "base_model.model.";

impl LowRankAdapter {
    /// Writes the adapter to a folder as PEFT does, for the decoder of a model of Hugging Face:
    /// `adapter_model.safetensors` with `base_model.model.lm_head.lora_A.weight` and `.lora_B.weight`, and
    /// `adapter_config.json` with `r`, `lora_alpha` (the scale times r, an integer if it is whole) and
    /// `target_modules`. The folder is created if it does not exist; each file replaces an older one once it is
    /// complete.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a file cannot be written, [`Error::Config`] if the product of scale and rank is not
    /// finite.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use mos_head::parts::LowRankAdapter;
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let random = |shape: (usize, usize)| Tensor::randn(0f32, 0.1, shape, &Device::Cpu);
    /// let folder = std::env::temp_dir().join(format!("adapter-of-{}", std::process::id()));
    /// LowRankAdapter::from_tensors(random((8, 64))?, random((1000, 8))?, 2.0)?.save(&folder)?; // r 8, lora_alpha 16
    ///
    /// let head = SoftmaxHead::from_tensors(random((1000, 64))?, None)?;
    /// let adapter = LowRankAdapter::load(&folder, head.decoder())?;
    /// assert_eq!((adapter.rank(), adapter.scale()), (8, 2.0));
    /// let adapted = head.with_adapter(adapter)?;
    /// # assert!(adapted.decoder().adapter().is_some());
    /// # let _ = std::fs::remove_dir_all(folder);
    /// # Ok(())
    /// # }
    /// ```
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<()> {
        let folder = folder.as_ref();
        let expected = "a number whose product with the rank is finite";
        check_number(self.alpha().is_finite(), "scale", expected, self.scale())?;
        std::fs::create_dir_all(folder)
            .map_err(|error| Error::checkpoint(folder, "a folder that can be made", error))?;
        let path = folder.join(TENSORS);
        let entries = [("lora_A", self.a()), ("lora_B", self.b())].map(|(matrix, values)| TensorEntry {
            name: format!("{PREFIX}{MODULE}.{matrix}.weight"),
            dtype: values.dtype().into(),
            shape: values.dims().to_vec(),
            values,
        });
        let tensors = PendingFile::write_tensors(&path, entries.into(), |tensor, writer| {
            write_values(tensor, writer).map_err(|error| write_error(&path, error))
        })?;
        let path = folder.join(CONFIG);
        let config = format!("{:#}\n", self.peft_config());
        let config = PendingFile::write(&path, |writer| {
            std::io::Write::write_all(writer, config.as_bytes()).map_err(|error| write_error(&path, error))
        })?;
        tensors.put_in_place()?;
        config.put_in_place()
    }

    /// Returns PEFT's alpha.
    fn alpha(&self) -> f64 {
        self.scale() * self.rank() as f64
    }

    /// Returns the fields that tell PEFT what the tensors are; all others have PEFT's defaults.
    fn peft_config(&self) -> Value {
        let alpha = self.alpha();
        // PEFT writes a whole number where it can.
        let is_whole = alpha.fract() == 0.0 && alpha.abs() < (1u64 << 53) as f64;
        json!({
            "base_model_name_or_path": null,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "lora_alpha": if is_whole { json!(alpha as i64) } else { json!(alpha) },
            "lora_dropout": 0.0,
            "modules_to_save": null,
            "peft_type": "LORA",
            "r": self.rank(),
            "target_modules": [MODULE],
            "task_type": "CAUSAL_LM",
            "use_dora": false,
            "use_rslora": false,
        })
    }

    /// Reads the adapter of a decoder from a folder that [`LowRankAdapter::save`] or PEFT has written, in the decoder's
    /// dtype and on its device. It skips adapters of other modules. The matrices are constants: to train them further,
    /// make an adapter by [`LowRankAdapter::from_tensors`] from variables with their values.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a file cannot be read, the rank of the tensors is not the `r` of the configuration, or
    /// their width or number of token ids is not the decoder's; the error names both. Also if the configuration is for
    /// another method than LoRA, or for a variant with more than two matrices (DoRA, a bias), or for initial values
    /// that changed the decoder's weight (PiSSA, OLoRA, CorDA), or sets a rank or an alpha for a pattern of names.
    pub fn load(folder: impl AsRef<Path>, decoder: &Decoder) -> Result<Self> {
        let folder = folder.as_ref();
        let config = PeftConfig::read(folder.join(CONFIG))?;
        let file = TensorFile::open(&folder.join(TENSORS))?;
        check_no_bias(&file)?;
        let [(a, a_info), (b, b_info)] = [find_matrix(&file, "lora_A")?, find_matrix(&file, "lora_B")?];
        let rank = config.rank()?;
        let [vocab_size, context_dim] = [decoder.vocab_size(), decoder.context_dim()];
        for (name, info, expected, sizes) in [
            (&a, a_info, [rank, context_dim], "r of adapter_config.json and the decoder's context_dim"),
            (&b, b_info, [vocab_size, rank], "the decoder's vocab_size and r of adapter_config.json"),
        ] {
            if info.shape != expected {
                let expected = format!("shape {expected:?} of {name}, {sizes}");
                return Err(Error::checkpoint(&file.path, expected, format!("{:?}", info.shape)));
            }
        }
        let (dtype, device) = match decoder.parameter() {
            Some(parameter) => (parameter.dtype(), parameter.device()),
            // An adapter beside quantised rows.
            None => (DType::F32, &Device::Cpu),
        };
        let read = |name: &str, info: &TensorInfo| {
            let byte_count = info.data_offsets.1 - info.data_offsets.0;
            let mut bytes = Vec::with_capacity(byte_count);
            file.read_blocks(info, 0..byte_count, |block| {
                bytes.extend_from_slice(block);
                Ok(())
            })?;
            tensor_from_bytes(bytes, info.dtype, &info.shape, dtype, device)?.ok_or_else(|| {
                Error::checkpoint(&file.path, format!("{name} in {}", dtype.as_str()), format!("{:?}", info.dtype))
            })
        };
        Self::from_tensors(read(&a, a_info)?, read(&b, b_info)?, config.scale(rank)?)
    }
}

/// Checks that a file has no bias of the decoder, or of its adapter, which was trained with the matrices.
fn check_no_bias(file: &TensorFile) -> Result<()> {
    let is_bias = |name: &&String| name.ends_with(".bias") && name.split('.').any(|part| part == MODULE);
    match file.header.offset_keys().iter().find(is_bias) {
        Some(bias) => Err(Error::checkpoint(&file.path, "two matrices of the adapter", format!("{bias} too"))),
        None => Ok(()),
    }
}

/// Finds a matrix of the decoder's adapter in a file, by the end of its name; returns the name and the entry in the
/// header.
fn find_matrix<'a>(file: &'a TensorFile, matrix: &str) -> Result<(String, &'a TensorInfo)> {
    let ending = format!("{MODULE}.{matrix}.weight");
    let is_decoder_matrix =
        |name: &&String| name.strip_suffix(&ending).is_some_and(|before| before.is_empty() || before.ends_with('.'));
    let names = file.header.offset_keys();
    let mut found = names.iter().filter(is_decoder_matrix);
    match (found.next(), found.next()) {
        (Some(name), None) => Ok((name.clone(), file.info(name)?)),
        (None, _) => Err(Error::checkpoint(&file.path, format!("a tensor {PREFIX}{ending}"), "none")),
        (Some(first), Some(second)) => {
            let got = format!("{first} and {second}");
            Err(Error::checkpoint(&file.path, format!("one tensor whose name ends in {ending}"), got))
        }
    }
}

/// The contents of PEFT's file of the configuration.
struct PeftConfig {
    path: PathBuf,
    fields: Map<String, Value>,
}

impl PeftConfig {
    /// Reads a configuration, and checks that it is for LoRA without variants.
    fn read(path: PathBuf) -> Result<Self> {
        let expected = "a configuration of PEFT's";
        let bytes = std::fs::read(&path).map_err(|error| Error::checkpoint(&path, expected, error))?;
        let fields: Value =
            serde_json::from_slice(&bytes).map_err(|error| Error::checkpoint(&path, expected, error))?;
        let Value::Object(fields) = fields else {
            return Err(Error::checkpoint(&path, expected, "no object"));
        };
        let config = PeftConfig { path, fields };
        match config.get("peft_type").as_str() {
            Some("LORA") => {}
            _ => return Err(config.error("peft_type \"LORA\"", config.get("peft_type"))),
        }
        if config.is_true("use_dora") {
            return Err(config.error("use_dora false, without a vector of magnitudes", "true"));
        }
        if let Some(method) = config.get("init_lora_weights").as_str().filter(|method| !KEEPS_WEIGHT.contains(method)) {
            let expected = "init_lora_weights that leaves the weight as it is, or an adapter that PEFT has converted";
            return Err(config.error(expected, method));
        }
        for pattern in ["rank_pattern", "alpha_pattern"] {
            if config.get(pattern).as_object().is_some_and(|names| !names.is_empty()) {
                return Err(config.error(&format!("no {pattern}"), config.get(pattern)));
            }
        }
        Ok(config)
    }

    /// Returns a field, or null if there is none.
    fn get(&self, field: &str) -> &Value {
        self.fields.get(field).unwrap_or(&Value::Null)
    }

    /// Returns whether a field is true.
    fn is_true(&self, field: &str) -> bool {
        self.get(field).as_bool().unwrap_or(false)
    }

    /// Makes the error of this file.
    fn error(&self, expected: &str, got: impl Display) -> Error {
        Error::checkpoint(&self.path, expected, got.to_string())
    }

    /// Returns the rank, `r`.
    fn rank(&self) -> Result<usize> {
        let rank = self.get("r").as_u64().and_then(|rank| usize::try_from(rank).ok()).filter(|&rank| rank > 0);
        rank.ok_or_else(|| self.error("r, a rank of at least 1", self.get("r")))
    }

    /// Returns the factor s of an adapter of this rank. PEFT divides alpha by the square root of the rank for
    /// rank-stabilized adapters.
    fn scale(&self, rank: usize) -> Result<f64> {
        let alpha = self.get("lora_alpha");
        let alpha = alpha.as_f64().ok_or_else(|| self.error("lora_alpha, a number", alpha))?;
        let rank = rank as f64;
        Ok(alpha / if self.is_true("use_rslora") { rank.sqrt() } else { rank })
    }
}
