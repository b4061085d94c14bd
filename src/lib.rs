//! mos-head
mod autograd;
mod backend;
mod error;
mod loss;
mod mixture;
mod mixture_of_contexts;
mod mixture_of_softmaxes;
mod output_layer;
mod projection;
mod softmax_head;

pub use backend::plan::Plan;
pub use error::{Error, Result};
pub use loss::{Loss, LossOptions, Reduction};
pub use mixture::Mixture;
pub use mixture_of_contexts::MixtureOfContexts;
pub use mixture_of_softmaxes::MixtureOfSoftmaxes;
pub use output_layer::OutputLayer;
pub use projection::{Activation, MixtureConfig, MixtureTensors};
pub use softmax_head::{SoftmaxConfig, SoftmaxHead};
