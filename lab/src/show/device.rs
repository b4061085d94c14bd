//! A flag chooses the device.

use candle_core::Device;
use clap::ValueEnum;

/// Tensors are on one of these devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// The CPU.
    Cpu,
    /// The first NVIDIA GPU.
    Cuda,
    /// The first Apple GPU.
    Metal,
}

impl DeviceKind {
    /// Returns the device, or an error that names what is missing: the feature of this build, or the GPU of this
    /// machine.
    pub fn open(self) -> Result<Device, String> {
        match self {
            DeviceKind::Cpu => Ok(Device::Cpu),
            DeviceKind::Cuda => gpu("cuda", cfg!(feature = "cuda"), || Device::new_cuda(0)),
            DeviceKind::Metal => gpu("metal", cfg!(feature = "metal"), || Device::new_metal(0)),
        }
    }
}

fn gpu(
    name: &str,
    built: bool,
    open: impl FnOnce() -> candle_core::Result<Device> + std::panic::UnwindSafe,
) -> Result<Device, String> {
    if !built {
        return Err(format!("--device {name} needs a build with cargo's --features {name}"));
    }
    // candle's Metal backend panics without a GPU, and before macOS 15.
    let reason = match std::panic::catch_unwind(open) {
        Ok(Ok(device)) => return Ok(device),
        Ok(Err(error)) => error.to_string().lines().next().unwrap_or_default().to_owned(),
        Err(_) => "candle panicked, as shown above".into(),
    };
    Err(format!("--device {name}: this machine has no GPU that candle can use ({reason})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_was_not_built_is_an_error_that_names_the_feature() {
        assert!(DeviceKind::Cpu.open().is_ok());
        for (kind, built, feature) in [
            (DeviceKind::Cuda, cfg!(feature = "cuda"), "--features cuda"),
            (DeviceKind::Metal, cfg!(feature = "metal"), "--features metal"),
        ] {
            if !built {
                let error = kind.open().expect_err("must fail");
                assert!(error.contains(feature), "{error}");
            }
        }
    }
}
