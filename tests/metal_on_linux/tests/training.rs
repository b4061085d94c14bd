//! A few steps of training each head give on the make-believe device what they give on the CPU: losses, and every parameter.

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

/// The losses of some steps, the parameters after them, and the most probable words.
fn train(make: Make, dtype: DType, device: &Device) -> Result<(Vec<f32>, BTreeMap<String, Tensor>, Tensor)> {
    let variables = VarMap::new();
    let head = make(VarBuilder::from_varmap(&variables, dtype, device))?;
    // The same values everywhere, whatever a device draws.
    for (seed, (_, variable)) in
        variables.data().lock().unwrap().iter().collect::<BTreeMap<_, _>>().into_iter().enumerate()
    {
        let values = (numbers(variable.dims(), seed as u64) * 0.2)?.to_dtype(dtype)?;
        variable.set(&values.to_device(device)?)?;
    }
    // It does not begin where its storage does.
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
fn every_head_learns_what_it_learns_on_the_cpu() -> Result<()> {
    for (name, make) in HEADS {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (losses, parameters, words) = train(make, dtype, &metal())?;
            let (expected, wanted, best) = train(make, dtype, &Device::Cpu)?;
            assert!(losses[4] < losses[0], "{name} {dtype:?}: {losses:?}");
            for (got, wanted) in losses.iter().zip(&expected) {
                let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
                assert!((got - wanted).abs() <= tolerance * wanted, "{name} {dtype:?}: {losses:?}, not {expected:?}");
            }
            assert_eq!(parameters.len(), wanted.len());
            if dtype == DType::F32 {
                for (parameter, got) in &parameters {
                    assert_close(&format!("{name}, {parameter}"), got, &wanted[parameter], dtype)?;
                }
                assert_eq!(words.to_vec3::<u32>()?, best.to_vec3::<u32>()?, "{name}");
            }
        }
    }
    Ok(())
}
