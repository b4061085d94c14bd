//! The element types of tensors, and the slices of their elements. Numbers in `f16`, `bf16` and `f32` are computed in
//! `f32`, those in `f64` in `f64`; gradients are rounded to the type of their operand.

use std::convert::identity;

use candle_core::{DType, Device, Storage, Tensor, WithDType};
use half::{bf16, f16};
use num_traits::Zero;
use rayon::prelude::*;

use crate::backend::cpu::memory::{filled, zeros};
use crate::backend::cpu::tiles::rounding::{self, ToBf16};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};
use crate::error::{Error, Result};

/// A floating-point type that tensors are stored in.
pub(crate) trait Element: WithDType + ToBf16 {
    /// The type for computation and accumulation.
    type Acc: Float + Element<Acc = Self::Acc>;
    /// Whether `Acc` is `Self`, so that no conversion is needed.
    const IS_ACC: bool;

    /// Returns the number as `Acc`, exactly.
    fn widen(self) -> Self::Acc;
    /// Returns the nearest number of this type.
    fn narrow(value: Self::Acc) -> Self;

    /// Loads a register of these numbers, widened.
    fn load<V: Vector<Self::Acc>>(v: V, lanes: V::Lanes<Self>) -> V::Reg;

    /// Loads fewer numbers than fill a register, widened; the other lanes become zero.
    fn load_partial<V: Vector<Self::Acc>>(v: V, values: &[Self]) -> V::Reg;

    /// Returns the slice itself if `Acc` is `Self`.
    fn as_acc(values: &[Self]) -> Option<&[Self::Acc]>;

    /// Returns the values as `Acc`: the slice itself, or a copy in `buffer`.
    fn widen_slice<'a>(values: &'a [Self], buffer: &'a mut Vec<Self::Acc>) -> &'a [Self::Acc] {
        match Self::as_acc(values) {
            Some(values) => values,
            None => {
                buffer.clear();
                buffer.extend(values.iter().map(|x| x.widen()));
                buffer
            }
        }
    }
}

macro_rules! impl_element {
    ($type:ty as $acc:ty, $widen:expr, $narrow:expr, $load:expr, $load_partial:expr, $as_acc:expr, $to_bf16:expr) => {
        impl Element for $type {
            type Acc = $acc;
            const IS_ACC: bool = size_of::<$type>() == size_of::<$acc>();
            #[inline(always)]
            /// Returns the number as `Acc`, exactly.
            fn widen(self) -> $acc {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(value: $acc) -> Self {
                $narrow(value)
            }
            #[inline(always)]
            fn load<V: Vector<$acc>>(v: V, lanes: V::Lanes<$type>) -> V::Reg {
                $load(v, lanes)
            }
            #[inline(always)]
            fn load_partial<V: Vector<$acc>>(v: V, values: &[$type]) -> V::Reg {
                $load_partial(v, values)
            }
            fn as_acc(values: &[Self]) -> Option<&[$acc]> {
                $as_acc(values)
            }
        }

        impl ToBf16 for $type {
            #[inline(always)]
            fn to_bf16(self) -> bf16 {
                $to_bf16(self)
            }
        }
    };
}

impl_element!(f32 as f32, identity, identity, V::load, V::load_partial, Some, rounding::bf16);
impl_element!(f64 as f64, identity, identity, V::load, V::load_partial, Some, bf16::from_f64);
impl_element!(f16 as f32, rounding::widened_f16, f16::from_f32, load, load_partial, |_| None, |x| rounding::bf16(
    rounding::widened_f16(x)
));
impl_element!(bf16 as f32, rounding::widened, rounding::bf16, load, load_partial, |_| None, identity);

/// Loads a register of half-precision numbers.
#[inline(always)]
fn load<T: Element, V: Vector<T::Acc>>(v: V, lanes: V::Lanes<T>) -> V::Reg {
    load_partial(v, lanes.as_ref())
}

/// Loads half-precision numbers, at most a register of them.
#[inline(always)]
fn load_partial<T: Element, V: Vector<T::Acc>>(v: V, values: &[T]) -> V::Reg {
    let mut wide = V::filled(T::Acc::zero());
    for (wide, x) in wide.as_mut().iter_mut().zip(values) {
        *wide = x.widen();
    }
    v.load(wide)
}

/// Evaluates `$call` with `$T` as the Rust type of `$dtype`, which is one of the four.
macro_rules! with_type {
    ($dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            candle_core::DType::F64 => {
                type $T = f64;
                $call
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $call
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $call
            }
            _ => {
                type $T = f32;
                $call
            }
        }
    };
}
pub(crate) use with_type;

/// Calls `f` with the elements of a contiguous tensor.
pub(crate) fn with_slice<T: Element, O>(
    argument: &'static str,
    tensor: &Tensor,
    f: impl FnOnce(&[T]) -> Result<O>,
) -> Result<O> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        let got = format!("{:?}", tensor.device().location());
        return Err(Error::Device { argument, expected: "Cpu".into(), got });
    };
    match layout.contiguous_offsets() {
        Some((from, to)) => f(&T::cpu_storage_as_slice(storage)?[from..to]),
        None => Err(Error::shape(argument, "contiguous", layout.dims())),
    }
}

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
