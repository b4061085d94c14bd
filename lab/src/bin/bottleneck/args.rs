//! The flags.

use candle_core::DType;
use clap::{Parser, ValueEnum};
use lab::show::values::positive;
use std::path::PathBuf;

/// Measures the rank of a language model's log-probabilities, and what a lower rank would cost.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Checkpoints of language_model; with --weight or --log-probs, safetensors files
    #[arg(required = true, value_name = "CHECKPOINT")]
    pub(crate) checkpoints: Vec<PathBuf>,
    /// Print the contexts in which two checkpoints differ most, with the most probable tokens of each
    #[arg(long, conflicts_with_all = ["weight", "log_probs", "plot", "json"])]
    pub(crate) compare: bool,
    /// Print the share of the logits' gradient G = dL/dz that the decoder W passes on to its contexts,
    /// ||G W (W^T W)^(-1/2)|| / ||G|| (arXiv 2603.10145)
    ///
    /// L is the cross-entropy of the targets, which must be known, and the norms are those of Frobenius. A softmax has
    /// G = P - Y. The logits of component k of a mixture of softmaxes have G_k = r_k (s_k - y), with the responsibility
    /// r_k = pi_k s_kt / P(t) of the component for the target t; the sums of squares are over all positions and
    /// components. A function f of the logits adds the factor f'(z). Columns of W that depend on others add nothing:
    /// singular values below the roundoff of --dtype do not count. Nothing else is measured.
    #[arg(long, conflicts_with_all = ["compare", "log_probs", "plot"])]
    pub(crate) gradient: bool,
    /// Folder of the checkpoints' corpus [default: the one that they were trained on]
    #[arg(long, value_name = "DIR", conflicts_with_all = ["weight", "log_probs"])]
    pub(crate) data: Option<PathBuf>,
    /// Name of the matrix W `[vocab, d]` of a softmax(W h + b), or of a mixture of them, in the file
    #[arg(long, value_name = "KEY", requires = "hidden")]
    pub(crate) weight: Option<String>,
    /// Name of its bias b `[vocab]`
    #[arg(long, value_name = "KEY", requires = "weight")]
    pub(crate) bias: Option<String>,
    /// Safetensors file with hidden states `hidden` [.., d], or the contexts of a mixture of softmaxes `contexts`
    /// [.., K, d] and `log_priors` [.., K] (not needed if K = 1), and, if known, the next tokens `targets` [..]
    #[arg(long, value_name = "FILE", requires = "weight")]
    pub(crate) hidden: Option<PathBuf>,
    /// Name of log-probabilities `[.., vocab]` in the file
    #[arg(long, value_name = "KEY", conflicts_with = "weight")]
    pub(crate) log_probs: Option<String>,
    /// These are logits, to be normalised with a softmax
    #[arg(long, requires = "log_probs")]
    pub(crate) logits: bool,
    /// Name of the next tokens `[..]` after the positions of --log-probs
    #[arg(long, value_name = "KEY", requires = "log_probs")]
    pub(crate) targets: Option<String>,
    /// Take contexts of the test text, not of the validation text
    #[arg(long, conflicts_with_all = ["weight", "log_probs"])]
    pub(crate) test: bool,
    /// Number of contexts, evenly spaced over the text or the rows of the file
    #[arg(long, default_value_t = 2000, value_parser = positive)]
    pub(crate) contexts: usize,
    /// The dtype of the logits: with f32, or a file of log-probabilities in f32, singular values below its roundoff do
    /// not count
    #[arg(long, value_enum, default_value = "f64")]
    pub(crate) dtype: Precision,
    /// Upper bound of the memory for the log-probabilities, or for the gradients of --gradient, in MiB
    #[arg(long, default_value_t = 8192, value_parser = positive)]
    pub(crate) memory: usize,
    /// Number of contexts that --compare prints for each model
    #[arg(long, default_value_t = 3, value_parser = positive, requires = "compare")]
    pub(crate) top: usize,
    /// Draw the distribution of the singular values to this SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Print one line of JSON at the end
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Precision {
    F64,
    F32,
}

impl Precision {
    pub(crate) fn dtype(self) -> DType {
        match self {
            Precision::F64 => DType::F64,
            Precision::F32 => DType::F32,
        }
    }

    /// Returns the distance from 1 to the next number.
    pub(crate) fn epsilon(self) -> f64 {
        match self {
            Precision::F64 => f64::EPSILON,
            Precision::F32 => f64::from(f32::EPSILON),
        }
    }
}
