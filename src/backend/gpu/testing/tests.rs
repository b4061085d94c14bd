//! Tests of the whole backend on the emulated GPU, in each kernel language.

use proptest::prelude::*;

use super::case::{
    case, error, largest_error, options, plain_objective, random, top_k_and_truth, true_loss, with_bias, Case, ALL,
};
use super::*;

use crate::backend::distribution::{answers, Reader};
use crate::backend::gpu;
use crate::backend::gpu::decoding::{ranked, visit_chunks};
use crate::backend::logit_function::LogitFunction::{Identity, Sigsoftmax, Softcap};
use crate::backend::objective::{GradScale, LossTerms, Objective, TargetLoss, Task};
use crate::backend::operands::{NeedsGrad, Operands};
use crate::backend::plan::Computation;
use crate::backend::ranking::TopKQuery;
use crate::backend::weight::Weight;
use crate::loss::{LossOptions, Precision, Reduction};
use crate::tensors::log_softmax;

#[test]
fn losses_and_gradients_equal_those_of_the_cpu_in_f64() {
    for gpu in EmulatedGpu::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                for (smoothing, z_loss, function) in [
                    (0.0, 0.0, Identity),
                    (0.1, 0.0, Identity),
                    (0.2, 0.01, Softcap(5.0)),
                    (0.1, 0.01, Sigsoftmax),
                    (0.0, 0.0, Sigsoftmax),
                ] {
                    for (logit_scale, transposed) in [(1.0, false), (0.3, true)] {
                        let options = options(reduction, smoothing, z_loss, true);
                        Case { dtype, logit_scale, transposed, function, options, ..case(5, 3, 6, 37) }.check(&gpu);
                    }
                }
            }
        }
    }
}

#[test]
fn adapters_equal_those_of_the_cpu_in_f64() {
    for gpu in EmulatedGpu::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (positions, rank, transposed) in [(5, 2, false), (1, 1, true), (40, 4, false)] {
                for smoothing in [0.0, 0.1] {
                    let options = options(Reduction::Mean, smoothing, 0.0, true);
                    let case = Case { dtype, rank, transposed, options, ..case(positions, 3, 8, 37) };
                    case.check(&gpu);
                    let found = gpu::log_probs(&gpu, &case.plan(&gpu), dtype).unwrap();
                    assert!(error(&found, &case.true_log_probs()) <= case.tolerance());
                }
            }
        }
    }
}

#[test]
fn contexts_of_any_width_have_the_gradients_of_the_cpu_in_f64() {
    for gpu in EmulatedGpu::all() {
        for dtype in [DType::F16, DType::BF16] {
            // The gradient of the bias is a column of the decoder's if rows are padded, or many.
            for (positions, context_dim) in [(90, 8), (2, 8), (90, 7), (90, 12), (2, 9), (0, 7)] {
                for (options, transposed) in
                    [(LossOptions::new(), false), (options(Reduction::Sum, 0.1, 0.0, true), true)]
                {
                    Case { dtype, options, transposed, ..case(positions, 3, context_dim, 37) }.check(&gpu);
                }
            }
        }
    }
}

#[test]
fn exponentials_of_the_first_product_equal_those_of_the_cpu_in_f64() {
    let Some(gpu) = EmulatedGpu::new(Language::Cuda) else { return };
    for (positions, components, width, vocab) in
        [(1, 1, 8, 1), (43, 3, 16, 128), (90, 3, 39, 300), (129, 1, 72, 130), (2, 5, 104, 129), (88, 3, 1, 7)]
    {
        for logit_scale in [1.0, 0.3] {
            let sizes = case(positions, components, width, vocab);
            let case = Case { dtype: DType::BF16, logit_scale, options: LossOptions::new(), chunk: positions, ..sizes };
            assert_eq!(case.plan(&gpu).plan.computation, Computation::OnePass, "{:?}", case.sizes);
            case.check(&gpu);
        }
    }
}

#[test]
fn the_activation_and_its_gradient_equal_those_in_f64() {
    for gpu in EmulatedGpu::all() {
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F16, 1e-3), (DType::BF16, 1e-2)] {
            for (rows, columns) in [(3, 5), (2, 300), (1, 1), (0, 4), (3, 0)] {
                let operand = |seed, shape: &[usize]| random(seed, shape, 2.0).to_dtype(dtype).unwrap();
                let (z, bias, upstream) =
                    (operand(1, &[rows, columns]), operand(2, &[columns]), operand(3, &[rows, columns]));
                let [exact_z, exact_bias, exact_upstream] =
                    [&z, &bias, &upstream].map(|tensor| tensor.to_dtype(DType::F64).unwrap());
                let exact = exact_z.broadcast_add(&exact_bias).unwrap().tanh().unwrap();
                let found = gpu::bias_tanh(&gpu, &z, &bias).unwrap();
                assert_eq!((found.dims(), found.dtype()), (&[rows, columns][..], dtype));
                assert!(error(&found, &exact) <= tolerance, "{dtype:?} {rows} {columns}");
                let found_as_f64 = found.to_dtype(DType::F64).unwrap();
                let exact = (&exact_upstream * (1.0 - found_as_f64.sqr().unwrap()).unwrap()).unwrap();
                let found = gpu::tanh_gradient(&gpu, &found, &upstream).unwrap();
                assert!(error(&found, &exact) <= tolerance, "the gradient, {dtype:?} {rows} {columns}");
            }
        }
    }
}

#[test]
fn the_log_softmax_and_its_gradient_equal_those_in_f64() {
    for gpu in EmulatedGpu::all() {
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F16, 1e-3), (DType::BF16, 1e-2)] {
            for (rows, columns) in [(3, 5), (20, 15), (9, 100), (1, 1), (0, 4), (3, 0)] {
                let operand = |seed, shape: &[usize]| random(seed, shape, 20.0).to_dtype(dtype).unwrap();
                let (z, bias) = (operand(1, &[rows, columns]), operand(2, &[columns]));
                let upstream = random(3, &[rows, columns], 1.0);
                let exact = |tensor: &Tensor| tensor.to_dtype(DType::F64).unwrap();
                for bias in [Some(&bias), None] {
                    let expected = log_softmax::biased(&exact(&z), bias.map(exact).as_ref()).unwrap();
                    let found = gpu::log_softmax(&gpu, &z, bias).unwrap();
                    assert_eq!((found.dims(), found.dtype()), (&[rows, columns][..], DType::F32));
                    assert!(error(&found, &expected) <= 1e-6, "{dtype:?} {rows} {columns}");
                    let expected = log_softmax::gradient(&exact(&found), &upstream, DType::F64).unwrap();
                    let upstream = upstream.to_dtype(DType::F32).unwrap();
                    let found = gpu::log_softmax_gradient(&gpu, &found, &upstream, dtype).unwrap();
                    assert_eq!((found.dims(), found.dtype()), (&[rows, columns][..], dtype));
                    assert!(error(&found, &expected) <= tolerance, "the gradient, {dtype:?} {rows} {columns}");
                }
            }
        }
    }
}

#[test]
fn the_mean_of_no_count_is_zero() {
    for gpu in EmulatedGpu::all() {
        let case = Case { options: LossOptions::new(), ..case(3, 2, 4, 9) };
        let weightless = |dtype| match case.objective(dtype) {
            Objective::Targets(loss) => Objective::Targets(TargetLoss {
                position_weights: loss.position_weights.map(|w| w.zeros_like().unwrap()),
                ..loss
            }),
            objective => objective,
        };
        let results = gpu::loss(&gpu, &case.plan(&gpu), &weightless(DType::F32)).unwrap();
        assert_eq!(results.mean.unwrap().to_scalar::<f32>().unwrap(), 0.0);
    }
}

#[test]
fn targets_that_are_entries_of_their_own_equal_those_of_the_cpu_in_f64() {
    for gpu in EmulatedGpu::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                for (components, vocab, behind, logit_scale) in [(3, 37, 20, 1.0), (1, 9, 0, 0.3), (2, 1, 3, 2.0)] {
                    // Position 0 has target 3, which is ignored in half of the cases.
                    let options = LossOptions::new().with_reduction(reduction);
                    let options = if components == 3 { options.with_ignore_index(3) } else { options };
                    let case = case(7, components, 6, vocab);
                    Case { dtype, logit_scale, options, own: Some(behind), ..case }.check(&gpu);
                }
            }
        }
    }
}

#[test]
fn f64_is_an_error_that_names_the_backend() {
    for gpu in EmulatedGpu::all() {
        let case = case(2, 1, 3, 5);
        let (operands, task) = (case.operands(DType::F64), Task::LogProbs { needs_grad: NeedsGrad::default() });
        let name = gpu.kind().kernels.to_string();
        let plan = gpu::plan(&gpu, &operands, task, None);
        let Err(crate::Error::DType { argument: "hidden", expected, got: DType::F64 }) = plan else {
            panic!("{plan:?}")
        };
        assert!(expected.contains(&name), "{expected}");
    }
}

#[test]
fn small_large_and_empty_sizes_work() {
    for gpu in EmulatedGpu::all() {
        for (positions, components, context_dim, vocab) in
            [(0, 2, 3, 5), (1, 1, 1, 1), (3, 1, 7, 2), (2, 17, 5, 9), (3, 4, 8, 1025), (1, 2, 3, 4099), (300, 1, 2, 3)]
        {
            for chunk in [1, 300] {
                Case { chunk, ..case(positions, components, context_dim, vocab) }.check(&gpu);
            }
        }
    }
}

#[test]
fn products_of_many_half_precision_rows_are_tiled() {
    for gpu in EmulatedGpu::all() {
        for dtype in [DType::F16, DType::BF16] {
            for (context_dim, vocab) in [(6, 37), (50, 11), (1, 90)] {
                Case {
                    dtype,
                    chunk: 9,
                    options: options(Reduction::Mean, 0.1, 0.0, true),
                    ..case(16, 3, context_dim, vocab)
                }
                .check(&gpu);
            }
        }
    }
}

#[test]
fn large_logits_keep_their_precision() {
    for gpu in EmulatedGpu::all() {
        for scale in [10.0, 100.0] {
            let case = Case { scale, ..case(4, 3, 6, 50) };
            let (error, name) = case.loss_error(&gpu, |dtype| case.objective(dtype));
            assert!(error <= 1e-5 * scale, "{name}: {error} at scale {scale}");
        }
    }
}

/// The error of a loss whose logits are about `first` up to the id `late`, `largest` at this id, and far less behind
/// it.
pub(super) fn error_of_a_late_logit(gpu: &EmulatedGpu, width: usize, (first, largest): (f32, f32), late: usize) -> f64 {
    let vocab = late + 30;
    let case = Case { dtype: DType::BF16, options: LossOptions::new(), chunk: 2, ..case(3, 2, width, vocab) };
    let mut bias = vec![first; late];
    bias.extend((late..vocab).map(|v| if v == late { largest } else { largest - 60.0 }));
    let operands = |dtype| with_bias(case.operands(dtype), &bias);
    let targets = vec![late as i64, late as i64 + 1, late as i64 + 7];
    let objective = plain_objective(targets, LossTerms::default(), GradScale::Constant(1.0));
    let truth = true_loss(&operands(DType::F64), &objective, ALL);
    let got = gpu::loss(gpu, &case.plan_for(gpu, &operands(DType::BF16)), &objective).unwrap();
    let pairs = vec![
        ("nll", Some(got.nll), Some(truth.nll)),
        ("contexts", got.gradients.contexts, truth.gradients.contexts),
        ("weight", got.gradients.weight, truth.gradients.weight),
    ];
    largest_error(pairs).0
}

#[test]
fn confident_predictions_keep_their_precision() {
    for gpu in EmulatedGpu::all() {
        for (target, width) in [(-50.0, 4), (50.0, 4), (90.0, 4), (-50.0, 8), (50.0, 8), (90.0, 8)] {
            let case = Case { dtype: DType::BF16, scale: 0.01, ..case(4, 1, width, 30) };
            let bias: Vec<f32> = (0..30).map(|v| if v == 7 { target } else { target - 8.0 }).collect();
            let operands = |dtype| with_bias(case.operands(dtype), &bias);
            let objective = plain_objective(vec![7; 4], LossTerms::default(), GradScale::Constant(1.0));
            let truth = true_loss(&operands(DType::F64), &objective, ALL);
            let got = gpu::loss(&gpu, &case.plan_for(&gpu, &operands(DType::BF16)), &objective).unwrap();
            // About 0.01, from logits with errors of 4e-6.
            let difference = error(&got.nll, &truth.nll);
            assert!(difference <= 1e-3, "{target}: {difference}");
            let difference = error(&got.gradients.contexts.unwrap(), &truth.gradients.contexts.unwrap());
            assert!(difference <= 1e-2, "the gradient, {target}: {difference}");
        }
    }
}

#[test]
fn the_largest_logit_may_come_late() {
    for gpu in EmulatedGpu::all() {
        let infinity = f32::INFINITY;
        for logits in [(0.0, 120.0), (-40.0, 120.0), (70.0, 120.0), (-infinity, 120.0), (-infinity, -150.0)] {
            // With a width of 8 the first product on CUDA writes exponentials.
            for (late, width) in [(3, 4), (2048, 4), (5000, 4), (3, 8), (500, 8)] {
                let error = error_of_a_late_logit(&gpu, width, logits, late);
                assert!(error <= 1e-2, "{logits:?} {late} {width}: {error}");
            }
        }
    }
}

#[test]
fn responsibilities_of_improbable_targets_sum_to_one() {
    for gpu in EmulatedGpu::all() {
        for bias in [1e2, 1e3, 1e4] {
            let case = Case { bias, ..case(9, 3, 6, 41) };
            let objective =
                plain_objective((0..9).map(|t| t * 4).collect(), LossTerms::default(), GradScale::Constant(1.0));
            let outcome = gpu::loss(&gpu, &case.plan(&gpu), &objective).unwrap();
            let sums = outcome.gradients.log_priors.unwrap().sum(1).unwrap().to_vec1::<f32>().unwrap();
            assert!(sums.iter().all(|sum| (sum + 1.0).abs() < 1e-6), "{bias}: {sums:?} {:?}", gpu.language);
        }
    }
}

#[test]
fn large_weights_do_not_overflow_half_precision() {
    for gpu in EmulatedGpu::all() {
        let case = Case { dtype: DType::F16, ..case(5, 3, 6, 37) };
        let heavy = |dtype| match case.objective(dtype) {
            Objective::Targets(loss) => Objective::Targets(TargetLoss {
                position_weights: loss.position_weights.map(|w| (w * 1000.0).unwrap()),
                class_weights: loss.class_weights.map(|w| (w * 1000.0).unwrap()),
                ..loss
            }),
            objective => objective,
        };
        let (error, name) = case.loss_error(&gpu, heavy);
        assert!(error <= case.tolerance(), "{name}: {error}");
        let ones = |dtype| Objective::LogProbs { upstream: Tensor::ones((5, 37), dtype, &Device::Cpu).unwrap() };
        let (error, name) = case.loss_error(&gpu, ones);
        assert!(error <= case.tolerance(), "{name}: {error}");
    }
}

#[test]
fn a_large_z_loss_does_not_overflow_half_precision() {
    for gpu in EmulatedGpu::all() {
        let options = LossOptions::new().with_z_loss(20.0);
        let case = Case { dtype: DType::F16, options, bias: 200.0, ..case(5, 3, 6, 37) };
        let (error, name) = case.loss_error(&gpu, |dtype| case.objective(dtype));
        assert!(error <= case.tolerance(), "{name}: {error}");
        // Small class weights do not multiply the z-loss.
        let options = LossOptions::new().with_z_loss(0.01);
        let case = Case { dtype: DType::F16, options, bias: 20.0, ..case };
        let light = |dtype| match case.objective(dtype) {
            Objective::Targets(loss) => Objective::Targets(TargetLoss {
                class_weights: loss.class_weights.map(|w| (w * 1e-5).unwrap()),
                ..loss
            }),
            objective => objective,
        };
        let (error, name) = case.loss_error(&gpu, light);
        assert!(error <= case.tolerance(), "{name}: {error}");
    }
}

#[test]
fn a_z_loss_that_cancels_the_mass_keeps_the_gradient_of_the_target() {
    for gpu in EmulatedGpu::all() {
        let case = Case { options: LossOptions::new().with_z_loss(0.5), ..case(1, 1, 1, 1) };
        let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
        let operands = Operands {
            contexts: ones(&[1, 1, 1]),
            log_priors: None,
            weight: Weight::Dense(ones(&[1, 1]).neg().unwrap()),
            bias: None,
            ..case.operands(DType::F32)
        };
        let objective = plain_objective(vec![0], case.options.terms(), GradScale::Constant(1.0));
        let outcome = gpu::loss(&gpu, &case.plan_for(&gpu, &operands), &objective).unwrap();
        assert_eq!(outcome.gradients.weight.unwrap().to_vec2::<f32>().unwrap(), [[-1.0]], "{:?}", gpu.language);
    }
}

#[test]
fn log_probabilities_and_their_gradient_equal_those_of_the_cpu() {
    for gpu in EmulatedGpu::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let case = Case { dtype, ..case(5, 3, 6, 37) };
            let found = gpu::log_probs(&gpu, &case.plan(&gpu), dtype).unwrap();
            assert!(error(&found, &case.true_log_probs()) <= case.tolerance());

            let upstream = random(8, &[5, 37], 1.0);
            let objective = |dtype| Objective::LogProbs { upstream: upstream.to_dtype(dtype).unwrap() };
            let (error, name) = case.loss_error(&gpu, objective);
            assert!(error <= case.tolerance(), "{name}: {error} in {dtype:?}");
        }
    }
}

#[test]
fn operands_in_f32_are_rounded_for_many_rows_where_products_can_be() {
    let options = LossOptions::new().with_precision(Precision::Bf16Products);
    for gpu in EmulatedGpu::all() {
        for (positions, rank, transposed) in [(85, 0, false), (86, 0, false), (90, 2, true)] {
            let sizes = case(positions, 3, 6, 37);
            let case = Case { rank, transposed, options: options.clone(), ..sizes };
            let is_rounded = positions * 3 >= 256 && gpu.kind().rounds_products;
            let (error, name) = case.loss_error(&gpu, |dtype| case.objective(dtype));
            let half = Case { dtype: DType::BF16, ..case };
            let (least, most) = if is_rounded { (1e-4, half.tolerance()) } else { (0.0, 1e-4) };
            assert!((least..=most).contains(&error), "{name}: {error}, {positions} positions, {:?}", gpu.language);
        }
    }
}

#[test]
fn the_most_probable_ids_equal_those_of_a_sort() {
    for gpu in EmulatedGpu::all() {
        for (positions, vocab, k) in [(5, 37, 4), (2, 1, 1), (3, 1100, 9), (1, 6, 6)] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let case = Case { dtype, ..case(positions, 3, 6, vocab) };
                let (ids, log_probs, expected, values) = top_k_and_truth(&gpu, &case, k);
                assert_eq!(ids, expected, "{dtype:?} {vocab} {:?}", gpu.language);
                assert!(error(&log_probs, &values) <= 1e-5);
            }
        }
    }
}

#[test]
fn the_host_ranks_many_ids_as_the_device_ranks_a_few() {
    for gpu in EmulatedGpu::all() {
        for components in [1, 3] {
            let operands = case(5, components, 6, 90).operands(DType::F32);
            let ((few_ids, few), (ids, log_probs)) =
                (gpu::top_k(&gpu, &operands, 7).unwrap(), gpu::top_k(&gpu, &operands, 80).unwrap());
            let first = |tensor: &Tensor| tensor.narrow(1, 0, 7).unwrap();
            assert_eq!(first(&ids).to_vec2::<u32>().unwrap(), few_ids.to_vec2::<u32>().unwrap());
            assert_eq!(first(&log_probs).to_vec2::<f32>().unwrap(), few.to_vec2::<f32>().unwrap());
            let positions = operands.sizes.positions;
            let same = answers(&TopKQuery { k: 7 }, positions, |reader| gpu::visit(&gpu, &operands, reader)).unwrap();
            let ids = |found: Vec<Vec<(f64, u32)>>| found.into_iter().flatten().map(|(_, id)| id).collect::<Vec<_>>();
            let few_ids = few_ids.flatten_all().unwrap().to_vec1::<u32>().unwrap();
            assert_eq!(ids(same), few_ids);
            // The same in chunks of two positions.
            let plan = |operands, budget| gpu::plan(&gpu, operands, Task::Visit, budget).unwrap();
            let first_two = operands.narrow(&(0..2)).unwrap();
            let two = plan(&first_two, None).plan.workspace_bytes;
            let planned = plan(&operands, Some(two));
            assert_eq!(planned.plan.chunks().count(), 3);
            let visit = |reader: &dyn Reader| visit_chunks(&gpu, &planned, reader);
            assert_eq!(ids(answers(&TopKQuery { k: 7 }, positions, visit).unwrap()), few_ids);
        }
    }
}

#[test]
fn the_plan_of_a_ranking_has_room_for_the_log_probabilities_of_a_chunk() {
    for gpu in EmulatedGpu::all() {
        let bytes = |task| {
            let operands = Case { chunk: 5, ..case(5, 2, 4, 1000) }.operands(DType::F32);
            gpu::plan(&gpu, &operands, task, None).unwrap().plan.workspace_bytes
        };
        let all = Task::LogProbs { needs_grad: NeedsGrad::default() };
        let log_probs = gpu.kind().allocation_factor * 5 * 1000 * DType::F32.size_in_bytes();
        for task in [Task::TopK { k: 3 }, Task::Visit] {
            assert_eq!(bytes(task), bytes(all) + log_probs);
        }
        let terms = |needs_grad| Task::LogProbTerms { needs_grad };
        assert_eq!(bytes(terms(NeedsGrad::default())), bytes(all) + 3 * log_probs);
        assert_eq!(bytes(terms(ALL)), bytes(all) + 5 * log_probs);
    }
}

#[test]
fn ties_are_ranked_by_id_and_a_nan_comes_first() {
    for gpu in EmulatedGpu::all() {
        let case = case(2, 1, 3, 700);
        let operands = case.operands(DType::F32);
        let operands =
            Operands { weight: Weight::Dense(operands.weight.tensor().unwrap().zeros_like().unwrap()), ..operands };
        let mut bias = [0f32; 700];
        bias[650] = 1.0;
        bias[3] = f32::NEG_INFINITY;
        let ranked = |bias: &[f32], k| {
            let planned = case.plan_for(&gpu, &with_bias(operands.clone(), bias));
            ranked(&gpu, &planned, k).unwrap()
        };
        assert_eq!(ranked(&bias, 5).0.to_vec2::<u32>().unwrap(), [[650, 0, 1, 2, 4]; 2]);
        bias[600] = f32::NAN;
        let log_probs = ranked(&bias, 1).1.to_vec2::<f32>().unwrap();
        assert!(log_probs.iter().all(|row| row[0].is_nan()));
    }
}

#[test]
fn a_target_outside_the_vocabulary_has_a_nan_loss() {
    for gpu in EmulatedGpu::all() {
        let case = case(4, 2, 3, 10);
        let objective = plain_objective(vec![1, 10, i64::MAX, -1], LossTerms::default(), GradScale::OneOverCount);
        let outcome = gpu::loss(&gpu, &case.plan(&gpu), &objective).unwrap();
        let nll = outcome.nll.to_vec1::<f32>().unwrap();
        assert!(nll[0].is_finite() && nll[1..].iter().all(|x| x.is_nan()), "{nll:?}");
        assert!(outcome.sum.to_scalar::<f32>().unwrap().is_nan());
    }
}

#[test]
fn infinities_and_nan_are_where_they_are_on_the_cpu() {
    for gpu in EmulatedGpu::all() {
        for (row, value) in [(0, f32::NAN), (3, f32::INFINITY), (5, f32::NEG_INFINITY)] {
            for (components, dtype) in [(1, DType::F32), (2, DType::F32), (1, DType::BF16), (2, DType::BF16)] {
                let case = Case { dtype, chunk: 6, ..case(6, components, 4, 12) };
                let mut bias = [0f32; 12];
                bias[row] = value;
                let operands = |dtype| with_bias(case.operands(dtype), &bias);
                let truth = true_loss(&operands(DType::F64), &case.objective(DType::F64), ALL);
                let planned = case.plan_for(&gpu, &operands(DType::F32));
                let got = gpu::loss(&gpu, &planned, &case.objective(DType::F32)).unwrap();
                assert!(error(&got.nll, &truth.nll) <= 1e-5, "{value} {:?} {:?}", got.nll, truth.nll);
                let (got, truth) = (got.gradients.contexts.unwrap(), truth.gradients.contexts.unwrap());
                assert!(error(&got, &truth) <= 5.0 * case.tolerance(), "{value} K = {components} {dtype:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn any_sizes_and_options_work(
        positions in 1usize..9, components in 1usize..6, context in 1usize..12, vocab in 1usize..70, chunk in 1usize..9,
        smoothing in prop_oneof![Just(0.0), 0.0..0.9], z_loss in prop_oneof![Just(0.0), 0.0..0.1],
        function in prop_oneof![Just(Identity), (2.0..30.0).prop_map(Softcap), Just(Sigsoftmax)],
        ignore: bool, transposed: bool,
        logit_scale in prop_oneof![Just(1.0), 0.1..3.0], rank in 0usize..3,
        reduction in prop_oneof![Just(Reduction::Mean), Just(Reduction::Sum), Just(Reduction::None)],
    ) {
        for gpu in EmulatedGpu::all() {
            let options = options(reduction, smoothing, z_loss, ignore).with_correct(false);
            // Only f32: in half precision the error depends on the cancellation within a gradient.
            let sizes = case(positions, components, context + rank, vocab);
            Case { logit_scale, transposed, function, options, rank, chunk, ..sizes }.check(&gpu);
        }
    }
}
