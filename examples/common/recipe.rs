//! The sizes of a model and how to train it, by flags over the defaults of an example.

use super::head::{ActivationKind, HeadSizes};
use super::values::{above_zero, below_one, not_negative, positive};
use super::{measure::Measure, optimizer::OptimizerKind};

/// `lr` rises for `warmup` steps and falls by the factor `decay` per epoch, smoothly over its steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recipe {
    pub(crate) components: usize,
    pub(crate) hidden: usize,
    /// `None`: as `hidden`.
    pub(crate) embedding: Option<usize>,
    /// `None`: the size that gives a mixture the softmax's number of parameters.
    pub(crate) context: Option<usize>,
    pub(crate) activation: ActivationKind,
    pub(crate) layers: usize,
    pub(crate) epochs: usize,
    pub(crate) batch: usize,
    /// Steps of backpropagation through time, for language models.
    pub(crate) bptt: usize,
    pub(crate) lr: f64,
    pub(crate) warmup: usize,
    pub(crate) decay: f64,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) clip: f64,
    pub(crate) dropout: f64,
    pub(crate) label_smoothing: f64,
    pub(crate) measure: Measure,
    pub(crate) seed: u64,
}

impl Recipe {
    /// What most examples share.
    pub(crate) const BASE: Recipe = Recipe {
        components: 3,
        hidden: 256,
        embedding: None,
        context: None,
        activation: ActivationKind::Tanh,
        layers: 1,
        epochs: 3,
        batch: 32,
        bptt: 32,
        lr: 0.01,
        warmup: 0,
        decay: 0.5,
        optimizer: OptimizerKind::Adam,
        clip: 1.0,
        dropout: 0.0,
        label_smoothing: 0.0,
        measure: Measure::Perplexity,
        seed: 1,
    };

    pub(crate) fn head(&self, vocab: usize) -> HeadSizes {
        let Recipe { hidden, components, activation, .. } = *self;
        let context = self.context.unwrap_or_else(|| HeadSizes::equal_context(vocab, hidden, components));
        HeadSizes { vocab, hidden, context, components, activation }
    }

    pub(crate) fn embedding(&self) -> usize {
        self.embedding.unwrap_or(self.hidden)
    }

    /// The learning rate after `steps` steps and `epochs` epochs, counted with fractions.
    pub(crate) fn lr_at(&self, steps: usize, epochs: f64) -> f64 {
        let rise = ((steps + 1) as f64 / self.warmup.max(1) as f64).min(1.0);
        rise * self.lr * self.decay.powf(epochs)
    }
}

/// The end of `--help`: the defaults of an example.
pub(crate) fn describe(defaults: &[(&str, Recipe)]) -> String {
    let mut text = "Defaults of the flags of sizes and training:".to_owned();
    for (data, recipe) in defaults {
        let Recipe { components, hidden, layers, epochs, batch, lr, warmup, decay, clip, dropout, .. } = recipe;
        let (activation, optimizer) = (recipe.activation.name(), recipe.optimizer);
        let embedding = recipe.embedding();
        text.push_str(&format!(
            "\n{data}:\n  --epochs {epochs} --components {components} --hidden {hidden} --embedding {embedding} \
             --activation {activation} --layers {layers}\n  --batch {batch} --lr {lr} --warmup {warmup} \
             --decay {decay} --optimizer {optimizer} --clip {clip} --dropout {dropout}"
        ));
    }
    text
}

/// Flags without a value keep the default of the example, listed at the end of --help.
#[derive(Debug, clap::Args)]
pub(crate) struct RecipeFlags {
    /// Total number of epochs, including those of a resumed checkpoint
    #[arg(long)]
    pub(crate) epochs: Option<usize>,
    /// Mixture components K
    #[arg(long, value_parser = positive)]
    pub(crate) components: Option<usize>,
    /// LSTM units per layer
    #[arg(long, value_parser = positive)]
    pub(crate) hidden: Option<usize>,
    /// Embedding size
    #[arg(long, value_parser = positive)]
    pub(crate) embedding: Option<usize>,
    /// Context size of the mixtures [default: at equal numbers of parameters]
    #[arg(long, value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// Activation of the contexts
    #[arg(long, value_enum)]
    pub(crate) activation: Option<ActivationKind>,
    /// Number of LSTM layers
    #[arg(long, value_parser = positive)]
    pub(crate) layers: Option<usize>,
    /// Parallel streams of a text, or pairs of sentences per batch
    #[arg(long, value_parser = positive)]
    pub(crate) batch: Option<usize>,
    /// Initial learning rate
    #[arg(long, value_parser = above_zero)]
    pub(crate) lr: Option<f64>,
    /// Steps of linear warm-up of the learning rate
    #[arg(long, value_name = "STEPS")]
    pub(crate) warmup: Option<usize>,
    /// Factor of the learning rate per epoch, applied smoothly
    #[arg(long, value_parser = above_zero)]
    pub(crate) decay: Option<f64>,
    #[arg(long, value_enum)]
    pub(crate) optimizer: Option<OptimizerKind>,
    /// Largest global gradient norm, 0 for no clipping
    #[arg(long, value_parser = not_negative)]
    pub(crate) clip: Option<f64>,
    /// Locked dropout on LSTM inputs and hidden states, and on contexts, whose masks are not seeded on the CPU
    #[arg(long, value_parser = below_one)]
    pub(crate) dropout: Option<f64>,
    #[arg(long, value_parser = below_one)]
    pub(crate) label_smoothing: Option<f64>,
}

impl RecipeFlags {
    pub(crate) fn over(&self, defaults: Recipe, seed: u64) -> Recipe {
        Recipe {
            components: self.components.unwrap_or(defaults.components),
            hidden: self.hidden.unwrap_or(defaults.hidden),
            embedding: self.embedding.or(defaults.embedding),
            context: self.context.or(defaults.context),
            activation: self.activation.unwrap_or(defaults.activation),
            layers: self.layers.unwrap_or(defaults.layers),
            epochs: self.epochs.unwrap_or(defaults.epochs),
            batch: self.batch.unwrap_or(defaults.batch),
            lr: self.lr.unwrap_or(defaults.lr),
            warmup: self.warmup.unwrap_or(defaults.warmup),
            decay: self.decay.unwrap_or(defaults.decay),
            optimizer: self.optimizer.unwrap_or(defaults.optimizer),
            clip: self.clip.unwrap_or(defaults.clip),
            dropout: self.dropout.unwrap_or(defaults.dropout),
            label_smoothing: self.label_smoothing.unwrap_or(defaults.label_smoothing),
            seed,
            bptt: defaults.bptt,
            measure: defaults.measure,
        }
    }
}
