//! Kept sets: the distribution of each position, renormalised over the token ids that are allowed there.
//!
//! ```text
//! P(v | S) = P(v) / P(S) for v in S, else 0
//! ```
//!
//! [`AllowedIds`] are the sets, [`RestrictedMixture`] a mixture over them, [`Restricted`] a head whose mixtures are. A
//! single softmax needs the decoder's rows of its set alone ([`single`]); a mixture of several needs the log-sum-exps
//! over all ids. [`rows`] chooses how the log-probabilities of the sets are computed, [`decoding`] how ids are chosen.

mod decoding;
mod head;
mod ids;
mod restricted;
mod rows;
mod single;

pub use head::Restricted;
pub use ids::AllowedIds;
pub use restricted::RestrictedMixture;
