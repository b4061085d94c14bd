//! What the heads of this crate share: their loss is that of a request, which is made once, and their other results are
//! those of the distributions at some of the positions.

use candle_core::Tensor;

use super::output_layer::OutputLayer;
use crate::error::Result;
use crate::loss::{Loss, LossOptions, OutputShape, Request};
use crate::tensors::checks::leading;
use crate::tensors::transfer::select_positions;

/// Returns the rows of hidden states `[.., hidden]` at these positions, `[n, hidden]`, or all hidden states as they are.
pub(crate) fn select_hidden(hidden: &Tensor, positions: Option<&[u32]>) -> Result<Tensor> {
    leading(hidden)?;
    match positions {
        Some(positions) => select_positions(hidden, positions),
        None => Ok(hidden.clone()),
    }
}

/// A head of this crate: its loss is that of a request, and its log-probabilities are those of its distributions.
pub(crate) trait RequestLayer: OutputLayer {
    /// Computes the loss of a request at the positions of these hidden states. What is at ignored positions must not reach
    /// a gradient.
    fn request_loss(&self, hidden: &Tensor, request: &Request) -> Result<Loss>;

    /// Makes the request for a loss, once, and computes the loss.
    fn target_loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let request = leading(hidden).and_then(|leading| {
            Request::new(OutputShape { leading, vocab: self.vocab_size(), like: hidden }, targets, options)
        });
        self.request_loss(hidden, &request.map_err(|error| self.announce(error))?)
    }
}

/// Defines the loss and the log-probabilities of a [`RequestLayer`].
macro_rules! request_layer_methods {
    () => {
        fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &$crate::loss::LossOptions) -> Result<Loss> {
            self.target_loss(hidden, targets, options)
        }

        fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
            self.distributions(hidden, None)?.log_probs()
        }

        fn log_probs_as(&self, hidden: &Tensor, dtype: candle_core::DType) -> Result<Tensor> {
            self.distributions(hidden, None)?.log_probs_as(dtype)
        }
    };
}
pub(crate) use request_layer_methods;
