//! A hash of exact bits.

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_nn::VarMap;
use mos_head::decode::TopK;
use mos_head::Result;

use super::problem::{uniform, variables};

/// An FNV-1a hash.
pub(crate) struct Digest(pub(crate) u64);

impl Digest {
    pub(crate) fn new() -> Self {
        Digest(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn word(&mut self, word: u64) {
        for byte in word.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    pub(crate) fn text(&mut self, text: &str) {
        text.bytes().for_each(|byte| self.word(byte.into()));
    }

    /// Dtype, shape and bits; each NaN is the same.
    pub(crate) fn tensor(&mut self, tensor: &Tensor) -> Result<()> {
        self.text(tensor.dtype().as_str());
        tensor.dims().iter().for_each(|&dim| self.word(dim as u64));
        let flat = tensor.flatten_all()?;
        if tensor.dtype().is_float() {
            // The conversion is exact for every dtype.
            flat.to_dtype(DType::F64)?.to_vec1::<f64>()?.into_iter().for_each(|x| {
                self.word(if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() });
            })
        } else {
            flat.to_dtype(DType::I64)?.to_vec1::<i64>()?.into_iter().for_each(|x| self.word(x as u64))
        }
        Ok(())
    }

    pub(crate) fn optional(&mut self, tensor: Option<&Tensor>) -> Result<()> {
        match tensor {
            Some(tensor) => self.tensor(tensor),
            None => {
                self.text("absent");
                Ok(())
            }
        }
    }

    pub(crate) fn top_k(&mut self, top: &TopK) -> Result<()> {
        self.tensor(&top.token_ids)?;
        self.tensor(&top.log_probs)
    }

    /// The gradient of every variable, in the order of their names.
    pub(crate) fn gradients(&mut self, gradients: &GradStore, vars: &VarMap) -> Result<()> {
        variables(vars).values().try_for_each(|var| self.optional(gradients.get(var)))
    }

    /// A tensor and the gradients of a weighted sum of it.
    pub(crate) fn differentiable(&mut self, tensor: &Tensor, vars: &VarMap) -> Result<()> {
        self.tensor(tensor)?;
        let upstream = uniform(tensor.dims(), 1.0, 41)?.to_dtype(tensor.dtype())?;
        self.gradients(&(tensor * upstream)?.sum_all()?.backward()?, vars)
    }
}
