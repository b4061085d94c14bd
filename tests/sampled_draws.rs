//! Losses over a sample of the vocabulary, on average over many draws: against sums over all of it.

mod common;

use approx::{abs_diff_eq, assert_abs_diff_eq};
use candle_core::{DType, Device, Tensor};
use common::sampled::{sigmoid, targets, Problem, VOCAB};
use common::values::numbers;
use mos_head::sampled::{Negatives, NoiseDistribution};
use mos_head::{Distributions, LossOptions, Reduction, Result};

/// Mean and standard error of each entry.
fn mean(draws: usize, mut draw: impl FnMut(u64) -> Result<Vec<f64>>) -> Result<Vec<(f64, f64)>> {
    let first = draw(0)?;
    let (mut sum, mut squares) = (vec![0.0; first.len()], vec![0.0; first.len()]);
    for seed in 0..draws {
        for ((sum, squares), x) in sum.iter_mut().zip(&mut squares).zip(draw(seed as u64)?) {
            *sum += x;
            *squares += x * x;
        }
    }
    let n = draws as f64;
    let statistics = |(sum, squares): (f64, f64)| (sum / n, ((squares / n - (sum / n).powi(2)).max(0.0) / n).sqrt());
    Ok(sum.into_iter().zip(squares).map(statistics).collect())
}

#[track_caller]
fn agrees(name: &str, found: &[(f64, f64)], expected: &[f64]) {
    for (i, ((mean, error), expected)) in found.iter().zip(expected).enumerate() {
        let is_near = abs_diff_eq!(*mean, *expected, epsilon = 5.0 * error + 1e-9);
        assert!(is_near, "{name}[{i}]: {mean} +- {error}, expected {expected}");
    }
}

type Draw = fn(&NoiseDistribution, usize, u64) -> Result<Negatives>;
const SCHEMES: [Draw; 2] = [NoiseDistribution::draw, NoiseDistribution::draw_with_replacement];

#[test]
fn expected_counts_are_those_of_many_draws() -> Result<()> {
    let counts: Vec<f64> = (0..12).map(|id| ((id * 5) % 7) as f64).collect();
    for noise in [NoiseDistribution::log_uniform(12)?, NoiseDistribution::unigram(&counts)?] {
        for draw in SCHEMES {
            // The ratio of an id's count to the count expected is one on average, whatever the random time.
            let ratios = mean(20_000, |seed| {
                let negatives = draw(&noise, 5, seed)?;
                assert_eq!(negatives.repeats().iter().sum::<usize>(), 5);
                let mut ratios = vec![0.0; 12];
                for (&id, &repeats) in negatives.token_ids().iter().zip(negatives.repeats()) {
                    ratios[id] = repeats as f64 / negatives.expected_count(id);
                }
                Ok(ratios)
            })?;
            let expected: Vec<f64> = (0..12).map(|id| f64::from(noise.probability(id) > 0.0)).collect();
            agrees("count", &ratios, &expected);
        }
    }
    Ok(())
}

#[test]
fn the_sum_over_the_negatives_is_unbiased() -> Result<()> {
    let (tensor, ids) = targets(&Device::Cpu)?;
    let problem = Problem::new(1, DType::F64, &Device::Cpu)?;
    let all: Vec<usize> = (0..VOCAB).collect();
    let own = |negatives: &Negatives| problem.shifted(negatives, &ids).map(|(_, own)| own.squeeze(1));
    let exact = {
        let logits = problem.logits(&all)?.squeeze(1)?.exp()?;
        let own = logits.gather(&tensor.unsqueeze(1)?, 1)?;
        (logits.sum(1)? - own.squeeze(1)?)?
    };
    let gradient = exact.sum_all()?.backward()?;
    let counts: Vec<f64> = (0..VOCAB).map(|id| 1.0 + (id % 5) as f64).collect();
    for draw in SCHEMES {
        let found = mean(1500, |seed| {
            let negatives = draw(&NoiseDistribution::unigram(&counts)?, 12, seed)?;
            let own = own(&negatives)??;
            let options = LossOptions::new().with_sampled_softmax(negatives).with_reduction(Reduction::None);
            let loss = problem.mixture()?.loss(&tensor, &options)?.value;
            // Without the target: `exp(loss) = 1 + sum / exp(z'_y)`.
            let sum = ((loss.exp()? - 1.0)? * own.exp()?)?;
            let gradients = sum.sum_all()?.backward()?;
            let mut all = numbers(&sum).into_vec();
            all.extend(numbers(gradients.get(&problem.vars["contexts"]).unwrap()));
            all.extend(numbers(gradients.get(&problem.vars["decoder.weight"]).unwrap()));
            Ok(all)
        })?;
        let mut expected = numbers(&exact).into_vec();
        expected.extend(numbers(gradient.get(&problem.vars["contexts"]).unwrap()));
        expected.extend(numbers(gradient.get(&problem.vars["decoder.weight"]).unwrap()));
        agrees("sum", &found, &expected);
    }
    Ok(())
}

#[test]
fn nce_with_replacement_is_its_sum_over_the_vocabulary_on_average() -> Result<()> {
    let (tensor, ids) = targets(&Device::Cpu)?;
    let problem = Problem::new(1, DType::F64, &Device::Cpu)?;
    let noise = NoiseDistribution::log_uniform(VOCAB)?;
    let all: Vec<usize> = (0..VOCAB).collect();
    let log_expected = |id: usize| (8.0 * noise.probability(id)).ln();
    let table = |value: &dyn Fn(usize) -> f64, ids: &[usize]| {
        Tensor::from_iter(ids.iter().map(|&id| value(id)).collect::<Vec<_>>(), &Device::Cpu)
    };
    let logits = problem.logits(&all)?.squeeze(1)?;
    let own = (logits.gather(&tensor.unsqueeze(1)?, 1)?.squeeze(1)? - table(&log_expected, &ids)?)?;
    let rest = sigmoid(&logits.broadcast_sub(&table(&log_expected, &all)?)?.neg()?)?.log()?;
    let rest = rest.broadcast_mul(&table(&|id| 8.0 * noise.probability(id), &all)?)?.sum(1)?;
    let exact = (sigmoid(&own)?.log()? + rest)?.neg()?;
    let gradient = exact.sum_all()?.backward()?;
    let found = mean(1500, |seed| {
        let negatives = noise.draw_with_replacement(8, seed)?;
        let options = LossOptions::new().with_nce(negatives).with_reduction(Reduction::Sum);
        let loss = problem.mixture()?.loss(&tensor, &options)?;
        let mut all = numbers(&loss.nll).into_vec();
        all.extend(numbers(loss.backward()?.get(&problem.vars["decoder.weight"]).unwrap()));
        Ok(all)
    })?;
    let mut expected = numbers(&exact).into_vec();
    expected.extend(numbers(gradient.get(&problem.vars["decoder.weight"]).unwrap()));
    agrees("nce", &found, &expected);
    Ok(())
}

#[test]
fn the_log_uniform_distribution_is_that_of_tensorflow() -> Result<()> {
    let noise = NoiseDistribution::log_uniform(10)?;
    // (log(c + 2) - log(c + 1)) / log(11)
    let expected = [0.2890648263178878, 0.1690920836734384, 0.11997274264444943, 0.09305808883546389];
    for (id, expected) in expected.into_iter().enumerate() {
        assert_abs_diff_eq!(noise.probability(id), expected, epsilon = 1e-15);
    }
    let total: f64 = (0..11).map(|id| noise.probability(id)).sum();
    assert_abs_diff_eq!(total, 1.0, epsilon = 1e-12);
    Ok(())
}
