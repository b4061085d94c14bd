use super::model::Speller;
use super::spellings::Spellings;
use super::trie::Trie;
use super::word::Word;
use crate::spelling::RECIPE;
use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use lab::data::{Corpus, Data, IGNORED};
use lab::layers::{init, Checkpoint, HeadKind};
use lab::training::{InitialValues, LanguageModel, Model, Pass, Recipe, Session};
use mos_head::LossOptions;
use rand::{rngs::StdRng, SeedableRng};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Words that are prefixes of others, and one of a single character.
const WORDS: [&str; 9] = ["a", "an", "and", "anderen", "<eos>", "tä", "the", "theatre", "n"];

const SMALL: Recipe = Recipe { hidden: 12, embedding: Some(5), batch: 3, bptt: 7, components: 2, ..RECIPE };

fn words() -> Vec<String> {
    WORDS.map(String::from).to_vec()
}

/// Makes a corpus in which every word is always followed by the same word.
fn corpus() -> Corpus {
    let text = |targets: u32| (0..=targets).map(|i| i * 2 % 9).collect::<Vec<_>>();
    Corpus { data: Data::new("toy".into(), words(), text(400), text(70)), words: words(), test: None, entropy: None }
}

fn word(seed: u64) -> Word {
    let recipe = Recipe { hidden: 6, dropout: 0.5, seed, ..Recipe::BASE };
    let (kind, values) = (HeadKind::Mos, InitialValues::Even);
    Word::new(kind, LanguageModel::new(kind, WORDS.len(), values, &recipe, &Device::Cpu).unwrap()).unwrap()
}

fn speller(kind: HeadKind, word: &Rc<Word>, recipe: &Recipe) -> Speller {
    Speller::new(kind, word.clone(), Rc::new(Spellings::new(&words())), recipe).unwrap()
}

fn session(kind: HeadKind, word: &Rc<Word>, recipe: &Recipe) -> Session<Speller> {
    let (data, spellings) = (corpus().data, Spellings::new(&words()));
    let data = Data { per_word: [&data.train, &data.valid].map(|text| spellings.per_word(text)), ..data };
    Session::new(kind, speller(kind, word, recipe), data, recipe).unwrap()
}

fn values(varmap: &VarMap) -> Vec<Vec<f32>> {
    init::sorted(varmap).iter().map(|(_, var)| var.flatten_all().unwrap().to_vec1().unwrap()).collect()
}

/// Returns hidden states of a word model.
fn hidden(positions: usize) -> Tensor {
    let values = (0..positions * 6).map(|i| ((i * 37 % 19) as f32 / 19.0) - 0.5).collect();
    Tensor::from_vec(values, (positions, 6), &Device::Cpu).unwrap()
}

/// Returns the log-probability of every word by itself after one hidden state.
fn one_by_one(speller: &Speller, hidden: &Tensor) -> Vec<f32> {
    let log_prob = |word: u32| {
        let (hidden, targets) = speller.characters(hidden, &[word], None).unwrap();
        assert_eq!(targets.dims(), [WORDS[word as usize].chars().count() + 1]);
        speller.head().log_prob(&hidden, &targets).unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap()
    };
    (0..WORDS.len() as u32).map(log_prob).collect()
}

fn assert_close(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5 * b.abs().max(1.0)), "{a:?} {b:?}");
}

#[test]
fn the_words_of_a_trie_have_the_probabilities_of_each_by_itself() {
    let word = Rc::new(word(1));
    let trie = Trie::new(&Spellings::new(&words()));
    // "", a an and ande ander andere anderen, <eos>, t tä, th the .. theatre, n
    assert_eq!(trie.prefixes(), 1 + 7 + 5 + 2 + 6 + 1);
    for (kind, layers) in [(HeadKind::Softmax, 1), (HeadKind::Softmax, 2), (HeadKind::Moc, 1), (HeadKind::Mos, 2)] {
        let speller = speller(kind, &word, &Recipe { layers, ..SMALL });
        let hidden = hidden(3);
        let log_probs = trie.log_probs(&speller, &hidden).unwrap();
        assert_eq!(log_probs.dims(), [WORDS.len(), 3]);
        for position in 0..3 {
            let found = log_probs.narrow(1, position, 1).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_close(&found, &one_by_one(&speller, &hidden.narrow(0, position, 1).unwrap()));
        }
        let mass = log_probs.exp().unwrap().sum(0).unwrap().to_vec1::<f32>().unwrap();
        assert!(mass.iter().all(|mass| *mass > 0.0 && *mass < 1.0 + 1e-5), "{mass:?}");
    }
}

#[test]
fn all_strings_have_a_probability_of_one() {
    // Spellings of one and of two characters; of none, or more.
    let word = Rc::new(word(2));
    let speller = speller(HeadKind::Softmax, &word, &SMALL);
    let letters: Vec<char> = WORDS.concat().chars().collect::<BTreeSet<_>>().into_iter().collect();
    let mut strings: Vec<String> = letters.iter().map(char::to_string).collect();
    strings.extend(letters.iter().flat_map(|a| letters.iter().map(move |b| format!("{a}{b}"))));
    let trie = Trie::new(&Spellings::new(&strings));
    let word_mass = trie.log_probs(&speller, &hidden(1)).unwrap().exp().unwrap().flatten_all().unwrap();
    let word_mass: f32 = word_mass.to_vec1::<f32>().unwrap().iter().sum();
    let conditions = speller.conditions(&hidden(1)).unwrap();
    let step = |last: usize, states: &mut [_]| -> Vec<f32> {
        let last = Tensor::new(&[last as u32], &Device::Cpu).unwrap();
        let log_probs = speller.step(&last, &conditions, states).unwrap();
        log_probs.exp().unwrap().flatten_all().unwrap().to_vec1().unwrap()
    };
    let mut start = speller.start(1).unwrap();
    let first = step(0, &mut start);
    let mut rest = first[0];
    for (a, first_prob) in first.iter().enumerate().skip(1) {
        let mut states = start.clone();
        for (b, second_prob) in step(a, &mut states).into_iter().enumerate().skip(1) {
            let longer: f32 = step(b, &mut states.clone())[1..].iter().sum();
            rest += first_prob * second_prob * longer;
        }
    }
    assert!((word_mass + rest - 1.0).abs() < 1e-4, "{word_mass} {rest}");
}

#[test]
fn padding_changes_nothing() {
    let word = Rc::new(word(1));
    let speller = speller(HeadKind::Mos, &word, &SMALL);
    let hidden = hidden(5);
    // 8 and 6 steps are a group, 4 and 3 another, 2 a third.
    let words = [3, 4, 6, 5, 0];
    let (outputs, targets) = speller.characters(&hidden, &words, None).unwrap();
    let ignored = targets.to_vec1::<i64>().unwrap().iter().filter(|target| **target == IGNORED).count();
    assert_eq!((outputs.dims(), ignored), (&[2 * 8 + 2 * 4 + 2, 12][..], 3));
    let options = LossOptions::evaluation().with_ignore_index(IGNORED);
    let (sum, count) = speller.head().loss(&outputs, &targets, &options).unwrap().sum_and_count().unwrap();
    assert_eq!(count, 23.0);
    let alone = words
        .iter()
        .enumerate()
        .map(|(row, &word)| f64::from(-one_by_one(&speller, &hidden.narrow(0, row, 1).unwrap())[word as usize]));
    assert!((sum - alone.sum::<f64>()).abs() < 1e-3);
}

#[test]
fn training_lowers_the_loss_and_leaves_the_word_model_as_it_is() {
    let word = Rc::new(word(3));
    let before = values(word.model.varmap());
    for kind in HeadKind::ALL {
        let recipe = Recipe { epochs: 3, lr: 0.02, dropout: 0.1, ..SMALL };
        let mut session = session(kind, &word, &recipe);
        let start = session.valid_nll().unwrap();
        session.run(None, None, None).unwrap();
        let end = session.valid_nll().unwrap();
        assert!(end < 0.7 * start, "{kind:?}: {start} to {end}");
    }
    assert_eq!(values(word.model.varmap()), before);
}

#[test]
fn gradients_reach_every_variable_of_the_character_lstm_and_none_of_the_word_model() {
    let word = Rc::new(word(1));
    let speller = speller(HeadKind::Mos, &word, &SMALL);
    let text = corpus().data.train;
    let pass = Pass::Training { epoch: 0 };
    let mut states = Model::start(&speller, &SMALL, pass).unwrap();
    let batch = &speller.batches(&text, &SMALL, pass)[0];
    let forward = speller.forward(&text, batch, &mut states, Some(&mut StdRng::seed_from_u64(1))).unwrap();
    let options = LossOptions::new().with_ignore_index(IGNORED);
    let gradients = speller.head().loss(&forward.hidden, &forward.targets, &options).unwrap().backward().unwrap();
    for (name, var) in init::sorted(speller.varmap()) {
        assert!(gradients.get(&var).is_some(), "{name}");
    }
    for (name, var) in init::sorted(word.model.varmap()) {
        assert!(gradients.get(&var).is_none(), "{name}");
    }
}

#[test]
fn the_word_model_is_without_dropout_and_a_sample_of_all_positions_is_the_text() {
    let word = Rc::new(word(1));
    let text = corpus().data.valid;
    let sample = word.sample(&text, usize::MAX, &SMALL).unwrap();
    assert_eq!(sample.hidden.dims(), [70, 6]);
    let (mut found, mut expected) = (sample.words.clone(), text[1..].to_vec());
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected);
    let nll = lab::training::evaluate(&word.model, &text, &SMALL).unwrap();
    assert!((sample.nll - nll).abs() < 1e-5);

    let some = word.sample(&text, 20, &SMALL).unwrap();
    assert_eq!((some.hidden.dims(), some.words.len()), (&[20, 6][..], 20));
    let again = word.sample(&text, 20, &Recipe { batch: 2, bptt: 3, ..SMALL }).unwrap();
    assert_eq!(some.words, again.words, "a seed fixes the sample");

    // The strings of all positions, with and without the trie.
    let session = session(HeadKind::Softmax, &word, &SMALL);
    let mass = Trie::new(&Spellings::new(&words())).mass(&session.model, &sample).unwrap();
    let nll = session.valid_nll().unwrap();
    assert!((mass.nll - nll).abs() < 1e-4, "{mass:?} {nll}");
    assert!(mass.log_mass < 0.0 && mass.renormalised() < mass.nll);
}

fn temporary(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("spell_{name}_{}.safetensors", std::process::id()))
}

#[test]
fn a_checkpoint_gives_the_same_numbers_with_its_own_word_model_alone() {
    let (mine, recipe, path) = (Rc::new(word(1)), Recipe { epochs: 1, ..SMALL }, temporary("same"));
    let mut trained = session(HeadKind::Moc, &mine, &recipe);
    trained.run(Some(&path), None, None).unwrap();
    let checkpoint = Checkpoint::load(&path, &Device::Cpu).unwrap();
    let mut restored = session(HeadKind::Moc, &mine, &recipe);
    restored.restore(&checkpoint).unwrap();
    assert_eq!(restored.valid_nll().unwrap(), trained.valid_nll().unwrap());

    let error = session(HeadKind::Moc, &Rc::new(word(2)), &recipe).restore(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("--spell"), "{error}");
    let wider = Recipe { hidden: 13, ..recipe };
    let error = session(HeadKind::Moc, &mine, &wider).restore(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("--hidden 12") && error.contains("--hidden 13"), "{error}");
    // It is no word model itself.
    let error = load(&path, &corpus()).err().expect("must fail");
    assert!(error.starts_with("--spell") && error.contains("--resume"), "{error}");
    std::fs::remove_file(path).unwrap();
}

fn load(path: &Path, corpus: &Corpus) -> Result<Word, String> {
    Word::load(path, corpus, &Device::Cpu).map_err(|error| error.to_string())
}

#[test]
fn a_word_model_of_another_corpus_is_an_error_that_names_the_flag() {
    let path = temporary("word");
    let (corpus, kind) = (corpus(), HeadKind::Softmax);
    let recipe = Recipe { hidden: 4, ..Recipe::BASE };
    let model = LanguageModel::new(kind, WORDS.len(), InitialValues::Even, &recipe, &Device::Cpu).unwrap();
    let session = Session::new(kind, model, corpus.data.clone(), &recipe).unwrap();
    session.checkpoint().unwrap().save(&path).unwrap();
    let loaded = load(&path, &corpus).unwrap();
    assert_eq!(values(loaded.model.varmap()), values(session.model.varmap()));
    assert_eq!(loaded.digest, Word::new(kind, session.model).unwrap().digest);

    let data = Data::new("other".into(), words(), vec![0, 1, 2], vec![1, 2]);
    let other = Corpus { data, words: words(), test: None, entropy: None };
    let error = load(&path, &other).err().expect("must fail");
    assert!(error.starts_with("--spell") && error.contains("toy") && error.contains("other"), "{error}");
    let error = load(&temporary("none"), &corpus).err().expect("must fail");
    assert!(error.starts_with("--spell") && error.contains("spell_none"), "{error}");
    std::fs::remove_file(path).unwrap();
}
