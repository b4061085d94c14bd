//! A word costs in a cell of a table what it costs in the cell's row, plus what it costs in the cell's column.

use crate::checks::check_sizes;
use crate::error::{Error, Result};

/// The largest cost. Sums over words, and their squares, are thus far from overflow.
const LARGEST_COST: f64 = 1e30;

/// Checks costs `[words, rows]` and `[words, columns]`, and that each word can have a cell of its own. Returns the
/// number of words.
pub(super) fn check(row_costs: &[f64], column_costs: &[f64], rows: usize, columns: usize) -> Result<usize> {
    check_sizes(&[("rows", rows), ("columns", columns)])?;
    let words = row_costs.len() / rows;
    if !row_costs.len().is_multiple_of(rows) {
        return Err(Error::shape("row_costs", format!("[words, {rows}]"), &[row_costs.len()]));
    }
    if words.checked_mul(columns) != Some(column_costs.len()) {
        return Err(Error::shape("column_costs", format!("[{words}, {columns}]"), &[column_costs.len()]));
    }
    // Cells are numbered in u32, whose largest value stands for no cell.
    let most = u32::MAX as usize - 1;
    let cells = rows.checked_mul(columns).filter(|cells| *cells <= most);
    let cells = cells
        .ok_or_else(|| Error::config("rows * columns", format!("at most {most}"), format!("{rows} * {columns}")))?;
    if words > cells {
        return Err(Error::config("words", format!("at most {cells}, the number of cells"), words));
    }
    for (argument, costs) in [("row_costs", row_costs), ("column_costs", column_costs)] {
        // NaN is outside every range.
        if let Some(cost) = costs.iter().find(|cost| !(-LARGEST_COST..=LARGEST_COST).contains(*cost)) {
            return Err(Error::config(argument, format!("from {:e} to {LARGEST_COST:e}", -LARGEST_COST), cost));
        }
    }
    Ok(words)
}

/// Subtracts from the costs `[words, lines]` of each word that of its cheapest line, then rounds. The best assignment
/// stays the same, and the rounding is relative to the differences between lines, not to the costs. A line is a row or
/// a column.
pub(super) fn relative<T>(costs: &[f64], lines: usize, round: impl Fn(f64) -> T + Copy) -> Vec<T> {
    let differences = |word_costs: &[f64]| {
        let least = word_costs.iter().copied().fold(f64::INFINITY, f64::min);
        word_costs.iter().map(|cost| round(cost - least)).collect::<Vec<T>>()
    };
    costs.chunks(lines).flat_map(differences).collect()
}

/// Each word costs `row_costs[word][row] + column_costs[word][column]` in the cell `row * columns + column`. The sizes
/// are those that [`check`] accepts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs<'a> {
    pub(super) row_costs: &'a [f32],
    pub(super) column_costs: &'a [f32],
    pub(super) words: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl<'a> Costs<'a> {
    pub(super) fn new(row_costs: &'a [f32], column_costs: &'a [f32], rows: usize, columns: usize) -> Self {
        Costs { row_costs, column_costs, words: row_costs.len() / rows, rows, columns }
    }

    /// Returns the number of cells.
    pub(super) fn cells(&self) -> usize {
        self.rows * self.columns
    }

    /// Returns the costs of a word in each row.
    pub(super) fn in_rows(&self, word: usize) -> &'a [f32] {
        &self.row_costs[word * self.rows..][..self.rows]
    }

    /// Returns the costs of a word in each column.
    pub(super) fn in_columns(&self, word: usize) -> &'a [f32] {
        &self.column_costs[word * self.columns..][..self.columns]
    }

    /// Computes the cost of a word in a cell.
    pub(super) fn in_cell(&self, word: usize, cell: usize) -> f64 {
        let row = self.in_rows(word)[cell / self.columns];
        f64::from(row) + f64::from(self.in_columns(word)[cell % self.columns])
    }

    /// Computes how much cheaper than the mean the cheapest cell is.
    pub(super) fn gain(&self, word: usize) -> f64 {
        let gain = |costs: &[f32]| {
            let mean = costs.iter().map(|cost| f64::from(*cost)).sum::<f64>() / costs.len() as f64;
            mean - f64::from(costs.iter().copied().fold(f32::INFINITY, f32::min))
        };
        gain(self.in_rows(word)) + gain(self.in_columns(word))
    }
}
