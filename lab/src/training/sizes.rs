//! The sizes of a language model, and the scale of its initial values.

use super::recipe::Recipe;
use crate::layers::{mixtape::MixtapeConfig, HeadKind, HeadSizes, Output, OutputKind};
use crate::Result;
use mos_head::parts::CharCnnConfig;

/// The sizes of a language model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// The sizes of its head.
    pub head: HeadSizes,
    /// The embedding's size.
    pub embedding: usize,
    /// The number of LSTM layers.
    pub layers: usize,
    /// LSTM units of the layers below the last, which has `head.hidden`.
    pub inner: usize,
    /// The number of cells of each layer, if their outputs are projected to its units.
    pub cells: Option<usize>,
    /// The output between the head and its vocabulary, and what the inputs are.
    pub output: Output,
    /// Whether the decoder is the embedding, which then is as wide as the contexts.
    pub tied: bool,
}

impl Sizes {
    /// Returns the sizes of this head's model. The contexts of a mixture have the size that gives it as many parameters
    /// as the softmax has, unless the recipe has another.
    pub fn new(kind: HeadKind, recipe: &Recipe, vocab: usize) -> Self {
        let (head, inner) = (recipe.head(vocab), recipe.awd.inner.unwrap_or(recipe.hidden));
        let (embedding, layers, tied) = (recipe.embedding(), recipe.layers, recipe.awd.tied());
        let cells = (recipe.cells > 0).then_some(recipe.cells);
        let sizes = Sizes { head, embedding, layers, inner, cells, output: recipe.output, tied };
        let with_context_dim = |context| Sizes { head: HeadSizes { context, ..head }, embedding: context, ..sizes };
        match (tied, kind, recipe.context) {
            (false, HeadKind::Mixtape, None) => {
                let MixtapeConfig { context, .. } = MixtapeConfig::equal_to_softmax(vocab, head.hidden);
                Sizes { head: HeadSizes { context, ..head }, ..sizes }
            }
            (false, ..) => sizes,
            // The softmax's context is its hidden state.
            (true, HeadKind::Softmax, _) => {
                let context = recipe.embedding.unwrap_or(head.hidden);
                let sizes = with_context_dim(context);
                Sizes { head: HeadSizes { hidden: context, ..sizes.head }, ..sizes }
            }
            (true, _, Some(context)) => with_context_dim(context),
            (true, _, None) => {
                let wanted = Sizes::new(HeadKind::Softmax, recipe, vocab).parameters(HeadKind::Softmax);
                let distance = |context: &usize| with_context_dim(*context).parameters(kind).abs_diff(wanted);
                with_context_dim((1..=2 * sizes.embedding).min_by_key(distance).unwrap_or(1))
            }
        }
    }

    /// Returns the units of every layer.
    pub fn units(self) -> Vec<usize> {
        let mut units = vec![self.inner; self.layers];
        units[self.layers - 1] = self.head.hidden;
        units
    }

    /// Returns the number of parameters of a model with these sizes.
    pub fn parameters(self, kind: HeadKind) -> usize {
        let Sizes { head, embedding, .. } = self;
        let widths = [vec![embedding], self.units()].concat();
        let layer = |inputs: usize, units: usize| match self.cells {
            None => 4 * units * (inputs + units + 2),
            Some(cells) => 4 * cells * (inputs + units + 2) + cells * units,
        };
        let lstm: usize = widths.windows(2).map(|pair| layer(pair[0], pair[1])).sum();
        let shared = if self.tied { head.vocab * embedding } else { 0 };
        head.vocab * embedding + lstm + head.parameters(kind) - shared
    }

    /// Returns the number of parameters of a model with this output and these inputs, whose words have this many
    /// different characters, without making it.
    pub fn described(self, kind: HeadKind, characters: usize) -> Result<usize> {
        let Sizes { head, embedding, output, tied, .. } = self;
        let is_described = output.kind == OutputKind::Full || output.kind.is_sampled();
        if !is_described || tied && output.spelled_inputs {
            return Err(
                format!("--describe is not for --output {}, or --tied with --spelled-inputs", output.name()).into()
            );
        }
        let mut parameters = self.parameters(kind);
        if output.spelled_inputs {
            parameters -= head.vocab * embedding;
            parameters += output.cnn.parameters(embedding, 0, head.vocab, characters);
        }
        if output.kind == OutputKind::CharCnn {
            let width = head.decoder_width(kind);
            parameters -= head.vocab * width;
            parameters += output.cnn.parameters(width, output.correction, head.vocab, characters);
        }
        Ok(parameters)
    }

    /// Returns these sizes with as many LSTM units, the same in all layers, as bring the parameters closest to
    /// `parameters`.
    pub fn with_parameters(self, kind: HeadKind, parameters: usize) -> Self {
        let with = |hidden| Sizes { head: HeadSizes { hidden, ..self.head }, inner: hidden, ..self };
        let above = (1..=parameters).find(|&hidden| with(hidden).parameters(kind) >= parameters).unwrap_or(1);
        let below = with((above - 1).max(1));
        let distance = |sizes: &Sizes| sizes.parameters(kind).abs_diff(parameters);
        [below, with(above)].into_iter().min_by_key(distance).unwrap_or(below)
    }

    /// Returns the settings that a checkpoint must match, by the names of their flags.
    pub fn settings(self, kind: HeadKind) -> Vec<(&'static str, String)> {
        let mut settings = self.head.settings(kind);
        let Sizes { embedding, layers, inner, cells, tied, .. } = self;
        settings.extend([("embedding", embedding.to_string()), ("layers", layers.to_string())]);
        if layers > 1 && inner != self.head.hidden {
            settings.push(("inner", inner.to_string()));
        }
        if let Some(cells) = cells {
            settings.push(("cells", cells.to_string()));
        }
        if tied {
            settings.push(("tied", "true".into()));
        }
        settings
    }
}

/// The bounds of the uniform distributions that the initial values are drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitialValues {
    /// The bounds of the released MoS code: embedding and decoder 0.1, an LSTM layer 1/sqrt(its units), all else
    /// 1/sqrt(hidden).
    Small,
    /// Embedding 1, all else sqrt(3/inputs), biases 0: every layer preserves the variance of its inputs. Mixtures,
    /// which have one more layer, then start to learn as fast as the softmax.
    Even,
}

impl InitialValues {
    /// Returns the bound of a variable's uniform initial values.
    pub fn bound(self, name: &str, kind: HeadKind, sizes: Sizes) -> f64 {
        let Sizes { head, embedding, .. } = sizes;
        let even_bound = |inputs: usize| (3.0 / inputs as f64).sqrt();
        let layer = name.strip_prefix("lstm.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        let units = layer.map_or(head.hidden, |layer| sizes.units()[layer]);
        if let Some(name) = name.strip_prefix("head.rows.").or_else(|| name.strip_prefix("inputs.")) {
            return row_network_bound(name, sizes.output);
        }
        match (self, name) {
            (_, name) if name.ends_with("decoder.bias") => 0.0,
            (InitialValues::Small, "embedding.weight" | "head.decoder.weight" | "head.gate.rows.weight") => 0.1,
            (InitialValues::Small, _) => 1.0 / (units as f64).sqrt(),
            (InitialValues::Even, "embedding.weight") => 1.0,
            (InitialValues::Even, "head.decoder.weight") if kind != HeadKind::Softmax => even_bound(head.context),
            (InitialValues::Even, "head.gate.rows.weight") => even_bound(head.mixtape().gate),
            (InitialValues::Even, name) if name.contains("bias") => 0.0,
            (InitialValues::Even, name) if name.ends_with("weight_ih_l0") => match layer {
                Some(0) | None => even_bound(embedding),
                Some(layer) => even_bound(sizes.units()[layer - 1]),
            },
            (InitialValues::Even, name) if name.ends_with("weight_hr_l0") => even_bound(sizes.cells.unwrap_or(units)),
            (InitialValues::Even, _) => even_bound(units),
        }
    }
}

/// Initial values of a network from spellings to rows, as the library has them, except the gates' biases, which are
/// zero.
fn row_network_bound(name: &str, output: Output) -> f64 {
    let CharCnnConfig { embedding, filters, correction, .. } = output.cnn.config(1, output.correction);
    let channels: usize = filters.iter().map(|(_, channels)| channels).sum();
    let inputs = match name {
        "embedding.weight" => 1,
        "correction.projection" => correction,
        name if name.ends_with("bias") || name == "correction.weight" => return 0.0,
        name => {
            match name.strip_prefix("convolution.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok()) {
                Some(width) => width * embedding,
                None => channels,
            }
        }
    };
    1.0 / (inputs as f64).sqrt()
}
