//! Threads of one process as the ranks of a distributed program.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use mos_head::distributed::{Collectives, Numbers};
use mos_head::Result;

/// A thread as a rank.
#[derive(Debug)]
struct Thread {
    rank: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    meeting: Mutex<Meeting>,
    all_are_here: Condvar,
    /// What each rank sends
    sent: Vec<Mutex<Vec<f64>>>,
}

/// A barrier, which a rank that ends leaves.
#[derive(Debug, Default)]
struct Meeting {
    waiting: usize,
    /// How often all ranks have met
    met: usize,
    has_left: bool,
}

impl Shared {
    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self) {
        let mut meeting = self.meeting();
        meeting.waiting += 1;
        if meeting.waiting == self.sent.len() {
            (meeting.waiting, meeting.met) = (0, meeting.met + 1);
            self.all_are_here.notify_all();
            return;
        }
        let met = meeting.met;
        let waits = |meeting: &mut Meeting| meeting.met == met && !meeting.has_left;
        let meeting = self.all_are_here.wait_while(meeting, waits).unwrap_or_else(PoisonError::into_inner);
        let has_left = meeting.has_left && meeting.met == met;
        drop(meeting);
        assert!(!has_left, "another rank has ended");
    }
}

/// Lets no rank wait for one that has ended.
struct Leaves(Arc<Shared>);

impl Drop for Leaves {
    fn drop(&mut self) {
        self.0.meeting().has_left = true;
        self.0.all_are_here.notify_all();
    }
}

/// The results of a function that as many threads call, each as a rank.
pub fn on_ranks<T: Send>(ranks: usize, run: impl Fn(Arc<dyn Collectives>) -> T + Sync) -> Vec<T> {
    let sent = (0..ranks).map(|_| Mutex::default()).collect();
    let shared = Arc::new(Shared { meeting: Mutex::default(), all_are_here: Condvar::new(), sent });
    std::thread::scope(|scope| {
        let run = &run;
        let start = |rank| {
            let (thread, leaves) = (Thread { rank, shared: shared.clone() }, Leaves(shared.clone()));
            scope.spawn(move || {
                let _leaves = leaves;
                run(Arc::new(thread))
            })
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a result")).collect()
    })
}

impl Thread {
    /// What all ranks send: as many numbers each, as MPI requires.
    fn exchange(&self, numbers: Vec<f64>) -> Vec<Vec<f64>> {
        let slot = |rank: usize| self.shared.sent[rank].lock().unwrap_or_else(PoisonError::into_inner);
        *slot(self.rank) = numbers;
        self.shared.wait();
        let all: Vec<Vec<f64>> = (0..self.ranks()).map(|rank| slot(rank).clone()).collect();
        self.shared.wait();
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
