//! The loss of a mixture whose decoder is cut among the ranks of a distributed program.

use std::hash::{DefaultHasher, Hash};

use candle_core::{DType, Device, Tensor, D};

use super::node::needs_grad;
use super::Mixture;
use crate::backend::agreement::{Agreed, Call};
use crate::backend::objective::TargetLoss;
use crate::backend::operands::{accumulation_dtype, NeedsGrad, Sizes};
use crate::backend::shard::VocabShard;
use crate::error::{Error, OptionName, Result};
use crate::loss::{Loss, LossOptions, Request};

impl Mixture {
    /// Computes the loss over the whole vocabulary, of which the decoder of this mixture has the rows of one rank's
    /// `shard`, and the gradients of contexts, log-priors and these rows. Every rank calls it with the same contexts,
    /// log-priors, targets and options, and gets the same loss and the same gradients of contexts and log-priors. (All
    /// ranks also take part in the backward pass of a loss without reduction, and in a second backward pass, with the
    /// same upstream gradient.)
    ///
    /// The ranks exchange two numbers for each row, `2 K` for each position, after which every rank has the
    /// log-sum-exps of the whole vocabulary and the targets' logits. For label smoothing and correct predictions they
    /// add up `K + 2` more numbers for each position, and for the contexts' gradient `K d`:
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
    /// The errors are those of [`Mixture::loss`], on every rank. [`Error::Ranks`] if another rank has an error of its
    /// own, makes another call, or has other targets, other options, another number of positions, components or
    /// columns, or other contexts (most differences of dropout masks are noticed). [`Error::Unsupported`] for a loss
    /// over a sample of the vocabulary, and on a GPU for label smoothing and correct predictions.
    ///
    /// # Devices
    ///
    /// On a GPU the log-sum-exps and the targets' logits of each chunk pass through the host, which waits for the
    /// device; the contexts' gradient is added up at the end ([`Collectives::all_reduce_sum_tensor`]). A target that is
    /// not in the vocabulary is an error there too. If a device fails in the middle of a call, the other ranks wait.
    ///
    /// [`Collectives::all_reduce_sum_tensor`]: crate::distributed::Collectives::all_reduce_sum_tensor
    pub fn vocab_parallel_loss(&self, shard: &VocabShard, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let checked = self.check_arguments(shard, targets, options);
        let needs_grad = if options.train { needs_grad(&self.operands) } else { NeedsGrad::default() };
        let numbers = [
            Agreed::hashed("targets", |state| checked.iter().for_each(|(_, ids)| ids.hash(state))),
            Agreed::hashed("options", |state| hash_options(options, state)),
            Agreed::equal("whether the contexts need a gradient", f64::from(u8::from(needs_grad.contexts))),
            Agreed::equal("whether anything needs a gradient", f64::from(u8::from(needs_grad.any()))),
        ];
        let (request, _) = self.agree(shard, Call::Loss, checked, &numbers)?;
        let dtype = accumulation_dtype("contexts", self.operands.contexts.dtype())?;
        let objective = TargetLoss { shard: Some(shard.clone()), ..request.target_loss(dtype)? };
        self.masked(&request)?.fused_loss(objective, &request)
    }

    /// Returns what this rank's check has found, if the mixtures of all ranks and these numbers agree.
    pub(crate) fn agree<T>(&self, shard: &VocabShard, call: Call, checked: Result<T>, numbers: &[Agreed]) -> Result<T> {
        let Sizes { positions, components, context_dim, .. } = self.operands.sizes;
        let contexts = &self.operands.contexts;
        let mixture_numbers = [
            Agreed::equal("positions", positions as f64),
            Agreed::equal("components", components as f64),
            Agreed::equal("context_dim", context_dim as f64),
            Agreed::hashed("dtype", |state| contexts.dtype().as_str().hash(state)),
            Agreed::equal("whether tensors are on the CPU", f64::from(u8::from(contexts.device().is_cpu()))),
        ];
        shard.agree(call, checked, &[&mixture_numbers[..], &projections("contexts", contexts), numbers].concat())
    }

    /// Checks that this mixture's decoder has as many rows as the shard.
    pub(crate) fn check_shard(&self, shard: &VocabShard) -> Result<()> {
        let sizes = self.operands.sizes;
        if sizes.vocab != shard.range().len() {
            let expected = format!("{} rows, as the shard {:?}", shard.range().len(), shard.range());
            return Err(Error::config("decoder", expected, sizes.vocab));
        }
        Ok(())
    }

    /// Checks this rank's arguments, and returns the request and the target ids.
    fn check_arguments<'a>(
        &self,
        shard: &VocabShard,
        targets: &'a Tensor,
        options: &'a LossOptions,
    ) -> Result<(Request<'a>, Vec<Option<usize>>)> {
        self.check_shard(shard)?;
        let contexts = &self.operands.contexts;
        let request = Request::new(&self.leading, Some(shard.vocab_size()), contexts, targets, options)?;
        use OptionName::{Correct, LabelSmoothing, ZLoss};
        request.check_support("a vocabulary-parallel loss", &[LabelSmoothing, ZLoss, Correct])?;
        if !contexts.device().is_cpu() {
            request.check_support("a vocabulary-parallel loss on a GPU", &[ZLoss])?;
        }
        let ids = request.read_ids(shard.vocab_size())?;
        Ok((request, ids))
    }
}

/// Checks before a backward pass that all ranks have the same upstream gradients, `[positions]`, if there are any.
pub(super) fn agree_on_backward(shard: &VocabShard, upstream: Option<&Tensor>) -> Result<()> {
    let positions = Agreed::equal("positions", upstream.map_or(0, Tensor::elem_count) as f64);
    let upstream = upstream.map(|upstream| projections("the upstream gradient", upstream));
    let upstream = upstream.as_ref().map_or(&[][..], |projections| &projections[..]);
    shard.agree(Call::Backward, Ok(()), &[&[positions][..], upstream].concat())
}

/// Computes three sums of some of a tensor's values, each with other signs, relative to the norm of these values. Ranks
/// whose values differ by rounding alone, as on different processors, have nearly the same sums; ranks with different
/// dropout masks hardly ever do.
fn projections(argument: &'static str, tensor: &Tensor) -> [Agreed; 3] {
    /// The number of columns whose values are read.
    const COLUMNS: usize = 8;
    /// The largest difference of two sums that rounding explains.
    const TOLERANCE: f64 = 0.02;
    let columns = || {
        let width = tensor.dim(D::Minus1)?;
        let columns = COLUMNS.min(width);
        let spread = Tensor::from_iter((0..columns).map(|i| (i * width / columns) as u32), tensor.device())?;
        values(&tensor.contiguous()?.index_select(&spread, D::Minus1)?)
    };
    let values = if tensor.rank() == 1 { values(tensor) } else { columns() }.unwrap_or_default();
    let norm = values.iter().map(|value| value * value).sum::<f64>().sqrt();
    [1u64, 2, 3].map(|seed| {
        let bit = |i: usize| (i as u64 ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
        let sign = |i: usize| if bit(i).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 63 == 0 { 1.0 } else { -1.0 };
        let sum: f64 = values.iter().enumerate().map(|(i, value)| sign(i) * value).sum();
        Agreed::close(argument, if norm == 0.0 { 0.0 } else { sum / norm }, TOLERANCE)
    })
}

/// Reads the values of a tensor. They are converted on the host, because Metal has no f64, and candle's GPU backends do
/// not convert empty tensors.
fn values(tensor: &Tensor) -> candle_core::Result<Vec<f64>> {
    tensor.flatten_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1()
}

/// Hashes the values of a tensor. If they cannot be read, they count as none, and the loss returns the error.
fn hash_values(tensor: &Tensor, state: &mut DefaultHasher) {
    values(tensor).unwrap_or_default().iter().for_each(|value| value.to_bits().hash(state));
}

/// Hashes the options that the loss depends on. The budget and the precision, which change it by rounding alone, may
/// differ among the ranks.
fn hash_options(options: &LossOptions, state: &mut DefaultHasher) {
    let LossOptions { train, reduction, denominator, ignore_index, .. } = options;
    format!("{train} {reduction:?} {denominator:?} {ignore_index:?} {:?}", options.terms()).hash(state);
    for weights in [&options.position_weights, &options.class_weights] {
        weights.is_some().hash(state);
        weights.iter().for_each(|weights| hash_values(weights, state));
    }
}
