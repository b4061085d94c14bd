//! Distillation at its edges: lists with padding, repeated ids and tails, masses below the smallest number, infinite
//! divergences, and no positions; fused, composed and over sets of allowed ids.

mod common;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use common::devices;
use common::divergences::{DIVERGENCES, MISSING};
use common::given::{places, Given};
use common::values::{gradient, numbers, tensor, Numbers};
use mos_head::distill::{DistillOptions, Divergence, MissingIds, Teacher};
use mos_head::policy::{PolicyBatch, PolicyOptions};
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax};
use mos_head::{
    Distributions, Error, Loss, Mixture, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Reduction, Result, SoftmaxHead,
};

/// Whatever computes it, and whatever is known of the teacher.
#[test]
fn no_positions_and_ignored_ones_have_no_loss() -> Result<()> {
    for positions in [0usize, 3] {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let weight = Var::from_tensor(&tensor(&[10, 4], 1, DType::F32)?)?;
        let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
        let log_probs = tensor(&[positions, 10], 2, DType::F32)?;
        let students: [Box<dyn OutputLayer>; 5] = [
            Box::new(head.clone()),
            Box::new(MixtureOfSoftmaxes::new(&MixtureConfig::new(4, 10, 3), vb.pp("mos"))?),
            Box::new(AdaptiveSoftmax::new(&AdaptiveConfig::new(4, 10, vec![3]), vb.pp("adaptive"))?),
            Box::new(Restricted::new(head.clone(), AllowedIds::new(&[0, 3, 5]))?),
            Box::new(Given(log_probs)),
        ];
        let ids = Tensor::zeros((positions, 2), DType::U32, &Device::Cpu)?;
        let none = Tensor::full(-1i64, positions, &Device::Cpu)?;
        let listed = Tensor::zeros((positions, 2), DType::F32, &Device::Cpu)?;
        let full = Tensor::zeros((positions, 10), DType::F32, &Device::Cpu)?;
        for (i, student) in students.iter().enumerate() {
            let hidden = tensor(&[positions, student.hidden_size()], 3, DType::F32)?;
            for divergence in DIVERGENCES {
                let lists = MISSING.map(|missing| (Teacher::from_top_k(&ids, &listed, missing), missing));
                let finite = |missing| divergence != Divergence::ReverseKl || missing == MissingIds::Tail;
                let lists = lists.into_iter().filter(|(_, missing)| finite(*missing)).map(|(teacher, _)| teacher);
                for teacher in lists.chain([Teacher::from_log_probs(&full)]) {
                    let options = DistillOptions::new(divergence).with_targets(none.clone()).with_ignore_index(-1);
                    let loss = student.distill(&hidden, &teacher, &options)?;
                    assert_eq!((loss.value.to_scalar::<f32>()?, loss.count.to_scalar::<f32>()?), (0.0, 0.0));
                    assert_eq!(loss.nll.to_vec1::<f32>()?, [0f32; 0]);
                    let gradients = loss.backward()?;
                    if i == 0 {
                        let gradient = gradients.get(&weight).expect("a gradient");
                        assert_eq!(gradient.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
                    }
                }
            }
        }
    }
    Ok(())
}

/// A student of four ids with these logits, and the values `[forward, reverse, Jensen-Shannon]` of the divergences from
/// a list, which the fused and the composed computation and a student over all ids as its allowed ids agree on.
fn divergences(logits: [f64; 4], ids: &[i64], log_probs: &[f64], missing: MissingIds) -> Result<[Option<f64>; 3]> {
    let weight = Tensor::new(&logits, &Device::Cpu)?.reshape((4, 1))?;
    let head = SoftmaxHead::from_tensors(weight, None)?;
    let hidden = Tensor::ones((1, 1), DType::F64, &Device::Cpu)?;
    let given = Given(head.log_probs(&hidden)?);
    let lists = AllowedIds::per_position(&[0, 1, 2, 3], &[0, 4])?;
    let restricted = Restricted::new(&head, lists)?;
    let shape = (1, ids.len());
    let (ids, log_probs) =
        (Tensor::from_slice(ids, shape, &Device::Cpu)?, Tensor::from_slice(log_probs, shape, &Device::Cpu)?);
    let teacher = Teacher::from_top_k(&ids, &log_probs, missing);
    let mut found = [None; 3];
    for (divergence, found) in
        [Divergence::ForwardKl, Divergence::ReverseKl, Divergence::JensenShannon(0.5)].into_iter().zip(&mut found)
    {
        if divergence == Divergence::ReverseKl && missing != MissingIds::Tail {
            continue;
        }
        let options = DistillOptions::new(divergence);
        let value = head.distill(&hidden, &teacher, &options)?.value.to_scalar::<f64>()?;
        for other in
            [given.distill(&places(&[1, 1])?, &teacher, &options)?, restricted.distill(&hidden, &teacher, &options)?]
        {
            assert_abs_diff_eq!(value, other.value.to_scalar::<f64>()?, epsilon = 1e-12);
        }
        *found = Some(value);
    }
    Ok(found)
}

#[test]
fn a_list_of_padding_alone_has_all_ids_as_missing() -> Result<()> {
    let close = |found: [Option<f64>; 3], expected: [Option<f64>; 3]| {
        // An absent one is as no number.
        let [found, expected] =
            [found, expected].map(|all| Numbers::from_iter(all.map(|value| value.unwrap_or(f64::NAN))));
        assert_abs_diff_eq!(found, expected, epsilon = 1e-12);
    };
    // The ids of padding need not be in the vocabulary.
    for id in [2, -1, 1000] {
        for n in [1, 3] {
            let (ids, log_probs) = (vec![id; n], vec![f64::NEG_INFINITY; n]);
            let divergences = |missing| divergences([0.0; 4], &ids, &log_probs, missing);
            // Both distributions have all of their mass on "another id".
            close(divergences(MissingIds::Tail)?, [Some(0.0); 3]);
            // The mixture of nothing and the student has half of the student's mass.
            close(divergences(MissingIds::Zero)?, [Some(0.0), None, Some(0.5 * 2f64.ln())]);
        }
    }
    Ok(())
}

/// A server's list has the sampled id first, and again among the most probable ones.
#[test]
fn an_id_that_is_listed_twice_counts_once() -> Result<()> {
    let logits = [0.3, -0.2, 0.7, 0.1];
    let [half, quarter] = [0.5f64.ln(), 0.25f64.ln()];
    for missing in MISSING {
        let expected = divergences(logits, &[2, 0], &[half, quarter], missing)?;
        let padding = f64::NEG_INFINITY;
        for (ids, log_probs) in [
            (vec![2, 2, 0], vec![half, half, quarter]),
            (vec![2, 0, 2, 0], vec![half, quarter, half, quarter]),
            (vec![0, 2, 0, 0], vec![padding, half, quarter, quarter]),
        ] {
            assert_eq!(divergences(logits, &ids, &log_probs, missing)?, expected, "{ids:?}");
        }
    }
    Ok(())
}

/// A student that is confident in the list's only id has a gradient that the tail decides.
#[test]
fn the_tail_of_a_list_is_exact() -> Result<()> {
    for tail in [1e-3, 1e-6] {
        let weight = Var::from_tensor(&Tensor::new(&[[8f32], [0.0], [0.0]], &Device::Cpu)?)?;
        let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
        let log_prob = f64::ln_1p(-tail);
        let hidden = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
        let ids = Tensor::zeros((1, 1), DType::U32, &Device::Cpu)?;
        for dtype in [DType::F64, DType::F32] {
            let log_probs = Tensor::new(&[[log_prob]], &Device::Cpu)?.to_dtype(dtype)?;
            let teacher = Teacher::from_top_k(&ids, &log_probs, MissingIds::Tail);
            // The reverse divergence has the gradient Q(other) Q(list) times the difference of both log-ratios.
            let loss = head.distill(&hidden, &teacher, &DistillOptions::new(Divergence::ReverseKl))?;
            let q = 8f64.exp() / (8f64.exp() + 2.0);
            let expected = q * (1.0 - q) * ((q.ln() - log_prob) - ((1.0 - q).ln() - f64::ln(tail)));
            let gradient = loss.backward()?.get(&weight).expect("a gradient").flatten_all()?.to_vec1::<f32>()?;
            assert_abs_diff_eq!(f64::from(gradient[0]), expected, epsilon = 1e-5 * expected.abs());
        }
    }
    Ok(())
}

/// Where the student's mass outside the list is below the smallest number, value and gradient are still those of its
/// logarithm.
#[test]
fn a_mass_that_underflows_outside_a_list_has_its_gradient() -> Result<()> {
    for (dtype, components, x) in
        [(DType::F32, 1, 120.0), (DType::F32, 2, 120.0), (DType::F64, 1, 900.0), (DType::F64, 2, 900.0)]
    {
        let bias = Var::from_tensor(&Tensor::new(&[0.0, x, 1.0], &Device::Cpu)?.to_dtype(dtype)?)?;
        let (contexts, weight) =
            (Tensor::ones((1, components, 1), dtype, &Device::Cpu)?, Tensor::zeros((3, 1), dtype, &Device::Cpu)?);
        let log_priors = (contexts.squeeze(2)? * 0.5)?.log()?;
        let student = Mixture::new(&contexts, Some(&log_priors).filter(|_| components > 1), &weight, Some(&bias))?;
        let given = Given(student.log_probs()?);
        let ids = Tensor::new(&[[1u32]], &Device::Cpu)?;
        let log_probs = Tensor::new(&[[0.9f64.ln()]], &Device::Cpu)?.to_dtype(dtype)?;
        let teacher = Teacher::from_top_k(&ids, &log_probs, MissingIds::Tail);
        let options = DistillOptions::new(Divergence::ForwardKl);
        let log_outside = 1f64.exp().ln_1p() - x;
        let expected = 0.9 * 0.9f64.ln() + 0.1 * (0.1f64.ln() - log_outside);
        let share = 1f64.exp() / (1.0 + 1f64.exp());
        let bias_gradient = [-0.1 * (1.0 - share), 0.1, -0.1 * share];
        for loss in [student.distill(&teacher, &options)?, given.distill(&places(&[1, 1])?, &teacher, &options)?] {
            assert_relative_eq!(numbers(&loss.value), [expected], max_relative = 1e-6);
            assert_abs_diff_eq!(gradient(&loss.backward()?, &bias).expect("a gradient"), bias_gradient, epsilon = 1e-5);
        }
    }
    Ok(())
}

/// Raw logits, and an infinity: by their place among all positions and in the row. A NaN stays one.
#[test]
fn numbers_above_zero_are_no_log_probabilities_of_a_teacher() -> Result<()> {
    let student = SoftmaxHead::from_tensors(Tensor::zeros((3, 1), DType::F32, &Device::Cpu)?, None)?;
    let hidden = Tensor::ones((3, 1), DType::F32, &Device::Cpu)?;
    let weights = Tensor::new(&[1f32, 0.0, 1.0], &Device::Cpu)?;
    let ids = Tensor::new(&[[0u32, 1, 2]], &Device::Cpu)?.repeat((3, 1))?;
    for (number, is_wrong) in [(3.75f32, true), (f32::INFINITY, true), (f32::NAN, false), (5e-5, false)] {
        let log_probs = Tensor::new(&[[-1f32, -2.0, -1.0], [9.0, 9.0, 9.0], [-1.0, number, -2.0]], &Device::Cpu)?;
        for teacher in [Teacher::from_log_probs(&log_probs), Teacher::from_top_k(&ids, &log_probs, MissingIds::Tail)] {
            for student in [&student as &dyn OutputLayer, &Given(student.log_probs(&hidden)?)] {
                let hidden = Tensor::new(&[[0f32], [1.0], [2.0]], &Device::Cpu)?;
                let options = DistillOptions::default().with_position_weights(weights.clone());
                let loss = student.distill(&hidden, &teacher, &options);
                if is_wrong {
                    assert!(matches!(loss, Err(Error::Value { position: 2, index: 1, .. })), "{loss:?}");
                } else {
                    assert_eq!(loss?.value.to_scalar::<f32>()?.is_nan(), number.is_nan());
                }
            }
        }
    }
    Ok(())
}

/// By its place among all positions, whatever computes it.
#[test]
fn an_infinite_divergence_is_an_error_that_names_the_position() -> Result<()> {
    let impossible = f64::NEG_INFINITY;
    // The third position gives no probability to an id.
    let finite = [0.1f64.ln(), 0.4f64.ln(), 0.5f64.ln()];
    let rows = |third: [f64; 3]| Tensor::new(&[finite, finite, third], &Device::Cpu);
    let masked = rows([0.5f64.ln(), impossible, 0.5f64.ln()])?;
    // And the teacher is certain of it.
    let certain = rows([impossible, 0.0, impossible])?;
    let all = rows(finite)?;
    let weights = Tensor::new(&[1f64, 0.0, 1.0], &Device::Cpu)?;
    let position = |loss: Result<Loss>| match loss {
        Err(Error::InfiniteDivergence { position }) => position,
        other => panic!("{other:?}"),
    };
    for temperature in [1.0, 2.0] {
        for (student, teacher, divergence, is_infinite) in [
            (&masked, &all, Divergence::ForwardKl, true),
            (&all, &masked, Divergence::ReverseKl, true),
            (&all, &masked, Divergence::ForwardKl, false),
            (&masked, &all, Divergence::ReverseKl, false),
            (&masked, &all, Divergence::JensenShannon(0.5), false),
            (&all, &masked, Divergence::JensenShannon(0.5), false),
            (&masked, &all, Divergence::TotalVariation, false),
            (&masked, &all, Divergence::NegLogAcceptance, false),
            (&all, &certain, Divergence::NegLogAcceptance, false),
            (&masked, &certain, Divergence::TotalVariation, false),
            (&masked, &certain, Divergence::NegLogAcceptance, true),
            (&masked, &all, Divergence::LkHybrid(3.0), true),
            // Its weight of the infinite term is below the smallest number.
            (&masked, &all, Divergence::LkHybrid(1e5), true),
            (&all, &masked, Divergence::LkHybrid(3.0), false),
        ] {
            let options = DistillOptions::new(divergence).with_temperature(temperature);
            let options = options.with_position_weights(weights.clone());
            let teacher = Teacher::from_log_probs(teacher);
            let mut losses = vec![Given(student.clone()).distill(&places(&[3, 1])?, &teacher, &options)];
            if std::ptr::eq(student, &all) {
                // The logits of a position are its row.
                let contexts = Tensor::eye(3, DType::F64, &Device::Cpu)?.unsqueeze(1)?;
                let student = Mixture::new(&contexts, None, &student.t()?.contiguous()?, None)?;
                losses.push(student.distill(&teacher, &options));
            }
            for loss in losses {
                if is_infinite {
                    assert_eq!(position(loss), 2, "{divergence:?}")
                } else {
                    assert!(loss?.value.to_scalar::<f64>()?.is_finite(), "{divergence:?}")
                }
            }
        }
    }
    // Over allowed ids: the teacher has a probability outside the third.
    let head = SoftmaxHead::from_tensors(Tensor::zeros((3, 1), DType::F64, &Device::Cpu)?, None)?;
    let hidden = Tensor::ones((3, 1), DType::F64, &Device::Cpu)?;
    let lists = AllowedIds::per_position(&[0, 1, 2, 0, 1, 2, 0, 2], &[0, 3, 6, 8])?;
    for (allowed, first) in [(lists, 2), (AllowedIds::new(&[0, 2]), 0)] {
        let restricted = Restricted::new(&head, allowed)?;
        let loss = restricted.distill(&hidden, &Teacher::from_log_probs(&all), &DistillOptions::default());
        assert_eq!(position(loss), first);
    }
    // An id of the teacher's list that is not allowed: the error names the position among all, of which the first has
    // no weight.
    let weights = Tensor::new(&[0f64, 1.0, 1.0], &Device::Cpu)?;
    let options = DistillOptions::default().with_position_weights(weights);
    let lists = AllowedIds::per_position(&[0, 1, 2, 0, 1, 2, 0, 2], &[0, 3, 6, 8])?;
    let top = Tensor::new(&[[0u32, 1]], &Device::Cpu)?.repeat((3, 1))?;
    let teacher = Teacher::from_top_k(&top, &Tensor::full(0.25f64.ln(), (3, 2), &Device::Cpu)?, MissingIds::Tail);
    let error = Restricted::new(&head, lists)?.distill(&hidden, &teacher, &options).expect_err("id 1 at position 2");
    assert!(matches!(error, Error::NotAllowed { position: 2, got: 1 }), "{error}");
    // A list whose tail the student excludes, and one that has all of the probability.
    let bias = Tensor::new(&[0.0, 0.0, impossible], &Device::Cpu)?;
    let weight = Tensor::zeros((3, 1), DType::F64, &Device::Cpu)?;
    let student = SoftmaxHead::from_tensors(weight, Some(bias))?;
    let ids = Tensor::new(&[[0u32, 1]], &Device::Cpu)?.repeat((3, 1))?;
    for (left, is_infinite) in [(0.2, true), (0.0, false)] {
        let listed = Tensor::new(&[[0.5 - left, 0.5]], &Device::Cpu)?.log()?.repeat((3, 1))?;
        let teacher = Teacher::from_top_k(&ids, &listed, MissingIds::Tail);
        let loss = student.distill(&hidden, &teacher, &DistillOptions::default());
        if is_infinite {
            assert_eq!(position(loss), 0)
        } else {
            assert_abs_diff_eq!(numbers(&loss?.value), [0.0], epsilon = 1e-12)
        }
    }
    Ok(())
}

/// The objective of a position is not divided by its weight, which may be below the smallest number.
#[test]
fn a_weight_that_underflows_leaves_the_objective_of_its_position() -> Result<()> {
    let student = SoftmaxHead::from_tensors(Tensor::new(&[[0.3f32], [-0.8], [0.1]], &Device::Cpu)?, None)?;
    let hidden = Tensor::ones((2, 1), DType::F32, &Device::Cpu)?;
    let log_probs = Tensor::new(&[[0.2f32, 0.5, 0.3], [0.6, 0.1, 0.3]], &Device::Cpu)?.log()?;
    let ids = Tensor::new(&[[0u32, 1], [2, 0]], &Device::Cpu)?;
    let listed = log_probs.gather(&ids, 1)?;
    for teacher in [Teacher::from_log_probs(&log_probs), Teacher::from_top_k(&ids, &listed, MissingIds::Tail)] {
        let nll = |options: DistillOptions| {
            student.distill(&hidden, &teacher, &options)?.nll.to_vec1::<f32>().map_err(Error::from)
        };
        let expected = nll(DistillOptions::default())?;
        for denominator in [1.0, 1e3, 1e6] {
            let weights = Tensor::new(&[1e-40f32, 1.0], &Device::Cpu)?;
            let options = DistillOptions::default().with_position_weights(weights).with_denominator(denominator);
            assert_eq!(nll(options)?, expected, "{denominator}");
        }
    }
    Ok(())
}

/// A target that the student finds impossible: the value is infinite, as the sum is, whatever computes it.
#[test]
fn an_impossible_target_has_an_infinite_objective() -> Result<()> {
    let impossible = f64::NEG_INFINITY;
    let bias = Tensor::new(&[impossible, 0.0], &Device::Cpu)?;
    let student = SoftmaxHead::from_tensors(Tensor::zeros((2, 1), DType::F64, &Device::Cpu)?, Some(bias))?;
    let hidden = Tensor::zeros((1, 1), DType::F64, &Device::Cpu)?;
    let given = Given(student.log_probs(&hidden)?);
    let teacher = Teacher::from_log_probs(&Tensor::new(&[[0.5f64, 0.5]], &Device::Cpu)?.log()?);
    let options = DistillOptions::new(Divergence::TotalVariation).with_hard_weight(0.5);
    let options = options.with_targets(Tensor::new(&[0u32], &Device::Cpu)?);
    for loss in [student.distill(&hidden, &teacher, &options)?, given.distill(&hidden, &teacher, &options)?] {
        assert_eq!((numbers(&loss.value), numbers(&loss.sum)), (numbers(&loss.sum), numbers(&loss.value)));
        assert_eq!(loss.value.to_scalar::<f64>()?, f64::INFINITY);
    }
    // A target that is not allowed is an error, by its position among all.
    let head = SoftmaxHead::from_tensors(Tensor::zeros((4, 1), DType::F64, &Device::Cpu)?, None)?;
    let hidden = Tensor::zeros((2, 1), DType::F64, &Device::Cpu)?;
    let teacher = Teacher::from_log_probs(&Tensor::new(&[[0.5f64, 0.5, 0.0, 0.0]; 2], &Device::Cpu)?.log()?);
    for added in [false, true] {
        for (allowed, target) in [(AllowedIds::new(&[0, 1]), 3), (AllowedIds::per_position(&[0, 0, 1], &[0, 1, 3])?, 2)]
        {
            let restricted = Restricted::new(&head, allowed.with_targets_added(added))?;
            let options = options.clone().with_targets(Tensor::new(&[-1i64, target], &Device::Cpu)?);
            let error = restricted.distill(&hidden, &teacher, &options.with_ignore_index(-1)).expect_err("a target");
            assert!(matches!(error, Error::NotAllowed { position: 1, got } if got == target), "{error:?}");
        }
    }
    Ok(())
}

/// Whoever computes the loss, its value is the sum of what the terms return: no number is lost to a larger one.
#[test]
fn the_value_of_a_loss_of_scores_is_its_sum() -> Result<()> {
    let positions = 100_000;
    let given = Given(Tensor::full(-10.25f32, (positions, 1), &Device::Cpu)?);
    let hidden = places(&[positions, 1])?.to_dtype(DType::F32)?;
    let distributions = given.distributions(&hidden, None)?;
    let ids = Tensor::zeros(positions, DType::U32, &Device::Cpu)?;
    let advantages = Tensor::full(1e-3f32, positions, &Device::Cpu)?;
    let loss = distributions.policy_loss(&PolicyBatch::new(ids, advantages), &PolicyOptions::new())?;
    assert_eq!(loss.value.to_scalar::<f32>()?, loss.sum.to_scalar::<f32>()?);
    Ok(())
}

/// On a GPU, where reading the targets would wait, the loss is NaN; on the CPU the target is an error.
#[test]
fn a_target_outside_the_vocabulary_leaves_the_device_intact() -> Result<()> {
    for device in devices() {
        let weight = Var::from_tensor(&tensor(&[10, 4], 1, DType::F32)?.to_device(&device)?)?;
        let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
        let hidden = tensor(&[3, 4], 2, DType::F32)?.to_device(&device)?;
        let teacher = Teacher::from_log_probs(&head.log_probs(&hidden)?.detach());
        for target in [10i64, -1, 1 << 40] {
            let targets = Tensor::new(&[5, target, 0], &device)?;
            let options = DistillOptions::default().with_hard_weight(0.1).with_targets(targets);
            let loss = head.distill(&hidden, &teacher, &options);
            if device.is_cpu() {
                let error = loss.expect_err("no id");
                assert!(matches!(error, Error::Target { position: 1, got, .. } if got == target), "{error:?}");
                continue;
            }
            let loss = loss?;
            assert!(loss.value.to_scalar::<f32>()?.is_nan());
            let is_nan: Vec<bool> = loss.nll.to_vec1::<f32>()?.into_iter().map(f32::is_nan).collect();
            assert_eq!(is_nan, [false, true, false]);
            assert!(numbers(&loss.backward()?.remove(&weight).expect("a gradient")).iter().any(|x| x.is_nan()));
        }
    }
    Ok(())
}

/// As a loss over targets does; its sum remains that of the weighted divergences.
#[test]
fn the_mean_is_zero_if_the_weights_sum_to_zero() -> Result<()> {
    let student = SoftmaxHead::from_tensors(Tensor::new(&[[1f32], [-1.0], [0.5]], &Device::Cpu)?, None)?;
    let hidden = Var::from_tensor(&Tensor::new(&[[1f32], [2.0]], &Device::Cpu)?)?;
    let teacher = Teacher::from_log_probs(&Tensor::full(-(3f32.ln()), (2, 3), &Device::Cpu)?);
    let options = DistillOptions::default().with_position_weights(Tensor::new(&[1f32, -1.0], &Device::Cpu)?);
    let mean = student.distill(&hidden, &teacher, &options)?;
    let sum = student.distill(&hidden, &teacher, &options.with_reduction(Reduction::Sum))?;
    assert_eq!(mean.value.to_scalar::<f32>()?, 0.0);
    let gradient = mean.backward()?.get(&hidden).expect("a gradient").flatten_all()?.to_vec1::<f32>()?;
    assert_eq!(gradient, [0.0, 0.0]);
    assert!(sum.value.to_scalar::<f32>()?.abs() > 0.1);
    assert_eq!(mean.sum.to_scalar::<f32>()?, sum.value.to_scalar::<f32>()?);
    assert_eq!(mean.count.to_scalar::<f32>()?, 0.0);
    Ok(())
}
