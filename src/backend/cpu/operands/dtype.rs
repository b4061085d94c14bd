//! The element types of tensors, and the slices of their elements. Numbers in `f16`, `bf16` and `f32` are computed in
//! `f32`, those in `f64` in `f64`; gradients are rounded to the type of their operand.
//!
//! Most code is generic over the type of the computation, an [`Accumulator`], and takes operands as they are
//! [`Stored`]. Only what reads each element is generic over the stored type, an [`Element`].

use std::convert::identity;
use std::ops::{Deref, Range};

use candle_core::{DType, Device, Storage, Tensor, WithDType};
use half::{bf16, f16};
use num_traits::Zero;

use super::blocks::BlockRows;
use crate::backend::cpu::memory::{untouched_zeros, zeros, BufferElement};
use crate::backend::cpu::pages::Finished;
use crate::backend::cpu::tiles::rounding::{self, ToBf16};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};
use crate::backend::parallel;
use crate::error::{Error, Result};
use crate::tensors::autograd::take_values;

/// A floating-point type that tensors are stored in.
pub(crate) trait Element: WithDType + ToBf16 + BufferElement {
    /// The type for computation and accumulation.
    type Acc: Accumulator;

    /// Returns the number as `Acc`, exactly.
    fn widen(self) -> Self::Acc;
    /// Returns the nearest number of this type.
    fn narrow(value: Self::Acc) -> Self;

    /// Loads a register of these numbers, widened.
    fn load<V: Vector<Self::Acc>>(v: V, lanes: V::Lanes<Self>) -> V::Reg;

    /// Loads fewer numbers than fill a register, widened; the other lanes become zero.
    fn load_partial<V: Vector<Self::Acc>>(v: V, values: &[Self]) -> V::Reg;
}

/// A type for computation and accumulation.
pub(crate) trait Accumulator: Float + Element<Acc = Self> {
    /// The type of half precision with five bits of exponent that is computed in this type. Nothing in half precision
    /// is computed in f64, for which this is f64 itself.
    type F16: Element<Acc = Self>;
    /// As [`Self::F16`], with eight bits of exponent.
    type Bf16: Element<Acc = Self>;

    /// Returns values of a quantised matrix, if they are computed in this type, which is f32.
    fn from_f32_values(values: Stored<'_, f32>) -> Option<Stored<'_, Self>>;

    /// As [`Self::from_f32_values`], for rows in blocks.
    fn from_f32_blocks(rows: &dyn BlockRows<f32>) -> Option<&dyn BlockRows<Self>>;
}

impl Accumulator for f32 {
    type F16 = f16;
    type Bf16 = bf16;

    fn from_f32_values(values: Stored<'_, f32>) -> Option<Stored<'_, f32>> {
        Some(values)
    }

    fn from_f32_blocks(rows: &dyn BlockRows<f32>) -> Option<&dyn BlockRows<f32>> {
        Some(rows)
    }
}

impl Accumulator for f64 {
    type F16 = f64;
    type Bf16 = f64;

    fn from_f32_values(_: Stored<'_, f32>) -> Option<Stored<'_, f64>> {
        None
    }

    fn from_f32_blocks(_: &dyn BlockRows<f32>) -> Option<&dyn BlockRows<f64>> {
        None
    }
}

/// The elements of an operand that is computed in `F`, as they are stored.
#[derive(Clone, Copy)]
pub(crate) enum Stored<'a, F: Accumulator> {
    /// In `F` itself.
    Wide(&'a [F]),
    F16(&'a [F::F16]),
    Bf16(&'a [F::Bf16]),
}

/// Evaluates `$call` with `$values` as the slice of stored elements, in each of the types.
macro_rules! with_values {
    ($stored:expr, $values:ident => $call:expr) => {
        match $stored {
            $crate::backend::cpu::operands::dtype::Stored::Wide($values) => $call,
            $crate::backend::cpu::operands::dtype::Stored::F16($values) => $call,
            $crate::backend::cpu::operands::dtype::Stored::Bf16($values) => $call,
        }
    };
}
pub(crate) use with_values;

impl<'a, F: Accumulator> Stored<'a, F> {
    /// Returns some of the elements.
    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Stored::Wide(values) => Stored::Wide(&values[range]),
            Stored::F16(values) => Stored::F16(&values[range]),
            Stored::Bf16(values) => Stored::Bf16(&values[range]),
        }
    }

    /// Returns the elements themselves if they are stored in `F`.
    pub(crate) fn wide(self) -> Option<&'a [F]> {
        match self {
            Stored::Wide(values) => Some(values),
            _ => None,
        }
    }

    /// Returns the elements in `F`: themselves, or a copy in `buffer`.
    pub(crate) fn widened<'b>(self, buffer: &'b mut Vec<F>) -> &'b [F]
    where
        'a: 'b,
    {
        match self.wide() {
            Some(values) => values,
            None => {
                buffer.clear();
                self.append_to(buffer);
                buffer
            }
        }
    }

    /// Appends the elements in `F`.
    pub(crate) fn append_to(self, to: &mut Vec<F>) {
        with_values!(self, values => to.extend(values.iter().map(|x| x.widen())))
    }
}

macro_rules! impl_element {
    ($type:ty as $acc:ty, $widen:expr, $narrow:expr, $load:expr, $load_partial:expr, $to_bf16:expr) => {
        impl Element for $type {
            type Acc = $acc;
            #[inline(always)]
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
        }

        impl ToBf16 for $type {
            #[inline(always)]
            fn to_bf16(self) -> bf16 {
                $to_bf16(self)
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $widen(self) as f32
            }
        }
    };
}

impl_element!(f32 as f32, identity, identity, V::load, V::load_partial, rounding::bf16);
impl_element!(f64 as f64, identity, identity, V::load, V::load_partial, bf16::from_f64);
impl_element!(f16 as f32, rounding::widened_f16, f16::from_f32, load, load_partial, |x| rounding::bf16(
    rounding::widened_f16(x)
));
impl_element!(bf16 as f32, rounding::widened, rounding::bf16, load, load_partial, identity);

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

/// Evaluates `$call` with `$F` as the type in which operands of `$dtype` are computed.
macro_rules! with_accumulator {
    ($dtype:expr, $F:ident => $call:expr) => {
        match $dtype {
            candle_core::DType::F64 => {
                type $F = f64;
                $call
            }
            _ => {
                type $F = f32;
                $call
            }
        }
    };
}
pub(crate) use with_accumulator;

/// The elements of a contiguous tensor, locked for reading.
pub(crate) struct Locked<G> {
    argument: &'static str,
    storage: G,
    elements: Range<usize>,
}

/// Locks the storage of the tensor that `argument` names.
pub(crate) fn locked<'a>(
    argument: &'static str,
    tensor: &'a Tensor,
) -> Result<Locked<impl Deref<Target = Storage> + use<'a>>> {
    let (storage, layout) = tensor.storage_and_layout();
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(Locked { argument, storage, elements: from..to }),
        None => Err(Error::shape(argument, "contiguous", layout.dims())),
    }
}

impl<G: Deref<Target = Storage>> Locked<G> {
    /// Returns the elements, which have this type.
    pub(crate) fn values<T: WithDType>(&self) -> Result<&[T]> {
        let Storage::Cpu(storage) = &*self.storage else {
            let got = format!("{:?}", self.storage.device().location());
            return Err(Error::Device { argument: self.argument, expected: "Cpu".into(), got });
        };
        Ok(&T::cpu_storage_as_slice(storage)?[self.elements.clone()])
    }

    /// Returns the elements, which are computed in `F`.
    pub(crate) fn stored<F: Accumulator>(&self) -> Result<Stored<'_, F>> {
        Ok(match self.storage.dtype() {
            DType::F16 => Stored::F16(self.values()?),
            DType::BF16 => Stored::Bf16(self.values()?),
            _ => Stored::Wide(self.values()?),
        })
    }
}

/// Calls `f` with the elements of a contiguous tensor.
pub(crate) fn with_slice<T: Element, O>(
    argument: &'static str,
    tensor: &Tensor,
    f: impl FnOnce(&[T]) -> Result<O>,
) -> Result<O> {
    f(locked(argument, tensor)?.values()?)
}

/// The number of elements that a thread converts at a time.
const BLOCK: usize = 1 << 16;

/// Converts a gradient, which nothing else may refer to, to the dtype of its operand.
pub(crate) fn rounded(gradient: Tensor, dtype: DType) -> Result<Tensor> {
    match (gradient.dtype(), dtype) {
        (DType::F32, DType::BF16) => rounded_to::<bf16>(gradient),
        (DType::F32, DType::F16) => rounded_to::<f16>(gradient),
        _ => Ok(gradient.to_dtype(dtype)?),
    }
}

/// Rounds a tensor in f32, which nothing else may refer to; the result is contiguous, and takes pages as the system has
/// those of the tensor back.
pub(crate) fn rounded_to<T: Element<Acc = f32>>(tensor: Tensor) -> Result<Tensor> {
    let isa = Isa::detected()?;
    let mut from: Vec<f32> = take_values(&tensor)?;
    let mut values: Vec<T> = untouched_zeros(from.len());
    let finished = Finished::new(&mut from);
    let blocks = values.chunks_mut(BLOCK).zip(from.chunks_mut(BLOCK));
    parallel::for_each(blocks, |(to, from)| {
        f32::dispatch(isa, NarrowRow { from, to });
        // SAFETY: the blocks are disjoint, and this was the last use of their numbers.
        unsafe { finished.finish(from) };
    });
    Ok(Tensor::from_vec(values, tensor.shape(), &Device::Cpu)?)
}

/// Widens a contiguous tensor to f32.
pub(crate) fn widened<T: Element<Acc = f32>>(tensor: &Tensor) -> Result<Tensor> {
    let values = with_slice("tensor", tensor, |from: &[T]| {
        let mut values: Vec<f32> = zeros(from.len());
        let blocks = values.chunks_mut(BLOCK).zip(from.chunks(BLOCK));
        parallel::for_each(blocks, |(to, from)| to.iter_mut().zip(from).for_each(|(to, x)| *to = x.widen()));
        Ok(values)
    })?;
    Ok(Tensor::from_vec(values, tensor.shape(), &Device::Cpu)?)
}

/// Computes `to[..] = from[..]`, rounded.
pub(crate) struct NarrowRow<'a, T: Element> {
    pub(crate) from: &'a [T::Acc],
    pub(crate) to: &'a mut [T],
}

impl<T: Element> Kernel<T::Acc> for NarrowRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<T::Acc>>(self, _: V) {
        for (to, &x) in self.to.iter_mut().zip(self.from) {
            *to = T::narrow(x);
        }
    }
}
