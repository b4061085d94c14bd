//! Initial values that several heads share.

use candle_nn::Init;

/// Returns the initial values of a linear layer with this number of inputs in PyTorch: uniform within `1 /
/// sqrt(inputs)`.
pub(crate) fn linear_init(inputs: usize) -> Init {
    let bound = 1.0 / (inputs as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}
