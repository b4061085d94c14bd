//! Numbers and names in tables and pictures, and the frames of tables.

use std::collections::BTreeSet;

use crate::results::{Line, Result};

/// This text stands in place of a table that nothing has been measured for.
pub(crate) const UNMEASURED: &str = "Not measured yet.\n";

/// Returns the number of components in words.
pub(crate) fn softmaxes(line: &Line) -> Result<String> {
    let components = need(line, "components")?;
    Ok(if components == 1.0 { "one softmax".into() } else { format!("{components} softmaxes") })
}

/// Returns the name of a head, and the number of components of a mixture.
pub(crate) fn head_with_components(line: &Line) -> String {
    let components = line.number("components").filter(|&components| components > 1.0);
    let components = components.map_or(String::new(), |components| format!(", K = {components}"));
    head_name(line.text("head")).to_owned() + &components
}

pub(crate) fn head_name(head: &str) -> &str {
    match head {
        "moc" => "mixture of contexts",
        "mos" => "mixture of softmaxes",
        head => head,
    }
}

/// Returns the mean and standard deviation of lines of a seed each.
pub(crate) fn over_seeds(lines: &[&Line], key: &str, decimals: usize) -> Result<String> {
    let values = lines.iter().map(|line| need(line, key)).collect::<Result<Vec<_>>>()?;
    Ok(mean_and_deviation(&values, decimals))
}

/// Returns the mean and standard deviation of a score of texts.
pub(crate) fn score_over_seeds(lines: &[&Line], key: &str, decimals: usize) -> Result<String> {
    let scores = lines.iter().map(|line| line.score(key).ok_or_else(|| format!("no score {key}")));
    Ok(mean_and_deviation(&scores.collect::<std::result::Result<Vec<_>, _>>()?, decimals))
}

/// Returns the mean of some numbers and, of more than one, the standard deviation.
pub(crate) fn mean_and_deviation(values: &[f64], decimals: usize) -> String {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    if values.len() < 2 {
        return format!("{mean:.decimals$}");
    }
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
    format!("{mean:.decimals$} ± {:.decimals$}", variance.sqrt())
}

pub(crate) fn perplexity(number: f64) -> String {
    if number < 10.0 {
        format!("{number:.2}")
    } else {
        format!("{number:.1}")
    }
}

pub(crate) fn need(line: &Line, key: &str) -> Result<f64> {
    line.number(key).ok_or_else(|| {
        let [figure, shape, implementation] = ["figure", "shape", "implementation"].map(|key| line.text(key));
        format!("no number under \"{key}\" of {figure}, {shape}, {implementation}").into()
    })
}

pub(crate) fn markdown(header: &str, rows: Vec<Vec<String>>) -> String {
    let mut text = format!("{header}\n|{}\n", "---|".repeat(header.matches('|').count() - 1));
    for row in rows {
        // An empty cell is one space wide.
        text += &format!("| {} |\n", row.join(" | ")).replace("|  |", "| |").replace("|  |", "| |");
    }
    text
}

/// Says where the numbers of a table come from: dates and commits, and the processors of timings.
pub(crate) fn source(lines: &[&Line], processors: bool) -> String {
    let all = |key| lines.iter().map(|line| line.text(key)).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>();
    let processors = if processors { all("processor").join("; ") + "; " } else { String::new() };
    let commits = all("commit");
    let noun = if commits.len() == 1 { "commit" } else { "commits" };
    format!("\n*{processors}{}, {noun} {}*\n", all("date").join(", "), commits.join(", "))
}

/// Writes 10000 as "10 000". Four digits stay together.
pub(crate) fn count(number: f64) -> String {
    let digits = plain(number);
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) && digits.len() > 4 {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

pub(crate) fn plain(number: f64) -> String {
    format!("{number:.0}")
}

/// Writes three significant digits.
pub(crate) fn digits(number: f64) -> String {
    let decimals = match number {
        x if x < 1.0 => 3,
        x if x < 10.0 => 2,
        x if x < 100.0 => 1,
        _ => 0,
    };
    format!("{number:.decimals$}")
}

/// Writes at most three significant digits, without zeros at the end.
pub(crate) fn short(number: f64) -> String {
    let text = digits(number);
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').into()
    } else {
        text
    }
}

/// Writes three significant digits, but none below a hundredth of a millisecond.
pub(crate) fn milliseconds(number: f64) -> String {
    if number < 1.0 {
        format!("{number:.2}")
    } else {
        digits(number)
    }
}

/// Returns the place of a step's shape in tables; others come last.
pub(crate) fn place_of_shape(line: &Line) -> usize {
    const SHAPES: [&str; 4] = ["ptb", "wt2", "1b", "llm"];
    SHAPES.iter().position(|shape| line.is("shape", shape)).unwrap_or(SHAPES.len())
}

/// Returns the shape, with all sizes or with the positions only if they are not the shape's own.
pub(crate) fn sizes(line: &Line, full: bool) -> Result<String> {
    let (shape, positions) = (line.text("shape"), need(line, "positions")?);
    if full {
        let (components, d) = (need(line, "components")?, need(line, "context")?);
        let vocab = count(need(line, "vocab")?);
        let positions = plain(positions);
        return Ok(format!("{shape} ({positions} positions, K = {components}, d = {d}, V = {vocab})"));
    }
    Ok(if shape == "ptb" { shape.into() } else { format!("{shape}, {} positions", plain(positions)) })
}

/// Returns the header of a table with these columns.
pub(crate) fn header<'a>(titles: impl Iterator<Item = &'a str>) -> String {
    format!("| {} |", titles.collect::<Vec<_>>().join(" | ")).replace("|  |", "| |")
}
