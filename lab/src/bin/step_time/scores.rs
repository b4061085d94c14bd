//! The time of log-probabilities and entropies, in turn with the loss and with the bare products that each needs.

use candle_core::{Result, Tensor};
use clap::ValueEnum;
use mos_head::{ChunkTerms, LossOptions, Mixture, ScoreOptions};

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Score {
    /// Log-probability and entropy without gradients: one product
    Values,
    /// Both with gradients of both: four products
    Gradients,
    /// A policy gradient: three products
    Policy,
    /// A policy gradient with an entropy bonus: three products
    Bonus,
}

impl Score {
    pub(crate) fn run(self, mixture: &Mixture, targets: &Tensor) -> Result<Option<Tensor>> {
        let options = ScoreOptions::new().with_entropy(true);
        let entropy_of = |scores: mos_head::Scores| match scores.entropy {
            Some(entropy) => Ok((scores.log_prob, entropy)),
            None => candle_core::bail!("no entropy"),
        };
        match self {
            Score::Values => {
                let (log_prob, entropy) = entropy_of(mixture.score(targets, &options)?)?;
                Ok(Some((log_prob.detach() + entropy.detach())?.mean_all()?))
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
        }
    }

    /// The loss that it is compared with: an evaluation, or a training step.
    pub(crate) fn loss(self) -> LossOptions {
        match self {
            Score::Values => LossOptions::evaluation(),
            Score::Gradients | Score::Policy | Score::Bonus => LossOptions::new(),
        }
    }
}
