//! Draws a token id from logits by the Gumbel-max trick: the id whose sum of logit and noise is the largest. The noise
//! of an id does not depend on what else is drawn ([`Noise`]).

use super::entries::Entries;
use super::noise::Noise;
use crate::backend::distribution::{Computed, TASK_TILES, TILE};
use crate::backend::parallel;
use crate::backend::ranking::top_k;
use crate::decoding::truncation::{largest, TileMasses, Truncation};
use crate::decoding::Sampling;

/// An entry, and its log-probability under the distribution that it was drawn from.
pub(super) struct Drawn {
    pub(super) entry: usize,
    pub(super) log_prob: f64,
}

/// Draws from the entries' logits, which are not NaN, and of which at least one is finite; `None` if no id can be
/// drawn. If `are_log_probs`, they are normalised already, which saves a sum at temperature 1.
pub(super) fn draw(
    z: &[f64],
    entries: Entries<'_>,
    are_log_probs: bool,
    sampling: &Sampling,
    noise: Noise,
) -> Option<Drawn> {
    let temperature = sampling.temperature;
    if temperature == 0.0 {
        return top_k(&Computed::new(z), 1).first().map(|&(_, entry)| Drawn { entry: entry as usize, log_prob: 0.0 });
    }
    let truncation = if sampling.is_truncated() { Some(Truncation::new(z, sampling)?) } else { None };
    let largest = truncation.as_ref().map_or_else(|| largest(z), Truncation::largest);
    let is_left = |z, entry| truncation.as_ref().is_none_or(|truncation| truncation.leaves(z, entry));
    // Differences from the largest logit: a small temperature makes quotients of the logits themselves infinite, or so
    // large that the noise, which decides among equals, is lost in them.
    let relative = |z: f64| (z - largest) / temperature;
    let larger = |leader: Option<(f64, u32)>, z: f64, entry: u32| -> Option<(f64, u32)> {
        let id = entries.id(entry as usize);
        larger_with_noise(leader.map(|leader| leader.0), z, id, noise).map(|sum| (sum, entry)).or(leader)
    };
    let draw_from_tile = |(tile, z): (usize, &[f64])| {
        let left = ((tile * TILE) as u32..).zip(z).filter(|&(entry, &z)| is_left(z, entry));
        left.fold(None, |leader, (entry, &z)| larger(leader, relative(z), entry))
    };
    let drawn = match truncation.as_ref().and_then(Truncation::ranked) {
        Some(ranked) => ranked.iter().fold(None, |leader, &entry| larger(leader, relative(z[entry as usize]), entry)),
        None => {
            let tiles: Vec<_> = z.chunks(TILE).enumerate().collect();
            let draw_from_tiles =
                |tiles: &[_]| tiles.iter().filter_map(|&tile| draw_from_tile(tile)).reduce(larger_sum);
            parallel::map(tiles.chunks(TASK_TILES), draw_from_tiles).into_iter().flatten().reduce(larger_sum)
        }
    };
    let entry = drawn?.1 as usize;
    let drawn_z = z[entry];
    let log_prob = match truncation {
        Some(truncation) => truncation.log_prob(drawn_z),
        None if are_log_probs && temperature == 1.0 => drawn_z,
        None => relative(drawn_z) - TileMasses::new(&Computed::new(z), temperature).total.ln(),
    };
    Some(Drawn { entry, log_prob })
}

/// Returns the entry with the larger sum of logit and noise; of equals, the first.
fn larger_sum(a: (f64, u32), b: (f64, u32)) -> (f64, u32) {
    if b.0 > a.0 {
        b
    } else {
        a
    }
}

/// Returns the sum of the logit z and the noise of an id if it is larger than the leader's.
fn larger_with_noise(leader: Option<f64>, z: f64, id: u32, noise: Noise) -> Option<f64> {
    if z == f64::NEG_INFINITY || leader.is_some_and(|leader| z + noise.bound(id) <= leader) {
        return None;
    }
    let sum = z + noise.gumbel(id);
    Some(sum).filter(|&sum| leader.is_none_or(|leader| sum > leader))
}
