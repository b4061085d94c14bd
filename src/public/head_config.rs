//! The choice of a head by a configuration, such as one that is read from a file.

use candle_nn::VarBuilder;

use crate::error::Result;
use crate::heads::{MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, SoftmaxConfig, SoftmaxHead};
use crate::two_level::{AdaptiveConfig, AdaptiveSoftmax, HierarchicalConfig, HierarchicalSoftmax};

/// The kind of a head and its configuration, to be saved beside a file of weights, which does not hold them. A
/// mixture's activation, the scale and the function of the logits are in no tensor: weights alone load into a head with
/// other ones without an error.
///
/// # Examples
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
///
/// With the feature `serde`, a file beside the weights names the head, such as `{"head": "mixture_of_softmaxes",
/// "hidden_size": 32, "vocab_size": 500, "components": 4, "activation": "identity"}`:
///
/// ```
/// # #[cfg(feature = "serde")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::{ContextActivation, HeadConfig, MixtureConfig, OutputLayer};
///
/// let folder = std::env::temp_dir().join(format!("head-of-{}", std::process::id()));
/// std::fs::create_dir_all(&folder)?;
/// let (weights, description) = (folder.join("head.safetensors"), folder.join("head.json"));
/// let config = MixtureConfig::new(32, 500, 4).with_activation(ContextActivation::Identity);
/// let config = HeadConfig::MixtureOfSoftmaxes(config);
/// let vars = VarMap::new();
/// let head = config.build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
/// vars.save(&weights)?;
/// std::fs::write(&description, serde_json::to_string(&config)?)?;
///
/// let config: HeadConfig = serde_json::from_slice(&std::fs::read(&description)?)?;
/// let mut vars = VarMap::new();
/// let loaded = config.build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
/// vars.load(&weights)?;
/// # let hidden = candle_core::Tensor::randn(0f32, 1., (3, 32), &Device::Cpu)?;
/// # let [head, loaded] = [head, loaded].map(|head| head.log_probs(&hidden)?.to_vec2::<f32>());
/// # assert_eq!(head?, loaded?);
/// # std::fs::remove_dir_all(folder)?;
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "serde"))]
/// # fn main() {}
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
    /// Builds the head, with variables of its own.
    ///
    /// # Errors
    ///
    /// The errors of the head's `new`.
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
