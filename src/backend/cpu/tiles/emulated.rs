//! The tile unit's arithmetic in plain Rust: Intel's `TDPBF16PS`.
//!
//! The even and the odd products of a square's depth, for two parts of the operands, are summed separately, with one
//! rounding for each product, added, and then added to the result. Subnormal numbers are zero, as operands and as
//! results.

use super::product::{TileProduct, PAIRS, SIDE, SQUARE};
use super::rounding::widened;

/// Computes the product, with the unit's bits.
pub(super) fn multiply(product: TileProduct<'_>) {
    let TileProduct { parts, left, right, steps, to, to_row, rows, columns, is_added } = product;
    for (row, column) in (0..SIDE * rows).flat_map(|row| (0..SIDE * columns).map(move |column| (row, column))) {
        let to = &mut to[row * to_row + column];
        let mut total = if is_added { normal(*to) } else { 0.0 };
        let products = (0..steps).flat_map(|step| parts.products().iter().map(move |&parts| (step, parts)));
        for (step, (left_part, right_part)) in products {
            let left = &left.values[left_part * SQUARE + step * left.step..];
            let left = &left[row / SIDE * product.left.square + row % SIDE * SIDE..][..SIDE];
            let right = &right.values[right_part * PAIRS * SIDE + step * right.step..];
            let right = &right[column / SIDE * product.right.square + column % SIDE..];
            let mut sums = [0.0f32; 2];
            for k in 0..PAIRS {
                let pair = right_pair(right, k * SIDE);
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = normal(normal(widened(left[2 * k + i])).mul_add(normal(pair[i]), *sum));
                }
            }
            total = normal(total + normal(sums[0] + sums[1]));
        }
        *to = total;
    }
}

/// Returns the two numbers of the pair at `at`.
fn right_pair(right: &[u32], at: usize) -> [f32; 2] {
    [f32::from_bits(right[at] << 16), f32::from_bits(right[at] & 0xffff_0000)]
}

/// Returns the number, or zero if it is subnormal.
fn normal(x: f32) -> f32 {
    if x.is_subnormal() {
        0.0f32.copysign(x)
    } else {
        x
    }
}
