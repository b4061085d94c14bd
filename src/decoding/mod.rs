//! Chooses token ids from the distribution of each position, without a tensor of the vocabulary's size.
//!
//! A distribution is read tile by tile ([`Distribution`](crate::backend::distribution::Distribution)): [`top_k`] ranks its
//! ids, [`multinomial`] draws one of them; [`next_token`] answers requests that have settings of their own.

mod log_probs;
mod multinomial;
mod next_token;
mod pruning;
mod sampler;
mod sampling;
mod shard_top_k;
mod top_k;
mod within;

pub(crate) use log_probs::check_host_log_probs;
pub use next_token::{Constraints, NextToken, TokenRequest};
pub use pruning::Pruned;
pub use sampler::Sampler;
pub use sampling::Sampling;
pub use top_k::TopK;
