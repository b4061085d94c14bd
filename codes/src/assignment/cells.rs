//! This file finds the cheapest cells of a word. A cell costs its row's cost plus its column's.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ordered_float::OrderedFloat;

/// A search for free cells has these limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The largest number of free cells that are returned.
    pub(super) candidates: usize,
    /// The largest number of cells that are visited, free or not.
    pub(super) visits: usize,
}

/// Returns up to `limits.candidates` free cells, `row * columns + column`, with their costs, cheapest first, among the
/// `limits.visits` cheapest cells. These lie in as many cheapest rows and columns.
pub(super) fn cheapest(
    row_costs: &[f32],
    column_costs: &[f32],
    limits: Limits,
    is_free: impl Fn(usize) -> bool,
) -> Vec<(u32, f64)> {
    let Limits { candidates, visits } = limits;
    let rows = ascending(row_costs, visits);
    let columns = ascending(column_costs, visits);
    let entry = |i: usize, j: usize| Reverse((OrderedFloat(rows[i].0 .0 + columns[j].0 .0), i, j));
    let mut found = Vec::new();
    // This holds the next cell of each row that has begun. A row begins when the first cell of the row before it is
    // visited.
    let mut next = BinaryHeap::from_iter((!rows.is_empty() && !columns.is_empty()).then(|| entry(0, 0)));
    for _ in 0..visits {
        let Some(Reverse((OrderedFloat(cost), i, j))) = next.pop() else { break };
        let cell = rows[i].1 * column_costs.len() + columns[j].1;
        if is_free(cell) {
            found.push((cell as u32, cost));
        }
        if found.len() == candidates {
            break;
        }
        if j == 0 && i + 1 < rows.len() {
            next.push(entry(i + 1, 0));
        }
        if j + 1 < columns.len() {
            next.push(entry(i, j + 1));
        }
    }
    found
}

/// Returns the `most` smallest numbers and their places, ascending.
fn ascending(numbers: &[f32], most: usize) -> Vec<(OrderedFloat<f64>, usize)> {
    let mut sorted: Vec<_> = numbers.iter().map(|x| OrderedFloat(f64::from(*x))).zip(0..).collect();
    if most < sorted.len() {
        sorted.select_nth_unstable(most);
        sorted.truncate(most);
    }
    sorted.sort_unstable();
    sorted
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_cells_are_those_of_a_full_sort(
            rows in prop::collection::vec(-6i8..6, 1..9),
            columns in prop::collection::vec(-60i8..60, 1..9),
            candidates in 1usize..90,
            visits in 1usize..90,
            free in prop::collection::vec(any::<bool>(), 81),
        ) {
            let float = |numbers: Vec<i8>| numbers.into_iter().map(|x| f32::from(x) / 4.0).collect::<Vec<_>>();
            let (rows, columns) = (float(rows), float(columns));
            let cost = |cell: usize| f64::from(rows[cell / columns.len()]) + f64::from(columns[cell % columns.len()]);
            let all = cheapest(&rows, &columns, Limits { candidates: visits, visits }, |_| true);
            let mut costs: Vec<f64> = (0..rows.len() * columns.len()).map(cost).collect();
            costs.sort_by(f64::total_cmp);
            costs.truncate(visits);
            prop_assert_eq!(all.iter().map(|cell| cell.1).collect::<Vec<_>>(), costs);
            prop_assert!(all.iter().all(|(cell, found)| cost(*cell as usize) == *found));
            let mut distinct: Vec<u32> = all.iter().map(|cell| cell.0).collect();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), all.len());

            let found = cheapest(&rows, &columns, Limits { candidates, visits }, |cell| free[cell]);
            let expected = all.into_iter().filter(|(cell, _)| free[*cell as usize]).take(candidates);
            prop_assert_eq!(found, expected.collect::<Vec<_>>());
        }
    }
}
