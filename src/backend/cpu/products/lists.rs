//! The products of contexts with the decoder's rows of a few ids each, the ids of its list, and their gradients. No
//! other row is read or written.

use candle_core::{Device, Tensor};
use num_traits::Zero;
use rayon::prelude::*;

use super::gemv::dots;
use crate::backend::cpu::locked_weight::QuantisedValues;
use crate::backend::cpu::operands::decoder::DecoderMatrix;
use crate::backend::cpu::operands::dtype::{locked, with_slice, with_type, Element};
use crate::backend::cpu::vector::simd::{Float, Isa, Kernel, Vector};
use crate::backend::parallel;
use crate::backend::weight::Weight;
use crate::error::Result;
use crate::tensors::id_lists::IdLists;

/// Computes the products of each context `[positions, d]` with the rows of its list, `[positions, longest]`; zero
/// beyond the end of a list.
pub(crate) fn list_products(contexts: &Tensor, matrix: &Weight, lists: &IdLists) -> Result<Tensor> {
    with_type!(contexts.dtype(), T => with_operands(contexts, matrix, |isa, contexts: &[T], matrix| {
        let (d, n) = (matrix.width, lists.longest());
        let mut values = vec![<T as Element>::Acc::zero(); lists.len() * n];
        let multiply_position = |(wide, rows): &mut (Vec<_>, Vec<_>), (t, to): (usize, &mut [_])| {
            let (context, ids) = (widened(&contexts[t * d..][..d], wide), lists.list(t));
            let to = &mut to[..ids.len()];
            match matrix.values {
                ListedValues::Rows(values) => {
                    dispatch(isa, ListDots { context, rows: &stored_rows(values, d, ids), to })
                }
                _ => dispatch(isa, ListDots { context, rows: &copied_rows(&matrix, ids, rows), to }),
            }
        };
        // If all lists are empty, `n` is zero and there are no chunks.
        parallel::for_each_with(values.chunks_mut(n.max(1)).enumerate(), Default::default, multiply_position);
        Ok(Tensor::from_vec(values, (lists.len(), n), &Device::Cpu)?)
    }))
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
    let (contexts_shape, matrix_shape) = (contexts.dims(), matrix.dims());
    with_type!(contexts.dtype(), T => with_operands(contexts, matrix, |isa, contexts: &[T], matrix| {
        let tensor = |values: Option<Vec<T>>, shape| {
            values.map(|values| Tensor::from_vec(values, shape, &Device::Cpu)).transpose()
        };
        with_slice("upstream", upstream, |upstream: &[<T as Element>::Acc]| Ok([
            tensor(needed[0].then(|| context_gradients(isa, &matrix, lists, upstream)), contexts_shape)?,
            tensor(needed[1].then(|| matrix_gradient(isa, contexts, &matrix, lists, upstream)), matrix_shape)?,
        ]))
    }))
}

/// Computes the gradients of the contexts, `[positions, d]`.
fn context_gradients<T: Element>(
    isa: Isa,
    matrix: &ListedMatrix<'_, T>,
    lists: &IdLists,
    upstream: &[T::Acc],
) -> Vec<T> {
    let (d, n) = (matrix.width, lists.longest());
    let mut values = vec![T::zero(); lists.len() * d];
    let add_position = |(sum, rows): &mut (Vec<_>, Vec<_>), (t, to): (usize, &mut [T])| {
        let (ids, factors): (Vec<u32>, Vec<T::Acc>) =
            lists.list(t).iter().zip(&upstream[t * n..]).filter(|(_, &g)| has_effect(g)).unzip();
        sum.clear();
        sum.resize(d, T::Acc::zero());
        let factors = &factors[..];
        match matrix.values {
            ListedValues::Rows(values) => {
                dispatch(isa, AddRows { factors, rows: &stored_rows(values, d, &ids), to: sum })
            }
            _ => dispatch(isa, AddRows { factors, rows: &copied_rows(matrix, &ids, rows), to: sum }),
        }
        to.iter_mut().zip(&*sum).for_each(|(to, &sum)| *to = T::narrow(sum));
    };
    parallel::for_each_with(values.chunks_mut(d).enumerate(), Default::default, add_position);
    values
}

/// The gradient of the product of a position's context and an id's row.
struct ListGradient<F> {
    id: u32,
    position: usize,
    gradient: F,
}

/// Computes the gradient of the matrix, `[rows of the matrix, d]`. One task sums the products of a row, in the order of
/// the positions: the result does not depend on the number of threads.
fn matrix_gradient<T: Element>(
    isa: Isa,
    contexts: &[T],
    matrix: &ListedMatrix<'_, T>,
    lists: &IdLists,
    upstream: &[T::Acc],
) -> Vec<T> {
    let (d, n) = (matrix.width, lists.longest());
    let list_gradients = |(position, list): (usize, _)| {
        let gradients = std::iter::zip(list, &upstream[position * n..]).filter(|(_, &g)| has_effect(g));
        gradients.map(move |(&id, &gradient)| ListGradient { id, position, gradient })
    };
    let mut entries: Vec<ListGradient<T::Acc>> = lists.iter().enumerate().flat_map(list_gradients).collect();
    entries.par_sort_unstable_by_key(|entry| (entry.id, entry.position));
    let groups: Vec<_> = entries.chunk_by(|a, b| a.id == b.id).collect();
    let add_row = |sum: &mut Vec<T::Acc>, (to, entries): (&mut [T], &[ListGradient<T::Acc>])| {
        let rows: Vec<&[T]> = entries.iter().map(|entry| &contexts[entry.position * d..][..d]).collect();
        let factors: Vec<T::Acc> = entries.iter().map(|entry| entry.gradient).collect();
        sum.clear();
        sum.resize(d, T::Acc::zero());
        dispatch(isa, AddRows { factors: &factors, rows: &rows, to: sum });
        to.iter_mut().zip(&*sum).for_each(|(to, &sum)| *to = T::narrow(sum));
    };
    // The system clears these zeros on first use: the other rows cost nothing. In huge pages nearly all of them would.
    let mut values = vec![T::zero(); matrix.rows * d];
    let rows = rows_mut(&mut values, d, groups.iter().map(|entries| entries[0].id));
    parallel::for_each_with(rows.into_iter().zip(groups), Vec::new, add_row);
    values
}

/// Returns a matrix `[rows, d]` that has these values in the rows `ids`, which are in ascending order without repeats,
/// and zeros in the other rows.
pub(crate) fn scattered_rows(values: &Tensor, ids: &[u32], rows: usize) -> Result<Tensor> {
    let d = values.dim(1)?;
    with_type!(values.dtype(), T => with_slice("rows", values, |values: &[T]| {
        let mut scattered = vec![Zero::zero(); rows * d];
        let to = rows_mut(&mut scattered, d, ids.iter().copied());
        parallel::for_each(to.into_iter().zip(values.chunks(d)), |(to, row): (&mut [T], _)| to.copy_from_slice(row));
        Ok(Tensor::from_vec(scattered, (rows, d), &Device::Cpu)?)
    }))
}

/// Returns whether a gradient changes a sum: it is NaN, or not so small that its products, which would be subnormal and
/// slow, count as zero.
fn has_effect<F: Float>(gradient: F) -> bool {
    gradient.is_nan() || gradient.abs() >= F::LEAST_GRADIENT
}

/// Borrows some rows of a matrix, which are in ascending order without repeats.
fn rows_mut<T>(mut values: &mut [T], d: usize, ids: impl Iterator<Item = u32>) -> Vec<&mut [T]> {
    let mut first = 0;
    let mut row = |id: u32| {
        let from_row = &mut std::mem::take(&mut values)[(id as usize - first) * d..];
        let (row, behind) = from_row.split_at_mut(d);
        (values, first) = (behind, id as usize + 1);
        row
    };
    ids.map(&mut row).collect()
}

/// Returns the rows of some ids as they are stored.
fn stored_rows<'a, T: Element>(values: &'a [T], width: usize, ids: &[u32]) -> Vec<&'a [T]> {
    ids.iter().map(|&id| &values[id as usize * width..][..width]).collect()
}

/// Copies the rows of some ids to `buffer`, from a matrix that is stored as its transpose or is quantised.
fn copied_rows<'a, T: Element>(
    matrix: &ListedMatrix<'_, T>,
    ids: &[u32],
    buffer: &'a mut Vec<T::Acc>,
) -> Vec<&'a [T::Acc]> {
    buffer.clear();
    for &id in ids {
        match &matrix.values {
            ListedValues::Rows(values) => {
                buffer.extend(values[id as usize * matrix.width..][..matrix.width].iter().map(|x| x.widen()))
            }
            ListedValues::Columns(values) => {
                buffer.extend(values[id as usize..].iter().step_by(matrix.rows).map(|x| x.widen()))
            }
            ListedValues::Quantised(matrix) => matrix.push_row(id as usize, buffer),
        }
    }
    buffer.chunks_exact(matrix.width).collect()
}

/// Returns numbers in the accumulation dtype, in `buffer`.
fn widened<'a, T: Element>(values: &[T], buffer: &'a mut Vec<T::Acc>) -> &'a [T::Acc] {
    buffer.clear();
    buffer.extend(values.iter().map(|x| x.widen()));
    buffer
}

/// A matrix `[rows, width]` of which lists name rows.
struct ListedMatrix<'a, T: Element> {
    values: ListedValues<'a, T>,
    rows: usize,
    width: usize,
}

/// The values of a matrix, stored in the dtype of the contexts as such or as its transpose, or quantised.
enum ListedValues<'a, T: Element> {
    Rows(&'a [T]),
    Columns(&'a [T]),
    Quantised(DecoderMatrix<'a, T::Acc>),
}

/// Calls `f` with the elements of the contexts, `[positions, d]`, and the matrix `[rows, d]`.
fn with_operands<T: Element, R>(
    contexts: &Tensor,
    matrix: &Weight,
    f: impl FnOnce(Isa, &[T], ListedMatrix<'_, T>) -> Result<R>,
) -> Result<R> {
    let (isa, (rows, width)) = (Isa::detected()?, matrix.dims2()?);
    let contexts = locked("contexts", contexts)?;
    if let Weight::Quantised(matrix) = matrix {
        let values = QuantisedValues::new(matrix, isa)?;
        let matrix = DecoderMatrix { values: values.values()?, vocab: rows, width };
        return f(isa, contexts.values()?, ListedMatrix { values: ListedValues::Quantised(matrix), rows, width });
    }
    let matrix = matrix.tensor()?;
    let is_transposed = !matrix.is_contiguous();
    let stored = if is_transposed { matrix.t()? } else { matrix.clone() };
    let stored = locked("weight", &stored)?;
    let values =
        if is_transposed { ListedValues::Columns(stored.values()?) } else { ListedValues::Rows(stored.values()?) };
    f(isa, contexts.values()?, ListedMatrix { values, rows, width })
}

/// Runs a kernel without results, whose float type the compiler infers.
fn dispatch<F: Float, K: Kernel<F, Output = ()>>(isa: Isa, kernel: K) {
    F::dispatch(isa, kernel);
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
        let (groups, others) = self.rows.as_chunks::<ROWS>();
        let (to, to_others) = self.to.as_chunks_mut::<ROWS>();
        for (&rows, to) in groups.iter().zip(to) {
            *to = dots::<1, ROWS, T, V>(v, self.context, rows, &[])[0];
        }
        for (&row, to) in others.iter().zip(to_others) {
            *to = dots::<1, 1, T, V>(v, self.context, [row], &[])[0][0];
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
    let (registers, rests) = (rows.map(|row| V::split_lanes(row).0), rows.map(|row| V::split_lanes(row).1));
    let (to, to_rest) = V::split_mut(to);
    let n = to.len();
    let registers = registers.map(|row| &row[..n]);
    let mut splats = [v.splat(T::Acc::zero()); N];
    for i in 0..N {
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
