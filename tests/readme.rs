//! The snippets of README.md compile, and do what they say.

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor};
use candle_nn::{linear_no_bias, Linear, Module, VarBuilder, VarMap};
use mos_head::linear_cross_entropy;

type Result = std::result::Result<(), Box<dyn std::error::Error>>;

/// An output layer with its variables, and hidden states `[2, 5, 16]` with their targets.
fn model() -> (Linear, VarMap, Tensor, Tensor) {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let lm_head = linear_no_bias(16, 40, vb).expect("a layer");
    let hidden: Vec<f32> = (0..2 * 5 * 16).map(|i| (i as f32 * 0.7).sin()).collect();
    let hidden = Tensor::from_vec(hidden, (2, 5, 16), &Device::Cpu).expect("hidden states");
    let targets: Vec<u32> = (0..10).map(|i| i * 7 % 40).collect();
    let targets = Tensor::from_vec(targets, (2, 5), &Device::Cpu).expect("targets");
    (lm_head, vars, hidden, targets)
}

#[test]
fn the_loss_and_the_gradients_are_those_of_the_logits() -> Result {
    use mos_head::{LossOptions, OutputLayer, SoftmaxHead};

    let (lm_head, varmap, hidden, targets) = model();
    let (weight, options) = (lm_head.weight().clone(), LossOptions::default());

    let logits = lm_head.forward(&hidden.flatten(0, 1)?)?;
    let loss = candle_nn::loss::cross_entropy(&logits, &targets.flatten_all()?)?;

    let before = (loss.to_scalar::<f32>()?, loss.backward()?);

    let head = SoftmaxHead::try_from(lm_head)?;
    let loss = head.loss(&hidden, &targets, &LossOptions::default())?;
    let gradients = loss.backward()?;
    loss.check_gradients(&gradients, &varmap)?;

    assert_abs_diff_eq!(loss.value.to_scalar::<f32>()?, before.0, epsilon = 1e-5);
    let linear_loss = linear_cross_entropy(&hidden, &weight, None, &targets, &options)?;
    assert_eq!(linear_loss.value.to_scalar::<f32>()?, loss.value.to_scalar::<f32>()?);
    let [expected, found] =
        [&before.1, &gradients].map(|gradients| gradients.get(&varmap.all_vars()[0]).expect("a gradient"));
    let difference = (found - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(difference < 1e-5, "{difference}");
    Ok(())
}

#[test]
fn a_seed_draws_the_same_ids_alone_and_in_a_batch() -> Result {
    use mos_head::decode::{Constraints, Sampling, TokenRequest};
    use mos_head::OutputLayer;
    use mos_head::SoftmaxHead;

    let (lm_head, _, all, _) = model();
    let head = SoftmaxHead::try_from(lm_head)?;
    let hidden = all.narrow(0, 0, 1)?.narrow(1, 0, 1)?.flatten(0, 1)?;
    let (seed, prompt, end) = (42, [3, 1], 0);

    let mut request = TokenRequest::new(Sampling::new().with_temperature(0.8).with_top_p(0.95), seed)?
        .with_constraints(Constraints::new().with_repetition_penalty(1.1))?
        .with_prompt(&prompt)
        .with_ends(&[end])
        .with_best(5);
    let before = request.clone();
    let token = &head.next_tokens(&hidden, &[&request])?[0];
    request.push(token.token_id);

    assert!(token.log_prob < 0.0 && token.best.len() == 5);
    assert_eq!(request.has_ended(), token.token_id == end);
    let together = head.next_tokens(&all.flatten(0, 1)?.narrow(0, 0, 3)?, &[&before, &request, &request])?;
    assert_eq!(together[0].token_id, token.token_id);
    Ok(())
}

/// Rust without comments and spaces.
fn code(text: &str) -> String {
    text.lines().filter_map(|line| line.split("//").next()).flat_map(str::split_whitespace).collect()
}

#[test]
fn every_snippet_is_tested_here() {
    let readme = include_str!("../README.md").replace("\r\n", "\n");
    let tested = code(include_str!("readme.rs"));
    let mut snippets: Vec<&str> = readme.split("```rust").skip(1).collect();
    assert_eq!(snippets.len(), 2);
    for snippet in &mut snippets {
        let (_, text) = snippet.split_once('\n').expect("a snippet");
        let (text, _) = text.split_once("```").expect("an end");
        for part in
            text.split("\n\n").flat_map(|part| part.split_inclusive(";\n").map(code)).filter(|part| !part.is_empty())
        {
            assert!(tested.contains(&part), "README.md has code that this file does not: {part}");
        }
    }
}

/// The text of every example.
fn examples() -> impl Iterator<Item = (std::path::PathBuf, String)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
    let files = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    files
        .filter(|file| file.extension().is_some_and(|extension| extension == "rs"))
        .map(|file| (file.clone(), std::fs::read_to_string(&file).expect("a text")))
}

#[test]
fn this_version_is_named_where_it_stands_in_a_text() {
    let version = env!("CARGO_PKG_VERSION");
    assert!(include_str!("../README.md").contains(&format!("**Status**: {version},")));
    assert!(include_str!("../CHANGELOG.md").contains(&format!("\n## [{version}] - ")));
    let (minor, _) = version.rsplit_once('.').expect("a version");
    for (file, text) in examples() {
        assert!(text.contains(&format!("mos-head {minor}")), "{}: a copy depends on {minor}", file.display());
    }
}

#[test]
fn every_example_that_trains_lets_candles_idle_threads_sleep() {
    let mut training = 0;
    for (file, text) in examples() {
        let (_, main) = text.split_once("fn main()").expect("a program");
        if text.contains(".backward(") || text.contains(".backward_with(") {
            training += 1;
            assert!(main.contains("CANDLE_BARRIER_POOL_SPIN_LIMIT"), "{}", file.display());
        }
    }
    assert!(training >= 9, "{training} examples train");
}
