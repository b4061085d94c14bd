//! Choice of the device by a flag.

use super::Result;
use candle_core::Device;
use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceKind {
    Cpu,
    Cuda,
    Metal,
}

impl DeviceKind {
    pub(crate) fn open(self) -> Result<Device> {
        let (device, name) = match self {
            DeviceKind::Cpu => return Ok(Device::Cpu),
            DeviceKind::Cuda => (Device::new_cuda(0), "cuda"),
            DeviceKind::Metal => (Device::new_metal(0), "metal"),
        };
        device.map_err(|error| {
            let reason = error.to_string();
            let reason = reason.lines().next().unwrap_or_default().to_owned();
            format!("--device {name} is not available in this build or on this machine: {reason}").into()
        })
    }
}
