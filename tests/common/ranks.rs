//! Threads of one process as the ranks of a distributed program.

use std::sync::{Arc, Barrier, Mutex, PoisonError};

use mos_head::{Collectives, Numbers, Result};

/// A thread as a rank.
#[derive(Debug)]
struct Thread {
    rank: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    barrier: Barrier,
    /// What each rank sends
    sent: Vec<Mutex<Vec<f64>>>,
}

/// The results of a function that as many threads call, each as a rank.
pub fn on_ranks<T: Send>(ranks: usize, run: impl Fn(Arc<dyn Collectives>) -> T + Sync) -> Vec<T> {
    let sent = (0..ranks).map(|_| Mutex::default()).collect();
    let shared = Arc::new(Shared { barrier: Barrier::new(ranks), sent });
    std::thread::scope(|scope| {
        let run = &run;
        let of_rank = |rank| {
            let thread = Thread { rank, shared: shared.clone() };
            scope.spawn(move || run(Arc::new(thread)))
        };
        let threads: Vec<_> = (0..ranks).map(of_rank).collect();
        threads.into_iter().map(|thread| thread.join().expect("a result")).collect()
    })
}

impl Thread {
    /// What all ranks send: as many numbers each, as MPI requires.
    fn exchange(&self, numbers: Vec<f64>) -> Vec<Vec<f64>> {
        let slot = |rank: usize| self.shared.sent[rank].lock().unwrap_or_else(PoisonError::into_inner);
        *slot(self.rank) = numbers;
        self.shared.barrier.wait();
        let all: Vec<Vec<f64>> = (0..self.ranks()).map(|rank| slot(rank).clone()).collect();
        self.shared.barrier.wait();
        assert!(all.iter().all(|sent| sent.len() == all[0].len()), "ranks send different numbers of numbers");
        all
    }
}

impl Collectives for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.shared.sent.len()
    }

    fn all_reduce_sum(&self, numbers: Numbers<'_>) -> Result<()> {
        match numbers {
            Numbers::F32(numbers) => {
                let all = self.exchange(numbers.iter().map(|&x| f64::from(x)).collect());
                numbers.iter_mut().enumerate().for_each(|(i, to)| *to = all.iter().map(|x| x[i] as f32).sum());
            }
            Numbers::F64(numbers) => {
                let all = self.exchange(numbers.to_vec());
                numbers.iter_mut().enumerate().for_each(|(i, to)| *to = all.iter().map(|x| x[i]).sum());
            }
        }
        Ok(())
    }

    fn all_gather(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        Ok(self.exchange(numbers.to_vec()).concat())
    }

    fn broadcast(&self, numbers: Numbers<'_>, root: usize) -> Result<()> {
        match numbers {
            Numbers::F32(numbers) => {
                let all = self.exchange(numbers.iter().map(|&x| f64::from(x)).collect());
                numbers.iter_mut().zip(&all[root]).for_each(|(to, &x)| *to = x as f32);
            }
            Numbers::F64(numbers) => {
                let all = self.exchange(numbers.to_vec());
                numbers.copy_from_slice(&all[root]);
            }
        }
        Ok(())
    }
}
