//! Scores: log-probabilities of given token ids, the entropy and the mass of all other ids, with gradients.
//!
//! Begin with [`OutputLayer::score`](crate::OutputLayer::score), which takes [`ScoreOptions`] and returns [`Scores`].
//! [`Scores::sum_by_sequence`] makes the log-probabilities of sequences of them, as losses of preferences need them.
//! For a loss of your own, [`Distributions::score_loss`](crate::Distributions::score_loss) and
//! [`Distributions::log_prob_loss`](crate::Distributions::log_prob_loss) take a function of [`ChunkScores`] or
//! [`ChunkLogProbs`], which returns its values and derivatives, [`ChunkTerms`], chunk by chunk:
//!
//! | | products with / without gradients |
//! |---|---|
//! | [`log_prob`](crate::OutputLayer::log_prob), [`score`](crate::OutputLayer::score) | 4 / 1: log-probabilities of one or several candidates, and the entropy, at a temperature |
//! | [`score_loss`](crate::Distributions::score_loss), [`log_prob_loss`](crate::Distributions::log_prob_loss) | 3 / 1: a function of your own of the log-probabilities of some ids, the entropy and the mass of all others, or of the log-probabilities of all ids |
//! | [`log_probs`](crate::OutputLayer::log_probs) | 4 / 1, and a tensor of the vocabulary's size |
//!
//! Heads that are one mixture compute them chunk by chunk. On a GPU the entropy, the mass outside, the collision
//! probability and a temperature need the log-probabilities of all ids of a chunk, and a loss of all log-probabilities
//! takes a product more. Heads of two levels compute scores from the log-probabilities of all ids, except for
//! `log_prob` of one id. The losses of [`policy`](crate::policy) and [`distill`](crate::distill) are computed in the
//! same way.

pub use crate::scores::{ChunkLogProbs, ChunkScores, ChunkTerms, ScoreOptions, Scores};
