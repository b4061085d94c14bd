//! Tables that are data (`tables.json`): with a row for each line of a figure, or with a row for each value of `rows`
//! and a column for each value of `by`.
//!
//! A column has a title and the cell of a line, in which `{key:format}` is a number and `{key}` a text of the line. The
//! number may be a quotient or a difference, `{a/b:format}`. A cell is empty if the line has no number `{key?:format}`.

use std::cmp::Ordering;

use serde_json::Value;

use crate::format::*;
use crate::results::{Line, Result, Results};

const TABLES: &str = include_str!("tables.json");

/// Returns the descriptions of the tables.
pub(crate) fn tables() -> Result<Vec<Value>> {
    Ok(serde_json::from_str(TABLES)?)
}

/// Makes the table of this description.
pub(crate) fn table(description: &Value, results: &Results) -> Result<String> {
    let Value::Array(columns) = &description["columns"] else { return Err("a table without columns".into()) };
    let figure = description["figure"].as_str().or(description["table"].as_str()).ok_or("a table without a name")?;
    let mut lines = results.lines_of(figure);
    if lines.is_empty() {
        return Ok(UNMEASURED.into());
    }
    let sort: Vec<&str> = description["sort"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    lines.sort_by(|a, b| sort.iter().fold(Ordering::Equal, |order, key| order.then(compare(a, b, key))));
    let pairs: Vec<[&str; 2]> = columns.iter().map(|pair| [0, 1].map(|i| pair[i].as_str().unwrap_or(""))).collect();
    let (titles, rows) = match description["by"].as_str() {
        Some(by) => crossed(description, &lines, by, pairs)?,
        None => {
            let row = |line: &&Line| pairs.iter().map(|[_, template]| cell(template, line)).collect::<Result<Vec<_>>>();
            (pairs.iter().map(|[title, _]| *title).collect(), lines.iter().map(row).collect::<Result<_>>()?)
        }
    };
    let is_timed = description["timed"].as_bool().unwrap_or(false);
    Ok(markdown(&header(titles.into_iter()), rows) + &source(&lines, is_timed))
}

/// Returns the titles and rows of a table whose cells are lines with two keys: each row begins with labels of its last
/// line. With `present`, columns without a line are left out, and a cell may have no line.
fn crossed<'a>(
    description: &'a Value,
    lines: &[&Line],
    by: &str,
    mut columns: Vec<[&'a str; 2]>,
) -> Result<(Vec<&'a str>, Vec<Vec<String>>)> {
    let text = |key: &str| description[key].as_str().ok_or_else(|| format!("a table without \"{key}\""));
    let (key, template) = (text("rows")?, text("cell")?);
    let is_present = description["present"].as_bool().unwrap_or(false);
    columns.retain(|[_, value]| !is_present || lines.iter().any(|line| shown(line, by) == *value));
    let labels = description["labels"].as_array().map_or(&[][..], Vec::as_slice);
    let labels = || labels.iter().map(|label| [0, 1].map(|i| label[i].as_str().unwrap_or("")));
    let mut rows: Vec<(String, Vec<String>)> = vec![];
    for first in lines {
        let row = shown(first, key);
        if rows.iter().any(|(known, _)| *known == row) {
            continue;
        }
        let last = lines.iter().rfind(|line| shown(line, key) == row).unwrap_or(first);
        let mut cells = labels().map(|[_, template]| cell(template, last)).collect::<Result<Vec<_>>>()?;
        if let (Some(name), Some(label)) = (description["names"][&row].as_str(), cells.first_mut()) {
            *label = name.to_owned();
        }
        for [_, value] in &columns {
            let found = lines.iter().find(|line| shown(line, key) == row && shown(line, by) == *value);
            cells.push(match found {
                Some(line) if line.number("valid_perplexity").is_none() && is_present => "diverged".into(),
                Some(line) => cell(template, line)?,
                None if is_present => String::new(),
                None => return Err(format!("no {value} of {row}").into()),
            });
        }
        rows.push((row, cells));
    }
    let titles = labels().map(|[title, _]| title).chain(columns.iter().map(|[title, _]| *title)).collect();
    Ok((titles, rows.into_iter().map(|(_, cells)| cells).collect()))
}

/// Returns a text or a number of a line as text.
fn shown(line: &Line, key: &str) -> String {
    line.number(key).map_or_else(|| line.text(key).to_owned(), |number| number.to_string())
}

/// Orders by a number or a text; shapes by their size, and this crate before its peers.
fn compare(a: &Line, b: &Line, key: &str) -> Ordering {
    let number = |line: &Line| line.number(key).unwrap_or(0.0);
    match key {
        "shape" => place_of_shape(a).cmp(&place_of_shape(b)),
        "implementation" => (!a.is(key, "mos-head")).cmp(&!b.is(key, "mos-head")),
        key => a.text(key).cmp(b.text(key)).then(number(a).total_cmp(&number(b))),
    }
}

fn cell(template: &str, line: &Line) -> Result<String> {
    let Some((before, rest)) = template.split_once('{') else { return Ok(template.to_owned()) };
    let (field, after) = rest.split_once('}').ok_or("a brace is not closed")?;
    let (key, format) = field.split_once(':').unwrap_or((field, ""));
    let optional = key.strip_suffix('?');
    if optional.is_some_and(|key| line.number(key).is_none()) {
        return Ok(String::new());
    }
    let key = optional.unwrap_or(key);
    let value = match format {
        "" => shown(line, key),
        "components" => head_with_components(line),
        "sizes" => sizes(line, false)?,
        _ => match format.strip_prefix("each ") {
            Some(format) => {
                let numbers = line.numbers(key).into_iter().map(|number| formatted(number, format));
                numbers.collect::<Result<Vec<_>>>()?.join(", ")
            }
            None => formatted(number(line, key)?, format)?,
        },
    };
    Ok(format!("{before}{value}{}", cell(after, line)?))
}

fn number(line: &Line, key: &str) -> Result<f64> {
    match (key.split_once('/'), key.split_once('-')) {
        (Some((a, b)), _) => Ok(need(line, a)? / need(line, b)?),
        (_, Some((a, b))) => Ok(need(line, a)? - need(line, b)?),
        _ => need(line, key),
    }
}

fn formatted(number: f64, format: &str) -> Result<String> {
    Ok(match format {
        "count" => count(number),
        "digits" => digits(number),
        "short" => short(number),
        "perplexity" => perplexity(number),
        "ms" => digits(1e3 * number),
        "milliseconds" => milliseconds(number),
        format => {
            let decimals = format.strip_prefix('.').and_then(|decimals| decimals.parse::<usize>().ok());
            let decimals = decimals.ok_or_else(|| format!("no format {format:?} of numbers"))?;
            format!("{number:.decimals$}")
        }
    })
}
