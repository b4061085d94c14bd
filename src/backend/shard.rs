//! The shard of a vocabulary that a rank has, and the checks that ranks make together before a call.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use crate::backend::agreement::{agree, Agreed, Call};
use crate::backend::collectives::Collectives;
use crate::backend::plan::Planned;
use crate::error::{Error, Result};
use crate::tensors::checks::{check_at_most, check_vocab};

/// The token ids whose rows of the decoder a rank has. They are consecutive, and ascend with the ranks.
///
/// # Examples
///
/// ```no_run
/// use std::sync::Arc;
/// use mos_head::distributed::{Collectives, VocabShard};
///
/// fn cut(ranks: Arc<dyn Collectives>) -> mos_head::Result<()> {
///     let shard = VocabShard::new(ranks, 128_256)?;
///     println!("this rank has the rows {:?} of 128256", shard.range());
///     Ok(())
/// }
/// ```
#[derive(Clone, Debug)]
pub struct VocabShard {
    collectives: Arc<dyn Collectives>,
    /// `[ranks + 1]`: the first id of each rank, and the size of the vocabulary.
    starts: Vec<usize>,
}

impl VocabShard {
    /// Cuts a vocabulary into parts that differ by at most one id. Every rank calls it.
    ///
    /// # Errors
    ///
    /// If there are fewer token ids than ranks, or more than 2^32 - 1; [`Error::Ranks`] if the ranks give different
    /// sizes, or one calls [`VocabShard::with_rows`].
    pub fn new(collectives: Arc<dyn Collectives>, vocab_size: usize) -> Result<Self> {
        let ranks = collectives.ranks();
        let cut = |rank: usize| rank * vocab_size / ranks;
        let numbers = [Agreed::own("rows", 0.0), Agreed::equal("vocab_size", vocab_size as f64)];
        agree(&*collectives, Call::Cut, check_vocab(vocab_size), &numbers)?;
        VocabShard { starts: (0..=ranks).map(cut).collect(), collectives }.checked()
    }

    /// Gives each rank as many token ids as it asks for, in the order of the ranks. Every rank calls it.
    ///
    /// # Errors
    ///
    /// If a rank has no token id, or there are more than 2^32 - 1; [`Error::Ranks`] if a rank calls
    /// [`VocabShard::new`].
    pub fn with_rows(collectives: Arc<dyn Collectives>, rows: usize) -> Result<Self> {
        let numbers = [Agreed::own("rows", rows as f64), Agreed::equal("vocab_size", f64::NAN)];
        let checked = check_at_most("rows", rows, u32::MAX as usize);
        let ((), values) = agree(&*collectives, Call::Cut, checked, &numbers)?;
        let mut starts = vec![0usize];
        for &rows in &values[0] {
            starts.push(starts[starts.len() - 1].saturating_add(rows as usize));
        }
        VocabShard { collectives, starts }.checked()
    }

    /// Checks that every rank has a token id, and that the vocabulary is not too large.
    fn checked(self) -> Result<Self> {
        check_vocab(self.vocab_size())?;
        match self.starts.windows(2).position(|ends| ends[0] == ends[1]) {
            None => Ok(self),
            Some(rank) => {
                let expected = format!("at least one token id for each of {} ranks", self.collectives.ranks());
                Err(Error::config("vocab_size", expected, format!("{}, and none for rank {rank}", self.vocab_size())))
            }
        }
    }

    /// Returns the token ids of this rank.
    pub fn range(&self) -> Range<usize> {
        self.range_of(self.collectives.rank())
    }

    /// Returns the token ids of a rank.
    pub(crate) fn range_of(&self, rank: usize) -> Range<usize> {
        self.starts[rank]..self.starts[rank + 1]
    }

    /// Returns the number of token ids of all ranks.
    pub fn vocab_size(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// Returns the ranks' operations.
    pub fn collectives(&self) -> &Arc<dyn Collectives> {
        &self.collectives
    }

    /// Returns the rank that has a token id.
    pub(crate) fn owner(&self, id: usize) -> usize {
        self.starts.partition_point(|&start| start <= id) - 1
    }

    /// Returns the place of a token id among this rank's, or [`ELSEWHERE`].
    pub(crate) fn row(&self, id: usize) -> usize {
        let range = self.range();
        if range.contains(&id) {
            id - range.start
        } else {
            ELSEWHERE
        }
    }

    /// Returns what this rank's check has found, unless another rank has found an error, or a number is not the same
    /// everywhere. Every rank calls it.
    pub(crate) fn agree<T>(&self, call: Call, checked: Result<T>, numbers: &[Agreed]) -> Result<T> {
        Ok(agree(&*self.collectives, call, checked, numbers)?.0)
    }

    /// Tells the other ranks of an error that this rank has before the call that they make, and returns it.
    pub(crate) fn announce(&self, error: Error) -> Error {
        match self.agree(Call::Refused, Err::<Infallible, _>(error), &[]) {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    /// Returns the plan with the smallest chunks of all ranks, whose shards and processors differ. Every rank calls it.
    pub(crate) fn agreed(&self, planned: Result<Planned>) -> Result<Planned> {
        // A rank without a plan sends a negative number.
        let chunk = planned.as_ref().map_or(-1.0, |planned| planned.plan.positions_per_chunk as f64);
        let chunks = self.collectives.all_gather(&[chunk])?;
        let planned = planned?;
        let least = chunks.iter().copied().fold(f64::INFINITY, f64::min);
        if least < 0.0 {
            // Another rank's budget does not suffice.
            Err(Error::Ranks { argument: "workspace_bytes for a position", element: None, values: chunks })
        } else {
            Ok(Planned { plan: planned.plan.with_positions_per_chunk(least as usize), ..planned })
        }
    }
}

/// The place of an id that another rank has.
pub(crate) const ELSEWHERE: usize = usize::MAX;
