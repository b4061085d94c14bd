//! The parts of a head: a projection from hidden states to contexts and log-priors, and a decoder from contexts to
//! logits.
//!
//! [`Head`](crate::Head) is built of a [`Projection`] and a [`Decoder`]. [`Identity`], [`MixedContexts`] and
//! [`Contexts`] are the projections of the three heads of this crate, and [`Configured`] builds each from its
//! configuration; a projection of your own gets every loss, option and result of a head by one method. Begin with
//! [`Projection`], whose example is a whole head.
//!
//! A decoder's rows are a matrix of its own or a tied one, with a bias or without ([`DecoderConfig`]). [`CharCnn`]
//! computes them from spellings instead ([`CharCnnConfig`]), and [`Decoder::from_quantised`] reads them from a GGUF
//! file's tensor. A [`LogitFunction`] may follow its logits. [`LowRankAdapter`] fine-tunes a decoder that is frozen
//! ([`LowRankConfig`]), and is saved as Hugging Face's PEFT does. [`QuantisedLinear`] is a layer of a quantised trunk
//! through which gradients pass.

pub use crate::backend::logit_function::LogitFunction;
pub use crate::decoder::{
    CharCnn, CharCnnConfig, Decoder, DecoderConfig, LowRankAdapter, LowRankConfig, QuantisedLinear,
};
pub use crate::heads::{Configured, Contexts, Identity, MixedContexts, Projection};
