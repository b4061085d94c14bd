//! The flags, and the defaults that train out of the box: one set for the built-in language, one for real text.

use crate::common::{device::DeviceKind, optimizer::OptimizerKind, Result};
use crate::model::{ActivationKind, HeadKind, Sizes};
use crate::train::Recipe;
use clap::{Parser, ValueEnum};
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum HeadChoice {
    Softmax,
    Moc,
    Mos,
    All,
}

/// Trains an LSTM language model with a softmax, a mixture of contexts and a mixture of softmaxes at equal size.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Folder with train.txt, valid.txt and perhaps test.txt (whitespace tokens); without it, a built-in language
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    #[arg(long, value_enum, default_value = "all")]
    pub(crate) head: HeadChoice,
    /// Epochs in all, those of a resumed checkpoint included [default: 6; real text: 3]
    #[arg(long)]
    pub(crate) epochs: Option<usize>,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Mixture components K [default: 8; real text: 5]
    #[arg(long, value_parser = positive)]
    pub(crate) components: Option<usize>,
    /// LSTM units per layer [default: 6; real text: 220]
    #[arg(long, value_parser = positive)]
    pub(crate) hidden: Option<usize>,
    /// Embedding size [default: 32; real text: as --hidden]
    #[arg(long, value_parser = positive)]
    pub(crate) embedding: Option<usize>,
    /// Context size of the mixtures [default: what gives the softmax's number of parameters]
    #[arg(long, value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// Activation of the contexts [default: identity; real text: tanh]
    #[arg(long, value_enum)]
    pub(crate) activation: Option<ActivationKind>,
    /// Number of LSTM layers
    #[arg(long, default_value_t = 1, value_parser = positive)]
    pub(crate) layers: usize,
    /// Streams read side by side [default: 128; real text: 20]
    #[arg(long, value_parser = positive)]
    pub(crate) batch: Option<usize>,
    /// Steps of backpropagation through time [default: 4; real text: 35]
    #[arg(long, value_parser = positive)]
    pub(crate) bptt: Option<usize>,
    /// Learning rate at the start [default: adam 0.03, real text 0.001; sgd 20]
    #[arg(long, value_parser = above_zero)]
    pub(crate) lr: Option<f64>,
    /// Factor of the learning rate per epoch, applied smoothly [default: 0.6; real text: 0.5]
    #[arg(long, value_parser = above_zero)]
    pub(crate) decay: Option<f64>,
    /// [default: adam; real text: sgd]
    #[arg(long, value_enum)]
    pub(crate) optimizer: Option<OptimizerKind>,
    /// Largest global gradient norm, 0 for none [default: 0; real text: 0.25]
    #[arg(long, value_parser = not_negative)]
    pub(crate) clip: Option<f64>,
    /// Locked dropout on LSTM inputs, hidden states and contexts; the contexts' masks are not seeded on the CPU
    #[arg(long, default_value_t = 0.0, value_parser = below_one)]
    pub(crate) dropout: f64,
    /// After every epoch, write DIR/HEAD.safetensors, or this file if it ends in .safetensors
    #[arg(long, value_name = "FILE_OR_DIR")]
    pub(crate) save: Option<PathBuf>,
    /// Go on from a checkpoint [without a value: from where --save writes]
    #[arg(long, value_name = "FILE_OR_DIR", num_args = 0..=1)]
    pub(crate) resume: Option<Option<PathBuf>>,
    /// Print so many tokens sampled from each model
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) generate: usize,
    /// Draw the learning curves into this SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// End stdout with one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) device: DeviceKind,
}

impl Args {
    pub(crate) fn heads(&self) -> Vec<HeadKind> {
        match self.head {
            HeadChoice::Softmax => vec![HeadKind::Softmax],
            HeadChoice::Moc => vec![HeadKind::Moc],
            HeadChoice::Mos => vec![HeadKind::Mos],
            HeadChoice::All => HeadKind::ALL.to_vec(),
        }
    }

    pub(crate) fn sizes(&self, vocab: usize) -> Sizes {
        let text = self.data.is_some();
        let hidden = self.hidden.unwrap_or(if text { 220 } else { 6 });
        let components = self.components.unwrap_or(if text { 5 } else { 8 });
        let activation = if text { ActivationKind::Tanh } else { ActivationKind::Identity };
        Sizes {
            vocab,
            embedding: self.embedding.unwrap_or(if text { hidden } else { 32 }),
            hidden,
            layers: self.layers,
            context: self.context.unwrap_or_else(|| Sizes::equal_context(vocab, hidden, components)),
            components,
            activation: self.activation.unwrap_or(activation),
        }
    }

    pub(crate) fn recipe(&self) -> Recipe {
        let text = self.data.is_some();
        let optimizer = self.optimizer.unwrap_or(if text { OptimizerKind::Sgd } else { OptimizerKind::Adam });
        let lr = match optimizer {
            OptimizerKind::Sgd => 20.0,
            OptimizerKind::Adam if text => 0.001,
            OptimizerKind::Adam => 0.03,
        };
        Recipe {
            epochs: self.epochs.unwrap_or(if text { 3 } else { 6 }),
            batch: self.batch.unwrap_or(if text { 20 } else { 128 }),
            bptt: self.bptt.unwrap_or(if text { 35 } else { 4 }),
            lr: self.lr.unwrap_or(lr),
            decay: self.decay.unwrap_or(if text { 0.5 } else { 0.6 }),
            clip: self.clip.unwrap_or(if text { 0.25 } else { 0.0 }),
            optimizer,
            seed: self.seed,
        }
    }

    pub(crate) fn save_path(&self, kind: HeadKind) -> Result<Option<PathBuf>> {
        self.save.as_deref().map(|path| self.checkpoint(path, "--save", kind)).transpose()
    }

    pub(crate) fn resume_path(&self, kind: HeadKind) -> Result<Option<PathBuf>> {
        match &self.resume {
            None => Ok(None),
            Some(Some(path)) => Ok(Some(self.checkpoint(path, "--resume", kind)?)),
            Some(None) if self.save.is_none() => Err("--resume without a path needs --save".into()),
            Some(None) => self.save_path(kind),
        }
    }

    fn checkpoint(&self, path: &Path, flag: &str, kind: HeadKind) -> Result<PathBuf> {
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            return Ok(path.join(format!("{}.safetensors", kind.name())));
        }
        if self.head == HeadChoice::All {
            return Err(format!("{flag} {} is one file, but --head all needs a folder", path.display()).into());
        }
        Ok(path.to_owned())
    }
}

fn parse<T: std::str::FromStr>(
    value: &str,
    wanted: &str,
    valid: impl Fn(&T) -> bool,
) -> std::result::Result<T, String> {
    value.parse().ok().filter(valid).ok_or_else(|| format!("expected {wanted}"))
}

fn positive(value: &str) -> std::result::Result<usize, String> {
    parse(value, "a whole number of at least 1", |&x| x > 0)
}

fn above_zero(value: &str) -> std::result::Result<f64, String> {
    parse(value, "a number above 0", |&x: &f64| x > 0.0 && x.is_finite())
}

fn not_negative(value: &str) -> std::result::Result<f64, String> {
    parse(value, "a number of at least 0", |&x: &f64| x >= 0.0 && x.is_finite())
}

fn below_one(value: &str) -> std::result::Result<f64, String> {
    parse(value, "a number from 0 to below 1", |x| (0.0..1.0).contains(x))
}
