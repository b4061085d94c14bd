//! A `Box`, an `Arc` and a reference of a head are heads: each method calls the head's method.

use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::mixture_layer::MixtureLayer;
use super::output_layer::OutputLayer;
use crate::backend::plan::Plan;
use crate::decoding::{NextToken, Pruned, Sampler, TokenRequest, TopK};
use crate::distributions::Distributions;
use crate::error::{Error, Result};
use crate::loss::{Loss, LossOptions};
use crate::mixture::{DistillOptions, Mixture, Teacher};
use crate::scores::policy::{PolicyBatch, PolicyOptions};
use crate::scores::{ScoreOptions, Scores};
use crate::tensors::dropout::DropoutMasks;

/// Implements the traits of heads for references and smart pointers by forwarding each method to the head that they point
/// to, so that a model can share its head and choose it at run time.
macro_rules! delegate_to_pointee {
    ($($pointer:ty),*) => {$(
        impl<T: OutputLayer + ?Sized> OutputLayer for $pointer {
            fn hidden_size(&self) -> usize {
                (**self).hidden_size()
            }
            fn vocab_size(&self) -> usize {
                (**self).vocab_size()
            }
            fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
                (**self).loss(hidden, targets, options)
            }
            fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
                (**self).log_probs(hidden)
            }
            fn log_probs_as(&self, hidden: &Tensor, dtype: DType) -> Result<Tensor> {
                (**self).log_probs_as(hidden, dtype)
            }
            fn log_prob(&self, hidden: &Tensor, token_ids: &Tensor) -> Result<Tensor> {
                (**self).log_prob(hidden, token_ids)
            }
            fn policy_loss(&self, hidden: &Tensor, batch: &PolicyBatch, options: &PolicyOptions) -> Result<Loss> {
                (**self).policy_loss(hidden, batch, options)
            }
            fn distill(&self, hidden: &Tensor, teacher: &Teacher, options: &DistillOptions) -> Result<Loss> {
                (**self).distill(hidden, teacher, options)
            }
            fn score(&self, hidden: &Tensor, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores> {
                (**self).score(hidden, token_ids, options)
            }
            fn top_k(&self, hidden: &Tensor, k: usize) -> Result<TopK> {
                (**self).top_k(hidden, k)
            }
            fn argmax(&self, hidden: &Tensor) -> Result<Tensor> {
                (**self).argmax(hidden)
            }
            fn sample(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
                (**self).sample(hidden, sampler)
            }
            fn next_tokens(&self, hidden: &Tensor, requests: &[&TokenRequest]) -> Result<Vec<NextToken>> {
                (**self).next_tokens(hidden, requests)
            }
            fn distributions(&self, hidden: &Tensor, positions: Option<&[u32]>) -> Result<Box<dyn Distributions + '_>> {
                (**self).distributions(hidden, positions)
            }
            fn announce(&self, error: Error) -> Error {
                (**self).announce(error)
            }
            fn frozen(&self) -> Result<Box<dyn OutputLayer + '_>> {
                (**self).frozen()
            }
        }

        impl<T: MixtureLayer + ?Sized> MixtureLayer for $pointer {
            fn components(&self) -> usize {
                (**self).components()
            }
            fn mixture(&self, hidden: &Tensor, dropout: DropoutMasks) -> Result<Mixture> {
                (**self).mixture(hidden, dropout)
            }
            fn plan(&self, hidden: &Tensor, options: &LossOptions) -> Result<Plan> {
                (**self).plan(hidden, options)
            }
            fn prune(&self, hidden: &Tensor, mass: f64) -> Result<Pruned> {
                (**self).prune(hidden, mass)
            }
            fn frozen_mixture(&self) -> Result<Box<dyn MixtureLayer + '_>> {
                (**self).frozen_mixture()
            }
        }
    )*};
}
delegate_to_pointee!(Box<T>, Arc<T>, &T);
