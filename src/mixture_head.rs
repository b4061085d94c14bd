//! The parameters and constructors shared by the two heads with K contexts.

use std::sync::Arc;

use candle_core::Tensor;
use candle_nn::{Embedding, VarBuilder};

use crate::decoder::{CharCnn, Decoder, Rows};
use crate::dropout::Dropout;
use crate::error::Result;
use crate::loss::{Loss, LossOptions};
use crate::mixture_config::{Activation, MixtureConfig, MixtureTensors};
use crate::projection::Projection;

/// The parameters of a head with K contexts.
#[derive(Clone, Debug)]
pub(crate) struct Parameters {
    pub(crate) projection: Projection,
    pub(crate) decoder: Decoder,
}

impl Parameters {
    /// New variables, with a decoder tied to an embedding.
    pub(crate) fn tied(config: &MixtureConfig, embedding: &Embedding, vb: &VarBuilder) -> Result<Self> {
        Self::new(config, Some(Rows::Matrix(embedding.embeddings().clone())), vb)
    }

    /// New variables, with computed rows of the decoder.
    pub(crate) fn computed(config: &MixtureConfig, rows: CharCnn, vb: &VarBuilder) -> Result<Self> {
        Self::new(config, Some(Rows::Computed(Arc::new(rows))), vb)
    }

    /// The parameters with the decoder's present rows as a constant.
    pub(crate) fn with_rows_computed(&self) -> Result<Self> {
        Ok(Parameters { projection: self.projection.clone(), decoder: self.decoder.with_rows_computed()? })
    }

    /// The loss of a head with these `contexts` and log-priors of hidden states: arguments are checked before they are
    /// computed, and ignored positions are masked.
    pub(crate) fn loss(
        &self,
        hidden: &Tensor,
        targets: &Tensor,
        options: &LossOptions,
        contexts: impl Fn(&Tensor, Dropout) -> Result<(Tensor, Option<Tensor>)>,
    ) -> Result<Loss> {
        options.validate()?;
        let hidden = options.mask_hidden(hidden, targets)?;
        let (contexts, log_priors) = contexts(&hidden, options.dropout())?;
        self.decoder.loss_of_masked(&contexts, log_priors.as_ref(), targets, options)
    }

    /// New variables; the decoder's rows may be given.
    pub(crate) fn new(config: &MixtureConfig, rows: Option<Rows>, vb: &VarBuilder) -> Result<Self> {
        config.validate()?;
        let projection = Projection::new(config, vb)?;
        let decoder = Decoder::new(config.vocab, config.context, config.decoder_bias, rows, vb)?;
        Ok(Parameters {
            projection,
            decoder: decoder.with_logit_scale(config.logit_scale)?.with_softcap(config.softcap)?,
        })
    }

    pub(crate) fn from_tensors(tensors: MixtureTensors, activation: Activation) -> Result<Self> {
        let projection = Projection::from_tensors(&tensors, activation)?;
        let decoder = Decoder::from_tensors(tensors.decoder_weight, tensors.decoder_bias)?;
        Ok(Parameters { projection, decoder })
    }

    pub(crate) fn tensors(&self) -> Result<MixtureTensors> {
        Ok(self.projection.tensors(self.decoder.weight()?, self.decoder.bias.clone()))
    }
}

/// The constructors and accessors of a head with K contexts.
macro_rules! mixture_head {
    ($head:ident) => {
        impl $head {
            /// A head with the variables `prior.weight` `[K, hidden]`, `latent.weight` `[K * d, hidden]`, `latent.bias`
            /// `[K * d]`, `decoder.weight` `[vocab, d]`, `decoder.bias` `[vocab]` and, if configured, `prior.bias`
            /// `[K]`. Their initial values are those of the released code: the decoder uniform within 0.1, its bias
            /// zero, the others uniform within 1 / sqrt(hidden).
            ///
            /// # Errors
            ///
            /// If a size is zero, a variable would have more than 2^40 elements, there are more than 2^32 - 1 token ids,
            /// an option is out of range, or a variable is missing or of another shape.
            pub fn new(config: &MixtureConfig, vb: VarBuilder) -> Result<Self> {
                Ok($head(Parameters::new(config, None, &vb)?))
            }

            /// A head whose decoder is tied to the matrix of an embedding, `[vocab, d]`; the gradients of both uses are
            /// summed.
            ///
            /// # Shapes
            ///
            /// - embedding: `[vocab, d]`
            ///
            /// # Errors
            ///
            /// If the embedding is of another shape, or as for `new`.
            pub fn tied(config: &MixtureConfig, embedding: &Embedding, vb: VarBuilder) -> Result<Self> {
                Ok($head(Parameters::tied(config, embedding, &vb)?))
            }

            /// A head whose decoder's rows are computed, `[vocab, d]`. They are computed anew for each call: for
            /// evaluation and decoding see `with_rows_computed`.
            ///
            /// # Errors
            ///
            /// If the rows are of another shape, or as for `new`.
            pub fn computed(config: &MixtureConfig, rows: CharCnn, vb: VarBuilder) -> Result<Self> {
                Ok($head(Parameters::computed(config, rows, &vb)?))
            }

            /// The head with the decoder's present rows as a constant matrix, if they are computed: for evaluation and
            /// decoding.
            ///
            /// # Errors
            ///
            /// If candle fails.
            pub fn with_rows_computed(&self) -> Result<Self> {
                Ok($head(self.0.with_rows_computed()?))
            }

            /// A head from its parameters.
            ///
            /// # Errors
            ///
            /// If the shapes do not match, or a dtype is not a float type.
            pub fn from_tensors(tensors: MixtureTensors, activation: Activation) -> Result<Self> {
                Ok($head(Parameters::from_tensors(tensors, activation)?))
            }

            /// The parameters, to export, freeze, tie or watch: tensors that share their storage with the head, except
            /// computed rows.
            ///
            /// # Errors
            ///
            /// If candle fails to compute the decoder's rows.
            pub fn tensors(&self) -> Result<MixtureTensors> {
                self.0.tensors()
            }

            /// The decoder's weight, `[vocab, d]`.
            ///
            /// # Errors
            ///
            /// If candle fails to compute it.
            pub fn weight(&self) -> Result<Tensor> {
                self.0.decoder.weight()
            }

            /// The decoder's bias, `[vocab]`.
            pub fn bias(&self) -> Option<&Tensor> {
                self.0.decoder.bias.as_ref()
            }

            /// The head with another probability of locked dropout on its contexts while training, see
            /// [`MixtureConfig::dropout`].
            ///
            /// # Errors
            ///
            /// If the probability is not at least 0 and below 1.
            pub fn with_dropout(self, dropout: f64) -> Result<Self> {
                let Parameters { projection, decoder } = self.0;
                Ok($head(Parameters { projection: projection.with_dropout(dropout)?, decoder }))
            }

            /// The head with another scale of the logits, bias included, before the softcap.
            ///
            /// # Errors
            ///
            /// If the scale is not from 1e-30 to 1e30.
            pub fn with_logit_scale(self, logit_scale: f64) -> Result<Self> {
                let Parameters { projection, decoder } = self.0;
                Ok($head(Parameters { projection, decoder: decoder.with_logit_scale(logit_scale)? }))
            }

            /// The head with softly bounded logits: `z = cap tanh(z / cap)` (Gemma 2, 2024).
            ///
            /// # Errors
            ///
            /// If the cap is not from 1e-30 to 1e30.
            pub fn with_softcap(self, cap: f64) -> Result<Self> {
                let Parameters { projection, decoder } = self.0;
                Ok($head(Parameters { projection, decoder: decoder.with_softcap(Some(cap))? }))
            }
        }
    };
}
pub(crate) use mixture_head;
