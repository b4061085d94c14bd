//! A head whose decoder's rows are cut among the ranks of a distributed program: it computes each result from the
//! mixture of the rank's rows, which exchanges numbers with the other ranks.

use candle_core::{DType, Tensor};

use crate::backend::agreement::Call;
use crate::backend::shard::VocabShard;
use crate::decoding::{NextToken, TokenRequest, TopK};
use crate::error::{Error, OptionName, Result};
use crate::heads::{policy_loss_from_scores, MixtureLayer, OutputLayer};
use crate::loss::{Loss, LossOptions, Reduction, Request};
use crate::mixture::Mixture;
use crate::scores::policy::{PolicyBatch, PolicyOptions, PolicyTerms};
use crate::scores::{candidate_count, ScoreOptions, Scores};
use crate::tensors::checks::leading;
use crate::tensors::dropout::DropoutMasks;

/// A head that is a [`MixtureLayer`] whose decoder's rows are cut among ranks: each rank has the rows of its
/// [`VocabShard`], and the same projection. [`OutputLayer::loss`] is
/// [`Mixture::vocab_parallel_loss`](crate::Mixture::vocab_parallel_loss): the loss of the whole vocabulary, the same on
/// every rank, as are the gradients of the hidden states and the projection; the decoder's gradient has the rank's own
/// rows. `top_k`, `argmax`, `next_tokens` and beam search are over the whole vocabulary too, and so are `log_prob` of
/// one id at each position and `policy_loss`. An entropy, a temperature and results that need the log-probabilities of
/// all ids as a tensor are [`Error::Unsupported`].
///
/// Every rank calls it with the same hidden states and targets, and has the same parameters of the projection: new
/// variables have other random values on every rank, so that each rank must read them from a checkpoint or receive them
/// from one rank. Dropout needs the same masks on every rank, from
/// [`DropoutMasks::Seeded`](crate::DropoutMasks::Seeded) with the same seed.
///
/// # Examples
///
/// ```no_run
/// use std::sync::Arc;
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::distributed::{Collectives, Numbers, VocabParallel, VocabShard};
/// use mos_head::{LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer};
///
/// fn step(ranks: Arc<dyn Collectives>, hidden: &Tensor, targets: &Tensor) -> mos_head::Result<()> {
///     let shard = VocabShard::new(ranks.clone(), 128_256)?;
///     let vars = VarMap::new();
///     let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
///     // This head has the rows of this rank only.
///     let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(1024, shard.range().len(), 4), vb)?;
///     // The first rank sends the initial values of the projection.
///     for name in ["prior.weight", "latent.weight", "latent.bias"] {
///         let var = &vars.data().lock().expect("the variables")[name];
///         let mut values = var.flatten_all()?.to_vec1::<f32>()?;
///         ranks.broadcast(Numbers::F32(&mut values), 0)?;
///         var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
///     }
///     let head = VocabParallel::new(head, shard)?;
///     let loss = head.loss(hidden, targets, &LossOptions::default())?;
///     let gradients = loss.backward()?; // then optimizer.step(&gradients)
///     # let _ = gradients;
///     Ok(())
/// }
/// ```
#[derive(Clone, Debug)]
pub struct VocabParallel<H> {
    head: H,
    shard: VocabShard,
}

impl<H: MixtureLayer> VocabParallel<H> {
    /// Makes the head of the whole vocabulary from a head whose vocabulary is the shard.
    ///
    /// # Errors
    ///
    /// If the head has another number of token ids than the shard.
    pub fn new(head: H, shard: VocabShard) -> Result<Self> {
        if head.vocab_size() == shard.range().len() {
            Ok(VocabParallel { head, shard })
        } else {
            let expected = format!("a vocabulary of {}, as the shard {:?}", shard.range().len(), shard.range());
            Err(Error::config("head", expected, head.vocab_size()))
        }
    }

    /// Returns the head of this rank's token ids.
    pub fn head(&self) -> &H {
        &self.head
    }

    /// Returns the shard, which has the token ids of this rank.
    pub fn shard(&self) -> &VocabShard {
        &self.shard
    }

    /// Computes the mixture of this rank. If it has an error, it tells the other ranks of the call.
    fn mixture(&self, call: Call, hidden: &Tensor, dropout: DropoutMasks) -> Result<Mixture> {
        match self.head.mixture(hidden, dropout) {
            Err(error) => self.shard.agree(call, Err(error), &[]),
            mixture => mixture,
        }
    }
}

/// The name of the head in errors.
const NAME: &str = "a vocabulary-parallel head";

/// Checks that the options ask for no more than the log-probability of one id at each position, and whether it is the
/// argmax.
fn check_score_options(hidden: &Tensor, token_ids: &Tensor, options: &ScoreOptions) -> Result<()> {
    options.validate()?;
    let leading = leading(hidden)?;
    candidate_count("token_ids", token_ids, leading)?;
    let unsupported = [
        (options.entropy, OptionName::Entropy),
        (options.outside, OptionName::Outside),
        (options.temperature != 1.0, OptionName::Temperature),
        (token_ids.dims() != leading, OptionName::LogProbs),
    ];
    match unsupported.into_iter().find(|(is_used, _)| *is_used) {
        Some((_, option)) => Err(Error::Unsupported { option, head: NAME }),
        None => Ok(()),
    }
}

impl<H: MixtureLayer> OutputLayer for VocabParallel<H> {
    fn hidden_size(&self) -> usize {
        self.head.hidden_size()
    }

    /// Returns the number of token ids of all ranks.
    fn vocab_size(&self) -> usize {
        self.shard.vocab_size()
    }

    fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        // Hidden states of ignored positions become zero, so that a NaN there reaches no gradient of the projection.
        let masked = || Request::new(leading(hidden)?, None, hidden, targets, options)?.mask(hidden);
        let mixture = match masked() {
            Ok(hidden) => self.mixture(Call::Loss, &hidden, options.dropout),
            Err(error) => self.shard.agree(Call::Loss, Err(error), &[]),
        };
        mixture?.vocab_parallel_loss(&self.shard, targets, options)
    }

    /// Computes the log-probability of one id at each position; entropy, mass outside and temperature are not
    /// supported.
    fn score(&self, hidden: &Tensor, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores> {
        let loss_options = LossOptions::new()
            .with_reduction(Reduction::None)
            .with_dropout(DropoutMasks::Off)
            .with_correct(options.is_argmax);
        let loss_options = LossOptions { workspace_bytes: options.workspace_bytes, ..loss_options };
        let loss = match check_score_options(hidden, token_ids, options) {
            Ok(()) => self.loss(hidden, token_ids, &loss_options),
            // This tells the other ranks of the error.
            Err(error) => self.shard.agree(Call::Loss, Err(error), &[]),
        };
        let loss = loss.map_err(|error| error.renamed("targets", "token_ids"))?;
        // `neg` would make a minus zero.
        let log_prob = loss.value.affine(-1.0, 0.0)?;
        let leaves = loss.leaves().collect();
        Ok(Scores { log_prob, entropy: None, log_outside: None, is_argmax: loss.is_correct, leaves })
    }

    fn policy_loss(&self, hidden: &Tensor, batch: &PolicyBatch, options: &PolicyOptions) -> Result<Loss> {
        let (terms, rows) = match PolicyTerms::from_hidden(hidden, batch, options) {
            Ok(terms) => terms,
            Err(error) => return self.shard.agree(Call::Loss, Err(error), &[]),
        };
        let scores = self.score(&rows, &terms.token_ids, &options.score_options());
        policy_loss_from_scores(&terms, scores.map_err(|error| error.with_position_from(&terms.positions))?)
    }

    fn top_k(&self, hidden: &Tensor, k: usize) -> Result<TopK> {
        self.mixture(Call::Decoding, hidden, DropoutMasks::Off)?.vocab_parallel_top_k(&self.shard, k)
    }

    fn next_tokens(&self, hidden: &Tensor, requests: &[&TokenRequest]) -> Result<Vec<NextToken>> {
        self.mixture(Call::Decoding, hidden, DropoutMasks::Off)?.vocab_parallel_next_tokens(&self.shard, requests)
    }

    fn frozen(&self) -> Result<Box<dyn OutputLayer + '_>> {
        Ok(Box::new(VocabParallel { head: self.head.frozen_mixture()?, shard: self.shard.clone() }))
    }

    /// Returns an error, because no rank has room for the log-probabilities of all ids.
    fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
        self.log_probs_as(hidden, hidden.dtype())
    }

    fn log_probs_as(&self, _: &Tensor, _: DType) -> Result<Tensor> {
        Err(Error::Unsupported { option: OptionName::LogProbs, head: NAME })
    }
}
