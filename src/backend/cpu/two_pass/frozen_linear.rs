//! The products of a linear layer with a quantised matrix, whose rows are constants.

use candle_core::{Device, Tensor};

use super::first_product::{FormChoice, LogitRows, LogitTiles};
use super::gradients;
use crate::backend::cpu::locked_weight::QuantisedValues;
use crate::backend::cpu::memory::zeros;
use crate::backend::cpu::operands::decoder::{DecoderMatrix, DecoderView};
use crate::backend::cpu::operands::dtype::with_slice;
use crate::backend::cpu::products::multiplier::Vectors;
use crate::backend::cpu::vector::simd::Isa;
use crate::backend::quantised::QuantisedMatrix;
use crate::error::Result;

/// Computes `input W^T` for an input `[n, columns]` in f32 and a matrix `[rows, columns]`.
pub(crate) fn quantised_product(input: &Tensor, matrix: &QuantisedMatrix) -> Result<Tensor> {
    let (n, rows) = (input.dim(0)?, matrix.dims()[0]);
    with_decoder(matrix, |vectors, decoder| {
        let mut values: Vec<f32> = zeros(n * rows);
        with_slice("input", input, |input: &[f32]| {
            let form = FormChoice { components: 1, are_independent: false };
            let to = LogitRows { values: &mut values, stride: rows };
            vectors.multiply_tiles(input, decoder, form, to, &|_, _| Vec::new());
            Ok(())
        })?;
        Ok(Tensor::from_vec(values, (n, rows), &Device::Cpu)?)
    })
}

/// Computes the gradient of the input, `upstream W`, from that of the product, `[n, rows]`.
pub(crate) fn quantised_gradient(upstream: &Tensor, matrix: &QuantisedMatrix) -> Result<Tensor> {
    let (n, &[rows, columns]) = (upstream.dim(0)?, matrix.dims());
    with_decoder(matrix, |_, decoder| {
        let mut values: Vec<f32> = zeros(n * columns);
        with_slice("upstream", upstream, |upstream: &[f32]| {
            gradients::context_gradient(&mut values, columns, upstream, rows, decoder);
            Ok(())
        })?;
        Ok(Tensor::from_vec(values, (n, columns), &Device::Cpu)?)
    })
}

/// Calls `f` with the matrix as a decoder without an adapter.
fn with_decoder<R>(matrix: &QuantisedMatrix, f: impl FnOnce(Vectors, DecoderView<'_, f32>) -> Result<R>) -> Result<R> {
    let isa = Isa::detected()?;
    let (values, &[rows, columns]) = (QuantisedValues::new(matrix, isa)?, matrix.dims());
    let weight = DecoderMatrix { values: values.values()?, vocab: rows, width: columns };
    f(Vectors { isa, copies_rows: matrix.is_copied() }, DecoderView { weight, adapter: None })
}
