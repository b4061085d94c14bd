//! The inputs of one computation: the elements of its operands, locked for reading.

use std::ops::Deref;

use candle_core::{Storage, Tensor};

use super::locked_weight::{locked_weight, LockedWeight};
use super::memory::zeros;
use super::operands::decoder::{DecoderMatrix, DecoderView, MatrixValues};
use super::operands::dtype::{locked, Accumulator, Locked, Stored};
use super::vector::logit_map::LogitMap;
use super::vector::simd::{Isa, ROW_ALIGN};
use crate::backend::operands::{Operands, Sizes};
use crate::error::Result;

/// The operands of one computation.
pub(crate) struct Inputs<'a, F: Accumulator> {
    pub(crate) sizes: Sizes,
    pub(crate) isa: Isa,
    pub(crate) logit_scale: F,
    pub(crate) logit_map: Option<LogitMap<F>>,
    /// `[positions, K, d]`
    pub(crate) contexts: Stored<'a, F>,
    pub(crate) decoder: DecoderView<'a, F>,
    /// `[positions, K]`
    pub(crate) log_priors: Vec<F>,
    /// `[rows of the decoder]`, times the logit scale, padded with minus infinity to a multiple of [`ROW_ALIGN`]
    pub(crate) bias: Vec<F>,
}

/// The elements of the operands, locked for reading.
struct LockedOperands<'a, G, W> {
    operands: &'a Operands,
    contexts: Locked<G>,
    weight: LockedWeight<'a, W>,
    adapter: Option<Locked<G>>,
}

/// Locks the operands; `dense` is their weight as it is stored, and whether that is its transpose, if it is a tensor.
fn lock_operands<'a>(
    operands: &'a Operands,
    dense: Option<&'a (Tensor, bool)>,
    isa: Isa,
) -> Result<LockedOperands<'a, impl Deref<Target = Storage> + use<'a>, impl Deref<Target = Storage> + use<'a>>> {
    let adapter = operands.adapter.as_ref().map(|adapter| locked("adapter", adapter)).transpose()?;
    let contexts = locked("contexts", &operands.contexts)?;
    let weight = locked_weight(&operands.weight, dense, isa)?;
    Ok(LockedOperands { operands, contexts, weight, adapter })
}

impl<G: Deref<Target = Storage>, W: Deref<Target = Storage>> LockedOperands<'_, G, W> {
    /// Makes the inputs of a computation.
    fn inputs<F: Accumulator>(&self, isa: Isa) -> Result<Inputs<'_, F>> {
        let LockedOperands { operands, contexts, weight, adapter } = self;
        let sizes @ Sizes { positions, components, .. } = operands.sizes;
        let (rows, columns) = (operands.weight_rows()?, operands.adapter_columns()?);
        let matrix = |values, width| DecoderMatrix { values, vocab: rows, width };
        let adapter = adapter.as_ref().map(|adapter| adapter.stored()).transpose()?;
        let decoder = DecoderView {
            weight: matrix(weight.values()?, columns.start),
            adapter: adapter.map(|values| matrix(MatrixValues::Rows(values), columns.len())),
        };
        let log_priors = match &operands.log_priors {
            Some(log_priors) => log_priors.flatten_all()?.to_vec1()?,
            None => zeros(positions * components),
        };
        let logit_scale = F::from_f64(operands.logit_scale);
        let mut bias = match &operands.bias {
            Some(bias) => bias.to_vec1()?,
            None => zeros(rows),
        };
        bias.iter_mut().for_each(|b| *b *= logit_scale);
        bias.resize(rows.next_multiple_of(ROW_ALIGN), num_traits::Float::neg_infinity());
        let logit_map = LogitMap::new(operands.logit_function);
        let contexts = contexts.stored()?;
        Ok(Inputs { sizes, isa, logit_scale, logit_map, contexts, decoder, log_priors, bias })
    }
}

impl<F: Accumulator> Inputs<'_, F> {
    /// Calls `f` with the inputs of these operands.
    pub(crate) fn with<R>(operands: &Operands, f: impl FnOnce(Inputs<'_, F>) -> Result<R>) -> Result<R> {
        let (isa, dense) = (Isa::detected()?, operands.weight.stored()?);
        let operands = lock_operands(operands, dense.as_ref(), isa)?;
        f(operands.inputs(isa)?)
    }

    /// Divides the logits by a temperature.
    pub(crate) fn tempered(mut self, temperature: f64) -> Self {
        if temperature != 1.0 {
            let power = F::from_f64(1.0 / temperature);
            self.logit_scale *= power;
            self.bias.iter_mut().for_each(|b| *b *= power);
        }
        self
    }
}
