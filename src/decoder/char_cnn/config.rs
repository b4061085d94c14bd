//! The sizes of a [`CharCnn`](super::CharCnn).

use crate::error::{Error, Result};
use crate::tensors::checks::{check_at_most, check_product, check_sizes};

/// The largest number of highway layers.
const MAX_LAYERS: usize = 1024;

/// The sizes and options of a [`CharCnn`](crate::parts::CharCnn).
///
/// # Examples
///
/// ```
/// use mos_head::parts::CharCnnConfig;
///
/// let config = CharCnnConfig::new(280).with_filters(&[(1, 32), (2, 32), (3, 64), (4, 128)]).with_correction(128);
/// ```
///
/// # References
///
/// - Kim, Jernite, Sontag, Rush: Character-Aware Neural Language Models. AAAI 2016, arXiv 1508.06615.
/// - Jozefowicz, Vinyals, Schuster, Shazeer, Wu: Exploring the Limits of Language Modeling. 2016, arXiv 1602.02410.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(from = "CharCnnFields"))]
#[non_exhaustive]
pub struct CharCnnConfig {
    /// The size of a row, d.
    pub context_dim: usize,
    /// The size of a character's embedding. The default is 16.
    pub embedding: usize,
    /// The convolutions, (width, channels) each. The default is (1, 32), (2, 64), (3, 96), (4, 128), (5, 160): the
    /// channels are proportional to the width, as in Kim et al. (2016).
    pub filters: Vec<(usize, usize)>,
    /// The number of highway layers. The default is 2.
    pub highway: usize,
    /// The size of the correction of each entry. The default is 0: no correction.
    pub correction: usize,
    /// The characters that spellings may have. The default, `None`, allows the characters of the vocabulary's
    /// spellings.
    pub alphabet: Option<String>,
    /// The limit on the memory of intermediate results, in bytes. The default is 64 MiB.
    pub budget_bytes: usize,
}

impl CharCnnConfig {
    /// Makes the configuration of the default network for rows of this size.
    pub fn new(context_dim: usize) -> Self {
        CharCnnConfig {
            context_dim,
            embedding: 16,
            filters: (1..=5).map(|width| (width, 32 * width)).collect(),
            highway: 2,
            correction: 0,
            alphabet: None,
            budget_bytes: 64 << 20,
        }
    }

    /// Sets the size of a character's embedding.
    pub fn with_embedding(self, embedding: usize) -> Self {
        CharCnnConfig { embedding, ..self }
    }

    /// Sets the convolutions, (width, channels) each.
    pub fn with_filters(self, filters: &[(usize, usize)]) -> Self {
        CharCnnConfig { filters: filters.to_vec(), ..self }
    }

    /// Sets the number of highway layers, at most 1024.
    pub fn with_highway(self, highway: usize) -> Self {
        CharCnnConfig { highway, ..self }
    }

    /// Sets the size of a vector for each entry that is multiplied by a matrix and added to the entry's row, to
    /// distinguish entries with the same spelling. Jozefowicz et al. (2016) use 128.
    pub fn with_correction(self, correction: usize) -> Self {
        CharCnnConfig { correction, ..self }
    }

    /// Sets the characters that spellings may have. With more characters than those of the vocabulary, words outside
    /// the vocabulary have rows too ([`CharCnn::rows_of_spellings`](crate::parts::CharCnn::rows_of_spellings)).
    pub fn with_alphabet(self, alphabet: &str) -> Self {
        CharCnnConfig { alphabet: Some(alphabet.into()), ..self }
    }

    /// Sets the limit on the memory of intermediate results, in bytes. Rows are computed in groups of entries that fit,
    /// at least one entry each.
    pub fn with_budget_bytes(self, budget_bytes: usize) -> Self {
        CharCnnConfig { budget_bytes, ..self }
    }

    /// Checks the sizes and options.
    pub(super) fn validate(&self) -> Result<()> {
        check_sizes(&[
            ("context_dim", self.context_dim),
            ("embedding", self.embedding),
            ("filters", self.filters.len()),
        ])?;
        let is_wrong = |&(i, &(width, channels)): &(usize, &(usize, usize))| {
            width == 0 || channels == 0 || self.filters[..i].iter().any(|filter| filter.0 == width)
        };
        if let Some((index, filter)) = self.filters.iter().enumerate().find(is_wrong) {
            let expected = "different widths of at least 1, and channels of at least 1";
            return Err(Error::config("filters", expected, format!("{filter:?} at index {index}")));
        }
        check_at_most("highway", self.highway, MAX_LAYERS)?;
        for &(width, channels) in &self.filters {
            check_product("width * embedding * channels", &[width, self.embedding, channels])?;
        }
        if self.highway > 0 {
            check_product("channels * channels", &[self.channels(), self.channels()])?;
        }
        check_product("context_dim * channels", &[self.context_dim, self.channels()])?;
        check_product("context_dim * correction", &[self.context_dim, self.correction])
    }

    /// Returns the number of channels of all convolutions.
    pub(super) fn channels(&self) -> usize {
        self.filters.iter().fold(0, |sum, (_, channels)| sum.saturating_add(*channels))
    }
}

/// The configuration as deserialized: the size is required, and options default to the values of `new`.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct CharCnnFields {
    context_dim: usize,
    embedding: Option<usize>,
    filters: Option<Vec<(usize, usize)>>,
    highway: Option<usize>,
    correction: Option<usize>,
    alphabet: Option<String>,
    budget_bytes: Option<usize>,
}

#[cfg(feature = "serde")]
impl From<CharCnnFields> for CharCnnConfig {
    fn from(read: CharCnnFields) -> Self {
        let default = CharCnnConfig::new(read.context_dim);
        CharCnnConfig {
            embedding: read.embedding.unwrap_or(default.embedding),
            filters: read.filters.unwrap_or(default.filters.clone()),
            highway: read.highway.unwrap_or(default.highway),
            correction: read.correction.unwrap_or(default.correction),
            alphabet: read.alphabet,
            budget_bytes: read.budget_bytes.unwrap_or(default.budget_bytes),
            ..default
        }
    }
}
