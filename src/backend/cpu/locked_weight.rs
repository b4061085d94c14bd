//! The decoder's weight, locked for reading: a tensor's elements, or a quantised matrix where it lies.

use std::ops::Deref;

use candle_core::quantized::GgmlDType;
use candle_core::{Storage, Tensor};
use half::{bf16, f16};

use super::operands::decoder::MatrixValues;
use super::operands::dtype::{locked, Accumulator, Locked, Stored};
use super::quantised::blocks::Blocks;
use super::quantised::kind::BlockType;
use super::quantised::rows::QuantisedRows;
use super::vector::simd::Isa;
use crate::backend::quantised::QuantisedMatrix;
use crate::backend::weight::Weight;
use crate::error::{Error, Result};

/// The decoder's weight.
pub(crate) enum LockedWeight<'a, G> {
    Dense { values: Locked<G>, is_transposed: bool },
    Quantised(QuantisedValues<'a>),
}

impl<G: Deref<Target = Storage>> LockedWeight<'_, G> {
    /// Returns the values, which are computed in `F`.
    pub(crate) fn values<F: Accumulator>(&self) -> Result<MatrixValues<'_, F>> {
        match self {
            LockedWeight::Dense { values, is_transposed } => Ok(MatrixValues::stored(values.stored()?, *is_transposed)),
            LockedWeight::Quantised(matrix) => matrix.values(),
        }
    }
}

/// Locks a weight; `dense` is it as it is stored, and whether that is its transpose, if it is a tensor.
pub(crate) fn locked_weight<'a>(
    weight: &'a Weight,
    dense: Option<&'a (Tensor, bool)>,
    isa: Isa,
) -> Result<LockedWeight<'a, impl Deref<Target = Storage> + use<'a>>> {
    Ok(match (weight, dense) {
        (Weight::Quantised(matrix), _) => LockedWeight::Quantised(QuantisedValues::new(matrix, isa)?),
        (Weight::Dense(weight), None) => {
            LockedWeight::Dense { values: locked("weight", weight)?, is_transposed: false }
        }
        (Weight::Dense(_), Some((stored, is_transposed))) => {
            LockedWeight::Dense { values: locked("weight", stored)?, is_transposed: *is_transposed }
        }
    })
}

/// The values of a quantised matrix.
pub(crate) enum QuantisedValues<'a> {
    /// In f16, bf16 or f32.
    Stored(Stored<'a, f32>),
    Blocks(QuantisedRows<'a>),
}

impl<'a> QuantisedValues<'a> {
    /// Takes the bytes of a matrix as what they are.
    pub(crate) fn new(matrix: &'a QuantisedMatrix, isa: Isa) -> Result<Self> {
        let (dtype, bytes, [_, width]) = (matrix.tensor().dtype(), matrix.bytes()?, *matrix.dims());
        let stored = match dtype {
            GgmlDType::F32 => numbers::<f32>(bytes).map(Stored::Wide),
            GgmlDType::F16 => numbers::<f16>(bytes).map(Stored::F16),
            GgmlDType::BF16 => numbers::<bf16>(bytes).map(Stored::Bf16),
            _ => None,
        };
        if let Some(stored) = stored {
            return Ok(QuantisedValues::Stored(stored));
        }
        match BlockType::new(dtype) {
            Some(kind) => Ok(QuantisedValues::Blocks(QuantisedRows { blocks: Blocks::new(kind, bytes, width), isa })),
            None => Err(Error::config("decoder.weight", "a type with kernels, aligned", format!("{dtype:?}"))),
        }
    }

    /// Returns the values, which are computed in `F`. No other type than f32 computes them.
    pub(crate) fn values<F: Accumulator>(&self) -> Result<MatrixValues<'_, F>> {
        let values = match self {
            QuantisedValues::Stored(values) => F::from_f32_values(*values).map(MatrixValues::Rows),
            QuantisedValues::Blocks(rows) => F::from_f32_blocks(rows).map(MatrixValues::Blocks),
        };
        values.ok_or(Error::DType { argument: "contexts", expected: "f32, as quantised rows".into(), got: F::DTYPE })
    }
}

/// A type of numbers.
///
/// # Safety
///
/// Any bits are a value of the type.
unsafe trait Plain: Copy {}
// SAFETY: any 32 bits are a number.
unsafe impl Plain for f32 {}
// SAFETY: any 16 bits are a number.
unsafe impl Plain for f16 {}
// SAFETY: any 16 bits are a number.
unsafe impl Plain for bf16 {}

/// Returns bytes as numbers, if they are aligned and whole.
fn numbers<T: Plain>(bytes: &[u8]) -> Option<&[T]> {
    // SAFETY: any bits are a number of a plain type.
    match unsafe { bytes.align_to::<T>() } {
        ([], numbers, []) => Some(numbers),
        _ => None,
    }
}
