//! The flags, with one set of defaults for the built-in language and one for real text.

use crate::output::OutputFlags;
use crate::spelling::{self, SpellFlags};
use crate::{cache::CacheSettings, dynamic::DynamicSettings, evaluate::Evaluation, presets::Preset};
use clap::Parser;
use lab::layers::{HeadKind, Output, OutputKind};
use lab::show::values::{above_zero, below_one, not_negative, positive};
use lab::training::{
    describe, Awd, OptimizerKind, Ranks, Recipe, RecipeFlags, SamplingFlags, TableFlags, TrainingFlags,
};
use lab::Result;
#[cfg(feature = "mpi")]
use mos_head::distributed::Mpi;
use mos_head::ContextActivation;
use std::path::PathBuf;
#[cfg(feature = "mpi")]
use std::sync::Arc;

const BUILT_IN: Recipe = Recipe {
    components: 8,
    hidden: 6,
    embedding: Some(32),
    activation: ContextActivation::Identity,
    epochs: 6,
    batch: 128,
    bptt: 4,
    lr: 0.03,
    decay: 0.6,
    clip: 0.0,
    ..Recipe::BASE
};

const TEXT: Recipe = Recipe {
    components: 5,
    hidden: 220,
    batch: 20,
    bptt: 35,
    lr: 20.0,
    optimizer: OptimizerKind::Sgd,
    clip: 0.25,
    ..Recipe::BASE
};

/// Trains an LSTM language model with a softmax, a mixture of contexts and a mixture of softmaxes at equal size.
#[derive(Debug, Parser)]
#[command(after_help = describe(&[("Built-in language", BUILT_IN), ("--data", TEXT), ("--spell", spelling::RECIPE)]))]
pub(crate) struct Args {
    /// Folder with train.txt, valid.txt and optionally test.txt (whitespace tokens), or in place of each with a folder
    /// of that name, of many files; without it, a built-in language
    #[arg(long, value_name = "DIR", group = "vocabulary")]
    pub(crate) data: Option<PathBuf>,
    /// Keep the N words that occur most in training, `<unk>` and `<eos>` among them; all others become `<unk>`
    #[arg(long, value_name = "N", value_parser = positive, requires = "data")]
    pub(crate) words: Option<usize>,
    /// The sizes and the recipe of a paper, AWD-LSTM included, or `small`: its regularisers on 5 million parameters,
    /// or `limits-small`. Other flags change them
    #[arg(long, value_enum, requires = "vocabulary")]
    pub(crate) preset: Option<Preset>,
    /// Average the parameters of this checkpoint from the first step on, until the validation loss no longer improves
    #[arg(long, value_name = "FILE", conflicts_with_all = ["resume", "search", "unigram_bias"])]
    pub(crate) finetune: Option<PathBuf>,
    /// Grow the softmax of this checkpoint into a mixture of softmaxes of the same distributions, and train it on: K by
    /// --components, linear contexts as wide as the hidden states
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "resume", "search", "finetune", "unigram_bias", "spread", "spell", "activation", "context",
    ])]
    pub(crate) grow: Option<PathBuf>,
    /// Start the decoder's bias at the logarithms of the ids' frequencies in the training text; --output nce always
    /// does
    #[arg(long)]
    pub(crate) unigram_bias: bool,
    /// Print the number of parameters that each head has for N words of 256 characters, and end
    #[arg(long, value_name = "N", value_parser = positive, group = "vocabulary")]
    pub(crate) describe: Option<usize>,
    #[command(flatten)]
    output: OutputFlags,
    #[command(flatten)]
    pub(crate) tables: TableFlags,
    /// Steps of backpropagation through time [default: 4; real text: 35]
    #[arg(long, value_parser = positive)]
    bptt: Option<usize>,
    /// Number of tokens to sample from each model
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) generate: usize,
    #[command(flatten)]
    pub(crate) sampling: SamplingFlags,
    /// Train one model with all the processes that mpirun has started, each with its part of every batch
    #[cfg(feature = "mpi")]
    #[arg(long, conflicts_with_all = ["evaluate", "spell"])]
    mpi: bool,
    #[command(flatten)]
    recipe: RecipeFlags,
    #[command(flatten)]
    common: TrainingFlags,
    #[command(flatten)]
    awd: Awd,
    #[command(flatten)]
    evaluation: EvaluationFlags,
    #[command(flatten)]
    pub(crate) spelling: SpellFlags,
}

/// The flags of `--evaluate`.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Evaluation")]
struct EvaluationFlags {
    /// Evaluate a checkpoint of this program, or a released one, instead of training
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "RecipeFlags", "Awd", "bptt", "OutputFlags", "unigram_bias", "head", "save", "resume", "finetune", "grow", "search", "plot", "results", "generate",
    ])]
    evaluate: Option<PathBuf>,
    /// Also with dynamic evaluation
    #[arg(long, requires = "evaluate")]
    dynamic_evaluation: bool,
    /// Learning rate of dynamic evaluation [default: that of the preset, or of ptb-mos, as all below]
    #[arg(long, value_name = "ETA", value_parser = not_negative, requires = "dynamic_evaluation")]
    dynamic_lr: Option<f64>,
    /// How fast parameters return to those of training
    #[arg(long, value_name = "LAMBDA", value_parser = not_negative, requires = "dynamic_evaluation")]
    dynamic_decay: Option<f64>,
    /// Added to the root mean square of gradients
    #[arg(long, value_name = "EPSILON", value_parser = above_zero, requires = "dynamic_evaluation")]
    dynamic_epsilon: Option<f64>,
    /// Steps of a segment of dynamic evaluation [default: 5]
    #[arg(long, value_name = "N", value_parser = positive, requires = "dynamic_evaluation")]
    dynamic_steps: Option<usize>,
    /// Also with a continuous cache
    #[arg(long, requires = "evaluate")]
    cache: bool,
    /// Positions in the cache
    #[arg(long, value_name = "N", value_parser = positive, requires = "cache")]
    cache_window: Option<usize>,
    /// Factor of the inner products of hidden states
    #[arg(long, value_name = "THETA", value_parser = not_negative, requires = "cache")]
    cache_theta: Option<f64>,
    /// Weight of the cache in the mixture with the model
    #[arg(long, value_name = "LAMBDA", value_parser = below_one, requires = "cache")]
    cache_lambda: Option<f64>,
    /// Add this to every probability; the released code adds 1e-8
    #[arg(long, value_parser = not_negative, requires = "evaluate")]
    floor: Option<f64>,
    /// Write the checkpoint with the names of the released code to this file
    #[arg(long, value_name = "FILE", requires = "evaluate")]
    export: Option<PathBuf>,
}

impl Args {
    /// Returns what --evaluate asks for.
    pub(crate) fn evaluation(&self) -> Option<Evaluation> {
        let flags = &self.evaluation;
        let (dynamic, cache) = self.preset.unwrap_or(Preset::PtbMos).adaptation();
        let dynamic = DynamicSettings {
            lr: flags.dynamic_lr.unwrap_or(dynamic.lr),
            decay: flags.dynamic_decay.unwrap_or(dynamic.decay),
            epsilon: flags.dynamic_epsilon.unwrap_or(dynamic.epsilon),
        };
        let cache = CacheSettings {
            window: flags.cache_window.unwrap_or(cache.window),
            theta: flags.cache_theta.unwrap_or(cache.theta),
            lambda: flags.cache_lambda.unwrap_or(cache.lambda),
        };
        Some(Evaluation {
            file: flags.evaluate.clone()?,
            export: flags.export.clone(),
            steps: flags.dynamic_steps.unwrap_or(5),
            dynamic: flags.dynamic_evaluation.then_some(dynamic),
            cache: flags.cache.then_some(cache),
            floor: flags.floor.unwrap_or(0.0),
            json: self.common.json,
        })
    }

    /// Returns the flags of training, with the head of the preset or of --spell; without heads that cannot have the
    /// output, if all are asked for.
    pub(crate) fn training(&self) -> TrainingFlags {
        let flags = match self.spelling.word() {
            Some(_) => self.common.or_head("softmax"),
            None if self.grow.is_some() && self.preset.is_none_or(|preset| preset.head() == "all") => {
                self.common.or_head("mos")
            }
            None => self.common.or_head(self.preset.map_or("all", Preset::head)),
        };
        flags.without(|kind| self.output().kind.reason_against(kind))
    }

    /// Returns the processes that train: one without --mpi.
    #[cfg(feature = "mpi")]
    pub(crate) fn ranks(&self) -> Result<Ranks> {
        if !self.mpi {
            return Ok(Ranks::default());
        }
        if self.output().kind.is_coded() {
            return Err("--mpi is for models of words, not of codes".into());
        }
        Ok(Ranks::new(Arc::new(Mpi::new()?)))
    }

    /// Returns the process that trains: without the feature `mpi` there is no other.
    #[cfg(not(feature = "mpi"))]
    pub(crate) fn ranks(&self) -> Result<Ranks> {
        Ok(Ranks::default())
    }

    /// Returns the output of the flags over that of the preset.
    fn output(&self) -> Output {
        // A preset that is not valid is an error of `recipe`.
        let preset = self.preset.and_then(|preset| preset.recipe().ok());
        self.output.over(preset.map_or(Output::FULL, |recipe| recipe.output))
    }

    /// Fails if the preset is for another head.
    pub(crate) fn check_head(&self) -> Result<()> {
        let Some(preset) = self.preset.filter(|preset| preset.head() != "all") else { return Ok(()) };
        let heads = self.training().heads();
        if heads.iter().any(|kind| kind.name() != preset.head()) {
            let names: Vec<_> = heads.iter().map(|kind| kind.name()).collect();
            let names = names.join(", ");
            return Err(format!("the preset is for --head {}, not {names}: see --preset small", preset.head()).into());
        }
        Ok(())
    }

    /// Fails if flags contradict each other.
    pub(crate) fn recipe(&self) -> Result<Recipe> {
        let mut defaults = match (self.preset, &self.data) {
            (Some(preset), _) => preset.recipe()?,
            _ if self.spelling.word().is_some() => spelling::RECIPE,
            (None, Some(_)) => TEXT,
            (None, None) => BUILT_IN,
        };
        // --dropout replaces the locked dropouts of a preset.
        if self.recipe.dropout.is_some() {
            defaults.awd = defaults.awd.without_locked_dropout();
        }
        defaults.bptt = self.bptt.unwrap_or(defaults.bptt);
        let is_spelling = self.spelling.word().is_some();
        if let Some(preset) =
            self.preset.filter(|preset| preset.word().is_some() != is_spelling && self.describe.is_none())
        {
            let name = lab::show::values::name(&preset);
            return Err(format!("--preset {name} is {} --spell", if is_spelling { "not for" } else { "for" }).into());
        }
        defaults.output = self.output();
        self.output.check(defaults.output)?;
        let kind = defaults.output.kind;
        let has_codes = matches!(kind, OutputKind::HybridLightRnn | OutputKind::Bpe);
        self.tables.check(has_codes, kind.is_coded() && kind != OutputKind::Bpe)?;
        if kind.is_sampled() && self.recipe.label_smoothing.is_some_and(|epsilon| epsilon > 0.0) {
            return Err("--label-smoothing needs the whole vocabulary, not a sample".into());
        }
        if self.finetune.is_some() && kind.is_coded() {
            return Err("--finetune is for models of words, not of codes".into());
        }
        if self.finetune.is_some() {
            defaults.lr = self.preset.map_or(20.0, Preset::finetuning_lr);
            defaults.awd.nonmono = defaults.awd.nonmono.or(Some(5));
            (defaults.optimizer, defaults.decay, defaults.epochs, defaults.finetune) =
                (OptimizerKind::Sgd, 1.0, 1000, true);
        }
        let optimizer = self.recipe.optimizer.unwrap_or(defaults.optimizer);
        if optimizer != defaults.optimizer {
            defaults.lr = match (optimizer, self.data.is_some()) {
                (OptimizerKind::Sgd, _) if self.spelling.word().is_some() => 1.0,
                (OptimizerKind::Sgd, _) => 20.0,
                (OptimizerKind::Adam, true) => 0.001,
                (OptimizerKind::Adam, false) => 0.03,
                (OptimizerKind::Adagrad, _) => 0.2,
            };
            defaults.awd.nonmono = None;
        }
        defaults.awd = self.awd.over(defaults.awd);
        let mut recipe = self.recipe.over(defaults, self.common.seed);
        if recipe.awd.tied() {
            recipe = self.tied(recipe)?;
        }
        if self.grow.is_some() {
            recipe = self.grown(recipe)?;
        }
        Ok(recipe)
    }

    /// Makes the contexts of a grown mixture linear and as wide as the hidden states, which are as wide as the
    /// embedding with a tied decoder.
    fn grown(&self, recipe: Recipe) -> Result<Recipe> {
        if self.training().heads() != [HeadKind::Mos] || self.output().kind.is_coded() {
            return Err("--grow is for --head mos and for models of words".into());
        }
        let tied = recipe.embedding.filter(|_| recipe.awd.tied());
        let hidden = tied.unwrap_or(recipe.hidden);
        Ok(Recipe { hidden, context: Some(hidden), activation: ContextActivation::Identity, ..recipe })
    }

    /// Makes the embedding as wide as what a tied decoder multiplies: contexts, or the
    /// softmax's hidden state.
    fn tied(&self, recipe: Recipe) -> Result<Recipe> {
        let (embedding, context) = (self.recipe.embedding(), self.recipe.context());
        if let Some((embedding, context)) = embedding.zip(context).filter(|(embedding, context)| embedding != context) {
            let message = format!("--embedding is {embedding}, but --context is {context}: they are one with --tied");
            return Err(message.into());
        }
        let is_softmax = self.training().heads() == [HeadKind::Softmax];
        if let Some((embedding, hidden)) = embedding.zip(self.recipe.hidden).filter(|(e, h)| is_softmax && e != h) {
            let message = format!("--embedding is {embedding}, but --hidden is {hidden}: they are one with --tied");
            return Err(message.into());
        }
        let width = embedding.or(context);
        Ok(Recipe { embedding: width.or(recipe.embedding), context: width.or(recipe.context), ..recipe })
    }
}

#[cfg(test)]
mod tests;
