//! The matrix that all components share: from a context to the logits.

use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};

use crate::check::check_sizes;
use crate::{Error, Result};

/// The matrix from a context to the logits, and their bias.
#[derive(Clone, Debug)]
pub(crate) struct Decoder {
    /// `[vocab, d]`
    pub(crate) weight: Tensor,
    /// `[vocab]`
    pub(crate) bias: Option<Tensor>,
}

impl Decoder {
    /// Variables `decoder.weight`, uniform within 0.1, and `decoder.bias`, zero, as in the released code. A weight that is
    /// given, that of an embedding, is used as it is.
    pub(crate) fn new(
        vocab: usize,
        context: usize,
        bias: bool,
        tied: Option<&Tensor>,
        vb: &VarBuilder,
    ) -> Result<Self> {
        let vb = vb.pp("decoder");
        let weight = match tied {
            Some(weight) if weight.dims() == [vocab, context] => weight.clone(),
            Some(weight) => return Err(Error::shape("embedding", format!("[{vocab}, {context}]"), weight.dims())),
            None => vb.get_with_hints((vocab, context), "weight", Init::Uniform { lo: -0.1, up: 0.1 })?,
        };
        let bias = bias.then(|| vb.get_with_hints(vocab, "bias", Init::Const(0.0))).transpose()?;
        Ok(Decoder { weight, bias })
    }

    pub(crate) fn from_tensors(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let &[vocab, context] = weight.dims() else {
            return Err(Error::shape("decoder.weight", "[vocab, context]", weight.dims()));
        };
        check_sizes(&[("vocab", vocab), ("context", context)])?;
        match &bias {
            Some(bias) if bias.dims() != [vocab] => {
                Err(Error::shape("decoder.bias", format!("[{vocab}]"), bias.dims()))
            }
            _ => Ok(Decoder { weight, bias }),
        }
    }

    pub(crate) fn vocab(&self) -> usize {
        self.weight.dims()[0]
    }
}
