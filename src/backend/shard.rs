//! The part of a vocabulary that a rank has, and what the ranks of a call must agree on.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::collectives::Collectives;
use crate::backend::plan::Plan;
use crate::error::{Error, Result};
use crate::tensors::checks::check_vocab;

/// The token ids of which a rank has the decoder's rows: consecutive ones, the first rank's first.
///
/// # Examples
///
/// ```no_run
/// use std::sync::Arc;
/// use mos_head::{Collectives, VocabShard};
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
    /// `[ranks + 1]`: the first id of each rank, and the size of the vocabulary
    starts: Vec<usize>,
}

impl VocabShard {
    /// Cuts a vocabulary into parts that differ by at most one id. Every rank calls it.
    ///
    /// # Errors
    ///
    /// If there are fewer token ids than ranks, or more than 2^32 - 1; [`Error::Ranks`] if the ranks give different sizes.
    pub fn new(collectives: Arc<dyn Collectives>, vocab_size: usize) -> Result<Self> {
        let ranks = collectives.ranks();
        let cut = |rank: usize| rank * vocab_size / ranks;
        let shard = VocabShard { starts: (0..=ranks).map(cut).collect(), collectives };
        shard.agree(Ok(()), &[("vocab_size", vocab_size as f64)])?;
        shard.checked()
    }

    /// Gives each rank as many token ids as it asks for, in the order of the ranks. Every rank calls it.
    ///
    /// # Errors
    ///
    /// If a rank has no token id, or there are more than 2^32 - 1.
    pub fn with_rows(collectives: Arc<dyn Collectives>, rows: usize) -> Result<Self> {
        let mut starts = vec![0];
        for rows in collectives.all_gather(&[rows as f64])? {
            starts.push(starts[starts.len() - 1] + rows as usize);
        }
        VocabShard { collectives, starts }.checked()
    }

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

    /// The token ids of this rank.
    pub fn range(&self) -> Range<usize> {
        self.range_of(self.collectives.rank())
    }

    /// The token ids of a rank.
    pub(crate) fn range_of(&self, rank: usize) -> Range<usize> {
        self.starts[rank]..self.starts[rank + 1]
    }

    /// The number of token ids of all ranks.
    pub fn vocab_size(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// The ranks.
    pub fn collectives(&self) -> &Arc<dyn Collectives> {
        &self.collectives
    }

    /// The rank that has a token id.
    pub(crate) fn owner(&self, id: usize) -> usize {
        self.starts.partition_point(|&start| start <= id) - 1
    }

    /// The place of a token id among this rank's, or [`ELSEWHERE`].
    pub(crate) fn row(&self, id: usize) -> usize {
        let range = self.range();
        if range.contains(&id) {
            id - range.start
        } else {
            ELSEWHERE
        }
    }

    /// What each rank's check has found, and an error on every rank if one of them has found one, or if a number is not
    /// the same everywhere. Every rank calls it with the same names, so that none waits for a rank that has given up.
    pub(crate) fn agree<T>(&self, checked: Result<T>, numbers: &[(&'static str, f64)]) -> Result<T> {
        let mut sent = vec![f64::from(u8::from(checked.is_err()))];
        // Another call may send more or fewer numbers, which engines do not expect.
        const NUMBERS: usize = 11;
        sent.extend(numbers.iter().map(|&(_, number)| number));
        sent.resize(NUMBERS, 0.0);
        let all = self.collectives.all_gather(&sent)?;
        let checked = checked?;
        let of_number = |i: usize| all.iter().copied().skip(i).step_by(NUMBERS).collect::<Vec<f64>>();
        let names = std::iter::once("arguments without an error").chain(numbers.iter().map(|&(name, _)| name));
        for (i, name) in names.enumerate() {
            let of_ranks = of_number(i);
            if of_ranks.iter().any(|of_rank| of_rank.to_bits() != of_ranks[0].to_bits()) {
                return Err(Error::Ranks { argument: name, of_ranks });
            }
        }
        Ok(checked)
    }

    /// The plan with the smallest chunks of all ranks, which have rows and processors of their own.
    pub(crate) fn agreed(&self, plan: Result<Plan>) -> Result<Plan> {
        let chunk = plan.as_ref().map_or(0, |plan| plan.positions_per_chunk);
        let chunks = self.collectives.all_gather(&[chunk as f64])?;
        let plan = plan?;
        let least = chunks.iter().copied().fold(f64::INFINITY, f64::min);
        match least == 0.0 && plan.positions > 0 {
            // Another rank's budget does not suffice.
            true => Err(Error::Ranks { argument: "workspace_bytes for a position", of_ranks: chunks }),
            false => Ok(plan.with_positions_per_chunk(least as usize)),
        }
    }
}

/// The place of an id that another rank has.
pub(crate) const ELSEWHERE: usize = usize::MAX;
