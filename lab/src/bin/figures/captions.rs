//! Captions of drawn images (`lab/run_all.sh`): a softmax and a mixture, with the image and without it.

use crate::format::*;
use crate::results::{Line, Result, Results};

/// The decoders in the order of the table, and what they see.
const SYSTEMS: [(&str, &str); 4] =
    [("softmax", "the image"), ("mos", "the image"), ("softmax", "nothing"), ("mos", "nothing")];
/// The scores of the test images with their decimals.
const SCORES: [(&str, usize); 5] = [("nll", 3), ("new_nll", 3), ("bleu_4", 1), ("cider", 1), ("right", 1)];

/// Returns the seeds of a decoder.
fn seeds_of<'a>(lines: &[&'a Line], (head, sees): (&str, &str)) -> Vec<&'a Line> {
    lines.iter().copied().filter(|line| line.is("head", head) && line.is("sees", sees)).collect()
}

/// Makes the table of NLL in nats per word, BLEU-4, CIDEr-D and the share of captions that are right.
pub(crate) fn captions(results: &Results) -> Result<String> {
    let lines = results.lines_of("captions");
    if lines.is_empty() {
        return Ok(UNMEASURED.into());
    }
    let mut rows = vec![];
    for system in SYSTEMS {
        let seeds = seeds_of(&lines, system);
        let Some(first) = seeds.first() else { continue };
        let mut row = vec![head_with_components(first)];
        row.extend([system.1.into(), format!("`{}`", first.text("setting")), count(need(first, "parameters")?)]);
        row.push(seeds.len().to_string());
        let above = |line: &&Line| Ok(need(line, "valid_perplexity")?.ln() - need(line, "floor_nll")?);
        row.push(mean_and_deviation(&seeds.iter().map(above).collect::<Result<Vec<_>>>()?, 3));
        for (key, decimals) in SCORES {
            row.push(score_over_seeds(&seeds, key, decimals)?);
        }
        rows.push(row);
    }
    let header =
        "| head | sees | best trial | parameters | seeds | validation NLL above the captions' information | test \
                  NLL | of new combinations | BLEU-4 | CIDEr-D | right, % |";
    Ok(markdown(header, rows) + &source(&lines, false))
}

/// Makes the table of BLEU-4 and CIDEr-D of the decoders that see the image.
pub(crate) fn summary(results: &Results) -> Result<String> {
    let lines = results.lines_of("captions");
    let mut parts = vec![];
    for system in &SYSTEMS[..2] {
        let seeds = seeds_of(&lines, *system);
        if seeds.is_empty() {
            return Ok("not run yet".into());
        }
        let [bleu, cider] = [score_over_seeds(&seeds, "bleu_4", 1)?, score_over_seeds(&seeds, "cider", 1)?];
        parts.push(format!("K = {} {bleu}, {cider}", short(need(seeds[0], "components")?)));
    }
    Ok(parts.join("; "))
}
