//! Images with the captions found for them, as an SVG file.

use crate::data::{Dataset, Example};
use crate::report::{spread, Row};
use lab::{show::plot::COLORS, Result};
use plotters::prelude::*;
use std::path::Path;

/// The side of a pixel, and the height of a line of text.
const PIXEL: i32 = 3;
const LINE: i32 = 20;
const MARGIN: i32 = 16;

/// Fails if the file cannot be written.
pub(crate) fn check(path: &Path) -> Result<()> {
    std::fs::write(path, "").map_err(|error| format!("--picture {} cannot be written: {error}", path.display()).into())
}

/// Draws `count` evenly spaced examples, each with the captions of all heads beside it.
pub(crate) fn draw(path: &Path, dataset: &Dataset, examples: &[Example], count: usize, rows: &[Row]) -> Result<()> {
    svg(path, dataset, examples, count, rows).map_err(|error| format!("cannot draw {}: {error}", path.display()).into())
}

fn svg(path: &Path, dataset: &Dataset, examples: &[Example], count: usize, rows: &[Row]) -> Result<()> {
    let (_, height, width, _) = dataset.images.dims4()?;
    let (height, width) = (PIXEL * height as i32, PIXEL * width as i32);
    let chosen = spread(count, examples.len());
    let total = MARGIN + chosen.len() as i32 * (height + MARGIN);
    let area = SVGBackend::new(path, (width as u32 + 860, total as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    let style = ("sans-serif", 15).into_text_style(&area);
    for (y, i) in (0..).map(|row| MARGIN + row * (height + MARGIN)).zip(chosen) {
        let picture = dataset.images.get(examples[i].image)?.to_vec3::<u8>()?;
        for (top, line) in (y..).step_by(PIXEL as usize).zip(picture) {
            for (left, pixel) in (MARGIN..).step_by(PIXEL as usize).zip(line) {
                let [red, green, blue] = pixel[..] else { return Err("a pixel has three channels".into()) };
                let corners = [(left, top), (left + PIXEL, top + PIXEL)];
                area.draw(&Rectangle::new(corners, RGBColor(red, green, blue).filled()))?;
            }
        }
        let left = 2 * MARGIN + width;
        let found = rows.iter().zip(COLORS.iter().cycle());
        let found = found.filter_map(|(row, color)| Some((row.kind.name(), row.more.as_ref()?, color)));
        for (line, (name, trained, color)) in (0..).zip(found) {
            area.draw_text(name, &style.color(color), (left, y + line * LINE))?;
            area.draw_text(&trained.scores.found[i], &style, (left + 70, y + line * LINE))?;
        }
        if let Some(reference) = examples[i].captions.first() {
            let line = y + rows.len() as i32 * LINE;
            area.draw_text("reference", &style.color(&BLACK.mix(0.5)), (left, line))?;
            area.draw_text(reference, &style.color(&BLACK.mix(0.5)), (left + 70, line))?;
        }
    }
    area.present()?;
    Ok(())
}
