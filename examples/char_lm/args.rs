//! The flags, with one set of defaults for the built-in text and one for a file of about a million characters.

use crate::common::flags::{above_zero, below_one, not_negative, positive, TrainingFlags};
use crate::common::generate::SamplingFlags;
use crate::common::head::{ActivationKind, HeadKind, HeadSizes};
use crate::common::{
    language_model::{InitialValues, Sizes, Start},
    measure::Measure,
    optimizer::OptimizerKind,
    train::Recipe,
};
use clap::Parser;
use std::path::PathBuf;

/// Trains an LSTM on characters with a softmax, a mixture of contexts and a mixture of softmaxes at equal size.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// A text file: 90 % for training, then 5 % for validation and 5 % for test; without it, the crate's sources
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,
    /// Total number of epochs, including those of a resumed checkpoint
    #[arg(long, default_value_t = 3)]
    pub(crate) epochs: usize,
    /// Mixture components K
    #[arg(long, default_value_t = 3, value_parser = positive)]
    pub(crate) components: usize,
    /// LSTM units of the softmax's model; the mixtures' give an equal number of parameters [default: 128; file: 256]
    #[arg(long, value_parser = positive)]
    pub(crate) hidden: Option<usize>,
    /// Embedding size
    #[arg(long, default_value_t = 64, value_parser = positive)]
    pub(crate) embedding: usize,
    /// Context size of the mixtures [default: the number of different characters]
    #[arg(long, value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// Number of LSTM layers
    #[arg(long, default_value_t = 1, value_parser = positive)]
    pub(crate) layers: usize,
    /// Number of parallel streams [default: 16; file: 32]
    #[arg(long, value_parser = positive)]
    pub(crate) batch: Option<usize>,
    /// Steps of backpropagation through time
    #[arg(long, default_value_t = 32, value_parser = positive)]
    pub(crate) bptt: usize,
    /// Initial learning rate of Adam
    #[arg(long, default_value_t = 0.01, value_parser = above_zero)]
    pub(crate) lr: f64,
    /// Steps of linear warm-up of the learning rate
    #[arg(long, value_name = "STEPS", default_value_t = 50)]
    pub(crate) warmup: usize,
    /// Factor of the learning rate per epoch, applied smoothly
    #[arg(long, default_value_t = 0.4, value_parser = above_zero)]
    pub(crate) decay: f64,
    /// Largest global gradient norm, 0 for no clipping
    #[arg(long, default_value_t = 1.0, value_parser = not_negative)]
    pub(crate) clip: f64,
    /// Locked dropout on LSTM inputs, hidden states and contexts; the contexts' masks are not seeded on the CPU
    #[arg(long, default_value_t = 0.0, value_parser = below_one)]
    pub(crate) dropout: f64,
    /// Number of characters to sample from each model
    #[arg(long, value_name = "N", default_value_t = 300)]
    pub(crate) generate: usize,
    #[command(flatten)]
    pub(crate) sampling: SamplingFlags,
    #[command(flatten)]
    pub(crate) common: TrainingFlags,
}

impl Args {
    /// The sizes of this head's model; all models have as many parameters as the softmax's.
    pub(crate) fn sizes(&self, kind: HeadKind, vocab: usize) -> Sizes {
        let hidden = self.hidden.unwrap_or(if self.data.is_some() { 256 } else { 128 });
        let (context, components) = (self.context.unwrap_or(vocab), self.components);
        let head = HeadSizes { vocab, hidden, context, components, activation: ActivationKind::Tanh };
        let softmax = Sizes { head, embedding: self.embedding, layers: self.layers };
        softmax.with_parameters(kind, softmax.parameters(HeadKind::Softmax))
    }

    pub(crate) fn recipe(&self) -> Recipe {
        let file = self.data.is_some();
        Recipe {
            epochs: self.epochs,
            batch: self.batch.unwrap_or(if file { 32 } else { 16 }),
            bptt: self.bptt,
            lr: self.lr,
            warmup: self.warmup,
            decay: self.decay,
            clip: self.clip,
            optimizer: OptimizerKind::Adam,
            measure: Measure::BitsPerCharacter,
            dropout: self.dropout,
            start: Start { seed: self.common.seed, values: InitialValues::Even },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_equal_parameter_counts_within_one_percent() {
        let built_in = ["char_lm"];
        let file = ["char_lm", "--data", "text.txt"];
        let components = ["char_lm", "--data", "text.txt", "--components", "10", "--layers", "2"];
        for flags in [&built_in[..], &file[..], &components[..]] {
            let args = Args::try_parse_from(flags).expect("valid flags");
            let softmax = args.sizes(HeadKind::Softmax, 65);
            assert!(softmax.head.hidden >= 65, "the softmax has no bottleneck");
            for kind in [HeadKind::Moc, HeadKind::Mos] {
                let sizes = args.sizes(kind, 65);
                let ratio = sizes.parameters(kind) as f64 / softmax.parameters(HeadKind::Softmax) as f64;
                assert!((ratio - 1.0).abs() < 0.01, "{kind:?} {flags:?}: {ratio}");
            }
        }
    }
}
