//! The flags, with one set of defaults for the built-in language and one for real text.

use crate::common::flags::TrainingFlags;
use crate::common::generate::SamplingFlags;
use crate::common::optimizer::OptimizerKind;
use crate::common::recipe::{describe, Recipe, RecipeFlags};
use crate::common::values::positive;
use clap::Parser;
use mos_head::Activation;
use std::path::PathBuf;

const BUILT_IN: Recipe = Recipe {
    components: 8,
    hidden: 6,
    embedding: Some(32),
    activation: Activation::Identity,
    epochs: 6,
    batch: 128,
    bptt: 4,
    lr: 0.03,
    decay: 0.6,
    clip: 0.0,
    ..Recipe::BASE
};

const TEXT: Recipe = Recipe {
    components: 5,
    hidden: 220,
    batch: 20,
    bptt: 35,
    lr: 20.0,
    optimizer: OptimizerKind::Sgd,
    clip: 0.25,
    ..Recipe::BASE
};

/// Trains an LSTM language model with a softmax, a mixture of contexts and a mixture of softmaxes at equal size.
#[derive(Debug, Parser)]
#[command(after_help = describe(&[("Built-in language", BUILT_IN), ("--data", TEXT)]))]
pub(crate) struct Args {
    /// Folder with train.txt, valid.txt and optionally test.txt (whitespace tokens); without it, a built-in language
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Steps of backpropagation through time [default: 4; real text: 35]
    #[arg(long, value_parser = positive)]
    bptt: Option<usize>,
    /// Number of tokens to sample from each model
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) generate: usize,
    #[command(flatten)]
    pub(crate) sampling: SamplingFlags,
    #[command(flatten)]
    recipe: RecipeFlags,
    #[command(flatten)]
    pub(crate) common: TrainingFlags,
}

impl Args {
    pub(crate) fn recipe(&self) -> Recipe {
        let defaults = if self.data.is_some() { TEXT } else { BUILT_IN };
        let lr = match (self.recipe.optimizer.unwrap_or(defaults.optimizer), self.data.is_some()) {
            (OptimizerKind::Sgd, _) => 20.0,
            (OptimizerKind::Adam, true) => 0.001,
            (OptimizerKind::Adam, false) => 0.03,
        };
        let bptt = self.bptt.unwrap_or(defaults.bptt);
        self.recipe.over(Recipe { lr, bptt, ..defaults }, self.common.seed)
    }
}
