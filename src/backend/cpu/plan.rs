//! The plan of a task: which computation serves it, and the workspace that this computation needs.

use candle_core::DType;

use super::memory::Workspace;
use super::one_pass::Format;
use super::products::multiplier::{Tiles, Vectors};
use super::served::Served;
use super::tiles::unit::TileUnit;
use super::vector::simd::Isa;
use super::{one_pass, two_pass};
use crate::backend::operands::{Operands, Precision, Sizes};
use crate::backend::plan::{default, Computation, Kernels, Needs, Plan};
use crate::backend::task::{ScoreTask, Task};
use crate::error::{Error, Result};

/// Maximum rows of a loss without gradients that inner products compute faster: in the kernels of `one_pass` a row is
/// one lane of a register.
const FEW_ROWS: usize = 4;

/// Rows of a chunk of decoding, at least.
const DECODING_ROWS: usize = 64;

/// Maximum number of the most probable ids that one pass collects of each row and segment of the vocabulary.
const MOST_TOP_K: usize = 64;

/// Two passes serve whatever needs every logit again once the log-sum-exps of all components are known: the mixture's
/// log-probabilities of all ids (label smoothing, log-probabilities, decoding). They are also faster for the loss alone of
/// a few rows. One pass serves all other losses and the most probable ids of one component, and only it knows the targets
/// of a sampled softmax.
pub(super) fn computation(task: &Task, sizes: Sizes) -> Computation {
    let rows = sizes.positions * sizes.components;
    match task {
        Task { own_targets: true, .. } => Computation::OnePass,
        Task { is_shard: true, argmax: true, .. } => Computation::TwoPasses,
        Task { top_k: Some(k), .. } if sizes.components == 1 && *k <= MOST_TOP_K => Computation::OnePass,
        Task { scores: Some(ScoreTask { of_listed: true, .. }), needs_grad, .. }
            if needs_grad.any() || rows > FEW_ROWS =>
        {
            Computation::OnePass
        }
        Task { all_ids: true, .. } | Task { soft_targets: true, .. } | Task { few_rows: true, .. } => {
            Computation::TwoPasses
        }
        Task { needs_grad, .. } if !needs_grad.any() && rows <= FEW_ROWS => Computation::TwoPasses,
        _ => Computation::OnePass,
    }
}

/// The products of the tile unit, where there is one, and the operands are bf16 or may be rounded to it.
fn tiles_of<T: Served>(operands: &Operands, task: &Task) -> Result<Option<T::Tiles>> {
    let isa = Isa::detected()?;
    let may_round = T::DTYPE == DType::BF16 || operands.precision == Precision::Bf16Products;
    // Decoding passes a decoder over few rows: vectors spend more on its transpose than they save.
    let serves = |unit: &TileUnit| may_round && (!task.few_rows || unit.kernels() == Kernels::Amx);
    let unit = TileUnit::detected()?.filter(serves);
    Ok(unit.and_then(|unit| T::tiles(Tiles { unit, isa })))
}

/// The plan of a task: for tiles, unless their operands leave too little of the budget.
pub(super) fn plan<T: Served>(operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan> {
    let plan = |tiles| plan_of::<T>(operands, task, budget, tiles);
    let tiles = tiles_of::<T>(operands, &task)?;
    match plan(tiles) {
        Err(Error::Workspace { .. }) if tiles.is_some() => plan(None),
        planned => planned,
    }
}

fn plan_of<T: Served>(operands: &Operands, task: Task, budget: Option<usize>, tiles: Option<T::Tiles>) -> Result<Plan> {
    let Sizes { positions, components, context_dim, .. } = operands.sizes;
    let (threads, isa) = (rayon::current_num_threads(), Isa::detected()?);
    let computation = computation(&task, operands.sizes);
    // In one pass only the decoder's gradient needs the exponentials again.
    let keeps_logits = task.needs_grad.decoder() || computation == Computation::TwoPasses;
    let Workspace { per_row, fixed, per_thread } = match (computation, tiles) {
        (Computation::OnePass, Some(tiles)) => one_pass::workspace(tiles, operands.sizes, &task),
        (Computation::OnePass, None) => one_pass::workspace::<T, _>(Vectors(isa), operands.sizes, &task),
        (Computation::TwoPasses, Some(tiles)) => two_pass::workspace::<T>(tiles, operands.sizes, task),
        (Computation::TwoPasses, None) => two_pass::workspace::<T>(Vectors(isa), operands.sizes, task),
    };
    let per_position = components * per_row;
    // Decoding accumulates no gradient, and so few rows already take longer than reading the decoder.
    let (rows, rounds) = (positions * components, <T::Tiles as Format<T>>::rounds_gradients());
    let enough_rows = match tiles {
        _ if task.few_rows => DECODING_ROWS,
        _ if task.top_k.is_some() && keeps_logits => default::CPU_ROWS_OF_RANKING,
        _ if computation == Computation::TwoPasses => default::CPU_ROWS,
        // The gradient of a single chunk is rounded at once, which saves its sum in f32. That is more memory than so
        // many exponentials take.
        Some(_) if rounds && task.needs_grad.weight && rows * size_of::<T>() <= context_dim * size_of::<T::Acc>() => {
            rows.max(default::CPU_ROWS_OF_TILES)
        }
        Some(_) => default::CPU_ROWS_OF_TILES,
        None => default::CPU_ROWS,
    };
    // The logits of a ranking are read once, from the cache if there are not too many.
    let least_bytes = if task.top_k.is_some() { 0 } else { default::CPU_BYTES };
    let kernels = match TileUnit::detected()? {
        Some(unit) if tiles.is_some() => unit.kernels(),
        _ => isa.kernels(),
    };
    let needs = Needs {
        per_position,
        fixed,
        per_thread,
        // The chunks of this budget do not depend on the number of threads.
        default_budget: fixed + threads * per_thread + least_bytes.max(enough_rows.div_ceil(components) * per_position),
        most_positions: if keeps_logits { usize::MAX } else { default::CPU_ROWS_WITHOUT_LOGITS / components },
        keeps_logits,
        computation,
        kernels,
        threads,
    };
    Plan::new(positions, components, needs, budget)
}
