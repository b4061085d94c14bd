use super::*;
use crate::layers::OutputKind;
use mos_head::parts::LogitFunction;

fn recipe(components: usize) -> Recipe {
    Recipe { components, hidden: 4, embedding: Some(3), context: Some(5), ..Recipe::BASE }
}

fn model(kind: HeadKind, vocab: usize, recipe: Recipe) -> LanguageModel {
    LanguageModel::new(kind, vocab, InitialValues::Small, &recipe, &Device::Cpu).expect("valid sizes")
}

/// Returns a model whose ids are counted: the higher, the more often.
fn counted(kind: HeadKind, vocab: usize, recipe: Recipe) -> LanguageModel {
    let entries = Entries { words: vec![], counts: (0..vocab).map(|id| id as f64).collect() };
    let sizes = Sizes::new(kind, &recipe, vocab);
    LanguageModel::with_entries(kind, sizes, InitialValues::Small, &recipe, &entries, &Device::Cpu)
        .expect("valid sizes")
}

#[test]
fn the_heads_have_equal_parameter_counts_within_one_percent() {
    for (vocab, embedding, hidden, components) in [(512, 32, 6, 8), (10_000, 220, 220, 5), (10_000, 220, 220, 15)] {
        let recipe = Recipe { hidden, components, embedding: Some(embedding), ..Recipe::BASE };
        let parameters = |kind| counted(kind, vocab, recipe).parameters() as f64;
        for kind in [HeadKind::Moc, HeadKind::Mos, HeadKind::Mixtape] {
            let ratio = parameters(kind) / parameters(HeadKind::Softmax);
            assert!((ratio - 1.0).abs() < 0.01, "{kind:?} {recipe:?}: {ratio}");
        }
    }
}

#[test]
fn sizes_know_the_number_of_parameters() {
    for (kind, layers) in [(HeadKind::Softmax, 1), (HeadKind::Moc, 2), (HeadKind::Mos, 3), (HeadKind::Mixtape, 2)] {
        let recipe = Recipe { layers, ..recipe(2) };
        let sizes = Sizes::new(kind, &recipe, 11);
        let parameters = sizes.parameters(kind);
        assert_eq!(counted(kind, 11, recipe).parameters(), parameters, "{kind:?}");
        for parameters in parameters - 1..=parameters + 1 {
            assert_eq!(sizes.with_parameters(kind, parameters), sizes);
        }
    }
}

#[test]
fn a_seed_fixes_the_initial_values() {
    let sum = |seed| -> f32 {
        let model = model(HeadKind::Mos, 11, Recipe { seed, ..recipe(2) });
        let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu).expect("ids");
        let hidden = model.hidden(&ids, &mut model.state(1).expect("state")).expect("hidden");
        hidden.sum_all().and_then(|sum| sum.to_scalar()).expect("sum")
    };
    assert_eq!(sum(1), sum(1));
    assert_ne!(sum(1), sum(2));
}

#[test]
fn a_bias_at_frequencies_is_a_unigram_model() {
    for kind in HeadKind::ALL {
        let model = model(kind, 5, recipe(2));
        model.start_at_frequencies(&[0, 0, 3, 1, 3]).expect("every head has a bias");
        let bias = init::sorted(model.varmap()).into_iter().find(|(name, _)| name == "head.decoder.bias");
        let frequencies = bias.expect("found").1.exp().unwrap().to_vec1::<f32>().unwrap();
        for (found, expected) in frequencies.into_iter().zip([0.3f32, 0.2, 0.1, 0.3, 0.1]) {
            assert!((found - expected).abs() < 1e-6, "{kind:?}: {found} {expected}");
        }
    }
}

/// Computes the hidden states, before and after dropout, of some ids with the embedding's mask of this seed.
fn outputs(awd: Awd, seed: Option<u64>) -> Outputs {
    let model = model(HeadKind::Mos, 50, Recipe { awd, ..recipe(2) });
    let ids: Vec<u32> = (0..50).chain(0..50).collect();
    let ids = Tensor::from_vec(ids, (2, 50), &Device::Cpu).unwrap();
    let mut rng = seed.map(StdRng::seed_from_u64);
    model.outputs(&ids, &mut model.state(2).unwrap(), rng.as_mut()).unwrap()
}

#[test]
fn the_embedding_drops_the_same_rows_everywhere() {
    let awd = Awd { embedding_dropout: Some(0.4), ..Awd::NONE };
    let first = |outputs: Outputs, stream| outputs.raw.get(stream).unwrap().to_vec2::<f32>().unwrap();
    // Both streams read the same ids: only a mask of rows of the vocabulary is the same for both.
    assert_eq!(first(outputs(awd, Some(1)), 0), first(outputs(awd, Some(1)), 1));
    assert_ne!(first(outputs(awd, Some(1)), 0), first(outputs(awd, Some(2)), 0));
    assert_ne!(first(outputs(awd, Some(1)), 0), first(outputs(awd, None), 0));
    assert_eq!(first(outputs(awd, None), 0), first(outputs(Awd::NONE, Some(1)), 0));
}

#[test]
fn penalties_are_those_of_the_papers() {
    let awd = Awd { output_dropout: Some(0.5), ar: Some(2.0), ..Awd::NONE };
    let recipe = Recipe { awd: Awd { tar: Some(3.0), ..awd }, ..recipe(2) };
    let model = |awd| model(HeadKind::Mos, 50, Recipe { awd, ..recipe });
    let outputs = outputs(awd, Some(1));
    let (raw, dropped) = (outputs.raw.to_vec3::<f32>().unwrap(), outputs.dropped.to_vec3::<f32>().unwrap());
    let mean = |values: Vec<f64>| values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
    let activations = mean(dropped.iter().flatten().flatten().map(|&x| f64::from(x)).collect());
    let differences = raw
        .iter()
        .flat_map(|steps| steps.windows(2))
        .flat_map(|pair| pair[0].iter().zip(&pair[1]).map(|(a, b)| f64::from(b - a)).collect::<Vec<_>>());
    let temporal = mean(differences.collect());
    let found = |awd| model(awd).penalty(&outputs).unwrap().map(|p| f64::from(p.to_scalar::<f32>().unwrap()));
    assert!((found(awd).unwrap() - 2.0 * activations).abs() < 1e-5);
    assert!((found(recipe.awd).unwrap() - 2.0 * activations - 3.0 * temporal).abs() < 1e-5);
    assert!((found(Awd { ar: None, ..recipe.awd }).unwrap() - 3.0 * temporal).abs() < 1e-5);
    assert_eq!(found(Awd::NONE), None);
}

#[test]
fn a_tied_decoder_is_the_embedding() {
    for kind in HeadKind::ALL.into_iter().chain([HeadKind::Mixtape]) {
        let recipe = Recipe { awd: Awd { tied: Some(true), inner: Some(6), ..Awd::NONE }, layers: 2, ..recipe(2) };
        let (sizes, model) = (Sizes::new(kind, &recipe, 11), counted(kind, 11, recipe));
        let names: Vec<String> = init::sorted(model.varmap()).into_iter().map(|(name, _)| name).collect();
        assert!(!names.iter().any(|name| name == "head.decoder.weight"), "{names:?}");
        assert_eq!(model.parameters(), sizes.parameters(kind), "{kind:?}");
    }
}

/// Projected states, spelled inputs and rows from spellings: every variable has a gradient, and the number of
/// parameters is that of the description.
#[test]
fn spelled_models_with_projected_states_are_as_described_and_train() {
    let words: Vec<String> = ["<unk>", "one", "two", "three", "four", "five", "six"].map(String::from).to_vec();
    let entries = Entries::count(&words, &[1, 2, 3, 1]);
    for (spelled_inputs, kind) in [
        (true, OutputKind::Full),
        (false, OutputKind::CharCnn),
        (true, OutputKind::CharCnn),
        (true, OutputKind::Sampled),
    ] {
        let output = Output { kind, spelled_inputs, samples: Some(3), correction: 2, ..Output::FULL };
        let recipe = Recipe { hidden: 5, cells: 9, layers: 2, output, ..Recipe::BASE };
        let sizes = Sizes::new(HeadKind::Softmax, &recipe, words.len());
        let device = Device::Cpu;
        let make =
            || LanguageModel::with_entries(HeadKind::Softmax, sizes, InitialValues::Even, &recipe, &entries, &device);
        let model = make().expect("valid sizes");
        // The characters of the words, and what the network adds to them.
        let variables = model.varmap().data().lock().unwrap().clone();
        let rows =
            ["inputs.embedding.weight", "head.rows.embedding.weight"].iter().find_map(|name| variables.get(*name));
        let characters = rows.expect("a network").dims()[0];
        assert_eq!(
            model.parameters(),
            sizes.described(HeadKind::Softmax, characters).expect("a description"),
            "{output:?}"
        );

        let ids = Tensor::new(&[[1u32, 2, 3], [4, 6, 1]], &device).unwrap();
        let targets = Tensor::new(&[[2i64, 3, 1], [6, 1, 5]], &device).unwrap();
        let mut states = model.state(2).expect("a state");
        let hidden = model.outputs(&ids, &mut states, None).expect("hidden states").dropped;
        assert_eq!((hidden.dims(), states[0].c.dims()), (&[2, 3, 5][..], &[2, 9][..]));
        let options = model.options(LossOptions::new(), &mut StdRng::seed_from_u64(1)).expect("options");
        let gradients = model.head().loss(&hidden, &targets, &options).expect("a loss").backward().unwrap();
        for (name, variable) in &variables {
            assert!(gradients.get(variable).is_some(), "{output:?} {name}");
        }
    }
    let recipe = Recipe { output: Output { spelled_inputs: true, ..Output::FULL }, ..Recipe::BASE };
    let error = LanguageModel::new(HeadKind::Softmax, 7, InitialValues::Even, &recipe, &Device::Cpu).err();
    assert!(error.expect("no words").to_string().contains("--spelled-inputs"));
}

/// Returns the negative log-likelihood of the ids 0 to 10 after the ids 1 to 10 and 0.
fn nll(model: &LanguageModel) -> Vec<f32> {
    let ids = |first: u32| Tensor::from_iter((0..11).map(|i| (first + i) % 11), &Device::Cpu).unwrap();
    let hidden = model.hidden(&ids(1).unsqueeze(0).unwrap(), &mut model.state(1).unwrap()).unwrap();
    let options = LossOptions::evaluation().with_reduction(mos_head::Reduction::None);
    let loss = model.head().loss(&hidden, &ids(0).unsqueeze(0).unwrap(), &options).unwrap();
    loss.nll.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn a_checkpoint_keeps_head_function_and_frequent_ids() {
    let tied = Awd { tied: Some(true), ..Awd::NONE };
    for awd in [Awd::NONE, tied] {
        let recipe = Recipe { awd, spread: 0.3, ..recipe(2) };
        let sigsoftmax = Recipe { logit_function: LogitFunction::Sigsoftmax, ..recipe };
        let kinds = HeadKind::ALL.into_iter().flat_map(|kind| [(kind, recipe), (kind, sigsoftmax)]);
        for (kind, recipe) in kinds.chain([(HeadKind::Mixtape, recipe)]) {
            let model = counted(kind, 11, recipe);
            let checkpoint = model.checkpoint();
            let stored = checkpoint.metadata.get("logit-function").map(String::as_str);
            let is_sigsoftmax = recipe.logit_function == LogitFunction::Sigsoftmax;
            assert_eq!(stored, is_sigsoftmax.then_some("sigsoftmax"));
            let mut file = Checkpoint::default();
            model.add_constants(&mut file).unwrap();
            assert_eq!(file.tensors.contains_key("head.ids"), kind == HeadKind::Mixtape);
            let (found, read) = LanguageModel::from_checkpoint(&checkpoint, 11, &Device::Cpu).expect("a model");
            assert_eq!((found, nll(&read)), (kind, nll(&model)), "{kind:?}");
            // Without what is stored, it would be another model.
            if is_sigsoftmax {
                let plain = Recipe { logit_function: LogitFunction::Identity, ..recipe };
                assert_ne!(nll(&counted(kind, 11, plain)), nll(&model));
                let error = counted(kind, 11, plain).restore(&checkpoint).expect_err("another function").to_string();
                assert!(error.contains("--logit-function sigsoftmax") && error.contains("identity"), "{error}");
            }
        }
        let mut other = counted(HeadKind::Mixtape, 11, recipe).checkpoint();
        let read = |checkpoint: &Checkpoint| LanguageModel::from_checkpoint(checkpoint, 11, &Device::Cpu);
        let before = nll(&read(&other).expect("a model").1);
        other.tensors.insert("head.ids".into(), Tensor::arange(0u32, 11, &Device::Cpu).unwrap());
        assert_ne!(nll(&read(&other).expect("a model").1), before);
        other.tensors.insert("head.ids".into(), Tensor::zeros(11, DType::U32, &Device::Cpu).unwrap());
        assert!(read(&other).err().expect("one id alone").to_string().contains("head.ids"));
        other.tensors.remove("head.ids");
        assert!(read(&other).err().expect("no order").to_string().contains("head.ids"));
    }
}

#[test]
fn outputs_and_functions_that_do_not_fit_are_errors_that_name_the_flags() {
    let entries = Entries::count(&(0..11).map(|id| format!("w{id}")).collect::<Vec<_>>(), &[0, 1, 1]);
    let build = |kind, recipe: Recipe, entries: &Entries| {
        let sizes = Sizes::new(kind, &recipe, 11);
        LanguageModel::with_entries(kind, sizes, InitialValues::Small, &recipe, entries, &Device::Cpu)
    };
    let error = |kind, recipe, entries: &Entries| build(kind, recipe, entries).err().expect("must fail").to_string();
    let output = |kind| Recipe { output: Output { kind, ..Output::FULL }, ..recipe(2) };
    for kind in [OutputKind::Sampled, OutputKind::CharCnn, OutputKind::Adaptive, OutputKind::Bpe] {
        assert!(error(HeadKind::Mixtape, output(kind), &entries).contains("--head mixtape"), "{kind:?}");
    }
    assert!(error(HeadKind::Mixtape, recipe(2), &Entries::default()).contains("--head mixtape"));
    let sigsoftmax = |recipe| Recipe { logit_function: LogitFunction::Sigsoftmax, ..recipe };
    let refused = error(HeadKind::Mixtape, sigsoftmax(recipe(2)), &entries);
    assert!(refused.contains("--logit-function") && refused.contains("--head mixtape"), "{refused}");
    let refused = error(HeadKind::Mos, sigsoftmax(output(OutputKind::Adaptive)), &entries);
    assert!(refused.contains("--logit-function") && refused.contains("--output adaptive"), "{refused}");
    // The library refuses a sample.
    let model = build(HeadKind::Mos, sigsoftmax(output(OutputKind::Sampled)), &entries).expect("valid sizes");
    let options = model.options(LossOptions::new(), &mut StdRng::seed_from_u64(1)).expect("negatives");
    let hidden = Tensor::zeros((1, 4), DType::F32, &Device::Cpu).unwrap();
    let targets = Tensor::zeros(1, DType::U32, &Device::Cpu).unwrap();
    let refused = model.head().loss(&hidden, &targets, &options).expect_err("a sample").to_string();
    assert!(refused.contains("sigsoftmax"), "{refused}");
}
