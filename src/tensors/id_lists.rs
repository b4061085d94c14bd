//! The allowed ids of positions, and products of contexts with the decoder's rows of these ids, by candle's operations.
//! The CPU computes these products by a kernel of its own (`backend/cpu/products/lists.rs`).

use candle_core::Tensor;

use super::transfer::accurate_dtype;
use crate::error::Result;

/// Returns whether a mask has the bit of an id: bit `id % 32` of word `id / 32`.
pub(crate) fn has_bit(words: &[u32], id: u32) -> bool {
    words[id as usize / 32] >> (id % 32) & 1 == 1
}

/// A list of token ids for each position, in ascending order without repeats.
#[derive(Clone, Debug)]
pub(crate) struct IdLists {
    ids: Vec<u32>,
    /// List i is `ids[offsets[i]..offsets[i + 1]]`.
    offsets: Vec<usize>,
}

impl IdLists {
    /// Makes sorted lists of these ids, in which each id is once.
    pub(crate) fn new(lists: impl IntoIterator<Item = Vec<u32>>) -> Self {
        let (mut ids, mut offsets) = (Vec::new(), vec![0]);
        for list in lists {
            ids.extend(sorted_unique(list));
            offsets.push(ids.len());
        }
        IdLists { ids, offsets }
    }

    /// Returns the number of lists.
    pub(crate) fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Returns the ids of a position.
    pub(crate) fn list(&self, position: usize) -> &[u32] {
        &self.ids[self.offsets[position]..self.offsets[position + 1]]
    }

    /// Iterates over the lists.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u32]> {
        (0..self.len()).map(|position| self.list(position))
    }

    /// Returns the ids of all lists, one list after the other.
    pub(crate) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns the length of the longest list.
    pub(crate) fn longest(&self) -> usize {
        self.iter().map(<[u32]>::len).max().unwrap_or(0)
    }

    /// Returns `[lists, longest]`: each list, padded with its first id (an empty list with 0).
    pub(crate) fn padded(&self) -> Vec<u32> {
        let n = self.longest();
        let pad = |list: &[u32]| std::iter::repeat_n(list.first().copied().unwrap_or(0), n - list.len());
        self.iter().flat_map(|list| list.iter().copied().chain(pad(list))).collect()
    }

    /// Returns `[lists, longest]`, which is one for each id and zero past the end of a list, or `None` if all lists
    /// have one length.
    pub(crate) fn mask(&self) -> Option<Vec<u8>> {
        let n = self.longest();
        let list_mask = |list: &[u32]| (0..n).map(|i| u8::from(i < list.len())).collect::<Vec<_>>();
        self.iter().any(|list| list.len() < n).then(|| self.iter().flat_map(list_mask).collect())
    }

    /// Returns the ids of all lists, each once, in ascending order.
    pub(crate) fn union(&self) -> Vec<u32> {
        let mut is_in = vec![false; self.ids.iter().max().map_or(0, |&id| id as usize + 1)];
        self.ids.iter().for_each(|&id| is_in[id as usize] = true);
        (0u32..).zip(is_in).filter(|(_, is_in)| *is_in).map(|(id, _)| id).collect()
    }
}

/// Returns the ids in ascending order without repeats.
pub(crate) fn sorted_unique(mut ids: Vec<u32>) -> Vec<u32> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The ids that each position's distribution is restricted to.
#[derive(Clone, Debug)]
pub(crate) enum Restriction {
    /// All ids are allowed.
    All,
    /// The same ids are allowed at all positions, in ascending order without repeats.
    Shared(Vec<u32>),
    /// Each position has a list of its own, none of which is empty.
    Each(IdLists),
}

impl Restriction {
    /// Returns the allowed ids of a position, or `None` if all ids are.
    pub(crate) fn ids(&self, position: usize) -> Option<&[u32]> {
        match self {
            Restriction::All => None,
            Restriction::Shared(ids) => Some(ids),
            Restriction::Each(lists) => Some(lists.list(position)),
        }
    }
}

/// Copies these rows of a matrix, which may be the transpose of a contiguous one.
pub(crate) fn matrix_rows(matrix: &Tensor, ids: &Tensor) -> Result<Tensor> {
    Ok(if matrix.is_contiguous() {
        matrix.index_select(ids, 0)?
    } else {
        matrix.t()?.index_select(ids, 1)?.t()?.contiguous()?
    })
}

/// Computes the products of each position's context, `[positions, d]`, with the matrix's rows of its list of ids:
/// `[positions, longest]`, in f32 (f64 for f64). Entries past the end of a list are unspecified.
pub(crate) fn list_products(contexts: &Tensor, matrix: &Tensor, lists: &IdLists) -> Result<Tensor> {
    let shape = (lists.len(), lists.longest());
    let dtype = accurate_dtype(contexts);
    if shape.0 * shape.1 == 0 {
        return Ok(Tensor::zeros(shape, dtype, contexts.device())?);
    }
    let contexts = contexts.to_dtype(dtype)?.unsqueeze(2)?;
    Ok(list_rows(matrix, lists)?.to_dtype(dtype)?.matmul(&contexts)?.squeeze(2)?)
}

/// Computes the gradients of contexts and matrix from the products' `upstream`, in the operands' dtype: those that
/// `needs_gradient` says.
pub(crate) fn list_product_gradients(
    contexts: &Tensor,
    matrix: &Tensor,
    lists: &IdLists,
    upstream: &Tensor,
    needs_gradient: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    let ((positions, d), n) = (contexts.dims2()?, lists.longest());
    let (operand_dtype, dtype) = (contexts.dtype(), upstream.dtype());
    let [needs_contexts, needs_matrix] = needs_gradient;
    if positions * n == 0 {
        let zeros = |tensor: &Tensor| Tensor::zeros(tensor.shape(), operand_dtype, tensor.device());
        return Ok([
            needs_contexts.then(|| zeros(contexts)).transpose()?,
            needs_matrix.then(|| zeros(matrix)).transpose()?,
        ]);
    }
    let upstream = match lists.mask() {
        Some(mask) => {
            let mask = Tensor::from_vec(mask, (positions, n), upstream.device())?;
            mask.where_cond(upstream, &upstream.zeros_like()?)?
        }
        None => upstream.clone(),
    };
    let context_gradient = || -> Result<Tensor> {
        let rows = list_rows(matrix, lists)?.to_dtype(dtype)?;
        Ok(upstream.unsqueeze(1)?.matmul(&rows)?.squeeze(1)?.to_dtype(operand_dtype)?)
    };
    let matrix_gradient = || -> Result<Tensor> {
        let contexts = contexts.to_dtype(dtype)?.unsqueeze(1)?;
        let products = upstream.unsqueeze(2)?.matmul(&contexts)?.reshape((positions * n, d))?;
        let ids = Tensor::from_vec(lists.padded(), positions * n, matrix.device())?;
        let zeros = Tensor::zeros(matrix.shape(), dtype, matrix.device())?;
        Ok(zeros.index_add(&ids, &products, 0)?.to_dtype(operand_dtype)?)
    };
    Ok([needs_contexts.then(context_gradient).transpose()?, needs_matrix.then(matrix_gradient).transpose()?])
}

/// Copies the matrix's rows of each position's list, `[positions, longest, d]`.
fn list_rows(matrix: &Tensor, lists: &IdLists) -> Result<Tensor> {
    let (positions, n) = (lists.len(), lists.longest());
    let ids = Tensor::from_vec(lists.padded(), positions * n, matrix.device())?;
    Ok(matrix_rows(matrix, &ids)?.reshape((positions, n, matrix.dim(1)?))?)
}

/// Makes a matrix `[rows, d]` with these values in the rows `ids`, which are in ascending order without repeats, and
/// zeros in the others.
pub(crate) fn scattered_rows(values: &Tensor, ids: &[u32], rows: usize) -> Result<Tensor> {
    let zeros = Tensor::zeros((rows, values.dim(1)?), values.dtype(), values.device())?;
    if ids.is_empty() {
        Ok(zeros)
    } else {
        Ok(zeros.index_add(&Tensor::new(ids, values.device())?, values, 0)?)
    }
}
