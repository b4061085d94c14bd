//! A measure is the unit in which a mean negative log-likelihood (nats per position) is shown.

/// A mean negative log-likelihood is shown in one of these units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// The exponential of the mean.
    Perplexity,
    /// The mean in bits.
    BitsPerCharacter,
}

impl Measure {
    /// Returns the value that is shown for a mean of `nll` nats.
    pub fn shown(self, nll: f64) -> f64 {
        match self {
            Measure::Perplexity => nll.exp(),
            Measure::BitsPerCharacter => nll / std::f64::consts::LN_2,
        }
    }
}

impl std::fmt::Display for Measure {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Measure::Perplexity => "perplexity",
            Measure::BitsPerCharacter => "bits per character",
        })
    }
}
