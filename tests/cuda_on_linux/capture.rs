//! What a CUDA graph cannot record: copies from the host, and waiting for the device.

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use mos_head::{LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Result};

use crate::driver::Driver;

#[test]
fn only_the_filter_waits_for_the_device_and_candle_can_keep_all_uploads() -> Result<()> {
    let Some(driver) = Driver::emulated() else { return Ok(()) };
    let device = Device::new_cuda(0)?;
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &device);
    let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(6, 20, 3).with_context(5), vb)?;
    let hidden = Tensor::ones((4, 6), DType::F32, &device)?;
    let targets = Tensor::new(&[3u32, 19, 0, 7], &device)?;
    // Uploads and waits of a training step.
    let step = |options: &LossOptions| -> Result<(i64, i64)> {
        let before = (driver.uploads(), driver.waits());
        head.loss(&hidden, &targets, options)?.backward()?;
        Ok((driver.uploads() - before.0, driver.waits() - before.1))
    };
    let plain = LossOptions::new().with_label_smoothing(0.1).with_ignore_index(0);
    let filtered = LossOptions::new().with_responsibility_filter(1e-3);

    step(&plain)?;
    let (uploads, waits) = step(&plain)?;
    assert!(uploads > 0, "candle uploads shapes and scalars");
    assert_eq!(waits, 0);
    assert_eq!(step(&filtered)?.1, 1, "the number of live rows of one chunk");

    // candle keeps them in a static variable.
    driver.keep_allocations();
    let _kept = device.as_cuda_device()?.enable_cuda_graph_htod_cache();
    step(&plain)?;
    assert_eq!(step(&plain)?, (0, 0));
    Ok(())
}
