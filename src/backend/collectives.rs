//! What the ranks of a distributed program compute together.

use std::fmt;

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};

/// Numbers that ranks add up or send.
#[derive(Debug)]
pub enum Numbers<'a> {
    /// In single precision.
    F32(&'a mut [f32]),
    /// In double precision.
    F64(&'a mut [f64]),
}

impl Numbers<'_> {
    /// How many bytes the numbers take.
    pub fn bytes(&self) -> usize {
        match self {
            Numbers::F32(numbers) => size_of_val(*numbers),
            Numbers::F64(numbers) => size_of_val(*numbers),
        }
    }
}

/// The collective operations of the ranks of a distributed program, each a process with a shard of the vocabulary
/// ([`VocabParallel`](crate::VocabParallel)). All ranks call the same operations with as many numbers in the same order;
/// an operation returns when the others have called it. Operations follow one another, but not all are called by the same
/// thread.
///
/// With the feature `mpi`, `Mpi` is one, for MPI; with `nccl`, `Nccl`, for GPUs of NVIDIA's. Another engine implements this
/// trait.
pub trait Collectives: fmt::Debug + Send + Sync {
    /// The number of this rank, from 0 on.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn ranks(&self) -> usize;

    /// Replaces each number by the sum over all ranks. Every rank gets the same bits.
    ///
    /// # Errors
    ///
    /// If the engine fails.
    fn all_reduce_sum(&self, numbers: Numbers<'_>) -> Result<()>;

    /// The sum of a tensor over all ranks, f32 or f64. Every rank gets the same bits. An engine that adds up in the memory
    /// of a device overrides it; otherwise the numbers are copied to the host and back.
    ///
    /// # Errors
    ///
    /// If the dtype is another one, or the engine fails.
    fn all_reduce_sum_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        let (shape, device) = (tensor.shape(), tensor.device());
        let flat = tensor.flatten_all()?;
        match tensor.dtype() {
            DType::F32 => {
                let mut numbers = flat.to_vec1()?;
                self.all_reduce_sum(Numbers::F32(&mut numbers))?;
                Ok(Tensor::from_vec(numbers, shape, device)?)
            }
            DType::F64 => {
                let mut numbers = flat.to_vec1()?;
                self.all_reduce_sum(Numbers::F64(&mut numbers))?;
                Ok(Tensor::from_vec(numbers, shape, device)?)
            }
            got => Err(Error::DType { argument: "tensor", expected: "f32 or f64".into(), got }),
        }
    }

    /// The numbers of all ranks, one rank after the other.
    ///
    /// # Errors
    ///
    /// If the engine fails.
    fn all_gather(&self, numbers: &[f64]) -> Result<Vec<f64>>;

    /// Replaces the numbers by those of the rank `root`.
    ///
    /// # Errors
    ///
    /// If the engine fails, or there is no such rank.
    fn broadcast(&self, numbers: Numbers<'_>, root: usize) -> Result<()>;
}

/// Checks the number of a rank.
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) fn check_rank(argument: &'static str, rank: usize, ranks: usize) -> Result<()> {
    match rank < ranks {
        true => Ok(()),
        false => Err(Error::config(argument, format!("a rank below {ranks}"), rank)),
    }
}
