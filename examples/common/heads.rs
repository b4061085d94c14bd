//! The loop over the heads of `--head`, from the checks of the paths to the plot.

use super::model::Model;
use super::plot::{self, Axes, Curve};
use super::{checkpoint::Checkpoint, flags::TrainingFlags, head::HeadKind, session::Session, Result};
use candle_core::Device;
use serde_json::{json, Value};

/// What the training of a head came to, with what the example adds.
pub(crate) struct Outcome<T> {
    pub(crate) kind: HeadKind,
    pub(crate) parameters: usize,
    /// Mean NLL of each epoch on the training and the validation data.
    pub(crate) history: Vec<[f64; 2]>,
    /// NaN if training diverged.
    pub(crate) valid_nll: f64,
    pub(crate) diverged: Option<usize>,
    pub(crate) tokens_per_second: Option<f64>,
    /// `None` if training diverged.
    pub(crate) more: Option<T>,
}

/// Trains every head of `--head`: `build` makes its session, `finish` uses the trained model. All paths and checkpoints
/// are checked before the first is trained.
pub(crate) fn train<M: Model, T>(
    flags: &TrainingFlags,
    device: &Device,
    build: impl Fn(HeadKind, Option<&Checkpoint>) -> Result<Session<M>>,
    finish: impl Fn(&Session<M>) -> Result<T>,
) -> Result<Vec<Outcome<T>>> {
    flags.check_outputs()?;
    let mut sessions = vec![];
    for kind in flags.head.kinds() {
        let (resume, save) = (flags.resume_path(kind)?, flags.save_path(kind)?);
        let checkpoint = resume.as_deref().map(|path| Checkpoint::load(path, device)).transpose()?;
        let mut session = build(kind, checkpoint.as_ref())?;
        if let Some(checkpoint) = &checkpoint {
            session.restore(checkpoint)?;
        }
        sessions.push((session, resume, save));
    }
    let mut outcomes = vec![];
    for (mut session, resume, save) in sessions {
        // The resumed model is the best so far.
        if let Some(path) = save.as_ref().filter(|_| resume.is_some() && resume != save) {
            session.checkpoint()?.save(path)?;
        }
        session.run(save.as_deref(), flags.results.as_deref())?;
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
    Ok(outcomes)
}

/// Prints the JSON line and draws the curves, with NLLs converted by `value`, as the flags ask for. Fails if a head
/// diverged, after the results of the others.
pub(crate) fn finish<T>(
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
        println!("{}", outcomes.iter().map(line).collect::<Value>());
    }
    if let Some(path) = &flags.plot {
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
