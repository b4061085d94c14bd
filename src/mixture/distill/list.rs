//! A teacher of which only some ids are known: the divergence is a function of the scores of these ids and of the mass
//! outside them.

use std::collections::HashSet;
use std::ops::Range;

use candle_core::{DType, Device, Tensor, D};

use super::options::{DistillOptions, MissingIds};
use super::positions::Counted;
use super::terms::{check_dims, mixed, DistillTerms};
use crate::backend::divergence::{log_add, terms_of, weighted, Divergence};
use crate::backend::operands::accumulation_dtype;
use crate::error::{Error, Result};
use crate::scores::ScoreOptions;
use crate::tensors::checks::{check_float, check_sizes, check_targets, max_log_prob, LOG_PROBS};
use crate::tensors::transfer;

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
    /// `[n]`: minus infinity, but zero where no id is known, so that the first of the list is missing too; `None` if each
    /// list has an id
    is_unknown: Option<Tensor>,
    /// The probability of the ids that are missing, if they have one
    tail: Option<Tail>,
    /// `[n]`: 1 where the target is in the list
    has_target: Option<Tensor>,
}

/// The ids that are missing, as another outcome.
#[derive(Clone)]
struct Tail {
    /// `[n]`: the logarithm of its probability
    log_prob: Tensor,
    /// `[n]`, u8: 1 where rounding may be all of it, or no id is missing
    may_be_empty: Tensor,
}

/// What is known of some positions, read on the host.
struct Lists {
    n: usize,
    token_ids: Vec<i64>,
    log_probs: Vec<f64>,
    is_known: Vec<f64>,
}

impl Lists {
    /// The ids `[positions, n]` and their log-probabilities. An id that is listed twice counts once; ids without a
    /// probability, and those that are listed again, become padding.
    fn new(token_ids: &Tensor, log_probs: &Tensor, counted: &Counted, vocab: usize) -> Result<Self> {
        let n = token_ids.dim(1)?;
        let on_host =
            |tensor: &Tensor, dtype| counted.rows(tensor)?.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(dtype);
        let most = max_log_prob(log_probs.dtype());
        let (mut token_ids, mut log_probs): (Vec<i64>, Vec<f64>) =
            (on_host(token_ids, DType::I64)?.to_vec1()?, on_host(log_probs, DType::F64)?.to_vec1()?);
        let mut is_known = vec![0.0; token_ids.len()];
        let mut seen = HashSet::new();
        let lists = token_ids.chunks_exact_mut(n).zip(log_probs.chunks_exact_mut(n)).zip(is_known.chunks_exact_mut(n));
        for (((ids, log_probs), is_known), &position) in lists.zip(&counted.positions) {
            let position = position as usize;
            seen.clear();
            for i in 0..n {
                let (id, log_prob) = (ids[i], log_probs[i]);
                if log_prob == f64::NEG_INFINITY || !seen.insert(id) {
                    log_probs[i] = f64::NEG_INFINITY;
                    continue;
                }
                if !usize::try_from(id).is_ok_and(|id| id < vocab) {
                    let (argument, position) = ("token_ids of the teacher", position * n + i);
                    return Err(Error::Target { argument, position, got: id, vocab_size: vocab });
                }
                if log_prob > most {
                    let argument = "log_probs of the teacher";
                    return Err(Error::Value { argument, expected: LOG_PROBS, position, index: i, got: log_prob });
                }
                is_known[i] = 1.0;
            }
            let first = (0..n).find(|&i| is_known[i] != 0.0).map_or(0, |i| ids[i]);
            (0..n).filter(|&i| is_known[i] == 0.0).for_each(|i| ids[i] = first);
        }
        Ok(Lists { n, token_ids, log_probs, is_known })
    }

    /// The known log-probabilities of each position.
    fn known(&self) -> impl Iterator<Item = impl Iterator<Item = f64> + Clone + '_> + '_ {
        let lists = self.log_probs.chunks_exact(self.n).zip(self.is_known.chunks_exact(self.n));
        lists.map(|(log_probs, is_known)| {
            log_probs.iter().zip(is_known).filter(|(_, &known)| known != 0.0).map(|(&x, _)| x)
        })
    }

    /// The log-probabilities at a temperature, renormalised over each list.
    fn renormalized(&self, temperature: f64) -> Vec<f64> {
        let norms = self.known().map(|log_probs| {
            let largest = log_probs.clone().fold(f64::NEG_INFINITY, f64::max);
            largest / temperature + log_probs.map(|x| ((x - largest) / temperature).exp()).sum::<f64>().ln()
        });
        let lists = self.log_probs.chunks_exact(self.n).zip(norms);
        lists.flat_map(|(list, norm)| list.iter().map(move |x| x / temperature - norm)).collect()
    }

    /// What the probabilities of each list leave, and whether no id may be missing.
    fn tails(&self, vocab: usize, dtype: DType) -> (Vec<f64>, Vec<u8>) {
        let tail = |log_probs: &mut dyn Iterator<Item = f64>| {
            let (count, sum) = log_probs.fold((0, 0.0), |(count, sum), x| (count + 1, sum + x.exp()));
            let left = 1.0 - sum;
            (f64::max(left, LEAST_TAIL).ln(), u8::from(left <= rounding(dtype) || count == vocab))
        };
        self.known().map(|mut log_probs| tail(&mut log_probs)).unzip()
    }
}

/// What rounding may leave of the probabilities of a list in this dtype.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => LEAST_TAIL,
        DType::F32 => 1e-5,
        _ => 1.0 / 64.0,
    }
}

impl ListTeacher {
    /// Reads the list, which waits for its device.
    pub(super) fn new(
        leading: &[usize],
        vocab: usize,
        like: &Tensor,
        (token_ids, log_probs, missing): (&Tensor, &Tensor, MissingIds),
        counted: &Counted,
        options: &DistillOptions,
    ) -> Result<Self> {
        let (dtype, device) = (accumulation_dtype("hidden", like.dtype())?, like.device());
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
        let (token_ids, log_probs) = (token_ids.reshape((positions, n))?, log_probs.reshape((positions, n))?);
        let lists = Lists::new(&token_ids, &log_probs, counted, vocab)?;

        let (positions, shape) = (counted.positions.len(), [counted.positions.len(), n]);
        let numbers = |values: Vec<f64>, shape: &[usize]| transfer::to_device_as(values, shape, dtype, device);
        let are_unknown: Vec<f64> = lists
            .is_known
            .chunks_exact(n)
            .map(|list| if list.contains(&1.0) { f64::NEG_INFINITY } else { 0.0 })
            .collect();
        let is_unknown = are_unknown.contains(&0.0).then(|| numbers(are_unknown, &[positions])).transpose()?;
        let mut tail = None;
        let known_log_probs = match missing {
            MissingIds::Zero => lists.log_probs.clone(),
            MissingIds::Renormalized => lists.renormalized(options.temperature),
            MissingIds::Tail => {
                let (left, may_be_empty) = lists.tails(vocab, log_probs.dtype());
                let may_be_empty = transfer::to_device(may_be_empty, positions, device)?;
                tail = Some(Tail { log_prob: numbers(left, &[positions])?, may_be_empty });
                lists.log_probs.clone()
            }
        };
        let (log_probs, is_known) = (numbers(known_log_probs, &shape)?, numbers(lists.is_known, &shape)?);
        let mut token_ids = transfer::to_device::<i64>(lists.token_ids, shape.as_slice(), device)?;
        let mut has_target = None;
        if let Some(targets) = counted.targets.as_ref().filter(|_| options.is_mixed() && positions > 0) {
            let targets = targets.unsqueeze(1)?;
            has_target = Some(token_ids.broadcast_eq(&targets)?.max(D::Minus1)?.to_dtype(dtype)?);
            token_ids = Tensor::cat(&[token_ids, targets], 1)?.contiguous()?;
        }
        Ok(ListTeacher { token_ids, log_probs, is_known, is_unknown, tail, has_target })
    }

    /// What the student is asked for.
    pub(super) fn score_options(&self, options: &DistillOptions) -> ScoreOptions {
        // With a zero outside the list, the mixture of both distributions has the student's part there.
        let outside = self.tail.is_some() || matches!(options.divergence, Divergence::JensenShannon(_));
        let scores = ScoreOptions::new().with_temperature(options.temperature).with_outside(outside);
        ScoreOptions { workspace_bytes: options.workspace_bytes, ..scores }
    }

    /// The terms of some positions, from the log-probabilities of the ids and of the mass outside them: the derivatives by
    /// both, `[chunk, ids + 1]`.
    pub(super) fn terms(
        &self,
        positions: &Range<usize>,
        (log_prob, log_outside): (Tensor, Tensor),
        counted: &Counted,
        options: &DistillOptions,
    ) -> Result<DistillTerms> {
        let scales = &counted.scales(positions)?;
        let of = |tensor: &Tensor| tensor.narrow(0, positions.start, positions.len());
        let (divergence, n) = (options.divergence, self.log_probs.dim(1)?);
        let (in_list, hard) = (log_prob.narrow(1, 0, n)?, options.hard_weight);
        // A list's padding is another of its ids, which counts once.
        let known = (in_list.exp()? * of(&self.is_known)?)?;
        let (terms, by_list) = terms_of(divergence, &of(&self.log_probs)?, &in_list, &known)?;
        let mut objective = terms.sum(D::Minus1)?;
        // Among the missing ids there may also be the target, and the first id of a list of padding alone.
        let of_target = self.has_target.as_ref().map(|has_target| {
            let log_p = log_prob.narrow(1, n, 1)?.squeeze(1)?;
            let is_outside = of(has_target)?.eq(0.0)?;
            Ok::<_, Error>((log_p.clone(), is_outside.where_cond(&log_p, &(log_p.zeros_like()? + f64::NEG_INFINITY)?)?))
        });
        let of_target = of_target.transpose()?;
        let first = |is_unknown: &Tensor| log_prob.narrow(1, 0, 1)?.squeeze(1)? + of(is_unknown)?;
        let first_missing = self.is_unknown.as_ref().map(first).transpose()?;
        let mut log_missing = log_outside.clone();
        for more in of_target.iter().map(|(_, outside)| outside).chain(&first_missing) {
            log_missing = log_add(&log_missing, more)?;
        }
        let by_missing = match (&self.tail, divergence) {
            (Some(tail), _) => {
                let (terms, slope) = terms_of(divergence, &of(&tail.log_prob)?, &log_missing, &log_missing.exp()?)?;
                let is_empty = (log_missing.eq(f64::NEG_INFINITY)? * of(&tail.may_be_empty)?)?;
                let zero = terms.zeros_like()?;
                objective = (objective + is_empty.where_cond(&zero, &terms)?)?;
                is_empty.where_cond(&zero, &slope)?
            }
            (None, Divergence::JensenShannon(beta)) => {
                let of_student = (log_missing.exp()? * (-(1.0 - beta) * (1.0 - beta).ln()))?;
                objective = (objective + &of_student)?;
                of_student
            }
            (None, _) => log_missing.zeros_like()?,
        };
        counted.check_finite(positions, &objective)?;
        let scaled = |derivatives: &Tensor| derivatives.broadcast_mul(&(scales * (1.0 - hard))?.unsqueeze(1)?);
        let share = |log_p: &Tensor| weighted(&by_missing, &(log_p - &log_missing)?.exp()?)?.unsqueeze(1);
        let mut by_list = scaled(&by_list)?;
        if let Some(first_missing) = &first_missing {
            let first_missing = scaled(&share(first_missing)?)?.pad_with_zeros(1, 0, n - 1)?;
            by_list = (by_list + first_missing)?;
        }
        let mut derivatives = vec![by_list];
        let mut nll = None;
        if let Some((log_p, outside)) = &of_target {
            derivatives.push((scaled(&share(outside)?)? - (scales * hard)?.unsqueeze(1)?)?);
            nll = Some(log_p.neg()?);
        }
        derivatives.push(scaled(&share(&log_outside)?)?);
        Ok(DistillTerms { objective: mixed(objective, nll, hard)?, derivatives: Tensor::cat(&derivatives, 1)? })
    }
}
