//! Texts from verified drafts are those that plain sampling draws, to the bit.

mod common;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use common::values::{fill, tensor};
use mos_head::decode::{Constraints, NextToken, Sampling, TokenRequest, Verified};
use mos_head::parts::LowRankAdapter;
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax};
use mos_head::{Error, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Result, SoftmaxConfig, SoftmaxHead};
use rand::{rngs::StdRng, Rng, SeedableRng};

const HIDDEN: usize = 24;
const VOCAB: usize = 1021;
const LENGTH: usize = 40;
const MOST_DRAFTS: usize = 6;

/// A language model whose hidden state is a function of the last two token ids.
struct Model(Vec<f32>);

impl Model {
    fn new() -> Result<Self> {
        Ok(Model(tensor(&[VOCAB, HIDDEN], 7, DType::F32)?.flatten_all()?.to_vec1()?))
    }

    /// The hidden states after each of these texts, `[texts, hidden]`.
    fn hidden<'a>(&self, texts: impl IntoIterator<Item = &'a [u32]>) -> Result<Tensor> {
        let mut states = Vec::new();
        for text in texts {
            let row = |back: usize| {
                let id = text.len().checked_sub(back).map_or(0, |place| text[place] as usize);
                &self.0[id * HIDDEN..(id + 1) * HIDDEN]
            };
            states.extend(row(1).iter().zip(row(2)).map(|(last, before)| last + 0.5 * before));
        }
        let texts = states.len() / HIDDEN;
        Ok(Tensor::from_vec(states, (texts, HIDDEN), &Device::Cpu)?)
    }

    /// Plain sampling: the tokens that each request draws step by step.
    fn sample(&self, head: &dyn OutputLayer, mut requests: Vec<TokenRequest>) -> Result<Vec<Vec<NextToken>>> {
        let mut tokens = vec![Vec::new(); requests.len()];
        for _ in 0..LENGTH + MOST_DRAFTS {
            let texts: Vec<Vec<u32>> = tokens.iter().map(|tokens| ids(tokens)).collect();
            let hidden = self.hidden(texts.iter().map(|text| &text[..]))?;
            let drawn = head.next_tokens(&hidden, &requests.iter().collect::<Vec<_>>())?;
            for ((request, tokens), token) in requests.iter_mut().zip(&mut tokens).zip(drawn) {
                request.push(token.token_id);
                tokens.push(token);
            }
        }
        Ok(tokens)
    }

    /// Verifies these drafts after each text.
    fn verify(
        &self,
        head: &dyn OutputLayer,
        texts: &[Vec<u32>],
        drafts: &[Vec<u32>],
        requests: &mut [TokenRequest],
    ) -> Result<Vec<Verified>> {
        let rows = texts
            .iter()
            .zip(drafts)
            .flat_map(|(text, drafts)| (0..=drafts.len()).map(move |n| [&text[..], &drafts[..n]].concat()));
        let rows: Vec<Vec<u32>> = rows.collect();
        let drafts: Vec<&[u32]> = drafts.iter().map(|drafts| &drafts[..]).collect();
        head.verify(
            &self.hidden(rows.iter().map(|row| &row[..]))?,
            &drafts,
            &mut requests.iter_mut().collect::<Vec<_>>(),
        )
    }
}

fn ids(tokens: &[NextToken]) -> Vec<u32> {
    tokens.iter().map(|token| token.token_id).collect()
}

fn heads() -> Result<Vec<Box<dyn OutputLayer>>> {
    let vars = VarMap::new();
    let vb = |name: &str| VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp(name);
    let adapter =
        LowRankAdapter::from_tensors(tensor(&[2, HIDDEN], 8, DType::F32)?, tensor(&[VOCAB, 2], 9, DType::F32)?, 0.1)?;
    let softmax = SoftmaxHead::new(&SoftmaxConfig::new(HIDDEN, VOCAB), vb("softmax"))?;
    let mixture = MixtureConfig::new(HIDDEN, VOCAB, 4).with_context_dim(16);
    let heads: Vec<Box<dyn OutputLayer>> = vec![
        Box::new(softmax.clone().with_adapter(adapter)?),
        Box::new(MixtureOfSoftmaxes::new(&mixture, vb("mixture"))?),
        Box::new(AdaptiveSoftmax::new(&AdaptiveConfig::new(HIDDEN, VOCAB, vec![60, 300]), vb("adaptive"))?),
        Box::new(Restricted::new(softmax, AllowedIds::new(&(0..VOCAB as u32).step_by(3).collect::<Vec<_>>()))?),
    ];
    fill(&vars, 0.6)?;
    Ok(heads)
}

fn softmax() -> Result<SoftmaxHead> {
    SoftmaxHead::from_tensors(tensor(&[VOCAB, HIDDEN], 3, DType::F32)?, None)
}

fn samplings() -> [Sampling; 4] {
    [
        Sampling::new(),
        Sampling::greedy(),
        Sampling::new().with_temperature(0.8).with_top_p(0.95),
        Sampling::new().with_top_k(40),
    ]
}

/// Requests with constraints of every kind, some of which depend on the text.
fn request(number: u64, sampling: &Sampling) -> Result<TokenRequest> {
    let constraints = match number % 7 {
        0 => Constraints::new(),
        1 => Constraints::new().with_repetition_penalty(1.3).with_bias(&[(5, 1.5)]),
        2 => Constraints::new().with_frequency_penalty(0.4).with_presence_penalty(0.2),
        3 => Constraints::new().with_banned(&[0, 3, 6, 1020]),
        4 => Constraints::new().with_repetition_penalty(1.5).with_frequency_penalty(0.3).with_penalty_window(4),
        5 => Constraints::new().with_logits_processor(|text, z| {
            z[text[text.len() - 1] as usize] -= 1.0;
            z[text.len() % 9] += 2.0;
        }),
        _ => Constraints::new().with_processor(|first, z| {
            z.iter_mut().zip(first..).filter(|(_, id)| id % 2 == 0).for_each(|(z, _)| *z += 0.7);
        }),
    };
    let request = TokenRequest::new(sampling.clone(), number)?.with_prompt(&[3, 9]);
    Ok(request.with_constraints(constraints)?.with_best(2).with_entropy(true))
}

#[test]
fn a_thousand_texts_equal_plain_sampling() -> Result<()> {
    let model = Model::new()?;
    let mut rng = StdRng::seed_from_u64(1);
    let (mut accepted, mut drafted) = (0, 0);
    for (kind, head) in heads()?.iter().enumerate() {
        let samplings = samplings();
        let requests = (0..250).map(|i| request(1000 * kind as u64 + i, &samplings[i as usize % 4]));
        let mut requests = requests.collect::<Result<Vec<_>>>()?;
        let plain = model.sample(head, requests.clone())?;
        let mut texts: Vec<Vec<NextToken>> = vec![Vec::new(); requests.len()];
        while texts.iter().any(|text| text.len() < LENGTH) {
            // Texts that are complete leave the batch.
            let live: Vec<usize> = (0..texts.len()).filter(|&i| texts[i].len() < LENGTH).collect();
            let mut drafts = Vec::new();
            for &i in &live {
                let n = rng.random_range(0..MOST_DRAFTS);
                let right = plain[i][texts[i].len()..].iter().take(n).map(|token| token.token_id);
                let draft = |id| if rng.random_bool(0.75) { id } else { rng.random_range(0..VOCAB as u32) };
                drafts.push(right.map(draft).collect::<Vec<u32>>());
            }
            let before: Vec<Vec<u32>> = live.iter().map(|&i| ids(&texts[i])).collect();
            let mut own: Vec<TokenRequest> = live.iter().map(|&i| requests[i].clone()).collect();
            let verified = model.verify(head, &before, &drafts, &mut own)?;
            assert_eq!(verified.len(), live.len());
            for (((&i, request), verified), drafts) in live.iter().zip(own).zip(verified).zip(&drafts) {
                let Verified { tokens, accepted: n, .. } = verified;
                assert_eq!(tokens.len(), n + 1);
                assert_eq!(ids(&tokens[..n]), drafts[..n], "what is accepted is the drafts");
                assert!(n == drafts.len() || tokens[n].token_id != drafts[n], "the first that differs ends it");
                (accepted, drafted) = (accepted + n, drafted + drafts.len());
                texts[i].extend(tokens);
                requests[i] = request;
                assert_eq!(requests[i].generated(), texts[i].len() as u64);
            }
        }
        for (number, (text, plain)) in texts.iter().zip(&plain).enumerate() {
            // Ids, log-probabilities, the best ids and the entropy, to the bit.
            assert_eq!(text[..], plain[..text.len()], "head {kind}, text {number}");
        }
    }
    // Three quarters of the drafts are right, and those after a wrong one are not looked at.
    assert!(drafted > 30_000 && (0.5..0.7).contains(&(f64::from(accepted as u32) / f64::from(drafted as u32))));
    Ok(())
}

/// The lowest of ids that are equally probable is drawn, and a draft of another is rejected.
#[test]
fn the_lowest_of_equally_probable_ids_is_verified() -> Result<()> {
    let half = tensor(&[500, HIDDEN], 4, DType::F32)?;
    let head = SoftmaxHead::from_tensors(Tensor::cat(&[&half, &half], 0)?, None)?;
    let hidden = tensor(&[3, HIDDEN], 5, DType::F32)?;
    let greedy = || TokenRequest::new(Sampling::greedy(), 1);
    let lowest = head.argmax(&hidden)?.to_vec1::<u32>()?;
    assert!(lowest.iter().all(|&id| id < 500));
    let verified = head.verify(&hidden, &[&lowest[..2]], &mut [&mut greedy()?])?;
    assert_eq!((verified[0].accepted, ids(&verified[0].tokens)), (2, lowest.clone()));
    let verified = head.verify(&hidden, &[&[lowest[0], lowest[1] + 500]], &mut [&mut greedy()?])?;
    assert_eq!((verified[0].accepted, ids(&verified[0].tokens)), (1, lowest[..2].to_vec()));
    Ok(())
}

#[test]
fn without_drafts_it_is_next_tokens() -> Result<()> {
    let (model, head) = (Model::new()?, softmax()?);
    let mut requests = (0..9).map(|i| request(i, &Sampling::new())).collect::<Result<Vec<_>>>()?;
    let texts: Vec<Vec<u32>> = (0..9).map(|i| vec![i, 2 * i + 1]).collect();
    let hidden = model.hidden(texts.iter().map(|text| &text[..]))?;
    let expected = head.next_tokens(&hidden, &requests.iter().collect::<Vec<_>>())?;
    let verified = model.verify(&head, &texts, &vec![vec![]; 9], &mut requests)?;
    let tokens: Vec<NextToken> = verified.into_iter().flat_map(|verified| verified.tokens).collect();
    assert_eq!(tokens, expected);
    assert!(requests.iter().all(|request| request.generated() == 1));
    // No text at all, and a head behind a pointer.
    assert_eq!(Arc::new(head).verify(&hidden.narrow(0, 0, 0)?, &[], &mut [])?, []);
    Ok(())
}

#[test]
fn a_drafter_that_shares_the_noise_is_accepted_more_often() -> Result<()> {
    let (model, head) = (Model::new()?, softmax()?);
    let noise = (tensor(&[VOCAB, HIDDEN], 12, DType::F32)? * 0.15)?;
    let drafter = SoftmaxHead::from_tensors((head.weight()? + noise)?, None)?;
    let accepted = |seed_of_drafter: u64| -> Result<usize> {
        let mut requests: Vec<_> = (0..200).map(|i| TokenRequest::new(Sampling::new(), i)).collect::<Result<_>>()?;
        let drafting = (0..200).map(|i| TokenRequest::new(Sampling::new(), i + seed_of_drafter));
        let drafting = drafting.collect::<Result<Vec<_>>>()?;
        let drafts = model.sample(&drafter, drafting)?;
        let drafts: Vec<Vec<u32>> = drafts.iter().map(|tokens| ids(&tokens[..4])).collect();
        let verified = model.verify(&head, &vec![vec![]; 200], &drafts, &mut requests)?;
        Ok(verified.iter().map(|verified| verified.accepted).sum())
    };
    let (shared, own) = (accepted(0)?, accepted(10_000)?);
    assert!(shared > 2 * own, "{shared} of 800 with shared noise, {own} with other noise");
    Ok(())
}

/// The requests as texts, which show everything that a push changes.
fn states(requests: &[TokenRequest]) -> Vec<String> {
    requests.iter().map(|request| format!("{request:?}")).collect()
}

#[test]
fn bad_arguments_are_errors_and_no_request_moves() -> Result<()> {
    let (head, hidden) = (softmax()?, tensor(&[5, HIDDEN], 5, DType::F32)?);
    let mut requests = vec![TokenRequest::new(Sampling::new(), 1)?, TokenRequest::new(Sampling::new(), 2)?];
    let before = states(&requests);
    let mut check = |hidden: &Tensor, drafts: &[&[u32]], message: &str| {
        let error = head.verify(hidden, drafts, &mut requests.iter_mut().collect::<Vec<_>>()).expect_err(message);
        assert_eq!(error.to_string(), message);
        assert_eq!(states(&requests), before);
    };
    check(&hidden, &[&[1, 2, 3]], "drafts: expected a list for each of 2 requests, got 1");
    check(&hidden, &[&[1], &[2]], "hidden: expected 4 positions: one more than drafts for each text, got 5");
    check(
        &hidden,
        &[&[1], &[2, VOCAB as u32]],
        "request 1: drafts: expected token ids below vocab_size 1021, got 1021 at index 1",
    );
    // A draft is checked before hidden states are.
    check(
        &Tensor::zeros((5, HIDDEN + 1), DType::F32, &Device::Cpu)?,
        &[&[5000], &[2, 3]],
        "request 0: drafts: expected token ids below vocab_size 1021, got 5000 at index 0",
    );
    let too_many = TokenRequest::new(Sampling::new(), 1)?.with_best(VOCAB + 1);
    let error = head.verify(&hidden, &[&[1, 2, 3, 4]], &mut [&mut too_many.clone()]).expect_err("too many");
    assert!(matches!(error, Error::Request { index: 0, .. }), "{error}");
    Ok(())
}

/// An error of a row counts if plain sampling comes there.
#[test]
fn an_error_after_a_rejected_draft_is_none() -> Result<()> {
    let head = softmax()?;
    let hidden = tensor(&[7, HIDDEN], 5, DType::F32)?;
    let drawn = head.argmax(&hidden)?.to_vec1::<u32>()?;
    let broken = |rows: &[usize]| -> Result<Tensor> {
        let mut states = hidden.to_vec2::<f32>()?;
        rows.iter().for_each(|&row| states[row][3] = f32::NAN);
        Ok(Tensor::new(states, &Device::Cpu)?)
    };
    let requests = || -> Result<Vec<TokenRequest>> {
        let request = |seed| TokenRequest::new(Sampling::greedy(), seed);
        [request(1), request(2)].into_iter().collect()
    };
    // Rows 0 to 3 and 4 to 6 are those of two texts. The second draft of each is wrong.
    let wrong = |id: u32| (id + 1) % VOCAB as u32;
    let first = [drawn[0], wrong(drawn[1]), drawn[2]];
    let second = [drawn[4], wrong(drawn[5])];
    for rows in [&[][..], &[2], &[3], &[2, 3], &[6], &[2, 6], &[3, 6]] {
        let mut requests = requests()?;
        let [one, two] = &mut requests[..] else { panic!("two") };
        let verified = head.verify(&broken(rows)?, &[&first, &second], &mut [one, two])?;
        assert_eq!((verified[0].accepted, ids(&verified[0].tokens)), (1, drawn[..2].to_vec()), "{rows:?}");
        assert_eq!((verified[1].accepted, ids(&verified[1].tokens)), (1, drawn[4..6].to_vec()), "{rows:?}");
    }
    for (rows, position) in [(&[0][..], 0), (&[1], 1), (&[5], 5), (&[1, 3], 1), (&[3, 5, 6], 5), (&[2, 4], 4)] {
        let mut requests = requests()?;
        let before = states(&requests);
        let [one, two] = &mut requests[..] else { panic!("two") };
        let error = head.verify(&broken(rows)?, &[&first, &second], &mut [one, two]).expect_err("a NaN");
        assert!(matches!(error, Error::Distribution { position: got } if got == position), "{rows:?}: {error}");
        assert_eq!(states(&requests), before);
    }
    Ok(())
}

/// A text stops at an accepted draft that ends it, and a draft after it is not looked at.
#[test]
fn a_text_stops_at_its_end() -> Result<()> {
    let head = SoftmaxHead::from_tensors(Tensor::eye(4, DType::F32, &Device::Cpu)?, None)?;
    // The greedy id of row i is i, except for the last row, which is impossible.
    let rows = Tensor::new(&[[9f32, 0., 0., 0.], [0., 9., 0., 0.], [0., 0., 9., 0.], [f32::NAN; 4]], &Device::Cpu)?;
    let request = TokenRequest::new(Sampling::greedy(), 0)?.with_ends(&[3, 1]);
    let verify = |drafts: &[u32], request: &TokenRequest| {
        let mut request = request.clone();
        let verified = head.verify(&rows, &[drafts], &mut [&mut request])?.remove(0);
        let ids: Vec<u32> = verified.tokens.iter().map(|token| token.token_id).collect();
        Ok::<_, Error>((ids, verified.accepted, request.generated(), request.has_ended()))
    };
    assert_eq!(verify(&[0, 1, 2], &request)?, (vec![0, 1], 2, 2, true));
    // The end is drawn, but was not drafted.
    assert_eq!(verify(&[0, 2, 2], &request)?, (vec![0, 1], 1, 2, true));
    // It is too early for the end.
    assert_eq!(verify(&[0, 0, 0], &request.clone().with_min_tokens(2))?, (vec![0, 0, 2], 2, 3, false));
    // Without ends, the last row counts.
    assert!(verify(&[0, 1, 2], &request.with_ends(&[])).is_err());
    Ok(())
}
