//! The sizes of a language model, and the scale of its initial values.

use super::head::{HeadKind, HeadSizes};
use super::recipe::Recipe;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sizes {
    pub(crate) head: HeadSizes,
    pub(crate) embedding: usize,
    pub(crate) layers: usize,
}

impl Sizes {
    pub(crate) fn new(recipe: &Recipe, vocab: usize) -> Self {
        Self { head: recipe.head(vocab), embedding: recipe.embedding(), layers: recipe.layers }
    }

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
    pub(crate) fn bound(self, name: &str, kind: HeadKind, sizes: Sizes) -> f64 {
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
