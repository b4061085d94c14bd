//! Learning curves as an SVG file.

use crate::Result;
use plotters::prelude::*;
use std::path::Path;

/// One line of a plot: a name, and a point for each whole number, such as an epoch.
pub(crate) struct Curve {
    /// The curve's name in the legend.
    pub(crate) name: String,
    /// Epochs and values.
    pub(crate) points: Vec<(i32, f64)>,
}

/// The labels of a plot.
pub struct Axes<'a> {
    /// The title.
    pub title: &'a str,
    /// The label of the horizontal axis.
    pub x: &'a str,
    /// The label of the vertical axis.
    pub y: &'a str,
    /// A horizontal reference line, such as the lowest value that can be reached.
    pub floor: Option<(&'a str, f64)>,
}

/// The colours of curves, in their order.
pub const COLORS: [RGBColor; 4] =
    [RGBColor(31, 119, 180), RGBColor(255, 127, 14), RGBColor(44, 160, 44), RGBColor(148, 103, 189)];

/// Draws the curves.
pub(crate) fn curves(path: &Path, axes: &Axes, curves: &[Curve]) -> Result<()> {
    draw(path, axes, curves).map_err(|error| format!("cannot draw {}: {error}", path.display()).into())
}

fn draw(path: &Path, axes: &Axes, curves: &[Curve]) -> Result<()> {
    let points = || curves.iter().flat_map(|curve| curve.points.iter().copied());
    if points().next().is_none() {
        return Err("no epoch was trained, so there is no curve".into());
    }
    let (mut left, mut right) = (i32::MAX, i32::MIN);
    let (mut low, mut high) = axes.floor.map_or((f64::INFINITY, f64::NEG_INFINITY), |(_, y)| (y, y));
    for (x, y) in points() {
        (left, right) = (left.min(x), right.max(x));
        (low, high) = (low.min(y), high.max(y));
    }
    let margin = 0.05 * (high - low).max(1e-3);

    let area = SVGBackend::new(path, (800, 500)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(axes.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(left..right.max(left + 1), (low - margin)..(high + margin))?;
    chart.configure_mesh().x_desc(axes.x).y_desc(axes.y).light_line_style(WHITE).draw()?;
    for (curve, color) in curves.iter().zip(COLORS.iter().cycle()) {
        let color = *color;
        chart
            .draw_series(LineSeries::new(curve.points.iter().copied(), color.stroke_width(2)).point_size(3))?
            .label(&curve.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    if let Some((name, y)) = axes.floor {
        chart
            .draw_series(LineSeries::new([(left, y), (right.max(left + 1), y)], BLACK.mix(0.6)))?
            .label(name)
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLACK.mix(0.6)));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.9)).border_style(BLACK.mix(0.3)).draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_of_few_epochs_has_whole_epochs_only() {
        let path = std::env::temp_dir().join(format!("plot_{}.svg", std::process::id()));
        let axes = Axes { title: "title", x: "epoch", y: "loss", floor: None };
        for epochs in 1..=4 {
            let points = (1..=epochs).map(|epoch| (epoch, 500.5 - f64::from(epoch))).collect();
            curves(&path, &axes, &[Curve { name: "softmax".into(), points }]).expect("draws");
            let file = std::fs::read_to_string(&path).expect("was just written");
            // The text of every label is a line of its own; those of the loss are above 400.
            let labels = file.lines().filter_map(|line| line.trim().parse().ok());
            let labels: Vec<f64> = labels.filter(|&label: &f64| label < 400.0).collect();
            assert_eq!(labels, (1..=epochs.max(2)).map(f64::from).collect::<Vec<_>>(), "{epochs} epochs");
        }
        std::fs::remove_file(path).expect("was just written");
    }
}
