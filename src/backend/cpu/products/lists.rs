//! The products of contexts with the decoder's rows of a few ids each, the ids of its list, and their gradients. No
//! other row is read or written.

use std::sync::Mutex;

use bytemuck::zeroed_vec;
use candle_core::{DType, Device, Tensor};
use num_traits::Zero;
use rayon::prelude::*;

use super::gemv::{dots, Next};
use crate::backend::cpu::locked_weight::locked_weight;
use crate::backend::cpu::operands::context_rows::ContextRows;
use crate::backend::cpu::operands::decoder::{DecoderMatrix, MatrixValues};
use crate::backend::cpu::operands::dtype::{
    locked, with_accumulator, with_slice, with_values, Accumulator, Element, Stored,
};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};
use crate::backend::parallel;
use crate::backend::weight::Weight;
use crate::error::Result;
use crate::tensors::id_lists::IdLists;

/// Computes the products of each context `[positions, d]` with the rows of its list, `[positions, longest]`; zero
/// beyond the end of a list.
pub(crate) fn list_products(contexts: &Tensor, matrix: &Weight, lists: &IdLists) -> Result<Tensor> {
    with_accumulator!(contexts.dtype(), F => {
        with_operands::<F, _>(contexts, matrix, |operands| operands.products(lists))
    })
}

/// Computes the gradients of the contexts and of the matrix from `upstream`, that of the products: those that are
/// `needed`, in the operands' dtype.
pub(crate) fn list_product_gradients(
    contexts: &Tensor,
    matrix: &Weight,
    lists: &IdLists,
    upstream: &Tensor,
    needed: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    let dtype = contexts.dtype();
    with_accumulator!(dtype, F => with_operands::<F, _>(contexts, matrix, |operands| {
        with_slice("upstream", upstream, |upstream: &[F]| Ok([
            needed[0].then(|| operands.context_gradients(lists, upstream, dtype)).transpose()?,
            needed[1].then(|| operands.matrix_gradient(lists, upstream, dtype)).transpose()?,
        ]))
    }))
}

/// Returns a matrix `[rows, d]` that has these values in the rows `ids`, which are in ascending order without repeats,
/// and zeros in the other rows.
pub(crate) fn scattered_rows(values: &Tensor, ids: &[u32], rows: usize) -> Result<Tensor> {
    let (d, dtype) = (values.dim(1)?, values.dtype());
    let values = locked("rows", values)?;
    with_accumulator!(dtype, F => {
        let values: Stored<'_, F> = values.stored()?;
        written_rows(dtype, (rows, d), ids, &|write| {
            parallel::for_each_with(0..ids.len(), Vec::new, |buffer, i| {
                write(i, values.slice(i * d..(i + 1) * d).widened(buffer));
            });
        })
    })
}

/// The operands of products with lists of rows.
struct ListOperands<'a, F: Accumulator> {
    isa: Isa,
    /// `[positions, d]`
    contexts: Stored<'a, F>,
    /// `[rows, d]`
    matrix: DecoderMatrix<'a, F>,
}

/// Calls `f` with the elements of the contexts, `[positions, d]`, and the matrix `[rows, d]`.
fn with_operands<F: Accumulator, R>(
    contexts: &Tensor,
    matrix: &Weight,
    f: impl FnOnce(ListOperands<'_, F>) -> Result<R>,
) -> Result<R> {
    let (isa, (vocab, width), dense) = (Isa::detected()?, matrix.dims2()?, matrix.stored()?);
    let (contexts, weight) = (locked("contexts", contexts)?, locked_weight(matrix, dense.as_ref(), isa)?);
    let matrix = DecoderMatrix { values: weight.values()?, vocab, width };
    f(ListOperands { isa, contexts: contexts.stored()?, matrix })
}

/// The gradient of the product of a position's context and an id's row.
struct ListGradient {
    id: u32,
    position: u32,
    gradient: f64,
}

impl<F: Accumulator> ListOperands<'_, F> {
    /// Returns a context, widened in `buffer` unless it is stored so.
    fn context<'b>(&'b self, position: usize, buffer: &'b mut Vec<F>) -> &'b [F] {
        let d = self.matrix.width;
        self.contexts.slice(position * d..(position + 1) * d).widened(buffer)
    }

    /// Copies the rows of some ids to `buffer`, from a matrix that is stored as its transpose or is quantised.
    fn copied_rows<'b>(&self, ids: &[u32], buffer: &'b mut Vec<F>) -> Vec<&'b [F]> {
        buffer.clear();
        ids.iter().for_each(|&id| self.matrix.push_row(id as usize, buffer));
        buffer.chunks_exact(self.matrix.width).collect()
    }

    /// Computes the products of all contexts.
    fn products(&self, lists: &IdLists) -> Result<Tensor> {
        let (d, n) = (self.matrix.width, lists.longest());
        let mut values = vec![F::zero(); lists.len() * n];
        let multiply_position = |(wide, rows): &mut (Vec<F>, Vec<F>), (t, to): (usize, &mut [F])| {
            let (context, ids) = (self.context(t, wide), lists.list(t));
            let to = &mut to[..ids.len()];
            match self.matrix.values {
                MatrixValues::Rows(values) => with_values!(values, values => {
                    F::dispatch(self.isa, ListDots { context, rows: &stored_rows(values, d, ids), to })
                }),
                _ => F::dispatch(self.isa, ListDots::<F> { context, rows: &self.copied_rows(ids, rows), to }),
            }
        };
        // If all lists are empty, `n` is zero and there are no chunks.
        parallel::for_each_with(values.chunks_mut(n.max(1)).enumerate(), Default::default, multiply_position);
        Ok(Tensor::from_vec(values, (lists.len(), n), &Device::Cpu)?)
    }

    /// Computes the gradients of the contexts, `[positions, d]`.
    fn context_gradients(&self, lists: &IdLists, upstream: &[F], dtype: DType) -> Result<Tensor> {
        let (d, n) = (self.matrix.width, lists.longest());
        let positions: Vec<u32> = (0..lists.len() as u32).collect();
        written_rows(dtype, (lists.len(), d), &positions, &|write| {
            let add_position = |(sum, rows): &mut (Vec<F>, Vec<F>), t: usize| {
                let (ids, factors): (Vec<u32>, Vec<F>) =
                    lists.list(t).iter().zip(&upstream[t * n..]).filter(|(_, &g)| has_effect(g)).unzip();
                sum.clear();
                sum.resize(d, F::zero());
                let (factors, to) = (&factors[..], &mut sum[..]);
                match self.matrix.values {
                    MatrixValues::Rows(values) => with_values!(values, values => {
                        F::dispatch(self.isa, AddRows { factors, rows: &stored_rows(values, d, &ids), to })
                    }),
                    _ => F::dispatch(self.isa, AddRows::<F> { factors, rows: &self.copied_rows(&ids, rows), to }),
                }
                write(t, sum);
            };
            parallel::for_each_with(0..lists.len(), Default::default, add_position);
        })
    }

    /// Computes the gradient of the matrix, `[rows of the matrix, d]`. One task sums the products of a row, in the
    /// order of the positions: the result does not depend on the number of threads.
    fn matrix_gradient(&self, lists: &IdLists, upstream: &[F], dtype: DType) -> Result<Tensor> {
        let d = self.matrix.width;
        let entries = sorted_gradients(lists, &|i| if has_effect(upstream[i]) { upstream[i].f64() } else { 0.0 });
        let groups: Vec<_> = entries.chunk_by(|a, b| a.id == b.id).collect();
        let ids: Vec<u32> = groups.iter().map(|entries| entries[0].id).collect();
        written_rows(dtype, (self.matrix.vocab, d), &ids, &|write| {
            parallel::for_each_with(groups.iter().enumerate(), Vec::new, |sum, (i, entries)| {
                let positions = entries.iter().map(|entry| entry.position);
                let factors: Vec<F> = entries.iter().map(|entry| F::from_f64(entry.gradient)).collect();
                sum.clear();
                sum.resize(d, F::zero());
                let (factors, to) = (&factors[..], &mut sum[..]);
                with_values!(self.contexts, contexts => {
                    let rows: Vec<_> = positions.map(|t| &contexts[t as usize * d..][..d]).collect();
                    F::dispatch(self.isa, AddRows { factors, rows: &rows, to })
                });
                write(i, sum);
            });
        })
    }
}

/// Returns the gradients of all products in the order of ids, and of positions for one id. `upstream` returns that of
/// an element of `[positions, longest]`; those of zero are left out.
fn sorted_gradients(lists: &IdLists, upstream: &dyn Fn(usize) -> f64) -> Vec<ListGradient> {
    let n = lists.longest();
    let mut entries = Vec::with_capacity(lists.ids().len());
    for (position, list) in lists.iter().enumerate() {
        for (i, &id) in list.iter().enumerate() {
            let gradient = upstream(position * n + i);
            if gradient != 0.0 {
                entries.push(ListGradient { id, position: position as u32, gradient });
            }
        }
    }
    entries.par_sort_unstable_by_key(|entry| (entry.id, entry.position));
    entries
}

/// Writes a row to its place among the rows that are written.
type WriteRow<'a, F> = dyn Fn(usize, &[F]) + Sync + 'a;

/// Makes a matrix `[rows, d]` of a dtype that is computed in `F`: `compute` writes the rows `ids`, which are in
/// ascending order without repeats, each once, and the others are zero.
fn written_rows<F: Accumulator>(
    dtype: DType,
    shape: (usize, usize),
    ids: &[u32],
    compute: &dyn Fn(&WriteRow<'_, F>),
) -> Result<Tensor> {
    match dtype {
        DType::F16 => rows_of_type::<F::F16>(shape, ids, compute),
        DType::BF16 => rows_of_type::<F::Bf16>(shape, ids, compute),
        _ => rows_of_type::<F>(shape, ids, compute),
    }
}

/// As [`written_rows`], in a type.
fn rows_of_type<T: Element>(
    (rows, d): (usize, usize),
    ids: &[u32],
    compute: &dyn Fn(&WriteRow<'_, T::Acc>),
) -> Result<Tensor> {
    // The system clears these zeros on first use: the other rows cost nothing. In huge pages nearly all of them would.
    let mut values: Vec<T> = zeroed_vec(rows * d);
    let (mut behind, mut first) = (&mut values[..], 0);
    let mut slots = Vec::with_capacity(ids.len());
    for &id in ids {
        let (row, rest) = std::mem::take(&mut behind)[(id as usize - first) * d..].split_at_mut(d);
        slots.push(Mutex::new(row));
        (behind, first) = (rest, id as usize + 1);
    }
    compute(&|i, sum| {
        // Each row comes once. A mutex that is locked for this alone is never poisoned.
        if let Ok(mut to) = slots[i].lock() {
            to.iter_mut().zip(sum).for_each(|(to, &sum)| *to = T::narrow(sum));
        }
    });
    drop(slots);
    Ok(Tensor::from_vec(values, (rows, d), &Device::Cpu)?)
}

/// Returns whether a gradient changes a sum: it is NaN, or not so small that its products, which would be subnormal and
/// slow, count as zero.
fn has_effect<F: Float>(gradient: F) -> bool {
    gradient.is_nan() || gradient.abs() >= F::LEAST_GRADIENT
}

/// Returns the rows of some ids as they are stored.
fn stored_rows<'a, T: Element>(values: &'a [T], width: usize, ids: &[u32]) -> Vec<&'a [T]> {
    ids.iter().map(|&id| &values[id as usize * width..][..width]).collect()
}

/// The number of rows whose sums stay in registers.
const ROWS: usize = 4;

/// Computes `to[i] = context . rows[i]`.
struct ListDots<'a, T: Element> {
    context: &'a [T::Acc],
    rows: &'a [&'a [T]],
    to: &'a mut [T::Acc],
}

impl<T: Element> Kernel<T::Acc> for ListDots<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<T::Acc>>(self, v: V) {
        let context = ContextRows { values: self.context, stride: self.context.len() };
        let (groups, others) = self.rows.as_chunks::<ROWS>();
        let (to, to_others) = self.to.as_chunks_mut::<ROWS>();
        for (&rows, to) in groups.iter().zip(to) {
            *to = dots::<1, ROWS, T, V>(v, context, rows, Next::NONE)[0];
        }
        for (&row, to) in others.iter().zip(to_others) {
            *to = dots::<1, 1, T, V>(v, context, [row], Next::NONE)[0][0];
        }
    }
}

/// Computes `to += sum_i factors[i] rows[i]`.
struct AddRows<'a, T: Element> {
    factors: &'a [T::Acc],
    rows: &'a [&'a [T]],
    to: &'a mut [T::Acc],
}

impl<T: Element> Kernel<T::Acc> for AddRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<T::Acc>>(self, v: V) {
        let AddRows { factors, rows, to } = self;
        let (groups, others) = rows.as_chunks::<ROWS>();
        let (group_factors, other_factors) = factors.as_chunks::<ROWS>();
        for (&rows, &factors) in groups.iter().zip(group_factors) {
            add_rows::<ROWS, T, V>(v, factors, rows, to);
        }
        for (&row, &factor) in others.iter().zip(other_factors) {
            add_rows::<1, T, V>(v, [factor], [row], to);
        }
    }
}

/// Computes `to += sum_i factors[i] rows[i]` for `N` rows at once.
#[inline(always)]
fn add_rows<const N: usize, T: Element, V: Vector<T::Acc>>(
    v: V,
    factors: [T::Acc; N],
    rows: [&[T]; N],
    to: &mut [T::Acc],
) {
    let (to, to_rest) = V::split_mut(to);
    let mut registers: [&[V::Lanes<T>]; N] = [&[]; N];
    let mut rests: [&[T]; N] = [&[]; N];
    let mut splats = [v.splat(T::Acc::zero()); N];
    for i in 0..N {
        let (row, rest) = V::split_lanes(rows[i]);
        (registers[i], rests[i]) = (&row[..to.len()], rest);
        splats[i] = v.splat(factors[i]);
    }
    for (r, to) in to.iter_mut().enumerate() {
        let mut sum = *to;
        for i in 0..N {
            sum = v.mul_add(splats[i], T::load(v, registers[i][r]), sum);
        }
        *to = sum;
    }
    if !to_rest.is_empty() {
        let mut sum = v.load_partial(to_rest);
        for i in 0..N {
            sum = v.mul_add(splats[i], T::load_partial(v, rests[i]), sum);
        }
        v.store_partial(sum, to_rest);
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Result};

    use super::*;
    use crate::tensors::id_lists;

    fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
        let wide = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
        wide(a).iter().zip(wide(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }

    /// The kernels equal the same products from candle's operations, in both layouts.
    #[test]
    fn products_and_gradients_equal_composed_operations() -> Result<()> {
        let lists = [vec![3, 1, 4, 1, 5, 9, 2, 6], vec![], vec![0], vec![30, 3], (0..31).collect()];
        for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-5), (DType::F16, 1e-2), (DType::BF16, 8e-2)] {
            for d in [1, 7, 16, 37] {
                for count in [0, 1, 5] {
                    let lists = IdLists::new(lists[..count].to_vec());
                    let random = |shape: &[usize]| Tensor::randn(0f64, 1., shape, &Device::Cpu)?.to_dtype(dtype);
                    let (contexts, weight) = (random(&[count, d])?, random(&[31, d])?);
                    let transposed = weight.t()?.contiguous()?.t()?;
                    for weight in [&weight, &transposed] {
                        let (found, expected) = (
                            list_products(&contexts, &Weight::Dense(weight.clone()), &lists)?,
                            id_lists::list_products(&contexts, weight, &lists)?,
                        );
                        let mask = lists.mask().unwrap_or_else(|| vec![1; found.elem_count()]);
                        let mask = Tensor::from_vec(mask, found.shape(), &Device::Cpu)?.to_dtype(found.dtype())?;
                        assert!(largest_difference(&found, &(expected * mask)?) <= tolerance, "{dtype:?} {d}");
                        let upstream = Tensor::randn(0f64, 1., found.shape(), &Device::Cpu)?.to_dtype(found.dtype())?;
                        let listed = Weight::Dense(weight.clone());
                        let found = list_product_gradients(&contexts, &listed, &lists, &upstream, [true; 2])?;
                        let expected =
                            id_lists::list_product_gradients(&contexts, weight, &lists, &upstream, [true; 2])?;
                        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                            assert!(largest_difference(found, expected) <= tolerance, "{dtype:?} {d} {count}");
                        }
                        assert!(list_product_gradients(&contexts, &listed, &lists, &upstream, [false; 2])?
                            .iter()
                            .all(Option::is_none));
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn scattered_rows_are_where_they_belong() -> Result<()> {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let values = Tensor::randn(0f32, 1., (3, 5), &Device::Cpu)?.to_dtype(dtype)?;
            let (found, expected) =
                (scattered_rows(&values, &[0, 4, 8], 9)?, id_lists::scattered_rows(&values, &[0, 4, 8], 9)?);
            assert_eq!(largest_difference(&found, &expected), 0.0);
            assert_eq!(largest_difference(&found.get(4)?, &values.get(1)?), 0.0);
        }
        Ok(())
    }
}
