//! Draws a token id from a distribution with one random number.

use rayon::prelude::*;

use super::sampling::Sampling;
use crate::backend::distribution::{Distribution, Real, Visit, TILE};
use crate::backend::ranking::{self, Ranked};
use crate::error::{Error, Result};

/// Draws a token id for each position with the random number of its position.
pub(super) struct Draw<'a> {
    pub(super) sampling: &'a Sampling,
    pub(super) uniform: &'a [f64],
}

impl Visit for Draw<'_> {
    type Output = u32;

    fn visit<F: Real>(&self, position: usize, distribution: &impl Distribution<F>) -> Result<u32> {
        distribution.check(position)?;
        let u = self.uniform[position];
        let id = match self.sampling {
            Sampling { temperature: 0.0, .. } => ranking::top_k(distribution, 1).first().map(|id| id.1),
            sampling if sampling.is_truncated() => from_the_best(distribution, sampling, u),
            sampling => TileMasses::new(distribution, sampling.temperature).draw(distribution, u),
        };
        id.ok_or(Error::Impossible { position })
    }
}

/// The mass of a distribution at temperature T. `tiles` has each tile's largest log-probability and the sum of its
/// `exp((x - largest) / T)`.
pub(super) struct TileMasses {
    temperature: f64,
    tiles: Vec<(f64, f64)>,
    largest: f64,
    total: f64,
}

impl TileMasses {
    pub(super) fn new<F: Real>(distribution: &impl Distribution<F>, temperature: f64) -> Self {
        let tile = |buffer: &mut Vec<F>, tile| {
            let log_probs = distribution.tile(tile, F::neg_infinity(), buffer);
            let largest = log_probs.iter().fold(f64::NEG_INFINITY, |m, x| m.max(x.f64()));
            (largest, log_probs.iter().map(|x| relative(x.f64(), largest, temperature)).sum())
        };
        let tiles: Vec<(f64, f64)> =
            (0..distribution.tiles()).into_par_iter().with_min_len(8).map_init(Vec::new, tile).collect();
        let largest = tiles.iter().fold(f64::NEG_INFINITY, |m, tile| m.max(tile.0));
        let total = tiles.iter().map(|tile| tile.1 * relative(tile.0, largest, temperature)).sum();
        TileMasses { temperature, tiles, largest, total }
    }

    /// The log-probability of an id at the temperature, from its logarithm here.
    pub(super) fn log_prob(&self, x: f64) -> f64 {
        (x - self.largest) / self.temperature - self.total.ln()
    }

    /// Returns the token id at which the cumulative probability passes `u`. Its tile is found first.
    fn draw<F: Real>(&self, distribution: &impl Distribution<F>, u: f64) -> Option<u32> {
        let mass = |&(largest, sum): &(f64, f64)| sum * relative(largest, self.largest, self.temperature);
        let (tile, left) = pass(self.tiles.iter().map(mass), u * self.total)?;
        let mut buffer = Vec::new();
        let log_probs = distribution.tile(tile, F::neg_infinity(), &mut buffer);
        let mass = |x: &F| relative(x.f64(), self.largest, self.temperature);
        let (id, _) = pass(log_probs.iter().map(mass), left)?;
        Some((tile * TILE + id) as u32)
    }
}

/// `exp((x - largest) / T)`
fn relative(x: f64, largest: f64, temperature: f64) -> f64 {
    if x == f64::NEG_INFINITY {
        0.0
    } else {
        ((x - largest) / temperature).exp()
    }
}

/// Returns the index at which the cumulative mass exceeds `target`, and the remainder of `target` there. An element
/// without mass is never chosen; if rounding leaves a remainder at the end, the last element with mass is chosen.
pub(super) fn pass(masses: impl Iterator<Item = f64>, target: f64) -> Option<(usize, f64)> {
    let mut left = target;
    let mut last = None;
    for (i, mass) in masses.enumerate() {
        if mass > 0.0 {
            if left < mass {
                return Some((i, left));
            }
            last = Some((i, mass));
            left -= mass;
        }
    }
    last
}

/// Draws from the token ids that top-k, top-p and min-p keep.
fn from_the_best<F: Real>(distribution: &impl Distribution<F>, sampling: &Sampling, u: f64) -> Option<u32> {
    let Nucleus { ids, masses } = nucleus(distribution, sampling)?;
    let total: f64 = masses.iter().sum();
    pass(masses.into_iter(), u * total).map(|(i, _)| ids[i].1)
}

/// The token ids that top-k, top-p and min-p keep, in descending order, and their masses relative to the largest.
pub(super) struct Nucleus<F> {
    pub(super) ids: Vec<Ranked<F>>,
    pub(super) masses: Vec<f64>,
}

pub(super) fn nucleus<F: Real>(distribution: &impl Distribution<F>, sampling: &Sampling) -> Option<Nucleus<F>> {
    let &Sampling { temperature, top_k, top_p, min_p, .. } = sampling;
    let limit = top_k.unwrap_or(usize::MAX).min(distribution.vocab());
    let all = (top_k.is_none() && top_p < 1.0).then(|| TileMasses::new(distribution, temperature).total);
    // Without top-k the number of ids in the nucleus is unknown, so that the search starts small and grows.
    let mut n = if top_k.is_some() { limit } else { limit.min(FIRST_CANDIDATES) };
    loop {
        let mut ids = ranking::top_k(distribution, n);
        let largest = ids.first()?.0.f64();
        let masses: Vec<f64> = ids.iter().map(|id| relative(id.0.f64(), largest, temperature)).collect();
        let wanted = top_p * all.unwrap_or_else(|| masses.iter().sum());
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
            return Some(Nucleus { ids, masses });
        }
        n = limit.min(n * 8);
    }
}

const FIRST_CANDIDATES: usize = 128;
