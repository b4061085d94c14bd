//! Tables of text, and the numbers in them.

/// Returns a table as text. The first column is aligned to the left, the others to the right.
pub fn table(columns: &[&str], rows: &[Vec<String>]) -> String {
    let width = |i: usize| rows.iter().map(|row| row[i].chars().count()).fold(columns[i].len(), usize::max);
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&widths).enumerate();
        let cells =
            cells.map(|(i, (cell, &width))| if i == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") });
        cells.collect::<Vec<_>>().join("  ")
    };
    let mut lines = vec![line(&mut columns.iter().copied())];
    lines.extend(rows.iter().map(|row| line(&mut row.iter().map(String::as_str))));
    lines.join("\n")
}

/// Returns a number with `digits` decimals: "-" without a value, "diverged" for NaN.
pub fn number(value: impl Into<Option<f64>>, digits: usize) -> String {
    match value.into() {
        None => "-".into(),
        Some(value) if value.is_nan() => "diverged".into(),
        Some(value) => format!("{value:.digits$}"),
    }
}

/// Returns the median of some numbers: of an even count the greater of the two in the middle, and NaN of none.
pub fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 3.0, 1.0, 2.0])), (2.0, 3.0));
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [
            vec!["softmax".into(), number(1.25, 3), number(None, 3)],
            vec!["mos".into(), number(f64::NAN, 3), number(10.0, 0)],
        ];
        let expected = "head          NLL  tokens/s\nsoftmax     1.250         -\nmos      diverged        10";
        assert_eq!(table(&["head", "NLL", "tokens/s"], &rows), expected);
    }
}
