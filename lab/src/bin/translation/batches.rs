//! Batches of pairs of similar length, padded to tensors.

use crate::corpus::{targets, Encoded};
use candle_core::{Device, Tensor};
use lab::data::words::{END, PAD};
use lab::{data::sequences, Result};
use rand::seq::SliceRandom;
use rand::{rngs::StdRng, SeedableRng};

/// Source sentences, each followed by END, padded at the end.
pub(crate) struct Sources {
    /// [batch, positions], forwards and backwards; the padding stays at the end.
    pub(crate) tokens: Tensor,
    pub(crate) reversed: Tensor,
    /// The index in the flattened `reversed` of each flattened token; [batch * positions].
    pub(crate) back: Tensor,
    /// 1 over the length, 0 over the padding; [batch, 1, positions].
    pub(crate) average: Tensor,
    /// 0 over the sentence, so low over the padding that its attention weights vanish; [batch, 1, positions].
    pub(crate) mask: Tensor,
}

const HIDDEN: f32 = -1e9;

impl Sources {
    /// Pads sentences to the longest sentence, or to `positions` if that is more.
    pub(crate) fn new(sentences: &[&[u32]], positions: usize, device: &Device) -> Result<Self> {
        let batch = sentences.len();
        let longest = sentences.iter().map(|sentence| sentence.len() + 1).max().unwrap_or(1);
        let positions = positions.max(longest);
        let (mut tokens, mut reversed, mut back) = (vec![], vec![], vec![]);
        let (mut average, mut mask) = (vec![], vec![]);
        for (row, sentence) in sentences.iter().enumerate() {
            let length = sentence.len() + 1;
            let padding = || std::iter::repeat_n(PAD, positions - length);
            tokens.extend(sentence.iter().copied().chain([END]).chain(padding()));
            reversed.extend([END].into_iter().chain(sentence.iter().rev().copied()).chain(padding()));
            for position in 0..positions {
                let inside = position < length;
                let mirrored = if inside { length - 1 - position } else { position };
                back.push((row * positions + mirrored) as u32);
                average.push(if inside { 1.0 / length as f32 } else { 0.0 });
                mask.push(if inside { 0.0 } else { HIDDEN });
            }
        }
        Ok(Self {
            tokens: Tensor::from_vec(tokens, (batch, positions), device)?,
            reversed: Tensor::from_vec(reversed, (batch, positions), device)?,
            back: Tensor::from_vec(back, batch * positions, device)?,
            average: Tensor::from_vec(average, (batch, 1, positions), device)?,
            mask: Tensor::from_vec(mask, (batch, 1, positions), device)?,
        })
    }
}

/// The decoder's inputs and targets, each [batch, steps], padded with PAD.
pub(crate) struct Batch {
    pub(crate) sources: Sources,
    pub(crate) inputs: Tensor,
    pub(crate) targets: Tensor,
}

impl Batch {
    pub(crate) fn new(pairs: &[Encoded], chosen: &[usize], device: &Device) -> Result<Self> {
        let sources: Vec<&[u32]> = chosen.iter().map(|&i| pairs[i].source.as_slice()).collect();
        let targets: Vec<&[u32]> = chosen.iter().map(|&i| pairs[i].target.as_slice()).collect();
        let (inputs, targets) = sequences::inputs_and_targets(&targets, device)?;
        Ok(Self { sources: Sources::new(&sources, 0, device)?, inputs, targets })
    }
}

/// Returns the pairs in random batches of similar length, in random order.
pub(crate) fn shuffled(pairs: &[Encoded], batch: usize, seed: u64) -> Vec<Vec<usize>> {
    sequences::shuffled(pairs.len(), batch, seed, |i| (pairs[i].target.len(), pairs[i].source.len()))
}

/// Returns the pairs in random batches of similar length, in random order, each with about as many targets as `batch`
/// pairs have on average: more pairs of short targets, fewer of long ones.
pub(crate) fn shuffled_evenly(pairs: &[Encoded], batch: usize, seed: u64) -> Vec<Vec<usize>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.shuffle(&mut rng);
    order.sort_by_key(|&i| (pairs[i].target.len(), pairs[i].source.len()));
    let most = (targets(pairs) * batch).div_ceil(pairs.len().max(1));
    let mut batches: Vec<Vec<usize>> = vec![];
    let mut left = 0;
    for i in order {
        let targets = pairs[i].target.len() + 1;
        match batches.last_mut() {
            Some(last) if targets <= left => last.push(i),
            _ => {
                batches.push(vec![i]);
                left = most;
            }
        }
        left = left.saturating_sub(targets);
    }
    batches.shuffle(&mut rng);
    batches
}

/// Returns the pairs in batches of similar length, in their order.
pub(crate) fn sorted(pairs: &[Encoded], batch: usize) -> Vec<Vec<usize>> {
    sequences::by_length((0..pairs.len()).collect(), batch, |i| (pairs[i].target.len(), pairs[i].source.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lab::data::words::START;

    fn pairs(count: usize) -> Vec<Encoded> {
        let text = |i: usize| (0..i % 7).map(|id| 4 + id as u32).collect();
        (0..count).map(|i| Encoded { source: text(i), target: text(i * 5 + 3) }).collect()
    }

    #[test]
    fn every_pair_is_in_one_batch_and_a_seed_fixes_which() {
        for (count, batch) in [(1, 8), (64, 8), (101, 8), (33, 1)] {
            let pairs = pairs(count);
            let batches = shuffled(&pairs, batch, 5);
            assert!(batches.iter().all(|chosen| chosen.len() <= batch));
            let mut seen = batches.concat();
            seen.sort_unstable();
            assert_eq!(seen, (0..count).collect::<Vec<_>>());
            assert_eq!(shuffled(&pairs, batch, 5), batches);
        }
        assert_ne!(shuffled(&pairs(101), 8, 5), shuffled(&pairs(101), 8, 6));
    }

    #[test]
    fn even_batches_have_similar_numbers_of_targets_and_every_pair() {
        // Half of the targets are of one token, the others of up to 40.
        let text = |i: usize| vec![5; if i.is_multiple_of(2) { 1 } else { i % 40 }];
        let pairs: Vec<_> = (0..1000).map(|i| Encoded { source: text(i), target: text(i) }).collect();
        let batches = shuffled_evenly(&pairs, 64, 5);
        let mut seen = batches.concat();
        seen.sort_unstable();
        assert_eq!(seen, (0..1000).collect::<Vec<_>>());
        let most = targets(&pairs) * 64 / 1000 + 1;
        let counts = batches.iter().map(|batch| batch.iter().map(|&i| pairs[i].target.len() + 1).sum::<usize>());
        let counts: Vec<usize> = counts.collect();
        assert!(counts.iter().all(|&count| count <= most), "{counts:?}");
        let fewer = counts.iter().filter(|&&count| count < most * 9 / 10).count();
        assert!(fewer <= 1, "all but the last are full: {counts:?}");
        assert_eq!(shuffled_evenly(&pairs, 64, 5), batches);
        assert_ne!(shuffled_evenly(&pairs, 64, 6), batches);
        // A target that is longer than a batch has one of its own.
        let long = [Encoded { source: vec![], target: vec![5; 90] }, Encoded { source: vec![], target: vec![5] }];
        assert_eq!(shuffled_evenly(&long, 1, 1).len(), 2);
        assert!(shuffled_evenly(&[], 64, 1).is_empty());
    }

    #[test]
    fn sentences_are_ended_padded_and_reversed_within_their_length() {
        let sources = Sources::new(&[&[7, 8], &[9]], 0, &Device::Cpu).unwrap();
        assert_eq!(sources.tokens.to_vec2::<u32>().unwrap(), [[7, 8, END], [9, END, PAD]]);
        assert_eq!(sources.reversed.to_vec2::<u32>().unwrap(), [[END, 8, 7], [END, 9, PAD]]);
        let reversed = sources.reversed.flatten_all().unwrap();
        let again = reversed.index_select(&sources.back, 0).unwrap().reshape((2, 3)).unwrap();
        assert_eq!(again.to_vec2::<u32>().unwrap(), sources.tokens.to_vec2::<u32>().unwrap());

        let batch =
            Batch::new(&[Encoded { source: vec![], target: vec![5] }, pairs(5)[4].clone()], &[0, 1], &Device::Cpu);
        let batch = batch.unwrap();
        assert_eq!(batch.inputs.to_vec2::<u32>().unwrap()[0][..3], [START, 5, PAD]);
        assert_eq!(batch.targets.to_vec2::<u32>().unwrap()[0][..3], [5, END, PAD]);
    }
}
