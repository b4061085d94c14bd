//! The time steps of an LSTM on the CPU in f32. Sequences are independent of each other, so each thread takes some of
//! them through all steps without waiting for another; if the recurrent weight exceeds a core's cache, all threads take
//! all sequences through each step.

use super::inplace::values;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor};
use gemm::Parallelism;
use rayon::prelude::*;
use std::sync::OnceLock;

/// Number of sequences of a part; a product with fewer rows is bound by reading the weight.
const PART: usize = 6;
/// Maximum elements of a weight that a thread reads at every step for its own sequences alone: 4 MiB, which stay in the
/// second- or third-level cache.
const CACHED: usize = 1 << 20;

/// Whether `recurrence` can take these operands.
pub(crate) fn supports(operands: [&Tensor; 3]) -> bool {
    operands.iter().all(|operand| operand.device().is_cpu() && operand.dtype() == DType::F32)
}

/// Computes `recurrence::recurrence`, which refuses empty operands.
pub(crate) fn recurrence(inputs: &Tensor, weight: &Tensor, start: &Tensor) -> Result<Tensor> {
    inputs.contiguous()?.apply_op3(&weight.contiguous()?, &start.contiguous()?, Steps::default())
}

#[derive(Default)]
struct Steps {
    /// What the forward pass computed.
    parts: OnceLock<Vec<Part>>,
}

/// What some sequences keep for the backward pass.
struct Part {
    first: usize,
    sequences: usize,
    /// The four gates and tanh of the cell, [steps, sequences, 5, hidden].
    gates: Vec<f32>,
    /// The cells from the initial one on, `[steps + 1, sequences, hidden]`.
    cells: Vec<f32>,
}

/// How the sequences are cut into parts.
#[derive(Clone, Copy)]
struct Sizes {
    steps: usize,
    batch: usize,
    hidden: usize,
    part: usize,
    /// The threads of a product.
    parallelism: Parallelism,
}

impl Sizes {
    fn new(inputs: &[usize]) -> Self {
        let (steps, batch, hidden) = (inputs[0], inputs[1], inputs[2] / 4);
        let (part, parallelism) = if 4 * hidden * hidden > CACHED {
            (batch, Parallelism::Rayon(0))
        } else {
            (batch.div_ceil(batch.div_ceil(PART)), Parallelism::None)
        };
        Self { steps, batch, hidden, part, parallelism }
    }

    /// The first sequence and the number of sequences of each part.
    fn parts(self) -> Vec<(usize, usize)> {
        let Self { batch, part, .. } = self;
        (0..batch).step_by(part).map(|first| (first, part.min(batch - first))).collect()
    }

    /// Sequences of a step that one thread computes.
    fn rows_at_a_time(self) -> usize {
        match self.parallelism {
            Parallelism::None => self.part,
            _ => 1,
        }
    }

    /// Copies the rows of a part, `[steps, sequences, width]`, to its sequences in `[.., batch, width]`.
    fn place(self, to: &mut [f32], from: &[f32], (first, sequences): (usize, usize), width: usize) {
        for (to, from) in to.chunks_exact_mut(self.batch * width).zip(from.chunks_exact(sequences * width)) {
            to[first * width..][..sequences * width].copy_from_slice(from);
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
        let sizes = Sizes::new(inputs_at.dims());
        let (inputs, weight, start) =
            (values(inputs, inputs_at)?, values(weight, weight_at)?, values(start, start_at)?);
        let Sizes { steps, batch, hidden, .. } = sizes;
        // The steps read the weight row by row.
        let transposed = transpose(weight, hidden);
        let (parts, hiddens): (Vec<_>, Vec<_>) =
            sizes.parts().into_par_iter().map(|part| forward(sizes, part, inputs, &transposed, start)).unzip();
        let mut output = vec![0.0; (steps + 1) * batch * hidden];
        let (to_hiddens, to_cell) = output.split_at_mut(steps * batch * hidden);
        for (part, hiddens) in parts.iter().zip(&hiddens) {
            let which = (part.first, part.sequences);
            let size = part.sequences * hidden;
            sizes.place(to_hiddens, &hiddens[size..], which, hidden);
            sizes.place(to_cell, &part.cells[steps * size..], which, hidden);
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
        let sizes = Sizes::new(inputs.dims());
        let Sizes { steps, batch, hidden, .. } = sizes;
        let Some(parts) = self.parts.get() else { candle_core::bail!("lstm: the forward pass has not run") };
        let found: Vec<_> = {
            let (upstream, weight) = (upstream.contiguous()?, weight.contiguous()?);
            let ((upstream, upstream_at), (weight, weight_at)) =
                (upstream.storage_and_layout(), weight.storage_and_layout());
            let (upstream, weight) = (of_cpu(&upstream, upstream_at)?, of_cpu(&weight, weight_at)?);
            parts.par_iter().map(|part| backward(sizes, part, upstream, weight)).collect()
        };
        let (mut sums, mut first) = (vec![0.0; steps * batch * 4 * hidden], vec![0.0; 2 * batch * hidden]);
        for (part, (of_sums, of_first)) in parts.iter().zip(&found) {
            let which = (part.first, part.sequences);
            sizes.place(&mut sums, of_sums, which, 4 * hidden);
            sizes.place(&mut first, of_first, which, hidden);
        }
        let device = inputs.device();
        let sums = Tensor::from_vec(sums, (steps, batch, 4 * hidden), device)?;
        let before = Tensor::cat(&[&start.detach().narrow(0, 0, 1)?, &output.detach().narrow(0, 0, steps - 1)?], 0)?;
        let by_weight = sums.flatten_to(1)?.t()?.matmul(&before.flatten_to(1)?)?;
        Ok((Some(sums), Some(by_weight), Some(Tensor::from_vec(first, (2, batch, hidden), device)?)))
    }
}

/// Takes some sequences through all steps: what the backward pass needs, and the hidden states [steps + 1, sequences,
/// hidden] from the initial ones on.
fn forward(
    sizes: Sizes,
    (first, sequences): (usize, usize),
    inputs: &[f32],
    weight: &[f32],
    start: &[f32],
) -> (Part, Vec<f32>) {
    let Sizes { steps, batch, hidden, parallelism, .. } = sizes;
    let size = sequences * hidden;
    let (mut hiddens, mut cells) = (vec![0.0; (steps + 1) * size], vec![0.0; (steps + 1) * size]);
    hiddens[..size].copy_from_slice(&start[first * hidden..][..size]);
    cells[..size].copy_from_slice(&start[(batch + first) * hidden..][..size]);
    let mut gates = vec![0.0; steps * sequences * 5 * hidden];
    for (step, gates) in gates.chunks_exact_mut(sequences * 5 * hidden).enumerate() {
        let inputs = &inputs[(step * batch + first) * 4 * hidden..][..sequences * 4 * hidden];
        for (gates, inputs) in gates.chunks_exact_mut(5 * hidden).zip(inputs.chunks_exact(4 * hidden)) {
            gates[..4 * hidden].copy_from_slice(inputs);
        }
        let (before, after) = hiddens[step * size..].split_at_mut(size);
        let into = Rows { values: gates, stride: 5 * hidden };
        add_product(into, (sequences, hidden, 4 * hidden), before, weight, parallelism);
        let (cells_before, cells_after) = cells[step * size..].split_at_mut(size);
        let cells_after = cells_after[..size].par_chunks_exact_mut(hidden);
        let states =
            cells_before.par_chunks_exact(hidden).zip(cells_after).zip(after[..size].par_chunks_exact_mut(hidden));
        let rows = gates.par_chunks_exact_mut(5 * hidden).zip(states).with_min_len(sizes.rows_at_a_time());
        rows.for_each(|(gates, ((before, cell), hidden))| activate(gates, before, cell, hidden));
    }
    (Part { first, sequences, gates, cells }, hiddens)
}

/// One step of one sequence, from the sums of its gates: they become the gates.
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

/// The gradients of the sums of the gates [steps, sequences, 4 hidden] and of the initial hidden states and cells
/// [2, sequences, hidden].
fn backward(sizes: Sizes, part: &Part, upstream: &[f32], weight: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let Sizes { steps, batch, hidden, parallelism, .. } = sizes;
    let Part { first, sequences, gates, cells } = part;
    let size = sequences * hidden;
    let upstream = |step: usize| &upstream[(step * batch + first) * hidden..][..size];
    let mut sums = vec![0.0; steps * sequences * 4 * hidden];
    // Gradients of the hidden states and cells after a step.
    let mut states = vec![0.0; 2 * size];
    let (back_hidden, back_cell) = states.split_at_mut(size);
    back_cell.copy_from_slice(upstream(steps));
    for step in (0..steps).rev() {
        let sums = &mut sums[step * sequences * 4 * hidden..][..sequences * 4 * hidden];
        let gates = &gates[step * sequences * 5 * hidden..][..sequences * 5 * hidden];
        let cells = &cells[step * size..][..size];
        back_hidden.iter_mut().zip(upstream(step)).for_each(|(back, upstream)| *back += upstream);
        let rows = sums.par_chunks_exact_mut(4 * hidden).zip(gates.par_chunks_exact(5 * hidden));
        let states = cells.par_chunks_exact(hidden).zip(back_hidden.par_chunks_exact(hidden));
        let rows = rows.zip(states).zip(back_cell.par_chunks_exact_mut(hidden)).with_min_len(sizes.rows_at_a_time());
        rows.for_each(|(((sums, gates), (before, hidden)), cell)| through_gates(sums, gates, before, hidden, cell));
        back_hidden.fill(0.0);
        let into = Rows { values: back_hidden, stride: hidden };
        add_product(into, (*sequences, 4 * hidden, hidden), sums, weight, parallelism);
    }
    (sums, states)
}

/// The gradients of the gates' sums in one step of one sequence, from the gradients of its hidden state and its cell.
/// The cell's gradient becomes the gradient of the cell before.
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

/// The logistic function. Like `tanh`, it has an absolute error of at most 1e-7.
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
struct Rows<'a> {
    values: &'a mut [f32],
    stride: usize,
}

/// `into[m, n] += lhs[m, k] rhs[k, n]`.
fn add_product(into: Rows, (m, k, n): (usize, usize, usize), lhs: &[f32], rhs: &[f32], parallelism: Parallelism) {
    let Rows { values, stride } = into;
    assert!(lhs.len() == m * k && rhs.len() == k * n && n <= stride && values.len() + stride >= m * stride + n);
    let (lhs, rhs) = (lhs.as_ptr(), rhs.as_ptr());
    let (stride, k_stride, n_stride) = (stride as isize, k as isize, n as isize);
    // SAFETY: the assertion checks that all elements lie within the slices and that the destination's rows do not
    // overlap; the destination is a unique borrow.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            values.as_mut_ptr(),
            1,
            stride,
            true,
            lhs,
            1,
            k_stride,
            rhs,
            1,
            n_stride,
            1.0f32,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

fn of_cpu<'a>(storage: &'a Storage, layout: &Layout) -> Result<&'a [f32]> {
    match storage {
        Storage::Cpu(storage) => values(storage, layout),
        _ => candle_core::bail!("lstm: expected tensors on the CPU"),
    }
}
