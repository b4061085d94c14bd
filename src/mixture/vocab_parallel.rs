//! The loss of a mixture whose decoder is cut among the ranks of a distributed program.

use std::hash::{DefaultHasher, Hash, Hasher};

use candle_core::{DType, Device, Tensor};

use super::node::needs_grad;
use super::Mixture;
use crate::backend::contract::{accumulation_dtype, NeedsGrad, Operands, Sizes, TargetLoss};
use crate::backend::shard::VocabShard;
use crate::error::{Error, OptionName, Result};
use crate::loss::{Loss, LossOptions, Request};

impl Mixture {
    /// The loss of the whole vocabulary, of which the decoder of this mixture has the rows of one rank's `shard`, and the
    /// gradients of contexts, log-priors and of these rows. Every rank calls it, with the same contexts, log-priors,
    /// targets and options, and gets the same loss and the same gradients of contexts and log-priors. (The backward pass
    /// of a loss without reduction, and a second backward pass, are calls of all ranks too.)
    ///
    /// One exchange of two numbers for each row, `2 K` a position, gives every rank the log-sum-exps of the whole
    /// vocabulary and the targets' logits. Label smoothing and correct predictions need one sum of `2 K + 2` numbers a
    /// position more, and the contexts' gradient is a sum of `K d`:
    ///
    /// ```text
    /// lse_k = log sum_p exp lse_k^(p),     dL/dc_k = sum_p W^(p)T dL/dz_k^(p)
    /// ```
    ///
    /// # Shapes
    ///
    /// - targets: `[..]`, the leading dimensions of the contexts; u8, u32 or i64, ids of the whole vocabulary
    ///
    /// # Errors
    ///
    /// As for [`Mixture::loss`], on every rank: [`Error::Ranks`] where another rank has an error of its own, or another
    /// number of positions, components or columns, other targets or options, or makes another call. [`Error::Unsupported`]
    /// for a loss over a sample of the vocabulary, and on a GPU for label smoothing and correct predictions.
    ///
    /// # Devices
    ///
    /// On a GPU the log-sum-exps and the targets' logits of each chunk pass through the host, which waits for the device; the
    /// contexts' gradient is added up at the end ([`Collectives::all_reduce_sum_tensor`]). A target that is not in the
    /// vocabulary is an error there too. If a device fails in the middle of a call, the other ranks wait.
    ///
    /// [`Collectives::all_reduce_sum_tensor`]: crate::Collectives::all_reduce_sum_tensor
    pub fn vocab_parallel_loss(&self, shard: &VocabShard, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let Sizes { positions, components, context_dim, .. } = self.operands.sizes;
        let request = self.checked(shard, targets, options);
        let needs_grad = if options.train { needs_grad(&self.operands) } else { NeedsGrad::default() };
        let request = shard.agree(
            request,
            &[
                ("the call", LOSS),
                ("positions", positions as f64),
                ("components", components as f64),
                ("context_dim", context_dim as f64),
                ("dtype", number_of(|state| self.operands.contexts.dtype().as_str().hash(state))),
                ("targets", number_of(|state| hash_values(targets, state))),
                ("whether tensors are on the CPU", f64::from(u8::from(self.operands.contexts.device().is_cpu()))),
                ("options", number_of(|state| hash_options(options, state))),
                ("whether the contexts need a gradient", f64::from(u8::from(needs_grad.contexts))),
                ("whether anything needs a gradient", f64::from(u8::from(needs_grad.any()))),
            ],
        )?;
        let dtype = accumulation_dtype("contexts", self.operands.contexts.dtype())?;
        let objective = TargetLoss { shard: Some(shard.clone()), ..request.target_loss(dtype)? };
        self.masked(&request)?.fused_loss(objective, &request)
    }

    /// [`Mixture::vocab_parallel_loss`] of a mixture that may have an error, of which the other ranks then know.
    pub(crate) fn vocab_parallel_loss_of(
        mixture: Result<Mixture>,
        shard: &VocabShard,
        targets: &Tensor,
        options: &LossOptions,
    ) -> Result<Loss> {
        match mixture {
            Ok(mixture) => mixture.vocab_parallel_loss(shard, targets, options),
            Err(error) => shard.agree(Err(error), &[]),
        }
    }

    /// The request, if this rank's arguments have no errors.
    fn checked<'a>(&self, shard: &VocabShard, targets: &'a Tensor, options: &'a LossOptions) -> Result<Request<'a>> {
        let Operands { contexts, sizes, .. } = &self.operands;
        if sizes.vocab != shard.range().len() {
            let expected = format!("{} rows, as the shard {:?}", shard.range().len(), shard.range());
            return Err(Error::config("decoder", expected, sizes.vocab));
        }
        let request = Request::new(&self.leading, Some(shard.vocab_size()), contexts, targets, options)?;
        use OptionName::{Correct, GradientFilter, LabelSmoothing, ZLoss};
        request.require("a vocabulary-parallel loss", &[LabelSmoothing, ZLoss, GradientFilter, Correct])?;
        if !contexts.device().is_cpu() {
            request.require("a vocabulary-parallel loss on a GPU", &[ZLoss, GradientFilter])?;
        }
        request.read_ids(shard.vocab_size())?;
        Ok(request)
    }
}

/// The call that a rank makes, among those that exchange this many numbers first.
const LOSS: f64 = 1.0;

/// A number that stands for what is hashed, and that f64 has exactly.
fn number_of(hash: impl FnOnce(&mut DefaultHasher)) -> f64 {
    let mut state = DefaultHasher::new();
    hash(&mut state);
    (state.finish() >> 12) as f64
}

/// Values that cannot be read are an error of the request.
fn hash_values(tensor: &Tensor, state: &mut DefaultHasher) {
    // On the host: Metal has no f64, and no GPU converts an empty tensor.
    let on_host = tensor.flatten_all().and_then(|tensor| tensor.to_device(&Device::Cpu));
    let values = on_host.and_then(|tensor| tensor.to_dtype(DType::F64)?.to_vec1::<f64>());
    values.unwrap_or_default().iter().for_each(|value| value.to_bits().hash(state));
}

/// What of the options changes the loss, whatever a rank's memory and rounding are.
fn hash_options(options: &LossOptions, state: &mut DefaultHasher) {
    let LossOptions { train, reduction, denominator, ignore_index, .. } = options;
    format!("{train} {reduction:?} {denominator:?} {ignore_index:?} {:?}", options.terms()).hash(state);
    for weights in [&options.position_weights, &options.class_weights] {
        weights.is_some().hash(state);
        weights.iter().for_each(|weights| hash_values(weights, state));
    }
}
