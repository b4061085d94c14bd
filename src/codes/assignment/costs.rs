//! The costs of words in the cells of a table: a row's and a column's cost, added.

use crate::error::{Error, Result};
use crate::validate::check_sizes;

/// Their sums over words are numbers of f32.
const LARGEST_COST: f32 = 1e30;

/// Costs `row_costs[word][row] + column_costs[word][column]` of each word in the cells `row * columns + column`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs<'a> {
    pub(super) row_costs: &'a [f32],
    pub(super) column_costs: &'a [f32],
    pub(super) words: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl<'a> Costs<'a> {
    pub(super) fn new(row_costs: &'a [f32], column_costs: &'a [f32], rows: usize, columns: usize) -> Result<Self> {
        check_sizes(&[("rows", rows), ("columns", columns)])?;
        let words = row_costs.len() / rows;
        if !row_costs.len().is_multiple_of(rows) {
            return Err(Error::shape("row_costs", format!("[words, {rows}]"), &[row_costs.len()]));
        }
        if words.checked_mul(columns) != Some(column_costs.len()) {
            return Err(Error::shape("column_costs", format!("[{words}, {columns}]"), &[column_costs.len()]));
        }
        // Cells are numbered in u32, of which the largest stands for none.
        let most = u32::MAX as usize - 1;
        let cells = rows.checked_mul(columns).filter(|cells| *cells <= most);
        let cells = cells
            .ok_or_else(|| Error::config("rows * columns", format!("at most {most}"), format!("{rows} * {columns}")))?;
        if words > cells {
            return Err(Error::config("words", format!("at most {cells}, the number of cells"), words));
        }
        for (argument, costs) in [("row_costs", row_costs), ("column_costs", column_costs)] {
            // NaN is in no range.
            if let Some(cost) = costs.iter().find(|cost| !(-LARGEST_COST..=LARGEST_COST).contains(*cost)) {
                return Err(Error::config(argument, format!("from {:e} to {LARGEST_COST:e}", -LARGEST_COST), cost));
            }
        }
        Ok(Costs { row_costs, column_costs, words, rows, columns })
    }

    pub(super) fn cells(&self) -> usize {
        self.rows * self.columns
    }

    pub(super) fn of_rows(&self, word: usize) -> &'a [f32] {
        &self.row_costs[word * self.rows..][..self.rows]
    }

    pub(super) fn of_columns(&self, word: usize) -> &'a [f32] {
        &self.column_costs[word * self.columns..][..self.columns]
    }

    pub(super) fn of_cell(&self, word: usize, cell: usize) -> f64 {
        let row = self.of_rows(word)[cell / self.columns];
        f64::from(row) + f64::from(self.of_columns(word)[cell % self.columns])
    }

    /// What the cheapest cell costs less than the mean of all.
    pub(super) fn gain(&self, word: usize) -> f64 {
        let gain = |costs: &[f32]| {
            let mean = costs.iter().map(|cost| f64::from(*cost)).sum::<f64>() / costs.len() as f64;
            mean - f64::from(costs.iter().copied().fold(f32::INFINITY, f32::min))
        };
        gain(self.of_rows(word)) + gain(self.of_columns(word))
    }
}
