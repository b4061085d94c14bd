//! A head whose decoder's rows are cut among the ranks of a distributed program: it computes each result from the
//! mixture of the rank's rows, which exchanges numbers with the other ranks.

use candle_core::{DType, Tensor};

use super::vocab_parallel_mixture::{unsupported, VocabParallelMixture};
use crate::backend::shard::VocabShard;
use crate::decoding::Sampler;
use crate::distributions::Distributions;
use crate::error::{Error, OptionName, Result};
use crate::heads::{select_hidden, MixtureLayer, OutputLayer, RequestLayer};
use crate::loss::{Loss, LossOptions, Request};
use crate::mixture::{DistillOptions, Mixture, Teacher};
use crate::tensors::dropout::DropoutMasks;

/// A head that is a [`MixtureLayer`] whose decoder's rows are cut among ranks: each rank has the rows of its
/// [`VocabShard`], and the same projection. [`OutputLayer::loss`] is that of a [`VocabParallelMixture`]: the loss of
/// the whole vocabulary, the same on every rank, as are the gradients of the hidden states and the projection; the
/// decoder's gradient has the rank's own rows. `top_k`, `argmax`, `next_tokens` and beam search are over the whole
/// vocabulary too, and so are `log_prob` of one id at each position and `policy_loss`. An entropy, a temperature and
/// results that need the log-probabilities of all ids as a tensor are [`Error::Unsupported`]. On a GPU all decoding is
/// [`Error::Device`].
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

    /// Returns the distributions of this rank's mixture, or tells the other ranks of its error.
    fn checked(&self, mixture: Result<Mixture>) -> Result<VocabParallelMixture> {
        match mixture {
            Ok(mixture) => Ok(mixture.vocab_parallel(&self.shard)),
            Err(error) => Err(self.announce(error)),
        }
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
        self.target_loss(hidden, targets, options)
    }

    /// Returns an error, because no rank has room for the log-probabilities of all ids.
    fn log_probs(&self, _: &Tensor) -> Result<Tensor> {
        Err(unsupported(OptionName::LogProbs))
    }

    fn log_probs_as(&self, _: &Tensor, _: DType) -> Result<Tensor> {
        Err(unsupported(OptionName::LogProbs))
    }

    fn sample(&self, _: &Tensor, _: &mut Sampler) -> Result<Tensor> {
        Err(unsupported(OptionName::Sample))
    }

    fn distill(&self, _: &Tensor, _: &Teacher, _: &DistillOptions) -> Result<Loss> {
        Err(unsupported(OptionName::Distill))
    }

    fn distributions(&self, hidden: &Tensor, positions: Option<&[u32]>) -> Result<Box<dyn Distributions + '_>> {
        let rows = select_hidden(hidden, positions);
        Ok(Box::new(self.checked(rows.and_then(|rows| self.head.mixture(&rows, DropoutMasks::Off)))?))
    }

    fn announce(&self, error: Error) -> Error {
        self.shard.announce(error)
    }

    fn frozen(&self) -> Result<Box<dyn OutputLayer + '_>> {
        Ok(Box::new(VocabParallel { head: self.head.frozen_mixture()?, shard: self.shard.clone() }))
    }
}

impl<H: MixtureLayer> RequestLayer for VocabParallel<H> {
    fn request_loss(&self, hidden: &Tensor, request: &Request) -> Result<Loss> {
        // Hidden states of ignored positions become zero, so that a NaN there reaches no gradient of the projection.
        let masked = request.positions.mask(hidden);
        let mixture = masked.and_then(|hidden| self.head.mixture(&hidden, request.options.dropout));
        self.checked(mixture)?.request_loss(request)
    }
}
