//! A teacher that gives a log-probability to the ids of a list alone. The divergence is a function of the student's
//! log-probabilities of these ids and of the mass outside them.

use std::collections::HashSet;
use std::ops::Range;

use candle_core::{DType, Device, Tensor, D};

use super::options::{DistillOptions, MissingIds, TeacherList};
use super::terms::{mix_objectives, DistillTerms};
use crate::backend::divergence::{log_add, outcome_terms, weighted, Divergence, OutcomeSum};
use crate::error::{Error, Result};
use crate::loss::{CountedPositions, OutputShape};
use crate::scores::ScoreOptions;
use crate::tensors::checks::{
    accumulation_dtype, check_device, check_elements, check_sizes, check_targets, check_weights, max_log_prob,
    LOG_PROBS,
};
use crate::tensors::log_softmax::log_sum_exp;
use crate::tensors::transfer;

/// The least probability of all missing ids together, with [`MissingIds::Tail`].
const LEAST_TAIL: f64 = 1e-7;

/// The teacher's lists at the `n` positions that count.
#[derive(Clone)]
pub(super) struct ListTeacher {
    /// `[n, ids]`: the ids of the list, in which the first known one stands for padding, and then the target if it
    /// takes part in the objective.
    pub(super) token_ids: Tensor,
    /// `[n, list]`: the teacher's log-probabilities, in the accumulation dtype; minus infinity for padding.
    log_probs: Tensor,
    /// `[n, list]`: one for a known id, and zero for padding.
    is_known: Tensor,
    /// `[n]`: zero where the list is padding alone, so that its first id is missing too, and minus infinity elsewhere.
    /// `None` if each list has a known id.
    is_unknown: Option<Tensor>,
    /// The missing ids, if the teacher gives them a probability.
    tail: Option<Tail>,
    /// `[n]`: one where the target is in the list. `None` if targets take no part in the objective.
    has_target: Option<Tensor>,
}

/// All missing ids, as one outcome of the teacher's distribution.
#[derive(Clone)]
struct Tail {
    /// `[n]`: the logarithm of its probability.
    log_prob: Tensor,
    /// `[n]`, u8: one where rounding may be all of its probability, or no id is missing.
    may_be_empty: Tensor,
}

/// The student's scores at the positions of a chunk.
pub(super) struct ListScores {
    /// `[chunk, ids]`: the log-probabilities of [`ListTeacher::token_ids`].
    pub(super) log_prob: Tensor,
    /// `[chunk]`: the logarithm of the mass outside these ids.
    pub(super) log_outside: Tensor,
}

/// The student's log-probabilities of the ids that a list lacks, `[chunk]` each. An id that the list has counts as
/// minus infinity.
struct MissingScores {
    /// That of the target, if it takes part in the objective.
    target: Option<Tensor>,
    /// That of the list's first id, which is missing if the list is padding alone.
    first: Option<Tensor>,
    /// That of all missing ids together.
    all: Tensor,
}

/// The teacher's lists at the positions that count, on the host: `n` ids for each position.
struct HostLists {
    n: usize,
    token_ids: Vec<i64>,
    log_probs: Vec<f64>,
    is_known: Vec<f64>,
}

impl HostLists {
    /// Reads the ids `[positions, n]` and their log-probabilities, and checks them. Ids of probability zero, and those
    /// that occurred before in the list, become padding.
    fn new(token_ids: &Tensor, log_probs: &Tensor, counted: &CountedPositions, vocab: usize) -> Result<Self> {
        let n = token_ids.dim(1)?;
        let on_host = |tensor: &Tensor, dtype| {
            counted.select_rows(tensor)?.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(dtype)
        };
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
        Ok(HostLists { n, token_ids, log_probs, is_known })
    }

    /// Returns the log-probabilities of each position's known ids.
    fn known(&self) -> impl Iterator<Item = impl Iterator<Item = f64> + Clone + '_> + '_ {
        let lists = self.log_probs.chunks_exact(self.n).zip(self.is_known.chunks_exact(self.n));
        lists.map(|(log_probs, is_known)| {
            log_probs.iter().zip(is_known).filter(|(_, &known)| known != 0.0).map(|(&x, _)| x)
        })
    }

    /// Applies a temperature to the log-probabilities, and renormalises them over each list.
    fn renormalized(&self, temperature: f64) -> Vec<f64> {
        let norms = self.known().map(|log_probs| log_sum_exp(log_probs, temperature));
        let lists = self.log_probs.chunks_exact(self.n).zip(norms);
        lists.flat_map(|(list, norm)| list.iter().map(move |x| x / temperature - norm)).collect()
    }

    /// Returns the logarithm of the probability that each list leaves, and 1 if rounding may be all of it or no id is
    /// missing.
    fn tails(&self, vocab: usize, dtype: DType) -> (Vec<f64>, Vec<u8>) {
        let tail = |log_probs: &mut dyn Iterator<Item = f64>| {
            let (count, sum) = log_probs.fold((0, 0.0), |(count, sum), x| (count + 1, sum + x.exp()));
            let left = 1.0 - sum;
            (f64::max(left, LEAST_TAIL).ln(), u8::from(left <= rounding(dtype) || count == vocab))
        };
        self.known().map(|mut log_probs| tail(&mut log_probs)).unzip()
    }
}

/// Returns the largest difference that rounding explains between one and the sum of a list's probabilities in this
/// dtype.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => LEAST_TAIL,
        DType::F32 => 1e-5,
        _ => 1.0 / 64.0,
    }
}

impl ListTeacher {
    /// Checks the teacher's lists and reads those of the positions that count, which waits for their device.
    pub(super) fn new(
        list: &TeacherList,
        student: OutputShape,
        counted: &CountedPositions,
        options: &DistillOptions,
    ) -> Result<Self> {
        let TeacherList { token_ids, log_probs, missing } = list;
        let OutputShape { leading, vocab, like } = student;
        let (dtype, device) = (accumulation_dtype("hidden", like.dtype())?, like.device());
        let Some(&n) = token_ids.dims().last() else {
            return Err(Error::shape("token_ids of the teacher", "[.., n]", token_ids.dims()));
        };
        check_sizes(&[("the teacher's list", n)])?;
        let dims = [leading, &[n]].concat();
        check_elements("token_ids of the teacher", &dims)?;
        check_targets("token_ids of the teacher", token_ids, &dims)?;
        check_device("token_ids of the teacher", token_ids, like)?;
        check_weights("log_probs of the teacher", log_probs, &dims, like)?;
        let positions: usize = leading.iter().product();
        let (token_ids, log_probs) = (token_ids.reshape((positions, n))?, log_probs.reshape((positions, n))?);
        let lists = HostLists::new(&token_ids, &log_probs, counted, vocab)?;

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

    /// Returns what the student must compute: the options of its scores.
    pub(super) fn score_options(&self, options: &DistillOptions) -> ScoreOptions {
        // Even if the missing ids have probability zero, the mixture of both distributions gives them that of the
        // student.
        let needs_outside = self.tail.is_some() || matches!(options.divergence, Divergence::JensenShannon(_));
        let scores = ScoreOptions::new().with_temperature(options.temperature).with_outside(needs_outside);
        ScoreOptions { workspace_bytes: options.workspace_bytes, ..scores }
    }

    /// Computes the terms of some positions from the student's scores of the teacher's ids. The derivatives,
    /// `[chunk, ids + 1]`, are those by the log-probabilities of the ids and by the logarithm of the mass outside them.
    pub(super) fn terms(
        &self,
        positions: &Range<usize>,
        scores: &ListScores,
        counted: &CountedPositions,
        options: &DistillOptions,
    ) -> Result<DistillTerms> {
        let scales = &counted.chunk_scales(positions)?;
        let chunk = |tensor: &Tensor| tensor.narrow(0, positions.start, positions.len());
        let (divergence, n) = (options.divergence, self.log_probs.dim(1)?);
        let (in_list, hard) = (scores.log_prob.narrow(1, 0, n)?, options.hard_weight);
        // A list's padding is another of its ids, which counts once.
        let known = (in_list.exp()? * chunk(&self.is_known)?)?;
        let missing = self.missing_scores(positions, scores)?;
        // The last outcome is that of the missing ids.
        let (objective, slopes) = divergence.combine_sums(|sum| {
            let (terms, by_list) = outcome_terms(sum, &chunk(&self.log_probs)?, &in_list, &known)?;
            let mut value = terms.sum(D::Minus1)?;
            let by_missing = match self.missing_terms(positions, &missing.all, sum)? {
                Some((terms, slopes)) => {
                    value = (value + terms)?;
                    slopes
                }
                None => missing.all.zeros_like()?,
            };
            Ok((value, Tensor::cat(&[by_list, by_missing.unsqueeze(1)?], 1)?))
        })?;
        let (by_list, by_missing) = (slopes.narrow(1, 0, n)?, slopes.narrow(1, n, 1)?.squeeze(1)?);
        counted.check_finite(positions, &objective)?;
        let scaled = |derivatives: &Tensor| derivatives.broadcast_mul(&(scales * (1.0 - hard))?.unsqueeze(1)?);
        // An outcome's part of the derivative is in proportion to its probability among the missing ids.
        let part = |log_p: &Tensor| weighted(&by_missing, &(log_p - &missing.all)?.exp()?)?.unsqueeze(1);
        let mut by_list = scaled(&by_list)?;
        if let Some(first) = &missing.first {
            let by_first = scaled(&part(first)?)?.pad_with_zeros(1, 0, n - 1)?;
            by_list = (by_list + by_first)?;
        }
        let mut derivatives = vec![by_list];
        let mut nll = None;
        if let Some(target) = &missing.target {
            derivatives.push((scaled(&part(target)?)? - (scales * hard)?.unsqueeze(1)?)?);
            nll = Some(self.target_log_prob(scores)?.neg()?);
        }
        derivatives.push(scaled(&part(&scores.log_outside)?)?);
        let objective = mix_objectives(objective, nll, hard)?;
        Ok(DistillTerms { objective, derivatives: Tensor::cat(&derivatives, 1)? })
    }

    /// The student's log-probability of each target, `[chunk]`, which follows the list in the scores.
    fn target_log_prob(&self, scores: &ListScores) -> Result<Tensor> {
        Ok(scores.log_prob.narrow(1, self.log_probs.dim(1)?, 1)?.squeeze(1)?)
    }

    /// Finds the student's log-probabilities of the ids that the teacher's lists lack at some positions.
    fn missing_scores(&self, positions: &Range<usize>, scores: &ListScores) -> Result<MissingScores> {
        let chunk = |tensor: &Tensor| tensor.narrow(0, positions.start, positions.len());
        let target = |has_target: &Tensor| {
            let log_p = self.target_log_prob(scores)?;
            let is_outside = chunk(has_target)?.eq(0.0)?;
            Ok::<_, Error>(is_outside.where_cond(&log_p, &(log_p.zeros_like()? + f64::NEG_INFINITY)?)?)
        };
        let target = self.has_target.as_ref().map(target).transpose()?;
        let first = |is_unknown: &Tensor| scores.log_prob.narrow(1, 0, 1)?.squeeze(1)? + chunk(is_unknown)?;
        let first = self.is_unknown.as_ref().map(first).transpose()?;
        let mut all = scores.log_outside.clone();
        for log_p in target.iter().chain(&first) {
            all = log_add(&all, log_p)?;
        }
        Ok(MissingScores { target, first, all })
    }

    /// Computes what the missing ids, as one outcome with these log-probabilities under the student, add to a sum over
    /// outcomes at some positions, and its derivatives by the log-probabilities; `None` if they add nothing.
    fn missing_terms(
        &self,
        positions: &Range<usize>,
        log_missing: &Tensor,
        sum: OutcomeSum,
    ) -> Result<Option<(Tensor, Tensor)>> {
        let chunk = |tensor: &Tensor| tensor.narrow(0, positions.start, positions.len());
        Ok(match (&self.tail, sum) {
            (Some(tail), _) => {
                let probability = log_missing.exp()?;
                let (terms, slopes) = outcome_terms(sum, &chunk(&tail.log_prob)?, log_missing, &probability)?;
                let is_empty = (log_missing.eq(f64::NEG_INFINITY)? * chunk(&tail.may_be_empty)?)?;
                let zero = terms.zeros_like()?;
                Some((is_empty.where_cond(&zero, &terms)?, is_empty.where_cond(&zero, &slopes)?))
            }
            // The teacher gives the missing ids no probability: the student's part of the divergence is left.
            (None, OutcomeSum::JensenShannon(beta)) => {
                let terms = (log_missing.exp()? * (-(1.0 - beta) * (1.0 - beta).ln()))?;
                Some((terms.clone(), terms))
            }
            (None, _) => None,
        })
    }
}
