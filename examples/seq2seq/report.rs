//! The final output: results with their references, the table, and the JSON line.

use crate::common::head::HeadKind;
use crate::corpus::Pair;
use crate::score::Scores;
use serde_json::{json, Map, Value};

pub(crate) struct Row {
    pub(crate) kind: HeadKind,
    pub(crate) parameters: usize,
    pub(crate) epochs: usize,
    pub(crate) valid_nll: f64,
    pub(crate) measures: Vec<(&'static str, f64)>,
    pub(crate) tokens_per_second: Option<f64>,
}

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
    let mut head = format!("{:<8} {:>10} {:>10} {:>10}", "head", "parameters", "valid NLL", "valid ppl");
    for (name, _) in rows.first().map_or(&[][..], |row| &row.measures) {
        head.push_str(&format!(" {name:>11}"));
    }
    head.push_str(&format!(" {:>9}", "tokens/s"));
    let mut lines = vec![head];
    for row in rows {
        let nll = row.valid_nll;
        let mut line = format!("{:<8} {:>10} {nll:>10.4} {:>10.3}", row.kind.name(), row.parameters, nll.exp());
        for (_, value) in &row.measures {
            line.push_str(&format!(" {value:>11.2}"));
        }
        let speed = row.tokens_per_second.map_or("-".into(), |speed| format!("{speed:.0}"));
        lines.push(format!("{line} {speed:>9}"));
    }
    lines.join("\n")
}

pub(crate) fn json(rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let measures: Map<String, Value> = row
            .measures
            .iter()
            .map(|(name, value)| (name.to_lowercase().replace([' ', '-'], "_"), json!(value)))
            .collect();
        json!({
            "head": row.kind.name(),
            "name": row.kind.name(),
            "parameters": row.parameters,
            "epochs": row.epochs,
            "valid_nll": row.valid_nll,
            "valid_perplexity": row.valid_nll.exp(),
            "tokens_per_second": row.tokens_per_second,
            "scores": measures,
        })
    };
    rows.iter().map(row).collect()
}
