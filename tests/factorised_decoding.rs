//! Decoding by heads with a vocabulary of two levels, and their errors.

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor, D};
use candle_nn::{VarBuilder, VarMap};
use common::factorised::{build, Kind, Random, CUTOFFS, HIDDEN, KINDS, VOCAB};
use common::values::numbers;
use common::{exact, on_each_device};
use mos_head::decode::{BeamSearch, Sampler, Sampling, TopK};
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, Classes, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{Error, LossOptions, OptionName, OutputLayer, Reduction, Result, SoftmaxConfig, SoftmaxHead};

/// The parameters of the root multiplied by a factor: its distribution is flat or peaked.
fn sharpened(mut random: Random, factor: f64) -> Random {
    for (name, numbers) in &mut random.values {
        if name.starts_with("head.") || name.starts_with("class.") {
            numbers.iter_mut().for_each(|x| *x *= factor);
        }
    }
    random
}

fn assert_same_top_k(head: &dyn OutputLayer, hidden: &Tensor, k: usize, context: &str) -> Result<()> {
    let (found, expected) = (head.top_k(hidden, k)?, TopK::from_log_probs(&head.log_probs(hidden)?, k)?);
    assert_eq!(found.token_ids.dims(), expected.token_ids.dims());
    assert_eq!(numbers(&found.token_ids), numbers(&expected.token_ids), "{context}");
    assert_eq!(found.log_probs.dtype(), expected.log_probs.dtype());
    assert_abs_diff_eq!(numbers(&found.log_probs).named(context), numbers(&expected.log_probs), epsilon = 1e-5);
    Ok(())
}

on_each_device! {
    fn top_k_equals_that_of_the_log_probabilities(device: &Device) -> Result<()> {
        for (seed, kind) in (0..).zip(KINDS) {
            for factor in [0.0, 1.0, 6.0] {
                let random = sharpened(kind.random(&[5, 8], seed)?, factor);
                let (head, hidden, _) = build(kind, &random, exact(device), device)?;
                for k in [1, 2, 7, VOCAB] {
                    assert_same_top_k(&head, &hidden, k, &format!("{kind:?}, {factor}, {k}"))?;
                }
                let argmax = head.argmax(&hidden)?;
                assert_eq!(numbers(&argmax), numbers(&head.log_probs(&hidden)?.argmax(D::Minus1)?));
            }
        }
        Ok(())
    }

    fn the_lowest_id_is_first_among_equals(device: &Device) -> Result<()> {
        // Four classes of four ids, mixed: every id has the probability 1 / 16.
        let classes = Classes::Given((0..16).map(|id| (id * 5 + 3) % 4).collect());
        let config = HierarchicalConfig::new(HIDDEN, 16).with_classes(classes);
        let head = HierarchicalSoftmax::new(&config, VarBuilder::zeros(DType::F32, device))?;
        let hidden = Tensor::ones((3, HIDDEN), DType::F32, device)?;
        for k in [1, 3, 6, 16] {
            let expected: Vec<f64> = (0..k).map(|id| id as f64).collect();
            assert_eq!(numbers(&head.top_k(&hidden, k)?.token_ids), expected.repeat(3));
            assert_same_top_k(&head, &hidden, k, "zeros")?;
        }
        // Classes of one id, the last of which has the lowest: as probable as the id.
        let classes = Classes::Given(vec![4, 3, 2, 1, 0]);
        let config = HierarchicalConfig::new(HIDDEN, 5).with_classes(classes);
        let head = HierarchicalSoftmax::new(&config, VarBuilder::zeros(DType::F32, device))?;
        for k in 1..=5 {
            assert_same_top_k(&head, &hidden, k, "classes of one id")?;
        }
        // The draws are of the shortlist and of clusters; a cluster of one id is as probable as an id of the shortlist.
        let config = AdaptiveConfig::new(HIDDEN, 9, vec![3, 4, 5]).with_div_value(1.0);
        let head = AdaptiveSoftmax::new(&config, VarBuilder::zeros(DType::F32, device))?;
        for k in 1..=9 {
            assert_same_top_k(&head, &hidden, k, "zeros")?;
        }
        assert_eq!(numbers(&head.top_k(&hidden, 5)?.token_ids), [0.0, 1.0, 2.0, 3.0, 4.0].repeat(3));
        Ok(())
    }

    fn a_cluster_that_cannot_win_is_not_computed(device: &Device) -> Result<()> {
        let kind = Kind::AdaptiveWithBias;
        let mut random = kind.random(&[6], 7)?;
        let bias = random.values.get_mut("head.bias").expect("a bias");
        bias[CUTOFFS[0] + 1] = -100.0;
        random.values.get_mut("tail.1.1.weight").expect("a cluster").fill(f64::NAN);
        let (head, hidden, _) = build(kind, &random, DType::F32, device)?;
        let top = head.top_k(&hidden, 3)?;
        assert!(numbers(&top.log_probs).iter().all(|x| x.is_finite()));
        // All ids need every cluster; the error has the position in the batch.
        assert!(matches!(head.top_k(&hidden, VOCAB), Err(Error::Distribution { position: 0 })));
        Ok(())
    }

    fn a_nan_distribution_is_an_error_with_its_position(device: &Device) -> Result<()> {
        for kind in KINDS {
            let (head, hidden, _) = build(kind, &kind.random(&[3], 8)?, DType::F32, device)?;
            let spoiled = hidden.broadcast_mul(&Tensor::new(&[[1f32], [1.0], [f32::NAN]], device)?)?;
            assert!(matches!(head.top_k(&spoiled, 2), Err(Error::Distribution { position: 2 })));
            let mut sampler = Sampler::new(Sampling::new(), 1)?;
            assert!(matches!(head.sample(&spoiled, &mut sampler), Err(Error::Distribution { position: 2 })));
        }
        // In a cluster of which only the second position draws.
        let mut random = Kind::AdaptiveWithBias.random(&[2], 9)?;
        random.values.get_mut("tail.1.1.weight").expect("a cluster").fill(f64::NAN);
        random.values.get_mut("head.weight").expect("a head").fill(0.0);
        random.values.get_mut("head.weight").expect("a head")[(CUTOFFS[0] + 1) * HIDDEN] = 100.0;
        let hidden = random.values.get_mut("hidden").expect("hidden states");
        (hidden[0], hidden[HIDDEN]) = (-1.0, 1.0);
        let kind = Kind::AdaptiveWithBias;
        let (head, hidden, _) = build(kind, &random, DType::F32, device)?;
        let mut sampler = Sampler::new(Sampling::new(), 1)?;
        assert!(matches!(head.sample(&hidden, &mut sampler), Err(Error::Distribution { position: 1 })));
        assert!(matches!(head.top_k(&hidden, 1), Err(Error::Distribution { position: 1 })));
        Ok(())
    }

    fn samples_are_drawn_from_the_distribution(device: &Device) -> Result<()> {
        // Draws are made on the host, whatever the device; an emulated one is slow.
        let draws = if device.is_cpu() { 20_000 } else { 500 };
        for (seed, kind) in (20..).zip(KINDS) {
            let random = kind.random(&[1], seed)?;
            let (head, one, _) = build(kind, &random, DType::F32, device)?;
            let hidden = one.broadcast_as((draws, HIDDEN))?;
            let probs: Vec<f64> = kind.log_probs(&random.values)[0].iter().map(|x| x.exp()).collect();
            let squares: f64 = probs.iter().map(|p| p * p).sum();
            let tempered: Vec<f64> = probs.iter().map(|p| p * p / squares).collect();
            for (sampling, probs) in [
                (Sampling::new(), &probs),
                (Sampling::new().with_ancestral(true), &probs),
                (Sampling::new().with_temperature(0.5), &tempered),
            ] {
                let mut counts = [0.0; VOCAB];
                let drawn = head.sample(&hidden, &mut Sampler::new(sampling.clone(), seed)?)?;
                drawn.to_vec1::<u32>()?.iter().for_each(|&id| counts[id as usize] += 1.0);
                for (id, (count, p)) in counts.iter().zip(probs).enumerate() {
                    let n = draws as f64;
                    let deviation = (count - n * p).abs() / (n * p * (1.0 - p)).sqrt().max(1.0);
                    assert!(deviation < 4.5, "{kind:?}, {sampling:?}: {count} of id {id}, expected {}", n * p);
                }
            }
        }
        Ok(())
    }

    fn the_same_seed_draws_the_same_ids(device: &Device) -> Result<()> {
        for (seed, kind) in (30..).zip(KINDS) {
            let (head, hidden, _) = build(kind, &kind.random(&[2, 9], seed)?, DType::F32, device)?;
            let draw = |sampling: &Sampling| -> Result<Tensor> {
                head.sample(&hidden, &mut Sampler::new(sampling.clone(), 3)?)
            };
            for sampling in [Sampling::new(), Sampling::new().with_top_p(0.7), Sampling::greedy()] {
                let drawn = draw(&sampling)?;
                assert_eq!((drawn.dims(), drawn.dtype()), (&[2, 9][..], DType::U32));
                assert_eq!(numbers(&drawn), numbers(&draw(&sampling)?));
            }
            assert_eq!(numbers(&draw(&Sampling::greedy())?), numbers(&head.argmax(&hidden)?));
            assert_eq!(numbers(&draw(&Sampling::new().with_top_k(1))?), numbers(&head.argmax(&hidden)?));
        }
        Ok(())
    }

    fn beam_search_finds_the_most_probable_ids(device: &Device) -> Result<()> {
        let kind = Kind::AdaptiveMixture;
        let (head, hidden, _) = build(kind, &kind.random(&[2], 40)?, DType::F32, device)?;
        let best = head.argmax(&hidden)?.to_vec1::<u32>()?;
        let end = (0..VOCAB as u32).find(|id| !best.contains(id)).expect("another id");
        let search = BeamSearch::new(end).with_width(1).with_max_length(1);
        let start = Tensor::zeros(2, DType::U32, device)?;
        let found = search.run(&head, &start, |_, _| -> Result<Tensor> { Ok(hidden.clone()) })?;
        for (found, id) in found.iter().zip(best) {
            assert_eq!(found[0].token_ids, [id]);
        }
        Ok(())
    }

    fn what_is_not_supported_is_an_error_that_names_both(device: &Device) -> Result<()> {
        for (kind, name) in [(Kind::Adaptive, "AdaptiveSoftmax"), (Kind::Classes, "HierarchicalSoftmax")] {
            let (head, hidden, _) = build(kind, &kind.random(&[2], 50)?, DType::F32, device)?;
            let targets = Tensor::new(&[1u32, 2], device)?;
            for (unsupported, options) in [
                (OptionName::LabelSmoothing, LossOptions::new().with_label_smoothing(0.1)),
                (OptionName::ZLoss, LossOptions::new().with_z_loss(0.1)),
                (OptionName::Correct, LossOptions::new().with_correct(true)),
            ] {
                let error = head.loss(&hidden, &targets, &options).expect_err("unsupported");
                assert!(matches!(error, Error::Unsupported { option, head } if (option, head) == (unsupported, name)));
            }
            let sampling = Sampling::new().with_component_temperature(0.5);
            let error = head.sample(&hidden, &mut Sampler::new(sampling, 1)?).expect_err("unsupported");
            assert!(matches!(error, Error::Unsupported { option: OptionName::ComponentTemperature, head } if head == name));
        }
        Ok(())
    }

    fn a_wrong_argument_is_an_error_that_names_it(device: &Device) -> Result<()> {
        for kind in KINDS {
            let (head, hidden, _) = build(kind, &kind.random(&[2], 60)?, DType::F32, device)?;
            let targets = Tensor::new(&[1i64, 22], device)?;
            let fails = |hidden: &Tensor, targets: &Tensor, options: LossOptions| {
                head.loss(hidden, targets, &options).expect_err("a wrong argument")
            };
            for bad in [23i64, -1, 1 << 40] {
                let error = fails(&hidden, &Tensor::new(&[1i64, bad], device)?, LossOptions::new());
                assert!(matches!(error, Error::Target { position: 1, got, vocab_size: VOCAB, .. } if got == bad), "{error}");
            }
            let error = fails(&hidden.narrow(1, 0, 7)?, &targets, LossOptions::new());
            assert!(matches!(error, Error::Shape { argument: "hidden", .. }), "{error}");
            let error = fails(&hidden.to_dtype(DType::F16)?, &targets, LossOptions::new());
            assert!(matches!(error, Error::DType { argument: "hidden", .. }), "{error}");
            let error = fails(&hidden, &targets.narrow(0, 0, 1)?, LossOptions::new());
            assert!(matches!(error, Error::Shape { argument: "targets", .. }), "{error}");
            let error = fails(&hidden, &targets.to_dtype(DType::F32)?, LossOptions::new());
            assert!(matches!(error, Error::DType { argument: "targets", .. }), "{error}");
            let ones = |n: usize| Tensor::ones(n, DType::F32, device);
            let error = fails(&hidden, &targets, LossOptions::new().with_position_weights(ones(3)?));
            assert!(matches!(error, Error::Shape { argument: "position_weights", .. }), "{error}");
            let error = fails(&hidden, &targets, LossOptions::evaluation().with_class_weights(ones(22)?));
            assert!(matches!(error, Error::Shape { argument: "class_weights", .. }), "{error}");
            let error = fails(&hidden, &targets, LossOptions::new().with_workspace_bytes(8));
            assert!(matches!(error, Error::Workspace { got: 8, .. }), "{error}");
            let error = fails(&hidden, &targets, LossOptions::new().with_z_loss(-1.0).with_reduction(Reduction::Sum));
            assert!(matches!(error, Error::Config { argument: "z_loss", .. }), "{error}");
            for k in [0, 24] {
                assert!(matches!(head.top_k(&hidden, k), Err(Error::Config { argument: "k", .. })));
            }
            assert!(matches!(head.log_probs(&hidden.narrow(1, 0, 7)?), Err(Error::Shape { argument: "hidden", .. })));
            assert!(matches!(head.log_probs_as(&hidden, DType::U32), Err(Error::DType { argument: "dtype", .. })));
        }
        Ok(())
    }
}

fn vb() -> VarBuilder<'static> {
    VarBuilder::zeros(DType::F32, &Device::Cpu)
}

#[test]
fn cutoffs_that_do_not_increase_within_the_vocabulary_are_errors() {
    for cutoffs in [vec![], vec![0], vec![0, 5], vec![5, 5], vec![7, 5], vec![5, 20], vec![20], vec![21]] {
        let config = AdaptiveConfig::new(16, 20, cutoffs.clone());
        let error = AdaptiveSoftmax::new(&config, vb()).expect_err("cutoffs");
        assert!(matches!(error, Error::Config { argument: "cutoffs", .. }), "{cutoffs:?}: {error}");
    }
    assert!(AdaptiveSoftmax::new(&AdaptiveConfig::new(16, 20, vec![1, 19]), vb()).is_ok());
}

#[test]
fn contexts_without_a_dimension_are_errors() {
    for (hidden, div_value) in [(16, 5.0), (15, 4.0), (16, 0.5), (16, 0.0), (16, f64::NAN), (16, f64::INFINITY)] {
        let config = AdaptiveConfig::new(hidden, 20, vec![5, 10]).with_div_value(div_value);
        let error = AdaptiveSoftmax::new(&config, vb()).expect_err("a div_value");
        assert!(matches!(error, Error::Config { argument: "div_value", .. }), "{error}");
    }
    for (hidden, vocab) in [(0, 20), (16, 0)] {
        let error = AdaptiveSoftmax::new(&AdaptiveConfig::new(hidden, vocab, vec![5]), vb()).expect_err("a size");
        assert!(matches!(error, Error::Config { argument: "hidden_size" | "vocab_size", got, .. } if got == "0"));
    }
}

#[test]
fn a_head_of_other_sizes_is_an_error() -> Result<()> {
    let config = AdaptiveConfig::new(16, 20, vec![5, 10]);
    for (hidden, vocab) in [(16, 6), (16, 8), (8, 7)] {
        let head = Arc::new(SoftmaxHead::new(&SoftmaxConfig::new(hidden, vocab), vb())?);
        let error = AdaptiveSoftmax::with_head(&config, head.clone(), vb()).expect_err("another head");
        assert!(matches!(error, Error::Config { argument: "head", .. }), "{error}");
        let classes = HierarchicalConfig::new(16, 49);
        let layer = HierarchicalSoftmax::with_class_layer(&classes, head, vb());
        assert_eq!(layer.is_ok(), (hidden, vocab) == (16, 7));
    }
    Ok(())
}

#[test]
fn a_bias_of_a_head_that_is_given_is_an_error() -> Result<()> {
    let config = AdaptiveConfig::new(16, 20, vec![5, 10]);
    let head = Arc::new(SoftmaxHead::new(&SoftmaxConfig::new(16, 7), vb())?);
    let error = AdaptiveSoftmax::with_head(&config.clone().with_head_bias(true), head.clone(), vb());
    let error = error.expect_err("a bias that nothing would have");
    assert_eq!(error.to_string(), "head_bias: expected false for a head that is given, got true");
    assert!(matches!(error, Error::Config { argument: "head_bias", .. }), "{error:?}");
    assert!(AdaptiveSoftmax::with_head(&config.clone(), head, vb()).is_ok());
    assert!(AdaptiveSoftmax::new(&config.with_head_bias(true), vb()).is_ok());
    Ok(())
}

#[test]
fn classes_with_gaps_or_of_another_number_of_ids_are_errors() {
    let fails = |classes: Classes, expected: &str| {
        let config = HierarchicalConfig::new(4, 5).with_classes(classes);
        let error = HierarchicalSoftmax::new(&config, vb()).expect_err("classes");
        assert!(matches!(error, Error::Config { argument: "classes", .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    };
    fails(Classes::Consecutive(0), "1 to vocab_size 5");
    fails(Classes::Consecutive(6), "1 to vocab_size 5");
    fails(Classes::Given(vec![0, 1, 0]), "got 3");
    fails(Classes::Given(vec![0, 2, 0, 2, 0]), "none in 1");
    fails(Classes::Given(vec![1, 2, 1, 2, 3]), "none in 0");
    fails(Classes::Given(vec![0, 0, 0, 0, u32::MAX]), "none in 1");
    for classes in [Classes::Consecutive(1), Classes::Consecutive(5), Classes::Given(vec![2, 1, 0, 1, 2])] {
        assert!(HierarchicalSoftmax::new(&HierarchicalConfig::new(4, 5).with_classes(classes), vb()).is_ok());
    }
    assert!(HierarchicalSoftmax::new(&HierarchicalConfig::new(4, 0), vb()).is_err());
}

#[test]
fn classes_of_frequencies_have_about_equal_mass() -> Result<()> {
    let frequencies: Vec<f64> = (0..1000).map(|id| 1.0 / ((id * 7 % 1000) as f64 + 10.0)).collect();
    let Classes::Given(classes) = Classes::from_frequencies(&frequencies, 8)? else { panic!("given classes") };
    let mut mass = [0.0; 8];
    classes.iter().zip(&frequencies).for_each(|(&class, f)| mass[class as usize] += f);
    let total: f64 = mass.iter().sum();
    assert!(mass.iter().all(|m| (m / total - 0.125).abs() < 0.03), "{mass:?}");
    // Descending frequencies: ascending classes.
    for (a, fa) in classes.iter().zip(&frequencies) {
        assert!(classes.iter().zip(&frequencies).all(|(b, fb)| fa <= fb || a <= b));
    }
    // One id with nearly all the mass leaves fewer classes, without a gap.
    let few = Classes::from_frequencies(&[1.0, 1000.0, 1.0, 0.0], 4)?;
    assert_eq!(few, Classes::Given(vec![1, 0, 1, 1]));
    HierarchicalSoftmax::new(&HierarchicalConfig::new(4, 4).with_classes(few), vb())?;
    for (frequencies, classes) in [(&[][..], 2), (&[0.0], 1), (&[1.0, -1.0], 1), (&[f64::NAN], 1), (&[1.0], 0)] {
        assert!(matches!(Classes::from_frequencies(frequencies, classes), Err(Error::Config { .. })));
    }
    Ok(())
}

#[test]
fn variables_have_the_names_and_shapes_of_pytorch() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    AdaptiveSoftmax::new(&AdaptiveConfig::new(64, 100, vec![10, 40]).with_head_bias(true), vb)?;
    let shapes: HashMap<String, Vec<usize>> = {
        let data = vars.data().lock().expect("variables");
        data.iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect()
    };
    let expected: [(&str, &[usize]); 6] = [
        ("head.weight", &[12, 64]),
        ("head.bias", &[12]),
        ("tail.0.0.weight", &[16, 64]),
        ("tail.0.1.weight", &[30, 16]),
        ("tail.1.0.weight", &[4, 64]),
        ("tail.1.1.weight", &[60, 4]),
    ];
    assert_eq!(shapes, expected.iter().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect());
    Ok(())
}
