//! The network from spellings to rows (Kim et al., 2016, arXiv 1508.06615): character embedding, convolutions of
//! several widths with the maximum over time, highway layers, projection.

use candle_core::{Tensor, D};
use candle_nn::{Init, VarBuilder};

use super::config::CharCnnConfig;
use super::spelling::padded;
use crate::error::Result;
use crate::tensors::initial_values::linear_init;

/// The parameters' values, in this order: the embedding `[alphabet, e]`; each convolution's weight
/// `[width * e, channels]` and bias `[channels]`; each highway layer's weight and bias of the value, then of the gate;
/// the projection's weight `[d, channels]` and bias `[d]`.
pub(super) type Parameters = Vec<Tensor>;

/// Creates the variables of a network.
pub(super) fn variables(config: &CharCnnConfig, alphabet: usize, vb: &VarBuilder) -> Result<Parameters> {
    let channels = config.channels();
    let mut parameters = vec![vb.get_with_hints((alphabet, config.embedding), "embedding.weight", linear_init(1))?];
    for &(width, channels) in &config.filters {
        let vb = vb.pp(format!("convolution.{width}"));
        let inputs = width * config.embedding;
        parameters.push(vb.get_with_hints((inputs, channels), "weight", linear_init(inputs))?);
        parameters.push(vb.get_with_hints(channels, "bias", Init::Const(0.0))?);
    }
    for layer in 0..config.highway {
        // At first the gates let most of the input through.
        for (part, bias) in [("value", 0.0), ("gate", -2.0)] {
            let vb = vb.pp(format!("highway.{layer}.{part}"));
            parameters.push(vb.get_with_hints((channels, channels), "weight", linear_init(channels))?);
            parameters.push(vb.get_with_hints(channels, "bias", Init::Const(bias))?);
        }
    }
    let vb = vb.pp("projection");
    parameters.push(vb.get_with_hints((config.context_dim, channels), "weight", linear_init(channels))?);
    parameters.push(vb.get_with_hints(config.context_dim, "bias", Init::Const(0.0))?);
    Ok(parameters)
}

/// Returns how many numbers the intermediate results of one entry of `length` characters have, gradients included.
pub(super) fn numbers_per_entry(config: &CharCnnConfig, length: usize) -> usize {
    let length = length.max(widest(config));
    let window = |(width, channels): &(usize, usize)| width.saturating_mul(config.embedding).saturating_add(*channels);
    let windows = config.filters.iter().map(window).fold(config.embedding, usize::saturating_add);
    let maxima = (8 * config.highway + 6).saturating_mul(config.channels());
    // Each value has a gradient, and zeros to which candle adds it.
    length.saturating_mul(windows).saturating_add(maxima).saturating_mul(3)
}

/// Returns the width of the widest convolution, to which shorter spellings are padded.
fn widest(config: &CharCnnConfig) -> usize {
    config.filters.iter().map(|(width, _)| *width).max().unwrap_or(1)
}

/// Computes the rows of some spellings, `[spellings, d]`.
pub(super) fn rows(config: &CharCnnConfig, parameters: &Parameters, spellings: &[&[u32]]) -> Result<Tensor> {
    let mut parameters = parameters.iter();
    // `variables` has made as many parameters as are taken here.
    let mut next = || parameters.next().ok_or_else(|| candle_core::Error::Msg("a parameter is missing".into()));
    let embedding = next()?;
    let (device, dtype) = (embedding.device(), embedding.dtype());
    let count = spellings.len();
    let longest = spellings.iter().map(|spelling| spelling.len()).max().unwrap_or(0).max(widest(config));

    let numbers = Tensor::from_vec(padded(spellings, longest), count * longest, device)?;
    let is_character = numbers.ne(0u32)?.to_dtype(dtype)?.unsqueeze(1)?;
    // Padding is zero, so that it adds nothing.
    let embedded = embedding.contiguous()?.index_select(&numbers, 0)?.broadcast_mul(&is_character)?;
    let embedded = embedded.reshape((count, longest, config.embedding))?;

    let mut maxima = Vec::new();
    for &(width, channels) in &config.filters {
        let (weight, bias) = (next()?, next()?);
        let windows = longest - width + 1;
        let shifted = (0..width).map(|shift| embedded.narrow(1, shift, windows));
        let unfolded = Tensor::cat(&shifted.collect::<candle_core::Result<Vec<_>>>()?, 2)?;
        let unfolded = unfolded.reshape((count * windows, width * config.embedding))?;
        let products = unfolded.matmul(weight)?.reshape((count, windows, channels))?;
        maxima.push(max_over_windows(products, spellings, width)?.broadcast_add(bias)?);
    }
    let mut x = Tensor::cat(&maxima, D::Minus1)?.relu()?;
    for _ in 0..config.highway {
        let mut linear = || x.matmul(&next()?.t()?)?.broadcast_add(next()?);
        let (value, gate) = (linear()?.relu()?, candle_nn::ops::sigmoid(&linear()?)?);
        x = (&x + ((value - &x)? * gate)?)?;
    }
    Ok(x.matmul(&next()?.t()?)?.broadcast_add(next()?)?)
}

/// Computes the maximum of products `[spellings, windows, channels]` over the windows of this width that lie within
/// each spelling: `[spellings, channels]`.
fn max_over_windows(products: Tensor, spellings: &[&[u32]], width: usize) -> Result<Tensor> {
    let (count, windows, _) = products.dims3()?;
    if windows == 1 {
        // candle's `argmax` over one element, not in the last dimension, is wrong on Metal (candle 0.11.1).
        return Ok(products.squeeze(1)?);
    }
    // Minus infinity excludes windows that reach beyond the end of a spelling, except the first window.
    let mask = spellings.iter().flat_map(|spelling| {
        let windows_inside = (spelling.len() + 1).saturating_sub(width).max(1);
        (0..windows).map(move |window| if window < windows_inside { 0f32 } else { f32::NEG_INFINITY })
    });
    let mask = Tensor::from_vec(mask.collect::<Vec<_>>(), (count, windows, 1), products.device())?;
    // `max` would give each of several equal windows the whole gradient.
    let largest = products.detach().broadcast_add(&mask.to_dtype(products.dtype())?)?.argmax_keepdim(1)?;
    Ok(products.gather(&largest, 1)?.squeeze(1)?)
}
