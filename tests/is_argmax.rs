//! Whether an id is the most probable of all: on every device, for every head, as `argmax` finds it.

mod common;

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use common::problem::Problem;
use common::values::{numbers, uniform, Numbers};
use common::{dtypes, exact, on, on_each_device};
use mos_head::parts::LogitFunction;
use mos_head::score::{ChunkTerms, ScoreOptions, Scores};
use mos_head::sets::AllowedIds;
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{
    Distributions, Error, LossOptions, MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes, OptionName, OutputLayer,
    Result, SoftmaxConfig, SoftmaxHead,
};

/// The most probable ids of the operands in f64.
fn truth(case: &Problem, dtype: DType) -> Result<Vec<u32>> {
    let untempered = Problem { temperature: 1.0, masked: false, ..*case };
    let tensors = case.drawn(dtype).constants(DType::F64, &Device::Cpu)?;
    let log_probs = untempered.composed_log_probs(&tensors)?.to_vec2::<f64>()?;
    let best = |row: &Vec<f64>| (0..row.len()).fold(0, |best, id| if row[id] > row[best] { id } else { best }) as u32;
    Ok(log_probs.iter().map(best).collect())
}

fn bits(is_argmax: &Option<Tensor>) -> Numbers {
    numbers(is_argmax.as_ref().expect("asked for"))
}

on_each_device! {
    fn it_is_that_of_the_reference(device: &Device) -> Result<()> {
        for (positions, components, d, vocab) in
            [(1, 1, 9, 1), (2, 1, 9, 2), (5, 3, 9, 37), (9, 1, 16, 600), (40, 4, 9, 131), (7, 15, 20, 1030)]
        {
            for &dtype in dtypes(device) {
                let plain = Problem { entropy: false, ..Problem::new(positions, components, d, vocab) };
                for case in [
                    plain,
                    Problem { entropy: true, ..plain },
                    Problem { outside: vocab > 3, ..plain },
                    Problem { temperature: 0.6, ..plain },
                    Problem { spread: 6.0, ..plain },
                    Problem { function: LogitFunction::Softcap(2.0), logit_scale: 0.7, ..plain },
                    Problem { function: LogitFunction::Sigsoftmax, ..plain },
                    Problem { transposed: true, ..plain },
                ] {
                    let (mixture, best) = (case.drawn(dtype).mixture(dtype, device)?, truth(&case, dtype)?);
                    let options = case.options().with_is_argmax(true);
                    let other = |t: usize| (best[t] + 1 + t as u32 % 5) % vocab as u32;
                    let name = format!("{case:?} {dtype:?}");
                    let ids: Vec<u32> = (0..positions).map(|t| if t % 2 == 0 { best[t] } else { other(t) }).collect();
                    let expected: Vec<f64> = ids.iter().zip(&best).map(|(a, b)| f64::from(u8::from(a == b))).collect();
                    let one = mixture.score(&on(device, &Tensor::new(ids, &Device::Cpu)?)?, &options)?;
                    assert_eq!(bits(&one.is_argmax), expected, "{name}");
                    // Some are equal.
                    let ids: Vec<u32> = (0..positions).flat_map(|t| [other(t), best[t], best[t], other(t)]).collect();
                    let expected: Vec<f64> =
                        ids.iter().enumerate().map(|(i, id)| f64::from(u8::from(*id == best[i / 4]))).collect();
                    let ids = Tensor::from_vec(ids, (positions, 4), &Device::Cpu)?;
                    let scores = mixture.score(&on(device, &ids)?, &options)?;
                    assert_eq!(bits(&scores.is_argmax), expected, "{name}");
                    let is_argmax = scores.is_argmax.expect("asked for");
                    assert_eq!((is_argmax.dims(), is_argmax.dtype()), (&[positions, 4][..], DType::U8));
                    // Log-probabilities do not change.
                    let without = mixture.score(&on(device, &ids)?, &case.options())?;
                    assert!(without.is_argmax.is_none());
                    assert_eq!(numbers(&without.log_prob), numbers(&scores.log_prob), "{name}");
                }
            }
        }
        Ok(())
    }

    fn losses_tell_it_with_every_option(device: &Device) -> Result<()> {
        for components in [1, 4] {
            let case = Problem::new(30, components, 9, 300);
            let dtype = exact(device);
            let (mixture, best) = (case.drawn(dtype).mixture(dtype, device)?, truth(&case, dtype)?);
            let target = |(t, &best): (usize, &u32)| match t % 4 {
                0 => -1,
                1 => (i64::from(best) + 3) % 300,
                _ => i64::from(best),
            };
            let targets: Vec<i64> = best.iter().enumerate().map(target).collect();
            let expected: Vec<f64> = (0..30).map(|t| f64::from(u8::from(t % 4 > 1))).collect();
            let targets = Tensor::from_vec(targets, (30,), &Device::Cpu)?.to_device(device)?;
            let asked = LossOptions::evaluation().with_correct(true).with_ignore_index(-1);
            for options in [
                asked.clone(),
                asked.clone().with_label_smoothing(0.1),
                asked.clone().with_z_loss(1e-3),
                LossOptions::new().with_correct(true).with_ignore_index(-1),
            ] {
                let loss = mixture.loss(&targets, &options)?;
                assert_eq!(numbers(loss.is_correct.as_ref().expect("asked for")), expected, "{options:?}");
                assert_eq!(numbers(loss.correct.as_ref().expect("asked for")), [expected.iter().sum::<f64>()]);
            }
            assert!(mixture.loss(&targets, &LossOptions::new().with_ignore_index(-1))?.is_correct.is_none());
        }
        Ok(())
    }

    fn the_lowest_of_equals_is_it(device: &Device) -> Result<()> {
        for components in [1, 3] {
            let case = Problem::new(12, components, 8, 900);
            let mut operands = case.operands(&case.drawn(DType::F32).constants(DType::F32, device)?)?;
            let rows: Vec<u32> = (0..900).map(|id| if [9, 400, 899].contains(&id) { 7 } else { id }).collect();
            operands.weight = operands.weight.index_select(&Tensor::new(rows, device)?, 0)?;
            let bias: Vec<f32> = (0..900).map(|id| if [7, 9, 400, 899].contains(&id) { 9.0 } else { 0.0 }).collect();
            operands.bias = Some(Tensor::new(bias, device)?);
            let mixture = operands.mixture(case.logits())?;
            let ids: Vec<u32> = (0..12).map(|t| [7, 9, 400, 899][t % 4]).collect();
            let ids = Tensor::from_vec(ids, (12,), &Device::Cpu)?.to_device(device)?;
            for entropy in [false, true] {
                let options = ScoreOptions::new().with_is_argmax(true).with_entropy(entropy);
                let expected: Vec<f64> = (0..12).map(|t| f64::from(u8::from(t % 4 == 0))).collect();
                assert_eq!(bits(&mixture.score(&ids, &options)?.is_argmax), expected);
                let each = ids.unsqueeze(1)?;
                assert_eq!(bits(&mixture.score(&each, &options)?.is_argmax), expected);
            }
        }
        Ok(())
    }

    fn nothing_is_it_without_a_distribution(device: &Device) -> Result<()> {
        for components in [1, 2] {
            let case = Problem::new(8, components, 6, 300);
            let mut drawn = case.drawn(DType::F32);
            drawn.values.get_mut("contexts").expect("contexts")[components * 6] = f64::NAN;
            let mut operands = case.operands(&drawn.constants(DType::F32, device)?)?;
            // The only id that is possible.
            let bias: Vec<f32> = (0..300).map(|id| if id == 150 { 0.0 } else { f32::NEG_INFINITY }).collect();
            let (possible, none) = (Tensor::new(bias, device)?, Tensor::full(f32::NEG_INFINITY, 300, device)?);
            for entropy in [false, true] {
                let options = ScoreOptions::new().with_is_argmax(true).with_entropy(entropy);
                for (bias, id, expected) in [(&possible, 150u32, 1.0), (&possible, 0, 0.0), (&none, 0, 0.0)] {
                    operands.bias = Some(bias.clone());
                    let mixture = operands.mixture(case.logits())?;
                    let ids = Tensor::full(id, 8, device)?;
                    let mut all = [expected; 8];
                    all[1] = 0.0;
                    assert_eq!(bits(&mixture.score(&ids, &options)?.is_argmax), all, "K = {components}, id {id}");
                }
            }
        }
        Ok(())
    }

    fn every_head_agrees_with_its_argmax(device: &Device) -> Result<()> {
        let dtype = exact(device);
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, device);
        let heads: [Box<dyn OutputLayer>; 5] = [
            Box::new(SoftmaxHead::new(&SoftmaxConfig::new(6, 90), vb.pp("softmax"))?),
            Box::new(MixtureOfContexts::new(&MixtureConfig::new(6, 90, 3), vb.pp("moc"))?),
            Box::new(MixtureOfSoftmaxes::new(&MixtureConfig::new(6, 90, 3), vb.pp("mos"))?),
            Box::new(AdaptiveSoftmax::new(&AdaptiveConfig::new(6, 90, vec![10, 40]).with_div_value(2.0), vb.pp("adaptive"))?),
            Box::new(HierarchicalSoftmax::new(&HierarchicalConfig::new(6, 90), vb.pp("hierarchical"))?),
        ];
        let hidden = uniform(&[3, 4, 6], 5.0, 1)?.to_dtype(dtype)?.to_device(device)?;
        for head in heads {
            let best = head.argmax(&hidden)?;
            let scores = head.score(&hidden, &best, &ScoreOptions::new().with_is_argmax(true))?;
            assert_eq!(scores.is_argmax.as_ref().expect("asked for").dims(), [3, 4], "{head:?}");
            assert_eq!(bits(&scores.is_argmax), [1.0; 12], "{head:?}");
            let others = (best.to_dtype(DType::I64)? + 1.0)?;
            let is_below = others.lt(90i64)?;
            let others = is_below.where_cond(&others, &others.zeros_like()?)?.unsqueeze(2)?;
            let both = Tensor::cat(&[best.to_dtype(DType::I64)?.unsqueeze(2)?, others], 2)?;
            let scores = head.score(&hidden, &both, &ScoreOptions::new().with_is_argmax(true))?;
            let expected: Vec<f64> = (0..24).map(|i| f64::from(u8::from(i % 2 == 0))).collect();
            assert_eq!(bits(&scores.is_argmax), expected, "{head:?}");
        }
        Ok(())
    }

    fn restricted_mixtures_tell_it_among_their_sets(device: &Device) -> Result<()> {
        for components in [1, 3] {
            let case = Problem::new(6, components, 7, 400);
            let mixture = case.drawn(exact(device)).mixture(exact(device), device)?;
            let log_probs = numbers(&mixture.log_probs()?);
            let list = |t: usize| (0..20).map(|i| ((i * 19 + t * 3) % 400) as u32).collect::<Vec<_>>();
            let lists: Vec<Vec<u32>> = (0..6).map(list).collect();
            let offsets: Vec<usize> = (0..=6).map(|t| t * 20).collect();
            for (allowed, lists) in [
                (AllowedIds::per_position(&lists.concat(), &offsets)?, lists.clone()),
                (AllowedIds::new(&lists[0]), vec![lists[0].clone(); 6]),
            ] {
                let restricted = mixture.restricted(&allowed)?;
                let prob = |t: usize, id: u32| log_probs[t * 400 + id as usize];
                let best = |t: usize| {
                    lists[t].iter().copied().reduce(|a, b| if prob(t, b) > prob(t, a) { b } else { a }).expect("ids")
                };
                let other = |t: usize| lists[t].iter().copied().find(|id| *id != best(t)).expect("another");
                let ids: Vec<u32> = (0..6).map(|t| if t % 2 == 0 { best(t) } else { other(t) }).collect();
                let ids = Tensor::new(ids, &Device::Cpu)?.to_device(device)?;
                let expected = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0];
                let scores = restricted.score(&ids, &ScoreOptions::new().with_is_argmax(true))?;
                assert_eq!(bits(&scores.is_argmax), expected, "K = {components}");
                let loss = restricted.loss(&ids, &LossOptions::new().with_correct(true))?;
                assert_eq!(numbers(loss.is_correct.as_ref().expect("asked for")), expected, "K = {components}");
                assert_eq!(numbers(loss.correct.as_ref().expect("asked for")), [3.0]);
            }
        }
        Ok(())
    }
}

#[test]
fn chunks_do_not_matter() -> Result<()> {
    for components in [1, 5] {
        let case = Problem::new(200, components, 11, 700);
        let mixture = case.drawn(DType::F32).mixture(DType::F32, &Device::Cpu)?;
        let best = mixture.argmax()?;
        let options = ScoreOptions::new().with_is_argmax(true);
        let Err(Error::Workspace { least, .. }) = mixture.score(&best, &options.clone().with_workspace_bytes(1)) else {
            panic!("one byte is not enough");
        };
        for bytes in [least, 2 * least, 64 << 20] {
            let found = mixture.score(&best, &options.clone().with_workspace_bytes(bytes))?;
            assert_eq!(bits(&found.is_argmax), vec![1.0; 200], "K = {components}, {bytes} bytes");
        }
    }
    Ok(())
}

#[test]
fn distributions_of_ones_own_have_it() -> Result<()> {
    let (nan, impossible) = (f32::NAN, f32::NEG_INFINITY);
    let rows = [[0.5, 0.25, 0.25], [0.25, 0.375, 0.375], [nan, 0.5, 0.5], [0.0, 1.0, 0.0]];
    let log_probs = Tensor::new(&rows, &Device::Cpu)?.log()?;
    let ids = Tensor::new(&[[0u32, 1, 2], [2, 1, 1], [0, 1, 2], [0, 1, 2]], &Device::Cpu)?;
    let options = ScoreOptions::new().with_is_argmax(true);
    let found = Scores::from_log_probs(&log_probs, &ids, &options)?;
    assert_eq!(bits(&found.is_argmax), [1., 0., 0., 0., 1., 1., 0., 0., 0., 0., 1., 0.]);
    let nothing = Scores::from_log_probs(
        &Tensor::full(impossible, (1, 2), &Device::Cpu)?,
        &Tensor::new(&[0u32], &Device::Cpu)?,
        &options,
    )?;
    assert_eq!(bits(&nothing.is_argmax), [0.0]);
    let empty = Scores::from_log_probs(&log_probs.narrow(0, 0, 0)?, &ids.narrow(0, 0, 0)?, &options)?;
    assert_eq!(empty.is_argmax.expect("asked for").dims(), [0, 3]);
    Ok(())
}

#[test]
fn a_loss_of_scores_refuses_it() -> Result<()> {
    let mixture = Problem::new(2, 1, 3, 5).drawn(DType::F32).mixture(DType::F32, &Device::Cpu)?;
    let ids = Tensor::zeros(2, DType::U32, &Device::Cpu)?;
    let terms = |scores: mos_head::score::ChunkScores| {
        Ok(ChunkTerms::new(scores.log_prob.neg()?, scores.log_prob.ones_like()?))
    };
    let error = mixture.score_loss(&ids, &ScoreOptions::new().with_is_argmax(true), terms).expect_err("refused");
    assert!(matches!(error, Error::Unsupported { option: OptionName::IsArgmax, .. }), "{error:?}");
    Ok(())
}

/// The next byte of this repository's README, from the two before it, by heads that were trained on it.
#[test]
fn trained_heads_tell_it_of_the_targets_of_a_text() -> Result<()> {
    let text = include_str!("../README.md").as_bytes();
    let features = uniform(&[256, 24], 1.7, 2)?.to_dtype(DType::F32)?;
    let shifted = |offset: usize| -> Result<Tensor> {
        let ids: Vec<u32> = text[offset..].iter().take(text.len() - 2).map(|&byte| u32::from(byte)).collect();
        Ok(Tensor::new(ids, &Device::Cpu)?)
    };
    let hidden = [0, 1].map(|offset| Ok::<_, Error>(features.index_select(&shifted(offset)?, 0)?));
    let [before, last] = hidden;
    let (hidden, targets) = (Tensor::cat(&[before?, last?], 1)?, shifted(2)?);
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let heads: [Box<dyn OutputLayer>; 2] = [
        Box::new(SoftmaxHead::new(&SoftmaxConfig::new(48, 256), vb.pp("softmax"))?),
        Box::new(MixtureOfSoftmaxes::new(&MixtureConfig::new(48, 256, 3).with_context_dim(32), vb.pp("mos"))?),
    ];
    let mut optimizer = candle_nn::AdamW::new_lr(vars.all_vars(), 0.02)?;
    for head in heads {
        for _ in 0..30 {
            let loss = head.loss(&hidden, &targets, &LossOptions::new())?;
            candle_nn::Optimizer::step(&mut optimizer, &loss.backward()?)?;
        }
        let scores = head.score(&hidden, &targets, &ScoreOptions::new().with_is_argmax(true))?;
        let expected = numbers(&head.argmax(&hidden)?.eq(&targets)?);
        assert_eq!(bits(&scores.is_argmax), expected);
        let accuracy = expected.iter().sum::<f64>() / expected.len() as f64;
        assert!((0.2..0.9).contains(&accuracy), "{accuracy}");
    }
    Ok(())
}
