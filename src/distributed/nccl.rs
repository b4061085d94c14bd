//! The engine over NCCL: the ranks of a program have an NVIDIA GPU each.

use candle_core::{Device, Tensor};

use crate::backend::collectives::{check_rank, Collectives, Numbers};
use crate::backend::Communicator;
use crate::error::{Error, Result};
use crate::tensors::checks::check_at_most;

/// A rank among processes (or threads) that have an NVIDIA GPU each and exchange numbers by NCCL. It adds up the
/// contexts' gradient of a [`VocabParallel`](crate::distributed::VocabParallel) head from GPU to GPU; the few numbers
/// of each position that the host reads pass through the GPUs too.
///
/// One rank creates an id and sends it to the others by a file, a socket or an environment variable. When the first
/// rank drops its `Nccl`, no other may be in the middle of a call.
///
/// It has not run on a GPU yet, but only on the emulated driver of the repository's tests, where the ranks are threads.
///
/// # Examples
///
/// ```no_run
/// use std::path::Path;
/// use candle_core::Device;
/// use mos_head::distributed::Nccl;
///
/// /// All processes see `folder`, which is a new one for each run.
/// fn join(folder: &Path) -> Result<Nccl, Box<dyn std::error::Error>> {
///     let rank: usize = std::env::var("RANK")?.parse()?;
///     let ranks: usize = std::env::var("WORLD_SIZE")?.parse()?;
///     let path = folder.join("nccl-id");
///     if rank == 0 {
///         std::fs::create_dir_all(folder)?;
///         std::fs::write(folder.join("nccl-id.part"), Nccl::new_id()?)?;
///         std::fs::rename(folder.join("nccl-id.part"), &path)?;
///     }
///     // The processes wait for the first one: the program that starts them should end all if one fails.
///     while !path.try_exists()? {
///         std::thread::sleep(std::time::Duration::from_millis(10));
///     }
///     let id = std::fs::read(path)?.try_into().map_err(|_| "not an id")?;
///     // All GPUs are on one machine, and each rank has the GPU of its number.
///     let device = Device::new_cuda(rank)?;
///     Ok(Nccl::new(&device, rank, ranks, id)?)
/// }
/// ```
#[derive(Debug)]
pub struct Nccl {
    communicator: Communicator,
    device: Device,
}

impl Nccl {
    /// Creates the id of a new group of ranks, which one rank sends to the others.
    ///
    /// # Errors
    ///
    /// If NCCL fails.
    pub fn new_id() -> Result<[u8; 128]> {
        Communicator::new_id()
    }

    /// Joins the group of an id, as a rank whose tensors are on this GPU. It waits for all ranks.
    ///
    /// # Errors
    ///
    /// If the device is not an NVIDIA GPU, there is no such rank, or NCCL fails: it demands another GPU for each rank.
    pub fn new(device: &Device, rank: usize, ranks: usize, id: [u8; 128]) -> Result<Self> {
        let Device::Cuda(cuda) = device else {
            let got = format!("{:?}", device.location());
            return Err(Error::Device { argument: "device", expected: "Cuda".into(), got });
        };
        check_at_most("ranks", ranks, i32::MAX as usize)?;
        check_rank("rank", rank, ranks)?;
        Ok(Nccl { communicator: Communicator::new(cuda, rank, ranks, id)?, device: device.clone() })
    }
}

impl Collectives for Nccl {
    fn rank(&self) -> usize {
        self.communicator.rank()
    }

    fn ranks(&self) -> usize {
        self.communicator.ranks()
    }

    fn all_reduce_sum(&self, numbers: Numbers<'_>) -> Result<()> {
        match numbers {
            Numbers::F32(numbers) => self.communicator.add_up(numbers),
            Numbers::F64(numbers) => self.communicator.add_up(numbers),
        }
    }

    /// Adds up a tensor on the GPU, without waiting for it.
    fn all_reduce_sum_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        match tensor.device() {
            Device::Cuda(_) => self.communicator.sum(tensor),
            elsewhere => Ok(self.communicator.sum(&tensor.to_device(&self.device)?)?.to_device(elsewhere)?),
        }
    }

    fn all_gather(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        self.communicator.all_gather(numbers)
    }

    fn broadcast(&self, numbers: Numbers<'_>, root: usize) -> Result<()> {
        check_rank("root", root, self.ranks())?;
        match numbers {
            Numbers::F32(numbers) => self.communicator.broadcast(numbers, root),
            Numbers::F64(numbers) => self.communicator.broadcast(numbers, root),
        }
    }
}
