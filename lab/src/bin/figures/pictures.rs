//! The pictures, as SVG: bars of a training step beside other implementations, and the heads' validation curves.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::format::*;
use crate::results::{Line, Result, Results};
use crate::runs;
use crate::tables::{beside, decoder_gradient_mib};

const WIDTH: i32 = 800;
/// The height of a bar and the space below it.
const ROW: i32 = 27;
const INK: RGBColor = RGBColor(31, 35, 40);
const GREY: RGBColor = RGBColor(89, 99, 110);
/// Where the axes of a chart begin.
const LEFT: i32 = 70;
const TOP: i32 = 102;
const PALE: RGBColor = RGBColor(225, 228, 232);
/// Some of Okabe and Ito's colours, which colour-blind readers tell apart.
const BLUE: RGBColor = RGBColor(0, 114, 178);
const OTHERS: RGBColor = RGBColor(160, 169, 179);
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

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Pixels of a font, its weight, and the side of the text where its anchor lies.
#[derive(Clone, Copy)]
struct Font(f64, FontStyle, HPos);

const TITLE: Font = Font(18.0, FontStyle::Bold, HPos::Left);
const HEADING: Font = Font(14.0, FontStyle::Bold, HPos::Left);
const SMALL: Font = Font(12.0, FontStyle::Normal, HPos::Left);
const TEXT: Font = Font(13.0, FontStyle::Normal, HPos::Left);
const RIGHT_ALIGNED: Font = Font(12.0, FontStyle::Normal, HPos::Right);
const CENTERED: Font = Font(12.0, FontStyle::Normal, HPos::Center);

fn text(area: &Area, text: &str, at: (i32, i32), font: Font, color: RGBColor) -> Result<()> {
    // plotters divides sizes by this.
    const SCALE: f64 = 1.24;
    let style = TextStyle::from(("sans-serif", font.0 * SCALE, font.1).into_font());
    area.draw(&Text::new(text.to_owned(), at, style.color(&color).pos(Pos::new(font.2, VPos::Center))))?;
    Ok(())
}

fn titles(area: &Area, title: &str, subtitle: &str) -> Result<()> {
    text(area, title, (20, 26), TITLE, INK)?;
    text(area, subtitle, (20, 50), TEXT, GREY)
}

/// Draws a line from the left axis to `right`, and its value beside it.
fn level(area: &Area, right: i32, y: i32, value: &str) -> Result<()> {
    area.draw(&PathElement::new([(LEFT, y), (right, y)], PALE))?;
    text(area, value, (LEFT - 8, y), RIGHT_ALIGNED, GREY)
}

/// Draws on a white ground of the given height.
fn svg(height: i32, draw: impl FnOnce(&Area) -> Result<()>) -> Result<String> {
    let mut output = String::new();
    {
        let area = SVGBackend::with_string(&mut output, (WIDTH as u32, height as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        draw(&area)?;
        area.present()?;
    }
    Ok(output)
}

/// Draws the time and the memory of a training step, mos-head beside the others, at two shapes.
pub(crate) fn step(results: &Results) -> Result<String> {
    let panels = [
        ("Penn Treebank model", beside(results, "ptb", 840.0)?),
        ("Large language model", beside(results, "llm", 2048.0)?),
    ];
    let all: Vec<&Line> = panels.iter().flat_map(|(_, lines)| lines.iter().copied()).collect();
    let processor = all[0].text("processor");
    let library = all.iter().map(|line| line.text("library")).find(|library| !library.is_empty()).unwrap_or("");
    let height = 84 + panels.len() as i32 * 76 + all.len() as i32 * ROW + 30;
    svg(height, |area| {
        let subtitle = format!("on {processor}; {library}; shorter is better");
        titles(area, "One training step of the output layer: loss and all gradients, f32", &subtitle)?;
        let mut top = 84;
        let mut gradient = None;
        for (name, lines) in &panels {
            let (positions, vocab) = (need(lines[0], "positions")?, count(need(lines[0], "vocab")?));
            let sizes = format!("{} over {vocab} ids, d = {}", softmaxes(lines[0])?, need(lines[0], "context")?);
            text(area, &format!("{name}: {positions} positions, {sizes}"), (20, top), HEADING, INK)?;
            text(area, "time", (TIME.left, top + 23), SMALL, GREY)?;
            text(area, "memory beyond parameters and inputs", (MEMORY.left, top + 23), SMALL, GREY)?;
            let first = top + 36;
            for (i, line) in lines.iter().enumerate() {
                let middle = first + i as i32 * ROW + ROW / 2;
                let font = Font(13.0, weight(i), HPos::Right);
                text(area, &implementation(line), (TIME.left - 10, middle), font, INK)?;
            }
            let panel_gradient = decoder_gradient_mib(lines[0], lines[0])?;
            TIME.bars(area, lines, "seconds", first, None, |seconds| digits(seconds) + " s")?;
            MEMORY.bars(area, lines, "extra_mib", first, panel_gradient, |mib| format!("{mib:.0} MiB"))?;
            top = first + lines.len() as i32 * ROW + 40;
            gradient = gradient.or(panel_gradient);
        }
        if let Some(mib) = gradient {
            let note = format!("Of this memory, {mib:.0} MiB (up to the white line) are the decoder's gradient.");
            text(area, &note, (20, top - 12), SMALL, GREY)?;
        }
        text(area, source(&all, false).trim().trim_matches('*'), (20, top + 10), SMALL, GREY)?;
        Ok(())
    })
}

/// A column of bars.
struct Column {
    left: i32,
    /// The length of the longest bar.
    length: i32,
}

const TIME: Column = Column { left: 330, length: 95 };
const MEMORY: Column = Column { left: 552, length: 105 };

impl Column {
    /// Draws bars from `top` on, each with its value and its ratio to the first. A white line ends a part of each bar.
    fn bars(
        &self,
        area: &Area,
        lines: &[&Line],
        key: &str,
        top: i32,
        part: Option<f64>,
        label: fn(f64) -> String,
    ) -> Result<()> {
        let values: Vec<f64> = lines.iter().filter_map(|line| line.number(key)).collect();
        if values.len() < lines.len() {
            return Err(format!("a line without a number under \"{key}\"").into());
        }
        let most = values.iter().copied().fold(0.0, f64::max);
        for (i, &value) in values.iter().enumerate() {
            let middle = top + i as i32 * ROW + ROW / 2;
            let end = self.left + (f64::from(self.length) * value / most).round().max(2.0) as i32;
            let color = if i == 0 { BLUE } else { OTHERS };
            area.draw(&Rectangle::new([(self.left, middle - 9), (end, middle + 9)], color.filled()))?;
            if let Some(part) = part {
                let x = self.left + (f64::from(self.length) * part / most).round() as i32;
                area.draw(&PathElement::new([(x, middle - 9), (x, middle + 9)], WHITE.stroke_width(2)))?;
            }
            let ratio = value / values[0];
            let label = match i {
                0 => label(value),
                _ if ratio < 9.95 => format!("{} ({ratio:.1}×)", label(value)),
                _ => format!("{} ({ratio:.0}×)", label(value)),
            };
            text(area, &label, (end + 6, middle), Font(13.0, weight(i), HPos::Left), INK)?;
        }
        let bottom = top + lines.len() as i32 * ROW;
        area.draw(&PathElement::new([(self.left, top), (self.left, bottom)], GREY))?;
        Ok(())
    }
}

/// Returns the weight of the font of a row. The first row is mos-head's.
fn weight(row: usize) -> FontStyle {
    if row == 0 {
        FontStyle::Bold
    } else {
        FontStyle::Normal
    }
}

fn implementation(line: &Line) -> String {
    match line.text("implementation") {
        "composed of candle operations" => "candle, composed operations".into(),
        // The subtitle names PyTorch.
        other => other.replace("PyTorch, linear", "linear"),
    }
}

/// Draws the validation NLL of the three heads after each epoch, above the entropy of the language.
pub(crate) fn curves(results: &Results) -> Result<String> {
    const HEIGHT: i32 = 430;
    const RIGHT: i32 = WIDTH - 250;
    const BOTTOM: i32 = HEIGHT - 58;
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
        end_labels(area, RIGHT + 12, y, ends)
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
        // There is no room for the numbers of fewer.
        for (positions, _) in curves[0].1.iter().filter(|(positions, _)| 8.0 * positions >= most) {
            text(area, &count(*positions), (x(*positions), BOTTOM + 16), CENTERED, GREY)?;
        }
        text(area, "positions", ((LEFT + RIGHT) / 2, BOTTOM + 38), CENTERED, GREY)?;
        let mut ends = vec![];
        for (i, (name, points)) in curves.iter().enumerate() {
            let color = if i == 0 { BLUE } else { OTHERS };
            let pixels: Vec<_> = points.iter().map(|&(positions, gib)| (x(positions), y(gib))).collect();
            area.draw(&PathElement::new(pixels.clone(), color.stroke_width(3)))?;
            for at in pixels {
                area.draw(&Circle::new(at, 4, color.filled()))?;
            }
            let (_, last) = points[points.len() - 1];
            ends.push((last, format!("{name}: {last:.1} GiB"), if i == 0 { BLUE } else { GREY }));
        }
        end_labels(area, RIGHT + 12, y, ends)?;
        text(area, source(&lines, true).trim().trim_matches('*'), (20, HEIGHT - 16), SMALL, GREY)?;
        Ok(())
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
        text(area, source(&used, true).trim().trim_matches('*'), (20, HEIGHT - 16), SMALL, GREY)?;
        Ok(())
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
    const HEIGHT: i32 = 400;
    const RIGHT: i32 = WIDTH - 260;
    const BOTTOM: i32 = HEIGHT - 58;
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
        Ok(())
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
