//! The next token ids of a vocabulary that is cut among ranks.

use super::{AllLogProbsQuery, NextToken, NextTokenQuery, TokenRequest};
use crate::backend;
use crate::backend::agreement::{Agreed, Call};
use crate::backend::shard::VocabShard;
use crate::error::Result;
use crate::mixture::Mixture;

impl Mixture {
    /// Draws the next token id at each position as its request says
    /// ([`OutputLayer::next_tokens`](crate::OutputLayer::next_tokens)), from a vocabulary of which the decoder of this
    /// mixture has the rows of one rank's `shard`. Every rank calls it with the same contexts, log-priors and requests,
    /// and gets the same ids. The noise of an id depends on the request's seed, its step and the id, so that any number
    /// of ranks draws the same ids, except where rounding decides.
    ///
    /// The ranks exchange two numbers for each row, from which the log-sum-exps follow, and then the log-probabilities
    /// of all ids, one number for each id and position. Every rank then answers all requests as a single process does.
    ///
    /// # Errors
    ///
    /// The errors are those of [`OutputLayer::next_tokens`](crate::OutputLayer::next_tokens) and
    /// [`Mixture::vocab_parallel_loss`], on every rank.
    pub fn vocab_parallel_next_tokens(&self, shard: &VocabShard, requests: &[&TokenRequest]) -> Result<Vec<NextToken>> {
        let operands = self.operands();
        let checked = self.check_shard(shard);
        let checked =
            checked.and_then(|()| NextTokenQuery::new(requests, operands.sizes.positions, shard.vocab_size()));
        let request_hash = Agreed::hashed("requests", |state| requests.iter().for_each(|request| request.hash(state)));
        let query = self.agree(shard, Call::Decoding, checked, &[request_hash])?;
        let own = backend::visit_shard(operands, shard, &AllLogProbsQuery)?;

        let ranks = 0..shard.collectives().ranks();
        let most = ranks.clone().map(|rank| shard.range_of(rank).len()).max().unwrap_or(0);
        let answer = |(position, (mut log_probs, offset)): (usize, (Vec<f64>, f64))| {
            // All ranks must send the same number of log-probabilities.
            log_probs.resize(most, f64::NAN);
            let received = shard.collectives().all_gather(&log_probs)?;
            let by_rank = received.chunks_exact(most).zip(ranks.clone());
            let all: Vec<f64> =
                by_rank.flat_map(|(log_probs, rank)| &log_probs[..shard.range_of(rank).len()]).copied().collect();
            query.answer(position, &all, offset)
        };
        own.into_iter().enumerate().map(answer).collect()
    }
}
