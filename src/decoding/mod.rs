//! Speaking: from the mixture of each token to the words that are chosen, without a tensor of the vocabulary's size.
//!
//! A distribution is looked at tile by tile ([`Distribution`](crate::backend::Distribution)); its words are ranked
//! ([`best`]), drawn from ([`draw`]), or searched for whole sequences ([`beam_search`]).

mod beam_search;
mod best;
mod components;
mod draw;
mod host;
mod sampling;
mod top_k;

pub use beam_search::{BeamSearch, Hypothesis};
pub use components::Pruned;
pub use sampling::{Sampler, Sampling};
pub use top_k::TopK;
