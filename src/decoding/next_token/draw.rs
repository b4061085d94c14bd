//! Draws a token id from logits, with noise of its own for each id.

use rayon::prelude::*;

use super::noise::Noise;
use super::truncation::kept;
use crate::backend::distribution::{Computed, TILE};
use crate::backend::ranking::top_k;
use crate::decoding::multinomial::{nucleus, TileMasses};
use crate::decoding::Sampling;

/// A token id, and its log-probability under the distribution that it was drawn from.
pub(super) struct Drawn {
    pub(super) id: u32,
    pub(super) log_prob: f64,
}

/// Draws from logits that are not NaN, of which one at least is finite. At temperature 1, log-probabilities are their own
/// distribution.
pub(super) fn draw(z: &[f64], are_log_probs: bool, sampling: &Sampling, noise: Noise) -> Option<Drawn> {
    let temperature = sampling.temperature;
    if temperature == 0.0 {
        return top_k(&Computed::new(z), 1).first().map(|&(_, id)| Drawn { id, log_prob: 0.0 });
    }
    // Differences from the largest logit: a small temperature makes quotients of the logits themselves infinite, or so
    // large that the noise, which decides among equals, is lost in them.
    let relative = |z: f64, largest: f64| (z - largest) / temperature;
    if sampling.top_k.is_some() {
        let kept = nucleus(&Computed::new(z), sampling)?;
        let largest = kept.ids.first()?.0;
        let ids = kept.ids.iter().map(|&(z, id)| (relative(z, largest), id));
        let (_, id) = ids.fold(None, |chosen, (z, id)| chosen_of(chosen, z, id, noise))?;
        let place = kept.ids.iter().position(|kept| kept.1 == id)?;
        return Some(Drawn { id, log_prob: (kept.masses[place] / kept.masses.iter().sum::<f64>()).ln() });
    }
    let kept = sampling.is_truncated().then(|| kept(z, sampling));
    let largest = z.par_iter().with_min_len(1 << 13).copied().reduce(|| f64::NEG_INFINITY, f64::max);
    let is_kept = |z, id| kept.as_ref().is_none_or(|kept| kept.has(z, id));
    let of_tile = |(tile, z): (usize, &[f64])| {
        let ids = ((tile * TILE) as u32..).zip(z).filter(|&(id, &z)| is_kept(z, id));
        ids.fold(None, |chosen, (id, &z)| chosen_of(chosen, relative(z, largest), id, noise))
    };
    let of_tiles: Vec<_> = z.par_chunks(TILE).enumerate().with_min_len(8).map(of_tile).collect();
    let chosen = of_tiles.into_iter().flatten().reduce(|a, b| if b.0 > a.0 { b } else { a });
    let (_, id) = chosen?;
    let of_id = z[id as usize];
    let log_prob = match kept {
        Some(kept) => kept.log_prob(of_id),
        None if are_log_probs && temperature == 1.0 => of_id,
        None => TileMasses::new(&Computed::new(z), temperature).log_prob(of_id),
    };
    Some(Drawn { id, log_prob })
}

/// The best of the id that is chosen so far and another one, with their sums of logit and noise; of equals the first.
fn chosen_of(chosen: Option<(f64, u32)>, z: f64, id: u32, noise: Noise) -> Option<(f64, u32)> {
    if z == f64::NEG_INFINITY || chosen.is_some_and(|(sum, _)| z + noise.bound(id) <= sum) {
        return chosen;
    }
    let sum = z + noise.gumbel(id);
    match chosen {
        Some((best, _)) if sum <= best => chosen,
        _ => Some((sum, id)),
    }
}
