//! A CUDA device: kernels, loaded once, and matrix products.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::cuda_backend::cudarc::cublas::{result as cublas, sys as cublas_sys, CudaBlas};
use candle_core::cuda_backend::cudarc::driver::{
    CudaModule, CudaStream, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{gemm_reduced_precision_f32, CudaDType, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Layout, Storage, Tensor};
use half::{bf16, f16};

use super::kind::KIND;
use crate::backend::gpu::arguments::{Argument, LogitsArgument, ObjectiveArgument, RowsArgument, ScoredArgument};
use crate::backend::gpu::device::{DeviceMatrix, DeviceProduct, Gpu, GpuKind, BLOCK, MEMORY_SHARE};
use crate::error::{Error, Result};

/// The kernels, compiled by `build.rs`.
static KERNELS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/mixture.fatbin"));

/// The state of a device and its stream on this thread, created once and cached.
#[derive(Clone)]
pub(in crate::backend) struct Cuda {
    stream: Arc<CudaStream>,
    kernels: Arc<CudaModule>,
    /// A handle of this crate, with other settings than candle's.
    blas: Rc<CudaBlas>,
    /// `[2]`: 0 and 1. Where the factor of a product is in device memory, so is that of what it accumulates to.
    constants: Tensor,
    /// The bytes of memory of the GPU.
    memory_bytes: usize,
}

impl Cuda {
    /// The cached state of this device, created on the first call of a thread.
    pub(in crate::backend) fn from_device(device: &Device) -> Result<Self> {
        match device {
            Device::Cuda(device) => Self::cached(device),
            device => Err(wrong_device(device)),
        }
    }

    /// The state of a device and its stream, created if this thread has none.
    fn cached(device: &CudaDevice) -> Result<Self> {
        thread_local! {
            // candle's default stream is another stream on each thread: two of them must not share a workspace of
            // cuBLAS, nor read constants that only one of them has written.
            static STATES: RefCell<HashMap<(usize, usize), Cuda>> = RefCell::default();
        }
        // candle gives every `Device` its own id, even for the same GPU.
        let stream = device.cuda_stream();
        let key = (stream.context().ordinal(), stream.cu_stream() as usize);
        if let Some(cuda) = STATES.with_borrow(|states| states.get(&key).cloned()) {
            return Ok(cuda);
        }
        let cuda = Self::new(device, stream)?;
        STATES.with_borrow_mut(|states| states.insert(key, cuda.clone()));
        Ok(cuda)
    }

    /// A new state: the kernels, a handle of cuBLAS and the constants.
    fn new(device: &CudaDevice, stream: Arc<CudaStream>) -> Result<Self> {
        let kernels = kernels(&stream)?;
        let blas = CudaBlas::new(stream.clone()).w()?;
        // SAFETY: the handle is valid. With this math mode, sums stay in f32 even if cuBLAS splits the inner dimension.
        unsafe {
            let math = cublas_sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
            cublas_sys::cublasSetMathMode(*blas.handle(), math).result().w()?;
        }
        let constants = Tensor::new(&[0f32, 1.0], &Device::Cuda(device.clone()))?;
        let memory_bytes = stream.context().total_mem().w()?;
        keep_memory(&stream, memory_bytes / MEMORY_SHARE)?;
        Ok(Cuda { stream, kernels, blas: Rc::new(blas), constants, memory_bytes })
    }
}

/// Lets the pool of the GPU's memory keep this many bytes. By default it gives all that is not in use back to the
/// driver when the host waits for the GPU, and a training step takes twice as long. Nothing happens if the program has
/// let the pool keep more, or if the GPU has none.
fn keep_memory(stream: &CudaStream, bytes: usize) -> Result<()> {
    use candle_core::cuda_backend::cudarc::driver::sys::{
        cuDeviceGetDefaultMemPool, cuMemPoolGetAttribute, cuMemPoolSetAttribute,
        CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as THRESHOLD,
    };
    if !stream.context().has_async_alloc() {
        return Ok(());
    }
    let (mut pool, mut kept, mut bytes) = (std::ptr::null_mut(), 0u64, bytes as u64);
    // SAFETY: the pool's place is valid for a write, and the attribute is a number of 64 bits.
    unsafe {
        cuDeviceGetDefaultMemPool(&mut pool, stream.context().cu_device()).result().w()?;
        cuMemPoolGetAttribute(pool, THRESHOLD, (&raw mut kept).cast()).result().w()?;
        if kept < bytes {
            cuMemPoolSetAttribute(pool, THRESHOLD, (&raw mut bytes).cast()).result().w()?;
        }
    }
    Ok(())
}

/// The kernels on the GPU of a stream, which all threads share.
fn kernels(stream: &CudaStream) -> Result<Arc<CudaModule>> {
    static MODULES: OnceLock<Mutex<HashMap<usize, Arc<CudaModule>>>> = OnceLock::new();
    // A panic leaves the map consistent.
    let mut modules = MODULES.get_or_init(Default::default).lock().unwrap_or_else(|error| error.into_inner());
    let ordinal = stream.context().ordinal();
    if let Some(module) = modules.get(&ordinal) {
        return Ok(module.clone());
    }
    let module = stream.context().load_module(Ptx::from_binary(KERNELS.to_vec())).w()?;
    modules.insert(ordinal, module.clone());
    Ok(module)
}

/// The error of operands that are not on a CUDA device.
fn wrong_device(device: &Device) -> Error {
    Error::Device { argument: "hidden", expected: "Cuda".into(), got: format!("{:?}", device.location()) }
}

// SAFETY: `repr(C)` numbers in the layout that the kernels declare.
unsafe impl DeviceRepr for LogitsArgument {}
// SAFETY: as above.
unsafe impl DeviceRepr for ObjectiveArgument {}
// SAFETY: as above.
unsafe impl DeviceRepr for RowsArgument {}
// SAFETY: as above.
unsafe impl DeviceRepr for ScoredArgument {}

impl Gpu for Cuda {
    fn kind(&self) -> &'static GpuKind {
        &KIND
    }

    fn memory_bytes(&self) -> Option<usize> {
        Some(self.memory_bytes)
    }

    fn address(&self, tensor: &Tensor) -> Result<u64> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { return Err(wrong_device(tensor.device())) };
        match tensor.dtype() {
            DType::F32 => self.element_address::<f32>(storage, layout),
            DType::F16 => self.element_address::<f16>(storage, layout),
            DType::BF16 => self.element_address::<bf16>(storage, layout),
            DType::U32 => self.element_address::<u32>(storage, layout),
            DType::I64 => self.element_address::<i64>(storage, layout),
            got => Err(Error::DType { argument: "tensor", expected: "f32, f16, bf16, u32 or i64".into(), got }),
        }
    }

    fn launch(&self, kernel: &str, blocks: usize, arguments: &[Argument]) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let function = self.kernels.load_function(kernel).w()?;
        let mut builder = self.stream.launch_builder(&function);
        for argument in arguments {
            match argument {
                Argument::Logits(x) => builder.arg(x),
                Argument::Objective(x) => builder.arg(x),
                Argument::Rows(x) => builder.arg(x),
                Argument::Scored(x) => builder.arg(x),
                Argument::Read(x) | Argument::Write(x) => builder.arg(x),
                Argument::Int(x) => builder.arg(x),
                Argument::Long(x) => builder.arg(x),
                Argument::Float(x) => builder.arg(x),
            };
        }
        let config =
            LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (BLOCK as u32, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel declares these arguments (the tests run the same launches on the host), and
        // the addresses among them point into tensors whose memory the stream frees only after the kernel.
        unsafe { builder.launch(config) }.w()?;
        Ok(())
    }

    fn multiply(&self, product: &DeviceProduct) -> Result<()> {
        use cublas_sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32};
        use cublas_sys::cublasGemmAlgo_t::CUBLAS_GEMM_DFALT;
        use cublas_sys::cublasOperation_t::{CUBLAS_OP_N, CUBLAS_OP_T};
        use cublas_sys::cublasPointerMode_t::{CUBLAS_POINTER_MODE_DEVICE, CUBLAS_POINTER_MODE_HOST};
        use cublas_sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
        if product.m == 0 || product.n == 0 {
            return Ok(());
        }
        let data_type = |dtype| match dtype {
            DType::F16 => CUDA_R_16F,
            DType::BF16 => CUDA_R_16BF,
            _ => CUDA_R_32F,
        };
        let dtype = data_type(product.lhs.dtype);
        let operation = |matrix: &DeviceMatrix| if matrix.is_transposed { CUBLAS_OP_T } else { CUBLAS_OP_N };
        let (one, beta) = (1f32, f32::from(u8::from(product.accumulates)));
        let (mode, alpha, beta) = match product.alpha {
            None => (CUBLAS_POINTER_MODE_HOST, &raw const one, &raw const beta),
            Some(alpha) => {
                let constants = self.address(&self.constants)?;
                let beta = constants + (usize::from(product.accumulates) * size_of::<f32>()) as u64;
                (CUBLAS_POINTER_MODE_DEVICE, alpha as *const f32, beta as *const f32)
            }
        };
        let compute = match product.lhs.dtype {
            DType::F32 if gemm_reduced_precision_f32() => CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => CUBLAS_COMPUTE_32F,
        };
        // cuBLAS launches on the current GPU of the thread, which may be another one by now.
        self.stream.context().bind_to_thread().w()?;
        // cuBLAS is column-major and reads each matrix as its transpose, so it computes out^T = rhs^T lhs^T.
        // SAFETY: the matrices are in tensors of the chunks, with these strides; the factors are in the memory that the
        // handle's pointer mode requires, and cuBLAS reads those on the host before it returns.
        unsafe {
            cublas_sys::cublasSetPointerMode_v2(*self.blas.handle(), mode).result().w()?;
            cublas::gemm_ex(
                *self.blas.handle(),
                operation(&product.rhs),
                operation(&product.lhs),
                product.n as i32,
                product.m as i32,
                product.k as i32,
                alpha.cast(),
                product.rhs.address as *const _,
                dtype,
                product.rhs.stride as i32,
                product.lhs.address as *const _,
                dtype,
                product.lhs.stride as i32,
                beta.cast(),
                product.out as *mut _,
                data_type(product.out_dtype),
                product.out_stride as i32,
                compute,
                CUBLAS_GEMM_DFALT,
            )
        }
        .w()?;
        Ok(())
    }
}

impl Cuda {
    /// The address of the first element of a layout.
    fn element_address<T: CudaDType>(&self, storage: &CudaStorage, layout: &Layout) -> Result<u64> {
        let (address, _read) = storage.as_cuda_slice::<T>()?.device_ptr(&self.stream);
        Ok(address + (layout.start_offset() * size_of::<T>()) as u64)
    }
}
