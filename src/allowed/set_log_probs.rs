//! The log-probabilities of each position's allowed ids, renormalised: a matrix with a row for each position. There are
//! three ways to compute it, of which the cheapest is chosen.

use std::sync::Arc;

use candle_core::Tensor;

use super::gathered_rows::{gathered_softmax, is_single, list_logits};
use crate::backend::operands::Sizes;
use crate::distributions::Distributions;
use crate::error::Result;
use crate::mixture::Mixture;
use crate::scores::ScoreOptions;
use crate::tensors::checks::accumulation_dtype;
use crate::tensors::id_lists::{IdLists, Restriction};
use crate::tensors::linear::with_shape;
use crate::tensors::log_softmax::log_softmax;
use crate::tensors::transfer;

/// The largest number of allowed ids at a position for which a mixture of several softmaxes computes their
/// log-probabilities as those of candidates. With more, it computes the log-probabilities of all ids.
const MOST_CANDIDATES: usize = 256;

/// The time of a logit whose row of the decoder is read for it alone, over the time of a logit in a matrix product.
/// This is the ratio for short rows; it is larger for long ones.
const GATHERED_LOGIT_COST: usize = 8;

/// The renormalised log-probabilities of each position's allowed ids.
pub(super) struct SetLogProbs {
    /// `[positions, n]` in the accumulation dtype, differentiable: minus infinity in the columns of ids that are not
    /// allowed.
    pub(super) log_probs: Tensor,
    column_ids: ColumnIds,
}

/// Which token id a column belongs to.
enum ColumnIds {
    /// The columns are those of all ids, in their order.
    All,
    /// The columns are those of these ids, at every position.
    Shared(Vec<u32>),
    /// The columns are those of the position's list.
    Each(Arc<IdLists>),
}

impl SetLogProbs {
    /// Computes the log-probabilities in the cheapest way. There is at least one position.
    pub(super) fn new(mixture: &Mixture, restriction: &Restriction, workspace_bytes: Option<usize>) -> Result<Self> {
        let Sizes { positions, vocab, .. } = mixture.operands().sizes;
        let lists = match restriction {
            Restriction::Each(lists) => lists,
            Restriction::Shared(ids) if !is_single(mixture) && ids.len() <= MOST_CANDIDATES => {
                let lists = IdLists::new(std::iter::repeat_n(ids.clone(), positions));
                return Self::from_candidates(mixture, lists, workspace_bytes);
            }
            Restriction::All | Restriction::Shared(_) => return Self::from_all_ids(mixture, restriction),
        };
        let are_short = if is_single(mixture) {
            lists.ids().len() * GATHERED_LOGIT_COST <= positions * lists.union().len().min(vocab)
        } else {
            lists.longest() <= MOST_CANDIDATES
        };
        if !are_short {
            Self::from_all_ids(mixture, restriction)
        } else if is_single(mixture) {
            Self::from_list_logits(mixture, lists.clone())
        } else {
            Self::from_candidates(mixture, lists.clone(), workspace_bytes)
        }
    }

    /// Computes only the logits of the lists, for a single softmax.
    fn from_list_logits(mixture: &Mixture, lists: IdLists) -> Result<Self> {
        let lists = Arc::new(lists);
        let logits = list_logits(mixture, &lists)?;
        let log_probs = masked_log_softmax(&logits, lists.mask())?;
        Ok(SetLogProbs { log_probs, column_ids: ColumnIds::Each(lists) })
    }

    /// Computes the log-probabilities of the lists' ids under the whole distribution and renormalises them, for a
    /// mixture of several softmaxes.
    fn from_candidates(mixture: &Mixture, lists: IdLists, workspace_bytes: Option<usize>) -> Result<Self> {
        let (positions, n) = (lists.len(), lists.longest());
        let device = mixture.operands().contexts.device();
        let candidates = transfer::to_device(lists.padded(), [mixture.leading(), &[n]].concat(), device)?;
        let scores = mixture.score(&candidates, &ScoreOptions { workspace_bytes, ..ScoreOptions::new() })?;
        let log_probs = masked_log_softmax(&scores.log_prob.reshape((positions, n))?, lists.mask())?;
        Ok(SetLogProbs { log_probs, column_ids: ColumnIds::Each(Arc::new(lists)) })
    }

    /// Computes the log-probabilities of all ids and renormalises them. A single softmax computes only those of the ids
    /// that are in any set.
    pub(super) fn from_all_ids(mixture: &Mixture, restriction: &Restriction) -> Result<Self> {
        let Sizes { positions, vocab, .. } = mixture.operands().sizes;
        let dtype = accumulation_dtype("contexts", mixture.operands().contexts.dtype())?;
        let matrix = |mixture: &Mixture| -> Result<Tensor> {
            with_shape(&mixture.log_probs_as(dtype)?, &[positions, mixture.operands().sizes.vocab])
        };
        let union = match restriction {
            Restriction::All => {
                let log_probs = matrix(mixture)?;
                return Ok(SetLogProbs { log_probs, column_ids: ColumnIds::All });
            }
            Restriction::Shared(ids) => ids.clone(),
            Restriction::Each(lists) => lists.union(),
        };
        let (log_probs, column_ids) = if is_single(mixture) && union.len() < vocab {
            (matrix(&gathered_softmax(mixture, &union, None)?)?, ColumnIds::Shared(union))
        } else if let Restriction::Shared(ids) = restriction {
            let index = Tensor::new(ids.as_slice(), mixture.operands().contexts.device())?;
            (matrix(mixture)?.index_select(&index, 1)?, ColumnIds::Shared(union))
        } else {
            (matrix(mixture)?, ColumnIds::All)
        };
        let n = log_probs.dim(1)?;
        let mask = match restriction {
            Restriction::Each(lists) => {
                let mut mask = vec![0u8; positions * n];
                for (row, list) in mask.chunks_exact_mut(n).zip(lists.iter()) {
                    list.iter().for_each(|&id| row[column_ids.column(0, id)] = 1);
                }
                Some(mask)
            }
            Restriction::All | Restriction::Shared(_) => None,
        };
        Ok(SetLogProbs { log_probs: masked_log_softmax(&log_probs, mask)?, column_ids })
    }

    /// Returns the columns of `n` allowed ids at each position, `[positions, n]`.
    pub(super) fn columns(&self, ids: &[usize], n: usize) -> Result<Tensor> {
        let column = |(i, &id): (usize, &usize)| self.column_ids.column(i / n, id as u32) as u32;
        let columns: Vec<u32> = ids.iter().enumerate().map(column).collect();
        transfer::to_device(columns, (self.log_probs.dim(0)?, n), self.log_probs.device())
    }

    /// Returns the log-probabilities of all ids, `[positions, vocab]`: those of ids that are not allowed are minus
    /// infinity. The columns must not be those of lists.
    pub(super) fn all_log_probs(&self, vocab: usize) -> Result<Tensor> {
        match &self.column_ids {
            ColumnIds::Shared(ids) => expand_columns(&self.log_probs, ids, vocab),
            ColumnIds::All | ColumnIds::Each(_) => Ok(self.log_probs.clone()),
        }
    }
}

impl ColumnIds {
    /// Returns the column of an id that has one at the position.
    fn column(&self, position: usize, id: u32) -> usize {
        let search = |ids: &[u32]| ids.binary_search(&id).unwrap_or(0);
        match self {
            ColumnIds::All => id as usize,
            ColumnIds::Shared(ids) => search(ids),
            ColumnIds::Each(lists) => search(lists.list(position)),
        }
    }
}

/// Makes the columns `[positions, n]` of `ids` those of all ids, `[positions, vocab]`; the others are minus infinity.
pub(super) fn expand_columns(columns: &Tensor, ids: &[u32], vocab: usize) -> Result<Tensor> {
    let (positions, n) = columns.dims2()?;
    let outside = Tensor::full(f32::NEG_INFINITY, (positions, 1), columns.device())?.to_dtype(columns.dtype())?;
    let mut place = vec![n as u32; vocab];
    ids.iter().enumerate().for_each(|(i, &id)| place[id as usize] = i as u32);
    let place = Tensor::from_vec(place, vocab, columns.device())?;
    Ok(Tensor::cat(&[columns, &outside], 1)?.index_select(&place, 1)?)
}

/// Computes the log-softmax of each row over the entries where the mask is not zero. The other entries, even if they
/// are NaN, change nothing and have no gradient; they become minus infinity.
fn masked_log_softmax(rows: &Tensor, mask: Option<Vec<u8>>) -> Result<Tensor> {
    let masked = match mask {
        Some(mask) => {
            let outside = Tensor::full(f32::NEG_INFINITY, rows.shape(), rows.device())?.to_dtype(rows.dtype())?;
            Tensor::from_vec(mask, rows.shape(), rows.device())?.where_cond(rows, &outside)?
        }
        None => rows.clone(),
    };
    log_softmax(&masked)
}
