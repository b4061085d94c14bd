//! Training on a sample of the vocabulary: each step looks at the targets and at some other ids, the negatives.
//!
//! [`NoiseDistribution`] draws [`Negatives`], such as in proportion to the counts of the ids. An option gives them to a
//! loss:
//!
//! | option | |
//! |---|---|
//! | [`with_sampled_softmax`](crate::LossOptions::with_sampled_softmax) | a softmax over target and negatives, corrected by their probabilities, for every head that is one mixture |
//! | [`with_nce`](crate::LossOptions::with_nce) | noise-contrastive estimation, for a head of one softmax |
//! | [`with_decoder_rows`](crate::LossOptions::with_decoder_rows) | makes variables of the decoder's rows in the sample ([`DecoderRows`]), which get gradients in place of the whole decoder |
//!
//! [`LossOptions::sampled`](crate::LossOptions::sampled) has the [`SampledLoss`]. An evaluation is over the whole
//! vocabulary.

pub use crate::loss::{DecoderRows, Negatives, NoiseDistribution, SampledLoss};
