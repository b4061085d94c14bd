//! A few training steps of each head give the same losses on each device, in each dtype, as in f64 on the CPU; in f32
//! and f64 also the same parameters and ids.

mod common;

use std::collections::BTreeMap;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, VarBuilder, VarMap, SGD};
use common::values::{fill, numbers, tensor, Numbers};
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

/// The losses of some steps, the parameters after them, and the most probable ids.
struct Trained {
    losses: Numbers,
    parameters: BTreeMap<String, Numbers>,
    ids: Vec<u32>,
}

fn train(make: Make, dtype: DType, device: &Device) -> Result<Trained> {
    let variables = VarMap::new();
    let head = make(VarBuilder::from_varmap(&variables, dtype, device))?;
    // The same values on every device, whose random generators differ.
    fill(&variables, 0.4)?;
    // It does not start at the beginning of its storage.
    let hidden = tensor(&[4, 5, 12], 99, dtype)?.to_device(device)?.narrow(0, 1, 3)?;
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
        losses.extend(numbers(&loss.value));
    }
    let parameters = variables.data().lock().unwrap();
    let parameters = parameters.iter().map(|(name, var)| (name.clone(), numbers(var).named(name))).collect();
    Ok(Trained { losses: losses.into(), parameters, ids: head.top_k(&hidden, 1)?.token_ids.flatten_all()?.to_vec1()? })
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
                assert_relative_eq!(losses.named(&what), exact.losses, epsilon = tolerance);
                assert_eq!(parameters.len(), exact.parameters.len());
                if matches!(dtype, DType::F32 | DType::F64) {
                    for (name, found) in &parameters {
                        assert_abs_diff_eq!(*found, exact.parameters[name], epsilon = 2.0 * tolerance);
                    }
                    assert_eq!(ids, exact.ids, "{what}");
                }
            }
        }
        Ok(())
    }
}
