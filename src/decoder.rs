//! The decoder, shared by all components: from a context to the logits.

use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};

use crate::error::{Error, Result};
use crate::mixture::Mixture;
use crate::validate::{check_device, check_float, check_logits, check_sizes};

/// The logits of a context c: `z = cap tanh(scale (c W^T + b) / cap)`.
#[derive(Clone, Debug)]
pub(crate) struct Decoder {
    /// `[vocab, d]`
    pub(crate) weight: Tensor,
    /// `[vocab]`
    pub(crate) bias: Option<Tensor>,
    logit_scale: f64,
    softcap: Option<f64>,
}

impl Decoder {
    /// Variables `decoder.weight`, uniform within 0.1 unless it is tied to an embedding, and `decoder.bias`, zero, as
    /// in the released code.
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
        Ok(Self::unchecked(weight, bias))
    }

    pub(crate) fn from_tensors(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let decoder = Self::unchecked(weight, bias);
        decoder.check()?;
        Ok(decoder)
    }

    /// A decoder whose tensors are checked at first use.
    pub(crate) fn unchecked(weight: Tensor, bias: Option<Tensor>) -> Self {
        Decoder { weight, bias, logit_scale: 1.0, softcap: None }
    }

    /// Checks shapes, dtypes and devices.
    pub(crate) fn check(&self) -> Result<()> {
        let Decoder { weight, bias, .. } = self;
        let &[vocab, context] = weight.dims() else {
            return Err(Error::shape("decoder.weight", "[vocab, context]", weight.dims()));
        };
        check_sizes(&[("vocab", vocab), ("context", context)])?;
        check_float("decoder.weight", weight)?;
        let Some(bias) = bias else { return Ok(()) };
        if bias.dims() != [vocab] {
            return Err(Error::shape("decoder.bias", format!("[{vocab}]"), bias.dims()));
        }
        check_float("decoder.bias", bias)?;
        check_device("decoder.bias", bias, weight)
    }

    pub(crate) fn with_softcap(self, softcap: Option<f64>) -> Result<Self> {
        check_logits(self.logit_scale, softcap)?;
        Ok(Decoder { softcap, ..self })
    }

    pub(crate) fn with_logit_scale(self, logit_scale: f64) -> Result<Self> {
        check_logits(logit_scale, self.softcap)?;
        Ok(Decoder { logit_scale, ..self })
    }

    /// The mixture of these contexts `[.., K, d]` and log-priors `[.., K]`.
    pub(crate) fn mixture(&self, contexts: &Tensor, log_priors: Option<&Tensor>) -> Result<Mixture> {
        let mixture = Mixture::new(contexts, log_priors, &self.weight, self.bias.as_ref())?;
        mixture.with_logits(self.logit_scale, self.softcap)
    }

    pub(crate) fn vocab(&self) -> usize {
        self.weight.dims().first().copied().unwrap_or(0)
    }

    /// The size of a context.
    pub(crate) fn context(&self) -> usize {
        self.weight.dims().get(1).copied().unwrap_or(0)
    }
}
