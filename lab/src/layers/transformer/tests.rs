//! Gradients of every layer against central differences, and what a position may depend on.

use super::*;
use crate::{layers::init, Result};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use rand::{rngs::StdRng, Rng, SeedableRng};

const SIZES: TransformerSizes = TransformerSizes { layers: 2, width: 6, heads: 2, inner: 7, dropout: 0.0 };

fn values(shape: &[usize], seed: u64) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| 2.0 * rng.random::<f64>() - 1.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Layers in f64 with random variables.
fn build<L>(layers: impl Fn(VarBuilder) -> Result<L>) -> (L, VarMap) {
    let varmap = VarMap::new();
    let built = layers(VarBuilder::from_varmap(&varmap, DType::F64, &Device::Cpu)).unwrap();
    init::uniform(&varmap, 3, |_| 0.9).unwrap();
    (built, varmap)
}

/// The gradients of all variables and of these inputs equal central differences of a weighted sum of the outputs.
fn check(varmap: &VarMap, inputs: &[(&str, &Var)], outputs: impl Fn() -> Result<Tensor>) {
    let objective = || {
        let outputs = outputs().unwrap();
        let weights = values(outputs.dims(), 9);
        (outputs * weights).unwrap().sum_all().unwrap()
    };
    let gradients = objective().backward().unwrap();
    let named = inputs.iter().map(|(name, var)| ((*name).to_owned(), (*var).clone()));
    let all: Vec<(String, Var)> = init::sorted(varmap).into_iter().chain(named).collect();
    for (name, var) in all {
        let gradient = gradients.get(&var).unwrap_or_else(|| panic!("{name} has no gradient"));
        let gradient: Vec<f64> = gradient.flatten_all().unwrap().to_vec1().unwrap();
        let start: Vec<f64> = var.flatten_all().unwrap().to_vec1().unwrap();
        let shifted = |i: usize, by: f64| {
            let mut values = start.clone();
            values[i] += by;
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap()).unwrap();
            objective().to_scalar::<f64>().unwrap()
        };
        // Every third element: each variable has some.
        for i in (0..start.len()).step_by(3) {
            let expected = (shifted(i, 1e-5) - shifted(i, -1e-5)) / 2e-5;
            assert!(
                (gradient[i] - expected).abs() < 1e-6 * (1.0 + expected.abs()),
                "{name} {i}: {} {expected}",
                gradient[i]
            );
        }
        shifted(0, 0.0);
    }
}

/// Hides the last position of the second row.
fn padding(positions: usize) -> Tensor {
    let numbers = (0..2 * positions).map(|i| if i + 1 == 2 * positions { -1e9 } else { 0.0 });
    Tensor::from_iter(numbers, &Device::Cpu).unwrap().reshape((2, 1, 1, positions)).unwrap()
}

#[test]
fn gradients_of_attention_equal_central_differences() {
    let (attention, varmap) = build(|vb| Attention::new(6, 3, vb));
    let (inputs, source) =
        (Var::from_tensor(&values(&[2, 4, 6], 1)).unwrap(), Var::from_tensor(&values(&[2, 5, 6], 2)).unwrap());
    let causal = causal_mask(4, 0, &inputs).unwrap();
    check(&varmap, &[("inputs", &inputs)], || attention.forward(&inputs, &attention.attended(&inputs)?, Some(&causal)));
    check(&varmap, &[("inputs", &inputs), ("source", &source)], || {
        attention.forward(&inputs, &attention.attended(&source)?, Some(&padding(5)))
    });
    check(&varmap, &[("source", &source)], || attention.forward(&inputs, &attention.attended(&source)?, None));
}

#[test]
fn gradients_of_the_encoder_equal_central_differences() {
    let (encoder, varmap) = build(|vb| Encoder::new(SIZES, vb));
    let inputs = Var::from_tensor(&values(&[2, 4, 6], 1)).unwrap();
    check(&varmap, &[("inputs", &inputs)], || encoder.forward(&inputs, Some(&padding(4)), None));
}

#[test]
fn gradients_of_the_decoder_equal_central_differences() {
    let (decoder, varmap) = build(|vb| Decoder::new(SIZES, vb));
    let (inputs, source) =
        (Var::from_tensor(&values(&[2, 3, 6], 1)).unwrap(), Var::from_tensor(&values(&[2, 5, 6], 2)).unwrap());
    check(&varmap, &[("inputs", &inputs), ("source", &source)], || {
        decoder.forward(&Positions { width: 6 }.add(&inputs, 2)?, &mut decoder.start(&source, padding(5))?, None)
    });
}

#[test]
fn outputs_depend_on_no_later_position_and_on_no_padding() {
    let (decoder, _) = build(|vb| Decoder::new(SIZES, vb));
    let (inputs, source) = (values(&[2, 4, 6], 1), values(&[2, 5, 6], 2));
    let outputs = |inputs: &Tensor, source: &Tensor| {
        let outputs = decoder.forward(inputs, &mut decoder.start(source, padding(5)).unwrap(), None).unwrap();
        outputs.to_vec3::<f64>().unwrap()
    };
    let before = outputs(&inputs, &source);
    for changed in 0..4 {
        let other = Tensor::cat(
            &[
                inputs.narrow(1, 0, changed).unwrap(),
                values(&[2, 1, 6], 5),
                inputs.narrow(1, changed + 1, 3 - changed).unwrap(),
            ],
            1,
        );
        let after = outputs(&other.unwrap(), &source);
        for row in 0..2 {
            for step in 0..4 {
                assert_eq!(before[row][step] == after[row][step], step < changed, "{row} {step} {changed}");
            }
        }
    }
    // The last position of the second source is padding.
    let other = Tensor::cat(&[source.narrow(1, 0, 4).unwrap(), values(&[2, 1, 6], 5)], 1).unwrap();
    let after = outputs(&inputs, &other);
    assert!(before[0] != after[0] && before[1] == after[1]);
}

#[test]
fn hidden_positions_get_no_gradient() {
    let (attention, _) = build(|vb| Attention::new(6, 3, vb));
    let (queries, attended) = (values(&[2, 4, 6], 1), Var::from_tensor(&values(&[2, 4, 6], 2)).unwrap());
    // This finds the positions of each row that get a gradient from the outputs of a step.
    let reached = |mask: &Tensor, step: usize| {
        let outputs = attention.forward(&queries, &attention.attended(&attended).unwrap(), Some(mask)).unwrap();
        let sum = (outputs.narrow(1, step, 1).unwrap() * values(&[2, 1, 6], 9)).unwrap().sum_all().unwrap();
        let gradients = sum.backward().unwrap().get(&attended).unwrap().to_vec3::<f64>().unwrap();
        gradients
            .into_iter()
            .map(|row| row.iter().map(|gradient| gradient.iter().any(|&x| x != 0.0)).collect())
            .collect()
    };
    for step in 0..4 {
        let both: Vec<Vec<bool>> = reached(&causal_mask(4, 0, &queries).unwrap(), step);
        assert_eq!(both, vec![(0..4).map(|position| position <= step).collect::<Vec<_>>(); 2], "{step}");
        assert_eq!(reached(&padding(4), step), [[true; 4], [true, true, true, false]], "{step}");
    }
}

#[test]
fn decoding_step_by_step_equals_all_at_once() {
    let (decoder, _) = build(|vb| Decoder::new(SIZES, vb));
    let (inputs, source) = (values(&[2, 5, 6], 1), values(&[2, 3, 6], 2));
    let start = || decoder.start(&source, padding(3)).unwrap();
    let all = decoder.forward(&inputs, &mut start(), None).unwrap();
    // Steps of one, two and two positions; rows are swapped after each, as in a beam.
    let swap = Tensor::new(&[1u32, 0], &Device::Cpu).unwrap();
    let mut state = start();
    for (i, (first, steps)) in [(0, 1), (1, 2), (3, 2)].into_iter().enumerate() {
        assert_eq!(state.positions().unwrap(), first);
        let swapped = |values: Tensor| {
            if i % 2 == 1 {
                values.contiguous().unwrap().index_select(&swap, 0).unwrap()
            } else {
                values
            }
        };
        let outputs = decoder.forward(&swapped(inputs.narrow(1, first, steps).unwrap()), &mut state, None).unwrap();
        let difference = (swapped(outputs) - all.narrow(1, first, steps).unwrap()).unwrap();
        assert!(difference.abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap() < 1e-12, "{first}");
        state = state.select(&swap).unwrap();
    }
}

#[test]
fn dropout_acts_with_a_generator_alone_and_a_seed_fixes_it() {
    let sizes = TransformerSizes { dropout: 0.4, ..SIZES };
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let (encoder, decoder) =
        (Encoder::new(sizes, vb.pp("encoder")).unwrap(), Decoder::new(sizes, vb.pp("decoder")).unwrap());
    init::uniform(&varmap, 3, |_| 0.9).unwrap();
    let [inputs, source] = [1, 2].map(|seed| values(&[2, 4, 6], seed).to_dtype(DType::F32).unwrap());
    let mask = padding(4).to_dtype(DType::F32).unwrap();
    for is_decoder in [false, true] {
        let outputs = |seed: Option<u64>| {
            let mut rng = seed.map(StdRng::seed_from_u64);
            let outputs = if is_decoder {
                decoder.forward(&inputs, &mut decoder.start(&source, mask.clone()).unwrap(), rng.as_mut())
            } else {
                encoder.forward(&inputs, None, rng.as_mut())
            };
            outputs.unwrap().to_vec3::<f32>().unwrap()
        };
        assert_eq!(outputs(Some(1)), outputs(Some(1)));
        assert!(outputs(Some(1)) != outputs(Some(2)) && outputs(Some(1)) != outputs(None));
    }
}

#[test]
fn a_width_that_heads_do_not_divide_is_an_error_that_says_so() {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    for heads in [0, 4] {
        let error = Attention::new(6, heads, vb.clone()).err().unwrap().to_string();
        assert!(error.contains('6') && error.contains(&format!("{heads} attention heads")), "{error}");
    }
}

#[test]
fn positions_have_the_encodings_of_the_paper() {
    let zeros = Tensor::zeros((1, 3, 4), DType::F64, &Device::Cpu).unwrap();
    let encodings = Positions { width: 4 }.add(&zeros, 5).unwrap().to_vec3::<f64>().unwrap();
    for (step, encoding) in encodings[0].iter().enumerate() {
        let position = (5 + step) as f64;
        let expected = [position.sin(), (position / 100.0).sin(), position.cos(), (position / 100.0).cos()];
        assert!(encoding.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-6), "{encoding:?}");
    }
}
