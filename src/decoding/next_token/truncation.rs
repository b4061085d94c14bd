//! What top-p and min-p keep of all ids, without ranking them: the least probable id that is kept.

use rayon::prelude::*;

use crate::decoding::Sampling;

/// The ids that are kept.
#[derive(Debug)]
pub(super) struct Truncated {
    /// The logit of the last one
    z: f64,
    /// Of equals, the last one
    id: u32,
    largest: f64,
    temperature: f64,
    mass: f64,
}

impl Truncated {
    pub(super) fn has(&self, z: f64, id: u32) -> bool {
        z > self.z || z == self.z && id <= self.id
    }

    /// The log-probability of one of them.
    pub(super) fn log_prob(&self, z: f64) -> f64 {
        (z - self.largest) / self.temperature - self.mass.ln()
    }
}

/// Intervals of `(largest - z) / T`, whose masses are added up; what is further away has hardly any mass.
const INTERVALS: usize = 1024;
const PER_UNIT: f64 = 32.0;
/// Parts of the vocabulary, whose sums are added up in order, whatever the number of threads.
const PARTS: usize = 16;

/// What top-p and min-p keep of logits, one of which at least is finite. There is no top-k.
pub(super) fn kept(z: &[f64], sampling: &Sampling) -> Truncated {
    let temperature = sampling.temperature;
    let part = z.len().div_ceil(PARTS).max(1);
    let largest = z.par_iter().with_min_len(1 << 13).copied().reduce(|| f64::NEG_INFINITY, f64::max);
    let relative = |z: f64| (z - largest) / temperature;
    let interval_at = |x: f64| ((-x * PER_UNIT) as usize).min(INTERVALS - 1);
    let interval = |z: f64| interval_at(relative(z));
    let least = if sampling.min_p > 0.0 { sampling.min_p.ln() } else { f64::NEG_INFINITY };
    let masses_of = |z: &[f64]| {
        let mut masses = vec![0.0; INTERVALS];
        z.iter().filter(|&&z| z > f64::NEG_INFINITY).for_each(|&z| masses[interval(z)] += relative(z).exp());
        masses
    };
    let of_parts: Vec<Vec<f64>> = z.par_chunks(part).map(masses_of).collect();
    let masses: Vec<f64> = (0..INTERVALS).map(|i| of_parts.iter().map(|masses| masses[i]).sum()).collect();
    let wanted = sampling.top_p * masses.iter().sum::<f64>();

    // The interval in which the nucleus, or what min-p keeps, ends; all of those before it is kept.
    let last_interval = interval_at(least);
    let (mut last, mut mass) = (0, 0.0);
    while last < last_interval && mass + masses[last] < wanted {
        mass += masses[last];
        last += 1;
    }
    let in_last = |(id, &z): (usize, &f64)| (z > f64::NEG_INFINITY && interval(z) == last).then_some((z, id as u32));
    let mut ids: Vec<(f64, u32)> = z.par_iter().enumerate().with_min_len(1 << 13).filter_map(in_last).collect();
    ids.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    // Without an id of the interval, the ids before it are all.
    let z_before = largest - last as f64 / PER_UNIT * temperature;
    let mut kept = Truncated { z: z_before, id: u32::MAX, largest, temperature, mass };
    for (z, id) in ids {
        // The id that completes the nucleus is in it; the most probable one always is.
        if kept.mass > 0.0 && kept.mass >= wanted || relative(z) < least {
            break;
        }
        kept = Truncated { z, id, mass: kept.mass + relative(z).exp(), ..kept };
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::distribution::Computed;
    use crate::decoding::multinomial::nucleus;
    use proptest::prelude::*;

    proptest! {
        /// The same ids as by ranking, at ties and impossible ids too.
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
            let ranked = nucleus(&Computed::new(&z), &sampling).expect("an id");
            let found = kept(&z, &sampling);
            let mut ids: Vec<u32> = ranked.ids.iter().map(|id| id.1).collect();
            ids.sort_unstable();
            let all = (0..z.len() as u32).filter(|&id| z[id as usize] > f64::NEG_INFINITY);
            prop_assert_eq!(all.filter(|&id| found.has(z[id as usize], id)).collect::<Vec<_>>(), ids);
            prop_assert!((found.mass / ranked.masses.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        }
    }
}
