//! The loss of a mixture whose decoder is cut among the ranks of a distributed program.

use std::hash::{DefaultHasher, Hash};

use candle_core::{DType, Tensor, D};

use super::node::needs_grad;
use super::Mixture;
use crate::backend::agreement::{Call, Number};
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
    /// number of positions, components or columns, other contexts (as with other dropout masks), targets or options, or
    /// makes another call. [`Error::Unsupported`]
    /// for a loss over a sample of the vocabulary; an error for tensors that are not on the CPU.
    pub fn vocab_parallel_loss(&self, shard: &VocabShard, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let request = self.checked(shard, targets, options);
        let needs_grad = if options.train { needs_grad(&self.operands) } else { NeedsGrad::default() };
        let numbers = [
            Number::hashed("targets", |state| hash_values(targets, state)),
            Number::hashed("options", |state| hash_options(options, state)),
            Number::equal("whether the contexts need a gradient", f64::from(u8::from(needs_grad.contexts))),
            Number::equal("whether anything needs a gradient", f64::from(u8::from(needs_grad.any()))),
        ];
        let request = self.agree(shard, Call::Loss, request, numbers)?;
        let dtype = accumulation_dtype("contexts", self.operands.contexts.dtype())?;
        let objective = TargetLoss { shard: Some(shard.clone()), ..request.target_loss(dtype)? };
        self.fused_loss(objective, &request)
    }

    /// What this rank's check has found, if the mixtures of all ranks and these numbers agree.
    pub(crate) fn agree<T, const N: usize>(
        &self,
        shard: &VocabShard,
        call: Call,
        checked: Result<T>,
        numbers: [Number; N],
    ) -> Result<T> {
        let Sizes { positions, components, context_dim, .. } = self.operands.sizes;
        let contexts = &self.operands.contexts;
        let of_mixture = [
            Number::equal("positions", positions as f64),
            Number::equal("components", components as f64),
            Number::equal("context_dim", context_dim as f64),
            Number::hashed("dtype", |state| contexts.dtype().as_str().hash(state)),
            Number::close("contexts", projection(contexts).unwrap_or(f64::NAN), ROUNDING),
        ];
        shard.agree(call, checked, &[&of_mixture[..], &numbers[..]].concat())
    }

    /// Checks that this mixture has the rows of a shard, on the CPU.
    pub(crate) fn check_shard(&self, shard: &VocabShard) -> Result<()> {
        let Operands { contexts, sizes, .. } = &self.operands;
        if !contexts.device().is_cpu() {
            let got = format!("{:?}", contexts.device().location());
            return Err(Error::Device { argument: "contexts", expected: "Cpu".into(), got });
        }
        if sizes.vocab != shard.range().len() {
            let expected = format!("{} rows, as the shard {:?}", shard.range().len(), shard.range());
            return Err(Error::config("decoder", expected, sizes.vocab));
        }
        Ok(())
    }

    /// The request, if this rank's arguments have no errors.
    fn checked<'a>(&self, shard: &VocabShard, targets: &'a Tensor, options: &'a LossOptions) -> Result<Request<'a>> {
        self.check_shard(shard)?;
        let contexts = &self.operands.contexts;
        let request = Request::new(&self.leading, Some(shard.vocab_size()), contexts, targets, options)?;
        use OptionName::{Correct, GradientFilter, LabelSmoothing, ZLoss};
        request.require("a vocabulary-parallel loss", &[LabelSmoothing, ZLoss, GradientFilter, Correct])?;
        request.read_ids(shard.vocab_size())?;
        Ok(request)
    }
}

/// How much the projections of contexts may differ that are the same but for rounding.
const ROUNDING: f64 = 0.02;

/// A sum of some of the contexts with various signs, relative to their norm. Contexts that are the same but for rounding,
/// as those of ranks with other processors, have nearly the same; with other dropout masks, another.
fn projection(contexts: &Tensor) -> Result<f64> {
    /// Columns that are looked at.
    const COLUMNS: usize = 4;
    let columns = contexts.dim(D::Minus1)?.min(COLUMNS);
    let values = contexts.narrow(D::Minus1, 0, columns)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    let sign = |i: usize| if (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 0 { 1.0 } else { -1.0 };
    let sum: f64 = values.iter().enumerate().map(|(i, value)| sign(i) * value).sum();
    let norm = values.iter().map(|value| value * value).sum::<f64>().sqrt();
    Ok(if norm == 0.0 { 0.0 } else { sum / norm })
}

/// Values that cannot be read are an error of the request.
fn hash_values(tensor: &Tensor, state: &mut DefaultHasher) {
    let values = tensor.flatten_all().and_then(|tensor| tensor.to_dtype(DType::F64)?.to_vec1::<f64>());
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
