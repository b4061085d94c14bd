//! The order of a distribution's ids: the more probable one comes first, and of equals the lower one. The logits of a
//! single component have the same order. A distribution that has a NaN or in which no id is possible has no argmax: a
//! query of it is an error ([`Distribution::check`]), and no listed id is its argmax. The GPUs' kernels have the order
//! in `gpu/kernels/ranking.h`.
//!
//! The `n` most probable ids are found in one pass over the distribution's tiles. The CPU's one pass ranks logits with
//! the same [`Ranking`] while they are computed. All numbers are ranked in f64, which has the order of f32.

use std::cmp::Ordering;

use candle_core::{DType, Device, Tensor, D};

use crate::backend::distribution::{Distribution, Visit, TILE};
use crate::backend::parallel;
use crate::error::Result;
use crate::tensors::transfer::{to_device, to_device_as};

/// The log-probability of a token id, and the id.
pub(crate) type Ranked = (f64, u32);

/// Compares two ids, or other things with numbers, for a ranking. None of the numbers is NaN.
pub(crate) fn order<F: PartialOrd, I: Ord>(a: &(F, I), b: &(F, I)) -> Ordering {
    b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then_with(|| a.1.cmp(&b.1))
}

/// Returns whether `a` comes before `b` in a ranking. A NaN comes before nothing, and nothing before it.
#[inline(always)]
pub(crate) fn precedes<F: PartialOrd, I: Ord>(a: (F, I), b: (F, I)) -> bool {
    a.0 > b.0 || a.0 == b.0 && a.1 < b.1
}

/// Returns the argmax of each row of log-probabilities `[positions, vocab]` by candle's operations, `[positions, 1]` in
/// i64; it is no id where there is none.
pub(crate) fn argmax(log_probs: &Tensor) -> Result<Tensor> {
    let (shape, device) = (log_probs.dims2()?, log_probs.device());
    let largest = log_probs.max_keepdim(D::Minus1)?;
    let is_valid = (largest.gt(f64::NEG_INFINITY)? * log_probs.sum_keepdim(D::Minus1)?.le(f64::INFINITY)?)?;
    let is_largest = (log_probs.broadcast_eq(&largest)? * is_valid.broadcast_as(shape)?)?;
    let ids = Tensor::arange(0, shape.1 as u32, device)?.broadcast_as(shape)?.contiguous()?;
    let no_id = Tensor::full(u32::MAX, shape, device)?;
    Ok(is_largest.where_cond(&ids, &no_id)?.min_keepdim(D::Minus1)?.to_dtype(DType::I64)?)
}

/// Finds the `n` most probable ids with their log-probabilities, in descending order.
pub(crate) fn top_k(distribution: &dyn Distribution, n: usize) -> Vec<Ranked> {
    let n = n.min(distribution.vocab());
    let tiles = distribution.tiles();
    let task_tiles = tiles.div_ceil(rayon::current_num_threads()).max(LEAST_TILES);
    let entries = parallel::map((0..tiles).step_by(task_tiles), |first| {
        let (mut ranking, mut buffer) = (Ranking::new(n), Vec::new());
        for tile in first..tiles.min(first + task_tiles) {
            let floor = ranking.floor.unwrap_or(f64::NEG_INFINITY);
            ranking.add((tile * TILE) as u32, distribution.tile_above(tile, floor, &mut buffer));
        }
        ranking.entries
    });
    let mut ranked = entries.concat();
    if ranked.len() > n {
        ranked.select_nth_unstable_by(n, order);
        ranked.truncate(n);
    }
    ranked.sort_unstable_by(order);
    ranked
}

/// A query for the `k` most probable ids.
pub(crate) struct TopKQuery {
    pub(crate) k: usize,
}

impl Visit for TopKQuery {
    type Output = Vec<Ranked>;

    fn visit(&self, position: usize, distribution: &dyn Distribution) -> Result<Self::Output> {
        distribution.check(position)?;
        Ok(top_k(distribution, self.k))
    }
}

/// Makes tensors of this shape of the ranked ids of each position, in u32, and of their log-probabilities, in `dtype`.
pub(crate) fn tensors(
    found: &[Vec<Ranked>],
    shape: &[usize],
    dtype: DType,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let (log_probs, ids): (Vec<f64>, Vec<u32>) = found.iter().flatten().copied().unzip();
    Ok((to_device(ids, shape, device)?, to_device_as(log_probs, shape, dtype, device)?))
}

/// The least number of tiles per parallel task, so that the work repays its overhead.
const LEAST_TILES: usize = 4;

/// The `n` most probable ids among those that have been added. They stand among other entries, which have not been
/// ranked yet.
pub(crate) struct Ranking {
    n: usize,
    entries: Vec<Ranked>,
    /// The n-th largest log-probability when the entries were last ranked.
    floor: Option<f64>,
}

impl Ranking {
    /// Makes a ranking of the `n` most probable ids, without entries.
    pub(crate) fn new(n: usize) -> Self {
        Ranking { n, entries: Vec::new(), floor: None }
    }

    /// Returns the number of entries that are collected before they are ranked.
    pub(crate) fn capacity(n: usize) -> usize {
        (2 * n).max(64)
    }

    /// Adds consecutive ids from `first` on, all higher than those added before.
    fn add(&mut self, first: u32, log_probs: &[f64]) {
        for (block, log_probs) in (first..).step_by(BLOCK).zip(log_probs.chunks(BLOCK)) {
            if self.floor.is_some_and(|floor| log_probs.iter().all(|&x| x <= floor)) {
                continue;
            }
            for (id, &log_prob) in (block..).zip(log_probs) {
                if self.has_place(log_prob) {
                    self.push(id, log_prob);
                }
            }
        }
    }

    /// Adds an id that has a place, higher than those added before.
    pub(crate) fn push(&mut self, id: u32, log_prob: f64) {
        self.entries.push((log_prob, id));
        if self.entries.len() == Self::capacity(self.n) {
            self.rank();
        }
    }

    /// Drops all entries but the `n` most probable ones, and returns the log-probability of the last of these. It
    /// returns `None`, and drops nothing, while fewer have been added.
    pub(crate) fn settle(&mut self) -> Option<f64> {
        if self.entries.len() >= self.n {
            self.rank();
        }
        self.floor
    }

    /// Returns whether an id with this log-probability may be among the `n` most probable ones. It is higher than those
    /// added before, so that a tie goes to these.
    pub(crate) fn has_place(&self, log_prob: f64) -> bool {
        self.floor.is_none_or(|floor| log_prob > floor)
    }

    /// Returns the entries, in no order: the `n` most probable ids, and others that have not been ranked yet.
    pub(crate) fn entries(&self) -> &[Ranked] {
        &self.entries
    }

    /// Drops all entries but the `n` most probable ones. There are at least `n`.
    fn rank(&mut self) {
        let last = self.n - 1;
        self.entries.select_nth_unstable_by(last, order);
        self.entries.truncate(self.n);
        self.floor = Some(self.entries[last].0);
    }
}

/// The number of ids that are compared with the floor together.
const BLOCK: usize = 64;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::backend::distribution::{read_positions, Computed};
    use crate::error::Error;

    proptest! {
        #[test]
        fn the_most_probable_ids_match_a_full_sort(
            values in proptest::collection::vec((0u8..40).prop_map(|x| f64::from(x) / 4.0), 1..3000),
            n in 1usize..200,
        ) {
            let mut sorted: Vec<Ranked> = values.iter().copied().zip(0..).collect();
            sorted.sort_by(order);
            sorted.truncate(n);
            prop_assert_eq!(top_k(&Computed::new(&values), n), sorted);
        }
    }

    #[test]
    fn minus_infinity_is_ranked_last() {
        let values = [f64::NEG_INFINITY, -2.0, f64::NEG_INFINITY, -1.0];
        let ids: Vec<u32> = top_k(&Computed::new(&values), 9).iter().map(|&(_, id)| id).collect();
        assert_eq!(ids, [3, 1, 0, 2]);
    }

    #[test]
    fn the_first_position_with_an_error_is_named_whichever_thread_finds_one_first() {
        let visit_position = |position: usize| {
            if position == 0 {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            Err(Error::Distribution { position })
        };
        let read = read_positions(0..64, &visit_position);
        assert!(matches!(read, Err(Error::Distribution { position: 0 })), "{read:?}");
    }
}
