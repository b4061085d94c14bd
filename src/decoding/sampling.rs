//! The options of a draw: temperature and truncation.

use crate::error::{Error, Result};
use crate::tensors::checks::check_number;

/// Options of the draw of a token id from a distribution. The default draws from the full distribution.
///
/// The temperature comes first. Then [`top_k`](Sampling::with_top_k) keeps the most probable ids,
/// [`top_p`](Sampling::with_top_p) keeps their nucleus, and [`min_p`](Sampling::with_min_p) drops ids whose probability
/// is below that fraction of the largest. The probabilities that remain are renormalised.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::decode::{Sampler, Sampling};
///
/// # fn main() -> mos_head::Result<()> {
/// let log_probs = Tensor::new(&[0.5f32, 0.3, 0.15, 0.05], &Device::Cpu)?.log()?;
/// let log_probs = log_probs.broadcast_as((1000, 4))?; // 1000 positions
/// // The nucleus has the ids 0 and 1: the first one alone has less than 0.7 of the probability.
/// let mut sampler = Sampler::new(Sampling::new().with_top_p(0.7), 42)?;
/// let drawn = sampler.sample(&log_probs)?.to_vec1::<u32>()?;
/// assert!(drawn.iter().all(|id| *id < 2));
/// // Their probabilities are renormalised to 5/8 and 3/8.
/// let zeros = drawn.iter().filter(|id| **id == 0).count();
/// assert!((575..675).contains(&zeros));
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// - top-k: Fan, Lewis, Dauphin: Hierarchical Neural Story Generation. ACL 2018, arXiv 1805.04833.
/// - top-p: Holtzman, Buys, Du, Forbes, Choi: The Curious Case of Neural Text Degeneration. ICLR 2020, arXiv
///   1904.09751.
/// - min-p: Nguyen et al.: Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs. ICLR 2025, arXiv
///   2407.01082.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default))]
#[non_exhaustive]
pub struct Sampling {
    /// The temperature of the mixture. The default is 1.
    pub temperature: f64,
    /// The temperature of the components. The default is 1.
    pub component_temperature: f64,
    /// The number of most probable ids that top-k keeps. The default is all.
    pub top_k: Option<usize>,
    /// The probability of the nucleus. The default is 1.
    pub top_p: f64,
    /// The smallest probability that min-p keeps, relative to the largest. The default is 0.
    pub min_p: f64,
    /// Whether a component is drawn first. The default is false.
    pub ancestral: bool,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 1.0, component_temperature: 1.0, top_k: None, top_p: 1.0, min_p: 0.0, ancestral: false }
    }
}

impl Sampling {
    /// The options of a draw from the full distribution.
    pub fn new() -> Self {
        Self::default()
    }

    /// The options of a draw that is always the most probable token id, among equals the lowest.
    pub fn greedy() -> Self {
        Self::default().with_temperature(0.0)
    }

    /// Divides the log-probabilities of the mixture by T and renormalises: `P(v)^(1/T)`. Temperature 0 is greedy. For
    /// one softmax this equals dividing the logits; for a mixture it does not, see
    /// [`Sampling::with_component_temperature`].
    pub fn with_temperature(self, temperature: f64) -> Self {
        Sampling { temperature, ..self }
    }

    /// Divides the logits of every component by T before they are mixed; the priors do not change.
    pub fn with_component_temperature(self, temperature: f64) -> Self {
        Sampling { component_temperature: temperature, ..self }
    }

    /// Draws from the `k` most probable token ids only, or from all if there are fewer.
    pub fn with_top_k(self, k: usize) -> Self {
        Sampling { top_k: Some(k), ..self }
    }

    /// Draws from the nucleus only: the smallest set of most probable token ids with a total probability of at least
    /// `p`.
    pub fn with_top_p(self, p: f64) -> Self {
        Sampling { top_p: p, ..self }
    }

    /// Draws only from token ids with at least `p` times the probability of the most probable one.
    pub fn with_min_p(self, p: f64) -> Self {
        Sampling { min_p: p, ..self }
    }

    /// Draws a component from the priors, then a token id from its softmax: the distribution of the mixture at nearly
    /// the cost of one softmax. Requires temperature 1 and no truncation, because probabilities under the mixture are
    /// never computed.
    pub fn with_ancestral(self, ancestral: bool) -> Self {
        Sampling { ancestral, ..self }
    }

    /// Whether top-k, top-p or min-p may drop an id.
    pub(crate) fn is_truncated(&self) -> bool {
        self.top_k.is_some() || self.top_p < 1.0 || self.min_p > 0.0
    }

    /// Checks the ranges of the numbers, and that no two options exclude each other.
    pub(super) fn validate(&self) -> Result<()> {
        let not_negative = |x: f64| x >= 0.0 && x.is_finite();
        check_number(not_negative(self.temperature), "temperature", "a finite number, at least 0", self.temperature)?;
        check_number(
            (1e-30..=1e30).contains(&self.component_temperature),
            "component_temperature",
            "from 1e-30 to 1e30",
            self.component_temperature,
        )?;
        check_number(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)?;
        check_number((0.0..=1.0).contains(&self.min_p), "min_p", "from 0 to 1", self.min_p)?;
        if self.top_k == Some(0) {
            return Err(Error::config("top_k", "at least 1", 0));
        }
        if self.ancestral && (self.is_truncated() || self.temperature != 1.0) {
            return Err(Error::config("ancestral", "temperature 1 and neither top_k, top_p nor min_p", "true"));
        }
        Ok(())
    }
}
