//! A few training steps of each head give the same losses on each device, in each dtype, as in f64 on the CPU; in f32 and
//! f64 also the same parameters and ids.

mod common;

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, VarBuilder, VarMap, SGD};
use common::{dtypes, on_each_device};
use mos_head::{
    LossOptions, MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, Result, SoftmaxConfig, SoftmaxHead,
};

type Make = fn(VarBuilder) -> Result<Box<dyn OutputLayer>>;

const HEADS: [(&str, Make); 3] = [
    ("softmax", |vb| Ok(Box::new(SoftmaxHead::new(&SoftmaxConfig::new(12, 70), vb)?))),
    ("mixture of contexts", |vb| Ok(Box::new(MixtureOfContexts::new(&config(), vb)?))),
    ("mixture of softmaxes", |vb| Ok(Box::new(MixtureOfSoftmaxes::new(&config(), vb)?))),
];

fn config() -> MixtureConfig {
    MixtureConfig::new(12, 70, 4).with_context_dim(9).with_prior_bias(true)
}

/// Numbers from -2 to 2.
fn numbers(shape: &[usize], seed: usize) -> Result<Tensor> {
    let values: Vec<f64> = (0..shape.iter().product()).map(|i| 2.0 * ((i + 100 * seed) as f64 * 1.7).sin()).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    // Metal has no f64, so the conversion is on the CPU.
    Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

/// The losses of some steps, the parameters after them, and the most probable ids.
struct Trained {
    losses: Vec<f64>,
    parameters: BTreeMap<String, Vec<f64>>,
    ids: Vec<u32>,
}

fn train(make: Make, dtype: DType, device: &Device) -> Result<Trained> {
    let variables = VarMap::new();
    let head = make(VarBuilder::from_varmap(&variables, dtype, device))?;
    // The same values on every device, whose random generators differ.
    for (seed, (_, variable)) in
        variables.data().lock().unwrap().iter().collect::<BTreeMap<_, _>>().into_iter().enumerate()
    {
        let values = (numbers(variable.dims(), seed)? * 0.2)?.to_dtype(dtype)?;
        variable.set(&values.to_device(device)?)?;
    }
    // It does not start at the beginning of its storage.
    let hidden = numbers(&[4, 5, 12], 99)?.to_dtype(dtype)?.to_device(device)?.narrow(0, 1, 3)?;
    let targets: Vec<u32> = (0..15).map(|i| i * 37 % 70).collect();
    let targets = Tensor::from_vec(targets, (3, 5), device)?;
    let options = LossOptions::new().with_label_smoothing(0.1).with_z_loss(1e-3).with_ignore_index(37);
    // Several chunks.
    let options = options.with_workspace_bytes(7_000 * dtype.size_in_bytes().max(4));
    let mut optimizer = SGD::new(variables.all_vars(), 0.5)?;
    let mut losses = vec![];
    for _ in 0..5 {
        let loss = head.loss(&hidden, &targets, &options)?;
        optimizer.step(&loss.backward()?)?;
        losses.extend(values(&loss.value)?);
    }
    let parameters = variables.data().lock().unwrap();
    let parameters = parameters.iter().map(|(name, v)| Ok((name.clone(), values(v)?))).collect::<Result<_>>()?;
    Ok(Trained { losses, parameters, ids: head.top_k(&hidden, 1)?.token_ids.flatten_all()?.to_vec1()? })
}

/// Panics unless all values are the same up to a tolerance relative to the larger of them and one.
fn assert_close(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let close = (got - expected).abs() <= tolerance * expected.abs().max(1.0);
        assert!(close, "{what}: value {i} is {got}, not {expected}");
    }
}

on_each_device! {
    fn every_head_learns_the_same_as_in_double_precision(device: &Device) -> Result<()> {
        for (name, make) in HEADS {
            let exact = train(make, DType::F64, &Device::Cpu)?;
            for &dtype in dtypes(device) {
                let Trained { losses, parameters, ids } = train(make, dtype, device)?;
                let what = format!("{name} {dtype:?}");
                assert!(losses[4] < losses[0], "{what}: {losses:?}");
                let tolerance = match dtype {
                    DType::F64 => 1e-12,
                    DType::F32 => 1e-5,
                    _ => 2e-2,
                };
                assert_close(&what, &losses, &exact.losses, tolerance);
                assert_eq!(parameters.len(), exact.parameters.len());
                if matches!(dtype, DType::F32 | DType::F64) {
                    for (parameter, got) in &parameters {
                        assert_close(&format!("{what}, {parameter}"), got, &exact.parameters[parameter], 2.0 * tolerance);
                    }
                    assert_eq!(ids, exact.ids, "{what}");
                }
            }
        }
        Ok(())
    }
}
