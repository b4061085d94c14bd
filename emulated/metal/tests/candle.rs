//! candle computes the same on the emulated device as on the CPU: every operation that the crate, its tests and its
//! examples use, in each floating-point dtype.

use candle_core::{DType, Device, Result, Tensor, Var, D};
use candle_nn::{AdamW, Module, Optimizer, ParamsAdamW};
use metal_on_linux::{assert_close, metal, numbers, same_on_both, FLOATS};

type Operation = (&'static str, fn(&[Tensor]) -> Result<Tensor>);

/// Checks each operation in each floating-point dtype.
fn check(tensors: &[Tensor], operations: &[Operation]) -> Result<()> {
    for dtype in FLOATS {
        for (name, operation) in operations {
            same_on_both(name, dtype, tensors, operation)?;
        }
    }
    Ok(())
}

/// A tensor of ids on the CPU.
fn indices(values: &[u32], shape: &[usize]) -> Result<Tensor> {
    Tensor::from_slice(values, shape, &Device::Cpu)
}

#[test]
fn functions_of_one_number() -> Result<()> {
    let operations: &[Operation] = &[
        ("exp", |x| x[0].exp()),
        ("log", |x| x[0].abs()?.log()),
        ("sin", |x| x[0].sin()),
        ("cos", |x| x[0].cos()),
        ("tanh", |x| x[0].tanh()),
        ("neg", |x| x[0].neg()),
        ("recip", |x| (x[0].abs()? + 0.5)?.recip()),
        ("sqr", |x| x[0].sqr()),
        ("sqrt", |x| x[0].abs()?.sqrt()),
        ("gelu", |x| x[0].gelu()),
        ("gelu_erf", |x| x[0].gelu_erf()),
        ("erf", |x| x[0].erf()),
        ("relu", |x| x[0].relu()),
        ("silu", |x| x[0].silu()),
        ("sigmoid", |x| candle_nn::ops::sigmoid(&x[0])),
        ("elu", |x| x[0].elu(0.7)),
        ("powf", |x| x[0].abs()?.powf(1.5)),
        ("affine", |x| x[0].affine(1.5, -0.25)),
        ("abs", |x| x[0].abs()),
        ("floor", |x| x[0].floor()),
        ("ceil", |x| x[0].ceil()),
        ("clamp", |x| x[0].clamp(-0.5, 0.75)),
        ("copy", |x| x[0].copy()),
    ];
    for shape in [vec![1], vec![3, 5], vec![2, 3, 700]] {
        check(&[numbers(&shape, 1)], operations)?;
        // candle has `sign` for contiguous tensors only.
        check(&[numbers(&shape, 1)], &[("sign", |x| x[0].sign())])?;
    }
    // Tensors that are not contiguous, or do not start at the beginning of their storage.
    for (name, operation) in operations {
        for dtype in FLOATS {
            same_on_both(name, dtype, &[numbers(&[4, 6], 2)], |x| operation(&[x[0].t()?]))?;
            same_on_both(name, dtype, &[numbers(&[4, 6], 2)], |x| operation(&[x[0].narrow(0, 1, 2)?]))?;
            same_on_both(name, dtype, &[numbers(&[4, 6], 2)], |x| operation(&[x[0].narrow(1, 2, 3)?]))?;
        }
    }
    Ok(())
}

#[test]
fn functions_of_two_numbers() -> Result<()> {
    let operations: &[Operation] = &[
        ("add", |x| x[0].broadcast_add(&x[1])),
        ("sub", |x| x[0].broadcast_sub(&x[1])),
        ("mul", |x| x[0].broadcast_mul(&x[1])),
        ("div", |x| x[0].broadcast_div(&(x[1].abs()? + 0.5)?)),
        ("minimum", |x| x[0].broadcast_minimum(&x[1])),
        ("maximum", |x| x[0].broadcast_maximum(&x[1])),
        ("eq", |x| x[0].broadcast_eq(&x[1])),
        ("ne", |x| x[0].broadcast_ne(&x[1])),
        ("lt", |x| x[0].broadcast_lt(&x[1])),
        ("le", |x| x[0].broadcast_le(&x[1])),
        ("gt", |x| x[0].broadcast_gt(&x[1])),
        ("ge", |x| x[0].broadcast_ge(&x[1])),
    ];
    let shapes: [[&[usize]; 2]; 6] = [
        [&[4, 5], &[4, 5]],
        [&[4, 5], &[5]],
        [&[4, 1], &[1, 5]],
        [&[4, 5], &[1, 1]],
        [&[1], &[4, 5]],
        [&[2, 1, 3], &[4, 1]],
    ];
    for [left, right] in shapes {
        check(&[numbers(left, 3), numbers(right, 4)], operations)?;
    }
    let transposed: &[Operation] = &[
        ("left transposed", |x| x[0].t()? + &x[1]),
        ("right transposed", |x| &x[1] - x[0].t()?),
        ("both transposed", |x| x[0].t()? * x[1].t()?.contiguous()?.t()?),
        ("scalar", |x| x[0].broadcast_add(&x[1].sum_all()?)),
    ];
    check(&[numbers(&[4, 6], 5), numbers(&[6, 4], 6)], transposed)
}

#[test]
fn integers() -> Result<()> {
    for dtype in [DType::U8, DType::U32, DType::I64] {
        let tensor = (numbers(&[3, 4], 7).abs()? * 10.0)?.to_dtype(dtype)?;
        let operations: &[Operation] = &[
            ("add", |x| &x[0] + &x[0]),
            ("affine", |x| x[0].affine(2.0, 1.0)),
            ("eq", |x| x[0].eq(&x[0].t()?.contiguous()?.t()?)),
            ("sum", |x| x[0].sum(1)),
            ("sum_all", |x| x[0].sum_all()),
            ("max", |x| x[0].max(0)),
            ("transposed", |x| x[0].t()?.contiguous()),
            ("cat", |x| Tensor::cat(&[&x[0], &x[0]], 1)),
            ("zeros_like", |x| x[0].zeros_like()),
            ("ones_like", |x| x[0].ones_like()),
        ];
        for (name, operation) in operations {
            same_on_both(name, DType::F32, std::slice::from_ref(&tensor), operation)?;
        }
    }
    Ok(())
}

#[test]
fn casts() -> Result<()> {
    let types = [DType::F32, DType::F16, DType::BF16, DType::U8, DType::U32, DType::I64];
    let tensor = (numbers(&[3, 4], 8).abs()? * 40.0)?;
    for from in types {
        for to in types {
            let cast = |x: &[Tensor]| x[0].to_dtype(from)?.to_dtype(to);
            same_on_both("cast", DType::F32, std::slice::from_ref(&tensor), cast)?;
            let strided = |x: &[Tensor]| x[0].to_dtype(from)?.t()?.to_dtype(to);
            same_on_both("strided cast", DType::F32, std::slice::from_ref(&tensor), strided)?;
        }
    }
    Ok(())
}

#[test]
fn reductions() -> Result<()> {
    let operations: &[Operation] = &[
        ("sum", |x| x[0].sum(D::Minus1)),
        ("sum_keepdim", |x| x[0].sum_keepdim(D::Minus1)),
        ("sum of rows", |x| x[0].sum(0)),
        ("sum_all", |x| x[0].sum_all()),
        ("mean", |x| x[0].mean(D::Minus1)),
        ("max", |x| x[0].max(D::Minus1)),
        ("max of rows", |x| x[0].max_keepdim(0)),
        ("min", |x| x[0].min(D::Minus1)),
        ("argmax", |x| x[0].argmax(D::Minus1)),
        ("argmax of rows", |x| x[0].argmax(0)),
        ("argmin", |x| x[0].argmin_keepdim(D::Minus1)),
        ("log_sum_exp", |x| x[0].log_sum_exp(D::Minus1)),
        ("log_softmax", |x| candle_nn::ops::log_softmax(&x[0], D::Minus1)),
        ("softmax", |x| candle_nn::ops::softmax(&x[0], D::Minus1)),
        ("softmax_last_dim", |x| candle_nn::ops::softmax_last_dim(&x[0])),
    ];
    for shape in [vec![1, 1], vec![3, 7], vec![2, 5, 64], vec![3, 200]] {
        // Small enough for sums in 16 bits, in another order than on the CPU.
        check(&[(numbers(&shape, 9) * 0.1)?], operations)?;
    }
    check(&[numbers(&[6, 4], 10)], &[("sum of a view", |x| x[0].t()?.narrow(1, 1, 4)?.sum(1))])
}

#[test]
fn products() -> Result<()> {
    let operations: &[Operation] = &[
        ("matmul", |x| x[0].matmul(&x[1])),
        ("left transposed", |x| x[0].t()?.contiguous()?.t()?.matmul(&x[1])),
        ("right transposed", |x| x[0].matmul(&x[1].t()?.contiguous()?.t()?)),
        ("both transposed", |x| x[1].t()?.matmul(&x[0].t()?)),
        ("a part of the left", |x| x[0].narrow(0, 1, x[0].dim(0)? - 1)?.matmul(&x[1])),
    ];
    for (m, n, k) in [(2, 3, 4), (2, 1, 9), (5, 64, 100), (17, 33, 16), (70, 70, 20), (64, 32, 32)] {
        check(&[numbers(&[m, k], 11), numbers(&[k, n], 12)], operations)?;
    }
    check(&[numbers(&[1, 30], 11), numbers(&[30, 700], 12)], &operations[..4])?;
    let batched: &[Operation] = &[
        ("batched", |x| x[0].matmul(&x[1])),
        ("broadcast", |x| x[0].broadcast_matmul(&x[1].narrow(0, 1, 1)?)),
        ("broadcast left", |x| x[0].narrow(0, 2, 1)?.squeeze(0)?.broadcast_matmul(&x[1])),
        ("transposed", |x| x[0].matmul(&x[1].transpose(1, 2)?.contiguous()?.transpose(1, 2)?)),
    ];
    check(&[numbers(&[3, 4, 5], 13), numbers(&[3, 5, 6], 14)], batched)?;
    check(&[numbers(&[3, 1, 5], 13), numbers(&[3, 5, 6], 14)], batched)?;
    let linear: Operation = ("linear", |x| candle_nn::Linear::new(x[1].clone(), Some(x[2].clone())).forward(&x[0]));
    check(&[numbers(&[2, 3, 5], 15), numbers(&[7, 5], 16), numbers(&[7], 17)], &[linear])
}

#[test]
fn shapes() -> Result<()> {
    let operations: &[Operation] = &[
        ("transpose", |x| x[0].transpose(0, 2)?.contiguous()),
        ("narrow", |x| x[0].narrow(1, 1, 2)?.contiguous()),
        ("permute", |x| x[0].permute((2, 0, 1))?.flatten_all()),
        ("cat", |x| Tensor::cat(&[&x[0], &x[0].narrow(1, 0, 1)?], 1)),
        ("stack", |x| Tensor::stack(&[&x[0], &x[0]], 0)),
        ("chunk", |x| x[0].chunk(2, 2)?[1].contiguous()),
        ("broadcast_as", |x| x[0].unsqueeze(0)?.broadcast_as((2, 3, 4, 5))?.contiguous()),
        ("reshape", |x| x[0].reshape((5, 12))),
        ("pad", |x| x[0].pad_with_zeros(1, 1, 2)),
        ("zeros_like", |x| x[0].zeros_like()),
        ("ones_like", |x| x[0].ones_like()),
        ("full", |x| Tensor::full(0.5f32, (2, 3), x[0].device())?.to_dtype(x[0].dtype())),
        ("arange", |x| Tensor::arange(0f32, 5.0, x[0].device())?.to_dtype(x[0].dtype())),
        ("slice_set", |x| {
            let target = x[0].zeros_like()?;
            target.slice_set(&x[0].narrow(1, 0, 2)?.contiguous()?, 1, 1)?;
            Ok(target)
        }),
        ("const_set", |x| {
            let target = x[0].copy()?;
            target.narrow(1, 1, 2)?.const_set(candle_core::scalar::Scalar::zero(x[0].dtype()))?;
            Ok(target)
        }),
    ];
    check(&[numbers(&[3, 4, 5], 18)], operations)
}

#[test]
fn indexing() -> Result<()> {
    let ids = indices(&[2, 0, 3, 2], &[4])?;
    let table = indices(&[0, 2, 1, 3, 3, 0, 2, 2], &[4, 2])?;
    let tensors = [numbers(&[4, 5], 19), ids, table, numbers(&[4, 2], 20)];
    let operations: &[Operation] = &[
        ("index_select rows", |x| x[0].index_select(&x[1], 0)),
        ("index_select columns", |x| x[0].index_select(&x[1], 1)),
        ("embedding", |x| x[0].embedding(&x[1])),
        ("gather", |x| x[0].gather(&x[2], 1)),
        ("gather by i64", |x| x[0].gather(&x[2].to_dtype(DType::I64)?, 1)),
        ("scatter", |x| x[0].scatter(&x[2], &x[3], 1)),
        ("scatter_add", |x| x[0].scatter_add(&x[2], &x[3], 1)),
        ("index_add", |x| x[0].index_add(&x[1], &x[0], 0)),
        ("where", |x| x[0].ge(0.0)?.where_cond(&x[0], &x[0].zeros_like()?)),
        ("where of views", |x| {
            x[0].t()?.ge(0.0)?.where_cond(&x[0].t()?, &x[0].narrow(0, 0, 1)?.t()?.broadcast_as((5, 4))?)
        }),
        ("order", |x| x[0].arg_sort_last_dim(false)),
        ("order", |x| x[0].arg_sort_last_dim(true)),
        ("cross_entropy", |x| candle_nn::loss::cross_entropy(&x[0], &x[1])),
        ("nll", |x| candle_nn::loss::nll(&candle_nn::ops::log_softmax(&x[0], 1)?, &x[1])),
    ];
    check(&tensors, operations)
}

#[test]
fn random_numbers() -> Result<()> {
    let device = metal();
    for dtype in FLOATS {
        device.set_seed(7)?;
        let uniform = Tensor::rand(-1f32, 3f32, 4001, &device)?.to_dtype(dtype)?;
        let normal = Tensor::randn(1f32, 2f32, 4000, &device)?.to_dtype(dtype)?;
        let moments = |tensor: &Tensor| -> Result<(f64, f64)> {
            let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
            Ok((tensor.mean_all()?.to_scalar()?, tensor.var(0)?.to_scalar()?))
        };
        let (mean, variance) = moments(&uniform)?;
        assert!((mean - 1.0).abs() < 0.1 && (variance - 16.0 / 12.0).abs() < 0.1, "{dtype:?}: {mean} {variance}");
        let (mean, variance) = moments(&normal)?;
        assert!((mean - 1.0).abs() < 0.2 && (variance - 4.0).abs() < 0.5, "{dtype:?}: {mean} {variance}");
    }
    device.set_seed(8)?;
    let first = Tensor::rand(0f32, 1f32, 10, &device)?.to_vec1::<f32>()?;
    let second = Tensor::rand(0f32, 1f32, 10, &device)?.to_vec1::<f32>()?;
    device.set_seed(8)?;
    let again = Tensor::rand(0f32, 1f32, 10, &device)?.to_vec1::<f32>()?;
    assert!(first != second && first == again);
    Ok(())
}

/// A small model: two layers and a loss.
struct Model {
    variables: Vec<Var>,
}

impl Model {
    /// A model with the same parameters on each device.
    fn new(dtype: DType, device: &Device) -> Result<Self> {
        let shapes: [&[usize]; 5] = [&[11, 6], &[8, 6], &[8], &[11, 8], &[11]];
        let make = |(i, shape): (usize, &&[usize])| {
            Var::from_tensor(&(numbers(shape, 30 + i as u64) * 0.5)?.to_dtype(dtype)?.to_device(device)?)
        };
        Ok(Self { variables: shapes.iter().enumerate().map(make).collect::<Result<_>>()? })
    }

    /// The mean negative log-likelihood of the targets.
    fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let [embedding, weight, bias, output, output_bias] = &self.variables[..] else { panic!("five variables") };
        let hidden = embedding.embedding(ids)?.matmul(&weight.t()?)?.broadcast_add(bias)?.tanh()?;
        let hidden = (hidden.narrow(1, 0, 8)? * hidden.ge(-0.5)?.to_dtype(hidden.dtype())?)?;
        let logits = hidden.matmul(&output.t()?)?.broadcast_add(output_bias)?;
        let log_probs = candle_nn::ops::log_softmax(&logits, 1)?;
        log_probs.gather(&targets.unsqueeze(1)?, 1)?.mean_all()?.neg()
    }
}

#[test]
fn gradients_and_steps() -> Result<()> {
    let ids = indices(&[3, 1, 4, 1, 5, 9], &[6])?;
    let targets = indices(&[1, 4, 1, 5, 9, 2], &[6])?;
    for dtype in FLOATS {
        let mut results = vec![];
        for device in [Device::Cpu, metal()] {
            let (ids, targets) = (ids.to_device(&device)?, targets.to_device(&device)?);
            let model = Model::new(dtype, &device)?;
            let mut optimizer = AdamW::new(model.variables.clone(), ParamsAdamW { lr: 0.05, ..Default::default() })?;
            let gradients = model.loss(&ids, &targets)?.backward()?;
            let mut found: Vec<Tensor> =
                model.variables.iter().map(|v| gradients.get(v).expect("a gradient").clone()).collect();
            for _ in 0..5 {
                optimizer.backward_step(&model.loss(&ids, &targets)?)?;
            }
            found.push(model.loss(&ids, &targets)?);
            results.push(found);
        }
        for (i, (expected, got)) in results[0].iter().zip(&results[1]).enumerate() {
            assert_close(&format!("result {i} of training"), got, expected, dtype)?;
        }
    }
    Ok(())
}
