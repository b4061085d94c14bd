//! The decoder's weight as an operand: a tensor, or the rows of a quantised one.

use std::sync::Arc;

use candle_core::Tensor;

use crate::backend::quantised::QuantisedMatrix;
use crate::error::Result;
use crate::tensors::id_lists::matrix_rows;

/// The decoder's weight, `[vocab, d]`.
#[derive(Clone, Debug)]
pub(crate) enum Weight {
    /// A contiguous tensor, or the transpose of one.
    Dense(Tensor),
    /// Rows that are read where a file's tensor lies, in f32 on the CPU. They are constants.
    Quantised(QuantisedMatrix),
}

impl Weight {
    /// Returns the shape.
    pub(crate) fn dims(&self) -> &[usize] {
        match self {
            Weight::Dense(weight) => weight.dims(),
            Weight::Quantised(matrix) => matrix.dims(),
        }
    }

    /// Returns the numbers of rows and of columns.
    pub(crate) fn dims2(&self) -> Result<(usize, usize)> {
        match self {
            Weight::Dense(weight) => Ok(weight.dims2()?),
            Weight::Quantised(matrix) => Ok((matrix.dims()[0], matrix.dims()[1])),
        }
    }

    /// Returns the weight as a tensor. Quantised rows, which no other device than the CPU reads, are an error.
    pub(crate) fn tensor(&self) -> Result<&Tensor> {
        match self {
            Weight::Dense(weight) => Ok(weight),
            Weight::Quantised(_) => Err(QuantisedMatrix::unsupported_device()),
        }
    }

    /// Returns the weight as a tensor: itself, or a copy of all rows in f32.
    pub(crate) fn dequantised(&self) -> Result<Tensor> {
        match self {
            Weight::Dense(weight) => Ok(weight.clone()),
            Weight::Quantised(matrix) => matrix.dequantised(),
        }
    }

    /// Returns the weight if it is a tensor. Quantised rows are no operand of the graph, and have no gradient.
    pub(crate) fn dense(&self) -> Option<&Tensor> {
        match self {
            Weight::Dense(weight) => Some(weight),
            Weight::Quantised(_) => None,
        }
    }

    /// Returns the weight if it is a variable.
    pub(crate) fn variable(&self) -> Option<Tensor> {
        self.dense().filter(|weight| weight.is_variable()).cloned()
    }

    /// Returns whether the weight depends on a variable.
    pub(crate) fn track_op(&self) -> bool {
        self.dense().is_some_and(Tensor::track_op)
    }

    /// Detaches the weight from the graph.
    pub(crate) fn detach(&self) -> Self {
        match self {
            Weight::Dense(weight) => Weight::Dense(weight.detach()),
            Weight::Quantised(matrix) => Weight::Quantised(matrix.clone()),
        }
    }

    /// Returns whether another weight is the same tensor, not only of the same numbers.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Weight::Dense(weight), Weight::Dense(other)) => weight.id() == other.id(),
            (Weight::Quantised(matrix), Weight::Quantised(other)) => Arc::ptr_eq(matrix.tensor(), other.tensor()),
            _ => false,
        }
    }

    /// Returns whether the rows are quantised.
    pub(crate) fn is_quantised(&self) -> bool {
        matches!(self, Weight::Quantised(_))
    }

    /// Copies the rows of these ids `[n]`, differentiably if the weight is a tensor.
    pub(crate) fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        match self {
            Weight::Dense(weight) => matrix_rows(weight, ids),
            Weight::Quantised(matrix) => matrix.rows(ids),
        }
    }

    /// Returns a tensor as it is stored, and whether it is stored as its transpose `[d, vocab]`. Quantised rows are
    /// none.
    pub(crate) fn stored(&self) -> Result<Option<(Tensor, bool)>> {
        Ok(match self {
            Weight::Dense(weight) if weight.is_contiguous() => Some((weight.clone(), false)),
            Weight::Dense(weight) => Some((weight.t()?, true)),
            Weight::Quantised(_) => None,
        })
    }
}
