//! Decoding with a head whose vocabulary is cut among ranks, beside the whole head.

use std::sync::Arc;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor};
use mos_head::decode::{BeamSearch, Constraints, NextToken, Sampling, TokenRequest};
use mos_head::distributed::{Collectives, VocabParallel, VocabShard};
use mos_head::{Error, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Result};

use crate::values::{numbers, tensor, Numbers};

pub const VOCAB: usize = 1301;
pub const HIDDEN: usize = 12;

/// A mixture of softmaxes over these ids. Ids that differ by 700 are equally probable.
pub fn head(components: usize, ids: std::ops::Range<usize>) -> Result<MixtureOfSoftmaxes> {
    let half = tensor(&[700, HIDDEN], 1, DType::F32)?;
    let weight = Tensor::cat(&[&half, &half], 0)?.narrow(0, ids.start, ids.len())?;
    let named = [
        ("decoder.weight", weight),
        ("decoder.bias", Tensor::zeros(ids.len(), DType::F32, &Device::Cpu)?),
        ("prior.weight", tensor(&[components, HIDDEN], 2, DType::F32)?),
        ("latent.weight", (tensor(&[components * HIDDEN, HIDDEN], 3, DType::F32)? * 0.3)?),
        ("latent.bias", tensor(&[components * HIDDEN], 4, DType::F32)?),
    ];
    let named = named.map(|(name, tensor)| (name.to_owned(), tensor)).into_iter().collect();
    let vb = candle_nn::VarBuilder::from_tensors(named, DType::F32, &Device::Cpu);
    MixtureOfSoftmaxes::new(&MixtureConfig::new(HIDDEN, ids.len(), components), vb)
}

/// What a head that is cut among the ranks decodes is what the whole head does.
pub fn equals_the_whole(ranks: &Arc<dyn Collectives>) -> Result<()> {
    let last = ranks.rank() + 1 == ranks.ranks();
    let shards = [
        VocabShard::new(ranks.clone(), VOCAB)?,
        // Fewer ids than are asked for.
        VocabShard::with_rows(ranks.clone(), if last { VOCAB - 3 * (ranks.ranks() - 1) } else { 3 })?,
    ];
    for components in [1, 3] {
        let whole = head(components, 0..VOCAB)?;
        for shard in &shards {
            let cut = VocabParallel::new(head(components, shard.range())?, shard.clone())?;
            ranks_as(&cut, &whole)?;
            draws_as(&cut, &whole)?;
            verifies_as(&cut, &whole)?;
            assert_eq!(sequences(&cut)?, sequences(&whole)?);
        }
    }
    Ok(())
}

fn ranks_as(cut: &dyn OutputLayer, whole: &dyn OutputLayer) -> Result<()> {
    let hidden = tensor(&[2, 3, HIDDEN], 5, DType::F32)?;
    let (found, expected) = (cut.top_k(&hidden, 20)?, whole.top_k(&hidden, 20)?);
    let ids = expected.token_ids.to_vec3::<u32>()?;
    assert_eq!(found.token_ids.to_vec3::<u32>()?, ids);
    // Some of equal probability are on several ranks.
    assert!(ids.iter().flatten().any(|ids| ids.windows(2).any(|pair| pair[1] == pair[0] + 700)));
    assert_abs_diff_eq!(numbers(&found.log_probs), numbers(&expected.log_probs), epsilon = 1e-5);
    assert_eq!(cut.argmax(&hidden)?.to_vec2::<u32>()?, whole.argmax(&hidden)?.to_vec2::<u32>()?);
    Ok(())
}

fn draws_as(cut: &dyn OutputLayer, whole: &dyn OutputLayer) -> Result<()> {
    for (found, expected) in drawn(cut)?.iter().zip(drawn(whole)?) {
        assert_eq!(found.token_id, expected.token_id);
        let read = |token: &NextToken| -> Numbers {
            let best = token.best.iter().flat_map(|&(id, log_prob)| [f64::from(id), log_prob]);
            let entropy = token.entropy.expect("asked for");
            [token.log_prob, token.sampled_log_prob, entropy].into_iter().chain(best).collect()
        };
        assert_abs_diff_eq!(read(found), read(&expected), epsilon = 1e-4);
    }
    Ok(())
}

/// Drafts of two texts, of which the first is right at first.
fn verifies_as(cut: &dyn OutputLayer, whole: &dyn OutputLayer) -> Result<()> {
    let hidden = tensor(&[6, HIDDEN], 11, DType::F32)?;
    let right = whole.argmax(&hidden)?.to_vec1::<u32>()?;
    let drafts = [&[right[0], right[1], 7][..], &[1]];
    let verify = |head: &dyn OutputLayer| -> Result<Vec<(usize, Vec<u32>, u64)>> {
        let [mut one, mut two] = [TokenRequest::new(Sampling::greedy(), 1)?, TokenRequest::new(Sampling::new(), 2)?];
        let verified = head.verify(&hidden, &drafts, &mut [&mut one, &mut two])?;
        let ids = |tokens: &[NextToken]| tokens.iter().map(|token| token.token_id).collect();
        let generated = [one.generated(), two.generated()];
        Ok(verified.iter().zip(generated).map(|(text, n)| (text.accepted, ids(&text.tokens), n)).collect())
    };
    let found = verify(cut)?;
    assert_eq!(found, verify(whole)?);
    assert_eq!(found[0], (2, right[..3].to_vec(), 3));
    // An error before any work is one on every rank.
    let mut request = TokenRequest::new(Sampling::new(), 1)?;
    assert!(matches!(
        cut.verify(&hidden, &[&[VOCAB as u32; 5]], &mut [&mut request]),
        Err(Error::Request { index: 0, .. })
    ));
    Ok(())
}

/// Four token ids of each request.
fn drawn(head: &dyn OutputLayer) -> Result<Vec<NextToken>> {
    let samplings = [
        Sampling::new(),
        Sampling::greedy(),
        Sampling::new().with_temperature(0.7).with_top_p(0.8),
        Sampling::new().with_min_p(0.05),
        Sampling::new().with_top_k(7).with_top_p(0.9),
    ];
    let words = (0..VOCAB.div_ceil(32) as u32).map(|word| !(1 << (word % 32))).collect();
    let constraints = Constraints::new().with_repetition_penalty(1.3).with_penalty_window(2).with_banned(&[0, 1300]);
    let constraints = constraints.with_allowed_mask(words).with_logits_processor(|text, z| z[text.len()] += 1.0);
    let request = |(seed, sampling): (usize, Sampling)| {
        let request = TokenRequest::new(sampling, seed as u64)?.with_best(6).with_entropy(true);
        if seed % 2 == 0 {
            return Ok(request);
        }
        request.with_constraints(constraints.clone())
    };
    let mut requests = samplings.into_iter().enumerate().map(request).collect::<Result<Vec<_>>>()?;
    let mut drawn = Vec::new();
    for step in 0..4 {
        let hidden = tensor(&[requests.len(), HIDDEN], 6 + step, DType::F32)?;
        let next = head.next_tokens(&hidden, &requests.iter().collect::<Vec<_>>())?;
        requests.iter_mut().zip(&next).for_each(|(request, next)| request.push(next.token_id));
        drawn.extend(next);
    }
    Ok(drawn)
}

/// The sequences that a beam search finds.
fn sequences(head: &dyn OutputLayer) -> Result<Vec<Vec<u32>>> {
    let (start, states) = (Tensor::new(&[3u32, 699], &Device::Cpu)?, tensor(&[VOCAB, HIDDEN], 9, DType::F32)?);
    let search = BeamSearch::new(0).with_width(4).with_max_length(5).with_n_best(2);
    let found = search.run(head, &start, |tokens, _| Ok::<_, Error>(states.index_select(tokens, 0)?))?;
    Ok(found.into_iter().flatten().map(|hypothesis| hypothesis.token_ids).collect())
}
