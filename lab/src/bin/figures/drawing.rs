//! Texts and lines of the pictures, in pixels.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::format::source;
use crate::results::{Line, Result};

pub(crate) const WIDTH: i32 = 800;
pub(crate) const INK: RGBColor = RGBColor(31, 35, 40);
pub(crate) const GREY: RGBColor = RGBColor(89, 99, 110);
/// Where the axes of a chart begin.
pub(crate) const LEFT: i32 = 70;
pub(crate) const TOP: i32 = 102;
pub(crate) const PALE: RGBColor = RGBColor(225, 228, 232);
/// The colour of this crate: one of Okabe and Ito's, which colour-blind readers tell apart.
pub(crate) const OURS: RGBColor = RGBColor(0, 114, 178);
pub(crate) const OTHERS: RGBColor = RGBColor(160, 169, 179);

pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Pixels of a font, its weight, and the side of the text where its anchor lies.
#[derive(Clone, Copy)]
pub(crate) struct Font(pub(crate) f64, pub(crate) FontStyle, pub(crate) HPos);

pub(crate) const TITLE: Font = Font(18.0, FontStyle::Bold, HPos::Left);
pub(crate) const HEADING: Font = Font(14.0, FontStyle::Bold, HPos::Left);
pub(crate) const SMALL: Font = Font(12.0, FontStyle::Normal, HPos::Left);
pub(crate) const TEXT: Font = Font(13.0, FontStyle::Normal, HPos::Left);
pub(crate) const RIGHT_ALIGNED: Font = Font(12.0, FontStyle::Normal, HPos::Right);
pub(crate) const CENTERED: Font = Font(12.0, FontStyle::Normal, HPos::Center);

pub(crate) fn text(area: &Area, text: &str, at: (i32, i32), font: Font, color: RGBColor) -> Result<()> {
    // plotters divides sizes by this.
    const SCALE: f64 = 1.24;
    let style = TextStyle::from(("sans-serif", font.0 * SCALE, font.1).into_font());
    area.draw(&Text::new(text.to_owned(), at, style.color(&color).pos(Pos::new(font.2, VPos::Center))))?;
    Ok(())
}

pub(crate) fn titles(area: &Area, title: &str, subtitle: &str) -> Result<()> {
    text(area, title, (20, 26), TITLE, INK)?;
    text(area, subtitle, (20, 50), TEXT, GREY)
}

/// Draws a line from the left axis to `right`, and its value beside it.
pub(crate) fn level(area: &Area, right: i32, y: i32, value: &str) -> Result<()> {
    area.draw(&PathElement::new([(LEFT, y), (right, y)], PALE))?;
    text(area, value, (LEFT - 8, y), RIGHT_ALIGNED, GREY)
}

/// Says at the foot of a picture where its numbers come from.
pub(crate) fn origin(area: &Area, lines: &[&Line], processors: bool, y: i32) -> Result<()> {
    text(area, source(lines, processors).trim().trim_matches('*'), (20, y), SMALL, GREY)
}

/// Draws on a white ground of the given height.
pub(crate) fn svg(height: i32, draw: impl FnOnce(&Area) -> Result<()>) -> Result<String> {
    let mut output = String::new();
    {
        let area = SVGBackend::with_string(&mut output, (WIDTH as u32, height as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        draw(&area)?;
        area.present()?;
    }
    Ok(output)
}

pub(crate) fn implementation(line: &Line) -> String {
    match line.text("implementation") {
        "composed of candle operations" => "candle, composed operations".into(),
        // The subtitle names PyTorch.
        other => other.replace("PyTorch, linear", "linear"),
    }
}
