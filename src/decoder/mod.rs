//! The decoder, shared by all components: from a context to the logits.

mod char_cnn;

use std::sync::Arc;

use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};

use crate::error::{Error, Result};
use crate::loss::{Loss, LossOptions};
use crate::mixture::Mixture;
use crate::validate::{
    check_device, check_elements, check_float, check_hidden, check_logits, check_sizes, check_vocab,
};
pub use char_cnn::{CharCnn, CharCnnConfig};

/// The logits of a context c: `z = cap tanh(scale (c W^T + b) / cap)`.
#[derive(Clone, Debug)]
pub(crate) struct Decoder {
    rows: Rows,
    /// `[vocab]`
    pub(crate) bias: Option<Tensor>,
    logit_scale: f64,
    softcap: Option<f64>,
}

/// The weight, `[vocab, d]`.
#[derive(Clone, Debug)]
pub(crate) enum Rows {
    Matrix(Tensor),
    Computed(Arc<CharCnn>),
}

impl Decoder {
    /// Variables `decoder.weight`, uniform within 0.1 unless there are rows, and `decoder.bias`, zero, as in the
    /// released code.
    pub(crate) fn new(vocab: usize, context: usize, bias: bool, rows: Option<Rows>, vb: &VarBuilder) -> Result<Self> {
        let vb = vb.pp("decoder");
        let rows = match rows {
            Some(Rows::Matrix(weight)) if weight.dims() != [vocab, context] => {
                return Err(Error::shape("embedding", format!("[{vocab}, {context}]"), weight.dims()));
            }
            Some(Rows::Computed(cnn)) if (cnn.vocab(), cnn.context()) != (vocab, context) => {
                let got = [cnn.vocab(), cnn.context()];
                return Err(Error::shape("computed rows", format!("[{vocab}, {context}]"), &got));
            }
            Some(rows) => rows,
            None => {
                let init = Init::Uniform { lo: -0.1, up: 0.1 };
                Rows::Matrix(vb.get_with_hints((vocab, context), "weight", init)?)
            }
        };
        let bias = bias.then(|| vb.get_with_hints(vocab, "bias", Init::Const(0.0))).transpose()?;
        Ok(Decoder { rows, bias, logit_scale: 1.0, softcap: None })
    }

    pub(crate) fn from_tensors(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let decoder = Self::unchecked(weight, bias);
        decoder.check()?;
        Ok(decoder)
    }

    /// A decoder whose tensors are checked at first use.
    pub(crate) fn unchecked(weight: Tensor, bias: Option<Tensor>) -> Self {
        Decoder { rows: Rows::Matrix(weight), bias, logit_scale: 1.0, softcap: None }
    }

    /// Checks shapes, dtypes and devices.
    pub(crate) fn check(&self) -> Result<()> {
        // Computed rows are of a known shape.
        let Decoder { rows: Rows::Matrix(weight), bias, .. } = self else { return Ok(()) };
        let &[vocab, context] = weight.dims() else {
            return Err(Error::shape("decoder.weight", "[vocab, context]", weight.dims()));
        };
        check_elements("decoder.weight", weight.dims())?;
        check_vocab(vocab)?;
        check_sizes(&[("context", context)])?;
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
        let mixture = Mixture::new(contexts, log_priors, &self.weight()?, self.bias.as_ref())?;
        mixture.with_logits(self.logit_scale, self.softcap)
    }

    /// The loss of the mixture of these contexts, which are masked at ignored positions. Of a sampled loss only the rows
    /// that it looks at are computed.
    pub(crate) fn loss_of_masked(
        &self,
        contexts: &Tensor,
        log_priors: Option<&Tensor>,
        targets: &Tensor,
        options: &LossOptions,
    ) -> Result<Loss> {
        let sampled = options.sampled_step().filter(|_| targets.elem_count() > 0);
        let (Rows::Computed(cnn), Some(sampled)) = (&self.rows, sampled) else {
            return self.mixture(contexts, log_priors)?.loss_of_masked(targets, options);
        };
        if options.decoder_rows {
            return Err(Error::Unsupported { option: "decoder_rows", head: "a decoder whose rows are computed" });
        }
        options.validate()?;
        // In place of the weight, which is not read.
        let unread = Tensor::zeros((1, 1), cnn.parameter().dtype(), cnn.parameter().device())?
            .broadcast_as((self.vocab(), self.context()))?;
        let mixture = Mixture::of_rows(contexts, log_priors, unread, self.bias.as_ref())?;
        let mixture = mixture.with_logits(self.logit_scale, self.softcap)?;
        mixture.sampled_loss(|ids| cnn.rows_of(ids), sampled, targets, options)
    }

    /// The weight, `[vocab, d]`.
    pub(crate) fn weight(&self) -> Result<Tensor> {
        match &self.rows {
            Rows::Matrix(weight) => Ok(weight.clone()),
            Rows::Computed(cnn) => cnn.rows(),
        }
    }

    /// The decoder with the present weight as a constant, if it is computed.
    pub(crate) fn with_rows_computed(&self) -> Result<Self> {
        match &self.rows {
            Rows::Matrix(_) => Ok(self.clone()),
            Rows::Computed(cnn) => Ok(Decoder { rows: Rows::Matrix(cnn.rows()?.detach()), ..self.clone() }),
        }
    }

    /// Checks that hidden states or contexts have the dtype and the device of the decoder.
    pub(crate) fn check_hidden(&self, hidden: &Tensor) -> Result<()> {
        match &self.rows {
            Rows::Matrix(weight) => check_hidden(hidden, self.context(), weight),
            Rows::Computed(cnn) => check_hidden(hidden, self.context(), cnn.parameter()),
        }
    }

    pub(crate) fn vocab(&self) -> usize {
        match &self.rows {
            Rows::Matrix(weight) => weight.dims().first().copied().unwrap_or(0),
            Rows::Computed(cnn) => cnn.vocab(),
        }
    }

    /// The size of a context.
    pub(crate) fn context(&self) -> usize {
        match &self.rows {
            Rows::Matrix(weight) => weight.dims().get(1).copied().unwrap_or(0),
            Rows::Computed(cnn) => cnn.context(),
        }
    }
}
