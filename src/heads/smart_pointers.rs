//! Heads behind references and smart pointers, so that a model can share its head and choose it at run time.

use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::mixture_layer::MixtureLayer;
use super::output_layer::OutputLayer;
use super::projection::Projection;
use crate::backend::plan::Plan;
use crate::decoding::{NextToken, Pruned, Sampler, TokenRequest, TopK, Verified};
use crate::distributions::Distributions;
use crate::error::{Error, Result};
use crate::loss::{Loss, LossOptions};
use crate::mixture::{DistillOptions, Mixture, Teacher};
use crate::scores::policy::{PolicyBatch, PolicyOptions};
use crate::scores::{ScoreOptions, Scores};
use crate::tensors::dropout::DropoutMasks;

/// Implements a trait for pointers by calling each of these methods of what they point to. It lists all methods of the
/// trait, also those with a body, because a head may have its own.
macro_rules! delegate_to_pointee {
    (impl $trait:ident { $(fn $method:ident($($argument:ident: $type:ty),*) -> $result:ty;)* }) => {
        delegate_to_pointee!(@ $trait, Box<T>, { $($method($($argument: $type),*) -> $result),* });
        delegate_to_pointee!(@ $trait, Arc<T>, { $($method($($argument: $type),*) -> $result),* });
        delegate_to_pointee!(@ $trait, &T, { $($method($($argument: $type),*) -> $result),* });
    };
    (@ $trait:ident, $pointer:ty, { $($method:ident($($argument:ident: $type:ty),*) -> $result:ty),* }) => {
        impl<T: $trait + ?Sized> $trait for $pointer {
            $(fn $method(&self, $($argument: $type),*) -> $result {
                (**self).$method($($argument),*)
            })*
        }
    };
}

delegate_to_pointee! {
    impl OutputLayer {
        fn hidden_size() -> usize;
        fn vocab_size() -> usize;
        fn loss(hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss>;
        fn log_probs(hidden: &Tensor) -> Result<Tensor>;
        fn log_probs_as(hidden: &Tensor, dtype: DType) -> Result<Tensor>;
        fn log_prob(hidden: &Tensor, token_ids: &Tensor) -> Result<Tensor>;
        fn score(hidden: &Tensor, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores>;
        fn policy_loss(hidden: &Tensor, batch: &PolicyBatch, options: &PolicyOptions) -> Result<Loss>;
        fn distill(hidden: &Tensor, teacher: &Teacher, options: &DistillOptions) -> Result<Loss>;
        fn top_k(hidden: &Tensor, k: usize) -> Result<TopK>;
        fn argmax(hidden: &Tensor) -> Result<Tensor>;
        fn sample(hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor>;
        fn next_tokens(hidden: &Tensor, requests: &[&TokenRequest]) -> Result<Vec<NextToken>>;
        fn next_tokens_per_position(
            hidden: &Tensor, requests: &[&[&TokenRequest]]
        ) -> Result<Vec<Vec<NextToken>>>;
        fn prompt_log_probs(hidden: &Tensor, token_ids: &[u32], n: usize) -> Result<Vec<NextToken>>;
        fn verify(
            hidden: &Tensor, drafts: &[&[u32]], requests: &mut [&mut TokenRequest]
        ) -> Result<Vec<Verified>>;
        fn distributions(hidden: &Tensor, positions: Option<&[u32]>) -> Result<Box<dyn Distributions + '_>>;
        fn announce(error: Error) -> Error;
        fn frozen() -> Result<Box<dyn OutputLayer + '_>>;
    }
}

delegate_to_pointee! {
    impl MixtureLayer {
        fn components() -> usize;
        fn mixture(hidden: &Tensor, dropout: DropoutMasks) -> Result<Mixture>;
        fn plan(hidden: &Tensor, options: &LossOptions) -> Result<Plan>;
        fn prune(hidden: &Tensor, mass: f64) -> Result<Pruned>;
        fn frozen_mixture() -> Result<Box<dyn MixtureLayer + '_>>;
    }
}

delegate_to_pointee! {
    impl Projection {
        fn hidden_size() -> usize;
        fn context_dim() -> usize;
        fn components() -> usize;
        fn forward(hidden: &Tensor, dropout: DropoutMasks) -> Result<(Tensor, Option<Tensor>)>;
        fn has_parameters() -> bool;
        fn is_identity() -> bool;
        fn draw(hidden: &Tensor, sampler: &mut Sampler) -> Result<Option<Tensor>>;
        fn frozen() -> Result<Box<dyn Projection + '_>>;
    }
}
