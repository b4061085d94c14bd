//! The ids whose logits a computation needs one by one.

use crate::backend::objective::Scored;
use crate::error::Result;
use crate::tensors::checks::read_ids;

/// The ids of each position whose logits are needed one by one: each once, in ascending order.
#[derive(Clone, Copy)]
pub(crate) enum ListedIds<'a> {
    /// No position lists an id.
    Nothing,
    /// Each position that is not ignored lists its target.
    Targets(&'a [Option<usize>]),
    /// Each position lists its candidates.
    Candidates(&'a Candidates),
}

impl<'a> ListedIds<'a> {
    /// Returns the ids of position `t`; `None` if it is ignored.
    pub(crate) fn at(self, t: usize) -> Option<&'a [usize]> {
        match self {
            ListedIds::Nothing => Some(&[]),
            ListedIds::Targets(ids) => ids[t].as_ref().map(std::slice::from_ref),
            ListedIds::Candidates(candidates) => Some(candidates.at(t)),
        }
    }
}

/// The candidates of scores, some of which may be equal.
pub(crate) struct Candidates {
    /// The number of candidates of each position.
    pub(crate) n: usize,
    /// `[positions, n]`: the candidates as the caller gives them.
    given: Vec<usize>,
    /// `[positions + 1]`: where each position's ids start in `ids`.
    starts: Vec<usize>,
    /// The ids of each position, each once, in ascending order.
    ids: Vec<usize>,
    /// `[positions, n]`: the place of each candidate among its position's ids.
    places: Vec<usize>,
}

impl Candidates {
    /// Reads the ids, which must be in the vocabulary.
    pub(crate) fn new(scored: &Scored, vocab: usize) -> Result<Self> {
        let (positions, n) = scored.token_ids.dims2()?;
        let given: Vec<usize> = read_ids("token_ids", &scored.token_ids, None, vocab)?.into_iter().flatten().collect();
        let (mut starts, mut ids, mut places) = (vec![0], Vec::new(), Vec::with_capacity(given.len()));
        for t in 0..positions {
            let given = &given[t * n..(t + 1) * n];
            let mut distinct = given.to_vec();
            distinct.sort_unstable();
            distinct.dedup();
            places.extend(given.iter().map(|id| distinct.partition_point(|other| other < id)));
            ids.extend(distinct);
            starts.push(ids.len());
        }
        Ok(Candidates { n, given, starts, ids, places })
    }

    /// Returns the ids of position `t`, each once, in ascending order.
    pub(crate) fn at(&self, t: usize) -> &[usize] {
        &self.ids[self.starts[t]..self.starts[t + 1]]
    }

    /// Returns position `t`'s candidates, `[n]`, as the caller gives them.
    pub(crate) fn given(&self, t: usize) -> &[usize] {
        &self.given[t * self.n..(t + 1) * self.n]
    }

    /// Returns the place of each of position `t`'s candidates among its ids, `[n]`.
    pub(crate) fn places(&self, t: usize) -> &[usize] {
        &self.places[t * self.n..(t + 1) * self.n]
    }
}
