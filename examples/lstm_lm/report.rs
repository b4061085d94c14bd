//! The final output: the table, a summary of one sentence, and the JSON line.

use crate::common::head::HeadKind;
use serde_json::{json, Value};

pub(crate) struct Row {
    pub(crate) kind: HeadKind,
    pub(crate) parameters: usize,
    pub(crate) valid_nll: f64,
    pub(crate) test_nll: Option<f64>,
    pub(crate) tokens_per_second: Option<f64>,
}

fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.digits$}"))
}

pub(crate) fn table(rows: &[Row], entropy: Option<f64>) -> String {
    let mut lines = vec![format!(
        "{:<8} {:>10} {:>10} {:>11} {:>11} {:>13} {:>9}",
        "head", "parameters", "valid NLL", "valid ppl", "test ppl", "above entropy", "tokens/s"
    )];
    for row in rows {
        lines.push(format!(
            "{:<8} {:>10} {:>10.4} {:>11.3} {:>11} {:>13} {:>9}",
            row.kind.name(),
            row.parameters,
            row.valid_nll,
            row.valid_nll.exp(),
            or_dash(row.test_nll.map(f64::exp), 3),
            or_dash(entropy.map(|entropy| row.valid_nll - entropy), 4),
            or_dash(row.tokens_per_second, 0),
        ));
    }
    if let Some(entropy) = entropy {
        lines.push(format!("True entropy: {entropy:.4} nats, perplexity {:.3}.", entropy.exp()));
    }
    lines.join("\n")
}

/// How the mixture of softmaxes compares with the softmax, if both were trained.
pub(crate) fn summary(rows: &[Row], entropy: Option<f64>) -> Option<String> {
    let find = |kind| rows.iter().find(|row| row.kind == kind);
    let (softmax, mos) = (find(HeadKind::Softmax)?, find(HeadKind::Mos)?);
    let size = 100.0 * (mos.parameters as f64 / softmax.parameters as f64 - 1.0);
    let size = match size.abs() < 1.0 {
        true => "the same number of parameters".into(),
        false => format!("{size:+.1}% parameters"),
    };
    let verdict =
        |gain: bool| if gain { "the mixture of softmaxes" } else { "the mixture of softmaxes, with no gain," };
    Some(match entropy {
        Some(entropy) => {
            let (above_softmax, above_mos) = (softmax.valid_nll - entropy, mos.valid_nll - entropy);
            format!(
                "With {size}, {} stays {above_mos:.3} nats above the entropy of the language, {:.2} times the \
                 {above_softmax:.3} of the softmax.",
                verdict(above_mos < above_softmax),
                above_mos / above_softmax
            )
        }
        None => format!(
            "With {size}, {} reaches a validation perplexity of {:.2}, {:.2} times the {:.2} of the softmax.",
            verdict(mos.valid_nll < softmax.valid_nll),
            mos.valid_nll.exp(),
            (mos.valid_nll - softmax.valid_nll).exp(),
            softmax.valid_nll.exp()
        ),
    })
}

pub(crate) fn json(rows: &[Row], entropy: Option<f64>) -> Value {
    let row = |row: &Row| {
        json!({
            "head": row.kind.name(),
            "name": row.kind.name(),
            "parameters": row.parameters,
            "valid_nll": row.valid_nll,
            "valid_perplexity": row.valid_nll.exp(),
            "test_perplexity": row.test_nll.map(f64::exp),
            "tokens_per_second": row.tokens_per_second,
            "nats_above_entropy": entropy.map(|entropy| row.valid_nll - entropy),
        })
    };
    rows.iter().map(row).collect()
}
