//! The trait of all heads, which turn hidden states into losses, log-probabilities and token ids.

use std::any::type_name;
use std::fmt::Debug;

use candle_core::{DType, Tensor, D};

use crate::decoding::{NextToken, Sampler, TokenRequest, TopK, Verification, Verified};
use crate::distributions::{Distributions, GivenLogProbs};
use crate::error::{Error, Result};
use crate::loss::{Loss, LossOptions, OutputShape, Reduction};
use crate::mixture::{DistillOptions, Distillation, Teacher};
use crate::scores::policy::{PolicyBatch, PolicyOptions, PolicyTerms};
use crate::scores::{candidate_count, ScoreOptions, Scores};
use crate::tensors::checks::leading;
use crate::tensors::dropout::DropoutMasks;
use crate::tensors::transfer::{accurate_dtype, select_positions};

/// The output layer of a language model: from a hidden state to a distribution over the vocabulary.
///
/// # What a head provides
///
/// | | |
/// |---|---|
/// | [`hidden_size`](OutputLayer::hidden_size), [`vocab_size`](OutputLayer::vocab_size) | its sizes |
/// | [`loss`](OutputLayer::loss) | the loss of targets under [`LossOptions`], with the gradients of all parameters |
/// | [`log_probs`](OutputLayer::log_probs) | the log-probabilities of all token ids |
///
/// A head of your own implements these four methods; the last example is one.
///
/// # What it gets
///
/// | | |
/// |---|---|
/// | [`log_prob`](OutputLayer::log_prob), [`score`](OutputLayer::score), [`log_probs_as`](OutputLayer::log_probs_as) | log-probabilities and entropies with gradients ([`score`](crate::score)) |
/// | [`top_k`](OutputLayer::top_k), [`argmax`](OutputLayer::argmax), [`sample`](OutputLayer::sample), [`next_tokens`](OutputLayer::next_tokens), [`next_tokens_per_position`](OutputLayer::next_tokens_per_position), [`prompt_log_probs`](OutputLayer::prompt_log_probs), [`verify`](OutputLayer::verify) | decoding ([`decode`](crate::decode)) |
/// | [`policy_loss`](OutputLayer::policy_loss), [`distill`](OutputLayer::distill) | PPO and GRPO ([`policy`](crate::policy)), a teacher's distributions ([`distill`](crate::distill)) |
/// | [`frozen`](OutputLayer::frozen) | the head as a constant |
///
/// These methods are computed from `loss` and `log_probs`, and a head overrides those for which it knows a cheaper way,
/// as the heads of this crate do. The trait is object safe: a model can hold a `Box<dyn OutputLayer>` and choose the
/// head by its configuration. A `Box`, an `Arc` and a reference of a head are heads too.
///
/// # Shapes
///
/// `hidden` is `[.., hidden]`, with any leading dimensions, such as `[batch, seq, hidden]`; targets have these leading
/// dimensions, `[batch, seq]`.
///
/// # Examples
///
/// A model chooses its head at run time:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::{LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, SoftmaxConfig, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let heads: [Box<dyn OutputLayer>; 2] = [
///     Box::new(SoftmaxHead::new(&SoftmaxConfig::new(32, 500), vb.pp("softmax"))?),
///     Box::new(MixtureOfSoftmaxes::new(&MixtureConfig::new(32, 500, 4).with_context_dim(16), vb.pp("mos"))?),
/// ];
/// let hidden = Tensor::randn(0f32, 1., (2, 7, 32), &Device::Cpu)?; // [batch, seq, hidden]
/// let targets = Tensor::zeros((2, 7), DType::U32, &Device::Cpu)?; // [batch, seq]
/// for head in heads {
///     let loss = head.loss(&hidden, &targets, &LossOptions::default())?;
///     let gradients = loss.backward()?;
///     let perplexity = loss.value.to_scalar::<f32>()?.exp();
///     # assert!(perplexity > 1.0);
///     # let _ = gradients;
/// }
/// # Ok(())
/// # }
/// ```
///
/// A head of your own has `P(v) = (1 - epsilon) softmax(W h)_v + epsilon / V`:
///
/// ```
/// use candle_core::{DType, Device, Tensor, D};
/// use mos_head::decode::{Sampler, Sampling};
/// use mos_head::{Loss, LossOptions, OutputLayer, Result};
///
/// #[derive(Debug)]
/// struct Floored {
///     weight: Tensor, // [vocab, hidden]
///     epsilon: f64,
/// }
///
/// impl OutputLayer for Floored {
///     fn hidden_size(&self) -> usize {
///         self.weight.dims()[1]
///     }
///
///     fn vocab_size(&self) -> usize {
///         self.weight.dims()[0]
///     }
///
///     fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
///         let probs = candle_nn::ops::softmax(&hidden.broadcast_matmul(&self.weight.t()?)?, D::Minus1)?;
///         Ok(probs.affine(1.0 - self.epsilon, self.epsilon / self.vocab_size() as f64)?.log()?)
///     }
///
///     fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
///         // Ignored targets need not be token ids.
///         let (hidden, ids) = options.mask_ignored(hidden, targets)?;
///         let log_probs = self.log_probs(&hidden)?.gather(&ids.unsqueeze(D::Minus1)?, D::Minus1)?;
///         Loss::from_nll(&log_probs.squeeze(D::Minus1)?.neg()?, targets, options)
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?;
/// let head: Box<dyn OutputLayer> = Box::new(Floored { weight, epsilon: 0.01 });
/// let hidden = Tensor::randn(0f32, 1., (2, 8), &Device::Cpu)?;
/// let best = head.top_k(&hidden, 5)?;
/// let next = head.sample(&hidden, &mut Sampler::new(Sampling::new().with_top_p(0.9), 42)?)?;
/// # assert_eq!((best.token_ids.dims(), next.dims()), (&[2, 5][..], &[2][..]));
/// # Ok(())
/// # }
/// ```
pub trait OutputLayer: Debug + Send + Sync {
    /// Returns the size of the hidden states.
    fn hidden_size(&self) -> usize;

    /// Returns the size of the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Computes the loss of targets `[..]` (u8, u32 or i64) after hidden states `[.., hidden]`, with the gradients of
    /// the hidden states and of every parameter that is a variable. The model decides whether gradients reach the
    /// variables of earlier layers: [`Loss::check_gradients`] names the variables that they do not reach.
    ///
    /// A head ignores no option that changes the loss: one that it does not support is
    /// [`Error::Unsupported`](crate::Error::Unsupported). A budget and a precision have no effect where a loss is
    /// composed of candle's operations.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - targets: `[..]`; u8, u32 or i64
    ///
    /// # Errors
    ///
    /// If shapes, dtypes or devices do not match, a target is not in the vocabulary (on a GPU its loss is NaN instead),
    /// or an option is out of range or not supported.
    fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss>;

    /// Computes log-probabilities `[.., vocab]` after hidden states `[.., hidden]`, without dropout. Differentiable.
    ///
    /// The samplers of other crates take them in place of logits. Only a penalty of repetition has another effect,
    /// because it depends on the sign of a logit: for one softmax, it needs
    /// [`Mixture::logits`](crate::Mixture::logits). The sampler of candle-transformers takes `[vocab]` (here from
    /// `hidden` `[1, hidden]`):
    ///
    /// ```ignore
    /// use candle_transformers::generation::{LogitsProcessor, Sampling};
    ///
    /// let mut processor = LogitsProcessor::from_sampling(42, Sampling::TopP { p: 0.9, temperature: 0.8 });
    /// let next = processor.sample(&head.log_probs(&hidden)?.squeeze(0)?)?;
    /// ```
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - returns `[.., vocab]`, of the dtype of `hidden`, or f32 if the decoder is quantised
    ///
    /// # Errors
    ///
    /// If the last dimension, dtype or device of the hidden states does not match the head.
    fn log_probs(&self, hidden: &Tensor) -> Result<Tensor>;

    /// Computes log-probabilities `[.., vocab]` in another dtype. The heads of this crate do not first round them to
    /// half precision if the dtype is f32; by default this converts the result of [`OutputLayer::log_probs`].
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - returns `[.., vocab]`
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::log_probs`].
    fn log_probs_as(&self, hidden: &Tensor, dtype: DType) -> Result<Tensor> {
        Ok(self.log_probs(hidden)?.to_dtype(dtype)?)
    }

    /// Computes the log-probability of given token ids after hidden states `[.., hidden]` and, if the options ask for
    /// them, the entropy, the mass outside the ids, the collision probability, the mean logit and whether an id is the
    /// argmax. Differentiable. Heads that are one mixture compute them without a tensor of the vocabulary's size, see
    /// [`Distributions::score`]; by default they are composed from [`OutputLayer::log_probs`].
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - token_ids: `[..]`, or `[.., n]` for several candidates at each position; u8, u32 or i64
    /// - returns log-probabilities and `is_argmax` of the shape of `token_ids`, and `[..]` each the entropy, the
    ///   logarithm of the mass outside, that of the collision probability, and the mean logit; in nats
    ///
    /// # Errors
    ///
    /// The errors that [`OutputLayer::loss`] has for targets, or if an option is out of range.
    /// [`Error::Unsupported`](crate::Error::Unsupported) for an option that the head does not have, see
    /// [`ScoreOptions::with_mean_logit`].
    fn score(&self, hidden: &Tensor, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores> {
        let checked = leading(hidden).and_then(|leading| candidate_count("token_ids", token_ids, leading));
        checked.map_err(|error| self.announce(error))?;
        self.distributions(hidden, None)?.score(token_ids, options)
    }

    /// Computes the loss of a policy gradient over sampled tokens, that of PPO and GRPO: see [`PolicyOptions`]. Heads
    /// that are one mixture compute it and its gradients in three products, without a tensor of the vocabulary's size;
    /// by default it is composed from [`OutputLayer::score`]. There is no dropout.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`, each position before its token
    /// - batch: every tensor `[..]`, the leading dimensions; the last of them is the sequence
    ///
    /// # Errors
    ///
    /// The errors that [`OutputLayer::loss`] has for targets, or if an option is out of range or the batch lacks a
    /// tensor that an option needs.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::policy::{PolicyBatch, PolicyOptions};
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Var::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
    /// let hidden = Tensor::randn(0f32, 1., (2, 3, 8), &Device::Cpu)?; // [batch, seq, hidden]
    /// let token_ids = Tensor::new(&[[3u32, 5, 7], [1, 0, 99]], &Device::Cpu)?;
    /// let old_log_probs = head.log_prob(&hidden, &token_ids)?.detach();
    /// let advantages = Tensor::new(&[[1f32, 1., 1.], [-1., -1., -1.]], &Device::Cpu)?;
    /// let batch = PolicyBatch::new(token_ids, advantages).with_old_log_probs(old_log_probs);
    /// let loss = head.policy_loss(&hidden, &batch, &PolicyOptions::new().with_entropy(0.01))?;
    /// let gradients = loss.backward()?;
    /// # assert!(gradients.get(&weight).is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # References
    ///
    /// - PPO: Schulman, Wolski, Dhariwal, Radford, Klimov: Proximal Policy Optimization Algorithms. 2017, arXiv
    ///   1707.06347.
    /// - GRPO: Shao et al.: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models. 2024,
    ///   arXiv 2402.03300.
    fn policy_loss(&self, hidden: &Tensor, batch: &PolicyBatch, options: &PolicyOptions) -> Result<Loss> {
        let terms = leading(hidden).and_then(|leading| PolicyTerms::new(leading, hidden, batch, options));
        let terms = terms.map_err(|error| self.announce(error))?;
        self.distributions(hidden, Some(terms.positions()))?.loss_from_policy(terms)
    }

    /// Computes the divergence of this layer, the student, from a teacher after hidden states `[.., hidden]`, and its
    /// gradients. For a head that is one mixture it costs as much as a loss, one product more if the teacher is a
    /// mixture, and on a GPU another one if it is not a list: see [`Distributions::distill`]. [`Loss::nll`] has the
    /// objective of each position that counts, in their order, without weights.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - teacher: a mixture of contexts `[.., K, d]`, log-probabilities `[.., vocab]`, or a list `[.., n]`
    /// - [`Loss::nll`]: `[positions]`, one for each position that counts
    ///
    /// # Errors
    ///
    /// If the shapes, the vocabulary or the devices of teacher and student differ, an id is not in the vocabulary, or
    /// an option is out of range. [`Error::InfiniteDivergence`](crate::Error::InfiniteDivergence) if a divergence is
    /// infinite at a position, because an id is possible for only one of student and teacher. On a GPU, where the call
    /// does not wait for the values, the loss is infinite instead.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::distill::{DistillOptions, Divergence, MissingIds, Teacher};
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let teacher = SoftmaxHead::from_tensors(Tensor::randn(0f32, 1., (100, 16), &Device::Cpu)?, None)?;
    /// let weight = Var::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let student = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
    /// let top = teacher.top_k(&Tensor::randn(0f32, 1., (2, 3, 16), &Device::Cpu)?, 8)?;
    /// let list = Teacher::from_top_k(&top.token_ids, &top.log_probs, MissingIds::Tail);
    /// let hidden = Tensor::randn(0f32, 1., (2, 3, 8), &Device::Cpu)?; // [batch, seq, hidden]
    /// let loss = student.distill(&hidden, &list, &DistillOptions::new(Divergence::ForwardKl))?;
    /// let gradients = loss.backward()?;
    /// # assert!(gradients.get(&weight).is_some());
    /// # Ok(())
    /// # }
    /// ```
    fn distill(&self, hidden: &Tensor, teacher: &Teacher, options: &DistillOptions) -> Result<Loss> {
        let distillation = leading(hidden).and_then(|leading| {
            Distillation::new(OutputShape { leading, vocab: self.vocab_size(), like: hidden }, teacher, options)
        });
        let distillation = distillation.map_err(|error| self.announce(error))?;
        self.distributions(hidden, Some(distillation.positions()))?.loss_from_teacher(&distillation)
    }

    /// Computes the log-probability of given token ids after hidden states `[.., hidden]`. Differentiable.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - token_ids: `[..]`, or `[.., n]` for several candidates at each position; u8, u32 or i64
    /// - returns the shape of `token_ids`, in nats
    ///
    /// # Errors
    ///
    /// The errors that [`OutputLayer::loss`] has for targets.
    fn log_prob(&self, hidden: &Tensor, token_ids: &Tensor) -> Result<Tensor> {
        if token_ids.dims() != &hidden.dims()[..hidden.rank().saturating_sub(1)] {
            return Ok(self.score(hidden, token_ids, &ScoreOptions::new())?.log_prob);
        }
        let options = LossOptions::new().with_reduction(Reduction::None).with_dropout(DropoutMasks::Off);
        let loss = self.loss(hidden, token_ids, &options).map_err(|error| error.renamed("targets", "token_ids"))?;
        // `neg` would make a minus zero.
        Ok(loss.value.affine(-1.0, 0.0)?)
    }

    /// Finds the `k` most probable token ids after hidden states `[.., hidden]`, and their log-probabilities, in
    /// descending order; equally probable ids are in ascending order. Unlike candle's sort on CUDA, which takes at most
    /// 8192 columns, it works for every size of vocabulary.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - returns ids, u32, and log-probabilities, `[.., k]` each
    ///
    /// # Errors
    ///
    /// If the hidden states do not match the head, `k` is not between 1 and the size of the vocabulary, or a
    /// distribution is NaN, infinite or impossible.
    fn top_k(&self, hidden: &Tensor, k: usize) -> Result<TopK> {
        self.distributions(hidden, None)?.top_k(k)
    }

    /// Finds the most probable token id, `[..]` (u32), after hidden states `[.., hidden]`: the lowest one, if several
    /// are equally probable.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - returns `[..]`, u32
    ///
    /// # Errors
    ///
    /// If the hidden states do not match the head, or a distribution is NaN, infinite or impossible: the error names
    /// its position.
    fn argmax(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.top_k(hidden, 1)?.token_ids.squeeze(D::Minus1)?)
    }

    /// Draws one token id for each of the hidden states `[.., hidden]`: `[..]`, u32.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - returns `[..]`, u32
    ///
    /// # Errors
    ///
    /// If the hidden states do not match the head, a distribution is NaN, infinite or impossible, or the options of the
    /// sampler need components that the head does not have.
    fn sample(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
        self.distributions(hidden, None)?.sample(sampler)
    }

    /// Chooses the next token id after each of the hidden states `[.., hidden]`, as the position's request says, with
    /// its log-probabilities, the most probable ids and the entropy. A head that is one mixture reads its decoder once
    /// for each chunk of positions; by default the answers are computed from [`OutputLayer::log_probs`], which the
    /// constraints then change in place of logits.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`, one position for each request
    ///
    /// # Errors
    ///
    /// If the hidden states do not match the head, or there are not as many requests as positions.
    /// [`Error::Request`](crate::Error::Request) names the first request that [`TokenRequest::check`] refuses.
    /// [`Error::EmptySet`](crate::Error::EmptySet) if the constraints leave no id of a position,
    /// [`Error::Value`](crate::Error::Value) if they make a logit NaN or plus infinity,
    /// [`Error::Distribution`](crate::Error::Distribution) if a distribution is NaN or infinite, and
    /// [`Error::Impossible`](crate::Error::Impossible) if it has no possible id. No request is answered after an error.
    fn next_tokens(&self, hidden: &Tensor, requests: &[&TokenRequest]) -> Result<Vec<NextToken>> {
        self.distributions(hidden, None)?.next_tokens(requests)
    }

    /// Chooses several next token ids after each of the hidden states `[.., hidden]`, one for each request of the
    /// position's list, from one read of the decoder for each chunk of positions and one distribution for each
    /// position: such as the first ids of n samples of a prompt, by requests that differ in their seeds.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`, one position for each list of requests
    ///
    /// # Errors
    ///
    /// The errors of [`next_tokens`](OutputLayer::next_tokens). [`Error::Request`](crate::Error::Request) counts the
    /// requests of all lists.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use mos_head::decode::{Sampling, TokenRequest};
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let head = SoftmaxHead::from_tensors(Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?, None)?;
    /// let hidden = Tensor::randn(0f32, 1., (1, 8), &Device::Cpu)?; // after a prompt
    /// let requests: Vec<_> = (0..5).map(|seed| TokenRequest::new(Sampling::new(), seed)).collect::<Result<_, _>>()?;
    /// let drawn = head.next_tokens_per_position(&hidden, &[&requests.iter().collect::<Vec<_>>()])?;
    /// assert_eq!(drawn[0].len(), 5);
    /// assert_eq!(drawn[0][3], head.next_tokens(&hidden, &[&requests[3]])?[0]);
    /// # Ok(())
    /// # }
    /// ```
    fn next_tokens_per_position(&self, hidden: &Tensor, requests: &[&[&TokenRequest]]) -> Result<Vec<Vec<NextToken>>> {
        self.distributions(hidden, None)?.next_tokens_per_position(requests)
    }

    /// Computes what servers return for a prompt: the log-probability of each of its token ids after the hidden state
    /// before it, its rank, and the `n` most probable ids. A head that is one mixture reads its decoder once for each
    /// chunk of positions (on the CPU 64 rows of logits, or more within 32 MiB), and holds the logits of a chunk and
    /// one distribution for each thread, or on a GPU the chunk's; a head of your own holds the log-probabilities of all
    /// positions.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`, one position for each token id: the state before it
    ///
    /// # Errors
    ///
    /// If the hidden states do not match the head, there are not as many as token ids, or `n` is above the size of the
    /// vocabulary. [`Error::Request`](crate::Error::Request) names the first id that is not in the vocabulary.
    /// [`Error::Distribution`](crate::Error::Distribution) if a distribution is NaN or infinite, and
    /// [`Error::Impossible`](crate::Error::Impossible) if it has no possible id.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let head = SoftmaxHead::from_tensors(Tensor::new(&[[3f32], [1.], [2.]], &Device::Cpu)?, None)?;
    /// let hidden = Tensor::new(&[[1f32], [1.]], &Device::Cpu)?;
    /// let prompt = head.prompt_log_probs(&hidden, &[2, 0], 1)?;
    /// assert_eq!((prompt[0].token_id, prompt[0].rank, prompt[0].best[0].0), (2, Some(2), 0));
    /// assert_eq!((prompt[1].token_id, prompt[1].rank), (0, Some(1)));
    /// assert!((prompt[1].log_prob - prompt[0].log_prob - 1.0).abs() < 1e-6);
    /// # Ok(())
    /// # }
    /// ```
    fn prompt_log_probs(&self, hidden: &Tensor, token_ids: &[u32], n: usize) -> Result<Vec<NextToken>> {
        let request = |&id: &u32| TokenRequest::forced(id).with_best(n).with_rank(true);
        let requests: Vec<TokenRequest> = token_ids.iter().map(request).collect();
        self.next_tokens(hidden, &requests.iter().collect::<Vec<_>>())
    }

    /// Verifies drafted token ids, for speculative decoding: draws the next tokens of each text from the hidden states
    /// after its last token and after each of its drafts, and accepts the drafts that they agree with. All rows of all
    /// texts are computed together, from one read of the decoder for each chunk of rows.
    ///
    /// The noise of a draw is a function of the request's seed, the step and the token id ([`TokenRequest`]), and so
    /// the tokens are those that [`next_tokens`](OutputLayer::next_tokens) draws step by step, whatever the drafts are:
    /// a row draws with the request of its text after the drafts before it, with its penalties, constraints and
    /// processor. For a head of this crate on the CPU ids and log-probabilities are the same to the bit, if the hidden
    /// states are ([what is promised](crate::decode#the-same-ids-in-every-batch)).
    ///
    /// A drafter that draws with a clone of the request shares its noise: where both distributions are alike, both draw
    /// the same id, much more often than with noise of their own (Daliri et al.). The noise is shared for agreement
    /// alone. The ratio test of Leviathan et al. accepts a draft with the probability `min(1, p / q)`, and needs noise
    /// that the draft does not depend on: with the drafter's, what it draws after a rejection is biased.
    ///
    /// Each request advances by the tokens of its text: the accepted drafts and one more, unless an accepted draft ends
    /// the text ([`TokenRequest::with_ends`]). After an error no request has moved. The model's cache of keys and values
    /// has the rejected drafts too: cut it to the text and [`Verified::accepted`] drafts. The constraints of a request
    /// hold at all rows of its text: where they change from step to step, as those of a grammar do, verify the drafts up
    /// to the change.
    ///
    /// # Shapes
    ///
    /// - hidden: `[rows, hidden]`: for each text in turn, the state after its last token and that after each of its
    ///   drafts
    /// - drafts: a list of token ids for each text, which may be empty
    /// - requests: one for each text
    ///
    /// # Errors
    ///
    /// If there are not as many requests as lists, or not as many hidden states as drafts and texts together.
    /// [`Error::Request`](crate::Error::Request) names the first text with a draft outside the vocabulary or with a
    /// request that [`TokenRequest::check`] refuses. Otherwise the errors of [`next_tokens`](OutputLayer::next_tokens),
    /// with the row as the position. Errors of rows after a rejected draft do not count: plain sampling does not come
    /// there.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use mos_head::decode::{Sampling, TokenRequest};
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let head = SoftmaxHead::from_tensors(Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?, None)?;
    /// let hidden = Tensor::randn(0f32, 1., (4, 8), &Device::Cpu)?; // after the text, and after each of three drafts
    /// let mut request = TokenRequest::new(Sampling::new().with_temperature(0.8), 42)?;
    /// let verified = &head.verify(&hidden, &[&[17, 4, 9]], &mut [&mut request])?[0];
    /// assert_eq!(verified.tokens.len(), verified.accepted + 1);
    /// assert_eq!(request.generated(), verified.tokens.len() as u64);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # References
    ///
    /// - Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding. ICML 2023, arXiv
    ///   2211.17192.
    /// - Daliri, Musco, Suresh: Coupling without Communication and Drafter-Invariant Speculative Decoding. 2024, arXiv
    ///   2408.07978.
    fn verify(&self, hidden: &Tensor, drafts: &[&[u32]], requests: &mut [&mut TokenRequest]) -> Result<Vec<Verified>> {
        let positions = leading(hidden).map(|leading| leading.iter().product());
        let verification =
            positions.and_then(|positions| Verification::new(positions, self.vocab_size(), drafts, requests));
        let verification = verification.map_err(|error| self.announce(error))?;
        let verified = verification.verify(|rows, requests| match rows {
            None => self.next_tokens(hidden, requests),
            Some(_) => self.distributions(hidden, rows)?.next_tokens(requests),
        })?;
        for (verified, request) in verified.iter().zip(requests) {
            verified.tokens.iter().for_each(|token| request.push(token.token_id));
        }
        Ok(verified)
    }

    /// Returns the distributions after hidden states, without dropout, of which `score`, `policy_loss`, `distill`,
    /// `top_k`, `sample` and `next_tokens` are asked. By default they are the log-probabilities of
    /// [`OutputLayer::log_probs_as`] in f32 (f64 for f64), from which every result is composed. A head that is built on
    /// another one, whose cheaper ways it wants to have, overrides this method.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., hidden]`
    /// - positions: the places of the positions to compute, in the flattened leading dimensions and in ascending order;
    ///   they become the leading dimension, `[n]`. `None` computes all
    ///
    /// # Errors
    ///
    /// The errors of [`OutputLayer::log_probs`].
    fn distributions(&self, hidden: &Tensor, positions: Option<&[u32]>) -> Result<Box<dyn Distributions + '_>> {
        let hidden = select_hidden(hidden, positions)?;
        let log_probs = self.log_probs_as(&hidden, accurate_dtype(&hidden))?;
        Ok(Box::new(GivenLogProbs::new(log_probs, hidden, type_name::<Self>())?))
    }

    /// Returns an error that is found before a result is asked for. Ranks that share a vocabulary tell each other.
    #[doc(hidden)]
    fn announce(&self, error: Error) -> Error {
        error
    }

    /// Returns the head as a constant, for evaluation and decoding, or to train only the layers before it: hidden
    /// states get their gradient through it, and none of its parameters does, nor those of an adapter. Values that
    /// depend on its parameters alone, such as decoder rows from spellings, are computed once. Parameters are shared
    /// with the head, not copied.
    ///
    /// A head of this crate freezes its parts: a [`Projection`](crate::parts::Projection) or a
    /// [`MixtureLayer`](crate::MixtureLayer) of your own in it must override
    /// [`Projection::frozen`](crate::parts::Projection::frozen) or
    /// [`MixtureLayer::frozen_mixture`](crate::MixtureLayer::frozen_mixture). By default, a head of your own returns
    /// itself, and its parameters still get gradients. [`Head::with_frozen_decoder`](crate::Head::with_frozen_decoder)
    /// trains a projection or an adapter on a frozen decoder.
    ///
    /// # Errors
    ///
    /// If the device has no memory for the computed rows.
    ///
    /// # Examples
    ///
    /// The gradient of the hidden states of a head that is not trained:
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Var::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
    /// let frozen = head.frozen()?;
    /// let hidden = Var::randn(0f32, 1., (3, 8), &Device::Cpu)?;
    /// let targets = Tensor::new(&[1u32, 2, 3], &Device::Cpu)?;
    /// let gradients = frozen.loss(&hidden, &targets, &LossOptions::default())?.backward()?;
    /// assert!(gradients.get(&hidden).is_some() && gradients.get(&weight).is_none());
    /// # Ok(())
    /// # }
    /// ```
    fn frozen(&self) -> Result<Box<dyn OutputLayer + '_>> {
        Ok(Box::new(self))
    }
}

/// Returns the rows of hidden states `[.., hidden]` at these positions, `[n, hidden]`, or all of them as they are.
pub(crate) fn select_hidden(hidden: &Tensor, positions: Option<&[u32]>) -> Result<Tensor> {
    let Some(positions) = positions else { return Ok(hidden.clone()) };
    leading(hidden)?;
    select_positions(hidden, positions)
}
