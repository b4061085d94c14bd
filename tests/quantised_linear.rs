//! A layer over quantised rows is the product of the dequantised ones, with the gradient of its input.

mod common;

use candle_core::quantized::{GgmlDType, QMatMul};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use common::quantised::{quantised, rows, TYPES};
use common::values::{numbers, uniform};
use mos_head::parts::QuantisedLinear;
use mos_head::{LossOptions, OutputLayer, Result, SoftmaxHead};

const VOCAB: usize = 403;
const D: usize = 256;

/// The variables before a product that detaches its result are named, with the layer to use instead.
#[test]
fn the_layer_has_the_gradient_that_candle_s_product_lacks() -> Result<()> {
    let weight = quantised(GgmlDType::Q8_0, 32, 32, 1)?;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let first = candle_nn::linear_no_bias(8, 32, vb.pp("first"))?;
    let head = SoftmaxHead::from_quantised(quantised(GgmlDType::Q8_0, VOCAB, 32, 2)?, None)?;
    let inner = first.forward(&uniform(&[5, 8], 1.0, 3)?.to_dtype(DType::F32)?)?;
    let check = |states: Tensor| -> Result<()> {
        let loss = head.loss(&states, &Tensor::new(&[1u32, 38, 75, 112, 149], &Device::Cpu)?, &LossOptions::new())?;
        // Without a variable the loss has no backward pass.
        loss.check_gradients(&loss.value.add(&vb.get(1, "last")?.sum_all()?)?.backward()?, &vars)
    };
    check(QuantisedLinear::new(weight.clone(), None)?.forward(&inner)?)?;
    let error = check(QMatMul::from_arc(weight)?.forward(&inner)?).expect_err("a detached result").to_string();
    assert!(error.starts_with("1 of 2 variables have no gradient: first.weight."), "{error}");
    assert!(error.ends_with("parts::QuantisedLinear in place of quantized::QMatMul"), "{error}");
    Ok(())
}

#[test]
fn a_layer_is_the_product_of_the_dequantised_rows() -> Result<()> {
    for dtype in TYPES {
        let (weight, bias) = (quantised(dtype, 37, D, 3)?, uniform(&[37], 1.0, 4)?);
        let layer = QuantisedLinear::new(weight.clone(), Some(bias.to_dtype(DType::F32)?))?;
        for leading in [vec![1], vec![2, 3], vec![70], vec![0], vec![]] {
            let input = uniform(&[&leading[..], &[D]].concat(), 1.0, 5)?;
            let var = Var::from_tensor(&input.to_dtype(DType::F32)?)?;
            let output = layer.forward(&var)?;
            let rows = rows(&weight)?.to_dtype(DType::F64)?;
            let flat = input.reshape(((), D))?;
            let expected = flat.matmul(&rows.t()?)?.broadcast_add(&bias)?.reshape(output.shape())?;
            let found = numbers(&output);
            approx::assert_relative_eq!(found, numbers(&expected), max_relative = 1e-6, epsilon = 1e-6);
            let gradients = output.sqr()?.sum_all()?.backward()?;
            let found = numbers(gradients.get(&var).expect("a gradient"));
            let expected = (expected.reshape(((), 37))?.matmul(&rows)? * 2.0)?.reshape(input.shape())?;
            approx::assert_relative_eq!(found, numbers(&expected), max_relative = 3e-6, epsilon = 1e-6);
        }
        for half in [DType::F16, DType::BF16] {
            let input = uniform(&[4, D], 1.0, 5)?.to_dtype(half)?;
            let wide = layer.forward(&input.to_dtype(DType::F32)?)?;
            let found = layer.forward(&input)?;
            assert_eq!(found.dtype(), half);
            assert_eq!(numbers(&found).into_vec(), numbers(&wide.to_dtype(half)?).into_vec());
        }
    }
    Ok(())
}

#[test]
fn a_trained_bias_gets_its_gradient_in_its_dtype() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let bias = Var::from_tensor(&uniform(&[37], 1.0, 4)?.to_dtype(dtype)?)?;
        let layer = QuantisedLinear::new(quantised(GgmlDType::Q8_0, 37, D, 3)?, Some(bias.as_tensor().clone()))?;
        let output = layer.forward(&uniform(&[2, 3, D], 1.0, 5)?.to_dtype(dtype)?)?;
        let factors = uniform(output.dims(), 1.0, 6)?.to_dtype(dtype)?;
        let gradients = (output * &factors)?.sum_all()?.backward()?;
        let gradient = gradients.get(&bias).expect("a gradient");
        assert_eq!(gradient.dtype(), dtype);
        let expected = factors.to_dtype(DType::F64)?.sum((0, 1))?;
        let rounding = if dtype == DType::F32 { 1e-6 } else { 1e-2 };
        approx::assert_relative_eq!(numbers(gradient), numbers(&expected), max_relative = rounding, epsilon = rounding);
    }
    Ok(())
}

/// Rows are cut by the number of threads: at these sizes a single row would be left.
#[test]
fn gradients_have_the_same_bits_on_every_number_of_threads() -> Result<()> {
    for dtype in TYPES {
        let layer = QuantisedLinear::new(quantised(dtype, 1000, D, 6)?, None)?;
        for n in [1, 17, 33, 65, 129, 193] {
            let var = Var::from_tensor(&uniform(&[n, D], 1.0, 7)?.to_dtype(DType::F32)?)?;
            let gradient = |threads| -> Result<Vec<f64>> {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
                let gradients = pool.install(|| layer.forward(&var)?.sqr()?.sum_all()?.backward())?;
                Ok(numbers(gradients.get(&var).expect("a gradient")).into_vec())
            };
            let one = gradient(1)?;
            for threads in [2, 3, 16] {
                assert!(gradient(threads)? == one, "{dtype:?}, {n} rows on {threads} threads");
            }
        }
    }
    Ok(())
}
