//! A layer of an LSTM on the CPU in f32. Sequences are independent of each other, so each thread takes some of them
//! through all steps without waiting for another; if the recurrent weight exceeds a core's cache, all threads take all
//! sequences through each step.

use super::inplace::values;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor};
use gemm::Parallelism;
use rayon::prelude::*;
use std::sync::OnceLock;

/// The number of sequences of a part. A product with fewer rows is bound by reading the weight.
const PART: usize = 6;
/// The largest number of elements of a weight that a thread reads at every step for its own sequences alone: 4 MiB,
/// which stay in the second- or third-level cache.
const CACHED: usize = 1 << 20;

/// Returns whether `recurrence` can take these operands.
pub(crate) fn supports(operands: [&Tensor; 3]) -> bool {
    operands.iter().all(|operand| operand.device().is_cpu() && operand.dtype() == DType::F32)
}

/// Computes `recurrence::recurrence`, which refuses empty operands.
pub(crate) fn recurrence(inputs: &Tensor, weight: &Tensor, start: &Tensor) -> Result<Tensor> {
    inputs.contiguous()?.apply_op3(&weight.contiguous()?, &start.contiguous()?, Steps::default())
}

#[derive(Default)]
struct Steps {
    /// The results of the forward pass.
    parts: OnceLock<Vec<Part>>,
}

/// Some sequences keep this for the backward pass.
struct Part {
    /// The four gates and tanh of the cell, [steps, sequences, 5, hidden].
    gates: Vec<f32>,
    /// The cells from the initial one on, `[steps + 1, sequences, hidden]`.
    cells: Vec<f32>,
}

/// The sequences are cut into parts of these sizes.
#[derive(Clone, Copy)]
struct Sizes {
    steps: usize,
    batch: usize,
    width: usize,
    hidden: usize,
    part: usize,
    /// The threads of a product.
    parallelism: Parallelism,
}

/// The sequences of a part: the first, and how many.
#[derive(Clone, Copy)]
struct Sequences {
    first: usize,
    count: usize,
}

impl Sizes {
    fn new(inputs: &[usize], start: &[usize]) -> Self {
        let (batch, steps, width, hidden) = (inputs[0], inputs[1], inputs[2], start[2]);
        let (part, parallelism) = if 4 * hidden * hidden > CACHED {
            (batch, Parallelism::Rayon(0))
        } else {
            (batch.div_ceil(batch.div_ceil(PART)), Parallelism::None)
        };
        Self { steps, batch, width, hidden, part, parallelism }
    }

    /// Returns the number of elements of a row of the weight: for the inputs, for the hidden state and for the bias.
    fn columns(self) -> usize {
        self.width + self.hidden + 1
    }

    fn parts(self) -> Vec<Sequences> {
        let Self { batch, part, .. } = self;
        (0..batch).step_by(part).map(|first| Sequences { first, count: part.min(batch - first) }).collect()
    }

    /// Returns the number of sequences of a step that one thread computes.
    fn rows_at_a_time(self) -> usize {
        match self.parallelism {
            Parallelism::None => self.part,
            _ => 1,
        }
    }

    /// Copies the rows of a part, `[steps, sequences, hidden]`, to its sequences in `[.., batch, hidden]`.
    fn place(self, to: &mut [f32], from: &[f32], Sequences { first, count }: Sequences) {
        let Self { batch, hidden, .. } = self;
        for (to, from) in to.chunks_exact_mut(batch * hidden).zip(from.chunks_exact(count * hidden)) {
            to[first * hidden..][..count * hidden].copy_from_slice(from);
        }
    }
}

impl CustomOp3 for Steps {
    fn name(&self) -> &'static str {
        "lstm"
    }

    fn cpu_fwd(
        &self,
        inputs: &CpuStorage,
        inputs_at: &Layout,
        weight: &CpuStorage,
        weight_at: &Layout,
        start: &CpuStorage,
        start_at: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let sizes = Sizes::new(inputs_at.dims(), start_at.dims());
        let (inputs, weight, start) =
            (values(inputs, inputs_at)?, values(weight, weight_at)?, values(start, start_at)?);
        let Sizes { steps, batch, hidden, .. } = sizes;
        // The products read the weight row by row.
        let transposed = transpose(weight, sizes.columns());
        let (parts, hiddens): (Vec<_>, Vec<_>) =
            sizes.parts().into_par_iter().map(|part| forward(sizes, part, inputs, &transposed, start)).unzip();
        let mut output = vec![0.0; (steps + 1) * batch * hidden];
        let (to_hiddens, to_cell) = output.split_at_mut(steps * batch * hidden);
        for ((which, part), hiddens) in sizes.parts().into_iter().zip(&parts).zip(&hiddens) {
            let size = which.count * hidden;
            sizes.place(to_hiddens, &hiddens[size..], which);
            sizes.place(to_cell, &part.cells[steps * size..], which);
        }
        if self.parts.set(parts).is_err() {
            candle_core::bail!("lstm: the forward pass of this node has run before");
        }
        Ok((CpuStorage::F32(output), Shape::from((steps + 1, batch, hidden))))
    }

    fn bwd(
        &self,
        inputs: &Tensor,
        weight: &Tensor,
        start: &Tensor,
        output: &Tensor,
        upstream: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let sizes = Sizes::new(inputs.dims(), start.dims());
        let Sizes { steps, batch, width, hidden, .. } = sizes;
        let Some(parts) = self.parts.get() else { candle_core::bail!("lstm: the forward pass has not run") };
        // The rows of `sums` and `operands` are in the order of the parts.
        let mut sums = vec![0.0; steps * batch * 4 * hidden];
        let mut operands = vec![0.0; steps * batch * sizes.columns()];
        let mut to_inputs = vec![0.0; batch * steps * width];
        let mut to_start = vec![0.0; 2 * batch * hidden];
        {
            let upstream = upstream.contiguous()?;
            let tensors = [inputs, weight, start, output, &upstream].map(Tensor::storage_and_layout);
            let mut slices = Vec::with_capacity(tensors.len());
            for (storage, layout) in &tensors {
                slices.push(cpu_values(storage, layout)?);
            }
            let computed = Computed { inputs: slices[0], start: slices[2], output: slices[3] };
            let part_rows = sizes.part * steps;
            let gradients =
                sums.par_chunks_mut(part_rows * 4 * hidden).zip(to_inputs.par_chunks_mut(part_rows * width));
            let parts = sizes.parts().into_par_iter().zip(parts).zip(gradients);
            let starts = parts.zip(operands.par_chunks_mut(part_rows * sizes.columns())).map(
                |(((which, part), (sums, to_inputs)), operands)| {
                    computed.operands(sizes, which, operands);
                    backward(sizes, which, part, slices[4], slices[1], sums, to_inputs)
                },
            );
            let starts: Vec<Vec<f32>> = starts.collect();
            for (which, part_start) in sizes.parts().into_iter().zip(&starts) {
                sizes.place(&mut to_start, part_start, which);
            }
        }
        let device = inputs.device();
        let sums = Tensor::from_vec(sums, (steps * batch, 4 * hidden), device)?;
        let operands = Tensor::from_vec(operands, (steps * batch, sizes.columns()), device)?;
        Ok((
            Some(Tensor::from_vec(to_inputs, (batch, steps, width), device)?),
            Some(sums.t()?.matmul(&operands)?),
            Some(Tensor::from_vec(to_start, (2, batch, hidden), device)?),
        ))
    }
}

/// Takes some sequences through all steps: what the backward pass needs, and the hidden states [steps + 1, sequences,
/// hidden] from the initial ones on.
fn forward(sizes: Sizes, which: Sequences, inputs: &[f32], weight: &[f32], start: &[f32]) -> (Part, Vec<f32>) {
    let Sizes { steps, batch, width, hidden, parallelism, .. } = sizes;
    let Sequences { first, count } = which;
    let size = count * hidden;
    let (mut hiddens, mut cells) = (vec![0.0; (steps + 1) * size], vec![0.0; (steps + 1) * size]);
    hiddens[..size].copy_from_slice(&start[first * hidden..][..size]);
    cells[..size].copy_from_slice(&start[(batch + first) * hidden..][..size]);

    let (input_weight, others) = weight.split_at(width * 4 * hidden);
    let (recurrent, bias) = others.split_at(hidden * 4 * hidden);
    let (input_weight, recurrent) = (rows(input_weight, 4 * hidden), rows(recurrent, 4 * hidden));
    let mut gates = vec![0.0; steps * count * 5 * hidden];
    gates.chunks_exact_mut(5 * hidden).for_each(|gates| gates[..4 * hidden].copy_from_slice(bias));
    for sequence in 0..count {
        let inputs = rows(&inputs[(first + sequence) * steps * width..][..steps * width], width);
        let to = RowsMut { values: &mut gates[sequence * 5 * hidden..], stride: count * 5 * hidden };
        add_product(to, (steps, width, 4 * hidden), inputs, input_weight, parallelism);
    }
    for (step, gates) in gates.chunks_exact_mut(count * 5 * hidden).enumerate() {
        let (before, after) = hiddens[step * size..].split_at_mut(size);
        let to = RowsMut { values: gates, stride: 5 * hidden };
        add_product(to, (count, hidden, 4 * hidden), rows(before, hidden), recurrent, parallelism);
        let (cells_before, cells_after) = cells[step * size..].split_at_mut(size);
        let cells_after = cells_after[..size].par_chunks_exact_mut(hidden);
        let states =
            cells_before.par_chunks_exact(hidden).zip(cells_after).zip(after[..size].par_chunks_exact_mut(hidden));
        let rows = gates.par_chunks_exact_mut(5 * hidden).zip(states).with_min_len(sizes.rows_at_a_time());
        rows.for_each(|(gates, ((before, cell), hidden))| activate(gates, before, cell, hidden));
    }
    (Part { gates, cells }, hiddens)
}

/// Takes one step of one sequence. The sums of its gates become the gates.
fn activate(gates: &mut [f32], before: &[f32], cell: &mut [f32], hidden: &mut [f32]) {
    let n = cell.len();
    let (input, rest) = gates.split_at_mut(n);
    let (forget, rest) = rest.split_at_mut(n);
    let (candidate, rest) = rest.split_at_mut(n);
    let (output, squashed) = rest.split_at_mut(n);
    for i in 0..n {
        input[i] = sigmoid(input[i]);
        forget[i] = sigmoid(forget[i]);
        candidate[i] = tanh(candidate[i]);
        output[i] = sigmoid(output[i]);
        cell[i] = forget[i] * before[i] + input[i] * candidate[i];
        squashed[i] = tanh(cell[i]);
        hidden[i] = output[i] * squashed[i];
    }
}

/// The operands and the value of the node.
struct Computed<'a> {
    inputs: &'a [f32],
    start: &'a [f32],
    output: &'a [f32],
}

impl Computed<'_> {
    /// Writes the right operand of the weight's gradient: for each step of each sequence the input, the hidden state
    /// before, and one, `[steps, sequences, columns]`.
    fn operands(&self, sizes: Sizes, Sequences { first, count }: Sequences, to: &mut [f32]) {
        let Sizes { steps, batch, width, hidden, .. } = sizes;
        for (row, to) in to.chunks_exact_mut(sizes.columns()).enumerate() {
            let (step, sequence) = (row / count, first + row % count);
            let before = match step {
                0 => &self.start[sequence * hidden..],
                _ => &self.output[((step - 1) * batch + sequence) * hidden..],
            };
            to[..width].copy_from_slice(&self.inputs[(sequence * steps + step) * width..][..width]);
            to[width..width + hidden].copy_from_slice(&before[..hidden]);
            to[width + hidden] = 1.0;
        }
    }
}

/// Writes the gradients of the sums of the gates, [steps, sequences, 4 hidden], adds the gradients of the inputs,
/// [sequences, steps, width], and returns the gradients of the initial hidden states and cells, [2, sequences, hidden].
fn backward(
    sizes: Sizes,
    Sequences { first, count }: Sequences,
    part: &Part,
    upstream: &[f32],
    weight: &[f32],
    all_sums: &mut [f32],
    to_inputs: &mut [f32],
) -> Vec<f32> {
    let Sizes { steps, batch, width, hidden, parallelism, .. } = sizes;
    let Part { gates, cells } = part;
    let size = count * hidden;
    let upstream = |step: usize| &upstream[(step * batch + first) * hidden..][..size];
    let (input_weight, recurrent) = (rows(weight, sizes.columns()), rows(&weight[width..], sizes.columns()));
    // These are the gradients of the hidden states and cells after a step.
    let mut states = vec![0.0; 2 * size];
    let (back_hidden, back_cell) = states.split_at_mut(size);
    back_cell.copy_from_slice(upstream(steps));
    for step in (0..steps).rev() {
        let sums = &mut all_sums[step * count * 4 * hidden..][..count * 4 * hidden];
        let gates = &gates[step * count * 5 * hidden..][..count * 5 * hidden];
        let cells = &cells[step * size..][..size];
        back_hidden.iter_mut().zip(upstream(step)).for_each(|(back, upstream)| *back += upstream);
        let sums_and_gates = sums.par_chunks_exact_mut(4 * hidden).zip(gates.par_chunks_exact(5 * hidden));
        let states = cells.par_chunks_exact(hidden).zip(back_hidden.par_chunks_exact(hidden));
        let all =
            sums_and_gates.zip(states).zip(back_cell.par_chunks_exact_mut(hidden)).with_min_len(sizes.rows_at_a_time());
        all.for_each(|(((sums, gates), (before, hidden)), cell)| through_gates(sums, gates, before, hidden, cell));
        back_hidden.fill(0.0);
        let to = RowsMut { values: back_hidden, stride: hidden };
        add_product(to, (count, 4 * hidden, hidden), rows(sums, 4 * hidden), recurrent, parallelism);
    }
    for (sequence, to_inputs) in to_inputs.chunks_exact_mut(steps * width).enumerate() {
        let sums = Rows { values: &all_sums[sequence * 4 * hidden..], stride: count * 4 * hidden };
        let to = RowsMut { values: to_inputs, stride: width };
        add_product(to, (steps, 4 * hidden, width), sums, input_weight, parallelism);
    }
    states
}

/// Writes the gradients of the gates' sums in one step of one sequence, from the gradients of its hidden state and its
/// cell. The cell's gradient becomes the gradient of the cell before.
fn through_gates(sums: &mut [f32], gates: &[f32], before: &[f32], hidden: &[f32], cell: &mut [f32]) {
    let n = cell.len();
    let part = |i: usize| &gates[i * n..][..n];
    let (input, forget, candidate, output, squashed) = (part(0), part(1), part(2), part(3), part(4));
    let (to_input, rest) = sums.split_at_mut(n);
    let (to_forget, rest) = rest.split_at_mut(n);
    let (to_candidate, to_output) = rest.split_at_mut(n);
    for i in 0..n {
        let through = cell[i] + hidden[i] * output[i] * (1.0 - squashed[i] * squashed[i]);
        to_input[i] = through * candidate[i] * input[i] * (1.0 - input[i]);
        to_forget[i] = through * before[i] * forget[i] * (1.0 - forget[i]);
        to_candidate[i] = through * input[i] * (1.0 - candidate[i] * candidate[i]);
        to_output[i] = hidden[i] * squashed[i] * output[i] * (1.0 - output[i]);
        cell[i] = through * forget[i];
    }
}

/// Computes the logistic function. Like `tanh`, it has an absolute error of at most 1e-7.
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (1.0 + (2.0 * x).exp())
}

/// Transposes `[rows, width]` to `[width, rows]`.
fn transpose(values: &[f32], width: usize) -> Vec<f32> {
    let rows = values.len() / width;
    let mut transposed = vec![0.0; values.len()];
    transposed.par_chunks_mut(rows).enumerate().for_each(|(column, transposed)| {
        for (row, value) in transposed.iter_mut().enumerate() {
            *value = values[row * width + column];
        }
    });
    transposed
}

/// Rows that lie `stride` elements apart.
#[derive(Clone, Copy)]
struct Rows<'a> {
    values: &'a [f32],
    stride: usize,
}

struct RowsMut<'a> {
    values: &'a mut [f32],
    stride: usize,
}

fn rows(values: &[f32], stride: usize) -> Rows<'_> {
    Rows { values, stride }
}

/// Computes `to[m, n] += lhs[m, k] rhs[k, n]`.
fn add_product(to: RowsMut, (m, k, n): (usize, usize, usize), lhs: Rows, rhs: Rows, parallelism: Parallelism) {
    let fits = |len: usize, stride: usize, rows: usize, columns: usize| {
        rows > 0 && columns <= stride && (rows - 1) * stride + columns <= len
    };
    assert!(fits(to.values.len(), to.stride, m, n));
    assert!(fits(lhs.values.len(), lhs.stride, m, k) && fits(rhs.values.len(), rhs.stride, k, n));
    // SAFETY: the assertions check that all elements lie within the slices and that the destination's rows do not
    // overlap; the destination is a unique borrow.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            to.values.as_mut_ptr(),
            1,
            to.stride as isize,
            true,
            lhs.values.as_ptr(),
            1,
            lhs.stride as isize,
            rhs.values.as_ptr(),
            1,
            rhs.stride as isize,
            1.0f32,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

fn cpu_values<'a>(storage: &'a Storage, layout: &Layout) -> Result<&'a [f32]> {
    match storage {
        Storage::Cpu(storage) => values(storage, layout),
        _ => candle_core::bail!("lstm: expected tensors on the CPU"),
    }
}
