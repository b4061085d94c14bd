//! A head over quantised rows gives every result of the same head over the dequantised rows, and the gradients of all
//! but the rows.

mod common;

use std::process::Command;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor, Var};
use common::decoded_bits;
use common::needs;
use common::quantised::{quantised, rows, Parameters, BLOCKS, HIDDEN, TYPES};
use common::values::{numbers, uniform};
use mos_head::decode::{BeamSearch, Constraints, Sampler, Sampling, TokenRequest};
use mos_head::parts::{Decoder, LowRankAdapter, QuantisedLinear};
use mos_head::sampled::NoiseDistribution;
use mos_head::score::ScoreOptions;
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::{Distributions, DropoutMasks, LossOptions, MixtureLayer, OutputLayer, Result, SoftmaxHead};

/// Odd, and more than a tile of ids.
const VOCAB: usize = 403;
const D: usize = 256;

fn hidden(positions: usize, size: usize) -> Result<Tensor> {
    Ok(uniform(&[positions, size], 1.0, 3)?.to_dtype(DType::F32)?)
}

fn ids(n: usize, seed: usize) -> Result<Tensor> {
    Ok(Tensor::from_iter((0..n).map(|i| ((i * 37 + seed) % VOCAB) as u32), &Device::Cpu)?)
}

/// Three allowed ids for each position.
fn each(positions: usize, list: impl Fn(u32) -> Vec<u32>) -> Result<AllowedIds> {
    let ids: Vec<u32> = (0..positions as u32).flat_map(list).collect();
    AllowedIds::per_position(&ids, &(0..=positions).map(|t| 3 * t).collect::<Vec<_>>())
}

/// A head over quantised rows, the same over dequantised ones, and hidden states.
struct Heads {
    quantised: Box<dyn MixtureLayer>,
    dense: Box<dyn MixtureLayer>,
    hidden: Tensor,
}

/// The softmax and the mixture of softmaxes.
fn heads(parameters: &Parameters, positions: usize) -> Result<[Heads; 2]> {
    Ok([
        Heads {
            quantised: Box::new(parameters.softmax()?),
            dense: Box::new(parameters.dense_softmax(DType::F32)?),
            hidden: hidden(positions, D)?,
        },
        Heads {
            quantised: Box::new(parameters.mixture()?),
            dense: Box::new(parameters.dense_mixture(DType::F32)?),
            hidden: hidden(positions, HIDDEN)?,
        },
    ])
}

/// The numbers of every result, by name.
fn results(head: &dyn MixtureLayer, hidden: &Tensor) -> Result<Vec<(&'static str, Vec<f64>)>> {
    let n = hidden.dim(0)?;
    let flat = |tensor: &Tensor| numbers(tensor).into_vec();
    let mixture = head.mixture(hidden, DropoutMasks::Off)?;
    let (targets, candidates) = (ids(n, 5)?, ids(3 * n, 1)?.reshape((n, 3))?);
    let scores = ScoreOptions::new().with_entropy(true).with_outside(true);
    let scores = mixture.score(&candidates, &scores)?;
    let (top, many) = (mixture.top_k(4)?, mixture.top_k(70)?);
    let mut found = vec![
        ("log_probs", flat(&mixture.log_probs()?)),
        ("log_prob", flat(&mixture.log_prob(&targets)?)),
        ("scores", flat(&scores.log_prob)),
        ("top_k", [flat(&top.token_ids), flat(&top.log_probs)].concat()),
        ("top_k of many", flat(&many.log_probs)),
        ("entropy", flat(&mixture.entropy()?)),
    ];
    let request = TokenRequest::new(Sampling::greedy(), 0)?.with_best(5).with_entropy(true);
    let tokens = mixture.next_tokens(&vec![&request; n])?;
    found.push(("next_tokens", tokens.iter().flat_map(|token| [f64::from(token.token_id), token.log_prob]).collect()));
    let draws = mixture.sample(&mut Sampler::new(Sampling::new(), 7)?)?;
    found.push(("sample", flat(&draws)));
    for (name, allowed) in [
        ("shared ids", AllowedIds::new(&[3, 77, 200, 401])),
        ("ids of each position", each(n, |t| vec![t % 50, 100 + t % 7, 402])?),
    ] {
        let restricted = mixture.restricted(&allowed)?;
        found.push((name, flat(&restricted.top_k(2)?.log_probs)));
    }
    let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(40, 3)?;
    for (name, options) in [
        ("loss", LossOptions::new()),
        ("smoothed loss", LossOptions::new().with_label_smoothing(0.1)),
        ("z loss", LossOptions::new().with_z_loss(0.01)),
        ("correct", LossOptions::evaluation().with_correct(true)),
        ("budget", LossOptions::new().with_workspace_bytes(8 << 20)),
        ("sampled softmax", LossOptions::new().with_sampled_softmax(negatives)),
    ] {
        let loss = head.loss(hidden, &targets, &options)?;
        found.push((name, [flat(&loss.value), flat(&loss.nll)].concat()));
    }
    Ok(found)
}

#[test]
fn every_result_is_that_of_the_dequantised_rows() -> Result<()> {
    for dtype in TYPES {
        let parameters = Parameters::random(dtype, VOCAB, D)?;
        for positions in [3, 80] {
            for Heads { quantised, dense, hidden } in heads(&parameters, positions)? {
                let (found, expected) = (results(&*quantised, &hidden)?, results(&*dense, &hidden)?);
                for ((name, found), (_, expected)) in found.into_iter().zip(expected) {
                    let largest = expected.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
                    let error = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert_eq!(found.len(), expected.len(), "{name}");
                    assert!(error <= 3e-6 * largest, "{name} of {dtype:?} at {positions} positions: {error}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn log_probs_equal_those_of_the_rows_in_f64_at_odd_sizes() -> Result<()> {
    for dtype in TYPES {
        let widths = if dtype.block_size() == 256 { [256, 512] } else { [32, 96] };
        for (d, vocab) in widths.into_iter().zip([1, 1021]) {
            let parameters = Parameters::random(dtype, vocab, d)?;
            for positions in [1, 2, 7, 9, 17, 70] {
                let hidden = hidden(positions, d)?;
                let found = numbers(&parameters.softmax()?.log_probs(&hidden)?);
                let dense = parameters.dense_softmax(DType::F64)?;
                let expected = numbers(&dense.log_probs(&hidden.to_dtype(DType::F64)?)?);
                let name = format!("{dtype:?}, [{vocab}, {d}], {positions} positions");
                approx::assert_relative_eq!(found.named(name), expected, max_relative = 1e-6, epsilon = 1e-6);
            }
        }
    }
    Ok(())
}

#[test]
fn half_precision_and_several_leading_dimensions_are_widened() -> Result<()> {
    let parameters = Parameters::random(GgmlDType::Q6K, VOCAB, D)?;
    let head = parameters.softmax()?;
    for dtype in [DType::F16, DType::BF16] {
        let hidden = hidden(6, D)?.to_dtype(dtype)?.reshape((2, 3, D))?;
        let expected = head.log_probs(&hidden.to_dtype(DType::F32)?)?;
        assert_eq!(numbers(&head.log_probs(&hidden)?).into_vec(), numbers(&expected).into_vec());
    }
    Ok(())
}

#[test]
fn the_weight_is_what_candle_dequantises() -> Result<()> {
    for dtype in TYPES {
        let parameters = Parameters::random(dtype, 37, 512)?;
        let expected = rows(&parameters.weight)?.to_vec2::<f32>()?;
        let decoder = Decoder::from_quantised(parameters.weight.clone(), None)?;
        assert_eq!(decoder.weight()?.to_vec2::<f32>()?, expected);
        // Products with unit vectors are the rows that the kernels dequantise.
        for positions in [1, 3, 100] {
            let unit = |i: usize| (0..512).map(move |j| f32::from(u8::from(i * 5 % 512 == j)));
            let units = Tensor::from_iter((0..positions).flat_map(unit), &Device::Cpu)?.reshape((positions, 512))?;
            let found = QuantisedLinear::new(parameters.weight.clone(), None)?.forward(&units)?.to_vec2::<f32>()?;
            for (i, row) in found.iter().enumerate() {
                let column: Vec<f32> = expected.iter().map(|row| row[i * 5 % 512]).collect();
                assert_eq!(row, &column, "{dtype:?}, {positions} positions");
            }
        }
        // The gradient of the sum over an id's outputs is the row.
        let input = Var::zeros((1, 512), DType::F32, &Device::Cpu)?;
        let output = QuantisedLinear::new(parameters.weight.clone(), None)?.forward(&input)?;
        let gradients = output.narrow(1, 7, 1)?.sum_all()?.backward()?;
        assert_eq!(gradients.get(&input).expect("a gradient").to_vec2::<f32>()?[0], expected[7]);
    }
    Ok(())
}

/// What is decoded of some hidden states.
fn decoded(head: &dyn MixtureLayer, hidden: &Tensor, first: usize, positions: usize) -> Result<Vec<Vec<u64>>> {
    let mixture = head.mixture(&hidden.narrow(0, first, positions)?, DropoutMasks::Off)?;
    decoded_bits(&mixture, first, positions, 20)
}

#[test]
fn a_position_has_the_same_bits_in_every_batch() -> Result<()> {
    const MOST: usize = 40;
    for dtype in TYPES {
        let parameters = Parameters::random(dtype, VOCAB, D)?;
        for Heads { quantised, hidden, .. } in heads(&parameters, MOST)? {
            let all = decoded(&*quantised, &hidden, 0, MOST)?;
            for batch in (1..=9).chain([13, 16, 17, 24, 31, 40]) {
                for first in [0, MOST - batch] {
                    let found = decoded(&*quantised, &hidden, first, batch)?;
                    assert!(found == all[first..first + batch], "{dtype:?}, {batch} from {first}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_position_has_the_same_bits_on_every_number_of_threads() -> Result<()> {
    for dtype in TYPES {
        let parameters = Parameters::random(dtype, VOCAB, D)?;
        for Heads { quantised, hidden, .. } in heads(&parameters, 20)? {
            let on_threads = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
                pool.install(|| decoded(&*quantised, &hidden, 0, 20))
            };
            let one = on_threads(1)?;
            for threads in [2, 7] {
                assert!(on_threads(threads)? == one, "{dtype:?} on {threads} threads");
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_equal_central_differences() -> Result<()> {
    let (vocab, d, rank, step) = (29, 64, 3, 1e-4);
    for dtype in [GgmlDType::Q8_0, GgmlDType::Q4_0, GgmlDType::F16] {
        let weight = quantised(dtype, vocab, d, 7)?;
        let values = [
            uniform(&[4, d], 1.0, 1)?,
            uniform(&[vocab], 0.5, 2)?,
            uniform(&[rank, d], 0.4, 3)?,
            uniform(&[vocab, rank], 0.4, 4)?,
        ];
        let targets = Tensor::new(&[3u32, 28, 0, 17], &Device::Cpu)?;
        for options in [LossOptions::new(), LossOptions::new().with_label_smoothing(0.1)] {
            let loss = |tensors: &[Tensor], head: SoftmaxHead| -> Result<_> {
                let adapter = LowRankAdapter::from_tensors(tensors[2].clone(), tensors[3].clone(), 0.7)?;
                let head = head.with_adapter(adapter)?.with_softcap(5.0)?.with_logit_scale(0.9)?;
                head.loss(&tensors[0], &targets, &options)
            };
            let exact = |tensors: &[Tensor]| -> Result<f64> {
                let head = SoftmaxHead::from_tensors(rows(&weight)?.to_dtype(DType::F64)?, Some(tensors[1].clone()))?;
                Ok(loss(tensors, head)?.value.to_scalar::<f64>()?)
            };
            let vars = values.iter().map(|value| Var::from_tensor(&value.to_dtype(DType::F32)?));
            let vars = vars.collect::<candle_core::Result<Vec<_>>>()?;
            let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
            let head = SoftmaxHead::from_quantised(weight.clone(), Some(tensors[1].clone()))?;
            let gradients = loss(&tensors, head)?.backward()?;
            for (i, var) in vars.iter().enumerate() {
                let found = numbers(gradients.get(var).expect("a gradient")).into_vec();
                for j in (0..found.len()).step_by(found.len() / 12) {
                    let moved = |by: f64| -> Result<f64> {
                        let unit =
                            Tensor::from_iter((0..found.len()).map(|k| if k == j { by } else { 0.0 }), &Device::Cpu)?;
                        let mut moved = values.to_vec();
                        moved[i] = (&moved[i] + unit.reshape(values[i].shape())?)?;
                        exact(&moved)
                    };
                    let expected = (moved(step)? - moved(-step)?) / (2.0 * step);
                    assert!((found[j] - expected).abs() < 2e-6, "{dtype:?}, {i}[{j}]: {} {expected}", found[j]);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_are_those_of_constant_rows_in_every_computation() -> Result<()> {
    let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(40, 3)?;
    for dtype in TYPES {
        let parameters = Parameters::random(dtype, VOCAB, D)?;
        for positions in [3, 100] {
            let hidden = hidden(positions, D)?;
            let gradients = |head: &SoftmaxHead, what: usize| -> Result<Tensor> {
                let hidden = Var::from_tensor(&hidden)?;
                let targets = ids(positions, 5)?;
                let mixture = head.mixture(&hidden, DropoutMasks::Off)?;
                let value = match what {
                    0 => head.loss(&hidden, &targets, &LossOptions::new())?.value,
                    1 => head.loss(&hidden, &targets, &LossOptions::new().with_label_smoothing(0.2))?.value,
                    2 => {
                        head.loss(&hidden, &targets, &LossOptions::new().with_sampled_softmax(negatives.clone()))?.value
                    }
                    3 => head.loss(&hidden, &targets, &LossOptions::new().with_nce(negatives.clone()))?.value,
                    4 => mixture.log_probs()?.sqr()?.mean_all()?,
                    5 => mixture.entropy()?.mean_all()?,
                    6 => mixture.logits()?.sqr()?.mean_all()?,
                    7 => mixture
                        .restricted(&AllowedIds::new(&[5, 42, 79]))?
                        .log_prob(&targets.affine(0.0, 42.0)?)?
                        .mean_all()?,
                    _ => {
                        let lists = each(positions, |t| vec![42, 43 + t % 60, 300])?;
                        mixture.restricted(&lists)?.log_prob(&targets.affine(0.0, 42.0)?)?.mean_all()?
                    }
                };
                Ok(value.backward()?.get(&hidden).expect("a gradient").clone())
            };
            let (quantised, dense) = (parameters.softmax()?, parameters.dense_softmax(DType::F32)?);
            for what in 0..9 {
                let (found, expected) = (gradients(&quantised, what)?, gradients(&dense, what)?);
                let name = format!("{what} of {dtype:?} at {positions} positions");
                approx::assert_relative_eq!(numbers(&found).named(name), numbers(&expected), max_relative = 5e-6);
            }
        }
    }
    Ok(())
}

#[test]
fn priors_and_contexts_of_a_mixture_get_gradients_and_the_rows_none() -> Result<()> {
    let parameters = Parameters::random(GgmlDType::Q5K, VOCAB, D)?;
    let var = |shape: &[usize], seed| Var::from_tensor(&uniform(shape, 0.5, seed)?.to_dtype(DType::F32)?);
    let (contexts, priors) = (var(&[5, 3, D], 1)?, var(&[5, 3], 2)?);
    let targets = ids(5, 2)?;
    let gradients = |decoder: Decoder| -> Result<[Tensor; 2]> {
        let log_priors = candle_nn::ops::log_softmax(&priors, 1)?;
        let loss = decoder.mixture(&contexts, Some(&log_priors))?.loss(&targets, &LossOptions::new())?;
        let gradients = loss.backward()?;
        Ok([&contexts, &priors].map(|var| gradients.get(var).expect("a gradient").clone()))
    };
    let found = gradients(Decoder::from_quantised(parameters.weight.clone(), None)?)?;
    let expected = gradients(Decoder::from_tensors(rows(&parameters.weight)?, None)?)?;
    for (found, expected) in found.iter().zip(&expected) {
        approx::assert_relative_eq!(numbers(found), numbers(expected), max_relative = 5e-6);
    }
    Ok(())
}

#[test]
fn beams_and_merged_decoders_are_those_of_the_dequantised_rows() -> Result<()> {
    let parameters = Parameters::random(GgmlDType::Q4K, VOCAB, D)?;
    let (quantised, dense) = (parameters.softmax()?, parameters.dense_softmax(DType::F32)?);
    let states = hidden(VOCAB, D)?;
    let beams = |head: &SoftmaxHead| {
        let start = Tensor::new(&[1u32, 7], &Device::Cpu)?;
        BeamSearch::new(0)
            .with_width(3)
            .with_max_length(4)
            .run(head, &start, |tokens, _| Ok::<_, mos_head::Error>(states.index_select(tokens, 0)?))
    };
    for (found, expected) in beams(&quantised)?.iter().flatten().zip(beams(&dense)?.iter().flatten()) {
        assert_eq!(found.token_ids, expected.token_ids);
    }
    let adapter = LowRankAdapter::from_tensors(
        uniform(&[2, D], 0.3, 1)?.to_dtype(DType::F32)?,
        uniform(&[VOCAB, 2], 0.3, 2)?.to_dtype(DType::F32)?,
        0.5,
    )?;
    let (quantised, dense) = (quantised.with_adapter(adapter.clone())?, dense.with_adapter(adapter)?);
    let (found, expected) = (quantised.merged()?.weight()?, dense.merged()?.weight()?);
    assert_eq!(found.to_vec2::<f32>()?, expected.to_vec2::<f32>()?);
    let folder = std::env::temp_dir().join(format!("mos-head-{}-quantised", std::process::id()));
    quantised.decoder().adapter().expect("an adapter").save(&folder)?;
    let loaded = LowRankAdapter::load(&folder, parameters.softmax()?.decoder())?;
    std::fs::remove_dir_all(&folder).expect("a folder");
    let states = hidden(4, D)?;
    let found = parameters.softmax()?.with_adapter(loaded)?.log_probs(&states)?;
    assert_eq!(found.to_vec2::<f32>()?, quantised.log_probs(&states)?.to_vec2::<f32>()?);
    Ok(())
}

/// A restricted head copies its rows as they are: what it draws has the bits of the whole head's logits.
#[test]
fn restricted_rows_are_those_of_the_file() -> Result<()> {
    for block in BLOCKS {
        let head = Parameters::random(block, VOCAB, D)?.softmax()?;
        let ids: Vec<u32> = (0..VOCAB as u32).filter(|id| id % 7 < 3).collect();
        let restricted = Restricted::new(&head, AllowedIds::new(&ids))?;
        let hidden = hidden(5, D)?;
        let outside: Vec<u32> = (0..VOCAB as u32).filter(|id| id % 7 >= 3).collect();
        let request = TokenRequest::new(Sampling::new(), 4)?.with_best(4);
        let banned = request.clone().with_constraints(Constraints::new().with_banned(&outside))?;
        let whole = head.next_tokens(&hidden, &[&banned; 5])?;
        for layer in [&restricted as &dyn OutputLayer, &*restricted.frozen()?] {
            let tokens = layer.next_tokens(&hidden, &[&request; 5])?;
            for (token, whole) in tokens.iter().zip(&whole) {
                assert_eq!(token.token_id, whole.token_id);
                assert!((token.sampled_log_prob - whole.sampled_log_prob).abs() < 1e-5, "{block:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_product_of_candle_becomes_a_head() -> Result<()> {
    let states = hidden(3, D)?;
    for dtype in TYPES {
        let weight = quantised(dtype, VOCAB, D, 7)?;
        let expected = SoftmaxHead::from_tensors(rows(&weight)?, None)?.log_probs(&states)?;
        let found = SoftmaxHead::try_from(QMatMul::from_arc(weight)?)?.log_probs(&states)?;
        approx::assert_relative_eq!(numbers(&found), numbers(&expected), max_relative = 1e-6);
    }
    Ok(())
}

#[test]
fn a_scale_that_is_not_a_number_gives_logits_that_are_none() -> Result<()> {
    for dtype in BLOCKS {
        let whole = quantised(dtype, VOCAB, D, 7)?;
        let mut bytes = whole.data()?.into_owned();
        // Every byte of the second row's blocks is one: its scale in half precision is a NaN.
        let row = bytes.len() / VOCAB;
        bytes[row..2 * row].fill(0xff);
        let storage = candle_core::quantized::QStorage::from_data(bytes.into(), &Device::Cpu, dtype)?;
        let head = SoftmaxHead::from_quantised(Arc::new(QTensor::new(storage, (VOCAB, D))?), None)?;
        for positions in [1, 9, 70] {
            let states = hidden(positions, D)?;
            let logits = head.mixture(&states, DropoutMasks::Off)?.logits()?.to_vec2::<f32>()?;
            assert!(logits.iter().all(|row| row[1].is_nan() && row[0].is_finite()), "{dtype:?}");
            let log_probs = numbers(&head.log_probs(&states)?).into_vec();
            assert!(log_probs.iter().all(|x| x.is_nan()), "{dtype:?}");
            let request = TokenRequest::new(Sampling::greedy(), 0)?;
            assert!(head.next_tokens(&states, &vec![&request; positions]).is_err());
        }
    }
    Ok(())
}

/// The variable that selects an instruction set is read once per process.
#[test]
fn every_instruction_set_passes_these_tests() {
    for name in ["avx512", "avx2", "neon", "scalar"] {
        let tests = [
            "log_probs_equal_those_of_the_rows_in_f64_at_odd_sizes",
            "the_weight_is_what_candle_dequantises",
            "a_position_has_the_same_bits_in_every_batch",
        ];
        let output = Command::new(std::env::current_exe().expect("this test"))
            .arg("--exact")
            .args(tests)
            .env("MOS_HEAD_SIMD", name)
            .output()
            .expect("a process");
        let printed = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        let is_lacking = printed.contains("MOS_HEAD_SIMD") && printed.contains(&format!("{name:?}"));
        assert!(is_lacking || output.status.success() && printed.contains("3 passed"), "{name}: {printed}");
        assert!(name != "scalar" || output.status.success(), "{printed}");
        if is_lacking {
            needs::is_skipped(&format!("quantised rows on {name}"), "this machine cannot run it");
        }
    }
}
