//! The final output: the table, a summary of one sentence, and the JSON line.

use crate::common::{head::HeadKind, language_model::Sizes};
use serde_json::{json, Value};

pub(crate) struct Row {
    pub(crate) kind: HeadKind,
    pub(crate) sizes: Sizes,
    pub(crate) valid_bpc: f64,
    pub(crate) test_bpc: f64,
    pub(crate) characters_per_second: Option<f64>,
}

impl Row {
    fn parameters(&self) -> usize {
        self.sizes.parameters(self.kind)
    }
}

pub(crate) fn table(rows: &[Row]) -> String {
    let mut lines = vec![format!(
        "{:<8} {:>10} {:>10} {:>10} {:>10} {:>9}",
        "head", "LSTM units", "parameters", "valid BPC", "test BPC", "chars/s"
    )];
    for row in rows {
        let speed = row.characters_per_second.map_or("-".into(), |speed| format!("{speed:.0}"));
        lines.push(format!(
            "{:<8} {:>10} {:>10} {:>10.4} {:>10.4} {:>9}",
            row.kind.name(),
            row.sizes.head.hidden,
            row.parameters(),
            row.valid_bpc,
            row.test_bpc,
            speed,
        ));
    }
    lines.join("\n")
}

/// How the mixture of softmaxes compares with the softmax, if both were trained.
pub(crate) fn summary(rows: &[Row]) -> Option<String> {
    let find = |kind| rows.iter().find(|row| row.kind == kind);
    let (softmax, mos) = (find(HeadKind::Softmax)?, find(HeadKind::Mos)?);
    let difference = mos.valid_bpc - softmax.valid_bpc;
    let (vocab, hidden) = (softmax.sizes.head.vocab, softmax.sizes.head.hidden);
    let expected = match vocab <= hidden {
        true => "has no bottleneck",
        false => "has a bottleneck",
    };
    Some(format!(
        "With {vocab} characters and {hidden} dimensions the softmax {expected}; the mixture of softmaxes differs by \
         {difference:+.4} bits per character."
    ))
}

pub(crate) fn json(rows: &[Row]) -> Value {
    let row = |row: &Row| {
        json!({
            "head": row.kind.name(),
            "vocab": row.sizes.head.vocab,
            "hidden": row.sizes.head.hidden,
            "parameters": row.parameters(),
            "valid_bpc": row.valid_bpc,
            "test_bpc": row.test_bpc,
            "characters_per_second": row.characters_per_second,
        })
    };
    rows.iter().map(row).collect()
}
