//! Draws a token id from logits by the Gumbel-max trick: the id whose sum of logit and noise is the largest. The noise
//! of an id does not depend on what else is drawn ([`Noise`]).

use super::noise::Noise;
use crate::backend::distribution::{Computed, TASK_TILES, TILE};
use crate::backend::parallel;
use crate::backend::ranking::top_k;
use crate::decoding::truncation::{largest, TileMasses, Truncation};
use crate::decoding::Sampling;

/// A token id, and its log-probability under the distribution that it was drawn from.
pub(super) struct Drawn {
    pub(super) id: u32,
    pub(super) log_prob: f64,
}

/// Draws from logits that are not NaN, of which at least one is finite; `None` if no id can be drawn. If
/// `are_log_probs`, they are normalised already, which saves a sum at temperature 1.
pub(super) fn draw(z: &[f64], are_log_probs: bool, sampling: &Sampling, noise: Noise) -> Option<Drawn> {
    let temperature = sampling.temperature;
    if temperature == 0.0 {
        return top_k(&Computed::new(z), 1).first().map(|&(_, id)| Drawn { id, log_prob: 0.0 });
    }
    let truncation = if sampling.is_truncated() { Some(Truncation::new(z, sampling)?) } else { None };
    let largest = truncation.as_ref().map_or_else(|| largest(z), Truncation::largest);
    let is_left = |z, id| truncation.as_ref().is_none_or(|truncation| truncation.leaves(z, id));
    // Differences from the largest logit: a small temperature makes quotients of the logits themselves infinite, or so
    // large that the noise, which decides among equals, is lost in them.
    let relative = |z: f64| (z - largest) / temperature;
    let draw_from_tile = |(tile, z): (usize, &[f64])| {
        let ids = ((tile * TILE) as u32..).zip(z).filter(|&(id, &z)| is_left(z, id));
        ids.fold(None, |leader, (id, &z)| larger_with_noise(leader, relative(z), id, noise))
    };
    let draw = |leader, &id: &u32| larger_with_noise(leader, relative(z[id as usize]), id, noise);
    let drawn = match truncation.as_ref().and_then(Truncation::ranked) {
        Some(ids) => ids.iter().fold(None, draw),
        None => {
            let tiles: Vec<_> = z.chunks(TILE).enumerate().collect();
            let draw_from_tiles =
                |tiles: &[_]| tiles.iter().filter_map(|&tile| draw_from_tile(tile)).reduce(larger_sum);
            parallel::map(tiles.chunks(TASK_TILES), draw_from_tiles).into_iter().flatten().reduce(larger_sum)
        }
    };
    let (_, id) = drawn?;
    let drawn_z = z[id as usize];
    let log_prob = match truncation {
        Some(truncation) => truncation.log_prob(drawn_z),
        None if are_log_probs && temperature == 1.0 => drawn_z,
        None => relative(drawn_z) - TileMasses::new(&Computed::new(z), temperature).total.ln(),
    };
    Some(Drawn { id, log_prob })
}

/// Returns the id with the larger sum of logit and noise; of equals, the first.
fn larger_sum(a: (f64, u32), b: (f64, u32)) -> (f64, u32) {
    if b.0 > a.0 {
        b
    } else {
        a
    }
}

/// Returns that of two ids, the leader so far and another one with logit `z`, whose sum of logit and noise is larger,
/// with this sum. If the sums are equal, it is the leader.
fn larger_with_noise(leader: Option<(f64, u32)>, z: f64, id: u32, noise: Noise) -> Option<(f64, u32)> {
    if z == f64::NEG_INFINITY || leader.is_some_and(|(sum, _)| z + noise.bound(id) <= sum) {
        return leader;
    }
    let sum = z + noise.gumbel(id);
    match leader {
        Some((largest, _)) if sum <= largest => leader,
        _ => Some((sum, id)),
    }
}
