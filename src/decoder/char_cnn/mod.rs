//! Rows of a decoder that a network computes from spellings (Kim et al., 2016, arXiv 1508.06615; Jozefowicz et al.,
//! 2016, arXiv 1602.02410, section 3.2). The decoder asks for all rows, or for those of a sample.

mod config;
mod network;
mod spelling;

use std::sync::Arc;

use candle_core::{DType, Tensor, Var};
use candle_nn::{Init, VarBuilder};

use crate::error::{Error, Result};
use crate::tensors::autograd;
use crate::tensors::checks::{accumulation_dtype, check_elements, check_float, check_product, check_sizes};
use crate::tensors::initial_values::linear_init;
use crate::tensors::permutation::{inverse, sorted};
pub use config::CharCnnConfig;
use network::Parameters;
use spelling::Alphabet;

/// The rows of a decoder, computed by a convolutional network from the spelling of each entry of the vocabulary, plus a
/// correction of low dimension for each entry:
///
/// ```text
/// W[v] = CNN(characters of v) + M corr[v]    (Jozefowicz et al., 2016, section 3.2)
/// ```
///
/// The network has a character embedding, convolutions of several widths with the maximum over time, highway layers and
/// a projection (Kim et al., 2016). Its intermediate results are computed for one group of entries after the other, and
/// once more in the backward pass, so that they stay within a budget: [`CharCnnConfig::budget_bytes`].
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::parts::{CharCnn, CharCnnConfig};
/// use mos_head::{LossOptions, OutputLayer, SoftmaxConfig, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let words = ["the", "cat", "sat", "on", "mat"];
/// let config = CharCnnConfig::new(16).with_filters(&[(2, 8), (3, 8)]).with_correction(4);
/// let cnn = CharCnn::new(&config, &words, vb.pp("rows"))?;
/// let head = SoftmaxHead::with_char_cnn(&SoftmaxConfig::new(16, words.len()), cnn, vb.pp("head"))?;
///
/// let hidden = Tensor::randn(0f32, 1., (3, 16), &Device::Cpu)?;
/// let targets = Tensor::new(&[0u32, 1, 2], &Device::Cpu)?;
/// let gradients = head.loss(&hidden, &targets, &LossOptions::default())?.backward()?;
/// assert!(vars.all_vars().iter().all(|var| gradients.get(var).is_some()));
///
/// // The frozen head has computed its rows once.
/// let frozen = head.frozen()?;
/// let best = frozen.top_k(&hidden, 2)?;
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// - Kim, Jernite, Sontag, Rush: Character-Aware Neural Language Models. AAAI 2016, arXiv 1508.06615.
/// - Jozefowicz, Vinyals, Schuster, Shazeer, Wu: Exploring the Limits of Language Modeling. 2016, arXiv 1602.02410.
#[derive(Clone, Debug)]
pub struct CharCnn {
    config: CharCnnConfig,
    alphabet: Alphabet,
    /// The encoded spelling of each entry.
    spellings: Arc<Vec<Vec<u32>>>,
    parameters: Parameters,
    /// A vector for each entry, `[vocab, c]`, and the matrix M, `[d, c]`.
    correction: Option<(Tensor, Tensor)>,
}

impl CharCnn {
    /// Makes a network for these entries, with the variables `embedding.weight`, `convolution.{width}.weight` and
    /// `.bias`, `highway.{layer}.value.weight` and `.bias`, `highway.{layer}.gate.weight` and `.bias`,
    /// `projection.weight` and `.bias` and, if configured, `correction.weight` `[vocab, c]` and `correction.projection`
    /// `[d, c]`. The correction is zero at first.
    ///
    /// # Errors
    ///
    /// If there are no spellings, a size is zero, a variable would have more than 2^40 elements, there are more than
    /// 1024 highway layers, two convolutions have the same width, a character is not in the configured alphabet, or a
    /// variable is missing or of another shape.
    pub fn new(config: &CharCnnConfig, spellings: &[impl AsRef<str>], vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        check_sizes(&[("spellings", spellings.len())])?;
        check_product("spellings * correction", &[spellings.len(), config.correction])?;
        let alphabet = match &config.alphabet {
            Some(alphabet) => Alphabet::new(alphabet.chars()),
            None => Alphabet::new(spellings.iter().flat_map(|spelling| spelling.as_ref().chars())),
        };
        check_product("characters * embedding", &[alphabet.size(), config.embedding])?;
        let encoded = alphabet.encode(spellings)?;
        let correction = (config.correction > 0).then(|| {
            let (vb, size) = (vb.pp("correction"), config.correction);
            Ok::<_, Error>((
                vb.get_with_hints((spellings.len(), size), "weight", Init::Const(0.0))?,
                vb.get_with_hints((config.context_dim, size), "projection", linear_init(size))?,
            ))
        });
        let parameters = network::variables(config, alphabet.size(), &vb)?;
        check_float("embedding.weight", &parameters[0])?;
        Ok(CharCnn {
            parameters,
            correction: correction.transpose()?,
            config: config.clone(),
            alphabet,
            spellings: Arc::new(encoded),
        })
    }

    /// Returns the number of entries.
    pub fn vocab_size(&self) -> usize {
        self.spellings.len()
    }

    /// Returns the size of a row, d.
    pub fn context_dim(&self) -> usize {
        self.config.context_dim
    }

    /// Computes the rows of all entries. Differentiable.
    ///
    /// # Shapes
    ///
    /// - returns `[vocab, d]`
    ///
    /// # Errors
    ///
    /// If the device has no memory left, or candle has no kernel there for the parameters' dtype.
    pub fn rows(&self) -> Result<Tensor> {
        let correction = self.correction.as_ref().map(|(correction, _)| correction.clone());
        self.corrected_rows(self.spellings.clone(), correction)
    }

    /// Computes the rows of these entries only. Differentiable.
    ///
    /// # Shapes
    ///
    /// - ids: `[n]`; u32
    /// - returns `[n, d]`
    ///
    /// # Errors
    ///
    /// If the ids are not a vector of u32, or an id is not below the number of entries.
    pub fn rows_of(&self, ids: &Tensor) -> Result<Tensor> {
        if ids.rank() != 1 {
            return Err(Error::shape("ids", "[n]", ids.dims()));
        }
        if ids.dtype() != DType::U32 {
            return Err(Error::DType { argument: "ids", expected: "u32".into(), got: ids.dtype() });
        }
        check_elements("ids", ids.dims())?;
        let vocab = self.vocab_size();
        let spelling = |(position, &id): (usize, &u32)| {
            let spelling = self.spellings.get(id as usize).cloned();
            spelling.ok_or(Error::Target { argument: "ids", position, got: i64::from(id), vocab_size: vocab })
        };
        let spellings = ids.to_vec1::<u32>()?.iter().enumerate().map(spelling).collect::<Result<Vec<_>>>()?;
        let correction = self.correction.as_ref().map(|(correction, _)| correction.contiguous()?.index_select(ids, 0));
        self.corrected_rows(Arc::new(spellings), correction.transpose()?)
    }

    /// Computes the rows of entries outside the vocabulary, which have no correction. Differentiable.
    ///
    /// # Shapes
    ///
    /// - returns `[spellings, d]`
    ///
    /// # Errors
    ///
    /// If a character is not in the alphabet.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use mos_head::parts::{CharCnn, CharCnnConfig};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let vars = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// let config = CharCnnConfig::new(16).with_filters(&[(2, 8)]).with_alphabet("abcdefghijklmnopqrstuvwxyz");
    /// let cnn = CharCnn::new(&config, &["cat", "mat"], vb)?;
    /// assert_eq!(cnn.rows_of_spellings(&["dog", "cats", "hat"])?.dims(), [3, 16]);
    /// assert!(cnn.rows_of_spellings(&["Dog"]).is_err()); // there is no capital letter in the alphabet
    /// # Ok(())
    /// # }
    /// ```
    pub fn rows_of_spellings(&self, spellings: &[impl AsRef<str>]) -> Result<Tensor> {
        self.network_rows(Arc::new(self.alphabet.encode(spellings)?))
    }

    /// Returns one of the parameters, which share a dtype and a device.
    pub(crate) fn parameter(&self) -> &Tensor {
        &self.parameters[0]
    }

    /// Computes the network's rows of these spellings, and adds the product of the entries' corrections.
    fn corrected_rows(&self, spellings: Arc<Vec<Vec<u32>>>, correction: Option<Tensor>) -> Result<Tensor> {
        let rows = self.network_rows(spellings)?;
        match (correction, &self.correction) {
            (Some(correction), Some((_, projection))) => Ok((rows + correction.matmul(&projection.t()?)?)?),
            _ => Ok(rows),
        }
    }

    /// Computes the network's rows of these spellings as one node of the graph, which keeps no intermediate results.
    fn network_rows(&self, spellings: Arc<Vec<Vec<u32>>>) -> Result<Tensor> {
        if spellings.is_empty() {
            return Ok(Tensor::zeros((0, self.context_dim()), self.parameter().dtype(), self.parameter().device())?);
        }
        let dtype = self.parameter().dtype();
        let accumulation = accumulation_dtype("embedding.weight", dtype)?;
        let groups = SpellingGroups::new(&self.config, &spellings, accumulation.size_in_bytes());
        let config = self.config.clone();
        let values: Parameters = self.parameters.iter().map(Tensor::detach).collect();
        let rows = {
            let group_rows = groups.map(&spellings, |spellings| network::rows(&config, &values, spellings))?;
            let sorted = Tensor::cat(&group_rows, 0)?;
            drop(group_rows);
            groups.to_entry_order(&sorted)?
        };

        // All trained parameters are one operand. Frozen ones must not appear in the GradStore.
        let is_trained: Vec<bool> = self.parameters.iter().map(Tensor::track_op).collect();
        let trained = self.parameters.iter().filter(|parameter| parameter.track_op()).map(Tensor::flatten_all);
        let trained = trained.collect::<candle_core::Result<Vec<_>>>()?;
        let packed = if trained.is_empty() { None } else { Some(Tensor::cat(&trained, 0)?) };
        autograd::attach("char-cnn", rows, [packed.as_ref(), None, None], move |_, _, upstream| {
            // Sums of many terms are in the accumulation dtype: a bias has a gradient from every entry.
            let leaf = |(value, &is_trained): (&Tensor, &bool)| {
                let value = value.to_dtype(accumulation)?;
                Ok::<_, Error>(if is_trained { Var::from_tensor(&value)?.into_inner() } else { value })
            };
            let leaves = values.iter().zip(&is_trained).map(leaf).collect::<Result<Parameters>>()?;
            let trained: Vec<&Tensor> = leaves.iter().filter(|leaf| leaf.is_variable()).collect();
            let mut sums = trained.iter().map(|leaf| leaf.zeros_like()).collect::<candle_core::Result<Vec<_>>>()?;
            let upstream = groups.to_group_order(upstream)?.to_dtype(accumulation)?;
            let mut first = 0;
            groups.map(&spellings, |spellings| {
                let rows = network::rows(&config, &leaves, spellings)?;
                let gradients = (rows * upstream.narrow(0, first, spellings.len())?)?.sum_all()?.backward()?;
                first += spellings.len();
                for (sum, leaf) in sums.iter_mut().zip(&trained) {
                    if let Some(gradient) = gradients.get(leaf) {
                        // A sum that is not detached would keep the graphs of the groups alive.
                        *sum = (&*sum + gradient.detach())?;
                    }
                }
                Ok(())
            })?;
            let flat = sums.iter().map(Tensor::flatten_all).collect::<candle_core::Result<Vec<_>>>()?;
            Ok([Some(Tensor::cat(&flat, 0)?.to_dtype(dtype)?), None, None])
        })
    }
}

/// Entries in groups of similar length, each within the budget.
struct SpellingGroups {
    /// The entries, from short to long spellings.
    order: Vec<u32>,
    /// The number of entries of each group.
    sizes: Vec<usize>,
}

impl SpellingGroups {
    /// Sorts the entries, and begins a new group wherever the next entry would exceed the budget.
    fn new(config: &CharCnnConfig, spellings: &[Vec<u32>], number_bytes: usize) -> Self {
        let order = sorted(spellings.len(), &|a, b| spellings[a].len().cmp(&spellings[b].len()));
        let (mut sizes, mut size) = (Vec::new(), 0);
        for &entry in &order {
            let length = spellings[entry as usize].len();
            let bytes = network::numbers_per_entry(config, length).saturating_mul(number_bytes);
            if size > 0 && bytes.saturating_mul(size + 1) > config.budget_bytes {
                sizes.push(std::mem::take(&mut size));
            }
            size += 1;
        }
        sizes.push(size);
        SpellingGroups { order, sizes }
    }

    /// Calls `f` with the spellings of each group, and returns the results.
    fn map<T>(&self, spellings: &[Vec<u32>], mut f: impl FnMut(&[&[u32]]) -> Result<T>) -> Result<Vec<T>> {
        let mut remaining = &self.order[..];
        let group = |&size: &usize| {
            let (group, later) = remaining.split_at(size);
            remaining = later;
            f(&group.iter().map(|&entry| &spellings[entry as usize][..]).collect::<Vec<_>>())
        };
        self.sizes.iter().map(group).collect()
    }

    /// Brings rows from the order of the groups to the order of the entries.
    fn to_entry_order(&self, rows: &Tensor) -> Result<Tensor> {
        Ok(rows.index_select(&Tensor::new(inverse(&self.order), rows.device())?, 0)?)
    }

    /// Brings rows from the order of the entries to the order of the groups.
    fn to_group_order(&self, rows: &Tensor) -> Result<Tensor> {
        Ok(rows.contiguous()?.index_select(&Tensor::new(&self.order[..], rows.device())?, 0)?)
    }
}
