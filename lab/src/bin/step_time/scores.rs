//! The time of log-probabilities, entropies and distillation, in turn with the loss and with the bare products that
//! each needs.

use crate::steps::Leaves;
use candle_core::{DType, Result, Tensor, D};
use clap::ValueEnum;
use mos_head::decode::{Sampler, Sampling};
use mos_head::distill::{DistillOptions, Divergence, MissingIds, Teacher};
use mos_head::score::{ChunkTerms, ScoreOptions};
use mos_head::{Distributions, LossOptions, Mixture};

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Score {
    /// Log-probability and entropy without gradients: one product
    Values,
    /// Log-probability, and whether the target is the most probable id, without gradients: one product
    Best,
    /// The same for targets that are the most probable ids, the most work
    BestOfBest,
    /// The ten most probable ids: one product
    TopK,
    /// The most probable id: one product
    Argmax,
    /// The most probable id as the draw at temperature 0, whose result does not depend on the other positions: one
    /// product
    Greedy,
    /// Both with gradients of both: four products
    Gradients,
    /// A policy gradient: three products
    Policy,
    /// A policy gradient with an entropy bonus: three products
    Bonus,
    /// A divergence from a teacher's list of 64 ids and the rest: three products
    List,
    /// A divergence from a teacher of the same sizes: four products
    Teacher,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DivergenceKind {
    Forward,
    Reverse,
    JensenShannon,
    TotalVariation,
    NegLogAcceptance,
    LkHybrid,
}

/// The number of ids of a teacher's list.
const LISTED: usize = 64;

/// This runs what is timed, from a mixture with these targets.
pub(crate) struct Timed<'a> {
    score: Score,
    mixture: &'a Mixture,
    targets: Tensor,
    /// The teacher and the options of a distillation.
    teacher: Option<(Teacher, DistillOptions)>,
}

impl<'a> Timed<'a> {
    pub(crate) fn new(
        score: Score,
        divergence: DivergenceKind,
        mixture: &'a Mixture,
        leaves: &'a Leaves,
    ) -> Result<Self> {
        let options = DistillOptions::new(match divergence {
            DivergenceKind::Forward => Divergence::ForwardKl,
            DivergenceKind::Reverse => Divergence::ReverseKl,
            DivergenceKind::JensenShannon => Divergence::JensenShannon(0.5),
            DivergenceKind::TotalVariation => Divergence::TotalVariation,
            DivergenceKind::NegLogAcceptance => Divergence::NegLogAcceptance,
            DivergenceKind::LkHybrid => Divergence::LkHybrid(3.0),
        });
        let teacher = match score {
            Score::List => Some(list(leaves)?),
            Score::Teacher => Some(Teacher::from_mixture(&other(mixture, leaves)?)),
            _ => None,
        };
        let targets = match score {
            Score::BestOfBest => mixture.argmax()?,
            _ => leaves.targets.clone(),
        };
        Ok(Timed { score, mixture, targets, teacher: teacher.map(|teacher| (teacher, options)) })
    }

    pub(crate) fn run(&self) -> Result<Option<Tensor>> {
        match &self.teacher {
            Some((teacher, options)) => {
                let loss = self.mixture.distill(teacher, options)?;
                loss.backward()?;
                Ok(Some(loss.value.detach()))
            }
            None => self.score.run(self.mixture, &self.targets),
        }
    }
}

/// Returns a list of ids at each position that has nine tenths of the probability, evenly.
fn list(Leaves { targets, weight, .. }: &Leaves) -> Result<Teacher> {
    let (positions, vocab) = (targets.elem_count(), weight.dim(0)?);
    let id = |t: usize, i: usize| ((t * 7919 + i * (vocab / LISTED).max(1)) % vocab) as u32;
    let n = LISTED.min(vocab);
    let ids: Vec<u32> = (0..positions).flat_map(|t| (0..n).map(move |i| id(t, i))).collect();
    let log_probs = Tensor::full((0.9 / n as f32).ln(), (positions, n), targets.device())?;
    let ids = Tensor::from_vec(ids, (positions, n), targets.device())?;
    Ok(Teacher::from_top_k(&ids, &log_probs, MissingIds::Tail))
}

/// Returns a mixture of the same sizes that is another distribution.
fn other(mixture: &Mixture, leaves: &Leaves) -> Result<Mixture> {
    let contexts = (mixture.contexts()?.detach() * -1.0)?;
    let log_priors = mixture.log_priors()?.detach();
    let log_priors = Some(&log_priors).filter(|log_priors| log_priors.dim(D::Minus1).is_ok_and(|k| k > 1));
    let bias = leaves.bias.as_detached_tensor();
    let bias = Some(&bias).filter(|_| log_priors.is_some());
    Ok(Mixture::new(&contexts, log_priors, &leaves.weight.as_detached_tensor(), bias)?)
}

impl Score {
    fn run(self, mixture: &Mixture, targets: &Tensor) -> Result<Option<Tensor>> {
        let options = ScoreOptions::new().with_entropy(true);
        let entropy_of = |scores: mos_head::score::Scores| match scores.entropy {
            Some(entropy) => Ok((scores.log_prob, entropy)),
            None => candle_core::bail!("no entropy"),
        };
        match self {
            Score::Values => {
                let (log_prob, entropy) = entropy_of(mixture.score(targets, &options)?)?;
                Ok(Some((log_prob.detach() + entropy.detach())?.mean_all()?))
            }
            Score::Best | Score::BestOfBest => {
                let scores = mixture.score(targets, &ScoreOptions::new().with_is_argmax(true))?;
                let Some(is_argmax) = scores.is_argmax else { candle_core::bail!("not told") };
                Ok(Some(is_argmax.to_dtype(DType::F32)?.mean_all()?))
            }
            Score::TopK => Ok(Some(mixture.top_k(10)?.log_probs.mean_all()?)),
            Score::Argmax => Ok(Some(mixture.argmax()?.to_dtype(DType::F32)?.mean_all()?)),
            Score::Greedy => {
                let mut sampler = Sampler::new(Sampling::new().with_temperature(0.0), 1)?;
                Ok(Some(mixture.sample(&mut sampler)?.to_dtype(DType::F32)?.mean_all()?))
            }
            Score::Gradients => {
                let scores = mixture.score(targets, &options)?;
                let (log_prob, entropy) = entropy_of(scores.clone())?;
                let value = (log_prob + (entropy * 0.1)?)?.mean_all()?;
                scores.backward(&value)?;
                Ok(Some(value.detach()))
            }
            Score::Policy | Score::Bonus => {
                let has_bonus = self == Score::Bonus;
                let loss = mixture.score_loss(targets, &options.with_entropy(has_bonus), move |scores| {
                    let by_log_prob = scores.log_prob.ones_like()?.neg()?;
                    let by_entropy = has_bonus.then(|| by_log_prob.affine(0.01, 0.0)).transpose()?;
                    let values = (scores.log_prob.neg()? - scores.entropy.affine(0.01, 0.0)?)?;
                    let terms = ChunkTerms::new(values, by_log_prob);
                    Ok(match by_entropy {
                        Some(by_entropy) => terms.with_by_entropy(by_entropy),
                        None => terms,
                    })
                })?;
                loss.backward()?;
                Ok(Some(loss.value.detach()))
            }
            Score::List | Score::Teacher => candle_core::bail!("a distillation has a teacher"),
        }
    }

    /// Returns the loss that it is compared with: an evaluation, or a training step.
    pub(crate) fn loss(self) -> LossOptions {
        match self {
            _ if self.has_gradients() => LossOptions::new(),
            _ => LossOptions::evaluation(),
        }
    }

    /// Returns whether gradients are computed too.
    pub(crate) fn has_gradients(self) -> bool {
        !matches!(self, Score::Values | Score::Best | Score::BestOfBest | Score::TopK | Score::Argmax | Score::Greedy)
    }
}
