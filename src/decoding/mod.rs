//! Chooses token ids from the distribution of each position: the last step of decoding.
//!
//! A distribution is read tile by tile ([`Distribution`](crate::backend::distribution::Distribution)), on the CPU without
//! a tensor of the vocabulary's size: [`top_k`] ranks its ids, and [`multinomial`] draws one of them. [`next_token`], which
//! answers requests with settings of their own, collects the tiles of one position at a time. [`verification`] draws
//! those of several steps at once, after drafts. [`within`] chooses from allowed ids alone, and [`pruning`] removes
//! components before anything is computed of them.

mod log_probs;
mod multinomial;
mod next_token;
mod pruning;
mod sampler;
mod sampling;
mod top_k;
mod truncation;
mod verification;
mod within;

pub(crate) use log_probs::check_host_log_probs;
pub(crate) use multinomial::DrawQuery;
pub(crate) use next_token::{AllLogProbsQuery, Entries, NextTokenQuery};
pub use next_token::{Constraints, NextToken, TokenRequest};
pub use pruning::Pruned;
pub use sampler::Sampler;
pub(crate) use sampler::Stage;
pub use sampling::Sampling;
pub use top_k::TopK;
pub(crate) use verification::Verification;
pub use verification::Verified;
