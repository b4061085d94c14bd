//! A factorised vocabulary as an output layer, and its distributions: log-probabilities of both levels, added, and
//! draws level by level, an entry of the root and, if that is a cluster, an id of the cluster.

use std::fmt::Debug;
use std::marker::PhantomData;

use candle_core::{DType, Tensor};

use super::{Cluster, Levels, TwoLevel};
use crate::backend;
use crate::backend::distribution::{Computed, Visit};
use crate::backend::parallel;
use crate::decoding::{
    AllLogProbsQuery, DrawQuery, NextToken, NextTokenQuery, Sampler, Sampling, Stage, TokenRequest, TopK,
};
use crate::distributions::{Distributions, Sealed};
use crate::error::{Error, OptionName, Result};
use crate::heads::{request_layer_methods, select_hidden, MixtureLayer, OutputLayer, RequestLayer};
use crate::loss::{Loss, OutputShape, Request};
use crate::tensors::checks::{accumulation_dtype, check_product, leading};
use crate::tensors::linear::with_shape;
use crate::tensors::transfer::{select_positions, to_device};

/// The number of positions whose log-probabilities of all ids are held at once.
const POSITIONS: usize = 16;

impl<S: Debug + Send + Sync, R: MixtureLayer> OutputLayer for TwoLevel<S, R> {
    fn hidden_size(&self) -> usize {
        self.root.hidden_size()
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    request_layer_methods!();

    fn distributions(&self, hidden: &Tensor, positions: Option<&[u32]>) -> Result<Box<dyn Distributions + '_>> {
        Ok(Box::new(TwoLevelDistributions::new(self.levels(), select_hidden(hidden, positions)?)?))
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

/// The distributions of a head of two levels after hidden states, which have been checked.
pub(super) struct TwoLevelDistributions<'a> {
    pub(super) head: Levels<'a>,
    /// `[.., hidden]`
    pub(super) hidden: Tensor,
    /// `[positions, hidden]`
    pub(super) states: Tensor,
}

impl<'a> TwoLevelDistributions<'a> {
    /// Checks the hidden states `[.., hidden]`.
    pub(super) fn new(head: Levels<'a>, hidden: Tensor) -> Result<Self> {
        head.check_hidden(&hidden)?;
        let states = head.flat_states(&hidden)?;
        Ok(TwoLevelDistributions { head, hidden, states })
    }

    /// Returns the leading dimensions of the hidden states.
    pub(super) fn leading(&self) -> &[usize] {
        &self.hidden.dims()[..self.hidden.rank() - 1]
    }
}

impl Sealed for TwoLevelDistributions<'_> {
    fn shape(&self) -> OutputShape<'_> {
        OutputShape { leading: self.leading(), vocab: self.head.vocab_size, like: &self.hidden }
    }

    fn name(&self) -> &'static str {
        self.head.name
    }

    fn select(&self, positions: &[u32]) -> Result<Box<dyn Distributions + '_>> {
        Ok(Box::new(TwoLevelDistributions::new(self.head, select_positions(&self.hidden, positions)?)?))
    }
}

impl Distributions for TwoLevelDistributions<'_> {
    fn request_loss(&self, request: &Request) -> Result<Loss> {
        self.head.request_loss(&self.hidden, request)
    }

    fn log_probs_as(&self, dtype: DType) -> Result<Tensor> {
        accumulation_dtype("dtype", dtype)?;
        let TwoLevelDistributions { head, hidden, states } = self;
        check_product("positions * vocab_size", &[states.dim(0)?, head.vocab_size])?;
        let shape = [leading(hidden)?, &[head.vocab_size]].concat();
        if states.elem_count() == 0 {
            return Ok(Tensor::zeros(shape, dtype, hidden.device())?);
        }
        let accumulation = accumulation_dtype("hidden", hidden.dtype())?;
        let index = |values: Vec<u32>| Tensor::from_vec(values, head.vocab_size, hidden.device());
        let entries = (0..head.vocab_size).map(|id| head.place(id).entry as u32).collect();
        let root = head.root_log_probs(states, accumulation)?.index_select(&index(entries)?, 1)?;
        let mut parts = Vec::with_capacity(head.clusters.len() + 1);
        if head.shortlist > 0 {
            parts.push(Tensor::zeros((states.dim(0)?, head.shortlist), accumulation, hidden.device())?);
        }
        for cluster in head.clusters {
            parts.push(cluster.mixture(states)?.log_probs_as(accumulation)?);
        }
        let mut within = Tensor::cat(&parts, 1)?;
        if let Some(permutation) = head.permutation {
            within = within.index_select(&index(permutation.slot_by_id.clone())?, 1)?;
        }
        Ok(with_shape(&(root + within)?, &shape)?.to_dtype(dtype)?)
    }

    fn top_k(&self, k: usize) -> Result<TopK> {
        self.search_top_k(k)
    }

    /// A temperature or a truncation needs the log-probabilities of all ids; otherwise only drawn clusters are
    /// computed.
    fn sample(&self, sampler: &mut Sampler) -> Result<Tensor> {
        let TwoLevelDistributions { hidden, states, .. } = self;
        let sampling = sampler.sampling().clone();
        if sampling.component_temperature != 1.0 {
            return Err(Error::Unsupported { option: OptionName::ComponentTemperature, head: self.head.name });
        }
        if sampling.temperature == 0.0 {
            return self.argmax();
        }
        let ids = if sampling.is_truncated() || sampling.temperature != 1.0 {
            let uniform = sampler.uniform(states.dim(0)?);
            self.visit(&DrawQuery { sampling: &sampling, uniform: &uniform })?
        } else {
            self.draw_by_level(sampler)?
        };
        to_device(ids, leading(hidden)?, hidden.device())
    }

    fn next_tokens_per_position(&self, requests: &[&[&TokenRequest]]) -> Result<Vec<Vec<NextToken>>> {
        self.visit(&NextTokenQuery::new(requests, self.states.dim(0)?, self.head.vocab_size)?)
    }
}

impl TwoLevelDistributions<'_> {
    /// Draws an entry of the first level at each position and, if it is a cluster, an id of the cluster.
    fn draw_by_level(&self, sampler: &mut Sampler) -> Result<Vec<u32>> {
        let TwoLevelDistributions { head, states, .. } = self;
        let states = states.detach();
        let uniform = sampler.stage_uniform(Stage::WithinCluster, states.dim(0)?);
        let mut ids = head.root.sample(&states, sampler)?.flatten_all()?.to_vec1::<u32>()?;
        let entries = head.shortlist + head.clusters.len();
        if let Some(entry) = ids.iter().find(|entry| **entry as usize >= entries) {
            return Err(Error::config("sample of the first level", format!("below {entries}"), entry));
        }
        let mut members = vec![Vec::new(); head.clusters.len()];
        for (position, &entry) in (0..).zip(&ids) {
            if let Some(cluster) = (entry as usize).checked_sub(head.shortlist) {
                members[cluster].push(position);
            }
        }
        for (cluster, positions) in members.iter().enumerate().filter(|(_, positions)| !positions.is_empty()) {
            let states = states.index_select(&Tensor::new(&**positions, states.device())?, 0)?;
            let uniform: Vec<f64> = positions.iter().map(|&position: &u32| uniform[position as usize]).collect();
            let draw = DrawQuery { sampling: &Sampling::new(), uniform: &uniform };
            let drawn = backend::visit(head.clusters[cluster].mixture(&states)?.operands(), &draw);
            let drawn = drawn.map_err(|error| error.with_position_from(positions))?;
            for (&position, index) in positions.iter().zip(drawn) {
                ids[position as usize] = head.id_within(cluster, index as usize);
            }
        }
        Ok(ids)
    }

    /// Answers a query of each position's distribution over all ids. Each position is computed as it is alone, so that
    /// its answer has the same bits in every batch.
    fn visit<V: Visit>(&self, query: &V) -> Result<Vec<V::Output>> {
        let TwoLevelDistributions { head, states, .. } = self;
        let (states, positions) = (states.detach(), states.dim(0)?);
        let mut answers = Vec::with_capacity(positions);
        for first in (0..positions).step_by(POSITIONS) {
            let places: Vec<u32> = (first as u32..positions.min(first + POSITIONS) as u32).collect();
            let states = states.narrow(0, first, places.len())?;
            let mut levels = Vec::with_capacity(head.clusters.len() + 1);
            for mixture in head.mixtures(&states) {
                let log_probs = backend::visit(mixture?.operands(), &AllLogProbsQuery);
                levels.push(log_probs.map_err(|error| error.with_position_from(&places))?);
            }
            let answer = |(i, position): (usize, &u32)| {
                let levels = levels.iter().map(|level| &level[i].0[..]);
                query.visit(*position as usize, &Computed::new(&head.log_probs_by_id(levels, states.dtype())))
            };
            answers.extend(parallel::map(places.iter().enumerate(), answer).into_iter().collect::<Result<Vec<_>>>()?);
        }
        Ok(answers)
    }
}
