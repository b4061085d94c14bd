//! Sampling from a factorised vocabulary, level by level: it draws an entry of the root and, if that is a cluster, an
//! id of the cluster.

use std::fmt::Debug;

use candle_core::{Tensor, D};

use super::TwoLevel;
use crate::backend::operands::accumulation_dtype;
use crate::decoding::Sampler;
use crate::error::{Error, OptionName, Result};
use crate::heads::{MixtureLayer, OutputLayer};
use crate::tensors::checks::leading;
use crate::tensors::transfer::to_device;

impl<S: Debug + Send + Sync, R: MixtureLayer> TwoLevel<S, R> {
    /// Draws a token id after each hidden state. A temperature or a truncation needs the log-probabilities of all ids;
    /// otherwise only drawn clusters are computed.
    pub(super) fn draw_ids(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
        let sampling = sampler.sampling();
        if sampling.component_temperature != 1.0 {
            return Err(Error::Unsupported { option: OptionName::ComponentTemperature, head: self.name });
        }
        if sampling.temperature == 0.0 {
            return Ok(self.top_k(hidden, 1)?.token_ids.squeeze(D::Minus1)?);
        }
        let is_whole = sampling.top_k.is_none() && sampling.top_p >= 1.0 && sampling.min_p <= 0.0;
        if !is_whole || sampling.temperature != 1.0 {
            let accumulation = accumulation_dtype("hidden", hidden.dtype())?;
            return sampler.sample_rounded(&self.log_probs_as(hidden, accumulation)?.detach(), hidden.dtype());
        }
        let states = self.flat_states(hidden)?.detach();
        let mut ids = self.root.sample(&states, sampler)?.flatten_all()?.to_vec1::<u32>()?;
        let entries = self.shortlist + self.clusters.len();
        if let Some(entry) = ids.iter().find(|entry| **entry as usize >= entries) {
            return Err(Error::config("sample of the first level", format!("below {entries}"), entry));
        }
        let mut members = vec![Vec::new(); self.clusters.len()];
        for (position, &entry) in (0..).zip(&ids) {
            if let Some(cluster) = (entry as usize).checked_sub(self.shortlist) {
                members[cluster].push(position);
            }
        }
        for (cluster, positions) in members.iter().enumerate().filter(|(_, positions)| !positions.is_empty()) {
            let states = states.index_select(&Tensor::new(&**positions, hidden.device())?, 0)?;
            let drawn = self.clusters[cluster].mixture(&states)?.sample(sampler);
            let drawn = drawn.map_err(|error| error.with_position_from(positions))?;
            for (&position, index) in positions.iter().zip(drawn.to_vec1::<u32>()?) {
                ids[position as usize] = self.id_within(cluster, index as usize);
            }
        }
        to_device(ids, leading(hidden)?, hidden.device())
    }
}
