//! Draws a token id from a distribution, or from what a truncation leaves of it, with one random number.

use super::sampling::Sampling;
use super::truncation::{mass, rank_truncated, TileMasses};
use crate::backend::distribution::{Distribution, Visit, TILE};
use crate::backend::ranking;
use crate::error::{Error, Result};

/// A query that draws a token id from each position's distribution.
pub(crate) struct DrawQuery<'a> {
    pub(crate) sampling: &'a Sampling,
    /// A random number from 0 to below 1 for each position.
    pub(crate) uniform: &'a [f64],
}

impl Visit for DrawQuery<'_> {
    type Output = u32;

    fn visit(&self, position: usize, distribution: &dyn Distribution) -> Result<u32> {
        distribution.check(position)?;
        let u = self.uniform[position];
        let id = match self.sampling {
            Sampling { temperature: 0.0, .. } => ranking::top_k(distribution, 1).first().map(|id| id.1),
            sampling if sampling.is_truncated() => draw_truncated(distribution, sampling, u),
            sampling => draw_from_all(distribution, sampling.temperature, u),
        };
        id.ok_or(Error::Impossible { position })
    }
}

/// Returns the token id at which the cumulative probability passes `u`. Its tile is found first.
fn draw_from_all(distribution: &dyn Distribution, temperature: f64, u: f64) -> Option<u32> {
    let TileMasses { tiles, largest, total } = TileMasses::new(distribution, temperature);
    let tile_mass = |tile: &(f64, f64)| tile.1 * mass(tile.0, largest, temperature);
    let (tile, remainder) = find_by_mass(tiles.iter().map(tile_mass), u * total)?;
    let mut buffer = Vec::new();
    let log_probs = distribution.tile(tile, &mut buffer);
    let (id, _) = find_by_mass(log_probs.iter().map(|&x| mass(x, largest, temperature)), remainder)?;
    Some((tile * TILE + id) as u32)
}

/// Draws from the token ids that top-k, top-p and min-p leave.
fn draw_truncated(distribution: &dyn Distribution, sampling: &Sampling, u: f64) -> Option<u32> {
    let ranked = rank_truncated(distribution, sampling)?;
    let masses = ranked.iter().map(|id| id.1);
    find_by_mass(masses.clone(), u * masses.sum::<f64>()).map(|(i, _)| ranked[i].0)
}

/// Returns the index at which the cumulative mass exceeds `target`, and the remainder of `target` there. An element
/// without mass is never chosen; if rounding leaves a remainder at the end, the last element with mass is chosen.
pub(super) fn find_by_mass(masses: impl Iterator<Item = f64>, target: f64) -> Option<(usize, f64)> {
    let mut remainder = target;
    let mut last = None;
    for (i, mass) in masses.enumerate() {
        if mass > 0.0 {
            if remainder < mass {
                return Some((i, remainder));
            }
            last = Some((i, mass));
            remainder -= mass;
        }
    }
    last
}
