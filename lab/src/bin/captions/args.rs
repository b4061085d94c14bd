//! The flags, with one set of defaults for drawn images and one for features from a file.

use clap::Parser;
use lab::show::values::{not_negative, positive};
use lab::training::{describe, Recipe, RecipeFlags, TrainingFlags};
use mos_head::decode::BeamSearch;
use mos_head::ContextActivation;
use std::path::PathBuf;

const DRAWN: Recipe = Recipe {
    components: 9,
    hidden: 96,
    activation: ContextActivation::Identity,
    spread: 0.3,
    epochs: 3,
    batch: 8,
    lr: 0.004,
    warmup: 50,
    decay: 0.5,
    dropout: 0.1,
    ..Recipe::BASE
};
const FEATURES: Recipe = Recipe { hidden: 512, batch: 16, lr: 0.001, dropout: 0.3, epochs: 20, decay: 0.9, ..DRAWN };

/// Trains a caption model with attention over the features of an image, with any of the output layers.
///
/// A batch has --batch images with all their captions. The mixtures have contexts of half the softmax's LSTM units
/// and fewer units, so that all models have equally many parameters.
#[derive(Debug, Parser)]
#[command(after_help = describe(&[("Drawn images", DRAWN), ("--features", FEATURES)]))]
pub(crate) struct Args {
    /// Features of images: the tensors `features` `[images, positions, width]` and `ids` `[images]`, of int64
    #[arg(long, value_name = "FILE.safetensors", requires = "captions")]
    pub(crate) features: Option<PathBuf>,
    /// Captions of these images, a JSON line each: {"image_id": 9, "caption": "A dog.", "split": "train"}; the split is
    /// train, valid or test; without a test, the scores are those of validation
    #[arg(long, value_name = "FILE.jsonl", requires = "features")]
    pub(crate) captions: Option<PathBuf>,
    /// Words that occur less often in the captions for training are unknown
    #[arg(long, default_value_t = 1, value_parser = positive)]
    pub(crate) min_count: usize,
    /// Number of images to draw for training, without --features
    #[arg(long, value_name = "N", default_value_t = 8000, value_parser = positive)]
    pub(crate) images: usize,
    /// Show the model no image: its features are zeros, with all its parameters kept
    #[arg(long)]
    pub(crate) blind: bool,
    /// Width of the beam search
    #[arg(long, default_value_t = 4, value_parser = positive)]
    beam: usize,
    /// Maximum length of a caption in the search, in words
    #[arg(long, default_value_t = 30, value_parser = positive)]
    max_length: usize,
    /// Exponent of the beam search's length penalty
    #[arg(long, default_value_t = 0.6, value_parser = not_negative)]
    length_penalty: f64,
    /// Number of images whose captions are printed with their references, and drawn
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) samples: usize,
    /// Draw --samples of the scored images with the captions found to this file
    #[arg(long, value_name = "FILE.svg", conflicts_with_all = ["features", "search"])]
    pub(crate) picture: Option<PathBuf>,
    #[command(flatten)]
    recipe: RecipeFlags,
    #[command(flatten)]
    pub(crate) common: TrainingFlags,
}

impl Args {
    pub(crate) fn recipe(&self) -> Recipe {
        let defaults = if self.features.is_some() { FEATURES } else { DRAWN };
        self.recipe.over(defaults, self.common.seed)
    }

    pub(crate) fn search(&self) -> BeamSearch {
        BeamSearch::new(lab::data::words::END)
            .with_width(self.beam)
            .with_max_length(self.max_length)
            .with_length_penalty(self.length_penalty)
    }
}
