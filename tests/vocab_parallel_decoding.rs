//! Decoding with heads whose vocabulary is cut among ranks.

#[path = "common/decoding.rs"]
mod decoding;
#[path = "common/ranks.rs"]
mod ranks;
#[path = "common/values.rs"]
mod values;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use decoding::{equals_the_whole, head, HIDDEN, VOCAB};
use mos_head::decode::{Constraints, Sampling, TokenRequest};
use mos_head::distributed::{Collectives, VocabParallel, VocabShard};
use mos_head::{Error, OutputLayer, Result, SoftmaxHead};
use ranks::on_ranks;
use values::tensor;

#[test]
fn what_is_decoded_does_not_depend_on_the_number_of_ranks() -> Result<()> {
    for ranks in 1..=4 {
        for result in on_ranks(ranks, |ranks| equals_the_whole(&ranks)) {
            result?;
        }
    }
    Ok(())
}

/// Ids of the text outside the vocabulary change nothing, and every rank names the request that is refused.
#[test]
fn requests_of_a_cut_vocabulary_are_checked_as_those_of_the_whole() -> Result<()> {
    let results = on_ranks(3, |ranks: Arc<dyn Collectives>| -> Result<_> {
        let shard = VocabShard::new(ranks, VOCAB)?;
        let head = VocabParallel::new(head(2, shard.range())?, shard)?;
        let hidden = tensor(&[2, HIDDEN], 5, DType::F32)?;
        let constraints = Constraints::new().with_repetition_penalty(1.3);
        let request = TokenRequest::new(Sampling::new(), 7)?.with_constraints(constraints)?;
        let with_image = request.clone().with_prompt(&[3, VOCAB as u32, 40_000]);
        let request = request.with_prompt(&[3]);
        let plain = head.next_tokens(&hidden, &[&request, &request])?;
        let tiny = TokenRequest::new(Sampling::new().with_temperature(1e-307), 7)?.with_best(1);
        let tiny = &head.next_tokens(&hidden, &[&tiny, &tiny])?[0];
        assert_eq!(tiny.token_id % 700, tiny.best[0].0 % 700);
        assert_eq!(head.next_tokens(&hidden, &[&with_image, &with_image])?, plain);
        let outside = Constraints::new().with_banned(&[VOCAB as u32]);
        let outside = request.clone().with_constraints(outside)?;
        Ok(head.next_tokens(&hidden, &[&request, &outside]).map(|_| ()))
    });
    for result in results {
        let error = result?.expect_err("an id outside the vocabulary");
        assert!(matches!(error, Error::Request { index: 1, .. }), "{error:?}");
    }
    Ok(())
}

#[test]
fn ids_above_two_to_the_24_are_exact() -> Result<()> {
    const VOCAB: usize = (1 << 24) + 9;
    // f32 has none of the odd ones.
    const BEST: [u32; 3] = [(1 << 24) + 5, (1 << 24) + 3, 7];
    for found in on_ranks(2, |ranks: Arc<dyn Collectives>| -> Result<_> {
        let shard = VocabShard::new(ranks, VOCAB)?;
        let mut weight = vec![0f32; shard.range().len()];
        for (id, logit) in BEST.into_iter().zip([30.0, 29.0, 28.0]) {
            if shard.range().contains(&(id as usize)) {
                weight[id as usize - shard.range().start] = logit;
            }
        }
        let weight = Tensor::from_vec(weight, (shard.range().len(), 1), &Device::Cpu)?;
        let head = VocabParallel::new(SoftmaxHead::from_tensors(weight, None)?, shard)?;
        let hidden = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
        let request = TokenRequest::new(Sampling::greedy(), 1)?;
        let next = head.next_tokens(&hidden, &[&request])?;
        Ok((head.top_k(&hidden, 3)?.token_ids.to_vec2::<u32>()?, next[0].token_id))
    }) {
        assert_eq!(found?, (vec![BEST.to_vec()], BEST[0]));
    }
    Ok(())
}

#[test]
fn ranks_that_disagree_about_a_query_get_an_error_on_every_rank() {
    let top_k_on_ranks = |k: fn(usize) -> usize| {
        on_ranks(3, move |ranks: Arc<dyn Collectives>| -> Result<_> {
            let (rank, shard) = (ranks.rank(), VocabShard::new(ranks, VOCAB)?);
            VocabParallel::new(head(2, shard.range())?, shard)?.top_k(&tensor(&[2, HIDDEN], 5, DType::F32)?, k(rank))
        })
    };
    for result in top_k_on_ranks(|rank| 3 + rank) {
        assert!(matches!(result, Err(Error::Ranks { argument: "k", .. })), "{result:?}");
    }
    for (rank, result) in top_k_on_ranks(|rank| if rank == 0 { 0 } else { 5 }).into_iter().enumerate() {
        match rank {
            0 => assert!(matches!(result, Err(Error::Config { argument: "k", .. })), "{result:?}"),
            _ => assert!(matches!(result, Err(Error::Ranks { .. })), "{result:?}"),
        }
    }
    let seeds = on_ranks(2, |ranks: Arc<dyn Collectives>| -> Result<_> {
        let (rank, shard) = (ranks.rank(), VocabShard::new(ranks, VOCAB)?);
        let request = TokenRequest::new(Sampling::new(), rank as u64)?;
        VocabParallel::new(head(2, shard.range())?, shard)?
            .next_tokens(&tensor(&[1, HIDDEN], 5, DType::F32)?, &[&request])
    });
    assert!(seeds.iter().all(|result| matches!(result, Err(Error::Ranks { argument: "requests", .. }))), "{seeds:?}");
}
