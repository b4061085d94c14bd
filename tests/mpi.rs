//! Processes of an MPI program as ranks: losses and gradients of a vocabulary that they share are those of the whole one.
//!
//!     cargo build --features mpi --test mpi
//!     mpirun -n 3 target/debug/deps/mpi-..    # scripts/mpi.sh finds the name, and runs 1 to 4 processes

#[path = "common/vocabulary.rs"]
mod vocabulary;

use std::sync::Arc;

use candle_core::Device;
use mos_head::{Collectives, Mpi, Numbers, Result};

fn main() -> Result<()> {
    let ranks: Arc<dyn Collectives> = Arc::new(Mpi::new()?);
    let (rank, count) = (ranks.rank(), ranks.ranks());
    assert!(Mpi::new().is_err());

    // More than a call sends at once.
    let of_rank = |rank: usize, i: usize| (rank + i % 5) as f64;
    let n = (1 << 20) + 3;
    let mut numbers: Vec<f64> = (0..n).map(|i| of_rank(rank, i)).collect();
    let all = ranks.all_gather(&numbers)?;
    assert!((0..count).all(|rank| (0..n).all(|i| all[rank * n + i] == of_rank(rank, i))));
    ranks.all_reduce_sum(Numbers::F64(&mut numbers))?;
    assert!((0..n).all(|i| numbers[i] == (0..count).map(|rank| of_rank(rank, i)).sum::<f64>()));
    let mut numbers: Vec<f32> = (0..n).map(|i| of_rank(rank, i) as f32).collect();
    ranks.broadcast(Numbers::F32(&mut numbers), count - 1)?;
    assert!((0..n).all(|i| numbers[i] == of_rank(count - 1, i) as f32));
    assert!(ranks.broadcast(Numbers::F32(&mut numbers), count).is_err());

    vocabulary::equals_the_whole(&ranks, &Device::Cpu)?;
    if rank == 0 {
        println!("{count} processes equal one");
    }
    Ok(())
}
