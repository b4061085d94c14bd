//! Components that start alike.

mod common;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use common::values::{numbers, tensor, uniform, Numbers};
use mos_head::parts::LowRankAdapter;
use mos_head::{
    Error, LossOptions, MixtureConfig, MixtureOfSoftmaxes, MixtureTensors, OutputLayer, Result, SoftmaxHead,
};

const HIDDEN: usize = 60;
const CONTEXT: usize = 50;
const COMPONENTS: usize = 4;

fn config() -> MixtureConfig {
    MixtureConfig::new(HIDDEN, 30, COMPONENTS).with_context_dim(CONTEXT)
}

fn latent_weight() -> Result<Tensor> {
    // The variance is one.
    Ok(uniform(&[COMPONENTS * CONTEXT, HIDDEN], 3f64.sqrt(), 1)?.to_dtype(DType::F32)?)
}

/// The mean product of the values of two components.
fn correlation(weight: &Tensor, i: usize, j: usize) -> Result<f32> {
    let component = |k| weight.narrow(0, k * CONTEXT, CONTEXT);
    Ok((component(i)? * component(j)?)?.mean_all()?.to_scalar()?)
}

#[test]
fn components_are_as_alike_as_the_spread_says_and_keep_their_scale() -> Result<()> {
    let weight = latent_weight()?;
    for spread in [0.0, 0.3, 0.8, 1.0] {
        let alike = config().similar_components(&weight, spread)?;
        let shared = (1.0 - spread * spread) as f32;
        for i in 0..COMPONENTS {
            assert_abs_diff_eq!(correlation(&alike, i, i)?, 1.0, epsilon = 0.1);
            for j in 0..i {
                let expected = if j == 0 { shared.sqrt() } else { shared };
                assert_abs_diff_eq!(correlation(&alike, i, j)?, expected, epsilon = 0.1);
            }
        }
    }
    Ok(())
}

#[test]
fn a_spread_of_one_changes_nothing() -> Result<()> {
    let weight = latent_weight()?;
    let same = config().similar_components(&weight, 1.0)?;
    assert_eq!(same.to_vec2::<f32>()?, weight.to_vec2::<f32>()?);
    let one = MixtureConfig::new(HIDDEN, 30, 1).with_context_dim(COMPONENTS * CONTEXT);
    assert_eq!(one.similar_components(&weight, 0.5)?.to_vec2::<f32>()?, weight.to_vec2::<f32>()?);
    Ok(())
}

/// The doc's two lines, for one component too.
#[test]
fn a_variable_can_be_set_to_the_result() -> Result<()> {
    for components in [1, 2] {
        let mut vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let config = MixtureConfig::new(HIDDEN, 30, components).with_context_dim(CONTEXT);
        let head = MixtureOfSoftmaxes::new(&config, vb)?;
        for spread in [0.0, 1.0] {
            vars.set_one("latent.weight", config.similar_components(&head.tensors()?.latent_weight, spread)?)?;
        }
    }
    Ok(())
}

#[test]
fn components_without_spread_are_one_softmax() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let tensors = MixtureOfSoftmaxes::new(&config(), vb)?.tensors()?;
    let latent_weight = config().similar_components(&tensors.latent_weight, 0.0)?;
    let latent_bias = tensors.latent_bias.zeros_like()?;
    let alike = MixtureTensors { latent_weight, latent_bias, ..tensors };
    let narrow = |tensor: &Tensor| tensor.narrow(0, 0, CONTEXT);
    let one = MixtureTensors {
        prior_weight: alike.prior_weight.narrow(0, 0, 1)?,
        latent_weight: narrow(&alike.latent_weight)?,
        latent_bias: narrow(&alike.latent_bias)?,
        ..alike.clone()
    };
    let hidden = tensor(&[5, HIDDEN], 1, DType::F32)?;
    let log_probs = |tensors| -> Result<Numbers> {
        Ok(numbers(&MixtureOfSoftmaxes::from_tensors(tensors, config().activation)?.log_probs(&hidden)?))
    };
    assert_abs_diff_eq!(log_probs(alike)?, log_probs(one)?, epsilon = 1e-5);
    Ok(())
}

/// They stay one softmax for ever.
#[test]
fn equal_components_with_zero_priors_get_equal_gradients() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let head = MixtureOfSoftmaxes::new(&config(), vb)?;
    let var = |name: &str| vars.data().lock().expect("no panic")[name].clone();
    let [prior, weight, bias] = ["prior.weight", "latent.weight", "latent.bias"].map(var);
    prior.set(&prior.zeros_like()?)?;
    bias.set(&bias.zeros_like()?)?;
    weight.set(&config().similar_components(&weight, 0.0)?)?;
    let hidden = tensor(&[5, HIDDEN], 1, DType::F64)?;
    let targets = Tensor::new(&[1u32, 2, 3, 4, 5], &Device::Cpu)?;
    let gradients = head.loss(&hidden, &targets, &LossOptions::new())?.backward()?;
    let gradient = |var: &Var| gradients.get(var).expect("a gradient").to_vec2::<f64>();
    let weight_gradient = gradient(&weight)?;
    for (first, other) in weight_gradient[..CONTEXT].iter().cycle().zip(&weight_gradient[CONTEXT..]) {
        assert!(first.iter().zip(other).all(|(a, b)| (a - b).abs() < 1e-14 && *a != 0.0), "{first:?} {other:?}");
    }
    assert!(gradient(&prior)?.iter().flatten().all(|slope| slope.abs() < 1e-14), "{:?}", gradient(&prior)?);
    Ok(())
}

#[test]
fn a_wrong_shape_or_spread_is_an_error_that_names_it() -> Result<()> {
    let weight = latent_weight()?;
    let error = config().similar_components(&weight, 1.5).expect_err("above 1");
    assert!(matches!(error, Error::Config { argument: "spread", .. }), "{error}");
    let error = config().with_context_dim(CONTEXT + 1).similar_components(&weight, 0.5).expect_err("another context");
    assert!(matches!(error, Error::Shape { argument: "latent_weight", .. }), "{error}");
    assert!(error.to_string().contains("[204, 60]") && error.to_string().contains("[200, 60]"), "{error}");
    Ok(())
}

/// A softmax that is grown into a mixture has its distributions, its options and its adapter, and then separates.
#[test]
fn a_mixture_begins_as_the_softmax_that_it_is_grown_from() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-5), (DType::BF16, 0.1)] {
        let weight = Var::from_tensor(&tensor(&[30, 8], 1, dtype)?)?;
        let adapter = LowRankAdapter::from_tensors(tensor(&[2, 8], 2, dtype)?, tensor(&[30, 2], 3, dtype)?, 0.5)?;
        let softmax = SoftmaxHead::from_tensors(weight.as_tensor().clone(), Some(tensor(&[30], 4, dtype)?))?;
        let softmax = softmax.with_adapter(adapter)?.with_logit_scale(0.7)?.with_softcap(5.0)?;
        let hidden = tensor(&[2, 3, 8], 5, dtype)?;
        let mixture = MixtureOfSoftmaxes::from_softmax(&softmax, 3, 7)?;
        let log_probs = [&mixture as &dyn OutputLayer, &softmax].map(|head| head.log_probs_as(&hidden, DType::F64));
        let [found, expected] = log_probs;
        assert_abs_diff_eq!(numbers(&found?), numbers(&expected?), epsilon = tolerance);

        let targets = Tensor::new(&[[1u32, 7, 29], [3, 0, 9]], &Device::Cpu)?;
        let loss = mixture.loss(&hidden, &targets, &LossOptions::default())?;
        let gradients = loss.backward()?;
        let latent = numbers(gradients.get(mixture.projection().parameters()[1]).expect("a gradient"));
        assert!(latent[..64] != latent[64..128] && latent[64..128] != latent[128..]);
        assert!(mixture.projection().parameters().iter().all(|tensor| gradients.get(tensor).is_some()));
        assert!(gradients.get(&weight).is_some());
        // Another seed has other priors.
        let priors = |seed| {
            Ok::<_, Error>(numbers(MixtureOfSoftmaxes::from_softmax(&softmax, 3, seed)?.projection().parameters()[0]))
        };
        assert_eq!(priors(7)?, numbers(mixture.projection().parameters()[0]));
        assert!(priors(8)? != priors(7)?);
    }
    let softmax = SoftmaxHead::from_tensors(tensor(&[30, 8], 1, DType::F32)?, None)?;
    let error = MixtureOfSoftmaxes::from_softmax(&softmax, 0, 1).unwrap_err();
    assert!(matches!(error, Error::Config { argument: "components", .. }), "{error}");
    Ok(())
}
