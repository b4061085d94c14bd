//! The tables of the small runs (`lab/run_all.sh`): the trials of every head, two seeds of the best, equal time.

use crate::format::*;
use crate::results::{Line, Result, Results};

/// The systems in the order of the tables.
const SYSTEMS: [&str; 6] = ["softmax", "moc", "mos", "sampled", "adaptive", "codes"];
/// The mixture and what came after it.
const SUCCESSORS: [&str; 9] =
    ["softmax", "moc", "mos", "sampled", "sigsoftmax", "mos-sigsoftmax", "mixtape", "control", "grown"];
/// Minutes of equal time.
pub(crate) const MINUTES: [f64; 3] = [10.0, 20.0, 40.0];

/// Returns the name of a system in a table or a picture.
pub(crate) fn system_name(system: &str) -> String {
    match system {
        "sampled" => "mixture of softmaxes, sampled".into(),
        "adaptive" => "adaptive, its head a mixture of softmaxes".into(),
        "codes" => "mixture of softmaxes over learned codes".into(),
        "sigsoftmax" => "softmax, sigsoftmax".into(),
        "mos-sigsoftmax" => "mixture of softmaxes, sigsoftmax".into(),
        "mixtape" => "Mixtape".into(),
        "control" => "the softmax, trained on".into(),
        "grown" => "mixture of softmaxes, grown from the softmax".into(),
        head => head_name(head).into(),
    }
}

/// Returns the systems that a figure has lines of.
fn systems<'a>(lines: &[&'a Line]) -> Vec<(&'static str, Vec<&'a Line>)> {
    let system_lines =
        |system: &str| lines.iter().copied().filter(|line| line.is("system", system)).collect::<Vec<_>>();
    SYSTEMS.into_iter().map(|system| (system, system_lines(system))).filter(|(_, lines)| !lines.is_empty()).collect()
}

fn first_of_system<'a>(lines: &[&'a Line], system: &str) -> Option<&'a Line> {
    lines.iter().copied().find(|line| line.is("system", system))
}

/// Makes the table of the seeds of the best trial of every head: mean and standard deviation.
pub(crate) fn finals(results: &Results, figure: &str, scores: &[(&str, &str)]) -> Result<String> {
    let lines = results.lines_of(figure);
    let systems = systems(&lines);
    if systems.is_empty() {
        return Ok(UNMEASURED.into());
    }
    let mut rows = vec![];
    for (system, lines) in systems {
        let decimals = if need(lines[0], "valid_perplexity")? < 10.0 { 2 } else { 1 };
        let mut row = vec![system_name(system), format!("`{}`", lines[0].text("setting"))];
        row.push(count(need(lines[0], "parameters")?));
        row.push(lines.len().to_string());
        for key in ["valid_perplexity", "test_perplexity"] {
            row.push(over_seeds(&lines, key, decimals)?);
        }
        for (key, _) in scores {
            row.push(score_over_seeds(&lines, key, 1)?);
        }
        rows.push(row);
    }
    let scores: String = scores.iter().map(|(_, name)| format!(" {name} |")).collect();
    let header =
        format!("| head | best trial | parameters | seeds | validation perplexity | test perplexity |{scores}");
    Ok(markdown(&header, rows) + &source(&lines, false))
}

/// Minutes and perplexities of a system: steps that are done times the seconds of a step on a quiet machine.
pub(crate) struct EqualTime {
    pub(crate) system: &'static str,
    pub(crate) parameters: f64,
    pub(crate) seconds: f64,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Returns every system that was trained for equal time. The mixture of softmaxes has its run of the first seed, which
/// takes longer.
pub(crate) fn equal_time(results: &Results) -> Result<(Vec<EqualTime>, Vec<&Line>)> {
    let (long, seconds) = (results.lines_of("equal-time"), results.lines_of("step-seconds"));
    let whole: Vec<_> =
        results.lines_of("ptb-small").into_iter().filter(|line| line.number("seed") == Some(1.0)).collect();
    let (mut found, mut used) = (vec![], vec![]);
    for system in SYSTEMS {
        let Some(step) = first_of_system(&seconds, system) else { continue };
        let longer = || if system == "mos" { first_of_system(&whole, system) } else { None };
        let Some(line) = first_of_system(&long, system).or_else(longer) else { continue };
        used.extend([line, step]);
        found.push(EqualTime {
            system,
            parameters: need(line, "parameters")?,
            seconds: need(step, "seconds")?,
            points: by_minutes(line, step)?,
        });
    }
    Ok((found, used))
}

/// Returns the minutes and the perplexity of each evaluation.
pub(crate) fn by_minutes(line: &Line, step: &Line) -> Result<Vec<(f64, f64)>> {
    let each = need(step, "seconds")?;
    let point = |[_, steps, perplexity]: [f64; 3]| (steps * each / 60.0, perplexity);
    Ok(line.triples("evaluations").into_iter().map(point).collect())
}

/// Returns the perplexity at the last evaluation within these minutes.
pub(crate) fn within(points: &[(f64, f64)], minutes: f64) -> String {
    let last = points.iter().rfind(|(at, _)| *at <= minutes);
    last.map_or(String::new(), |(_, value)| perplexity(*value))
}

pub(crate) fn equal_time_table(results: &Results) -> Result<String> {
    let (systems, used) = equal_time(results)?;
    if systems.is_empty() {
        return Ok(UNMEASURED.into());
    }
    let row = |system: &EqualTime| {
        let mut row = vec![system_name(system.system), count(system.parameters), digits(system.seconds)];
        row.extend(MINUTES.map(|minutes| within(&system.points, minutes)));
        row
    };
    let rows = systems.iter().map(row).collect();
    let header = "| system | parameters | seconds a step | 10 minutes | 20 minutes | 40 minutes |";
    Ok(markdown(header, rows) + &source(&used, true))
}

/// Makes the table of the mixture and its successors: seeds of the best trial after equal epochs and in the time of the
/// softmax's epochs, the time of a step, and the bottleneck of the first seed. The last two rows go on from the
/// softmax.
pub(crate) fn successors(results: &Results) -> Result<String> {
    let new = results.lines_of("successors");
    let lines: Vec<_> = results.lines_of("ptb-small").into_iter().chain(new.iter().copied()).collect();
    let (seconds, bottlenecks) = (results.lines_of("successors-seconds"), results.lines_of("successors-bottleneck"));
    let (Some(softmax), false) = (first_of_system(&lines, "softmax"), new.is_empty()) else {
        return Ok(UNMEASURED.into());
    };
    let softmax_step = first_of_system(&seconds, "softmax").ok_or("no step of the softmax was timed")?;
    let steps = softmax.triples("evaluations").last().map_or(0.0, |[_, steps, _]| *steps);
    let minutes = steps * need(softmax_step, "seconds")? / 60.0;
    let (mut rows, mut used) = (vec![], vec![]);
    for system in SUCCESSORS {
        let seeds: Vec<_> = lines.iter().copied().filter(|line| line.is("system", system)).collect();
        let Some(first) = seeds.first() else { continue };
        let step = first_of_system(&seconds, if system == "control" { "softmax" } else { system });
        let before = if system == "control" { minutes } else { 0.0 };
        let mut row = vec![system_name(system), format!("`{}`", first.text("setting"))];
        row.push(count(need(first, "parameters")?));
        for key in ["valid_perplexity", "test_perplexity"] {
            row.push(over_seeds(&seeds, key, 1)?);
        }
        row.push(match step {
            Some(step) => {
                let all = seeds.iter().map(|line| by_minutes(line, step)).collect::<Result<Vec<_>>>()?;
                let last = |points: &Vec<(f64, f64)>| points.iter().rfind(|(at, _)| *at <= before + minutes).copied();
                let found: Vec<f64> = all.iter().filter_map(last).map(|(_, perplexity)| perplexity).collect();
                if found.len() == seeds.len() {
                    mean_and_deviation(&found, 1)
                } else {
                    String::new()
                }
            }
            None => String::new(),
        });
        row.push(match step {
            Some(step) => format!("{:.2}", need(step, "seconds")? / need(softmax_step, "seconds")?),
            None => String::new(),
        });
        let bottleneck = first_of_system(&bottlenecks, system);
        row.push(bottleneck.map_or(Ok(String::new()), |line| need(line, "rank").map(count))?);
        let share = |line| need(line, "gradient_share").map(|share| format!("{:.1}%", 100.0 * share));
        row.push(bottleneck.map_or(Ok(String::new()), share)?);
        used.extend(seeds.into_iter().chain(step).chain(bottleneck));
        rows.push(row);
    }
    let header = format!(
        "| system | best trial | parameters | validation perplexity | test perplexity | validation, after {minutes:.0} \
         minutes | a step / the softmax's | rank | gradient passed on |"
    );
    Ok(markdown(&header, rows) + &source(&used, true))
}
