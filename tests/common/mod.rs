//! Shared by the integration tests: the reference in `f64` ([`reference`]), the same formula from ordinary candle
//! operations ([`composed`]), the comparison of both with the library ([`compare`], [`check`]), and random problems
//! ([`case`], [`objective`], [`random`]).
// Every test binary uses only some of it.
#![allow(dead_code, unreachable_pub, unused_imports, unused_macros)]

pub mod allowed;
pub mod case;
pub mod check;
pub mod compare;
pub mod composed;
pub mod factorised;
pub mod given;
pub mod objective;
pub mod random;
pub mod reference;
pub mod sampled;
pub mod scores;

use candle_core::{DType, Device, Tensor};

/// Every device that the test binary can use: the CPU, and a GPU if candle was built for one and one is available. With
/// `MOS_HEAD_NEED_GPU=1` it is an error if there is none.
pub fn devices() -> Vec<Device> {
    let mut devices = vec![Device::Cpu];
    if candle_core::utils::cuda_is_available() {
        devices.extend(Device::new_cuda(0));
    }
    if candle_core::utils::metal_is_available() {
        // candle panics on a Mac without a GPU, or with too old a system.
        devices.extend(std::panic::catch_unwind(|| Device::new_metal(0)).into_iter().flatten());
    }
    let needs_gpu = std::env::var("MOS_HEAD_NEED_GPU").is_ok_and(|needs| needs == "1");
    assert!(devices.len() > 1 || !needs_gpu, "MOS_HEAD_NEED_GPU is set, but no GPU can be used");
    devices
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
