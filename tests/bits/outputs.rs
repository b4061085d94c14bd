//! What is computed of a problem besides the loss of targets and the choice of ids: scores, policy losses,
//! distillation, sets of allowed ids, requests, accumulated gradients, losses of a chunk's scores, and a vocabulary
//! that ranks share.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::ops::log_softmax;
use mos_head::decode::{Constraints, NextToken, Sampling, TokenRequest};
use mos_head::distill::{DistillOptions, Divergence, MissingIds, Teacher};
use mos_head::distributed::{Collectives, VocabShard};
use mos_head::policy::{PolicyBatch, PolicyNormalization, PolicyOptions};
use mos_head::score::{ChunkTerms, ScoreOptions, Scores};
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::{
    Distributions, DropoutMasks, Error, GradientSum, Loss, LossOptions, Mixture, OutputLayer, Reduction, Result,
};

use super::digest::Digest;
use super::options::{Distillation, Draw::*, LossOption, PolicyTerm, Score};
use super::options::{Distillation::*, LossOption::*, PolicyTerm::*, Score::*};
use super::problem::{sampler, uniform, Problem};
use super::ranks::on_ranks;

const CPU: Device = Device::Cpu;

/// Token ids of these dimensions.
fn ids(dims: &[usize], vocab: usize, step: usize) -> Result<Tensor> {
    let n = dims.iter().product();
    Ok(Tensor::from_vec((0..n).map(|i| (i * step % vocab) as u32).collect(), dims, &CPU)?)
}

/// The sum of a tensor with seeded weights.
fn weighted(tensor: &Tensor, seed: u64) -> Result<Tensor> {
    Ok((tensor * uniform(tensor.dims(), 1.0, seed)?.to_dtype(tensor.dtype())?)?.sum_all()?)
}

/// Seeded log-probabilities of these dimensions.
fn log_probs(dims: &[usize], dtype: DType, seed: u64) -> Result<Tensor> {
    Ok(log_softmax(&uniform(dims, 3.0, seed)?, D::Minus1)?.to_dtype(dtype)?)
}

/// The dtype in which a head of this dtype computes.
fn accumulation(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

impl Problem {
    /// Scores of the targets, and of three candidates at each position.
    pub(crate) fn scores(&self, layer: &dyn OutputLayer, chosen: &[Score], digest: &mut Digest) -> Result<()> {
        let options =
            ScoreOptions::new().with_entropy(chosen.contains(&Entropy)).with_outside(chosen.contains(&Outside));
        let options = options.with_is_argmax(chosen.contains(&IsArgmax));
        let options = options.with_temperature(if chosen.contains(&Tempered) { 0.7 } else { 1.0 });
        let candidates = ids(&[self.sizes.leading, &[3]].concat(), self.sizes.vocab, 7)?;
        for token_ids in [&self.targets, &candidates] {
            self.digest_scores(&layer.score(&self.hidden, token_ids, &options)?, digest)?;
        }
        digest.differentiable(&layer.log_prob(&self.hidden, &candidates)?, &self.vars)
    }

    fn digest_scores(&self, scores: &Scores, digest: &mut Digest) -> Result<()> {
        digest.tensor(&scores.log_prob)?;
        let mut sum = weighted(&scores.log_prob, 43)?;
        for (seed, score) in (47..).zip([&scores.entropy, &scores.log_outside]) {
            digest.optional(score.as_ref())?;
            if let Some(score) = score {
                sum = (sum + weighted(score, seed)?)?;
            }
        }
        digest.optional(scores.is_argmax.as_ref())?;
        digest.gradients(&scores.backward(&sum)?, &self.vars)
    }

    pub(crate) fn policy_loss(&self, layer: &dyn OutputLayer, terms: &[PolicyTerm], digest: &mut Digest) -> Result<()> {
        let (leading, dtype) = (self.sizes.leading, accumulation(self.hidden.dtype()));
        let log_prob = layer.log_prob(&self.hidden, &self.targets)?.detach();
        let near = |seed| -> Result<Tensor> { Ok((&log_prob + uniform(leading, 0.4, seed)?.to_dtype(dtype)?)?) };
        let n = leading.iter().product();
        let mask = Tensor::from_vec((0..n).map(|i| u8::from(i % 3 != 1)).collect::<Vec<_>>(), leading, &CPU)?;
        let batch = PolicyBatch::new(self.targets.clone(), uniform(leading, 1.0, 53)?.to_dtype(dtype)?);
        let mut batch = batch.with_old_log_probs(near(59)?).with_mask(mask);
        let mut options = PolicyOptions::new();
        for term in terms {
            match term {
                Ratio => {}
                Kl => {
                    batch = batch.with_reference_log_probs(near(61)?);
                    options = options.with_kl(0.1).with_normalization(PolicyNormalization::Sequences);
                }
                Importance => batch = batch.with_sampler_log_probs(near(67)?),
                EntropyBonus => options = options.with_entropy(0.05),
                PolicyTemperature => options = options.with_temperature(1.3),
                Constant => options = options.with_normalization(PolicyNormalization::Constant(17.0)),
            }
        }
        self.digest_loss(&layer.policy_loss(&self.hidden, &batch, &options)?, &[Mean], digest)
    }

    /// The divergence from each kind of teacher.
    pub(crate) fn distill(&self, layer: &dyn OutputLayer, chosen: &[Distillation], digest: &mut Digest) -> Result<()> {
        let (leading, vocab, dtype) = (self.sizes.leading, self.sizes.vocab, accumulation(self.hidden.dtype()));
        let has = |option| chosen.contains(&option);
        let divergence = match chosen.first() {
            Some(Reverse) => Divergence::ReverseKl,
            Some(JensenShannon) => Divergence::JensenShannon(0.3),
            _ => Divergence::ForwardKl,
        };
        let mut options = DistillOptions::new(divergence);
        if has(TeacherTemperature) {
            options = options.with_temperature(1.7);
        }
        if has(HardTargets) {
            options = options.with_targets(self.targets.clone()).with_hard_weight(0.3);
        }
        if has(Weights) {
            let weights = uniform(leading, 0.7, 71)?.relu()?.to_dtype(dtype)?;
            options = options.with_position_weights(weights).with_reduction(Reduction::Sum);
        }
        let all_log_probs = log_probs(&[leading, &[vocab]].concat(), dtype, 73)?;
        let listed = ids(&[leading, &[5]].concat(), vocab, 11)?;
        let listed_log_probs = all_log_probs.gather(&listed, D::Minus1)?;
        let constant = |dims: &[usize], seed| Ok::<_, Error>(uniform(dims, 1.0, seed)?.to_dtype(self.hidden.dtype())?);
        let log_priors = log_probs(&[leading, &[2]].concat(), dtype, 79)?;
        let contexts = constant(&[leading, &[2, 6]].concat(), 83)?;
        let mixture = Mixture::new(&contexts, Some(&log_priors), &constant(&[vocab, 6], 89)?, None)?;
        let mut teachers = vec![Teacher::from_log_probs(&all_log_probs), Teacher::from_mixture(&mixture)];
        let is_mixed_and_tempered = has(TeacherTemperature) && has(HardTargets);
        for missing in [MissingIds::Tail, MissingIds::Zero, MissingIds::Renormalized] {
            let is_infinite = divergence == Divergence::ReverseKl && missing != MissingIds::Tail;
            if !is_infinite && !is_mixed_and_tempered {
                teachers.push(Teacher::from_top_k(&listed, &listed_log_probs, missing));
            }
        }
        for teacher in teachers {
            self.digest_loss(&layer.distill(&self.hidden, &teacher, &options)?, &[Mean], digest)?;
        }
        Ok(())
    }

    /// Every result over one set, and over a list for each position.
    pub(crate) fn kept_sets(&self, digest: &mut Digest) -> Result<()> {
        let (vocab, n) = (self.sizes.vocab, self.sizes.leading.iter().product::<usize>());
        let shared: Vec<u32> = (0..vocab as u32).step_by(9).collect();
        let list = |t: usize| (0..1 + t * 5 % 7).map(move |i| ((t * 13 + i * 17) % vocab) as u32);
        let lists: Vec<u32> = (0..n).flat_map(list).collect();
        let offsets = (0..=n).map(|t| (0..t).map(|t| list(t).len()).sum()).collect::<Vec<_>>();
        for allowed in [AllowedIds::new(&shared), AllowedIds::per_position(&lists, &offsets)?] {
            let head = Restricted::new(self.mixture_layer(), allowed.with_targets_added(true))?;
            let sets: [&[LossOption]; 4] =
                [&[Mean], &[Unreduced, IgnoreSome, PositionWeights, ClassWeights], &[Hits, Sum], &[Evaluation]];
            for options in sets {
                let loss = head.loss(&self.hidden, &self.targets, &self.options(options)?)?;
                self.digest_loss(&loss, options, digest)?;
            }
            digest.differentiable(&head.log_probs(&self.hidden)?, &self.vars)?;
            digest.top_k(&head.top_k(&self.hidden, 4)?)?;
            digest.tensor(&head.argmax(&self.hidden)?)?;
            for draws in [&[Full][..], &[Temperature, TopP]] {
                digest.tensor(&head.sample(&self.hidden, &mut sampler(draws)?)?)?;
            }
            self.scores(&head, &[Entropy, IsArgmax], digest)?;
            self.policy_loss(&head, &[Ratio, EntropyBonus], digest)?;
        }
        Ok(())
    }

    /// Two steps of a text for each position, each with settings of its own.
    pub(crate) fn next_tokens(&self, layer: &dyn OutputLayer, digest: &mut Digest) -> Result<()> {
        let n: usize = self.sizes.leading.iter().product();
        let mut requests = (0..n).map(|i| request(i, self.sizes.vocab)).collect::<Result<Vec<_>>>()?;
        for _ in 0..2 {
            let tokens = layer.next_tokens(&self.hidden, &requests.iter().collect::<Vec<_>>())?;
            digest_tokens(&tokens, digest);
            requests.iter_mut().zip(&tokens).for_each(|(request, token)| request.push(token.token_id));
        }
        Ok(())
    }

    /// The gradients of two batches.
    pub(crate) fn gradient_sum(&self, options: &[LossOption], digest: &mut Digest) -> Result<()> {
        let sum = GradientSum::new();
        for _ in 0..2 {
            let loss =
                self.layer().loss(&self.hidden, &self.targets, &self.options(options)?.with_gradient_sum(&sum))?;
            digest.tensor(&loss.value)?;
            sum.add(&loss)?;
        }
        digest.gradients(&sum.take(), &self.vars)
    }

    /// Losses that are functions of a chunk's scores, and of its log-probabilities.
    pub(crate) fn chunk_losses(&self, digest: &mut Digest) -> Result<()> {
        let mixture = self.mixture_layer().mixture(&self.hidden, DropoutMasks::Off)?;
        let candidates = ids(&[self.sizes.leading, &[3]].concat(), self.sizes.vocab, 7)?;
        for (temperature, entropy, outside) in [(1.0, false, false), (1.0, true, true), (0.6, false, true)] {
            let options = ScoreOptions::new().with_entropy(entropy).with_outside(outside).with_temperature(temperature);
            let loss = mixture.score_loss(&candidates, &options, |scores| {
                let values = ((scores.log_prob.sum(1)? + (&scores.entropy * 0.3)?)? - (&scores.log_outside * 0.2)?)?;
                let by_log_prob = scores.log_prob.ones_like()?;
                let by = |factor: f64| scores.entropy.zeros_like()? + factor;
                Ok(ChunkTerms::new(values, by_log_prob).with_by_entropy(by(0.3)?).with_by_outside(by(-0.2)?))
            })?;
            self.digest_loss(&loss, &[Mean], digest)?;
        }
        let loss = mixture.log_prob_loss(None, |chunk| {
            let squares = (chunk.log_probs * 2.0)?.exp()?;
            Ok(ChunkTerms::new(squares.sum(1)?, (squares * 2.0)?))
        })?;
        self.digest_loss(&loss, &[Mean], digest)
    }
}

/// The request of the i-th text.
fn request(i: usize, vocab: usize) -> Result<TokenRequest> {
    let sampling = match i % 6 {
        0 => Sampling::greedy(),
        1 => Sampling::new(),
        2 => Sampling::new().with_temperature(0.8),
        3 => Sampling::new().with_top_p(0.9),
        4 => Sampling::new().with_top_k(9).with_temperature(1.2),
        _ => Sampling::new().with_min_p(0.05),
    };
    let id = |step: usize| (i * step % vocab) as u32;
    let constraints = match i % 5 {
        0 => Constraints::new(),
        1 => Constraints::new().with_repetition_penalty(1.2).with_bias(&[(id(3), 0.5)]),
        2 => Constraints::new().with_frequency_penalty(0.3).with_presence_penalty(0.1).with_banned(&[id(5)]),
        3 => Constraints::new().with_allowed(&(0..vocab as u32).step_by(2).collect::<Vec<_>>()),
        _ => Constraints::new().with_processor(|_, z| z.iter_mut().for_each(|z| *z *= 0.9)),
    };
    let request = TokenRequest::new(sampling, 97 + i as u64)?.with_constraints(constraints)?;
    Ok(request.with_prompt(&[id(7), id(11)]).with_best(i % 4).with_entropy(i.is_multiple_of(2)))
}

fn digest_tokens(tokens: &[NextToken], digest: &mut Digest) {
    for token in tokens {
        digest.word(token.token_id.into());
        let best = token.best.iter().flat_map(|&(id, log_prob)| [u64::from(id), log_prob.to_bits()]);
        let numbers = [token.log_prob, token.sampled_log_prob].into_iter().chain(token.entropy);
        best.chain(numbers.map(f64::to_bits)).for_each(|word| digest.word(word));
    }
}

/// A mixture whose vocabulary three ranks share: losses and gradients, the most probable ids and requests, on each
/// rank.
pub(crate) fn ranks(components: usize, dtype: DType, digest: &mut Digest) -> Result<()> {
    const VOCAB: usize = 101;
    const POSITIONS: usize = 21;
    let run = |ranks: Arc<dyn Collectives>| -> Result<u64> {
        let shard = VocabShard::new(ranks, VOCAB)?;
        let (range, mut digest) = (shard.range(), Digest::new());
        let var = |dims: &[usize], seed| Ok::<_, Error>(Var::from_tensor(&uniform(dims, 0.8, seed)?.to_dtype(dtype)?)?);
        let rows = |all_log_probs: Var| {
            Ok::<_, Error>(Var::from_tensor(&all_log_probs.narrow(0, range.start, range.len())?.copy()?)?)
        };
        let contexts = var(&[POSITIONS, components, 12], 101)?;
        let (weight, bias) = (rows(var(&[VOCAB, 12], 103)?)?, rows(var(&[VOCAB], 107)?)?);
        let log_priors = log_probs(&[POSITIONS, components], accumulation(dtype), 109)?;
        let log_priors = Some(&log_priors).filter(|_| components > 1);
        let mixture = Mixture::new(&contexts, log_priors, &weight, Some(&bias))?;
        let targets = ids(&[POSITIONS], VOCAB, 13)?;
        for options in [
            LossOptions::new(),
            LossOptions::new().with_reduction(Reduction::Sum).with_label_smoothing(0.1).with_z_loss(0.01),
            LossOptions::new().with_correct(true).with_ignore_index(13),
            LossOptions::evaluation(),
        ] {
            let loss: Loss = mixture.vocab_parallel(&shard).loss(&targets, &options)?;
            for tensor in [&loss.value, &loss.sum, &loss.count, &loss.nll] {
                digest.tensor(tensor)?;
            }
            digest.optional(loss.correct.as_ref())?;
            if options.train {
                let gradients = loss.backward()?;
                [&contexts, &weight, &bias].into_iter().try_for_each(|var| digest.optional(gradients.get(var)))?;
            }
        }
        digest.top_k(&mixture.vocab_parallel(&shard).top_k(5)?)?;
        let requests = (0..POSITIONS).map(|i| request(i, VOCAB)).collect::<Result<Vec<_>>>()?;
        let tokens = mixture.vocab_parallel(&shard).next_tokens(&requests.iter().collect::<Vec<_>>())?;
        digest_tokens(&tokens, &mut digest);
        Ok(digest.0)
    };
    on_ranks(3, run).into_iter().try_for_each(|rank| {
        digest.word(rank?);
        Ok(())
    })
}
