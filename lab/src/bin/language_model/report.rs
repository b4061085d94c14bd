//! The final output: the table, a summary of one sentence, and the JSON line.

use lab::layers::HeadKind;
use lab::show::report::{self, number};
use lab::training::heads::{slowdown, Outcome};
use serde_json::{json, Value};

/// The outcome of a head, with the NLL on the test text if there is one.
pub(crate) type Row = Outcome<Option<f64>>;

pub(crate) fn table(rows: &[Row], entropy: Option<f64>) -> String {
    let columns = ["head", "parameters", "valid NLL", "valid ppl", "test ppl", "above entropy", "tokens/s", "slowdown"];
    let cells = |row: &Row| {
        vec![
            row.kind.name().into(),
            row.parameters.to_string(),
            number(row.valid_nll, 4),
            number(row.valid_nll.exp(), 3),
            number(row.more.flatten().map(f64::exp), 3),
            number(entropy.map(|entropy| row.valid_nll - entropy), 4),
            number(row.tokens_per_second, 0),
            number(slowdown(row, rows), 2),
        ]
    };
    let mut table = report::table(&columns, &rows.iter().map(cells).collect::<Vec<_>>());
    if let Some(entropy) = entropy {
        table += &format!("\nTrue entropy: {entropy:.4} nats, perplexity {:.3}.", entropy.exp());
    }
    table
}

/// Says how the mixture of softmaxes compares with the softmax, if both were trained.
pub(crate) fn summary(rows: &[Row], entropy: Option<f64>) -> Option<String> {
    let find = |kind| rows.iter().find(|row| row.kind == kind && row.diverged.is_none());
    let (softmax, mos) = (find(HeadKind::Softmax)?, find(HeadKind::Mos)?);
    let size = 100.0 * (mos.parameters as f64 / softmax.parameters as f64 - 1.0);
    let size =
        if size.abs() < 1.0 { "the same number of parameters".into() } else { format!("{size:+.1}% parameters") };
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

pub(crate) fn json(row: &Row, rows: &[Row], entropy: Option<f64>) -> Value {
    row.json(json!({
        "test_perplexity": row.more.flatten().map(f64::exp),
        "slowdown": slowdown(row, rows),
        "nats_above_entropy": entropy.map(|entropy| row.valid_nll - entropy),
    }))
}
