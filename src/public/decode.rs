//! Decoding: the most probable token ids, samples, the next tokens of texts that are served, and whole sequences.
//!
//! Methods of [`OutputLayer`](crate::OutputLayer) and of a mixture, and beam search, take and return these types:
//!
//! | | |
//! |---|---|
//! | [`top_k`](crate::OutputLayer::top_k), [`argmax`](crate::OutputLayer::argmax) | return the most probable token ids under the whole mixture ([`TopK`]); among equals the lowest id comes first |
//! | [`sample`](crate::OutputLayer::sample) | draws with a [`Sampler`]: [`Sampling`] has the temperature of the mixture or of its components, top-k, top-p and min-p; the same seed draws the same ids |
//! | [`next_tokens`](crate::OutputLayer::next_tokens) | answers the [`TokenRequest`]s of several texts, each of which has its own seed, sampling and [`Constraints`], from one read of the decoder for a chunk of them; a [`NextToken`] has a token id, its log-probabilities, the most probable ids, the entropy and the rank |
//! | [`next_tokens_per_position`](crate::OutputLayer::next_tokens_per_position) | answers several requests of each position, such as n seeds after a prompt |
//! | [`prompt_log_probs`](crate::OutputLayer::prompt_log_probs) | the log-probability and the rank of each id of a prompt, with the most probable ids |
//! | [`verify`](crate::OutputLayer::verify) | verifies drafted token ids for speculative decoding: the texts are those that `next_tokens` draws step by step ([`Verified`]) |
//! | [`with_ancestral`](Sampling::with_ancestral) | draws a component, and then an id from its softmax: the distribution is that of the mixture, at nearly the cost of one softmax |
//! | [`BeamSearch`] | finds the most probable sequences of a batch, each a [`Hypothesis`], n-best, with a length penalty; the model is a closure |
//! | [`prune`](crate::MixtureLayer::prune) | removes the components whose priors sum to at most m, with a bound of the total variation ([`Pruned`]) |
//!
//! [`OutputLayer::log_probs`](crate::OutputLayer::log_probs) returns the log-probabilities of all ids. Other samplers
//! take them in place of logits, unless a penalty of repetition depends on the sign of a logit. To decode among some
//! ids alone, see [`sets`](crate::sets).
//!
//! # The same ids in every batch
//!
//! On the CPU, [`next_tokens`](crate::OutputLayer::next_tokens), [`verify`](crate::OutputLayer::verify) and
//! [`sample`](crate::OutputLayer::sample) of every head of this crate give a position the same bits alone and in any
//! batch, on any number of threads: the same ids, log-probabilities and entropies. The promise holds for the head
//! alone: equal hidden states give equal results. The layers before the head may give other hidden states in another
//! batch: candle's product of one row rounds otherwise than its product of several, so that the ids may differ where
//! two are nearly equally probable.
//!
//! [`top_k`](crate::OutputLayer::top_k), [`score`](crate::score) and losses take faster products of many rows: they
//! agree with the above up to rounding, so that ids differ only where two are nearly equally probable. GPUs promise
//! nothing of this, nor do heads of your own.
//!
//! # Numerics
//!
//! A head that is one mixture computes all logits of a position once, for its log-sum-exps, and reads its distribution
//! in tiles. A NaN distribution is an error that names its position.

pub use crate::decoding::{Constraints, NextToken, Pruned, Sampler, Sampling, TokenRequest, TopK, Verified};
pub use crate::heads::{BeamSearch, Hypothesis};
