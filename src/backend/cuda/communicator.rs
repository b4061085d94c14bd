//! NCCL's communicator of a rank, on a stream of its own.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits};
use candle_core::cuda_backend::cudarc::nccl::result::{NcclError, NcclStatus};
use candle_core::cuda_backend::cudarc::nccl::{Comm, Id, NcclType, ReduceOp};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Storage, Tensor};

use crate::error::{Error, Result};

/// A rank's communicator, by which ranks exchange numbers.
pub(crate) struct Communicator {
    rank: usize,
    ranks: usize,
    ordinal: usize,
    /// The handle, which one thread uses at a time, since NCCL serves one thread at a time.
    handle: Mutex<Handle>,
}

/// NCCL's communicator and its stream.
struct Handle(Comm);

// SAFETY: a communicator is bound to a GPU, not to a thread. Calls bind the GPU's context to their thread first.
unsafe impl Send for Handle {}

impl Drop for Handle {
    /// Waits until all operations have ended: [`Comm`] ends with an abort, which would stop them.
    fn drop(&mut self) {
        // Without a GPU that answers, there is nothing to wait for.
        let _ = self.0.stream().synchronize();
    }
}

/// The number of bytes of [`Communicator::new_id`].
const ID_BYTES: usize = 128;

impl Communicator {
    /// Makes an id for new communicators. One rank makes it and sends it to the others; all of them give it to
    /// [`Communicator::new`].
    pub(crate) fn new_id() -> Result<[u8; ID_BYTES]> {
        let id = check_nccl(Id::new())?;
        Ok(id.internal().map(|byte| byte as u8))
    }

    /// The communicator of one rank. Waits for all ranks.
    pub(crate) fn new(device: &CudaDevice, rank: usize, ranks: usize, id: [u8; ID_BYTES]) -> Result<Self> {
        // With one stream, NCCL's operations have one order, whatever the threads and streams of their operands are.
        let stream = device.cuda_stream().context().new_stream().w()?;
        stream.context().bind_to_thread().w()?;
        let ordinal = stream.context().ordinal();
        let comm = check_nccl(Comm::from_rank(stream, rank, ranks, Id::uninit(id.map(|byte| byte as _))))?;
        Ok(Communicator { rank, ranks, ordinal, handle: Mutex::new(Handle(comm)) })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    /// Waits for the handle, and binds its context to this thread.
    fn lock(&self) -> Result<MutexGuard<'_, Handle>> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        handle.0.context().bind_to_thread().w()?;
        Ok(handle)
    }

    /// Replaces numbers of the host by their sums over all ranks.
    pub(crate) fn add_up<T: DeviceRepr + NcclType>(&self, numbers: &mut [T]) -> Result<()> {
        self.exchange_copy(numbers, |comm, copy| comm.all_reduce_in_place(copy, &ReduceOp::Sum))
    }

    /// Replaces numbers of the host by the ones of the rank `root`.
    pub(crate) fn broadcast<T: DeviceRepr + NcclType>(&self, numbers: &mut [T], root: usize) -> Result<()> {
        self.exchange_copy(numbers, |comm, copy| comm.broadcast_in_place(copy, root as i32))
    }

    /// Copies numbers of the host to the device, lets NCCL change the copy, and copies it back.
    fn exchange_copy<T: DeviceRepr>(
        &self,
        numbers: &mut [T],
        call: impl FnOnce(&Comm, &mut CudaSlice<T>) -> std::result::Result<NcclStatus, NcclError>,
    ) -> Result<()> {
        // CUDA has no memory without bytes.
        if numbers.is_empty() {
            return Ok(());
        }
        let Handle(comm) = &*self.lock()?;
        let mut copy = comm.stream().clone_htod(numbers).w()?;
        check_nccl(call(comm, &mut copy))?;
        comm.stream().memcpy_dtoh(&copy, numbers).w()?;
        Ok(comm.stream().synchronize().w()?)
    }

    /// Returns the numbers of all ranks, one rank after the other.
    pub(crate) fn all_gather(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        if numbers.is_empty() {
            return Ok(Vec::new());
        }
        let Handle(comm) = &*self.lock()?;
        let sent = comm.stream().clone_htod(numbers).w()?;
        let mut received = comm.stream().alloc_zeros::<f64>(numbers.len() * self.ranks).w()?;
        check_nccl(comm.all_gather(&sent, &mut received))?;
        let all = comm.stream().clone_dtoh(&received).w()?;
        comm.stream().synchronize().w()?;
        Ok(all)
    }

    /// Returns the sum over all ranks of a tensor in the memory of the communicator's GPU. The host does not wait for
    /// it.
    pub(crate) fn sum(&self, tensor: &Tensor) -> Result<Tensor> {
        let tensor = tensor.contiguous()?;
        if tensor.elem_count() == 0 {
            return Ok(tensor);
        }
        match tensor.dtype() {
            DType::F32 => self.sum_typed::<f32>(&tensor),
            DType::F64 => self.sum_typed::<f64>(&tensor),
            got => Err(Error::DType { argument: "tensor", expected: "f32 or f64".into(), got }),
        }
    }

    /// [`Communicator::sum`] of a contiguous tensor with elements of this type.
    fn sum_typed<T: CudaDType + DeviceRepr + NcclType + ValidAsZeroBits>(&self, tensor: &Tensor) -> Result<Tensor> {
        let expected = || Error::Device {
            argument: "tensor",
            expected: format!("Cuda {{ gpu_id: {} }}", self.ordinal),
            got: format!("{:?}", tensor.device().location()),
        };
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { return Err(expected()) };
        let device: &CudaDevice = &storage.device;
        // For candle's default device, this is the stream of this thread.
        let stream = device.cuda_stream();
        if stream.context().ordinal() != self.ordinal {
            return Err(expected());
        }
        let (start, n) = (layout.start_offset(), tensor.elem_count());
        let slice = storage.as_cuda_slice::<T>()?.slice(start..start + n);
        let mut sum = stream.alloc_zeros::<T>(n).w()?;
        let Handle(comm) = &*self.lock()?;
        order_after(&comm.stream(), &stream)?;
        check_nccl(comm.all_reduce(&slice, &mut sum, &ReduceOp::Sum))?;
        order_after(&stream, &comm.stream())?;
        let storage = Storage::Cuda(T::wrap_cuda_slice(sum, device.clone()));
        Ok(Tensor::from_storage(storage, tensor.shape(), BackpropOp::none(), false))
    }
}

/// Makes what the stream `later` is given from now on wait for what `earlier` has been given.
fn order_after(later: &CudaStream, earlier: &CudaStream) -> Result<()> {
    Ok(later.join(earlier).w()?)
}

/// Turns an error of NCCL into one of the crate, with its name.
fn check_nccl<T>(result: std::result::Result<T, NcclError>) -> Result<T> {
    result.map_err(|error| candle_core::Error::Cuda(format!("{:?}", error.0).into()).bt().into())
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} on GPU {}", self.rank, self.ranks, self.ordinal)
    }
}
