//! Names of 0.2, each forwarded to its present one; they go with 0.4. CHANGELOG.md lists those that have no alias.

use candle_nn::VarBuilder;

use crate::decoder::CharCnn;
use crate::error::Result;
use crate::heads::{Configured, Head, MixtureConfig};
use crate::loss::{LossOptions, Negatives, NoiseDistribution};

/// The former name of [`NoiseDistribution`].
#[deprecated(since = "0.3.0", note = "use `NoiseDistribution`")]
pub type Proposal = NoiseDistribution;

impl LossOptions {
    /// [`LossOptions::with_correct`]
    #[deprecated(since = "0.3.0", note = "use `with_correct`")]
    pub fn with_hits(self, hits: bool) -> Self {
        self.with_correct(hits)
    }
}

impl MixtureConfig {
    /// [`MixtureConfig::with_context_dim`]
    #[deprecated(since = "0.3.0", note = "use `with_context_dim`")]
    pub fn with_context(self, context: usize) -> Self {
        self.with_context_dim(context)
    }
}

impl Negatives {
    /// [`Negatives::token_ids`]
    #[deprecated(since = "0.3.0", note = "use `token_ids`")]
    pub fn ids(&self) -> &[usize] {
        self.token_ids()
    }
}

impl<P: Configured> Head<P> {
    /// [`Head::with_char_cnn`]
    ///
    /// # Errors
    ///
    /// As for [`Head::with_char_cnn`].
    #[deprecated(since = "0.3.0", note = "use `with_char_cnn`")]
    pub fn computed(config: &P::Config, rows: CharCnn, vb: VarBuilder) -> Result<Self> {
        Self::with_char_cnn(config, rows, vb)
    }
}
