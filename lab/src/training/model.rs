//! The training loop needs this of a model and of its data.

use super::{ranks::Ranks, recipe::Recipe};
use crate::{layers::Checkpoint, Result};
use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use mos_head::{LossOptions, OutputLayer};
use rand::rngs::StdRng;
use std::collections::HashMap;

/// The loss of a batch is computed from these tensors.
pub struct Forward {
    /// Hidden states `[.., hidden]`.
    pub hidden: Tensor,
    /// Targets `[..]`.
    pub targets: Tensor,
    /// A scalar that is added to the loss in training: a regulariser of the hidden states.
    pub penalty: Option<Tensor>,
}

/// A batch takes part in the steps of the optimizer in this way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    /// The batch's share of the targets of the step, from 0 to 1.
    pub share: f64,
    /// Whether the optimizer takes a step after this batch.
    pub is_last: bool,
    /// The factor of the learning rate of the step.
    pub lr_factor: f64,
}

/// A batch is for training or for evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Training has dropout, and shuffles where the order of the data is free.
    Training {
        /// The epoch, counted from zero.
        epoch: usize,
    },
    /// Evaluation has no dropout, and keeps the order of the data.
    Evaluation {
        /// The number of parts in which ranks evaluate, as many as there are ranks.
        parts: usize,
    },
}

/// The parts that every model has.
pub struct Base {
    /// The output layer.
    pub head: Box<dyn OutputLayer>,
    /// The variables of the whole model.
    pub varmap: VarMap,
    /// The device of the variables.
    pub device: Device,
}

/// A model that ends in an output layer.
pub trait Model {
    /// An element of the data: a token id of a text, or a pair of sentences.
    type Item: Clone;
    /// One batch, before anything is computed.
    type Batch;
    /// The state that passes from one batch to the next.
    type State;
    /// The target of positions that the loss ignores.
    const IGNORED: i64;

    /// Returns the parts that every model has.
    fn base(&self) -> &Base;

    /// Returns the output layer.
    fn head(&self) -> &dyn OutputLayer {
        self.base().head.as_ref()
    }

    /// Returns the options of a training step, from those that all models share.
    fn options(&self, options: LossOptions, _: &mut StdRng) -> Result<LossOptions> {
        Ok(options)
    }

    /// Returns the variables.
    fn varmap(&self) -> &VarMap {
        &self.base().varmap
    }

    /// Returns the device of the variables.
    fn device(&self) -> &Device {
        &self.base().device
    }

    /// Returns the settings that a checkpoint must match, by the names of their flags.
    fn settings(&self) -> Vec<(&'static str, String)>;

    /// Returns more metadata of a checkpoint.
    fn notes(&self) -> Result<Vec<(&'static str, String)>> {
        Ok(vec![])
    }

    /// Adds what a checkpoint needs beside the variables: constants, such as a table of codes.
    fn add_constants(&self, _: &mut Checkpoint) -> Result<()> {
        Ok(())
    }

    /// Returns the batches of one pass over `items`, in which every target occurs once.
    fn batches(&self, items: &[Self::Item], recipe: &Recipe, pass: Pass) -> Vec<Self::Batch>;

    /// Says how a batch takes part in a step. By default every batch is a step.
    fn part(&self, _: &Self::Batch) -> Part {
        Part { share: 1.0, is_last: true, lr_factor: 1.0 }
    }

    /// Returns the state before the first batch.
    fn start(&self, recipe: &Recipe, pass: Pass) -> Result<Self::State>;

    /// Returns the hidden states and targets of a batch; dropout is applied if a generator for its masks is given.
    fn forward(
        &self,
        items: &[Self::Item],
        batch: &Self::Batch,
        state: &mut Self::State,
        rng: Option<&mut StdRng>,
    ) -> Result<Forward>;

    /// Returns the tensors of a state, by name.
    fn save_state(&self, _: &Self::State) -> Vec<(String, Tensor)> {
        vec![]
    }

    /// Sets the tensors of a state from tensors by name.
    fn load_state(&self, _: &mut Self::State, _: &HashMap<String, Tensor>) -> Result<()> {
        Ok(())
    }

    /// Gives every rank the state of all parts of a step.
    fn share_state(&self, _: &mut Self::State, _: &Ranks) -> Result<()> {
        Ok(())
    }

    /// Returns the number of parameters.
    fn parameters(&self) -> usize {
        self.varmap().all_vars().iter().map(|var| var.elem_count()).sum()
    }
}
