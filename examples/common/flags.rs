//! Flags that the training examples share, and the checks of their values.

use super::device::DeviceKind;
use super::head::{HeadChoice, HeadKind};
use super::Result;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct TrainingFlags {
    #[arg(long, value_enum, default_value = "all")]
    pub(crate) head: HeadChoice,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// After every epoch, write DIR/HEAD.safetensors, or this file if it ends in .safetensors
    #[arg(long, value_name = "FILE_OR_DIR")]
    pub(crate) save: Option<PathBuf>,
    /// Resume from a checkpoint [without a value: from the path of --save]
    #[arg(long, value_name = "FILE_OR_DIR", num_args = 0..=1)]
    pub(crate) resume: Option<Option<PathBuf>>,
    /// Write the learning curves to this SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Print one line of JSON at the end
    #[arg(long)]
    pub(crate) json: bool,
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) device: DeviceKind,
}

impl TrainingFlags {
    pub(crate) fn save_path(&self, kind: HeadKind) -> Result<Option<PathBuf>> {
        self.save.as_deref().map(|path| checkpoint_path(path, "--save", self.head, kind)).transpose()
    }

    pub(crate) fn resume_path(&self, kind: HeadKind) -> Result<Option<PathBuf>> {
        match &self.resume {
            None => Ok(None),
            Some(Some(path)) => Ok(Some(checkpoint_path(path, "--resume", self.head, kind)?)),
            Some(None) if self.save.is_none() => Err("--resume without a path needs --save".into()),
            Some(None) => self.save_path(kind),
        }
    }
}

/// The path of a head's checkpoint: DIR/HEAD.safetensors, or `path` itself if it ends in .safetensors. `flag` is for
/// the error message.
fn checkpoint_path(path: &Path, flag: &str, choice: HeadChoice, kind: HeadKind) -> Result<PathBuf> {
    if path.extension().is_none_or(|extension| extension != "safetensors") {
        return Ok(path.join(format!("{}.safetensors", kind.name())));
    }
    if choice == HeadChoice::All {
        return Err(format!("{flag} {} is one file, but --head all needs a folder", path.display()).into());
    }
    Ok(path.to_owned())
}

fn parse<T: std::str::FromStr>(
    value: &str,
    wanted: &str,
    valid: impl Fn(&T) -> bool,
) -> std::result::Result<T, String> {
    value.parse().ok().filter(valid).ok_or_else(|| format!("expected {wanted}"))
}

pub(crate) fn positive(value: &str) -> std::result::Result<usize, String> {
    parse(value, "a whole number of at least 1", |&x| x > 0)
}

pub(crate) fn above_zero(value: &str) -> std::result::Result<f64, String> {
    parse(value, "a number above 0", |&x: &f64| x > 0.0 && x.is_finite())
}

pub(crate) fn not_negative(value: &str) -> std::result::Result<f64, String> {
    parse(value, "a number of at least 0", |&x: &f64| x >= 0.0 && x.is_finite())
}

pub(crate) fn below_one(value: &str) -> std::result::Result<f64, String> {
    parse(value, "a number from 0 to below 1", |x| (0.0..1.0).contains(x))
}
