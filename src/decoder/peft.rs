//! The files of a low-rank adapter, as Hugging Face's PEFT writes and reads them.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorInfo;
use serde_json::{json, Map, Value};

use super::adapter::LowRankAdapter;
use super::Decoder;
use crate::error::{Error, Result};
use crate::tensors::tensor_file::{tensor_of, unwritten, write_values, TensorEntry, TensorFile, Unplaced};

/// PEFT's names of the two files.
const TENSORS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// The name of the decoder in a language model of Hugging Face's.
const MODULE: &str = "lm_head";

/// What PEFT puts before the names of a model's tensors.
const PREFIX: &str = "base_model.model.";

impl LowRankAdapter {
    /// Writes the adapter to a folder as PEFT does, for the decoder of a model of Hugging Face's: `adapter_model.safetensors`
    /// with `base_model.model.lm_head.lora_A.weight` and `.lora_B.weight`, and `adapter_config.json` with `r`, `lora_alpha`
    /// (the scale times r) and `target_modules`. The folder is made if there is none; each file takes the place of an
    /// earlier one once it is complete.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a file cannot be written.
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
        std::fs::create_dir_all(folder)
            .map_err(|error| Error::checkpoint(folder, "a folder that can be made", error))?;
        let path = folder.join(TENSORS);
        let listed = [("lora_A", self.a()), ("lora_B", self.b())].map(|(matrix, values)| TensorEntry {
            name: format!("{PREFIX}{MODULE}.{matrix}.weight"),
            dtype: values.dtype().into(),
            shape: values.dims().to_vec(),
            values,
        });
        let tensors = Unplaced::write_tensors(&path, listed.into(), |tensor, writer| {
            write_values(tensor, writer).map_err(|error| unwritten(&path, error))
        })?;
        let path = folder.join(CONFIG);
        let config = format!("{:#}\n", self.peft_config());
        let config = Unplaced::write(&path, |writer| {
            std::io::Write::write_all(writer, config.as_bytes()).map_err(|error| unwritten(&path, error))
        })?;
        tensors.place()?;
        config.place()
    }

    /// The fields that tell PEFT what the tensors are; all others have its defaults.
    fn peft_config(&self) -> Value {
        let alpha = self.scale() * self.rank() as f64;
        // PEFT's is a whole number, where it can be one.
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

    /// Reads the adapter of a decoder from a folder that [`LowRankAdapter::save`] or PEFT has written, in the decoder's dtype
    /// and on its device. Adapters of other modules in it are not read. The matrices are constants: to train them further,
    /// make an adapter by [`LowRankAdapter::from_tensors`] of variables with their values.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a file cannot be read, the rank of the tensors is not the `r` of the configuration, or their
    /// width or number of token ids is not the decoder's; the error names both. Also if the configuration is of another
    /// method than LoRA, or of a variant with more than two matrices (DoRA, a bias), or has a rank or alpha for a pattern of
    /// names.
    pub fn load(folder: impl AsRef<Path>, decoder: &Decoder) -> Result<Self> {
        let folder = folder.as_ref();
        let config = PeftConfig::read(folder.join(CONFIG))?;
        let file = TensorFile::open(&folder.join(TENSORS))?;
        let [(a, of_a), (b, of_b)] = [matrix(&file, "lora_A")?, matrix(&file, "lora_B")?];
        let rank = config.rank()?;
        let [vocab_size, context_dim] = [decoder.vocab_size(), decoder.context_dim()];
        for (name, info, expected, what) in [
            (&a, of_a, [rank, context_dim], "r of adapter_config.json and the decoder's context_dim"),
            (&b, of_b, [vocab_size, rank], "the decoder's vocab_size and r of adapter_config.json"),
        ] {
            if info.shape != expected {
                let expected = format!("shape {expected:?} of {name}, {what}");
                return Err(Error::checkpoint(&file.path, expected, format!("{:?}", info.shape)));
            }
        }
        let parameter = decoder.parameter();
        let read = |name: &str, info: &TensorInfo| {
            let mut bytes = Vec::with_capacity(info.data_offsets.1 - info.data_offsets.0);
            file.read(info, 0..info.data_offsets.1 - info.data_offsets.0, |block| {
                bytes.extend_from_slice(block);
                Ok(())
            })?;
            let dtype = parameter.dtype();
            tensor_of(bytes, (info.dtype, &info.shape), dtype, parameter.device())?.ok_or_else(|| {
                Error::checkpoint(&file.path, format!("{name} in {}", dtype.as_str()), format!("{:?}", info.dtype))
            })
        };
        Self::from_tensors(read(&a, of_a)?, read(&b, of_b)?, config.scale(rank)?)
    }
}

/// The name of the decoder's matrix in a file, whatever is before the module's, and what its header says of it.
fn matrix<'a>(file: &'a TensorFile, matrix: &str) -> Result<(String, &'a TensorInfo)> {
    let ending = format!("{MODULE}.{matrix}.weight");
    let is_of_module =
        |name: &&String| name.strip_suffix(&ending).is_some_and(|before| before.is_empty() || before.ends_with('.'));
    let names = file.header.offset_keys();
    if let Some(bias) = names.iter().find(|name| name.ends_with(&format!("{MODULE}.{matrix}.bias"))) {
        return Err(Error::checkpoint(&file.path, "two matrices of the adapter", format!("{bias} too")));
    }
    let mut found = names.iter().filter(is_of_module);
    match (found.next(), found.next()) {
        (Some(name), None) => Ok((name.clone(), file.info(name)?)),
        (None, _) => Err(Error::checkpoint(&file.path, format!("a tensor {PREFIX}{ending}"), "none")),
        (Some(first), Some(second)) => {
            let got = format!("{first} and {second}");
            Err(Error::checkpoint(&file.path, format!("one tensor whose name ends in {ending}"), got))
        }
    }
}

/// A configuration of PEFT's.
struct PeftConfig {
    path: PathBuf,
    fields: Map<String, Value>,
}

impl PeftConfig {
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
            _ => return Err(config.fails("peft_type \"LORA\"", config.get("peft_type"))),
        }
        if config.is("use_dora") {
            return Err(config.fails("use_dora false, without a vector of magnitudes", "true"));
        }
        for pattern in ["rank_pattern", "alpha_pattern"] {
            if config.get(pattern).as_object().is_some_and(|names| !names.is_empty()) {
                return Err(config.fails(&format!("no {pattern}"), config.get(pattern)));
            }
        }
        Ok(config)
    }

    /// A field, or null.
    fn get(&self, field: &str) -> &Value {
        self.fields.get(field).unwrap_or(&Value::Null)
    }

    fn is(&self, field: &str) -> bool {
        self.get(field).as_bool().unwrap_or(false)
    }

    fn fails(&self, expected: &str, got: impl Display) -> Error {
        Error::checkpoint(&self.path, expected, got.to_string())
    }

    fn rank(&self) -> Result<usize> {
        let rank = self.get("r").as_u64().and_then(|rank| usize::try_from(rank).ok()).filter(|&rank| rank > 0);
        rank.ok_or_else(|| self.fails("r, a rank of at least 1", self.get("r")))
    }

    /// The factor s of an adapter of this rank; PEFT divides by the square root of the rank for rank-stabilized ones.
    fn scale(&self, rank: usize) -> Result<f64> {
        let alpha = self.get("lora_alpha");
        let alpha = alpha.as_f64().ok_or_else(|| self.fails("lora_alpha, a number", alpha))?;
        let rank = rank as f64;
        Ok(alpha / if self.is("use_rslora") { rank.sqrt() } else { rank })
    }
}
