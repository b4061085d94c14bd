//! A few training steps of each head give the same losses and parameters on the emulated device as on the CPU.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, VarBuilder, VarMap, SGD};
use metal_on_linux::{assert_close, metal, numbers};
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
    MixtureConfig::new(12, 70, 4).with_context(9).with_prior_bias(true)
}

/// The losses of some steps, the parameters after them, and the most probable ids.
fn train(make: Make, dtype: DType, device: &Device) -> Result<(Vec<f32>, BTreeMap<String, Tensor>, Tensor)> {
    let variables = VarMap::new();
    let head = make(VarBuilder::from_varmap(&variables, dtype, device))?;
    // The same values on every device, whose random generators differ.
    for (seed, (_, variable)) in
        variables.data().lock().unwrap().iter().collect::<BTreeMap<_, _>>().into_iter().enumerate()
    {
        let values = (numbers(variable.dims(), seed as u64) * 0.2)?.to_dtype(dtype)?;
        variable.set(&values.to_device(device)?)?;
    }
    // It does not start at the beginning of its storage.
    let hidden = numbers(&[4, 5, 12], 99).to_dtype(dtype)?.to_device(device)?.narrow(0, 1, 3)?;
    let targets: Vec<u32> = (0..15).map(|i| i * 37 % 70).collect();
    let targets = Tensor::from_vec(targets, (3, 5), device)?;
    let options = LossOptions::new().with_label_smoothing(0.1).with_z_loss(1e-3).with_ignore_index(37);
    // Several chunks.
    let options = options.with_workspace_bytes(20_000);
    let mut optimizer = SGD::new(variables.all_vars(), 0.5)?;
    let mut losses = vec![];
    for _ in 0..5 {
        let loss = head.loss(&hidden, &targets, &options)?;
        optimizer.step(&loss.backward()?)?;
        losses.push(loss.value.to_dtype(DType::F32)?.to_scalar()?);
    }
    let parameters =
        variables.data().lock().unwrap().iter().map(|(name, v)| (name.clone(), v.as_tensor().clone())).collect();
    Ok((losses, parameters, head.top_k(&hidden, 1)?.tokens))
}

#[test]
fn every_head_learns_the_same_as_on_the_cpu() -> Result<()> {
    for (name, make) in HEADS {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (losses, parameters, ids) = train(make, dtype, &metal())?;
            let (cpu_losses, cpu_parameters, cpu_ids) = train(make, dtype, &Device::Cpu)?;
            assert!(losses[4] < losses[0], "{name} {dtype:?}: {losses:?}");
            for (got, expected) in losses.iter().zip(&cpu_losses) {
                let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
                let is_close = (got - expected).abs() <= tolerance * expected;
                assert!(is_close, "{name} {dtype:?}: {losses:?}, not {cpu_losses:?}");
            }
            assert_eq!(parameters.len(), cpu_parameters.len());
            if dtype == DType::F32 {
                for (parameter, got) in &parameters {
                    assert_close(&format!("{name}, {parameter}"), got, &cpu_parameters[parameter], dtype)?;
                }
                assert_eq!(ids.to_vec3::<u32>()?, cpu_ids.to_vec3::<u32>()?, "{name}");
            }
        }
    }
    Ok(())
}
