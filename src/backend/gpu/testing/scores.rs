//! Scores and losses that are functions of them, on the emulated GPU, against the CPU in f64.

use std::sync::Arc;

use super::case::{case, error, gradient_pairs, largest_error, random, true_loss, Case};
use super::*;

use crate::backend::logit_function::LogitFunction::{Sigsoftmax, Softcap};
use crate::backend::objective::{LossResults, Objective, Scored, POSITION_SCORES};
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::backend::plan::Planned;
use crate::backend::{self, gpu};

/// A mixture with scores and an upstream gradient for each.
pub(super) struct ScoreCase {
    pub(super) mixture: Case,
    /// The number of candidates of each position.
    pub(super) n: usize,
    pub(super) entropy: bool,
    pub(super) outside: bool,
    pub(super) collision: bool,
    pub(super) temperature: f64,
    /// Whether the bias of every third id, which is no candidate, is minus infinity.
    pub(super) masked: bool,
    /// Whether the log-prior of one component at each position is minus infinity.
    pub(super) pruned: bool,
    /// A number that is added to the logit of the first id, a candidate of the first position.
    pub(super) excess: f64,
    pub(super) upstream: Upstream,
}

/// Which scores have an upstream gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Upstream {
    All,
    LogProbs,
    Entropy,
    Outside,
    Collision,
    /// All, but none at the even positions.
    OddPositions,
}

/// Scores of a mixture with all upstream gradients.
pub(super) fn scored(mixture: Case, n: usize, entropy: bool, temperature: f64) -> ScoreCase {
    ScoreCase {
        mixture,
        n,
        entropy,
        outside: false,
        collision: false,
        temperature,
        masked: false,
        pruned: false,
        excess: 0.0,
        upstream: Upstream::All,
    }
}

impl ScoreCase {
    /// The operands, some of whose ids or components are impossible.
    fn operands(&self, dtype: DType) -> Operands {
        let Sizes { positions, components, vocab, .. } = self.mixture.sizes;
        let operands = self.mixture.operands(dtype);
        let add = |tensor: Option<Tensor>, shape: &[usize], is_impossible: &dyn Fn(usize) -> bool, first: f64| {
            let tensor = tensor.unwrap();
            let n = shape.iter().product();
            let number = |i| if is_impossible(i) { f64::NEG_INFINITY } else { first * f64::from(u8::from(i == 0)) };
            let numbers: Vec<f64> = (0..n).map(number).collect();
            let numbers = Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap().to_dtype(tensor.dtype()).unwrap();
            Some((tensor + numbers).unwrap())
        };
        let pruned = |i: usize| self.pruned && i % components == i / components % components;
        Operands {
            bias: add(operands.bias, &[vocab], &|v| self.masked && v % 3 == 1, self.excess),
            log_priors: add(operands.log_priors, &[positions, components], &pruned, 0.0),
            ..operands
        }
    }

    /// The scores. The first two candidates of a position are equal, and so are the next two, and so on.
    pub(super) fn scored(&self) -> Scored {
        let Sizes { positions, vocab, .. } = self.mixture.sizes;
        let id = |i: usize| (i / self.n * 5 + i % self.n / 2 * 7) % vocab.div_ceil(3) * 3;
        let ids: Vec<u32> = (0..positions * self.n).map(|i| id(i) as u32).collect();
        let token_ids = Tensor::from_vec(ids, (positions, self.n), &Device::Cpu).unwrap();
        Scored {
            token_ids,
            needs_entropy: self.entropy,
            needs_outside: self.outside,
            needs_collision: self.collision,
            needs_argmax: true,
            temperature: self.temperature,
        }
    }

    /// The upstream gradient of each score.
    fn upstream(&self) -> Tensor {
        let (positions, columns) = (self.mixture.sizes.positions, self.n + POSITION_SCORES);
        let has = |i: usize| match self.upstream {
            Upstream::All => true,
            Upstream::LogProbs => i % columns < self.n,
            Upstream::Entropy => i % columns == self.n,
            Upstream::Outside => i % columns == self.n + 1,
            Upstream::Collision => i % columns == self.n + 2,
            Upstream::OddPositions => i / columns % 2 == 1,
        };
        let is_given: Vec<f64> = (0..positions * columns).map(|i| f64::from(u8::from(has(i)))).collect();
        let is_given = Tensor::from_vec(is_given, (positions, columns), &Device::Cpu).unwrap();
        (random(8, &[positions, columns], 2.0) * is_given).unwrap()
    }

    /// The inner product of scores and upstream gradients, which are multiplied by a factor.
    fn objective(&self, dtype: DType, factor: f64) -> Objective {
        let accumulation = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let upstream = (self.upstream() * factor).unwrap().to_dtype(accumulation).unwrap();
        let terms = move |positions: std::ops::Range<usize>, scores: &Tensor| {
            let upstream = upstream.narrow(0, positions.start, positions.len())?;
            Ok(((scores * &upstream)?.sum(1)?, upstream))
        };
        Objective::Scores { scored: self.scored(), terms: Arc::new(terms) }
    }

    /// The scores and the loss on the CPU in f64.
    fn truth(&self) -> (Tensor, LossResults) {
        let (operands, objective) = (self.operands(DType::F64), self.objective(DType::F64, 1.0));
        let loss = true_loss(&operands, &objective, self.mixture.needs_grad());
        (true_scores(&operands, &self.scored()), loss)
    }

    /// The plan for the scores and the gradients that are needed.
    fn plan(&self, gpu: &EmulatedGpu, needs_grad: NeedsGrad) -> Planned {
        let operands = self.operands(self.mixture.dtype);
        self.mixture.plan_task(gpu, &operands, self.scored().task(&operands, needs_grad).unwrap())
    }

    /// The scores and the loss on the emulated GPU.
    fn found(&self, gpu: &EmulatedGpu, factor: f64) -> (Tensor, LossResults) {
        let scores = gpu::scores(gpu, &self.plan(gpu, NeedsGrad::default()), &self.scored()).unwrap();
        let objective = self.objective(self.mixture.dtype, factor);
        (joined(scores), gpu::loss(gpu, &self.plan(gpu, self.mixture.needs_grad()), &objective).unwrap())
    }

    /// The largest error, as of [`Case::loss_error`], of the results for upstream gradients times a factor.
    pub(super) fn error(&self, gpu: &EmulatedGpu, factor: f64) -> (f64, &'static str) {
        let ((scores, loss), (true_scores, truth)) = (self.found(gpu, factor), self.truth());
        let scaled = |found: Tensor| (found.to_dtype(DType::F64).unwrap() / factor).unwrap();
        let mut pairs = gradient_pairs(loss.gradients, truth.gradients);
        pairs.extend([
            ("objective", Some(loss.objective), Some(truth.objective)),
            ("sum", Some(loss.sum), Some(truth.sum)),
        ]);
        pairs.iter_mut().for_each(|(_, found, _)| *found = found.take().map(scaled));
        pairs.extend([
            ("scores", Some(scores), Some(true_scores)),
            ("nll", Some(loss.nll), Some(truth.nll)),
            ("count", Some(loss.count), Some(truth.count)),
        ]);
        largest_error(pairs)
    }

    /// Asserts that the error is within the tolerance.
    fn check(&self, gpu: &EmulatedGpu) {
        let (error, name) = self.error(gpu, 1.0);
        let ScoreCase { mixture, n, entropy, outside, collision, temperature, masked, pruned, excess, upstream } = self;
        assert!(
            error <= mixture.tolerance(),
            "{name}: {error} with {:?} {:?}, {n} candidates, entropy {entropy}, outside {outside}, collision \
             {collision}, temperature {temperature}, masked {masked}, pruned {pruned}, excess {excess}, {upstream:?} \
             on {:?}",
            mixture.sizes,
            mixture.dtype,
            gpu.language,
        );
    }
}

/// The scores on the CPU, as [`joined`].
fn true_scores(operands: &Operands, scored: &Scored) -> Tensor {
    let task = scored.task(operands, NeedsGrad::default()).unwrap();
    joined(backend::scores(&backend::plan(operands, task, None).unwrap(), scored).unwrap())
}

/// Joins the scores and, behind them, whether each candidate is the most probable id.
fn joined((scores, are_argmax): (Tensor, Option<Tensor>)) -> Tensor {
    let are_argmax = are_argmax.unwrap().to_dtype(scores.dtype()).unwrap();
    Tensor::cat(&[&scores, &are_argmax], 1).unwrap()
}

#[test]
fn scores_and_their_losses_equal_those_of_the_cpu_in_f64() {
    for gpu in EmulatedGpu::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (positions, components, vocab) in [(5, 3, 37), (4, 1, 37), (3, 2, 1)] {
                for temperature in [0.7, 1.0, 1.8] {
                    for (n, entropy) in [(1, true), (1, false), (3, true), (3, false), (0, true)] {
                        let mixture = || Case { dtype, ..case(positions, components, 6, vocab) };
                        scored(mixture(), n, entropy, temperature).check(&gpu);
                        // With a single id nothing is outside.
                        let outside = vocab > 1;
                        ScoreCase { outside, ..scored(mixture(), n, entropy, temperature) }.check(&gpu);
                    }
                }
            }
        }
    }
}

#[test]
fn the_collision_probability_and_its_losses_equal_those_of_the_cpu_in_f64() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        // A device holds all tensors that it has seen.
        for gpu in EmulatedGpu::all() {
            for (positions, components, vocab) in [(5, 3, 37), (4, 1, 300), (3, 2, 1)] {
                for (n, entropy, temperature) in [(0, false, 1.0), (1, false, 0.7), (3, true, 1.8), (2, true, 1.0)] {
                    let scored = |outside| {
                        let mixture = Case { dtype, ..case(positions, components, 6, vocab) };
                        ScoreCase { outside, collision: true, ..scored(mixture, n, entropy, temperature) }
                    };
                    scored(false).check(&gpu);
                    // With a single id nothing is outside.
                    scored(vocab > 1).check(&gpu);
                }
            }
        }
    }
}

#[test]
fn every_kind_of_logits_and_upstream_gradient_equals_those_of_the_cpu() {
    for gpu in EmulatedGpu::all() {
        for components in [1, 4] {
            for temperature in [1.0, 0.7] {
                let new = || case(5, components, 6, 40);
                let scored = |mixture| scored(mixture, 3, true, temperature);
                scored(Case { function: Softcap(1.5), logit_scale: 0.6, ..new() }).check(&gpu);
                scored(Case { dtype: DType::BF16, function: Softcap(3.0), logit_scale: 0.6, ..new() }).check(&gpu);
                scored(Case { function: Sigsoftmax, ..new() }).check(&gpu);
                scored(Case { transposed: true, rank: 2, ..new() }).check(&gpu);
                scored(Case { scale: 5.0, bias: 10.0, ..new() }).check(&gpu);
                ScoreCase { masked: true, ..scored(new()) }.check(&gpu);
                ScoreCase { pruned: components > 1, ..scored(new()) }.check(&gpu);
                ScoreCase { outside: true, masked: true, ..scored(new()) }.check(&gpu);
                ScoreCase { outside: true, pruned: components > 1, ..scored(new()) }.check(&gpu);
                ScoreCase { outside: true, ..scored(Case { scale: 5.0, bias: 10.0, ..new() }) }.check(&gpu);
                let collision = true;
                ScoreCase { collision, ..scored(Case { function: Softcap(1.5), logit_scale: 0.6, ..new() }) }
                    .check(&gpu);
                ScoreCase { collision, masked: true, ..scored(new()) }.check(&gpu);
                ScoreCase { collision, pruned: components > 1, ..scored(new()) }.check(&gpu);
                ScoreCase { collision, ..scored(Case { scale: 5.0, bias: 10.0, ..new() }) }.check(&gpu);
                let upstreams = [
                    Upstream::LogProbs,
                    Upstream::Entropy,
                    Upstream::Outside,
                    Upstream::Collision,
                    Upstream::OddPositions,
                ];
                for upstream in upstreams {
                    ScoreCase { upstream, collision, outside: true, ..scored(new()) }.check(&gpu);
                    ScoreCase { upstream, collision, ..scored(new()) }.check(&gpu);
                    ScoreCase { upstream, collision, entropy: false, ..scored(new()) }.check(&gpu);
                    ScoreCase { upstream, outside: true, ..scored(new()) }.check(&gpu);
                    ScoreCase { upstream, ..scored(new()) }.check(&gpu);
                    ScoreCase { upstream, entropy: false, ..scored(new()) }.check(&gpu);
                }
            }
        }
    }
}

#[test]
fn the_mass_outside_has_its_gradient_where_it_underflows() {
    for gpu in EmulatedGpu::all() {
        for components in [1, 3] {
            for (excess, temperature) in [(20.0, 1.0), (95.0, 1.0), (200.0, 1.0), (20.0, 0.1)] {
                for entropy in [false, true] {
                    let mixture = case(1, components, 4, 37);
                    let case = ScoreCase { outside: true, excess, ..scored(mixture, 1, entropy, temperature) };
                    ScoreCase { upstream: Upstream::Outside, ..case }.check(&gpu);
                }
            }
        }
    }
}

#[test]
fn sizes_around_a_block_and_any_chunks_work() {
    for gpu in EmulatedGpu::all() {
        for (positions, components, vocab, n) in
            [(1, 1, 1023, 1), (3, 2, 1025, 3), (2, 1, 255, 300), (2, 3, 257, 2), (300, 1, 3, 2), (0, 2, 5, 3)]
        {
            for (chunk, temperature) in [(1, 1.0), (2, 0.8), (300, 1.0)] {
                let mixture = Case { chunk, ..case(positions, components, 4, vocab) };
                scored(mixture, n, true, temperature).check(&gpu);
            }
        }
    }
}

#[test]
fn positions_without_an_upstream_gradient_have_none() {
    for gpu in EmulatedGpu::all() {
        for dtype in [DType::F32, DType::F16] {
            let case = scored(Case { dtype, chunk: 3, ..case(7, 2, 4, 20) }, 2, true, 1.3);
            let loss = ScoreCase { upstream: Upstream::OddPositions, ..case }.found(&gpu, 1.0).1;
            let contexts = loss.gradients.contexts.unwrap().flatten_from(1).unwrap().to_vec2::<f32>().unwrap();
            for (position, gradient) in contexts.iter().enumerate() {
                assert_eq!(gradient.iter().all(|&g| g == 0.0), position % 2 == 0, "{position}");
            }
        }
    }
}

#[test]
fn neither_large_nor_small_upstream_gradients_leave_the_range_of_half_precision() {
    for gpu in EmulatedGpu::all() {
        for temperature in [1.0, 1e-2] {
            for factor in [1e-7, 1e7] {
                let mixture = Case { dtype: DType::F16, scale: 0.2, ..case(5, 3, 6, 37) };
                let case = scored(mixture, 2, true, temperature);
                let (error, name) = case.error(&gpu, factor);
                assert!(error <= case.mixture.tolerance(), "{name}: {error} at {factor}, {temperature}");
            }
        }
    }
}

#[test]
fn a_nan_or_infinite_upstream_gradient_stays_at_its_position() {
    for gpu in EmulatedGpu::all() {
        for value in [f32::NAN, f32::INFINITY] {
            for dtype in [DType::F32, DType::F16] {
                let case = scored(Case { dtype, chunk: 4, ..case(4, 2, 4, 20) }, 1, true, 1.0);
                let upstream =
                    [[1f32, 0.5, 0.0, 0.0], [value, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]];
                let upstream = Tensor::new(&upstream, &Device::Cpu).unwrap();
                let terms = move |_, scores: &Tensor| Ok((scores.sum(1)?, upstream.clone()));
                let needs_grad = NeedsGrad { contexts: true, ..NeedsGrad::default() };
                let objective = Objective::Scores { scored: case.scored(), terms: Arc::new(terms) };
                let loss = gpu::loss(&gpu, &case.plan(&gpu, needs_grad), &objective).unwrap();
                let contexts = loss.gradients.contexts.unwrap().flatten_from(1).unwrap().to_vec2::<f32>().unwrap();
                for (position, gradient) in contexts.iter().enumerate() {
                    assert_eq!(gradient.iter().all(|g| g.is_finite()), position != 1, "{value} {dtype:?} {contexts:?}");
                }
            }
        }
    }
}

#[test]
fn a_candidate_outside_the_vocabulary_has_a_nan_score() {
    for gpu in EmulatedGpu::all() {
        for components in [1, 3] {
            let case = scored(case(4, components, 3, 10), 2, false, 1.0);
            let token_ids = Tensor::new(&[[1i64, 9], [10, 0], [i64::MAX, -1], [2, -7]], &Device::Cpu).unwrap();
            let scored = Scored { token_ids, ..case.scored() };
            let planned = case.plan(&gpu, case.mixture.needs_grad());
            let scores = gpu::scores(&gpu, &planned, &scored).unwrap().0.to_vec2::<f32>().unwrap();
            let is_nan: Vec<[bool; 2]> = scores.iter().map(|row| [row[0].is_nan(), row[1].is_nan()]).collect();
            assert_eq!(is_nan, [[false, false], [true, false], [true, true], [false, true]]);
            // The last one has no upstream gradient.
            let upstream = [[1f32, 1.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]].map(|[a, b]| [a, b, 0.0, 0.0, 0.0]);
            let upstream = Tensor::new(&upstream, &Device::Cpu).unwrap();
            let terms = move |positions: std::ops::Range<usize>, scores: &Tensor| {
                Ok((scores.sum(1)?, upstream.narrow(0, positions.start, positions.len())?))
            };
            let loss = gpu::loss(&gpu, &planned, &Objective::Scores { scored, terms: Arc::new(terms) }).unwrap();
            let contexts = loss.gradients.contexts.unwrap().flatten_from(1).unwrap().to_vec2::<f32>().unwrap();
            let is_nan: Vec<bool> = contexts.iter().map(|gradient| gradient.iter().any(|g| g.is_nan())).collect();
            assert_eq!(is_nan, [false, true, true, false]);
        }
    }
}

#[test]
fn impossible_candidates_have_a_score_of_minus_infinity() {
    for gpu in EmulatedGpu::all() {
        for (components, temperature) in [(1, 1.0), (3, 1.0), (3, 0.7)] {
            let case = ScoreCase { masked: true, ..scored(case(3, components, 3, 10), 1, true, temperature) };
            let token_ids = Tensor::new(&[[1u32], [2], [4]], &Device::Cpu).unwrap();
            let scored = Scored { token_ids, ..case.scored() };
            let found = joined(gpu::scores(&gpu, &case.plan(&gpu, NeedsGrad::default()), &scored).unwrap());
            let truth = true_scores(&case.operands(DType::F64), &scored);
            assert_eq!(truth.to_vec2::<f64>().unwrap()[0][0], f64::NEG_INFINITY);
            assert!(error(&found, &truth) <= 2e-5, "{found:?} {truth:?}");
        }
    }
}

#[test]
fn scores_that_do_not_depend_on_all_ids_need_no_workspace_for_them() {
    for gpu in EmulatedGpu::all() {
        let bytes = |entropy, collision, temperature| {
            let mixture = Case { chunk: 5, ..case(5, 1, 4, 1000) };
            let case = ScoreCase { collision, ..scored(mixture, 1, entropy, temperature) };
            let operands = case.operands(DType::F32);
            let task = case.scored().task(&operands, case.mixture.needs_grad()).unwrap();
            gpu::plan(&gpu, &operands, task, None).unwrap().plan.workspace_bytes
        };
        let row = gpu.kind().allocation_factor * 5 * 1000 * DType::F32.size_in_bytes();
        assert_eq!(bytes(true, false, 1.0), bytes(false, false, 1.0) + row);
        assert_eq!(bytes(false, true, 1.0), bytes(true, false, 1.0));
        assert_eq!(bytes(false, false, 0.5), bytes(true, false, 1.0));
    }
}
