//! The flags of spelling, and its recipe.

use lab::training::{OptimizerKind, Recipe};
use std::path::{Path, PathBuf};

/// The sizes and the recipe of the character LSTM.
pub(crate) const RECIPE: Recipe = Recipe {
    hidden: 128,
    embedding: Some(32),
    batch: 20,
    bptt: 8,
    lr: 0.005,
    decay: 0.7,
    optimizer: OptimizerKind::Adam,
    ..Recipe::BASE
};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Spelling")]
pub(crate) struct SpellFlags {
    /// Freeze the word model of this checkpoint, and train a character LSTM that spells the next word from its hidden
    /// states; --hidden, --embedding, --head and all other sizes are those of the character LSTM [--head: softmax]
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "TableFlags", "Awd", "EvaluationFlags", "finetune", "unigram_bias", "OutputFlags", "generate",
    ])]
    spell: Option<PathBuf>,
    /// Random positions of the validation text at which the spellings of the whole vocabulary are summed up; 0 for none
    /// [default: 200]
    #[arg(long, value_name = "N", requires = "spell")]
    pub(crate) renormalise: Option<usize>,
}

impl SpellFlags {
    /// Returns the word model to spell with.
    pub(crate) fn word(&self) -> Option<&Path> {
        self.spell.as_deref()
    }
}
