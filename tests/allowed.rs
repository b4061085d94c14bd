//! Distributions that are renormalised over kept sets of ids: every result and every gradient equals plain loops in f64,
//! central differences and candle's operations, for each way in which they are computed.

mod common;

use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::ops::log_softmax;
use candle_nn::{VarBuilder, VarMap};
use common::allowed::{cases, of_lists, tensors, values, variables, Case, Sets};
use common::check::numbers;
use common::scores::compare;
use common::{exact, on, on_each_device};
use mos_head::{
    AllowedIds, BeamSearch, DropoutMasks, Error, Loss, LossOptions, LowRankAdapter, Mixture, MixtureConfig,
    MixtureLayer, MixtureOfSoftmaxes, Negatives, NoiseDistribution, OptionName, OutputLayer, PolicyBatch,
    PolicyOptions, Reduction, Restricted, Result, Sampler, Sampling, ScoreOptions, SoftmaxHead,
};

/// The relative tolerance of values, and of gradients.
fn tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F64 => (1e-12, 1e-11),
        DType::F32 => (1e-5, 4e-5),
        _ => (1e-5, 1e-2),
    }
}

fn assert_near(name: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let largest = expected.iter().filter(|x| x.is_finite()).fold(0.1f64, |a, x| a.max(x.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        let is_near = a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= tolerance * largest;
        assert!(is_near, "{name}[{i}]: {a}, expected {b} (largest {largest})");
    }
}

fn ids(ids: &[u32], shape: &[usize]) -> Tensor {
    Tensor::from_vec(ids.to_vec(), shape, &Device::Cpu).expect("ids")
}

/// Losses, log-probabilities, scores and entropies of every case, in every dtype.
#[test]
fn values_equal_plain_loops() -> Result<()> {
    for case in cases() {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let (tolerance, _) = tolerance(dtype);
            let name = format!("{case:?} {dtype:?}");
            let operands = case.operands(dtype)?;
            let (lists, targets, n) = (case.lists(), case.targets(), case.positions);
            let of_values = |temperature| case.restricted(&values(&operands), &lists, temperature);
            let truth = of_values(1.0);
            let restricted = case.mixture(&operands)?.restricted(&case.allowed())?;

            let mut expected = vec![f64::NEG_INFINITY; n * case.vocab];
            for (t, list) in lists.iter().enumerate() {
                list.iter().zip(&truth[t]).for_each(|(&id, &x)| expected[t * case.vocab + id as usize] = x);
            }
            let found = restricted.log_probs_as(DType::F64)?;
            assert_eq!(found.dims(), [n, case.vocab]);
            assert_near(&name, &numbers(&found), &expected, tolerance);

            let place = |t: usize| lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
            let nll: Vec<f64> = (0..n).map(|t| -truth[t][place(t)]).collect();
            let loss = restricted.loss(&ids(&targets, &[n]), &LossOptions::new().with_reduction(Reduction::None))?;
            assert_near(&name, &numbers(&loss.nll), &nll, tolerance);
            assert_near(&name, &numbers(&loss.value), &nll, tolerance);
            assert_near(&name, &numbers(&restricted.log_prob(&ids(&targets, &[n]))?.affine(-1., 0.)?), &nll, tolerance);

            let tempered = of_values(case.temperature);
            let entropy = |of: &[Vec<f64>]| -> Vec<f64> {
                of.iter().map(|row| -row.iter().map(|x| x * x.exp()).sum::<f64>()).collect()
            };
            let options = ScoreOptions::new().with_temperature(case.temperature).with_entropy(true);
            let first: Vec<u32> = (0..n).flat_map(|t| [lists[t][0], targets[t]]).collect();
            let scores = restricted.score(&ids(&first, &[n, 2]), &options)?;
            let expected: Vec<f64> = (0..n).flat_map(|t| [tempered[t][0], tempered[t][place(t)]]).collect();
            assert_near(&name, &numbers(&scores.log_prob), &expected, tolerance);
            assert_near(&name, &numbers(&scores.entropy.expect("asked for")), &entropy(&tempered), tolerance);
            assert_near(&name, &numbers(&restricted.entropy()?), &entropy(&truth), tolerance);
        }
    }
    Ok(())
}

/// A function of every result, by whose gradients they are compared.
fn value_of(case: &Case, operands: &[Tensor; 4], part: usize) -> Result<Tensor> {
    let restricted = case.mixture(operands)?.restricted(&case.allowed())?;
    let targets = ids(&case.targets(), &[case.positions]);
    let weights = upstream(case.positions, operands[0].dtype())?;
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
                let of_list = log_probs.get(t)?.index_select(&Tensor::new(list.as_slice(), &Device::Cpu)?, 0)?;
                sum = (sum + (of_list.sqr()?.sum_all()? * weights.get(t)?)?)?;
            }
            Ok(sum)
        }
    }
}

/// The same from candle's operations.
fn composed_value(case: &Case, operands: &[Tensor; 4], part: usize) -> Result<Tensor> {
    let (lists, targets) = (case.lists(), case.targets());
    let weights = upstream(case.positions, operands[0].dtype())?;
    let temperature = if part == 1 { case.temperature } else { 1.0 };
    let mut sum = Tensor::zeros((), operands[0].dtype(), &Device::Cpu)?;
    for (t, row) in case.composed(operands, &lists, temperature)?.iter().enumerate() {
        let place = lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
        let of_target = row.get(place)?;
        let term = match part {
            0 => of_target.neg()?,
            1 => (of_target - (row.exp()? * row)?.sum_all()?)?,
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

const NAMES: [&str; 4] = ["contexts", "log-priors", "weight", "bias"];

#[test]
fn gradients_equal_composed_operations() -> Result<()> {
    for case in cases() {
        for part in 0..3 {
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                // Rounded log-probabilities have other gradients.
                if part == 2 && dtype == DType::BF16 {
                    continue;
                }
                let vars = variables(&case.operands(dtype)?);
                let truth = variables(&tensors(&vars).map(|t| t.to_dtype(DType::F64).expect("f64")));
                let found = value_of(&case, &tensors(&vars), part)?.backward()?;
                let expected = composed_value(&case, &tensors(&truth), part)?.backward()?;
                for (i, name) in NAMES.into_iter().enumerate() {
                    if i == 1 && case.components == 1 || i == 3 && !case.bias {
                        continue;
                    }
                    let (Some(found), Some(expected)) = (found.get(&vars[i]), expected.get(&truth[i])) else {
                        panic!("no gradient of {name}: {case:?} {part}");
                    };
                    assert_eq!(found.dtype(), dtype, "{name}");
                    let name = format!("{name} {part}");
                    compare(&name, &case, dtype, found, expected, tolerance(dtype).1)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_equal_central_differences() -> Result<()> {
    const STEP: f64 = 1e-5;
    for case in cases().into_iter().filter(|case| case.vocab < 100 && case.vocab > 1) {
        let (operands, lists, targets) = (case.operands(DType::F64)?, case.lists(), case.targets());
        let vars = variables(&operands);
        let gradients = value_of(&case, &tensors(&vars), 0)?.backward()?;
        let weights = numbers(&upstream(case.positions, DType::F64)?);
        let value = |values: &[Vec<f64>; 4]| -> f64 {
            let rows = case.restricted(values, &lists, 1.0);
            let place = |t: usize| lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
            (0..case.positions).map(|t| -weights[t] * rows[t][place(t)]).sum()
        };
        for (i, var) in vars.iter().enumerate() {
            let Some(gradient) = gradients.get(var) else {
                assert!(i == 1 && case.components == 1 || i == 3 && !case.bias, "{case:?}: {}", NAMES[i]);
                continue;
            };
            let gradient = numbers(gradient);
            for j in (0..gradient.len()).step_by(1 + gradient.len() / 23) {
                let moved = |by: f64| {
                    let mut values = values(&operands);
                    values[i][j] += by;
                    value(&values)
                };
                let expected = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                assert!((gradient[j] - expected).abs() < 1e-7, "{}[{j}]: {} {expected}", NAMES[i], gradient[j]);
            }
        }
    }
    Ok(())
}

/// `Loss::backward` spares a copy of the decoder's gradient, and `Scores::backward` does.
#[test]
fn a_backward_pass_with_a_copy_less_has_the_same_gradients() -> Result<()> {
    for case in cases() {
        let vars = variables(&case.operands(DType::F64)?);
        let restricted = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
        let targets = ids(&case.targets(), &[case.positions]);
        let loss = restricted.loss(&targets, &LossOptions::new())?;
        let scores = restricted.score(&targets, &ScoreOptions::new().with_entropy(true))?;
        let value = (scores.log_prob.sum_all()? + scores.entropy.as_ref().expect("asked for").sqr()?.sum_all()?)?;
        let pairs = [(loss.backward()?, loss.value.backward()?), (scores.backward(&value)?, value.backward()?)];
        for (found, expected) in pairs {
            let (found, expected) = (found.get(&vars[2]).expect("one"), expected.get(&vars[2]).expect("one"));
            compare("weight", &case, DType::F64, found, expected, 1e-14)?;
        }
    }
    Ok(())
}

/// With all ids allowed nothing changes: not a bit if the set is for all positions.
#[test]
fn all_ids_allowed_equal_the_plain_loss() -> Result<()> {
    for components in [1, 3] {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let case = Case { components, ..cases()[2 * 3] };
            let vars = variables(&case.operands(dtype)?);
            let mixture = case.mixture(&tensors(&vars))?;
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
                (of_lists(&vec![all.clone(); case.positions]), tolerance(dtype).0),
                (of_lists(&vec![vec![]; case.positions]).with_empty_as_full(true), tolerance(dtype).0),
            ] {
                let restricted = mixture.restricted(&allowed)?;
                let loss = restricted.loss(&targets, &options)?;
                let (exact, of_gradients) = (tolerance, if dtype == DType::BF16 { 1e-2 } else { 4.0 * tolerance });
                compare("nll", &case, dtype, &loss.nll, &plain.nll, exact)?;
                compare("log-probs", &case, dtype, &restricted.log_probs()?, &mixture.log_probs()?, of_gradients)?;
                compare("entropy", &case, dtype, &restricted.entropy()?, &mixture.entropy()?, exact)?;
                let found = loss.backward()?;
                for i in [0, 2, 3] {
                    let (a, b) = (found.get(&vars[i]).expect("one"), expected.get(&vars[i]).expect("one"));
                    compare(NAMES[i], &case, dtype, a, b, if tolerance == 0.0 { 0.0 } else { of_gradients })?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_single_allowed_id_has_no_loss_and_no_gradient() -> Result<()> {
    for components in [1, 3] {
        for shared in [true, false] {
            let case = Case { components, sets: if shared { Sets::Shared(1) } else { Sets::Each(1) }, ..cases()[3] };
            let vars = variables(&case.operands(DType::F32)?);
            let restricted = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
            let targets = ids(&case.targets(), &[case.positions]);
            let loss = restricted.loss(&targets, &LossOptions::new())?;
            assert_eq!(numbers(&loss.nll), vec![0.0; case.positions]);
            let gradients = loss.backward()?;
            for i in [0, 2, 3] {
                let gradient = numbers(gradients.get(&vars[i]).expect(NAMES[i]));
                assert!(gradient.iter().all(|g| g.abs() < 1e-6), "{}: {gradient:?}", NAMES[i]);
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
    let of_first = z[0] - (z[0].exp() + z[1].exp()).ln();
    let found = numbers(&restricted.log_probs()?);
    assert!((found[0] - of_first).abs() < 1e-14 && found[1] == f64::NEG_INFINITY, "{found:?}");
    Ok(())
}

#[test]
fn repeated_ids_count_once_in_any_order() -> Result<()> {
    for components in [1, 3] {
        let case = Case { components, ..cases()[9] };
        let mixture = case.mixture(&case.operands(DType::F64)?)?;
        let lists = case.lists();
        let repeated: Vec<Vec<u32>> =
            lists.iter().map(|list| list.iter().rev().chain(list).copied().collect()).collect();
        let of = |allowed: AllowedIds| mixture.restricted(&allowed)?.log_probs();
        assert_eq!(numbers(&of(of_lists(&lists))?), numbers(&of(of_lists(&repeated))?));
        assert_eq!(numbers(&of(AllowedIds::new(&lists[0]))?), numbers(&of(AllowedIds::new(&repeated[0]))?));
    }
    Ok(())
}

/// A target outside its set is an error that names it, or a member of the set.
#[test]
fn targets_outside_their_sets_are_errors_or_added() -> Result<()> {
    for case in cases().into_iter().filter(|case| case.vocab > 30 && case.sets != Sets::Shared(30)) {
        let operands = case.operands(DType::F64)?;
        let mixture = case.mixture(&operands)?;
        let (mut lists, mut targets) = (case.lists(), case.targets());
        let last = case.positions - 1;
        let outside = (0..case.vocab as u32).find(|id| !lists[last].contains(id)).expect("not all are allowed");
        targets[last] = outside;
        let of_targets = ids(&targets, &[case.positions]);
        let restricted = mixture.restricted(&case.allowed())?;
        let errors = [
            restricted.loss(&of_targets, &LossOptions::new()).map(|_| ()),
            restricted.score(&of_targets, &ScoreOptions::new()).map(|_| ()),
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
        let loss = restricted.loss(&of_targets, &LossOptions::new())?;
        lists[last].push(outside);
        let truth = case.restricted(&values(&operands), &lists, 1.0);
        let place = |t: usize| lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
        let nll: Vec<f64> = (0..case.positions).map(|t| -truth[t][place(t)]).collect();
        assert_near("nll", &numbers(&loss.nll), &nll, 1e-12);
        let scores = restricted.score(&of_targets, &ScoreOptions::new().with_entropy(true))?;
        assert_near("log_prob", &numbers(&scores.log_prob.affine(-1.0, 0.0)?), &nll, 1e-12);
        let entropy: Vec<f64> = truth.iter().map(|row| -row.iter().map(|x| x * x.exp()).sum::<f64>()).collect();
        assert_near("entropy", &numbers(&scores.entropy.expect("asked for")), &entropy, 1e-12);
    }
    Ok(())
}

#[test]
fn empty_sets_are_errors_or_allow_all_ids() -> Result<()> {
    for components in [1, 3] {
        let case = Case { components, ..cases()[9] };
        let operands = case.operands(DType::F64)?;
        let mixture = case.mixture(&operands)?;
        let (mut lists, targets) = (case.lists(), ids(&case.targets(), &[case.positions]));
        lists[2] = vec![];
        let allowed = of_lists(&lists);
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
        let truth = case.restricted(&values(&operands), &lists, 1.0);
        let found = restricted.log_probs()?.get(2)?;
        assert_near("log_probs", &numbers(&found), &truth[2], 1e-12);
        let nll = numbers(&restricted.loss(&targets, &LossOptions::new())?.nll);
        assert!((nll[2] + truth[2][case.targets()[2] as usize]).abs() < 1e-12, "{nll:?}");
        assert_eq!(restricted.top_k(case.vocab)?.token_ids.dims(), [case.positions, case.vocab]);
    }
    Ok(())
}

/// Ignored positions need neither a valid target nor a set, and may hold NaN.
#[test]
fn ignored_positions_need_no_set() -> Result<()> {
    for case in [cases()[3], cases()[9], cases()[15], cases()[21], cases()[27]] {
        let [contexts, logits, weight, bias] = case.operands(DType::F64)?;
        let nan = Tensor::full(f64::NAN, (1, case.components, case.d), &Device::Cpu)?;
        let contexts = Tensor::cat(&[&nan, &contexts.narrow(0, 1, case.positions - 1)?], 0)?;
        let operands = [contexts, logits, weight, bias];
        let vars = variables(&operands);
        let mixture = case.mixture(&tensors(&vars))?;
        let mut lists = case.lists();
        let shared = matches!(case.sets, Sets::Shared(_));
        let allowed = match shared {
            true => case.allowed(),
            false => {
                lists[0] = vec![];
                of_lists(&lists)
            }
        };
        let mut targets: Vec<i64> = case.targets().into_iter().map(i64::from).collect();
        targets[0] = -100;
        let targets = Tensor::new(targets.as_slice(), &Device::Cpu)?;
        let loss = mixture.restricted(&allowed)?.loss(&targets, &LossOptions::new().with_ignore_index(-100))?;
        assert_eq!(numbers(&loss.count), [(case.positions - 1) as f64]);
        assert_eq!(numbers(&loss.nll)[0], 0.0);
        let gradients = loss.backward()?;
        let rest = case.lists();
        for i in [0, 2, 3] {
            let gradient = numbers(gradients.get(&vars[i]).expect(NAMES[i]));
            assert!(gradient.iter().all(|g| g.is_finite()), "{} {case:?}", NAMES[i]);
            assert!(gradient.iter().any(|g| *g != 0.0), "{} {case:?}", NAMES[i]);
        }
        let finite = values(&case.operands(DType::F64)?);
        let truth = case.restricted(&finite, &rest, 1.0);
        let place = |t: usize| rest[t].iter().position(|id| *id == case.targets()[t]).expect("allowed");
        let mean = (1..case.positions).map(|t| -truth[t][place(t)]).sum::<f64>() / (case.positions - 1) as f64;
        assert!((numbers(&loss.value)[0] - mean).abs() < 1e-12 * mean.max(1.0), "{case:?}");
        // All ignored.
        let none = Tensor::full(-100i64, case.positions, &Device::Cpu)?;
        for allowed in [allowed, AllowedIds::new(&[])] {
            let loss = mixture.restricted(&allowed)?.loss(&none, &LossOptions::new().with_ignore_index(-100))?;
            assert_eq!((numbers(&loss.value), numbers(&loss.count)), (vec![0.0], vec![0.0]));
        }
    }
    Ok(())
}

/// A NaN stays at its position; ids of logit minus infinity have no probability and no NaN gradient; a set of these
/// alone has no distribution.
#[test]
fn infinite_and_undefined_logits_stay_where_they_are() -> Result<()> {
    for components in [1, 3] {
        for case in
            [Case { components, ..cases()[9] }, Case { components, ..cases()[15] }, Case { components, ..cases()[3] }]
        {
            let [contexts, logits, weight, bias] = case.operands(DType::F64)?;
            let (lists, targets) = (case.lists(), case.targets());
            // Forbidden by the bias: an id of position 1 that is no target.
            let forbidden = lists.iter().flatten().copied().find(|id| !targets.contains(id)).expect("another id");
            let mut of_bias = numbers(&bias);
            of_bias[forbidden as usize] = f64::NEG_INFINITY;
            let bias = Tensor::new(of_bias.as_slice(), &Device::Cpu)?;
            let vars = variables(&[contexts.clone(), logits.clone(), weight.clone(), bias.clone()]);
            let restricted = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
            let of_targets = ids(&targets, &[case.positions]);
            let scores = restricted.score(&of_targets, &ScoreOptions::new().with_entropy(true))?;
            let truth =
                case.restricted(&values(&[contexts.clone(), logits.clone(), weight.clone(), bias]), &lists, 1.0);
            let place = |t: usize| lists[t].iter().position(|id| *id == targets[t]).expect("allowed");
            let expected: Vec<f64> = (0..case.positions).map(|t| truth[t][place(t)]).collect();
            assert_near("log_prob", &numbers(&scores.log_prob), &expected, 1e-12);
            let value = (scores.log_prob.sum_all()? + scores.entropy.expect("asked for").sum_all()?)?;
            let gradients = value.backward()?;
            for i in [0, 2, 3] {
                let gradient = numbers(gradients.get(&vars[i]).expect(NAMES[i]));
                assert!(gradient.iter().all(|g| g.is_finite()), "{} {case:?}", NAMES[i]);
            }

            let nan = Tensor::full(f64::NAN, (1, components, case.d), &Device::Cpu)?;
            let contexts = Tensor::cat(&[&nan, &contexts.narrow(0, 1, case.positions - 1)?], 0)?;
            let mixture = case.mixture(&[contexts, logits, weight, vars[3].as_tensor().detach()])?;
            let restricted = mixture.restricted(&case.allowed())?;
            let nll = numbers(&restricted.loss(&of_targets, &LossOptions::new())?.nll);
            assert!(nll[0].is_nan() && nll[1..].iter().all(|x| x.is_finite()), "{nll:?}");
            assert!(matches!(restricted.top_k(1), Err(Error::Distribution { position: 0 })));
            let only = AllowedIds::new(&[forbidden]);
            let last = mixture.restricted(&only)?.log_probs()?.get(1)?;
            assert!(numbers(&last)[forbidden as usize].is_nan());
            let lists = [vec![vec![targets[0]]], vec![vec![forbidden]; case.positions - 1]].concat();
            let of_finite = case.mixture(&case.operands(DType::F64)?)?;
            assert!(of_finite.restricted(&of_lists(&lists))?.top_k(1).is_ok());
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
        let lists = of_lists(&[vec![0, 1], vec![3], vec![1, 2]]);
        for (allowed, expected) in [(lists, 2), (AllowedIds::new(&[2, 1]), 0)] {
            let restricted = mixture.restricted(&allowed)?;
            for result in [restricted.top_k(2).map(|_| ()), restricted.sample(&mut sampler).map(|_| ())] {
                let is_expected = matches!(result, Err(Error::Distribution { position }) if position == expected);
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
            let operands = case.operands(dtype)?;
            let truth = case.restricted(&values(&operands), &case.lists(), 1.0);
            let vars = operands.map(|t| Var::from_tensor(&t.to_device(device).expect("a copy")).expect("a variable"));
            let restricted = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
            let targets = on(device, &ids(&case.targets(), &[case.positions]))?;
            let loss = restricted.loss(&targets, &LossOptions::new())?;
            let place = |t: usize| case.lists()[t].iter().position(|id| *id == case.targets()[t]).expect("allowed");
            let nll: Vec<f64> = (0..case.positions).map(|t| -truth[t][place(t)]).collect();
            assert_near("nll", &numbers(&loss.nll), &nll, 1e-5);
            assert!(loss.backward()?.get(&vars[2]).is_some());
            let top = restricted.top_k(1)?;
            for (t, id) in top.token_ids.flatten_all()?.to_vec1::<u32>()?.into_iter().enumerate() {
                assert!(case.lists()[t].contains(&id));
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
    let vars = variables(&case.operands(DType::F64)?);
    let list = case.lists()[0].clone();
    let index = Tensor::new(list.as_slice(), &Device::Cpu)?;
    let small =
        Mixture::new(&vars[0], None, &vars[2].index_select(&index, 0)?, Some(&vars[3].index_select(&index, 0)?))?;
    let restricted = case.mixture(&tensors(&vars))?.restricted(&case.allowed())?;
    let place = |id: &u32| list.iter().position(|other| other == id).expect("allowed") as u32;
    let targets = case.targets();
    let places = ids(&targets.iter().map(place).collect::<Vec<_>>(), &[case.positions]);
    let targets = ids(&targets, &[case.positions]);
    let class_weights = upstream(case.vocab, DType::F64)?;
    let plain = LossOptions::new().with_position_weights(upstream(case.positions, DType::F64)?);
    for (options, of_small) in [
        (plain.clone().with_label_smoothing(0.2), plain.clone().with_label_smoothing(0.2)),
        (plain.clone().with_z_loss(0.1), plain.clone().with_z_loss(0.1)),
        (plain.clone().with_correct(true), plain.clone().with_correct(true)),
        (plain.clone().with_denominator(7.0), plain.clone().with_denominator(7.0)),
        (
            plain.clone().with_class_weights(class_weights.clone()),
            plain.with_class_weights(class_weights.index_select(&index, 0)?),
        ),
    ] {
        let (found, expected) = (restricted.loss(&targets, &options)?, small.loss(&places, &of_small)?);
        assert_eq!(numbers(&found.value), numbers(&expected.value));
        assert_eq!(numbers(&found.count), numbers(&expected.count));
        assert_eq!(found.correct.as_ref().map(numbers), expected.correct.as_ref().map(numbers));
        let (found, expected) = (found.backward()?, expected.backward()?);
        for i in [0, 2, 3] {
            let (a, b) = (found.get(&vars[i]).expect("one"), expected.get(&vars[i]).expect("one"));
            compare(NAMES[i], &case, DType::F64, a, b, 1e-14)?;
        }
    }
    Ok(())
}

/// Class weights, the reduction and the denominator of lists follow the options too; others are refused.
#[test]
fn options_of_lists_follow_the_conventions_or_are_refused() -> Result<()> {
    let case = cases()[9];
    let mixture = case.mixture(&case.operands(DType::F64)?)?;
    let restricted = mixture.restricted(&case.allowed())?;
    let targets = ids(&case.targets(), &[case.positions]);
    let (of_positions, of_classes) = (upstream(case.positions, DType::F64)?, upstream(case.vocab, DType::F64)?);
    let options = LossOptions::new().with_position_weights(of_positions.clone()).with_class_weights(of_classes.clone());
    let loss = restricted.loss(&targets, &options)?;
    let weights: Vec<f64> = numbers(&(of_positions * of_classes.index_select(&targets, 0)?)?);
    let sum: f64 = numbers(&loss.nll).iter().zip(&weights).map(|(nll, weight)| nll * weight).sum();
    let count: f64 = weights.iter().sum();
    assert_near("mean", &numbers(&loss.value), &[sum / count], 1e-13);
    let halved = restricted.loss(&targets, &options.with_denominator(2.0 * count))?;
    assert_near("denominator", &numbers(&halved.value), &[sum / count / 2.0], 1e-13);
    assert!(!restricted.loss(&targets, &LossOptions::evaluation())?.value.track_op());

    let shared = mixture.restricted(&AllowedIds::new(&case.lists()[0]).with_targets_added(true))?;
    let negatives: Negatives = NoiseDistribution::log_uniform(case.vocab)?.draw(4, 1)?;
    let refused: [(OptionName, LossOptions); 6] = [
        (OptionName::LabelSmoothing, LossOptions::new().with_label_smoothing(0.1)),
        (OptionName::ZLoss, LossOptions::new().with_z_loss(0.1)),
        (OptionName::GradientFilter, LossOptions::new().with_gradient_filter(0.1)),
        (OptionName::Correct, LossOptions::new().with_correct(true)),
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

fn assert_config<T: std::fmt::Debug>(result: Result<T>, name: &str, part: &str) {
    let error = result.expect_err(name);
    assert!(matches!(error, Error::Config { argument, .. } if argument == name), "{name}: {error:?}");
    assert!(error.to_string().contains(part), "{error}");
}

#[test]
fn sets_that_do_not_fit_are_refused() -> Result<()> {
    let mixture = cases()[3].mixture(&cases()[3].operands(DType::F32)?)?; // 5 positions, 37 ids
    assert_config(mixture.restricted(&AllowedIds::new(&[36, 37])), "allowed ids", "below vocab_size 37, got 37");
    let lists = [vec![1], vec![2, 99], vec![3], vec![], vec![5]];
    assert_config(mixture.restricted(&of_lists(&lists)), "allowed ids", "below vocab_size 37, got 99");
    assert_config(mixture.restricted(&of_lists(&lists[2..])), "allowed ids", "each of 5 positions, got 3");
    assert_config(AllowedIds::per_position(&[1, 2], &[]), "offsets", "got none");
    assert_config(AllowedIds::per_position(&[1, 2], &[1, 2]), "offsets", "got 1 first");
    assert_config(AllowedIds::per_position(&[1, 2], &[0, 1]), "offsets", "got 1 last");
    assert_config(AllowedIds::per_position(&[1, 2], &[0, 2, 1, 2]), "offsets", "got 1 after 2");
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
    assert!(matches!(error, Err(Error::Target { position: 2, got: 37, vocab_size: 37 })), "{error:?}");
    let error = restricted.loss(&ids(&[3], &[1]), &LossOptions::new());
    assert!(matches!(error, Err(Error::Shape { argument: "targets", .. })), "{error:?}");
    Ok(())
}

/// The most probable ids are those of a sort of the set; no id is outside.
#[test]
fn the_best_ids_are_those_of_the_set() -> Result<()> {
    for case in cases() {
        let operands = case.operands(DType::F64)?;
        let (lists, truth) = (case.lists(), case.restricted(&values(&operands), &case.lists(), 1.0));
        let restricted = case.mixture(&operands)?.restricted(&case.allowed())?;
        let longest = lists.iter().map(Vec::len).max().expect("a position");
        for k in [1, 3, case.vocab].into_iter().filter(|k| *k <= case.vocab) {
            let top = restricted.top_k(k)?;
            let n = k.min(longest);
            assert_eq!(top.token_ids.dims(), [case.positions, n], "{case:?}");
            let (found, log_probs) = (top.token_ids.to_vec2::<u32>()?, top.log_probs.to_vec2::<f64>()?);
            for t in 0..case.positions {
                let mut ranked: Vec<(f64, u32)> = truth[t].iter().copied().zip(lists[t].iter().copied()).collect();
                ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
                ranked.truncate(n);
                let own = ranked.len();
                ranked.resize(n, (f64::NEG_INFINITY, ranked[own - 1].1));
                let (expected, of_ids): (Vec<f64>, Vec<u32>) = ranked.into_iter().unzip();
                assert_eq!(found[t], of_ids, "{case:?} {k}");
                assert_near("log_probs", &log_probs[t], &expected, 1e-12);
            }
        }
        let best: Vec<u32> = restricted.top_k(1)?.token_ids.flatten_all()?.to_vec1()?;
        assert_eq!(restricted.argmax()?.to_vec1::<u32>()?, best);
    }
    Ok(())
}

/// The frequencies of draws are those of the renormalised distribution, at a temperature and with truncation.
#[test]
fn draws_have_the_frequencies_of_the_renormalised_distribution() -> Result<()> {
    const DRAWS: usize = 4000;
    let plain = Sampling::new();
    let samplings = [
        plain.clone(),
        plain.clone().with_temperature(0.5),
        plain.clone().with_temperature(2.0),
        plain.clone().with_top_p(0.6),
        plain.clone().with_top_k(2),
        plain.clone().with_min_p(0.4),
    ];
    for components in [1, 3] {
        for shared in [true, false] {
            let one = Case { positions: 1, components, softcap: Some(2.0), ..cases()[3] };
            let case = Case { positions: DRAWS, ..one };
            let [contexts, logits, weight, bias] = one.operands(DType::F64)?;
            let list = vec![2u32, 11, 12, 30];
            let operands = [contexts.repeat((DRAWS, 1, 1))?, logits.repeat((DRAWS, 1))?, weight.clone(), bias.clone()];
            let mixture = case.mixture(&operands)?;
            let allowed = match shared {
                true => AllowedIds::new(&list),
                false => of_lists(&vec![list.clone(); DRAWS]),
            };
            let restricted = mixture.restricted(&allowed)?;
            let log_probs = &one.restricted(&values(&[contexts, logits, weight, bias]), &[list.clone()], 1.0)[0];
            for sampling in &samplings {
                let mut masses: Vec<f64> = log_probs.iter().map(|x| (x / sampling.temperature).exp()).collect();
                let total: f64 = masses.iter().sum();
                masses.iter_mut().for_each(|mass| *mass /= total);
                let mut order: Vec<usize> = (0..masses.len()).collect();
                order.sort_by(|&a, &b| masses[b].total_cmp(&masses[a]));
                let (mut before, largest) = (0.0, masses[order[0]]);
                for (rank, &i) in order.iter().enumerate() {
                    let mass = masses[i];
                    let is_kept = rank < sampling.top_k.unwrap_or(usize::MAX)
                        && (rank == 0 || before < sampling.top_p)
                        && mass >= sampling.min_p * largest;
                    before += mass;
                    masses[i] = if is_kept { mass } else { 0.0 };
                }
                let total: f64 = masses.iter().sum();
                let drawn = restricted.sample(&mut Sampler::new(sampling.clone(), 7)?)?.to_vec1::<u32>()?;
                assert!(drawn.iter().all(|id| list.contains(id)));
                for (id, mass) in list.iter().zip(&masses) {
                    let p = mass / total;
                    let found = drawn.iter().filter(|other| *other == id).count() as f64 / DRAWS as f64;
                    let deviation = (p * (1.0 - p) / DRAWS as f64).sqrt();
                    assert!((found - p).abs() <= 4.0 * deviation, "{sampling:?} {id}: {found}, expected {p}");
                }
            }
            let mut ancestral = Sampler::new(Sampling::new().with_ancestral(true), 7)?;
            match (components, restricted.sample(&mut ancestral)) {
                (1, drawn) => assert!(drawn?.to_vec1::<u32>()?.iter().all(|id| list.contains(id))),
                (_, error) => {
                    assert!(matches!(error, Err(Error::Unsupported { option: OptionName::Ancestral, .. })));
                }
            }
            // The temperature of the components is that of the restricted mixture's.
            let mut sampler = Sampler::new(Sampling::greedy().with_component_temperature(0.01), 7)?;
            let tempered = mixture.with_component_temperature(0.01)?.restricted(&allowed)?;
            assert_eq!(restricted.sample(&mut sampler)?.to_vec1::<u32>()?, tempered.argmax()?.to_vec1::<u32>()?);
        }
    }
    Ok(())
}

fn heads() -> Result<(Vec<Var>, Vec<Box<dyn MixtureLayer>>, Tensor)> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let mixture = MixtureOfSoftmaxes::new(&MixtureConfig::new(8, 60, 3).with_context_dim(6), vb)?;
    let random = |shape: &[usize]| Var::from_tensor(&Tensor::randn(0f64, 1., shape, &Device::Cpu)?);
    let [weight, bias, a, b] = [&[60, 8][..], &[60], &[2, 8], &[60, 2]].map(|shape| random(shape).expect("a variable"));
    let adapter = LowRankAdapter::from_tensors(a.as_tensor().clone(), b.as_tensor().clone(), 4.0)?;
    let plain = SoftmaxHead::from_tensors(weight.as_tensor().clone(), Some(bias.as_tensor().clone()))?;
    let adapted = plain.with_adapter(adapter)?.with_logit_scale(0.5)?.with_softcap(3.0)?;
    let hidden = Tensor::randn(0f64, 1., (3, 4, 8), &Device::Cpu)?;
    let all = [vec![weight, bias, a, b], vars.all_vars()].concat();
    Ok((all, vec![Box::new(adapted), Box::new(mixture)], hidden))
}

/// Sets of each kind for 12 positions over 60 ids.
fn sets() -> (Vec<u32>, [(AllowedIds, Vec<Vec<u32>>); 2]) {
    let shared = vec![1u32, 5, 17, 18, 40, 59];
    let lists: Vec<Vec<u32>> = (0..12u32).map(|t| vec![(t * 5) % 60, (t * 5 + 1) % 60, (t * 5 + 3) % 60]).collect();
    let sets = [(AllowedIds::new(&shared), vec![shared.clone(); 12]), (of_lists(&lists), lists)];
    (shared, sets)
}

/// Heads, an adapter of the decoder included: every variable has the gradient of the head's own log-probabilities,
/// renormalised by candle's operations.
#[test]
fn restricted_heads_equal_their_log_probabilities_renormalised() -> Result<()> {
    let (vars, heads, hidden) = heads()?;
    for head in &heads {
        for (allowed, lists) in sets().1 {
            let targets: Vec<u32> = lists.iter().enumerate().map(|(t, list)| list[t % list.len()]).collect();
            let restricted = Restricted::new(head, allowed)?;
            let of_targets = ids(&targets, &[3, 4]);
            let log_probs = head.log_probs(&hidden)?.reshape((12, 60))?;
            let mut rows = Vec::new();
            for (t, list) in lists.iter().enumerate() {
                let index = Tensor::new(list.as_slice(), &Device::Cpu)?;
                rows.push(log_softmax(&log_probs.get(t)?.index_select(&index, 0)?, 0)?);
            }
            let of_target = |t: usize| rows[t].get(lists[t].iter().position(|id| *id == targets[t]).expect("allowed"));
            let terms = (0..12).map(of_target).collect::<candle_core::Result<Vec<_>>>()?;
            let expected = Tensor::stack(&terms, 0)?.mean_all()?.neg()?;
            let loss = restricted.loss(&hidden, &of_targets, &LossOptions::new())?;
            compare("loss", &0, DType::F64, &loss.value.detach(), &expected.detach(), 1e-12)?;
            let (found, expected) = (loss.backward()?, expected.backward()?);
            let mut count = 0;
            for var in &vars {
                match (found.get(var), expected.get(var)) {
                    (Some(a), Some(b)) => {
                        compare("gradient", &var.dims(), DType::F64, a, b, 1e-11)?;
                        count += 1;
                    }
                    (None, None) => {}
                    (a, b) => panic!("{:?}: {} {}", var.dims(), a.is_some(), b.is_some()),
                }
            }
            assert!(count >= 4);
            // Every method is the mixture's.
            let mixture = restricted.mixture(&hidden)?;
            let options = ScoreOptions::new().with_entropy(true);
            assert_eq!(restricted.log_probs(&hidden)?.dims(), [3, 4, 60]);
            assert_eq!(numbers(&restricted.log_probs(&hidden)?), numbers(&mixture.log_probs()?));
            let (a, b) = (restricted.score(&hidden, &of_targets, &options)?, mixture.score(&of_targets, &options)?);
            assert_eq!(numbers(&a.log_prob), numbers(&b.log_prob));
            assert_eq!(a.log_prob.dims(), [3, 4]);
            assert_eq!(numbers(&restricted.log_prob(&hidden, &of_targets)?), numbers(&a.log_prob));
            assert_eq!(
                restricted.top_k(&hidden, 2)?.token_ids.flatten_all()?.to_vec1::<u32>()?,
                mixture.top_k(2)?.token_ids.flatten_all()?.to_vec1::<u32>()?
            );
            let sums = restricted.log_probs(&hidden)?.exp()?.sum(D::Minus1)?;
            assert!(numbers(&sums).iter().all(|sum| (sum - 1.0).abs() < 1e-12));
            let drawn = restricted.sample(&hidden, &mut Sampler::new(Sampling::new(), 3)?)?;
            assert_eq!(drawn.dims(), [3, 4]);
            let drawn = drawn.flatten_all()?.to_vec1::<u32>()?;
            assert!(drawn.iter().zip(&lists).all(|(id, list)| list.contains(id)));
        }
        assert_config(Restricted::new(head, AllowedIds::new(&[60])), "allowed ids", "below vocab_size 60, got 60");
        let lists = Restricted::new(head, of_lists(&[vec![1]]))?;
        assert_config(lists.log_probs(&hidden), "allowed ids", "each of 12 positions, got 1");
    }
    Ok(())
}

/// A policy loss takes the lists of the tokens that count, and keeps a token that its set has lost.
#[test]
fn policy_losses_see_the_sets_of_the_tokens_that_count() -> Result<()> {
    let (vars, heads, hidden) = heads()?;
    for head in &heads {
        for (allowed, lists) in sets().1 {
            let mut targets: Vec<u32> = lists.iter().enumerate().map(|(t, list)| list[t % list.len()]).collect();
            targets[7] = 33; // in no set
            let token_ids = ids(&targets, &[3, 4]);
            let mask: Vec<u8> = (0..12u8).map(|t| u8::from(t % 3 != 0)).collect();
            let advantages = Tensor::randn(0f64, 1., (3, 4), &Device::Cpu)?;
            let batch = PolicyBatch::new(token_ids.clone(), advantages.clone()).with_mask(Tensor::from_vec(
                mask.clone(),
                (3, 4),
                &Device::Cpu,
            )?);
            let options = PolicyOptions::new().with_entropy(0.1);
            let outside = Restricted::new(head, allowed.clone())?.policy_loss(&hidden, &batch, &options);
            assert!(matches!(outside, Err(Error::NotAllowed { got: 33, .. })), "{outside:?}");
            let restricted = Restricted::new(head, allowed.with_targets_added(true))?;
            let loss = restricted.policy_loss(&hidden, &batch, &options)?;
            let scores = restricted.score(&hidden, &token_ids, &ScoreOptions::new().with_entropy(true))?;
            let weights: Vec<f64> = mask.iter().map(|&counts| f64::from(counts) / 8.0).collect();
            let weights = Tensor::from_vec(weights, (3, 4), &Device::Cpu)?;
            // The ratio of the present policy is one, and its gradient that of the log-probability.
            let log_prob = &scores.log_prob;
            let ratio = (log_prob - log_prob.detach())?.exp()?;
            let bonus = (scores.entropy.expect("asked for") * 0.1)?;
            let expected = (((ratio * advantages)?.neg()? - bonus)? * weights)?.sum_all()?;
            compare("value", &0, DType::F64, &loss.value.detach(), &expected.detach(), 1e-12)?;
            let (found, expected) = (loss.backward()?, expected.backward()?);
            for var in &vars {
                if let Some(expected) = expected.get(var) {
                    compare("gradient", &var.dims(), DType::F64, found.get(var).expect("one"), expected, 1e-11)?;
                }
            }
        }
    }
    Ok(())
}

/// Beam search over a restricted head stays in the set, and finds what a search over the renormalised log-probabilities
/// finds.
#[test]
fn beam_search_never_leaves_the_set() -> Result<()> {
    let (_, heads, _) = heads()?;
    let embeddings = Tensor::randn(0f64, 2., (60, 8), &Device::Cpu)?;
    let shared = sets().0;
    for head in &heads {
        let restricted = Restricted::new(head, AllowedIds::new(&shared))?;
        // Six ids; the width asks for more.
        let search = BeamSearch::new(59).with_width(8).with_max_length(5).with_n_best(4);
        let start = Tensor::new(&[1u32, 5, 33], &Device::Cpu)?;
        let step = |tokens: &Tensor, _: &Tensor| embeddings.index_select(tokens, 0);
        let found = search.run(&restricted, &start, step)?;
        let expected = search.search(60, &start, |tokens, _, k| -> Result<_> {
            let log_probs = head.log_probs(&embeddings.index_select(tokens, 0)?)?;
            let index = Tensor::new(shared.as_slice(), &Device::Cpu)?;
            let small = log_softmax(&log_probs.index_select(&index, 1)?, 1)?;
            let mut top = mos_head::TopK::of_log_probs(&small, k.min(6))?;
            top.token_ids = index.index_select(&top.token_ids.flatten_all()?, 0)?.reshape(top.token_ids.shape())?;
            Ok(top)
        })?;
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!(found.token_ids.iter().all(|id| shared.contains(id)), "{found:?}");
            assert_eq!(found.token_ids, expected.token_ids);
            assert!((found.log_prob - expected.log_prob).abs() < 1e-9);
        }
        assert_eq!(found.iter().flatten().count(), 12);
    }
    Ok(())
}

/// A loss with dropout, as of any head: the masks are the head's.
#[test]
fn dropout_is_that_of_the_head() -> Result<()> {
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let config = MixtureConfig::new(8, 60, 2).with_context_dim(6).with_dropout(0.5);
    let head = MixtureOfSoftmaxes::new(&config, vb)?;
    let hidden = Tensor::randn(0f32, 1., (4, 8), &Device::Cpu)?;
    let restricted = Restricted::new(&head, AllowedIds::new(&[1, 2, 3]))?;
    let options = LossOptions::new().with_dropout(DropoutMasks::Seeded(3));
    let loss = |options: &LossOptions| -> Result<Loss> { restricted.loss(&hidden, &ids(&[1, 2, 3, 1], &[4]), options) };
    assert_eq!(numbers(&loss(&options)?.nll), numbers(&loss(&options)?.nll));
    assert!(numbers(&loss(&LossOptions::evaluation())?.nll).iter().all(|nll| (nll - 3f64.ln()).abs() < 1e-6));
    Ok(())
}
