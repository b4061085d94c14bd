//! The losses of TRL's trainers in mos-head: documentation with code, and no items of its own.
//!
//! [TRL](https://huggingface.co/docs/trl) fine-tunes language models in PyTorch with one trainer for each method. A
//! trainer is a loop around a loss, and the loss is a few lines here:
//!
//! | trainer | loss | it is computed by |
//! |---|---|---|
//! | `SFTTrainer` | [supervised fine-tuning](#supervised-fine-tuning) | [`OutputLayer::loss`](crate::OutputLayer::loss) |
//! | `DPOTrainer` | [DPO](#dpo) | [`Scores::sum_by_sequence`](crate::score::Scores::sum_by_sequence) |
//! | `KTOTrainer` | [KTO](#kto) | [`Scores::sum_by_sequence`](crate::score::Scores::sum_by_sequence) |
//! | `CPOTrainer` with `loss_type="simpo"` | [SimPO](#simpo) | [`Scores::mean_by_sequence`](crate::score::Scores::mean_by_sequence) |
//! | `ORPOTrainer` | [ORPO](#orpo) | [`Scores::mean_by_sequence`](crate::score::Scores::mean_by_sequence) |
//! | `GRPOTrainer` | [GRPO](#grpo) | [`OutputLayer::policy_loss`](crate::OutputLayer::policy_loss) |
//! | `RLOOTrainer` | [RLOO](#rloo) | [`OutputLayer::policy_loss`](crate::OutputLayer::policy_loss) |
//! | `GKDTrainer` | [GKD](#gkd) | [`OutputLayer::distill`](crate::OutputLayer::distill) |
//! | `RewardTrainer` | [reward model](#reward-model) | candle alone: there is no vocabulary |
//!
//! A trainer also logs [numbers of each token's distribution](#what-trainers-log), and the last section has a loss over
//! [several future tokens](#several-future-tokens). `examples/dpo.rs` and
//! `examples/grpo.rs` train with two of these losses, and `examples/distill.rs` distils.
//!
//! In the code below, `head` is the output layer of the policy, and `hidden` `[batch, seq, hidden]` are the hidden
//! states of its model, each before its token in `token_ids` `[batch, seq]`. `mask` `[batch, seq]` is one at the tokens
//! of completions, and zero at those of prompts and at padding. `reference` and `reference_hidden` are those of a
//! frozen model; no gradient is needed there, and its log-probabilities may be computed once and kept. Preferences are
//! pairs of completions: the first half of a batch is chosen, and the second half is rejected, in the same order.
//!
//! [`OutputLayer::score`](crate::OutputLayer::score) computes all positions, those of prompts too: narrow `hidden`,
//! `token_ids` and `mask` to the positions from the first completion's beginning. `policy_loss` and `distill` leave out
//! what does not count before any product.
//!
//! The probability that a completion with reward a is preferred to one with reward b is `sigmoid(a - b)` in the model
//! of Bradley and Terry, which is the softmax of the two rewards. The losses of pairs below take its logarithm as
//! `log_softmax` of `[a, b]`, which does not overflow, and whose gradient is exact where a equals b.
//!
//! # Supervised fine-tuning
//!
//! The targets of prompts and padding are the ignored index (Ouyang et al., arXiv 2203.02155).
//!
//! ```
//! # use candle_core::{Device, Tensor};
//! # use mos_head::score::ScoreOptions;
//! use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
//!
//! # fn main() -> mos_head::Result<()> {
//! # let device = &Device::Cpu;
//! # let head = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 8), device)?, None)?;
//! # let hidden = Tensor::randn(0f64, 1., (2, 3, 8), device)?;
//! let targets = Tensor::new(&[[-100i64, 5, 7], [-100, 9, -100]], device)?; // [batch, seq]
//! let loss = head.loss(&hidden, &targets, &LossOptions::new().with_ignore_index(-100))?;
//! let gradients = loss.backward()?;
//! # let token_ids = Tensor::new(&[[0u32, 5, 7], [0, 9, 0]], device)?;
//! # let mask = Tensor::new(&[[0u8, 1, 1], [0, 1, 0]], device)?;
//! # let sums = head.score(&hidden, &token_ids, &ScoreOptions::new())?.sum_by_sequence(&mask)?;
//! # let expected = -sums.sum_all()?.to_scalar::<f64>()? / 3.0;
//! # assert!((loss.value.to_scalar::<f64>()? - expected).abs() < 1e-12);
//! # let _ = gradients;
//! # Ok(())
//! # }
//! ```
//!
//! # DPO
//!
//! Direct preference optimization (Rafailov et al., arXiv 2305.18290, equation 7):
//!
//! ```text
//! -log sigmoid(r(chosen) - r(rejected)),    r(y) = beta (log policy(y) - log reference(y))
//! ```
//!
//! ```
//! # use candle_core::{Device, Tensor};
//! use candle_nn::ops::log_softmax;
//! use mos_head::score::ScoreOptions;
//! use mos_head::{OutputLayer, SoftmaxHead};
//!
//! # fn main() -> mos_head::Result<()> {
//! # let device = &Device::Cpu;
//! # let head = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 8), device)?, None)?;
//! # let reference = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 8), device)?, None)?;
//! # let hidden = Tensor::randn(0f64, 1., (4, 3, 8), device)?;
//! # let reference_hidden = Tensor::randn(0f64, 1., (4, 3, 8), device)?;
//! # let token_ids = Tensor::new(&[[3u32, 5, 7], [3, 0, 9], [3, 6, 49], [3, 2, 2]], device)?;
//! # let mask = Tensor::new(&[[0u8, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]], device)?;
//! let beta = 0.1;
//! let scores = head.score(&hidden, &token_ids, &ScoreOptions::new())?;
//! let reference_scores = reference.score(&reference_hidden, &token_ids, &ScoreOptions::new())?;
//! let log_ratios = (scores.sum_by_sequence(&mask)? - reference_scores.sum_by_sequence(&mask)?.detach())?;
//! let rewards = (log_ratios * beta)?.reshape((2, ()))?; // chosen, rejected
//! let loss = log_softmax(&rewards, 0)?.get(0)?.mean_all()?.neg()?;
//! let gradients = scores.backward(&loss)?;
//! # let [policy, other] = [&scores, &reference_scores].map(|scores| scores.log_prob.to_vec2::<f64>().unwrap());
//! # let mask = mask.to_vec2::<u8>()?;
//! # let reward = |i: usize| (0..3).map(|t| beta * f64::from(mask[i][t]) * (policy[i][t] - other[i][t])).sum::<f64>();
//! # let term = |i: usize| -(1.0 / (1.0 + (reward(2 + i) - reward(i)).exp())).ln();
//! # assert!((loss.to_scalar::<f64>()? - (term(0) + term(1)) / 2.0).abs() < 1e-12);
//! # let _ = gradients;
//! # Ok(())
//! # }
//! ```
//!
//! # KTO
//!
//! Kahneman-Tversky optimization (Ethayarajh et al., arXiv 2402.01306) takes completions that are desirable or not,
//! without pairs:
//!
//! ```text
//! lambda_y (1 - sigmoid(s_y beta (log policy(y) - log reference(y) - z))),    s_y = 1 if y is desirable, otherwise -1
//! ```
//!
//! where z is an estimate of the divergence from the reference: the mean log-ratio of completions after the prompts of
//! others, at least 0, without a gradient.
//!
//! ```
//! # use candle_core::{Device, Tensor};
//! use candle_nn::ops::sigmoid;
//! use mos_head::score::ScoreOptions;
//! use mos_head::{OutputLayer, SoftmaxHead};
//!
//! # fn main() -> mos_head::Result<()> {
//! # let device = &Device::Cpu;
//! # let head = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 8), device)?, None)?;
//! # let reference = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 8), device)?, None)?;
//! # let [hidden, reference_hidden, others_hidden, others_reference_hidden] =
//! #     [(); 4].map(|()| Tensor::randn(0f64, 1., (3, 3, 8), device).unwrap());
//! # let token_ids = Tensor::new(&[[3u32, 5, 7], [3, 0, 9], [3, 6, 49]], device)?;
//! # let mask = Tensor::new(&[[0u8, 1, 1], [0, 1, 1], [0, 1, 0]], device)?;
//! let beta = 0.1;
//! let signs = Tensor::new(&[1f64, 1., -1.], device)?; // the last completion is not desirable
//! let weights = Tensor::new(&[1f64, 1., 1.5], device)?; // lambda
//! let log_ratios = |hidden: &Tensor, reference_hidden: &Tensor| -> mos_head::Result<Tensor> {
//!     let scores = head.score(hidden, &token_ids, &ScoreOptions::new())?;
//!     let reference_scores = reference.score(reference_hidden, &token_ids, &ScoreOptions::new())?;
//!     Ok((scores.sum_by_sequence(&mask)? - reference_scores.sum_by_sequence(&mask)?.detach())?)
//! };
//! // The same completions after the prompts of others.
//! let divergence = log_ratios(&others_hidden, &others_reference_hidden)?.detach().mean_all()?.relu()?;
//! let log_ratios = log_ratios(&hidden, &reference_hidden)?;
//! let values = sigmoid(&((log_ratios.broadcast_sub(&divergence)? * &signs)? * beta)?)?;
//! let loss = (&weights - (values * &weights)?)?.mean_all()?;
//! let gradients = loss.backward()?;
//! # let (ratios, z) = (log_ratios.to_vec1::<f64>()?, divergence.to_scalar::<f64>()?);
//! # let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
//! # let sum = (1.0 - sigmoid(beta * (ratios[0] - z))) + (1.0 - sigmoid(beta * (ratios[1] - z)))
//! #     + 1.5 * (1.0 - sigmoid(beta * (z - ratios[2])));
//! # assert!(z >= 0.0 && (loss.to_scalar::<f64>()? - sum / 3.0).abs() < 1e-12);
//! # let _ = gradients;
//! # Ok(())
//! # }
//! ```
//!
//! # SimPO
//!
//! Simple preference optimization (Meng et al., arXiv 2405.14734, equation 6) needs no reference. The reward is the
//! mean log-probability of the tokens, and gamma is the margin that is aimed at:
//!
//! ```text
//! -log sigmoid(beta mean(chosen) - beta mean(rejected) - gamma)
//! ```
//!
//! ```
//! # use candle_core::{Device, Tensor};
//! use candle_nn::ops::log_softmax;
//! use mos_head::score::ScoreOptions;
//! use mos_head::{OutputLayer, SoftmaxHead};
//!
//! # fn main() -> mos_head::Result<()> {
//! # let device = &Device::Cpu;
//! # let head = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 8), device)?, None)?;
//! # let hidden = Tensor::randn(0f64, 1., (4, 3, 8), device)?;
//! # let token_ids = Tensor::new(&[[3u32, 5, 7], [3, 0, 9], [3, 6, 49], [3, 2, 2]], device)?;
//! # let mask = Tensor::new(&[[0u8, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]], device)?;
//! let (beta, gamma) = (2.0, 0.5);
//! let scores = head.score(&hidden, &token_ids, &ScoreOptions::new())?;
//! let rewards = (scores.mean_by_sequence(&mask)? * beta)?.reshape((2, ()))?; // chosen, rejected
//! let rewards = Tensor::stack(&[&(rewards.get(0)? - gamma)?, &rewards.get(1)?], 0)?;
//! let loss = log_softmax(&rewards, 0)?.get(0)?.mean_all()?.neg()?;
//! let gradients = scores.backward(&loss)?;
//! # let (log_prob, lengths) = (scores.log_prob.to_vec2::<f64>()?, [2.0, 2.0, 2.0, 1.0]);
//! # let mask = mask.to_vec2::<u8>()?;
//! # let mean = |i: usize| (0..3).map(|t| f64::from(mask[i][t]) * log_prob[i][t]).sum::<f64>() / lengths[i];
//! # let term = |i: usize| -(1.0 / (1.0 + (beta * mean(2 + i) - beta * mean(i) + gamma).exp())).ln();
//! # assert!((loss.to_scalar::<f64>()? - (term(0) + term(1)) / 2.0).abs() < 1e-12);
//! # let _ = gradients;
//! # Ok(())
//! # }
//! ```
//!
//! # ORPO
//!
//! Odds ratio preference optimization (Hong et al., arXiv 2403.07691, equations 6 and 7) adds to the loss of the chosen
//! completions that of the odds of a pair, where `log P` is the mean log-probability of the tokens:
//!
//! ```text
//! -log P(chosen) - lambda log sigmoid(log odds(chosen) - log odds(rejected)),    odds = P / (1 - P)
//! ```
//!
//! ```
//! # use candle_core::{Device, Tensor};
//! use candle_nn::ops::log_softmax;
//! use mos_head::score::ScoreOptions;
//! use mos_head::{OutputLayer, SoftmaxHead};
//!
//! # fn main() -> mos_head::Result<()> {
//! # let device = &Device::Cpu;
//! # let head = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 8), device)?, None)?;
//! # let hidden = Tensor::randn(0f64, 1., (4, 3, 8), device)?;
//! # let token_ids = Tensor::new(&[[3u32, 5, 7], [3, 0, 9], [3, 6, 49], [3, 2, 2]], device)?;
//! # let mask = Tensor::new(&[[0u8, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]], device)?;
//! let lambda = 0.1;
//! let scores = head.score(&hidden, &token_ids, &ScoreOptions::new())?;
//! let means = scores.mean_by_sequence(&mask)?;
//! let log_odds = (&means - (1.0 - means.exp()?)?.log()?)?.reshape((2, ()))?; // chosen, rejected
//! let preference = log_softmax(&log_odds, 0)?.get(0)?.mean_all()?.neg()?;
//! let chosen = means.reshape((2, ()))?.get(0)?.mean_all()?.neg()?;
//! let loss = (chosen + (preference * lambda)?)?;
//! let gradients = scores.backward(&loss)?;
//! # let p: Vec<f64> = means.to_vec1::<f64>()?.iter().map(|x| x.exp()).collect();
//! # let odds = |i: usize| p[i] / (1.0 - p[i]);
//! # let term = |i: usize| -p[i].ln() - lambda * (odds(i) / (odds(i) + odds(2 + i))).ln();
//! # assert!((loss.to_scalar::<f64>()? - (term(0) + term(1)) / 2.0).abs() < 1e-12);
//! # let _ = gradients;
//! # Ok(())
//! # }
//! ```
//!
//! # GRPO
//!
//! Group relative policy optimization (Shao et al., arXiv 2402.03300, equations 3 and 4). The advantage of a completion
//! is its reward less the mean of its group, the completions of one prompt, over their standard deviation.
//! [`PolicyOptions`](crate::policy::PolicyOptions) names the options of its descendants, such as DAPO and Dr. GRPO.
//!
//! ```
//! # use candle_core::{DType, Device, Tensor};
//! use mos_head::policy::{PolicyBatch, PolicyNormalization, PolicyOptions};
//! use mos_head::{OutputLayer, SoftmaxHead};
//!
//! # fn main() -> mos_head::Result<()> {
//! # let device = &Device::Cpu;
//! # let head = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 8), device)?, None)?;
//! # let reference = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 8), device)?, None)?;
//! # let hidden = Tensor::randn(0f64, 0.3, (4, 3, 8), device)?;
//! # let reference_hidden = Tensor::randn(0f64, 0.3, (4, 3, 8), device)?;
//! # let token_ids = Tensor::new(&[[3u32, 5, 7], [3, 0, 9], [4, 6, 49], [4, 2, 2]], device)?;
//! # let mask = Tensor::new(&[[0u8, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]], device)?;
//! let rewards = Tensor::new(&[[1f64, 0.], [0.2, 0.6]], device)?; // [groups, completions]
//! let centred = rewards.broadcast_sub(&rewards.mean_keepdim(1)?)?;
//! let advantages = centred.broadcast_div(&(rewards.var_keepdim(1)?.sqrt()? + 1e-4)?)?;
//! let advantages = advantages.reshape(((), 1))?.broadcast_as(token_ids.shape())?.contiguous()?; // one for each token
//! let batch = PolicyBatch::new(token_ids.clone(), advantages.clone())
//!     .with_old_log_probs(head.log_prob(&hidden, &token_ids)?) // of the policy that sampled
//!     .with_reference_log_probs(reference.log_prob(&reference_hidden, &token_ids)?)
//!     .with_mask(mask.clone());
//! let options = PolicyOptions::new()
//!     .with_clip(0.2, 0.2)
//!     .with_kl(0.04)
//!     .with_normalization(PolicyNormalization::Sequences);
//! let loss = head.policy_loss(&hidden, &batch, &options)?;
//! let gradients = loss.backward()?;
//! # let x = (reference.log_prob(&reference_hidden, &token_ids)? - head.log_prob(&hidden, &token_ids)?)?;
//! # let terms = (((x.exp()? - &x)? - 1.0)? * 0.04)?;
//! # let mask = mask.to_dtype(DType::F64)?;
//! # let sums = ((terms - advantages)? * &mask)?.sum(1)?;
//! # let expected = (sums / mask.sum(1)?)?.mean_all()?.to_scalar::<f64>()?;
//! # assert!((loss.value.to_scalar::<f64>()? - expected).abs() < 1e-10);
//! # let _ = gradients;
//! # Ok(())
//! # }
//! ```
//!
//! # RLOO
//!
//! REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740): the advantage of a completion is its reward less the
//! mean of the other rewards of its group. The gradient is that of `-advantage log policy(completion)`, averaged over
//! the completions. Without old log-probabilities, the ratio of the policy to itself has this gradient.
//!
//! ```
//! # use candle_core::{Device, Tensor, Var};
//! use mos_head::policy::{PolicyBatch, PolicyNormalization, PolicyOptions};
//! # use mos_head::score::ScoreOptions;
//! use mos_head::{OutputLayer, SoftmaxHead};
//!
//! # fn main() -> mos_head::Result<()> {
//! # let device = &Device::Cpu;
//! # let weight = Var::randn(0f64, 1., (50, 8), device)?;
//! # let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
//! # let hidden = Tensor::randn(0f64, 1., (4, 3, 8), device)?;
//! # let token_ids = Tensor::new(&[[3u32, 5, 7], [3, 0, 9], [4, 6, 49], [4, 2, 2]], device)?;
//! # let mask = Tensor::new(&[[0u8, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]], device)?;
//! let rewards = Tensor::new(&[[1f64, 0.], [0.2, 0.6]], device)?; // [groups, completions]
//! let (groups, completions) = rewards.dims2()?;
//! let others = (rewards.sum_keepdim(1)?.broadcast_sub(&rewards)? / (completions - 1) as f64)?;
//! let advantages = (rewards - others)?.reshape(((), 1))?;
//! let batch = PolicyBatch::new(token_ids.clone(), advantages.broadcast_as(token_ids.shape())?.contiguous()?)
//!     .with_mask(mask.clone());
//! let normalization = PolicyNormalization::Constant((groups * completions) as f64);
//! let loss = head.policy_loss(&hidden, &batch, &PolicyOptions::new().with_normalization(normalization))?;
//! let gradients = loss.backward()?;
//! # let scores = head.score(&hidden, &token_ids, &ScoreOptions::new())?;
//! # let composed = (scores.sum_by_sequence(&mask)? * advantages.squeeze(1)?)?.mean_all()?.neg()?;
//! # let composed = scores.backward(&composed)?;
//! # let [found, expected] = [&gradients, &composed].map(|gradients| gradients.get(&weight).unwrap());
//! # assert!((found - expected)?.abs()?.max_all()?.to_scalar::<f64>()? < 1e-12);
//! # assert!(expected.abs()?.max_all()?.to_scalar::<f64>()? > 1e-3);
//! # Ok(())
//! # }
//! ```
//!
//! # GKD
//!
//! Generalized knowledge distillation (Agarwal et al., arXiv 2306.13649, equation 1): the generalised Jensen-Shannon
//! divergence from a teacher, on texts that the student or others have written.
//!
//! ```
//! # use candle_core::{DType, Device, Tensor};
//! use mos_head::distill::{DistillOptions, Divergence, Teacher};
//! use mos_head::{DropoutMasks, MixtureLayer, OutputLayer, SoftmaxHead};
//!
//! # fn main() -> mos_head::Result<()> {
//! # let device = &Device::Cpu;
//! # let head = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 8), device)?, None)?;
//! # let teacher = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 16), device)?, None)?;
//! # let hidden = Tensor::randn(0f64, 1., (2, 3, 8), device)?;
//! # let teacher_hidden = Tensor::randn(0f64, 1., (2, 3, 16), device)?;
//! # let mask = Tensor::new(&[[0u8, 1, 1], [0, 1, 0]], device)?;
//! let beta = 0.5;
//! let distributions = Teacher::from_mixture(&teacher.mixture(&teacher_hidden, DropoutMasks::Off)?);
//! let options = DistillOptions::new(Divergence::JensenShannon(beta))
//!     .with_position_weights(mask.to_dtype(DType::F64)?); // completions alone
//! let loss = head.distill(&hidden, &distributions, &options)?;
//! let gradients = loss.backward()?;
//! # let [q, t] = [head.log_probs(&hidden)?.exp()?, teacher.log_probs(&teacher_hidden)?.exp()?];
//! # let middle = ((&t * beta)? + (&q * (1.0 - beta))?)?;
//! # let kl = |p: &Tensor| (p * (p / &middle)?.log()?)?.sum(2);
//! # let divergence = ((kl(&t)? * beta)? + (kl(&q)? * (1.0 - beta))?)?;
//! # let expected = (divergence * mask.to_dtype(DType::F64)?)?.sum_all()?.to_scalar::<f64>()? / 3.0;
//! # assert!((loss.value.to_scalar::<f64>()? - expected).abs() < 1e-12);
//! # let _ = gradients;
//! # Ok(())
//! # }
//! ```
//!
//! # Reward model
//!
//! The reward of a text is a linear map of the hidden state of its last token, in place of an output layer over the
//! vocabulary (Ouyang et al., arXiv 2203.02155, equation 1): `-log sigmoid(r(chosen) - r(rejected))`.
//!
//! ```
//! # use candle_core::{Device, Tensor};
//! use candle_nn::ops::log_softmax;
//! use candle_nn::{Linear, Module};
//!
//! # fn main() -> candle_core::Result<()> {
//! # let device = &Device::Cpu;
//! # let hidden = Tensor::randn(0f64, 1., (4, 3, 8), device)?;
//! let reward = Linear::new(Tensor::randn(0f64, 1., (1, 8), device)?, None);
//! let last = Tensor::new(&[2u32, 2, 1, 2], device)?; // the place of the last token of each text
//! let (batch, _, size) = hidden.dims3()?;
//! let last = last.reshape((batch, 1, 1))?.broadcast_as((batch, 1, size))?.contiguous()?;
//! let rewards = reward.forward(&hidden.gather(&last, 1)?.squeeze(1)?)?.reshape((2, ()))?; // chosen, rejected
//! let loss = log_softmax(&rewards, 0)?.get(0)?.mean_all()?.neg()?;
//! # let all = reward.forward(&hidden)?.squeeze(2)?.to_vec2::<f64>()?;
//! # let term = |chosen: f64, rejected: f64| -(1.0 / (1.0 + (rejected - chosen).exp())).ln();
//! # let expected = (term(all[0][2], all[2][1]) + term(all[1][2], all[3][2])) / 2.0;
//! # assert!((loss.to_scalar::<f64>()? - expected).abs() < 1e-12);
//! # Ok(())
//! # }
//! ```
//!
//! # What trainers log
//!
//! Beside the log-probability of each token, the trainers log its entropy, and the preference trainers the mean logit
//! of chosen and rejected completions (`logits/chosen`, `logits/rejected`), which is a mean over their tokens and over
//! all ids. [`Scores`](crate::score::Scores) has these without the logits of all ids, and the logarithm of `sum_v
//! P(v)^2`, the probability that two draws are equal; all of them have gradients.
//!
//! | number of a token | option | result |
//! |---|---|---|
//! | `log P(y)` | | `log_prob` |
//! | `-sum_v P(v) log P(v)` | `with_entropy` | `entropy` |
//! | `log sum_v P(v)^2` | `with_collision` | `log_collision` |
//! | `1/V sum_v z_v` | `with_mean_logit` | `mean_logit` |
//!
//! ```
//! # use candle_core::{DType, Device, Tensor};
//! use mos_head::score::ScoreOptions;
//! use mos_head::{DropoutMasks, MixtureLayer, OutputLayer, SoftmaxHead};
//!
//! # fn main() -> mos_head::Result<()> {
//! # let device = &Device::Cpu;
//! # let head = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1., (50, 8), device)?, None)?;
//! # let hidden = Tensor::randn(0f64, 1., (4, 3, 8), device)?;
//! # let token_ids = Tensor::new(&[[3u32, 5, 7], [3, 0, 9], [3, 6, 49], [3, 2, 2]], device)?;
//! # let mask = Tensor::new(&[[0u8, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]], device)?;
//! let options = ScoreOptions::new().with_entropy(true).with_collision(true).with_mean_logit(true);
//! let scores = head.score(&hidden, &token_ids, &options)?;
//! let [entropy, log_collision, mean_logit] =
//!     [scores.entropy, scores.log_collision, scores.mean_logit].map(|scores| scores.expect("asked for").detach());
//! let weights = mask.to_dtype(DType::F64)?;
//! let mean = |numbers: &Tensor, first: usize, n: usize| -> mos_head::Result<f64> {
//!     let [numbers, weights] = [&(numbers * &weights)?, &weights].map(|tensor| tensor.narrow(0, first, n)?.sum_all());
//!     Ok(numbers?.to_scalar::<f64>()? / weights?.to_scalar::<f64>()?)
//! };
//! let (logits_chosen, logits_rejected) = (mean(&mean_logit, 0, 2)?, mean(&mean_logit, 2, 2)?);
//! let (entropy, log_collision) = (mean(&entropy, 0, 4)?, mean(&log_collision, 0, 4)?);
//! # let logits = head.mixture(&hidden, DropoutMasks::Off)?.logits()?;
//! # let log_probs = head.log_probs(&hidden)?;
//! # let probs = log_probs.exp()?;
//! # let expected = mean(&logits.mean(2)?, 0, 2)? - mean(&logits.mean(2)?, 2, 2)?;
//! # assert!((logits_chosen - logits_rejected - expected).abs() < 1e-12);
//! # let expected = mean(&(&probs * &log_probs)?.sum(2)?.neg()?, 0, 4)?;
//! # assert!((entropy - expected).abs() < 1e-12);
//! # let expected = mean(&probs.sqr()?.sum(2)?.log()?, 0, 4)?;
//! # assert!((log_collision - expected).abs() < 1e-12);
//! # Ok(())
//! # }
//! ```
//!
//! # Several future tokens
//!
//! Multi-token prediction adds losses of the tokens after the next one, at depths 1 to D, whose modules share the
//! output layer (DeepSeek-V3, arXiv 2412.19437, equations 24 and 25). With the loss of the next token as depth 0 it is
//!
//! ```text
//! L_0 + lambda / D sum_{k=1..D} L_k,    L_k = -1/T sum_t log P_k(token t + 1 + k)
//! ```
//!
//! One call over the rows of all depths, with a weight for each row, reads the decoder once, and makes one gradient of
//! the decoder in place of D + 1.
//!
//! ```
//! # use candle_core::{Device, Tensor, Var};
//! use mos_head::{LossOptions, OutputLayer, Reduction, SoftmaxHead};
//!
//! # fn main() -> mos_head::Result<()> {
//! # let device = &Device::Cpu;
//! # let weight = Var::randn(0f64, 1., (50, 8), device)?;
//! # let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
//! # let (batch, seq) = (2, 5);
//! # let texts = Tensor::new(&[[3u32, 5, 7, 9, 11, 13], [1, 2, 4, 8, 16, 32]], device)?; // [batch, seq + 1]
//! # let hidden = [seq, seq - 1, seq - 2].map(|length| Tensor::randn(0f64, 1., (batch, length, 8), device).unwrap());
//! let (lambda, depths) = (0.3, 2);
//! let (mut rows, mut targets, mut weights) = (Vec::new(), Vec::new(), Vec::new());
//! for (depth, hidden) in hidden.iter().enumerate() {
//!     let length = seq - depth; // hidden: [batch, seq - depth, hidden]
//!     let weight = if depth == 0 { 1.0 } else { lambda / depths as f64 };
//!     rows.push(hidden.flatten(0, 1)?);
//!     targets.push(texts.narrow(1, 1 + depth, length)?.flatten_all()?);
//!     weights.extend(vec![weight / (batch * seq) as f64; batch * length]);
//! }
//! let options = LossOptions::new()
//!     .with_position_weights(Tensor::new(weights, device)?)
//!     .with_reduction(Reduction::Sum);
//! let loss = head.loss(&Tensor::cat(&rows, 0)?, &Tensor::cat(&targets, 0)?, &options)?;
//! let gradients = loss.backward()?;
//! # let mut separate = Tensor::zeros((), candle_core::DType::F64, device)?;
//! # for (depth, (rows, targets)) in rows.iter().zip(&targets).enumerate() {
//! #     let options = LossOptions::new().with_denominator((batch * seq) as f64);
//! #     let factor = if depth == 0 { 1.0 } else { lambda / depths as f64 };
//! #     separate = (separate + (head.loss(rows, targets, &options)?.value * factor)?)?;
//! # }
//! # assert!((loss.value.to_scalar::<f64>()? - separate.to_scalar::<f64>()?).abs() < 1e-12);
//! # let separate = separate.backward()?;
//! # let [found, expected] = [&gradients, &separate].map(|gradients| gradients.get(&weight).unwrap());
//! # assert!((found - expected)?.abs()?.max_all()?.to_scalar::<f64>()? < 1e-12);
//! # Ok(())
//! # }
//! ```
