//! How a token id is drawn: temperature and truncation.

use crate::error::{Error, Result};
use crate::validate::check_number;

/// How the next token id is drawn from a distribution. The default draws from the full distribution.
///
/// The steps, in this order: temperature; the [`top_k`](Sampling::with_top_k) most probable ids; of these the
/// [`top_p`](Sampling::with_top_p) nucleus; of these the ids with at least [`min_p`](Sampling::with_min_p) times the
/// largest probability. The remaining probabilities are renormalised.
///
/// # References
///
/// - top-k: Fan, Lewis, Dauphin: Hierarchical Neural Story Generation. ACL 2018.
/// - top-p: Holtzman, Buys, Du, Forbes, Choi: The Curious Case of Neural Text Degeneration. ICLR 2020.
/// - min-p: Nguyen et al.: Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs. ICLR 2025.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default))]
pub struct Sampling {
    pub(super) temperature: f64,
    pub(super) component_temperature: f64,
    pub(super) top_k: Option<usize>,
    pub(super) top_p: f64,
    pub(super) min_p: f64,
    pub(super) ancestral: bool,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 1.0, component_temperature: 1.0, top_k: None, top_p: 1.0, min_p: 0.0, ancestral: false }
    }
}

impl Sampling {
    /// Draws from the full distribution.
    pub fn new() -> Self {
        Self::default()
    }

    /// Always the most probable token id; of equals the lowest.
    pub fn greedy() -> Self {
        Self::default().with_temperature(0.0)
    }

    /// Divides the log-probabilities of the mixture by T and renormalises: `P(v)^(1/T)`. 0 is greedy. For one softmax
    /// this equals dividing the logits; for a mixture it does not, see [`Sampling::with_component_temperature`].
    pub fn with_temperature(self, temperature: f64) -> Self {
        Sampling { temperature, ..self }
    }

    /// Divides the logits of every component by T before they are mixed; the priors do not change.
    pub fn with_component_temperature(self, temperature: f64) -> Self {
        Sampling { component_temperature: temperature, ..self }
    }

    /// Draws from the `k` most probable token ids only (all, if there are fewer).
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

    /// The temperature of the mixture.
    pub fn temperature(&self) -> f64 {
        self.temperature
    }

    /// The temperature of the components.
    pub fn component_temperature(&self) -> f64 {
        self.component_temperature
    }

    /// The number of most probable ids that are kept, if limited.
    pub fn top_k(&self) -> Option<usize> {
        self.top_k
    }

    /// The probability of the nucleus.
    pub fn top_p(&self) -> f64 {
        self.top_p
    }

    /// The smallest probability that is kept, relative to the largest.
    pub fn min_p(&self) -> f64 {
        self.min_p
    }

    /// Whether a component is drawn first.
    pub fn is_ancestral(&self) -> bool {
        self.ancestral
    }

    pub(super) fn is_truncated(&self) -> bool {
        self.top_k.is_some() || self.top_p < 1.0 || self.min_p > 0.0
    }

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
