//! The log-probabilities of each position's set, renormalised, as a matrix with a row for each position.

use std::sync::Arc;

use candle_core::{Tensor, D};

use super::gathered_rows::{gathered, is_single, logits_of_lists};
use crate::backend::operands::{accumulation_dtype, Sizes};
use crate::error::Result;
use crate::mixture::Mixture;
use crate::scores::ScoreOptions;
use crate::tensors::autograd::Leaf;
use crate::tensors::id_lists::{IdLists, Restriction};
use crate::tensors::transfer;

/// The most candidates of a position whose log-probabilities under a mixture of several softmaxes are computed without
/// the log-probabilities of all ids.
const MOST_CANDIDATES: usize = 256;

/// A logit whose row of the decoder is read for it alone takes longer than one of a matrix product: by this factor where
/// rows are short, by more where they are long.
const GATHERED_OVER_PRODUCT: usize = 8;

/// Log-probabilities `[positions, n]` in the accumulation dtype, minus infinity outside a set. Differentiable.
pub(super) struct SetLogProbs {
    pub(super) log_probs: Tensor,
    columns: ColumnIds,
    /// The decoder's variables whose gradients bypass candle's sum.
    pub(super) leaves: Vec<Leaf>,
}

/// Which id a column belongs to.
enum ColumnIds {
    /// Of all ids, the same.
    All,
    /// These ids at every position.
    Shared(Vec<u32>),
    /// The ids of the position's list.
    Each(Arc<IdLists>),
}

impl SetLogProbs {
    /// The rows of some sets, of at least one position, by the cheapest way.
    pub(super) fn new(mixture: &Mixture, kept: &Restriction, workspace_bytes: Option<usize>) -> Result<Self> {
        let Sizes { positions, vocab, .. } = mixture.operands().sizes;
        let lists = match kept {
            Restriction::Each(lists) => lists,
            Restriction::Shared(ids) if !is_single(mixture) && ids.len() <= MOST_CANDIDATES => {
                let lists = IdLists::new(std::iter::repeat_n(ids.clone(), positions));
                return Self::of_candidates(mixture, lists, workspace_bytes);
            }
            Restriction::All | Restriction::Shared(_) => return Self::of_all(mixture, kept),
        };
        let is_short = if is_single(mixture) {
            lists.ids().len() * GATHERED_OVER_PRODUCT <= positions * lists.union().len().min(vocab)
        } else {
            lists.longest() <= MOST_CANDIDATES
        };
        match (is_short, is_single(mixture)) {
            (true, true) => Self::of_lists(mixture, lists.clone()),
            (true, false) => Self::of_candidates(mixture, lists.clone(), workspace_bytes),
            (false, _) => Self::of_all(mixture, kept),
        }
    }

    /// A single softmax: the logits of the lists alone.
    fn of_lists(mixture: &Mixture, lists: IdLists) -> Result<Self> {
        let lists = Arc::new(lists);
        let (logits, leaves) = logits_of_lists(mixture, &lists)?;
        let log_probs = log_softmax_within(&logits, lists.mask())?;
        Ok(SetLogProbs { log_probs, columns: ColumnIds::Each(lists), leaves })
    }

    /// A mixture of several softmaxes: the log-probabilities of the lists among all ids, renormalised.
    fn of_candidates(mixture: &Mixture, lists: IdLists, workspace_bytes: Option<usize>) -> Result<Self> {
        let (positions, n) = (lists.len(), lists.longest());
        let device = mixture.operands().contexts.device();
        let candidates = Tensor::from_vec(lists.padded(), [mixture.leading(), &[n]].concat(), device)?;
        let scores = mixture.score(&candidates, &ScoreOptions { workspace_bytes, ..ScoreOptions::new() })?;
        let log_probs = log_softmax_within(&scores.log_prob.reshape((positions, n))?, lists.mask())?;
        Ok(SetLogProbs { log_probs, columns: ColumnIds::Each(Arc::new(lists)), leaves: scores.leaves })
    }

    /// The log-probabilities of all ids, for a single softmax of those in any set, renormalised.
    pub(super) fn of_all(mixture: &Mixture, kept: &Restriction) -> Result<Self> {
        let Sizes { positions, vocab, .. } = mixture.operands().sizes;
        let dtype = accumulation_dtype("contexts", mixture.operands().contexts.dtype())?;
        let matrix = |mixture: &Mixture| -> Result<Tensor> {
            Ok(mixture.log_probs_as(dtype)?.reshape((positions, mixture.operands().sizes.vocab))?)
        };
        let union = match kept {
            Restriction::All => {
                return Ok(SetLogProbs { log_probs: matrix(mixture)?, columns: ColumnIds::All, leaves: Vec::new() });
            }
            Restriction::Shared(ids) => ids.clone(),
            Restriction::Each(lists) => lists.union(),
        };
        let (log_probs, columns, leaves) = match (is_single(mixture) && union.len() < vocab, kept) {
            (true, _) => {
                let (mixture, leaves) = gathered(mixture, &union)?;
                (matrix(&mixture)?, ColumnIds::Shared(union), leaves)
            }
            (false, Restriction::Shared(ids)) => {
                let index = Tensor::new(ids.as_slice(), mixture.operands().contexts.device())?;
                (matrix(mixture)?.index_select(&index, 1)?, ColumnIds::Shared(union), Vec::new())
            }
            (false, _) => (matrix(mixture)?, ColumnIds::All, Vec::new()),
        };
        let n = log_probs.dim(1)?;
        let mask = match kept {
            Restriction::Each(lists) => {
                let mut mask = vec![0u8; positions * n];
                for (row, list) in mask.chunks_exact_mut(n).zip(lists.iter()) {
                    list.iter().for_each(|&id| row[columns.place(0, id)] = 1);
                }
                Some(mask)
            }
            Restriction::All | Restriction::Shared(_) => None,
        };
        Ok(SetLogProbs { log_probs: log_softmax_within(&log_probs, mask)?, columns, leaves })
    }

    /// The columns of `n` ids at each position, `[positions, n]`.
    pub(super) fn places(&self, asked: &[usize], n: usize) -> Result<Tensor> {
        let place = |(i, &id): (usize, &usize)| self.columns.place(i / n, id as u32) as u32;
        let places: Vec<u32> = asked.iter().enumerate().map(place).collect();
        transfer::to_device(places, (self.log_probs.dim(0)?, n), self.log_probs.device())
    }

    /// The log-probabilities of all ids, `[positions, vocab]`, minus infinity outside a set. The columns are not lists.
    pub(super) fn expanded(&self, vocab: usize) -> Result<Tensor> {
        match &self.columns {
            ColumnIds::Shared(ids) => expanded(&self.log_probs, ids, vocab),
            ColumnIds::All | ColumnIds::Each(_) => Ok(self.log_probs.clone()),
        }
    }
}

impl ColumnIds {
    /// The column of an id that is among the ids of a position.
    fn place(&self, position: usize, id: u32) -> usize {
        let search = |ids: &[u32]| ids.binary_search(&id).unwrap_or(0);
        match self {
            ColumnIds::All => id as usize,
            ColumnIds::Shared(ids) => search(ids),
            ColumnIds::Each(lists) => search(lists.list(position)),
        }
    }
}

/// `[positions, vocab]` from the columns `[positions, n]` of `ids`; the others are minus infinity.
pub(super) fn expanded(columns: &Tensor, ids: &[u32], vocab: usize) -> Result<Tensor> {
    let (positions, n) = columns.dims2()?;
    let outside = Tensor::full(f32::NEG_INFINITY, (positions, 1), columns.device())?.to_dtype(columns.dtype())?;
    let mut place = vec![n as u32; vocab];
    ids.iter().enumerate().for_each(|(i, &id)| place[id as usize] = i as u32);
    let place = Tensor::from_vec(place, vocab, columns.device())?;
    Ok(Tensor::cat(&[columns, &outside], 1)?.index_select(&place, 1)?)
}

/// The log-softmax of each row over the places where the mask is not zero; minus infinity elsewhere, where nothing, NaN
/// included, has an effect or a gradient.
fn log_softmax_within(rows: &Tensor, mask: Option<Vec<u8>>) -> Result<Tensor> {
    let kept = match mask {
        Some(mask) => {
            let outside = Tensor::full(f32::NEG_INFINITY, rows.shape(), rows.device())?.to_dtype(rows.dtype())?;
            Tensor::from_vec(mask, rows.shape(), rows.device())?.where_cond(rows, &outside)?
        }
        None => rows.clone(),
    };
    let relative = kept.broadcast_sub(&kept.detach().max_keepdim(D::Minus1)?)?;
    Ok(relative.broadcast_sub(&relative.exp()?.sum_keepdim(D::Minus1)?.log()?)?)
}
