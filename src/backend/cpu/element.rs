//! The storage dtypes: what is kept as `f16`, `bf16` or `f32` is computed in `f32`, and `f64` in `f64`.

use std::ops::Range;

use candle_core::WithDType;
use half::{bf16, f16};

use super::simd::Float;

/// A floating-point type that tensors are stored in.
pub(crate) trait Element: WithDType {
    /// The type that it is computed and accumulated in.
    type Acc: Float;
    /// Whether `Acc` is `Self`, so that nothing needs to be converted.
    const IS_ACC: bool;

    fn widen(self) -> Self::Acc;
    fn narrow(value: Self::Acc) -> Self;

    /// The slice itself where that is already of the type to compute in.
    fn as_acc(values: &[Self]) -> Option<&[Self::Acc]>;

    /// The values to compute with: the slice itself, or a copy in `buffer`.
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

    /// Rows and columns of a matrix with rows of `d` elements, and the distance from row to row: a part of the slice
    /// itself, or a copy in `buffer`.
    fn widen_block<'a>(
        matrix: &'a [Self],
        d: usize,
        rows: Range<usize>,
        columns: Range<usize>,
        buffer: &'a mut Vec<Self::Acc>,
    ) -> (&'a [Self::Acc], usize) {
        match Self::as_acc(&matrix[rows.start * d + columns.start..]) {
            Some(values) => (values, d),
            None => {
                buffer.clear();
                for row in matrix[rows.start * d..rows.end * d].chunks_exact(d) {
                    buffer.extend(row[columns.clone()].iter().map(|x| x.widen()));
                }
                (buffer, columns.len())
            }
        }
    }
}

macro_rules! impl_element {
    ($type:ty, computes in itself) => {
        impl Element for $type {
            type Acc = $type;
            const IS_ACC: bool = true;
            fn widen(self) -> Self {
                self
            }
            fn narrow(value: Self) -> Self {
                value
            }
            fn as_acc(values: &[Self]) -> Option<&[Self]> {
                Some(values)
            }
        }
    };
    ($type:ty, computes in f32) => {
        impl Element for $type {
            type Acc = f32;
            const IS_ACC: bool = false;
            fn widen(self) -> f32 {
                self.to_f32()
            }
            fn narrow(value: f32) -> Self {
                Self::from_f32(value)
            }
            fn as_acc(_: &[Self]) -> Option<&[f32]> {
                None
            }
        }
    };
}

impl_element!(f32, computes in itself);
impl_element!(f64, computes in itself);
impl_element!(f16, computes in f32);
impl_element!(bf16, computes in f32);
