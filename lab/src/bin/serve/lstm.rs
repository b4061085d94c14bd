//! The LSTM of `language_model`: texts of a batch advance together.

use crate::backbone::Backbone;
use candle_core::{Device, Tensor};
use candle_nn::rnn::LSTMState;
use lab::layers::{Checkpoint, HeadKind};
use lab::training::{InitialValues, LanguageModel, Model, Recipe};
use lab::Result;
use mos_head::OutputLayer;
use std::path::Path;

pub(crate) struct Lstm(LanguageModel);

impl Lstm {
    /// Returns the model of a checkpoint, or a mixture of softmaxes over 10,000 ids with random weights.
    pub(crate) fn new(checkpoint: Option<&Path>) -> Result<Self> {
        let Some(checkpoint) = checkpoint else {
            let values = InitialValues::Even;
            return Ok(Lstm(LanguageModel::new(HeadKind::Mos, 10_000, values, &Recipe::BASE, &Device::Cpu)?));
        };
        let checkpoint = Checkpoint::load(checkpoint, &Device::Cpu)?;
        let embedding = checkpoint.tensors.get("embedding.weight").ok_or("the checkpoint has no embedding")?;
        Ok(Lstm(LanguageModel::from_checkpoint(&checkpoint, embedding.dim(0)?, &Device::Cpu)?.1))
    }

    /// Returns the hidden state after some ids of texts in step, `[texts, ids]`.
    fn advance(&self, ids: Tensor, states: &mut [LSTMState]) -> Result<Tensor> {
        let last = ids.dim(1)? - 1;
        Ok(self.0.hidden(&ids, states)?.narrow(1, last, 1)?.squeeze(1)?)
    }
}

impl Backbone for Lstm {
    /// The state of each layer for one text.
    type State = Vec<LSTMState>;

    fn head(&self) -> &dyn OutputLayer {
        self.0.head()
    }

    fn start(&self) -> Result<Self::State> {
        self.0.state(1)
    }

    fn read(&self, texts: &mut [(&mut Self::State, &[u32])]) -> Result<Tensor> {
        // Each text reads all but the last id of its prompt alone.
        for (state, ids) in texts.iter_mut().filter(|(_, ids)| ids.len() > 1) {
            self.advance(Tensor::new(&ids[..ids.len() - 1], &Device::Cpu)?.unsqueeze(0)?, state)?;
        }
        let last: Vec<u32> = texts.iter().filter_map(|(_, ids)| ids.last().copied()).collect();
        let joined = |layer: usize| {
            let joined_part = |f: fn(&LSTMState) -> &Tensor| {
                Tensor::cat(&texts.iter().map(|(state, _)| f(&state[layer])).collect::<Vec<_>>(), 0)
            };
            Ok(LSTMState::new(joined_part(|state| &state.h)?, joined_part(|state| &state.c)?))
        };
        let layers = texts.first().map_or(0, |(state, _)| state.len());
        let mut states = (0..layers).map(joined).collect::<Result<Vec<_>>>()?;
        let hidden = self.advance(Tensor::new(last, &Device::Cpu)?.unsqueeze(1)?, &mut states)?;
        for (i, (state, _)) in texts.iter_mut().enumerate() {
            for (text_state, all) in state.iter_mut().zip(&states) {
                *text_state = LSTMState::new(all.h.narrow(0, i, 1)?, all.c.narrow(0, i, 1)?);
            }
        }
        Ok(hidden)
    }
}
