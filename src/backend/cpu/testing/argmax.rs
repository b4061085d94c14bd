//! Both computations find, with every instruction set and number of threads, at which positions the target is the most
//! probable id.

use super::super::log_probs::scores;
use super::super::plan::{logit_tiles, one_pass};
use super::super::two_pass::TwoPasses;
use super::*;
use crate::backend::objective::Scored;
use crate::backend::plan::Steps;
use crate::backend::weight::Weight;

/// The ids that have equal rows of the decoder. They lie in one tile and in several.
const EQUALS: [usize; 4] = [5, 9, 700, 1600];

/// Makes the operands of a mixture in which [`EQUALS`] are equally probable, and by far the most probable ids if
/// `bonus` is large.
fn operands(case: &Case, bonus: f64) -> Result<Operands> {
    let (mut operands, _) = case.operands()?;
    let mut rows: Vec<u32> = (0..case.sizes.vocab as u32).collect();
    let equals: Vec<usize> = EQUALS.into_iter().filter(|&id| id < rows.len()).collect();
    equals.iter().for_each(|&id| rows[id] = equals[0] as u32);
    let index = Tensor::new(rows.as_slice(), &Device::Cpu)?;
    operands.weight = Weight::Dense(operands.weight.rows(&index)?);
    let bias = operands.bias.clone().expect("a bias").index_select(&index, 0)?;
    let extra: Vec<f64> = (0..rows.len()).map(|id| if equals.contains(&id) { bonus } else { 0.0 }).collect();
    let extra = Tensor::new(extra.as_slice(), &Device::Cpu)?.to_dtype(bias.dtype())?;
    operands.bias = Some((bias + extra)?);
    let log_priors = operands.log_priors.take().expect("log-priors");
    operands.log_priors = Some(candle_nn::ops::log_softmax(&log_priors, candle_core::D::Minus1)?);
    Ok(operands)
}

/// How a search runs.
#[derive(Clone, Copy)]
struct Run {
    computation: Computation,
    isa: Isa,
    budget: Option<usize>,
}

/// Tells whether each target is the most probable id.
fn is_correct<F: Served>(operands: &Operands, targets: &[i64], run: Run) -> Result<Vec<bool>> {
    let Run { computation, isa, budget } = run;
    let loss = TargetLoss {
        targets: Tensor::new(targets, &Device::Cpu)?,
        ignore_index: Some(-100),
        position_weights: None,
        class_weights: None,
        terms: LossTerms { needs_correct: true, ..LossTerms::default() },
        scale: GradScale::OneOverCount,
        shard: None,
        own_shifts: None,
        so_far: None,
    };
    let planned = with_computation(cpu::plan(operands, loss.task(NeedsGrad::default()), budget)?, computation);
    let targets = Targets::from_ids(&loss, operands.sizes, operands.sizes.vocab)?;
    Inputs::with(operands, |inputs: Inputs<'_, F>| {
        let (inputs, vectors) = (Inputs { isa, ..inputs }, Vectors { isa, copies_rows: false }.into());
        let gradients = BufferedGradients::none();
        let losses = match computation {
            Computation::OnePass => {
                let request = OnePassRequest::Loss { targets: &targets, shard: None };
                let mut pass = one_pass(vectors, inputs, request, gradients, &planned);
                pass.run_loss(&planned)?;
                pass.finish().0
            }
            Computation::TwoPasses => {
                let mut passes =
                    TwoPasses::for_targets(logit_tiles(vectors), inputs, &targets, None, gradients, &planned.plan);
                passes.run_loss(&planned)?;
                passes.losses
            }
        };
        Ok(losses.iter().map(|loss| loss.is_correct).collect())
    })
}

/// Returns the most probable id of each position, from log-probabilities in f64; among equals it is the lowest.
fn argmax(operands: &Operands) -> Result<Vec<usize>> {
    let planned = cpu::plan(operands, Task::LogProbs { needs_grad: NeedsGrad::default() }, None)?;
    let rows = cpu::log_probs(&planned, DType::F64)?.to_vec2::<f64>()?;
    let row_argmax = |row: &Vec<f64>| {
        let argmax = row.iter().enumerate().fold(0, |argmax, (id, x)| if *x > row[argmax] { id } else { argmax });
        // The log-probabilities of equal ids may differ in the last bit.
        if EQUALS.contains(&argmax) {
            EQUALS[0]
        } else {
            argmax
        }
    };
    Ok(rows.iter().map(row_argmax).collect())
}

#[test]
fn every_computation_finds_the_most_probable_ids() -> Result<()> {
    for (positions, components, context_dim, vocab, bonus) in [
        (11, 1, 17, 3001, 0.0),
        (40, 3, 9, 1700, 0.0),
        (40, 3, 9, 1700, 0.4),
        (9, 15, 20, 2100, 0.0),
        // More components than a panel has rows.
        (5, 60, 6, 1900, 0.2),
        (7, 2, 5, 13, 0.0),
    ] {
        let case = Case { dtype: DType::F64, ..Case::new(positions, components, context_dim, vocab) };
        let argmax = argmax(&operands(&case, bonus)?)?;
        let other = |t: usize, id: usize| (id + 1 + t * 7 % (vocab - 1)) % vocab;
        let target = |t: usize| if t % 3 == 1 { other(t, argmax[t]) } else { argmax[t] } as i64;
        let targets: Vec<i64> = (0..positions).map(|t| if t % 5 == 3 { -100 } else { target(t) }).collect();
        let expected: Vec<bool> = (0..positions).map(|t| t % 5 != 3 && targets[t] == argmax[t] as i64).collect();
        for isa in Isa::available() {
            for computation in [Computation::OnePass, Computation::TwoPasses] {
                for budget in [None, Some(3 << 20)] {
                    let run = Run { computation, isa, budget };
                    let found = [
                        is_correct::<f32>(&operands(&Case { dtype: DType::F32, ..case }, bonus)?, &targets, run)?,
                        is_correct::<f64>(&operands(&case, bonus)?, &targets, run)?,
                    ];
                    let name = format!("{:?} {computation:?} {}", case.sizes, isa.kernels());
                    found.iter().for_each(|found| assert_eq!(*found, expected, "{name}"));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn among_equals_the_lowest_id_is_the_most_probable() -> Result<()> {
    for components in [1, 4] {
        for function in [Identity, Softcap(30.0), Sigsoftmax] {
            let case = Case { function, ..Case::new(12, components, 19, 1900) };
            let operands = operands(&case, 9.0)?;
            let targets: Vec<i64> = (0..12).map(|t| EQUALS[t % 4] as i64).collect();
            let expected: Vec<bool> = (0..12).map(|t| t % 4 == 0).collect();
            for isa in Isa::available() {
                for computation in [Computation::OnePass, Computation::TwoPasses] {
                    let found = is_correct::<f32>(&operands, &targets, Run { computation, isa, budget: None })?;
                    assert_eq!(found, expected, "K = {components} {computation:?} {}", isa.kernels());
                }
            }
        }
        // All ids are equal.
        let (mut operands, _) = Case::new(6, components, 7, 900).operands()?;
        operands.weight = Weight::Dense(operands.weight.tensor()?.zeros_like()?);
        operands.bias = None;
        for computation in [Computation::OnePass, Computation::TwoPasses] {
            let run = Run { computation, isa: Isa::detected()?, budget: None };
            let found = is_correct::<f32>(&operands, &[0, 1, 899, 0, 500, 0], run)?;
            assert_eq!(found, [true, false, false, true, false, true], "K = {components} {computation:?}");
        }
    }
    Ok(())
}

#[test]
fn tiles_find_the_most_probable_ids() -> Result<()> {
    let isa = Isa::detected()?;
    for unit in TileUnit::available(isa).into_iter().chain([TileUnit::Emulated]) {
        for components in [1, 3, 20] {
            let case = Case { dtype: DType::BF16, ..Case::new(12, components, 19, 1900) };
            let operands = operands(&case, 9.0)?;
            let ids: Vec<u32> = (0..12).flat_map(|t| [700, t, 5, 1600, 5]).collect();
            let token_ids = Tensor::from_vec(ids, (12, 5), &Device::Cpu)?;
            let scored = Scored {
                token_ids,
                needs_entropy: false,
                needs_outside: false,
                needs_collision: false,
                needs_argmax: true,
                temperature: 1.0,
            };
            let planned = cpu::plan(&operands, scored.task(&operands, NeedsGrad::default())?, None)?;
            assert_eq!(planned.plan.computation, Computation::OnePass);
            let found =
                scores::<f32>(Tiles { unit, isa, dtype: DType::BF16, parts: Parts::One }.into(), &planned, &scored)?;
            let expected: Vec<u8> = (0..12).flat_map(|t| [0, u8::from(t == 5), 1, 0, 1]).collect();
            assert_eq!(found.1.expect("asked for").flatten_all()?.to_vec1::<u8>()?, expected, "K = {components}");
        }
    }
    Ok(())
}

#[test]
fn the_argmax_does_not_depend_on_the_number_of_threads() -> Result<()> {
    let with_threads = |threads: usize| {
        in_pool(threads, || {
            let operands = operands(&Case::new(300, 15, 24, 1500), 0.0)?;
            let run = Run { computation: Computation::OnePass, isa: Isa::detected()?, budget: None };
            is_correct::<f32>(&operands, &argmax_targets(&operands)?, run)
        })
    };
    let one = with_threads(1)?;
    assert!(one.iter().filter(|is_correct| **is_correct).count() > 290);
    for threads in [2, 7] {
        assert_eq!(with_threads(threads)?, one, "{threads} threads");
    }
    Ok(())
}

/// Returns the most probable ids as targets.
fn argmax_targets(operands: &Operands) -> Result<Vec<i64>> {
    let (ids, _) = cpu::top_k(operands, 1)?;
    Ok(ids.flatten_all()?.to_vec1::<u32>()?.into_iter().map(i64::from).collect())
}
