//! The n most probable token ids of a distribution, in one pass over its tiles.

use std::cmp::Ordering;

use rayon::prelude::*;

use crate::backend::contract::{Distribution, Real, Visit, TILE};
use crate::error::{Error, Result};

/// A token id and its log-probability.
pub(crate) type Ranked<F> = (F, u32);

/// The more probable first; of equals the lower id.
fn order<F: Real>(a: &Ranked<F>, b: &Ranked<F>) -> Ordering {
    b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1))
}

/// The `n` most probable token ids, the most probable first.
pub(crate) fn best<F: Real>(distribution: &impl Distribution<F>, n: usize) -> Vec<Ranked<F>> {
    let n = n.min(distribution.vocab());
    let tiles = distribution.tiles();
    let part = tiles.div_ceil(rayon::current_num_threads()).max(LEAST_TILES);
    let candidates = (0..tiles).into_par_iter().step_by(part).map(|first| {
        let (mut candidates, mut buffer) = (Candidates::new(n), Vec::new());
        for tile in first..tiles.min(first + part) {
            let floor = candidates.floor.unwrap_or_else(F::neg_infinity);
            candidates.add((tile * TILE) as u32, distribution.tile(tile, floor, &mut buffer));
        }
        candidates.ids
    });
    let mut ids: Vec<Ranked<F>> = candidates.flatten_iter().collect();
    ids.sort_unstable_by(order);
    ids.truncate(n);
    ids
}

/// Finds the `k` most probable ids.
pub(crate) struct Best {
    pub(crate) k: usize,
}

impl Visit for Best {
    type Output = Vec<(f64, u32)>;

    fn visit<F: Real>(&self, position: usize, distribution: &impl Distribution<F>) -> Result<Self::Output> {
        if !distribution.is_valid() {
            return Err(Error::Distribution { position });
        }
        Ok(best(distribution, self.k).into_iter().map(|(log_prob, id)| (log_prob.f64(), id)).collect())
    }
}

/// Fewer tiles are not worth another thread.
const LEAST_TILES: usize = 4;

/// The best token ids so far, and some that are not.
struct Candidates<F> {
    n: usize,
    ids: Vec<Ranked<F>>,
    /// The n-th best of those that have been ranked.
    floor: Option<F>,
}

impl<F: Real> Candidates<F> {
    fn new(n: usize) -> Self {
        Candidates { n, ids: Vec::with_capacity(Self::room(n)), floor: None }
    }

    /// So many are collected before they are ranked.
    fn room(n: usize) -> usize {
        (2 * n).max(64)
    }

    /// Adds token ids with higher ids than those before.
    fn add(&mut self, first: u32, log_probs: &[F]) {
        for (block, log_probs) in (first..).step_by(BLOCK).zip(log_probs.chunks(BLOCK)) {
            if self.floor.is_some_and(|floor| log_probs.iter().all(|&x| x <= floor)) {
                continue;
            }
            for (id, &log_prob) in (block..).zip(log_probs) {
                // Of equals the lower id is there already.
                if self.floor.is_none_or(|floor| log_prob > floor) {
                    self.ids.push((log_prob, id));
                    if self.ids.len() == Self::room(self.n) {
                        self.rank();
                    }
                }
            }
        }
    }

    fn rank(&mut self) {
        let last = self.n - 1;
        self.ids.select_nth_unstable_by(last, order);
        self.ids.truncate(self.n);
        self.floor = Some(self.ids[last].0);
    }
}

/// Token ids that are compared with the floor together.
const BLOCK: usize = 64;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::backend::contract::Computed;

    proptest! {
        #[test]
        fn the_best_are_those_of_a_sort(
            values in proptest::collection::vec((0u8..40).prop_map(|x| f32::from(x) / 4.0), 1..3000),
            n in 1usize..200,
        ) {
            let mut sorted: Vec<Ranked<f32>> = values.iter().copied().zip(0..).collect();
            sorted.sort_by(order);
            sorted.truncate(n);
            prop_assert_eq!(best(&Computed(&values), n), sorted);
        }
    }

    #[test]
    fn minus_infinity_is_ranked_last() {
        let values = [f32::NEG_INFINITY, -2.0, f32::NEG_INFINITY, -1.0];
        let ids: Vec<u32> = best(&Computed(&values), 9).iter().map(|id| id.1).collect();
        assert_eq!(ids, [3, 1, 0, 2]);
    }
}
