//! The next token ids of a vocabulary that ranks share.

use super::{AllIds, Next, NextToken, TokenRequest};
use crate::backend;
use crate::backend::agreement::{Agreed, Call};
use crate::backend::shard::VocabShard;
use crate::error::Result;
use crate::mixture::Mixture;

impl Mixture {
    /// The next token id at each position, as its request says ([`OutputLayer::next_tokens`](crate::OutputLayer::next_tokens)),
    /// from a vocabulary of which the decoder of this mixture has the rows of one rank's `shard`. Every rank calls it with
    /// the same contexts, log-priors and requests, and gets the same. The noise of an id depends on the request's seed,
    /// its step and the id, so that any number of ranks draws the same ids but where rounding decides.
    ///
    /// After the log-sum-exps, of two numbers a row, the ranks exchange the log-probabilities of all ids, one number for
    /// each id and position: all that a request may ask for is then answered as by one process.
    ///
    /// # Errors
    ///
    /// As for [`OutputLayer::next_tokens`](crate::OutputLayer::next_tokens) and [`Mixture::vocab_parallel_loss`], on every
    /// rank.
    pub fn vocab_parallel_next_tokens(&self, shard: &VocabShard, requests: &[&TokenRequest]) -> Result<Vec<NextToken>> {
        let operands = self.operands();
        let checked = self.check_shard(shard);
        let checked = checked.and_then(|()| Next::new(requests, operands.sizes.positions, shard.vocab_size()));
        let of_requests = Agreed::hashed("requests", |state| requests.iter().for_each(|request| request.hash(state)));
        let next = self.agree(shard, Call::Decoding, checked, &[of_requests])?;
        let own = backend::visit_shard(operands, shard, &AllIds)?;

        let ranks = 0..shard.collectives().ranks();
        let most = ranks.clone().map(|rank| shard.range_of(rank).len()).max().unwrap_or(0);
        let answer = |(position, (mut log_probs, offset)): (usize, (Vec<f64>, f64))| {
            // Every rank sends as many numbers.
            log_probs.resize(most, f64::NAN);
            let received = shard.collectives().all_gather(&log_probs)?;
            let of_ranks = received.chunks_exact(most).zip(ranks.clone());
            let all: Vec<f64> =
                of_ranks.flat_map(|(of_rank, rank)| &of_rank[..shard.range_of(rank).len()]).copied().collect();
            next.answer(position, &all, offset)
        };
        own.into_iter().enumerate().map(answer).collect()
    }
}
