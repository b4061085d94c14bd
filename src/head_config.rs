//! The choice of a head by a configuration, such as one that is read from a file.

use candle_nn::VarBuilder;

use crate::error::Result;
use crate::heads::{MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, SoftmaxConfig, SoftmaxHead};
use crate::two_level::{AdaptiveConfig, AdaptiveSoftmax, HierarchicalConfig, HierarchicalSoftmax};

/// A head and its configuration.
///
/// # Examples
///
/// With the feature `serde`, a model's configuration file names its head, such as
/// `{"head": "mixture_of_softmaxes", "hidden_size": 32, "vocab_size": 500, "components": 4}`.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::VarBuilder;
/// use mos_head::{HeadConfig, MixtureConfig, OutputLayer};
///
/// # fn main() -> mos_head::Result<()> {
/// let config = HeadConfig::MixtureOfSoftmaxes(MixtureConfig::new(32, 500, 4));
/// let head = config.build(VarBuilder::zeros(DType::F32, &Device::Cpu).pp("head"))?;
/// assert_eq!((head.hidden_size(), head.vocab_size()), (32, 500));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "head", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum HeadConfig {
    /// A [`SoftmaxHead`].
    Softmax(SoftmaxConfig),
    /// A [`MixtureOfContexts`].
    MixtureOfContexts(MixtureConfig),
    /// A [`MixtureOfSoftmaxes`].
    MixtureOfSoftmaxes(MixtureConfig),
    /// An [`AdaptiveSoftmax`], whose first level is a softmax.
    Adaptive(AdaptiveConfig),
    /// A [`HierarchicalSoftmax`], whose first level is a softmax.
    Hierarchical(HierarchicalConfig),
}

impl HeadConfig {
    /// The head, with variables of its own.
    ///
    /// # Errors
    ///
    /// As for `new` of the head.
    pub fn build(&self, vb: VarBuilder) -> Result<Box<dyn OutputLayer>> {
        Ok(match self {
            HeadConfig::Softmax(config) => Box::new(SoftmaxHead::new(config, vb)?),
            HeadConfig::MixtureOfContexts(config) => Box::new(MixtureOfContexts::new(config, vb)?),
            HeadConfig::MixtureOfSoftmaxes(config) => Box::new(MixtureOfSoftmaxes::new(config, vb)?),
            HeadConfig::Adaptive(config) => Box::new(AdaptiveSoftmax::new(config, vb)?),
            HeadConfig::Hierarchical(config) => Box::new(HierarchicalSoftmax::new(config, vb)?),
        })
    }
}
