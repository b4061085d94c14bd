//! What several examples ask of their flags.

use super::head::{HeadChoice, HeadKind};
use super::Result;
use std::path::{Path, PathBuf};

/// Where a head's checkpoint is: DIR/HEAD.safetensors, or the file itself if `path` ends in .safetensors. `flag` is for the
/// error message.
pub(crate) fn checkpoint_path(path: &Path, flag: &str, choice: HeadChoice, kind: HeadKind) -> Result<PathBuf> {
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
