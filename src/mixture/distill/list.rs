//! A teacher of which only some ids are known: the divergence is a function of the scores of these ids and of the mass
//! outside them.

use std::ops::Range;

use candle_core::{DType, Tensor, D};

use super::options::{DistillOptions, MissingIds};
use super::positions::Counted;
use super::terms::{check_dims, mixed, Terms};
use crate::backend::contract::accumulation_dtype;
use crate::backend::divergence::{log_add, terms_of, weighted, Divergence};
use crate::error::{Error, Result};
use crate::scores::ScoreOptions;
use crate::tensors::checks::{check_float, check_sizes, check_targets};

/// The least probability of the ids that are missing, with [`MissingIds::Tail`].
const LEAST_TAIL: f64 = 1e-7;

/// The lists of the positions that count.
#[derive(Clone)]
pub(super) struct ListTeacher {
    /// `[n, ids]`: the list, with an id of the list in place of padding, and the target if it takes part
    pub(super) token_ids: Tensor,
    /// `[n, list]`: log-probabilities, in the accumulation dtype; minus infinity for padding
    log_probs: Tensor,
    /// `[n, list]`: 1 where there is no padding
    is_known: Tensor,
    /// `[n]`: the logarithm of the probability of the ids that are missing, if they have one
    log_tail: Option<Tensor>,
    /// `[n]`: 1 where the target is in the list
    has_target: Option<Tensor>,
}

impl ListTeacher {
    pub(super) fn new(
        leading: &[usize],
        like: &Tensor,
        (token_ids, log_probs, missing): (&Tensor, &Tensor, MissingIds),
        counted: &Counted,
        options: &DistillOptions,
    ) -> Result<Self> {
        let dtype = accumulation_dtype("hidden", like.dtype())?;
        let Some(&n) = token_ids.dims().last() else {
            return Err(Error::shape("token_ids of the teacher", "[.., n]", token_ids.dims()));
        };
        check_sizes(&[("the teacher's list", n)])?;
        let dims = [leading, &[n]].concat();
        check_targets("token_ids of the teacher", token_ids, &dims)?;
        check_dims("token_ids of the teacher", token_ids, &dims, like)?;
        check_dims("log_probs of the teacher", log_probs, &dims, like)?;
        check_float("log_probs of the teacher", log_probs)?;
        let positions: usize = leading.iter().product();
        let token_ids = counted.rows(&token_ids.reshape((positions, n))?)?;
        let mut log_probs = counted.rows(&log_probs.reshape((positions, n))?)?.to_dtype(dtype)?;
        if token_ids.elem_count() == 0 {
            let is_known = log_probs.clone();
            return Ok(ListTeacher { token_ids, log_probs, is_known, log_tail: None, has_target: None });
        }
        let is_padding = log_probs.eq(f64::NEG_INFINITY)?;
        let first = token_ids.gather(&is_padding.argmin_keepdim(D::Minus1)?, 1)?.broadcast_as(token_ids.shape())?;
        let mut token_ids = is_padding.where_cond(&first, &token_ids)?.to_dtype(DType::I64)?;
        let is_known = (is_padding.to_dtype(dtype)?.affine(-1.0, 1.0))?;
        let mut log_tail = None;
        match missing {
            MissingIds::Zero => {}
            MissingIds::Renormalized => {
                let tempered = (log_probs / options.temperature)?;
                let largest = tempered.max_keepdim(D::Minus1)?;
                let sum = tempered.broadcast_sub(&largest)?.exp()?.sum_keepdim(D::Minus1)?.log()?;
                log_probs = tempered.broadcast_sub(&(largest + sum)?)?;
            }
            MissingIds::Tail => {
                let tail = log_probs.exp()?.sum(D::Minus1)?.affine(-1.0, 1.0)?;
                log_tail = Some(tail.maximum(LEAST_TAIL)?.log()?);
            }
        }
        let mut has_target = None;
        if let Some(targets) = counted.targets.as_ref().filter(|_| options.is_mixed()) {
            let targets = targets.unsqueeze(1)?;
            has_target = Some(token_ids.broadcast_eq(&targets)?.max(D::Minus1)?.to_dtype(dtype)?);
            token_ids = Tensor::cat(&[token_ids, targets], 1)?;
        }
        Ok(ListTeacher { token_ids: token_ids.contiguous()?, log_probs, is_known, log_tail, has_target })
    }

    /// The number of ids of a list, padding included.
    pub(super) fn len(&self) -> usize {
        self.log_probs.dims().last().copied().unwrap_or(0)
    }

    /// What the student is asked for.
    pub(super) fn score_options(&self, options: &DistillOptions) -> ScoreOptions {
        // With a zero outside the list, the mixture of both distributions has the student's part there.
        let outside = self.log_tail.is_some() || matches!(options.divergence, Divergence::JensenShannon(_));
        let scores = ScoreOptions::new().with_temperature(options.temperature).with_outside(outside);
        ScoreOptions { workspace_bytes: options.workspace_bytes, ..scores }
    }

    /// The terms of some positions, from the log-probabilities of the ids and of the mass outside them: the derivatives by
    /// both, `[chunk, ids + 1]`.
    pub(super) fn terms(
        &self,
        positions: &Range<usize>,
        (log_prob, log_outside): (Tensor, Tensor),
        scales: &Tensor,
        options: &DistillOptions,
    ) -> Result<Terms> {
        let of = |tensor: &Tensor| tensor.narrow(0, positions.start, positions.len());
        let (divergence, n) = (options.divergence, self.log_probs.dim(1)?);
        let (in_list, hard) = (log_prob.narrow(1, 0, n)?, options.hard_weight);
        // A list's padding is another of its ids, which counts once.
        let known = (in_list.exp()? * of(&self.is_known)?)?;
        let (terms, by_list) = terms_of(divergence, &of(&self.log_probs)?, &in_list, &known)?;
        let mut objective = terms.sum(D::Minus1)?;
        // Outside the list there may also be the target.
        let of_target = self.has_target.as_ref().map(|has_target| {
            let log_p = log_prob.narrow(1, n, 1)?.squeeze(1)?;
            let is_outside = of(has_target)?.eq(0.0)?;
            Ok::<_, Error>((log_p.clone(), is_outside.where_cond(&log_p, &(log_p.zeros_like()? + f64::NEG_INFINITY)?)?))
        });
        let of_target = of_target.transpose()?;
        let log_missing = match &of_target {
            Some((_, outside)) => log_add(&log_outside, outside)?,
            None => log_outside.clone(),
        };
        let by_missing = match (&self.log_tail, divergence) {
            (Some(log_tail), _) => {
                let (terms, slope) = terms_of(divergence, &of(log_tail)?, &log_missing, &log_missing.exp()?)?;
                // Where no id is missing, nothing is.
                let is_none = log_missing.eq(f64::NEG_INFINITY)?;
                let zero = terms.zeros_like()?;
                objective = (objective + is_none.where_cond(&zero, &terms)?)?;
                is_none.where_cond(&zero, &slope)?
            }
            (None, Divergence::JensenShannon(beta)) => {
                let of_student = (log_missing.exp()? * (-(1.0 - beta) * (1.0 - beta).ln()))?;
                objective = (objective + &of_student)?;
                of_student
            }
            (None, _) => log_missing.zeros_like()?,
        };
        let scaled = |derivatives: &Tensor| derivatives.broadcast_mul(&(scales * (1.0 - hard))?.unsqueeze(1)?);
        let share = |log_p: &Tensor| weighted(&by_missing, &(log_p - &log_missing)?.exp()?)?.unsqueeze(1);
        let mut derivatives = vec![scaled(&by_list)?];
        let mut nll = None;
        if let Some((log_p, outside)) = &of_target {
            derivatives.push((scaled(&share(outside)?)? - (scales * hard)?.unsqueeze(1)?)?);
            nll = Some(log_p.neg()?);
        }
        derivatives.push(scaled(&share(&log_outside)?)?);
        Ok(Terms { objective: mixed(objective, nll, hard)?, derivatives: Tensor::cat(&derivatives, 1)? })
    }
}
