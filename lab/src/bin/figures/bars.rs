//! The bars of a training step, beside other implementations.

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use crate::drawing::*;
use crate::format::*;
use crate::results::{Line, Result, Results};
use crate::tables::{beside, decoder_gradient_mib};

/// The height of a bar and the space below it.
const ROW: i32 = 27;

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
            let note = format!("The decoder's gradient is {mib:.0} MiB of this memory (up to the white line).");
            text(area, &note, (20, top - 12), SMALL, GREY)?;
        }
        origin(area, &all, false, top + 10)
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
            let color = if i == 0 { OURS } else { OTHERS };
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
