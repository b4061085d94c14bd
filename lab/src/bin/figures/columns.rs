//! Tables with a row for each line of a figure: their columns are data (`tables.json`).
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
    let texts = |i: usize| columns.iter().map(move |column| column[i].as_str().unwrap_or(""));
    let row = |line: &&Line| texts(1).map(|template| cell(template, line)).collect::<Result<Vec<_>>>();
    let rows = lines.iter().map(row).collect::<Result<_>>()?;
    let is_timed = description["timed"].as_bool().unwrap_or(false);
    Ok(markdown(&header(texts(0)), rows) + &source(&lines, is_timed))
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
        "" => line.text(key).to_owned(),
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
        format => {
            let decimals = format.strip_prefix('.').and_then(|decimals| decimals.parse::<usize>().ok());
            let decimals = decimals.ok_or_else(|| format!("no format {format:?} of numbers"))?;
            format!("{number:.decimals$}")
        }
    })
}
