//! Values from PyTorch in `f64`, made by `golden/golden.py`: losses (those of a softmax from `cross_entropy` itself),
//! log-probabilities and every gradient; and the formula of the released code, which adds 1e-8 to each probability.

mod common;

use approx::assert_relative_eq;
use candle_core::{DType, Device, Tensor};
use common::case::{Case, Head, Logits, Sizes};
use common::check::{backward, gradients, Layer};
use common::compare::{assert_close, Tolerance};
use common::objective::Objective;
use common::values::{numbers, Numbers};
use common::{dtypes, on_each_device};
use mos_head::parts::LogitFunction;
use mos_head::score::ScoreOptions;
use mos_head::{ContextActivation, Distributions, LossOptions, Reduction, Result};
use serde_json::Value;

fn golden() -> Value {
    serde_json::from_str(include_str!("golden/golden.json")).expect("golden.json is JSON")
}

fn floats(value: &Value) -> Vec<f64> {
    let numbers = value.as_array().expect("a list").iter();
    numbers.map(|x| x.as_f64().expect("a number")).collect()
}

fn integers(value: &Value) -> Vec<i64> {
    let numbers = value.as_array().expect("a list").iter();
    numbers.map(|x| x.as_i64().expect("an integer")).collect()
}

/// The case whose operands are stored under `key`.
fn case(golden: &Value, key: &str, head: Head) -> Case {
    let size = |name: &str| golden["sizes"][name].as_u64().expect(name) as usize;
    let components = if head == Head::Softmax { 1 } else { size("components") };
    let context = if head == Head::Softmax { size("hidden") } else { size("context") };
    let stored = &golden["heads"][key];
    let names =
        ["hidden", "prior.weight", "prior.bias", "latent.weight", "latent.bias", "decoder.weight", "decoder.bias"];
    let operand = |name| Some((name, floats(stored["operands"].get(name)?)));
    Case {
        head,
        sizes: Sizes::new(size("hidden"), context, components, size("vocab")),
        lead: vec![size("rows")],
        activation: ContextActivation::Tanh,
        logits: Logits::PLAIN,
        transposed: false,
        values: names.into_iter().filter_map(operand).collect(),
        targets: integers(&stored["targets"]),
    }
}

/// The objective for PyTorch's options.
fn objective(golden: &Value, options: &Value) -> Objective {
    let number = |name: &str| options.get(name).and_then(Value::as_f64);
    let weights = |name: &str| options.get(name).map(|_| floats(&golden[name]));
    Objective {
        reduction: match options["reduction"].as_str() {
            Some("mean") => Reduction::Mean,
            Some("sum") => Reduction::Sum,
            _ => Reduction::None,
        },
        ignore_index: options.get("ignore_index").and_then(Value::as_i64),
        position_weights: weights("position_weights"),
        class_weights: weights("class_weights"),
        label_smoothing: number("label_smoothing").unwrap_or(0.0),
        z_loss: number("z_loss").unwrap_or(0.0),
    }
}

/// The dtypes that store the golden operands exactly or nearly so.
fn strict(device: &Device) -> impl Iterator<Item = DType> {
    dtypes(device).iter().copied().filter(|d| d.size_in_bytes() >= 4)
}

/// The function of the logits that the options of PyTorch's side name.
fn softcap(options: &Value) -> LogitFunction {
    options.get("softcap").and_then(Value::as_f64).map_or(LogitFunction::Identity, LogitFunction::Softcap)
}

fn assert_losses(golden: &Value, key: &str, head: Head, device: &Device) -> Result<()> {
    let mut case = case(golden, key, head);
    let upstream = floats(&golden["upstream"]);
    let losses = golden["heads"][key]["losses"].as_array().expect("losses");
    assert_eq!(losses.len(), 12);
    for dtype in strict(device) {
        for loss in losses {
            case.targets = integers(&loss["targets"]);
            let objective = objective(golden, &loss["options"]);
            case.logits.function = softcap(&loss["options"]);
            let tensors = case.variables(dtype, device)?;
            let options = objective.options(&case.lead, device)?;
            let got = Layer::new(&case, &tensors)?.loss(&case.target_tensor(device)?, &options)?.value;
            let name = |what: &str| format!("{key} {what} with {}", loss["options"]);
            let expected = floats(&loss["value"]);
            assert_close(&name("value"), &numbers(&got), &expected, None, Tolerance::value(dtype));
            let upstream = if expected.len() == 1 { &[1.0][..] } else { &upstream };
            let found = gradients(&backward(&got, upstream)?, &tensors);
            let expected = loss["gradients"].as_object().expect("gradients");
            assert_eq!(found.len(), expected.len());
            for (operand, expected) in expected {
                let got = &found[operand.as_str()];
                assert_close(&name(operand), got, &floats(expected), None, Tolerance::gradient(dtype));
            }
        }
    }
    Ok(())
}

fn assert_log_probs(golden: &Value, key: &str, head: Head, device: &Device) -> Result<()> {
    let case = case(golden, key, head);
    for dtype in strict(device) {
        let layer = Layer::new(&case, &case.constants(dtype, device)?)?;
        let nll = layer.loss(&case.target_tensor(device)?, &LossOptions::evaluation())?.nll;
        let stored = &golden["heads"][key];
        for (name, got) in [("log_probs", layer.log_probs()?), ("nll", nll)] {
            let name_of_all = format!("{key} {name}");
            let expected = floats(&stored[name]);
            assert_close(&name_of_all, &numbers(&got), &expected, None, Tolerance::value(dtype));
        }
    }
    Ok(())
}

const HEADS: [(&str, Head); 3] =
    [("softmax", Head::Softmax), ("moc", Head::MixtureOfContexts), ("mos", Head::MixtureOfSoftmaxes)];

on_each_device! {
    fn losses_and_gradients_equal_pytorch(device: &Device) -> Result<()> {
        let golden = golden();
        HEADS.into_iter().try_for_each(|(key, head)| assert_losses(&golden, key, head, device))
    }

    fn log_probs_equal_pytorch(device: &Device) -> Result<()> {
        let golden = golden();
        HEADS.into_iter().try_for_each(|(key, head)| assert_log_probs(&golden, key, head, device))
    }

    fn the_released_formula_equals_the_exact_one_plus_its_epsilon(device: &Device) -> Result<()> {
        let golden = golden();
        let case = case(&golden, "released", Head::MixtureOfSoftmaxes);
        let (stored, epsilon) = (&golden["heads"]["released"], golden["epsilon"].as_f64().expect("epsilon"));
        for dtype in strict(device) {
            let tensors = case.variables(dtype, device)?;
            let layer = Layer::new(&case, &tensors)?;
            let value = Tolerance::value(dtype);
            let with_epsilon = |log_p: f64| (log_p.exp() + epsilon).ln();
            let log_probs: Vec<f64> = numbers(&layer.log_probs()?).into_iter().map(with_epsilon).collect();
            assert_close("log_probs", &log_probs, &floats(&stored["log_probs"]), None, value);

            let targets = case.target_tensor(device)?;
            let nll = numbers(&layer.loss(&targets, &LossOptions::evaluation())?.nll);
            let positions = nll.len() as f64;
            let mean = nll.iter().map(|nll| -with_epsilon(-nll)).sum::<f64>() / positions;
            assert_close("value", &[mean], &floats(&stored["value"]), None, value);

            // d(-log(p + e)) = p / (p + e) d(-log p): a weight for each position.
            let weight = |nll: &f64| (-nll).exp() / ((-nll).exp() + epsilon) / positions;
            let weights: Vec<f64> = nll.iter().map(weight).collect();
            assert!(weights.iter().any(|w| w * positions < 0.9), "the epsilon matters somewhere: {weights:?}");
            let weights = Tensor::from_vec(weights, nll.len(), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
            let options = LossOptions::new().with_reduction(Reduction::Sum).with_position_weights(weights);
            let found = gradients(&layer.loss(&targets, &options)?.backward()?, &tensors);
            for (name, expected) in stored["gradients"].as_object().expect("gradients") {
                let got = &found[name.as_str()];
                assert_close(name, got, &floats(expected), None, Tolerance::gradient(dtype));
            }
        }
        Ok(())
    }
}

#[test]
fn the_golden_file_names_its_torch_version_and_seed() {
    let golden = golden();
    assert!(golden["torch"].as_str().is_some_and(|version| version.starts_with("2.")));
    assert!(golden["seed"].is_u64());
}

/// Log-probabilities and entropies with their gradients, made by `golden/scores.py`.
#[test]
fn scores_equal_pytorch() -> Result<()> {
    let golden: Value = serde_json::from_str(include_str!("golden/scores.json")).expect("scores.json is JSON");
    let size = |name: &str| golden[name].as_u64().expect(name) as usize;
    let (positions, d, vocab, n) = (size("positions"), size("d"), size("vocab"), size("n"));
    for case in golden["cases"].as_array().expect("a list") {
        let components = case["components"].as_u64().expect("a number") as usize;
        let names = ["contexts", "log_priors", "decoder.weight", "decoder.bias"].into_iter();
        let names = names.zip(["contexts", "logits", "weight", "bias"]);
        let values = names.clone().map(|(name, stored)| (name, floats(&case["operands"][stored])));
        let operands = Case {
            head: Head::Mixture,
            sizes: Sizes::new(0, d, components, vocab),
            lead: vec![positions],
            activation: ContextActivation::Tanh,
            logits: Logits { function: softcap(case), ..Logits::PLAIN },
            transposed: false,
            values: values.collect(),
            targets: vec![],
        };
        let ids: Vec<i64> = integers(&case["token_ids"]);
        let ids = Tensor::from_vec(ids, (positions, n), &Device::Cpu)?;
        for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-5)] {
            let vars = operands.variables(dtype, &Device::Cpu)?;
            let mixture = operands.operands(&vars)?.mixture(operands.logits)?;
            let temperature = case["temperature"].as_f64().expect("a number");
            let options = ScoreOptions::new().with_entropy(true).with_temperature(temperature);
            let scores = mixture.score(&ids, &options)?;
            let entropy = scores.entropy.expect("asked for");
            let near = |name: &str, found: Numbers| {
                let values = case.get(name).unwrap_or_else(|| &case["gradients"][name]);
                let found = found.named(format!("{name} of {components} in {dtype:?}"));
                assert_relative_eq!(found, floats(values), max_relative = tolerance);
            };
            near("log_prob", numbers(&scores.log_prob));
            near("entropy", numbers(&entropy));
            let found = Tensor::cat(&[scores.log_prob, entropy.unsqueeze(1)?], 1)?;
            let found = gradients(&backward(&found, &floats(&case["upstream"]))?, &vars);
            names.clone().for_each(|(name, stored)| near(stored, found[name].clone()));
        }
    }
    Ok(())
}
