//! The final output: captions with their references, the table, and the JSON line.

use crate::data::{targets, Example};
use crate::{model::Captioner, score::Scores};
use lab::layers::HeadKind;
use lab::show::report::{self, number};
use lab::training::heads::{slowdown, Outcome};
use lab::training::{Model, Pass, Recipe, Session};
use serde_json::{json, Value};

pub(crate) type Row = Outcome<Trained>;

/// These are the results of a trained model.
pub(crate) struct Trained {
    pub(crate) scores: Scores,
    /// The mean of training.
    seconds_per_batch: Option<f64>,
    /// The peak of the memory in use until the end of training, without the search.
    peak_mib: Option<f64>,
    blind: bool,
    /// The number of units of an LSTM layer.
    units: usize,
    vocab_size: usize,
    /// The number of softmaxes or contexts; one for a softmax.
    components: usize,
}

impl Trained {
    pub(crate) fn new(session: &Session<Captioner>, recipe: &Recipe, scores: Scores, peak_mib: Option<f64>) -> Self {
        let (train, setting) = (&session.data.train, &session.model.setting);
        let batches = session.model.batches(train, recipe, Pass::Training { epoch: 0 }).len();
        let per_batch = targets(train) as f64 / batches as f64;
        Self {
            scores,
            seconds_per_batch: session.tokens_per_second().map(|rate| per_batch / rate),
            peak_mib,
            blind: setting.blind,
            units: session.model.units(),
            vocab_size: session.model.head().vocab_size(),
            components: if session.kind == HeadKind::Softmax { 1 } else { recipe.components },
        }
    }
}

/// Returns `count` evenly spaced ones of `total`.
pub(crate) fn spread(count: usize, total: usize) -> Vec<usize> {
    let count = count.min(total);
    (0..count).map(|i| (2 * i + 1) * total / (2 * count)).collect()
}

/// Returns `count` captions with their references.
pub(crate) fn samples(examples: &[Example], scores: &Scores, count: usize) -> String {
    let mut lines = vec![];
    for i in spread(count, examples.len()) {
        lines.push(format!("  found      {}", scores.found[i]));
        lines.extend(examples[i].captions.iter().map(|text| format!("  reference  {text}")));
        lines.push(String::new());
    }
    lines.join("\n")
}

pub(crate) fn table(rows: &[Row], scored: &str) -> String {
    let nll = format!("{scored} NLL");
    let columns = [
        "head",
        "units",
        "parameters",
        "valid NLL",
        &nll,
        "new NLL",
        "BLEU-4",
        "CIDEr",
        "right %",
        "s/batch",
        "peak MiB",
        "slowdown",
    ];
    let cells = |row: &Row| {
        let value = |select: fn(&Trained) -> Option<f64>| row.more.as_ref().and_then(select);
        vec![
            row.kind.name().to_owned(),
            number(value(|trained| Some(trained.units as f64)), 0),
            row.parameters.to_string(),
            number(row.valid_nll, 4),
            number(value(|trained| Some(trained.scores.nll)), 4),
            number(value(|trained| trained.scores.new_nll), 4),
            number(value(|trained| Some(trained.scores.bleu)), 2),
            number(value(|trained| Some(trained.scores.cider)), 1),
            number(value(|trained| trained.scores.right), 1),
            number(value(|trained| trained.seconds_per_batch), 3),
            number(value(|trained| trained.peak_mib), 0),
            number(slowdown(row, rows), 2),
        ]
    };
    report::table(&columns, &rows.iter().map(cells).collect::<Vec<_>>())
}

pub(crate) fn json(row: &Row, rows: &[Row], scored: &str, floor: Option<f64>) -> Value {
    let trained = row.more.as_ref();
    let scores = trained.map(|trained| &trained.scores);
    row.json(json!({
        "units": trained.map(|trained| trained.units),
        "blind": trained.map(|trained| trained.blind),
        "vocab_size": trained.map(|trained| trained.vocab_size),
        "components": trained.map(|trained| trained.components),
        "epochs": row.history.len(),
        "floor_nll": floor,
        "seconds_per_batch": trained.map(|trained| trained.seconds_per_batch),
        "peak_mib": trained.map(|trained| trained.peak_mib),
        "slowdown": slowdown(row, rows),
        "scores_of": scored,
        "scores": scores.map(|scores| json!({
            "nll": scores.nll,
            "new_nll": scores.new_nll,
            "bleu_4": scores.bleu,
            "cider": scores.cider,
            "right": scores.right,
        })),
    }))
}
