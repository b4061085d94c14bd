//! The flags, with one set of defaults for the built-in language and one for real text.

use crate::common::flags::{above_zero, below_one, not_negative, positive, TrainingFlags};
use crate::common::generate::SamplingFlags;
use crate::common::head::{ActivationKind, HeadSizes};
use crate::common::{
    language_model::{InitialValues, Sizes, Start},
    measure::Measure,
    optimizer::OptimizerKind,
    train::Recipe,
};
use clap::Parser;
use std::path::PathBuf;

/// Trains an LSTM language model with a softmax, a mixture of contexts and a mixture of softmaxes at equal size.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Folder with train.txt, valid.txt and optionally test.txt (whitespace tokens); without it, a built-in language
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Total number of epochs, including those of a resumed checkpoint [default: 6; real text: 3]
    #[arg(long)]
    pub(crate) epochs: Option<usize>,
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
    /// Number of parallel streams [default: 128; real text: 20]
    #[arg(long, value_parser = positive)]
    pub(crate) batch: Option<usize>,
    /// Steps of backpropagation through time [default: 4; real text: 35]
    #[arg(long, value_parser = positive)]
    pub(crate) bptt: Option<usize>,
    /// Initial learning rate [default: adam 0.03, real text 0.001; sgd 20]
    #[arg(long, value_parser = above_zero)]
    pub(crate) lr: Option<f64>,
    /// Factor of the learning rate per epoch, applied smoothly [default: 0.6; real text: 0.5]
    #[arg(long, value_parser = above_zero)]
    pub(crate) decay: Option<f64>,
    /// Optimizer [default: adam; real text: sgd]
    #[arg(long, value_enum)]
    pub(crate) optimizer: Option<OptimizerKind>,
    /// Largest global gradient norm, 0 for no clipping [default: 0; real text: 0.25]
    #[arg(long, value_parser = not_negative)]
    pub(crate) clip: Option<f64>,
    /// Locked dropout on LSTM inputs, hidden states and contexts; the contexts' masks are not seeded on the CPU
    #[arg(long, default_value_t = 0.0, value_parser = below_one)]
    pub(crate) dropout: f64,
    /// Number of tokens to sample from each model
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) generate: usize,
    #[command(flatten)]
    pub(crate) sampling: SamplingFlags,
    #[command(flatten)]
    pub(crate) common: TrainingFlags,
}

impl Args {
    pub(crate) fn sizes(&self, vocab: usize) -> Sizes {
        let text = self.data.is_some();
        let hidden = self.hidden.unwrap_or(if text { 220 } else { 6 });
        let components = self.components.unwrap_or(if text { 5 } else { 8 });
        let activation = if text { ActivationKind::Tanh } else { ActivationKind::Identity };
        let context = self.context.unwrap_or_else(|| HeadSizes::equal_context(vocab, hidden, components));
        let activation = self.activation.unwrap_or(activation);
        let embedding = self.embedding.unwrap_or(if text { hidden } else { 32 });
        Sizes { head: HeadSizes { vocab, hidden, context, components, activation }, embedding, layers: self.layers }
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
            warmup: 0,
            decay: self.decay.unwrap_or(if text { 0.5 } else { 0.6 }),
            clip: self.clip.unwrap_or(if text { 0.25 } else { 0.0 }),
            optimizer,
            measure: Measure::Perplexity,
            dropout: self.dropout,
            start: Start { seed: self.common.seed, values: InitialValues::Small },
        }
    }
}
