//! The flags, with one set of defaults for the built-in task and one for real text.

use crate::kinds::{Architecture, Task, TransformerShape, VocabularyKind};
use crate::search::Beam;
use clap::{Parser, ValueEnum};
use lab::show::values::{below_one, not_negative, positive, share};
use lab::training::{describe, Awd, Recipe, RecipeFlags, TableFlags, TrainingFlags};
use lab::Result;
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
const TOY_TRANSFORMER: Recipe = Recipe { layers: 2, lr: 0.003, warmup: 100, ..TOY };
const TRANSFORMER: Recipe = Recipe {
    hidden: 192,
    layers: 2,
    epochs: 6,
    lr: 0.003,
    warmup: 400,
    decay: 0.65,
    dropout: 0.1,
    label_smoothing: 0.1,
    ..TRANSLATION
};
/// Attention heads of a Transformer.
const ATTENTION_HEADS: usize = 4;

const DIALOGUE: Recipe = Recipe { epochs: 6, lr: 0.008, dropout: 0.3, ..TRANSLATION };

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ArchitectureName {
    /// A bidirectional LSTM and an LSTM with attention over its outputs
    Lstm,
    /// An encoder and a decoder of attention and feed-forward networks
    Transformer,
}

/// Trains an encoder-decoder with attention for translation or dialogue, with any of the output layers.
///
/// Each direction of a recurrent encoder has half of the LSTM units.
#[derive(Debug, Parser)]
#[command(after_help = describe(&[
    ("Built-in task", TOY),
    ("--data", TRANSLATION),
    ("--dialogue", DIALOGUE),
    ("--architecture transformer", TOY_TRANSFORMER),
    ("--architecture transformer with --data or --dialogue", TRANSFORMER),
]))]
pub(crate) struct Args {
    /// Translate: folder with train.SOURCE, train.TARGET, valid.SOURCE, valid.TARGET (one sentence per line); the
    /// scores are those of test.SOURCE and test.TARGET if both exist, otherwise of the validation pairs
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
    /// The model below the output layer
    #[arg(long, value_enum, default_value = "lstm")]
    architecture: ArchitectureName,
    /// Attention heads of a Transformer [default: 4]
    #[arg(long, value_parser = positive)]
    attention_heads: Option<usize>,
    /// Width within a Transformer's feed-forward networks [default: four times --hidden]
    #[arg(long, value_parser = positive)]
    inner: Option<usize>,
    /// What a token is [default: word; with a checkpoint its own]
    #[arg(long, value_enum)]
    pub(crate) vocab: Option<VocabularyKind>,
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
    /// Write what is found for each scored pair to this file, a JSON line each: {"head", "source", "reference",
    /// "found"}
    #[arg(long, value_name = "FILE.jsonl", conflicts_with = "search")]
    pub(crate) write_found: Option<PathBuf>,
    /// Number of results to print
    #[arg(long, default_value_t = 3)]
    pub(crate) samples: usize,
    /// Only translate the lines of stdin with the model of --resume FILE
    #[arg(long, requires = "resume", conflicts_with_all = ["data", "dialogue", "chat"], group = "answers")]
    pub(crate) translate: bool,
    /// Only respond to the lines of stdin with the model of --resume FILE, with three replies each
    #[arg(long, requires = "resume", conflicts_with_all = ["data", "dialogue"], group = "answers")]
    pub(crate) chat: bool,
    /// Sample the answers of --translate and --chat at this temperature, instead of a beam search for the likeliest
    #[arg(long, value_parser = not_negative, requires = "answers")]
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
    /// Returns the model below the output layer.
    pub(crate) fn architecture(&self, recipe: &Recipe) -> Result<Architecture> {
        match self.architecture {
            ArchitectureName::Transformer => {
                let (hidden, heads) = (recipe.hidden, self.attention_heads.unwrap_or(ATTENTION_HEADS));
                if hidden % heads != 0 {
                    let expected = format!("expected a multiple of --attention-heads {heads}");
                    return Err(format!("--hidden is {hidden}, {expected}").into());
                }
                Ok(Architecture::Transformer(TransformerShape { heads, inner: self.inner.unwrap_or(4 * hidden) }))
            }
            ArchitectureName::Lstm if self.attention_heads.is_some() || self.inner.is_some() => {
                Err("--attention-heads and --inner need --architecture transformer".into())
            }
            ArchitectureName::Lstm => Ok(Architecture::Lstm),
        }
    }

    pub(crate) fn task(&self) -> Task {
        match (&self.data, &self.dialogue) {
            (Some(_), _) => Task::Translation,
            (None, Some(_)) => Task::Dialogue,
            (None, None) => Task::Toy,
        }
    }

    pub(crate) fn beam(&self, task: Task, n_best: usize) -> Beam {
        let (width, max_length, diversity) = match task {
            Task::Toy | Task::Translation => (5, 60, 0.0),
            Task::Dialogue => (10, 30, 0.5), // width: Yang et al. (2018), section 3.3
        };
        Beam {
            width: self.beam.unwrap_or(width).max(n_best),
            n_best,
            max_length: self.max_length.unwrap_or(max_length),
            length_penalty: self.length_penalty,
            diversity: self.diversity.unwrap_or(diversity),
        }
    }

    pub(crate) fn recipe(&self) -> Recipe {
        let defaults = match (self.task(), self.architecture) {
            (Task::Toy, ArchitectureName::Lstm) => TOY,
            (Task::Translation, ArchitectureName::Lstm) => TRANSLATION,
            (Task::Dialogue, ArchitectureName::Lstm) => DIALOGUE,
            (Task::Toy, ArchitectureName::Transformer) => TOY_TRANSFORMER,
            (Task::Translation | Task::Dialogue, ArchitectureName::Transformer) => TRANSFORMER,
        };
        let recipe = self.recipe.over(defaults, self.common.seed);
        Recipe { awd: Awd { context_dropout: self.context_dropout, ..recipe.awd }, ..recipe }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the architecture of these flags, separated by spaces, or the error.
    fn architecture(flags: &str) -> std::result::Result<Architecture, String> {
        let args = Args::try_parse_from(["translation"].into_iter().chain(flags.split_whitespace())).unwrap();
        args.architecture(&args.recipe()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_shape_of_a_transformer_has_defaults_and_limits() {
        assert_eq!(architecture(""), Ok(Architecture::Lstm));
        let transformer = |heads, inner| Ok(Architecture::Transformer(TransformerShape { heads, inner }));
        assert_eq!(architecture("--architecture transformer"), transformer(4, 256));
        assert_eq!(architecture("--architecture transformer --data DIR"), transformer(4, 768));
        let flags = "--architecture transformer --hidden 66 --attention-heads 3 --inner 50";
        assert_eq!(architecture(flags), transformer(3, 50));
        let error = architecture("--architecture transformer --hidden 66").unwrap_err();
        assert_eq!(error, "--hidden is 66, expected a multiple of --attention-heads 4");
        for flags in ["--attention-heads 4", "--inner 64 --architecture lstm"] {
            assert!(architecture(flags).unwrap_err().contains("need --architecture transformer"), "{flags}");
        }
    }
}
