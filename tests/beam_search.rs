//! Beam search against the enumeration of all sequences.

mod common;

use std::cell::RefCell;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor};
use common::on_each_device;
use common::values::{numbers, uniform};
use mos_head::decode::{BeamSearch, Hypothesis, TopK};
use mos_head::{Error, OutputLayer, Result, SoftmaxHead};

const VOCAB: usize = 5;
const WIDTH: usize = 6;
const END: u32 = 0;

/// Its ids without the end, log P, the score, and whether it is finished.
type Sequence = (Vec<u32>, f64, f64, bool);

/// A recurrent model, h <- tanh(A h + e(id)), whose state differs between all prefixes.
struct Model {
    recurrent: Tensor,
    embeddings: Tensor,
    head: SoftmaxHead,
}

impl Model {
    fn new(seed: u64, device: &Device) -> Result<Self> {
        let tensor = |shape: &[usize], bound: f64, i: u64| -> Result<Tensor> {
            Ok(uniform(shape, bound, 3 * seed + i)?.to_dtype(DType::F32)?.to_device(device)?)
        };
        Ok(Model {
            recurrent: tensor(&[WIDTH, WIDTH], 0.9, 0)?,
            embeddings: tensor(&[VOCAB, WIDTH], 1.5, 1)?,
            head: SoftmaxHead::from_tensors(tensor(&[VOCAB, WIDTH], 1.2, 2)?, None)?,
        })
    }

    fn next(&self, tokens: &Tensor, state: &Tensor) -> Result<Tensor> {
        Ok((state.matmul(&self.recurrent)? + self.embeddings.index_select(tokens, 0)?)?.tanh()?)
    }

    fn search(&self, search: &BeamSearch, start: &[u32]) -> Result<Vec<Vec<Hypothesis>>> {
        let device = self.embeddings.device();
        let mut state = Tensor::zeros((start.len(), WIDTH), DType::F32, device)?;
        search.run(&self.head, &Tensor::new(start, device)?, |tokens, parents| {
            state = self.next(tokens, &state.index_select(parents, 0)?)?;
            Ok(state.clone())
        })
    }

    /// log P of the ids after `start`, one after another.
    fn log_prob(&self, start: u32, ids: &[u32]) -> Result<f64> {
        let device = self.embeddings.device();
        let mut state = Tensor::zeros((1, WIDTH), DType::F32, device)?;
        let mut sum = 0.0;
        for (&last, &id) in [&[start], ids].concat().iter().zip(ids) {
            state = self.next(&Tensor::new(&[last], device)?, &state)?;
            sum += numbers(&self.head.log_probs(&state)?)[id as usize];
        }
        Ok(sum)
    }

    /// All sequences of at most `length` ids, the best first. Those of fewer than `least` ids do not end.
    fn all(&self, start: u32, ends: &[u32], (least, length): (usize, usize), alpha: f64) -> Result<Vec<Sequence>> {
        let penalty = |n: usize| ((5.0 + n as f64) / 6.0).powf(alpha);
        let (mut found, mut open) = (Vec::new(), vec![vec![]]);
        for n in 1..=length {
            let mut next = Vec::new();
            for prefix in open {
                for id in (0..VOCAB as u32).filter(|id| n >= least || !ends.contains(id)) {
                    let ids = [&prefix[..], &[id]].concat();
                    let is_end = ends.contains(&id);
                    if is_end || n == length {
                        let log_prob = self.log_prob(start, &ids)?;
                        let tokens = if is_end { prefix.clone() } else { ids };
                        found.push((tokens, log_prob, log_prob / penalty(n), is_end));
                    } else {
                        next.push(ids);
                    }
                }
            }
            open = next;
        }
        found.sort_by(|a, b| b.2.total_cmp(&a.2));
        Ok(found)
    }
}

on_each_device! {
    fn a_beam_that_holds_all_prefixes_finds_the_best_of_all_sequences(device: &Device) -> Result<()> {
        // Many thousands of small calls; a GPU synchronizes after each.
        for seed in 0..if device.is_cpu() { 4 } else { 1 } {
            for (alpha, ends, least) in
                [(0.0, &[END][..], 1), (0.6, &[END], 1), (2.0, &[END], 1), (0.6, &[END, 3], 1), (0.3, &[END, 2, 3], 3)]
            {
                let model = Model::new(seed, device)?;
                let search = BeamSearch::new(END).with_width(300).with_max_length(4).with_n_best(12);
                let search = search.with_ends(ends).with_min_length(least);
                let found = model.search(&search.with_length_penalty(alpha), &[1, 3])?;
                for (start, found) in [1, 3].into_iter().zip(found) {
                    let all = model.all(start, ends, (least, 4), alpha)?;
                    assert_eq!(found.len(), 12);
                    for (got, (tokens, log_prob, score, finished)) in found.iter().zip(&all) {
                        assert_abs_diff_eq!(got.score, *score, epsilon = 1e-4);
                        assert_abs_diff_eq!(got.log_prob, model.log_prob_of(start, got)?, epsilon = 1e-4);
                        if all.iter().filter(|other| (other.2 - score).abs() < 1e-4).count() == 1 {
                            assert_eq!((&got.token_ids, got.finished), (tokens, *finished));
                            assert_abs_diff_eq!(got.log_prob, *log_prob, epsilon = 1e-4);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn a_narrow_beam_reports_the_true_probabilities_of_its_hypotheses(device: &Device) -> Result<()> {
        for seed in 0..20 {
            let model = Model::new(seed, device)?;
            let starts: Vec<u32> = (0..VOCAB as u32).collect();
            let search = BeamSearch::new(END).with_width(3).with_max_length(12).with_n_best(3).with_length_penalty(0.7);
            for (&start, found) in starts.iter().zip(model.search(&search, &starts)?) {
                assert_eq!(found.len(), 3);
                assert!(found.windows(2).all(|pair| pair[0].score >= pair[1].score));
                for hypothesis in found {
                    assert_abs_diff_eq!(hypothesis.log_prob, model.log_prob_of(start, &hypothesis)?, epsilon = 1e-4);
                    let length = hypothesis.token_ids.len() + usize::from(hypothesis.finished);
                    let penalty = ((5.0 + length as f64) / 6.0).powf(0.7);
                    assert_abs_diff_eq!(hypothesis.score, hypothesis.log_prob / penalty, epsilon = 1e-9);
                    assert!(length <= 12 && !hypothesis.token_ids.contains(&END));
                }
            }
        }
        Ok(())
    }

    fn a_batch_finds_what_each_sequence_finds_alone(device: &Device) -> Result<()> {
        for seed in 0..5 {
            let model = Model::new(seed, device)?;
            let search = BeamSearch::new(END).with_width(4).with_max_length(9).with_n_best(2);
            let together = model.search(&search, &[4, 1, 2, 1])?;
            for (start, found) in [4, 1, 2, 1].into_iter().zip(together) {
                let alone = model.search(&search, &[start])?.remove(0);
                for (a, b) in found.iter().zip(&alone) {
                    assert_eq!(a.token_ids, b.token_ids);
                    assert_abs_diff_eq!(a.log_prob, b.log_prob, epsilon = 1e-5);
                }
            }
        }
        Ok(())
    }

    fn width_one_is_greedy(device: &Device) -> Result<()> {
        for seed in 0..10 {
            let model = Model::new(seed, device)?;
            let found = model.search(&BeamSearch::new(END).with_width(1).with_max_length(8), &[2])?.remove(0).remove(0);
            let mut state = Tensor::zeros((1, WIDTH), DType::F32, device)?;
            let (mut id, mut ids) = (2u32, Vec::new());
            for _ in 0..8 {
                state = model.next(&Tensor::new(&[id], device)?, &state)?;
                id = model.head.argmax(&state)?.to_vec1::<u32>()?[0];
                if id == END {
                    break;
                }
                ids.push(id);
            }
            assert_eq!(found.token_ids, ids);
            assert_eq!(found.finished, id == END);
        }
        Ok(())
    }

    fn an_end_at_the_first_position_takes_one_step(device: &Device) -> Result<()> {
        let head = SoftmaxHead::from_tensors(Tensor::new(&[[9f32], [0.], [0.]], device)?, None)?;
        let steps = RefCell::new(0);
        let start = Tensor::new(&[1u32, 2], device)?;
        let found = BeamSearch::new(0).with_width(3).run(&head, &start, |tokens, _| -> Result<Tensor> {
            *steps.borrow_mut() += 1;
            Ok(Tensor::ones((tokens.dim(0)?, 1), DType::F32, device)?)
        })?;
        assert_eq!(*steps.borrow(), 1);
        for found in found {
            assert!(found.len() == 1 && found[0].token_ids.is_empty() && found[0].finished && found[0].log_prob > -1e-3);
        }
        Ok(())
    }

    /// The ends that come too early are the most probable ids, and as many as there are more ids than the beam is wide.
    fn early_ends_leave_room_for_other_ids(device: &Device) -> Result<()> {
        let head = SoftmaxHead::from_tensors(Tensor::new(&[[9f32], [8.], [7.], [1.], [0.]], device)?, None)?;
        for width in [1, 2] {
            let search = BeamSearch::new(0).with_ends(&[0, 1, 2]).with_min_length(3).with_width(width);
            let found = search.run(&head, &Tensor::new(&[4u32], device)?, |tokens, _| -> Result<Tensor> {
                Ok(Tensor::ones((tokens.dim(0)?, 1), DType::F32, device)?)
            })?;
            assert_eq!((&found[0][0].token_ids[..], found[0][0].end), (&[3, 3][..], Some(0)));
        }
        Ok(())
    }

    fn impossible_ids_are_never_found(device: &Device) -> Result<()> {
        // Only id 2 is possible, and it is not the end.
        let weight = Tensor::new(&[[f32::NEG_INFINITY], [f32::NEG_INFINITY], [1.0], [f32::NEG_INFINITY]], device)?;
        let head = SoftmaxHead::from_tensors(weight, None)?;
        let search = BeamSearch::new(0).with_width(3).with_n_best(3).with_max_length(5);
        let found = search.run(&head, &Tensor::new(&[2u32], device)?, |tokens, _| -> Result<Tensor> {
            Ok(Tensor::ones((tokens.dim(0)?, 1), DType::F32, device)?)
        })?;
        assert_eq!(found[0].len(), 1);
        assert_eq!(found[0][0].token_ids, [2; 5]);
        assert!(!found[0][0].finished && found[0][0].log_prob == 0.0);
        Ok(())
    }

    fn an_empty_batch_takes_no_step(device: &Device) -> Result<()> {
        let model = Model::new(1, device)?;
        let start = Tensor::zeros(0, DType::U32, device)?;
        let found = BeamSearch::new(END).run(&model.head, &start, |_, _| -> Result<Tensor> { panic!("a step") })?;
        assert!(found.is_empty());
        Ok(())
    }

    fn any_width_is_accepted(device: &Device) -> Result<()> {
        let model = Model::new(1, device)?;
        let found = model.search(&BeamSearch::new(END).with_width(usize::MAX).with_max_length(2), &[1])?;
        assert_eq!(found[0].len(), 1);
        Ok(())
    }

    fn bad_arguments_are_named(device: &Device) -> Result<()> {
        let model = Model::new(1, device)?;
        let beam_search = || BeamSearch::new(END);
        for (search, argument) in [
            (beam_search().with_width(0), "width"),
            (beam_search().with_max_length(0), "max_length"),
            (beam_search().with_n_best(0), "n_best"),
            (beam_search().with_width(2).with_n_best(3), "n_best"),
            (beam_search().with_length_penalty(-1.0), "length_penalty"),
            (beam_search().with_max_length(2).with_min_length(3), "min_length"),
            (BeamSearch::new(VOCAB as u32), "ends"),
        ] {
            let error = model.search(&search, &[1]).expect_err("out of range");
            assert!(matches!(error, Error::Config { argument: got, .. } if got == argument), "{error:?}");
        }
        let start = Tensor::new(&[1u32, 2], device)?;
        let hidden = Tensor::zeros((3, WIDTH), DType::F32, device)?;
        let error = beam_search().run(&model.head, &start, |_, _| Ok::<_, Error>(hidden.clone()));
        let error = error.expect_err("three rows for two");
        assert!(error.to_string().contains("hidden: expected shape [2, hidden], got [3, 6]"), "{error}");
        let error = beam_search().run(&model.head, &start.unsqueeze(0)?, |_, _| Ok::<_, Error>(hidden.clone()));
        assert!(matches!(error, Err(Error::Shape { argument: "start", .. })));
        let negative = Tensor::new(&[1i64, -1], device)?;
        let error = beam_search().run(&model.head, &negative, |_, _| Ok::<_, Error>(hidden.clone()));
        let message = error.expect_err("no token id").to_string();
        assert_eq!(message, "start: expected token ids, which fit u32, got -1 at index 1");
        let found = beam_search().search(VOCAB, &start, |tokens, _, k| {
            let log_probs = Tensor::zeros((tokens.dim(0)?, VOCAB), DType::F32, tokens.device())?;
            let mut top = TopK::from_log_probs(&log_probs, k)?;
            top.log_probs = top.log_probs.narrow(0, 0, 1)?;
            Ok::<_, Error>(top)
        });
        assert!(matches!(found, Err(Error::Shape { argument: "log_probs", .. })));
        let bad_row = |bad: f32, dtype: DType| {
            let found = beam_search().search(VOCAB, &start, |tokens, _, k| {
                let log_probs = Tensor::full(-2f32, (tokens.dim(0)?, VOCAB), tokens.device())?;
                let mut top = TopK::from_log_probs(&log_probs, k)?;
                let log_probs = Tensor::new(&[[-1f32, -1.0, -1.0], [-1.0, bad, f32::NEG_INFINITY]], tokens.device())?;
                top.token_ids = Tensor::new(&[[1u32, 2, 3], [3, 4, 0]], tokens.device())?;
                top.log_probs = log_probs.to_dtype(dtype)?;
                Ok::<_, Error>(top)
            });
            found.map(|_| ())
        };
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(matches!(bad_row(bad, DType::F32), Err(Error::Distribution { position: 1 })));
        }
        let error = bad_row(3.75, DType::F32).expect_err("no log-probability");
        let expected = "log_probs: expected log-probabilities, at most 0, got 3.75 at index 4 of position 1";
        assert_eq!(error.to_string(), expected, "the index is the token id");
        assert!(bad_row(0.01, DType::F32).is_err());
        let floats = start.to_dtype(DType::F32)?;
        let error = beam_search().run(&model.head, &floats, |_, _| Ok::<_, Error>(hidden.clone()));
        assert!(matches!(error, Err(Error::DType { argument: "start", got: DType::F32, .. })));
        let failing = beam_search().run(&model.head, &start, |_, _| Err(Error::from(candle_core::Error::Msg("mine".into()))));
        assert!(failing.expect_err("the step failed").to_string().contains("mine"));
        Ok(())
    }
}

impl Model {
    fn log_prob_of(&self, start: u32, hypothesis: &Hypothesis) -> Result<f64> {
        assert_eq!(hypothesis.end.is_some(), hypothesis.finished);
        self.log_prob(start, &[&hypothesis.token_ids[..], hypothesis.end.as_slice()].concat())
    }
}
