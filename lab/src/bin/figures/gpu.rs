//! The tables of a training step on a GPU, from the lines that `scripts/gpu.sh record` writes.

use crate::format::*;
use crate::results::{Line, Result, Results};

/// Writes milliseconds, or nothing.
fn milliseconds(line: &Line, key: &str) -> String {
    line.number(key).map_or(String::new(), |seconds| format!("{} ms", digits(1e3 * seconds)))
}

/// Makes the table of one step, this crate first at each shape and dtype, then its peers from the fastest on.
pub(crate) fn steps(results: &Results) -> Result<String> {
    let mut lines = results.lines_of("gpu-step");
    if lines.is_empty() {
        return Ok(UNMEASURED.into());
    }
    let place =
        |line: &Line| (line.text("dtype").to_owned(), place_of_shape(line), !line.is("implementation", "mos-head"));
    lines.sort_by(|a, b| {
        let seconds = |line: &Line| line.number("seconds").unwrap_or(0.0);
        place(a).cmp(&place(b)).then(seconds(a).total_cmp(&seconds(b)))
    });
    let row = |line: &&Line| {
        let ratio = line.number("mixture_over_products").map_or(String::new(), digits);
        Ok(vec![
            format!("{}, {}", line.text("shape"), line.text("dtype")),
            line.text("implementation").into(),
            milliseconds(line, "seconds"),
            milliseconds(line, "pipelined_seconds"),
            format!("{} MiB", count(need(line, "extra_mib")?)),
            milliseconds(line, "mixture_seconds"),
            milliseconds(line, "products_seconds"),
            ratio,
        ])
    };
    let rows = lines.iter().map(row).collect::<Result<_>>()?;
    let header = "| shape | implementation | step | of 20 | extra | mixture | products | mixture / products |";
    Ok(markdown(header, rows) + &source(&lines, true))
}

/// Makes the table of a step with chunks of other sizes.
pub(crate) fn chunks(results: &Results) -> Result<String> {
    let mut lines = results.lines_of("gpu-chunks");
    if lines.is_empty() {
        return Ok(UNMEASURED.into());
    }
    lines.sort_by_key(|line| (place_of_shape(line), line.number("chunk_rows").unwrap_or(0.0) as usize));
    let row = |line: &&Line| {
        Ok(vec![
            line.text("shape").into(),
            count(need(line, "chunk_rows")?),
            milliseconds(line, "seconds"),
            format!("{} MiB", count(need(line, "extra_mib")?)),
        ])
    };
    let rows = lines.iter().map(row).collect::<Result<_>>()?;
    Ok(markdown("| shape | rows of a chunk | step | extra |", rows) + &source(&lines, true))
}
