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

/// The start of training: a seed and the scale of the initial values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    pub(crate) seed: u64,
    pub(crate) values: InitialValues,
}

/// The bounds of the uniform distributions that the initial values are drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InitialValues {
    /// Those of the released MoS code: embedding and decoder 0.1, all else 1/sqrt(hidden).
    Small,
    /// Embedding 1, all else sqrt(3/inputs), biases 0: every layer preserves the variance of its inputs. Mixtures,
    /// which have one more layer, then start to learn as fast as the softmax.
    Even,
}

impl InitialValues {
    fn bound(self, name: &str, kind: HeadKind, sizes: Sizes) -> f64 {
        let Sizes { head, embedding, .. } = sizes;
        let of = |inputs: usize| (3.0 / inputs as f64).sqrt();
        match (self, name) {
            (_, "head.decoder.bias") => 0.0,
            (InitialValues::Small, "embedding.weight" | "head.decoder.weight") => 0.1,
            (InitialValues::Small, _) => 1.0 / (head.hidden as f64).sqrt(),
            (InitialValues::Even, "embedding.weight") => 1.0,
            (InitialValues::Even, "lstm.0.weight_ih_l0") => of(embedding),
            (InitialValues::Even, "head.decoder.weight") if kind != HeadKind::Softmax => of(head.context),
            (InitialValues::Even, name) if name.contains("bias") => 0.0,
            (InitialValues::Even, _) => of(head.hidden),
        }
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
    pub(crate) fn new(kind: HeadKind, sizes: Sizes, dropout: f64, start: Start, device: &Device) -> Result<Self> {
        let Sizes { head, embedding, layers } = sizes;
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let lstm = Lstm::new(embedding, head.hidden, layers, dropout, vb.pp("lstm"))?;
        let embedding = candle_nn::embedding(head.vocab, embedding, vb.pp("embedding"))?;
        let bound = |name: &str| start.values.bound(name, kind, sizes);
        let head = head.build(kind, dropout, vb.pp("head"))?;
        init::uniform(&varmap, start.seed, bound)?;
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

    /// The state before the first id of a text.
    pub(crate) fn start(&self, batch: usize) -> Result<Vec<LSTMState>> {
        self.lstm.start(batch)
    }

    /// Token ids [batch, seq] -> hidden states [batch, seq, hidden]; advances `states`, detached from the graph.
    /// Dropout is applied if a generator for its masks is given.
    pub(crate) fn hidden(&self, ids: &Tensor, states: &mut [LSTMState], rng: Option<&mut StdRng>) -> Result<Tensor> {
        let hidden = self.lstm.forward(&self.embedding.forward(ids)?, states, rng)?;
        recurrent::detach(states);
        Ok(hidden)
    }
}

#[cfg(test)]
mod tests {
    use super::super::head::ActivationKind;
    use super::*;

    const START: Start = Start { seed: 0, values: InitialValues::Small };

    fn parameters(kind: HeadKind, (vocab, embedding, hidden, components): (usize, usize, usize, usize)) -> f64 {
        let context = HeadSizes::equal_context(vocab, hidden, components);
        let head = HeadSizes { vocab, hidden, context, components, activation: ActivationKind::Tanh };
        let sizes = Sizes { head, embedding, layers: 1 };
        LanguageModel::new(kind, sizes, 0.0, START, &Device::Cpu).expect("valid sizes").parameters() as f64
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
            let model = LanguageModel::new(kind, sizes, 0.0, START, &Device::Cpu).expect("valid sizes");
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
            let model = LanguageModel::new(HeadKind::Mos, sizes, 0.0, Start { seed, ..START }, &Device::Cpu)
                .expect("valid sizes");
            let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu).expect("ids");
            let hidden = model.hidden(&ids, &mut model.start(1).expect("state"), None).expect("hidden");
            hidden.sum_all().and_then(|sum| sum.to_scalar()).expect("sum")
        };
        assert_eq!(sum(1), sum(1));
        assert_ne!(sum(1), sum(2));
    }
}
