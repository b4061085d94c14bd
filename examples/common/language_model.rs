//! The language model: embedding, LSTM layers, and one of the three output layers.

use super::head::{HeadKind, HeadSizes};
use super::{init, recurrent, recurrent::Lstm, Result};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::rnn::LSTMState;
use candle_nn::{Embedding, VarBuilder, VarMap};
use mos_head::OutputLayer;
use rand::rngs::StdRng;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sizes {
    pub(crate) head: HeadSizes,
    pub(crate) embedding: usize,
    pub(crate) layers: usize,
}

impl Sizes {
    /// The number of parameters of a model with these sizes.
    pub(crate) fn parameters(self, kind: HeadKind) -> usize {
        let Sizes { head, embedding, layers } = self;
        let layer = |inputs: usize| 4 * head.hidden * (inputs + head.hidden + 2);
        let lstm = layer(embedding) + (layers - 1) * layer(head.hidden);
        head.vocab * embedding + lstm + head.parameters(kind)
    }

    /// These sizes with as many LSTM units as bring the parameters closest to `parameters`.
    pub(crate) fn with_parameters(self, kind: HeadKind, parameters: usize) -> Self {
        let with = |hidden| Sizes { head: HeadSizes { hidden, ..self.head }, ..self };
        let above = (1..=parameters).find(|&hidden| with(hidden).parameters(kind) >= parameters).unwrap_or(1);
        let below = with((above - 1).max(1));
        let distance = |sizes: &Sizes| sizes.parameters(kind).abs_diff(parameters);
        [below, with(above)].into_iter().min_by_key(distance).unwrap_or(below)
    }
}

pub(crate) struct LanguageModel {
    embedding: Embedding,
    lstm: Lstm,
    head: Box<dyn OutputLayer>,
    varmap: VarMap,
    device: Device,
}

impl LanguageModel {
    /// Initial values of the released MoS code: embedding and decoder U(-0.1, 0.1), decoder bias 0, all else
    /// U(-1/sqrt(hidden), 1/sqrt(hidden)).
    pub(crate) fn new(kind: HeadKind, sizes: Sizes, dropout: f64, seed: u64, device: &Device) -> Result<Self> {
        let Sizes { head, embedding, layers } = sizes;
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let lstm = Lstm::new(embedding, head.hidden, layers, dropout, vb.pp("lstm"))?;
        let embedding = candle_nn::embedding(head.vocab, embedding, vb.pp("embedding"))?;
        let linear = 1.0 / (head.hidden as f64).sqrt();
        let head = head.build(kind, dropout, vb.pp("head"))?;
        init::uniform(&varmap, seed, |name| match name {
            "embedding.weight" | "head.decoder.weight" => 0.1,
            "head.decoder.bias" => 0.0,
            _ => linear,
        })?;
        Ok(Self { embedding, lstm, head, varmap, device: device.clone() })
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
        self.lstm.start(batch)
    }

    /// Tokens [batch, seq] -> hidden [batch, seq, hidden]; `states` moves on, cut off from the gradients.
    /// Dropout is applied where a generator for its masks is given.
    pub(crate) fn hidden(&self, tokens: &Tensor, states: &mut [LSTMState], rng: Option<&mut StdRng>) -> Result<Tensor> {
        let hidden = self.lstm.forward(&self.embedding.forward(tokens)?, states, rng)?;
        recurrent::detach(states);
        Ok(hidden)
    }
}

#[cfg(test)]
mod tests {
    use super::super::head::ActivationKind;
    use super::*;

    fn parameters(kind: HeadKind, (vocab, embedding, hidden, components): (usize, usize, usize, usize)) -> f64 {
        let context = HeadSizes::equal_context(vocab, hidden, components);
        let head = HeadSizes { vocab, hidden, context, components, activation: ActivationKind::Tanh };
        let sizes = Sizes { head, embedding, layers: 1 };
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
    fn sizes_know_the_number_of_parameters() {
        let head = HeadSizes { vocab: 11, hidden: 4, context: 5, components: 2, activation: ActivationKind::Tanh };
        for (kind, layers) in [(HeadKind::Softmax, 1), (HeadKind::Moc, 2), (HeadKind::Mos, 3)] {
            let sizes = Sizes { head, embedding: 3, layers };
            let model = LanguageModel::new(kind, sizes, 0.0, 0, &Device::Cpu).expect("valid sizes");
            assert_eq!(model.parameters(), sizes.parameters(kind), "{kind:?}");
            assert_eq!(sizes.with_parameters(kind, sizes.parameters(kind)), sizes);
            assert_eq!(sizes.with_parameters(kind, sizes.parameters(kind) + 1), sizes);
            assert_eq!(sizes.with_parameters(kind, sizes.parameters(kind) - 1), sizes);
        }
    }

    #[test]
    fn a_seed_fixes_the_initial_values() {
        let head = HeadSizes { vocab: 11, hidden: 4, context: 5, components: 2, activation: ActivationKind::Tanh };
        let sizes = Sizes { head, embedding: 3, layers: 2 };
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
