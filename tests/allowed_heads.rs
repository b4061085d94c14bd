//! Heads over sets of allowed ids, and the choice of ids: top-k, samples, beam search and policy losses of the
//! renormalised distribution.

mod common;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::ops::log_softmax;
use candle_nn::{VarBuilder, VarMap};
use common::allowed::{assert_config, cases, ids, per_position, renormalized};
use common::given::{places, Given};
use common::problem::Problem;
use common::values::{gradients, numbers, uniform, Numbers};
use mos_head::decode::{BeamSearch, NextToken, Sampler, Sampling, TokenRequest};
use mos_head::distill::{DistillOptions, Divergence, MissingIds, Teacher};
use mos_head::parts::{LogitFunction, LowRankAdapter};
use mos_head::policy::{PolicyBatch, PolicyOptions};
use mos_head::score::ScoreOptions;
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::{
    Distributions, DropoutMasks, Error, Loss, LossOptions, Mixture, MixtureConfig, MixtureLayer, MixtureOfSoftmaxes,
    OptionName, OutputLayer, Result, SoftmaxHead,
};

/// The most probable ids are those of a sort of the set; no id is outside.
#[test]
fn the_best_ids_are_those_of_the_set() -> Result<()> {
    for case in cases() {
        let (lists, truth) = (case.lists(), renormalized(&case.drawn(DType::F64), &case.lists(), 1.0));
        let restricted = case.drawn(DType::F64).mixture(DType::F64, &Device::Cpu)?.restricted(&case.allowed())?;
        let longest = lists.iter().map(Vec::len).max().expect("a position");
        for k in [1, 3, case.vocab].into_iter().filter(|k| *k <= case.vocab) {
            let top = restricted.top_k(k)?;
            let n = k.min(longest);
            assert_eq!(top.token_ids.dims(), [case.positions, n], "{case:?}");
            let (found, log_probs) = (top.token_ids.to_vec2::<u32>()?, top.log_probs.to_vec2::<f64>()?);
            for t in 0..case.positions {
                let mut ranked: Vec<(f64, u32)> = truth[t].iter().copied().zip(lists[t].iter().copied()).collect();
                ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
                ranked.truncate(n);
                let own = ranked.len();
                ranked.resize(n, (f64::NEG_INFINITY, ranked[own - 1].1));
                let (expected, expected_ids): (Vec<f64>, Vec<u32>) = ranked.into_iter().unzip();
                assert_eq!(found[t], expected_ids, "{case:?} {k}");
                assert_relative_eq!(
                    Numbers::from(log_probs[t].clone()),
                    expected,
                    epsilon = 1e-13,
                    max_relative = 1e-12
                );
            }
        }
        let best: Vec<u32> = restricted.top_k(1)?.token_ids.flatten_all()?.to_vec1()?;
        assert_eq!(restricted.argmax()?.to_vec1::<u32>()?, best);
    }
    Ok(())
}

/// The frequencies of draws are those of the renormalised distribution, at a temperature and with truncation.
#[test]
fn draws_have_the_frequencies_of_the_renormalised_distribution() -> Result<()> {
    const DRAWS: usize = 4000;
    let plain = Sampling::new();
    let samplings = [
        plain.clone(),
        plain.clone().with_temperature(0.5),
        plain.clone().with_temperature(2.0),
        plain.clone().with_top_p(0.6),
        plain.clone().with_top_k(2),
        plain.clone().with_min_p(0.4),
    ];
    for components in [1, 3] {
        for shared in [true, false] {
            let one = Problem { positions: 1, components, function: LogitFunction::Softcap(2.0), ..cases()[3] };
            let (one, list) = (one.drawn(DType::F64), vec![2u32, 11, 12, 30]);
            let mixture = one.at(vec![0; DRAWS]).mixture(DType::F64, &Device::Cpu)?;
            let allowed = if shared { AllowedIds::new(&list) } else { per_position(&vec![list.clone(); DRAWS]) };
            let restricted = mixture.restricted(&allowed)?;
            let log_probs = &renormalized(&one, std::slice::from_ref(&list), 1.0)[0];
            for sampling in &samplings {
                let mut masses: Vec<f64> = log_probs.iter().map(|x| (x / sampling.temperature).exp()).collect();
                let total: f64 = masses.iter().sum();
                masses.iter_mut().for_each(|mass| *mass /= total);
                let mut order: Vec<usize> = (0..masses.len()).collect();
                order.sort_by(|&a, &b| masses[b].total_cmp(&masses[a]));
                let (mut before, largest) = (0.0, masses[order[0]]);
                for (rank, &i) in order.iter().enumerate() {
                    let mass = masses[i];
                    let is_kept = rank < sampling.top_k.unwrap_or(usize::MAX)
                        && (rank == 0 || before < sampling.top_p)
                        && mass >= sampling.min_p * largest;
                    before += mass;
                    masses[i] = if is_kept { mass } else { 0.0 };
                }
                let total: f64 = masses.iter().sum();
                let drawn = restricted.sample(&mut Sampler::new(sampling.clone(), 7)?)?.to_vec1::<u32>()?;
                assert!(drawn.iter().all(|id| list.contains(id)));
                for (id, mass) in list.iter().zip(&masses) {
                    let p = mass / total;
                    let found = drawn.iter().filter(|other| *other == id).count() as f64 / DRAWS as f64;
                    let deviation = (p * (1.0 - p) / DRAWS as f64).sqrt();
                    assert_abs_diff_eq!(found, p, epsilon = 4.0 * deviation);
                }
            }
            let mut ancestral = Sampler::new(Sampling::new().with_ancestral(true), 7)?;
            match (components, restricted.sample(&mut ancestral)) {
                (1, drawn) => assert!(drawn?.to_vec1::<u32>()?.iter().all(|id| list.contains(id))),
                (_, error) => {
                    assert!(matches!(error, Err(Error::Unsupported { option: OptionName::Ancestral, .. })));
                }
            }
            // The temperature of the components is that of the restricted mixture's.
            let mut sampler = Sampler::new(Sampling::greedy().with_component_temperature(0.01), 7)?;
            let tempered = mixture.with_component_temperature(0.01)?.restricted(&allowed)?;
            assert_eq!(restricted.sample(&mut sampler)?.to_vec1::<u32>()?, tempered.argmax()?.to_vec1::<u32>()?);
        }
    }
    Ok(())
}

/// The variables of two heads, the heads, and hidden states.
type Heads = (Vec<Var>, [Box<dyn MixtureLayer>; 2], Tensor);

fn heads() -> Result<Heads> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let mixture = MixtureOfSoftmaxes::new(&MixtureConfig::new(8, 60, 3).with_context_dim(6), vb)?;
    let random = |shape: &[usize]| {
        Var::from_tensor(&uniform(shape, 1.7, shape.iter().product::<usize>() as u64).expect("numbers"))
    };
    let [weight, bias, a, b] = [&[60, 8][..], &[60], &[2, 8], &[60, 2]].map(|shape| random(shape).expect("a variable"));
    let adapter = LowRankAdapter::from_tensors(a.as_tensor().clone(), b.as_tensor().clone(), 4.0)?;
    let plain = SoftmaxHead::from_tensors(weight.as_tensor().clone(), Some(bias.as_tensor().clone()))?;
    let adapted = plain.with_adapter(adapter)?.with_logit_scale(0.5)?.with_softcap(3.0)?;
    let hidden = uniform(&[3, 4, 8], 1.7, 5)?;
    let all = [vec![weight, bias, a, b], vars.all_vars()].concat();
    Ok((all, [Box::new(adapted), Box::new(mixture)], hidden))
}

/// The gradients of the variables.
fn read(vars: &[Var], store: &GradStore) -> Vec<Numbers> {
    gradients(store, vars.iter().map(Var::as_tensor))
}

const SHARED: [u32; 6] = [1, 5, 17, 18, 40, 59];

/// Sets of each kind for 12 positions over 60 ids, and the ids of each position.
fn sets() -> [(AllowedIds, Vec<Vec<u32>>); 2] {
    let lists: Vec<Vec<u32>> = (0..12u32).map(|t| vec![(t * 5) % 60, (t * 5 + 1) % 60, (t * 5 + 3) % 60]).collect();
    [(AllowedIds::new(&SHARED), vec![SHARED.to_vec(); 12]), (per_position(&lists), lists)]
}

/// Heads, an adapter of the decoder included: every variable has the gradient of the head's own log-probabilities,
/// renormalised by candle's operations.
#[test]
fn restricted_heads_equal_their_log_probabilities_renormalised() -> Result<()> {
    let (vars, heads, hidden) = heads()?;
    for head in &heads {
        for (allowed, lists) in sets() {
            let targets: Vec<u32> = lists.iter().enumerate().map(|(t, list)| list[t % list.len()]).collect();
            let restricted = Restricted::new(head, allowed)?;
            let target_ids = ids(&targets, &[3, 4]);
            let log_probs = head.log_probs(&hidden)?.reshape((12, 60))?;
            let mut rows = Vec::new();
            for (t, list) in lists.iter().enumerate() {
                let index = Tensor::new(list.as_slice(), &Device::Cpu)?;
                rows.push(log_softmax(&log_probs.get(t)?.index_select(&index, 0)?, 0)?);
            }
            let target_log_prob =
                |t: usize| rows[t].get(lists[t].iter().position(|id| *id == targets[t]).expect("allowed"));
            let terms = (0..12).map(target_log_prob).collect::<candle_core::Result<Vec<_>>>()?;
            let expected = Tensor::stack(&terms, 0)?.mean_all()?.neg()?;
            let loss = restricted.loss(&hidden, &target_ids, &LossOptions::new())?;
            assert_relative_eq!(numbers(&loss.value), numbers(&expected), max_relative = 1e-12);
            let expected = read(&vars, &expected.backward()?);
            assert_relative_eq!(
                read(&vars, &loss.backward()?)[..],
                expected[..],
                epsilon = 1e-12,
                max_relative = 1e-11
            );
            assert!(expected.iter().filter(|gradient| !gradient.is_empty()).count() >= 4);
            // Every method is the mixture's.
            let mixture = restricted.mixture(&hidden)?;
            let options = ScoreOptions::new().with_entropy(true);
            assert_eq!(restricted.log_probs(&hidden)?.dims(), [3, 4, 60]);
            assert_eq!(numbers(&restricted.log_probs(&hidden)?), numbers(&mixture.log_probs()?));
            let (a, b) = (restricted.score(&hidden, &target_ids, &options)?, mixture.score(&target_ids, &options)?);
            assert_eq!(numbers(&a.log_prob), numbers(&b.log_prob));
            assert_eq!(a.log_prob.dims(), [3, 4]);
            assert_eq!(numbers(&restricted.log_prob(&hidden, &target_ids)?), numbers(&a.log_prob));
            assert_eq!(
                restricted.top_k(&hidden, 2)?.token_ids.flatten_all()?.to_vec1::<u32>()?,
                mixture.top_k(2)?.token_ids.flatten_all()?.to_vec1::<u32>()?
            );
            let sums = restricted.log_probs(&hidden)?.exp()?.sum(D::Minus1)?;
            assert_abs_diff_eq!(numbers(&sums), [1.0; 12], epsilon = 1e-12);
            let drawn = restricted.sample(&hidden, &mut Sampler::new(Sampling::new(), 3)?)?;
            assert_eq!(drawn.dims(), [3, 4]);
            let drawn = drawn.flatten_all()?.to_vec1::<u32>()?;
            assert!(drawn.iter().zip(&lists).all(|(id, list)| list.contains(id)));
        }
        assert_config(Restricted::new(head, AllowedIds::new(&[60])), "allowed ids", "below vocab_size 60, got 60");
        let lists = Restricted::new(head, per_position(&[vec![1]]))?;
        assert_config(lists.log_probs(&hidden), "allowed ids", "each of 12 positions, got 1");
    }
    Ok(())
}

/// A policy loss takes the lists of the tokens that count, and keeps a token that its set has lost.
#[test]
fn policy_losses_see_the_sets_of_the_tokens_that_count() -> Result<()> {
    let (vars, heads, hidden) = heads()?;
    for head in &heads {
        for (allowed, lists) in sets() {
            let mut targets: Vec<u32> = lists.iter().enumerate().map(|(t, list)| list[t % list.len()]).collect();
            targets[7] = 33; // in no set
            let token_ids = ids(&targets, &[3, 4]);
            let mask: Vec<u8> = (0..12u8).map(|t| u8::from(t % 3 != 0)).collect();
            let advantages = uniform(&[3, 4], 1.7, 6)?;
            let batch = PolicyBatch::new(token_ids.clone(), advantages.clone()).with_mask(Tensor::from_vec(
                mask.clone(),
                (3, 4),
                &Device::Cpu,
            )?);
            let options = PolicyOptions::new().with_entropy(0.1);
            let outside = Restricted::new(head, allowed.clone())?.policy_loss(&hidden, &batch, &options);
            // By its place among all positions, of which every third does not count.
            assert!(matches!(outside, Err(Error::NotAllowed { position: 7, got: 33 })), "{outside:?}");
            let restricted = Restricted::new(head, allowed.with_targets_added(true))?;
            let loss = restricted.policy_loss(&hidden, &batch, &options)?;
            let scores = restricted.score(&hidden, &token_ids, &ScoreOptions::new().with_entropy(true))?;
            let weights: Vec<f64> = mask.iter().map(|&counts| f64::from(counts) / 8.0).collect();
            let weights = Tensor::from_vec(weights, (3, 4), &Device::Cpu)?;
            // The ratio of the present policy is one, and its gradient that of the log-probability.
            let log_prob = &scores.log_prob;
            let ratio = (log_prob - log_prob.detach())?.exp()?;
            let bonus = (scores.entropy.expect("asked for") * 0.1)?;
            let expected = (((ratio * advantages)?.neg()? - bonus)? * weights)?.sum_all()?;
            assert_relative_eq!(numbers(&loss.value), numbers(&expected), max_relative = 1e-12);
            let [found, expected] = [loss.backward()?, expected.backward()?].map(|store| read(&vars, &store));
            assert_relative_eq!(found[..], expected[..], max_relative = 1e-11);
        }
    }
    Ok(())
}

/// A student over sets of allowed ids learns as the tensor of its renormalised log-probabilities does, also where some
/// positions do not count.
#[test]
fn distillation_sees_the_sets_of_the_positions_that_count() -> Result<()> {
    let (vars, heads, hidden) = heads()?;
    let weights =
        Tensor::from_vec((0..12).map(|t| [0.5, 0.0, 2.0][t % 3]).collect::<Vec<f64>>(), (3, 4), &Device::Cpu)?;
    for head in &heads {
        for (allowed, lists) in sets() {
            let restricted = Restricted::new(head, allowed)?;
            let log_probs = restricted.log_probs(&hidden)?;
            // The teacher's distributions are over the same sets.
            let noise = uniform(&[3, 4, 60], 1.7, 7)?;
            let log_teacher = log_softmax(&(&log_probs.detach() + noise)?, 2)?;
            let two = |ids: &Vec<u32>| ids.iter().take(2).copied().collect::<Vec<_>>();
            let token_ids = ids(&lists.iter().flat_map(two).collect::<Vec<_>>(), &[3, 4, 2]);
            let log_probs_listed = log_teacher.gather(&token_ids, 2)?;
            for teacher in [
                Teacher::from_log_probs(&log_teacher),
                Teacher::from_top_k(&token_ids, &log_probs_listed, MissingIds::Tail),
            ] {
                for divergence in [
                    Divergence::ForwardKl,
                    Divergence::ReverseKl,
                    Divergence::JensenShannon(0.3),
                    Divergence::NegLogAcceptance,
                    Divergence::LkHybrid(3.0),
                ] {
                    let options = DistillOptions::new(divergence).with_position_weights(weights.clone());
                    let loss = restricted.distill(&hidden, &teacher, &options)?;
                    let expected =
                        Given(log_probs.reshape((12, 60))?).distill(&places(&[3, 4, 1])?, &teacher, &options)?;
                    let value = numbers(&expected.value);
                    assert_relative_eq!(numbers(&loss.value), value, max_relative = 1e-12);
                    let [found, expected] = [loss.backward()?, expected.backward()?].map(|store| read(&vars, &store));
                    assert_relative_eq!(found[..], expected[..], max_relative = 1e-10);
                }
            }
        }
    }
    Ok(())
}

/// Beam search over a restricted head stays in the set, and finds what a search over the renormalised log-probabilities
/// finds.
#[test]
fn beam_search_never_leaves_the_set() -> Result<()> {
    let (_, heads, _) = heads()?;
    let embeddings = uniform(&[60, 8], 3.4, 8)?;
    let shared = SHARED;
    for head in &heads {
        let restricted = Restricted::new(head, AllowedIds::new(&shared))?;
        // Six ids; the width asks for more.
        let search = BeamSearch::new(59).with_width(8).with_max_length(5).with_n_best(4);
        let start = Tensor::new(&[1u32, 5, 33], &Device::Cpu)?;
        let step = |tokens: &Tensor, _: &Tensor| embeddings.index_select(tokens, 0);
        let found = search.run(&restricted, &start, step)?;
        let expected = search.search(60, &start, |tokens, _, k| -> Result<_> {
            let log_probs = head.log_probs(&embeddings.index_select(tokens, 0)?)?;
            let index = Tensor::new(shared.as_slice(), &Device::Cpu)?;
            let small = log_softmax(&log_probs.index_select(&index, 1)?, 1)?;
            let mut top = mos_head::decode::TopK::from_log_probs(&small, k.min(6))?;
            top.token_ids = index.index_select(&top.token_ids.flatten_all()?, 0)?.reshape(top.token_ids.shape())?;
            Ok(top)
        })?;
        // The next id depends on the last alone: texts of the same pairs are equally probable, in either order.
        let pairs = |start: u32, ids: &[u32]| {
            let mut pairs: Vec<_> = [start].iter().chain(ids).copied().zip(ids.iter().copied()).collect();
            pairs.sort_unstable();
            pairs
        };
        for ((start, found), expected) in start.to_vec1::<u32>()?.into_iter().zip(&found).zip(&expected) {
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.token_ids.iter().all(|id| shared.contains(id)), "{found:?}");
                assert_eq!(pairs(start, &found.token_ids), pairs(start, &expected.token_ids));
                assert_abs_diff_eq!(found.log_prob, expected.log_prob, epsilon = 1e-9);
            }
        }
        assert_eq!(found.iter().flatten().count(), 12);
    }
    Ok(())
}

/// A loss with dropout, as of any head: the masks are the head's.
#[test]
fn dropout_is_that_of_the_head() -> Result<()> {
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let config = MixtureConfig::new(8, 60, 2).with_context_dim(6).with_dropout(0.5);
    let head = MixtureOfSoftmaxes::new(&config, vb)?;
    let hidden = uniform(&[4, 8], 1.7, 9)?.to_dtype(DType::F32)?;
    let restricted = Restricted::new(&head, AllowedIds::new(&[1, 2, 3]))?;
    let options = LossOptions::new().with_dropout(DropoutMasks::Seeded(3));
    let loss = |options: &LossOptions| -> Result<Loss> { restricted.loss(&hidden, &ids(&[1, 2, 3, 1], &[4]), options) };
    assert_eq!(numbers(&loss(&options)?.nll), numbers(&loss(&options)?.nll));
    assert_abs_diff_eq!(numbers(&loss(&LossOptions::evaluation())?.nll), [3f64.ln(); 4], epsilon = 1e-6);
    Ok(())
}

/// The bits of every result of a restricted head, and the gradient of the hidden states.
fn results(head: &dyn OutputLayer, hidden: &Tensor) -> Result<Vec<u64>> {
    let hidden = Var::from_tensor(hidden)?;
    let positions = hidden.elem_count() / 8;
    let ids = Tensor::from_iter((0..positions).map(|t| SHARED[t % 6]), &Device::Cpu)?.reshape((3, 4))?;
    let loss = head.loss(&hidden, &ids, &LossOptions::default())?;
    let gradients = loss.backward()?;
    let request =
        TokenRequest::new(Sampling::new().with_top_p(0.9), 5)?.with_best(3).with_entropy(true).with_rank(true);
    let tokens = head.next_tokens(&hidden, &vec![&request; positions])?;
    let token_numbers = |token: &NextToken| {
        let best = token.best.iter().flat_map(|&(id, log_p)| [f64::from(id), log_p]);
        let rank = token.rank.expect("asked for") as f64;
        let numbers = [f64::from(token.token_id), token.log_prob, token.sampled_log_prob, rank];
        best.chain(numbers).chain(token.entropy).collect::<Vec<_>>()
    };
    let mut found: Vec<f64> = tokens.iter().flat_map(token_numbers).collect();
    let top = head.top_k(&hidden, 4)?;
    for tensor in [
        &loss.value,
        gradients.get(&hidden).expect("a gradient"),
        &head.log_probs(&hidden)?,
        &head.score(&hidden, &ids, &ScoreOptions::new().with_entropy(true))?.log_prob,
        &top.token_ids.to_dtype(DType::F64)?,
        &top.log_probs,
        &head.sample(&hidden, &mut Sampler::new(Sampling::new(), 3)?)?.to_dtype(DType::F64)?,
        &head.distributions(&hidden, Some(&[1, 5, 6]))?.log_probs()?,
    ] {
        found.extend(numbers(tensor).iter());
    }
    Ok(found.into_iter().map(f64::to_bits).collect())
}

/// A frozen head, whose rows are gathered once, gives the bits of the head whose rows are gathered at each call.
#[test]
fn a_frozen_head_has_the_same_results() -> Result<()> {
    let (_, heads, hidden) = heads()?;
    for head in &heads {
        for (allowed, _) in [sets()[0].clone(), (AllowedIds::new(&SHARED).with_empty_as_full(true), vec![])] {
            let restricted = Restricted::new(head, allowed)?;
            let frozen = restricted.frozen()?;
            let expected = results(&restricted, &hidden)?;
            // The first call gathers the rows, and the others have them.
            for _ in 0..2 {
                assert!(results(&frozen, &hidden)? == expected);
            }
            assert!(results(&frozen.frozen()?, &hidden)? == expected);
        }
    }
    Ok(())
}

/// The rows of a weight that is another one at each call, or a variable, are not those of the first call.
#[test]
fn frozen_rows_are_those_of_the_weight() -> Result<()> {
    #[derive(Debug)]
    struct Changing(std::sync::Mutex<f64>, Option<Var>);

    impl OutputLayer for Changing {
        fn hidden_size(&self) -> usize {
            8
        }

        fn vocab_size(&self) -> usize {
            60
        }

        fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
            self.mixture(hidden, options.dropout)?.loss(targets, options)
        }

        fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
            self.mixture(hidden, DropoutMasks::Off)?.log_probs()
        }
    }

    impl MixtureLayer for Changing {
        fn components(&self) -> usize {
            1
        }

        fn mixture(&self, hidden: &Tensor, _: DropoutMasks) -> Result<Mixture> {
            let mut scale = self.0.lock().expect("the scale");
            *scale += 1.0;
            let weight = match &self.1 {
                Some(var) => var.as_tensor().clone(),
                None => (uniform(&[60, 8], 1.0, 1)? * *scale)?,
            };
            Mixture::new(&hidden.unsqueeze(hidden.rank() - 1)?, None, &weight, None)
        }
    }

    let hidden = uniform(&[2, 8], 1.7, 5)?;
    let log_probs = |head: &dyn OutputLayer| Ok::<_, Error>(numbers(&head.log_probs(&hidden)?));
    let changing = Restricted::new(Changing(0.0.into(), None), AllowedIds::new(&SHARED))?;
    let frozen = changing.frozen()?;
    assert!(log_probs(&frozen)? != log_probs(&frozen)?);

    let var = Var::from_tensor(&uniform(&[60, 8], 1.0, 1)?)?;
    let trained = Restricted::new(Changing(0.0.into(), Some(var.clone())), AllowedIds::new(&SHARED))?;
    let frozen = trained.frozen()?;
    let before = log_probs(&frozen)?;
    var.set(&uniform(&[60, 8], 1.0, 2)?)?;
    assert!(log_probs(&frozen)? != before);
    assert_eq!(log_probs(&frozen)?, log_probs(&trained)?);
    Ok(())
}
