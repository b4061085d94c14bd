//! A layer of an LSTM as one node of candle's graph. From ordinary candle operations, every step would keep a dozen
//! tensors and add its own gradient of the weights; here that gradient is one product over all steps.

use super::recurrence_cpu;
use crate::Result;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, MetalStorage, Shape, Tensor, D};
use candle_nn::ops::sigmoid;

/// Computes the hidden states of all steps, then the last cell, `[steps + 1, batch, hidden]`, from inputs `[batch,
/// steps, width]`, the weight `[4 hidden, width + hidden + 1]` of inputs, hidden states and ones (whose column is the
/// bias), and the initial hidden state and cell, `[2, batch, hidden]`. The gates are in candle_nn's order: input,
/// forget, cell, output.
pub(crate) fn recurrence(inputs: &Tensor, weight: &Tensor, start: &Tensor) -> Result<Tensor> {
    if inputs.elem_count() == 0 || start.elem_count() == 0 {
        return Err(format!(
            "an LSTM needs at least one step, sequence, input and unit, got inputs {:?} and {} units",
            inputs.dims(),
            start.dim(2)?
        )
        .into());
    }
    if recurrence_cpu::supports([inputs, weight, start]) {
        return Ok(recurrence_cpu::recurrence(inputs, weight, start)?);
    }
    let tracked = [inputs, weight, start].iter().any(|operand| operand.track_op());
    let (width, units) = (inputs.dim(2)?, start.dim(2)?);
    let by_step = by_step(&inputs.detach())?;
    let [input_weight, recurrent, bias] = parts(&weight.detach(), width, units)?;
    let recurrent = recurrent.t()?;
    let (mut hidden, mut cell) = (start.detach().get(0)?, start.detach().get(1)?);
    let (mut outputs, mut kept) = (vec![], vec![]);
    let (steps, batch, _) = by_step.dims3()?;
    let sums =
        by_step.flatten_to(1)?.matmul(&input_weight.t()?)?.broadcast_add(&bias.t()?)?.reshape((steps, batch, ()))?;
    for step in 0..steps {
        let all = Gates::new(&(sums.get(step)? + hidden.matmul(&recurrent)?)?)?;
        let before = cell;
        cell = ((&all.forget * &before)? + (&all.input * &all.cell)?)?;
        let squashed = cell.tanh()?;
        hidden = (&all.output * &squashed)?;
        outputs.push(hidden.clone());
        if tracked {
            kept.push(Kept { gates: all, before, squashed });
        }
    }
    outputs.push(cell);
    let value = Tensor::stack(&outputs, 0)?;
    if !tracked {
        return Ok(value);
    }
    let node = inputs.apply_op3(weight, start, Node { value: value.clone(), kept })?;
    Ok((value + node)?)
}

/// Transposes `[batch, steps, width]` to `[steps, batch, width]`.
fn by_step(inputs: &Tensor) -> candle_core::Result<Tensor> {
    inputs.transpose(0, 1)?.contiguous()
}

/// Returns the columns of a weight for inputs, hidden states and ones. A GPU multiplies whole matrices alone.
fn parts(weight: &Tensor, width: usize, units: usize) -> candle_core::Result<[Tensor; 3]> {
    let part = |first, columns| weight.narrow(1, first, columns)?.contiguous();
    Ok([part(0, width)?, part(width, units)?, part(width + units, 1)?])
}

/// The gates of a step, each `[batch, hidden]`.
struct Gates {
    input: Tensor,
    forget: Tensor,
    cell: Tensor,
    output: Tensor,
}

impl Gates {
    fn new(sums: &Tensor) -> candle_core::Result<Self> {
        let sums = sums.chunk(4, D::Minus1)?;
        let [input, forget, cell, output] = [&sums[0], &sums[1], &sums[2], &sums[3]];
        Ok(Self { input: sigmoid(input)?, forget: sigmoid(forget)?, cell: cell.tanh()?, output: sigmoid(output)? })
    }
}

/// A step keeps this for the backward pass.
struct Kept {
    gates: Gates,
    /// The cell before the step, `[batch, hidden]`.
    before: Tensor,
    /// The hyperbolic tangent of the cell after the step.
    squashed: Tensor,
}

/// The gradients of the recurrence. Its value is added to the node's own, which is zero.
struct Node {
    value: Tensor,
    kept: Vec<Kept>,
}

impl Node {
    fn gradients(&self, [inputs, weight, start, upstream]: [&Tensor; 4]) -> candle_core::Result<[Tensor; 3]> {
        let (steps, (batch, _, width), units) = (self.kept.len(), inputs.dims3()?, start.dim(2)?);
        let [input_weight, recurrent, _] = parts(weight, width, units)?;
        let (mut back_hidden, mut back_cell) = (start.get(0)?.zeros_like()?, upstream.get(steps)?);
        let mut sums = Vec::with_capacity(steps);
        for (step, Kept { gates, before, squashed }) in self.kept.iter().enumerate().rev() {
            let hidden = (upstream.get(step)? + back_hidden)?;
            let through = ((&hidden * &gates.output)? * (1.0 - squashed.sqr()?)?)?;
            let cell = (back_cell + through)?;
            let sum = Tensor::cat(
                &[
                    through_sigmoid(&(&cell * &gates.cell)?, &gates.input)?,
                    through_sigmoid(&(&cell * before)?, &gates.forget)?,
                    ((&cell * &gates.input)? * (1.0 - gates.cell.sqr()?)?)?,
                    through_sigmoid(&(&hidden * squashed)?, &gates.output)?,
                ],
                1,
            )?;
            back_hidden = sum.matmul(&recurrent)?;
            back_cell = (&cell * &gates.forget)?;
            sums.push(sum);
        }
        sums.reverse();
        let sums = Tensor::cat(&sums, 0)?;
        let first = start.narrow(0, 0, 1)?;
        let before = Tensor::cat(&[&first, &self.value.narrow(0, 0, steps - 1)?], 0)?;
        let ones = sums.ones_like()?.narrow(1, 0, 1)?;
        let operands = Tensor::cat(&[by_step(inputs)?.flatten_to(1)?, before.flatten_to(1)?, ones], 1)?;
        let by_weight = sums.t()?.matmul(&operands)?;
        let by_inputs = sums.matmul(&input_weight)?.reshape((steps, batch, width))?;
        Ok([by_inputs.transpose(0, 1)?.contiguous()?, by_weight, Tensor::stack(&[back_hidden, back_cell], 0)?])
    }
}

fn through_sigmoid(upstream: &Tensor, value: &Tensor) -> candle_core::Result<Tensor> {
    upstream * (value - value.sqr()?)?
}

/// The forward pass of one backend, which returns zeros.
macro_rules! forward {
    ($name:ident, $storage:ty) => {
        fn $name(
            &self,
            inputs: &$storage,
            _: &Layout,
            _: &$storage,
            _: &Layout,
            _: &$storage,
            _: &Layout,
        ) -> candle_core::Result<($storage, Shape)> {
            let shape = self.value.shape();
            Ok((inputs.device().zeros_impl(shape, inputs.dtype())?, shape.clone()))
        }
    };
}

impl CustomOp3 for Node {
    fn name(&self) -> &'static str {
        "lstm"
    }

    forward!(cpu_fwd, CpuStorage);
    forward!(cuda_fwd, CudaStorage);
    forward!(metal_fwd, MetalStorage);

    fn bwd(
        &self,
        inputs: &Tensor,
        weight: &Tensor,
        start: &Tensor,
        _: &Tensor,
        upstream: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let operands = [inputs, weight, start, upstream].map(Tensor::detach);
        let [inputs, weight, start] = self.gradients(operands.each_ref())?;
        Ok((Some(inputs), Some(weight), Some(start)))
    }
}
