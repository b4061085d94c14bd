//! Gradient accumulation: batches with a common denominator and one sum are one batch.

mod common;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use common::values::{gradients, numbers, tensor};
use common::{dtypes, on_each_device};
use mos_head::sampled::NoiseDistribution;
use mos_head::two_level::{AdaptiveConfig, HierarchicalConfig};
use mos_head::{
    Error, GradientSum, HeadConfig, LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Reduction, Result,
    SoftmaxConfig, SoftmaxHead,
};

const HIDDEN: usize = 12;
const VOCAB: usize = 70;
/// Sizes of the batches; the second has no target.
const BATCHES: [usize; 4] = [5, 2, 0, 7];
const IGNORED: i64 = 3;

/// Hidden states of a first layer that is trained too, and targets, for each batch and for all.
fn batches(device: &Device, dtype: DType) -> Result<Vec<(Tensor, Tensor)>> {
    let count = BATCHES.iter().sum::<usize>();
    let inputs = tensor(&[count, HIDDEN], 1, dtype)?.to_device(device)?;
    let targets: Vec<i64> = (0..count as i64).map(|t| if t == 5 || t == 6 { IGNORED } else { t * 11 % 70 }).collect();
    let targets = Tensor::from_vec(targets, count, device)?;
    let mut first = 0;
    let part = |&size: &usize| {
        first += size;
        Ok((inputs.narrow(0, first - size, size)?, targets.narrow(0, first - size, size)?))
    };
    BATCHES.iter().map(part).chain([Ok((inputs.clone(), targets.clone()))]).collect()
}

fn configs() -> [HeadConfig; 5] {
    let mixture = MixtureConfig::new(HIDDEN, VOCAB, 3).with_context_dim(8);
    [
        HeadConfig::Softmax(SoftmaxConfig::new(HIDDEN, VOCAB)),
        HeadConfig::MixtureOfContexts(mixture.clone()),
        HeadConfig::MixtureOfSoftmaxes(mixture),
        HeadConfig::Adaptive(AdaptiveConfig::new(HIDDEN, VOCAB, vec![20, 40]).with_div_value(2.0)),
        HeadConfig::Hierarchical(HierarchicalConfig::new(HIDDEN, VOCAB)),
    ]
}

/// The gradients and the value of one batch equal those of the batches' sum.
fn batches_equal_one(
    device: &Device,
    dtype: DType,
    build: impl Fn(VarBuilder) -> Result<Box<dyn OutputLayer>>,
    options: &LossOptions,
) -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, dtype, device);
    let layer = candle_nn::linear(HIDDEN, HIDDEN, vb.pp("layer"))?;
    let head = build(vb.pp("head"))?;
    let mut parts = batches(device, dtype)?;
    let (inputs, targets) = parts.pop().expect("all batches");
    let hidden = |inputs: &Tensor| candle_nn::Module::forward(&layer, inputs);

    let whole = head.loss(&hidden(&inputs)?, &targets, options)?;
    let expected = whole.backward()?;
    let mut options = options.clone();
    if options.positions.reduction == Reduction::Mean {
        options = options.with_denominator(whole.sum_and_count()?.1);
    }
    let sum = GradientSum::new();
    let options = options.with_gradient_sum(&sum);
    let mut value = 0.0;
    for (inputs, targets) in parts {
        if targets.elem_count() == 0 {
            continue;
        }
        let loss = head.loss(&hidden(&inputs)?, &targets, &options)?;
        value += numbers(&loss.value)[0];
        sum.add(&loss)?;
    }
    let got = sum.take();
    let tolerance = if dtype == DType::BF16 || dtype == DType::F16 { 2e-2 } else { 1e-5 };
    let whole = numbers(&whole.value)[0];
    assert_abs_diff_eq!(value, whole, epsilon = tolerance * whole.abs());
    // Gradients of priors are small differences of terms as large as the decoder's gradient, and so is their rounding.
    let data = vars.data().lock().expect("a lock");
    let [got, expected] = [&got, &expected].map(|store| gradients(store, data.values().map(Var::as_tensor)));
    let largest = expected.iter().flatten().fold(0f64, |largest, x| largest.max(x.abs()));
    assert_abs_diff_eq!(got[..], expected[..], epsilon = tolerance * largest);
    assert!(sum.take().get_ids().next().is_none(), "the sum is empty once it is taken");
    Ok(())
}

on_each_device! {
    fn batches_with_one_denominator_are_one_batch(device: &Device) -> Result<()> {
        let options = LossOptions::new().with_ignore_index(IGNORED);
        for config in configs() {
            for &dtype in dtypes(device) {
                batches_equal_one(device, dtype, |vb| config.build(vb), &options)?;
            }
        }
        Ok(())
    }

    fn so_are_sums_weights_smoothing_and_counted_predictions(device: &Device) -> Result<()> {
        let base = LossOptions::new().with_ignore_index(IGNORED);
        let weights = Tensor::from_iter((0..VOCAB).map(|id| 0.5 + (id % 3) as f32), device)?;
        let mixture = HeadConfig::MixtureOfSoftmaxes(MixtureConfig::new(HIDDEN, VOCAB, 3).with_context_dim(8));
        for options in [
            base.clone().with_reduction(Reduction::Sum),
            base.clone().with_class_weights(weights),
            base.clone().with_label_smoothing(0.1),
            base.clone().with_correct(true),
        ] {
            batches_equal_one(device, DType::F32, |vb| mixture.build(vb), &options)?;
        }
        Ok(())
    }

    fn a_tied_or_transposed_decoder_is_summed_too(device: &Device) -> Result<()> {
        let options = LossOptions::new().with_ignore_index(IGNORED);
        let tied = |vb: VarBuilder| -> Result<Box<dyn OutputLayer>> {
            let embedding = candle_nn::embedding(VOCAB, 8, vb.pp("embedding"))?;
            let config = MixtureConfig::new(HIDDEN, VOCAB, 2).with_context_dim(8);
            Ok(Box::new(MixtureOfSoftmaxes::tied(&config, &embedding, vb)?))
        };
        batches_equal_one(device, DType::F32, tied, &options)?;
        let transposed = |vb: VarBuilder| -> Result<Box<dyn OutputLayer>> {
            let weight = vb.get((HIDDEN, VOCAB), "weight")?.t()?;
            Ok(Box::new(SoftmaxHead::from_tensors(weight, None)?))
        };
        batches_equal_one(device, DType::F32, transposed, &options)
    }

    fn a_multiple_of_a_summed_loss_is_an_error(device: &Device) -> Result<()> {
        let vars = VarMap::new();
        let head = configs()[0].build(VarBuilder::from_varmap(&vars, DType::F32, device))?;
        let (hidden, targets) = (Tensor::ones((2, HIDDEN), DType::F32, device)?, Tensor::new(&[1u32, 5], device)?);
        let sum = GradientSum::new();
        let options = LossOptions::new().with_gradient_sum(&sum);
        sum.add(&head.loss(&hidden, &targets, &options)?)?;
        let loss = head.loss(&hidden, &targets, &options)?;
        let error = (loss.value * 2.0)?.backward().map(|_| ()).expect_err("a multiple").to_string();
        assert!(error.contains("gradient_sum"), "{error}");
        // The rows of a sample are a variable of their own, which no sum is added to in place.
        let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(4, 1)?;
        let options = options.with_sampled_softmax(negatives).with_decoder_rows(true);
        let loss = head.loss(&hidden, &targets, &options)?;
        (loss.value * 2.0)?.backward()?;
        Ok(())
    }
}

#[test]
fn a_refused_loss_leaves_the_sum_as_it_is() -> Result<()> {
    let (vars, device) = (VarMap::new(), Device::Cpu);
    let head = configs()[0].build(VarBuilder::from_varmap(&vars, DType::F32, &device))?;
    let hidden = Tensor::ones((2, HIDDEN), DType::F32, &device)?;
    let sum = GradientSum::new();
    let options = LossOptions::new().with_gradient_sum(&sum);
    sum.add(&head.loss(&hidden, &Tensor::new(&[1u32, 5], &device)?, &options)?)?;
    let bad = Tensor::new(&[1u32, VOCAB as u32], &device)?;
    assert!(matches!(head.loss(&hidden, &bad, &options), Err(Error::Target { position: 1, .. })));
    let gradients = sum.take();
    assert!(vars.all_vars().iter().all(|var| gradients.get(var).is_some()));
    Ok(())
}

#[test]
fn denominators_out_of_range_are_errors() -> Result<()> {
    let head = SoftmaxHead::from_tensors(Tensor::zeros((VOCAB, HIDDEN), DType::F32, &Device::Cpu)?, None)?;
    let (hidden, targets) =
        (Tensor::zeros((2, HIDDEN), DType::F32, &Device::Cpu)?, Tensor::new(&[1u32, 5], &Device::Cpu)?);
    for denominator in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let refused = head.loss(&hidden, &targets, &LossOptions::new().with_denominator(denominator));
        assert!(matches!(refused, Err(Error::Config { argument: "denominator", .. })));
    }
    let options = LossOptions::new().with_denominator(2.0).with_reduction(Reduction::Sum);
    assert!(matches!(head.loss(&hidden, &targets, &options), Err(Error::Config { argument: "denominator", .. })));
    // A sampled loss is divided too.
    let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(20, 1)?;
    let sampled = LossOptions::new().with_sampled_softmax(negatives);
    let mean = numbers(&head.loss(&hidden, &targets, &sampled)?.value)[0];
    let quarter = numbers(&head.loss(&hidden, &targets, &sampled.with_denominator(8.0))?.value)[0];
    assert_abs_diff_eq!(mean, 4.0 * quarter, epsilon = 1e-5);
    Ok(())
}
