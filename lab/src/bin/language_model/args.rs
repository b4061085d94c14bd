//! The flags, with one set of defaults for the built-in language and one for real text.

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
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Keep the N words that occur most in training, `<unk>` and `<eos>` among them; all others become `<unk>`
    #[arg(long, value_name = "N", value_parser = positive, requires = "data")]
    pub(crate) words: Option<usize>,
    /// The sizes and the recipe of a paper, AWD-LSTM included, or `small`: its regularisers on 5 million parameters.
    /// Other flags change them
    #[arg(long, value_enum, requires = "data")]
    preset: Option<Preset>,
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
    /// What lies between the head and the vocabulary
    #[arg(long, value_enum, default_value = "full")]
    output: OutputKind,
    /// Number of negatives of a sampled output [default: a tenth of the vocabulary]
    #[arg(long, value_name = "N", value_parser = positive)]
    samples: Option<usize>,
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
        "RecipeFlags", "Awd", "bptt", "output", "samples", "unigram_bias", "head", "save", "resume", "finetune", "grow", "search", "plot", "results", "generate",
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
        flags.without(|kind| self.output.reason_against(kind))
    }

    /// Returns the processes that train: one without --mpi.
    #[cfg(feature = "mpi")]
    pub(crate) fn ranks(&self) -> Result<Ranks> {
        if !self.mpi {
            return Ok(Ranks::default());
        }
        if self.output.is_coded() {
            return Err("--mpi is for models of words, not of codes".into());
        }
        Ok(Ranks::new(Arc::new(Mpi::new()?)))
    }

    /// Returns the process that trains: without the feature `mpi` there is no other.
    #[cfg(not(feature = "mpi"))]
    pub(crate) fn ranks(&self) -> Result<Ranks> {
        Ok(Ranks::default())
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
            _ if self.spelling.word().is_some() => spelling::RECIPE,
            (Some(preset), _) => preset.recipe()?,
            (None, Some(_)) => TEXT,
            (None, None) => BUILT_IN,
        };
        // --dropout replaces the locked dropouts of a preset.
        if self.recipe.dropout.is_some() {
            defaults.awd = defaults.awd.without_locked_dropout();
        }
        defaults.bptt = self.bptt.unwrap_or(defaults.bptt);
        defaults.output = Output { kind: self.output, samples: self.samples };
        let is_sampled = matches!(self.output, OutputKind::Sampled | OutputKind::Nce | OutputKind::CharCnn);
        let has_codes = matches!(self.output, OutputKind::HybridLightRnn | OutputKind::Bpe);
        self.tables.check(has_codes, self.output.is_coded() && self.output != OutputKind::Bpe)?;
        if self.samples.is_some() && !is_sampled {
            return Err("--samples is for --output sampled, nce and char-cnn".into());
        }
        if is_sampled && self.recipe.label_smoothing.is_some_and(|epsilon| epsilon > 0.0) {
            return Err("--label-smoothing needs the whole vocabulary, not a sample".into());
        }
        if self.finetune.is_some() && self.output.is_coded() {
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

    /// Makes the contexts of a grown mixture linear and as wide as the hidden states, which are as wide as the embedding
    /// with a tied decoder.
    fn grown(&self, recipe: Recipe) -> Result<Recipe> {
        if self.training().heads() != [HeadKind::Mos] || self.output.is_coded() {
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
mod tests {
    use super::*;

    fn recipe(flags: &[&str]) -> Recipe {
        Args::try_parse_from([&["language_model", "--data", "DIR"], flags].concat())
            .expect("valid flags")
            .recipe()
            .expect("no contradiction")
    }

    #[test]
    fn flags_change_a_preset() {
        let plain = recipe(&["--preset", "ptb-mos"]);
        assert_eq!((plain.hidden, plain.lr, plain.awd.ar), (620, 20.0, Some(2.0)));
        let changed = recipe(&["--preset", "ptb-mos", "--hidden", "64", "--ar", "0", "--dropout", "0.2"]);
        assert_eq!((changed.hidden, changed.awd.ar, changed.awd.inner), (64, Some(0.0), Some(960)));
        assert_eq!((changed.dropout, changed.awd.input_dropout, changed.awd.weight_dropout), (0.2, None, Some(0.5)));
        assert!(recipe(&["--tied"]).awd.tied() && !recipe(&["--preset", "small", "--tied", "false"]).awd.tied());
        assert_eq!(recipe(&[]).awd, Awd::NONE);
    }

    #[test]
    fn the_learning_rate_fits_the_optimizer() {
        assert_eq!(recipe(&[]).lr, 20.0);
        assert_eq!(recipe(&["--optimizer", "adam"]).lr, 0.001);
        assert_eq!(recipe(&["--preset", "wt2-mos"]).lr, 15.0);
        assert_eq!(recipe(&["--preset", "wt2-mos", "--lr", "3"]).lr, 3.0);
    }

    #[test]
    fn a_preset_has_its_head() {
        let heads = |flags: &[&str]| {
            let flags = [&["language_model", "--data", "DIR"], flags].concat();
            Args::try_parse_from(flags).expect("valid flags").training().heads()
        };
        assert_eq!(heads(&["--preset", "ptb-mos"]), [HeadKind::Mos]);
        assert_eq!(heads(&["--preset", "small"]), HeadKind::ALL);
        assert_eq!(heads(&["--preset", "small", "--head", "moc"]), [HeadKind::Moc]);
        let args =
            Args::try_parse_from(["language_model", "--data", "DIR", "--preset", "ptb-mos", "--head", "softmax"]);
        let error = args.expect("valid flags").check_head().expect_err("another head").to_string();
        assert!(error.contains("--head mos") && error.contains("softmax"), "{error}");
    }

    #[test]
    fn heads_that_cannot_have_the_output_are_left_out_of_all() {
        let flags = |flags: &str| {
            let args = ["language_model"].into_iter().chain(flags.split_whitespace());
            Args::try_parse_from(args).expect("valid flags").training()
        };
        for all in ["--output nce", "--output nce --head all", "--output nce --search 2"] {
            assert_eq!(flags(all).heads(), [HeadKind::Softmax, HeadKind::Moc], "{all}");
            assert_eq!(flags(all).left_out.len(), 1);
            assert!(flags(all).left_out[0].1.contains("one softmax"));
        }
        // An error when it is built: nothing else is asked for.
        assert_eq!(flags("--output nce --head mos").heads(), [HeadKind::Mos]);
        assert_eq!(flags("--output sampled").heads(), HeadKind::ALL);
    }

    #[test]
    fn finetuning_averages_until_it_no_longer_improves() {
        let plain = recipe(&["--finetune", "FILE"]);
        assert!(plain.finetune && plain.optimizer == OptimizerKind::Sgd && plain.epochs == 1000);
        assert_eq!((plain.lr, plain.decay, plain.awd.nonmono), (20.0, 1.0, Some(5)));
        assert_eq!(recipe(&["--preset", "ptb-mos", "--finetune", "FILE"]).lr, 25.0);
        assert_eq!(recipe(&["--preset", "ptb-mos", "--optimizer", "adam"]).awd.nonmono, None);
    }

    #[test]
    fn a_grown_mixture_has_linear_contexts_as_wide_as_the_hidden_states() {
        for flags in [&["--grow", "FILE"][..], &["--grow", "FILE", "--preset", "small"]] {
            let grown = recipe(flags);
            assert_eq!((grown.context, grown.activation), (Some(grown.hidden), ContextActivation::Identity));
        }
        let tied = recipe(&["--grow", "FILE", "--tied", "--embedding", "50"]);
        assert_eq!((tied.hidden, tied.context, tied.embedding), (50, Some(50), Some(50)));
        let args = |flags: &str| Args::try_parse_from(format!("language_model --grow F {flags}").split_whitespace());
        assert_eq!(args("").expect("valid flags").training().heads(), [HeadKind::Mos]);
        let error = args("--head moc").expect("valid flags").recipe().expect_err("another head").to_string();
        assert!(error.contains("--grow") && error.contains("--head mos"), "{error}");
        for flags in ["--resume G", "--finetune G", "--spread 0.5", "--activation tanh", "--context 5", "--evaluate G"]
        {
            assert!(args(flags).is_err(), "{flags}");
        }
    }

    #[test]
    fn mixtape_is_asked_for_by_name() {
        let heads = |flags: &str| {
            let args = Args::try_parse_from(format!("language_model {flags}").split_whitespace());
            args.expect("valid flags").training().heads()
        };
        assert_eq!(heads("--head mixtape"), [HeadKind::Mixtape]);
        assert_eq!(heads("--head all"), HeadKind::ALL);
    }

    #[test]
    fn spelling_has_its_own_sizes_and_a_softmax() {
        let spelled = recipe(&["--spell", "FILE", "--hidden", "64"]);
        assert_eq!((spelled.hidden, spelled.embedding, spelled.optimizer), (64, Some(32), OptimizerKind::Adam));
        let args = |flags: &str| Args::try_parse_from(format!("language_model --spell F {flags}").split_whitespace());
        assert_eq!(args("--renormalise 0").expect("valid flags").training().heads(), [HeadKind::Softmax]);
        assert_eq!(args("--head all").expect("valid flags").training().heads(), HeadKind::ALL);
        for flags in ["--tied", "--output nce", "--codes 9", "--finetune F", "--generate 5", "--evaluate F", "--cache"]
        {
            assert!(args(flags).is_err(), "{flags}");
        }
    }

    #[cfg(feature = "mpi")]
    #[test]
    fn processes_train_models_of_words() {
        let args = |flags: &str| Args::try_parse_from(format!("language_model --mpi {flags}").split_whitespace());
        for flags in ["--evaluate F", "--spell F"] {
            assert!(args(flags).is_err(), "{flags}");
        }
        let error = args("--output bpe").expect("valid flags").ranks().expect_err("codes").to_string();
        assert!(error.contains("--mpi"), "{error}");
    }

    #[test]
    fn sizes_that_contradict_a_tied_decoder_are_errors() {
        assert_eq!(recipe(&["--preset", "ptb-mos", "--embedding", "300"]).context, Some(300));
        for flags in [
            &["--preset", "ptb-mos", "--embedding", "300", "--context", "200"][..],
            &["--preset", "ptb-softmax", "--embedding", "300", "--hidden", "200"],
        ] {
            let args =
                Args::try_parse_from([&["language_model", "--data", "DIR"], flags].concat()).expect("valid flags");
            let error = args.recipe().expect_err("a contradiction").to_string();
            assert!(error.contains("300") && error.contains("200"), "{error}");
        }
    }

    #[test]
    fn flags_without_effect_are_errors() {
        let flags =
            ["--dynamic-lr 1", "--cache-window 5", "--floor 1e-8", "--export F", "--preset small", "--renormalise 5"];
        for flags in flags {
            let with = |start: &str| Args::try_parse_from(format!("language_model {start} {flags}").split_whitespace());
            assert!(with("").is_err(), "{flags}");
        }
        for flags in ["--lr 1", "--tied", "--bptt 3", "--head mos", "--generate 5", "--dynamic-lr 1"] {
            let with = |start: &str| Args::try_parse_from(format!("language_model {start} {flags}").split_whitespace());
            assert!(with("--evaluate F").is_err(), "{flags}");
        }
        assert!(Args::try_parse_from("language_model --evaluate F --cache --cache-window 5 --floor 1e-8".split(' '))
            .is_ok());
    }
}
