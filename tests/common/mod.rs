//! Shared by the integration tests: the reference in `f64` ([`reference`]), the same formula from ordinary candle
//! operations ([`composed`]), the comparison of both with the library ([`compare`], [`check`]), random problems
//! ([`case`], [`problem`], [`objective`], [`random`]), divergences ([`divergences`]), tensors of GGUF files
//! ([`quantised`]), and the numbers of tensors ([`values`]).
// Every test binary uses only some of it.
#![allow(dead_code, unreachable_pub, unused_imports, unused_macros)]

pub mod allowed;
pub mod case;
pub mod check;
pub mod compare;
pub mod composed;
pub mod divergences;
pub mod factorised;
pub mod given;
pub mod needs;
pub mod objective;
pub mod problem;
pub mod quantised;
pub mod random;
pub mod reference;
pub mod sampled;
pub mod scores;
pub mod values;

use candle_core::{DType, Device, Tensor};
use mos_head::decode::{NextToken, Sampler, Sampling, TokenRequest};
use mos_head::{Distributions, Mixture};

/// Every device that the test binary can use: the CPU, and a GPU if candle was built for one and one is available.
/// Where none is, a line says so, or with `MOS_HEAD_NEED_GPU=1` it is an error.
pub fn devices() -> Vec<Device> {
    let gpu = gpu().inspect_err(|reason| needs::GPU.is_missing_for("the tests on a GPU", reason));
    std::iter::once(Device::Cpu).chain(gpu).collect()
}

/// Opens the GPU that candle was built for; the error says why it cannot be used.
pub fn gpu() -> Result<Device, String> {
    let open: fn() -> candle_core::Result<Device> = if candle_core::utils::cuda_is_available() {
        || Device::new_cuda(0)
    } else if candle_core::utils::metal_is_available() {
        || Device::new_metal(0)
    } else {
        return Err("candle was built without its features `cuda` and `metal`".into());
    };
    // candle panics on a Mac without a GPU, or with too old a system.
    match std::panic::catch_unwind(open) {
        Ok(device) => device.map_err(|error| error.to_string()),
        Err(panic) => Err(match panic.downcast_ref::<String>() {
            Some(message) => format!("candle panicked: {message}"),
            None => format!("candle panicked: {:?}", panic.downcast_ref::<&str>()),
        }),
    }
}

/// The element types a device computes in.
pub fn dtypes(device: &Device) -> &'static [DType] {
    match device {
        Device::Metal(_) | Device::Cuda(_) => &[DType::F32, DType::F16, DType::BF16],
        Device::Cpu => &[DType::F64, DType::F32, DType::F16, DType::BF16],
    }
}

/// A tensor on a device. candle cannot copy an empty tensor to Metal.
pub fn on(device: &Device, tensor: &Tensor) -> candle_core::Result<Tensor> {
    match tensor.elem_count() {
        0 => Tensor::zeros(tensor.shape(), tensor.dtype(), device),
        _ => tensor.to_device(device),
    }
}

/// The most exact element type of a device.
pub fn exact(device: &Device) -> DType {
    dtypes(device)[0]
}

/// Turns `fn law(device: &Device) -> Result<()> { .. }` into a test that runs the body on each device.
macro_rules! on_each_device {
    ($($(#[$attribute:meta])* fn $name:ident($device:ident: &Device) -> $result:ty $body:block)+) => {$(
        $(#[$attribute])*
        #[test]
        fn $name() {
            fn body($device: &candle_core::Device) -> $result $body
            for device in $crate::common::devices() {
                eprintln!("device: {device:?}");
                body(&device).expect(stringify!($name));
            }
        }
    )+};
}
pub(crate) use on_each_device;

/// For each of `positions` positions from `first` on: the ids and bits of the `best` ids, of the most probable one, and
/// an id that is drawn with the number of the position.
pub fn decoded_bits(mixture: &Mixture, first: usize, positions: usize, best: usize) -> mos_head::Result<Vec<Vec<u64>>> {
    let mut sampler = Sampler::new(Sampling::new(), 7)?;
    // The numbers of the positions before these.
    sampler.uniform(first);
    let drawn = mixture.sample(&mut sampler)?.to_vec1::<u32>()?;
    // The best ids with the forms of a draw: those of `top_k` depend on the number of rows.
    let request = TokenRequest::new(Sampling::greedy(), 0)?.with_best(best);
    let tokens = mixture.next_tokens(&vec![&request; positions])?;
    let position_bits = |(token, id): (&NextToken, u32)| {
        let bits = token.best.iter().flat_map(|&(id, log_p)| [u64::from(id), log_p.to_bits()]);
        bits.chain([u64::from(token.token_id), token.log_prob.to_bits(), u64::from(id)]).collect()
    };
    Ok(tokens.iter().zip(drawn).map(position_bits).collect())
}

/// Elements that are apart: for a vector a column of a matrix, in place of a tensor of its own.
pub fn strided(tensor: &Tensor) -> mos_head::Result<Tensor> {
    let rank = tensor.rank();
    let column = Tensor::stack(&[tensor, tensor], rank)?.narrow(rank, 0, 1)?.squeeze(rank)?;
    assert!(!column.is_contiguous());
    Ok(column)
}
