//! The distribution of a position over the vocabulary, which is read tile by tile, and the queries that read it. Decoding
//! is made of such queries, so that no device holds a tensor of all log-probabilities for it.

use std::cmp::Ordering;

use crate::backend::operands::Real;
use crate::backend::parallel;
use crate::error::{Error, Result};

/// The number of ids in a tile of a distribution.
pub(crate) const TILE: usize = 512;

/// The number of tiles that repay the overhead of a parallel task.
pub(crate) const TASK_TILES: usize = 8;

/// The distribution of one position over the vocabulary, computed tile by tile on demand.
pub(crate) trait Distribution<F>: Sync {
    /// Returns the number of ids.
    fn vocab(&self) -> usize;
    /// Returns why the numbers are no distribution, if they are none.
    fn defect(&self) -> Option<Defect>;
    /// Returns the log-probabilities of the ids from `tile * TILE` on: [`TILE`] of them, or fewer in the last tile. They
    /// may be written to `buffer`. Values below `floor` may be returned as minus infinity.
    fn tile<'a>(&'a self, tile: usize, floor: F, buffer: &'a mut Vec<F>) -> &'a [F];
    /// As [`Distribution::tile`], the logits of a single component, if they are known. Unlike its log-probability, an id's logit
    /// does not depend on the other ids.
    fn logit_tile(&self, _: usize) -> Option<&[F]> {
        None
    }
    /// Returns the log-sum-exp of the logits, which is the difference between a logit and its log-probability. It is
    /// `None` if there are several components, or if it has not been computed.
    fn logit_offset(&self) -> Option<F>;

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
    #[cfg_attr(not(any(feature = "cuda", feature = "metal")), allow(dead_code))]
    fn needs_logits(&self) -> bool {
        false
    }

    /// Answers the query for one position.
    fn visit<F: Real>(&self, position: usize, distribution: &dyn Distribution<F>) -> Result<Self::Output>;

    /// Collects the answers for some items, one for each position, in parallel. If several are errors, it returns the first
    /// position's, in whatever order the threads find them.
    fn answers<T: Send>(
        items: impl IntoIterator<Item = T>,
        answer: impl Fn(T) -> Result<Self::Output> + Sync,
    ) -> Result<Vec<Self::Output>> {
        parallel::map(items, answer).into_iter().collect()
    }
}

/// A distribution whose log-probabilities are already computed.
pub(crate) struct Computed<'a, F> {
    log_probs: &'a [F],
    logit_offset: Option<F>,
}

impl<'a, F> Computed<'a, F> {
    /// Makes the distribution with these log-probabilities, whose logits are unknown.
    pub(crate) fn new(log_probs: &'a [F]) -> Self {
        Computed { log_probs, logit_offset: None }
    }

    /// Sets the log-sum-exp of the logits, if there is a single component.
    #[cfg_attr(not(any(feature = "cuda", feature = "metal")), allow(dead_code))]
    pub(crate) fn with_logit_offset(self, logit_offset: Option<F>) -> Self {
        Computed { logit_offset, ..self }
    }
}

impl<F: Real> Distribution<F> for Computed<'_, F> {
    fn vocab(&self) -> usize {
        self.log_probs.len()
    }

    fn defect(&self) -> Option<Defect> {
        // A NaN is not below infinity either.
        if self.log_probs.iter().any(|&x| x.partial_cmp(&F::infinity()) != Some(Ordering::Less)) {
            return Some(Defect::NotFinite);
        }
        let is_possible = self.log_probs.iter().any(|&x| x > F::neg_infinity());
        (!is_possible).then_some(Defect::Impossible)
    }

    fn tile<'a>(&'a self, tile: usize, _: F, _: &'a mut Vec<F>) -> &'a [F] {
        &self.log_probs[tile * TILE..self.log_probs.len().min((tile + 1) * TILE)]
    }

    fn logit_offset(&self) -> Option<F> {
        self.logit_offset
    }
}
