//! The language model: embedding, LSTM layers, and one of the three output layers.

use crate::common::{init, Result};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::rnn::{LSTMConfig, LSTMState, LSTM, RNN};
use candle_nn::{Embedding, VarBuilder, VarMap};
use clap::ValueEnum;
use mos_head::{
    Activation, MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, SoftmaxConfig, SoftmaxHead,
};
use rand::{rngs::StdRng, Rng};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum HeadKind {
    Softmax,
    Moc,
    Mos,
}

impl HeadKind {
    pub(crate) const ALL: [HeadKind; 3] = [HeadKind::Softmax, HeadKind::Moc, HeadKind::Mos];

    pub(crate) fn name(self) -> &'static str {
        match self {
            HeadKind::Softmax => "softmax",
            HeadKind::Moc => "moc",
            HeadKind::Mos => "mos",
        }
    }
}

/// Of the contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActivationKind {
    Tanh,
    Identity,
}

impl ActivationKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            ActivationKind::Tanh => "tanh",
            ActivationKind::Identity => "identity",
        }
    }
}

impl From<ActivationKind> for Activation {
    fn from(kind: ActivationKind) -> Self {
        match kind {
            ActivationKind::Tanh => Activation::Tanh,
            ActivationKind::Identity => Activation::Identity,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sizes {
    pub(crate) vocab: usize,
    pub(crate) embedding: usize,
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    /// Of the mixtures; the softmax's context is the hidden state.
    pub(crate) context: usize,
    pub(crate) components: usize,
    pub(crate) activation: ActivationKind,
}

impl Sizes {
    /// The context size that gives a mixture as many parameters as the softmax has: `vocab * hidden` against
    /// `context * (vocab + components * (hidden + 1)) + components * hidden`.
    pub(crate) fn equal_context(vocab: usize, hidden: usize, components: usize) -> usize {
        let left = (vocab * hidden).saturating_sub(components * hidden) as f64;
        let each = (vocab + components * (hidden + 1)) as f64;
        (left / each).round().max(1.0) as usize
    }
}

pub(crate) struct LanguageModel {
    embedding: Embedding,
    layers: Vec<LSTM>,
    head: Box<dyn OutputLayer>,
    varmap: VarMap,
    dropout: f64,
    device: Device,
}

impl LanguageModel {
    /// Initial values of the released MoS code: embedding and decoder U(-0.1, 0.1), decoder bias 0, all else
    /// U(-1/sqrt(hidden), 1/sqrt(hidden)).
    pub(crate) fn new(kind: HeadKind, sizes: Sizes, dropout: f64, seed: u64, device: &Device) -> Result<Self> {
        let Sizes { vocab, embedding, hidden, layers, context, components, activation } = sizes;
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let mixture = MixtureConfig::new(hidden, context, vocab, components)
            .with_dropout(dropout)
            .with_activation(activation.into());
        let head: Box<dyn OutputLayer> = match kind {
            HeadKind::Softmax => Box::new(SoftmaxHead::new(&SoftmaxConfig::new(hidden, vocab), vb.pp("head"))?),
            HeadKind::Moc => Box::new(MixtureOfContexts::new(&mixture, vb.pp("head"))?),
            HeadKind::Mos => Box::new(MixtureOfSoftmaxes::new(&mixture, vb.pp("head"))?),
        };
        let layer = |i: usize| {
            let inputs = if i == 0 { embedding } else { hidden };
            candle_nn::lstm(inputs, hidden, LSTMConfig::default(), vb.pp(format!("lstm.{i}")))
        };
        let layers = (0..layers).map(layer).collect::<candle_core::Result<_>>()?;
        let embedding = candle_nn::embedding(vocab, embedding, vb.pp("embedding"))?;
        let linear = 1.0 / (hidden as f64).sqrt();
        init::uniform(&varmap, seed, |name| match name {
            "embedding.weight" | "head.decoder.weight" => 0.1,
            "head.decoder.bias" => 0.0,
            _ => linear,
        })?;
        Ok(Self { embedding, layers, head, varmap, dropout, device: device.clone() })
    }

    pub(crate) fn head(&self) -> &dyn OutputLayer {
        self.head.as_ref()
    }

    pub(crate) fn varmap(&self) -> &VarMap {
        &self.varmap
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn parameters(&self) -> usize {
        self.varmap.all_vars().iter().map(|var| var.elem_count()).sum()
    }

    /// The state before the first token of a text.
    pub(crate) fn start(&self, batch: usize) -> Result<Vec<LSTMState>> {
        Ok(self.layers.iter().map(|layer| layer.zero_state(batch)).collect::<candle_core::Result<_>>()?)
    }

    /// Tokens [batch, seq] -> hidden [batch, seq, hidden]; `states` moves on, cut off from the gradients.
    /// Dropout is applied where a generator for its masks is given.
    pub(crate) fn hidden(
        &self,
        tokens: &Tensor,
        states: &mut [LSTMState],
        mut rng: Option<&mut StdRng>,
    ) -> Result<Tensor> {
        let mut outputs = self.embedding.forward(tokens)?;
        for (layer, state) in self.layers.iter().zip(states) {
            outputs = self.locked_dropout(outputs, rng.as_deref_mut())?;
            let steps = layer.seq_init(&outputs, state)?;
            if let Some(last) = steps.last() {
                *state = LSTMState::new(last.h.detach(), last.c.detach());
            }
            outputs = layer.states_to_tensor(&steps)?;
        }
        self.locked_dropout(outputs, rng)
    }

    /// One mask per sequence, shared by its time steps.
    fn locked_dropout(&self, values: Tensor, rng: Option<&mut StdRng>) -> Result<Tensor> {
        let Some(rng) = rng.filter(|_| self.dropout > 0.0) else { return Ok(values) };
        let (batch, _, width) = values.dims3()?;
        let keep = 1.0 - self.dropout;
        let mask: Vec<f32> =
            (0..batch * width).map(|_| if rng.random::<f64>() < keep { 1.0 / keep as f32 } else { 0.0 }).collect();
        Ok(values.broadcast_mul(&Tensor::from_vec(mask, (batch, 1, width), &self.device)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(kind: HeadKind, (vocab, embedding, hidden, components): (usize, usize, usize, usize)) -> f64 {
        let context = Sizes::equal_context(vocab, hidden, components);
        let activation = ActivationKind::Tanh;
        let sizes = Sizes { vocab, embedding, hidden, layers: 1, context, components, activation };
        LanguageModel::new(kind, sizes, 0.0, 0, &Device::Cpu).expect("valid sizes").parameters() as f64
    }

    #[test]
    fn the_heads_have_equal_parameter_counts_within_one_percent() {
        for sizes in [(512, 32, 6, 8), (10_000, 220, 220, 5), (10_000, 220, 220, 15)] {
            let softmax = parameters(HeadKind::Softmax, sizes);
            for kind in [HeadKind::Moc, HeadKind::Mos] {
                let ratio = parameters(kind, sizes) / softmax;
                assert!((ratio - 1.0).abs() < 0.01, "{kind:?} {sizes:?}: {ratio}");
            }
        }
    }

    #[test]
    fn a_seed_fixes_the_initial_values() {
        let sizes = Sizes {
            vocab: 11,
            embedding: 3,
            hidden: 4,
            layers: 2,
            context: 5,
            components: 2,
            activation: ActivationKind::Tanh,
        };
        let sum = |seed| -> f32 {
            let model = LanguageModel::new(HeadKind::Mos, sizes, 0.0, seed, &Device::Cpu).expect("valid sizes");
            let tokens = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu).expect("tokens");
            let hidden = model.hidden(&tokens, &mut model.start(1).expect("state"), None).expect("hidden");
            hidden.sum_all().and_then(|sum| sum.to_scalar()).expect("sum")
        };
        assert_eq!(sum(1), sum(1));
        assert_ne!(sum(1), sum(2));
    }
}
