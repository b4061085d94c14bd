use super::*;
use crate::training::{Awd, InitialValues, LanguageModel};
use candle_core::Device;
use std::path::PathBuf;

/// Returns the squares modulo 23: the next id depends on the last two.
fn data(targets: usize) -> Data<u32> {
    let text = |targets| (0..=targets).map(|i| (i * i % 23) as u32).collect();
    Data::new("squares".into(), ["a", "b"], text(targets), text(targets / 9))
}

const SMALL: Recipe =
    Recipe { hidden: 6, context: Some(5), batch: 4, bptt: 8, layers: 2, lr: 1.0, seed: 3, ..Recipe::BASE };

fn session(epochs: usize, optimizer: OptimizerKind, components: usize) -> Session<LanguageModel> {
    let lr = if optimizer == OptimizerKind::Adam { 0.01 } else { SMALL.lr };
    with_recipe(Recipe { epochs, optimizer, components, lr, warmup: 10, clip: 0.5, ..SMALL })
}

fn with_recipe(recipe: Recipe) -> Session<LanguageModel> {
    let model =
        LanguageModel::new(HeadKind::Mos, 23, InitialValues::Small, &recipe, &Device::Cpu).expect("valid sizes");
    Session::new(HeadKind::Mos, model, data(999), &recipe).expect("valid sizes")
}

fn temporary(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("session_{name}_{}.safetensors", std::process::id()))
}

fn load(path: &Path) -> Checkpoint {
    Checkpoint::load(path, &Device::Cpu).expect("loads")
}

#[test]
fn resumed_training_equals_uninterrupted_training() {
    for optimizer in [OptimizerKind::Sgd, OptimizerKind::Adam, OptimizerKind::Adagrad] {
        let mut whole = session(2, optimizer, 2);
        whole.run(None, None, None).expect("trains");

        let path = temporary(&format!("{optimizer:?}"));
        session(1, optimizer, 2).run(Some(&path), None, None).expect("trains and saves");
        let mut second = session(2, optimizer, 2);
        second.restore(&load(&path)).expect("fits");
        assert_eq!(second.history.len(), 1);
        second.run(None, None, None).expect("trains");
        assert_eq!(second.history, whole.history, "{optimizer:?}");
        std::fs::remove_file(path).expect("was just written");
    }
}

#[test]
fn a_checkpoint_of_other_components_is_an_error_that_names_the_flag() {
    let checkpoint = session(1, OptimizerKind::Adam, 2).checkpoint().expect("copies");
    let error = session(1, OptimizerKind::Adam, 3).restore(&checkpoint).expect_err("must fail").to_string();
    assert!(error.contains("--components 2") && error.contains("--components 3"), "{error}");
}

#[test]
fn a_checkpoint_of_another_corpus_is_an_error_that_names_both() {
    let checkpoint = session(1, OptimizerKind::Adam, 2).checkpoint().expect("copies");
    let mut other = session(1, OptimizerKind::Adam, 2);
    other.data = Data::new("others".into(), ["a", "b"], other.data.train.clone(), vec![1, 2, 3]);
    let error = other.restore(&checkpoint).expect_err("must fail").to_string();
    assert!(error.contains("squares") && error.contains("others"), "{error}");
}

#[test]
fn a_resumed_model_is_evaluated_anew() {
    let mut first = session(1, OptimizerKind::Adam, 2);
    first.run(None, None, None).expect("trains");
    let mut checkpoint = first.checkpoint().expect("copies");
    checkpoint.metadata.insert("history".into(), "[[0.1, 0.1]]".into());
    let mut second = session(1, OptimizerKind::Adam, 2);
    second.restore(&checkpoint).expect("fits");
    second.run(None, None, None).expect("nothing to train");
    assert_eq!(second.valid_nll().expect("known"), first.valid_nll().expect("known"));
}

#[test]
fn a_diverged_model_leaves_the_last_good_checkpoint() {
    let path = temporary("diverged");
    let mut session = session(1, OptimizerKind::Sgd, 2);
    session.run(Some(&path), None, None).expect("trains and saves");
    let good = std::fs::read(&path).expect("was just written");
    session.recipe = Recipe { epochs: 5, lr: 1e30, clip: 0.0, ..session.recipe };
    session.run(Some(&path), None, None).expect("divergence is no error here");
    assert_eq!((session.diverged, session.history.len()), (Some(2), 1));
    assert!(session.valid_nll().expect("known").is_nan());
    assert_eq!(std::fs::read(&path).expect("still exists"), good);
    std::fs::remove_file(path).expect("was just written");
}

#[test]
fn a_worse_epoch_leaves_the_best_checkpoint() {
    let path = temporary("worse");
    let mut session = session(3, OptimizerKind::Adam, 2);
    session.run(Some(&path), None, None).expect("trains and saves");
    let good = std::fs::read(&path).expect("was just written");
    // Steps that are far too long, but finite.
    session.recipe = Recipe { epochs: 4, lr: 3.0, decay: 1.0, ..session.recipe };
    session.run(Some(&path), None, None).expect("trains");
    assert_eq!(session.history.len(), 4);
    assert!(session.history[3][1] > session.history[2][1], "{:?}", session.history);
    assert_eq!(std::fs::read(&path).expect("still exists"), good);
    std::fs::remove_file(path).expect("was just written");
}

#[test]
fn training_lowers_the_loss() {
    let mut session = session(2, OptimizerKind::Adam, 2);
    session.data = data(9999);
    let before = session.valid_nll().expect("evaluates");
    session.run(None, None, None).expect("trains");
    let after = session.valid_nll().expect("evaluates");
    assert!(after < before - 0.3, "{before} -> {after}");
}

/// Everything that is random, in parts, averaged.
fn regularized(epochs: usize) -> Recipe {
    let (inner, weight_decay, small_batch, nonmono) = (Some(7), Some(1e-4), Some(3), Some(1));
    let awd = Awd { inner, weight_decay, small_batch, nonmono, ..Awd::RANDOM };
    Recipe { awd, epochs, optimizer: OptimizerKind::Sgd, ..SMALL }
}

#[test]
fn training_in_legs_equals_training_at_once() {
    // Training alone, with a switch to averaging after the first epoch, and finetuning that ends there.
    for (history, finetune) in [(vec![], false), (vec![[0.1; 2]; 2], false), (vec![[0.1; 2]; 2], true)] {
        let recipe = Recipe { finetune, ..regularized(history.len() + 2) };
        let start = || {
            let mut session = with_recipe(recipe);
            session.history = history.clone();
            session
        };
        let mut whole = start();
        assert!(whole.run(None, None, None).expect("trains"));
        assert_eq!(whole.optimizer.is_averaging(), !history.is_empty());
        assert_eq!(whole.history.len(), history.len() + if finetune { 1 } else { 2 });
        let path = temporary(&format!("leg_{}_{finetune}", history.len()));
        let mut legs = 0;
        loop {
            legs += 1;
            let mut session = start();
            if legs > 1 {
                session.restore(&load(&path)).expect("fits");
            }
            // The time is up after one step.
            let leg = Leg { path: path.clone(), until: Instant::now() };
            if session.run(None, None, Some(&leg)).expect("trains") {
                assert_eq!(session.history, whole.history, "finetune {finetune}");
                let tensors = |session: &Session<LanguageModel>| session.checkpoint().expect("copies").tensors;
                for (name, tensor) in tensors(&whole) {
                    let other = &tensors(&session)[&name];
                    let difference = (&tensor - other).and_then(|d| d.abs()?.sum_all()?.to_scalar());
                    assert_eq!(difference.ok(), Some(0f32), "{name}");
                }
                break;
            }
        }
        assert!(legs > 20, "{legs} legs");
        std::fs::remove_file(path).expect("was just written");
    }
}

#[test]
fn evaluations_within_an_epoch_change_nothing_and_are_the_same_in_legs() {
    let awd = Awd { nonmono: None, ..regularized(2).awd };
    let recipe = Recipe { awd, average: 3, evaluations: 4, ..regularized(2) };
    let lines = |path: &Path| -> Vec<[serde_json::Value; 3]> {
        let text = std::fs::read_to_string(path).expect("was just written");
        let line = |line| serde_json::from_str::<serde_json::Value>(line).expect("JSON");
        text.lines().map(line).map(|line| ["epoch", "steps", "valid_nll"].map(|key| line[key].clone())).collect()
    };
    let (at_once, in_legs) = (temporary("at_once"), temporary("in_legs"));
    let mut whole = with_recipe(recipe);
    whole.run(None, Some(&at_once), None).expect("trains");
    let mut without = with_recipe(Recipe { evaluations: 1, ..recipe });
    without.run(None, None, None).expect("trains");
    assert_eq!(whole.history, without.history);

    let path = temporary("evaluations");
    for legs in 0.. {
        let mut session = with_recipe(recipe);
        if legs > 0 {
            session.restore(&load(&path)).expect("fits");
        }
        let leg = Leg { path: path.clone(), until: Instant::now() };
        if session.run(None, Some(&in_legs), Some(&leg)).expect("trains") {
            assert_eq!(session.history, whole.history);
            break;
        }
    }
    let lines = [&at_once, &in_legs].map(|path| lines(path));
    assert_eq!((lines[0].len(), &lines[0]), (8, &lines[1]));
    assert_eq!([lines[0][3][0].as_f64(), lines[0][7][0].as_f64()], [Some(1.0), Some(2.0)]);
    [at_once, in_legs, path].iter().for_each(|path| std::fs::remove_file(path).expect("was just written"));
}

#[test]
fn training_stops_when_patience_is_over() {
    let over = |patience, valid: &[f64]| {
        let awd = Awd { nonmono: None, ..regularized(9).awd };
        let mut session = with_recipe(Recipe { patience, awd, ..regularized(9) });
        session.history = valid.iter().map(|&valid| [valid, valid]).collect();
        session.is_over()
    };
    assert!(!over(2, &[]) && !over(2, &[1.0, 1.0]) && !over(2, &[3.0, 2.0, 1.0]) && !over(2, &[1.0, 3.0, 0.9]));
    assert!(over(2, &[1.0, 3.0, 2.0]) && over(2, &[1.0, 1.0, 1.0]) && over(1, &[1.0, 1.0]));
    assert!(!over(0, &[1.0; 5]));
}

#[test]
fn a_leg_of_another_training_is_an_error_that_names_the_difference() {
    let path = temporary("other_leg");
    let leg = Leg { path: path.clone(), until: Instant::now() };
    assert!(!with_recipe(regularized(2)).run(None, None, Some(&leg)).expect("pauses"));
    let restore = |recipe| with_recipe(recipe).restore(&load(&path)).expect_err("must fail").to_string();
    let error = restore(Recipe { bptt: 9, ..regularized(2) });
    assert!(error.contains("--bptt 8") && error.contains("--bptt 9"), "{error}");
    let awd = Awd { nonmono: None, ..regularized(2).awd };
    let error = restore(Recipe { average: 4, awd, ..regularized(2) });
    assert!(error.contains("--average 0") && error.contains("has 4"), "{error}");
    let error = restore(Recipe { finetune: true, ..regularized(2) });
    assert!(error.contains("without --finetune"), "{error}");
    std::fs::remove_file(path).expect("was just written");
}

#[test]
fn finetuning_leaves_a_model_that_is_better_than_it_gets() {
    let path = temporary("finetuning");
    let mut first = with_recipe(regularized(3));
    first.run(Some(&path), None, None).expect("trains");
    // Steps that are far too long.
    let awd = Awd { weight_decay: None, ..regularized(2).awd };
    let recipe = Recipe { finetune: true, lr: 300.0, clip: 0.0, awd, ..regularized(2) };
    let good = load(&path);
    // Onto the model itself, onto another one, and into a new file.
    let (other, new) = (temporary("finetuning_other"), temporary("finetuning_new"));
    with_recipe(regularized(1)).run(Some(&other), None, None).expect("trains");
    for to in [path, other, new] {
        let mut session = with_recipe(recipe);
        session.model.restore(&good).expect("the same sizes");
        let before = session.valid_nll().expect("evaluates");
        session.run(Some(&to), None, None).expect("trains");
        assert!(session.history.iter().all(|[_, valid]| *valid > before), "{before} {:?}", session.history);
        assert_eq!(session.valid_nll().expect("evaluates"), before, "the model that it got");
        let saved = with_recipe(recipe);
        saved.model.restore(&load(&to)).expect("the same sizes");
        assert_eq!(saved.valid_nll().expect("evaluates"), before, "the saved model");
        std::fs::remove_file(to).expect("was just written");
    }
}

#[test]
fn averaging_needs_sgd() {
    for recipe in [Recipe { finetune: true, ..Recipe::BASE }, Recipe { awd: regularized(1).awd, ..Recipe::BASE }] {
        let model = LanguageModel::new(HeadKind::Softmax, 23, InitialValues::Small, &recipe, &Device::Cpu);
        let session = Session::new(HeadKind::Softmax, model.expect("valid sizes"), data(99), &recipe);
        assert!(session.err().expect("Adam").to_string().contains("--optimizer sgd"));
    }
}

#[test]
fn small_batches_change_nothing_but_rounding() {
    let train = |small_batch| {
        let awd = Awd { small_batch, ar: Some(2.0), tar: Some(1.0), ..Awd::NONE };
        let mut session = with_recipe(Recipe { awd, ..regularized(1) });
        // 999 targets in 4 streams: the last one is padded, and the parts have different numbers of targets.
        session.run(None, None, None).expect("trains");
        session.history[0]
    };
    let (whole, parts) = (train(None), train(Some(3)));
    assert!((whole[0] - parts[0]).abs() < 1e-4 && (whole[1] - parts[1]).abs() < 1e-4, "{whole:?} {parts:?}");
}

#[test]
fn averaging_starts_when_the_validation_loss_no_longer_improves() {
    let recipe = Recipe { awd: Awd { nonmono: Some(2), ..Awd::NONE }, ..regularized(9) };
    let with_history = |valid: &[f64]| {
        let mut session = with_recipe(recipe);
        session.history = valid.iter().map(|&valid| [valid, valid]).collect();
        session
    };
    // The last two epochs do not count.
    assert!(!with_history(&[1.0, 1.0]).no_longer_improves(2.0));
    assert!(!with_history(&[3.0, 1.0, 1.0]).no_longer_improves(2.0));
    assert!(with_history(&[1.0, 3.0, 3.0]).no_longer_improves(2.0));
    let never = Recipe { awd: Awd::NONE, ..recipe };
    assert!(!Session { recipe: never, ..with_history(&[1.0; 5]) }.no_longer_improves(2.0));

    let mut session = with_history(&[0.1, 3.0, 3.0]);
    session.recipe.epochs = 4;
    session.run(None, None, None).expect("trains");
    assert!(session.optimizer.is_averaging());
    // Finetuning averages from the start and ends where the criterion holds.
    let mut session = with_history(&[0.1, 3.0, 3.0]);
    session.recipe.finetune = true;
    assert!(session.run(None, None, None).expect("trains") && session.history.len() == 4);
}
