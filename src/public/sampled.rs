//! Training on a sample of the vocabulary: each step looks at the targets and at some other ids, the negatives.
//!
//! [`NoiseDistribution`] is the distribution of the negatives, such as one of the ids' counts, and draws [`Negatives`].
//! A loss takes these by an option:
//!
//! | option | |
//! |---|---|
//! | [`with_sampled_softmax`](crate::LossOptions::with_sampled_softmax) | a softmax over target and negatives, corrected by their probabilities, for every head that is one mixture |
//! | [`with_nce`](crate::LossOptions::with_nce) | noise-contrastive estimation, for a head of one softmax |
//! | [`with_decoder_rows`](crate::LossOptions::with_decoder_rows) | returns the gradient of the rows of the sample ([`DecoderRows`]), in place of the whole decoder's |
//!
//! [`SampledLoss`] is the loss that the options hold, [`LossOptions::sampled`](crate::LossOptions::sampled). Evaluate
//! with the loss of the whole vocabulary.

pub use crate::loss::{DecoderRows, Negatives, NoiseDistribution, SampledLoss};
