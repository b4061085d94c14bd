//! The tables of what the programs learn: perplexities, BLEU, and the rank of log-probabilities.

use crate::format::*;
use crate::results::{Line, Result, Results};

const HEADS: [&str; 3] = ["softmax", "moc", "mos"];
const VALIDATION: &str = "valid_perplexity_by_epoch";
const BITS: &str = "valid_bits_per_character_by_epoch";

/// Makes the table of what all three heads reach with equal numbers of parameters.
pub(crate) fn examples(results: &Results) -> Result<String> {
    type Value = fn(&[&Line]) -> Result<String>;
    let table: [(&str, &str, Value); 6] = [
        ("built-in-language", "built-in language, nats above its entropy", |lines| {
            Ok(format!("{:.3}", above_entropy(lines[0])?))
        }),
        ("penn-treebank", "Penn Treebank, validation perplexity after {} epochs", |lines| {
            spread(lines[0], "valid_perplexity", 1)
        }),
        ("ptb-small", "the same with the paper's regularisers, test perplexity after {} epochs", |lines| {
            over_seeds(lines, "test_perplexity", 1)
        }),
        ("multi30k", "Multi30k, German to English, test perplexity after {} epochs", |lines| {
            over_seeds(lines, "test_perplexity", 2)
        }),
        ("multi30k", "the same, BLEU (beam 5)", |lines| score_over_seeds(lines, "bleu", 1)),
        ("characters", "tiny Shakespeare, validation bits per character after {} epochs", |lines| {
            Ok(format!("{:.3}", last(lines[0], BITS)?))
        }),
    ];
    let mut used = vec![];
    let mut rows = vec![];
    for (figure, name, value) in table {
        let lines = results.lines_of(figure);
        let mut row = vec![name.replace("{}", &lines.first().map_or(0, |line| epochs(line)).to_string())];
        for head in HEADS {
            // Other systems of the small runs have a mixture of softmaxes too.
            let is_head = |line: &&Line| line.is("head", head) && ["", head].contains(&line.text("system"));
            let lines: Vec<_> = lines.iter().copied().filter(is_head).collect();
            if lines.is_empty() {
                return Err(format!("no {head} of {figure}").into());
            }
            row.push(value(&lines)?);
            used.extend(lines);
        }
        rows.push(row);
    }
    Ok(markdown("| | softmax | mixture of contexts | mixture of softmaxes |", rows) + &source(&used, false))
}

/// Returns the epochs that a line's model was trained for.
fn epochs(line: &Line) -> usize {
    let evaluation_count = |key| line.numbers(key).len();
    let evaluations = line.triples("evaluations");
    evaluations
        .last()
        .map_or(evaluation_count(VALIDATION).max(evaluation_count(BITS)), |[epoch, ..]| epoch.round() as usize)
}

/// Makes the table of means over the seeds. The slowdown is the time of a step over the softmax's, each in its fastest
/// run.
pub(crate) fn penn_treebank(results: &Results) -> Result<String> {
    let header =
        "| head | learning rate | dropout | contexts | validation perplexity, by epoch | at the end | slowdown |";
    let speed = |line: &Line| line.numbers("tokens_per_second").into_iter().fold(0.0, f64::max);
    let lines = results.lines_of("penn-treebank");
    let softmax = lines.first().map_or(0.0, |line| speed(line));
    let row = |line: &&Line| {
        Ok(vec![
            head_with_components(line),
            need(line, "lr")?.to_string(),
            need(line, "dropout")?.to_string(),
            if line.is("head", "softmax") { String::new() } else { line.text("activation").into() },
            each(line, VALIDATION, perplexity),
            spread(line, "valid_perplexity", 1)?,
            format!("{:.1}", softmax / speed(line)),
        ])
    };
    let rows = lines.iter().map(row).collect::<Result<_>>()?;
    Ok(markdown(header, rows) + &source(&lines, false))
}

/// Makes the table of the paper's recipe without one of its parts, after the recipe itself.
pub(crate) fn regularisers(results: &Results) -> Result<String> {
    let lines = results.lines_of("regularisers");
    let whole = last(lines.first().ok_or("no line of the whole recipe")?, VALIDATION)?;
    let row = |line: &&Line| {
        let found = last(line, VALIDATION)?;
        let lowest = line.numbers(VALIDATION).into_iter().fold(f64::INFINITY, f64::min);
        let change = if line.text("without").is_empty() {
            String::new()
        } else {
            format!("{:+.1}%", 100.0 * (found / whole - 1.0))
        };
        Ok(vec![line.text("recipe").into(), perplexity(found), change, perplexity(lowest)])
    };
    let rows = lines.iter().map(row).collect::<Result<_>>()?;
    Ok(markdown("| recipe | after the last epoch | change | lowest |", rows) + &source(&lines, false))
}

/// Makes the table of the heads on cheaper vocabularies. At equal time: the last epoch that ends within the time of the
/// first two with the whole vocabulary.
pub(crate) fn outputs(results: &Results) -> Result<String> {
    let lines = results.lines_of("outputs");
    let row = |line: &&Line| {
        let whole = lines.iter().find(|other| other.is("output", "full") && other.text("head") == line.text("head"));
        let whole = need(whole.ok_or("no line of the whole vocabulary")?, "positions_per_second")?;
        let speed = need(line, "positions_per_second")?;
        let perplexities = line.numbers(VALIDATION);
        let epochs = ((2.0 * speed / whole + 0.01) as usize).min(perplexities.len());
        let at_equal_time = match epochs.checked_sub(1) {
            Some(last) => format!("{} ({epochs})", perplexity(perplexities[last])),
            None => String::new(),
        };
        let units = format!("{}", need(line, "hidden")?);
        let parameters = count(need(line, "parameters")?);
        let [head, output] = [line.text("head").into(), format!("`{}`", line.text("output"))];
        Ok(vec![head, output, units, parameters, count(speed), each(line, VALIDATION, perplexity), at_equal_time])
    };
    let rows = lines.iter().map(row).collect::<Result<_>>()?;
    let header =
        "| head | `--output` | units | parameters | positions per second | validation perplexity, by epoch | at \
                  equal time (epochs) |";
    Ok(markdown(header, rows) + &source(&lines, false))
}

/// Makes the table of the rank of the log-probabilities of trained models.
pub(crate) fn bottleneck(results: &Results) -> Result<String> {
    let lines = results.lines_of("bottleneck");
    let mut rows = vec![];
    for (i, line) in lines.iter().enumerate() {
        let same = i > 0 && lines[i - 1].text("shape") == line.text("shape");
        let optional = |key| line.number(key).map_or(String::new(), |value| format!("{value:.2}"));
        let (rank, most) = (need(line, "rank")?, need(line, "contexts")?.min(need(line, "vocab")?));
        rows.push(vec![
            if same { String::new() } else { line.text("shape").into() },
            head_name(line.text("head")).into(),
            count(need(line, "context")?),
            if rank == most { format!("{} (full)", count(rank)) } else { count(rank) },
            format!("{:.2}", need(line, "pairwise_kl_nats")?),
            optional("effective_priors"),
            optional("effective_posteriors"),
            perplexity(need(line, "valid_perplexity")?),
            perplexity(need(line, "valid_perplexity_at_softmax_rank")?),
        ]);
    }
    let header = "| | head | d | rank | pairwise KL, nats | priors | posteriors | perplexity | at rank d + 2 |";
    Ok(markdown(header, rows) + &source(&lines, false))
}

fn above_entropy(line: &Line) -> Result<f64> {
    Ok(need(line, "valid_nll")? - need(line, "entropy_nats")?)
}

fn last(line: &Line, key: &str) -> Result<f64> {
    line.numbers(key).last().copied().ok_or_else(|| format!("no numbers under \"{key}\"").into())
}

/// Returns the mean and standard deviation of a line's numbers, one for each seed.
fn spread(line: &Line, key: &str, decimals: usize) -> Result<String> {
    let values = line.numbers(key);
    if values.len() < 2 {
        return Err(format!("fewer than two numbers under \"{key}\"").into());
    }
    Ok(mean_and_deviation(&values, decimals))
}

fn each(line: &Line, key: &str, format: fn(f64) -> String) -> String {
    line.numbers(key).into_iter().map(format).collect::<Vec<_>>().join(", ")
}
