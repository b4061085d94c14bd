//! From the distribution of each position to the token ids that are chosen, without a tensor of the vocabulary's size.
//!
//! A distribution is looked at tile by tile ([`Distribution`](crate::backend::contract::Distribution)); its ids are
//! ranked ([`top_k`]), drawn from ([`multinomial`]), or searched for whole sequences ([`beam_search`]).

mod beam_search;
mod multinomial;
mod pruning;
mod sampler;
mod sampling;
mod top_k;
pub(crate) mod transfer;

pub use beam_search::{BeamSearch, Hypothesis};
pub use pruning::Pruned;
pub use sampler::Sampler;
pub use sampling::Sampling;
pub use top_k::TopK;
