//! What top-k, top-p and min-p leave of a distribution at a temperature: the ids down to a last one, in the order of
//! [`ranking`]. The mass of an id with log-probability x is `exp((x - largest) / T)`.
//!
//! A draw by one random number adds up masses in descending order, and needs a ranking of the ids ([`rank_truncated`]).
//! A draw with noise only asks which ids are left ([`Truncation`]): top-k leaves few, which are ranked too; without it
//! the last one is found from a histogram of masses.

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
            let log_probs = distribution.tile(tile, buffer);
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
    // Several numbers at a time do not wait for each other.
    let larger = |a: f64, b: f64| if b > a { b } else { a };
    let largest = |z: &[f64]| {
        let mut lanes = [f64::NEG_INFINITY; 8];
        z.chunks(8).for_each(|z| lanes.iter_mut().zip(z).for_each(|(lane, &z)| *lane = larger(*lane, z)));
        lanes.into_iter().fold(f64::NEG_INFINITY, larger)
    };
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
        let histogram = Histogram::new(z, sampling.temperature);
        let Histogram { largest, temperature, ref masses } = histogram;
        let wanted = sampling.top_p * masses.iter().sum::<f64>();
        let least = if sampling.min_p > 0.0 { sampling.min_p.ln() } else { f64::NEG_INFINITY };

        // The last id is in the interval in which the nucleus ends, or in which min-p's smallest probability is. All
        // ids of the intervals before it are left.
        let last_interval = place(-least * INTERVALS_PER_UNIT).0;
        let (mut end, mut mass) = (0, 0.0);
        while end < last_interval && mass + masses[end] < wanted {
            mass += masses[end];
            end += 1;
        }
        let mut ids = histogram.ids_in(end, z);
        ids.sort_unstable_by(ranking::order);
        // If no id of this interval is left, those above its upper end are.
        let upper_end = largest - (end as f64 - 0.5) / INTERVALS_PER_UNIT * temperature;
        let relative = |z: f64| (z - largest) / temperature;
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

/// The masses of a distribution by intervals of `t = 32 (largest - z) / T`: interval i has those whose t rounds to i,
/// and the last one all others.
struct Histogram {
    largest: f64,
    temperature: f64,
    /// `[INTERVALS]`
    masses: Vec<f64>,
}

impl Histogram {
    /// Adds up the masses of these logits.
    fn new(z: &[f64], temperature: f64) -> Self {
        let (largest, scale) = (largest(z), intervals_per_logit(temperature));
        // Masses relative to that of the middle of their interval, but for the last one.
        let piece = |z: &[f64]| {
            let mut masses = vec![0.0; INTERVALS];
            for z in z {
                let t = (largest - z) * scale;
                let (interval, distance) = place(t);
                masses[interval] += if interval == LAST {
                    (-t / INTERVALS_PER_UNIT).exp()
                } else {
                    exp_near_zero(distance / INTERVALS_PER_UNIT)
                };
            }
            masses
        };
        let pieces = parallel::map(z.chunks(z.len().div_ceil(PIECES).max(1)), piece);
        let middle = |i: usize| if i == LAST { 1.0 } else { (-(i as f64) / INTERVALS_PER_UNIT).exp() };
        let mass = |i: usize| middle(i) * pieces.iter().map(|masses| masses[i]).sum::<f64>();
        Histogram { largest, temperature, masses: (0..INTERVALS).map(mass).collect() }
    }

    /// Returns the possible ids of an interval with their logits.
    fn ids_in(&self, interval: usize, z: &[f64]) -> Vec<Ranked> {
        let Histogram { largest, temperature, .. } = *self;
        let scale = intervals_per_logit(temperature);
        // No logit of the interval is below this one, which leaves room for rounding.
        let least = largest - (interval + 1) as f64 / INTERVALS_PER_UNIT * temperature;
        let least = if interval == LAST { f64::NEG_INFINITY } else { least };
        let is_in = |z: f64| place((largest - z) * scale).0 == interval;
        let ids = |(task, z): (usize, &[f64])| {
            let mut found = Vec::new();
            for (id, &z) in ((task * TASK_IDS) as u32..).zip(z) {
                if z >= least && z > f64::NEG_INFINITY && is_in(z) {
                    found.push((z, id));
                }
            }
            found
        };
        parallel::map(z.chunks(TASK_IDS).enumerate(), ids).concat()
    }
}

/// Returns the finite factor from differences of logits to t.
fn intervals_per_logit(temperature: f64) -> f64 {
    (INTERVALS_PER_UNIT / temperature).min(f64::MAX)
}

/// Rounds t, which is at least zero, to its interval. Also returns the interval's middle less t.
fn place(t: f64) -> (usize, f64) {
    // The last bits of a sum with 2^52 are the nearest integer.
    const TWO_TO_52: f64 = (1u64 << 52) as f64;
    let t = if t < LAST as f64 { t } else { LAST as f64 };
    let sum = t + TWO_TO_52;
    ((sum.to_bits() & (INTERVALS - 1) as u64) as usize, (sum - TWO_TO_52) - t)
}

/// Returns `exp(x)` for x from -1/64 to 1/64: the remainder of its series is below 1e-16.
fn exp_near_zero(x: f64) -> f64 {
    const FACTORS: [f64; 6] = [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    FACTORS.iter().fold(1.0 / 720.0, |sum, factor| sum * x + factor)
}

/// The number of intervals of a histogram. Ids beyond the last interval, which count in it, have hardly any mass.
const INTERVALS: usize = 1024;
/// The last interval.
const LAST: usize = INTERVALS - 1;
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
