//! The flags, with the sizes of published models.

use crate::scores::{DivergenceKind, Score};
use crate::steps::{Sizes, Train};
use candle_core::DType;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use lab::layers::logit_function;
use lab::show::{values::positive, DeviceKind};
use mos_head::parts::LogitFunction;

#[derive(Parser)]
#[command(about = "Times one training step of the output layer")]
pub(crate) struct Args {
    /// The sizes of a published model
    #[arg(long, value_enum, default_value = "small")]
    pub(crate) shape: Shape,
    /// What to time
    #[arg(long = "impl", value_enum, default_value = "fused")]
    pub(crate) implementation: Implementation,
    #[arg(long, default_value = "f32", value_parser = dtype())]
    pub(crate) dtype: DType,
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) device: DeviceKind,
    /// Number of timed steps
    #[arg(long, default_value_t = 5, value_parser = positive)]
    pub(crate) reps: usize,
    /// Number of steps before the timed ones
    #[arg(long, default_value_t = 2)]
    pub(crate) warmup: usize,
    /// Number of positions [default: that of the shape]
    #[arg(long, value_parser = positive)]
    pub(crate) tokens: Option<usize>,
    /// Number of components [default: that of the shape]
    #[arg(long, value_parser = positive)]
    pub(crate) components: Option<usize>,
    /// Size of a context [default: that of the shape]
    #[arg(long, value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// Size of the vocabulary [default: that of the shape]
    #[arg(long, value_parser = positive)]
    pub(crate) vocab: Option<usize>,
    /// A cheaper vocabulary in place of a decoder with a row for each id
    #[arg(long, value_enum)]
    pub(crate) output: Option<Output>,
    /// Function of the logits before the softmax
    #[arg(long, default_value = "identity", value_parser = logit_function(), conflicts_with = "output")]
    pub(crate) logit_function: LogitFunction,
    /// Normalise over a sample of N negatives, which is drawn anew in each step
    #[arg(long, value_name = "N", value_parser = positive, conflicts_with = "forward_only")]
    pub(crate) sampled: Option<usize>,
    /// The decoder's gradient as rows and ids, of a sample
    #[arg(long, requires = "sampled")]
    pub(crate) decoder_rows: bool,
    /// What is trained; the rest is frozen. The whole step is then timed in turn with it
    #[arg(long, value_enum, default_value = "all", conflicts_with_all = ["output", "sampled", "forward_only"])]
    pub(crate) train: Train,
    /// Rank of the adapter
    #[arg(long, default_value_t = 16, value_parser = positive)]
    pub(crate) rank: usize,
    /// Time the loss without gradients, as in an evaluation
    #[arg(long)]
    pub(crate) forward_only: bool,
    /// Lets the products round operands of f32 to bf16
    #[arg(long)]
    pub(crate) bf16_products: bool,
    /// Budget of the workspace, in MiB
    #[arg(long, value_parser = positive)]
    pub(crate) workspace_mib: Option<usize>,
    /// Budget of the workspace for chunks of at most N rows
    #[arg(long, value_name = "N", value_parser = positive, conflicts_with_all = ["workspace_mib", "output"])]
    pub(crate) chunk_rows: Option<usize>,
    /// Time log-probabilities, entropies or distillation of the mixture in place of a step
    #[arg(long, value_enum, conflicts_with_all = ["output", "sampled", "train", "step_only", "forward_only", "bf16_products", "workspace_mib", "chunk_rows"])]
    pub(crate) score: Option<Score>,
    /// The divergence of a distillation
    #[arg(long, value_enum, default_value = "forward")]
    pub(crate) divergence: DivergenceKind,
    /// Time the loss over sets of N allowed ids a position, with its gradients, in place of a step
    #[arg(long, value_name = "N", value_parser = positive, conflicts_with_all = ["score", "output", "sampled", "train", "step_only", "forward_only", "bf16_products", "workspace_mib", "chunk_rows"])]
    pub(crate) kept: Option<usize>,
    /// Time the step alone, without the mixture and the matrix products
    #[arg(long)]
    pub(crate) step_only: bool,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Shape {
    /// Penn Treebank, Yang et al. 2018: batch 12 x 70, K = 15
    Ptb,
    /// WikiText-2, Yang et al. 2018: batch 15 x 70, K = 15
    Wt2,
    /// One Billion Word, Yang et al. 2018: batch 60 x 35, K = 7
    #[value(name = "1b")]
    OneBillion,
    /// The softmax of a language model of a billion parameters: 2048 positions
    Llm,
    /// A softmax of width 512 over 100,000 ids: 840 positions
    Large,
    /// Small sizes to try a script on
    Small,
}

impl Shape {
    /// Returns the sizes of the published model.
    fn sizes(self) -> Sizes {
        let (positions, components, context, vocab, hidden) = match self {
            Shape::Ptb => (840, 15, 280, 10_000, 620),
            Shape::Wt2 => (1050, 15, 300, 33_278, 650),
            Shape::OneBillion => (2100, 7, 900, 100_000, 1024),
            Shape::Llm => (2048, 1, 2048, 128_256, 2048),
            Shape::Large => (840, 1, 512, 100_000, 512),
            Shape::Small => (256, 4, 64, 2000, 96),
        };
        Sizes { positions, components, context, vocab, hidden }
    }
}

impl Args {
    /// Returns the sizes of the shape, or those of the flags that are set.
    pub(crate) fn sizes(&self) -> Sizes {
        let shape = self.shape.sizes();
        let components = self.components.unwrap_or(shape.components);
        // A single softmax has no projection.
        let hidden = if components == 1 { self.context.unwrap_or(shape.context) } else { shape.hidden };
        Sizes {
            positions: self.tokens.unwrap_or(shape.positions),
            components,
            context: self.context.unwrap_or(shape.context),
            vocab: self.vocab.unwrap_or(shape.vocab),
            hidden,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Rows of the decoder computed from spellings
    CharCnn,
    /// A head over a fiftieth of the vocabulary, and three clusters
    Adaptive,
    /// As many classes as the square root of the vocabulary
    Hierarchical,
    /// Mixtape, whose four contexts are mixed before one softmax; half of the ids have gates of their own
    Mixtape,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum Implementation {
    /// This crate
    Fused,
    /// The same formula from ordinary candle operations
    Composed,
    /// The three matrix products alone
    Gemm3,
}

fn dtype() -> impl TypedValueParser<Value = DType> {
    PossibleValuesParser::new(["f32", "f64", "f16", "bf16"]).try_map(|name| name.parse())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_zero_are_errors_that_name_the_flag() {
        for flag in
            ["--tokens", "--components", "--vocab", "--sampled", "--reps", "--workspace-mib", "--chunk-rows", "--kept"]
        {
            let error = Args::try_parse_from(["step_time", flag, "0"]).err().expect("must fail").to_string();
            assert!(error.contains(flag) && error.contains("at least 1"), "{error}");
        }
    }
}
