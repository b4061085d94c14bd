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
    let left = Arc::<Mutex<HashMap<ThreadId, Vec<OperandGradients>>>>::default();
    let taken = left.clone();
    let operand = attach(name, value, operands, move |_, _, _| {
        let gradients = taken.lock().ok().and_then(|mut left| left.get_mut(&thread::current().id())?.pop());
        Ok(gradients.unwrap_or_default())
    })?;
    let gradient = Some(operand.detach());
    Ok((Some(operand), JoinedGradients { gradient, left }))
}

/// Where a node leaves the gradients of joined operands.
pub(crate) struct JoinedGradients {
    /// That of the joined operand itself, of which nothing but its shape matters.
    gradient: Option<Tensor>,
    /// By the thread of the backward pass: other passes through the same graph may run on other threads, and, while a
    /// pass waits for rayon, on its own.
    left: Arc<Mutex<HashMap<ThreadId, Vec<OperandGradients>>>>,
}

impl JoinedGradients {
    /// Leaves the gradients of the operands, in their order. Returns the gradient of the joined operand.
    pub(crate) fn leave(&self, gradients: OperandGradients) -> Option<Tensor> {
        if let (Some(_), Ok(mut left)) = (&self.gradient, self.left.lock()) {
            left.entry(thread::current().id()).or_default().push(gradients);
        }
        self.gradient.clone()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// A pass that waits for rayon may run another one through the same graph on its thread.
    #[test]
    fn a_pass_within_another_takes_its_own_gradients() -> Result<()> {
        let variable = Var::new(&[1f32, 2.0], &Device::Cpu)?;
        let (operand, gradients) = join("test", [Some(variable.as_tensor()), None, None], &variable)?;
        let operand = operand.expect("an operand");
        for number in [1f32, 2.0] {
            gradients.leave([Some(Tensor::full(number, 2, &Device::Cpu)?), None, None]);
        }
        for number in [2f32, 1.0] {
            let found = operand.backward()?.remove(&variable).expect("a gradient");
            assert_eq!(found.to_vec1::<f32>()?, [number; 2]);
        }
        Ok(())
    }
}
