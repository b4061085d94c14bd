//! The ids whose logits a computation needs one by one.

use crate::backend::objective::Scored;
use crate::error::Result;
use crate::tensors::checks::read_ids;

/// The ids of each position whose logits are needed one by one: each once, in ascending order.
#[derive(Clone, Copy)]
pub(crate) enum ListedIds<'a> {
    /// None of any position.
    Nothing,
    /// The target of each position that is not ignored.
    Targets(&'a [Option<usize>]),
    Candidates(&'a Candidates),
}

impl<'a> ListedIds<'a> {
    /// The ids of position `t`; `None` if it is ignored.
    pub(crate) fn at(self, t: usize) -> Option<&'a [usize]> {
        match self {
            ListedIds::Nothing => Some(&[]),
            ListedIds::Targets(ids) => ids[t].as_ref().map(std::slice::from_ref),
            ListedIds::Candidates(candidates) => Some(candidates.at(t)),
        }
    }
}

/// The ids of scores, some of which may be equal.
pub(crate) struct Candidates {
    /// How many candidates each position has.
    pub(crate) n: usize,
    /// `[positions, n]`
    given: Vec<usize>,
    /// `[positions + 1]`
    starts: Vec<usize>,
    /// The ids of each position, each once, in ascending order
    ids: Vec<usize>,
    /// `[positions, n]`: the place of each candidate among its position's ids
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
            let mut of_position = given.to_vec();
            of_position.sort_unstable();
            of_position.dedup();
            places.extend(given.iter().map(|id| of_position.partition_point(|other| other < id)));
            ids.extend(of_position);
            starts.push(ids.len());
        }
        Ok(Candidates { n, given, starts, ids, places })
    }

    /// The ids of position `t`.
    pub(crate) fn at(&self, t: usize) -> &[usize] {
        &self.ids[self.starts[t]..self.starts[t + 1]]
    }

    /// `[n]`: position `t`'s candidates as they were given.
    pub(crate) fn given(&self, t: usize) -> &[usize] {
        &self.given[t * self.n..(t + 1) * self.n]
    }

    /// `[n]`: the place of each of position `t`'s candidates among its ids.
    pub(crate) fn places(&self, t: usize) -> &[usize] {
        &self.places[t * self.n..(t + 1) * self.n]
    }
}
