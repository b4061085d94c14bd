//! The plan of a task on the CPU: the computation and the products that serve it, and the workspace that these need.

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

/// The most rows of a loss without gradients for which inner products are faster: in the kernels of `one_pass` a row is one
/// lane of a register.
const FEW_ROWS: usize = 4;

/// The least rows of a chunk of decoding for which the default budget has room.
const DECODING_ROWS: usize = 64;

/// The largest k for which one pass finds the k most probable ids, which it collects of each row and segment.
const MOST_TOP_K: usize = 64;

/// Chooses the computation of a task.
///
/// Two passes serve whatever needs every logit again once the log-sum-exps of all components are known: the mixture's
/// log-probabilities of all ids (label smoothing, log-probabilities, decoding). They are also faster for the loss alone of
/// a few rows. One pass serves all other losses and the most probable ids of one component, and only one pass knows the
/// targets of a sampled softmax.
pub(super) fn computation(task: &Task, sizes: Sizes) -> Computation {
    let rows = sizes.positions * sizes.components;
    match task {
        Task { has_own_targets: true, .. } => Computation::OnePass,
        Task { is_shard: true, needs_argmax: true, .. } => Computation::TwoPasses,
        Task { top_k: Some(k), .. } if sizes.components == 1 && *k <= MOST_TOP_K => Computation::OnePass,
        Task { scores: Some(ScoreTask { needs_listed_only: true, .. }), needs_grad, .. }
            if needs_grad.any() || rows > FEW_ROWS =>
        {
            Computation::OnePass
        }
        Task { needs_all_ids: true, .. } | Task { has_soft_targets: true, .. } | Task { is_decoding: true, .. } => {
            Computation::TwoPasses
        }
        Task { needs_grad, .. } if !needs_grad.any() && rows <= FEW_ROWS => Computation::TwoPasses,
        _ => Computation::OnePass,
    }
}

/// Returns the tile unit that computes the products of a task. It is `None` without such a unit, if the operands are not
/// bf16 and may not be rounded to it, and for decoding unless the unit is AMX.
fn choose_tiles<T: Served>(operands: &Operands, task: &Task) -> Result<Option<T::Tiles>> {
    let isa = Isa::detected()?;
    let may_round = T::DTYPE == DType::BF16 || operands.precision == Precision::Bf16Products;
    // Decoding passes a decoder over few rows: vectors spend more on its transpose than they save.
    let serves = |unit: &TileUnit| may_round && (!task.is_decoding || unit.kernels() == Kernels::Amx);
    let unit = TileUnit::detected()?.filter(serves);
    Ok(unit.and_then(|unit| T::tiles(Tiles { unit, isa })))
}

/// Makes the plan of a task: for tiles, unless their operands leave too little of the budget.
pub(super) fn plan<T: Served>(operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan> {
    let plan = |tiles| plan_products::<T>(operands, task, budget, tiles);
    let tiles = choose_tiles::<T>(operands, &task)?;
    match plan(tiles) {
        Err(Error::Workspace { .. }) if tiles.is_some() => plan(None),
        planned => planned,
    }
}

/// Makes the plan of a task for the products of `tiles`, or of vectors.
fn plan_products<T: Served>(
    operands: &Operands,
    task: Task,
    budget: Option<usize>,
    tiles: Option<T::Tiles>,
) -> Result<Plan> {
    let Sizes { positions, components, .. } = operands.sizes;
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
    let chunk_rows = match tiles {
        // Decoding accumulates no gradient, and so few rows already take longer than reading the decoder.
        _ if task.is_decoding => DECODING_ROWS,
        _ if task.top_k.is_some() && keeps_logits => default::CPU_ROWS_OF_RANKING,
        Some(_) if computation == Computation::OnePass => tile_rows::<T>(operands.sizes, &task),
        _ => default::CPU_ROWS,
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
        default_budget: fixed + threads * per_thread + least_bytes.max(chunk_rows.div_ceil(components) * per_position),
        most_positions: if keeps_logits { usize::MAX } else { default::CPU_ROWS_WITHOUT_LOGITS / components },
        keeps_logits,
        computation,
        kernels,
        threads,
    };
    Plan::new(positions, components, needs, budget)
}

/// Chooses the rows of a chunk that one pass computes on a tile unit.
fn tile_rows<T: Served>(sizes: Sizes, task: &Task) -> usize {
    let rows = sizes.positions * sizes.components;
    // The gradient of a single chunk is rounded at once, which saves its sum in f32. That is more memory than so many
    // exponentials take.
    let is_sum_larger = rows * size_of::<T>() <= sizes.context_dim * size_of::<T::Acc>();
    if <T::Tiles as Format<T>>::rounds_gradients() && task.needs_grad.weight && is_sum_larger {
        rows.max(default::CPU_ROWS_OF_TILES)
    } else {
        default::CPU_ROWS_OF_TILES
    }
}
