//! Policy-gradient losses of token-level reinforcement learning, PPO and GRPO: functions of the log-probability of each
//! sampled token and of the entropy.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::loss::CountedPositions;
use crate::scores::{ScoreLoss, ScoreOptions};
use crate::tensors::checks::{accumulation_dtype, check_device, check_number, check_targets, check_weights};
use crate::tensors::transfer::number_like;

/// The largest log-ratio whose exponential is computed. Beyond it the exponential is continued linearly, so that it
/// stays finite.
const MOST_LOG_RATIO: f64 = 20.0;

/// How the losses of tokens are averaged.
///
/// # Examples
///
/// Three tokens with advantage 1 in one sequence, and one with advantage -1 in the other:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::policy::{PolicyBatch, PolicyNormalization, PolicyOptions};
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((2, 3, 8), DType::F32, &Device::Cpu)?; // [batch, seq, hidden]
/// let token_ids = Tensor::new(&[[3u32, 5, 7], [1, 0, 0]], &Device::Cpu)?;
/// let advantages = Tensor::new(&[[1f32, 1., 1.], [-1., 0., 0.]], &Device::Cpu)?;
/// let mask = Tensor::new(&[[1u8, 1, 1], [1, 0, 0]], &Device::Cpu)?;
/// let batch = PolicyBatch::new(token_ids, advantages).with_mask(mask);
/// // The ratio of the present policy to itself is 1: the loss of a token is the negative advantage.
/// for (normalization, expected) in [
///     (PolicyNormalization::Tokens, -2.0 / 4.0),
///     (PolicyNormalization::Sequences, (-1.0 + 1.0) / 2.0),
///     (PolicyNormalization::Constant(6.0), -2.0 / 6.0),
/// ] {
///     let options = PolicyOptions::new().with_normalization(normalization);
///     let loss = head.policy_loss(&hidden, &batch, &options)?.value.to_scalar::<f32>()?;
///     assert!((loss - expected).abs() < 1e-6);
/// }
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// - DAPO: Yu et al.: DAPO: An Open-Source LLM Reinforcement Learning System at Scale. 2025, arXiv 2503.14476.
/// - GRPO: Shao et al.: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models. 2024, arXiv
///   2402.03300.
/// - Dr. GRPO: Liu et al.: Understanding R1-Zero-Like Training: A Critical Perspective. 2025, arXiv 2503.20783.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum PolicyNormalization {
    /// The mean over all tokens (DAPO).
    #[default]
    Tokens,
    /// The mean over each sequence, the last of the leading dimensions, and then over the sequences that have a token
    /// (GRPO, equation 3).
    Sequences,
    /// The sum divided by a constant (Dr. GRPO).
    Constant(f64),
}

/// Options of [`OutputLayer::policy_loss`](crate::OutputLayer::policy_loss). The loss of a token with advantage A is
///
/// ```text
/// -m min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl (e^x - x - 1) - entropy H
/// r = exp(log p - old)        x = reference - log p        m = min(exp(old - sampler), importance_cap)
/// ```
///
/// The first term is PPO's, equation 7; the estimate of the divergence from the reference is GRPO's, equation 4. Where
/// the two terms of the minimum are equal, which they are while the ratio is within the clip's bounds or at one of
/// them, its gradient is that of the unclipped term, `r A`. A token whose clipped term is smaller has no gradient.
/// Exponentials of log-ratios above 20 are continued linearly. Ratios of whole sequences (GSPO) need all tokens of a
/// sequence at once: compute them from [`OutputLayer::score`](crate::OutputLayer::score), which costs a fourth product.
///
/// # Examples
///
/// A step of GRPO with DAPO's larger upper clip, on tokens that an earlier policy has sampled:
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use mos_head::policy::{PolicyBatch, PolicyNormalization, PolicyOptions};
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Var::randn(0f32, 1., (100, 8), &Device::Cpu)?;
/// let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
/// let hidden = Tensor::randn(0f32, 1., (2, 3, 8), &Device::Cpu)?; // [batch, seq, hidden]
/// let token_ids = Tensor::new(&[[3u32, 5, 7], [1, 0, 99]], &Device::Cpu)?;
/// let old = head.log_prob(&hidden, &token_ids)?.detach();
/// let advantages = Tensor::new(&[[1f32, 1., 1.], [-1., -1., -1.]], &Device::Cpu)?;
/// let batch = PolicyBatch::new(token_ids, advantages)
///     .with_old_log_probs(old.clone())
///     .with_reference_log_probs(old);
/// let options = PolicyOptions::new()
///     .with_clip(0.2, 0.28)
///     .with_kl(0.04)
///     .with_normalization(PolicyNormalization::Sequences);
/// let loss = head.policy_loss(&hidden, &batch, &options)?;
/// // While the policy equals the old one and the reference, the loss is the mean of the negative advantages.
/// assert!(loss.value.to_scalar::<f32>()?.abs() < 1e-5);
/// assert_eq!(loss.backward()?.get(&weight).expect("a gradient").dims(), [100, 8]);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// - PPO: Schulman, Wolski, Dhariwal, Radford, Klimov: Proximal Policy Optimization Algorithms. 2017, arXiv 1707.06347.
/// - GRPO: Shao et al.: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models. 2024, arXiv
///   2402.03300.
/// - DAPO: Yu et al.: DAPO: An Open-Source LLM Reinforcement Learning System at Scale. 2025, arXiv 2503.14476.
/// - GSPO: Zheng et al.: Group Sequence Policy Optimization. 2025, arXiv 2507.18071.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PolicyOptions {
    /// How far a ratio may fall below 1 before it is clipped. The default is 0.2.
    pub clip_low: f64,
    /// How far a ratio may rise above 1 before it is clipped. The default is 0.2. DAPO's is larger than `clip_low`.
    pub clip_high: f64,
    /// The coefficient of the divergence from the reference. The default is 0.
    pub kl: f64,
    /// The coefficient of the entropy bonus. The default is 0.
    pub entropy: f64,
    /// The largest importance weight m. The default is 2.
    pub importance_cap: f64,
    /// How the losses of tokens are averaged. The default is the mean over all tokens.
    pub normalization: PolicyNormalization,
    /// The temperature that the tokens were sampled with. The default is 1.
    pub temperature: f64,
    /// The budget of the workspace in bytes; by default the device decides.
    pub workspace_bytes: Option<usize>,
}

impl Default for PolicyOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl PolicyOptions {
    /// The options for the clipped objective alone.
    pub fn new() -> Self {
        PolicyOptions {
            clip_low: 0.2,
            clip_high: 0.2,
            kl: 0.0,
            entropy: 0.0,
            importance_cap: 2.0,
            normalization: PolicyNormalization::Tokens,
            temperature: 1.0,
            workspace_bytes: None,
        }
    }

    /// Clips ratios below `1 - low` and above `1 + high`: both at least 0, `low` at most 1.
    pub fn with_clip(self, low: f64, high: f64) -> Self {
        PolicyOptions { clip_low: low, clip_high: high, ..self }
    }

    /// Sets the coefficient of the divergence from the reference, whose log-probabilities the batch then needs.
    pub fn with_kl(self, coefficient: f64) -> Self {
        PolicyOptions { kl: coefficient, ..self }
    }

    /// Sets the coefficient of the entropy bonus.
    pub fn with_entropy(self, coefficient: f64) -> Self {
        PolicyOptions { entropy: coefficient, ..self }
    }

    /// Sets the largest importance weight: above 0.
    pub fn with_importance_cap(self, cap: f64) -> Self {
        PolicyOptions { importance_cap: cap, ..self }
    }

    /// Sets how the losses of tokens are averaged.
    pub fn with_normalization(self, normalization: PolicyNormalization) -> Self {
        PolicyOptions { normalization, ..self }
    }

    /// Sets the temperature of the distribution: from 1e-6 to 1e6.
    pub fn with_temperature(self, temperature: f64) -> Self {
        PolicyOptions { temperature, ..self }
    }

    /// Sets the budget of the workspace in bytes.
    pub fn with_workspace_bytes(self, bytes: usize) -> Self {
        PolicyOptions { workspace_bytes: Some(bytes), ..self }
    }

    /// Returns the options of the scores that the loss depends on.
    pub(crate) fn score_options(&self) -> ScoreOptions {
        let scores = ScoreOptions::new().with_entropy(self.entropy != 0.0).with_temperature(self.temperature);
        ScoreOptions { workspace_bytes: self.workspace_bytes, ..scores }
    }

    /// Checks the ranges of the numbers.
    fn validate(&self) -> Result<()> {
        let is_number = |x: f64| x.is_finite();
        let (low, high) = (self.clip_low, self.clip_high);
        check_number((0.0..=1.0).contains(&low), "clip_low", "from 0 to 1", low)?;
        check_number(high >= 0.0 && is_number(high), "clip_high", "at least 0", high)?;
        check_number(is_number(self.kl), "kl", "a finite number", self.kl)?;
        check_number(is_number(self.entropy), "entropy", "a finite number", self.entropy)?;
        let cap = self.importance_cap;
        check_number(cap > 0.0 && is_number(cap), "importance_cap", "above 0", cap)?;
        if let PolicyNormalization::Constant(by) = self.normalization {
            check_number(by > 0.0 && is_number(by), "normalization", "a constant above 0", by)?;
        }
        self.score_options().validate()
    }
}

/// Sampled tokens, their advantages, and their log-probabilities under other policies. Each tensor is `[..]`, the
/// leading dimensions of the hidden states. The numbers are constants: no gradient passes through them.
///
/// # Examples
///
/// A prompt of two tokens, which does not count, and two tokens that an engine of lower precision has sampled:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::policy::{PolicyBatch, PolicyOptions};
/// use mos_head::{OutputLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((1, 4, 8), DType::F32, &Device::Cpu)?; // [batch, seq, hidden]
/// let token_ids = Tensor::new(&[[9u32, 8, 3, 5]], &Device::Cpu)?;
/// let advantages = Tensor::new(&[[0f32, 0., 1., 1.]], &Device::Cpu)?;
/// let old = head.log_prob(&hidden, &token_ids)?;
/// let sampler = (&old + 0.5)?; // it gave every token a larger probability
/// let batch = PolicyBatch::new(token_ids, advantages)
///     .with_mask(Tensor::new(&[[0u8, 0, 1, 1]], &Device::Cpu)?)
///     .with_old_log_probs(old)
///     .with_sampler_log_probs(sampler);
/// let loss = head.policy_loss(&hidden, &batch, &PolicyOptions::new())?;
/// // Each token that counts has the importance weight exp(-0.5).
/// assert!((loss.value.to_scalar::<f32>()? + (-0.5f32).exp()).abs() < 1e-5);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PolicyBatch {
    /// The tokens; u8, u32 or i64.
    pub token_ids: Tensor,
    /// Their advantages.
    pub advantages: Tensor,
    /// Their log-probabilities under the policy that the ratio refers to; by default the present one, whose ratio is 1.
    pub old_log_probs: Option<Tensor>,
    /// Their log-probabilities under the reference policy.
    pub reference_log_probs: Option<Tensor>,
    /// Their log-probabilities under the engine that sampled them, for truncated importance weights.
    pub sampler_log_probs: Option<Tensor>,
    /// A mask that is not zero where a token counts. Other tokens, such as a prompt's, are left out before any product.
    pub mask: Option<Tensor>,
}

impl PolicyBatch {
    /// Makes a batch of tokens of the present policy, all of which count.
    ///
    /// # Shapes
    ///
    /// - token_ids: `[..]`, the leading dimensions of the hidden states; u8, u32 or i64
    /// - advantages: `[..]`; a float type
    pub fn new(token_ids: Tensor, advantages: Tensor) -> Self {
        PolicyBatch {
            token_ids,
            advantages,
            old_log_probs: None,
            reference_log_probs: None,
            sampler_log_probs: None,
            mask: None,
        }
    }

    /// Sets the log-probabilities under the policy that the ratio refers to.
    ///
    /// # Shapes
    ///
    /// - log_probs: `[..]`; a float type
    pub fn with_old_log_probs(self, log_probs: Tensor) -> Self {
        PolicyBatch { old_log_probs: Some(log_probs), ..self }
    }

    /// Sets the log-probabilities under the reference policy.
    ///
    /// # Shapes
    ///
    /// - log_probs: `[..]`; a float type
    pub fn with_reference_log_probs(self, log_probs: Tensor) -> Self {
        PolicyBatch { reference_log_probs: Some(log_probs), ..self }
    }

    /// Sets the log-probabilities under the engine that sampled the tokens.
    ///
    /// # Shapes
    ///
    /// - log_probs: `[..]`; a float type
    pub fn with_sampler_log_probs(self, log_probs: Tensor) -> Self {
        PolicyBatch { sampler_log_probs: Some(log_probs), ..self }
    }

    /// Sets which tokens count.
    ///
    /// # Shapes
    ///
    /// - mask: `[..]`; u8, u32, i64 or a float type, not zero where a token counts, and nowhere NaN
    pub fn with_mask(self, mask: Tensor) -> Self {
        PolicyBatch { mask: Some(mask), ..self }
    }

    /// Checks shapes, dtypes and devices, and that the batch has what the options need. The mask is checked where it is
    /// read.
    fn check(&self, leading: &[usize], like: &Tensor, options: &PolicyOptions) -> Result<()> {
        check_targets("token_ids", &self.token_ids, leading)?;
        check_device("token_ids", &self.token_ids, like)?;
        check_weights("advantages", &self.advantages, leading, like)?;
        for (argument, log_probs) in [
            ("old_log_probs", &self.old_log_probs),
            ("reference_log_probs", &self.reference_log_probs),
            ("sampler_log_probs", &self.sampler_log_probs),
        ] {
            log_probs.as_ref().map_or(Ok(()), |log_probs| check_weights(argument, log_probs, leading, like))?;
        }
        if options.kl != 0.0 && self.reference_log_probs.is_none() {
            return Err(Error::config(
                "reference_log_probs",
                "the reference's log-probabilities, because kl is not 0",
                "none",
            ));
        }
        Ok(())
    }
}

/// The constants of a policy loss at the tokens that count, `[n]` each.
pub struct PolicyTerms {
    counted: CountedPositions,
    token_ids: Tensor,
    advantages: Tensor,
    /// The log-probabilities under the policy that the ratio refers to.
    old: Option<Tensor>,
    /// The log-probabilities under the reference policy.
    reference: Option<Tensor>,
    /// The truncated importance weights.
    importance: Option<Tensor>,
    options: PolicyOptions,
}

impl PolicyTerms {
    /// Checks the batch of positions with these leading dimensions, and selects the tokens that count, which reads the
    /// mask on the host. `like` has the dtype and the device of the policy.
    pub(crate) fn new(leading: &[usize], like: &Tensor, batch: &PolicyBatch, options: &PolicyOptions) -> Result<Self> {
        options.validate()?;
        let dtype = accumulation_dtype("hidden", like.dtype())?;
        batch.check(leading, like, options)?;
        let counts = read_mask(batch.mask.as_ref(), leading)?;
        let scales = token_weights(&counts, leading, options.normalization);
        let counted = CountedPositions::new(counts.into_iter(), scales, like)?;
        let select = |tensor: &Tensor| counted.select_rows(&tensor.detach().flatten_all()?);
        let numbers = |tensor: &Tensor| Ok::<_, Error>(select(tensor)?.to_dtype(dtype)?);
        let numbers_if_given = |tensor: &Option<Tensor>| tensor.as_ref().map(numbers).transpose();
        let old = numbers_if_given(&batch.old_log_probs)?;
        let importance = |sampler: Tensor| match &old {
            Some(old) => {
                let log_ratio = (old - sampler)?;
                let cap = number_like(&log_ratio, options.importance_cap.ln())?;
                Ok(log_ratio.broadcast_minimum(&cap)?.exp()?)
            }
            None => {
                Err(Error::config("old_log_probs", "log-probabilities, because sampler_log_probs are given", "none"))
            }
        };
        Ok(PolicyTerms {
            token_ids: select(&batch.token_ids)?,
            advantages: numbers(&batch.advantages)?,
            reference: numbers_if_given(&batch.reference_log_probs)?.filter(|_| options.kl != 0.0),
            importance: numbers_if_given(&batch.sampler_log_probs)?.map(importance).transpose()?,
            old,
            options: options.clone(),
            counted,
        })
    }

    /// Returns the places, among all positions, of the tokens that count.
    pub(crate) fn positions(&self) -> &[u32] {
        &self.counted.positions
    }

    /// Returns the loss as a function of the policy's scores at the tokens that count.
    pub(crate) fn into_score_loss(self) -> ScoreLoss {
        let (token_ids, options) = (self.token_ids.clone(), self.options.score_options());
        let terms = Arc::new(move |positions: Range<usize>, scores: &Tensor| self.chunk_loss(positions, scores));
        // The terms have their weights already.
        ScoreLoss { token_ids, options, terms, position_scores: 0..1, counted: None }
    }

    /// Computes the weighted losses of some of the tokens that count, `[chunk]`, and their derivatives by the scores,
    /// `[chunk, 4]`, from these scores: log-probability, entropy, and two more, which take no part.
    fn chunk_loss(&self, positions: Range<usize>, scores: &Tensor) -> Result<(Tensor, Tensor)> {
        let chunk = |tensor: &Tensor| tensor.narrow(0, positions.start, positions.len());
        let column = |i| scores.narrow(1, i, 1)?.squeeze(1);
        let (log_prob, entropy, advantages) = (column(0)?, column(1)?, chunk(&self.advantages)?);
        let log_ratio = match &self.old {
            Some(old) => (&log_prob - chunk(old)?)?,
            None => log_prob.zeros_like()?,
        };
        let exp = ContinuedExp::new(&log_ratio)?;
        let (ratio, slope) = (exp.value()?, exp.slope);
        let PolicyOptions { clip_low, clip_high, kl, entropy: bonus, .. } = self.options;
        let unclipped = (&ratio * &advantages)?;
        let [least, most] = [1.0 - clip_low, 1.0 + clip_high].map(|bound| number_like(&ratio, bound));
        let clipped = (ratio.broadcast_maximum(&least?)?.broadcast_minimum(&most?)? * &advantages)?;
        // The comparison is false for a NaN, which stays a NaN.
        let is_clipped = unclipped.gt(&clipped)?;
        let mut loss = unclipped.broadcast_minimum(&clipped)?.neg()?;
        let mut by_log_prob = is_clipped.where_cond(&loss.zeros_like()?, &(slope * &advantages)?.neg()?)?;
        if let Some(importance) = &self.importance {
            (loss, by_log_prob) = ((loss * chunk(importance)?)?, (by_log_prob * chunk(importance)?)?);
        }
        if let Some(reference) = &self.reference {
            let ContinuedExp { within, beyond, slope } = ContinuedExp::new(&(chunk(reference)? - &log_prob)?)?;
            // exp(x) - x - 1, where both of its terms may be infinite
            let divergence = (((&slope - within)? - 1.0)? + ((&slope - 1.0)? * beyond)?)?;
            loss = (loss + divergence.affine(kl, 0.0)?)?;
            by_log_prob = (by_log_prob + slope.affine(-kl, kl)?)?;
        }
        let weights = self.counted.chunk_scales(&positions)?;
        if bonus != 0.0 {
            loss = (loss - entropy.affine(bonus, 0.0)?)?;
        }
        let zero = weights.zeros_like()?;
        let derivatives = [(by_log_prob * &weights)?, weights.affine(-bonus, 0.0)?, zero.clone(), zero];
        let derivatives = Tensor::stack(&derivatives, 1)?;
        Ok(((loss * weights)?, derivatives))
    }
}

/// `exp(x)`, which is continued linearly beyond [`MOST_LOG_RATIO`]: `slope (1 + beyond)`.
struct ContinuedExp {
    /// The part of x up to [`MOST_LOG_RATIO`].
    within: Tensor,
    /// What x is above it.
    beyond: Tensor,
    /// The derivative, `exp(within)`.
    slope: Tensor,
}

impl ContinuedExp {
    fn new(x: &Tensor) -> Result<Self> {
        let most = number_like(x, MOST_LOG_RATIO)?;
        let within = x.broadcast_minimum(&most)?;
        let beyond = x.broadcast_gt(&most)?.where_cond(&(x - &within)?, &x.zeros_like()?)?;
        let slope = within.exp()?;
        Ok(Self { within, beyond, slope })
    }

    fn value(&self) -> Result<Tensor> {
        Ok((self.beyond.affine(1.0, 1.0)? * &self.slope)?)
    }
}

/// Reads which tokens count, which waits for the device of the mask.
fn read_mask(mask: Option<&Tensor>, leading: &[usize]) -> Result<Vec<bool>> {
    let Some(mask) = mask else { return Ok(vec![true; leading.iter().product()]) };
    if mask.dims() != leading {
        return Err(Error::shape("mask", format!("{leading:?}"), mask.dims()));
    }
    let mask = mask.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    match mask.iter().position(|x| x.is_nan()) {
        None => Ok(mask.into_iter().map(|x| x != 0.0).collect()),
        Some(position) => Err(Error::config("mask", "numbers", format!("NaN at position {position}"))),
    }
}

/// Returns the weight of each token that counts.
fn token_weights(counts: &[bool], leading: &[usize], normalization: PolicyNormalization) -> Vec<f64> {
    let total = |counts: &[bool]| counts.iter().filter(|&&counts| counts).count();
    match normalization {
        PolicyNormalization::Tokens => vec![1.0 / total(counts) as f64; total(counts)],
        PolicyNormalization::Constant(by) => vec![1.0 / by; total(counts)],
        PolicyNormalization::Sequences => {
            let tokens: Vec<usize> = counts.chunks(leading.last().map_or(1, |&n| n.max(1))).map(total).collect();
            let sequences = tokens.iter().filter(|&&n| n > 0).count();
            tokens.into_iter().flat_map(|n| vec![1.0 / (n * sequences) as f64; n]).collect()
        }
    }
}
