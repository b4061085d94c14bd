//! The tables of words as codes: what they learn, what they cost, and how tables are made.

use crate::format::*;
use crate::results::{Line, Result, Results};

/// Makes the table of language models over words and over codes.
pub(crate) fn codes(results: &Results) -> Result<String> {
    let lines = results.lines_of("codes");
    let row = |line: &&Line| {
        let by_seed = |key: &str| {
            let numbers: Vec<String> = line.numbers(key).into_iter().map(|number| format!("{number:.1}")).collect();
            numbers.join(", ")
        };
        Ok(vec![
            line.text("head").into(),
            format!("`{}`", line.text("output")),
            line.text("table").into(),
            count(need(line, "codes")?),
            format!("{:.2}", need(line, "codes_per_word")?),
            count(need(line, "parameters")?),
            by_seed("first_epoch"),
            by_seed("second_epoch"),
        ])
    };
    let rows = lines.iter().map(row).collect::<Result<_>>()?;
    let header =
        "| head | `--output` | table | ids | per word | parameters | validation perplexity, epoch 1 | epoch 2 |";
    Ok(markdown(header, rows) + &source(&lines, false))
}

/// Makes the table of translation with mixtures over words, pieces and codes.
pub(crate) fn fast_mos(results: &Results) -> Result<String> {
    let lines = results.lines_of("fast-mos");
    let row = |line: &&Line| {
        let optional =
            |key, digits: usize| line.number(key).map_or(String::new(), |number| format!("{number:.digits$}"));
        Ok(vec![
            line.text("output").into(),
            count(need(line, "components")?),
            count(need(line, "vocab")?),
            count(need(line, "parameters")?),
            optional("seconds_per_batch", 3),
            optional("peak_mib", 0),
            optional("valid_perplexity", 2),
            optional("bleu", 1),
        ])
    };
    let rows = lines.iter().map(row).collect::<Result<_>>()?;
    let header = "| target tokens | K | ids | parameters | s/batch | peak MiB | perplexity per word | BLEU |";
    Ok(markdown(header, rows) + &source(&lines, true))
}

/// Makes the table of assignments of words to the cells of a table.
pub(crate) fn assignment(results: &Results) -> Result<String> {
    let lines = results.lines_of("assignment");
    let row = |line: &&Line| {
        let gap = line.number("gap_percent").map_or(String::new(), |percent| format!("{percent:.1}%"));
        let [shape, implementation] = ["shape", "implementation"].map(|key| line.text(key).to_owned());
        Ok(vec![shape, implementation, digits(need(line, "seconds")?) + " s", gap])
    };
    let rows = lines.iter().map(row).collect::<Result<_>>()?;
    Ok(markdown("| words and cells | assignment | time | above the least cost |", rows) + &source(&lines, true))
}
