//! The flags, with one set of defaults for the built-in task and one for real text.

use crate::common::flags::{above_zero, below_one, not_negative, positive, TrainingFlags};
use crate::common::head::{ActivationKind, HeadSizes};
use crate::common::optimizer::OptimizerKind;
use crate::model::Sizes;
use crate::task::{Task, VocabularyKind};
use crate::train::Recipe;
use clap::Parser;
use std::path::PathBuf;

/// Trains an LSTM encoder-decoder with attention for translation or dialogue, with any of the output layers.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Translate: folder with train.SOURCE, train.TARGET, valid.SOURCE, valid.TARGET (one sentence per line)
    #[arg(long, value_name = "DIR", conflicts_with = "dialogue")]
    pub(crate) data: Option<PathBuf>,
    /// Ending of the source files
    #[arg(long, default_value = "de")]
    pub(crate) source: String,
    /// Ending of the target files
    #[arg(long, default_value = "en")]
    pub(crate) target: String,
    /// Respond: one dialogue per line, {"utts": [[speaker, text], ..]}; a sixth of them is held out
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) dialogue: Option<PathBuf>,
    /// Number of utterances in a context
    #[arg(long, default_value_t = 2, value_parser = positive)]
    pub(crate) turns: usize,
    #[arg(long, value_enum, default_value = "word")]
    pub(crate) vocab: VocabularyKind,
    /// Words that occur less often are unknown
    #[arg(long, default_value_t = 2, value_parser = positive)]
    pub(crate) min_count: usize,
    /// Vocabulary size of a byte-pair encoding, for each side
    #[arg(long, default_value_t = 6000, value_parser = positive)]
    pub(crate) vocab_size: usize,
    /// Total number of epochs, including those of a resumed checkpoint [default: 4; dialogue: 5]
    #[arg(long)]
    pub(crate) epochs: Option<usize>,
    /// Mixture components K [default: 3; real text: 5]
    #[arg(long, value_parser = positive)]
    pub(crate) components: Option<usize>,
    /// LSTM units of the decoder, and of both directions of the encoder together [default: 64; real text: 256]
    #[arg(long, value_parser = positive)]
    pub(crate) hidden: Option<usize>,
    /// Embedding size [default: as --hidden]
    #[arg(long, value_parser = positive)]
    pub(crate) embedding: Option<usize>,
    /// Context size of the mixtures [default: what gives the softmax's number of parameters]
    #[arg(long, value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// Number of LSTM layers
    #[arg(long, default_value_t = 1, value_parser = positive)]
    pub(crate) layers: usize,
    /// Pairs per batch [default: 32; real text: 64]
    #[arg(long, value_parser = positive)]
    pub(crate) batch: Option<usize>,
    /// Initial learning rate of Adam [default: 0.005; real text: 0.002]
    #[arg(long, value_parser = above_zero)]
    pub(crate) lr: Option<f64>,
    /// Factor of the learning rate per epoch, applied smoothly
    #[arg(long, default_value_t = 0.6, value_parser = above_zero)]
    pub(crate) decay: f64,
    /// Largest global gradient norm, 0 for no clipping
    #[arg(long, default_value_t = 1.0, value_parser = not_negative)]
    pub(crate) clip: f64,
    /// Locked dropout on LSTM inputs, hidden states and attentional states [default: 0; real text: 0.3]
    #[arg(long, value_parser = below_one)]
    pub(crate) dropout: Option<f64>,
    #[arg(long, default_value_t = 0.0, value_parser = below_one)]
    pub(crate) label_smoothing: f64,
    /// Width of the beam search [default: 5; dialogue: 10]
    #[arg(long, value_parser = positive)]
    pub(crate) beam: Option<usize>,
    /// Maximum length of a target in the search [default: 60; dialogue: 30]
    #[arg(long, value_parser = positive)]
    pub(crate) max_length: Option<usize>,
    /// Exponent of the beam search's length penalty [default: 0.6; dialogue: 0]
    #[arg(long, value_parser = not_negative)]
    pub(crate) length_penalty: Option<f64>,
    /// Number of results to print
    #[arg(long, default_value_t = 3)]
    pub(crate) samples: usize,
    /// Only translate the lines of stdin with the model of --resume FILE
    #[arg(long, requires = "resume", conflicts_with_all = ["data", "dialogue", "chat"])]
    pub(crate) translate: bool,
    /// Only respond to the lines of stdin with the model of --resume FILE, with three replies each
    #[arg(long, requires = "resume", conflicts_with_all = ["data", "dialogue"])]
    pub(crate) chat: bool,
    /// Sample the answers of --translate and --chat at this temperature, instead of a beam search for the likeliest
    #[arg(long, value_parser = not_negative)]
    pub(crate) temperature: Option<f64>,
    #[command(flatten)]
    pub(crate) common: TrainingFlags,
}

impl Args {
    pub(crate) fn sizes(&self, source_vocab: usize, vocab: usize) -> Sizes {
        let toy = Task::new(self) == Task::Toy;
        let hidden = self.hidden.unwrap_or(if toy { 64 } else { 256 });
        let components = self.components.unwrap_or(if toy { 3 } else { 5 });
        let context = self.context.unwrap_or_else(|| HeadSizes::equal_context(vocab, hidden, components));
        let head = HeadSizes { vocab, hidden, context, components, activation: ActivationKind::Tanh };
        Sizes { head, source_vocab, embedding: self.embedding.unwrap_or(hidden), layers: self.layers }
    }

    pub(crate) fn recipe(&self) -> Recipe {
        let task = Task::new(self);
        let toy = task == Task::Toy;
        let epochs = match task {
            Task::Toy | Task::Translation => 4,
            Task::Dialogue => 5,
        };
        Recipe {
            epochs: self.epochs.unwrap_or(epochs),
            batch: self.batch.unwrap_or(if toy { 32 } else { 64 }),
            lr: self.lr.unwrap_or(if toy { 0.005 } else { 0.002 }),
            decay: self.decay,
            dropout: self.dropout.unwrap_or(if toy { 0.0 } else { 0.3 }),
            clip: self.clip,
            label_smoothing: self.label_smoothing,
            optimizer: OptimizerKind::Adam,
            seed: self.common.seed,
        }
    }
}
