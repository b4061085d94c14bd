//! A source of log-probabilities: a mixture of known contexts, or the log-probabilities themselves.

use candle_core::{DType, Device, Tensor, D};
use lab::layers::mixtape::{self, Mixtape};
use lab::layers::{Checkpoint, HeadKind};
use lab::{data::Corpus, Result};
use mos_head::parts::LogitFunction;
use mos_head::{Distributions, DropoutMasks, Mixture, MixtureLayer, OutputLayer};
use std::path::Path;

pub(crate) struct Source {
    pub(crate) name: String,
    /// The head, unless the log-probabilities themselves were given.
    pub(crate) head: Option<Head>,
    pub(crate) origin: Origin,
    pub(crate) targets: Option<Vec<u32>>,
    pub(crate) text: Option<Text>,
    /// The roundoff of the log-probabilities: the distance from 1 to the next number of their dtype.
    pub(crate) epsilon: f64,
}

#[derive(Clone, Copy)]
pub(crate) struct Head {
    pub(crate) kind: HeadKind,
    /// The columns of its decoder, d.
    pub(crate) width: usize,
}

/// What the log-probabilities are computed from.
pub(crate) enum Origin {
    Model {
        layer: Box<dyn MixtureLayer>,
        decoder: Decoder,
        /// `[positions, hidden]`
        hidden: Tensor,
        /// `[K, hidden]`
        prior_weight: Option<Tensor>,
    },
    Mixture {
        /// `[positions, K, d]`
        contexts: Tensor,
        /// `[positions, K]`
        log_priors: Option<Tensor>,
        decoder: Decoder,
    },
    /// A head that mixes logits `c_k W^T`.
    Mixtape {
        layer: Box<Mixtape>,
        decoder: Decoder,
        /// `[positions, hidden]`
        hidden: Tensor,
    },
    /// `[positions, vocab]`
    LogProbs(Tensor),
}

/// The logits of a context c are `f(c W^T + b)`.
#[derive(Clone)]
pub(crate) struct Decoder {
    /// `[vocab, d]`
    pub(crate) weight: Tensor,
    /// `[vocab]`
    pub(crate) bias: Option<Tensor>,
    /// The function f.
    pub(crate) function: LogitFunction,
}

impl Decoder {
    /// Computes the logits `c W^T + b` `[rows, vocab]` of contexts `[rows, d]`, without the function.
    pub(crate) fn logits(&self, contexts: &Tensor) -> Result<Tensor> {
        let products = contexts.matmul(&self.weight.t()?)?;
        Ok(match &self.bias {
            Some(bias) => products.broadcast_add(bias)?,
            None => products,
        })
    }

    /// Makes the mixture of these contexts.
    pub(crate) fn mixture(&self, contexts: &Tensor, log_priors: Option<&Tensor>) -> Result<Mixture> {
        let mixture = Mixture::new(contexts, log_priors, &self.weight, self.bias.as_ref())?;
        Ok(mixture.with_logit_function(self.function)?)
    }
}

/// The text to which the contexts belong.
pub(crate) struct Text {
    pub(crate) corpus: Corpus,
    /// The validation text, or the test text.
    pub(crate) ids: Vec<u32>,
    /// The place of each context's target in the text.
    pub(crate) places: Vec<usize>,
}

impl Source {
    /// Returns the mixture of some contexts.
    pub(crate) fn mixture(&self, start: usize, count: usize) -> Result<Mixture> {
        match &self.origin {
            Origin::Model { layer, hidden, .. } => {
                Ok(layer.mixture(&hidden.narrow(0, start, count)?, DropoutMasks::Off)?)
            }
            Origin::Mixture { contexts, log_priors, decoder } => {
                let contexts = contexts.narrow(0, start, count)?;
                let log_priors = log_priors.as_ref().map(|all| all.narrow(0, start, count)).transpose()?;
                decoder.mixture(&contexts, log_priors.as_ref())
            }
            Origin::Mixtape { .. } => Err(format!("{} mixes logits: it has no mixture of softmaxes", self.name).into()),
            Origin::LogProbs(_) => Err(format!("{} has log-probabilities, but no mixture", self.name).into()),
        }
    }

    pub(crate) fn decoder(&self) -> Result<&Decoder> {
        match &self.origin {
            Origin::Model { decoder, .. } | Origin::Mixture { decoder, .. } | Origin::Mixtape { decoder, .. } => {
                Ok(decoder)
            }
            Origin::LogProbs(_) => Err(format!("{} has log-probabilities, but no decoder", self.name).into()),
        }
    }

    /// Returns the log-probabilities of some contexts, [count, vocab].
    pub(crate) fn log_probs(&self, start: usize, count: usize) -> Result<Tensor> {
        match &self.origin {
            Origin::LogProbs(all) => Ok(all.narrow(0, start, count)?),
            Origin::Mixtape { layer, hidden, .. } => Ok(layer.log_probs(&hidden.narrow(0, start, count)?)?),
            _ => Ok(self.mixture(start, count)?.log_probs()?),
        }
    }

    /// Returns the log-priors of the components of a mixture, [count, K].
    pub(crate) fn log_priors(&self, start: usize, count: usize) -> Result<Option<Tensor>> {
        match &self.origin {
            Origin::Model { hidden, prior_weight: Some(weight), .. } => {
                let logits = hidden.narrow(0, start, count)?.matmul(&weight.t()?)?;
                Ok(Some(candle_nn::ops::log_softmax(&logits, D::Minus1)?))
            }
            Origin::Mixture { .. } if self.mixes_softmaxes() => Ok(Some(self.mixture(start, count)?.log_priors()?)),
            _ => Ok(None),
        }
    }

    /// Returns the responsibilities of the softmaxes that are mixed for the targets, `log r_k`, [targets, K].
    pub(crate) fn log_posteriors(&self, start: usize, targets: &[u32]) -> Result<Option<Tensor>> {
        if !self.mixes_softmaxes() {
            return Ok(None);
        }
        let mixture = self.mixture(start, targets.len())?;
        Ok(Some(mixture.responsibilities(&Tensor::new(targets, &Device::Cpu)?)?.log()?))
    }

    fn mixes_softmaxes(&self) -> bool {
        self.head.is_some_and(|head| head.kind == HeadKind::Mos)
    }

    /// Returns the number of contexts.
    pub(crate) fn contexts(&self) -> usize {
        match &self.origin {
            Origin::Model { hidden: rows, .. }
            | Origin::Mixtape { hidden: rows, .. }
            | Origin::Mixture { contexts: rows, .. }
            | Origin::LogProbs(rows) => rows.dims()[0],
        }
    }

    /// Returns the number of contexts of a position, K.
    pub(crate) fn components(&self) -> Result<usize> {
        match &self.origin {
            Origin::Mixtape { .. } => Ok(mixtape::COMPONENTS),
            _ => Ok(self.mixture(0, 1)?.log_priors()?.elem_count()),
        }
    }

    pub(crate) fn vocab(&self) -> usize {
        match &self.origin {
            Origin::Model { layer, .. } => layer.vocab_size(),
            Origin::Mixtape { layer, .. } => layer.vocab_size(),
            Origin::Mixture { decoder, .. } => decoder.weight.dims()[0],
            Origin::LogProbs(all) => all.dims()[1],
        }
    }

    /// Returns the name of the head, or of the file if its head is not known.
    pub(crate) fn label(&self) -> &str {
        self.head.map_or(&self.name, |head| head.kind.name())
    }
}

/// Returns a tensor of a file, or an error that lists those it has.
pub(crate) fn named<'a>(file: &'a Checkpoint, path: &Path, key: &str) -> Result<&'a Tensor> {
    file.tensors.get(key).ok_or_else(|| {
        let mut names: Vec<&str> = file.tensors.keys().map(String::as_str).collect();
        names.sort_unstable();
        let more = if names.len() > 12 { ", .." } else { "" };
        names.truncate(12);
        let names = if names.is_empty() { "none".into() } else { names.join(", ") };
        format!("{} has no tensor {key}; its tensors: {names}{more}", path.display()).into()
    })
}

/// Returns the values of a tensor in f64, row by row.
pub(crate) fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}
