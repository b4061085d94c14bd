//! Curves: the heads' validation NLL, memory by positions, equal time, singular values.

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use crate::drawing::*;
use crate::format::*;
use crate::results::{Result, Results};
use crate::runs;

const HEADS: [(&str, RGBColor); 3] =
    [("softmax", RGBColor(213, 94, 0)), ("moc", RGBColor(0, 158, 115)), ("mos", RGBColor(0, 114, 178))];

const SYSTEMS: [(&str, RGBColor); 6] = [
    HEADS[0],
    HEADS[1],
    HEADS[2],
    ("sampled", RGBColor(204, 121, 167)),
    ("adaptive", RGBColor(230, 159, 0)),
    ("codes", RGBColor(86, 180, 233)),
];

/// Draws the validation NLL of the three heads after each epoch, above the entropy of the language.
pub(crate) fn curves(results: &Results) -> Result<String> {
    const HEIGHT: i32 = 448;
    const RIGHT: i32 = WIDTH - 250;
    const BOTTOM: i32 = HEIGHT - 76;
    let lines = results.lines_of("curves");
    let entropy = lines.iter().find_map(|line| line.number("entropy_nats")).ok_or("no entropy of the language")?;
    let mut curves = vec![];
    for (head, color) in HEADS {
        let mut points = vec![];
        for line in lines.iter().filter(|line| line.is("head", head)) {
            points.push(line.number("epoch").zip(line.number("valid_nll")).ok_or("no epoch or no NLL")?);
        }
        curves.push((head, color, points));
    }
    let all = || curves.iter().flat_map(|(_, _, points)| points.iter().copied());
    let epochs = all().map(|(epoch, _)| epoch).fold(1.0, f64::max);
    let highest = all().map(|(_, nll)| nll).fold(entropy, f64::max);
    // Fifths of a nat around all values.
    let (low, high) = ((entropy * 5.0).floor() as i32, (highest * 5.0).ceil() as i32);
    let (bottom, top) = (f64::from(low) / 5.0, f64::from(high) / 5.0);
    let x = |epoch: f64| {
        LEFT + 24 + (f64::from(RIGHT - LEFT - 24) * (epoch - 1.0) / (epochs - 1.0).max(1.0)).round() as i32
    };
    let y = |nll: f64| BOTTOM - (f64::from(BOTTOM - TOP) * (nll - bottom) / (top - bottom)).round() as i32;

    svg(HEIGHT, |area| {
        let vocab = count(need(lines[0], "vocab")?);
        let subtitle = format!("LSTM language model on the built-in language of {vocab} ids, whose entropy is known");
        titles(area, "Three output layers at equal size", &subtitle)?;
        for value in (low..=high).map(|tick| f64::from(tick) / 5.0) {
            level(area, RIGHT, y(value), &format!("{value:.1}"))?;
        }
        for epoch in 1..=epochs as i32 {
            text(area, &epoch.to_string(), (x(f64::from(epoch)), BOTTOM + 16), CENTERED, GREY)?;
        }
        text(area, "validation NLL (nats per position)", (20, TOP - 20), SMALL, GREY)?;
        text(area, "epoch", ((LEFT + RIGHT) / 2, BOTTOM + 38), CENTERED, GREY)?;

        let mut start = LEFT;
        while start < RIGHT {
            let end = (start + 7).min(RIGHT);
            area.draw(&PathElement::new([(start, y(entropy)), (end, y(entropy))], INK.stroke_width(1)))?;
            start += 12;
        }
        let mut ends = vec![(entropy, format!("entropy of the language {entropy:.3}"), INK)];
        for (head, color, points) in &curves {
            let pixels: Vec<_> = points.iter().map(|&(epoch, nll)| (x(epoch), y(nll))).collect();
            area.draw(&PathElement::new(pixels.clone(), color.stroke_width(3)))?;
            for &at in &pixels {
                marker(area, head, at, *color)?;
            }
            ends.extend(points.last().map(|(_, nll)| (*nll, format!("{} {nll:.3}", head_name(head)), *color)));
        }
        end_labels(area, RIGHT + 12, y, ends)?;
        origin(area, &lines, false, HEIGHT - 16)
    })
}

/// Names of curves beside the values at their ends. Labels that would overlap stand a line apart, about the middle of
/// their values.
fn end_labels(area: &Area, x: i32, y: impl Fn(f64) -> i32, mut ends: Vec<(f64, String, RGBColor)>) -> Result<()> {
    const LINE: i32 = 18;
    ends.sort_by(|a, b| b.0.total_cmp(&a.0));
    // Groups of labels a line apart: the number of labels, and the sum of where each would have the group begin.
    let mut groups: Vec<(i32, i32)> = vec![];
    for (value, _, _) in &ends {
        let mut last = (1, y(*value));
        while let Some(&(count, sum)) = groups.last() {
            if last.1 / last.0 >= sum / count + LINE * count {
                break;
            }
            groups.pop();
            last = (count + last.0, sum + last.1 - LINE * count * last.0);
        }
        groups.push(last);
    }
    let places = groups.iter().flat_map(|&(count, sum)| (0..count).map(move |i| sum / count + LINE * i));
    for ((_, label, color), place) in ends.iter().zip(places) {
        text(area, label, (x, place), Font(13.0, FontStyle::Bold, HPos::Left), *color)?;
    }
    Ok(())
}

/// Draws the memory of a training step against the number of positions, mos-head beside the others; `None` if it was
/// not measured.
pub(crate) fn memory(results: &Results) -> Result<Option<String>> {
    const HEIGHT: i32 = 430;
    const RIGHT: i32 = WIDTH - 270;
    const BOTTOM: i32 = HEIGHT - 76;
    let lines = results.lines_of("memory");
    let Some(first) = lines.first() else { return Ok(None) };
    let mut curves: Vec<(String, Vec<(f64, f64)>)> = vec![];
    for line in &lines {
        // Its chunks are longer with more positions.
        let name = implementation(line).split(" (").next().unwrap_or_default().to_owned();
        let point = (need(line, "positions")?, need(line, "extra_mib")? / 1024.0);
        match curves.iter_mut().find(|(other, _)| *other == name) {
            Some((_, points)) => points.push(point),
            None => curves.push((name, vec![point])),
        }
    }
    let all = || curves.iter().flat_map(|(_, points)| points.iter().copied());
    let most = all().map(|(positions, _)| positions).fold(1.0, f64::max);
    let highest = all().map(|(_, gib)| gib).fold(1.0, f64::max).ceil();
    let x = |positions: f64| LEFT + (f64::from(RIGHT - LEFT) * positions / most).round() as i32;
    let y = |gib: f64| BOTTOM - (f64::from(BOTTOM - TOP) * gib / highest).round() as i32;
    let picture = svg(HEIGHT, |area| {
        let sizes =
            format!("{} over {} ids, d = {}", softmaxes(first)?, count(need(first, "vocab")?), need(first, "context")?);
        let subtitle = format!("{sizes}; beyond parameters and inputs, with the decoder's gradient");
        titles(area, "Memory of a training step of the output layer, f32", &subtitle)?;
        text(area, "GiB", (20, TOP - 20), SMALL, GREY)?;
        let step = (highest / 6.0).ceil().max(1.0);
        for tick in (0..).map(|i| f64::from(i) * step).take_while(|gib| *gib <= highest) {
            level(area, RIGHT, y(tick), &format!("{tick}"))?;
        }
        // A number that would touch the one before it is left out; its tick stays.
        let mut free = i32::MIN;
        for (positions, _) in &curves[0].1 {
            let (at, label) = (x(*positions), count(*positions));
            area.draw(&PathElement::new([(at, BOTTOM), (at, BOTTOM + 5)], GREY))?;
            let half = 4 * label.len() as i32 + 3;
            if at - half > free {
                text(area, &label, (at, BOTTOM + 16), CENTERED, GREY)?;
                free = at + half;
            }
        }
        text(area, "positions", ((LEFT + RIGHT) / 2, BOTTOM + 38), CENTERED, GREY)?;
        let mut ends = vec![];
        for (i, (name, points)) in curves.iter().enumerate() {
            let color = [OURS, GREY, OTHERS][i.min(2)];
            let pixels: Vec<_> = points.iter().map(|&(positions, gib)| (x(positions), y(gib))).collect();
            area.draw(&PathElement::new(pixels.clone(), color.stroke_width(3)))?;
            for at in pixels {
                area.draw(&Circle::new(at, 4, color.filled()))?;
            }
            let (_, last) = points[points.len() - 1];
            ends.push((last, format!("{name}: {last:.1} GiB"), if i == 0 { OURS } else { GREY }));
        }
        end_labels(area, RIGHT + 12, y, ends)?;
        origin(area, &lines, true, HEIGHT - 16)
    })?;
    Ok(Some(picture))
}

/// Draws the perplexity against minutes of equal time, for every system that was trained so. Returns `None` if none
/// was. The axes hold every evaluation.
pub(crate) fn equal_time(results: &Results) -> Result<Option<String>> {
    const HEIGHT: i32 = 500;
    const RIGHT: i32 = WIDTH - 296;
    const BOTTOM: i32 = HEIGHT - 76;
    let (systems, used) = runs::equal_time(results)?;
    if systems.is_empty() {
        return Ok(None);
    }
    let longest = runs::MINUTES[runs::MINUTES.len() - 1];
    let all = || systems.iter().flat_map(|system| system.points.iter().copied());
    let (first, last) = bounds(all().map(|(minutes, _)| minutes));
    let (lowest, highest) = bounds(all().map(|(_, value)| value));
    let (lowest, highest) = ((lowest / 10.0).floor() * 10.0, (highest / 50.0).ceil() * 50.0);
    // Both axes are logarithmic.
    let x = |minutes: f64| LEFT + 8 + (f64::from(RIGHT - LEFT - 16) * part(minutes, first, last)).round() as i32;
    let y = |value: f64| BOTTOM - (f64::from(BOTTOM - TOP) * part(value, lowest, highest)).round() as i32;
    let picture = svg(HEIGHT, |area| {
        let subtitle = "About 5 million parameters each; minutes of one core: steps done times the seconds of a step";
        titles(area, "Equal time on Penn Treebank", subtitle)?;
        text(area, "validation perplexity", (20, TOP - 20), SMALL, GREY)?;
        text(area, &format!("at {longest} minutes (MoS: mixture of softmaxes)"), (RIGHT + 12, TOP - 20), SMALL, GREY)?;
        let values = [100.0, 125.0, 150.0, 200.0, 250.0, 300.0, 400.0, 500.0, 600.0, 800.0, 1000.0];
        for value in values.into_iter().filter(|value| (lowest..=highest).contains(value)) {
            level(area, RIGHT, y(value), &format!("{value}"))?;
        }
        for minutes in [1.0, 2.0, 5.0, 10.0, 20.0, 40.0].into_iter().filter(|minutes| (first..=last).contains(minutes))
        {
            area.draw(&PathElement::new([(x(minutes), TOP), (x(minutes), BOTTOM)], PALE))?;
            text(area, &format!("{minutes}"), (x(minutes), BOTTOM + 16), CENTERED, GREY)?;
        }
        text(area, "minutes", ((LEFT + RIGHT) / 2, BOTTOM + 38), CENTERED, GREY)?;
        let mut ends = vec![];
        for system in &systems {
            let color = SYSTEMS.iter().find(|(name, _)| *name == system.system).map_or(INK, |(_, color)| *color);
            let pixels: Vec<_> = system.points.iter().map(|(minutes, value)| (x(*minutes), y(*value))).collect();
            area.draw(&PathElement::new(pixels.clone(), color.stroke_width(2)))?;
            for &at in &pixels {
                area.draw(&Circle::new(at, 3, color.filled()))?;
            }
            let name = runs::system_name(system.system).replace("mixture of softmaxes", "MoS");
            let label = format!("{} {name}", runs::within(&system.points, longest));
            ends.extend(system.points.iter().rfind(|(at, _)| *at <= longest).map(|(_, value)| (*value, label, color)));
        }
        end_labels(area, RIGHT + 12, y, ends)?;
        origin(area, &used, true, HEIGHT - 16)
    })?;
    Ok(Some(picture))
}

/// Returns the smallest and the largest number.
fn bounds(numbers: impl Iterator<Item = f64>) -> (f64, f64) {
    numbers.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), number| (low.min(number), high.max(number)))
}

/// Returns where a number lies on a logarithmic axis, from 0 to 1.
fn part(number: f64, low: f64, high: f64) -> f64 {
    (number / low).ln() / (high / low).ln()
}

/// Draws the distribution of the singular values of the log-probabilities (Yang et al., 2018, figure 1), of the models
/// that are measured first.
pub(crate) fn rank(results: &Results) -> Result<String> {
    const HEIGHT: i32 = 418;
    const RIGHT: i32 = WIDTH - 260;
    const BOTTOM: i32 = HEIGHT - 76;
    let mut lines = results.lines_of("bottleneck");
    let shape = lines.first().map_or("", |line| line.text("shape"));
    lines.retain(|line| line.is("shape", shape));
    let (contexts, vocab) = match lines.first() {
        Some(line) => (count(need(line, "contexts")?), count(need(line, "vocab")?)),
        None => return Err("no bottleneck was measured".into()),
    };
    let x = |part: f64| LEFT + (f64::from(RIGHT - LEFT) * part).round() as i32;
    let y = |percent: f64| BOTTOM - (f64::from(BOTTOM - TOP) * percent / 100.0).round() as i32;
    svg(HEIGHT, |area| {
        let subtitle = format!("{shape}: {contexts} contexts, {vocab} ids");
        titles(area, "Singular values of the log-probabilities", &subtitle)?;
        text(area, "singular values below, %", (20, TOP - 20), SMALL, GREY)?;
        for percent in [0.0, 25.0, 50.0, 75.0, 100.0] {
            level(area, RIGHT, y(percent), &format!("{percent}"))?;
        }
        for decade in [16, 12, 8, 4, 0] {
            let label = if decade == 0 { "1".into() } else { format!("1e-{decade}") };
            text(area, &label, (x(1.0 - f64::from(decade) / 16.0), BOTTOM + 16), CENTERED, GREY)?;
        }
        text(area, "singular value / the largest one", ((LEFT + RIGHT) / 2, BOTTOM + 38), CENTERED, GREY)?;
        for (i, line) in lines.iter().enumerate() {
            let color = HEADS.iter().find(|(head, _)| line.is("head", head)).map_or(INK, |(_, color)| *color);
            let percents = line.numbers("singular_values_below_percent");
            let last = percents.len().max(2) - 1;
            let points = percents.iter().enumerate().map(|(i, &percent)| (x(i as f64 / last as f64), y(percent)));
            // A curve that another one covers is wider, and shows on both of its sides.
            let width = 3 + 2 * (lines.len() - 1 - i) as u32;
            area.draw(&PathElement::new(points.collect::<Vec<_>>(), color.stroke_width(width)))?;
            let label = format!("{}: rank {}", head_name(line.text("head")), count(need(line, "rank")?));
            text(area, &label, (RIGHT + 12, TOP + 8 + 22 * i as i32), Font(13.0, FontStyle::Bold, HPos::Left), color)?;
        }
        origin(area, &lines, false, HEIGHT - 16)
    })
}

/// Draws another shape for each head, for readers who see no colours.
fn marker(area: &Area, head: &str, (x, y): (i32, i32), color: RGBColor) -> Result<()> {
    match head {
        "softmax" => area.draw(&Rectangle::new([(x - 5, y - 5), (x + 5, y + 5)], color.filled()))?,
        "moc" => area.draw(&Polygon::new([(x, y - 7), (x + 7, y + 5), (x - 7, y + 5)], color.filled()))?,
        _ => area.draw(&Circle::new((x, y), 5, color.filled()))?,
    }
    Ok(())
}
