//! Flags that the training programs share, and the checks of their paths.

use super::{leg::Leg, ranks::Ranks};
use crate::layers::{checkpoint::beside, HeadKind};
use crate::show::values::{above_zero, positive};
use crate::{show::DeviceKind, Result};
use clap::ValueEnum;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The flags that all programs which train have.
#[derive(Clone, Debug, clap::Args)]
pub struct TrainingFlags {
    /// Which heads to train [default: all, which are those of mos-head]
    #[arg(long, value_parser = ["softmax", "moc", "mos", "mixtape", "all"])]
    head: Option<String>,
    /// The seed of initial values, batches and masks.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the model of the best epoch so far to DIR/HEAD.safetensors, or to this file if it ends in .safetensors;
    /// the results at the end are those of this model
    #[arg(long, value_name = "FILE_OR_DIR")]
    pub save: Option<PathBuf>,
    /// Resume from a checkpoint [without a value: from the path of --save]
    #[arg(long, value_name = "FILE_OR_DIR", num_args = 0..=1)]
    pub resume: Option<Option<PathBuf>>,
    /// Stop after about N minutes, and write the state of training beside --save: the same command continues from it
    #[arg(long, value_name = "N", value_parser = above_zero, requires = "save")]
    minutes: Option<f64>,
    /// Write the learning curves to this SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Append a JSON line per head and evaluation to this file
    #[arg(long, value_name = "FILE")]
    pub results: Option<PathBuf>,
    /// Only compare N trials of each head: the defaults, and N - 1 with other learning rates, dropouts and activations
    #[arg(long, value_name = "N", value_parser = positive, conflicts_with_all = ["save", "resume", "minutes", "plot", "json"])]
    pub search: Option<usize>,
    /// Print one line of JSON at the end
    #[arg(long)]
    pub json: bool,
    /// The device.
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: DeviceKind,
    /// Heads that are not trained, and why.
    #[arg(skip)]
    pub left_out: Vec<(HeadKind, &'static str)>,
    /// The processes that train.
    #[arg(skip)]
    pub ranks: Ranks,
    /// The time at which the flags were read.
    #[arg(skip = Instant::now())]
    start: Instant,
}

impl TrainingFlags {
    /// Returns the heads to train.
    pub fn heads(&self) -> Vec<HeadKind> {
        let is_left_out = |kind: &HeadKind| self.left_out.iter().any(|(other, _)| other == kind);
        if self.asks_for_all() {
            return HeadKind::ALL.into_iter().filter(|kind| !is_left_out(kind)).collect();
        }
        let is_asked_for = |kind: &HeadKind| self.head() == Some(kind.name());
        HeadKind::value_variants().iter().copied().filter(is_asked_for).collect()
    }

    fn asks_for_all(&self) -> bool {
        [None, Some("all")].contains(&self.head())
    }

    /// Returns these flags; `--head all` leaves out the heads that `reason` speaks against.
    pub fn without(&self, reason: impl Fn(HeadKind) -> Option<&'static str>) -> Self {
        let all = HeadKind::ALL.into_iter().filter(|_| self.asks_for_all());
        let left_out = all.filter_map(|kind| Some((kind, reason(kind)?))).collect();
        Self { left_out, ..self.clone() }
    }

    fn head(&self) -> Option<&str> {
        self.head.as_deref()
    }

    /// Returns these flags, with this head if they have none.
    pub fn or_head(&self, head: &str) -> Self {
        Self { head: self.head.clone().or(Some(head.into())), ..self.clone() }
    }

    /// Returns the path of a head's checkpoint: DIR/HEAD.safetensors, or `path` itself if it ends in .safetensors.
    /// `flag` is for the error message.
    fn checkpoint_path(&self, path: &Path, flag: &str, kind: HeadKind) -> Result<PathBuf> {
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            return Ok(path.join(format!("{}.safetensors", kind.name())));
        }
        if self.asks_for_all() {
            return Err(format!("{flag} {} is one file, but --head all needs a folder", path.display()).into());
        }
        Ok(path.to_owned())
    }

    /// Returns where a head's checkpoint is saved; `None` without `--save`.
    pub(crate) fn save_path(&self, kind: HeadKind) -> Result<Option<PathBuf>> {
        self.save.as_deref().map(|path| self.checkpoint_path(path, "--save", kind)).transpose()
    }

    /// Returns the checkpoint from which a head's training is resumed; `None` without `--resume`.
    pub fn resume_path(&self, kind: HeadKind) -> Result<Option<PathBuf>> {
        match &self.resume {
            None => Ok(None),
            Some(Some(path)) => Ok(Some(self.checkpoint_path(path, "--resume", kind)?)),
            Some(None) if self.save.is_none() => Err("--resume without a path needs --save".into()),
            Some(None) => self.save_path(kind),
        }
    }

    /// Returns the leg that `--minutes` asks for. Its file is DIR/HEAD.leg.safetensors, beside the checkpoint of
    /// `--save`.
    pub fn leg(&self, kind: HeadKind) -> Result<Option<Leg>> {
        let Some((minutes, save)) = self.minutes.zip(self.save_path(kind)?) else { return Ok(None) };
        let until = Duration::try_from_secs_f64(60.0 * minutes).ok().and_then(|time| self.start.checked_add(time));
        let until = until.ok_or_else(|| format!("--minutes is {minutes}, expected a time that comes"))?;
        Ok(Some(Leg { path: save.with_extension("leg.safetensors"), until }))
    }

    /// Fails if a file that the flags name cannot be written by the rank that writes it.
    pub(crate) fn check_outputs(&self) -> Result<()> {
        if !self.ranks.is_first() {
            return Ok(());
        }
        for kind in self.heads() {
            if let Some(path) = self.save_path(kind)? {
                if let Some(folder) = path.parent() {
                    std::fs::create_dir_all(folder).map_err(|error| unwritable("--save", &path, error))?;
                }
                check_writable("--save", &path)?;
                check_writable("--save", &beside(&path))?;
            }
        }
        for (flag, path) in [("--plot", &self.plot), ("--results", &self.results)] {
            path.iter().try_for_each(|path| check_writable(flag, path))?;
        }
        Ok(())
    }
}

/// Opens the file for writing, and removes it again if it is new.
fn check_writable(flag: &str, path: &Path) -> Result<()> {
    let is_new = !path.exists();
    OpenOptions::new().create(true).append(true).open(path).map_err(|error| unwritable(flag, path, error))?;
    if is_new {
        std::fs::remove_file(path).map_err(|error| unwritable(flag, path, error))?;
    }
    Ok(())
}

fn unwritable(flag: &str, path: &Path, error: std::io::Error) -> String {
    format!("{flag} {} cannot be written: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Args {
        #[command(flatten)]
        flags: TrainingFlags,
    }

    #[test]
    fn a_path_that_cannot_be_written_is_an_error_that_names_flag_and_path() {
        let folder = std::env::temp_dir().join(format!("flags_{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("creates");
        let file = folder.join("file");
        std::fs::write(&file, "content").expect("writes");
        let check = |flag: &str, path: &Path| {
            let args = [flag.as_ref(), path.as_os_str()];
            let flags = Args::try_parse_from(["program".as_ref()].into_iter().chain(args)).expect("valid").flags;
            flags.check_outputs().map_err(|error| error.to_string())
        };
        for flag in ["--save", "--plot", "--results"] {
            let below = file.join("x.svg"); // below a file
            let error = check(flag, &below).expect_err("must fail");
            assert!(error.contains(flag) && error.contains("file"), "{error}");
            if flag != "--save" {
                assert!(check(flag, &folder).expect_err("a folder").contains(flag));
                let new = folder.join("new");
                assert_eq!(check(flag, &new), Ok(()));
                assert!(!new.exists(), "the check removes a new file");
                assert_eq!(check(flag, &file), Ok(()));
                assert_eq!(std::fs::read_to_string(&file).expect("still exists"), "content");
            }
        }
        assert_eq!(check("--save", &folder.join("new")), Ok(()));
        std::fs::remove_dir_all(folder).expect("was just written");
    }
}
