//! The index of the papers' tables (`lab/papers.jsonl`): for each its command, its price, its published value and the
//! value that was reached here, which is that of the measurements.

use serde_json::Value;

use crate::format::*;
use crate::results::{read, root, Line, Result, Results};
use crate::{captions, vocabularies};

const INDEX: &str = "lab/papers.jsonl";

/// Makes the tables of one paper.
pub(crate) fn papers(results: &Results, paper: &str) -> Result<String> {
    let mut rows = vec![];
    for (i, line) in read(root(), INDEX)?.lines().enumerate() {
        let entry: Value = serde_json::from_str(line).map_err(|error| format!("{INDEX}, line {}: {error}", i + 1))?;
        let text = |key: &str| entry.get(key).and_then(Value::as_str).unwrap_or("").to_owned();
        if text("paper") != paper {
            continue;
        }
        let here = expand(&text("here"), results).map_err(|error| format!("{INDEX}, line {}: {error}", i + 1))?;
        let commands = array(&entry, "command").iter().filter_map(Value::as_str).map(command).collect::<Vec<_>>();
        let prices = array(&entry, "price").iter().map(|price| hours(price, results)).collect::<Result<Vec<_>>>()?;
        rows.push(vec![
            text("item"),
            text("what"),
            text("data"),
            commands.join("<br>"),
            prices.join("<br>"),
            text("published"),
            here,
            text("status"),
        ]);
    }
    let header = "| | what | data | command | hours on 2 cores | published | here | status |";
    Ok(markdown(header, rows))
}

fn array<'a>(entry: &'a Value, key: &str) -> &'a [Value] {
    entry.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Returns a command as code, and a remark as it is.
fn command(text: &str) -> String {
    let programs =
        ["language_model ", "translation ", "captions ", "characters ", "bottleneck ", "step_time ", "scripts/"];
    if programs.iter().any(|start| text.starts_with(start)) {
        format!("`{}`", text.replacen(" --", " -- --", usize::from(!text.starts_with("scripts/"))))
    } else {
        text.to_owned()
    }
}

/// Returns what an epoch costs: its steps, times the seconds of a step of the preset.
fn hours(price: &Value, results: &Results) -> Result<String> {
    let (Some(preset), Some(steps)) = (price[0].as_str(), price[1].as_f64()) else {
        return Err(format!("{INDEX}: a price is [preset, steps, remark], got {price}").into());
    };
    let remark =
        price[2].as_str().filter(|remark| !remark.is_empty()).map_or(String::new(), |text| format!(" ({text})"));
    let lines = results.lines_of("preset-seconds");
    Ok(match lines.iter().find(|line| line.is("preset", preset)) {
        None => format!("`{preset}`: not measured"),
        Some(line) => {
            format!("`{preset}`: {} an epoch{remark}", digits(steps * need(line, "seconds")? / 3600.0))
        }
    })
}

/// Returns a text with the measurements in the place of names in braces.
fn expand(text: &str, results: &Results) -> Result<String> {
    let Some((before, rest)) = text.split_once('{') else { return Ok(text.to_owned()) };
    let (name, after) = rest.split_once('}').ok_or("a brace is not closed")?;
    let value = match name {
        "spell" => spelled(results)?,
        "slowdowns" => slowdowns(results)?,
        "lstm-bleu" => vocabularies::summary(results, "LSTM")?,
        "captions" => captions::summary(results)?,
        "transformer-bleu" => vocabularies::summary(results, "Transformer")?,
        figure => heads(results, figure)?,
    };
    Ok(format!("{before}{value}{}", expand(after, results)?))
}

/// Returns the perplexities of the small runs.
fn heads(results: &Results, figure: &str) -> Result<String> {
    let lines = results.lines_of(figure);
    let values = |system: &str, key: &str| -> Result<Vec<f64>> {
        lines.iter().filter(|line| line.is("system", system)).map(|line| need(line, key)).collect()
    };
    let mut parts = vec![];
    for (system, name) in [("mos", "MoS"), ("moc", "MoC"), ("softmax", "softmax")] {
        let [valid, test] = [values(system, "valid_perplexity")?, values(system, "test_perplexity")?];
        if !valid.is_empty() {
            let seeds = if valid.len() == 1 { " (one seed)" } else { "" };
            parts.push(format!("{name} {} / {}{seeds}", mean_and_deviation(&valid, 1), mean_and_deviation(&test, 1)));
        }
    }
    Ok(if parts.is_empty() { "not run yet".into() } else { parts.join(", ") })
}

fn spelled(results: &Results) -> Result<String> {
    let lines = results.lines_of("spell");
    let Some(line) = lines.first() else { return Ok(String::new()) };
    Ok(format!(
        "{}, validation, one seed: {} over strings, {} over the vocabulary alone; the word model {}",
        line.text("shape"),
        digits(need(line, "valid_perplexity")?),
        digits(need(line, "renormalised_perplexity")?),
        digits(need(line, "word_perplexity")?),
    ))
}

/// Returns how many times as long as a position of the softmax's preset one of the mixture's takes.
fn slowdowns(results: &Results) -> Result<String> {
    let lines = results.lines_of("preset-seconds");
    let each = |preset: &str| -> Result<Option<f64>> {
        let line: Option<&&Line> = lines.iter().find(|line| line.is("preset", preset));
        line.map(|line| Ok(need(line, "seconds")? / need(line, "positions")?)).transpose()
    };
    let mut parts = vec![];
    for (name, text) in [("ptb", "PTB"), ("wt2", "WT2"), ("1b", "1B")] {
        if let (Some(softmax), Some(mos)) = (each(&format!("{name}-softmax"))?, each(&format!("{name}-mos"))?) {
            parts.push(format!("{text} {:.1}", mos / softmax));
        }
    }
    Ok(if parts.is_empty() {
        "not measured".into()
    } else {
        format!("2 cores, each preset with its own batch, time of a position: {}", parts.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::parse;
    use serde_json::json;

    fn results() -> Results {
        const ORIGIN: &str = r#""command": "c", "processor": "p", "date": "2026-11-24", "commit": "0123abc""#;
        let lines = [
            r#""figure": "ptb-small", "system": "mos", "seed": 1, "valid_perplexity": 110.0, "test_perplexity": 105.0"#,
            r#""figure": "ptb-small", "system": "mos", "seed": 2, "valid_perplexity": 112.0, "test_perplexity": 105.0"#,
            r#""figure": "preset-seconds", "preset": "ptb-mos", "positions": 816, "seconds": 7.2"#,
            r#""figure": "preset-seconds", "preset": "ptb-softmax", "positions": 1360, "seconds": 4.0"#,
        ];
        let lines = lines.map(|line| format!("{{{line}, {ORIGIN}}}"));
        Results::new(parse(&lines.join("\n")).expect("whole lines"))
    }

    #[test]
    fn values_and_hours_are_those_of_the_measurements() {
        let results = results();
        assert_eq!(expand("small: {ptb-small}.", &results).expect("a figure"), "small: MoS 111.0 ± 1.4 / 105.0 ± 0.0.");
        assert_eq!(expand("{switchboard}", &results).expect("nothing yet"), "not run yet");
        assert!(expand("{slowdowns}", &results).expect("two presets").ends_with("PTB 3.0"));
        assert!(expand("{ptb-small", &results).is_err());
        let price = |preset: &str| hours(&json!([preset, 1000, "500 epochs"]), &results).expect("a price");
        assert_eq!(price("ptb-mos"), "`ptb-mos`: 2.00 an epoch (500 epochs)");
        assert_eq!(price("wt2-mos"), "`wt2-mos`: not measured");
    }

    #[test]
    fn commands_are_code_and_remarks_are_not() {
        assert_eq!(command("language_model --data DIR --tied"), "`language_model -- --data DIR --tied`");
        assert_eq!(command("scripts/fast_mos.sh DIR"), "`scripts/fast_mos.sh DIR`");
        assert_eq!(command("or `wt2-moc`"), "or `wt2-moc`");
    }
}
