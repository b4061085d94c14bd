//! A vocabulary of two levels, which the adaptive and the hierarchical softmax share.
//!
//! ```text
//! P(v) = P_root(v)                      for an id of the shortlist
//! P(v) = P_root(cluster c) P_c(v)       for an id of cluster c
//! ```
//!
//! The root is a mixture over `[shortlist ids, clusters]`; each cluster is a softmax, whose context is the hidden state
//! or a linear projection of it.

mod loss;
mod sample;
mod top_k;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use crate::backend::contract::accumulation_dtype;
use crate::error::{Error, Result};
use crate::mixture::Mixture;
use crate::output_layer::MixtureLayer;
use crate::projection::layer;
use crate::validate::{check_hidden, check_product, leading};

/// A head whose vocabulary is a shortlist and clusters.
#[derive(Clone, Debug)]
pub(crate) struct Factorised {
    /// The public head, for errors.
    name: &'static str,
    /// Over the shortlist, then the clusters.
    root: Arc<dyn MixtureLayer>,
    /// The number of ids that are entries of the root themselves.
    shortlist: usize,
    clusters: Vec<Cluster>,
    vocab: usize,
    permutation: Option<Permutation>,
}

/// A softmax over consecutive ranks.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    /// `[d, hidden]`
    pub(crate) projection: Option<Tensor>,
    /// `[size, d]`
    pub(crate) weight: Tensor,
    /// `[size]`
    pub(crate) bias: Option<Tensor>,
    /// Its ranks.
    pub(crate) ranks: Range<usize>,
}

impl Cluster {
    /// The softmax at these positions, `[positions, hidden]`.
    fn mixture(&self, rows: &Tensor) -> Result<Mixture> {
        let contexts = match &self.projection {
            None => rows.unsqueeze(1)?,
            Some(weight) => {
                let shape = [rows.dim(0)?, 1, weight.dim(0)?];
                layer("cluster", rows, weight, None, &shape, |z, _| Ok(z), |_, upstream| Ok(upstream.clone()))?
            }
        };
        Mixture::new(&contexts, None, &self.weight, self.bias.as_ref())
    }
}

/// The order of the token ids, cluster by cluster, if that is not their own; there is no shortlist then. Within a
/// cluster, ids ascend.
#[derive(Clone, Debug)]
pub(crate) struct Permutation {
    pub(crate) rank_of_id: Vec<u32>,
    pub(crate) id_of_rank: Vec<u32>,
}

/// Where the log-probability of a token id comes from.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Its entry of the root, or that of its cluster.
    entry: usize,
    /// Its cluster and its index there.
    within: Option<(usize, usize)>,
}

impl Factorised {
    /// `clusters` have consecutive ranks, from the shortlist on; an error that names `argument` if the root does not
    /// fit.
    pub(crate) fn new(
        name: &'static str,
        argument: &'static str,
        hidden: usize,
        root: Arc<dyn MixtureLayer>,
        clusters: Vec<Cluster>,
        permutation: Option<Permutation>,
    ) -> Result<Self> {
        let shortlist = clusters.first().map_or(0, |cluster| cluster.ranks.start);
        let vocab = clusters.last().map_or(0, |cluster| cluster.ranks.end);
        let entries = shortlist + clusters.len();
        if (root.hidden_size(), root.vocab_size()) != (hidden, entries) {
            let expected = format!("a layer with hidden_size {hidden} and vocab_size {entries}");
            let got = format!("{} and {}", root.hidden_size(), root.vocab_size());
            return Err(Error::config(argument, expected, got));
        }
        Ok(Factorised { name, root, shortlist, clusters, vocab, permutation })
    }

    pub(crate) fn root(&self) -> &dyn MixtureLayer {
        &*self.root
    }

    pub(crate) fn hidden_size(&self) -> usize {
        self.root.hidden_size()
    }

    pub(crate) fn vocab_size(&self) -> usize {
        self.vocab
    }

    /// Log-probabilities `[.., vocab]`, computed in the accumulation dtype.
    pub(crate) fn log_probs_as(&self, hidden: &Tensor, dtype: DType) -> Result<Tensor> {
        accumulation_dtype("dtype", dtype)?;
        let rows = self.rows(hidden)?;
        check_product("positions * vocab", &[rows.dim(0)?, self.vocab])?;
        let shape = [leading(hidden)?, &[self.vocab]].concat();
        if rows.elem_count() == 0 {
            return Ok(Tensor::zeros(shape, dtype, hidden.device())?);
        }
        let accumulation = accumulation_dtype("hidden", hidden.dtype())?;
        let index = |values: Vec<u32>| Tensor::from_vec(values, self.vocab, hidden.device());
        let entries = (0..self.vocab).map(|id| self.place(id).entry as u32).collect();
        let root = self.root_log_probs(&rows, accumulation)?.index_select(&index(entries)?, 1)?;
        let mut parts = Vec::with_capacity(self.clusters.len() + 1);
        if self.shortlist > 0 {
            parts.push(Tensor::zeros((rows.dim(0)?, self.shortlist), accumulation, hidden.device())?);
        }
        for cluster in &self.clusters {
            parts.push(cluster.mixture(&rows)?.log_probs_as(accumulation)?);
        }
        let mut within = Tensor::cat(&parts, 1)?;
        if let Some(permutation) = &self.permutation {
            within = within.index_select(&index(permutation.rank_of_id.clone())?, 1)?;
        }
        Ok((root + within)?.reshape(shape)?.to_dtype(dtype)?)
    }

    /// Log-probabilities of the root, `[rows, entries]`, checked.
    fn root_log_probs(&self, rows: &Tensor, dtype: DType) -> Result<Tensor> {
        let root = self.root.log_probs_as(rows, dtype)?;
        let expected = [rows.dim(0)?, self.shortlist + self.clusters.len()];
        match root.dims() == expected {
            true => Ok(root),
            false => Err(Error::shape("log-probabilities of the first level", format!("{expected:?}"), root.dims())),
        }
    }

    /// Hidden states as `[positions, hidden]`, checked.
    fn rows(&self, hidden: &Tensor) -> Result<Tensor> {
        self.check(hidden)?;
        let positions: usize = leading(hidden)?.iter().product();
        Ok(hidden.reshape((positions, self.hidden_size()))?)
    }

    fn check(&self, hidden: &Tensor) -> Result<()> {
        let Some(first) = self.clusters.first() else { return Ok(()) };
        check_hidden(hidden, self.hidden_size(), &first.weight)
    }

    fn place(&self, id: usize) -> Place {
        let rank = self.permutation.as_ref().map_or(id, |permutation| permutation.rank_of_id[id] as usize);
        if rank < self.shortlist {
            return Place { entry: rank, within: None };
        }
        let cluster = self.clusters.partition_point(|cluster| cluster.ranks.end <= rank);
        Place { entry: self.shortlist + cluster, within: Some((cluster, rank - self.clusters[cluster].ranks.start)) }
    }

    /// The token id at an index of a cluster.
    fn id_within(&self, cluster: usize, index: usize) -> u32 {
        let rank = self.clusters[cluster].ranks.start + index;
        self.permutation.as_ref().map_or(rank as u32, |permutation| permutation.id_of_rank[rank])
    }
}

/// An error of some of the positions, with its position among all.
fn at_positions(error: Error, positions: &[u32]) -> Error {
    match error {
        Error::Distribution { position } => Error::Distribution { position: positions[position] as usize },
        error => error,
    }
}

/// [`OutputLayer`](crate::OutputLayer) for a head that wraps a [`Factorised`].
macro_rules! factorised_head {
    ($head:ident) => {
        impl OutputLayer for $head {
            fn hidden_size(&self) -> usize {
                self.0.hidden_size()
            }

            fn vocab_size(&self) -> usize {
                self.0.vocab_size()
            }

            fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
                self.0.loss(hidden, targets, options)
            }

            fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
                self.0.log_probs_as(hidden, hidden.dtype())
            }

            fn log_probs_as(&self, hidden: &Tensor, dtype: DType) -> Result<Tensor> {
                self.0.log_probs_as(hidden, dtype)
            }

            fn top_k(&self, hidden: &Tensor, k: usize) -> Result<TopK> {
                self.0.top_k(hidden, k)
            }

            fn sample(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
                self.0.sample(hidden, sampler)
            }
        }
    };
}
pub(crate) use factorised_head;
