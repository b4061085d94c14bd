//! The hierarchical softmax of two levels (Goodman, 2001, arXiv cs/0108006): its root is a head over classes of ids,
//! and each class is a cluster. There is no shortlist.

use std::sync::Arc;

use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};

use super::{Cluster, LevelNames, Permutation, TwoLevel};
use crate::error::{Error, Result};
use crate::heads::{MixtureLayer, SoftmaxHead};
use crate::tensors::checks::{check_at_most, check_frequencies, check_product, check_sizes, check_vocab};
use crate::tensors::initial_values::linear_init;
use crate::tensors::permutation::{inverse, sorted};

/// The largest number of classes, each of which has variables of its own.
const MAX_CLASSES: usize = 1 << 20;

/// The classes of a [`HierarchicalSoftmax`].
///
/// # Examples
///
/// Five token ids in two classes, by their parts of speech:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// use mos_head::two_level::{Classes, HierarchicalConfig, HierarchicalSoftmax};
/// use mos_head::OutputLayer;
///
/// # fn main() -> mos_head::Result<()> {
/// let words = ["the", "cat", "a", "mat", "dog"];
/// let classes = Classes::Given(vec![0, 1, 0, 1, 1]); // articles, nouns
/// let config = HierarchicalConfig::new(8, words.len()).with_classes(classes);
/// assert_eq!(config.class_count()?, 2);
/// let head = HierarchicalSoftmax::new(&config, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let probs = head.log_probs(&Tensor::zeros((1, 8), DType::F32, &Device::Cpu)?)?.exp()?.squeeze(0)?;
/// // With weights of zero a class has probability 1/2: "the" half of it, "cat" a third.
/// let probs = probs.to_vec1::<f32>()?;
/// assert!((probs[0] - 1.0 / 4.0).abs() < 1e-6 && (probs[1] - 1.0 / 6.0).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Classes {
    /// This many classes of consecutive ids, whose sizes differ by at most one id. They suit ids sorted by frequency.
    Consecutive(usize),
    /// The class of each id. Classes are numbered from 0 without gaps.
    Given(Vec<u32>),
}

impl Classes {
    /// Makes at most this many classes of about equal probability mass: ids in descending order of frequency fill one
    /// class after the other (Mikolov, Kombrink, Burget, Černocký, Khudanpur: Extensions of Recurrent Neural Network
    /// Language Model. ICASSP 2011). There are fewer classes if single ids have more than the mass of a class.
    ///
    /// # Errors
    ///
    /// If the number of classes is zero, or a frequency is negative or not finite, or none is positive.
    ///
    /// # Examples
    ///
    /// ```
    /// use mos_head::two_level::Classes;
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let classes = Classes::from_frequencies(&[1.0, 4.0, 1.0, 2.0], 2)?;
    /// assert_eq!(classes, Classes::Given(vec![1, 0, 1, 1]));
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_frequencies(frequencies: &[f64], classes: usize) -> Result<Self> {
        check_sizes(&[("classes", classes)])?;
        let total = check_frequencies("frequencies", frequencies)?;
        let order = sorted(frequencies.len(), &|a, b| frequencies[b].total_cmp(&frequencies[a]));
        let mut given = vec![0; frequencies.len()];
        let (mut mass, mut bin, mut class) = (0.0, 0, 0);
        for (i, id) in order.into_iter().map(|id| id as usize).enumerate() {
            // The mass before this id ends in the bin `next`; rounding may bring it to the end of the last bin.
            let next = ((mass / total * classes as f64) as usize).min(classes - 1);
            if i > 0 && next > bin {
                (bin, class) = (next, class + 1);
            }
            given[id] = class;
            mass += frequencies[id];
        }
        Ok(Classes::Given(given))
    }
}

/// The sizes and options of a [`HierarchicalSoftmax`].
///
/// # Examples
///
/// ```
/// use mos_head::two_level::{Classes, HierarchicalConfig};
///
/// let config = HierarchicalConfig::new(512, 100_000);
/// assert_eq!(config.classes, Classes::Consecutive(317)); // the square root of vocab_size, rounded up
/// let config = config.with_classes(Classes::Consecutive(200));
/// # let _ = config;
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(from = "HierarchicalFields"))]
#[non_exhaustive]
pub struct HierarchicalConfig {
    /// The size of a hidden state.
    pub hidden_size: usize,
    /// The number of token ids.
    pub vocab_size: usize,
    /// The classes. The default is consecutive classes, the square root of `vocab_size` in number, rounded up.
    pub classes: Classes,
    /// Whether both levels have a bias. The default is true.
    pub bias: bool,
}

impl HierarchicalConfig {
    /// Makes the configuration of a head of these sizes with consecutive classes and biases.
    pub fn new(hidden_size: usize, vocab_size: usize) -> Self {
        let classes = Classes::Consecutive((vocab_size as f64).sqrt().ceil() as usize);
        HierarchicalConfig { hidden_size, vocab_size, classes, bias: true }
    }

    /// Sets the classes.
    pub fn with_classes(self, classes: Classes) -> Self {
        HierarchicalConfig { classes, ..self }
    }

    /// Sets whether both levels have a bias.
    pub fn with_bias(self, bias: bool) -> Self {
        HierarchicalConfig { bias, ..self }
    }

    /// Returns the number of classes, which is the vocabulary of a class layer.
    ///
    /// # Errors
    ///
    /// If a size is zero, a level would have more than 2^40 weights or 2^32 - 1 ids, or the classes are not valid: a
    /// class is empty, or the classes are more than the ids or 2^20 or not given for each id.
    pub fn class_count(&self) -> Result<usize> {
        Ok(self.class_sizes()?.0.len())
    }

    /// Checks the sizes and the classes. Returns the number of ids of each class, and the order of the ids by class, or
    /// `None` if it is the order of the ids themselves.
    fn class_sizes(&self) -> Result<(Vec<usize>, Option<Permutation>)> {
        check_sizes(&[("hidden_size", self.hidden_size)])?;
        check_vocab(self.vocab_size)?;
        check_product("vocab_size * hidden_size", &[self.vocab_size, self.hidden_size])?;
        let vocab = self.vocab_size;
        match &self.classes {
            &Classes::Consecutive(classes) if (1..=vocab).contains(&classes) => {
                check_at_most("classes", classes, MAX_CLASSES)?;
                let start = |class| (class as u128 * vocab as u128 / classes as u128) as usize;
                Ok(((0..classes).map(|class| start(class + 1) - start(class)).collect(), None))
            }
            Classes::Consecutive(classes) => {
                Err(Error::config("classes", format!("a number from 1 to vocab_size {vocab}"), classes))
            }
            Classes::Given(given) if given.len() == vocab => given_class_sizes(given),
            Classes::Given(given) => {
                Err(Error::config("classes", format!("the classes of {vocab} ids"), format!("{}", given.len())))
            }
        }
    }
}

/// Checks given classes, one for each token id. Returns the number of ids of each class, and the order of the ids by
/// class, or `None` if it is the order of the ids themselves.
fn given_class_sizes(given: &[u32]) -> Result<(Vec<usize>, Option<Permutation>)> {
    let vocab = given.len();
    let classes = given.iter().max().map_or(0, |&last| (last as usize).saturating_add(1));
    let mut sizes = vec![0; classes.min(vocab)];
    for &class in given {
        if let Some(size) = sizes.get_mut(class as usize) {
            *size += 1;
        }
    }
    if let Some(class) = sizes.iter().position(|&size| size == 0) {
        return Err(Error::config("classes", "an id in each class up to the last", format!("none in {class}")));
    }
    check_at_most("classes", classes, MAX_CLASSES)?;
    if given.is_sorted() {
        return Ok((sizes, None));
    }
    // Ids ascend within a class.
    let id_by_slot = sorted(vocab, &|a, b| given[a].cmp(&given[b]));
    Ok((sizes, Some(Permutation { slot_by_id: inverse(&id_by_slot), id_by_slot })))
}

/// The fields of a configuration that is deserialized: sizes are required, options have the defaults of `new`.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct HierarchicalFields {
    hidden_size: usize,
    vocab_size: usize,
    classes: Option<Classes>,
    bias: Option<bool>,
}

#[cfg(feature = "serde")]
impl From<HierarchicalFields> for HierarchicalConfig {
    fn from(read: HierarchicalFields) -> Self {
        let default = HierarchicalConfig::new(read.hidden_size, read.vocab_size);
        HierarchicalConfig {
            classes: read.classes.unwrap_or(default.classes),
            bias: read.bias.unwrap_or(default.bias),
            ..default
        }
    }
}

/// A hierarchical softmax of two levels: a softmax over classes of token ids, and one over the ids of each class.
///
/// ```text
/// P(v) = softmax(A h + a)_c softmax(W_c h + b_c)_v,    c the class of v
/// ```
///
/// With about sqrt(vocab) classes of as many ids, the loss of a position costs 2 sqrt(vocab) logits instead of vocab.
/// Each class is computed only for the positions whose target is in it. The layer over the classes can be any mixture,
/// [`HierarchicalSoftmax::with_class_layer`].
///
/// The loss is exact. It reads the targets, which on a GPU waits for the device. A class without a target in the batch
/// gets no gradients: they are zero, but absent from the `GradStore`. Each class has its own variables, because the
/// gradient of a part of one matrix would be as large as the matrix. The options label smoothing, z-loss and counted
/// predictions of a loss are [`Error::Unsupported`](crate::Error::Unsupported).
///
/// [`OutputLayer::top_k`](crate::OutputLayer::top_k) computes a class only at positions where one of its ids can be
/// among the k best (a NaN in another class goes unnoticed). [`OutputLayer::sample`](crate::OutputLayer::sample) draws
/// a class, then an id, unless a temperature or a truncation needs all log-probabilities.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::two_level::{HierarchicalConfig, HierarchicalSoftmax};
/// use mos_head::{LossOptions, OutputLayer};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let head = HierarchicalSoftmax::new(&HierarchicalConfig::new(64, 10_000), vb)?;
/// let hidden = Tensor::randn(0f32, 1., (2, 3, 64), &Device::Cpu)?;
/// let targets = Tensor::new(&[[3u32, 1, 700], [9999, 2, 0]], &Device::Cpu)?;
/// let gradients = head.loss(&hidden, &targets, &LossOptions::default())?.backward()?;
/// // Weight and bias of the layer over the classes, and of the three classes that have a target.
/// assert_eq!(vars.all_vars().iter().filter(|var| gradients.get(var).is_some()).count(), 8);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// - Goodman: Classes for Fast Maximum Entropy Training. ICASSP 2001, arXiv cs/0108006.
/// - Mikolov, Kombrink, Burget, Černocký, Khudanpur: Extensions of Recurrent Neural Network Language Model. ICASSP
///   2011.
pub type HierarchicalSoftmax = TwoLevel<Hierarchical>;

/// The scheme of a [`HierarchicalSoftmax`].
#[derive(Clone, Copy, Debug)]
pub enum Hierarchical {}

impl TwoLevel<Hierarchical> {
    /// Makes a head with the variables `class.weight` `[classes, hidden]`, `class.bias` `[classes]`, and for each class
    /// `word.{c}.weight` `[size_c, hidden]` and `word.{c}.bias` `[size_c]`: weights uniform within 1 / sqrt(hidden),
    /// biases zero.
    ///
    /// # Errors
    ///
    /// If a size is zero, a level would have more than 2^40 weights or 2^32 - 1 ids, a class is empty, the classes are
    /// more than the ids or 2^20 or not given for each id, or a variable is missing or of another shape.
    pub fn new(config: &HierarchicalConfig, vb: VarBuilder) -> Result<Self> {
        let classes = config.class_sizes()?.0.len();
        let (weight, bias) = level_variables(classes, config, &vb.pp("class"))?;
        Self::with_class_layer(config, Arc::new(SoftmaxHead::from_tensors(weight, bias)?), vb)
    }

    /// Makes a hierarchical softmax with a layer of your own over the classes, such as a
    /// [`MixtureOfSoftmaxes`](crate::MixtureOfSoftmaxes). This creates variables for the ids within each class only.
    ///
    /// # Errors
    ///
    /// The errors of [`HierarchicalSoftmax::new`], or if the layer's vocabulary is not the classes or its hidden states
    /// are of another size.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use candle_core::{DType, Device};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use mos_head::two_level::{HierarchicalConfig, HierarchicalSoftmax};
    /// use mos_head::{MixtureConfig, MixtureOfSoftmaxes, OutputLayer};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let vars = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// let config = HierarchicalConfig::new(64, 10_000);
    /// let classes = MixtureConfig::new(64, config.class_count()?, 5).with_context_dim(32);
    /// let classes = MixtureOfSoftmaxes::new(&classes, vb.pp("classes"))?;
    /// let head = HierarchicalSoftmax::with_class_layer(&config, Arc::new(classes), vb)?;
    /// assert_eq!((head.class_layer().components(), head.vocab_size()), (5, 10_000));
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_class_layer(
        config: &HierarchicalConfig,
        class_layer: Arc<dyn MixtureLayer>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let (sizes, permutation) = config.class_sizes()?;
        let mut start = 0;
        let cluster = |(class, size): (usize, usize)| {
            let (weight, bias) = level_variables(size, config, &vb.pp("word").pp(class))?;
            start += size;
            Ok(Cluster { projection: None, weight, bias, slots: start - size..start })
        };
        let clusters = sizes.into_iter().enumerate().map(cluster).collect::<Result<_>>()?;
        let names = LevelNames { head: "HierarchicalSoftmax", root: "class_layer" };
        TwoLevel::from_levels(names, config.hidden_size, class_layer, clusters, permutation)
    }

    /// Returns the layer that gives the distribution over the classes.
    pub fn class_layer(&self) -> &dyn MixtureLayer {
        &*self.root
    }
}

/// Makes the weight of a level with this number of outputs, and its bias if it is configured.
fn level_variables(outputs: usize, config: &HierarchicalConfig, vb: &VarBuilder) -> Result<(Tensor, Option<Tensor>)> {
    let init = linear_init(config.hidden_size);
    let weight = vb.get_with_hints((outputs, config.hidden_size), "weight", init)?;
    let bias = config.bias.then(|| vb.get_with_hints(outputs, "bias", Init::Const(0.0))).transpose()?;
    Ok((weight, bias))
}
