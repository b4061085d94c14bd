//! More than three operands of a node of candle's graph, whose custom operations have three.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use candle_core::Tensor;

use super::autograd::attach;
use crate::error::Result;

/// The gradients of three operands, each if it is needed.
type OperandGradients = [Option<Tensor>; 3];

/// Joins some of three operands into one operand of another node: the value of a node of their own, which is one
/// number. The other node computes their gradients, and leaves them for this one, which candle visits later in the same
/// backward pass. An operand that is missing needs no gradient; without any there is no joined operand. `like` is
/// another operand of the other node, whose device and dtype the value has.
pub(crate) fn join(
    name: &'static str,
    operands: [Option<&Tensor>; 3],
    like: &Tensor,
) -> Result<(Option<Tensor>, JoinedGradients)> {
    if operands.iter().all(Option::is_none) {
        return Ok((None, JoinedGradients { gradient: None, left: Arc::default() }));
    }
    let value = Tensor::zeros(1, like.dtype(), like.device())?;
    let left = Arc::<Mutex<HashMap<ThreadId, OperandGradients>>>::default();
    let taken = left.clone();
    let operand = attach(name, value, operands, move |_, _, _| {
        let gradients = taken.lock().ok().and_then(|mut left| left.remove(&thread::current().id()));
        Ok(gradients.unwrap_or_default())
    })?;
    let gradient = Some(operand.detach());
    Ok((Some(operand), JoinedGradients { gradient, left }))
}

/// Where a node leaves the gradients of joined operands.
pub(crate) struct JoinedGradients {
    /// That of the joined operand itself, of which nothing but its shape matters.
    gradient: Option<Tensor>,
    /// By the thread of the backward pass: other passes through the same graph may run on other threads.
    left: Arc<Mutex<HashMap<ThreadId, OperandGradients>>>,
}

impl JoinedGradients {
    /// Leaves the gradients of the operands, in their order. Returns the gradient of the joined operand.
    pub(crate) fn leave(&self, gradients: OperandGradients) -> Option<Tensor> {
        if let (Some(_), Ok(mut left)) = (&self.gradient, self.left.lock()) {
            left.insert(thread::current().id(), gradients);
        }
        self.gradient.clone()
    }
}
