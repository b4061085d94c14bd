//! Decoding: the most probable token ids, samples, the next tokens of texts that are served, and whole sequences.
//!
//! A head is asked by methods of [`OutputLayer`](crate::OutputLayer), which take and return the types of this module:
//!
//! | | |
//! |---|---|
//! | [`top_k`](crate::OutputLayer::top_k), [`argmax`](crate::OutputLayer::argmax) | return the most probable token ids under the whole mixture ([`TopK`]); among equals the lowest id comes first |
//! | [`sample`](crate::OutputLayer::sample) | draws with a [`Sampler`]: [`Sampling`] has the temperature of the mixture or of its components, top-k, top-p and min-p; the same seed draws the same ids |
//! | [`next_tokens`](crate::OutputLayer::next_tokens) | serves several texts: for each of several [`TokenRequest`]s, which have their own seed, sampling and [`Constraints`], a [`NextToken`] has a token id, its log-probabilities, the most probable ids and the entropy, from one read of the decoder |
//! | [`with_ancestral`](Sampling::with_ancestral) | draws a component, then an id: the distribution is that of the mixture, at nearly the cost of one softmax |
//! | [`BeamSearch`] | finds the most probable sequences of a batch, each a [`Hypothesis`], n-best, with a length penalty; the model is a closure |
//! | [`prune`](crate::MixtureLayer::prune) | removes the components whose priors sum to at most m, with a bound of the total variation ([`Pruned`]) |
//!
//! [`OutputLayer::log_probs`](crate::OutputLayer::log_probs) gives the log-probabilities of all ids, which other
//! samplers take in place of logits, but for penalties of repetition. To decode among some ids alone, see
//! [`sets`](crate::sets).
//!
//! The log-sum-exps of a head that is one mixture need all logits of a position once; beyond them, its distributions
//! are read in tiles. A NaN distribution is an error that names its position.

pub use crate::decoding::{Constraints, NextToken, Pruned, Sampler, Sampling, TokenRequest, TopK};
pub use crate::heads::{BeamSearch, Hypothesis};
