//! The sizes of a [`CharCnn`](super::CharCnn).

use crate::error::{Error, Result};
use crate::tensors::checks::{check_most, check_product, check_sizes};

/// The largest number of highway layers.
const MOST_LAYERS: usize = 1024;

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
    /// Size of a row, d.
    pub context_dim: usize,
    /// Size of a character's embedding. The default is 16.
    pub embedding: usize,
    /// The convolutions, (width, channels) each. The default is (1, 32), (2, 64), (3, 96), (4, 128), (5, 160): in
    /// proportion to the width, as in Kim et al. (2016).
    pub filters: Vec<(usize, usize)>,
    /// Number of highway layers. The default is 2.
    pub highway: usize,
    /// Size of the correction of each entry. The default is 0: no correction.
    pub correction: usize,
    /// The characters that spellings may have. The default, `None`, allows the characters of the vocabulary's
    /// spellings.
    pub alphabet: Option<String>,
    /// Limit on the memory of intermediate results, in bytes. The default is 64 MiB.
    pub budget_bytes: usize,
}

impl CharCnnConfig {
    /// The default network for rows of this size.
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

    /// Adds a vector of this size for each entry, times a matrix, to its row: it tells apart entries that are spelled
    /// alike. Jozefowicz et al. (2016) have 128.
    pub fn with_correction(self, correction: usize) -> Self {
        CharCnnConfig { correction, ..self }
    }

    /// Sets the characters that spellings may have: with more characters than the vocabulary has, other entries have
    /// rows too ([`CharCnn::rows_of_spellings`](crate::parts::CharCnn::rows_of_spellings)).
    pub fn with_alphabet(self, alphabet: &str) -> Self {
        CharCnnConfig { alphabet: Some(alphabet.into()), ..self }
    }

    /// Sets the limit on the memory of intermediate results, in bytes. Rows are computed in groups that fit, at least
    /// one entry each.
    pub fn with_budget_bytes(self, budget_bytes: usize) -> Self {
        CharCnnConfig { budget_bytes, ..self }
    }

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
        check_most("highway", self.highway, MOST_LAYERS)?;
        for &(width, channels) in &self.filters {
            check_product("width * embedding * channels", &[width, self.embedding, channels])?;
        }
        if self.highway > 0 {
            check_product("channels * channels", &[self.channels(), self.channels()])?;
        }
        check_product("context_dim * channels", &[self.context_dim, self.channels()])?;
        check_product("context_dim * correction", &[self.context_dim, self.correction])
    }

    /// Number of channels of all convolutions.
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
