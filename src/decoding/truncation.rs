//! What top-k, top-p and min-p leave of a distribution at a temperature: the ids down to a last one, in the order of
//! [`ranking`]. The mass of an id with log-probability x is `exp((x - largest) / T)`.
//!
//! A draw by one random number adds up masses in descending order, and needs a ranking of the ids ([`rank_truncated`]). A
//! draw with noise only asks which ids are left ([`Truncation`]): top-k leaves few, which are ranked too; without it the
//! last one is found from a histogram of masses.

use super::sampling::Sampling;
use crate::backend::distribution::{Computed, Distribution, TASK_TILES};
use crate::backend::parallel;
use crate::backend::ranking::{self, Ranked};

/// The masses of a distribution's tiles.
pub(super) struct TileMasses {
    /// For each tile, its largest log-probability, and the sum of its masses relative to this one.
    pub(super) tiles: Vec<(f64, f64)>,
    /// The largest log-probability of all ids.
    pub(super) largest: f64,
    /// The sum of all masses.
    pub(super) total: f64,
}

impl TileMasses {
    /// Adds up the masses of a distribution, tile by tile.
    pub(super) fn new(distribution: &dyn Distribution, temperature: f64) -> Self {
        let tile = |buffer: &mut Vec<f64>, tile| -> (f64, f64) {
            let log_probs = distribution.tile(tile, f64::NEG_INFINITY, buffer);
            let largest = log_probs.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
            (largest, log_probs.iter().map(|&x| mass(x, largest, temperature)).sum())
        };
        let count = distribution.tiles();
        let task_tiles = |buffer: &mut Vec<f64>, first: usize| -> Vec<(f64, f64)> {
            (first..count.min(first + TASK_TILES)).map(|i| tile(buffer, i)).collect()
        };
        let tiles = parallel::map_with((0..count).step_by(TASK_TILES), Vec::new, task_tiles).concat();
        let largest = tiles.iter().fold(f64::NEG_INFINITY, |m, tile| m.max(tile.0));
        let total = tiles.iter().map(|tile| tile.1 * mass(tile.0, largest, temperature)).sum();
        TileMasses { tiles, largest, total }
    }
}

/// Returns `exp((x - largest) / T)`, which is zero for minus infinity.
pub(super) fn mass(x: f64, largest: f64, temperature: f64) -> f64 {
    if x == f64::NEG_INFINITY {
        0.0
    } else {
        ((x - largest) / temperature).exp()
    }
}

/// Ranks the ids that top-k, top-p and min-p leave of a distribution, and returns them with their masses in descending
/// order; `None` if no id is possible.
pub(super) fn rank_truncated(distribution: &dyn Distribution, sampling: &Sampling) -> Option<Vec<(u32, f64)>> {
    let &Sampling { temperature, top_k, top_p, min_p, .. } = sampling;
    let limit = top_k.unwrap_or(usize::MAX).min(distribution.vocab());
    let total = (top_k.is_none() && top_p < 1.0).then(|| TileMasses::new(distribution, temperature).total);
    // Without top-k the number of ids in the nucleus is unknown, so that the search starts small and grows.
    let mut n = if top_k.is_some() { limit } else { limit.min(FIRST_RANKED) };
    loop {
        let ids = ranking::top_k(distribution, n);
        let largest = ids.first()?.0;
        let masses: Vec<f64> = ids.iter().map(|id| mass(id.0, largest, temperature)).collect();
        let wanted = top_p * total.unwrap_or_else(|| masses.iter().sum());
        let mut sum = 0.0;
        // The id that completes the nucleus is in it; the most probable one always is.
        let nucleus = masses.iter().take_while(|&&mass| {
            let is_in = sum == 0.0 || sum < wanted;
            sum += mass;
            is_in
        });
        let masses: Vec<f64> = nucleus.copied().take_while(|&mass| mass >= min_p && mass > 0.0).collect();
        if masses.len() < n || n == limit {
            return Some(ids.into_iter().map(|ranked| ranked.1).zip(masses).collect());
        }
        n = limit.min(n * 8);
    }
}

/// The number of ids of a parallel task.
const TASK_IDS: usize = 1 << 13;

/// The number of ids that are ranked first, if top-k does not say how many.
const FIRST_RANKED: usize = 128;

/// Returns the largest of these logits.
pub(super) fn largest(z: &[f64]) -> f64 {
    let largest = |z: &[f64]| z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    largest(&parallel::map(z.chunks(TASK_IDS), largest))
}

/// What a truncation leaves of some logits.
#[derive(Debug)]
pub(super) struct Truncation {
    /// The last id that is left, with its logit.
    last: Ranked,
    /// The largest logit of all ids.
    largest: f64,
    temperature: f64,
    /// The sum of the masses of the ids that are left.
    mass: f64,
    /// The ids that are left, in descending order, if they were ranked.
    ranked: Option<Vec<u32>>,
}

impl Truncation {
    /// Truncates logits; `None` if no id is possible.
    pub(super) fn new(z: &[f64], sampling: &Sampling) -> Option<Self> {
        if sampling.top_k.is_none() {
            return Some(Self::from_histogram(z, sampling));
        }
        let (ranked, masses): (Vec<u32>, Vec<f64>) = rank_truncated(&Computed::new(z), sampling)?.into_iter().unzip();
        let (first, last) = (*ranked.first()?, *ranked.last()?);
        Some(Truncation {
            last: (z[last as usize], last),
            largest: z[first as usize],
            temperature: sampling.temperature,
            mass: masses.iter().sum(),
            ranked: Some(ranked),
        })
    }

    /// The largest logit of all ids.
    pub(super) fn largest(&self) -> f64 {
        self.largest
    }

    /// Returns the ids that are left, if they were ranked.
    pub(super) fn ranked(&self) -> Option<&[u32]> {
        self.ranked.as_deref()
    }

    /// Whether the truncation leaves this id, whose logit is `z`.
    pub(super) fn leaves(&self, z: f64, id: u32) -> bool {
        !ranking::precedes(self.last, (z, id))
    }

    /// Returns the log-probability after the truncation of an id that it leaves, whose logit is `z`.
    pub(super) fn log_prob(&self, z: f64) -> f64 {
        let relative = (z - self.largest) / self.temperature;
        // The two differ in their last bits alone; each keeps the bits that results have had.
        if self.ranked.is_some() {
            (relative.exp() / self.mass).ln()
        } else {
            relative - self.mass.ln()
        }
    }

    /// Finds the last id that top-p and min-p leave of these logits from a histogram of masses. There must be no top-k.
    fn from_histogram(z: &[f64], sampling: &Sampling) -> Self {
        let (largest, temperature) = (largest(z), sampling.temperature);
        let piece_len = z.len().div_ceil(PIECES).max(1);
        let relative = |z: f64| (z - largest) / temperature;
        let interval_at = |x: f64| ((-x * INTERVALS_PER_UNIT) as usize).min(INTERVALS - 1);
        let interval = |z: f64| interval_at(relative(z));
        let least = if sampling.min_p > 0.0 { sampling.min_p.ln() } else { f64::NEG_INFINITY };
        let histogram = |z: &[f64]| {
            let mut masses = vec![0.0; INTERVALS];
            z.iter().filter(|&&z| z > f64::NEG_INFINITY).for_each(|&z| masses[interval(z)] += relative(z).exp());
            masses
        };
        let histograms = parallel::map(z.chunks(piece_len), histogram);
        let masses: Vec<f64> = (0..INTERVALS).map(|i| histograms.iter().map(|masses| masses[i]).sum()).collect();
        let wanted = sampling.top_p * masses.iter().sum::<f64>();

        // The last id is in the interval in which the nucleus ends, or in which min-p's smallest probability is. All ids
        // of the intervals before it are left.
        let last_interval = interval_at(least);
        let (mut end, mut mass) = (0, 0.0);
        while end < last_interval && mass + masses[end] < wanted {
            mass += masses[end];
            end += 1;
        }
        let in_last = |(task, z): (usize, &[f64])| -> Vec<(f64, u32)> {
            let ids = ((task * TASK_IDS) as u32..).zip(z).map(|(id, &z)| (z, id));
            ids.filter(|&(z, _)| z > f64::NEG_INFINITY && interval(z) == end).collect()
        };
        let mut ids = parallel::map(z.chunks(TASK_IDS).enumerate(), in_last).concat();
        ids.sort_unstable_by(ranking::order);
        // If no id of this interval is left, those above its upper end are.
        let upper_end = largest - end as f64 / INTERVALS_PER_UNIT * temperature;
        let mut truncation = Truncation { last: (upper_end, u32::MAX), largest, temperature, mass, ranked: None };
        for (z, id) in ids {
            // The id that completes the nucleus is in it; the most probable one always is.
            if truncation.mass > 0.0 && truncation.mass >= wanted || relative(z) < least {
                break;
            }
            truncation = Truncation { last: (z, id), mass: truncation.mass + relative(z).exp(), ..truncation };
        }
        truncation
    }
}

/// The number of intervals of `(largest - z) / T` in the histogram. Ids beyond the last interval, which count in it,
/// have hardly any mass.
const INTERVALS: usize = 1024;
/// The number of intervals in a unit of `(largest - z) / T`.
const INTERVALS_PER_UNIT: f64 = 32.0;
/// The number of pieces of the vocabulary, whose histograms are added up in order, so that the sums do not depend on
/// the number of threads.
const PIECES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The ids that the truncation leaves are those of a ranking, with equal logits and impossible ids too.
        #[test]
        fn the_ids_are_those_of_a_ranking(
            values in proptest::collection::vec((0u16..400).prop_map(|x| f64::from(x) / 7.0), 1..700),
            impossible in proptest::collection::vec(any::<bool>(), 700),
            top_p in 0.01f64..1.0,
            min_p in prop_oneof![Just(0.0), 0.0f64..1.0],
            temperature in 0.2f64..30.0,
            top_k in proptest::option::of(1usize..800),
        ) {
            let mut z = values;
            z.iter_mut().zip(&impossible).skip(1).filter(|(_, &no)| no).for_each(|(z, _)| *z = f64::NEG_INFINITY);
            let sampling = Sampling { temperature, top_k, top_p, min_p, ..Sampling::new() };
            let ranked = rank_truncated(&Computed::new(&z), &sampling).expect("an id");
            let found = Truncation::new(&z, &sampling).expect("an id");
            let mut ids: Vec<u32> = ranked.iter().map(|id| id.0).collect();
            ids.sort_unstable();
            let all = (0..z.len() as u32).filter(|&id| z[id as usize] > f64::NEG_INFINITY);
            prop_assert_eq!(all.filter(|&id| found.leaves(z[id as usize], id)).collect::<Vec<_>>(), ids);
            prop_assert!((found.mass / ranked.iter().map(|id| id.1).sum::<f64>() - 1.0).abs() < 1e-12);
        }
    }
}
