//! Draws a token id from a distribution, or from what a truncation leaves of it, with one random number.

use rayon::prelude::*;

use super::sampling::Sampling;
use crate::backend::distribution::{Distribution, Real, Visit, TILE};
use crate::backend::ranking::{self, Ranked};
use crate::error::{Error, Result};

/// A query that draws a token id from each position's distribution.
pub(crate) struct DrawQuery<'a> {
    pub(crate) sampling: &'a Sampling,
    /// A random number from 0 to below 1 for each position.
    pub(crate) uniform: &'a [f64],
}

impl Visit for DrawQuery<'_> {
    type Output = u32;

    fn visit<F: Real>(&self, position: usize, distribution: &impl Distribution<F>) -> Result<u32> {
        distribution.check(position)?;
        let u = self.uniform[position];
        let id = match self.sampling {
            Sampling { temperature: 0.0, .. } => ranking::top_k(distribution, 1).first().map(|id| id.1),
            sampling if sampling.is_truncated() => draw_truncated(distribution, sampling, u),
            sampling => TileMasses::new(distribution, sampling.temperature).draw(distribution, u),
        };
        id.ok_or(Error::Impossible { position })
    }
}

/// The masses of a distribution's tiles at temperature T. The mass of an id with log-probability x is
/// `exp((x - largest) / T)`.
pub(super) struct TileMasses {
    temperature: f64,
    /// For each tile, its largest log-probability, and the sum of its masses relative to this one.
    tiles: Vec<(f64, f64)>,
    /// The largest log-probability of all ids.
    largest: f64,
    /// The sum of all masses.
    total: f64,
}

impl TileMasses {
    /// Adds up the masses of a distribution, tile by tile.
    pub(super) fn new<F: Real>(distribution: &impl Distribution<F>, temperature: f64) -> Self {
        let tile = |buffer: &mut Vec<F>, tile| {
            let log_probs = distribution.tile(tile, F::neg_infinity(), buffer);
            let largest = log_probs.iter().fold(f64::NEG_INFINITY, |m, x| m.max(x.f64()));
            (largest, log_probs.iter().map(|x| mass(x.f64(), largest, temperature)).sum())
        };
        let tiles: Vec<(f64, f64)> =
            (0..distribution.tiles()).into_par_iter().with_min_len(8).map_init(Vec::new, tile).collect();
        let largest = tiles.iter().fold(f64::NEG_INFINITY, |m, tile| m.max(tile.0));
        let total = tiles.iter().map(|tile| tile.1 * mass(tile.0, largest, temperature)).sum();
        TileMasses { temperature, tiles, largest, total }
    }

    /// Returns the log-probability at the temperature of an id whose log-probability in the distribution is `x`.
    pub(super) fn tempered_log_prob(&self, x: f64) -> f64 {
        (x - self.largest) / self.temperature - self.total.ln()
    }

    /// Returns the token id at which the cumulative probability passes `u`. Its tile is found first.
    fn draw<F: Real>(&self, distribution: &impl Distribution<F>, u: f64) -> Option<u32> {
        let tile_mass = |&(largest, sum): &(f64, f64)| sum * mass(largest, self.largest, self.temperature);
        let (tile, remainder) = find_by_mass(self.tiles.iter().map(tile_mass), u * self.total)?;
        let mut buffer = Vec::new();
        let log_probs = distribution.tile(tile, F::neg_infinity(), &mut buffer);
        let id_mass = |x: &F| mass(x.f64(), self.largest, self.temperature);
        let (id, _) = find_by_mass(log_probs.iter().map(id_mass), remainder)?;
        Some((tile * TILE + id) as u32)
    }
}

/// Returns `exp((x - largest) / T)`, which is zero for minus infinity.
fn mass(x: f64, largest: f64, temperature: f64) -> f64 {
    if x == f64::NEG_INFINITY {
        0.0
    } else {
        ((x - largest) / temperature).exp()
    }
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

/// Draws from the token ids that top-k, top-p and min-p leave.
fn draw_truncated<F: Real>(distribution: &impl Distribution<F>, sampling: &Sampling, u: f64) -> Option<u32> {
    let RankedTruncation { ids, masses } = rank_truncation(distribution, sampling)?;
    let total: f64 = masses.iter().sum();
    find_by_mass(masses.into_iter(), u * total).map(|(i, _)| ids[i].1)
}

/// The token ids that top-k, top-p and min-p leave, in descending order, and their masses relative to the largest.
pub(super) struct RankedTruncation<F> {
    pub(super) ids: Vec<Ranked<F>>,
    pub(super) masses: Vec<f64>,
}

/// Ranks the ids that top-k, top-p and min-p leave of a distribution; `None` if no id is possible.
pub(super) fn rank_truncation<F: Real>(
    distribution: &impl Distribution<F>,
    sampling: &Sampling,
) -> Option<RankedTruncation<F>> {
    let &Sampling { temperature, top_k, top_p, min_p, .. } = sampling;
    let limit = top_k.unwrap_or(usize::MAX).min(distribution.vocab());
    let total = (top_k.is_none() && top_p < 1.0).then(|| TileMasses::new(distribution, temperature).total);
    // Without top-k the number of ids in the nucleus is unknown, so that the search starts small and grows.
    let mut n = if top_k.is_some() { limit } else { limit.min(FIRST_RANKED) };
    loop {
        let mut ids = ranking::top_k(distribution, n);
        let largest = ids.first()?.0.f64();
        let masses: Vec<f64> = ids.iter().map(|id| mass(id.0.f64(), largest, temperature)).collect();
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
            ids.truncate(masses.len());
            return Some(RankedTruncation { ids, masses });
        }
        n = limit.min(n * 8);
    }
}

/// The number of ids that are ranked first, if top-k does not say how many.
const FIRST_RANKED: usize = 128;
