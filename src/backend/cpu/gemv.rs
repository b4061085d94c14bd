//! The first product for a few rows of contexts, as inner products. Reading the decoder is its whole cost, so the rows
//! stay as they are stored, and each loaded register serves the sums of several contexts and ids.

use super::matrix::ViewMut;
use super::memory::{prefetch, CACHE_LINE};
use super::simd::{Float, Kernel, Vector};

/// Maximum rows for which this is faster than the `gemm` crate, which first packs and transposes its operands.
pub(super) const MOST_ROWS: usize = 64;

/// `to[row, id] = contexts[row] . decoder[id]`
pub(super) struct Dots<'a, 'b, F> {
    /// `[rows, d]`
    pub(super) contexts: &'a [F],
    /// `[ids, d]`, in rows `stride` elements apart
    pub(super) decoder: &'a [F],
    pub(super) stride: usize,
    pub(super) d: usize,
    pub(super) ids: usize,
    /// Column of `to` for the first id.
    pub(super) first_column: usize,
    /// Whether the products are added to `to`.
    pub(super) add: bool,
    pub(super) to: &'a mut ViewMut<'b, F>,
}

impl<F: Float> Kernel<F> for Dots<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let Dots { contexts, decoder, stride, d, ids, first_column, add, to } = self;
        let mut id = 0;
        while id < ids {
            let decoder = &decoder[id * stride..];
            let to = &mut Columns { matrix: to, first: first_column + id, add };
            id += match ids - id {
                // All sums stay in registers.
                4.. if V::REGISTERS >= 32 => few_ids::<4, F, V>(v, contexts, decoder, stride, d, to),
                2.. => few_ids::<2, F, V>(v, contexts, decoder, stride, d, to),
                _ => few_ids::<1, F, V>(v, contexts, decoder, stride, d, to),
            };
        }
    }
}

/// Where the products of some ids are stored.
struct Columns<'a, 'b, F> {
    matrix: &'a mut ViewMut<'b, F>,
    first: usize,
    /// Whether they are added to what is there.
    add: bool,
}

impl<F: Float> Columns<'_, '_, F> {
    fn store(&mut self, row: usize, sums: &[F]) {
        let to = &mut self.matrix.row_mut(row)[self.first..self.first + sums.len()];
        match self.add {
            true => to.iter_mut().zip(sums).for_each(|(to, &sum)| *to += sum),
            false => to.copy_from_slice(sums),
        }
    }
}

/// Multiplies `IDS` ids by all contexts; returns `IDS`.
#[inline(always)]
fn few_ids<const IDS: usize, F: Float, V: Vector<F>>(
    v: V,
    contexts: &[F],
    decoder: &[F],
    stride: usize,
    d: usize,
    to: &mut Columns<'_, '_, F>,
) -> usize {
    let ids: [&[F]; IDS] = std::array::from_fn(|j| &decoder[j * stride..][..d]);
    // Prefetches the next ids during these products: the hardware does not prefetch that far ahead.
    let mut next = decoder.get(IDS * stride..).unwrap_or(&[]);
    next = &next[..next.len().min(IDS * stride)];
    let per_group = (next.len() * 6 * d).div_ceil(contexts.len());
    let mut row = 0;
    let mut store = |sums: &[[F; IDS]]| {
        sums.iter().enumerate().for_each(|(i, sums)| to.store(row + i, sums));
        row += sums.len();
    };
    let mut groups = contexts.chunks_exact(6 * d);
    for group in &mut groups {
        let (now, later) = next.split_at(per_group.min(next.len()));
        next = later;
        prefetch_all(now);
        store(&dots::<6, IDS, F, V>(v, group, ids, d));
    }
    prefetch_all(next);
    let rest = groups.remainder();
    match rest.len() / d {
        5 => store(&dots::<5, IDS, F, V>(v, rest, ids, d)),
        4 => store(&dots::<4, IDS, F, V>(v, rest, ids, d)),
        3 => store(&dots::<3, IDS, F, V>(v, rest, ids, d)),
        2 => store(&dots::<2, IDS, F, V>(v, rest, ids, d)),
        1 => store(&dots::<1, IDS, F, V>(v, rest, ids, d)),
        _ => {}
    }
    IDS
}

/// The inner products of `ROWS` contexts with `IDS` ids.
#[inline(always)]
fn dots<const ROWS: usize, const IDS: usize, F: Float, V: Vector<F>>(
    v: V,
    contexts: &[F],
    ids: [&[F]; IDS],
    d: usize,
) -> [[F; IDS]; ROWS] {
    let contexts: [&[F]; ROWS] = std::array::from_fn(|i| &contexts[i * d..][..d]);
    let (context_registers, context_rests) = (contexts.map(|x| V::split(x).0), contexts.map(|x| V::split(x).1));
    let (id_registers, id_rests) = (ids.map(|x| V::split(x).0), ids.map(|x| V::split(x).1));
    let n = id_registers[0].len();
    let id_registers = id_registers.map(|x| &x[..n]);
    let context_registers = context_registers.map(|x| &x[..n]);
    let mut sums = [[v.splat(F::zero()); IDS]; ROWS];
    for i in 0..n {
        for row in 0..ROWS {
            for id in 0..IDS {
                sums[row][id] = v.mul_add(context_registers[row][i], id_registers[id][i], sums[row][id]);
            }
        }
    }
    if !id_rests[0].is_empty() {
        let mut decoder = [v.splat(F::zero()); IDS];
        for (register, rest) in decoder.iter_mut().zip(id_rests) {
            *register = v.load_partial(rest);
        }
        for (row, context) in context_rests.into_iter().enumerate() {
            let context = v.load_partial(context);
            for (id, &decoder) in decoder.iter().enumerate() {
                sums[row][id] = v.mul_add(context, decoder, sums[row][id]);
            }
        }
    }
    // These are loops because the closure of a `map` is not compiled with the target features of the kernel.
    let mut results = [[F::zero(); IDS]; ROWS];
    for (results, sums) in results.iter_mut().zip(&sums) {
        for (result, &sum) in results.iter_mut().zip(sums) {
            *result = v.sum(sum);
        }
    }
    results
}

/// Prefetches `values` into the cache.
#[inline(always)]
fn prefetch_all<F>(values: &[F]) {
    for line in values.chunks((CACHE_LINE / size_of::<F>()).max(1)) {
        prefetch(line.as_ptr());
    }
}
