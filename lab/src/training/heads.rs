//! The loop over the heads of `--head`, from the checks of the paths to the plot.

use super::{flags::TrainingFlags, model::Model, recipe::Recipe, session::Session};
use crate::layers::{Checkpoint, HeadKind};
use crate::show::plot::{self, Axes, Curve};
use crate::show::report::{self, number};
use crate::Result;
use candle_core::Device;
use serde_json::{json, Value};

/// The result of the training of one head, with what the program adds.
pub struct Outcome<T> {
    /// The head.
    pub kind: HeadKind,
    /// The number of the model's parameters.
    pub parameters: usize,
    /// Mean NLL of each epoch on the training and the validation data, in nats.
    pub history: Vec<[f64; 2]>,
    /// Mean NLL on the validation data, in nats; NaN if training diverged.
    pub valid_nll: f64,
    /// The epoch in which the loss was not finite, if one was.
    pub diverged: Option<usize>,
    /// Words per second of training; `None` if there was none.
    pub tokens_per_second: Option<f64>,
    /// The results that the program adds; `None` if training diverged.
    pub more: Option<T>,
}

impl<T> Outcome<T> {
    /// Returns the results as JSON, with the fields that the program adds or has other values for.
    pub fn json(&self, more: Value) -> Value {
        let mut line = json!({
            "head": self.kind.name(),
            "name": self.kind.name(),
            "parameters": self.parameters,
            "valid_nll": self.valid_nll,
            "valid_perplexity": self.valid_nll.exp(),
            "tokens_per_second": self.tokens_per_second,
        });
        if let (Value::Object(line), Value::Object(more)) = (&mut line, more) {
            line.extend(more);
        }
        line
    }
}

/// Returns how many times as long as the softmax's a training step of this head takes, if both were trained (Yang et
/// al., 2018, table 13).
pub fn slowdown<T>(outcome: &Outcome<T>, all: &[Outcome<T>]) -> Option<f64> {
    let softmax = all.iter().find(|other| other.kind == HeadKind::Softmax)?;
    Some(softmax.tokens_per_second? / outcome.tokens_per_second?)
}

/// Trains every head of `--head`: `build` makes its session, `finish` uses the trained model. All paths and checkpoints
/// are checked before the first is trained. Returns `None` if the time of `--minutes` is up.
pub fn train<M: Model, T>(
    flags: &TrainingFlags,
    device: &Device,
    build: impl Fn(HeadKind, Option<&Checkpoint>) -> Result<Session<M>>,
    finish: impl Fn(&Session<M>) -> Result<T>,
) -> Result<Option<Vec<Outcome<T>>>> {
    flags.check_outputs()?;
    let mut sessions = vec![];
    for kind in flags.heads() {
        let (resume, save, leg) = (flags.resume_path(kind)?, flags.save_path(kind)?, flags.leg(kind)?);
        let has_leg = flags.ranks.first_finds(leg.as_ref().is_some_and(|leg| leg.path.exists()))?;
        let resume = match leg.as_ref().filter(|_| has_leg) {
            None => resume,
            Some(leg) if resume.as_ref().is_some_and(|path| Some(path) != save.as_ref()) => {
                let path = leg.path.display();
                return Err(format!("--resume, but {path} has the state of a training: remove one of them").into());
            }
            Some(leg) => Some(leg.path.clone()),
        };
        let checkpoint = resume.as_deref().map(|path| Checkpoint::load(path, device)).transpose()?;
        let mut session = build(kind, checkpoint.as_ref())?;
        if let Some(checkpoint) = &checkpoint {
            session.restore(checkpoint)?;
        }
        if let Some((leg, checkpoint)) = leg.as_ref().filter(|_| has_leg).zip(checkpoint.as_ref()) {
            session.require_course(checkpoint, &leg.path)?;
        }
        sessions.push((session, resume, save, leg));
    }
    let mut outcomes = vec![];
    for (mut session, resume, save, leg) in sessions {
        // The resumed model is the best so far, but a leg has its best model in the file of --save already.
        let is_leg = leg.as_ref().is_some_and(|leg| Some(&leg.path) == resume.as_ref());
        if let Some(path) = save.as_ref().filter(|_| resume.is_some() && resume != save && !is_leg) {
            session.save(path)?;
        }
        if !session.run(save.as_deref(), flags.results.as_deref(), leg.as_ref())? {
            flags.ranks.print("The time is up: the same command continues.");
            return Ok(None);
        }
        outcomes.push(Outcome {
            kind: session.kind,
            parameters: session.model.parameters(),
            valid_nll: session.valid_nll()?,
            diverged: session.diverged,
            tokens_per_second: session.tokens_per_second(),
            more: if session.diverged.is_none() { Some(finish(&session)?) } else { None },
            history: session.history,
        });
    }
    Ok(Some(outcomes))
}

/// Trains every head of `--head` as `train` does, or only compares the trials of `--search`, and then returns `None`.
pub fn run<M: Model, T>(
    flags: &TrainingFlags,
    recipe: &Recipe,
    device: &Device,
    build: impl Fn(HeadKind, &Recipe, Option<&Checkpoint>) -> Result<Session<M>>,
    finish: impl Fn(&Session<M>) -> Result<T>,
) -> Result<Option<Vec<Outcome<T>>>> {
    match flags.search {
        Some(trials) => search(flags, trials, recipe, |kind, recipe| build(kind, recipe, None)).map(|()| None),
        None => train(flags, device, |kind, checkpoint| build(kind, recipe, checkpoint), finish),
    }
}

/// Trains every head of `--head` once for each trial of `recipe`, and prints the flags of its best.
pub fn search<M: Model>(
    flags: &TrainingFlags,
    trials: usize,
    recipe: &Recipe,
    build: impl Fn(HeadKind, &Recipe) -> Result<Session<M>>,
) -> Result<()> {
    flags.check_outputs()?;
    let mut rows = vec![];
    let mut best = vec![];
    for kind in flags.heads() {
        let mut lowest = f64::INFINITY;
        for trial in 0..trials {
            let recipe = recipe.trial(trial);
            let settings = recipe.tried(kind);
            flags.ranks.print(format_args!("{} trial {}: {settings}", kind.name(), trial + 1));
            let mut session = build(kind, &recipe)?;
            session.run(None, flags.results.as_deref(), None)?;
            let nll = session.valid_nll()?;
            rows.push(vec![kind.name().into(), settings.clone(), number(recipe.measure.shown(nll), 3)]);
            if nll < lowest {
                lowest = nll;
                best.retain(|(other, _)| *other != kind);
                best.push((kind, settings));
            }
        }
    }
    let table = report::table(&["head", "flags", &format!("valid {}", recipe.measure)], &rows);
    flags.ranks.print(format_args!("\n{table}\n"));
    for (kind, settings) in best {
        flags.ranks.print(format_args!("best: --head {} {settings}", kind.name()));
    }
    Ok(())
}

/// Prints the JSON line and draws the curves, with NLLs converted by `value`, as the flags ask for. Fails at the
/// end if a head diverged.
pub fn finish<T>(
    flags: &TrainingFlags,
    outcomes: &[Outcome<T>],
    axes: &Axes,
    value: impl Fn(f64) -> f64,
    json: impl Fn(&Outcome<T>) -> Value,
) -> Result<()> {
    if flags.json {
        let line = |outcome: &Outcome<T>| {
            let mut line = json(outcome);
            line["diverged"] = json!(outcome.diverged);
            line
        };
        flags.ranks.print(outcomes.iter().map(line).collect::<Value>());
    }
    if let Some(path) = flags.plot.as_ref().filter(|_| flags.ranks.is_first()) {
        let curve = |outcome: &Outcome<T>| {
            let points = outcome.history.iter().enumerate();
            let points = points.map(|(i, [_, valid])| (i as i32 + 1, value(*valid))).collect();
            Curve { name: outcome.kind.name().into(), points }
        };
        plot::curves(path, axes, &outcomes.iter().map(curve).collect::<Vec<_>>())?;
    }
    let diverged = outcomes.iter().filter_map(|outcome| Some((outcome.kind.name(), outcome.diverged?)));
    match diverged.map(|(name, epoch)| format!("{name} diverged in epoch {epoch}")).collect::<Vec<_>>() {
        diverged if diverged.is_empty() => Ok(()),
        diverged => Err(format!("{}: try a lower --lr or --clip", diverged.join(", ")).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Data;
    use crate::layers::{Entries, Output, OutputKind};
    use crate::training::{InitialValues, LanguageModel, OptimizerKind, Recipe, Sizes};
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Args {
        #[command(flatten)]
        flags: TrainingFlags,
    }

    fn flags(args: &str) -> TrainingFlags {
        Args::try_parse_from(["program"].into_iter().chain(args.split_whitespace())).expect("valid flags").flags
    }

    #[test]
    fn a_head_that_the_output_is_not_for_is_left_out() {
        let text: Vec<u32> = (0..200).map(|i| i * i % 7).collect();
        let words: Vec<String> = (0..7).map(|id| format!("w{id}")).collect();
        let entries = Entries::count(&words, &text);
        let data = Data::new("squares".into(), ["a"], text.clone(), text);
        let output = Output { kind: OutputKind::Nce, samples: Some(3), ..Output::FULL };
        let recipe = Recipe { hidden: 4, context: Some(3), epochs: 1, output, ..Recipe::BASE };
        let build = |kind, recipe: &Recipe| {
            let sizes = Sizes::new(kind, recipe, 7);
            let model = LanguageModel::with_entries(kind, sizes, InitialValues::Even, recipe, &entries, &Device::Cpu)?;
            Session::new(kind, model, data.clone(), recipe)
        };
        let run = |args: &str| {
            let flags = flags(args).without(|kind| output.kind.reason_against(kind));
            train(&flags, &Device::Cpu, |kind, _| build(kind, &recipe), |session| session.valid_nll())
        };
        for args in ["", "--head all"] {
            let rows = run(args).expect("two heads are left").expect("no leg");
            assert_eq!(rows.iter().map(|row| row.kind).collect::<Vec<_>>(), [HeadKind::Softmax, HeadKind::Moc]);
            assert!(rows.iter().all(|row| row.valid_nll.is_finite() && row.diverged.is_none()));
        }
        // With these flags nothing would be trained.
        let error = run("--head mos").err().expect("no head is left").to_string();
        assert_eq!(error, "--output nce is for one softmax, as --head softmax and moc are");
    }

    #[test]
    fn a_head_that_diverges_does_not_lose_the_results_of_the_others() {
        let plot = std::env::temp_dir().join(format!("heads_{}.svg", std::process::id()));
        let args = ["program".as_ref(), "--json".as_ref(), "--plot".as_ref(), plot.as_os_str()];
        let flags = Args::try_parse_from(args).expect("valid flags").flags;
        let text: Vec<u32> = (0..500).map(|i| i * i % 7).collect();
        let data = Data::new("squares".into(), ["a"], text.clone(), text);
        let build = |kind, _: Option<&_>| {
            let lr = if kind == HeadKind::Moc { 1e30 } else { 0.1 };
            let optimizer = OptimizerKind::Sgd;
            let recipe = Recipe { hidden: 4, context: Some(3), clip: 0.0, epochs: 2, lr, optimizer, ..Recipe::BASE };
            let model = LanguageModel::new(kind, 7, InitialValues::Even, &recipe, &Device::Cpu)?;
            Session::new(kind, model, data.clone(), &recipe)
        };
        let rows = train(&flags, &Device::Cpu, build, |session| session.valid_nll()).expect("divergence is no error");
        let rows = rows.expect("no leg");
        assert_eq!(rows.iter().map(|row| row.diverged).collect::<Vec<_>>(), [None, Some(1), None]);
        assert!(rows[0].more.is_some() && rows[1].more.is_none() && rows[2].valid_nll.is_finite());
        assert!(rows[1].valid_nll.is_nan());

        let axes = Axes { title: "", x: "epoch", y: "NLL", floor: None };
        let error = finish(&flags, &rows, &axes, |nll| nll, |row| json!({ "head": row.kind.name() })).expect_err("moc");
        assert!(error.to_string().contains("moc diverged in epoch 1"), "{error}");
        let drawn = std::fs::read_to_string(&plot).expect("the plot is drawn");
        assert!(drawn.contains("softmax") && drawn.contains("mos"));
        std::fs::remove_file(plot).expect("was just written");
    }

    #[test]
    fn a_finished_training_does_not_answer_for_another() {
        let folder = std::env::temp_dir().join(format!("heads_legs_{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let flags = flags(&format!("--head softmax --minutes 10 --save {}", folder.join("model").display()));
        let text: Vec<u32> = (0..500).map(|i| i * i % 7).collect();
        let data = Data::new("squares".into(), ["a"], text.clone(), text);
        let run = |seed, lr, clip| {
            let optimizer = OptimizerKind::Sgd;
            let recipe = Recipe { hidden: 4, epochs: 1, seed, lr, clip, optimizer, ..Recipe::BASE };
            let build = |kind, _: Option<&_>| {
                let model = LanguageModel::new(kind, 7, InitialValues::Even, &recipe, &Device::Cpu)?;
                Session::new(kind, model, data.clone(), &recipe)
            };
            train(&flags, &Device::Cpu, build, |session| session.valid_nll())
        };
        let first = run(1, 0.5, 1.0).expect("a training").expect("no leg")[0].valid_nll;
        // The same flags have the same answer.
        assert_eq!(run(1, 0.5, 1.0).expect("a training").expect("no leg")[0].valid_nll, first);
        for (seed, lr, clip, stored, here) in [
            (2, 0.5, 1.0, "--seed 1", "--seed 2"),
            (1, 0.25, 1.0, "--lr 0.5", "--lr 0.25"),
            (1, 0.5, 0.25, "--clip 1.0", "--clip 0.25"),
        ] {
            let error = run(seed, lr, clip).err().expect("another training").to_string();
            assert!(error.ends_with(&format!("with {stored}, but this run has {here}: remove it")), "{error}");
        }
        std::fs::remove_dir_all(folder).expect("a folder");
    }
}
