//! The top k of a factorised vocabulary, for which clusters that cannot contain one of its ids are not computed.
//!
//! An id is at most as probable as its cluster. Each position first visits its most probable cluster; the others follow
//! in descending order of their probability at all positions together, each at the positions where it is not less
//! probable than the k-th most probable id so far.

use candle_core::Tensor;

use super::distributions::TwoLevelDistributions;
use super::{addition, Levels};
use crate::backend;
use crate::backend::distribution::Computed;
use crate::backend::ranking::{self, order, Ranked};
use crate::decoding::{AllLogProbsQuery, TopK};
use crate::error::Result;
use crate::tensors::checks::accumulation_dtype;
use crate::tensors::transfer::read_matrix;

/// The search for the top k at one position.
struct ClusterSearch<'a> {
    /// The log-probabilities of the clusters.
    clusters: &'a [f64],
    /// The most probable ids so far, in descending order, at most k.
    found: Vec<Ranked>,
}

impl ClusterSearch<'_> {
    /// Returns the most probable cluster, which is visited first.
    fn first_cluster(&self) -> Option<usize> {
        ranking::top_k(&Computed::new(self.clusters), 1).first().map(|cluster| cluster.1 as usize)
    }

    /// Returns whether a cluster may contain one of the top k ids.
    fn may_contain(&self, cluster: usize, k: usize) -> bool {
        // An id of the cluster that is as probable as the last id found may be the lower one.
        self.found.get(k - 1).is_none_or(|last| self.clusters[cluster] >= last.0)
    }
}

impl TwoLevelDistributions<'_> {
    /// Finds the top k at each position.
    pub(super) fn search_top_k(&self, k: usize) -> Result<TopK> {
        let TwoLevelDistributions { head, hidden, states } = self;
        TopK::check_k(k, head.vocab_size)?;
        let states = states.detach();
        let accumulation = accumulation_dtype("hidden", hidden.dtype())?;
        let root = backend::visit(head.root_mixture(&states)?.operands(), &AllLogProbsQuery)?;
        let found = root.iter().map(|(root, _)| ranking::top_k(&Computed::new(&root[..head.shortlist]), k));
        let clusters = root.iter().map(|(root, _)| &root[head.shortlist..]);
        let search = |(found, clusters)| ClusterSearch { found, clusters };
        let mut searches: Vec<ClusterSearch> = found.zip(clusters).map(search).collect();

        let first: Vec<Option<usize>> = searches.iter().map(ClusterSearch::first_cluster).collect();
        let mut visits = vec![Vec::new(); head.clusters.len()];
        for ((position, search), first) in (0..).zip(&searches).zip(&first) {
            if let Some(first) = first.filter(|&first| search.may_contain(first, k)) {
                visits[first].push(position);
            }
        }
        for (cluster, positions) in visits.into_iter().enumerate() {
            head.visit(cluster, &positions, &states, k, &mut searches)?;
        }
        let total = |cluster: usize| searches.iter().map(|search| search.clusters[cluster].exp()).sum::<f64>();
        let mut ranked_clusters: Vec<Ranked> = (0..head.clusters.len()).map(total).zip(0..).collect();
        ranked_clusters.sort_unstable_by(order);
        for (_, cluster) in ranked_clusters {
            let cluster = cluster as usize;
            let needs_visit = |position: &u32| {
                let position = *position as usize;
                first[position] != Some(cluster) && searches[position].may_contain(cluster, k)
            };
            let positions: Vec<u32> = (0..searches.len() as u32).filter(needs_visit).collect();
            head.visit(cluster, &positions, &states, k, &mut searches)?;
        }
        let found: Vec<_> = searches.into_iter().map(|search| search.found).collect();
        TopK::from_ranked(&found, &[self.leading(), &[k]].concat(), accumulation, hidden.device())
    }
}

impl Levels<'_> {
    /// Adds the most probable ids of a cluster to the searches at these positions.
    fn visit(
        &self,
        cluster: usize,
        positions: &[u32],
        states: &Tensor,
        k: usize,
        searches: &mut [ClusterSearch],
    ) -> Result<()> {
        if positions.is_empty() {
            return Ok(());
        }
        let states = states.index_select(&Tensor::new(positions, states.device())?, 0)?;
        let mixture = self.clusters[cluster].mixture(&states)?;
        let top = backend::independent_top_k(mixture.operands(), k.min(self.clusters[cluster].slots.len()));
        let (ids, log_probs) = top.map_err(|error| error.with_position_from(positions))?;
        let add = addition(log_probs.dtype());
        let (ids, log_probs) = (ids.to_vec2::<u32>()?, read_matrix(&log_probs)?);
        for ((&position, ids), log_probs) in positions.iter().zip(ids).zip(log_probs) {
            let ClusterSearch { clusters, found } = &mut searches[position as usize];
            let id = |(index, log_prob)| (add(clusters[cluster], log_prob), self.id_within(cluster, index as usize));
            found.extend(ids.into_iter().zip(log_probs).map(id));
            found.sort_unstable_by(order);
            found.truncate(k);
        }
        Ok(())
    }
}
