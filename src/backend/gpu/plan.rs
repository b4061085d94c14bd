//! The plan of a task on a GPU: the workspace of its chunks.

use candle_core::{DType, Tensor};

use super::chunks::{FIRST_IDS, ROW_ALIGN};
use super::columns::{product_dtype, LEAST_PADDED_ROWS};
use super::device::{Gpu, GpuKind, MEMORY_SHARE};
use super::device_scores::values_per_position;
use super::exponentials::tiles_per_row;
use crate::backend::logit_function::LogitFunction;
use crate::backend::objective::{LossTerms, TargetKind, Task};
use crate::backend::operands::{Operands, Precision, Sizes};
use crate::backend::plan::{Computation, Needs, Plan, Planned};
use crate::error::{Error, Result};

/// Makes the plan of a task, for operands in f16, bf16 or f32.
pub(in crate::backend) fn plan<G: Gpu>(
    gpu: &G,
    operands: &Operands,
    task: Task,
    budget: Option<usize>,
) -> Result<Planned> {
    let kind = gpu.kind();
    let operands = Operands { precision: precision(kind, operands, &task), ..operands.clone() };
    let sizes @ Sizes { components, context_dim, vocab, .. } = operands.sizes;
    let dtype = match product_dtype(&operands) {
        dtype @ (DType::F32 | DType::F16 | DType::BF16) => dtype,
        got => {
            let expected = format!("f16, bf16 or f32 on {}", kind.kernels);
            return Err(Error::DType { argument: "hidden", expected, got });
        }
    };
    let stride = vocab.next_multiple_of(ROW_ALIGN);
    let f32_size = DType::F32.size_in_bytes();
    let gradient_dtype = kind.gradient_dtype(dtype);
    let gradient = if gradient_dtype == DType::F32 { 0 } else { stride * gradient_dtype.size_in_bytes() };
    let products = (kind.product_bytes)(sizes, dtype);
    // With relative exponentials, a row has a scaled context and its gradient in f32.
    let relative = match kind.product_dtype(dtype) {
        DType::F32 => 0,
        half => (context_dim + 2 * kind.half_row_align) * (half.size_in_bytes() + f32_size),
    };
    let computation = computation(kind, &operands, &task)?;
    let logits = match computation {
        Computation::OnePass => stride.min(FIRST_IDS) + 2 * tiles_per_row(vocab),
        Computation::TwoPasses => stride,
    };
    // A row has its logits, their gradient in the dtype of the products, and at most ten f32 values.
    let row = logits * f32_size + gradient + relative + products.per_row + 10 * f32_size;
    // The numbers of all ids that a position holds besides its logits.
    let (id_rows, scores) = match task {
        Task::Scores { scores, .. } => {
            (usize::from(scores.need_all_ids), values_per_position(scores.candidates, components) * f32_size)
        }
        Task::TopK { .. } | Task::Visit => (1, 0),
        // The log-probabilities, a teacher's, and the derivatives; for gradients also these times a factor, and the
        // log-probabilities again.
        Task::LogProbTerms { needs_grad } => (if needs_grad.any() { 5 } else { 3 }, 0),
        _ => (usize::from(task.has_soft_targets()), 0),
    };
    let per_position = kind.allocation_factor * (components * row + id_rows * stride * f32_size + scores);
    let fixed = kind.allocation_factor * (vocab * f32_size + products.fixed);
    let logit_bytes = match computation {
        Computation::OnePass => DType::BF16.size_in_bytes(),
        Computation::TwoPasses => f32_size,
    };
    let rows = (kind.default_logit_bytes / (stride * logit_bytes)).max(kind.least_default_rows);
    let positions = rows.div_ceil(components);
    // A share of what is free would vary, and with it the chunks and the bits of a result.
    let most_bytes = gpu.memory_bytes().map_or(kind.most_default_bytes, |bytes| bytes / MEMORY_SHARE);
    let needs = Needs {
        per_position,
        fixed,
        per_thread: 0,
        default_budget: (fixed + positions * per_position).min(kind.allocation_factor * most_bytes),
        most_positions: usize::MAX,
        keeps_logits: true,
        computation,
        kernels: kind.kernels,
        threads: 1,
    };
    let plan = Plan::new(sizes.positions, components, needs, budget)?;
    Ok(Planned { operands, needs_grad: task.needs_grad(), plan })
}

/// Chooses the computation of a task: one pass, in which the first product writes exponentials and no logits, if the
/// exponentials of the ids are all that a loss needs of them, and if the contexts are narrow.
fn computation(kind: &GpuKind, operands: &Operands, task: &Task) -> Result<Computation> {
    let Task::Loss { terms, targets: TargetKind::Ids, needs_grad } = task else { return Ok(Computation::TwoPasses) };
    let is_aligned =
        |tensor: &Tensor| tensor.is_contiguous() && tensor.layout().start_offset().is_multiple_of(ROW_ALIGN);
    let sizes = operands.sizes;
    // With as many rows, operands whose rows are not aligned are copied.
    let rows = sizes.positions * sizes.components;
    let has_one_pass = needs_grad.any()
        && sizes.context_dim <= kind.most_one_pass_width
        && operands.precision == Precision::Full
        && operands.contexts.dtype() == DType::BF16
        && has_relative_exponentials(kind, DType::BF16, operands.logit_function, terms)
        && operands.adapter.is_none()
        && !task.has_soft_targets()
        && !terms.needs_correct
        && is_aligned(&operands.contexts)
        && is_aligned(operands.weight.tensor()?)
        && (rows >= LEAST_PADDED_ROWS || sizes.context_dim.is_multiple_of(ROW_ALIGN));
    Ok(if has_one_pass { Computation::OnePass } else { Computation::TwoPasses })
}

/// Returns whether a loss whose targets are ids needs of its logits only the exponentials, relative to a reference of
/// each row, from which the gradient follows by a factor for each row (`kernels/relative.h`).
pub(super) fn has_relative_exponentials(
    kind: &GpuKind,
    dtype: DType,
    function: LogitFunction,
    terms: &LossTerms,
) -> bool {
    kind.product_dtype(dtype) == DType::BF16 && function.is_identity() && terms.z_loss == 0.0
}

/// Returns the precision of the products of a task: bf16 if it is allowed, changes something, and the products are
/// worth the copies. A distribution that is drawn from is not rounded: how many positions there are does not matter.
fn precision(kind: &GpuKind, operands: &Operands, task: &Task) -> Precision {
    let is_served = matches!(task, Task::Loss { .. } | Task::LogProbTerms { .. } | Task::Scores { .. });
    let rows = operands.sizes.positions * operands.sizes.components;
    if operands.contexts.dtype() == DType::F32 && is_served && kind.rounds_products && rows >= LEAST_PADDED_ROWS {
        operands.precision
    } else {
        Precision::Full
    }
}
