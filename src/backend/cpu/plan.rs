//! The plan of a task on the CPU: the computation and the products that serve it, and the workspace that these need.

use candle_core::DType;

use super::inputs::Inputs;
use super::memory::Workspace;
use super::objective::results::BufferedGradients;
use super::one_pass::{self, Format, OnePass, OnePassRequest, Pass};
use super::operands::dtype::Accumulator;
use super::products::multiplier::{Multiplier, Tiles, Vectors};
use super::tiles::product::Parts;
use super::tiles::unit::TileUnit;
use super::two_pass::{self, FirstProduct, LogitTiles};
use super::vector::simd::Isa;
use crate::backend::objective::{ScoreTask, TargetKind, Task};
use crate::backend::operands::{Operands, Precision, Sizes};
use crate::backend::plan::{Computation, Kernels, Needs, Plan, Planned};
use crate::error::{Error, OptionName, Result};

/// The most rows of a loss without gradients for which inner products are faster: in the kernels of `one_pass` a row is
/// one lane of a register.
const FEW_ROWS: usize = 4;

// The default budgets are in bytes or rows of logits, and chosen by measurement (`docs/measurements.md`).

/// The least rows of a chunk of decoding for which the default budget has room.
const DECODING_ROWS: usize = 64;
/// The least bytes of a chunk's rows for which the default budget has room.
const LEAST_BYTES: usize = 32 << 20;
/// The rows of a chunk for which the default budget has room. Each chunk reads the whole decoder and adds to its whole
/// gradient, which is costly with fewer rows.
const CHUNK_ROWS: usize = 480;
/// The rows of a chunk that ranks ids and has no gradient: chunks of half as many rows take hardly longer.
const RANKING_ROWS: usize = 240;
/// The rows of a chunk on a tile unit, of operands in one part, which it multiplies faster than memory provides the
/// gradient. Their exponentials take half the bytes.
const TILE_ROWS: usize = 768;
/// The least rows of a chunk whose operands a tile unit multiplies in parts: fewer do not save what it takes to split
/// the decoder. Chunks of equal size have more if there are more than [`CHUNK_ROWS`] rows.
const LEAST_SPLIT_ROWS: usize = CHUNK_ROWS / 2;
/// The most rows of a chunk that keeps no logits: its contexts stay in a cache while the decoder passes.
const ROWS_WITHOUT_LOGITS: usize = 768;

/// The largest k for which one pass finds the k most probable ids, which it collects of each row and segment.
const MOST_TOP_K: usize = 64;

/// Chooses the computation of a task.
///
/// Two passes serve whatever needs every logit again once the log-sum-exps of all components are known: the mixture's
/// log-probabilities of all ids (label smoothing, log-probabilities, decoding). They are also faster for the loss alone
/// of a few rows. One pass serves all other losses and the most probable ids of one component, and only one pass knows
/// the targets of a sampled softmax.
pub(super) fn computation(task: &Task, sizes: Sizes) -> Computation {
    let rows = sizes.positions * sizes.components;
    let needs_grad = task.needs_grad().any();
    match task {
        Task::Loss { targets: TargetKind::Own, .. } => Computation::OnePass,
        Task::Loss { targets: TargetKind::SharedIds, terms, .. } if terms.needs_correct => Computation::TwoPasses,
        Task::TopK { k } if sizes.components == 1 && *k <= MOST_TOP_K => Computation::OnePass,
        Task::Scores { scores: ScoreTask { need_listed_only: true, .. }, .. } if needs_grad || rows > FEW_ROWS => {
            Computation::OnePass
        }
        Task::Loss { .. } if !task.has_soft_targets() && (needs_grad || rows > FEW_ROWS) => Computation::OnePass,
        _ => Computation::TwoPasses,
    }
}

/// Returns the task of finding the `k` most probable ids of each position.
pub(super) fn ranking_task(sizes: Sizes, k: usize) -> Task {
    /// The most rows for which chunks of a few rows are faster.
    const MOST_VISITED_ROWS: usize = 64;
    if sizes.positions * sizes.components <= MOST_VISITED_ROWS {
        Task::Visit
    } else {
        Task::TopK { k }
    }
}

/// Returns the tile unit that computes the products of a task; `None` without such a unit, or if vectors are faster.
fn choose_tiles<F: Served>(operands: &Operands, task: &Task) -> Result<Option<F::Tiles>> {
    let (isa, dtype, parts) = (Isa::detected()?, operands.contexts.dtype(), parts(operands));
    let serves = |unit: &TileUnit| match (parts, task) {
        // Decoding passes a decoder over few rows: vectors spend more on its transpose than they save.
        (Parts::One, Task::Visit) => unit.kernels() == Kernels::Amx,
        (Parts::One, _) => true,
        (Parts::Three, Task::Loss { .. } | Task::Scores { .. }) => {
            let is_one_pass = computation(task, operands.sizes) == Computation::OnePass;
            unit.kernels() == Kernels::Amx && is_one_pass
        }
        (Parts::Three, _) => false,
    };
    let unit = TileUnit::detected()?.filter(serves);
    Ok(unit.and_then(|unit| F::tiles(Tiles { unit, isa, dtype, parts })))
}

/// Returns how a tile unit represents operands: those that are not bf16, and may not be rounded to it, are split.
fn parts(operands: &Operands) -> Parts {
    if operands.contexts.dtype() == DType::BF16 || operands.precision == Precision::Bf16Products {
        Parts::One
    } else {
        Parts::Three
    }
}

/// Makes the plan of a task: for tiles, unless their operands leave too little of the budget, or chunks of too few rows.
pub(super) fn plan<F: Served>(operands: &Operands, task: &Task, budget: Option<usize>) -> Result<Plan> {
    if operands.weight.is_quantised() && operands.precision != Precision::Full {
        return Err(Error::Unsupported { option: OptionName::Precision, head: "a quantised decoder" });
    }
    let plan = |tiles| plan_products::<F>(operands, task, budget, tiles);
    let tiles = choose_tiles::<F>(operands, task)?;
    match plan(tiles) {
        Err(Error::Workspace { .. }) if tiles.is_some() => plan(None),
        Ok(tiled) if tiles.is_some() && parts(operands) == Parts::Three && tiled.rows_per_chunk < LEAST_SPLIT_ROWS => {
            plan(None).or(Ok(tiled))
        }
        planned => planned,
    }
}

/// Makes the plan of a task for the products of `tiles`, or of vectors.
fn plan_products<F: Served>(
    operands: &Operands,
    task: &Task,
    budget: Option<usize>,
    tiles: Option<F::Tiles>,
) -> Result<Plan> {
    let Sizes { positions, components, .. } = operands.sizes;
    let (threads, isa) = (rayon::current_num_threads(), Isa::detected()?);
    let computation = computation(task, operands.sizes);
    // In one pass only the decoder's gradient needs the exponentials again.
    let keeps_logits = task.needs_grad().decoder() || computation == Computation::TwoPasses;
    let vectors = Vectors { isa, copies_rows: operands.copies_rows() };
    let Workspace { per_row, fixed, per_thread } = match (computation, tiles) {
        (Computation::OnePass, Some(tiles)) => one_pass::workspace(tiles, operands.sizes, task),
        (Computation::OnePass, None) => one_pass::workspace::<F, _>(vectors, operands.sizes, task),
        (Computation::TwoPasses, Some(tiles)) => two_pass::workspace::<F>(tiles, operands.sizes, task),
        (Computation::TwoPasses, None) => two_pass::workspace::<F>(vectors, operands.sizes, task),
    };
    let per_position = components * per_row;
    let is_ranking = matches!(task, Task::TopK { .. });
    let chunk_rows = match tiles {
        // Decoding accumulates no gradient, and so few rows already take longer than reading the decoder.
        _ if matches!(task, Task::Visit) => DECODING_ROWS,
        _ if is_ranking && keeps_logits => RANKING_ROWS,
        Some(_) if computation == Computation::OnePass && parts(operands) == Parts::One => tile_rows(operands, task),
        _ => CHUNK_ROWS,
    };
    // The logits of a ranking are read once, from the cache if there are not too many.
    let least_bytes = if is_ranking { 0 } else { LEAST_BYTES };
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
        most_positions: if keeps_logits { usize::MAX } else { ROWS_WITHOUT_LOGITS / components },
        keeps_logits,
        computation,
        kernels,
        threads,
    };
    Plan::new(positions, components, needs, budget)
}

/// Chooses the rows of a chunk that one pass computes on a tile unit.
fn tile_rows(operands: &Operands, task: &Task) -> usize {
    let (sizes, dtype) = (operands.sizes, operands.contexts.dtype());
    let rows = sizes.positions * sizes.components;
    // The gradient of a single chunk is rounded at once, which saves its sum in f32. That is more memory than so many
    // exponentials take.
    let is_sum_larger = rows * dtype.size_in_bytes() <= sizes.context_dim * size_of::<f32>();
    if dtype == DType::BF16 && task.needs_grad().weight && is_sum_larger {
        rows.max(TILE_ROWS)
    } else {
        TILE_ROWS
    }
}

/// A multiplier that serves one pass and two passes.
pub(crate) trait Products<F: Accumulator>: Format<F> + FirstProduct<F> + 'static {}
impl<F: Accumulator, X: Format<F> + FirstProduct<F> + 'static> Products<F> for X {}

/// A type of computation on vectors, and perhaps on a tile unit.
pub(crate) trait Served: Accumulator {
    /// The multiplier on a tile unit. For f64, which no unit multiplies, it is the multiplier on vectors.
    type Tiles: Products<Self>;

    /// Returns the multiplier on this tile unit; `None` for f64.
    fn tiles(tiles: Tiles) -> Option<Self::Tiles>;
}

impl Served for f32 {
    type Tiles = Tiles;

    fn tiles(tiles: Tiles) -> Option<Tiles> {
        Some(tiles)
    }
}

impl Served for f64 {
    type Tiles = Vectors;

    fn tiles(_: Tiles) -> Option<Vectors> {
        None
    }
}

/// Returns what the plan is made for: a tile unit, or vectors.
pub(super) fn multiplier(Planned { operands, plan, .. }: &Planned) -> Result<Multiplier> {
    let (isa, dtype, parts) = (Isa::detected()?, operands.contexts.dtype(), parts(operands));
    // Two passes multiply one part alone.
    let serves_computation = parts == Parts::One || plan.computation == Computation::OnePass;
    let has_tiles = Kernels::WITH_TILES.contains(&plan.kernels) && serves_computation;
    Ok(match TileUnit::detected()?.filter(|_| has_tiles) {
        Some(unit) => Tiles { unit, isa, dtype, parts }.into(),
        None => Vectors { isa, copies_rows: operands.copies_rows() }.into(),
    })
}

/// Evaluates `$compute` with `$products` as the products of a multiplier.
macro_rules! with_products {
    ($F:ident, $multiplier:expr, $products:ident => $compute:expr) => {
        match $multiplier.tiles.and_then($F::tiles) {
            Some($products) => $compute,
            None => {
                let $products = $multiplier.vectors;
                $compute
            }
        }
    };
}

/// Returns the first product in two passes.
pub(super) fn logit_tiles<F: Served>(multiplier: Multiplier) -> Box<dyn LogitTiles<F>> {
    with_products!(F, multiplier, products => Box::new(products))
}

/// Makes the state of one pass.
pub(super) fn one_pass<'a, F: Served>(
    multiplier: Multiplier,
    inputs: Inputs<'a, F>,
    request: OnePassRequest<'a, F>,
    gradients: BufferedGradients<F>,
    planned: &Planned,
) -> Box<dyn Pass<'a, F> + 'a> {
    with_products!(F, multiplier, products => Box::new(OnePass::new(products, inputs, request, gradients, planned)))
}
