//! The peak of the memory in use: by the process on the CPU, in the allocator's pool with CUDA, in the process's
//! buffers with Metal.

use candle_core::Device;

/// Returns the peak in bytes since the start.
type End = Box<dyn FnOnce() -> Option<u64>>;

/// A watch over a device's memory. `mib` returns the peak since the start, `extra_mib` how far it is above the start.
pub struct Peak {
    start: Option<u64>,
    end: End,
}

impl Peak {
    /// Starts to watch the memory of a device.
    pub fn watch(device: &Device) -> Self {
        let (start, end): (_, End) = match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let device = device.clone();
                (pool::reset(&device), Box::new(move || pool::peak(&device)))
            }
            #[cfg(feature = "metal")]
            Device::Metal(device) => buffers::watch(device),
            _ => {
                // Resets the peak of the process, if the system allows it.
                let _ = std::fs::write("/proc/self/clear_refs", "5");
                (status("VmRSS"), Box::new(|| status("VmHWM")))
            }
        };
        Peak { start, end }
    }

    /// Returns how far the peak is above the start, in MiB.
    pub fn extra_mib(self) -> Option<f64> {
        let peak = (self.end)();
        peak.zip(self.start).map(|(peak, start)| mib(peak.saturating_sub(start)))
    }

    /// Returns the peak, in MiB.
    pub fn mib(self) -> Option<f64> {
        (self.end)().map(mib)
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Reads the bytes in a line of this process's status, on Linux.
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
        // SAFETY: `pool` is valid for a write of the result.
        unsafe { cuDeviceGetDefaultMemPool(&mut pool, ordinal) }.result().ok()?;
        Some(pool)
    }

    fn get(pool: CUmemoryPool, attribute: Attribute) -> Option<u64> {
        let mut value = 0u64;
        // SAFETY: these attributes are 64-bit numbers, and `value` is valid for a write of one.
        unsafe { cuMemPoolGetAttribute(pool, attribute, (&mut value as *mut u64).cast()) }.result().ok()?;
        Some(value)
    }

    /// Resets the peak of the pool, and returns the bytes in use.
    pub(super) fn reset(device: &CudaDevice) -> Option<u64> {
        let (pool, mut peak) = (pool(device)?, 0u64);
        // SAFETY: the attribute is a 64-bit number, as `peak` is, and may only be set to zero.
        unsafe { cuMemPoolSetAttribute(pool, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, (&raw mut peak).cast()) }
            .result()
            .ok()?;
        get(pool, Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    }

    pub(super) fn peak(device: &CudaDevice) -> Option<u64> {
        get(pool(device)?, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    }
}

#[cfg(feature = "metal")]
mod buffers {
    use crate::show::memory::End;
    use candle_core::MetalDevice;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::Arc;
    use std::time::Duration;

    /// Returns the bytes in use; Metal records no peak of them, so a thread polls them.
    pub(super) fn watch(device: &MetalDevice) -> (Option<u64>, End) {
        // Frees the buffers that only candle's pool still holds.
        if device.wait_until_completed().is_err() {
            return (None, Box::new(|| None));
        }
        let device = device.metal_device().clone();
        let start = device.current_allocated_size() as u64;
        let done = Arc::new(AtomicBool::new(false));
        let watcher = std::thread::spawn({
            let done = done.clone();
            move || {
                let mut peak = start;
                while !done.load(Ordering::Relaxed) {
                    peak = peak.max(device.current_allocated_size() as u64);
                    std::thread::sleep(Duration::from_micros(500));
                }
                peak
            }
        });
        let end = move || {
            done.store(true, Ordering::Relaxed);
            watcher.join().ok()
        };
        (Some(start), Box::new(end))
    }
}
