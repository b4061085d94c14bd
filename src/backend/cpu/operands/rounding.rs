//! Conversions of half precision to and from f32, on all threads.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::dtype::{with_slice, Element};
use crate::backend::cpu::memory::{filled, zeros};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};
use crate::error::Result;

/// The number of elements that a thread converts at a time.
const BLOCK: usize = 1 << 16;

/// Converts a gradient to the dtype of its operand.
pub(crate) fn rounded(gradient: &Tensor, dtype: DType) -> Result<Tensor> {
    match (gradient.dtype(), dtype) {
        (DType::F32, DType::BF16) => rounded_to::<bf16>(gradient),
        (DType::F32, DType::F16) => rounded_to::<f16>(gradient),
        _ => Ok(gradient.to_dtype(dtype)?),
    }
}

/// Rounds a tensor in f32; the result is contiguous.
pub(crate) fn rounded_to<T: Element<Acc = f32>>(gradient: &Tensor) -> Result<Tensor> {
    let isa = Isa::detected()?;
    let values = with_slice("gradient", &gradient.contiguous()?, |from: &[f32]| {
        let mut values: Vec<T> = filled(T::zero(), from.len());
        let blocks = values.par_chunks_mut(BLOCK).zip(from.par_chunks(BLOCK));
        blocks.for_each(|(to, from)| f32::dispatch(isa, NarrowRow { from, to }));
        Ok(values)
    })?;
    Ok(Tensor::from_vec(values, gradient.shape(), &Device::Cpu)?)
}

/// Widens a contiguous tensor to f32.
pub(crate) fn widened<T: Element<Acc = f32>>(tensor: &Tensor) -> Result<Tensor> {
    let values = with_slice("tensor", tensor, |from: &[T]| {
        let mut values: Vec<f32> = zeros(from.len());
        let blocks = values.par_chunks_mut(BLOCK).zip(from.par_chunks(BLOCK));
        blocks.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(to, x)| *to = x.widen()));
        Ok(values)
    })?;
    Ok(Tensor::from_vec(values, tensor.shape(), &Device::Cpu)?)
}

/// Computes `to[..] = from[..]`, rounded.
struct NarrowRow<'a, T> {
    from: &'a [f32],
    to: &'a mut [T],
}

impl<T: Element<Acc = f32>> Kernel<f32> for NarrowRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>>(self, _: V) {
        for (to, &x) in self.to.iter_mut().zip(self.from) {
            *to = T::narrow(x);
        }
    }
}
