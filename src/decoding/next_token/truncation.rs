//! Truncation by top-p and min-p without a ranking of all ids: the least probable id that they leave is found from a
//! histogram of masses.

use rayon::prelude::*;

use crate::decoding::Sampling;

/// The least probable id that a truncation leaves.
#[derive(Debug)]
pub(super) struct Threshold {
    /// Its logit.
    z: f64,
    /// The id, which is the last one that is left among those with its logit.
    id: u32,
    /// The largest logit of all ids.
    largest: f64,
    temperature: f64,
    /// The sum of the masses `exp((z - largest) / T)` of the ids that are left.
    mass: f64,
}

impl Threshold {
    /// Whether the truncation leaves this id, whose logit is `z`.
    pub(super) fn admits(&self, z: f64, id: u32) -> bool {
        z > self.z || z == self.z && id <= self.id
    }

    /// Returns the log-probability after the truncation of an id that it leaves, whose logit is `z`.
    pub(super) fn log_prob(&self, z: f64) -> f64 {
        (z - self.largest) / self.temperature - self.mass.ln()
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

/// Finds the least probable id that top-p and min-p leave of these logits, at least one of which is finite. There must
/// be no top-k.
pub(super) fn find_threshold(z: &[f64], sampling: &Sampling) -> Threshold {
    let temperature = sampling.temperature;
    let piece_len = z.len().div_ceil(PIECES).max(1);
    let largest = z.par_iter().with_min_len(1 << 13).copied().reduce(|| f64::NEG_INFINITY, f64::max);
    let relative = |z: f64| (z - largest) / temperature;
    let interval_at = |x: f64| ((-x * INTERVALS_PER_UNIT) as usize).min(INTERVALS - 1);
    let interval = |z: f64| interval_at(relative(z));
    let least = if sampling.min_p > 0.0 { sampling.min_p.ln() } else { f64::NEG_INFINITY };
    let histogram = |z: &[f64]| {
        let mut masses = vec![0.0; INTERVALS];
        z.iter().filter(|&&z| z > f64::NEG_INFINITY).for_each(|&z| masses[interval(z)] += relative(z).exp());
        masses
    };
    let histograms: Vec<Vec<f64>> = z.par_chunks(piece_len).map(histogram).collect();
    let masses: Vec<f64> = (0..INTERVALS).map(|i| histograms.iter().map(|masses| masses[i]).sum()).collect();
    let wanted = sampling.top_p * masses.iter().sum::<f64>();

    // The threshold is in the interval in which the nucleus ends, or in which min-p's smallest probability is. All ids
    // of the intervals before it are left.
    let last_interval = interval_at(least);
    let (mut last, mut mass) = (0, 0.0);
    while last < last_interval && mass + masses[last] < wanted {
        mass += masses[last];
        last += 1;
    }
    let in_last = |(id, &z): (usize, &f64)| (z > f64::NEG_INFINITY && interval(z) == last).then_some((z, id as u32));
    let mut ids: Vec<(f64, u32)> = z.par_iter().enumerate().with_min_len(1 << 13).filter_map(in_last).collect();
    ids.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    // If no id of this interval is left, the threshold is its upper end.
    let upper_end = largest - last as f64 / INTERVALS_PER_UNIT * temperature;
    let mut threshold = Threshold { z: upper_end, id: u32::MAX, largest, temperature, mass };
    for (z, id) in ids {
        // The id that completes the nucleus is in it; the most probable one always is.
        if threshold.mass > 0.0 && threshold.mass >= wanted || relative(z) < least {
            break;
        }
        threshold = Threshold { z, id, mass: threshold.mass + relative(z).exp(), ..threshold };
    }
    threshold
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::distribution::Computed;
    use crate::decoding::multinomial::rank_truncation;
    use proptest::prelude::*;

    proptest! {
        /// The ids that the threshold admits are those of a ranking, with equal logits and impossible ids too.
        #[test]
        fn the_ids_are_those_of_a_ranking(
            values in proptest::collection::vec((0u16..400).prop_map(|x| f64::from(x) / 7.0), 1..700),
            impossible in proptest::collection::vec(any::<bool>(), 700),
            top_p in 0.01f64..1.0,
            min_p in prop_oneof![Just(0.0), 0.0f64..1.0],
            temperature in 0.2f64..30.0,
        ) {
            let mut z = values;
            z.iter_mut().zip(&impossible).skip(1).filter(|(_, &no)| no).for_each(|(z, _)| *z = f64::NEG_INFINITY);
            let sampling = Sampling::new().with_top_p(top_p).with_min_p(min_p).with_temperature(temperature);
            let ranked = rank_truncation(&Computed::new(&z), &sampling).expect("an id");
            let found = find_threshold(&z, &sampling);
            let mut ids: Vec<u32> = ranked.ids.iter().map(|id| id.1).collect();
            ids.sort_unstable();
            let all = (0..z.len() as u32).filter(|&id| z[id as usize] > f64::NEG_INFINITY);
            prop_assert_eq!(all.filter(|&id| found.admits(z[id as usize], id)).collect::<Vec<_>>(), ids);
            prop_assert!((found.mass / ranked.masses.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        }
    }
}
