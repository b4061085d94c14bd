//! Rows of a decoder computed from spellings: against plain loops, central differences, and a decoder that has them as
//! a matrix.

mod common;

use std::collections::BTreeMap;

use approx::assert_relative_eq;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use common::values::{central_differences, fill, gradient, numbers, tensor, Numbers};
use common::{dtypes, on_each_device};
use mos_head::parts::{CharCnn, CharCnnConfig};
use mos_head::sampled::NoiseDistribution;
use mos_head::{
    ContextActivation, Error, LossOptions, MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, Result,
    SoftmaxConfig, SoftmaxHead,
};

/// Empty, short, with equal windows, longer than the rest.
const WORDS: [&str; 9] = ["", "a", "aaaa", "ab", "banana", "bandana", "é", "cab", "abracadabra"];

fn config() -> CharCnnConfig {
    CharCnnConfig::new(5).with_embedding(3).with_filters(&[(1, 2), (3, 4), (4, 3)]).with_correction(2)
}

/// Variables by name, with a correction that is not zero.
fn variables(config: &CharCnnConfig, dtype: DType, device: &Device) -> Result<(VarMap, CharCnn)> {
    let vars = VarMap::new();
    let cnn = CharCnn::new(config, &WORDS, VarBuilder::from_varmap(&vars, dtype, device))?;
    fill(&vars, 0.8)?;
    Ok((vars, cnn))
}

fn by_name(vars: &VarMap) -> BTreeMap<String, Var> {
    vars.data().lock().unwrap().clone().into_iter().collect()
}

/// A row by plain loops.
fn row(config: &CharCnnConfig, vars: &BTreeMap<String, Var>, entry: usize) -> Vec<f64> {
    let matrix = |name: &str| -> Vec<Vec<f64>> {
        let tensor = vars[name].to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        tensor.to_vec2().unwrap()
    };
    let vector = |name: &str| numbers(&vars[name]);
    let mut alphabet: Vec<char> = WORDS.concat().chars().collect();
    alphabet.sort_unstable();
    alphabet.dedup();
    let embedding = matrix("embedding.weight");
    // 0 is padding, 1 the start, 2 the end.
    let middle = WORDS[entry].chars().map(|c| 3 + alphabet.iter().position(|a| *a == c).unwrap());
    let mut characters: Vec<Vec<f64>> =
        [1].into_iter().chain(middle).chain([2]).map(|i| embedding[i].clone()).collect();
    let widest = config.filters.iter().map(|filter| filter.0).max().unwrap();
    let length = characters.len();
    characters.resize(length.max(widest), vec![0.0; config.embedding]);
    let mut x = Vec::new();
    for (width, channels) in &config.filters {
        let (weight, bias) =
            (matrix(&format!("convolution.{width}.weight")), vector(&format!("convolution.{width}.bias")));
        let windows = if length < *width { 1 } else { length - width + 1 };
        for channel in 0..*channels {
            let at = |start: usize| -> f64 {
                let inputs = characters[start..start + width].concat();
                inputs.iter().zip(&weight).map(|(input, weight)| input * weight[channel]).sum()
            };
            let largest = (0..windows).map(at).fold(f64::NEG_INFINITY, f64::max);
            x.push((largest + bias[channel]).max(0.0));
        }
    }
    let linear = |x: &[f64], name: &str| -> Vec<f64> {
        let rows = matrix(&format!("{name}.weight")).into_iter().zip(vector(&format!("{name}.bias")));
        rows.map(|(row, bias)| row.iter().zip(x).map(|(a, b)| a * b).sum::<f64>() + bias).collect()
    };
    for layer in 0..config.highway {
        let (value, gate) =
            (linear(&x, &format!("highway.{layer}.value")), linear(&x, &format!("highway.{layer}.gate")));
        for (x, (value, gate)) in x.iter_mut().zip(value.into_iter().zip(gate)) {
            let gate = 1.0 / (1.0 + (-gate).exp());
            *x = gate * value.max(0.0) + (1.0 - gate) * *x;
        }
    }
    let mut row = linear(&x, "projection");
    let correction = &matrix("correction.weight")[entry];
    for (x, projection) in row.iter_mut().zip(matrix("correction.projection")) {
        *x += correction.iter().zip(projection).map(|(a, b)| a * b).sum::<f64>();
    }
    row
}

on_each_device! {
    fn rows_equal_plain_loops(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            let config = config();
            let (vars, cnn) = variables(&config, dtype, device)?;
            let vars = by_name(&vars);
            let expected: Vec<f64> = (0..WORDS.len()).flat_map(|entry| row(&config, &vars, entry)).collect();
            let tolerance = match dtype {
                DType::F64 => 1e-13,
                DType::F32 => 1e-5,
                DType::F16 => 1e-2,
                _ => 6e-2,
            };
            assert_relative_eq!(numbers(&cnn.rows()?), expected, max_relative = tolerance);
            let some = cnn.rows_of(&Tensor::new(&[4u32, 0, 4, 2], device)?)?;
            let expected: Vec<f64> = [4, 0, 4, 2].into_iter().flat_map(|entry| row(&config, &vars, entry)).collect();
            assert_relative_eq!(numbers(&some), expected, max_relative = tolerance);
        }
        Ok(())
    }
}

/// The gradients by name, of a loss of each head.
fn gradients(cnn: &CharCnn, vars: &VarMap, head: &str, options: &LossOptions) -> Result<BTreeMap<String, Numbers>> {
    let vb = VarBuilder::from_varmap(vars, DType::F64, &Device::Cpu).pp("head");
    let hidden = tensor(&[4, 5], 1, DType::F64)?;
    let targets = Tensor::new(&[0u32, 2, 4, 8], &Device::Cpu)?;
    let config = MixtureConfig::new(5, WORDS.len(), 2).with_activation(ContextActivation::Identity);
    let head: Box<dyn OutputLayer> = match head {
        "softmax" => Box::new(SoftmaxHead::with_char_cnn(&SoftmaxConfig::new(5, WORDS.len()), cnn.clone(), vb)?),
        "moc" => Box::new(MixtureOfContexts::with_char_cnn(&config, cnn.clone(), vb)?),
        _ => Box::new(MixtureOfSoftmaxes::with_char_cnn(&config, cnn.clone(), vb)?),
    };
    let gradients = head.loss(&hidden, &targets, options)?.backward()?;
    Ok(by_name(vars).into_iter().filter_map(|(name, var)| Some((name, gradient(&gradients, &var)?))).collect())
}

#[test]
fn every_gradient_equals_central_differences() -> Result<()> {
    let (vars, cnn) = variables(&config(), DType::F64, &Device::Cpu)?;
    let upstream = tensor(&[WORDS.len(), 5], 1, DType::F64)?;
    let value = || -> Result<Tensor> { Ok((cnn.rows()? * &upstream)?.sum_all()?) };
    let found = value()?.backward()?;
    let vars = by_name(&vars);
    let values = vars.iter().map(|(name, var)| (name.clone(), numbers(var).into_vec())).collect();
    let expected = central_differences(&values, 1e-6, |moved| {
        for (name, var) in &vars {
            var.set(&Tensor::new(&*moved[name], &Device::Cpu)?.reshape(var.shape())?)?;
        }
        Ok(value()?.to_scalar()?)
    })?;
    for (name, var) in &vars {
        let found = gradient(&found, var).unwrap().named(name);
        assert_relative_eq!(found, expected[name], epsilon = 1e-13, max_relative = 1e-7);
    }
    Ok(())
}

#[test]
fn a_small_budget_changes_nothing_but_rounding() -> Result<()> {
    let (vars, cnn) = variables(&config(), DType::F64, &Device::Cpu)?;
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let small = CharCnn::new(&config().with_budget_bytes(1), &WORDS, vb)?;
    assert_relative_eq!(numbers(&small.rows()?), numbers(&cnn.rows()?), max_relative = 1e-14);
    let options = LossOptions::default();
    let (one, other) = (gradients(&cnn, &vars, "mos", &options)?, gradients(&small, &vars, "mos", &options)?);
    for (name, gradient) in one {
        assert_relative_eq!(other[&name], gradient, epsilon = 1e-18, max_relative = 1e-12);
    }
    Ok(())
}

#[test]
fn every_head_has_the_gradients_of_a_matrix_of_these_rows() -> Result<()> {
    let (vars, cnn) = variables(&config(), DType::F64, &Device::Cpu)?;
    let negatives = NoiseDistribution::log_uniform(WORDS.len())?.draw(3, 1)?;
    for options in [LossOptions::default(), LossOptions::default().with_sampled_softmax(negatives)] {
        for head in ["softmax", "moc", "mos"] {
            let found = gradients(&cnn, &vars, head, &options)?;
            assert!(by_name(&vars).keys().all(|name| name.starts_with("head") || found.contains_key(name)), "{head}");
        }
        // By the chain rule: the gradient of the rows, from a head that has them as a variable.
        let rows = cnn.rows()?;
        let leaf = Var::from_tensor(&rows.detach())?;
        let bias = by_name(&vars)["head.decoder.bias"].as_tensor().clone();
        let head = SoftmaxHead::from_tensors(leaf.as_tensor().clone(), Some(bias))?;
        let hidden = tensor(&[4, 5], 1, DType::F64)?;
        let targets = Tensor::new(&[0u32, 2, 4, 8], &Device::Cpu)?;
        let row_gradients = head.loss(&hidden, &targets, &options)?.backward()?;
        let expected = (&rows * row_gradients.get(&leaf).unwrap())?.sum_all()?.backward()?;
        let found = gradients(&cnn, &vars, "softmax", &options)?;
        for (name, var) in by_name(&vars).into_iter().filter(|(name, _)| !name.starts_with("head")) {
            let expected = gradient(&expected, &var).unwrap();
            assert_relative_eq!(found[&name], expected, epsilon = 1e-18, max_relative = 1e-12);
        }
    }
    Ok(())
}

#[test]
fn computed_rows_decode_like_the_matrix() -> Result<()> {
    let (vars, cnn) = variables(&config(), DType::F32, &Device::Cpu)?;
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("head");
    let mixture = MixtureConfig::new(5, WORDS.len(), 2);
    let softmax = SoftmaxHead::with_char_cnn(&SoftmaxConfig::new(5, WORDS.len()), cnn.clone(), vb.clone())?;
    let mos = MixtureOfSoftmaxes::with_char_cnn(&mixture, cnn, vb)?;
    assert_eq!(softmax.weight()?.dims(), [WORDS.len(), 5]);
    let heads: [&dyn OutputLayer; 2] = [&softmax, &mos];
    let hidden = tensor(&[3, 5], 1, DType::F32)?;
    for head in heads {
        let frozen = head.frozen()?;
        let expected = numbers(&head.log_probs(&hidden)?);
        assert_relative_eq!(numbers(&frozen.log_probs(&hidden)?), expected, max_relative = 1e-6);
        assert_eq!(
            frozen.top_k(&hidden, 3)?.token_ids.to_vec2::<u32>()?,
            head.top_k(&hidden, 3)?.token_ids.to_vec2::<u32>()?
        );
    }
    Ok(())
}

#[test]
fn other_spellings_have_rows_too() -> Result<()> {
    let (vars, _) = variables(&config(), DType::F64, &Device::Cpu)?;
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let uncorrected = config().with_correction(0);
    let cnn = CharCnn::new(&uncorrected, &WORDS, vb)?;
    let rows = cnn.rows_of_spellings(&["banana", "nab"])?;
    let expected = numbers(&cnn.rows()?.narrow(0, 4, 1)?);
    assert_relative_eq!(numbers(&rows.narrow(0, 0, 1)?), expected, max_relative = 1e-14);
    assert_eq!(cnn.rows_of_spellings(&[] as &[&str])?.dims(), [0, 5]);
    let error = cnn.rows_of_spellings(&["nab", "nub"]).unwrap_err();
    assert_eq!(error.to_string(), "spellings: expected characters of the alphabet, got 'u' in \"nub\" at index 1");
    Ok(())
}

#[test]
fn mistakes_are_errors_that_name_them() -> Result<()> {
    let vb = || VarBuilder::zeros(DType::F32, &Device::Cpu);
    let message = |config: CharCnnConfig, words: &[&str]| CharCnn::new(&config, words, vb()).unwrap_err().to_string();
    assert_eq!(message(config(), &[]), "spellings: expected at least 1, got 0");
    assert_eq!(message(CharCnnConfig::new(0), &WORDS), "context_dim: expected at least 1, got 0");
    assert_eq!(message(config().with_embedding(0), &WORDS), "embedding: expected at least 1, got 0");
    assert_eq!(message(config().with_filters(&[]), &WORDS), "filters: expected at least 1, got 0");
    for filters in [[(0, 1), (1, 1)], [(1, 1), (2, 0)], [(2, 1), (2, 3)]] {
        let error = CharCnn::new(&config().with_filters(&filters), &WORDS, vb()).unwrap_err();
        assert!(matches!(error, Error::Config { argument: "filters", .. }), "{error}");
    }
    assert_eq!(
        message(config().with_alphabet("abnd"), &WORDS),
        "spellings: expected characters of the alphabet, got 'é' in \"é\" at index 6"
    );
    let cnn = CharCnn::new(&config(), &WORDS, vb())?;
    let error = SoftmaxHead::with_char_cnn(&SoftmaxConfig::new(5, 10), cnn.clone(), vb()).unwrap_err();
    assert_eq!(error.to_string(), "rows of the char-CNN: expected shape [10, 5], got [9, 5]");
    let error = cnn.rows_of(&Tensor::new(&[1u32, 9], &Device::Cpu)?).unwrap_err();
    assert!(matches!(error, Error::Target { argument: "ids", position: 1, got: 9, vocab_size: 9 }));
    let head = SoftmaxHead::with_char_cnn(&SoftmaxConfig::new(5, 9), cnn, vb())?;
    let hidden = Tensor::zeros((1, 5), DType::F32, &Device::Cpu)?;
    let rows =
        LossOptions::new().with_sampled_softmax(NoiseDistribution::log_uniform(9)?.draw(2, 0)?).with_decoder_rows(true);
    let error = head.loss(&hidden, &Tensor::new(&[1u32], &Device::Cpu)?, &rows).unwrap_err();
    assert_eq!(error.to_string(), "decoder_rows: not supported by a decoder whose rows are computed");
    let error = head.loss(&hidden.to_dtype(DType::F64)?, &Tensor::new(&[1u32], &Device::Cpu)?, &rows).unwrap_err();
    assert!(matches!(error, Error::DType { argument: "hidden", .. }), "{error}");
    Ok(())
}

#[test]
fn ids_of_rows_are_a_vector_of_u32() -> Result<()> {
    let cnn = CharCnn::new(&config(), &WORDS, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    let error = |ids: &Tensor| cnn.rows_of(ids).unwrap_err();
    let ids = Tensor::new(&[1u32, 8], &Device::Cpu)?;
    for dtype in [DType::I64, DType::U8, DType::F32] {
        let error = error(&ids.to_dtype(dtype)?);
        assert_eq!(error.to_string(), format!("ids: expected dtype u32, got {dtype:?}"));
        assert!(matches!(error, Error::DType { argument: "ids", .. }), "{error:?}");
    }
    for shape in [&[1, 2][..], &[2, 1], &[2, 1, 1]] {
        let error = error(&ids.reshape(shape)?);
        assert_eq!(error.to_string(), format!("ids: expected shape [n], got {shape:?}"));
        assert!(matches!(error, Error::Shape { argument: "ids", .. }), "{error:?}");
    }
    assert_eq!(error(&ids.get(0)?).to_string(), "ids: expected shape [n], got []");
    let endless = ids.get(0)?.broadcast_as(1 << 62)?;
    assert!(matches!(error(&endless), Error::Shape { argument: "ids", .. }));
    assert_eq!(cnn.rows_of(&ids)?.dims(), [2, 5]);
    Ok(())
}

#[test]
fn sizes_that_no_machine_holds_are_errors_that_name_them() {
    let vars = VarMap::new();
    let error = |config: CharCnnConfig| {
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let error = CharCnn::new(&config, &WORDS, vb).unwrap_err();
        assert!(matches!(error, Error::Config { .. }), "{error:?}");
        error.to_string()
    };
    let huge = usize::MAX;
    // A window of 2^64 + .. characters: 2 in 64 bits.
    let filters = |filters: &[(usize, usize)]| error(config().with_filters(filters));
    assert!(filters(&[(huge, 2)]).starts_with("width * embedding * channels: expected at most 1099511627776, got 1844"));
    assert!(filters(&[(1, 2), (1 << 62, 4)]).starts_with("width * embedding * channels: expected at most"));
    assert!(filters(&[(1, huge), (2, 3)]).starts_with("width * embedding * channels: expected at most"));
    // Their sum.
    let most = (1 << 39) / 3;
    assert!(filters(&[(1, most), (2, most)]).starts_with("channels * channels: expected at most"));
    assert!(error(config().with_embedding(huge)).starts_with("width * embedding * channels: expected at most"));
    assert!(error(config().with_highway(huge)).starts_with("highway: expected at most"));
    assert!(error(config().with_correction(huge)).starts_with("context_dim * correction: expected at most"));
    let config_with_context = |context| CharCnnConfig::new(context).with_filters(&[(1, 2), (3, 4)]);
    assert!(error(config_with_context(1 << 39)).starts_with("context_dim * channels: expected at most"));
    let corrected = config_with_context(1).with_correction(1 << 39);
    assert!(error(corrected).starts_with("spellings * correction: expected at most"));
    assert!(vars.all_vars().is_empty(), "a refused network leaves no variables");
}

#[test]
fn gradients_of_half_precision_are_summed_in_single_precision() -> Result<()> {
    let words: Vec<String> = (0..3000).map(|id| format!("{id:b}")).collect();
    let config = config().with_budget_bytes(1 << 20);
    let gradients = |dtype: DType| -> Result<BTreeMap<String, Numbers>> {
        let vars = VarMap::new();
        let cnn = CharCnn::new(&config, &words, VarBuilder::from_varmap(&vars, dtype, &Device::Cpu))?;
        // The same numbers in every dtype.
        for (seed, (_, var)) in by_name(&vars).into_iter().enumerate() {
            var.set(&(tensor(var.dims(), seed, DType::BF16)? * 0.3)?.to_dtype(dtype)?)?;
        }
        let gradients = cnn.rows()?.mean_all()?.backward()?;
        let read = |(name, var): (String, Var)| (name, gradient(&gradients, &var).unwrap());
        Ok(by_name(&vars).into_iter().map(read).collect())
    };
    let expected = gradients(DType::F32)?;
    for dtype in [DType::BF16, DType::F16] {
        for (name, found) in gradients(dtype)? {
            // The correction's are those of candle's product.
            if !name.starts_with("correction") {
                assert_relative_eq!(found.named(&name), expected[&name], max_relative = 0.02);
            }
        }
    }
    Ok(())
}

#[test]
fn frozen_parameters_have_no_gradient() -> Result<()> {
    let (vars, _) = variables(&config(), DType::F32, &Device::Cpu)?;
    let named_vars: BTreeMap<_, _> = by_name(&vars);
    let tensors = named_vars.iter().map(|(name, var)| {
        let is_trained = name.starts_with("projection");
        (name.clone(), if is_trained { var.as_tensor().clone() } else { var.as_tensor().detach() })
    });
    let vb = VarBuilder::from_tensors(tensors.collect(), DType::F32, &Device::Cpu);
    let gradients = CharCnn::new(&config(), &WORDS, vb)?.rows()?.sum_all()?.backward()?;
    for (name, var) in named_vars {
        assert_eq!(gradients.get(&var).is_some(), name.starts_with("projection"), "{name}");
    }
    Ok(())
}
