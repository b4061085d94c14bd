//! The final output: results with their references, the table, and the JSON line.

use crate::common::heads::{slowdown, Outcome};
use crate::common::report::{self, number};
use crate::corpus::Pair;
use crate::score::{Measures, Scores};
use serde_json::{json, Map, Value};

pub(crate) type Row = Outcome<Measures>;

/// `count` evenly spaced pairs with their best results.
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

pub(crate) fn table(rows: &[Row]) -> String {
    let names = rows
        .iter()
        .find_map(|row| row.more.as_ref())
        .map_or(vec![], |measures| measures.iter().map(|(name, _)| *name).collect());
    let columns = [&["head", "parameters", "valid NLL", "valid ppl"][..], &names, &["tokens/s", "slowdown"]].concat();
    let cells = |row: &Row| {
        let mut cells = vec![row.kind.name().to_owned(), row.parameters.to_string()];
        cells.extend([number(row.valid_nll, 4), number(row.valid_nll.exp(), 3)]);
        let value = |i: usize| row.more.as_ref().map(|measures| measures[i].1);
        cells.extend((0..names.len()).map(|i| number(value(i), 2)));
        cells.extend([number(row.tokens_per_second, 0), number(slowdown(row, rows), 2)]);
        cells
    };
    report::table(&columns, &rows.iter().map(cells).collect::<Vec<_>>())
}

pub(crate) fn json(row: &Row, rows: &[Row]) -> Value {
    let measures = row.more.iter().flatten();
    let scores: Map<String, Value> =
        measures.map(|(name, value)| (name.to_lowercase().replace([' ', '-'], "_"), json!(value))).collect();
    json!({
        "head": row.kind.name(),
        "name": row.kind.name(),
        "parameters": row.parameters,
        "epochs": row.history.len(),
        "valid_nll": row.valid_nll,
        "valid_perplexity": row.valid_nll.exp(),
        "tokens_per_second": row.tokens_per_second,
        "slowdown": slowdown(row, rows),
        "scores": scores,
    })
}
