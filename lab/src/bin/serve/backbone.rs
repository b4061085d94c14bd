//! What serving needs of a model.

use candle_core::Tensor;
use lab::Result;
use mos_head::OutputLayer;

/// A model without its output layer, which keeps a state for each text.
pub(crate) trait Backbone {
    type State;

    fn head(&self) -> &dyn OutputLayer;

    fn start(&self) -> Result<Self::State>;

    /// Returns the hidden states `[texts, hidden]` after new token ids of each text.
    fn read(&self, texts: &mut [(&mut Self::State, &[u32])]) -> Result<Tensor>;
}
