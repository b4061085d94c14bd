//! The flags, with one set of defaults for the built-in text and one for a file of about a million characters.

use clap::Parser;
use lab::training::{describe, Recipe, RecipeFlags, SamplingFlags, Sizes, TrainingFlags};
use lab::{layers::HeadKind, scores::Measure, show::values::positive};
use std::path::PathBuf;

const BUILT_IN: Recipe = Recipe {
    hidden: 128,
    embedding: Some(64),
    batch: 16,
    warmup: 50,
    decay: 0.4,
    measure: Measure::BitsPerCharacter,
    ..Recipe::BASE
};

const FILE: Recipe = Recipe { hidden: 256, batch: 32, ..BUILT_IN };

/// Trains an LSTM on characters with a softmax, a mixture of contexts and a mixture of softmaxes at equal size.
///
/// The mixtures have fewer LSTM units than the softmax, so that all models have equally many parameters.
#[derive(Debug, Parser)]
#[command(after_help = describe(&[("Built-in text", BUILT_IN), ("--data", FILE)]))]
pub(crate) struct Args {
    /// A text file: 90 % for training, then 5 % for validation and 5 % for test; without it, the built-in text
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,
    /// Steps of backpropagation through time
    #[arg(long, default_value_t = 32, value_parser = positive)]
    bptt: usize,
    /// Number of characters to sample from each model
    #[arg(long, value_name = "N", default_value_t = 300)]
    pub(crate) generate: usize,
    #[command(flatten)]
    pub(crate) sampling: SamplingFlags,
    #[command(flatten)]
    recipe: RecipeFlags,
    #[command(flatten)]
    pub(crate) common: TrainingFlags,
}

impl Args {
    /// Returns the recipe, whose contexts are as wide as the alphabet.
    pub(crate) fn recipe(&self, vocab: usize) -> Recipe {
        let defaults = if self.data.is_some() { FILE } else { BUILT_IN };
        self.recipe.over(Recipe { context: Some(vocab), bptt: self.bptt, ..defaults }, self.common.seed)
    }
}

/// Returns the sizes of this head's model; all models have as many parameters as the softmax's.
pub(crate) fn sizes(recipe: &Recipe, kind: HeadKind, vocab: usize) -> Sizes {
    let softmax = Sizes::new(HeadKind::Softmax, recipe, vocab);
    softmax.with_parameters(kind, softmax.parameters(HeadKind::Softmax))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_equal_parameter_counts_within_one_percent() {
        let built_in = ["characters"];
        let file = ["characters", "--data", "text.txt"];
        let components = ["characters", "--data", "text.txt", "--components", "10", "--layers", "2"];
        for flags in [&built_in[..], &file[..], &components[..]] {
            let recipe = Args::try_parse_from(flags).expect("valid flags").recipe(65);
            let softmax = sizes(&recipe, HeadKind::Softmax, 65);
            assert!(softmax.head.hidden >= 65, "the softmax has no bottleneck");
            for kind in [HeadKind::Moc, HeadKind::Mos] {
                let parameters = sizes(&recipe, kind, 65).parameters(kind);
                let ratio = parameters as f64 / softmax.parameters(HeadKind::Softmax) as f64;
                assert!((ratio - 1.0).abs() < 0.01, "{kind:?} {flags:?}: {ratio}");
            }
        }
    }
}
