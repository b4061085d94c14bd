//! The results of a position are the same bits wherever it stands in a batch, whatever else is in the batch, and on any
//! number of threads, so that a sampler draws the same ids.

mod common;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use common::allowed::per_position;
use common::case::{Case, Head, Sizes};
use common::decoded_bits;
use common::values::{fill, tensor};
use mos_head::decode::{Constraints, NextToken, Sampler, Sampling, TokenRequest};
use mos_head::parts::{Configured, Contexts, LowRankAdapter, Projection};
use mos_head::sets::{AllowedIds, Restricted};
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{
    DropoutMasks, MixtureConfig, MixtureLayer, MixtureOfContexts, MixtureOfSoftmaxes, OutputLayer, Result,
    SoftmaxConfig, SoftmaxHead,
};

const VOCAB: usize = 1021;
const MOST: usize = 70;

fn case(components: usize, d: usize, dtype: DType) -> Result<Case> {
    Ok(Case::random(Head::Mixture, Sizes::new(0, d, components, VOCAB), &[MOST], 5).rounded(dtype)?)
}

/// What is decoded of some positions of a case.
fn found(case: &Case, first: usize, positions: usize, dtype: DType) -> Result<Vec<Vec<u64>>> {
    decoded_bits(&case.at(first..first + positions).mixture(dtype, &Device::Cpu)?, first, positions, 50)
}

#[test]
fn a_position_has_the_same_bits_in_every_batch() -> Result<()> {
    for (components, d) in [(1, 37), (3, 37), (4, 37), (15, 37), (1, 128), (3, 128), (4, 128), (15, 128)] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let case = case(components, d, dtype)?;
            let all = found(&case, 0, MOST, dtype)?;
            for batch in [1, 2, 5, 9] {
                for first in (0..MOST - batch).step_by(if batch == 1 { 13 } else { 9 }) {
                    let found = found(&case, first, batch, dtype)?;
                    assert!(found == all[first..first + batch], "{components} {d} {dtype:?}, {batch} from {first}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_position_has_the_same_bits_on_every_number_of_threads() -> Result<()> {
    for (components, d, dtype) in [(1, 37, DType::F32), (15, 128, DType::F32), (4, 128, DType::BF16)] {
        let case = case(components, d, dtype)?;
        let bits_on_threads = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| found(&case, 0, MOST, dtype))
        };
        let one = bits_on_threads(1)?;
        for threads in [2, 7] {
            assert!(bits_on_threads(threads)? == one, "{components} {d} {dtype:?} on {threads} threads");
        }
    }
    Ok(())
}

/// The sizes of the batches that the positions are cut into.
const BATCHES: [usize; 14] = [1, 1, 2, 3, 5, 9, 16, 17, 33, 64, 65, 128, 255, 1];
const HIDDEN: usize = 72;

/// A head with a low-rank adapter, whose factors are random.
fn adapted<P: Projection>(head: mos_head::Head<P>, dtype: DType) -> Result<mos_head::Head<P>> {
    let (rank, d) = (3, head.projection().context_dim());
    let adapter =
        LowRankAdapter::from_tensors(tensor(&[rank, d], 71, dtype)?, tensor(&[VOCAB, rank], 72, dtype)?, 0.3)?;
    head.with_adapter(adapter)
}

/// The heads of the crate, each with its name.
fn heads(dtype: DType) -> Result<Vec<(&'static str, Box<dyn OutputLayer>)>> {
    let vars = VarMap::new();
    let vb = |name: &str| VarBuilder::from_varmap(&vars, dtype, &Device::Cpu).pp(name);
    let mixture = |k, vocab| MixtureConfig::new(HIDDEN, vocab, k).with_context_dim(40).with_prior_bias(true);
    let softmax = SoftmaxHead::new(&SoftmaxConfig::new(HIDDEN, VOCAB), vb("softmax"))?;
    let contexts = MixtureOfContexts::new(&mixture(3, VOCAB), vb("contexts"))?;
    let softmaxes = MixtureOfSoftmaxes::new(&mixture(5, VOCAB), vb("softmaxes"))?;
    let single = MixtureOfSoftmaxes::new(&mixture(1, VOCAB), vb("single"))?;
    let (adaptive, classes) =
        (AdaptiveConfig::new(HIDDEN, VOCAB, vec![50, 300]), HierarchicalConfig::new(HIDDEN, VOCAB));
    let root = MixtureOfSoftmaxes::new(&mixture(3, adaptive.head_size()), vb("root"))?;
    let sets = [AllowedIds::new(&[3, 5, 700]), AllowedIds::new(&(0..400).map(|id| id * 2).collect::<Vec<_>>())];
    let heads: Vec<(&'static str, Box<dyn OutputLayer>)> = vec![
        ("two levels", Box::new(AdaptiveSoftmax::new(&adaptive, vb("adaptive"))?)),
        (
            "two levels, the first a mixture",
            Box::new(AdaptiveSoftmax::with_head(&adaptive, Arc::new(root), vb("mixed"))?),
        ),
        ("classes", Box::new(HierarchicalSoftmax::new(&classes, vb("classes"))?)),
        ("a softmax of a set", Box::new(Restricted::new(softmax.clone(), sets[0].clone())?)),
        ("softmaxes of a set", Box::new(Restricted::new(softmaxes.clone(), sets[1].clone())?)),
        (
            "a softmax with an adapter, of a set",
            Box::new(Restricted::new(adapted(softmax.clone(), dtype)?, sets[1].clone())?),
        ),
        ("a softmax with an adapter", Box::new(adapted(softmax.clone(), dtype)?)),
        ("contexts with an adapter", Box::new(adapted(contexts.clone(), dtype)?)),
        ("softmaxes with an adapter", Box::new(adapted(softmaxes.clone(), dtype)?)),
        ("a softmax", Box::new(softmax)),
        ("contexts", Box::new(contexts)),
        ("softmaxes", Box::new(softmaxes)),
        ("one softmax of a mixture", Box::new(single)),
    ];
    fill(&vars, 0.4)?;
    Ok(heads)
}

/// Cuts the positions into batches.
fn batches() -> impl Iterator<Item = Range<usize>> {
    BATCHES.into_iter().scan(0, |first, n| {
        *first += n;
        Some(*first - n..*first)
    })
}

/// The answers to a request for each position, by batches.
fn next_tokens(
    head: &dyn OutputLayer,
    hidden: &Tensor,
    batches: impl Iterator<Item = Range<usize>>,
) -> Result<Vec<NextToken>> {
    let mut tokens = Vec::new();
    for batch in batches {
        let request = |position: usize| {
            let sampling = [
                Sampling::new(),
                Sampling::greedy(),
                Sampling::new().with_temperature(0.8).with_top_p(0.9),
                Sampling::new().with_top_k(40),
            ];
            let constraints = match position % 3 {
                0 => Constraints::new().with_repetition_penalty(1.3),
                _ => Constraints::new().with_banned(&[position as u32]),
            };
            let request = TokenRequest::new(sampling[position % 4].clone(), position as u64 / 4)?.with_prompt(&[5, 9]);
            Ok(request.with_constraints(constraints)?.with_best(3).with_entropy(true))
        };
        let requests = batch.clone().map(request).collect::<Result<Vec<_>>>()?;
        let hidden = hidden.narrow(0, batch.start, batch.len())?;
        tokens.extend(head.next_tokens(&hidden, &requests.iter().collect::<Vec<_>>())?);
    }
    Ok(tokens)
}

/// The ids that one sampler draws for each position, by batches.
fn sample(
    head: &dyn OutputLayer,
    hidden: &Tensor,
    sampling: Sampling,
    batches: impl Iterator<Item = Range<usize>>,
) -> Result<Vec<u32>> {
    let mut sampler = Sampler::new(sampling, 11)?;
    let mut ids = Vec::new();
    for batch in batches {
        let hidden = hidden.narrow(0, batch.start, batch.len())?;
        ids.extend(head.sample(&hidden, &mut sampler)?.to_vec1::<u32>()?);
    }
    Ok(ids)
}

/// The samplings that a head supports.
fn samplings(name: &str) -> Vec<Sampling> {
    let mut samplings =
        vec![Sampling::new(), Sampling::greedy(), Sampling::new().with_temperature(0.7).with_top_p(0.9)];
    if name != "softmaxes of a set" {
        samplings.push(Sampling::new().with_ancestral(true));
    }
    samplings
}

fn on_threads<T: Send>(threads: usize, run: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads").install(run)
}

#[test]
fn every_head_answers_a_position_with_the_same_bits_in_every_batch_and_on_every_number_of_threads() -> Result<()> {
    let positions = BATCHES.iter().sum();
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let hidden = tensor(&[positions, HIDDEN], 5, dtype)?;
        for (name, head) in heads(dtype)? {
            let (all, head) = (|| std::iter::once(0..positions), &*head);
            let expected = on_threads(2, || next_tokens(head, &hidden, all()))?;
            for threads in 1..=3 {
                let found = on_threads(threads, || next_tokens(head, &hidden, batches()))?;
                let differ = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
                assert_eq!(
                    differ, 0,
                    "{name} {dtype:?} on {threads} threads: {differ} of {positions} positions differ"
                );
            }
            for sampling in samplings(name) {
                let expected = on_threads(2, || sample(head, &hidden, sampling.clone(), all()))?;
                let found = on_threads(3, || sample(head, &hidden, sampling.clone(), batches()))?;
                let differ = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
                assert_eq!(differ, 0, "{name} {dtype:?} {sampling:?}: {differ} of {positions} ids differ");
            }
        }
    }
    Ok(())
}

/// Sets of their own at each position, with which a single softmax gathers the rows of the ids that are in any set.
#[test]
fn a_position_with_a_set_of_its_own_has_the_same_bits_in_every_batch() -> Result<()> {
    let positions = BATCHES.iter().sum();
    let list =
        |position: usize| (0..2 + position % 40).map(|i| ((position * 37 + i * i * 11) % VOCAB) as u32).collect();
    let lists: Vec<Vec<u32>> = (0..positions).map(list).collect();
    for dtype in [DType::F32, DType::BF16] {
        let hidden = tensor(&[positions, HIDDEN], 5, dtype)?;
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, &Device::Cpu);
        let softmax = SoftmaxHead::new(&SoftmaxConfig::new(HIDDEN, VOCAB), vb.pp("softmax"))?;
        let config = MixtureConfig::new(HIDDEN, VOCAB, 3).with_context_dim(40);
        let softmaxes = MixtureOfSoftmaxes::new(&config, vb.pp("softmaxes"))?;
        fill(&vars, 0.4)?;
        let heads: [&dyn MixtureLayer; 2] = [&softmax, &softmaxes];
        for head in heads {
            let run = |batches: &mut dyn Iterator<Item = Range<usize>>| -> Result<Vec<NextToken>> {
                let mut tokens = Vec::new();
                for batch in batches {
                    let allowed = per_position(&lists[batch.clone()]);
                    let restricted = Restricted::new(head, allowed)?;
                    let hidden = hidden.narrow(0, batch.start, batch.len())?;
                    let request = |position: usize| {
                        let constraints = Constraints::new().with_repetition_penalty(1.3);
                        let request =
                            TokenRequest::new(Sampling::new(), position as u64)?.with_prompt(&lists[position]);
                        Ok(request.with_constraints(constraints)?.with_best(2).with_entropy(true))
                    };
                    let requests = batch.map(request).collect::<Result<Vec<_>>>()?;
                    tokens.extend(restricted.next_tokens(&hidden, &requests.iter().collect::<Vec<_>>())?);
                }
                Ok(tokens)
            };
            let (all, found) = (run(&mut std::iter::once(0..positions))?, run(&mut batches())?);
            let differ = found.iter().zip(&all).filter(|(found, expected)| found != expected).count();
            assert_eq!(differ, 0, "K = {} {dtype:?}: {differ} of {positions} positions differ", head.components());
            for (token, list) in all.iter().zip(&lists) {
                assert!(list.contains(&token.token_id));
            }
        }
    }
    Ok(())
}

/// The contexts of the components that an ancestral draw chooses.
#[test]
fn a_drawn_context_has_the_same_bits_in_every_batch() -> Result<()> {
    let positions = BATCHES.iter().sum();
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, &Device::Cpu);
        let contexts = Contexts::new(&MixtureConfig::new(HIDDEN, VOCAB, 5).with_context_dim(40), &vb)?;
        fill(&vars, 0.4)?;
        let hidden = tensor(&[positions, HIDDEN], 5, dtype)?;
        let (every, _) = contexts.forward(&hidden, DropoutMasks::Off)?;
        let run = |batches: &mut dyn Iterator<Item = Range<usize>>| -> Result<Vec<Vec<f64>>> {
            let (mut sampler, mut rows) = (Sampler::new(Sampling::new().with_ancestral(true), 3)?, Vec::new());
            for batch in batches {
                let drawn = contexts.draw(&hidden.narrow(0, batch.start, batch.len())?, &mut sampler)?;
                rows.extend(drawn.expect("contexts").squeeze(1)?.to_dtype(DType::F64)?.to_vec2()?);
            }
            Ok(rows)
        };
        let all = run(&mut std::iter::once(0..positions))?;
        let found = run(&mut batches())?;
        let differ: Vec<usize> = (0..positions).filter(|&position| found[position] != all[position]).collect();
        assert!(differ.is_empty(), "{dtype:?}: {differ:?}");
        // It is the context that a forward pass computes.
        let every = every.to_dtype(DType::F64)?.to_vec3::<f64>()?;
        assert!(every.iter().zip(&all).all(|(every, drawn)| every.contains(drawn)), "{dtype:?}");
    }
    Ok(())
}
