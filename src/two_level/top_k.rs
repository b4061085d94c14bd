//! The most probable ids of a factorised vocabulary, without the clusters that cannot contain one of them.
//!
//! An id is at most as probable as its cluster. Each position first visits its most probable cluster; the others follow
//! in descending order of their probability at all positions together, each at the positions where it is more probable
//! than the k-th best id so far.

use candle_core::{DType, Tensor};

use super::TwoLevel;
use crate::backend::distribution::{Computed, Distribution};
use crate::backend::operands::accumulation_dtype;
use crate::backend::ranking::{self, order, Ranked};
use crate::decoding::TopK;
use crate::error::Result;
use crate::heads::MixtureLayer;
use crate::tensors::checks::leading;
use crate::tensors::transfer::matrix;

/// The search at one position.
struct ClusterSearch<'a> {
    /// The log-probabilities of the clusters.
    clusters: &'a [f64],
    /// The best ids so far, in descending order.
    found: Vec<Ranked<f64>>,
}

impl ClusterSearch<'_> {
    /// The most probable cluster.
    fn first(&self) -> Option<usize> {
        ranking::top_k(&Computed::new(self.clusters), 1).first().map(|cluster| cluster.1 as usize)
    }

    /// Whether one of the `k` best ids may be in a cluster.
    fn may_gain(&self, cluster: usize, k: usize) -> bool {
        // An id as probable as the last one found may be lower.
        self.found.get(k - 1).is_none_or(|last| self.clusters[cluster] >= last.0)
    }
}

impl<S, R: MixtureLayer> TwoLevel<S, R> {
    pub(super) fn most_probable(&self, hidden: &Tensor, k: usize) -> Result<TopK> {
        TopK::check_k(k, self.vocab_size)?;
        let rows = self.rows(hidden)?.detach();
        let accumulation = accumulation_dtype("hidden", hidden.dtype())?;
        let root = matrix(&self.root_log_probs(&rows, accumulation)?.detach())?;
        let of_shortlist = |(position, root): (usize, &Vec<f64>)| {
            Computed::new(root).check(position)?;
            Ok(ranking::top_k(&Computed::new(&root[..self.shortlist]), k))
        };
        let found = root.iter().enumerate().map(of_shortlist).collect::<Result<Vec<_>>>()?;
        let clusters = root.iter().map(|root| &root[self.shortlist..]);
        let search = |(found, clusters)| ClusterSearch { found, clusters };
        let mut searches: Vec<ClusterSearch> = found.into_iter().zip(clusters).map(search).collect();

        let first: Vec<Option<usize>> = searches.iter().map(ClusterSearch::first).collect();
        let mut visits = vec![Vec::new(); self.clusters.len()];
        for ((position, search), first) in (0..).zip(&searches).zip(&first) {
            if let Some(first) = first.filter(|&first| search.may_gain(first, k)) {
                visits[first].push(position);
            }
        }
        for (cluster, positions) in visits.into_iter().enumerate() {
            self.visit(cluster, &positions, &rows, k, &mut searches)?;
        }
        let total = |cluster: usize| searches.iter().map(|search| search.clusters[cluster].exp()).sum::<f64>();
        let mut rest: Vec<Ranked<f64>> = (0..self.clusters.len()).map(total).zip(0..).collect();
        rest.sort_by(order);
        for (_, cluster) in rest {
            let cluster = cluster as usize;
            let may_gain = |position: &u32| {
                let position = *position as usize;
                first[position] != Some(cluster) && searches[position].may_gain(cluster, k)
            };
            let positions: Vec<u32> = (0..searches.len() as u32).filter(may_gain).collect();
            self.visit(cluster, &positions, &rows, k, &mut searches)?;
        }
        let found: Vec<_> = searches.into_iter().map(|search| search.found).collect();
        TopK::from_ranked(&found, &[leading(hidden)?, &[k]].concat(), accumulation, hidden.device())
    }

    /// Adds the best ids of a cluster to the searches at these positions.
    fn visit(
        &self,
        cluster: usize,
        positions: &[u32],
        rows: &Tensor,
        k: usize,
        searches: &mut [ClusterSearch],
    ) -> Result<()> {
        if positions.is_empty() {
            return Ok(());
        }
        let rows = rows.index_select(&Tensor::new(positions, rows.device())?, 0)?;
        let top = self.clusters[cluster].mixture(&rows)?.top_k(k.min(self.clusters[cluster].ranks.len()));
        let top = top.map_err(|error| error.among(positions))?;
        // Rounds like adding two tensors, so that it matches `log_probs`.
        let add = |a: f64, b: f64| match top.log_probs.dtype() {
            DType::F64 => a + b,
            _ => f64::from(a as f32 + b as f32),
        };
        let (ids, log_probs) = (top.token_ids.to_vec2::<u32>()?, matrix(&top.log_probs)?);
        for ((&position, ids), log_probs) in positions.iter().zip(ids).zip(log_probs) {
            let ClusterSearch { clusters, found } = &mut searches[position as usize];
            let id = |(index, log_prob)| (add(clusters[cluster], log_prob), self.id_within(cluster, index as usize));
            found.extend(ids.into_iter().zip(log_probs).map(id));
            found.sort_by(order);
            found.truncate(k);
        }
        Ok(())
    }
}
