//! Divergences of a student's distributions from a teacher's (Agarwal et al., arXiv 2306.13649), and their computation
//! from candle's operations, which serves GPUs. The CPU has its own (`cpu/objective/divergence.rs`).

use candle_core::{DType, Tensor, D};

use crate::error::Result;
use crate::tensors::log_softmax::tempered;
use crate::tensors::transfer::number_like;

/// How far a student's distribution Q is from a teacher's T, in nats.
///
/// # Examples
///
/// ```
/// use mos_head::distill::Divergence;
///
/// assert_eq!(Divergence::default(), Divergence::ForwardKl);
/// let symmetric = Divergence::JensenShannon(0.5);
/// # let _ = symmetric;
/// ```
///
/// # References
///
/// Agarwal et al.: On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes. ICLR 2024, arXiv
/// 2306.13649, equation 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Divergence {
    /// `sum_v T(v) (log T(v) - log Q(v))`: the student covers what the teacher may say. It is infinite, which on the CPU is
    /// an error, where the student gives no probability to what the teacher may say. The default.
    #[default]
    ForwardKl,
    /// `sum_v Q(v) (log Q(v) - log T(v))`: the student seeks what the teacher is likely to say. It is infinite, which on the
    /// CPU is an error, where the teacher gives no probability to what the student may say.
    ReverseKl,
    /// `beta KL(T, M) + (1 - beta) KL(Q, M)` with `M = beta T + (1 - beta) Q`, for beta between 0 and 1. At both ends it
    /// is zero for all distributions, so that they are errors; divided by beta it tends to `KL(T, Q)` at 0, divided by
    /// 1 - beta to `KL(Q, T)` at 1.
    JensenShannon(f64),
}

/// The divergence of rows of log-probabilities, without these rows.
#[derive(Clone, Debug)]
pub(crate) struct DivergenceTerms {
    pub(crate) divergence: Divergence,
    /// The temperature of both distributions.
    pub(crate) temperature: f64,
    /// `[n]`, in the accumulation dtype: the factor of each row's derivatives.
    pub(crate) scales: Tensor,
}

/// Computes the divergence of each row of log-probabilities `[n, vocab]`, `[n]`, and its derivatives by these, times the
/// scales.
pub(crate) fn composed(log_probs: &Tensor, log_teacher: &Tensor, terms: &DivergenceTerms) -> Result<(Tensor, Tensor)> {
    let &DivergenceTerms { divergence, temperature, ref scales } = terms;
    let (log_q, log_t) = (tempered(log_probs, temperature)?, tempered(log_teacher, temperature)?);
    let q = log_q.exp()?;
    let (terms, slopes) = terms_of(divergence, &log_t, &log_q, &q)?;
    let scales = scales.unsqueeze(1)?;
    let derivatives = if temperature != 1.0 {
        let normalisation = q.broadcast_mul(&slopes.sum_keepdim(D::Minus1)?)?;
        (slopes - normalisation)?.broadcast_mul(&(scales / temperature)?)?
    } else {
        slopes.broadcast_mul(&scales)?
    };
    Ok((not_negative(&terms.sum(D::Minus1)?)?, derivatives))
}

/// Computes each outcome's term of the divergence, and the derivative of the divergence by the student's log-probability
/// of the outcome, up to a constant times the probability. The operands are the log-probabilities of teacher and student,
/// and the student's probabilities `q`, which are zero where an outcome does not count.
pub(crate) fn terms_of(divergence: Divergence, log_t: &Tensor, log_q: &Tensor, q: &Tensor) -> Result<(Tensor, Tensor)> {
    Ok(match divergence {
        Divergence::ForwardKl => {
            let t = log_t.exp()?;
            (weighted(&t, &(log_t - log_q)?)?, t.neg()?)
        }
        Divergence::ReverseKl => {
            let terms = weighted(q, &(log_q - log_t)?)?;
            (terms.clone(), terms)
        }
        Divergence::JensenShannon(beta) => {
            let log_m = log_mixture(log_t, log_q, beta)?;
            let teacher_terms = weighted(&log_t.exp()?, &(log_t - &log_m)?)?;
            let student_terms = (weighted(q, &(log_q - &log_m)?)? * (1.0 - beta))?;
            (((teacher_terms * beta)? + &student_terms)?, student_terms)
        }
    })
}

/// Replaces values that rounding has moved below zero by zero; NaN stays NaN.
pub(crate) fn not_negative(values: &Tensor) -> Result<Tensor> {
    Ok(values.lt(0.0)?.where_cond(&values.zeros_like()?, values)?)
}

/// Computes `probability x`, which is zero for a probability of zero, whatever `x` is.
pub(crate) fn weighted(probability: &Tensor, x: &Tensor) -> Result<Tensor> {
    let is_zero = probability.eq(0.0)?;
    Ok(is_zero.where_cond(&probability.zeros_like()?, &(probability * x)?)?)
}

/// Computes `log(beta T + (1 - beta) Q)`.
fn log_mixture(log_t: &Tensor, log_q: &Tensor, beta: f64) -> Result<Tensor> {
    log_add(&(log_t + beta.ln())?, &(log_q + (1.0 - beta).ln())?)
}

/// Computes `log(e^a + e^b)`.
pub(crate) fn log_add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let largest = a.broadcast_maximum(b)?;
    // Where both are minus infinity, so is the sum.
    let reference = largest.broadcast_maximum(&number_like(a, finite_floor(a.dtype()))?)?;
    let sum = ((a - &reference)?.exp()? + (b - &reference)?.exp()?)?;
    Ok((sum.log()? + reference)?)
}

/// Returns a finite number in the place of minus infinity, far below the log-probabilities that finite logits have.
fn finite_floor(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => -1e300,
        _ => -1e30,
    }
}
