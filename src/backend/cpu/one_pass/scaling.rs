//! The kernels that multiply by the factors of rows, between the matrix products.

use crate::backend::cpu::products::panel::{lanes, Left};
use crate::backend::cpu::vector::simd::{Float, Kernel, Vector};

/// Computes `values[.., row] := factors[row] values[.., row]`.
pub(super) struct Scale<'a, F> {
    /// `[n, width]`
    pub(super) values: &'a mut [F],
    /// `[width]`
    pub(super) factors: &'a [F],
}

impl<F: Float> Kernel<F> for Scale<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let factors = V::registers(self.factors);
        for values in V::registers_mut(self.values).chunks_exact_mut(factors.len()) {
            for (value, &factor) in values.iter_mut().zip(factors) {
                *value = v.mul(*value, factor);
            }
        }
    }
}

/// Computes `to[.., row] += factors[row] values[.., row]`.
pub(super) struct AddScaled<'a, F> {
    /// `[n, width]`
    pub(super) to: &'a mut [F],
    pub(super) values: &'a [F],
    /// `[width]`
    pub(super) factors: &'a [F],
}

impl<F: Float> Kernel<F> for AddScaled<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let factors = V::registers(self.factors);
        let to = V::registers_mut(self.to).chunks_exact_mut(factors.len());
        for (to, values) in to.zip(V::registers(self.values).chunks_exact(factors.len())) {
            for ((to, &value), &factor) in to.iter_mut().zip(values).zip(factors) {
                *to = v.mul_add(value, factor, *to);
            }
        }
    }
}

/// Computes `to[row, ..] = factors[row] contexts[row, ..]` for some columns, padded with zeros to whole vectors.
pub(super) struct ScaleRows<'a, F> {
    /// The rows, which start `d` elements apart, from the first of the columns on.
    pub(super) contexts: &'a [F],
    pub(super) d: usize,
    pub(super) columns: usize,
    pub(super) factors: &'a [F],
    pub(super) to: &'a mut [F],
}

impl<F: Float> Kernel<F> for ScaleRows<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let ScaleRows { contexts, d, columns, factors, to } = self;
        let width = columns.div_ceil(lanes::<F, V>());
        let to = V::registers_mut(to).chunks_exact_mut(width);
        for ((to, context), &factor) in to.zip(contexts.chunks(d)).zip(factors) {
            let factor = v.splat(factor);
            let (registers, rest) = V::split(&context[..columns]);
            for (to, &x) in to.iter_mut().zip(registers) {
                *to = v.mul(factor, x);
            }
            if !rest.is_empty() {
                to[width - 1] = v.mul(factor, v.load_partial(rest));
            }
        }
    }
}

/// Computes `to[i] += sum_k left[i, k] factors[k]`, for a left operand whose blocks have rows of whole vectors.
pub(super) struct AddWeightedSums<'a, F> {
    pub(super) left: &'a [Left<'a, F>],
    /// The factors, padded as the left operand's rows are.
    pub(super) factors: &'a [F],
    pub(super) to: &'a mut [F],
}

impl<F: Float> Kernel<F> for AddWeightedSums<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        /// The number of independent sums, which hide the latency.
        const SUMS: usize = 4;
        let AddWeightedSums { left, factors, to } = self;
        for (i, to) in to.chunks_mut(SUMS).enumerate() {
            let mut sums = [v.splat(F::zero()); SUMS];
            let mut factors = V::registers(factors);
            for left in left {
                let rows = V::registers(&left.values[i * SUMS * left.row..][..to.len() * left.row]);
                let (block_factors, others) = factors.split_at(left.row / lanes::<F, V>());
                factors = others;
                for (sum, row) in sums.iter_mut().zip(rows.chunks_exact(block_factors.len())) {
                    for (&x, &factor) in row.iter().zip(block_factors) {
                        *sum = v.mul_add(x, factor, *sum);
                    }
                }
            }
            for (to, &sum) in to.iter_mut().zip(&sums) {
                *to += v.sum(sum);
            }
        }
    }
}
