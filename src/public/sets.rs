//! Sets of allowed ids: the distribution of each position is renormalised over the token ids that are allowed there.
//!
//! ```text
//! P(v | S) = P(v) / P(S) for v in S, else 0
//! ```
//!
//! [`AllowedIds`] are the sets: one for all positions, such as a grammar's, or one for each position, such as the ids
//! that a sampler's truncation left. [`Mixture::restricted`](crate::Mixture::restricted) returns a
//! [`RestrictedMixture`], whose results are those of a mixture: losses, log-probabilities, scores, the most probable
//! ids and samples. [`Restricted`] is a head whose mixtures are restricted, and an [`OutputLayer`](crate::OutputLayer)
//! itself. Begin with [`Restricted`] for a head, or with [`AllowedIds`] for a mixture.
//!
//! A set that stays, such as a draft vocabulary, is cheapest in a [frozen](crate::OutputLayer::frozen) head, which
//! copies its rows of the decoder once. The allowed ids of a single text that is served are a constraint of its request
//! instead: [`Constraints::with_allowed`](crate::decode::Constraints::with_allowed), or
//! [`Constraints::with_allowed_mask`](crate::decode::Constraints::with_allowed_mask) for the mask of a grammar.

pub use crate::allowed::{AllowedIds, Restricted, RestrictedMixture};
