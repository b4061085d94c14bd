//! The peak of the memory in use: of the process on the CPU, of the allocator's pool on a GPU.

use candle_core::Device;

/// Begins to watch; `extra_mib` then gives what the peak was above the start.
pub struct Peak {
    device: Device,
    start: Option<u64>,
}

impl Peak {
    pub fn watch(device: &Device) -> Self {
        let start = match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => pool::reset(device),
            _ => {
                // Makes the kernel forget the peak of what came before, where it can.
                let _ = std::fs::write("/proc/self/clear_refs", "5");
                status("VmRSS")
            }
        };
        Peak { device: device.clone(), start }
    }

    pub fn extra_mib(&self) -> Option<f64> {
        let peak = match &self.device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => pool::peak(device),
            _ => status("VmHWM"),
        };
        peak.zip(self.start).map(|(peak, start)| peak.saturating_sub(start) as f64 / f64::from(1 << 20))
    }
}

/// Bytes of a line of this process's status, on Linux.
fn status(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with(name))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
}

#[cfg(feature = "cuda")]
mod pool {
    use candle_core::cuda_backend::cudarc::driver::sys::{
        cuDeviceGetDefaultMemPool, cuMemPoolGetAttribute, cuMemPoolSetAttribute, CUmemPool_attribute as Attribute,
        CUmemoryPool,
    };
    use candle_core::CudaDevice;

    fn pool(device: &CudaDevice) -> Option<CUmemoryPool> {
        let mut pool = std::ptr::null_mut();
        let ordinal = device.cuda_stream().context().cu_device();
        // SAFETY: `pool` is a place for the answer.
        unsafe { cuDeviceGetDefaultMemPool(&mut pool, ordinal) }.result().ok()?;
        Some(pool)
    }

    fn get(pool: CUmemoryPool, attribute: Attribute) -> Option<u64> {
        let mut value = 0u64;
        // SAFETY: these attributes are 64-bit numbers, and `value` is a place for one.
        unsafe { cuMemPoolGetAttribute(pool, attribute, (&mut value as *mut u64).cast()) }.result().ok()?;
        Some(value)
    }

    /// Lets the pool keep its memory, forgets its peak, and gives the bytes in use.
    pub(super) fn reset(device: &CudaDevice) -> Option<u64> {
        let pool = pool(device)?;
        let set = |attribute, mut value: u64| {
            // SAFETY: as in `get`; the peak may be set to zero only.
            unsafe { cuMemPoolSetAttribute(pool, attribute, (&mut value as *mut u64).cast()) }.result().ok()
        };
        set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)?;
        set(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)?;
        get(pool, Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    }

    pub(super) fn peak(device: &CudaDevice) -> Option<u64> {
        get(pool(device)?, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    }
}
