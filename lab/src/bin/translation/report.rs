//! The final output: results with their references, the table, and the JSON line.

use crate::corpus::{targets, Pair};
use crate::model::Seq2Seq;
use crate::score::{Measures, Scores};
use lab::show::report::{self, number};
use lab::training::heads::{slowdown, Outcome};
use lab::training::{Model, Pass, Recipe, Session};
use lab::{layers::HeadKind, Result};
use serde_json::{json, Map, Value};

pub(crate) type Row = Outcome<Trained>;

/// These are the results of a trained model.
pub(crate) struct Trained {
    /// The scores of the test pairs if `test_nll` is known, otherwise of the validation pairs.
    measures: Measures,
    /// Mean NLL per word of the test pairs, in nats; `None` if there are none.
    test_nll: Option<f64>,
    /// The mean of training.
    seconds_per_batch: Option<f64>,
    /// The peak of the memory in use until the end of training, without the search.
    peak_mib: Option<f64>,
    vocab: &'static str,
    /// The number of target token ids.
    vocab_size: usize,
    /// The number of softmaxes or contexts; one for a softmax.
    components: usize,
}

impl Trained {
    pub(crate) fn new(
        session: &Session<Seq2Seq>,
        recipe: &Recipe,
        measures: Measures,
        test_nll: Option<f64>,
        peak_mib: Option<f64>,
    ) -> Self {
        let (train, target) = (&session.data.train, &session.model.setting.target);
        let words = targets(train) as f64 / session.data.per_word[0];
        let batches = session.model.batches(train, recipe, Pass::Training { epoch: 0 }).len();
        let per_batch = words / batches as f64;
        Self {
            measures,
            test_nll,
            seconds_per_batch: session.tokens_per_second().map(|rate| per_batch / rate),
            peak_mib,
            vocab: target.kind(),
            vocab_size: target.len(),
            components: if session.kind == HeadKind::Softmax { 1 } else { recipe.components },
        }
    }
}

/// Returns `count` evenly spaced pairs with their best results.
pub(crate) fn samples(pairs: &[Pair], scores: &Scores, count: usize) -> String {
    let mut lines = vec![];
    for i in 0..count.min(pairs.len()) {
        let i = (2 * i + 1) * pairs.len() / (2 * count);
        let (pair, found) = (&pairs[i], &scores.found[i]);
        lines.push(format!("  source     {}\n  reference  {}", pair.source, pair.target));
        lines.extend(found.iter().take(3).map(|text| format!("  found      {text}")));
        lines.push(String::new());
    }
    lines.join("\n")
}

/// Returns a JSON line for each pair, with all that was found for it.
pub(crate) fn found(kind: HeadKind, pairs: &[Pair], scores: &Scores) -> Result<String> {
    let line = |(pair, found): (&Pair, &Vec<String>)| {
        let line = json!({ "head": kind.name(), "source": pair.source, "reference": pair.target, "found": found });
        Ok(serde_json::to_string(&line)? + "\n")
    };
    pairs.iter().zip(&scores.found).map(line).collect()
}

pub(crate) fn table(rows: &[Row]) -> String {
    let names = rows
        .iter()
        .find_map(|row| row.more.as_ref())
        .map_or(vec![], |trained| trained.measures.iter().map(|(name, _)| *name).collect());
    let costs = ["tokens/s", "s/batch", "peak MiB", "slowdown"];
    let test_nll = |row: &Row| row.more.as_ref().and_then(|trained| trained.test_nll);
    let test: &[&str] = if rows.iter().any(|row| test_nll(row).is_some()) { &["test ppl"] } else { &[] };
    let columns = [&["head", "parameters", "valid NLL", "valid ppl"][..], test, &names, &costs].concat();
    let cells = |row: &Row| {
        let mut cells = vec![row.kind.name().to_owned(), row.parameters.to_string()];
        cells.extend([number(row.valid_nll, 4), number(row.valid_nll.exp(), 3)]);
        cells.extend(test.iter().map(|_| number(test_nll(row).map(f64::exp), 3)));
        let value = |i: usize| row.more.as_ref().map(|trained| trained.measures[i].1);
        cells.extend((0..names.len()).map(|i| number(value(i), 2)));
        let cost = |select: fn(&Trained) -> Option<f64>| row.more.as_ref().and_then(select);
        let (seconds, mib) = (cost(|trained| trained.seconds_per_batch), cost(|trained| trained.peak_mib));
        cells.extend([number(row.tokens_per_second, 0), number(seconds, 3), number(mib, 0)]);
        cells.push(number(slowdown(row, rows), 2));
        cells
    };
    report::table(&columns, &rows.iter().map(cells).collect::<Vec<_>>())
}

pub(crate) fn json(row: &Row, rows: &[Row]) -> Value {
    let trained = row.more.as_ref();
    let test_nll = trained.and_then(|trained| trained.test_nll);
    let measures = trained.iter().flat_map(|trained| &trained.measures);
    let scores: Map<String, Value> =
        measures.map(|(name, value)| (name.to_lowercase().replace([' ', '-'], "_"), json!(value))).collect();
    row.json(json!({
        "vocab": trained.map(|trained| trained.vocab),
        "vocab_size": trained.map(|trained| trained.vocab_size),
        "components": trained.map(|trained| trained.components),
        "epochs": row.history.len(),
        "test_nll": test_nll,
        "test_perplexity": test_nll.map(f64::exp),
        "seconds_per_batch": trained.map(|trained| trained.seconds_per_batch),
        "peak_mib": trained.map(|trained| trained.peak_mib),
        "slowdown": slowdown(row, rows),
        "scores_of": if test_nll.is_some() { "test" } else { "valid" },
        "scores": scores,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(test_nll: Option<f64>) -> Row {
        let trained = Trained {
            measures: vec![("BLEU-1 P", 12.5)],
            test_nll,
            seconds_per_batch: None,
            peak_mib: None,
            vocab: "word",
            vocab_size: 9,
            components: 1,
        };
        Outcome {
            kind: HeadKind::Softmax,
            parameters: 7,
            history: vec![],
            valid_nll: 1.0,
            diverged: None,
            tokens_per_second: None,
            more: Some(trained),
        }
    }

    #[test]
    fn results_name_their_pairs() {
        let reported = |test_nll| {
            let rows = [row(test_nll)];
            (json(&rows[0], &rows), table(&rows))
        };
        let (with, with_table) = reported(Some(2.0));
        assert_eq!((&with["scores_of"], &with["test_perplexity"]), (&json!("test"), &json!(2f64.exp())));
        assert_eq!(with["scores"], json!({ "bleu_1_p": 12.5 }));
        assert!(with_table.contains("test ppl") && with_table.contains("7.389"), "{with_table}");
        let (without, without_table) = reported(None);
        assert_eq!((&without["scores_of"], &without["test_perplexity"]), (&json!("valid"), &Value::Null));
        assert!(!without_table.contains("test ppl"), "{without_table}");
    }

    #[test]
    fn every_pair_has_a_line_of_what_was_found() {
        let pair = |text: &str| Pair { source: format!("{text}?"), target: text.into() };
        let scores = Scores { measures: vec![], found: vec![vec!["a \"b\"".into(), "c".into()], vec![]] };
        let lines = found(HeadKind::Moc, &[pair("x"), pair("y")], &scores).unwrap();
        let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let first = json!({ "head": "moc", "source": "x?", "reference": "x", "found": ["a \"b\"", "c"] });
        assert_eq!((lines.len(), &lines[0]), (2, &first));
    }
}
