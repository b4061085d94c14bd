//! Decoding with a head whose vocabulary is cut among ranks, beside the whole head.

#[path = "common/ranks.rs"]
mod ranks;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use mos_head::{
    BeamSearch, Collectives, Constraints, Error, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Result, Sampling,
    TokenRequest, VocabParallel, VocabShard,
};
use ranks::on_ranks;

const VOCAB: usize = 1301;
const HIDDEN: usize = 12;

fn tensor(shape: &[usize], seed: usize) -> Result<Tensor> {
    let values = (0..shape.iter().product()).map(|i| ((i * 7919 + seed * 104_729 + i / 13) % 201) as f32 / 50.0 - 2.0);
    Ok(Tensor::from_iter(values, &Device::Cpu)?.reshape(shape)?)
}

/// A mixture of softmaxes over these ids. Ids that differ by 700 are equally probable.
fn head(components: usize, ids: std::ops::Range<usize>) -> Result<MixtureOfSoftmaxes> {
    let half = tensor(&[700, HIDDEN], 1)?;
    let weight = Tensor::cat(&[&half, &half], 0)?.narrow(0, ids.start, ids.len())?;
    let named = [
        ("decoder.weight", weight),
        ("decoder.bias", Tensor::zeros(ids.len(), DType::F32, &Device::Cpu)?),
        ("prior.weight", tensor(&[components, HIDDEN], 2)?),
        ("latent.weight", (tensor(&[components * HIDDEN, HIDDEN], 3)? * 0.3)?),
        ("latent.bias", tensor(&[components * HIDDEN], 4)?),
    ];
    let named = named.map(|(name, tensor)| (name.to_owned(), tensor)).into_iter().collect();
    let vb = candle_nn::VarBuilder::from_tensors(named, DType::F32, &Device::Cpu);
    MixtureOfSoftmaxes::new(&MixtureConfig::new(HIDDEN, ids.len(), components), vb)
}

/// The results of the whole head, and of every rank of a head that is cut.
fn results<R: Send>(components: usize, run: impl Fn(&dyn OutputLayer) -> Result<R> + Sync) -> Result<(R, Vec<R>)> {
    let whole = run(&head(components, 0..VOCAB)?)?;
    let mut of_ranks = Vec::new();
    for ranks in 1..=4 {
        let of_rank = |ranks: Arc<dyn Collectives>| {
            let shard = match ranks.ranks() {
                // Fewer ids than are asked for.
                4 => VocabShard::with_rows(ranks.clone(), if ranks.rank() == 3 { VOCAB - 9 } else { 3 })?,
                _ => VocabShard::new(ranks, VOCAB)?,
            };
            run(&VocabParallel::new(head(components, shard.range())?, shard)?)
        };
        of_ranks.extend(on_ranks(ranks, of_rank).into_iter().collect::<Result<Vec<R>>>()?);
    }
    Ok((whole, of_ranks))
}

#[test]
fn the_most_probable_ids_are_those_of_the_whole_head() -> Result<()> {
    for components in [1, 3] {
        let (whole, of_ranks) = results(components, |head| {
            let best = head.top_k(&tensor(&[2, 3, HIDDEN], 5)?, 20)?;
            let argmax = head.argmax(&tensor(&[2, 3, HIDDEN], 5)?)?.to_vec2::<u32>()?;
            Ok((best.token_ids.to_vec3::<u32>()?, best.log_probs.flatten_all()?.to_vec1::<f32>()?, argmax))
        })?;
        for (ids, log_probs, argmax) in of_ranks {
            assert_eq!((&ids, &argmax), (&whole.0, &whole.2));
            assert!(log_probs.iter().zip(&whole.1).all(|(found, expected)| (found - expected).abs() < 1e-5));
        }
        // Ids of equal probability are on several ranks.
        assert!(whole.0.iter().flatten().any(|ids| ids.windows(2).any(|pair| pair[1] == pair[0] + 700)));
    }
    Ok(())
}

#[test]
fn any_number_of_ranks_draws_the_same_ids() -> Result<()> {
    let samplings = [
        Sampling::new(),
        Sampling::greedy(),
        Sampling::new().with_temperature(0.7).with_top_p(0.8),
        Sampling::new().with_min_p(0.05),
        Sampling::new().with_top_k(7).with_top_p(0.9),
    ];
    for components in [1, 3] {
        let (whole, of_ranks) = results(components, |head| {
            let mut drawn = Vec::new();
            let constraints = Constraints::new().with_repetition_penalty(1.3).with_banned(&[0, 1300]);
            let request = |(seed, sampling): (usize, &Sampling)| {
                let request = TokenRequest::new(sampling.clone(), seed as u64)?.with_best(6).with_entropy(true);
                if seed % 2 == 0 {
                    return Ok(request);
                }
                request.with_constraints(constraints.clone())
            };
            let mut requests = samplings.iter().enumerate().map(request).collect::<Result<Vec<_>>>()?;
            for step in 0..4 {
                let hidden = tensor(&[requests.len(), HIDDEN], 6 + step)?;
                let next = head.next_tokens(&hidden, &requests.iter().collect::<Vec<_>>())?;
                requests.iter_mut().zip(&next).for_each(|(request, next)| request.push(next.token_id));
                drawn.push(next);
            }
            Ok(drawn)
        })?;
        for found in of_ranks {
            for (found, expected) in found.iter().flatten().zip(whole.iter().flatten()) {
                assert_eq!(found.token_id, expected.token_id);
                let close = |a: f64, b: f64| (a - b).abs() < 1e-4;
                assert!(close(found.log_prob, expected.log_prob), "{found:?} {expected:?}");
                assert!(close(found.sampled_log_prob, expected.sampled_log_prob), "{found:?} {expected:?}");
                assert!(close(found.entropy.expect("asked for"), expected.entropy.expect("asked for")));
                assert!(found.best.iter().zip(&expected.best).all(|(a, b)| a.0 == b.0 && close(a.1, b.1)));
            }
        }
    }
    Ok(())
}

#[test]
fn beam_search_finds_the_same_sequences() -> Result<()> {
    let (whole, of_ranks) = results(2, |head| {
        let (start, states) = (Tensor::new(&[3u32, 699], &Device::Cpu)?, tensor(&[VOCAB, HIDDEN], 9)?);
        let search = BeamSearch::new(0).with_width(4).with_max_length(5).with_n_best(2);
        let found = search.run(head, &start, |tokens, _| Ok::<_, Error>(states.index_select(tokens, 0)?))?;
        Ok(found.into_iter().flatten().map(|hypothesis| hypothesis.token_ids).collect::<Vec<_>>())
    })?;
    assert!(of_ranks.iter().all(|found| *found == whole) && whole.len() == 4);
    Ok(())
}

#[test]
fn ranks_that_disagree_about_a_query_get_an_error_on_every_rank() {
    let of_rank = |k: fn(usize) -> usize| {
        on_ranks(3, move |ranks: Arc<dyn Collectives>| -> Result<_> {
            let (rank, shard) = (ranks.rank(), VocabShard::new(ranks, VOCAB)?);
            VocabParallel::new(head(2, shard.range())?, shard)?.top_k(&tensor(&[2, HIDDEN], 5)?, k(rank))
        })
    };
    for result in of_rank(|rank| 3 + rank) {
        assert!(matches!(result, Err(Error::Ranks { argument: "k", .. })), "{result:?}");
    }
    for (rank, result) in of_rank(|rank| if rank == 0 { 0 } else { 5 }).into_iter().enumerate() {
        match rank {
            0 => assert!(matches!(result, Err(Error::Config { argument: "k", .. })), "{result:?}"),
            _ => assert!(matches!(result, Err(Error::Ranks { .. })), "{result:?}"),
        }
    }
    let seeds = on_ranks(2, |ranks: Arc<dyn Collectives>| -> Result<_> {
        let (rank, shard) = (ranks.rank(), VocabShard::new(ranks, VOCAB)?);
        let request = TokenRequest::new(Sampling::new(), rank as u64)?;
        VocabParallel::new(head(2, shard.range())?, shard)?.next_tokens(&tensor(&[1, HIDDEN], 5)?, &[&request])
    });
    assert!(seeds.iter().all(|result| matches!(result, Err(Error::Ranks { argument: "requests", .. }))), "{seeds:?}");
}
