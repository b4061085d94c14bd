//! The emulated driver detects faults that a GPU would not report: each ends its process with a message, or is refused.

use std::process::Command;

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::cublas::{result::gemm_ex, sys as cublas, CudaBlas};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{kernels, WrapErr};
use candle_core::{CudaDevice, DType, Device, Result, Tensor};

use crate::driver::Driver;

/// The number of elements of each allocation.
const N: usize = 64;

/// Launches candle's kernel that fills `n` numbers from an address on.
fn fill_with(device: &CudaDevice, address: u64, n: usize, config: LaunchConfig) -> Result<()> {
    let function = device.get_or_load_func("fill_f32", &kernels::FILL)?;
    let mut arguments = function.builder();
    arguments.arg(&address).arg(&1f32).arg(&n);
    // SAFETY: the emulated driver checks the addresses.
    unsafe { arguments.launch(config) }.w()?;
    Ok(())
}

/// [`fill_with`] enough threads.
fn fill(device: &CudaDevice, address: u64, n: usize) -> Result<()> {
    fill_with(device, address, n, LaunchConfig::for_num_elems(n as u32))
}

/// Launches candle's kernel that computes the exponentials of `n` numbers.
fn exp_with(device: &CudaDevice, from: u64, to: u64, n: usize, config: LaunchConfig) -> Result<()> {
    let function = device.get_or_load_func("uexp_f32", &kernels::UNARY)?;
    let mut arguments = function.builder();
    arguments.arg(&n).arg(&1usize).arg(&0u64).arg(&from).arg(&to);
    // SAFETY: as above.
    unsafe { arguments.launch(config) }.w()?;
    Ok(())
}

/// [`exp_with`] enough threads.
fn exp(device: &CudaDevice, from: u64, to: u64, n: usize) -> Result<()> {
    exp_with(device, from, to, n, LaunchConfig::for_num_elems(n as u32))
}

/// Three 4 by 4 matrices, one after another.
const MATRICES: [f32; 48] = [0.0; 48];

/// The product of the last two of three matrices, with these strides, into the first.
fn multiply(blas: &CudaBlas, matrices: u64, factors: *const f32, [out, lhs, rhs]: [i32; 3]) -> Result<()> {
    use cublas::cublasComputeType_t::CUBLAS_COMPUTE_32F;
    use cublas::cublasGemmAlgo_t::CUBLAS_GEMM_DFALT;
    use cublas::cublasOperation_t::CUBLAS_OP_N;
    use cublas::cudaDataType_t::CUDA_R_32F;
    let (matrix, factors) = (|i: u64| (matrices + 64 * i) as *mut std::ffi::c_void, factors.cast());
    // SAFETY: as above.
    unsafe {
        gemm_ex(
            *blas.handle(),
            CUBLAS_OP_N,
            CUBLAS_OP_N,
            4,
            4,
            4,
            factors,
            matrix(1),
            CUDA_R_32F,
            lhs,
            matrix(2),
            CUDA_R_32F,
            rhs,
            factors,
            matrix(0),
            CUDA_R_32F,
            out,
            CUBLAS_COMPUTE_32F,
            CUBLAS_GEMM_DFALT,
        )
    }
    .w()?;
    Ok(())
}

/// [`multiply`] on this thread, by candle's handle.
fn multiply_new(device: &CudaDevice, strides: [i32; 3]) -> Result<()> {
    let matrices = device.clone_htod(&MATRICES)?;
    multiply(&device.cublas_handle(), address(&matrices, &device.cuda_stream()), &1.0, strides)
}

/// Returns the address of a slice. cudarc takes its use to be over at once.
fn address<T>(slice: &impl DevicePtr<T>, stream: &CudaStream) -> u64 {
    slice.device_ptr(stream).0
}

/// Code that has a fault.
type Fault = fn(&CudaDevice) -> Result<()>;

/// The name of each fault and the expected message.
const FAULTS: [(&str, &str, Fault); 25] = [
    ("past_the_end", "writes 4 bytes", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        fill(device, address(&numbers, &device.cuda_stream()), N + 1)
    }),
    ("not_written", "which nothing has written", |device| {
        // SAFETY: it is what the test is about.
        let numbers = unsafe { device.alloc::<f32>(N) }?;
        let at = address(&numbers, &device.cuda_stream());
        fill(device, at, N - 1)?;
        exp(device, at, at, N)
    }),
    ("copied_before_written", "which nothing has written", |device| {
        // SAFETY: it is what the test is about.
        let numbers = unsafe { device.alloc::<f32>(N) }?;
        device.clone_dtoh(&numbers).map(|_| ())
    }),
    ("freed", "is no address of an allocation", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        let at = address(&numbers, &device.cuda_stream());
        drop(numbers);
        fill(device, at, N)
    }),
    ("memory_of_the_host", "is no address of an allocation", |device| {
        let numbers = [0f32; N];
        fill(device, numbers.as_ptr() as u64, N)
    }),
    ("misaligned", "a misaligned access", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        fill(device, address(&numbers, &device.cuda_stream()) + 2, N / 2)
    }),
    ("read_after_write_of_a_thread", "thread 1: reads what thread 0 writes, without a barrier in between", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        let at = address(&numbers, &device.cuda_stream());
        exp(device, at, at + 4, N - 1)
    }),
    ("write_after_read_of_a_thread", "thread 1: writes what thread 0 reads, without a barrier in between", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        let at = address(&numbers, &device.cuda_stream());
        exp(device, at + 4, at, N - 1)
    }),
    ("write_after_read_of_a_block", "writes what another block reads in the same launch", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        let at = address(&numbers, &device.cuda_stream());
        let config = LaunchConfig { grid_dim: (N as u32, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        exp_with(device, at + 4, at, N - 1, config)
    }),
    ("another_stream", "without waiting for it", |device| {
        let other = CudaDevice::new_with_stream(0)?;
        let numbers = device.alloc_zeros::<f32>(N)?;
        fill(&other, address(&numbers, &device.cuda_stream()), N)
    }),
    // candle passes the output of its kernels as an input, so no event marks it as written.
    ("sum_on_another_stream", "without waiting for it", |_| {
        let [device, other] = [Device::new_cuda_with_stream(0)?, Device::new_cuda_with_stream(0)?];
        let numbers = Tensor::zeros(N, DType::F32, &device)?;
        (&numbers + &numbers)?.to_device(&other)?;
        Ok(())
    }),
    ("freed_on_another_stream", "without waiting for it", |device| {
        let other = CudaDevice::new_with_stream(0)?;
        let numbers = other.alloc_zeros::<f32>(N)?;
        other.synchronize()?;
        fill(device, address(&numbers, &other.cuda_stream()), N)?;
        drop(numbers);
        Ok(())
    }),
    ("no_blocks", "CUDA_ERROR_INVALID_VALUE", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        fill(device, address(&numbers, &device.cuda_stream()), 0)
    }),
    ("too_many_threads", "CUDA_ERROR_INVALID_VALUE", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (2048, 1, 1), shared_mem_bytes: 0 };
        fill_with(device, address(&numbers, &device.cuda_stream()), N, config)
    }),
    ("too_much_shared_memory", "CUDA_ERROR_INVALID_VALUE", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 64 << 10 };
        fill_with(device, address(&numbers, &device.cuda_stream()), N, config)
    }),
    ("no_such_kernel", "CUDA_ERROR_NOT_FOUND", |device| device.get_or_load_func("filled", &kernels::FILL).map(|_| ())),
    ("assertion", "is_u32_f32, block 0, thread 2: assertion failed", |device| {
        let device = Device::Cuda(device.clone());
        let ids = Tensor::new(&[1u32, 9], &device)?;
        Tensor::zeros((4, 2), DType::F32, &device)?.index_select(&ids, 0).map(|_| ())
    }),
    ("outside_a_matrix", "192 bytes from the start of an allocation of 192 bytes", |device| {
        multiply_new(device, [4, 4, 5])
    }),
    ("result_over_an_operand", "the result overlaps an operand", |device| multiply_new(device, [5, 4, 4])),
    ("columns_that_overlap", "CUBLAS_STATUS_INVALID_VALUE", |device| multiply_new(device, [3, 4, 4])),
    ("matrix_not_written", "which nothing has written", |device| {
        // SAFETY: it is what the test is about.
        let matrices = unsafe { device.alloc::<f32>(MATRICES.len()) }?;
        multiply(&device.cublas_handle(), address(&matrices, &device.cuda_stream()), &1.0, [4; 3])
    }),
    ("factors_on_the_device", "a factor in the device's memory", |device| {
        let matrices = device.clone_htod(&MATRICES)?;
        let at = address(&matrices, &device.cuda_stream());
        multiply(&device.cublas_handle(), at, at as *const f32, [4; 3])
    }),
    ("factors_on_the_host", "a factor in the host's memory", |device| {
        let matrices = device.clone_htod(&MATRICES)?;
        let blas = CudaBlas::new(device.cuda_stream()).w()?;
        // SAFETY: the handle is valid.
        unsafe {
            cublas::cublasSetPointerMode_v2(*blas.handle(), cublas::cublasPointerMode_t::CUBLAS_POINTER_MODE_DEVICE)
        };
        multiply(&blas, address(&matrices, &device.cuda_stream()), &1.0, [4; 3])
    }),
    ("without_a_context", "cublasGemmEx without a context", |device| {
        let matrices = device.clone_htod(&MATRICES)?;
        let (blas, at) = (device.cublas_handle(), address(&matrices, &device.cuda_stream()));
        std::thread::scope(|scope| scope.spawn(|| multiply(&blas, at, &1.0, [4; 3])).join().expect("no panic"))
    }),
    ("one_workspace", "the workspace of a cuBLAS handle", |device| {
        // The handle's stream is the default one, which is another stream on each thread.
        let blas = device.cublas_handle();
        let run = |device: &CudaDevice| {
            let matrices = device.clone_htod(&MATRICES)?;
            multiply(&blas, address(&matrices, &device.cuda_stream()), &1.0, [4; 3])
        };
        run(device)?;
        std::thread::scope(|scope| scope.spawn(|| run(&CudaDevice::new(0)?)).join().expect("no panic"))
    }),
];

/// Runs one fault, in its own process.
#[test]
#[ignore = "ends its process"]
fn fault() -> Result<()> {
    let name = std::env::var("FAULT").expect("the name of a fault");
    if name == "leak" {
        std::mem::forget(CudaDevice::new(0)?.alloc_zeros::<f32>(N)?);
        return Ok(());
    }
    let (_, _, fault) = FAULTS.iter().find(|(other, _, _)| *other == name).expect("a fault");
    let device = CudaDevice::new(0)?;
    fault(&device)?;
    device.synchronize()
}

#[test]
fn every_fault_is_detected() {
    if Driver::emulated().is_none() {
        return;
    }
    let leak = ("leak", "never freed: an allocation of 256 bytes, last written by \"memset\"");
    for (name, message) in FAULTS.iter().map(|(name, message, _)| (*name, *message)).chain([leak]) {
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "faults::fault", "--ignored", "--nocapture"])
            .env("FAULT", name)
            .output()
            .expect("a process");
        let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(!output.status.success() && printed.contains(message), "{name}: {printed}");
    }
}
