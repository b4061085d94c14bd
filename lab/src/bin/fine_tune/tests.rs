//! Every output layer trains all of its variables, and the logits and the head compute the same.

use super::*;
use crate::model::Llama;
use candle_core::{DType, Tensor};
use candle_nn::{VarBuilder, VarMap};

const CONFIG: Config = Config {
    vocab: 50,
    hidden: 24,
    layers: 2,
    heads: 3,
    inner: 32,
    positions: 9,
    rms_epsilon: 1e-5,
    rope_theta: 100.0,
};

fn ids(shape: (usize, usize), factor: u32) -> Tensor {
    let ids = (0..(shape.0 * shape.1) as u32).map(|i| (i * factor + 3) % 50);
    Tensor::from_iter(ids, &Device::Cpu).unwrap().reshape(shape).unwrap()
}

fn args(flags: &[&str]) -> Args {
    let small =
        "fine_tune --vocab-size 600 --hidden 16 --layers 1 --attention-heads 2 --inner 24 --batch 2 --positions 10";
    Args::try_parse_from(small.split(' ').chain(flags.iter().copied())).unwrap()
}

#[test]
fn the_head_has_the_loss_and_the_gradients_of_the_logits() {
    let [logits, head] =
        [Output::Logits, Output::Head].map(|output| FineTuned::new(CONFIG, output, 4, 7, None).unwrap());
    let (tokens, targets) = (ids((2, 9), 7), ids((2, 9), 11));
    let ((expected, logits_gradients), (found, head_gradients)) =
        (logits.step(&tokens, &targets).unwrap(), head.step(&tokens, &targets).unwrap());
    assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    for ((name, a), (_, b)) in logits.variables().into_iter().zip(head.variables()) {
        let (a, b) = (logits_gradients.get(&a).expect(&name), head_gradients.get(&b).expect(&name));
        let largest = a.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        let difference = (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(largest > 0.0 && difference < 1e-4 * largest, "{name}: {difference} of {largest}");
    }
}

#[test]
fn what_is_frozen_has_no_gradient_and_all_else_has() {
    for output in [Output::Frozen, Output::Adapter] {
        let tuned = FineTuned::new(CONFIG, output, 4, 7, None).unwrap();
        let (_, gradients) = tuned.step(&ids((2, 9), 7), &ids((2, 9), 11)).unwrap();
        for (name, var) in tuned.variables() {
            assert_eq!(gradients.get(&var).is_none(), name == "model.embed_tokens.weight", "{output:?} {name}");
        }
    }
    let parameters = |output| FineTuned::new(CONFIG, output, 4, 7, None).unwrap().variables().len();
    assert_eq!(parameters(Output::Adapter), parameters(Output::Frozen) + 2);
}

#[test]
fn hidden_states_depend_on_no_later_token_and_on_the_order_of_earlier_ones() {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let embedding = vb.get((50, 24), "embedding").unwrap();
    let model = Llama::new(CONFIG, embedding, vb).unwrap();
    lab::layers::init::uniform(&varmap, 3, |_| 0.5).unwrap();
    let hidden = |tokens: [u32; 5]| {
        model.forward(&Tensor::new(&[tokens], &Device::Cpu).unwrap()).unwrap().to_vec3::<f32>().unwrap()[0].clone()
    };
    let before = hidden([1, 2, 3, 4, 5]);
    let after = hidden([1, 2, 3, 9, 5]);
    assert!(before[..3] == after[..3] && before[3] != after[3] && before[4] != after[4]);
    assert_ne!(hidden([2, 1, 3, 4, 5])[4], before[4]);
}

#[test]
fn training_lowers_the_loss_and_saved_weights_continue_it() {
    let path = std::env::temp_dir().join(format!("fine_tune_{}.safetensors", std::process::id()));
    let file = path.to_str().unwrap();
    let first =
        train(&args(&["--output", "head", "--steps", "12", "--lr", "0.01", "--save", file]), Output::Head, |_, _| {});
    let losses = numbers(&first.unwrap(), "losses");
    assert!(losses[11] < losses[0] - 0.2, "{losses:?}");
    // The weights are the same, whatever is trained next; an adapter starts without effect.
    let next = |output| {
        let line = train(&args(&["--steps", "1", "--weights", file]), output, |_, _| {}).unwrap();
        numbers(&line, "losses")[0]
    };
    let expected = next(Output::Logits);
    assert!(expected < losses[0] - 0.2);
    for output in [Output::Head, Output::Frozen, Output::Adapter] {
        assert!((next(output) - expected).abs() < 1e-5, "{output:?}");
    }
    // The checkpoint has other sizes.
    let larger = Args { vocab_size: 700, ..args(&["--weights", file]) };
    let error = train(&larger, Output::Head, |_, _| {}).err().unwrap();
    assert!(error.to_string().contains("model.embed_tokens.weight is [600, 16], expected [700, 16]"), "{error}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn wrong_flags_and_texts_are_errors_that_say_so() {
    let error = run(&Args { hidden: 18, attention_heads: 4, ..args(&[]) }).err().unwrap().to_string();
    assert!(error.contains("--hidden is 18") && error.contains("twice the 4"), "{error}");
    let error = run(&Args { vocab_size: 100, ..args(&["--output", "head"]) }).err().unwrap().to_string();
    assert!(error.contains("--vocab-size is 100"), "{error}");
    let path = std::env::temp_dir().join(format!("fine_tune_{}.txt", std::process::id()));
    std::fs::write(&path, "a few words").unwrap();
    let long = Args { positions: 40, ..args(&["--output", "head", "--text", path.to_str().unwrap()]) };
    let error = run(&long).err().unwrap();
    assert!(error.to_string().contains("fewer than the 41 of a window"), "{error}");
    std::fs::write(&path, "the cat and the dog and the bird ".repeat(20)).unwrap();
    let diverging = args(&["--lr", "1e30", "--steps", "9"]);
    let error = train(&diverging, Output::Head, |_, _| {}).err().unwrap().to_string();
    assert!(error.contains("the loss of step") && error.contains("--lr"), "{error}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn weights_come_with_their_tokenizer() {
    let folder = std::env::temp_dir().join(format!("fine_tune_tokenizer_{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let [text, weights, tokenizer] = ["text.txt", "weights.safetensors", "weights.tokenizer.json"]
        .map(|name| folder.join(name).to_str().unwrap().to_owned());
    std::fs::write(&text, "the cat and the dog and the bird ".repeat(20)).unwrap();
    let line = |flags: &[&str]| train(&args(flags), Output::Adapter, |_, _| {});
    let first = line(&["--text", &text, "--steps", "2", "--save", &weights, "--output", "adapter"]).unwrap();
    assert!(first["pieces"].as_u64().unwrap() > 5, "{first}");
    let again = ["--text", &text, "--weights", &weights, "--steps", "1"];
    let with_tokenizer = [&again[..], &["--tokenizer", &tokenizer]].concat();
    let next = line(&with_tokenizer).unwrap();
    assert_eq!(next["pieces"], first["pieces"]);
    assert!(numbers(&next, "losses")[0] < numbers(&first, "losses")[0]);
    let error = run(&args(&again)).err().unwrap().to_string();
    assert!(error.contains("needs the --tokenizer"), "{error}");
    // Other output layers would lose the adapter.
    let error = train(&args(&with_tokenizer), Output::Head, |_, _| {}).err().unwrap().to_string();
    assert!(error.contains("lm_head.lora_A.weight") && error.contains("--output adapter"), "{error}");
    let small = Args { vocab_size: 5, ..args(&with_tokenizer) };
    let error = train(&small, Output::Adapter, |_, _| {}).err().unwrap().to_string();
    assert!(error.contains("--vocab-size is 5, but the tokenizer has"), "{error}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_names_of_variables_without_a_gradient_are_told() {
    let tuned = FineTuned::new(CONFIG, Output::Head, 4, 7, None).unwrap();
    let nothing = Tensor::zeros((), DType::F32, &Device::Cpu).unwrap().backward().unwrap();
    let names = tuned.without_gradient(&nothing);
    assert!(names.contains(&"model.embed_tokens.weight".to_owned()) && names.len() == tuned.variables().len());
}

/// candle's Llama computes the logits of the last position, from the same variables.
#[cfg(feature = "candle-transformers")]
#[test]
fn hidden_states_are_those_of_candle_transformers() {
    use candle_nn::Module;
    use candle_transformers::models::llama;
    let Config { vocab, hidden, layers, heads, inner, positions, rms_epsilon, rope_theta } = CONFIG;
    let config = llama::Config {
        hidden_size: hidden,
        intermediate_size: inner,
        vocab_size: vocab,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: heads,
        use_flash_attn: false,
        rms_norm_eps: rms_epsilon,
        rope_theta: rope_theta as f32,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: positions,
        tie_word_embeddings: true,
    };
    let tuned = FineTuned::new(CONFIG, Output::Logits, 4, 7, None).unwrap();
    for (name, var) in tuned.variables() {
        // The norms are not all one.
        lab::layers::init::uniform_by_name(&var, 5, &name, 0.5).unwrap();
    }
    let vb = VarBuilder::from_varmap(&tuned.trained, DType::F32, &Device::Cpu);
    let theirs = llama::Llama::load(vb, &config).unwrap();
    let mut cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu).unwrap();
    let tokens = ids((2, 9), 7);
    let expected = theirs.forward(&tokens, 0, &mut cache).unwrap();
    let last = tuned.model.forward(&tokens).unwrap().narrow(1, 8, 1).unwrap().squeeze(1).unwrap();
    let embedding = candle_nn::Linear::new(tuned.variables()[0].1.as_tensor().clone(), None);
    let found = embedding.forward(&last).unwrap();
    let difference = (&found - &expected).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    assert!(difference < 1e-4, "{difference}");
}

#[test]
fn losses_that_are_not_alike_are_found() {
    let line = |losses: &[f64]| json!({ "losses": losses });
    assert!(largest_difference(&line(&[1.0, 2.0]), &line(&[1.0, 2.5]), 2) > 0.4);
    assert_eq!(largest_difference(&line(&[1.0, 2.0]), &line(&[1.0, 2.5]), 1), 0.0);
    assert!(largest_difference(&line(&[1.0]), &line(&[1.0, 2.5]), 2).is_nan());
    // JSON has no NaN.
    assert!(largest_difference(&line(&[f64::NAN, 1.0]), &line(&[1.0, 1.0]), 2).is_nan());
}

#[test]
fn a_quantised_output_layer_is_the_decoder() {
    use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
    let path = std::env::temp_dir().join(format!("fine-tune-{}.gguf", std::process::id()));
    let config = Config { hidden: 32, heads: 4, ..CONFIG };
    let weight = Tensor::randn(0f32, 1., (50, 32), &Device::Cpu).unwrap();
    let weight = QTensor::quantize(&weight, GgmlDType::Q8_0).unwrap();
    gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &[], &[("output.weight", &weight)]).unwrap();
    let (tokens, targets) = (ids((2, 9), 7), ids((2, 9), 11));
    for output in [Output::Frozen, Output::Adapter] {
        let tuned = FineTuned::new(config, output, 4, 7, Some(&path)).unwrap();
        let (loss, gradients) = tuned.step(&tokens, &targets).unwrap();
        assert!(loss > 4.0 && tuned.without_gradient(&gradients).is_empty(), "{output:?} {loss}");
    }
    let error = |config, output| FineTuned::new(config, output, 4, 7, Some(&path)).err().unwrap().to_string();
    assert!(error(config, Output::Head).contains("--output frozen or adapter"));
    assert!(error(CONFIG, Output::Frozen).contains("expected [50, 24]"));
    std::fs::remove_file(path).unwrap();
}
