//! The flags, with one set of defaults for the built-in task and one for real text.

use crate::task::{Task, VocabularyKind};
use clap::Parser;
use lab::awd::Awd;
use lab::flags::TrainingFlags;
use lab::recipe::{describe, Recipe, RecipeFlags};
use lab::table::TableFlags;
use lab::values::{below_one, not_negative, positive, share};
use mos_head::ContextActivation;
use std::path::PathBuf;

const TOY: Recipe = Recipe {
    hidden: 64,
    activation: ContextActivation::Identity,
    spread: 0.3,
    epochs: 4,
    batch: 32,
    lr: 0.005,
    decay: 0.6,
    ..Recipe::BASE
};
const TRANSLATION: Recipe = Recipe { components: 5, hidden: 256, batch: 64, lr: 0.0037, dropout: 0.16, ..TOY };
const DIALOGUE: Recipe = Recipe { epochs: 6, lr: 0.008, dropout: 0.3, ..TRANSLATION };

/// Trains an LSTM encoder-decoder with attention for translation or dialogue, with any of the output layers.
///
/// Each direction of the encoder has half of the LSTM units.
#[derive(Debug, Parser)]
#[command(after_help = describe(&[("Built-in task", TOY), ("--data", TRANSLATION), ("--dialogue", DIALOGUE)]))]
pub(crate) struct Args {
    /// Translate: folder with train.SOURCE, train.TARGET, valid.SOURCE, valid.TARGET (one sentence per line); the scores
    /// are those of test.SOURCE and test.TARGET if both exist, otherwise of the validation pairs
    #[arg(long, value_name = "DIR", conflicts_with = "dialogue")]
    pub(crate) data: Option<PathBuf>,
    /// Ending of the source files
    #[arg(long, default_value = "de")]
    pub(crate) source: String,
    /// Ending of the target files
    #[arg(long, default_value = "en")]
    pub(crate) target: String,
    /// Respond: one dialogue per line, {"utts": [[speaker, text], ..]}; a sixth of them is for validation
    /// and a sixth for the test, the same for every --seed
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) dialogue: Option<PathBuf>,
    /// Train on this first share of the training pairs
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = share)]
    pub(crate) part: f64,
    /// Number of utterances in a context
    #[arg(long, default_value_t = 2, value_parser = positive)]
    pub(crate) turns: usize,
    /// What a token is
    #[arg(long, value_enum, default_value = "word")]
    pub(crate) vocab: VocabularyKind,
    /// Words that occur less often are unknown
    #[arg(long, default_value_t = 2, value_parser = positive)]
    pub(crate) min_count: usize,
    /// Vocabulary size of a byte-pair encoding, for each side
    #[arg(long, default_value_t = 6000, value_parser = positive)]
    pub(crate) vocab_size: usize,
    #[command(flatten)]
    pub(crate) tables: TableFlags,
    /// Width of the beam search [default: 5; dialogue: 10]
    #[arg(long, value_parser = positive)]
    pub(crate) beam: Option<usize>,
    /// Maximum length of a target in the search, in tokens, or twice as many codes [default: 60; dialogue: 30]
    #[arg(long, value_parser = positive)]
    pub(crate) max_length: Option<usize>,
    /// Exponent of the beam search's length penalty
    #[arg(long, default_value_t = 0.6, value_parser = not_negative)]
    pub(crate) length_penalty: f64,
    /// Subtract so much of the log-probability without a source from that of a target's first tokens, so that the
    /// beam search does not give the same answer to every source [default: 0; dialogue: 0.5]
    #[arg(long, value_name = "WEIGHT", value_parser = not_negative)]
    pub(crate) diversity: Option<f64>,
    /// Write what is found for each scored pair to this file, a JSON line each: {"head", "source", "reference", "found"}
    #[arg(long, value_name = "FILE.jsonl", conflicts_with = "search")]
    pub(crate) write_found: Option<PathBuf>,
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
    /// Locked dropout of the mixtures' contexts [default: 0; dialogue: --dropout]
    #[arg(long, value_name = "P", value_parser = below_one)]
    context_dropout: Option<f64>,
    #[command(flatten)]
    recipe: RecipeFlags,
    #[command(flatten)]
    pub(crate) common: TrainingFlags,
}

impl Args {
    pub(crate) fn recipe(&self) -> Recipe {
        let defaults = match Task::new(self) {
            Task::Toy => TOY,
            Task::Translation => TRANSLATION,
            Task::Dialogue => DIALOGUE,
        };
        let recipe = self.recipe.over(defaults, self.common.seed);
        Recipe { awd: Awd { context_dropout: self.context_dropout, ..recipe.awd }, ..recipe }
    }
}
