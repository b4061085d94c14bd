//! The dispatch of each operation to the backend of its operands' device: the CPU, or a GPU that this build has kernels
//! for.
//!
//! [`contract`] defines the operations of a backend, [`plan`] cuts the work into chunks, and [`schedule`] orders the
//! steps of a chunk. `cpu` and `gpu` implement them; `gpu` launches its kernels through `cuda` or `metal`. Each function
//! of this file is an operation of [`Backend`], which documents it.

pub(crate) mod agreement;
pub(crate) mod collectives;
pub(crate) mod contract;
mod cpu;
#[cfg(any(feature = "cuda", all(test, target_os = "linux")))]
mod cuda;
pub(crate) mod distribution;
pub(crate) mod divergence;
#[cfg(any(feature = "cuda", feature = "metal", all(test, target_os = "linux")))]
mod gpu;
#[cfg(any(feature = "metal", all(test, target_os = "linux")))]
mod metal;
pub(crate) mod objective;
pub(crate) mod operands;
pub(crate) mod plan;
pub(crate) mod ranking;
mod schedule;
pub(crate) mod shard;
mod shared_rows;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::tensors::id_lists::IdLists;
use contract::{Backend, LossResults};
use distribution::Visit;
use divergence::DivergenceTerms;
use objective::{Objective, Scored, Task};
use operands::Operands;
use plan::Planned;
use shard::VocabShard;

#[cfg(feature = "nccl")]
pub(crate) use cuda::Communicator;

/// Evaluates `$call` with `$backend` bound to the backend of `$device`.
macro_rules! on_device {
    ($device:expr, $backend:ident => $call:expr) => {
        match $device {
            Device::Cpu => {
                let $backend = cpu::Cpu;
                $call
            }
            #[cfg(feature = "cuda")]
            device @ Device::Cuda(_) => {
                let $backend = cuda::Cuda::from_device(device)?;
                $call
            }
            #[cfg(feature = "metal")]
            device @ Device::Metal(_) => {
                let $backend = metal::Metal::from_device(device)?;
                $call
            }
            #[allow(unreachable_patterns)] // unreachable with both features
            device => Err(unsupported(device)),
        }
    };
}

/// Returns the error for a device that this build has no kernels for.
fn unsupported(device: &Device) -> Error {
    let mut expected = vec!["Cpu"];
    expected.extend(cfg!(feature = "cuda").then_some("Cuda"));
    expected.extend(cfg!(feature = "metal").then_some("Metal"));
    Error::Device { argument: "hidden", expected: expected.join(" or "), got: format!("{:?}", device.location()) }
}

/// Defines functions of the names of [`Backend`]'s operations: each calls the operation of the backend of its first
/// argument's device, with the same arguments.
macro_rules! dispatch {
    ($(
        fn $operation:ident$(<$query:ident>)?($first:ident: $first_type:ty$(, $argument:ident: $type:ty)*) -> $result:ty;
    )*) => {$(
        #[doc = concat!("Calls [`Backend::", stringify!($operation), "`] of the backend of the first argument's device.")]
        pub(crate) fn $operation$(<$query: Visit>)?($first: $first_type$(, $argument: $type)*) -> Result<$result> {
            let device = $first.device().clone();
            on_device!(&device, backend => backend.$operation($first$(, $argument)*))
        }
    )*};
}

dispatch! {
    fn plan(operands: &Operands, task: Task, budget: Option<usize>) -> Planned;
    fn loss(planned: &Planned, objective: &Objective) -> LossResults;
    fn log_probs(planned: &Planned, dtype: DType) -> Tensor;
    fn scores(planned: &Planned, scored: &Scored) -> (Tensor, Option<Tensor>);
    fn divergence(log_probs: Tensor, log_teacher: &Tensor, terms: &DivergenceTerms) -> (Tensor, Tensor);
    fn top_k(operands: &Operands, k: usize) -> (Tensor, Tensor);
    fn visit<V>(operands: &Operands, query: &V) -> Vec<V::Output>;
    fn visit_shard<V>(operands: &Operands, shard: &VocabShard, query: &V) -> Vec<V::Output>;
    fn matmul(left: &Tensor, right: &Tensor) -> Tensor;
    fn list_products(contexts: &Tensor, matrix: &Tensor, lists: &IdLists) -> Tensor;
    fn list_product_gradients(
        contexts: &Tensor, matrix: &Tensor, lists: &IdLists, upstream: &Tensor, needed: [bool; 2]
    ) -> [Option<Tensor>; 2];
    fn scattered_rows(values: &Tensor, ids: &[u32], rows: usize) -> Tensor;
    fn rounded(gradient: &Tensor, dtype: DType) -> Tensor;
    fn bias_tanh(z: &Tensor, bias: &Tensor) -> Tensor;
    fn tanh_gradient(result: &Tensor, upstream: &Tensor) -> Tensor;
}
