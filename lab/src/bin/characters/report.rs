//! The final output: the table, a summary of one sentence, and the JSON line.

use lab::layers::{HeadKind, HeadSizes};
use lab::show::report::{self, number};
use lab::{scores::Measure, training::heads::Outcome};
use serde_json::{json, Value};

/// The outcome of a head, with the NLL on the test text.
pub(crate) type Row = Outcome<f64>;

pub(crate) fn bits(nll: f64) -> f64 {
    Measure::BitsPerCharacter.shown(nll)
}

pub(crate) fn table(rows: &[Row], sizes: impl Fn(HeadKind) -> HeadSizes) -> String {
    let columns = ["head", "LSTM units", "parameters", "valid BPC", "test BPC", "chars/s"];
    let cells = |row: &Row| {
        vec![
            row.kind.name().into(),
            sizes(row.kind).hidden.to_string(),
            row.parameters.to_string(),
            number(bits(row.valid_nll), 4),
            number(row.more.map(bits), 4),
            number(row.tokens_per_second, 0),
        ]
    };
    report::table(&columns, &rows.iter().map(cells).collect::<Vec<_>>())
}

/// Says how the mixture of softmaxes compares with the softmax, if both were trained.
pub(crate) fn summary(rows: &[Row], sizes: impl Fn(HeadKind) -> HeadSizes) -> Option<String> {
    let find = |kind| rows.iter().find(|row| row.kind == kind && row.diverged.is_none());
    let difference = bits(find(HeadKind::Mos)?.valid_nll - find(HeadKind::Softmax)?.valid_nll);
    let HeadSizes { vocab, hidden, .. } = sizes(HeadKind::Softmax);
    let bottleneck = if vocab <= hidden { "no bottleneck" } else { "a bottleneck" };
    Some(format!(
        "With {vocab} characters and {hidden} dimensions the softmax has {bottleneck}; the mixture of softmaxes \
         differs by {difference:+.4} bits per character."
    ))
}

pub(crate) fn json(row: &Row, sizes: HeadSizes) -> Value {
    json!({
        "head": row.kind.name(),
        "vocab": sizes.vocab,
        "hidden": sizes.hidden,
        "parameters": row.parameters,
        "valid_bpc": bits(row.valid_nll),
        "test_bpc": row.more.map(bits),
        "characters_per_second": row.tokens_per_second,
    })
}
