//! Losses of the log-probabilities of all ids equal the CPU's in f64.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::case::{case, gradient_pairs, largest_error, true_loss, Case};
use super::*;

use crate::backend::divergence::{Divergence, DivergenceTerms};
use crate::backend::objective::Objective;
use crate::backend::{self, gpu};

/// A teacher's log-probabilities `[positions, vocab]`.
fn teacher(positions: usize, vocab: usize) -> Tensor {
    let logits: Vec<f64> = (0..positions * vocab).map(|i| ((i * 37 + 11) % 23) as f64 / 7.0).collect();
    let logits = Tensor::from_vec(logits, (positions, vocab), &Device::Cpu).unwrap();
    if positions == 0 {
        return logits;
    }
    candle_nn::ops::log_softmax(&logits, 1).unwrap()
}

/// A divergence from the teacher, for operands of `dtype`.
fn divergence_loss(case: &Case, dtype: DType, divergence: Divergence) -> Objective {
    let log_teacher = teacher(case.sizes.positions, case.sizes.vocab).to_dtype(dtype).unwrap();
    Objective::AllLogProbs(Arc::new(move |positions, log_probs| {
        let log_teacher = log_teacher.narrow(0, positions.start, positions.len())?;
        let scales = Tensor::ones(positions.len(), dtype, &Device::Cpu)?;
        let terms = DivergenceTerms { divergence, temperature: 1.3, scales };
        // The emulated GPU still writes to its own tensors.
        backend::divergence(log_probs.copy()?, &log_teacher, &terms)
    }))
}

#[test]
fn losses_of_log_probabilities_equal_those_of_the_cpu_in_f64() {
    for gpu in EmulatedGpu::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (positions, components, vocab) in [(5, 3, 37), (4, 1, 40), (0, 2, 5)] {
                for divergence in [Divergence::ForwardKl, Divergence::JensenShannon(0.3), Divergence::LkHybrid(3.0)] {
                    let case = Case { dtype, chunk: 2, ..case(positions, components, 6, vocab) };
                    let objective = divergence_loss(&case, DType::F32, divergence);
                    let operands = case.operands(dtype);
                    let task = objective.task(&operands, case.needs_grad()).unwrap();
                    let found = gpu::loss(&gpu, &case.plan_task(&gpu, &operands, task), &objective).unwrap();
                    let objective = divergence_loss(&case, DType::F64, divergence);
                    let truth = true_loss(&case.operands(DType::F64), &objective, case.needs_grad());
                    let mut pairs = gradient_pairs(found.gradients, truth.gradients);
                    pairs.extend([
                        ("objective", Some(found.objective), Some(truth.objective)),
                        ("sum", Some(found.sum), Some(truth.sum)),
                    ]);
                    let (error, name) = largest_error(pairs);
                    assert!(error <= case.tolerance(), "{name}: {error} {dtype:?} {:?} {divergence:?}", case.sizes);
                }
            }
        }
    }
}
