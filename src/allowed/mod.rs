//! Kept sets: the distribution of each position, renormalised over the token ids that are allowed there.
//!
//! ```text
//! P(v | S) = P(v) / P(S) for v in S, else 0
//! ```
//!
//! [`AllowedIds`] are the sets, [`RestrictedMixture`] a mixture over them, [`Restricted`] a head whose mixtures are. A
//! single softmax needs the decoder's rows of its set alone ([`single`]); a mixture of several needs the log-sum-exps
//! over all ids. [`rows`] chooses how the log-probabilities of the sets are computed, [`decoding`] how ids are chosen.

mod choice;
mod gathered_rows;
mod ids;
mod restricted_head;
mod restricted_mixture;
mod rows;

pub use ids::AllowedIds;
pub use restricted_head::Restricted;
pub use restricted_mixture::RestrictedMixture;
