//! What the training loop needs of a model and of its data.

use super::{digest::Digest, recipe::Recipe, Result};
use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use mos_head::OutputLayer;

/// Hidden states and targets of one batch after the other; each is computed on request.
pub(crate) type Batches<'a> = Box<dyn ExactSizeIterator<Item = Result<(Tensor, Tensor)>> + 'a>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// With dropout; shuffled, where the order of the data is free.
    Training {
        epoch: usize,
    },
    Evaluation,
}

pub(crate) trait Model {
    /// An element of the data: a token id of a text, or a pair of sentences.
    type Item: Clone;
    /// The target of positions that the loss ignores.
    const IGNORED: i64;

    fn head(&self) -> &dyn OutputLayer;

    fn varmap(&self) -> &VarMap;

    fn device(&self) -> &Device;

    /// The settings that a checkpoint must match, by the names of their flags.
    fn settings(&self) -> Vec<(&'static str, String)>;

    /// More metadata of a checkpoint.
    fn notes(&self) -> Result<Vec<(&'static str, String)>> {
        Ok(vec![])
    }

    /// One pass over `items`, in which every target occurs once.
    fn batches<'a>(&'a self, items: &'a [Self::Item], recipe: &'a Recipe, pass: Pass) -> Result<Batches<'a>>;

    fn parameters(&self) -> usize {
        self.varmap().all_vars().iter().map(|var| var.elem_count()).sum()
    }
}

/// A corpus as a model reads it.
#[derive(Clone, Debug)]
pub(crate) struct Data<T> {
    pub(crate) name: String,
    /// Of the vocabulary and both parts, to recognize the corpus of a checkpoint.
    pub(crate) digest: String,
    pub(crate) train: Vec<T>,
    pub(crate) valid: Vec<T>,
}

impl Data<u32> {
    /// Texts whose first token is an input only; all others are targets.
    pub(crate) fn new<S: AsRef<str>>(
        name: String,
        vocabulary: impl IntoIterator<Item = S>,
        train: Vec<u32>,
        valid: Vec<u32>,
    ) -> Self {
        let digest = Digest::new().texts(vocabulary).ids(&train).ids(&valid).to_string();
        Self { name, digest, train, valid }
    }
}
