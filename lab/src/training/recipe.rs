//! The sizes of a model and how to train it, by flags over the defaults of a program.

use super::{awd::Awd, optimizer::OptimizerKind, ranks::Ranks};
use crate::layers::head::{activation, logit_function, stored_logit_function};
use crate::layers::recurrent_decoder::DecoderSizes;
use crate::layers::{Checkpoint, HeadKind, HeadSizes, Output};
use crate::show::values::{above_zero, below_one, not_negative, positive, up_to_one};
use crate::{scores::Measure, Result};
use mos_head::{parts::LogitFunction, ContextActivation};
use rand::{rngs::StdRng, Rng, SeedableRng};

/// Declares each setting once: its doc, its flag and its most common default.
macro_rules! recipe {
    ($(#[doc $($doc:tt)*] #[arg $($arg:tt)*] $name:ident: $type:ty = $default:expr,)*) => {
        /// The sizes of a model and how to train it.
        #[derive(Clone, Copy, Debug)]
        pub struct Recipe {
            $(
                #[doc $($doc)*]
                pub $name: $type,
            )*
            /// The size of the embedding. `None` stands for `hidden`.
            pub embedding: Option<usize>,
            /// The size of the mixtures' contexts. `None` stands for the size that gives a mixture the softmax's number
            /// of parameters.
            pub context: Option<usize>,
            /// Steps of backpropagation through time, for language models.
            pub bptt: usize,
            /// The measure by which losses are shown.
            pub measure: Measure,
            /// The seed of initial values, batches and masks.
            pub seed: u64,
            /// The settings that AWD-LSTM adds, for language models.
            pub awd: Awd,
            /// The output between the head and its vocabulary, for language models.
            pub output: Output,
            /// Whether the parameters are averaged from the start, until the validation loss no longer improves.
            pub finetune: bool,
        }

        impl Recipe {
            /// The defaults from which each program starts.
            pub const BASE: Recipe = Recipe {
                $($name: $default,)*
                embedding: None,
                context: None,
                bptt: 32,
                measure: Measure::Perplexity,
                seed: 1,
                awd: Awd::NONE,
                output: Output::FULL,
                finetune: false,
            };

            fn flags(&self) -> Vec<String> {
                vec![$(format!("--{} {:?}", stringify!($name).replace('_', "-"), self.$name).to_lowercase()),*]
            }
        }

        /// Flags without a value keep the default of the program, listed at the end of --help.
        #[derive(Debug, clap::Args)]
        pub struct RecipeFlags {
            $(#[doc $($doc)*] #[arg $($arg)*] pub $name: Option<$type>,)*
            /// Embedding size
            #[arg(long, value_parser = positive)]
            embedding: Option<usize>,
            /// Context size of the mixtures [default: at equal numbers of parameters]
            #[arg(long, value_parser = positive)]
            context: Option<usize>,
        }

        impl RecipeFlags {
            /// Returns the embedding's size, if the flag is set.
            pub fn embedding(&self) -> Option<usize> {
                self.embedding
            }

            /// Returns the contexts' size, if the flag is set.
            pub fn context(&self) -> Option<usize> {
                self.context
            }

            /// Returns the recipe of these flags over the defaults of a program.
            pub fn over(&self, defaults: Recipe, seed: u64) -> Recipe {
                Recipe {
                    $($name: self.$name.unwrap_or(defaults.$name),)*
                    embedding: self.embedding.or(defaults.embedding),
                    context: self.context.or(defaults.context),
                    seed,
                    ..defaults
                }
            }
        }
    };
}

recipe! {
    /// Total number of epochs, including those of a resumed checkpoint
    #[arg(long)]
    epochs: usize = 3,
    /// Mixture components K
    #[arg(long, value_parser = positive)]
    components: usize = 3,
    /// LSTM units per layer, or the width of a Transformer
    #[arg(long, value_parser = positive)]
    hidden: usize = 256,
    /// Cells of each LSTM layer, whose outputs are projected to its units; 0: as many as units, without a projection
    #[arg(long)]
    cells: usize = 0,
    /// Activation of the contexts
    #[arg(long, value_parser = activation())]
    activation: ContextActivation = ContextActivation::Tanh,
    /// Function of the logits before the softmax
    #[arg(long, value_parser = logit_function())]
    logit_function: LogitFunction = LogitFunction::Identity,
    /// Number of LSTM layers, or of a Transformer's encoder and of its decoder
    #[arg(long, value_parser = positive)]
    layers: usize = 1,
    /// Parallel streams of a text, or pairs of sentences per batch
    #[arg(long, value_parser = positive)]
    batch: usize = 32,
    /// Initial learning rate
    #[arg(long, value_parser = above_zero)]
    lr: f64 = 0.01,
    /// Steps of linear warm-up of the learning rate
    #[arg(long, value_name = "STEPS")]
    warmup: usize = 0,
    /// Factor of the learning rate per epoch, applied smoothly
    #[arg(long, value_parser = above_zero)]
    decay: f64 = 0.5,
    /// Optimizer
    #[arg(long, value_enum)]
    optimizer: OptimizerKind = OptimizerKind::Adam,
    /// Evaluate and save the average of the parameters of all steps, step t with a weight of about t^N; 0: no average
    #[arg(long, value_name = "N")]
    average: usize = 0,
    /// Number of evaluations per epoch, each with a line of --results
    #[arg(long, value_name = "N", value_parser = positive)]
    evaluations: usize = 1,
    /// Stop when the validation loss has not fallen for N epochs; 0: never
    #[arg(long, value_name = "N")]
    patience: usize = 0,
    /// Largest global gradient norm, 0 for no clipping
    #[arg(long, value_parser = not_negative)]
    clip: f64 = 1.0,
    /// Whether the gradients of the LSTM are clipped alone, by their own norm
    #[arg(long, value_name = "BOOL")]
    clip_lstm: bool = false,
    /// Dropout: locked, of LSTM inputs, hidden states and most programs' contexts; or of a Transformer's sublayers
    #[arg(long, value_parser = below_one)]
    dropout: f64 = 0.0,
    /// Share of the target distribution that is spread over the vocabulary
    #[arg(long, value_parser = below_one)]
    label_smoothing: f64 = 0.0,
    /// Whether products of a training step may round their operands to bf16, which is faster on CPUs with Intel AMX
    #[arg(long, value_name = "BOOL")]
    bf16_products: bool = false,
    /// How far apart the mixture's components start: 0 all alike, 1 independent of each other
    #[arg(long, value_parser = up_to_one)]
    spread: f64 = 1.0,
}

impl Recipe {
    /// Returns the sizes of a head over `vocab` token ids.
    pub fn head(&self, vocab: usize) -> HeadSizes {
        let Recipe { hidden, components, activation, logit_function, .. } = *self;
        let context = self.context.unwrap_or_else(|| HeadSizes::equal_context(vocab, hidden, components));
        HeadSizes { vocab, hidden, context, components, activation, logit_function }
    }

    /// Returns the sizes of a checkpoint's model; all else is as in `BASE`.
    pub fn from_checkpoint(kind: HeadKind, checkpoint: &Checkpoint) -> Result<Recipe> {
        let mut recipe = Recipe {
            hidden: checkpoint.get("hidden")?,
            embedding: Some(checkpoint.get("embedding")?),
            layers: checkpoint.get("layers")?,
            cells: checkpoint.optional("cells")?.unwrap_or(0),
            logit_function: stored_logit_function(checkpoint)?,
            ..Recipe::BASE
        };
        if kind != HeadKind::Softmax {
            recipe.context = Some(checkpoint.get("context")?);
        }
        if kind.is_mixture() {
            recipe.components = checkpoint.get("components")?;
            let tanh = checkpoint.get::<String>("activation")? == "tanh";
            recipe.activation = if tanh { ContextActivation::Tanh } else { ContextActivation::Identity };
        }
        Ok(recipe)
    }

    /// Returns this recipe, with about a part of every batch for each rank if it has no parts of its own. Fails if it
    /// has fewer parts.
    pub fn divided(&self, ranks: &Ranks) -> Result<Recipe> {
        let (mut recipe, batch, ranks) = (*self, self.batch, ranks.count());
        if ranks > 1 {
            let even = match batch.div_ceil(ranks) {
                // These parts are too few.
                even if batch.div_ceil(even) < ranks => (batch / ranks).max(1),
                even => even,
            };
            let small_batch = *recipe.awd.small_batch.get_or_insert(even);
            let parts = batch.div_ceil(small_batch);
            if parts < ranks {
                let cut = format!("--batch {batch} is {parts} parts of --small-batch {small_batch}");
                return Err(format!("{cut}, but there are {ranks} processes: they need a part each").into());
            }
        }
        Ok(recipe)
    }

    /// Returns the sizes of a decoder of `vocab` token ids with attention.
    pub fn decoder(&self, vocab: usize) -> DecoderSizes {
        let Recipe { hidden, layers, dropout, .. } = *self;
        DecoderSizes { vocab, embedding: self.embedding(), hidden, layers, dropout }
    }

    /// Fails if the recipe has `--cells`, for a model whose LSTMs are not projected.
    pub fn require_no_cells(&self) -> Result<()> {
        match self.cells {
            0 => Ok(()),
            cells => Err(format!("--cells is {cells}, but this model has no projected LSTM").into()),
        }
    }

    /// Returns the flags of the training, but those that only say how long it takes, or how its work is divided.
    pub(crate) fn training_flags(&self) -> Vec<String> {
        let Recipe { seed, bptt, awd, .. } = *self;
        let flags = [vec![format!("--seed {seed}"), format!("--bptt {bptt}")], self.flags(), awd.flags()].concat();
        let others = ["--epochs ", "--patience ", "--small-batch "];
        flags.into_iter().filter(|flag| !others.iter().any(|other| flag.starts_with(other))).collect()
    }

    /// Returns the flags that the rest of a paused epoch must have.
    pub(crate) fn course(&self) -> String {
        let Recipe { batch, bptt, seed, finetune, average, awd: Awd { random_bptt, small_batch, .. }, .. } = *self;
        let optional =
            |flag: &str, value: Option<usize>| value.map_or(String::new(), |value| format!(" {flag} {value}"));
        let (random_bptt, small_batch) =
            (optional("--random-bptt", random_bptt), optional("--small-batch", small_batch));
        let finetune = if finetune { " --finetune" } else { "" };
        let average = if average > 0 { format!(" --average {average}") } else { String::new() };
        format!("--batch {batch} --bptt {bptt} --seed {seed}{random_bptt}{small_batch}{finetune}{average}")
    }

    /// Returns trial number `trial` of a random search: 0 is the recipe itself; the others have a learning rate from
    /// half to twice its own, a dropout from 0 to 0.4, and in turn one and the other activation. Every head gets the
    /// same trials.
    pub(crate) fn trial(&self, trial: usize) -> Recipe {
        if trial == 0 {
            return *self;
        }
        let mut rng = StdRng::seed_from_u64(self.seed << 32 | trial as u64);
        // Few digits, to be typed as flags.
        let rounded = |text: String| text.parse().expect("a number as text is a number");
        let lr = rounded(format!("{:.1e}", self.lr * 2f64.powf(rng.random_range(-1.0..=1.0))));
        let dropout = rounded(format!("{:.2}", rng.random_range(0.0..=0.4f64)));
        let activation = match (self.activation, trial % 2) {
            (ContextActivation::Tanh, 1) | (ContextActivation::Identity, 0) => ContextActivation::Identity,
            _ => ContextActivation::Tanh,
        };
        Recipe { lr, dropout, activation, awd: self.awd.without_locked_dropout(), ..*self }
    }

    /// Returns the flags that trials differ in; a softmax and a Mixtape have no activation to choose.
    pub(crate) fn tried(&self, kind: HeadKind) -> String {
        let mut flags = format!("--lr {}", self.lr);
        if !self.awd.has_locked_dropout() {
            flags += &format!(" --dropout {}", self.dropout);
        }
        if kind.is_mixture() {
            flags += &format!(" --activation {:?}", self.activation).to_lowercase();
        }
        flags
    }

    /// Returns the embedding's size.
    pub fn embedding(&self) -> usize {
        self.embedding.unwrap_or(self.hidden)
    }

    /// Returns the learning rate after `steps` steps and `epochs` epochs, counted with fractions: it rises for `warmup`
    /// steps and falls by the factor `decay` per epoch.
    pub(crate) fn lr_at(&self, steps: usize, epochs: f64) -> f64 {
        let rise = ((steps + 1) as f64 / self.warmup.max(1) as f64).min(1.0);
        rise * self.lr * self.decay.powf(epochs)
    }
}

/// Returns the end of `--help`: the defaults of a program.
pub fn describe(defaults: &[(&str, Recipe)]) -> String {
    let lines = defaults.iter().map(|(data, recipe)| {
        let embedding = format!("--embedding {}", recipe.embedding());
        let flags = [recipe.flags(), vec![embedding]].concat();
        format!("{data}:\n  {}", flags.chunks(7).map(|flags| flags.join(" ")).collect::<Vec<_>>().join("\n  "))
    });
    format!("Defaults of the flags of sizes and training.\n{}", lines.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_are_the_recipe_and_others_near_it() {
        let trials: Vec<Recipe> = (0..6).map(|trial| Recipe::BASE.trial(trial)).collect();
        assert_eq!((trials[0].lr, trials[0].activation), (Recipe::BASE.lr, Recipe::BASE.activation));
        for (i, trial) in trials.iter().enumerate() {
            assert!((0.005..=0.02).contains(&trial.lr) && (0.0..=0.4).contains(&trial.dropout), "{trial:?}");
            assert_eq!(trial.lr, Recipe::BASE.trial(i).lr);
            assert!(trial.tried(HeadKind::Softmax).len() <= "--lr 0.0012 --dropout 0.12".len(), "{trial:?}");
            assert!(trials[..i].iter().all(|earlier| earlier.lr != trial.lr), "{trial:?}");
        }
        let tanh = trials.iter().filter(|trial| trial.activation == ContextActivation::Tanh).count();
        assert_eq!(tanh, 3);
    }
}
