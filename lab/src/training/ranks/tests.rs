use super::super::recipe::Recipe;
use super::*;
use crate::data::Data;
use crate::layers::{Checkpoint, HeadKind};
use crate::training::{Awd, InitialValues, LanguageModel, Leg, OptimizerKind, Session};
use candle_core::Device;
use std::time::Instant;

#[path = "../../../../tests/common/ranks.rs"]
mod threads;

/// Returns a recipe with everything that is random, in four parts of seven streams, the last one smaller.
fn recipe() -> Recipe {
    let awd = Awd { small_batch: Some(2), ..Awd::RANDOM };
    let optimizer = OptimizerKind::Sgd;
    let (hidden, context, batch, bptt, layers, lr) = (6, Some(5), 7, 8, 2, 0.5);
    Recipe { awd, epochs: 2, optimizer, hidden, context, batch, bptt, layers, lr, seed: 3, ..Recipe::BASE }
}

fn session(recipe: &Recipe, ranks: &Ranks) -> Session<LanguageModel> {
    // The squares modulo 23: the next id depends on the last two.
    let text = |targets: u32| (0..=targets).map(|i| i * i % 23).collect();
    let data = Data::new("squares".into(), ["a", "b"], text(999), text(111));
    let model = LanguageModel::new(HeadKind::Mos, 23, InitialValues::Small, recipe, &Device::Cpu).unwrap();
    Session::new(HeadKind::Mos, model, data, recipe).unwrap().with_ranks(ranks)
}

/// Runs a function on `count` threads, each a rank, and returns the results.
fn on_ranks<T: Send>(count: usize, run: impl Fn(&Ranks) -> T + Sync) -> Vec<T> {
    threads::on_ranks(count, |collectives| run(&Ranks::new(collectives)))
}

/// The NLLs and the variables at the end of training.
type Trained = (Vec<[f64; 2]>, Vec<f32>);

fn trained(session: &Session<LanguageModel>) -> Trained {
    let mut tensors: Vec<_> = session.checkpoint().unwrap().tensors.into_iter().collect();
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    let values = tensors.iter().flat_map(|(_, tensor)| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    (session.history.clone(), values.collect())
}

fn train(recipe: &Recipe, ranks: &Ranks) -> Trained {
    let mut session = session(recipe, ranks);
    assert!(session.run(None, None, None).unwrap());
    trained(&session)
}

fn assert_near(found: &Trained, expected: &Trained, what: &str) {
    let nlls = |trained: &Trained| trained.0.concat();
    let values = |trained: &Trained| trained.1.iter().map(|&value| f64::from(value)).collect();
    for (found, expected) in [(nlls(found), nlls(expected)), (values(found), values(expected))] {
        assert_eq!(found.len(), expected.len(), "{what}");
        for (a, b) in found.iter().zip(&expected) {
            assert!((a - b).abs() < 1e-5, "{what}: {a} {b}");
        }
    }
}

#[test]
fn any_number_of_ranks_trains_as_one_process() {
    let one = train(&recipe(), &Ranks::default());
    assert_eq!(one.0.len(), 2);
    let others = Recipe { seed: 4, ..recipe() };
    assert!((one.0[0][0] - train(&others, &Ranks::default()).0[0][0]).abs() > 1e-3, "other masks are other NLLs");
    for count in 1..=4 {
        let ranks = on_ranks(count, |ranks| train(&recipe(), ranks));
        assert_near(&ranks[0], &one, &format!("{count} ranks"));
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{count} ranks have the same bits");
    }
}

#[test]
fn legs_of_different_numbers_of_ranks_equal_training_at_once() {
    let one = train(&recipe(), &Ranks::default());
    let path = std::env::temp_dir().join(format!("ranks_{}.safetensors", std::process::id()));
    // The time is up after one step.
    let leg = |ranks: &Ranks| {
        let mut session = session(&recipe(), ranks);
        if path.exists() {
            session.restore(&Checkpoint::load(&path, &Device::Cpu).unwrap()).unwrap();
        }
        let leg = Leg { path: path.clone(), until: Instant::now() };
        session.run(None, None, Some(&leg)).unwrap().then(|| trained(&session))
    };
    for legs in 1.. {
        let end = on_ranks(legs % 4 + 1, leg).swap_remove(0);
        if let Some(end) = end {
            assert!(legs > 20, "{legs} legs");
            assert_near(&end, &one, "legs");
            break;
        }
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_batch_has_a_part_for_every_rank() {
    let divided = |batch, small_batch, count| {
        let recipe = Recipe { batch, awd: Awd { small_batch, ..Awd::NONE }, ..Recipe::BASE };
        let small_batch = |ranks: &Ranks| recipe.divided(ranks).map(|r| r.awd.small_batch).map_err(|e| e.to_string());
        on_ranks(count, small_batch).swap_remove(0)
    };
    assert_eq!(divided(20, None, 1), Ok(None));
    assert_eq!(divided(20, None, 3), Ok(Some(7)));
    assert_eq!(divided(20, Some(4), 5), Ok(Some(4)));
    assert_eq!(divided(5, None, 4), Ok(Some(1)));
    for (batch, small_batch, count, parts) in [(20, Some(5), 5, "4 parts of --small-batch 5"), (3, None, 4, "3 parts")]
    {
        let error = divided(batch, small_batch, count).unwrap_err();
        assert!(error.contains(parts) && error.contains(&format!("{count} processes")), "{error}");
    }
}

#[test]
fn every_part_has_one_owner() {
    for (count, parts) in [(1, 1), (2, 5), (3, 4), (4, 4), (4, 3)] {
        let owned = on_ranks(count, |ranks| ranks.own(parts));
        assert_eq!(owned.iter().cloned().flatten().collect::<Vec<_>>(), (0..parts).collect::<Vec<_>>());
        assert!(owned.iter().all(|own| own.len() <= parts.div_ceil(count)), "{owned:?}");
    }
}
