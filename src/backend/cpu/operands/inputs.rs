//! The operands of a computation as slices and numbers.

use super::dtype::{with_slice, Element};
use super::matrix::{DecoderMatrix, DecoderView};
use crate::backend::cpu::memory::zeros;
use crate::backend::cpu::vector::simd::{Isa, ROW_ALIGN};
use crate::backend::cpu::vector::softcap::Softcap;
use crate::backend::operands::{Operands, Sizes};
use crate::error::Result;
use candle_core::WithDType;

/// The operands of one computation.
pub(crate) struct Inputs<'a, T: Element> {
    pub(crate) sizes: Sizes,
    pub(crate) isa: Isa,
    pub(crate) logit_scale: T::Acc,
    pub(crate) softcap: Option<Softcap<T::Acc>>,
    /// `[positions, K, d]`
    pub(crate) contexts: &'a [T],
    pub(crate) decoder: DecoderView<'a, T>,
    /// `[positions, K]`
    pub(crate) log_priors: Vec<T::Acc>,
    /// `[rows of the decoder]`, times the logit scale, padded with minus infinity to a multiple of [`ROW_ALIGN`]
    pub(crate) bias: Vec<T::Acc>,
}

impl<T: Element> Inputs<'_, T> {
    /// Calls `f` with the inputs of these operands.
    pub(crate) fn with<R>(operands: &Operands, f: impl FnOnce(Inputs<'_, T>) -> Result<R>) -> Result<R> {
        let sizes @ Sizes { positions, components, .. } = operands.sizes;
        let rows = operands.weight_rows()?;
        let log_priors = match &operands.log_priors {
            Some(log_priors) => log_priors.flatten_all()?.to_vec1()?,
            None => zeros(positions * components),
        };
        let logit_scale = T::Acc::from_f64(operands.logit_scale);
        let mut bias = match &operands.bias {
            Some(bias) => bias.to_vec1()?,
            None => zeros(rows),
        };
        bias.iter_mut().for_each(|b| *b *= logit_scale);
        bias.resize(rows.next_multiple_of(ROW_ALIGN), num_traits::Float::neg_infinity());
        let softcap = operands.softcap.map(|cap| Softcap::new(T::Acc::from_f64(cap)));
        let isa = Isa::detected()?;
        let (weight, is_transposed) = operands.stored_weight()?;
        with_slice("contexts", &operands.contexts, |contexts| {
            with_slice("weight", &weight, |values| {
                with_adapter(operands, |adapter| {
                    let columns = operands.adapter_columns()?;
                    let matrix =
                        |values, width, is_transposed| DecoderMatrix { values, vocab: rows, width, is_transposed };
                    let decoder = DecoderView {
                        weight: matrix(values, columns.start, is_transposed),
                        adapter: adapter.map(|values| matrix(values, columns.len(), false)),
                    };
                    f(Inputs { sizes, isa, logit_scale, softcap, contexts, decoder, log_priors, bias })
                })
            })
        })
    }

    /// Divides the logits by a temperature.
    pub(crate) fn tempered(mut self, temperature: f64) -> Self {
        if temperature != 1.0 {
            let power = T::Acc::from_f64(1.0 / temperature);
            self.logit_scale *= power;
            self.bias.iter_mut().for_each(|b| *b *= power);
        }
        self
    }
}

/// Calls `f` with the elements of the adapter, if there is one.
fn with_adapter<T: Element, R>(operands: &Operands, f: impl FnOnce(Option<&[T]>) -> Result<R>) -> Result<R> {
    match &operands.adapter {
        Some(adapter) => with_slice("adapter", adapter, |values| f(Some(values))),
        None => f(None),
    }
}
