//! The emulated device detects what would be wrong on a GPU: each fault ends its process with a message that names it.
//! Most faults are false declarations to candle's encoder.

use std::process::Command;

use candle_core::{DType, Device, MetalDevice, Result, Storage, Tensor};
use candle_metal_kernels::metal::{Buffer, ComputeCommandEncoder};
use candle_metal_kernels::source::Source;
use metal_on_linux::gemm::{gemm, Into, Matrix};
use metal_on_linux::metal;
use objc2_metal::MTLSize;

/// The name of a fault, a part of its message, and the code that has it.
type Fault = (&'static str, &'static str, fn(&MetalDevice) -> Result<()>);

/// The number of elements of each buffer.
const LENGTH: usize = 64;

/// Encodes the dispatch of one of candle's kernels.
fn encode(device: &MetalDevice, name: &'static str, f: impl FnOnce(&ComputeCommandEncoder)) -> Result<()> {
    let source = if name.starts_with("gemm") { Source::Gemm } else { Source::Unary };
    let pipeline =
        device.kernels().load_pipeline(device.metal_device(), source, name).map_err(candle_core::Error::wrap)?;
    let guard = device.command_encoder()?;
    guard.set_compute_pipeline_state(&pipeline);
    f(guard.as_ref());
    Ok(())
}

/// Dispatches groups of threads along one dimension.
fn dispatch(encoder: &ComputeCommandEncoder, groups: usize, threads: usize) {
    let size = |width| MTLSize { width, height: 1, depth: 1 };
    encoder.dispatch_thread_groups(size(groups), size(threads));
}

/// Computes `to = exp(from)`. `to` is declared as an output if `is_declared`, otherwise as an input.
fn exp(device: &MetalDevice, from: &Buffer, to: &Buffer, is_declared: bool) -> Result<()> {
    encode(device, "exp_f32", |encoder| {
        encoder.set_bytes(0, &LENGTH);
        encoder.set_input_buffer(1, Some(from), 0);
        if is_declared {
            encoder.set_output_buffer(2, Some(to), 0)
        } else {
            encoder.set_input_buffer(2, Some(to), 0)
        }
        dispatch(encoder, 1, LENGTH);
    })
}

/// Fresh buffers.
fn buffers<const N: usize>(device: &MetalDevice) -> Result<[std::sync::Arc<Buffer>; N]> {
    let made: Vec<_> =
        (0..N).map(|_| device.new_buffer_builder().with_size_for(LENGTH, DType::F32).build()).collect::<Result<_>>()?;
    Ok(made.try_into().expect("N buffers"))
}

const FAULTS: [Fault; 15] = [
    ("no_barrier_before_reading", "reads what an earlier command of this encoder writes", |device| {
        let [a, b, c] = buffers(device)?;
        exp(device, &a, &b, false)?;
        exp(device, &b, &c, true)
    }),
    ("no_barrier_before_writing", "writes what an earlier command of this encoder uses", |device| {
        let [a, b, c] = buffers(device)?;
        exp(device, &a, &b, true)?;
        exp(device, &c, &a, false)
    }),
    ("no_fence", "reads what another encoder writes", |device| {
        let [a, b, c] = buffers(device)?;
        exp(device, &a, &b, false)?;
        // A copy has its own encoder, which waits only for buffers that are declared as outputs.
        device.blit_command_encoder()?.copy_from_buffer(&b, 0, &c, 0, LENGTH);
        Ok(())
    }),
    ("private_contents", "the contents of a private buffer", |device| {
        let [a] = buffers(device)?;
        a.contents();
        Ok(())
    }),
    ("contents_too_early", "before the commands that use it were waited for", |device| {
        let buffer = device.new_buffer_builder().with_zeros(LENGTH).build()?;
        buffer.contents();
        Ok(())
    }),
    ("argument_not_set", "buffer 1 is not set", |device| {
        let [a] = buffers(device)?;
        exp(device, &a, &a, true)?;
        encode(device, "exp_f32", |encoder| {
            encoder.set_bytes(0, &LENGTH);
            encoder.set_output_buffer(2, Some(&a), 0);
            dispatch(encoder, 1, LENGTH);
        })
    }),
    ("offset_outside", "an offset of 256 in a buffer of 256 bytes", |device| {
        let [a] = buffers(device)?;
        encode(device, "exp_f32", |encoder| encoder.set_input_buffer(1, Some(&a), 256))
    }),
    ("beyond_the_end", "element 16 of 16", |device| {
        let [a] = buffers(device)?;
        encode(device, "copy_f32", |encoder| {
            encoder.set_bytes(0, &LENGTH);
            encoder.set_input_buffer(1, Some(&a), 192);
            encoder.set_output_buffer(2, Some(&a), 0);
            dispatch(encoder, 1, LENGTH);
        })
    }),
    ("rows_of_c_beyond_the_end", "buffer 2: element 128 of 64", |device| {
        let [a, b, c] = buffers(device)?;
        let [a, b, c] = [&a, &b, &c].map(|buffer| Matrix { buffer, offset: 0, stride: 8, transposed: false });
        gemm(device, DType::F32, (8, 8, 8), [a, b, c], Into::Sum(c))
    }),
    ("empty_buffer", "a buffer of no bytes", |device| device.new_private_buffer(0, DType::F32, "").map(|_| ())),
    ("no_threads", "a dispatch of no threads", |device| encode(device, "exp_f32", |encoder| dispatch(encoder, 0, 1))),
    ("too_many_threads", "a threadgroup of 1025 threads", |device| {
        encode(device, "exp_f32", |encoder| dispatch(encoder, 1, 1025))
    }),
    ("too_few_threads", "31 threads for 64 elements", |device| {
        let [a, b] = buffers(device)?;
        encode(device, "exp_f32", |encoder| {
            encoder.set_bytes(0, &LENGTH);
            encoder.set_input_buffer(1, Some(&a), 0);
            encoder.set_output_buffer(2, Some(&b), 0);
            dispatch(encoder, 1, 31);
        })
    }),
    ("constant_not_set", "function constant 100 is not set", |device| {
        let [a] = buffers(device)?;
        encode(device, "gemm_nn_f32_f32_32_32_16_2_2", |encoder| {
            for slot in [0, 1, 4, 6, 7] {
                encoder.set_input_buffer(slot, Some(&a), 0);
            }
            encoder.set_output_buffer(3, Some(&a), 0);
            dispatch(encoder, 1, 128);
        })
    }),
    ("two_queues", "a buffer is used on two queues", |device| {
        let [a, b] = buffers(device)?;
        exp(device, &a, &b, true)?;
        device.flush_and_wait_current()?;
        let other = metal();
        let other = other.as_metal_device()?;
        exp(other, &a, &b, true)?;
        other.flush_and_wait_current()
    }),
];

/// Runs one fault, in its own process.
#[test]
#[ignore = "ends its process"]
fn fault() -> Result<()> {
    let name = std::env::var("FAULT").expect("the name of a fault");
    let (_, _, fault) = FAULTS.iter().find(|(other, _, _)| *other == name).expect("a fault");
    let device = metal();
    let device = device.as_metal_device()?;
    fault(device)?;
    device.flush_and_wait_current()
}

#[test]
fn every_fault_is_detected() {
    for (name, message, _) in FAULTS {
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "fault", "--ignored", "--nocapture"])
            .env("FAULT", name)
            .output()
            .expect("a process");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(message), "{name}: {stderr}");
    }
}

#[test]
fn a_kernel_without_a_stand_in_is_named() -> Result<()> {
    let image = Tensor::zeros((1, 1, 4, 4), DType::F32, &metal())?;
    let error = image.avg_pool2d(2).expect_err("no stand-in").to_string();
    assert!(error.contains("avg_pool2d_f32"), "{error}");
    Ok(())
}

#[test]
fn fresh_memory_is_not_zero() -> Result<()> {
    let device = metal();
    let [a, b] = buffers::<2>(device.as_metal_device()?)?;
    exp(device.as_metal_device()?, &a, &b, true)?;
    let storage = candle_core::MetalStorage::new(b, device.as_metal_device()?.clone(), LENGTH, DType::F32);
    let tensor = Tensor::from_storage(Storage::Metal(storage), LENGTH, candle_core::op::BackpropOp::none(), false);
    let values: Vec<f32> = tensor.to_device(&Device::Cpu)?.to_vec1()?;
    assert!(values.iter().all(|value| value.is_nan()));
    Ok(())
}
