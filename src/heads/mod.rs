//! Output layers of one mixture: a [`Projection`] from hidden states to contexts and log-priors, and a decoder.
//!
//! [`identity`], [`contexts`] and [`mixed_contexts`] are the projections of the three heads; [`Head`] makes each of
//! them an [`OutputLayer`]. [`beam_search`] asks any output layer for its most probable continuations.

mod beam_search;
mod config;
mod contexts;
mod head;
mod identity;
mod mixed_contexts;
mod mixture_layer;
mod output_layer;
mod projection;
mod smart_pointers;

pub use beam_search::{BeamSearch, Hypothesis};
pub use config::{ContextActivation, MixtureConfig, MixtureTensors};
pub use contexts::{Contexts, MixtureOfSoftmaxes};
pub use head::Head;
pub(crate) use head::{request_layer_methods, RequestLayer};
pub use identity::{Identity, SoftmaxConfig, SoftmaxHead};
pub use mixed_contexts::{MixedContexts, MixtureOfContexts};
pub use mixture_layer::MixtureLayer;
pub(crate) use output_layer::select_hidden;
pub use output_layer::OutputLayer;
pub use projection::{Configured, Projection};
