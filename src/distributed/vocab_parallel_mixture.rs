//! A mixture whose decoder's rows are cut among the ranks of a distributed program: each result is that of the whole
//! vocabulary, for which the ranks exchange numbers.

use std::hash::Hash;

use candle_core::{DType, Tensor};

use crate::backend;
use crate::backend::agreement::{Agreed, Call};
use crate::backend::ranking::{order, Ranked, TopKQuery};
use crate::backend::shard::VocabShard;
use crate::decoding::{AllLogProbsQuery, Entries, NextToken, NextTokenQuery, Sampler, TokenRequest, TopK};
use crate::distributions::{Distributions, Sealed};
use crate::error::{Error, OptionName, Result};
use crate::loss::{Loss, OutputShape, Request};
use crate::mixture::{DistillOptions, Mixture, Teacher};
use crate::scores::{candidate_count, LogProbLoss, ScoreOptions, Scores};
use crate::tensors::checks::accumulation_dtype;

/// The distributions over a whole vocabulary, of which the decoder of a mixture has the rows of one rank's shard, from
/// [`Mixture::vocab_parallel`]. Every rank calls each method with the same contexts, log-priors and arguments, and gets
/// the same results. Results that need the log-probabilities of all ids as a tensor are
/// [`Error::Unsupported`](crate::Error::Unsupported): no rank has room for them.
///
/// # The loss
///
/// [`Distributions::loss`] is over the whole vocabulary: targets are ids of all ranks. Every rank gets the same loss,
/// the same gradients of contexts and log-priors, and those of its own rows of the decoder. All ranks also take part in
/// the backward pass of a loss without reduction, and in a second backward pass, with the same upstream gradient.
///
/// The ranks exchange two numbers for each row, `2 K` for each position, after which every rank has the log-sum-exps of
/// the whole vocabulary and the targets' logits. For label smoothing and correct predictions they add up `K + 2` more
/// numbers for each position, and for the contexts' gradient `K d`:
///
/// ```text
/// lse_k = log sum_p exp lse_k^(p),     dL/dc_k = sum_p W^(p)T dL/dz_k^(p)
/// ```
///
/// # Errors
///
/// The errors are those of [`Distributions`], on every rank. [`Error::Ranks`] if another rank has an error of its own,
/// makes another call, or has other targets, other options, another number of positions, components or columns, or
/// other contexts (most differences of dropout masks are noticed). [`Error::Unsupported`] for a loss over a sample of
/// the vocabulary, and on a GPU for label smoothing and correct predictions; [`Error::Device`] for decoding on a GPU.
///
/// # Devices
///
/// On a GPU the log-sum-exps and the targets' logits of each chunk pass through the host, which waits for the device;
/// the contexts' gradient is added up at the end ([`Collectives::all_reduce_sum_tensor`]). A target that is not in the
/// vocabulary is an error there too. If a device fails in the middle of a call, the other ranks wait.
///
/// [`Collectives::all_reduce_sum_tensor`]: crate::distributed::Collectives::all_reduce_sum_tensor
#[derive(Clone, Debug)]
pub struct VocabParallelMixture {
    mixture: Mixture,
    shard: VocabShard,
}

/// The name in errors.
const NAME: &str = "a vocabulary-parallel head";

impl Mixture {
    /// Returns the distributions over the whole vocabulary, of which the decoder of this mixture has the rows of one
    /// rank's `shard`.
    pub fn vocab_parallel(&self, shard: &VocabShard) -> VocabParallelMixture {
        VocabParallelMixture { mixture: self.clone(), shard: shard.clone() }
    }
}

/// Returns the error for a result that needs the log-probabilities of all ids. It is the same on every rank, whatever
/// the arguments are, so that no rank needs to be told.
pub(super) fn unsupported(option: OptionName) -> Error {
    Error::Unsupported { option, head: NAME }
}

impl Sealed for VocabParallelMixture {
    fn shape(&self) -> OutputShape<'_> {
        OutputShape { vocab: self.shard.vocab_size(), ..self.mixture.shape() }
    }

    fn select(&self, positions: &[u32]) -> Result<Box<dyn Distributions + '_>> {
        Ok(Box::new(self.mixture.with_positions(positions)?.vocab_parallel(&self.shard)))
    }

    fn announce(&self, error: Error) -> Error {
        self.shard.announce(error)
    }
}

impl Distributions for VocabParallelMixture {
    fn request_loss(&self, request: &Request) -> Result<Loss> {
        self.mixture.shard_loss(&self.shard, request)
    }

    /// Returns an error, because no rank has room for the log-probabilities of all ids.
    fn log_probs_as(&self, _: DType) -> Result<Tensor> {
        Err(unsupported(OptionName::LogProbs))
    }

    /// Computes the log-probability of one id at each position; entropy, mass outside and temperature are not
    /// supported.
    fn score(&self, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores> {
        check_score_options(self.mixture.leading(), token_ids, options).map_err(|error| self.announce(error))?;
        Scores::from_loss(self.loss(token_ids, &options.loss_options()))
    }

    /// The ranks exchange two numbers for each row, from which the log-sum-exps follow, and then the `k` most probable
    /// ids of each rank, `2 k` numbers for each position.
    fn top_k(&self, k: usize) -> Result<TopK> {
        let (mixture, shard) = (&self.mixture, &self.shard);
        let checked = mixture.check_shard(shard).and_then(|()| TopK::check_k(k, shard.vocab_size()));
        mixture.agree(shard, Call::Decoding, checked, &[Agreed::equal("k", k as f64)])?;
        let operands = mixture.operands();
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
            let mut ranked: Vec<Ranked> = possible.map(|pair| (pair[0], pair[1] as u32)).collect();
            ranked.sort_unstable_by(order);
            ranked.truncate(k);
            ranked
        };
        let ranked: Vec<_> = (0..operands.sizes.positions).map(rank_position).collect();
        let dtype = accumulation_dtype("contexts", operands.contexts.dtype())?;
        TopK::from_ranked(&ranked, &[mixture.leading(), &[k]].concat(), dtype, operands.contexts.device())
    }

    fn sample(&self, _: &mut Sampler) -> Result<Tensor> {
        Err(unsupported(OptionName::Sample))
    }

    /// The ranks exchange two numbers for each row, from which the log-sum-exps follow, and then the log-probabilities
    /// of all ids, one number for each id and position. Every rank then answers all requests as a single process does:
    /// the noise of an id depends on the request's seed, its step and the id, so that any number of ranks draws the
    /// same ids, except where rounding decides.
    fn next_tokens_per_position(&self, requests: &[&[&TokenRequest]]) -> Result<Vec<Vec<NextToken>>> {
        let (mixture, shard) = (&self.mixture, &self.shard);
        let operands = mixture.operands();
        let checked = mixture.check_shard(shard);
        let checked =
            checked.and_then(|()| NextTokenQuery::new(requests, operands.sizes.positions, shard.vocab_size()));
        let request_hash = Agreed::hashed("requests", |state| {
            requests.iter().for_each(|requests| {
                requests.len().hash(state);
                requests.iter().for_each(|request| request.hash(state));
            });
        });
        let query = mixture.agree(shard, Call::Decoding, checked, &[request_hash])?;
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
            query.answer(position, &all, offset, Entries::all(all.len()))
        };
        own.into_iter().enumerate().map(answer).collect()
    }

    fn distill(&self, _: &Teacher, _: &DistillOptions) -> Result<Loss> {
        Err(unsupported(OptionName::Distill))
    }

    fn loss_from_log_probs(&self, _: &LogProbLoss) -> Result<(Loss, Tensor)> {
        Err(unsupported(OptionName::LogProbLoss))
    }
}

/// Checks that the options ask for no more than the log-probability of one id at each position, and whether it is the
/// argmax.
fn check_score_options(leading: &[usize], token_ids: &Tensor, options: &ScoreOptions) -> Result<()> {
    options.validate()?;
    candidate_count("token_ids", token_ids, leading)?;
    let unsupported = [
        (options.entropy, OptionName::Entropy),
        (options.outside, OptionName::Outside),
        (options.collision, OptionName::Collision),
        (options.mean_logit, OptionName::MeanLogit),
        (options.temperature != 1.0, OptionName::Temperature),
        (token_ids.dims() != leading, OptionName::LogProbs),
    ];
    match unsupported.into_iter().find(|(is_used, _)| *is_used) {
        Some((_, option)) => Err(self::unsupported(option)),
        None => Ok(()),
    }
}
