//! The most probable ids of a factorised vocabulary, without the clusters that cannot contain one of them.
//!
//! An id is at most as probable as its cluster. Each position visits its clusters in descending order of probability,
//! until the next is less probable than the `k` best ids so far.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use super::{at_positions, Factorised};
use crate::backend::contract::{accumulation_dtype, Computed, Distribution};
use crate::backend::ranking::{best, order, Ranked};
use crate::decoding::transfer::matrix;
use crate::decoding::TopK;
use crate::error::{Error, Result};
use crate::validate::leading;

/// The search at one position.
struct Search {
    /// The best ids so far, in descending order.
    found: Vec<Ranked<f64>>,
    /// The clusters that are not visited yet and their log-probabilities, in ascending order.
    left: Vec<Ranked<f64>>,
}

impl Search {
    /// The next cluster, if it may contain one of the `k` best ids.
    fn next(&mut self, k: usize) -> Option<Ranked<f64>> {
        let next = self.left.pop()?;
        // An id as probable as the last one found may be lower.
        match self.found.get(k - 1) {
            Some(last) if next.0 < last.0 => None,
            _ => Some(next),
        }
    }
}

impl Factorised {
    pub(crate) fn top_k(&self, hidden: &Tensor, k: usize) -> Result<TopK> {
        TopK::check_k(k, self.vocab)?;
        let rows = self.rows(hidden)?.detach();
        let accumulation = accumulation_dtype("hidden", hidden.dtype())?;
        // As the sum of two tensors.
        let add = |a: f64, b: f64| match accumulation {
            DType::F64 => a + b,
            _ => f64::from(a as f32 + b as f32),
        };
        let root = matrix(&self.root.log_probs_as(&rows, accumulation)?.detach())?;
        let search = |(position, root): (usize, &Vec<f64>)| {
            if !Computed(root).is_valid() {
                return Err(Error::Distribution { position });
            }
            let (shortlist, clusters) = root.split_at(self.shortlist);
            let found = match shortlist.is_empty() {
                true => Vec::new(),
                false => best(&Computed(shortlist), k),
            };
            let mut left: Vec<_> = clusters.iter().copied().zip(0..).collect();
            left.sort_by(|a, b| order(b, a));
            Ok(Search { found, left })
        };
        let mut searches = root.iter().enumerate().map(search).collect::<Result<Vec<_>>>()?;
        loop {
            // Positions that visit the same cluster visit it together.
            let mut visits: BTreeMap<u32, (Vec<u32>, Vec<f64>)> = BTreeMap::new();
            for (position, search) in (0..).zip(&mut searches) {
                if let Some((log_prob, cluster)) = search.next(k) {
                    let (positions, log_probs) = visits.entry(cluster).or_default();
                    positions.push(position);
                    log_probs.push(log_prob);
                }
            }
            if visits.is_empty() {
                break;
            }
            for (cluster, (positions, log_probs)) in visits {
                let cluster = cluster as usize;
                let rows = rows.index_select(&Tensor::new(&*positions, hidden.device())?, 0)?;
                let k_within = k.min(self.clusters[cluster].ranks.len());
                let top = self.clusters[cluster].mixture(&rows)?.top_k(k_within);
                let top = top.map_err(|error| at_positions(error, &positions))?;
                let (ids, of_ids) = (top.tokens.to_vec2::<u32>()?, matrix(&top.log_probs)?);
                for (((position, of_cluster), ids), of_ids) in positions.iter().zip(log_probs).zip(ids).zip(of_ids) {
                    let found = &mut searches[*position as usize].found;
                    let id = |(&index, &log_prob): (&u32, &f64)| {
                        (add(of_cluster, log_prob), self.id_within(cluster, index as usize))
                    };
                    found.extend(ids.iter().zip(&of_ids).map(id));
                    found.sort_by(order);
                    found.truncate(k);
                }
            }
        }
        let found: Vec<_> = searches.into_iter().map(|search| search.found).collect();
        TopK::of_ranked(&found, &[leading(hidden)?, &[k]].concat(), accumulation, hidden.device())
    }
}
