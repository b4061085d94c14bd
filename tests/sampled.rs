//! Losses over a sample of the vocabulary: against their formulas in candle's operations, and against the exact loss
//! where the sample is the vocabulary.

mod common;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::{DType, Device, Tensor, Var};
use common::sampled::{assert_near, draws, targets, tolerance, Problem, VOCAB};
use common::values::{gradient, numbers, uniform};
use common::{dtypes, exact, on_each_device};
use mos_head::parts::LogitFunction;
use mos_head::sampled::NoiseDistribution;
use mos_head::{
    ContextActivation, Distributions, DropoutMasks, Error, Loss, LossOptions, Mixture, MixtureConfig, MixtureLayer,
    MixtureOfContexts, MixtureOfSoftmaxes, OptionName, OutputLayer, Reduction, Result, SoftmaxConfig, SoftmaxHead,
};

on_each_device! {
    fn the_sampled_softmax_equals_its_formula(device: &Device) -> Result<()> {
        let (tensor, ids) = targets(device)?;
        let [first, second, ..] = draws()?;
        // Targets are among the negatives, one of them more than once.
        assert!(first.token_ids().contains(&3) && second.token_ids().iter().zip(second.repeats()).any(|(id, n)| *id < 2 && *n > 1));
        for &dtype in dtypes(device) {
            for negatives in draws()? {
                for (components, scale, has_bias) in [(1, 1.0, true), (3, 1.0, true), (3, 2.5, false)] {
                    let problem = Problem::new(components, dtype, device)?.with_scale(scale);
                    let problem = if has_bias { problem } else { problem.without_bias() };
                    let expected = problem.softmax(&negatives, &ids)?.mean_all()?;
                    let options = LossOptions::new().with_sampled_softmax(negatives.clone());
                    let loss = problem.mixture()?.loss(&tensor, &options)?;
                    assert_near("loss", &loss.value, &expected, tolerance(dtype));
                    problem.assert_near(&loss.backward()?, &expected.backward()?, tolerance(dtype));
                }
            }
        }
        Ok(())
    }

    fn nce_equals_its_formula(device: &Device) -> Result<()> {
        let (tensor, ids) = targets(device)?;
        for &dtype in dtypes(device) {
            for negatives in draws()? {
                let problem = Problem::new(1, dtype, device)?;
                let expected = problem.nce(&negatives, &ids)?;
                let options = LossOptions::new().with_nce(negatives.clone()).with_reduction(Reduction::None);
                let loss = problem.mixture()?.loss(&tensor, &options)?;
                assert_near("loss", &loss.value, &expected, tolerance(dtype));
                let (found, expected) = (loss.value.sum_all()?.backward()?, expected.sum_all()?.backward()?);
                problem.assert_near(&found, &expected, tolerance(dtype));
            }
        }
        Ok(())
    }

    fn a_sample_of_the_whole_vocabulary_is_the_exact_loss(device: &Device) -> Result<()> {
        let (tensor, _) = targets(device)?;
        let dtype = exact(device);
        let problem = Problem::new(3, dtype, device)?;
        let mixture = problem.mixture()?;
        let weights = Tensor::new(&[1f32, 2., 0., 0.5, 1., 3., 1.], device)?;
        let class_weights = Tensor::from_iter((0..VOCAB).map(|id| 0.5 + (id % 3) as f32), device)?;
        let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(VOCAB, 3)?;
        for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
            let exact = LossOptions::new()
                .with_reduction(reduction)
                .with_ignore_index(17)
                .with_position_weights(weights.clone())
                .with_class_weights(class_weights.clone());
            let losses = [exact.clone(), exact.with_sampled_softmax(negatives.clone())];
            let [exact, sampled] = losses.map(|options| mixture.loss(&tensor, &options));
            let (exact, sampled) = (exact?, sampled?);
            for (name, found, expected) in [
                ("value", &sampled.value, &exact.value),
                ("sum", &sampled.sum, &exact.sum),
                ("count", &sampled.count, &exact.count),
                ("nll", &sampled.nll, &exact.nll),
            ] {
                assert_near(name, found, expected, tolerance(dtype));
            }
            let gradients = |loss: &Loss| loss.value.sum_all()?.backward();
            problem.assert_near(&gradients(&sampled)?, &gradients(&exact)?, tolerance(dtype));
        }
        Ok(())
    }

    fn rows_have_the_gradients_of_the_dense_decoder(device: &Device) -> Result<()> {
        let (tensor, _) = targets(device)?;
        let problem = Problem::new(2, exact(device), device)?;
        for negatives in draws()? {
            let options = LossOptions::new().with_sampled_softmax(negatives);
            let dense = problem.mixture()?.loss(&tensor, &options)?.backward()?;
            let loss = problem.mixture()?.loss(&tensor, &options.with_decoder_rows(true))?;
            let gradients = loss.backward()?;
            let rows = loss.decoder_rows.unwrap();
            let mut ids = rows.token_ids.to_vec1::<u32>()?;
            let (contexts, weight) = (&problem.vars["contexts"], &problem.vars["decoder.weight"]);
            for (name, row) in [("decoder.weight", &rows.weight), ("decoder.bias", rows.bias.as_ref().unwrap())] {
                let expected = dense.get(&problem.vars[name]).unwrap().index_select(&rows.token_ids, 0)?;
                assert_near(name, gradients.get(row).unwrap(), &expected, 1e-12);
            }
            assert!(gradients.get(weight).is_none() && gradients.get(contexts).is_some());
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), rows.weight.dim(0)?);
            // All other rows have none.
            let sum = |store, tensor| gradient(store, tensor).unwrap().iter().map(|x| x.abs()).sum::<f64>();
            let (all, some) = (sum(&dense, weight), sum(&gradients, &rows.weight));
            assert_abs_diff_eq!(all, some, epsilon = 1e-4 * all);
        }
        Ok(())
    }

    fn nothing_of_an_ignored_position_reaches_a_gradient(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let weight = Var::from_tensor(&Tensor::ones((VOCAB, 2), dtype, device)?)?;
        let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
        let hidden = Tensor::new(&[[0.5f32, 1.0], [f32::NAN, f32::INFINITY]], device)?.to_dtype(dtype)?;
        let targets = Tensor::new(&[3i64, -100], device)?;
        let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(4, 0)?;
        let options = LossOptions::new().with_ignore_index(-100);
        for options in [options.clone().with_sampled_softmax(negatives.clone()), options.with_nce(negatives)] {
            let loss = head.loss(&hidden, &targets, &options)?;
            let gradients = loss.backward()?;
            assert!(numbers(gradients.get(&weight).unwrap()).iter().all(|x| x.is_finite()));
            assert_eq!(loss.sum_and_count()?.1, 1.0);
            assert_eq!(numbers(&loss.nll)[1], 0.0);
            let none = Tensor::new(&[-100i64, -100], device)?;
            let loss = head.loss(&hidden, &none, &options)?;
            assert_eq!(numbers(&loss.value), [0.0]);
            let gradients = loss.backward()?;
            assert!(gradients.get(&weight).is_none_or(|g| numbers(g).iter().all(|x| *x == 0.0)));
        }
        Ok(())
    }

    fn no_positions_are_no_loss(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let weight = Var::from_tensor(&Tensor::ones((VOCAB, 2), dtype, device)?)?;
        let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
        let (hidden, targets) = (Tensor::zeros((0, 2), dtype, device)?, Tensor::zeros(0, DType::U32, device)?);
        let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(4, 0)?;
        for options in [
            LossOptions::new().with_sampled_softmax(negatives.clone()),
            LossOptions::new().with_nce(negatives),
        ] {
            let loss = head.loss(&hidden, &targets, &options)?;
            assert_eq!(loss.sum_and_count()?, (0.0, 0.0));
            assert_eq!(numbers(&loss.value), [0.0]);
            loss.backward()?;
        }
        Ok(())
    }

    fn an_evaluation_is_exact(device: &Device) -> Result<()> {
        let (tensor, _) = targets(device)?;
        let mixture = Problem::new(3, exact(device), device)?.mixture()?;
        let expected = mixture.loss(&tensor, &LossOptions::evaluation())?;
        let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(4, 0)?;
        for options in [
            LossOptions::evaluation().with_sampled_softmax(negatives.clone()),
            LossOptions::evaluation().with_nce(negatives),
        ] {
            assert_eq!(numbers(&mixture.loss(&tensor, &options)?.value), numbers(&expected.value));
        }
        Ok(())
    }
}

#[test]
fn every_head_takes_a_sampled_loss() -> Result<()> {
    let device = &Device::Cpu;
    let vars = candle_nn::VarMap::new();
    let vb = candle_nn::VarBuilder::from_varmap(&vars, DType::F64, device);
    let config = MixtureConfig::new(6, VOCAB, 3).with_activation(ContextActivation::Identity);
    let head = MixtureOfSoftmaxes::new(&config, vb)?;
    let hidden = uniform(&[2, 3, 6], 1.7, 1)?;
    let targets = Tensor::new(&[[1u32, 2, 3], [4, 5, 6]], device)?;
    let options = LossOptions::new().with_sampled_softmax(NoiseDistribution::log_uniform(VOCAB)?.draw(9, 1)?);
    let loss = head.loss(&hidden, &targets, &options.clone().with_reduction(Reduction::None))?;
    assert_eq!((loss.value.dims(), loss.nll.dims()), (&[2, 3][..], &[2, 3][..]));
    // A loss of the head is that of its mixture.
    let mixture = head.mixture(&hidden, DropoutMasks::Off)?.loss(&targets, &options)?;
    assert_near("value", &loss.value.mean_all()?, &mixture.value, 1e-12);
    let gradients = head.loss(&hidden, &targets, &options)?.backward()?;
    assert!(vars.all_vars().iter().all(|var| gradients.get(var).is_some()));
    Ok(())
}

#[test]
fn noise_contrastive_estimation_trains_what_ends_in_one_softmax() -> Result<()> {
    let device = &Device::Cpu;
    let vars = candle_nn::VarMap::new();
    let vb = candle_nn::VarBuilder::from_varmap(&vars, DType::F64, device);
    let softmax = SoftmaxHead::new(&SoftmaxConfig::new(6, VOCAB), vb.pp("softmax"))?;
    let contexts = MixtureOfContexts::new(&MixtureConfig::new(6, VOCAB, 3), vb.pp("contexts"))?;
    let one = MixtureOfSoftmaxes::new(&MixtureConfig::new(6, VOCAB, 1), vb.pp("one"))?;
    let several = MixtureOfSoftmaxes::new(&MixtureConfig::new(6, VOCAB, 3), vb.pp("several"))?;
    let hidden = uniform(&[2, 6], 1.7, 1)?;
    let targets = Tensor::new(&[1u32, 2], device)?;
    let options = LossOptions::new().with_nce(NoiseDistribution::log_uniform(VOCAB)?.draw(9, 1)?);
    let heads: [(&str, &dyn OutputLayer); 3] = [("softmax.", &softmax), ("contexts.", &contexts), ("one.", &one)];
    for (prefix, head) in heads {
        let gradients = head.loss(&hidden, &targets, &options)?.backward()?;
        let data = vars.data().lock().unwrap();
        for (name, var) in data.iter().filter(|(name, _)| name.starts_with(prefix) && !name.contains("one.prior")) {
            assert!(gradients.get(var).is_some(), "{name}");
        }
    }
    let error = several.loss(&hidden, &targets, &options).unwrap_err();
    assert!(matches!(error, Error::Unsupported { option: OptionName::Nce, .. }), "{error}");
    Ok(())
}

#[test]
fn losses_are_those_of_tensorflow_for_the_same_draws() -> Result<()> {
    let device = &Device::Cpu;
    let weight = Tensor::from_iter((0..20).map(|i| ((i * 7) % 11) as f64 / 5.0 - 1.0), device)?.reshape((10, 2))?;
    let head = SoftmaxHead::from_tensors(weight, None)?;
    let hidden = Tensor::new(&[[0.5f64, -1.0], [1.5, 0.25]], device)?;
    let targets = Tensor::new(&[1u32, 6], device)?;
    let negatives = NoiseDistribution::log_uniform(10)?.draw_with_replacement(6, 19)?;
    assert_eq!((negatives.token_ids(), negatives.repeats()), (&[0, 1, 3, 4, 9][..], &[1, 2, 1, 1, 1][..]));
    // By its formulas in Python: `log_uniform_candidate_sampler` with `unique=False`, hits removed from the sampled
    // softmax only; the first target is drawn twice.
    let options = LossOptions::new().with_reduction(Reduction::None);
    let softmax = head.loss(&hidden, &targets, &options.clone().with_sampled_softmax(negatives.clone()))?;
    let nce = head.loss(&hidden, &targets, &options.with_nce(negatives))?;
    for (found, expected) in
        [(softmax.nll, [3.805330594161978, 1.2138911743448348]), (nce.nll, [6.432191203570607, 5.368961153432695])]
    {
        assert_relative_eq!(numbers(&found), expected, max_relative = 1e-13);
    }
    Ok(())
}

#[test]
fn mistakes_are_errors_that_name_them() -> Result<()> {
    let device = &Device::Cpu;
    let message = |result: Result<Loss>| result.map(|_| ()).unwrap_err().to_string();
    let draw = |vocab, samples| NoiseDistribution::log_uniform(vocab)?.draw(samples, 0);
    assert_eq!(
        draw(5, 6).unwrap_err().to_string(),
        "samples: expected at most 5, the number of ids of positive probability, got 6"
    );
    assert_eq!(draw(5, 0).unwrap_err().to_string(), "samples: expected at least 1, got 0");
    assert_eq!(draw(0, 1).unwrap_err().to_string(), "vocab_size: expected at least 1, got 0");
    for counts in [&[][..], &[0.0], &[1.0, -1.0], &[f64::NAN, 1.0], &[f64::INFINITY]] {
        assert!(
            matches!(NoiseDistribution::unigram(counts), Err(Error::Config { argument: "counts", .. })),
            "{counts:?}"
        );
    }
    assert!(NoiseDistribution::unigram(&[1.0, 0.0])?.draw(2, 0).is_err());
    assert!(NoiseDistribution::log_uniform(3)?.draw_with_replacement(0, 0).is_err());
    assert!(NoiseDistribution::log_uniform(3)?.draw_with_replacement(usize::MAX, 0).is_err());

    let (tensor, _) = targets(device)?;
    let problem = Problem::new(3, DType::F32, device)?;
    let mixture = problem.mixture()?;
    let negatives = draw(VOCAB, 4)?;
    let sampled = LossOptions::new().with_sampled_softmax(negatives.clone());
    let nce = LossOptions::new().with_nce(negatives.clone());
    assert_eq!(message(mixture.loss(&tensor, &nce)), "nce: not supported by a mixture of several softmaxes");
    let softmax = Problem::new(1, DType::F32, device)?.mixture()?;
    for options in [&sampled, &nce] {
        for (option, options) in [
            (OptionName::Correct, options.clone().with_correct(true)),
            (OptionName::ZLoss, options.clone().with_z_loss(0.1)),
            (OptionName::LabelSmoothing, options.clone().with_label_smoothing(0.1)),
        ] {
            let error = softmax.loss(&tensor, &options).unwrap_err();
            assert!(matches!(error, Error::Unsupported { option: got, .. } if got == option), "{error}");
        }
    }
    assert_eq!(
        message(mixture.clone().with_softcap(30.0)?.loss(&tensor, &sampled)),
        "softcap: not supported by the sampled softmax"
    );
    assert_eq!(
        message(mixture.clone().with_logit_function(LogitFunction::Sigsoftmax)?.loss(&tensor, &sampled)),
        "sigsoftmax: not supported by the sampled softmax"
    );
    let other = LossOptions::new().with_sampled_softmax(draw(VOCAB + 1, 4)?);
    assert_eq!(
        message(mixture.loss(&tensor, &other)),
        "vocab_size of the negatives: expected 40, the size of the vocabulary, got 41"
    );
    let outside = Tensor::new(&[3u32, 0, 40, 17, 3, 1, 20], device)?;
    assert_eq!(message(mixture.loss(&outside, &sampled)), "targets: 40 at position 2 is not in 0..40, the vocabulary");
    let counts: Vec<f64> = (0..VOCAB).map(|id| f64::from(id != 17)).collect();
    let never = LossOptions::new().with_sampled_softmax(NoiseDistribution::unigram(&counts)?.draw(4, 0)?);
    assert_eq!(
        message(mixture.loss(&tensor, &never)),
        "noise: expected a positive probability of the target 17 at position 3, got 0"
    );
    assert_eq!(
        message(mixture.loss(&tensor, &LossOptions::new().with_decoder_rows(true))),
        "decoder_rows: expected a sampled loss, got none"
    );
    // A head that computes its loss itself.
    let nll = Tensor::zeros(7, DType::F32, device)?;
    assert_eq!(message(Loss::from_nll(&nll, &tensor, &sampled)), "sampled_softmax: not supported by Loss::from_nll");
    Ok(())
}

/// Positions and targets that make every sum long, one of the targets not among the negatives.
fn many(dtype: DType, components: usize) -> Result<(Mixture, [Var; 2], Tensor)> {
    const POSITIONS: usize = 3000;
    let tensor = |shape: &[usize], scale: f64| -> Result<Var> {
        // The same numbers in every dtype.
        Ok(Var::from_tensor(&uniform(shape, scale, 3)?.to_dtype(DType::BF16)?.to_dtype(dtype)?)?)
    };
    let (contexts, weight) = (tensor(&[POSITIONS, components, 16], 1.0)?, tensor(&[VOCAB, 16], 0.5)?);
    let log_priors = Tensor::full(-(components as f32).ln(), (POSITIONS, components), &Device::Cpu)?;
    let log_priors = if dtype == DType::F64 { log_priors.to_dtype(dtype)? } else { log_priors };
    let mixture = Mixture::new(&contexts, Some(&log_priors), &weight, None)?;
    let targets = Tensor::full(39u32, POSITIONS, &Device::Cpu)?;
    Ok((mixture, [contexts, weight], targets))
}

#[test]
fn gradients_of_half_precision_are_summed_in_single_precision() -> Result<()> {
    let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(6, 2)?;
    assert!(!negatives.token_ids().contains(&39));
    let options = |kind: &str| match kind {
        "nce" => LossOptions::new().with_nce(negatives.clone()),
        _ => LossOptions::new().with_sampled_softmax(negatives.clone()),
    };
    for (kind, components) in [("nce", 1), ("softmax", 1), ("softmax", 3)] {
        let (exact, [contexts, weight], targets) = many(DType::F64, components)?;
        let expected = exact.loss(&targets, &options(kind))?.backward()?;
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 1e-2), (DType::F16, 2e-3)] {
            let (mixture, found, targets) = many(dtype, components)?;
            let loss = mixture.loss(&targets, &options(kind))?;
            // As a loss scale does: the gradient of a mean over many positions is subnormal in f16.
            let scale = 65536.0;
            let gradients = match kind {
                "nce" => loss.value.backward()?,
                _ => (&loss.value * scale)?.backward()?,
            };
            let scale = if kind == "nce" { 1.0 } else { scale };
            for (found, expected_of) in found.iter().zip([&contexts, &weight]) {
                if kind == "nce" && dtype == DType::F16 && expected_of.rank() == 3 {
                    continue;
                }
                let found = (gradients.get(found).unwrap().to_dtype(DType::F64)? / scale)?;
                assert_near(&format!("{kind} {dtype:?}"), &found, expected.get(expected_of).unwrap(), tolerance);
            }
        }
    }
    Ok(())
}

/// The losses of a softmax over one context element and two ids, one of them the target of all and the other the
/// negative.
fn two_id_loss(
    contexts: &[f64],
    weight: [f64; 2],
    bias: [f64; 2],
    scale: f64,
    dtype: DType,
) -> Result<(Loss, Var, f64)> {
    let negatives = NoiseDistribution::unigram(&[1.0, 1.0])?;
    let negatives = (0..)
        .map(|seed| negatives.draw(1, seed))
        .find(|drawn| drawn.as_ref().is_ok_and(|drawn| drawn.token_ids() == [0]));
    let negatives = negatives.expect("a seed that draws the first id")?;
    // Both ids are equally probable in the noise: no shift remains.
    let expected_difference = negatives.expected_count(1).ln() - negatives.expected_count(0).ln();
    assert_eq!(expected_difference, 0.0);
    let accumulation = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let tensor = |values: &[f64], shape: &[usize], dtype| -> Result<Tensor> {
        Ok(Tensor::from_vec(values.to_vec(), shape, &Device::Cpu)?.to_dtype(dtype)?)
    };
    let contexts = Var::from_tensor(&tensor(contexts, &[contexts.len(), 1, 1], dtype)?)?;
    let mixture =
        Mixture::new(&contexts, None, &tensor(&weight, &[2, 1], dtype)?, Some(&tensor(&bias, &[2], accumulation)?))?;
    let targets = Tensor::ones(contexts.dim(0)?, DType::U32, &Device::Cpu)?;
    let options = LossOptions::new().with_reduction(Reduction::Sum).with_sampled_softmax(negatives);
    let loss = mixture.with_logit_scale(scale)?.loss(&targets, &options)?;
    let nll = numbers(&loss.nll)[0];
    Ok((loss, contexts, nll))
}

#[test]
fn a_large_loss_is_not_reported_as_infinite() -> Result<()> {
    for (dtype, x) in [(DType::F16, 123.0), (DType::BF16, 123.0), (DType::F32, 2e4), (DType::F64, 2e4)] {
        let (loss, contexts, nll) = two_id_loss(&[x], [x, -x], [0.0; 2], 1.0, dtype)?;
        assert_abs_diff_eq!(nll, 2.0 * x * x, epsilon = 1e-6 * nll);
        let gradient = numbers(loss.backward()?.get(&contexts).unwrap())[0];
        assert_abs_diff_eq!(gradient, 2.0 * x, epsilon = 1e-3 * x);
    }
    Ok(())
}

#[test]
fn scales_at_the_ends_of_their_range_are_those_of_the_formula() -> Result<()> {
    for (dtype, scale, x) in [
        (DType::F16, 1e-9, 1.0),
        (DType::F16, 1e-10, 3.0),
        (DType::F16, 1e-30, 1.0),
        (DType::F32, 1e-25, 1e4),
        (DType::F32, 1e30, 1e-15),
        (DType::BF16, 1e30, 1e-15),
        (DType::F64, 1e30, 1e-15),
    ] {
        let (loss, contexts, nll) = two_id_loss(&[x], [x, -x], [0.0; 2], scale, dtype)?;
        let rounded = numbers(&Tensor::new(&[x], &Device::Cpu)?.to_dtype(dtype)?)[0];
        let difference = 2.0 * scale * rounded * rounded;
        let expected = difference.exp().ln_1p();
        assert_abs_diff_eq!(nll, expected, epsilon = 1e-6 * expected);
        let gradient = numbers(loss.backward()?.get(&contexts).unwrap())[0];
        let expected = 2.0 * scale * rounded / (1.0 + (-difference).exp());
        let tolerance = if dtype == DType::BF16 { 1e-2 } else { 1e-5 };
        // Less than f16 can represent is zero there.
        let least = if dtype == DType::F16 { 1e-7 } else { 0.0 };
        assert_abs_diff_eq!(gradient, expected, epsilon = tolerance * expected + least);
    }
    Ok(())
}

#[test]
fn an_impossible_target_is_infinite_whatever_the_negatives_are() -> Result<()> {
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        for negative_bias in [0.0, -1e9] {
            let (loss, contexts, nll) =
                two_id_loss(&[1.0], [1.0, 2.0], [negative_bias, f64::NEG_INFINITY], 1.0, dtype)?;
            assert_eq!((nll, numbers(&loss.value)[0]), (f64::INFINITY, f64::INFINITY), "{dtype:?}");
            // As the exact loss of one softmax: the gradient of the other logits.
            let gradient = numbers(loss.backward()?.get(&contexts).unwrap())[0];
            assert_abs_diff_eq!(gradient, 1.0 - 2.0, epsilon = 1e-3);
        }
        let (loss, contexts, nll) = two_id_loss(&[1.0], [1.0, 2.0], [f64::NEG_INFINITY; 2], 1.0, dtype)?;
        assert!(nll.is_nan(), "{dtype:?}: {nll}");
        assert!(numbers(loss.backward()?.get(&contexts).unwrap())[0].is_nan(), "{dtype:?}");
    }
    Ok(())
}

#[test]
fn many_positions_are_one_loss() -> Result<()> {
    // 24 MiB of contexts.
    let (positions, d) = (24_000, 128);
    let contexts = Var::from_tensor(&uniform(&[positions, 2, d], 0.5, 1)?.to_dtype(DType::F32)?)?;
    let log_priors = Tensor::full(0.5f32.ln(), (positions, 2), &Device::Cpu)?;
    let weight = Var::from_tensor(&uniform(&[VOCAB, d], 0.5, 2)?.to_dtype(DType::F32)?)?;
    let mixture = Mixture::new(&contexts, Some(&log_priors), &weight, None)?;
    let targets = Tensor::from_iter((0..positions as u32).map(|i| i * 7 % VOCAB as u32), &Device::Cpu)?;
    let exact = mixture.loss(&targets, &LossOptions::new())?;
    let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(VOCAB, 1)?;
    let sampled = mixture.loss(&targets, &LossOptions::new().with_sampled_softmax(negatives))?;
    assert_near("nll", &sampled.nll, &exact.nll, 1e-5);
    let (found, expected) = (sampled.backward()?, exact.backward()?);
    for variable in [&contexts, &weight] {
        assert_near("gradient", found.get(variable).unwrap(), expected.get(variable).unwrap(), 1e-4);
    }
    Ok(())
}

#[test]
fn a_scale_of_the_logits_is_exact_in_half_precision() -> Result<()> {
    // Logits of 8192 before their scale, and shifts that are divided by it.
    for (dtype, scale) in [(DType::F16, 1.0 / 512.0), (DType::F16, 1e-4), (DType::BF16, 1e-8), (DType::F32, 1e-8)] {
        let contexts = Tensor::full(8f32, (3, 1, 128), &Device::Cpu)?.to_dtype(dtype)?;
        let weight = Tensor::full(8f32, (VOCAB, 128), &Device::Cpu)?.to_dtype(dtype)?;
        let mixture = Mixture::new(&contexts, None, &weight, None)?.with_logit_scale(scale)?;
        let targets = Tensor::new(&[0u32, 20, 39], &Device::Cpu)?;
        let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(VOCAB, 1)?;
        let sampled = mixture.loss(&targets, &LossOptions::new().with_sampled_softmax(negatives))?;
        assert_relative_eq!(numbers(&sampled.nll), [(VOCAB as f64).ln(); 3], max_relative = 1e-5);
        let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(2, 1)?;
        let log_expected = |id: usize| negatives.expected_count(id).ln();
        let options = LossOptions::new().with_sampled_softmax(negatives.clone());
        let found = mixture.loss(&targets, &options)?.nll.to_vec1::<f32>()?;
        for (found, id) in found.into_iter().zip([0usize, 20, 39]) {
            let others =
                negatives.token_ids().iter().filter(|other| **other != id).map(|id| (-log_expected(*id)).exp());
            let own = (-log_expected(id)).exp();
            let expected = ((own + others.sum::<f64>()) / own).ln();
            assert_abs_diff_eq!(f64::from(found), expected, epsilon = 1e-3 * expected.max(1.0));
        }
    }
    Ok(())
}

#[test]
fn an_impossible_target_has_an_infinite_loss_and_spoils_no_other() -> Result<()> {
    let weight = Var::from_tensor(&Tensor::ones((VOCAB, 2), DType::F32, &Device::Cpu)?)?;
    let bias = Tensor::from_iter((0..VOCAB).map(|id| if id == 39 { f32::NEG_INFINITY } else { 0.0 }), &Device::Cpu)?;
    let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), Some(bias))?;
    let hidden = Var::from_tensor(&Tensor::ones((2, 2), DType::F32, &Device::Cpu)?)?;
    let targets = Tensor::new(&[3u32, 39], &Device::Cpu)?;
    let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(4, 0)?;
    for options in [LossOptions::new().with_sampled_softmax(negatives.clone()), LossOptions::new().with_nce(negatives)]
    {
        for weight_of_it in [1f32, 0.0] {
            let weights = Tensor::new(&[1f32, weight_of_it], &Device::Cpu)?;
            let loss = head.loss(&hidden, &targets, &options.clone().with_position_weights(weights))?;
            let nll = loss.nll.to_vec1::<f32>()?;
            assert!(nll[0].is_finite() && nll[1] == f32::INFINITY, "{nll:?}");
            assert_eq!(loss.value.to_scalar::<f32>()?.is_finite(), weight_of_it == 0.0);
            let gradients = loss.backward()?;
            let gradient = gradients.get(&hidden).unwrap().get(0)?;
            assert!(numbers(&gradient).iter().all(|x| x.is_finite()), "{gradient}");
        }
    }
    Ok(())
}

#[test]
fn weights_that_sum_to_zero_have_no_mean() -> Result<()> {
    let (tensor, _) = targets(&Device::Cpu)?;
    let problem = Problem::new(2, DType::F64, &Device::Cpu)?;
    let weights = Tensor::new(&[1f64, -1., 2., -2., 0., 0., 0.], &Device::Cpu)?;
    let options = LossOptions::new().with_position_weights(weights);
    let loss = problem.mixture()?.loss(&tensor, &options.with_sampled_softmax(draws()?[0].clone()))?;
    assert_eq!(numbers(&loss.value), [0.0]);
    let gradients = loss.backward()?;
    let gradients = problem.gradients(&gradients);
    assert!(gradients.len() == 4 && gradients.values().all(|gradient| gradient.iter().all(|x| *x == 0.0)));
    Ok(())
}

#[test]
fn layouts_frozen_operands_and_second_passes_are_those_of_the_exact_loss() -> Result<()> {
    let (tensor, _) = targets(&Device::Cpu)?;
    let problem = Problem::new(3, DType::F64, &Device::Cpu)?;
    let options = LossOptions::new().with_sampled_softmax(NoiseDistribution::log_uniform(VOCAB)?.draw(VOCAB, 1)?);
    // A transposed decoder, frozen contexts, an upstream gradient of each position, twice.
    let operands = problem.operands()?;
    let transposed = Var::from_tensor(&operands.weight.t()?.contiguous()?)?;
    let mixture = Mixture::new(&operands.contexts.detach(), operands.log_priors.as_ref(), &transposed.t()?, None)?;
    let upstream = Tensor::new(&[1f64, -2., 0.5, 0., 3., 1., 1.], &Device::Cpu)?;
    let [exact, sampled] = [LossOptions::new(), options].map(|options| -> Result<_> {
        let loss = mixture.loss(&tensor, &options.with_reduction(Reduction::None))?;
        let value = (loss.value * &upstream)?.sum_all()?;
        Ok((value.backward()?, value.backward()?))
    });
    let ((expected, _), (first, second)) = (exact?, sampled?);
    for variable in [transposed.as_tensor(), &problem.vars["log_priors"]] {
        for found in [&first, &second] {
            assert_near("gradient", found.get(variable).unwrap(), expected.get(variable).unwrap(), 1e-11);
        }
    }
    assert!(first.get(&problem.vars["contexts"]).is_none());
    Ok(())
}
