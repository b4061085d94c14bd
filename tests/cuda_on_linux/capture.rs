//! What a CUDA graph cannot record: copies from the host, and waiting for the device.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use mos_head::score::{ChunkTerms, ScoreOptions};
use mos_head::{
    Distributions, LossOptions, Mixture, MixtureConfig, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, Result,
    SoftmaxConfig, SoftmaxHead,
};

use crate::driver::Driver;

#[test]
fn a_step_does_not_wait_for_the_device_and_candle_can_keep_all_uploads() -> Result<()> {
    let Some(driver) = Driver::emulated() else { return Ok(()) };
    let device = Device::new_cuda(0)?;
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &device);
    let config = MixtureConfig::new(6, 20, 3).with_context_dim(5).with_softcap(30.0);
    let heads: [Box<dyn OutputLayer>; 3] = [
        Box::new(SoftmaxHead::new(&SoftmaxConfig::new(6, 20), vb.pp("softmax"))?),
        Box::new(MixtureOfContexts::new(&config, vb.pp("contexts"))?),
        Box::new(MixtureOfSoftmaxes::new(&config, vb.pp("softmaxes"))?),
    ];
    let hidden = Tensor::ones((4, 6), DType::F32, &device)?;
    let targets = Tensor::new(&[3u32, 19, 0, 7], &device)?;
    let weights = |n: usize| Tensor::ones(n, DType::F32, &device);
    let options = [
        LossOptions::new(),
        LossOptions::new().with_label_smoothing(0.1).with_ignore_index(0),
        LossOptions::new().with_z_loss(1e-3).with_correct(true),
        LossOptions::new().with_position_weights(weights(4)?).with_class_weights(weights(20)?),
    ];
    // Uploads and waits of a training step.
    let step = |head: &dyn OutputLayer, options: &LossOptions| -> Result<(i64, i64)> {
        let before = (driver.uploads(), driver.waits());
        head.loss(&hidden, &targets, options)?.backward()?;
        Ok((driver.uploads() - before.0, driver.waits() - before.1))
    };

    let mut all_uploads = 0;
    for head in &heads {
        for options in &options {
            step(&**head, options)?;
            let (uploads, waits) = step(&**head, options)?;
            all_uploads += uploads;
            assert_eq!(waits, 0);
        }
    }
    assert!(all_uploads > 0, "candle uploads shapes and scalars");

    // candle keeps them in a static variable.
    driver.keep_allocations();
    let _kept = device.as_cuda_device()?.enable_cuda_graph_htod_cache();
    for head in &heads {
        for options in &options {
            step(&**head, options)?;
            assert_eq!(step(&**head, options)?, (0, 0));
        }
    }
    Ok(())
}

#[test]
fn a_loss_that_depends_on_scores_does_not_wait_between_its_chunks() -> Result<()> {
    let Some(driver) = Driver::emulated() else { return Ok(()) };
    let device = Device::new_cuda(0)?;
    let contexts = Var::ones((4, 1, 6), DType::F32, &device)?;
    let mixture = Mixture::new(&contexts, None, &Tensor::ones((20, 6), DType::F32, &device)?, None)?;
    let token_ids = Tensor::new(&[3u32, 19, 0, 7], &device)?;
    for temperature in [1.0, 0.7] {
        // Two chunks
        let options = ScoreOptions::new().with_entropy(true).with_temperature(temperature).with_workspace_bytes(700);
        let before = driver.waits();
        let loss = mixture.score_loss(&token_ids, &options, |scores| {
            assert_eq!(scores.positions.len(), 2);
            let values = (&scores.log_prob * &scores.entropy)?;
            Ok(ChunkTerms::new(values, scores.entropy).with_by_entropy(scores.log_prob))
        })?;
        loss.backward()?;
        assert_eq!(driver.waits(), before);
    }
    Ok(())
}
