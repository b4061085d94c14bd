//! An error of any call of the driver comes back as an error of the crate; nothing is lost, and the next call works.

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use mos_head::{
    LossOptions, MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, Result, SoftmaxConfig, SoftmaxHead,
};

use crate::driver::Driver;

/// The three heads of the crate.
fn heads(device: &Device) -> Result<[Box<dyn OutputLayer>; 3]> {
    let config = MixtureConfig::new(6, 20, 3).with_context_dim(5);
    let variables = || VarMap::new();
    let builder = |map: &VarMap| VarBuilder::from_varmap(map, DType::F32, device);
    Ok([
        Box::new(SoftmaxHead::new(&SoftmaxConfig::new(6, 20), builder(&variables()))?),
        Box::new(MixtureOfContexts::new(&config, builder(&variables()))?),
        Box::new(MixtureOfSoftmaxes::new(&config, builder(&variables()))?),
    ])
}

/// A step of training and one of decoding. The numbers are those of the loss and of the most probable ids.
fn step(head: &dyn OutputLayer, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Vec<f32>> {
    let loss = head.loss(hidden, targets, options)?;
    loss.backward()?;
    let top = head.top_k(hidden, 2)?;
    let ids = top.token_ids.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    Ok([vec![loss.value.to_scalar()?], ids].concat())
}

/// Hidden states and targets.
fn batch(device: &Device) -> Result<(Tensor, Tensor)> {
    let hidden: Vec<f32> = (0..24).map(|i| (i as f32 * 0.7).sin()).collect();
    Ok((Tensor::from_vec(hidden, (4, 6), device)?, Tensor::new(&[3u32, 19, 0, 7], device)?))
}

#[test]
fn every_error_in_a_step_comes_back() -> Result<()> {
    let Some(driver) = Driver::emulated() else { return Ok(()) };
    let device = Device::new_cuda(0)?;
    let (hidden, targets) = batch(&device)?;
    let plain = LossOptions::new();
    let full = LossOptions::new().with_label_smoothing(0.1).with_z_loss(1e-3).with_correct(true);
    let [softmax, contexts, softmaxes] = heads(&device)?;
    for (head, options) in [(softmax, plain.clone()), (contexts, full), (softmaxes, plain)] {
        let expected = step(&*head, &hidden, &targets, &options)?;
        let live = driver.live_allocations();
        let mut calls = 0;
        loop {
            driver.fail_call(calls + 1);
            let result = step(&*head, &hidden, &targets, &options);
            if driver.take_pending_failure() {
                assert_eq!(result?, expected);
                break;
            }
            calls += 1;
            // An error while memory is freed comes back from the next call.
            assert!(result.is_err() || device.synchronize().is_err(), "the error of call {calls} is lost");
            drop(result);
            let _ = device.synchronize();
            assert_eq!(driver.live_allocations(), live, "after an error of call {calls}");
            if calls.is_multiple_of(8) {
                assert_eq!(step(&*head, &hidden, &targets, &options)?, expected, "after an error of call {calls}");
            }
        }
        assert!(calls > 50, "only {calls} calls");
    }
    Ok(())
}

#[test]
fn every_error_in_the_first_step_of_a_thread_comes_back() {
    if Driver::emulated().is_none() {
        return;
    }
    let first_step = |call: usize| {
        let driver = Driver::emulated().expect("as above");
        driver.fail_call(call);
        let mut kept = vec![];
        let mut run = || -> Result<()> {
            let device = Device::new_cuda(0)?;
            let (hidden, targets) = batch(&device)?;
            let [.., head] = heads(&device)?;
            let result = step(&*head, &hidden, &targets, &LossOptions::new());
            // Errors while they are freed could come back from no call.
            kept.push((hidden, targets, head));
            result?;
            Ok(device.synchronize()?)
        };
        let result = run();
        let succeeded = driver.take_pending_failure();
        assert_eq!(succeeded, result.is_ok(), "call {call}: {result:?}");
        succeeded
    };
    let mut call = 1;
    while !std::thread::spawn(move || first_step(call)).join().expect("no panic") {
        call += 1;
    }
    assert!(call > 200, "only {call} calls");
}
