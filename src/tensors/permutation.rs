//! Orders of rows.

/// Returns the place of each row in `order`, which has every row once: the inverse permutation.
pub(crate) fn inverse(order: &[u32]) -> Vec<u32> {
    let mut places = vec![0; order.len()];
    order.iter().zip(0..).for_each(|(&row, place)| places[row as usize] = place);
    places
}
