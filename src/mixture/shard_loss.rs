//! The loss of a mixture whose decoder is cut among the ranks of a distributed program.

use std::hash::{DefaultHasher, Hash};

use candle_core::{DType, Device, Tensor, D};

use super::node::needs_grad;
use super::Mixture;
use crate::backend::agreement::{Agreed, Call};
use crate::backend::objective::TargetLoss;
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::backend::shard::VocabShard;
use crate::error::{Error, OptionName, Result};
use crate::loss::{Loss, LossOptions, PositionOptions, Request};
use crate::tensors::checks::accumulation_dtype;

impl Mixture {
    /// Computes the loss over the whole vocabulary, of which the decoder of this mixture has the rows of one rank's
    /// `shard`, from a request over the whole vocabulary. Every rank calls it.
    pub(crate) fn shard_loss(&self, shard: &VocabShard, request: &Request) -> Result<Loss> {
        let checked = self.check_shard_request(shard, request);
        let options = request.options;
        let needs_grad = if options.train { needs_grad(&self.operands) } else { NeedsGrad::default() };
        let numbers = [
            Agreed::hashed("targets", |state| checked.iter().for_each(|ids| ids.hash(state))),
            Agreed::hashed("options", |state| hash_options(options, state)),
            Agreed::equal("whether the contexts need a gradient", f64::from(u8::from(needs_grad.contexts))),
            Agreed::equal("whether anything needs a gradient", f64::from(u8::from(needs_grad.any()))),
        ];
        self.agree(shard, Call::Loss, checked, &numbers)?;
        let dtype = accumulation_dtype("contexts", self.operands.contexts.dtype())?;
        let objective = TargetLoss { shard: Some(shard.clone()), ..request.target_loss(dtype)? };
        self.masked(request)?.fused_loss(objective, request)
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
        let Operands { sizes, weight, .. } = &self.operands;
        if weight.is_quantised() {
            let head = "a vocabulary that ranks share";
            return Err(Error::Unsupported { option: OptionName::QuantisedRows, head });
        }
        if sizes.vocab != shard.range().len() {
            let expected = format!("{} rows, as the shard {:?}", shard.range().len(), shard.range());
            return Err(Error::config("decoder", expected, sizes.vocab));
        }
        Ok(())
    }

    /// Checks this rank's part of a request, and returns the target ids.
    fn check_shard_request(&self, shard: &VocabShard, request: &Request) -> Result<Vec<Option<usize>>> {
        self.check_shard(shard)?;
        use OptionName::{Correct, LabelSmoothing, ZLoss};
        request.check_support("a vocabulary-parallel loss", &[LabelSmoothing, ZLoss, Correct])?;
        if !self.operands.contexts.device().is_cpu() {
            request.check_support("a vocabulary-parallel loss on a GPU", &[ZLoss])?;
        }
        request.positions.read_ids(shard.vocab_size())
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
    let LossOptions { train, positions, .. } = options;
    let PositionOptions { reduction, denominator, ignore_index, .. } = positions;
    format!("{train} {reduction:?} {denominator:?} {ignore_index:?} {:?}", options.terms()).hash(state);
    for weights in [&positions.position_weights, &options.class_weights] {
        weights.is_some().hash(state);
        weights.iter().for_each(|weights| hash_values(weights, state));
    }
}
