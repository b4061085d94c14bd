//! The tables of what the examples learn: perplexities, BLEU, and the rank of log-probabilities.

use crate::results::{Line, Result, Results};
use crate::tables::{count, digits, markdown, need, short, source};

/// What all three heads reach with equal numbers of parameters.
pub(crate) fn examples(results: &Results) -> Result<String> {
    type Value = fn(&Line) -> Result<String>;
    const PERPLEXITY: &str = "valid_perplexity_by_epoch";
    const BITS: &str = "valid_bits_per_character_by_epoch";
    let table: [(&str, &str, &str, Value); 4] = [
        ("built-in-language", "built-in language of `lstm_lm`, nats above its entropy", "", |line| {
            Ok(format!("{:.3}", above_entropy(line)?))
        }),
        ("penn-treebank", "Penn Treebank, validation perplexity", PERPLEXITY, |line| {
            Ok(perplexity(last(line, PERPLEXITY)?))
        }),
        ("translation", "Multi30k, German to English, validation BLEU (beam 5)", PERPLEXITY, |line| {
            Ok(format!("{:.1}", need(line, "bleu")?))
        }),
        ("characters", "tiny Shakespeare, validation bits per character", BITS, |line| {
            Ok(format!("{:.3}", last(line, BITS)?))
        }),
    ];
    let mut used = vec![];
    let mut rows = vec![];
    for (figure, name, epochs, value) in table {
        let lines = results.of(figure);
        let epochs = lines.first().map_or(0, |line| line.numbers(epochs).len());
        let epochs = if epochs > 0 { format!(" after {epochs} epochs") } else { String::new() };
        let mut row = vec![name.to_owned() + &epochs];
        for head in ["softmax", "moc", "mos"] {
            let line = *lines.iter().find(|line| line.is("head", head)).ok_or(format!("no {head} of {figure}"))?;
            row.push(value(line)?);
            used.push(line);
        }
        rows.push(row);
    }
    Ok(markdown("| | softmax | mixture of contexts | mixture of softmaxes |", rows) + &source(&used, false))
}

pub(crate) fn penn_treebank(results: &Results) -> Result<String> {
    by_head(results, "penn-treebank", "| head | parameters | validation perplexity, epochs 1, 2, 3 |", |line| {
        Ok(vec![count(need(line, "parameters")?), each(line, "valid_perplexity_by_epoch", perplexity)])
    })
}

pub(crate) fn built_in_language(results: &Results) -> Result<String> {
    let header = "| head | parameters | validation NLL | nats above the entropy |";
    by_head(results, "built-in-language", header, |line| {
        let nll = need(line, "valid_nll")?;
        Ok(vec![count(need(line, "parameters")?), format!("{nll:.4}"), format!("{:.3}", above_entropy(line)?)])
    })
}

pub(crate) fn translation(results: &Results) -> Result<String> {
    let header = "| head | parameters | validation perplexity, epochs 1 to 4 | BLEU | minutes |";
    by_head(results, "translation", header, |line| {
        Ok(vec![
            count(need(line, "parameters")?),
            each(line, "valid_perplexity_by_epoch", perplexity),
            format!("{:.1}", need(line, "bleu")?),
            short(need(line, "minutes")?),
        ])
    })
}

pub(crate) fn dialogue(results: &Results) -> Result<String> {
    let header = "| head | parameters | validation perplexity | BLEU-1 P / R | BLEU-2 P / R | BLEU-3 P / R \
                  | BLEU-4 P / R |";
    by_head(results, "dialogue", header, |line| {
        let mut row = vec![count(need(line, "parameters")?), perplexity(need(line, "valid_perplexity")?)];
        let (precision, recall) = (line.numbers("bleu_1_to_4_precision"), line.numbers("bleu_1_to_4_recall"));
        row.extend(precision.iter().zip(recall).map(|(p, r)| format!("{} / {}", digits(*p), digits(r))));
        Ok(row)
    })
}

pub(crate) fn characters(results: &Results) -> Result<String> {
    let header = "| head | LSTM units | parameters | validation BPC, epochs 1 to 3 | test BPC | CPU minutes |";
    by_head(results, "characters", header, |line| {
        Ok(vec![
            count(need(line, "units")?),
            count(need(line, "parameters")?),
            each(line, "valid_bits_per_character_by_epoch", |bits| format!("{bits:.3}")),
            format!("{:.3}", need(line, "test_bits_per_character")?),
            short(need(line, "cpu_minutes")?),
        ])
    })
}

/// A table with one row per line, which starts with the head.
fn by_head(
    results: &Results,
    figure: &str,
    header: &str,
    cells: impl Fn(&Line) -> Result<Vec<String>>,
) -> Result<String> {
    let lines = results.of(figure);
    let row = |line: &&Line| {
        let components = line.number("components").filter(|&components| components > 1.0);
        let components = components.map_or(String::new(), |components| format!(", K = {components}"));
        Ok([vec![head_name(line.text("head")).to_owned() + &components], cells(line)?].concat())
    };
    let rows = lines.iter().map(row).collect::<Result<_>>()?;
    Ok(markdown(header, rows) + &source(&lines, false))
}

pub(crate) fn head_name(head: &str) -> &str {
    match head {
        "moc" => "mixture of contexts",
        "mos" => "mixture of softmaxes",
        head => head,
    }
}

fn above_entropy(line: &Line) -> Result<f64> {
    Ok(need(line, "valid_nll")? - need(line, "entropy_nats")?)
}

fn last(line: &Line, key: &str) -> Result<f64> {
    line.numbers(key).last().copied().ok_or_else(|| format!("no numbers under \"{key}\"").into())
}

fn each(line: &Line, key: &str, format: fn(f64) -> String) -> String {
    line.numbers(key).into_iter().map(format).collect::<Vec<_>>().join(", ")
}

fn perplexity(number: f64) -> String {
    if number < 10.0 {
        format!("{number:.2}")
    } else {
        format!("{number:.1}")
    }
}
