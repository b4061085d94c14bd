//! A checkpoint: one safetensors file with named f32 tensors and a few strings in its header.

use super::init::sorted;
use crate::Result;
use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use safetensors::tensor::SafeTensors;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The key of a checkpoint for a function of the logits; without it, the function is the identity.
pub(crate) const LOGIT_FUNCTION: &str = "logit-function";

/// Named tensors and settings, as a file has them.
#[derive(Default)]
pub struct Checkpoint {
    /// Parameters and the optimizer's state, by name.
    pub tensors: HashMap<String, Tensor>,
    /// Settings, by name.
    pub metadata: HashMap<String, String>,
}

impl Checkpoint {
    /// Writes a file beside `path` and renames it, so that an interrupted save leaves the last checkpoint intact.
    pub fn save(&self, path: &Path) -> Result<()> {
        let file = safetensors::serialize(&self.tensors, Some(self.metadata.clone()))?;
        let failed = |error| format!("cannot write the checkpoint {}: {error}", path.display());
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        let partial = beside(path);
        std::fs::write(&partial, file).map_err(failed)?;
        std::fs::rename(&partial, path).map_err(failed)?;
        Ok(())
    }

    /// Reads a file.
    pub fn load(path: &Path, device: &Device) -> Result<Self> {
        let failed = |error: &dyn std::fmt::Display| format!("cannot read the checkpoint {}: {error}", path.display());
        let file = std::fs::read(path).map_err(|error| failed(&error))?;
        // PyTorch's files are zip archives, or, before version 1.6, bare pickles.
        if file.starts_with(b"PK") || file.starts_with(&[0x80]) && file.get(8).is_none_or(|byte| *byte != b'{') {
            return Err(
                failed(&"it is a PyTorch pickle, not safetensors: scripts/resave-released.py converts it").into()
            );
        }
        if file.starts_with(b"version https://git-lfs") {
            return Err(failed(&"it is a pointer of Git LFS, whose file has not been fetched (git lfs pull)").into());
        }
        let (_, header) = SafeTensors::read_metadata(&file).map_err(|error| failed(&error))?;
        let tensors = candle_core::safetensors::load_buffer(&file, device).map_err(|error| failed(&error))?;
        Ok(Self { tensors, metadata: header.metadata().clone().unwrap_or_default() })
    }

    /// Adds the variables.
    pub fn insert_variables(&mut self, varmap: &VarMap) {
        self.tensors.extend(sorted(varmap).into_iter().map(|(name, var)| (name, var.as_tensor().clone())));
    }

    /// Sets the variables, which must have the stored shapes.
    pub fn restore_variables(&self, varmap: &VarMap) -> Result<()> {
        for (name, var) in sorted(varmap) {
            let saved = self.tensors.get(&name).ok_or_else(|| format!("the checkpoint has no tensor {name}"))?;
            if saved.dims() != var.dims() {
                let (saved, wanted) = (saved.dims(), var.dims());
                return Err(format!("the checkpoint's {name} is {saved:?}, expected {wanted:?}").into());
            }
            var.set(saved)?;
        }
        Ok(())
    }

    /// Returns the parsed value of `key`.
    pub fn get<T: std::str::FromStr>(&self, key: &str) -> Result<T> {
        let value = self.metadata.get(key).ok_or_else(|| format!("the checkpoint has no {key}"))?;
        value.parse().map_err(|_| format!("the checkpoint's {key} is {value:?}, which is not a valid value").into())
    }

    /// Returns the parsed value of `key`, if there is one.
    pub fn optional<T: std::str::FromStr>(&self, key: &str) -> Result<Option<T>> {
        self.metadata.contains_key(key).then(|| self.get(key)).transpose()
    }

    /// Fails unless the checkpoint has these values of flags.
    pub(crate) fn require_flags(&self, settings: &[(&str, String)]) -> Result<()> {
        for (flag, wanted) in settings {
            let stored: String = self.get(flag)?;
            if stored != *wanted {
                return Err(format!("the checkpoint has --{flag} {stored}, but this run has --{flag} {wanted}").into());
            }
        }
        let stored = self.metadata.get(LOGIT_FUNCTION);
        if let Some(stored) = stored.filter(|_| !settings.iter().any(|(flag, _)| *flag == LOGIT_FUNCTION)) {
            let flag = format!("--{LOGIT_FUNCTION}");
            return Err(format!("the checkpoint has {flag} {stored}, but this run has {flag} identity").into());
        }
        Ok(())
    }

    /// Fails unless the checkpoint was made on this corpus.
    pub fn require_corpus(&self, name: &str, digest: &str) -> Result<()> {
        let (stored, stored_digest): (String, String) = (self.get("corpus")?, self.get("digest")?);
        if stored_digest != digest {
            return Err(format!(
                "the checkpoint was made on {stored} (digest {stored_digest}), but the corpus of this run is {name} \
                 (digest {digest}): take the same data and --seed"
            )
            .into());
        }
        Ok(())
    }
}

/// Returns the file that a checkpoint is written to before it is renamed.
pub(crate) fn beside(path: &Path) -> PathBuf {
    path.with_extension("partial")
}
