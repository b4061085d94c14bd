//! Initial values that several heads share.

use candle_nn::Init;

/// Those of a linear layer with so many inputs in PyTorch: uniform within `1 / sqrt(inputs)`.
pub(crate) fn linear(inputs: usize) -> Init {
    let bound = 1.0 / (inputs as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}
