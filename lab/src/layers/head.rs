//! The choice of an output layer by flags, at equal numbers of parameters.

use super::checkpoint::{Checkpoint, LOGIT_FUNCTION};
use super::mixtape::MixtapeConfig;
use crate::Result;
use candle_nn::{Embedding, VarBuilder, VarMap};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::ValueEnum;
use mos_head::parts::LogitFunction;
use mos_head::{
    ContextActivation, MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, SoftmaxConfig, SoftmaxHead,
};

/// An output layer of mos-head, or Mixtape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HeadKind {
    /// `SoftmaxHead`
    Softmax,
    /// `MixtureOfContexts`
    Moc,
    /// `MixtureOfSoftmaxes`
    Mos,
    /// `Mixtape`
    Mixtape,
}

impl HeadKind {
    /// All heads of mos-head, in the order of the tables.
    pub const ALL: [HeadKind; 3] = [HeadKind::Softmax, HeadKind::Moc, HeadKind::Mos];

    /// Returns the head of a checkpoint.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let name: String = checkpoint.get("head")?;
        Ok(HeadKind::from_str(&name, false).map_err(|_| format!("the checkpoint's head {name:?} is unknown"))?)
    }

    /// Returns the head's name in flags and tables.
    pub fn name(self) -> &'static str {
        match self {
            HeadKind::Softmax => "softmax",
            HeadKind::Moc => "moc",
            HeadKind::Mos => "mos",
            HeadKind::Mixtape => "mixtape",
        }
    }

    /// Returns whether the head is a mixture of mos-head, which has components, contexts and an activation to choose.
    pub(crate) fn is_mixture(self) -> bool {
        matches!(self, HeadKind::Moc | HeadKind::Mos)
    }
}

/// Returns the parser of an activation's name.
pub(crate) fn activation() -> impl TypedValueParser<Value = ContextActivation> {
    PossibleValuesParser::new(["tanh", "identity"]).map(|name| {
        if name == "tanh" {
            ContextActivation::Tanh
        } else {
            ContextActivation::Identity
        }
    })
}

/// Returns the parser of the name of a function of the logits.
pub fn logit_function() -> impl TypedValueParser<Value = LogitFunction> {
    PossibleValuesParser::new(["identity", "sigsoftmax"]).map(|name| {
        if name == "sigsoftmax" {
            LogitFunction::Sigsoftmax
        } else {
            LogitFunction::Identity
        }
    })
}

/// Returns the function of the logits of a checkpoint.
pub(crate) fn stored_logit_function(checkpoint: &Checkpoint) -> Result<LogitFunction> {
    match checkpoint.optional::<String>(LOGIT_FUNCTION)?.as_deref() {
        None => Ok(LogitFunction::Identity),
        Some("sigsoftmax") => Ok(LogitFunction::Sigsoftmax),
        Some(name) => Err(format!("the checkpoint's {LOGIT_FUNCTION} {name:?} is unknown").into()),
    }
}

/// The sizes of a head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadSizes {
    /// Number of token ids.
    pub vocab: usize,
    /// Size of a hidden state.
    pub hidden: usize,
    /// Size of the mixtures' contexts; the softmax's context is the hidden state.
    pub context: usize,
    /// Number of components, K.
    pub components: usize,
    /// The activation of the contexts.
    pub activation: ContextActivation,
    /// The function of the logits.
    pub logit_function: LogitFunction,
}

impl HeadSizes {
    /// Returns the context size that gives a mixture as many parameters as the softmax has: `vocab * hidden` against
    /// `context * (vocab + components * (hidden + 1)) + components * hidden`.
    pub(crate) fn equal_context(vocab: usize, hidden: usize, components: usize) -> usize {
        let left = (vocab * hidden).saturating_sub(components * hidden) as f64;
        let each = (vocab + components * (hidden + 1)) as f64;
        (left / each).round().max(1.0) as usize
    }

    /// Returns the width of a head's decoder.
    pub fn decoder_width(self, kind: HeadKind) -> usize {
        match kind {
            HeadKind::Softmax => self.hidden,
            HeadKind::Moc | HeadKind::Mos | HeadKind::Mixtape => self.context,
        }
    }

    /// Returns the number of parameters of a head with these sizes.
    pub fn parameters(self, kind: HeadKind) -> usize {
        let HeadSizes { vocab, hidden, context, components, .. } = self;
        match kind {
            HeadKind::Softmax => vocab * (hidden + 1),
            HeadKind::Moc | HeadKind::Mos => {
                vocab * (context + 1) + components * context * (hidden + 1) + components * hidden
            }
            HeadKind::Mixtape => self.mixtape().parameters(),
        }
    }

    /// Returns the configuration of a softmax of these sizes.
    pub(crate) fn softmax(self) -> SoftmaxConfig {
        SoftmaxConfig::new(self.hidden, self.vocab).with_logit_function(self.logit_function)
    }

    /// Returns the configuration of a mixture of these sizes.
    pub(crate) fn mixture(self) -> MixtureConfig {
        let HeadSizes { vocab, hidden, context, components, activation, logit_function } = self;
        let config = MixtureConfig::new(hidden, vocab, components).with_context_dim(context);
        config.with_activation(activation).with_logit_function(logit_function)
    }

    /// Returns the sizes of a Mixtape with contexts of this size.
    pub fn mixtape(self) -> MixtapeConfig {
        MixtapeConfig::with_context(self.vocab, self.hidden, self.context)
    }

    /// Sets how far apart the components of `head.latent.weight` start, from 0 (all alike) to 1 (independent of each
    /// other). A softmax has no components and stays as it is; a Mixtape has as many as its weight.
    pub fn start_alike(self, varmap: &VarMap, spread: f64) -> Result<()> {
        let variables = varmap.data().lock().expect("no thread panicked while it held the variables");
        if let Some(latent) = variables.get("head.latent.weight") {
            let components = latent.dim(0)? / self.context;
            latent.set(&HeadSizes { components, ..self }.mixture().similar_components(latent, spread)?)?;
        }
        Ok(())
    }

    /// Returns a head with these sizes, variables `prior.weight`, `latent.weight`, .., and this dropout of the
    /// contexts. If an embedding is given, the decoder shares its weight. A Mixtape, which needs the counts of the ids,
    /// is an error.
    pub fn build(
        self,
        kind: HeadKind,
        dropout: f64,
        tied: Option<&Embedding>,
        vb: VarBuilder,
    ) -> Result<Box<dyn OutputLayer>> {
        let softmax = self.softmax();
        let mixture = self.mixture().with_dropout(dropout);
        Ok(match (kind, tied) {
            (HeadKind::Softmax, None) => Box::new(SoftmaxHead::new(&softmax, vb)?),
            (HeadKind::Softmax, Some(embedding)) => Box::new(SoftmaxHead::tied(&softmax, embedding, vb)?),
            (HeadKind::Moc, None) => Box::new(MixtureOfContexts::new(&mixture, vb)?),
            (HeadKind::Moc, Some(embedding)) => Box::new(MixtureOfContexts::tied(&mixture, embedding, vb)?),
            (HeadKind::Mos, None) => Box::new(MixtureOfSoftmaxes::new(&mixture, vb)?),
            (HeadKind::Mos, Some(embedding)) => Box::new(MixtureOfSoftmaxes::tied(&mixture, embedding, vb)?),
            (HeadKind::Mixtape, _) => {
                return Err(
                    "--head mixtape is for the words of language_model, whose text tells which are frequent".into()
                )
            }
        })
    }

    /// Returns the settings that a checkpoint must match, by the names of their flags; derived settings are last.
    pub fn settings(self, kind: HeadKind) -> Vec<(&'static str, String)> {
        let mut settings = vec![("head", kind.name().to_owned())];
        if kind.is_mixture() {
            settings.push(("components", self.components.to_string()));
            settings.push(("activation", format!("{:?}", self.activation).to_lowercase()));
        }
        settings.push(("hidden", self.hidden.to_string()));
        if kind != HeadKind::Softmax {
            settings.push(("context", self.context.to_string()));
        }
        if self.logit_function != LogitFunction::Identity {
            settings.push((LOGIT_FUNCTION, format!("{:?}", self.logit_function).to_lowercase()));
        }
        settings
    }
}
