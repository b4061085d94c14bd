//! One pass and two passes agree on every loss that both can compute, within the workspace of their plan and with any
//! number of threads. Tiles agree with vectors.

mod argmax;
mod scores;

use candle_core::{DType, Device, Tensor};
use rand::{rngs::StdRng, Rng, SeedableRng};

use super::inputs::Inputs;
use super::log_probs::log_probs;
use super::loss::loss;
use super::objective::results::{BufferedGradients, WeightBuffer};
use super::objective::targets::Targets;
use super::one_pass::{OnePass, OnePassRequest};
use super::operands::dtype::with_accumulator;
use super::plan::{computation, multiplier, Served};
use super::products::multiplier::{Tiles, Vectors};
use super::tiles::product::Parts;
use super::tiles::unit::TileUnit;
use super::vector::simd::Isa;

use crate::backend::cpu;
use crate::backend::logit_function::LogitFunction::{self, Identity, Sigsoftmax, Softcap};
use crate::backend::objective::{GradScale, LossResults, LossTerms, Objective, TargetLoss, Task};
use crate::backend::operands::{NeedsGrad, Operands, Precision, Sizes};
use crate::backend::plan::{Computation, Plan, Planned};
use crate::backend::weight::Weight;
use crate::error::Result;

const ALL: NeedsGrad = NeedsGrad { contexts: true, log_priors: true, weight: true, adapter: false, bias: true };

/// A mixture whose logits rise by about `slope` from the first id to the last.
#[derive(Clone, Copy)]
struct Case {
    sizes: Sizes,
    /// The number of the decoder's columns that are an adapter's.
    rank: usize,
    slope: f64,
    dtype: DType,
    transposed: bool,
    function: LogitFunction,
    terms: LossTerms,
    needs_grad: NeedsGrad,
    /// The budget of the workspace, as a multiple of the least.
    budget: Option<usize>,
}

impl Case {
    fn new(positions: usize, components: usize, context_dim: usize, vocab: usize) -> Self {
        Case {
            sizes: Sizes { positions, components, context_dim, vocab },
            rank: 0,
            slope: 0.0,
            dtype: DType::F32,
            transposed: false,
            function: Identity,
            terms: LossTerms::default(),
            needs_grad: ALL,
            budget: None,
        }
    }

    /// Draws the operands, and the targets of a loss with some ignored positions.
    fn operands(&self) -> Result<(Operands, Objective)> {
        let Sizes { positions, components, context_dim, vocab } = self.sizes;
        let mut rng = StdRng::seed_from_u64(7);
        let mut tensor = |shape: &[usize], bound: f64| -> Result<Tensor> {
            let values = (0..shape.iter().product()).map(|_| bound * (2.0 * rng.random::<f64>() - 1.0)).collect();
            Ok(Tensor::from_vec::<_, f64>(values, shape, &Device::Cpu)?)
        };
        let accumulation = if self.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let contexts = tensor(&[positions, components, context_dim], 1.0)?.to_dtype(self.dtype)?;
        let bound = 2.0 / (context_dim as f64).sqrt();
        let decoder = tensor(&[vocab, context_dim], bound)?.to_dtype(self.dtype)?;
        let d = context_dim - self.rank;
        let weight = decoder.narrow(1, 0, d)?.contiguous()?;
        let adapter = if self.rank > 0 { Some(decoder.narrow(1, d, self.rank)?.contiguous()?) } else { None };
        let weight = if self.transposed { weight.t()?.contiguous()?.t()? } else { weight };
        let ramp: Vec<f64> = (0..vocab).map(|id| self.slope * id as f64 / vocab as f64).collect();
        let bias = (tensor(&[vocab], 0.5)? + Tensor::from_vec(ramp, vocab, &Device::Cpu)?)?.to_dtype(accumulation)?;
        let log_priors = tensor(&[positions, components], 3.0)?.to_dtype(accumulation)?;
        let weights: Vec<f64> = (0..positions).map(|t| [1.0, 0.5, 0.0, 2.0][t % 4]).collect();
        let targets: Vec<i64> =
            (0..positions).map(|t| if t % 5 == 3 { -100 } else { (t * 37 % vocab) as i64 }).collect();
        let loss = TargetLoss {
            targets: Tensor::from_vec(targets, positions, &Device::Cpu)?,
            ignore_index: Some(-100),
            position_weights: Some(Tensor::from_vec(weights, positions, &Device::Cpu)?.to_dtype(accumulation)?),
            class_weights: None,
            terms: self.terms,
            scale: GradScale::OneOverCount,
            shard: None,
            own_shifts: None,
            so_far: None,
        };
        let (logit_scale, logit_function) = (0.8, self.function);
        let operands = Operands {
            sizes: self.sizes,
            contexts,
            source: None,
            log_priors: Some(log_priors),
            weight: Weight::Dense(weight),
            adapter,
            bias: Some(bias),
            logit_scale,
            logit_function,
            precision: Precision::Full,
        };
        Ok((operands, Objective::Targets(loss)))
    }

    /// Makes the plan of the case's loss.
    fn plan(&self, operands: &Operands, objective: &Objective) -> Result<Planned> {
        let task = objective.task(operands, self.needs_grad)?;
        let many_rows = Sizes { positions: 1000, ..operands.sizes };
        assert_eq!(computation(&task, many_rows), Computation::OnePass);
        let budget = self.budget.map(|factor| match cpu::plan(operands, task, Some(0)) {
            Err(crate::Error::Workspace { least, .. }) => factor * least,
            other => panic!("a workspace of 0 bytes was accepted: {other:?}"),
        });
        cpu::plan(operands, task, budget)
    }

    /// Computes the loss by one computation.
    fn run<F: Served>(&self, computation: Computation) -> Result<LossResults> {
        let (operands, objective) = self.operands()?;
        let planned = with_computation(self.plan(&operands, &objective)?, computation);
        loss::<F>(multiplier(&planned)?, &planned, &objective)
    }

    /// Checks that both computations agree.
    fn check(&self) -> Result<()> {
        let found = |computation| with_accumulator!(self.dtype, F => self.run::<F>(computation));
        let (one, two) = (flat(&found(Computation::OnePass)?)?, flat(&found(Computation::TwoPasses)?)?);
        let (tolerance, epsilon) = if self.dtype == DType::F64 { (1e-12, f64::EPSILON) } else { (1e-5, 1.2e-7) };
        // The relative error of an exponential is the absolute error of its logit.
        let tolerance = tolerance + 2.0 * self.slope.abs() * epsilon;
        let has_tiles = self.dtype == DType::BF16 && TileUnit::detected()?.is_some();
        let gradients = if has_tiles { TILE_TOLERANCE } else { tolerance };
        self.compare(one, two, Tolerances { losses: tolerance, gradients });
        Ok(())
    }

    /// Checks that the products of a tile unit, or of its emulation, agree with products of vectors for operands of
    /// three parts.
    fn check_split_tiles(&self) -> Result<()> {
        let (operands, objective) = self.operands()?;
        let isa = Isa::detected()?;
        let tolerance = 1e-5 + 2.0 * self.slope.abs() * 1.2e-7;
        let vectors = Vectors { isa, copies_rows: operands.copies_rows() }.into();
        let planned = with_computation(self.plan(&operands, &objective)?, Computation::OnePass);
        let expected = flat(&loss::<f32>(vectors, &planned, &objective)?)?;
        for unit in TileUnit::available(isa).into_iter().chain([TileUnit::Emulated]) {
            let tiles = Tiles { unit, isa, dtype: self.dtype, parts: Parts::Three }.into();
            let found = flat(&loss::<f32>(tiles, &planned, &objective)?)?;
            self.compare(found, expected.clone(), Tolerances { losses: tolerance, gradients: tolerance });
        }
        Ok(())
    }

    /// Compares the losses and gradients of two computations.
    fn compare(&self, one: Results, two: Results, tolerances: Tolerances) {
        for ((name, one), (_, two)) in one.into_iter().zip(two) {
            let is_loss = matches!(name, "nll" | "objective" | "log_priors");
            let tolerance = match name {
                _ if is_loss => tolerances.losses,
                // One of the two may be rounded at once.
                "weight" if self.dtype == DType::BF16 => tolerances.gradients.max(TILE_TOLERANCE),
                _ => tolerances.gradients,
            };
            let largest = two.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
            for (i, (one, two)) in one.iter().zip(&two).enumerate() {
                let error = (one - two).abs() / largest.max(1e-30);
                assert!(error < tolerance, "{name}[{i}] of {:?} {:?}: {one} {two}", self.sizes, self.dtype);
            }
        }
    }

    /// Checks that the products of a tile unit, or of its emulation, agree with products of vectors, of operands in
    /// three parts and of operands that bf16 represents exactly.
    fn check_tiles(&self) -> Result<()> {
        if self.dtype == DType::F32 {
            self.check_split_tiles()?;
        }
        let (mut operands, objective) = self.operands()?;
        let represented = |tensor: &Tensor| tensor.to_dtype(DType::BF16)?.to_dtype(self.dtype);
        operands.contexts = represented(&operands.contexts)?;
        let Some((weight, is_transposed)) = operands.weight.stored()? else { return Ok(()) };
        let weight = represented(&weight)?;
        operands.weight = Weight::Dense(if is_transposed { weight.t()? } else { weight });
        operands.adapter = operands.adapter.as_ref().map(represented).transpose()?;
        let isa = Isa::detected()?;
        let tolerance = 1e-5 + 2.0 * self.slope.abs() * 1.2e-7;
        for unit in TileUnit::available(isa).into_iter().chain([TileUnit::Emulated]) {
            let tiles = Tiles { unit, isa, dtype: self.dtype, parts: Parts::One }.into();
            let vectors = Vectors { isa, copies_rows: operands.copies_rows() }.into();
            let computations = [(Computation::OnePass, TILE_TOLERANCE), (Computation::TwoPasses, tolerance)];
            for (computation, gradients) in computations {
                let planned = with_computation(self.plan(&operands, &objective)?, computation);
                let expected = loss::<f32>(vectors, &planned, &objective)?;
                let found = loss::<f32>(tiles, &planned, &objective)?;
                self.compare(flat(&found)?, flat(&expected)?, Tolerances { losses: tolerance, gradients });
            }
            let planned = cpu::plan(&operands, Task::LogProbs { needs_grad: NeedsGrad::default() }, None)?;
            let expected = log_probs::<f32, f32>(vectors, &planned)?;
            let found = log_probs::<f32, f32>(tiles, &planned)?;
            let tolerances = Tolerances { losses: tolerance, gradients: tolerance };
            self.compare(vec![("nll", values(&found)?)], vec![("nll", values(&expected)?)], tolerances);
        }
        Ok(())
    }
}

/// The largest error of a gradient that is rounded to bf16, or whose operands are, relative to the largest gradient.
const TILE_TOLERANCE: f64 = 4e-3;

/// The largest errors relative to the largest number of each result.
#[derive(Clone, Copy)]
struct Tolerances {
    /// The tolerance of losses and of the log-priors' gradients.
    losses: f64,
    /// The tolerance of the other gradients.
    gradients: f64,
}

/// The numbers of each result, by its name.
type Results = Vec<(&'static str, Vec<f64>)>;

/// Returns the elements of a tensor in f64.
fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

/// Returns the results of a loss, by name.
fn flat(results: &LossResults) -> Result<Results> {
    let LossResults { nll, objective, gradients, .. } = results;
    let gradients = [
        ("contexts", &gradients.contexts),
        ("log_priors", &gradients.log_priors),
        ("weight", &gradients.weight),
        ("adapter", &gradients.adapter),
        ("bias", &gradients.bias),
    ];
    let gradients = gradients.into_iter().filter_map(|(name, gradient)| Some((name, gradient.as_ref()?)));
    let all = [("nll", nll), ("objective", objective)].into_iter().chain(gradients);
    all.map(|(name, tensor)| Ok((name, values(tensor)?))).collect()
}

#[test]
fn both_computations_agree_at_odd_sizes() -> Result<()> {
    for (positions, components, context_dim, vocab) in
        [(1, 1, 1, 1), (2, 1, 3, 9), (7, 3, 5, 257), (40, 5, 33, 1000), (11, 15, 330, 1700), (130, 1, 17, 3001)]
    {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            for (transposed, needs_grad) in [(false, ALL), (true, ALL), (true, NeedsGrad::default())] {
                Case { dtype, transposed, needs_grad, ..Case::new(positions, components, context_dim, vocab) }
                    .check()?;
            }
        }
    }
    Ok(())
}

#[test]
fn both_computations_agree_on_groups_of_tiles() -> Result<()> {
    // The third product takes several tiles at a time where there are many, whose rows are wide.
    for dtype in [DType::F32, DType::BF16] {
        Case { dtype, ..Case::new(3, 1, 2000, 5501) }.check()?;
    }
    Ok(())
}

#[test]
fn both_computations_agree_whatever_the_order_of_the_logits() -> Result<()> {
    // Offsets move in many tiles, or whole segments are negligible.
    for slope in [-400.0, -60.0, 60.0, 400.0] {
        for (dtype, needs_grad) in [(DType::F32, ALL), (DType::F64, ALL), (DType::F32, NeedsGrad::default())] {
            Case { slope, dtype, needs_grad, ..Case::new(30, 4, 20, 2000) }.check()?;
        }
        // Wide contexts, where the third product computes several tiles at a time, whose offsets may differ.
        Case { slope, ..Case::new(10, 4, 1500, 9000) }.check()?;
    }
    Ok(())
}

/// Functions of the logits with terms of a loss.
fn functions_and_terms() -> [(LogitFunction, LossTerms); 5] {
    let z_loss = LossTerms { z_loss: 0.01, ..LossTerms::default() };
    [
        (Softcap(2.0), LossTerms::default()),
        (Identity, z_loss),
        (Softcap(30.0), z_loss),
        (Sigsoftmax, LossTerms::default()),
        (Sigsoftmax, z_loss),
    ]
}

/// The gradient of one operand alone.
fn one_gradient() -> [NeedsGrad; 4] {
    let none = NeedsGrad::default();
    [
        NeedsGrad { contexts: true, ..none },
        NeedsGrad { log_priors: true, ..none },
        NeedsGrad { weight: true, ..none },
        NeedsGrad { bias: true, ..none },
    ]
}

#[test]
fn both_computations_agree_with_options() -> Result<()> {
    for (function, terms) in functions_and_terms() {
        Case { function, terms, slope: 20.0, ..Case::new(30, 4, 20, 1200) }.check()?;
    }
    for needs_grad in one_gradient().into_iter().chain([NeedsGrad::default()]) {
        Case { needs_grad, ..Case::new(30, 4, 20, 1200) }.check()?;
    }
    for budget in [1, 2, 5] {
        for needs_grad in [ALL, NeedsGrad::default()] {
            Case { budget: Some(budget), needs_grad, ..Case::new(61, 3, 20, 900) }.check()?;
        }
    }
    Ok(())
}

#[test]
fn both_computations_agree_on_adapters() -> Result<()> {
    let none = NeedsGrad::default();
    let adapter = NeedsGrad { adapter: true, ..none };
    for (positions, d, rank, vocab) in [(1, 3, 1, 5), (30, 33, 16, 1200), (70, 64, 5, 700), (9, 600, 50, 333)] {
        for needs_grad in [NeedsGrad { adapter: true, ..ALL }, NeedsGrad { contexts: true, ..adapter }, adapter, none] {
            let case = Case { rank, needs_grad, slope: 20.0, ..Case::new(positions, 3, d + rank, vocab) };
            case.check()?;
            Case { transposed: true, budget: Some(2), ..case }.check()?;
            Case { dtype: DType::BF16, ..case }.check()?;
        }
    }
    Ok(())
}

#[test]
fn tiles_agree_with_vectors() -> Result<()> {
    for (positions, components, context_dim, vocab) in
        [(1, 1, 1, 1), (2, 1, 3, 9), (7, 3, 5, 257), (13, 5, 33, 600), (11, 15, 130, 700), (70, 1, 450, 300)]
    {
        for (transposed, needs_grad) in [(false, ALL), (true, ALL), (true, NeedsGrad::default())] {
            let case = Case { transposed, needs_grad, ..Case::new(positions, components, context_dim, vocab) };
            case.check_tiles()?;
            Case { dtype: DType::BF16, ..case }.check_tiles()?;
        }
    }
    Ok(())
}

#[test]
fn tiles_agree_with_vectors_with_options() -> Result<()> {
    let case = Case::new(17, 4, 20, 700);
    for slope in [-400.0, -60.0, 60.0, 400.0] {
        Case { slope, ..case }.check_tiles()?;
    }
    for (function, terms) in functions_and_terms() {
        Case { function, terms, slope: 20.0, ..case }.check_tiles()?;
    }
    for needs_grad in one_gradient() {
        Case { needs_grad, ..case }.check_tiles()?;
    }
    for (d, rank) in [(3, 1), (33, 16), (32, 32), (64, 5)] {
        for needs_grad in [NeedsGrad { adapter: true, ..ALL }, NeedsGrad { adapter: true, ..NeedsGrad::default() }] {
            let case = Case { rank, needs_grad, ..Case::new(9, 3, d + rank, 300) };
            case.check_tiles()?;
            Case { transposed: true, budget: Some(2), ..case }.check_tiles()?;
        }
    }
    Ok(())
}

/// An adapter adds columns to the decoder. The same columns give the same results as a part of the weight.
#[test]
fn an_adapter_equals_columns_of_the_weight() -> Result<()> {
    let needs_grad = NeedsGrad { adapter: true, ..ALL };
    for (positions, rank) in [(1, 2), (3, 1), (40, 16)] {
        for computation in [Computation::OnePass, Computation::TwoPasses] {
            let case = Case { rank, needs_grad, dtype: DType::F64, ..Case::new(positions, 2, 20 + rank, 300) };
            let found = case.run::<f64>(computation)?;
            let whole = Case { rank: 0, needs_grad: ALL, ..case }.run::<f64>(computation)?;
            let parts = [found.gradients.weight, found.gradients.adapter];
            let joined = Tensor::cat(&parts.into_iter().flatten().collect::<Vec<_>>(), 1)?;
            let pairs = [
                (Some(found.nll), Some(whole.nll)),
                (found.gradients.contexts, whole.gradients.contexts),
                (Some(joined), whole.gradients.weight),
            ];
            for (found, whole) in pairs {
                let (Some(found), Some(whole)) = (found, whole) else { panic!("a gradient is missing") };
                assert_eq!(found.dims(), whole.dims());
                let largest = (found - whole)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>()?;
                assert!(largest < 1e-14, "{largest}");
            }
        }
    }
    Ok(())
}

/// Returns the plan with another computation.
fn with_computation(planned: Planned, computation: Computation) -> Planned {
    Planned { plan: Plan { computation, ..planned.plan }, ..planned }
}

/// Runs `f` in a pool of so many threads.
fn in_pool<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads").install(f)
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() -> Result<()> {
    let with_threads = |threads: usize, needs_grad: NeedsGrad| {
        in_pool(threads, || {
            let (operands, objective) = Case::new(800, 15, 24, 1500).operands()?;
            let planned = cpu::plan(&operands, objective.task(&operands, needs_grad)?, None)?;
            assert!(planned.plan.chunks().count() > 1, "{}", planned.plan);
            flat(&cpu::loss(&planned, &objective)?)
        })
    };
    for needs_grad in [ALL, NeedsGrad::default()] {
        let one = with_threads(1, needs_grad)?;
        for threads in [2, 7, 16] {
            assert!(with_threads(threads, needs_grad)? == one, "{threads} threads");
        }
    }
    Ok(())
}

/// Two passes cut the second product's rows by the number of threads: into tiles of more than one row.
#[test]
fn results_of_two_passes_do_not_depend_on_the_number_of_threads() -> Result<()> {
    for (dtype, context_dim) in [(DType::F32, 100), (DType::BF16, 100), (DType::F32, 1), (DType::BF16, 1)] {
        for positions in 60..=140 {
            let terms = LossTerms { label_smoothing: 0.1, ..LossTerms::default() };
            let case = Case { dtype, terms, ..Case::new(positions, 1, context_dim, 1000) };
            let (operands, objective) = case.operands()?;
            let with_threads = |threads: usize| {
                in_pool(threads, || {
                    let planned = cpu::plan(&operands, objective.task(&operands, ALL)?, None)?;
                    assert_eq!(planned.plan.computation, Computation::TwoPasses);
                    flat(&cpu::loss(&planned, &objective)?)
                })
            };
            let one = with_threads(1)?;
            for threads in [2, 4, 16] {
                assert!(with_threads(threads)? == one, "{dtype:?}, {positions} positions, {threads} threads");
            }
        }
    }
    Ok(())
}

#[test]
fn results_of_tiles_do_not_depend_on_the_number_of_threads() -> Result<()> {
    let isa = Isa::detected()?;
    let unit = TileUnit::detected()?.unwrap_or(TileUnit::Emulated);
    for (dtype, parts) in [(DType::BF16, Parts::One), (DType::F32, Parts::Three)] {
        let with_threads = |threads: usize| {
            in_pool(threads, || {
                let case = Case { dtype, ..Case::new(40, 5, 24, 900) };
                let (operands, objective) = case.operands()?;
                let planned = case.plan(&operands, &objective)?;
                flat(&loss::<f32>(Tiles { unit, isa, dtype, parts }.into(), &planned, &objective)?)
            })
        };
        let one = with_threads(1)?;
        for threads in [2, 7] {
            assert!(with_threads(threads)? == one, "{threads} threads");
        }
    }
    Ok(())
}

#[test]
fn the_least_budget_does_not_depend_on_the_number_of_threads() -> Result<()> {
    let terms = [LossTerms::default(), LossTerms { label_smoothing: 0.1, ..LossTerms::default() }];
    for (terms, needs_grad) in terms.into_iter().flat_map(|terms| [(terms, ALL), (terms, NeedsGrad::default())]) {
        let with_threads = |threads: usize| {
            in_pool(threads, || {
                let (operands, mut objective) = Case::new(11, 3, 24, 1500).operands()?;
                if let Objective::Targets(loss) = &mut objective {
                    loss.terms = terms;
                }
                let task = objective.task(&operands, needs_grad)?;
                let plan = |budget| cpu::plan(&operands, task, Some(budget));
                let Err(crate::Error::Workspace { least, .. }) = plan(0) else { panic!("a workspace of 0 bytes") };
                let (short, ample) = (plan(least)?, plan(1 << 30)?);
                assert_eq!((short.plan.threads, ample.plan.threads), (1, threads));
                Ok::<_, crate::Error>((least, flat(&cpu::loss(&short, &objective)?)?))
            })
        };
        let one = with_threads(1)?;
        assert!(with_threads(5)? == one && with_threads(16)? == one);
    }
    Ok(())
}

#[test]
fn the_buffers_are_those_of_the_plan() -> Result<()> {
    for (positions, components, context_dim, vocab) in
        [(700, 5, 40, 900), (400, 1, 300, 2000), (40, 15, 280, 3000), (7, 2, 600, 10_000), (1, 1, 64, 40)]
    {
        let none = NeedsGrad::default();
        let some = [ALL, none, NeedsGrad { contexts: true, ..none }, NeedsGrad { weight: true, ..none }];
        let budgets = [None, Some(1), Some(3)].into_iter();
        for (budget, needs_grad) in budgets.flat_map(|budget| some.map(|needs_grad| (budget, needs_grad))) {
            let case = Case { budget, needs_grad, ..Case::new(positions, components, context_dim, vocab) };
            let (operands, objective) = case.operands()?;
            let planned = case.plan(&operands, &objective)?;
            let plan = &planned.plan;
            Inputs::with(&operands, |inputs: Inputs<'_, f32>| {
                let Objective::Targets(loss) = &objective else { panic!("a loss over targets") };
                let targets = Targets::from_ids(loss, operands.sizes, operands.weight_rows()?)?;
                let gradients = BufferedGradients::new(&planned, WeightBuffer::Zeros)?;
                let request = OnePassRequest::Loss { targets: &targets, shard: None };
                let multiplier = multiplier(&planned)?;
                let allocated = match multiplier.tiles {
                    Some(tiles) => OnePass::new(tiles, inputs, request, gradients, &planned).allocated(),
                    None => OnePass::new(multiplier.vectors, inputs, request, gradients, &planned).allocated(),
                };
                assert!(allocated <= plan.workspace_bytes, "{allocated} bytes: {plan}");
                if needs_grad != ALL {
                    return Ok(());
                }
                // The workspace also counts the numbers of each thread and row, and room for chunks with fewer panels.
                // What a tile unit's threads and third products have is more than that.
                let is_small = budget.is_some() || multiplier.tiles.is_some() || positions < 10;
                assert!(is_small || 2 * allocated > plan.workspace_bytes, "{allocated}: {plan}");
                Ok(())
            })?;
        }
    }
    Ok(())
}
