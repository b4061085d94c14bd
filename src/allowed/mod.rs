//! Allowed ids: the distribution of each position is renormalised over the set of token ids that are allowed there.
//!
//! ```text
//! P(v | S) = P(v) / P(S) for v in S, else 0
//! ```
//!
//! [`AllowedIds`] has the sets, [`RestrictedMixture`] is a mixture whose distributions they restrict, and
//! [`Restricted`] is a head of such mixtures. A single softmax needs only the decoder's rows of the allowed ids
//! ([`gathered_rows`]); a mixture of several softmaxes needs the log-sum-exps over all ids. [`set_log_probs`] computes
//! the log-probabilities of the sets in the cheapest way, and [`choice`] chooses ids from them.

mod choice;
mod gathered_rows;
mod ids;
mod restricted_head;
mod restricted_mixture;
mod set_log_probs;

pub use ids::AllowedIds;
pub use restricted_head::Restricted;
pub use restricted_mixture::RestrictedMixture;
