//! The adaptive softmax of Grave et al. (2017, arXiv 1609.04309): its root is a head over the frequent ids and the
//! clusters of rare ids.

use std::sync::Arc;

use candle_nn::VarBuilder;

use super::{Cluster, LevelNames, TwoLevel};
use crate::error::{Error, Result};
use crate::heads::{MixtureLayer, SoftmaxHead};
use crate::tensors::checks::{check_number, check_product, check_sizes, check_vocab};
use crate::tensors::initial_values::linear_init;

/// The sizes and options of an [`AdaptiveSoftmax`], named as in PyTorch's `AdaptiveLogSoftmaxWithLoss`.
///
/// # Examples
///
/// ```
/// use mos_head::two_level::AdaptiveConfig;
///
/// // 2000 frequent ids, and clusters of 8000, 40000 and 50000 ids.
/// let config = AdaptiveConfig::new(512, 100_000, vec![2000, 10_000, 50_000]);
/// assert_eq!(config.head_size(), 2003);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct AdaptiveConfig {
    /// The size of a hidden state.
    pub hidden_size: usize,
    /// The number of token ids, sorted by descending frequency.
    pub vocab_size: usize,
    /// The first id of each cluster, increasing: ids below `cutoffs[0]` are in the shortlist.
    pub cutoffs: Vec<usize>,
    /// The contexts of cluster i have the size `hidden_size / div_value^(i + 1)`, rounded down. The default is 4.
    #[cfg_attr(feature = "serde", serde(default = "default_div_value"))]
    pub div_value: f64,
    /// Whether the head, the softmax over the shortlist and the clusters, has a bias. The default is false. It is for
    /// [`AdaptiveSoftmax::new`]: the head of [`AdaptiveSoftmax::with_head`] decides on its own bias.
    #[cfg_attr(feature = "serde", serde(default))]
    pub head_bias: bool,
}

/// Returns the ratio of PyTorch's default.
fn default_div_value() -> f64 {
    4.0
}

impl AdaptiveConfig {
    /// Makes the configuration of these sizes and cutoffs, with a head without a bias.
    pub fn new(hidden_size: usize, vocab_size: usize, cutoffs: Vec<usize>) -> Self {
        AdaptiveConfig { hidden_size, vocab_size, cutoffs, div_value: default_div_value(), head_bias: false }
    }

    /// Sets the ratio of the sizes of successive clusters' contexts, at least 1.
    pub fn with_div_value(self, div_value: f64) -> Self {
        AdaptiveConfig { div_value, ..self }
    }

    /// Sets whether the head has a bias.
    pub fn with_head_bias(self, head_bias: bool) -> Self {
        AdaptiveConfig { head_bias, ..self }
    }

    /// Returns the number of entries of the head: the ids of the shortlist, then the clusters.
    pub fn head_size(&self) -> usize {
        self.cutoffs.first().map_or(0, |shortlist| shortlist.saturating_add(self.cutoffs.len()))
    }

    /// Returns the size of the contexts of a cluster.
    fn context_dim(&self, cluster: usize) -> usize {
        // This is Python's `hidden_size // div_value ** (cluster + 1)`, the floor of the exact quotient.
        let (hidden, divisor) = (self.hidden_size as f64, self.div_value.powf((cluster + 1) as f64));
        ((hidden - hidden % divisor) / divisor).round() as usize
    }

    /// Checks the sizes, the cutoffs and the widths of the clusters.
    fn validate(&self) -> Result<()> {
        check_sizes(&[("hidden_size", self.hidden_size)])?;
        check_vocab(self.vocab_size)?;
        let cutoffs = &self.cutoffs;
        let expected = || format!("increasing numbers, at least 1 and below vocab_size {}", self.vocab_size);
        if cutoffs.is_empty() {
            return Err(Error::config("cutoffs", expected(), "none"));
        }
        let is_wrong = |&index: &usize| {
            let least = index.checked_sub(1).map_or(1, |before| cutoffs[before].saturating_add(1));
            !(least..self.vocab_size).contains(&cutoffs[index])
        };
        if let Some(index) = (0..cutoffs.len()).find(is_wrong) {
            let got = format!("{} at index {index} of {cutoffs:?}", cutoffs[index]);
            return Err(Error::config("cutoffs", expected(), got));
        }
        let div_value = self.div_value;
        check_number(div_value >= 1.0 && div_value.is_finite(), "div_value", "a finite number, at least 1", div_value)?;
        let last = cutoffs.len() - 1;
        let expected = format!("hidden_size / div_value^{} of at least 1 for cluster {last}", last + 1);
        check_number(self.context_dim(last) >= 1, "div_value", &expected, div_value)?;
        // The head and each cluster have at most as many rows as there are ids, the contexts at most the hidden size.
        check_product("vocab_size * hidden_size", &[self.vocab_size, self.hidden_size])?;
        check_product("context_dim * hidden_size", &[self.context_dim(0), self.hidden_size])
    }
}

/// An adaptive softmax: one softmax, the head, over the frequent ids and the clusters of rare ids, and one of reduced
/// width within each cluster.
///
/// ```text
/// P(v) = P_head(v)                                           v < cutoffs[0]
/// P(v) = P_head(cluster i) softmax(U_i V_i h)_v              cutoffs[i] <= v < cutoffs[i + 1]
/// ```
///
/// The variables have the names of PyTorch's `AdaptiveLogSoftmaxWithLoss`, whose state dict is loaded as it is. Token
/// ids must be sorted by descending frequency. Most targets are then in the shortlist, and a cluster is computed only
/// for the positions whose target is in it: a training step costs about a softmax over the shortlist. The head can be
/// any mixture, [`AdaptiveSoftmax::with_head`].
///
/// The loss is exact. It reads the targets, which on a GPU waits for the device. A cluster without a target in the
/// batch gets no gradients: they are zero, but absent from the `GradStore`. The options label smoothing, z-loss and
/// counted predictions of a loss are [`Error::Unsupported`](crate::Error::Unsupported).
///
/// [`OutputLayer::top_k`](crate::OutputLayer::top_k) computes a cluster only at positions where one of its ids can be
/// among the k best (a NaN in another cluster goes unnoticed). [`OutputLayer::sample`](crate::OutputLayer::sample)
/// draws from the head, then from the drawn cluster, unless a temperature or a truncation needs all log-probabilities.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax};
/// use mos_head::{LossOptions, OutputLayer};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let config = AdaptiveConfig::new(64, 10_000, vec![500, 2000]);
/// let head = AdaptiveSoftmax::new(&config, vb)?;
/// let hidden = Tensor::randn(0f32, 1., (2, 3, 64), &Device::Cpu)?;
/// let targets = Tensor::new(&[[3u32, 1, 700], [9999, 2, 0]], &Device::Cpu)?;
/// let gradients = head.loss(&hidden, &targets, &LossOptions::default())?.backward()?;
/// assert_eq!(vars.all_vars().iter().filter(|var| gradients.get(var).is_some()).count(), 5);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// Grave, Joulin, Cissé, Grangier, Jégou: Efficient softmax approximation for GPUs. ICML 2017, arXiv 1609.04309.
pub type AdaptiveSoftmax = TwoLevel<Adaptive>;

/// The scheme of an [`AdaptiveSoftmax`].
#[derive(Clone, Copy, Debug)]
pub enum Adaptive {}

impl TwoLevel<Adaptive> {
    /// Makes a head with the variables `head.weight` `[head_size, hidden]`, `head.bias` `[head_size]`, and for each
    /// cluster `tail.{i}.0.weight` `[d_i, hidden]` and `tail.{i}.1.weight` `[size_i, d_i]`, initialised as PyTorch's
    /// `nn.Linear`: uniform within 1 / sqrt(n) for n inputs.
    ///
    /// # Errors
    ///
    /// If a size is zero, the cutoffs do not increase from at least 1 to below the size of the vocabulary, the contexts
    /// of a cluster would have no dimension, a variable would have more than 2^40 elements, there are more than 2^32 -
    /// 1 token ids, or a variable is missing or of another shape.
    pub fn new(config: &AdaptiveConfig, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        let (size, head) = (config.head_size(), vb.pp("head"));
        let weight = head.get_with_hints((size, config.hidden_size), "weight", linear_init(config.hidden_size))?;
        let bias =
            config.head_bias.then(|| head.get_with_hints(size, "bias", linear_init(config.hidden_size))).transpose()?;
        Self::from_head(config, Arc::new(SoftmaxHead::from_tensors(weight, bias)?), vb)
    }

    /// Makes an adaptive softmax with a head of your own, whose vocabulary is the ids of the shortlist, then the
    /// clusters. With a [`MixtureOfSoftmaxes`](crate::MixtureOfSoftmaxes), for example, frequent ids come from a
    /// mixture of softmaxes, rare ids from a softmax. This creates variables for the clusters only. The given head
    /// decides on its own bias: `head_bias` must be false.
    ///
    /// # Errors
    ///
    /// The errors of [`AdaptiveSoftmax::new`], or if `head_bias` is set, the head's vocabulary does not have
    /// [`AdaptiveConfig::head_size`] entries or its hidden states are of another size.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use candle_core::{DType, Device};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax};
    /// use mos_head::{MixtureConfig, MixtureOfSoftmaxes, OutputLayer};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let vars = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// let config = AdaptiveConfig::new(64, 10_000, vec![500, 2000]);
    /// let mixture = MixtureConfig::new(64, config.head_size(), 5).with_context_dim(32);
    /// let mixture = MixtureOfSoftmaxes::new(&mixture, vb.pp("head"))?;
    /// let head = AdaptiveSoftmax::with_head(&config, Arc::new(mixture), vb)?;
    /// assert_eq!(head.vocab_size(), 10_000);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_head(config: &AdaptiveConfig, head: Arc<dyn MixtureLayer>, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        if config.head_bias {
            return Err(Error::config("head_bias", "false for a head that is given", true));
        }
        Self::from_head(config, head, vb)
    }

    /// Makes the clusters of a checked configuration, with their variables, below a head.
    fn from_head(config: &AdaptiveConfig, head: Arc<dyn MixtureLayer>, vb: VarBuilder) -> Result<Self> {
        let ends = config.cutoffs[1..].iter().chain([&config.vocab_size]);
        let cluster = |(i, (&start, &end)): (usize, (&usize, &usize))| {
            let (context_dim, tail) = (config.context_dim(i), vb.pp("tail").pp(i));
            let projection =
                tail.get_with_hints((context_dim, config.hidden_size), "0.weight", linear_init(config.hidden_size))?;
            let weight = tail.get_with_hints((end - start, context_dim), "1.weight", linear_init(context_dim))?;
            Ok(Cluster { projection: Some(projection), weight, bias: None, slots: start..end })
        };
        let clusters = config.cutoffs.iter().zip(ends).enumerate().map(cluster).collect::<Result<_>>()?;
        let names = LevelNames { head: "AdaptiveSoftmax", root: "head" };
        TwoLevel::from_levels(names, config.hidden_size, head, clusters, None)
    }

    /// Returns the head, which gives the distribution over the ids of the shortlist, then the clusters.
    pub fn head(&self) -> &dyn MixtureLayer {
        &*self.root
    }
}
