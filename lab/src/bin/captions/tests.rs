//! Tests of whole trainings.

use crate::data::{pairs, Dataset, Example, Pair};
use crate::model::{Captioner, Setting};
use crate::{picture, report::Trained, score::score};
use candle_core::{Device, Tensor};
use lab::data::words::{Words, PAD};
use lab::layers::{init, Checkpoint, HeadKind};
use lab::training::{heads::Outcome, Model, Recipe, Session};
use mos_head::decode::BeamSearch;
use mos_head::LossOptions;

const RECIPE: Recipe = Recipe { components: 2, hidden: 24, batch: 12, lr: 0.01, decay: 0.8, seed: 3, ..Recipe::BASE };

fn session(kind: HeadKind, dataset: &Dataset, blind: bool, recipe: &Recipe) -> Session<Captioner> {
    let texts = dataset.train.iter().flat_map(|example| example.captions.iter().map(String::as_str));
    let setting = Setting { images: dataset.images.clone(), words: Words::from_texts(texts, 1, &[]), blind };
    let data = dataset.encode(&setting.words).unwrap();
    let model = Captioner::new(kind, setting, recipe, &Device::Cpu).unwrap();
    Session::new(kind, model, data, recipe).unwrap()
}

/// Makes images with one of four features at each of two positions, and captions that name both, in either order.
fn features() -> Dataset {
    let names = ["circle", "square", "ring", "cross"];
    let (mut values, mut examples) = (vec![], vec![]);
    for image in 0..160 {
        let [first, second] = [image * 7 % 4, image * 5 / 4 % 4];
        for chosen in [first, second] {
            values.extend((0..4).map(|i| if i == chosen { 1f32 } else { 0.0 }));
        }
        let [a, b] = [first, second].map(|i| names[i]);
        let captions = vec![format!("a {a} left of a {b}"), format!("a {b} right of a {a}")];
        examples.push(Example { image, captions });
    }
    let images = Tensor::from_vec(values, (160, 2, 4), &Device::Cpu).unwrap();
    let test = examples.split_off(140);
    let valid = examples.split_off(120);
    Dataset { name: "two features".into(), images, train: examples, valid, test, scenes: None }
}

#[test]
fn seeing_beats_blind_in_every_score() {
    let dataset = features();
    for kind in HeadKind::ALL {
        let scores = [false, true].map(|blind| {
            let mut session =
                session(kind, &dataset, blind, &Recipe { epochs: 25, decay: 0.95, context: Some(12), ..RECIPE });
            session.run(None, None, None).unwrap();
            let search = BeamSearch::new(lab::data::words::END).with_width(4).with_max_length(10);
            score(&session, &dataset, &dataset.test, &search).unwrap()
        });
        let [seeing, blind] = scores;
        // The order alone is one of two in six words and an end; the names are two of four.
        let floor = 2f64.ln() / 7.0;
        assert!(seeing.nll < floor + 0.1 && blind.nll > floor + 0.3, "{kind:?} {} {}", seeing.nll, blind.nll);
        assert!(seeing.bleu > 90.0 && blind.bleu < 70.0, "{kind:?} {} {}", seeing.bleu, blind.bleu);
        assert!(seeing.cider > 2.0 * blind.cider, "{kind:?} {} {}", seeing.cider, blind.cider);
    }
}

#[test]
fn every_variable_gets_a_gradient_and_a_blind_model_has_as_many() {
    let dataset = Dataset::drawn(4, 1, &Device::Cpu).unwrap();
    for kind in HeadKind::ALL {
        let gradients = |blind| {
            let session = session(kind, &dataset, blind, &Recipe { layers: 2, context: Some(8), ..RECIPE });
            let (model, pairs) = (session.model, session.data.train);
            let forward = model.forward(&pairs, &vec![0, 7, 13], &mut (), None).unwrap();
            let options = LossOptions::new().with_ignore_index(i64::from(PAD));
            let gradients = model.head().loss(&forward.hidden, &forward.targets, &options).unwrap().backward().unwrap();
            let sum = |var: &candle_core::Var| {
                let gradient = gradients.get(var)?;
                Some(gradient.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap())
            };
            let sums = init::sorted(model.varmap()).into_iter().map(|(name, var)| (name, sum(&var)));
            (sums.collect::<Vec<_>>(), model.parameters())
        };
        let ((seeing, parameters), (blind, blind_parameters)) = (gradients(false), gradients(true));
        assert!(seeing.iter().all(|(_, sum)| sum.is_some_and(|sum| sum > 0.0)), "{kind:?} {seeing:?}");
        assert_eq!(parameters, blind_parameters);
        let without: Vec<&str> = blind.iter().filter(|(_, sum)| sum.is_none()).map(|(name, _)| name.as_str()).collect();
        assert!(without.len() == 6 && without.iter().all(|name| name.starts_with("encoder.conv")), "{without:?}");
    }
}

#[test]
fn models_of_all_heads_have_as_many_parameters() {
    let dataset = Dataset::drawn(300, 1, &Device::Cpu).unwrap();
    let setting = session(HeadKind::Softmax, &dataset, false, &RECIPE).model.setting;
    for recipe in [Recipe { components: 9, hidden: 96, ..RECIPE }, Recipe { layers: 2, hidden: 64, ..RECIPE }] {
        let [softmax, moc, mos] = HeadKind::ALL.map(|kind| {
            let recipe = Captioner::equal(kind, &setting, &recipe, &Device::Cpu).unwrap();
            let model = Captioner::new(kind, setting.clone(), &recipe, &Device::Cpu).unwrap();
            model.parameters()
        });
        assert_eq!(moc, mos);
        assert!((mos as f64 / softmax as f64 - 1.0).abs() < 0.015, "{softmax} {mos}");
    }
}

#[test]
fn a_blind_model_says_the_same_of_all_images() {
    let dataset = Dataset::drawn(20, 1, &Device::Cpu).unwrap();
    let nlls = |blind| {
        let session = session(HeadKind::Mos, &dataset, blind, &RECIPE);
        let caption = session.data.train[0].caption.clone();
        let nll = |image| session.evaluate(&[Pair { image, caption: caption.clone() }]).unwrap();
        [nll(0), nll(1)]
    };
    let ([first, second], [seen, other]) = (nlls(true), nlls(false));
    assert_eq!(first, second);
    assert_ne!(seen, other);
}

#[test]
fn resumed_training_equals_uninterrupted_training() {
    let dataset = Dataset::drawn(30, 1, &Device::Cpu).unwrap();
    let recipe = |epochs| Recipe { epochs, dropout: 0.2, ..RECIPE };
    let session = |epochs| session(HeadKind::Mos, &dataset, false, &recipe(epochs));
    let mut whole = session(2);
    whole.run(None, None, None).unwrap();
    let mut first = session(1);
    first.run(None, None, None).unwrap();
    let mut second = session(2);
    second.restore(&first.checkpoint().unwrap()).unwrap();
    second.run(None, None, None).unwrap();
    assert_eq!(second.history, whole.history);

    let checkpoint: Checkpoint = whole.checkpoint().unwrap();
    let mut blind = self::session(HeadKind::Mos, &dataset, true, &recipe(2));
    let error = blind.restore(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("--blind"), "{error}");
    let others =
        Dataset { images: dataset.images.ones_like().unwrap(), ..Dataset::drawn(30, 1, &Device::Cpu).unwrap() };
    let error = self::session(HeadKind::Mos, &others, false, &recipe(2)).restore(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("digest"), "other images: {error}");
    let words = &whole.model.setting.words;
    assert_eq!(pairs(&dataset.valid, words).len(), 5 * dataset.valid.len());
}

#[test]
fn a_picture_has_the_images_the_captions_found_and_a_reference() {
    let dataset = Dataset::drawn(10, 1, &Device::Cpu).unwrap();
    let session = session(HeadKind::Mos, &dataset, false, &RECIPE);
    let search = BeamSearch::new(lab::data::words::END).with_width(2).with_max_length(6);
    let mut scores = score(&session, &dataset, &dataset.test, &search).unwrap();
    scores.found[1] = "what was found".into();
    let row = Outcome {
        kind: HeadKind::Mos,
        parameters: 1,
        history: vec![],
        valid_nll: 1.0,
        diverged: None,
        tokens_per_second: None,
        more: Some(Trained::new(&session, &RECIPE, scores, None)),
    };
    let path = std::env::temp_dir().join(format!("captions_{}.svg", std::process::id()));
    picture::check(&path).unwrap();
    let two = [dataset.test[0].clone(), dataset.test[1].clone()];
    picture::draw(&path, &dataset, &two, 2, &[row]).unwrap();
    let svg = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(svg.contains("what was found") && two.iter().all(|example| svg.contains(&example.captions[0])));
    // The background, and the pixels of both images.
    let pixels = dataset.images.dims()[1..3].iter().product::<usize>();
    assert_eq!(svg.matches("<rect").count(), 1 + 2 * pixels);
    let error = picture::check(&path.join("nowhere.svg")).unwrap_err().to_string();
    assert!(error.contains("--picture") && error.contains("nowhere.svg"), "{error}");
}
