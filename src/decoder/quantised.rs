//! What a decoder with quantised rows takes: contexts in f32, and those that are widened to it, on the CPU.

use candle_core::{DType, Tensor};

use crate::backend::quantised::QuantisedMatrix;
use crate::backend::weight::Weight;
use crate::error::{Error, Result};
use crate::mixture::Mixture;

/// The dtypes of hidden states and contexts, which are widened to f32.
pub(super) const HIDDEN: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Makes the mixture of these contexts, which are widened, under quantised rows.
pub(super) fn mixture(
    contexts: &Tensor,
    log_priors: Option<&Tensor>,
    matrix: &QuantisedMatrix,
    bias: Option<&Tensor>,
) -> Result<Mixture> {
    check_operand("contexts", contexts, &HIDDEN)?;
    let contexts = contexts.to_dtype(DType::F32)?;
    Mixture::from_weight(&contexts, log_priors, Weight::Quantised(matrix.clone()), bias)
}

/// Checks that an operand beside quantised rows is of one of these dtypes, and on the CPU.
pub(super) fn check_operand(argument: &'static str, tensor: &Tensor, dtypes: &[DType]) -> Result<()> {
    if !dtypes.contains(&tensor.dtype()) {
        let names: Vec<_> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
        let expected = format!("{}, as the decoder is quantised", names.join(" or "));
        return Err(Error::DType { argument, expected, got: tensor.dtype() });
    }
    check_on_cpu(argument, tensor)
}

/// Checks that an operand beside quantised rows is on the CPU.
pub(super) fn check_on_cpu(argument: &'static str, tensor: &Tensor) -> Result<()> {
    if !tensor.device().is_cpu() {
        let got = format!("{:?}", tensor.device().location());
        return Err(Error::Device { argument, expected: "Cpu, as the decoder is quantised".into(), got });
    }
    Ok(())
}
