//! Kept sets: the distribution of each position, renormalised over the token ids that are allowed there.
//!
//! ```text
//! P(v | S) = P(v) / P(S) for v in S, else 0
//! ```
//!
//! [`AllowedIds`] are the sets: one for all positions, such as a grammar's, or what a sampler kept at each.
//! [`Mixture::restricted`](crate::Mixture::restricted) returns a [`RestrictedMixture`], which has every result of a
//! mixture, losses included. [`Restricted`] is a head whose mixtures are restricted; it goes wherever an
//! [`OutputLayer`](crate::OutputLayer) goes. Begin with [`Restricted`] for a head, or with [`AllowedIds`] for a
//! mixture.
//!
//! The allowed ids of a single text that is served are a constraint of its request instead:
//! [`Constraints::with_allowed`](crate::decode::Constraints::with_allowed).

pub use crate::allowed::{AllowedIds, Restricted, RestrictedMixture};
