//! Ranks that exchange numbers by NCCL: threads on the emulated driver, which needs no GPU for each.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use mos_head::distributed::{Collectives, Nccl, Numbers};
use mos_head::{Error, Result};

use crate::driver::Driver;
use crate::vocabulary;

/// Calls a function in a thread for each rank, with a device of its own. cudarc orders its streams by events if
/// `has_events`.
fn on_ranks(
    ranks: usize,
    has_events: bool,
    run: impl Fn(Arc<dyn Collectives>, &Device) -> Result<()> + Sync,
) -> Result<()> {
    // NCCL demands a GPU for each rank.
    if Driver::emulated().is_none() {
        return Ok(());
    }
    let id = Nccl::new_id()?;
    let run_rank = |rank: usize| {
        let device = Device::new_cuda(0)?;
        if let (Device::Cuda(device), false) = (&device, has_events) {
            // SAFETY: `Nccl` orders its stream and the device's, which are all there are.
            unsafe { device.disable_event_tracking() };
        }
        run(Arc::new(Nccl::new(&device, rank, ranks, id)?), &device)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run_rank(rank))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })
}

#[test]
fn numbers_of_the_host_and_of_the_device() -> Result<()> {
    const N: usize = 1000;
    let rank_number = |rank: usize, i: usize| (rank * 3 + i % 7) as f64;
    let check = |ranks: Arc<dyn Collectives>, device: &Device| {
        let (rank, count) = (ranks.rank(), ranks.ranks());
        let own: Vec<f64> = (0..N).map(|i| rank_number(rank, i)).collect();
        let sums: Vec<f64> = (0..N).map(|i| (0..count).map(|rank| rank_number(rank, i)).sum()).collect();
        let all: Vec<f64> = (0..count).flat_map(|rank| (0..N).map(move |i| rank_number(rank, i))).collect();
        assert_eq!(ranks.all_gather(&own)?, all);

        let mut numbers = own.clone();
        ranks.all_reduce_sum(Numbers::F64(&mut numbers))?;
        assert_eq!(numbers, sums);
        let mut numbers: Vec<f32> = own.iter().map(|&x| x as f32).collect();
        ranks.all_reduce_sum(Numbers::F32(&mut numbers))?;
        assert!(numbers.iter().zip(&sums).all(|(&x, &sum)| f64::from(x) == sum));
        let mut numbers = own.clone();
        ranks.broadcast(Numbers::F64(&mut numbers), 1)?;
        assert_eq!(numbers, all[N..2 * N]);
        assert!(matches!(ranks.broadcast(Numbers::F64(&mut numbers), 3), Err(Error::Config { argument: "root", .. })));
        ranks.all_reduce_sum(Numbers::F64(&mut []))?;
        assert!(ranks.all_gather(&[])?.is_empty());

        // A part of a tensor, not from its start, which a kernel has just written.
        for dtype in [DType::F32, DType::F64] {
            let tensor = Tensor::from_slice(&own, (N / 10, 10), device)?.to_dtype(dtype)?.exp()?.log()?;
            let sum = ranks.all_reduce_sum_tensor(&tensor.narrow(0, 3, 50)?)?;
            assert_eq!((sum.dims(), sum.dtype()), (&[50, 10][..], dtype));
            // A kernel reads the sum.
            let sum = (sum * 2.0)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
            assert!(sum.iter().zip(&sums[30..530]).all(|(x, sum)| (x - 2.0 * sum).abs() < 1e-4), "{sum:?}");
        }
        let on_host = Tensor::from_slice(&own, N, &Device::Cpu)?;
        let sum = ranks.all_reduce_sum_tensor(&on_host)?;
        assert!(sum.device().is_cpu());
        assert_eq!(sum.to_vec1::<f64>()?, sums);
        let on_device = Tensor::from_slice(&own, N, device)?;
        let half = Tensor::zeros(4, DType::F16, device)?;
        assert!(matches!(ranks.all_reduce_sum_tensor(&half), Err(Error::DType { argument: "tensor", .. })));
        // The host waits for this sum after the communicator is gone.
        let sum = ranks.all_reduce_sum_tensor(&on_device)?;
        drop(ranks);
        assert_eq!(sum.to_vec1::<f64>()?, sums);
        Ok(())
    };
    on_ranks(3, true, check)?;
    on_ranks(3, false, check)
}

#[test]
fn losses_of_a_vocabulary_that_ranks_share() -> Result<()> {
    on_ranks(2, true, |ranks, device| vocabulary::equals_the_whole(&ranks, device).map(|_| ()))
}

#[test]
fn a_rank_has_a_number_and_a_gpu() -> Result<()> {
    let id = [0; 128];
    assert!(matches!(Nccl::new(&Device::Cpu, 0, 1, id), Err(Error::Device { argument: "device", .. })));
    let device = Device::new_cuda(0)?;
    assert!(matches!(Nccl::new(&device, 2, 2, id), Err(Error::Config { argument: "rank", .. })));
    Ok(())
}
