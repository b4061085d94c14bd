//! The most probable ids of a vocabulary that is cut among ranks.

use crate::backend;
use crate::backend::agreement::{Agreed, Call};
use crate::backend::operands::accumulation_dtype;
use crate::backend::ranking::{order, Ranked, TopKQuery};
use crate::backend::shard::VocabShard;
use crate::decoding::TopK;
use crate::error::Result;
use crate::mixture::Mixture;

impl Mixture {
    /// Returns the `k` most probable token ids of the whole vocabulary, of which the decoder of this mixture has the
    /// rows of one rank's `shard`. Every rank calls it with the same contexts, log-priors and k, and gets the same ids.
    /// The ranks exchange two numbers for each row, from which the log-sum-exps follow, and then the `k` most probable
    /// ids of each rank, `2 k` numbers for each position.
    ///
    /// # Shapes
    ///
    /// - returns ids, u32, and log-probabilities, `[.., k]` each
    ///
    /// # Errors
    ///
    /// The errors are those of [`Mixture::top_k`] and [`Mixture::vocab_parallel_loss`], on every rank.
    pub fn vocab_parallel_top_k(&self, shard: &VocabShard, k: usize) -> Result<TopK> {
        let checked = self.check_shard(shard).and_then(|()| TopK::check_k(k, shard.vocab_size()));
        self.agree(shard, Call::Decoding, checked, &[Agreed::equal("k", k as f64)])?;
        let operands = self.operands();
        let own = backend::visit_shard(operands, shard, &TopKQuery { k })?;

        // A rank with fewer than `k` ids adds impossible ones, because all ranks must send the same number of ids.
        let first_id = shard.range().start as f64;
        let mut sent = Vec::with_capacity(own.len() * 2 * k);
        for ranked in own {
            let missing = k - ranked.len();
            sent.extend(ranked.into_iter().flat_map(|(log_prob, id)| [log_prob, first_id + f64::from(id)]));
            sent.extend(std::iter::repeat_n([f64::NEG_INFINITY, f64::INFINITY], missing).flatten());
        }
        let received = shard.collectives().all_gather(&sent)?;
        let ranks: Vec<&[f64]> = received.chunks_exact(sent.len().max(1)).collect();
        let rank_position = |position: usize| {
            let position_numbers = |rank: &&'_ [f64]| rank[position * 2 * k..][..2 * k].to_vec();
            let pairs: Vec<f64> = ranks.iter().flat_map(position_numbers).collect();
            let possible = pairs.chunks_exact(2).filter(|pair| pair[1].is_finite());
            let mut ranked: Vec<Ranked<f64>> = possible.map(|pair| (pair[0], pair[1] as u32)).collect();
            ranked.sort_unstable_by(order);
            ranked.truncate(k);
            ranked
        };
        let ranked: Vec<_> = (0..operands.sizes.positions).map(rank_position).collect();
        let dtype = accumulation_dtype("contexts", operands.contexts.dtype())?;
        TopK::from_ranked(&ranked, &[self.leading(), &[k]].concat(), dtype, operands.contexts.device())
    }
}
