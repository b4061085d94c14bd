//! Translation over words, byte pairs and codes with one softmax and nine (`lab/run_all.sh`): cost, quality, equal
//! time.

use crate::format::*;
use crate::results::{Line, Result, Results};
use crate::runs::{by_minutes, within};

/// The models and target tokens, in the order of the tables.
const SYSTEMS: [&str; 6] = [
    "LSTM, words",
    "LSTM, byte pairs",
    "LSTM, codes",
    "Transformer, words",
    "Transformer, byte pairs",
    "Transformer, codes",
];
const HEADS: [&str; 2] = ["softmax", "mos"];
/// Minutes of equal time.
const MINUTES: [f64; 3] = [4.0, 8.0, 12.0];

/// One system with one head: its seeds, and the seconds of a step on a machine that does nothing else.
struct Row<'a> {
    system: &'static str,
    seeds: Vec<&'a Line>,
    step: Option<&'a Line>,
}

fn rows(results: &Results) -> Vec<Row<'_>> {
    let (trained, timed) = (results.lines_of("multi30k-vocabularies"), results.lines_of("vocabulary-seconds"));
    let pairs = SYSTEMS.into_iter().flat_map(|system| HEADS.map(|head| (system, head)));
    let row = |(system, head): (&'static str, &str)| {
        let is_of = |line: &&&Line| line.is("system", system) && line.is("head", head);
        Row { system, seeds: trained.iter().filter(is_of).copied().collect(), step: timed.iter().find(is_of).copied() }
    };
    pairs.map(row).filter(|row| !row.seeds.is_empty()).collect()
}

/// Returns the test BLEU of a model's rows.
pub(crate) fn summary(results: &Results, model: &str) -> Result<String> {
    let mut parts: Vec<String> = vec![];
    for row in rows(results).iter().filter(|row| row.system.starts_with(model)) {
        let [_, tokens, components] = names(row)?;
        parts.push(format!("{tokens}, K = {components} {}", score_over_seeds(&row.seeds, "bleu", 1)?));
    }
    Ok(if parts.is_empty() { "not run yet".into() } else { parts.join("; ") })
}

/// Returns the name of a row: the model, what a target token is, and the number of softmaxes.
fn names(row: &Row) -> Result<[String; 3]> {
    let (model, tokens) = row.system.split_once(", ").ok_or("a system has a model and its tokens")?;
    Ok([model.into(), tokens.into(), count(need(row.seeds[0], "components")?)])
}

/// Makes the table of the validation perplexity of the Transformer's trials, whose settings are the columns.
pub(crate) fn trials(results: &Results) -> Result<String> {
    let lines = results.lines_of("multi30k-transformer-trials");
    let mut settings: Vec<&str> = vec![];
    for line in &lines {
        if !settings.contains(&line.text("setting")) {
            settings.push(line.text("setting"));
        }
    }
    if settings.is_empty() {
        return Ok(UNMEASURED.into());
    }
    let mut rows = vec![];
    for (system, head) in SYSTEMS.into_iter().flat_map(|system| HEADS.map(|head| (system, head))) {
        let trials: Vec<_> = lines.iter().filter(|line| line.is("system", system) && line.is("head", head)).collect();
        let Some(first) = trials.first() else { continue };
        let mut row = vec![system.trim_start_matches("Transformer, ").into(), count(need(first, "components")?)];
        for setting in &settings {
            let trial = trials.iter().find(|line| line.is("setting", setting));
            let found = trial.map(|line| line.number("valid_perplexity").map_or("diverged".into(), perplexity));
            row.push(found.unwrap_or_default());
        }
        rows.push(row);
    }
    let settings: String = settings.iter().map(|setting| format!(" `{setting}` |")).collect();
    Ok(markdown(&format!("| target tokens | K |{settings}"), rows) + &source(&lines, false))
}

/// Makes the table of sizes, time, memory, perplexity and BLEU of every system.
pub(crate) fn vocabularies(results: &Results) -> Result<String> {
    let rows = rows(results);
    if rows.is_empty() {
        return Ok(UNMEASURED.into());
    }
    let cells = |row: &Row| {
        let first = |key: &str| need(row.seeds[0], key);
        let mut cells = names(row)?.to_vec();
        cells.extend([count(first("vocab_size")?), count(first("parameters")?)]);
        cells.push(row.step.map_or(Ok(String::new()), |line| need(line, "seconds").map(digits))?);
        cells.push(count(first("peak_mib")?.round()));
        cells.push(row.seeds.len().to_string());
        for key in ["valid_perplexity", "test_perplexity"] {
            cells.push(over_seeds(&row.seeds, key, 2)?);
        }
        cells.push(score_over_seeds(&row.seeds, "bleu", 1)?);
        Ok(cells)
    };
    let header =
        "| model | target tokens | K | ids | parameters | s/batch | peak MiB | seeds | validation perplexity | \
                  test perplexity | test BLEU |";
    let used: Vec<_> = rows.iter().flat_map(|row| row.seeds.iter().copied().chain(row.step)).collect();
    Ok(markdown(header, rows.iter().map(cells).collect::<Result<_>>()?) + &source(&used, true))
}

/// Makes the table of the validation perplexity after some minutes of one core, of the first seed.
pub(crate) fn equal_time(results: &Results) -> Result<String> {
    let timed: Vec<_> = rows(results).into_iter().filter_map(|row| row.step.map(|step| (row, step))).collect();
    if timed.is_empty() {
        return Ok(UNMEASURED.into());
    }
    let cells = |(row, step): &(Row, &Line)| {
        let points = by_minutes(row.seeds[0], step)?;
        let mut cells = names(row)?.to_vec();
        cells.extend(MINUTES.map(|minutes| within(&points, minutes)));
        Ok(cells)
    };
    let minutes: String = MINUTES.iter().map(|minutes| format!(" {minutes:.0} minutes |")).collect();
    let used: Vec<_> = timed.iter().flat_map(|(row, step)| [row.seeds[0], *step]).collect();
    let header = format!("| model | target tokens | K |{minutes}");
    Ok(markdown(&header, timed.iter().map(cells).collect::<Result<_>>()?) + &source(&used, true))
}
