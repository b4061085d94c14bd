//! The distribution of the singular values as an SVG file (Yang et al., 2018, figure 1).

use crate::{source::Head, spectrum::DECADES, study::Study};
use lab::{show::plot::COLORS, Result};
use plotters::prelude::*;
use std::path::Path;

pub(crate) fn draw(path: &Path, studies: &[Study]) -> Result<()> {
    curves(path, studies).map_err(|error| format!("cannot draw {}: {error}", path.display()).into())
}

fn curves(path: &Path, studies: &[Study]) -> Result<()> {
    let area = SVGBackend::new(path, (800, 500)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("Singular values of the log-probabilities", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(-f64::from(DECADES)..0.0, 0.0..100.0)?;
    chart
        .configure_mesh()
        .x_desc("singular value / the largest one")
        .y_desc("singular values below, %")
        .x_label_formatter(&|x| format!("1e{x:.0}"))
        .light_line_style(WHITE)
        .draw()?;
    for (study, color) in studies.iter().zip(COLORS.iter().cycle()) {
        let color = *color;
        let points = study.spectrum.distribution().into_iter().enumerate();
        let points = points.map(|(i, percent)| (i as f64 / 2.0 - f64::from(DECADES), percent));
        let label = match study.head {
            Some(Head { kind, width }) => format!("{}, d = {width}, rank {}", kind.name(), study.rank),
            None => format!("{}, rank {}", study.name, study.rank),
        };
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)))?
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::MiddleLeft)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()?;
    Ok(())
}
