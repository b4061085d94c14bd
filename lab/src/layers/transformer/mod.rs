//! Layers of a Transformer (Vaswani et al., 2017, "Attention Is All You Need", arXiv:1706.03762) that normalise the
//! input of each sublayer, not its output, and that have no biases: in candle the gradient of a bias takes longer than
//! the layer's matrix product.

mod attention;
mod layers;
mod positions;
#[cfg(test)]
mod tests;

pub use attention::{causal_mask, Attention, KeysValues};
pub use layers::{Decoder, DecoderState, Encoder, TransformerSizes};
pub use positions::Positions;
