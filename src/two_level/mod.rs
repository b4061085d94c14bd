//! Heads for large vocabularies: the adaptive and the hierarchical softmax, a vocabulary of two levels.
//!
//! ```text
//! P(v) = P_root(v)                      for an id of the shortlist
//! P(v) = P_root(cluster c) P_c(v)       for an id of cluster c
//! ```
//!
//! The root is a mixture over `[shortlist ids, clusters]`; each cluster is a softmax, whose context is the hidden state
//! or a linear projection of it. A loss computes the root, and of the rest only the clusters that have a target:
//!
//! | head | levels | cost |
//! |---|---|---|
//! | [`AdaptiveSoftmax`] | frequent ids and clusters, by any head that is a mixture; the ids of each cluster, from narrower contexts | about a softmax over the frequent ids |
//! | [`HierarchicalSoftmax`] | classes, by any head that is a mixture; the ids of each class | about two softmaxes over sqrt(vocab) ids |
//!
//! Both are a [`TwoLevel`], by the scheme [`Adaptive`] or [`Hierarchical`]. Begin with [`AdaptiveConfig`], which has the
//! ids sorted by frequency, or with [`HierarchicalConfig`], where [`Classes`] may be of any kind.

mod adaptive;
mod hierarchical;
mod loss;
mod sample;
mod top_k;

use std::fmt::Debug;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use crate::backend;
use crate::backend::operands::accumulation_dtype;
use crate::decoding::{Sampler, TopK};
use crate::error::{Error, Result};
use crate::heads::{MixtureLayer, OutputLayer};
use crate::loss::{Loss, LossOptions, Request};
use crate::mixture::Mixture;
use crate::tensors::checks::{check_hidden, check_product, leading};
use crate::tensors::linear::layer;
pub use adaptive::{Adaptive, AdaptiveConfig, AdaptiveSoftmax};
pub use hierarchical::{Classes, Hierarchical, HierarchicalConfig, HierarchicalSoftmax};

/// A head whose vocabulary is a shortlist and clusters, by a scheme `S`:
/// [`AdaptiveSoftmax`] or [`HierarchicalSoftmax`]. `R` is the layer of the first level.
#[derive(Clone, Debug)]
pub struct TwoLevel<S, R = Arc<dyn MixtureLayer>> {
    /// For errors.
    name: &'static str,
    scheme: PhantomData<S>,
    /// Over the shortlist, then the clusters.
    root: R,
    /// The number of ids that are entries of the root themselves.
    shortlist: usize,
    clusters: Vec<Cluster>,
    vocab_size: usize,
    permutation: Option<Permutation>,
}

/// A softmax over consecutive ranks.
#[derive(Clone, Debug)]
struct Cluster {
    /// `[d, hidden]`
    projection: Option<Tensor>,
    /// `[size, d]`
    weight: Tensor,
    /// `[size]`
    bias: Option<Tensor>,
    /// Its ranks.
    ranks: Range<usize>,
}

impl Cluster {
    /// The softmax with its parameters as constants.
    fn frozen(&self) -> Self {
        let Cluster { projection, weight, bias, ranks } = self;
        let detached = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::detach);
        Cluster {
            projection: detached(projection),
            weight: weight.detach(),
            bias: detached(bias),
            ranks: ranks.clone(),
        }
    }

    /// The softmax at these positions, `[positions, hidden]`.
    fn mixture(&self, rows: &Tensor) -> Result<Mixture> {
        let contexts = match &self.projection {
            None => rows.unsqueeze(1)?,
            Some(weight) => {
                let shape = [rows.dim(0)?, 1, weight.dim(0)?];
                layer(
                    "cluster",
                    (rows, weight, None),
                    &shape,
                    backend::matmul,
                    |z, _| Ok(z),
                    |_, upstream| Ok(upstream.clone()),
                )?
            }
        };
        Mixture::new(&contexts, None, &self.weight, self.bias.as_ref())
    }
}

/// The order of the token ids, cluster by cluster, if that is not their own; there is no shortlist then. Within a
/// cluster, ids ascend.
#[derive(Clone, Debug)]
struct Permutation {
    rank_of_id: Vec<u32>,
    id_of_rank: Vec<u32>,
}

/// Where the log-probability of a token id comes from.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Its entry of the root, or its cluster's.
    entry: usize,
    /// Its cluster and its index there.
    within: Option<(usize, usize)>,
}

impl<S> TwoLevel<S> {
    /// `clusters` have consecutive ranks, from the shortlist on; an error that names `argument` if the root does not
    /// fit.
    fn from_levels(
        name: &'static str,
        argument: &'static str,
        hidden: usize,
        root: Arc<dyn MixtureLayer>,
        clusters: Vec<Cluster>,
        permutation: Option<Permutation>,
    ) -> Result<Self> {
        let shortlist = clusters.first().map_or(0, |cluster| cluster.ranks.start);
        let vocab_size = clusters.last().map_or(0, |cluster| cluster.ranks.end);
        let entries = shortlist + clusters.len();
        if (root.hidden_size(), root.vocab_size()) != (hidden, entries) {
            let expected = format!("a layer with hidden_size {hidden} and vocab_size {entries}");
            let got = format!("{} and {}", root.hidden_size(), root.vocab_size());
            return Err(Error::config(argument, expected, got));
        }
        Ok(TwoLevel { name, scheme: PhantomData, root, shortlist, clusters, vocab_size, permutation })
    }
}

impl<S, R: MixtureLayer> TwoLevel<S, R> {
    /// Log-probabilities of the root, `[rows, entries]`, checked.
    fn root_log_probs(&self, rows: &Tensor, dtype: DType) -> Result<Tensor> {
        let root = self.root.log_probs_as(rows, dtype)?;
        let expected = [rows.dim(0)?, self.shortlist + self.clusters.len()];
        if root.dims() == expected {
            Ok(root)
        } else {
            Err(Error::shape("log-probabilities of the first level", format!("{expected:?}"), root.dims()))
        }
    }

    /// Hidden states as `[positions, hidden]`, checked.
    fn rows(&self, hidden: &Tensor) -> Result<Tensor> {
        self.check(hidden)?;
        let positions: usize = leading(hidden)?.iter().product();
        Ok(hidden.reshape((positions, self.root.hidden_size()))?)
    }

    fn check(&self, hidden: &Tensor) -> Result<()> {
        let Some(first) = self.clusters.first() else { return Ok(()) };
        let compared = || match &first.projection {
            Some(projection) => format!("the first cluster's projection {:?}", projection.dims()),
            None => format!("the first class's weight {:?}", first.weight.dims()),
        };
        check_hidden(hidden, self.root.hidden_size(), compared, &first.weight)
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

impl<S: Debug + Send + Sync, R: MixtureLayer> OutputLayer for TwoLevel<S, R> {
    fn hidden_size(&self) -> usize {
        self.root.hidden_size()
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        self.check(hidden)?;
        self.loss_of(hidden, &Request::new(leading(hidden)?, Some(self.vocab_size), hidden, targets, options)?)
    }

    fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
        self.log_probs_as(hidden, hidden.dtype())
    }

    fn log_probs_as(&self, hidden: &Tensor, dtype: DType) -> Result<Tensor> {
        accumulation_dtype("dtype", dtype)?;
        let rows = self.rows(hidden)?;
        check_product("positions * vocab_size", &[rows.dim(0)?, self.vocab_size])?;
        let shape = [leading(hidden)?, &[self.vocab_size]].concat();
        if rows.elem_count() == 0 {
            return Ok(Tensor::zeros(shape, dtype, hidden.device())?);
        }
        let accumulation = accumulation_dtype("hidden", hidden.dtype())?;
        let index = |values: Vec<u32>| Tensor::from_vec(values, self.vocab_size, hidden.device());
        let entries = (0..self.vocab_size).map(|id| self.place(id).entry as u32).collect();
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

    fn top_k(&self, hidden: &Tensor, k: usize) -> Result<TopK> {
        self.most_probable(hidden, k)
    }

    fn sample(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
        self.draw(hidden, sampler)
    }

    fn frozen(&self) -> Result<Box<dyn OutputLayer + '_>> {
        Ok(Box::new(TwoLevel::<S, _> {
            name: self.name,
            scheme: PhantomData,
            root: self.root.frozen_mixture()?,
            shortlist: self.shortlist,
            clusters: self.clusters.iter().map(Cluster::frozen).collect(),
            vocab_size: self.vocab_size,
            permutation: self.permutation.clone(),
        }))
    }
}
