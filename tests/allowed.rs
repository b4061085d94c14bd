//! Distributions that are renormalised over sets of allowed ids: every result and every gradient equals plain loops in
//! f64, central differences and candle's operations, for each way in which they are computed.

mod common;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::{DType, Device, Tensor, Var};
use common::allowed::{assert_config, cases, entropies, ids, nll, per_position, renormalized};
use common::case::Tensors;
use common::check::{assert_near, central_differences, gradients, Gradients};
use common::problem::{Problem, Sets};
use common::values::{gradient, numbers, uniform, Numbers};
use common::{exact, on, on_each_device};
use mos_head::decode::{Sampler, Sampling};
use mos_head::sampled::{Negatives, NoiseDistribution};
use mos_head::score::ScoreOptions;
use mos_head::sets::AllowedIds;
use mos_head::{Distributions, Error, LossOptions, Mixture, OptionName, Reduction, Result};

/// The relative tolerance of values, and of gradients.
fn tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F64 => (1e-12, 1e-11),
        DType::F32 => (1e-5, 4e-5),
        _ => (1e-5, 1e-2),
    }
}

/// Losses, log-probabilities, scores and entropies of every case, in every dtype.
#[test]
fn values_equal_plain_loops() -> Result<()> {
    for case in cases() {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let (tolerance, _) = tolerance(dtype);
            let name = format!("{case:?} {dtype:?}");
            let near = |found: &Tensor, expected: &[f64]| {
                let found = numbers(found).named(&name);
                assert_relative_eq!(found, *expected, max_relative = tolerance);
            };
            let drawn = case.drawn(dtype);
            let (lists, targets, n) = (case.lists(), case.targets(), case.positions);
            let truth = renormalized(&drawn, &lists, 1.0);
            let mixture = drawn.mixture(dtype, &Device::Cpu)?;
            let found = mixture.restricted(&case.allowed())?;

            let mut expected = vec![f64::NEG_INFINITY; n * case.vocab];
            for (t, list) in lists.iter().enumerate() {
                list.iter().zip(&truth[t]).for_each(|(&id, &x)| expected[t * case.vocab + id as usize] = x);
            }
            let log_probs = found.log_probs_as(DType::F64)?;
            assert_eq!(log_probs.dims(), [n, case.vocab]);
            near(&log_probs, &expected);

            let target_ids = ids(&targets, &[n]);
            let loss = found.loss(&target_ids, &LossOptions::new().with_reduction(Reduction::None))?;
            let expected = nll(&truth, &lists, &targets);
            near(&loss.nll, &expected);
            near(&loss.value, &expected);
            near(&found.log_prob(&target_ids)?.affine(-1., 0.)?, &expected);

            let tempered = renormalized(&drawn, &lists, case.temperature);
            let options = ScoreOptions::new().with_temperature(case.temperature).with_entropy(true);
            let first: Vec<u32> = (0..n).flat_map(|t| [lists[t][0], targets[t]]).collect();
            let scores = found.score(&ids(&first, &[n, 2]), &options)?;
            let tempered_nll = nll(&tempered, &lists, &targets);
            let expected: Vec<f64> = (0..n).flat_map(|t| [tempered[t][0], -tempered_nll[t]]).collect();
            near(&scores.log_prob, &expected);
            near(&scores.entropy.expect("asked for"), &entropies(&tempered));
            near(&found.entropy()?, &entropies(&truth));
        }
    }
    Ok(())
}

/// A function of every result, by whose gradients they are compared.
fn value(case: &Problem, tensors: &Tensors, part: usize) -> Result<Tensor> {
    let restricted = case.mixture(tensors)?.restricted(&case.allowed())?;
    let targets = ids(&case.targets(), &[case.positions]);
    let weights = upstream(case.positions, tensors["contexts"].dtype())?;
    match part {
        0 => {
            let options = LossOptions::new().with_position_weights(weights).with_reduction(Reduction::Sum);
            Ok(restricted.loss(&targets, &options)?.value)
        }
        1 => {
            let options = ScoreOptions::new().with_temperature(case.temperature).with_entropy(true);
            let scores = restricted.score(&targets, &options)?;
            let entropy = scores.entropy.expect("asked for");
            Ok(((scores.log_prob * &weights)?.sum_all()? + (entropy * weights)?.sum_all()?)?)
        }
        _ => {
            let log_probs = restricted.log_probs()?;
            let mut sum = Tensor::zeros((), log_probs.dtype(), &Device::Cpu)?;
            for (t, list) in case.lists().iter().enumerate() {
                let listed = log_probs.get(t)?.index_select(&Tensor::new(list.as_slice(), &Device::Cpu)?, 0)?;
                sum = (sum + (listed.sqr()?.sum_all()? * weights.get(t)?)?)?;
            }
            Ok(sum)
        }
    }
}

/// The same from candle's operations.
fn composed_value(case: &Problem, tensors: &Tensors, part: usize) -> Result<Tensor> {
    let (lists, targets) = (case.lists(), case.targets());
    let weights = upstream(case.positions, tensors["contexts"].dtype())?;
    let temperature = if part == 1 { case.temperature } else { 1.0 };
    let mut sum = Tensor::zeros((), DType::F64, &Device::Cpu)?;
    for (t, row) in case.composed_restricted(tensors, temperature)?.iter().enumerate() {
        let place = lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
        let target_log_prob = row.get(place)?;
        let term = match part {
            0 => target_log_prob.neg()?,
            1 => (target_log_prob - (row.exp()? * row)?.sum_all()?)?,
            _ => row.sqr()?.sum_all()?,
        };
        sum = (sum + (term * weights.get(t)?)?)?;
    }
    Ok(sum)
}

fn upstream(n: usize, dtype: DType) -> Result<Tensor> {
    let values: Vec<f64> = (0..n).map(|i| 0.3 + ((i * 5) % 7) as f64 / 4.0).collect();
    Ok(Tensor::from_vec(values, n, &Device::Cpu)?.to_dtype(if dtype == DType::F64 { dtype } else { DType::F32 })?)
}

#[test]
fn gradients_equal_composed_operations() -> Result<()> {
    for case in cases() {
        for part in 0..3 {
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                // Rounded log-probabilities have other gradients.
                if part == 2 && dtype == DType::BF16 {
                    continue;
                }
                let vars = case.variables(dtype)?;
                let truth = case.drawn(dtype).variables(DType::F64, &Device::Cpu)?;
                let found = value(&case, &vars, part)?.backward()?;
                let expected = composed_value(&case, &truth, part)?.backward()?;
                let (found, expected) = (gradients(&found, &vars), gradients(&expected, &truth));
                assert_near(&format!("{part} of {case:?} in {dtype:?}"), &found, &expected, tolerance(dtype).1);
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_equal_central_differences() -> Result<()> {
    for case in cases().into_iter().filter(|case| case.vocab < 100 && case.vocab > 1) {
        let (lists, targets) = (case.lists(), case.targets());
        let vars = case.variables(DType::F64)?;
        let weights = numbers(&upstream(case.positions, DType::F64)?);
        let expected = central_differences(&case.drawn(DType::F64), |moved| {
            let nll = nll(&renormalized(moved, &lists, 1.0), &lists, &targets);
            Ok(nll.iter().zip(weights.iter()).map(|(nll, weight)| nll * weight).sum())
        })?;
        let found = gradients(&value(&case, &vars, 0)?.backward()?, &vars);
        assert!(found.keys().eq(expected.keys()), "{case:?}: {:?}", found.keys());
        for (name, found) in found {
            assert_abs_diff_eq!(found, expected[name], epsilon = 1e-7);
        }
    }
    Ok(())
}

/// `Loss::backward` spares a copy of the decoder's gradient, and `Scores::backward` does.
#[test]
fn a_backward_pass_with_a_copy_less_has_the_same_gradients() -> Result<()> {
    for case in cases() {
        let vars = case.variables(DType::F64)?;
        let restricted = case.mixture(&vars)?.restricted(&case.allowed())?;
        let targets = ids(&case.targets(), &[case.positions]);
        let loss = restricted.loss(&targets, &LossOptions::new())?;
        let scores = restricted.score(&targets, &ScoreOptions::new().with_entropy(true))?;
        let value = (scores.log_prob.sum_all()? + scores.entropy.as_ref().expect("asked for").sqr()?.sum_all()?)?;
        let pairs = [(loss.backward()?, loss.value.backward()?), (scores.backward(&value)?, value.backward()?)];
        for (found, expected) in pairs {
            assert_near("a copy less", &gradients(&found, &vars), &gradients(&expected, &vars), 1e-14);
        }
    }
    Ok(())
}

/// With all ids allowed nothing changes: not a bit if the set is for all positions.
#[test]
fn all_ids_allowed_equal_the_plain_loss() -> Result<()> {
    for components in [1, 3] {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let case = Problem { components, ..cases()[2 * 3] };
            let vars = case.variables(dtype)?;
            let mixture = case.mixture(&vars)?;
            let targets = ids(&case.targets(), &[case.positions]);
            let all: Vec<u32> = (0..case.vocab as u32).collect();
            let options = LossOptions::new();
            let plain = mixture.loss(&targets, &options)?;
            let expected = plain.backward()?;
            let mask = Tensor::ones(case.vocab, DType::U8, &Device::Cpu)?;
            for (allowed, tolerance) in [
                (AllowedIds::new(&all), 0.0),
                (AllowedIds::from_mask(&mask)?, 0.0),
                (AllowedIds::new(&[]).with_empty_as_full(true), 0.0),
                (per_position(&vec![all.clone(); case.positions]), tolerance(dtype).0),
                (per_position(&vec![vec![]; case.positions]).with_empty_as_full(true), tolerance(dtype).0),
            ] {
                let restricted = mixture.restricted(&allowed)?;
                let loss = restricted.loss(&targets, &options)?;
                let (exact, gradient_tolerance) =
                    (tolerance, if dtype == DType::BF16 { 1e-2 } else { 4.0 * tolerance });
                for (found, expected, tolerance) in [
                    (&loss.nll, &plain.nll, exact),
                    (&restricted.log_probs()?, &mixture.log_probs()?, gradient_tolerance),
                    (&restricted.entropy()?, &mixture.entropy()?, exact),
                ] {
                    assert_relative_eq!(numbers(found), numbers(expected), max_relative = tolerance);
                }
                let (found, expected) = (gradients(&loss.backward()?, &vars), gradients(&expected, &vars));
                assert_eq!(expected.len(), vars.len());
                assert_near("all", &found, &expected, if tolerance == 0.0 { 0.0 } else { gradient_tolerance });
            }
        }
    }
    Ok(())
}

#[test]
fn a_single_allowed_id_has_no_loss_and_no_gradient() -> Result<()> {
    for components in [1, 3] {
        for shared in [true, false] {
            let case = Problem { components, sets: if shared { Sets::Shared(1) } else { Sets::Each(1) }, ..cases()[3] };
            let vars = case.variables(DType::F32)?;
            let restricted = case.mixture(&vars)?.restricted(&case.allowed())?;
            let targets = ids(&case.targets(), &[case.positions]);
            let loss = restricted.loss(&targets, &LossOptions::new())?;
            assert_eq!(numbers(&loss.nll), vec![0.0; case.positions]);
            let found = gradients(&loss.backward()?, &vars);
            assert_eq!(found.len(), vars.len());
            for (name, gradient) in found {
                assert!(gradient.iter().all(|g| g.abs() < 1e-6), "{name}: {gradient:?}");
            }
            assert_eq!(restricted.argmax()?.to_vec1::<u32>()?, case.targets());
        }
    }
    Ok(())
}

/// The softcap comes first: a mask before it would leave masked ids `exp(-cap)`.
#[test]
fn ids_are_restricted_after_the_softcap() -> Result<()> {
    let weight = Tensor::new(&[[1f64], [2.], [3.]], &Device::Cpu)?;
    let mixture = Mixture::new(&Tensor::ones((1, 1, 1), DType::F64, &Device::Cpu)?, None, &weight, None)?;
    let restricted = mixture.with_softcap(0.5)?.restricted(&AllowedIds::new(&[0, 2]))?;
    let z = [1.0f64, 3.0].map(|z| 0.5 * (z / 0.5).tanh());
    let first_log_prob = z[0] - (z[0].exp() + z[1].exp()).ln();
    let found = numbers(&restricted.log_probs()?);
    assert_abs_diff_eq!(found[0], first_log_prob, epsilon = 1e-14);
    assert_eq!(found[1], f64::NEG_INFINITY);
    Ok(())
}

#[test]
fn repeated_ids_count_once_in_any_order() -> Result<()> {
    for components in [1, 3] {
        let case = Problem { components, ..cases()[9] };
        let mixture = case.drawn(DType::F64).mixture(DType::F64, &Device::Cpu)?;
        let lists = case.lists();
        let repeated: Vec<Vec<u32>> =
            lists.iter().map(|list| list.iter().rev().chain(list).copied().collect()).collect();
        let log_probs_within = |allowed: AllowedIds| mixture.restricted(&allowed)?.log_probs();
        assert_eq!(
            numbers(&log_probs_within(per_position(&lists))?),
            numbers(&log_probs_within(per_position(&repeated))?)
        );
        assert_eq!(
            numbers(&log_probs_within(AllowedIds::new(&lists[0]))?),
            numbers(&log_probs_within(AllowedIds::new(&repeated[0]))?)
        );
    }
    Ok(())
}

/// A target outside its set is an error that names it, or a member of the set.
#[test]
fn targets_outside_their_sets_are_errors_or_added() -> Result<()> {
    for case in cases().into_iter().filter(|case| case.vocab > 30 && case.sets != Sets::Shared(30)) {
        let mixture = case.drawn(DType::F64).mixture(DType::F64, &Device::Cpu)?;
        let (mut lists, mut targets) = (case.lists(), case.targets());
        let last = case.positions - 1;
        let outside = (0..case.vocab as u32).find(|id| !lists[last].contains(id)).expect("not all are allowed");
        targets[last] = outside;
        let target_ids = ids(&targets, &[case.positions]);
        let restricted = mixture.restricted(&case.allowed())?;
        let errors = [
            restricted.loss(&target_ids, &LossOptions::new()).map(|_| ()),
            restricted.score(&target_ids, &ScoreOptions::new()).map(|_| ()),
        ];
        for error in errors.map(|result| result.expect_err("a target outside")) {
            assert!(
                matches!(error, Error::NotAllowed { position, got } if position == last && got == i64::from(outside)),
                "{error:?}"
            );
            let message = error.to_string();
            assert!(message.contains(&format!("{outside} at position {last} is not among")), "{message}");
        }
        let restricted = mixture.restricted(&case.allowed().with_targets_added(true))?;
        let loss = restricted.loss(&target_ids, &LossOptions::new())?;
        lists[last].push(outside);
        let truth = renormalized(&case.drawn(DType::F64), &lists, 1.0);
        let nll = nll(&truth, &lists, &targets);
        assert_relative_eq!(numbers(&loss.nll), nll, max_relative = 1e-12);
        let scores = restricted.score(&target_ids, &ScoreOptions::new().with_entropy(true))?;
        assert_relative_eq!(numbers(&scores.log_prob.affine(-1.0, 0.0)?), nll, max_relative = 1e-12);
        assert_relative_eq!(numbers(&scores.entropy.expect("asked for")), entropies(&truth), max_relative = 1e-12);
    }
    Ok(())
}

#[test]
fn empty_sets_are_errors_or_allow_all_ids() -> Result<()> {
    for components in [1, 3] {
        let case = Problem { components, ..cases()[9] };
        let mixture = case.drawn(DType::F64).mixture(DType::F64, &Device::Cpu)?;
        let (mut lists, targets) = (case.lists(), ids(&case.targets(), &[case.positions]));
        lists[2] = vec![];
        let allowed = per_position(&lists);
        let restricted = mixture.restricted(&allowed)?;
        let mut sampler = Sampler::new(Sampling::new(), 1)?;
        for error in [
            restricted.loss(&targets, &LossOptions::new()).map(|_| ()),
            restricted.log_probs().map(|_| ()),
            restricted.score(&targets, &ScoreOptions::new()).map(|_| ()),
            restricted.top_k(2).map(|_| ()),
            restricted.argmax().map(|_| ()),
            restricted.sample(&mut sampler).map(|_| ()),
        ] {
            let error = error.expect_err("an empty set");
            assert!(matches!(error, Error::EmptySet { position: 2 }), "{error:?}");
            assert_eq!(error.to_string(), "no id is allowed at position 2");
        }
        let none = mixture.restricted(&AllowedIds::new(&[]))?;
        assert!(matches!(none.top_k(1), Err(Error::EmptySet { position: 0 })));
        assert!(matches!(none.loss(&targets, &LossOptions::new()), Err(Error::EmptySet { position: 0 })));

        let restricted = mixture.restricted(&allowed.with_empty_as_full(true))?;
        lists[2] = (0..case.vocab as u32).collect();
        let truth = renormalized(&case.drawn(DType::F64), &lists, 1.0);
        assert_relative_eq!(numbers(&restricted.log_probs()?.get(2)?), truth[2], max_relative = 1e-12);
        let nll = numbers(&restricted.loss(&targets, &LossOptions::new())?.nll);
        assert_abs_diff_eq!(nll[2], -truth[2][case.targets()[2] as usize], epsilon = 1e-12);
        assert_eq!(restricted.top_k(case.vocab)?.token_ids.dims(), [case.positions, case.vocab]);
    }
    Ok(())
}

/// Ignored positions need neither a valid target nor a set, and may hold NaN.
#[test]
fn ignored_positions_need_no_set() -> Result<()> {
    for case in [cases()[3], cases()[9], cases()[15], cases()[21], cases()[27]] {
        let mut drawn = case.drawn(DType::F64);
        drawn.values.get_mut("contexts").expect("contexts")[..case.components * case.d].fill(f64::NAN);
        let vars = drawn.variables(DType::F64, &Device::Cpu)?;
        let mixture = case.mixture(&vars)?;
        let mut lists = case.lists();
        let shared = matches!(case.sets, Sets::Shared(_));
        let allowed = if shared {
            case.allowed()
        } else {
            lists[0] = vec![];
            per_position(&lists)
        };
        let mut targets: Vec<i64> = case.targets().into_iter().map(i64::from).collect();
        targets[0] = -100;
        let targets = Tensor::new(targets.as_slice(), &Device::Cpu)?;
        let loss = mixture.restricted(&allowed)?.loss(&targets, &LossOptions::new().with_ignore_index(-100))?;
        assert_eq!(numbers(&loss.count), [(case.positions - 1) as f64]);
        assert_eq!(numbers(&loss.nll)[0], 0.0);
        let found = gradients(&loss.backward()?, &vars);
        assert_eq!(found.len(), vars.len());
        for (name, gradient) in found {
            assert!(gradient.iter().all(|g| g.is_finite()), "{name} {case:?}");
            assert!(gradient.iter().any(|g| *g != 0.0), "{name} {case:?}");
        }
        let lists = case.lists();
        let nll = nll(&renormalized(&case.drawn(DType::F64), &lists, 1.0), &lists, &case.targets());
        let mean = nll[1..].iter().sum::<f64>() / (case.positions - 1) as f64;
        assert_abs_diff_eq!(numbers(&loss.value), [mean], epsilon = 1e-12 * mean.max(1.0));
        // All ignored.
        let none = Tensor::full(-100i64, case.positions, &Device::Cpu)?;
        for allowed in [allowed, AllowedIds::new(&[])] {
            let loss = mixture.restricted(&allowed)?.loss(&none, &LossOptions::new().with_ignore_index(-100))?;
            assert_eq!(loss.sum_and_count()?, (0.0, 0.0));
            assert_eq!(numbers(&loss.value), [0.0]);
        }
    }
    Ok(())
}

/// Nothing is computed of an ignored position: neither ids without a probability, in its set or elsewhere, nor a NaN
/// change the gradients, which are those of the other positions.
#[test]
fn an_ignored_position_has_no_part_in_the_gradients() -> Result<()> {
    let impossible = f64::NEG_INFINITY;
    for (components, shared, bias) in [
        (2, false, [impossible, 0.0, 0.0, 0.0]),
        (1, false, [impossible, 0.0, 0.0, 0.0]),
        (2, true, [impossible, 0.0, 0.0, 0.0]),
        (1, true, [impossible, 0.0, 0.0, 0.0]),
        // The ignored position has the last id alone.
        (2, false, [0.0, 0.3, -0.2, impossible]),
        (1, false, [0.0, 0.3, -0.2, impossible]),
    ] {
        let contexts = Var::from_tensor(&Tensor::ones((2, components, 1), DType::F64, &Device::Cpu)?)?;
        let log_priors = Var::from_tensor(&(Tensor::ones((2, components), DType::F64, &Device::Cpu)? * 0.5)?.log()?)?;
        let weight = Var::from_tensor(&Tensor::new(&[[0.1], [0.2], [-0.3], [0.4]], &Device::Cpu)?)?;
        let bias = Var::from_tensor(&Tensor::new(&bias, &Device::Cpu)?)?;
        let mixture = |positions: usize| {
            let leading = |var: &Var| var.narrow(0, 0, positions);
            let log_priors = Some(leading(&log_priors)?).filter(|_| components > 1);
            Mixture::new(&leading(&contexts)?, log_priors.as_ref(), &weight, Some(&bias))
        };
        let (both, alone) = if shared {
            // With targets added, sets are lists.
            let ids = AllowedIds::new(&[2]).with_targets_added(true);
            (ids.clone(), ids)
        } else {
            (per_position(&[vec![1, 2], vec![3]]), per_position(&[vec![1, 2]]))
        };
        let options = LossOptions::new().with_ignore_index(-100);
        let targets = Tensor::new(&[1i64, -100], &Device::Cpu)?;
        let loss = mixture(2)?.restricted(&both)?.loss(&targets, &options)?;
        let expected = mixture(1)?.restricted(&alone)?.loss(&targets.narrow(0, 0, 1)?, &options)?;
        assert_eq!(numbers(&loss.value), numbers(&expected.value));
        assert_eq!(numbers(&loss.nll), [numbers(&expected.nll)[0], 0.0]);
        let (found, expected) = (loss.backward()?, expected.backward()?);
        for var in [&contexts, &log_priors, &weight, &bias].into_iter().filter(|var| expected.get(var).is_some()) {
            let found = numbers(found.get(var).expect("a gradient"));
            assert_eq!(found, numbers(expected.get(var).expect("a gradient")), "K = {components}, shared {shared}");
            assert!(found.iter().all(|g| g.is_finite()));
        }
        // If all are ignored, nothing has a gradient.
        let none = Tensor::full(-100i64, 2, &Device::Cpu)?;
        let loss = mixture(2)?.restricted(&both)?.loss(&none, &options)?;
        assert_eq!(numbers(&loss.value), [0.0]);
        let gradients = loss.backward()?;
        for var in [&contexts, &weight, &bias] {
            assert!(numbers(gradients.get(var).expect("a gradient")).iter().all(|g| *g == 0.0));
        }
    }
    Ok(())
}

/// A NaN stays at its position; ids of logit minus infinity have no probability and no NaN gradient; a set of these
/// alone has no distribution.
#[test]
fn infinite_and_undefined_logits_stay_where_they_are() -> Result<()> {
    for components in [1, 3] {
        for case in [
            Problem { components, ..cases()[9] },
            Problem { components, ..cases()[15] },
            Problem { components, ..cases()[3] },
        ] {
            let (lists, targets) = (case.lists(), case.targets());
            // Forbidden by the bias: an id of position 1 that is no target.
            let forbidden = lists.iter().flatten().copied().find(|id| !targets.contains(id)).expect("another id");
            let mut drawn = case.drawn(DType::F64);
            drawn.values.get_mut("decoder.bias").expect("a bias")[forbidden as usize] = f64::NEG_INFINITY;
            let vars = drawn.variables(DType::F64, &Device::Cpu)?;
            let restricted = case.mixture(&vars)?.restricted(&case.allowed())?;
            let target_ids = ids(&targets, &[case.positions]);
            let scores = restricted.score(&target_ids, &ScoreOptions::new().with_entropy(true))?;
            let expected = nll(&renormalized(&drawn, &lists, 1.0), &lists, &targets);
            assert_relative_eq!(numbers(&scores.log_prob.affine(-1.0, 0.0)?), expected, max_relative = 1e-12);
            let value = (scores.log_prob.sum_all()? + scores.entropy.expect("asked for").sum_all()?)?;
            let found = gradients(&value.backward()?, &vars);
            assert_eq!(found.len(), vars.len());
            for (name, gradient) in found {
                assert!(gradient.iter().all(|g| g.is_finite()), "{name} {case:?}");
            }

            drawn.values.get_mut("contexts").expect("contexts")[..components * case.d].fill(f64::NAN);
            let mixture = drawn.mixture(DType::F64, &Device::Cpu)?;
            let restricted = mixture.restricted(&case.allowed())?;
            let nll = numbers(&restricted.loss(&target_ids, &LossOptions::new())?.nll);
            assert!(nll[0].is_nan() && nll[1..].iter().all(|x| x.is_finite()), "{nll:?}");
            assert!(matches!(restricted.top_k(1), Err(Error::Distribution { position: 0 })));
            let only = AllowedIds::new(&[forbidden]);
            let last = mixture.restricted(&only)?.log_probs()?.get(1)?;
            assert!(numbers(&last)[forbidden as usize].is_nan());
            let lists = [vec![vec![targets[0]]], vec![vec![forbidden]; case.positions - 1]].concat();
            let finite = case.drawn(DType::F64).mixture(DType::F64, &Device::Cpu)?;
            assert!(finite.restricted(&per_position(&lists))?.top_k(1).is_ok());
        }
    }
    Ok(())
}

#[test]
fn a_set_without_probability_is_no_distribution() -> Result<()> {
    for components in [1, 2] {
        let weight = Tensor::ones((4, 2), DType::F32, &Device::Cpu)?;
        let bias = Tensor::new(&[0f32, f32::NEG_INFINITY, f32::NEG_INFINITY, 1.0], &Device::Cpu)?;
        let contexts = Tensor::ones((3, components, 2), DType::F32, &Device::Cpu)?;
        let log_priors = Tensor::full(-(components as f32).ln(), (3, components), &Device::Cpu)?;
        let log_priors = Some(&log_priors).filter(|_| components > 1);
        let mixture = Mixture::new(&contexts, log_priors, &weight, Some(&bias))?;
        let mut sampler = Sampler::new(Sampling::new().with_top_p(0.5), 1)?;
        let lists = per_position(&[vec![0, 1], vec![3], vec![1, 2]]);
        for (allowed, expected) in [(lists, 2), (AllowedIds::new(&[2, 1]), 0)] {
            let restricted = mixture.restricted(&allowed)?;
            for result in [restricted.top_k(2).map(|_| ()), restricted.sample(&mut sampler).map(|_| ())] {
                let is_expected = matches!(result, Err(Error::Impossible { position }) if position == expected);
                assert!(is_expected, "{components} {result:?}");
            }
        }
    }
    Ok(())
}

on_each_device! {
    fn sets_of_each_device_equal_plain_loops(device: &Device) -> Result<()> {
        let dtype = exact(device);
        for case in cases() {
            let vars = case.drawn(dtype).variables(dtype, device)?;
            let restricted = case.mixture(&vars)?.restricted(&case.allowed())?;
            let targets = on(device, &ids(&case.targets(), &[case.positions]))?;
            let loss = restricted.loss(&targets, &LossOptions::new())?;
            let lists = case.lists();
            let expected = nll(&renormalized(&case.drawn(dtype), &lists, 1.0), &lists, &case.targets());
            assert_relative_eq!(numbers(&loss.nll), expected, epsilon = 1e-6, max_relative = 1e-5);
            assert!(loss.backward()?.get(&vars["decoder.weight"]).is_some());
            let top = restricted.top_k(1)?;
            for (t, id) in top.token_ids.flatten_all()?.to_vec1::<u32>()?.into_iter().enumerate() {
                assert!(lists[t].contains(&id));
            }
        }
        Ok(())
    }

    fn an_empty_batch_of_each_device_has_no_positions(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let weight = Var::from_tensor(&Tensor::ones((20, 6), dtype, device)?)?;
        for components in [1, 2] {
            let log_priors = Tensor::zeros((0, components), dtype, device)?;
            let log_priors = Some(&log_priors).filter(|_| components > 1);
            let contexts = Tensor::zeros((0, components, 6), dtype, device)?;
            let mixture = Mixture::new(&contexts, log_priors, &weight, None)?;
            for allowed in [AllowedIds::new(&[3, 5]), AllowedIds::new(&[]), AllowedIds::per_position(&[], &[0])?] {
                let restricted = mixture.restricted(&allowed)?;
                let loss = restricted.loss(&Tensor::zeros(0, DType::U32, device)?, &LossOptions::new())?;
                assert_eq!(numbers(&loss.value), [0.0]);
                assert!(numbers(loss.backward()?.get(&weight).expect("a gradient")).iter().all(|g| *g == 0.0));
                assert_eq!(restricted.log_probs()?.dims(), [0, 20]);
                assert_eq!(restricted.entropy()?.dims(), [0]);
                assert_eq!(restricted.top_k(2)?.token_ids.dims(), [0, 2]);
                assert_eq!(restricted.sample(&mut Sampler::new(Sampling::new(), 1)?)?.dims(), [0]);
            }
        }
        Ok(())
    }
}

/// The options of a loss over one set for all positions are those of a small vocabulary.
#[test]
fn options_of_one_set_are_those_of_a_small_vocabulary() -> Result<()> {
    let case = cases()[3];
    let vars = case.variables(DType::F64)?;
    let list = case.lists()[0].clone();
    let index = Tensor::new(list.as_slice(), &Device::Cpu)?;
    let small = case.operands(&vars)?.only(&index)?.mixture(case.logits())?;
    let restricted = case.mixture(&vars)?.restricted(&case.allowed())?;
    let place = |id: &u32| list.iter().position(|other| other == id).expect("allowed") as u32;
    let targets = case.targets();
    let places = ids(&targets.iter().map(place).collect::<Vec<_>>(), &[case.positions]);
    let targets = ids(&targets, &[case.positions]);
    let class_weights = upstream(case.vocab, DType::F64)?;
    let plain = LossOptions::new().with_position_weights(upstream(case.positions, DType::F64)?);
    for (options, small_options) in [
        (plain.clone().with_label_smoothing(0.2), plain.clone().with_label_smoothing(0.2)),
        (plain.clone().with_z_loss(0.1), plain.clone().with_z_loss(0.1)),
        (plain.clone().with_correct(true), plain.clone().with_correct(true)),
        (plain.clone().with_denominator(7.0), plain.clone().with_denominator(7.0)),
        (
            plain.clone().with_class_weights(class_weights.clone()),
            plain.with_class_weights(class_weights.index_select(&index, 0)?),
        ),
    ] {
        let (found, expected) = (restricted.loss(&targets, &options)?, small.loss(&places, &small_options)?);
        assert_eq!(numbers(&found.value), numbers(&expected.value));
        assert_eq!(numbers(&found.count), numbers(&expected.count));
        assert_eq!(found.correct.as_ref().map(numbers), expected.correct.as_ref().map(numbers));
        let (found, expected) = (gradients(&found.backward()?, &vars), gradients(&expected.backward()?, &vars));
        assert_eq!(expected.len(), vars.len());
        assert_near("one set", &found, &expected, 1e-14);
    }
    Ok(())
}

/// Class weights, the reduction and the denominator of lists follow the options too; others are refused.
#[test]
fn options_of_lists_follow_the_conventions_or_are_refused() -> Result<()> {
    let case = cases()[9];
    let mixture = case.drawn(DType::F64).mixture(DType::F64, &Device::Cpu)?;
    let restricted = mixture.restricted(&case.allowed())?;
    let targets = ids(&case.targets(), &[case.positions]);
    let (position_weights, class_weights) = (upstream(case.positions, DType::F64)?, upstream(case.vocab, DType::F64)?);
    let options =
        LossOptions::new().with_position_weights(position_weights.clone()).with_class_weights(class_weights.clone());
    let loss = restricted.loss(&targets, &options)?;
    let weights = numbers(&(position_weights * class_weights.index_select(&targets, 0)?)?);
    let sum: f64 = numbers(&loss.nll).iter().zip(weights.iter()).map(|(nll, weight)| nll * weight).sum();
    let count: f64 = weights.iter().sum();
    assert_relative_eq!(numbers(&loss.value), [sum / count], max_relative = 1e-13);
    let halved = restricted.loss(&targets, &options.with_denominator(2.0 * count))?;
    assert_relative_eq!(numbers(&halved.value), [sum / count / 2.0], max_relative = 1e-13);
    assert!(!restricted.loss(&targets, &LossOptions::evaluation())?.value.track_op());

    let shared = mixture.restricted(&AllowedIds::new(&case.lists()[0]).with_targets_added(true))?;
    let negatives: Negatives = NoiseDistribution::log_uniform(case.vocab)?.draw(4, 1)?;
    let refused: [(OptionName, LossOptions); 4] = [
        (OptionName::LabelSmoothing, LossOptions::new().with_label_smoothing(0.1)),
        (OptionName::ZLoss, LossOptions::new().with_z_loss(0.1)),
        (OptionName::SampledSoftmax, LossOptions::new().with_sampled_softmax(negatives.clone())),
        (OptionName::Nce, LossOptions::new().with_nce(negatives)),
    ];
    for (expected, options) in refused {
        for restricted in [&restricted, &shared] {
            let error = restricted.loss(&targets, &options).expect_err("not supported");
            assert!(matches!(error, Error::Unsupported { option, .. } if option == expected), "{error:?}");
        }
    }
    Ok(())
}

#[test]
fn sets_that_do_not_fit_are_refused() -> Result<()> {
    let mixture = cases()[3].drawn(DType::F32).mixture(DType::F32, &Device::Cpu)?; // 5 positions, 37 ids
    assert_config(mixture.restricted(&AllowedIds::new(&[36, 37])), "allowed ids", "below vocab_size 37, got 37");
    let lists = [vec![1], vec![2, 99], vec![3], vec![], vec![5]];
    assert_config(
        mixture.restricted(&per_position(&lists)),
        "allowed ids",
        "below vocab_size 37, got 99 at position 1",
    );
    assert_config(mixture.restricted(&per_position(&lists[2..])), "allowed ids", "each of 5 positions, got 3");
    assert_config(AllowedIds::per_position(&[1, 2], &[]), "offsets", "got none");
    assert_config(AllowedIds::per_position(&[1, 2], &[1, 2]), "offsets", "got 1 first");
    assert_config(AllowedIds::per_position(&[1, 2], &[0, 1]), "offsets", "got 1 last");
    assert_config(AllowedIds::per_position(&[1, 2], &[0, 2, 1, 2]), "offsets", "got 1 after 2 at index 2");
    assert_config(AllowedIds::per_position(&[1], &[0]), "offsets", "got 0 last");
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let mask = AllowedIds::from_mask(&zeros(&[36], DType::U8)?)?;
    assert!(matches!(mixture.restricted(&mask), Err(Error::Shape { argument: "mask", .. })));
    let matrix = AllowedIds::from_mask(&zeros(&[2, 37], DType::U8)?);
    assert!(matches!(matrix, Err(Error::Shape { argument: "mask", .. })));
    let wide = AllowedIds::from_mask(&zeros(&[37], DType::U32)?);
    assert!(matches!(wide, Err(Error::DType { argument: "mask", .. })));
    let restricted = mixture.restricted(&AllowedIds::new(&[3]))?;
    assert_config(restricted.top_k(0), "k", "1 to vocab_size 37");
    assert_config(restricted.top_k(38), "k", "1 to vocab_size 37");
    let targets = Tensor::new(&[3u32, 3, 37, 3, 3], &Device::Cpu)?;
    let error = restricted.loss(&targets, &LossOptions::new());
    assert!(matches!(error, Err(Error::Target { position: 2, got: 37, vocab_size: 37, .. })), "{error:?}");
    let error = restricted.loss(&ids(&[3], &[1]), &LossOptions::new());
    assert!(matches!(error, Err(Error::Shape { argument: "targets", .. })), "{error:?}");
    Ok(())
}

/// The log-prior of a single component cancels; it has a gradient, which is zero.
#[test]
fn the_log_prior_of_one_component_changes_nothing() -> Result<()> {
    for case in [cases()[3], cases()[9], cases()[15]] {
        let vars = case.variables(DType::F64)?;
        let log_priors = Var::from_tensor(&upstream(case.positions, DType::F64)?.unsqueeze(1)?)?;
        let targets = ids(&case.targets(), &[case.positions]);
        let without = case.mixture(&vars)?.restricted(&case.allowed())?;
        let mut operands = case.operands(&vars)?;
        operands.log_priors = Some(log_priors.as_tensor().clone());
        let with = operands.mixture(case.logits())?.restricted(&case.allowed())?;
        let (a, b) = (with.loss(&targets, &LossOptions::new())?, without.loss(&targets, &LossOptions::new())?);
        assert_relative_eq!(numbers(&a.nll), numbers(&b.nll), max_relative = 1e-12);
        let (a, b) = (a.backward()?, b.backward()?);
        assert_near("a log-prior", &gradients(&a, &vars), &gradients(&b, &vars), 1e-12);
        assert!(gradient(&a, &log_priors).expect("one").iter().all(|g| g.abs() < 1e-14));
    }
    Ok(())
}

/// Each row of the decoder's gradient is the sum of one task: results have the same bits with any number of threads.
#[test]
fn the_number_of_threads_changes_no_bit() -> Result<()> {
    for case in [cases()[3], cases()[9], cases()[15], cases()[27]] {
        let results = |threads: usize| -> Result<(Numbers, Gradients)> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            pool.install(|| {
                let vars = case.variables(DType::F32)?;
                let restricted = case.mixture(&vars)?.restricted(&case.allowed())?;
                let loss = restricted.loss(&ids(&case.targets(), &[case.positions]), &LossOptions::new())?;
                Ok((numbers(&loss.nll), gradients(&loss.backward()?, &vars)))
            })
        };
        let one = results(1)?;
        for threads in [2, 5] {
            assert_eq!(results(threads)?, one, "{case:?} {threads}");
        }
    }
    Ok(())
}

/// A mask as words allows the ids of the mask as a tensor.
#[test]
fn words_are_a_mask() -> Result<()> {
    for vocab in [1usize, 31, 32, 33, 100] {
        let mask: Vec<u8> = (0..vocab).map(|id| u8::from(id * 7 % 5 < 2)).collect();
        // Bits beyond the vocabulary are ignored.
        let mut words = vec![0u32; vocab.div_ceil(32)];
        (vocab..words.len() * 32).for_each(|bit| words[bit / 32] |= 1 << (bit % 32));
        mask.iter().enumerate().for_each(|(id, &bit)| words[id / 32] |= u32::from(bit) << (id % 32));
        let weight = uniform(&[vocab, 3], 1.0, 1)?;
        let mixture = Mixture::new(&uniform(&[4, 1, 3], 1.0, 2)?, None, &weight, None)?;
        let by_mask = AllowedIds::from_mask(&Tensor::new(&mask[..], &Device::Cpu)?)?;
        let by_words = AllowedIds::from_words(&words, vocab)?;
        let log_probs = |allowed| mixture.restricted(allowed)?.log_probs()?.to_vec2::<f64>().map_err(Error::from);
        assert_eq!(log_probs(&by_words)?, log_probs(&by_mask)?);
    }
    let error = AllowedIds::from_words(&[1, 2], 32).unwrap_err().to_string();
    assert_eq!(error, "words: expected 1 words for vocab_size 32, got 2");
    let mixture = Mixture::new(&uniform(&[4, 1, 3], 1.0, 2)?, None, &uniform(&[33, 3], 1.0, 1)?, None)?;
    let error = mixture.restricted(&AllowedIds::from_words(&[1, 2], 34)?).unwrap_err().to_string();
    assert_eq!(error, "vocab_size of the words: expected 33, got 34");
    Ok(())
}
