//! The emulated driver detects faults that a GPU would not report: each ends its process with a message, or is refused.

use std::process::Command;

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::cublas::{result::gemm_ex, sys as cublas, CudaBlas};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{kernels, WrapErr};
use candle_core::{CudaDevice, DType, Device, Result, Tensor};

use crate::driver::Driver;

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

fn fill(device: &CudaDevice, address: u64, n: usize) -> Result<()> {
    fill_with(device, address, n, LaunchConfig::for_num_elems(n as u32))
}

/// Launches candle's kernel that computes the exponentials of `n` numbers.
fn exp(device: &CudaDevice, from: u64, to: u64, n: usize) -> Result<()> {
    let function = device.get_or_load_func("uexp_f32", &kernels::UNARY)?;
    let mut arguments = function.builder();
    arguments.arg(&n).arg(&1usize).arg(&0u64).arg(&from).arg(&to);
    // SAFETY: as above.
    unsafe { arguments.launch(LaunchConfig::for_num_elems(n as u32)) }.w()?;
    Ok(())
}

/// The product of two 4 by 4 matrices, with factors at an address and these strides, on a stream.
fn multiply(blas: &CudaBlas, matrix: u64, factors: *const f32, strides: [i32; 3]) -> Result<()> {
    use cublas::cublasComputeType_t::CUBLAS_COMPUTE_32F;
    use cublas::cublasGemmAlgo_t::CUBLAS_GEMM_DFALT;
    use cublas::cublasOperation_t::CUBLAS_OP_N;
    use cublas::cudaDataType_t::CUDA_R_32F;
    let [lhs, rhs, out] = strides;
    let (matrix, factors) = (matrix as *mut std::ffi::c_void, factors.cast());
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
            matrix,
            CUDA_R_32F,
            lhs,
            matrix,
            CUDA_R_32F,
            rhs,
            factors,
            matrix,
            CUDA_R_32F,
            out,
            CUBLAS_COMPUTE_32F,
            CUBLAS_GEMM_DFALT,
        )
    }
    .w()?;
    Ok(())
}

/// The address of a slice, without the events that order its uses.
fn address<T>(slice: &impl DevicePtr<T>, stream: &CudaStream) -> u64 {
    slice.device_ptr(stream).0
}

type Fault = fn(&CudaDevice) -> Result<()>;

/// The name of each fault and the expected message.
const FAULTS: [(&str, &str, Fault); 15] = [
    ("past_the_end", "writes 4 bytes", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        fill(device, address(&numbers, &device.cuda_stream()), N + 1)
    }),
    ("not_written", "which nothing has written", |device| {
        // SAFETY: what the test is about.
        let numbers = unsafe { device.alloc::<f32>(N) }?;
        let at = address(&numbers, &device.cuda_stream());
        fill(device, at, N - 1)?;
        exp(device, at, at, N)
    }),
    ("copied_before_written", "which nothing has written", |device| {
        // SAFETY: what the test is about.
        let numbers = unsafe { device.alloc::<f32>(N) }?;
        device.clone_dtoh(&numbers).map(|_| ())
    }),
    ("freed", "is no address of an allocation", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        let at = address(&numbers, &device.cuda_stream());
        drop(numbers);
        fill(device, at, N)
    }),
    ("of_the_host", "is no address of an allocation", |device| {
        let numbers = [0f32; N];
        fill(device, numbers.as_ptr() as u64, N)
    }),
    ("misaligned", "a misaligned access", |device| {
        let numbers = device.alloc_zeros::<f32>(N)?;
        fill(device, address(&numbers, &device.cuda_stream()) + 2, N / 2)
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
    ("outside_a_matrix", "64 bytes from the start of an allocation of 64 bytes", |device| {
        let matrix = device.clone_htod(&[0f32; 16])?;
        let at = address(&matrix, &device.cuda_stream());
        multiply(&device.cublas_handle(), at, &1.0, [4, 5, 4])
    }),
    ("rows_that_overlap", "CUBLAS_STATUS_INVALID_VALUE", |device| {
        let matrix = device.clone_htod(&[0f32; 16])?;
        let at = address(&matrix, &device.cuda_stream());
        multiply(&device.cublas_handle(), at, &1.0, [4, 4, 3])
    }),
    ("factors_on_the_device", "a factor in the device's memory", |device| {
        let matrix = device.clone_htod(&[0f32; 16])?;
        let at = address(&matrix, &device.cuda_stream());
        multiply(&device.cublas_handle(), at, at as *const f32, [4; 3])
    }),
    ("one_workspace", "the workspace of a cuBLAS handle", |device| {
        // The handle's stream is the default one, which is another stream on each thread.
        let blas = device.cublas_handle();
        let run = |device: &CudaDevice| {
            let matrix = device.clone_htod(&[0f32; 16])?;
            let at = address(&matrix, &device.cuda_stream());
            multiply(&blas, at, &1.0, [4; 3])?;
            // Kept, since freeing it would be ordered by nothing either.
            std::mem::forget(matrix);
            Ok(())
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
    let (_, _, fault) = FAULTS.iter().find(|(of, _, _)| *of == name).expect("a fault");
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
