//! Heads for large vocabularies, which factorise the vocabulary into two levels: the adaptive and the hierarchical
//! softmax.
//!
//! ```text
//! P(v) = P_root(v)                      for an id of the shortlist
//! P(v) = P_root(cluster c) P_c(v)       for an id of cluster c
//! ```
//!
//! The root is a mixture over `[shortlist ids, clusters]`; each cluster is a softmax, whose context is the hidden state
//! or a linear projection of it. A loss computes the root, and only those clusters that have a target:
//!
//! | head | levels | cost |
//! |---|---|---|
//! | [`AdaptiveSoftmax`] | frequent ids and clusters, by any head that is a mixture; the ids of each cluster, from narrower contexts | about a softmax over the frequent ids |
//! | [`HierarchicalSoftmax`] | classes, by any head that is a mixture; the ids of each class | about two softmaxes over sqrt(vocab) ids |
//!
//! Both are a [`TwoLevel`], by the scheme [`Adaptive`] or [`Hierarchical`]. Begin with [`AdaptiveConfig`] if token ids
//! are sorted by frequency, or with [`HierarchicalConfig`], which takes [`Classes`] of any kind.

mod adaptive;
mod distributions;
mod hierarchical;
mod loss;
mod top_k;

use std::fmt::Debug;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use crate::backend;
use crate::error::{Error, Result};
use crate::heads::MixtureLayer;
use crate::mixture::Mixture;
use crate::tensors::checks::leading;
use crate::tensors::dropout::DropoutMasks;
use crate::tensors::linear::{linear_layer, LinearOperands};
pub use adaptive::{Adaptive, AdaptiveConfig, AdaptiveSoftmax};
pub use hierarchical::{Classes, Hierarchical, HierarchicalConfig, HierarchicalSoftmax};

/// A head whose vocabulary is a shortlist and clusters: an [`AdaptiveSoftmax`] or a [`HierarchicalSoftmax`], by its
/// scheme `S`. `R` is the layer of the first level.
///
/// The ids of the shortlist and then those of the clusters, one cluster after the other, have consecutive slots. The
/// slot of a token id is the id itself, or is in a permutation.
#[derive(Clone, Debug)]
pub struct TwoLevel<S, R = Arc<dyn MixtureLayer>> {
    /// The name of the head in errors.
    name: &'static str,
    scheme: PhantomData<S>,
    /// The layer over the shortlist, then the clusters.
    root: R,
    /// The number of ids that are entries of the root themselves.
    shortlist: usize,
    clusters: Vec<Cluster>,
    vocab_size: usize,
    permutation: Option<Permutation>,
}

/// What a head of two levels computes with, whatever its scheme and the type of its root.
#[derive(Clone, Copy, Debug)]
struct Levels<'a> {
    /// The name of the head in errors.
    name: &'static str,
    root: &'a dyn MixtureLayer,
    shortlist: usize,
    clusters: &'a [Cluster],
    vocab_size: usize,
    permutation: Option<&'a Permutation>,
}

/// A softmax over the ids of consecutive slots.
#[derive(Clone, Debug)]
struct Cluster {
    /// `[d, hidden]`
    projection: Option<Tensor>,
    /// `[size, d]`
    weight: Tensor,
    /// `[size]`
    bias: Option<Tensor>,
    /// The slots of its ids.
    slots: Range<usize>,
}

impl Cluster {
    /// Returns the softmax with its parameters as constants.
    fn frozen(&self) -> Self {
        let Cluster { projection, weight, bias, slots } = self;
        let detached = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::detach);
        Cluster {
            projection: detached(projection),
            weight: weight.detach(),
            bias: detached(bias),
            slots: slots.clone(),
        }
    }

    /// Computes the softmax at these positions, `[positions, hidden]`.
    fn mixture(&self, states: &Tensor) -> Result<Mixture> {
        let contexts = match &self.projection {
            None => states.unsqueeze(1)?,
            Some(weight) => {
                let shape = [states.dim(0)?, 1, weight.dim(0)?];
                let operands = LinearOperands { input: states, weight, bias: None };
                let gradient = |_: &Tensor, upstream: &Tensor| Ok(upstream.clone());
                let forward = |layer: LinearOperands<'_>| backend::linear(layer.input, layer.weight);
                linear_layer("cluster", operands, &shape, &forward, backend::matmul, Box::new(gradient))?
            }
        };
        Mixture::new(&contexts, None, &self.weight, self.bias.as_ref())
    }
}

/// The order of the token ids, cluster by cluster, where it differs from the order of the ids; there is no shortlist
/// then. Within a cluster, ids ascend.
#[derive(Clone, Debug)]
struct Permutation {
    slot_by_id: Vec<u32>,
    id_by_slot: Vec<u32>,
}

/// The entries whose log-probabilities add up to that of a token id.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The root's entry for the id, or for its cluster.
    entry: usize,
    /// The cluster, and the index of the id there; `None` for an id of the shortlist.
    within: Option<(usize, usize)>,
}

/// The names of a scheme in errors.
#[derive(Clone, Copy, Debug)]
struct LevelNames {
    /// The name of the head.
    head: &'static str,
    /// The name of the argument that is the root.
    root: &'static str,
}

impl<S> TwoLevel<S> {
    /// Makes a head from its root and its clusters, which have consecutive slots, from the shortlist on. It is an error
    /// if the root has other sizes than these.
    fn from_levels(
        names: LevelNames,
        hidden_size: usize,
        root: Arc<dyn MixtureLayer>,
        clusters: Vec<Cluster>,
        permutation: Option<Permutation>,
    ) -> Result<Self> {
        let shortlist = clusters.first().map_or(0, |cluster| cluster.slots.start);
        let vocab_size = clusters.last().map_or(0, |cluster| cluster.slots.end);
        let entries = shortlist + clusters.len();
        if (root.hidden_size(), root.vocab_size()) != (hidden_size, entries) {
            let expected = format!("a layer with hidden_size {hidden_size} and vocab_size {entries}");
            let got = format!("{} and {}", root.hidden_size(), root.vocab_size());
            return Err(Error::config(names.root, expected, got));
        }
        Ok(TwoLevel { name: names.head, scheme: PhantomData, root, shortlist, clusters, vocab_size, permutation })
    }
}

impl<S, R: MixtureLayer> TwoLevel<S, R> {
    /// Borrows the levels.
    fn levels(&self) -> Levels<'_> {
        let TwoLevel { name, root, shortlist, clusters, vocab_size, permutation, scheme: _ } = self;
        Levels {
            name,
            root,
            shortlist: *shortlist,
            clusters,
            vocab_size: *vocab_size,
            permutation: permutation.as_ref(),
        }
    }
}

/// Returns the addition of the log-probabilities of two levels, which rounds as that of two tensors of this dtype does,
/// so that the sum equals that of `log_probs`.
fn addition(dtype: DType) -> fn(f64, f64) -> f64 {
    match dtype {
        DType::F64 => |a, b| a + b,
        _ => |a, b| f64::from(a as f32 + b as f32),
    }
}

impl Levels<'_> {
    /// Makes the mixtures of the root and of each cluster at these positions, `[positions, hidden]`.
    fn mixtures<'b>(&'b self, states: &'b Tensor) -> impl Iterator<Item = Result<Mixture>> + 'b {
        let root = std::iter::once_with(|| self.root_mixture(states));
        root.chain(self.clusters.iter().map(|cluster| cluster.mixture(states)))
    }

    /// Makes the mixture of the root, and checks its vocabulary.
    fn root_mixture(&self, states: &Tensor) -> Result<Mixture> {
        let (mixture, entries) = (self.root.mixture(states, DropoutMasks::Off)?, self.shortlist + self.clusters.len());
        let vocab = mixture.operands().sizes.vocab;
        if vocab == entries {
            Ok(mixture)
        } else {
            Err(Error::shape("log-probabilities of the first level", format!("[.., {entries}]"), &[vocab]))
        }
    }

    /// Computes the log-probabilities of the root, `[positions, entries]`, and checks their shape.
    fn root_log_probs(&self, states: &Tensor, dtype: DType) -> Result<Tensor> {
        let root = self.root.log_probs_as(states, dtype)?;
        let expected = [states.dim(0)?, self.shortlist + self.clusters.len()];
        if root.dims() == expected {
            Ok(root)
        } else {
            Err(Error::shape("log-probabilities of the first level", format!("{expected:?}"), root.dims()))
        }
    }

    /// Adds up the log-probabilities of all ids at a position from those of the root's entries and of each cluster's
    /// ids.
    fn log_probs_by_id<'b>(&self, mut levels: impl Iterator<Item = &'b [f64]>, dtype: DType) -> Vec<f64> {
        let add = addition(dtype);
        let root = levels.next().unwrap_or(&[]);
        let (shortlist, clusters) = root.split_at(self.shortlist);
        let mut by_slot = shortlist.to_vec();
        for (cluster, within) in clusters.iter().zip(levels) {
            by_slot.extend(within.iter().map(|&log_p| add(*cluster, log_p)));
        }
        match self.permutation {
            Some(permutation) => permutation.slot_by_id.iter().map(|&slot| by_slot[slot as usize]).collect(),
            None => by_slot,
        }
    }

    /// Returns hidden states as `[positions, hidden]`.
    fn flat_states(&self, hidden: &Tensor) -> Result<Tensor> {
        let positions: usize = leading(hidden)?.iter().product();
        Ok(hidden.reshape((positions, self.root.hidden_size()))?)
    }

    /// Returns the entries of a token id.
    fn place(&self, id: usize) -> Place {
        let slot = self.permutation.map_or(id, |permutation| permutation.slot_by_id[id] as usize);
        if slot < self.shortlist {
            return Place { entry: slot, within: None };
        }
        let cluster = self.clusters.partition_point(|cluster| cluster.slots.end <= slot);
        Place { entry: self.shortlist + cluster, within: Some((cluster, slot - self.clusters[cluster].slots.start)) }
    }

    /// Returns the token id at an index of a cluster.
    fn id_within(&self, cluster: usize, index: usize) -> u32 {
        let slot = self.clusters[cluster].slots.start + index;
        self.permutation.map_or(slot as u32, |permutation| permutation.id_by_slot[slot])
    }
}
