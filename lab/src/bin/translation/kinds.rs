//! The three tasks, the kinds of vocabularies, and the models below the output layer.

use clap::ValueEnum;
use lab::{layers::Checkpoint, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Task {
    Toy,
    Translation,
    Dialogue,
}

impl Task {
    pub(crate) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    pub(crate) fn from_name(name: &str) -> Result<Self> {
        Task::from_str(name, false).map_err(|_| format!("the checkpoint's task {name:?} is unknown").into())
    }

    /// Returns the dropout of the mixtures' contexts beside a `dropout` of all else. On the few dialogues that there
    /// are, mixtures overfit without it: a softmax has dropout right before its decoder, on the hidden states.
    pub(crate) fn context_dropout(self, dropout: f64) -> f64 {
        match self {
            Task::Toy | Task::Translation => 0.0,
            Task::Dialogue => dropout,
        }
    }

    /// Returns the number of results that are scored per pair.
    pub(crate) fn n_best(self) -> usize {
        if self == Task::Dialogue {
            5
        } else {
            1
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum VocabularyKind {
    /// Words
    Word,
    /// Pieces of words, by byte-pair encoding
    Bpe,
    /// Words; targets as the rows and columns of a table (LightRNN)
    Light,
    /// Words; frequent targets as they are, rare ones as rows and columns of a table (Hybrid-LightRNN)
    Hybrid,
}

impl VocabularyKind {
    /// Returns the shape of the table, if there is one.
    pub(crate) fn shape(self) -> Option<TableShape> {
        match self {
            VocabularyKind::Word | VocabularyKind::Bpe => None,
            VocabularyKind::Light => Some(TableShape::Light),
            VocabularyKind::Hybrid => Some(TableShape::Hybrid),
        }
    }
}

/// Which words share a table of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableShape {
    /// LightRNN: all words share the table, but for the special tokens.
    Light,
    /// Hybrid-LightRNN: rare words share the table.
    Hybrid,
}

/// The model below the output layer has one of these architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    Lstm,
    Transformer(TransformerShape),
}

impl Architecture {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Architecture::Lstm => "lstm",
            Architecture::Transformer(_) => "transformer",
        }
    }

    /// Returns the architecture of a checkpoint. One without a name is recurrent.
    pub(crate) fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint.optional::<String>("architecture")?.as_deref() {
            None | Some("lstm") => Ok(Architecture::Lstm),
            Some("transformer") => {
                let (heads, inner) = (checkpoint.get("attention-heads")?, checkpoint.get("inner")?);
                Ok(Architecture::Transformer(TransformerShape { heads, inner }))
            }
            Some(name) => Err(format!("the checkpoint's architecture {name:?} is unknown").into()),
        }
    }

    /// Returns its settings, by the names of their flags.
    pub(crate) fn settings(self) -> Vec<(&'static str, String)> {
        let mut settings = vec![("architecture", self.name().to_owned())];
        if let Architecture::Transformer(TransformerShape { heads, inner }) = self {
            settings.extend([("attention-heads", heads.to_string()), ("inner", inner.to_string())]);
        }
        settings
    }
}

/// The sizes that a recurrent model does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TransformerShape {
    /// The number of attention heads.
    pub(crate) heads: usize,
    /// The width within the feed-forward networks.
    pub(crate) inner: usize,
}
