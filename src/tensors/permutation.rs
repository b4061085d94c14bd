//! Orders of rows.

use std::cmp::Ordering;

/// Returns the place of each row in `order`, which has every row once: the inverse permutation.
pub(crate) fn inverse(order: &[u32]) -> Vec<u32> {
    let mut places = vec![0; order.len()];
    order.iter().zip(0..).for_each(|(&row, place)| places[row as usize] = place);
    places
}

/// Returns the numbers below `n` in the order of `compare`, equal ones in ascending order. The comparison is behind a
/// pointer, so that the sort is compiled once.
pub(crate) fn sorted(n: usize, compare: &dyn Fn(usize, usize) -> Ordering) -> Vec<u32> {
    let mut order: Vec<u32> = (0..n as u32).collect();
    order.sort_by(|&a, &b| compare(a as usize, b as usize));
    order
}
