//! The distribution of a position over the vocabulary, which is read tile by tile, and the queries that read it.
//! Decoding is made of such queries, so that no device holds a tensor of all log-probabilities for it.

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::Mutex;

use crate::backend::parallel;
use crate::error::{Error, Result};

/// The number of ids in a tile of a distribution.
pub(crate) const TILE: usize = 512;

/// The number of tiles that repay the overhead of a parallel task.
pub(crate) const TASK_TILES: usize = 8;

/// The distribution of one position over the vocabulary, computed tile by tile on demand. Its numbers are read in f64,
/// in whichever type they were computed: a query is compiled once.
pub(crate) trait Distribution: Sync {
    /// Returns the number of ids.
    fn vocab(&self) -> usize;
    /// Returns why the numbers are no distribution, if they are none.
    fn defect(&self) -> Option<Defect>;
    /// Returns the log-probabilities of the ids from `tile * TILE` on: [`TILE`] of them, or fewer in the last tile.
    /// They may be written to `buffer`.
    fn tile<'a>(&'a self, tile: usize, buffer: &'a mut Vec<f64>) -> &'a [f64];
    /// As [`Distribution::tile`], but values below `floor` may be returned as minus infinity, and no values if there
    /// are no others.
    fn tile_above<'a>(&'a self, tile: usize, _floor: f64, buffer: &'a mut Vec<f64>) -> &'a [f64] {
        self.tile(tile, buffer)
    }
    /// As [`Distribution::tile`], the logits of a single component, if they are known. Unlike its log-probability, an
    /// id's logit does not depend on the other ids.
    fn logit_tile<'a>(&'a self, _: usize, _: &'a mut Vec<f64>) -> Option<&'a [f64]> {
        None
    }
    /// Returns the log-sum-exp of the logits, which is the difference between a logit and its log-probability. It is
    /// `None` if there are several components, or if it has not been computed.
    fn logit_offset(&self) -> Option<f64>;

    /// Returns the number of tiles.
    fn tiles(&self) -> usize {
        self.vocab().div_ceil(TILE)
    }

    /// Checks that the numbers are a distribution.
    fn check(&self, position: usize) -> Result<()> {
        self.defect().map_or(Ok(()), |defect| Err(defect.at(position)))
    }
}

/// The reason why numbers are no distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    /// A number is NaN or plus infinity.
    NotFinite,
    /// All log-probabilities are minus infinity.
    Impossible,
}

impl Defect {
    /// Returns the error of a position with this defect.
    pub(crate) fn at(self, position: usize) -> Error {
        match self {
            Defect::NotFinite => Error::Distribution { position },
            Defect::Impossible => Error::Impossible { position },
        }
    }
}

/// A query of the distribution of each position.
pub(crate) trait Visit: Sync {
    /// The answer for one position.
    type Output: Send;

    /// Returns whether the query reads [`Distribution::logit_offset`].
    fn needs_logits(&self) -> bool {
        false
    }

    /// Answers the query for one position.
    fn visit(&self, position: usize, distribution: &dyn Distribution) -> Result<Self::Output>;
}

/// What reads the distribution of each position, once: a query, whatever its answers are.
pub(crate) trait Reader: Sync {
    /// Returns whether [`Distribution::logit_offset`] is read.
    #[cfg_attr(not(any(feature = "cuda", feature = "metal")), allow(dead_code))]
    fn needs_logits(&self) -> bool;

    /// Reads the distribution of one position.
    fn read(&self, position: usize, distribution: &dyn Distribution) -> Result<()>;
}

/// A query and its answers for all positions.
struct Answers<'a, V: Visit> {
    query: &'a V,
    by_position: Vec<Mutex<Option<V::Output>>>,
}

impl<V: Visit> Reader for Answers<'_, V> {
    fn needs_logits(&self) -> bool {
        self.query.needs_logits()
    }

    fn read(&self, position: usize, distribution: &dyn Distribution) -> Result<()> {
        let answer = self.query.visit(position, distribution)?;
        // Each position comes once. A mutex that is locked for this alone is never poisoned.
        if let Ok(mut to) = self.by_position[position].lock() {
            *to = Some(answer);
        }
        Ok(())
    }
}

/// Returns the answers of a query for so many positions, whose distributions `visit` lets it read.
pub(crate) fn answers<V: Visit>(
    query: &V,
    positions: usize,
    visit: impl FnOnce(&dyn Reader) -> Result<()>,
) -> Result<Vec<V::Output>> {
    let answers = Answers { query, by_position: (0..positions).map(|_| Mutex::new(None)).collect() };
    visit(&answers)?;
    Ok(answers.by_position.into_iter().filter_map(|answer| answer.into_inner().ok().flatten()).collect())
}

/// Calls `read` with some positions, in parallel. If several results are errors, it returns the first position's, in
/// whatever order the threads find them.
pub(crate) fn read_positions(positions: Range<usize>, read: &(dyn Fn(usize) -> Result<()> + Sync)) -> Result<()> {
    parallel::map(positions, read).into_iter().collect()
}

/// A distribution whose log-probabilities are already computed.
pub(crate) struct Computed<'a> {
    log_probs: &'a [f64],
    logit_offset: Option<f64>,
}

impl<'a> Computed<'a> {
    /// Makes the distribution with these log-probabilities, whose logits are unknown.
    pub(crate) fn new(log_probs: &'a [f64]) -> Self {
        Computed { log_probs, logit_offset: None }
    }

    /// Sets the log-sum-exp of the logits, if there is a single component.
    #[cfg_attr(not(any(feature = "cuda", feature = "metal")), allow(dead_code))]
    pub(crate) fn with_logit_offset(self, logit_offset: Option<f64>) -> Self {
        Computed { logit_offset, ..self }
    }
}

impl Distribution for Computed<'_> {
    fn vocab(&self) -> usize {
        self.log_probs.len()
    }

    fn defect(&self) -> Option<Defect> {
        // A NaN is not below infinity either.
        if self.log_probs.iter().any(|x| x.partial_cmp(&f64::INFINITY) != Some(Ordering::Less)) {
            return Some(Defect::NotFinite);
        }
        let is_possible = self.log_probs.iter().any(|&x| x > f64::NEG_INFINITY);
        (!is_possible).then_some(Defect::Impossible)
    }

    fn tile<'a>(&'a self, tile: usize, _: &'a mut Vec<f64>) -> &'a [f64] {
        &self.log_probs[tile * TILE..self.log_probs.len().min((tile + 1) * TILE)]
    }

    fn logit_offset(&self) -> Option<f64> {
        self.logit_offset
    }
}
