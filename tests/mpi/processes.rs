//! What each process does: all comparisons, or the fault that the argument names.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use candle_core::Device;
use mos_head::distributed::{Collectives, Mpi, Numbers, VocabShard};
use mos_head::{Error, Result};

use crate::{checkpoint, decoding, texts, vocabulary};

/// What befalls a rank when the others wait for it: each of those that say so ends with an error.
fn befall(fault: &str, world: Mpi) -> Result<()> {
    let (rank, last) = (world.rank(), world.ranks() - 1);
    let is_absent = rank == last;
    match fault {
        // In a group of every second rank.
        "absent" => {
            let group = world.split(rank % 2)?;
            if is_absent {
                std::thread::sleep(Duration::from_secs(60));
            }
            let result = group.all_gather(&[1.0]);
            let is_in_group = rank % 2 == last % 2;
            assert!(
                !is_in_group || matches!(&result, Err(Error::Timeout { ranks, .. }) if *ranks == [last]),
                "{result:?}"
            );
            assert!(is_in_group || result.is_ok(), "{result:?}");
            let again = world.all_gather(&[1.0]);
            assert!(matches!(&again, Err(Error::Timeout { .. })), "{again:?}");
        }
        "at the end" if is_absent => std::thread::sleep(Duration::from_secs(60)),
        "at the end" => {}
        "panics" if is_absent => panic!("as it should"),
        "panics" => world.all_gather(&[1.0]).map(|_| ())?,
        // While MPI moves numbers.
        "stops" => {
            if is_absent {
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_secs(1));
                    Command::new("kill").args(["-STOP", &std::process::id().to_string()]).status()
                });
            }
            let mut numbers = vec![1f32; 1 << 24];
            let error = loop {
                if let Err(error) = world.all_reduce_sum(Numbers::F32(&mut numbers)) {
                    break error;
                }
            };
            assert!(matches!(error, Error::Timeout { .. }), "{error:?}");
        }
        _ => panic!("no such fault: {fault}"),
    }
    Ok(())
}

pub(crate) fn run() -> Result<()> {
    if let Some(fault) = std::env::args().nth(1) {
        return befall(&fault, Mpi::with_time_limit(Duration::from_secs(2))?);
    }
    let world = Mpi::new()?;
    // One that each has for itself, a grid, and one of all in which a rank ends before the others.
    let (alone, together) = (world.split(world.rank())?, world.split(0)?);
    assert_eq!((alone.rank(), alone.ranks(), together.rank(), together.ranks()), (0, 1, world.rank(), world.ranks()));
    for shards in 1..=world.ranks() {
        if world.ranks() % shards == 0 {
            let vocabulary: Arc<dyn Collectives> = Arc::new(world.split(world.rank() / shards)?);
            let texts: Arc<dyn Collectives> = Arc::new(world.split(world.rank() % shards)?);
            texts::equal_one_process(&texts, (shards > 1).then_some(&vocabulary))?;
        }
    }
    let ranks: Arc<dyn Collectives> = Arc::new(world);
    let (rank, count) = (ranks.rank(), ranks.ranks());
    assert!(Mpi::new().is_err());

    // More than a call sends at once.
    let rank_number = |rank: usize, i: usize| (rank + i % 5) as f64;
    let n = (1 << 20) + 3;
    let mut numbers: Vec<f64> = (0..n).map(|i| rank_number(rank, i)).collect();
    let all = ranks.all_gather(&numbers)?;
    assert!((0..count).all(|rank| (0..n).all(|i| all[rank * n + i] == rank_number(rank, i))));
    ranks.all_reduce_sum(Numbers::F64(&mut numbers))?;
    assert!((0..n).all(|i| numbers[i] == (0..count).map(|rank| rank_number(rank, i)).sum::<f64>()));
    // Rounding depends on the order of a sum, which must be the same for every rank.
    let mut numbers: Vec<f32> = (0..n).map(|i| ((i + 7 * rank) as f32).sin()).collect();
    ranks.all_reduce_sum(Numbers::F32(&mut numbers))?;
    let mut bits = DefaultHasher::new();
    numbers.iter().for_each(|number| number.to_bits().hash(&mut bits));
    let all_bits = ranks.all_gather(&[(bits.finish() >> 12) as f64])?;
    assert!(all_bits.iter().all(|bits_of_rank| *bits_of_rank == all_bits[0]), "{all_bits:?}");
    let mut numbers: Vec<f32> = (0..n).map(|i| rank_number(rank, i) as f32).collect();
    ranks.broadcast(Numbers::F32(&mut numbers), count - 1)?;
    assert!((0..n).all(|i| numbers[i] == rank_number(count - 1, i) as f32));
    assert!(ranks.broadcast(Numbers::F32(&mut numbers), count).is_err());

    let bits = vocabulary::equals_the_whole(&ranks, &Device::Cpu)?;
    vocabulary::correct_targets_are_those_of_the_whole(&ranks)?;
    vocabulary::adapted_decoders_equal_the_whole(&ranks)?;
    decoding::equals_the_whole(&ranks)?;
    checkpoint::loads_with_another_cut(&ranks)?;

    // Other operations, other numbers of numbers, and other roots are errors on every rank.
    if count > 1 {
        let result = match rank {
            0 => ranks.all_reduce_sum(Numbers::F64(&mut [1.0])),
            _ => ranks.all_gather(&[1.0]).map(|_| ()),
        };
        assert!(matches!(result, Err(Error::Ranks { argument: "the operation (0 is the end)", .. })), "{result:?}");
        let result = ranks.all_gather(&vec![1.0; 2 + rank / 2]);
        assert!(result.is_ok() == (count == 2), "{result:?}");
        let result = ranks.broadcast(Numbers::F64(&mut [1.0]), rank);
        assert!(matches!(result, Err(Error::Ranks { argument: "root", .. })), "{result:?}");
    }

    // A rank that has ended does not let another wait.
    if rank + 1 == count && count > 1 {
        drop(ranks);
        let waits = VocabShard::new(Arc::new(together), 1000);
        assert!(matches!(waits, Err(Error::Ranks { argument: "the operation (0 is the end)", .. })), "{waits:?}");
    } else {
        drop((together, alone, ranks));
    }
    if rank == 0 {
        println!("{count} processes equal one (bits of the first: {bits:016x})");
    }
    Ok(())
}
