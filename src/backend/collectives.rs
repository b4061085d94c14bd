//! The operations that the ranks of a distributed program run together, on numbers of the host or on tensors.

use std::fmt;

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};

/// Numbers that ranks add up or send.
///
/// # Examples
///
/// ```
/// use mos_head::distributed::Numbers;
///
/// assert_eq!(Numbers::F32(&mut [1.0, 2.0, 3.0]).bytes(), 12);
/// ```
#[derive(Debug)]
pub enum Numbers<'a> {
    /// Numbers in single precision.
    F32(&'a mut [f32]),
    /// Numbers in double precision.
    F64(&'a mut [f64]),
}

impl Numbers<'_> {
    /// Returns how many bytes the numbers take.
    pub fn bytes(&self) -> usize {
        match self {
            Numbers::F32(numbers) => size_of_val(*numbers),
            Numbers::F64(numbers) => size_of_val(*numbers),
        }
    }
}

/// The collective operations of the ranks of a distributed program, each a process with a shard of the vocabulary
/// ([`VocabShard`](crate::distributed::VocabShard)). All ranks call the same operations with as many numbers in the
/// same order; an operation returns when the others have called it. Operations follow one another, but not all are
/// called by the same thread.
///
/// The feature `mpi` has `Mpi`, an engine for MPI; the feature `nccl` has `Nccl`, an engine for NVIDIA's GPUs. Another
/// engine implements this trait.
///
/// # Examples
///
/// A single rank, with which a program for several also runs as one process:
///
/// ```
/// use std::sync::Arc;
///
/// use candle_core::{Device, Tensor};
/// use mos_head::distributed::{Collectives, Numbers, VocabShard};
/// use mos_head::{Distributions, LossOptions, Mixture, Result};
///
/// #[derive(Debug)]
/// struct Alone;
///
/// impl Collectives for Alone {
///     fn rank(&self) -> usize {
///         0
///     }
///
///     fn ranks(&self) -> usize {
///         1
///     }
///
///     fn all_reduce_sum(&self, _: Numbers<'_>) -> Result<()> {
///         Ok(()) // the sum over one rank
///     }
///
///     fn all_gather(&self, numbers: &[f64]) -> Result<Vec<f64>> {
///         Ok(numbers.to_vec())
///     }
///
///     fn broadcast(&self, _: Numbers<'_>, _root: usize) -> Result<()> {
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let shard = VocabShard::new(Arc::new(Alone), 100)?;
/// let weight = Tensor::randn(0f32, 1., (shard.range().len(), 8), &Device::Cpu)?; // the rows of this rank
/// let contexts = Tensor::randn(0f32, 1., (3, 1, 8), &Device::Cpu)?; // the same on every rank
/// let mixture = Mixture::new(&contexts, None, &weight, None)?;
/// let targets = Tensor::new(&[1u32, 2, 3], &Device::Cpu)?;
/// let options = LossOptions::evaluation();
/// let (sum, count) = mixture.vocab_parallel(&shard).loss(&targets, &options)?.sum_and_count()?;
/// let (expected, _) = mixture.loss(&targets, &options)?.sum_and_count()?;
/// assert!(count == 3.0 && (sum - expected).abs() < 1e-4);
/// # Ok(())
/// # }
/// ```
pub trait Collectives: fmt::Debug + Send + Sync {
    /// Returns the number of this rank, from 0 on.
    fn rank(&self) -> usize;

    /// Returns how many ranks there are.
    fn ranks(&self) -> usize;

    /// Replaces each number by the sum over all ranks. Every rank gets the same bits.
    ///
    /// # Errors
    ///
    /// If the engine fails.
    fn all_reduce_sum(&self, numbers: Numbers<'_>) -> Result<()>;

    /// Computes the sum of a tensor over all ranks. Every rank gets the same bits. An engine that adds up in the memory
    /// of a device overrides it; otherwise the numbers are copied to the host and back.
    ///
    /// # Shapes
    ///
    /// - tensor: any shape, the same on every rank; f32 or f64
    /// - returns the shape and the dtype of `tensor`, on its device
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

    /// Returns the numbers of all ranks, one rank after the other.
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

/// Checks that there is a rank of this number.
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) fn check_rank(argument: &'static str, rank: usize, ranks: usize) -> Result<()> {
    if rank < ranks {
        Ok(())
    } else {
        Err(Error::config(argument, format!("a rank below {ranks}"), rank))
    }
}
