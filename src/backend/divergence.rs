//! Divergences of a student's distributions from a teacher's (Agarwal et al., arXiv 2306.13649; Samarin et al., arXiv
//! 2602.23881), and their computation from candle's operations, which serves GPUs. The CPU has its own
//! (`cpu/objective/divergence.rs`).

use candle_core::{DType, Tensor, D};

use crate::error::Result;
use crate::tensors::log_softmax::tempered;
use crate::tensors::transfer::number_like;

/// How far a student's distribution Q is from a teacher's T, in nats.
///
/// The last three train the drafter of speculative decoding (Leviathan et al., arXiv 2211.17192): the student drafts,
/// and the teacher accepts a draft with the probability `alpha = sum_v min(T(v), Q(v))`. Their derivatives have jumps
/// where `T(v) = Q(v)`, and take such an id as accepted: it has no part in them. With
/// [`MissingIds::Tail`](crate::distill::MissingIds::Tail), `alpha` is an upper bound, because the missing ids are one
/// outcome; otherwise missing ids add nothing to any of the sums.
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
/// - Agarwal et al.: On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes. ICLR 2024, arXiv
///   2306.13649, equation 1.
/// - Samarin et al.: LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding. ICML 2026, arXiv
///   2602.23881.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Divergence {
    /// `sum_v T(v) (log T(v) - log Q(v))`: the student covers what the teacher may say. It is infinite, which on the
    /// CPU is an error, where the student gives no probability to what the teacher may say. The default.
    #[default]
    ForwardKl,
    /// `sum_v Q(v) (log Q(v) - log T(v))`: the student seeks what the teacher is likely to say. It is infinite, which
    /// on the CPU is an error, where the teacher gives no probability to what the student may say.
    ReverseKl,
    /// `beta KL(T, M) + (1 - beta) KL(Q, M)` with `M = beta T + (1 - beta) Q`, for beta above 0 and below 1. At 0 and
    /// at 1 it would be zero for all distributions, so that these are errors; divided by beta it tends to `KL(T, Q)` at
    /// 0, divided by 1 - beta to `KL(Q, T)` at 1.
    JensenShannon(f64),
    /// `sum_v max(0, T(v) - Q(v))`, half the sum of `|T(v) - Q(v)|`: the probability `1 - alpha` that a draft is
    /// rejected. Far from the teacher its derivatives are small.
    TotalVariation,
    /// `-log alpha`, which has the derivatives of the total variation divided by `alpha`. For a teacher that is certain
    /// of an id it is the cross-entropy. It is infinite, which on the CPU is an error, where no id is possible for
    /// both.
    NegLogAcceptance,
    /// `lambda KL(T, Q) + (1 - lambda) TV(T, Q)` with `lambda = exp(-eta alpha)` for the forward divergence and the
    /// total variation above. The weight `lambda` is a constant of each position: it has no derivative. eta is at least
    /// 0; at 0 this is [`Divergence::ForwardKl`]. The paper takes 3.
    LkHybrid(f64),
}

/// A sum over the outcomes of both distributions. A divergence is one, or a function of some.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OutcomeSum {
    ForwardKl,
    ReverseKl,
    JensenShannon(f64),
    /// `sum_v max(0, T(v) - Q(v))`
    TotalVariation,
    /// `sum_v min(T(v), Q(v))`
    Acceptance,
}

impl Divergence {
    /// Computes this divergence, `[n]`, and its derivatives, `[n, outcomes]`, from those of sums over outcomes.
    pub(crate) fn combine_sums(self, sum: impl Fn(OutcomeSum) -> Result<(Tensor, Tensor)>) -> Result<(Tensor, Tensor)> {
        match self {
            Divergence::ForwardKl => sum(OutcomeSum::ForwardKl),
            Divergence::ReverseKl => sum(OutcomeSum::ReverseKl),
            Divergence::JensenShannon(beta) => sum(OutcomeSum::JensenShannon(beta)),
            Divergence::TotalVariation => sum(OutcomeSum::TotalVariation),
            Divergence::NegLogAcceptance => {
                let (acceptance, slopes) = sum(OutcomeSum::Acceptance)?;
                let slopes = slopes.broadcast_div(&acceptance.neg()?.unsqueeze(1)?)?;
                Ok((acceptance.log()?.neg()?, slopes))
            }
            Divergence::LkHybrid(eta) => {
                let lambda = (sum(OutcomeSum::Acceptance)?.0 * -eta)?.exp()?;
                let rest = (1.0 - &lambda)?;
                let (kl, by_kl) = sum(OutcomeSum::ForwardKl)?;
                let (variation, by_variation) = sum(OutcomeSum::TotalVariation)?;
                let slopes =
                    (by_kl.broadcast_mul(&lambda.unsqueeze(1)?)? + by_variation.broadcast_mul(&rest.unsqueeze(1)?)?)?;
                // A divergence that is infinite remains so where its weight is rounded to zero.
                let value = ((lambda * &kl)? + (rest * variation)?)?;
                Ok((kl.eq(f64::INFINITY)?.where_cond(&kl, &value)?, slopes))
            }
        }
    }
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

/// Computes the divergence of each row of log-probabilities `[n, vocab]`, `[n]`, and its derivatives by these, times
/// the scales.
pub(crate) fn composed(log_probs: &Tensor, log_teacher: &Tensor, terms: &DivergenceTerms) -> Result<(Tensor, Tensor)> {
    let &DivergenceTerms { divergence, temperature, ref scales } = terms;
    let (log_q, log_t) = (tempered(log_probs, temperature)?, tempered(log_teacher, temperature)?);
    let q = log_q.exp()?;
    let (values, slopes) = divergence.combine_sums(|sum| {
        let (terms, slopes) = outcome_terms(sum, &log_t, &log_q, &q)?;
        Ok((terms.sum(D::Minus1)?, slopes))
    })?;
    let scales = scales.unsqueeze(1)?;
    let derivatives = if temperature != 1.0 {
        let normalisation = q.broadcast_mul(&slopes.sum_keepdim(D::Minus1)?)?;
        (slopes - normalisation)?.broadcast_mul(&(scales / temperature)?)?
    } else {
        slopes.broadcast_mul(&scales)?
    };
    Ok((not_negative(&values)?, derivatives))
}

/// Computes each outcome's term of a sum, and the derivative of the sum by the student's log-probability of the
/// outcome, up to a constant times the probability. The operands are the log-probabilities of teacher and student, and
/// the student's probabilities `q`, which are zero where an outcome does not count.
pub(crate) fn outcome_terms(sum: OutcomeSum, log_t: &Tensor, log_q: &Tensor, q: &Tensor) -> Result<(Tensor, Tensor)> {
    Ok(match sum {
        OutcomeSum::ForwardKl => {
            let t = log_t.exp()?;
            (weighted(&t, &(log_t - log_q)?)?, t.neg()?)
        }
        OutcomeSum::ReverseKl => {
            let terms = weighted(q, &(log_q - log_t)?)?;
            (terms.clone(), terms)
        }
        OutcomeSum::JensenShannon(beta) => {
            let log_m = log_mixture(log_t, log_q, beta)?;
            let teacher_terms = weighted(&log_t.exp()?, &(log_t - &log_m)?)?;
            let student_terms = (weighted(q, &(log_q - &log_m)?)? * (1.0 - beta))?;
            (((teacher_terms * beta)? + &student_terms)?, student_terms)
        }
        OutcomeSum::TotalVariation => {
            let t = log_t.exp()?;
            let zero = t.zeros_like()?;
            let terms = t.lt(q)?.where_cond(&zero, &(&t - q)?)?;
            (terms, t.le(q)?.where_cond(&zero, &q.neg()?)?)
        }
        OutcomeSum::Acceptance => {
            let t = log_t.exp()?;
            (t.lt(q)?.where_cond(&t, q)?, t.le(q)?.where_cond(&t.zeros_like()?, q)?)
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
