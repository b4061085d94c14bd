//! Batches of sequences of similar length, padded to tensors.

use super::words::{END, PAD, START};
use crate::Result;
use candle_core::{Device, Tensor};
use rand::seq::SliceRandom;
use rand::{rngs::StdRng, SeedableRng};

/// Returns `count` items in random batches of similar `length`, in random order.
pub fn shuffled<K: Ord>(count: usize, batch: usize, seed: u64, length: impl Fn(usize) -> K) -> Vec<Vec<usize>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut order: Vec<usize> = (0..count).collect();
    order.shuffle(&mut rng);
    let mut batches = by_length(order, batch, length);
    batches.shuffle(&mut rng);
    batches
}

/// Splits `order` into batches of similar `length`. The sort is stable.
pub fn by_length<K: Ord>(mut order: Vec<usize>, batch: usize, length: impl Fn(usize) -> K) -> Vec<Vec<usize>> {
    order.sort_by_key(|&i| length(i));
    order.chunks(batch).map(<[usize]>::to_vec).collect()
}

/// Returns a decoder's inputs, each text after START, and its targets, each text with END; both `[batch, steps]`,
/// padded with PAD.
pub fn inputs_and_targets(texts: &[&[u32]], device: &Device) -> Result<(Tensor, Tensor)> {
    let steps = texts.iter().map(|text| text.len() + 1).max().unwrap_or(1);
    let (mut inputs, mut targets) = (vec![], vec![]);
    for text in texts {
        let padding = || std::iter::repeat_n(PAD, steps - text.len() - 1);
        inputs.extend([START].into_iter().chain(text.iter().copied()).chain(padding()));
        targets.extend(text.iter().copied().chain([END]).chain(padding()));
    }
    let shape = (texts.len(), steps);
    Ok((Tensor::from_vec(inputs, shape, device)?, Tensor::from_vec(targets, shape, device)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_have_every_item_once_and_similar_lengths() {
        let length = |i: usize| i % 5;
        for (count, batch) in [(0, 4), (1, 4), (23, 4), (20, 5)] {
            let batches = shuffled(count, batch, 7, length);
            assert!(batches.iter().all(|items| (1..=batch).contains(&items.len())));
            let mut all = batches.concat();
            all.sort_unstable();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
            let range =
                |items: &Vec<usize>| (items.iter().map(|&i| length(i)).min(), items.iter().map(|&i| length(i)).max());
            let mut ranges: Vec<_> = batches.iter().map(range).collect();
            ranges.sort();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:?}");
        }
        assert_eq!(shuffled(23, 4, 7, length), shuffled(23, 4, 7, length));
        assert_ne!(shuffled(23, 4, 7, length), shuffled(23, 4, 8, length));
    }

    #[test]
    fn targets_are_the_inputs_one_step_on() {
        let (inputs, targets) = inputs_and_targets(&[&[7, 8], &[], &[9]], &Device::Cpu).expect("a batch");
        assert_eq!(inputs.to_vec2::<u32>().expect("u32"), [[START, 7, 8], [START, PAD, PAD], [START, 9, PAD]]);
        assert_eq!(targets.to_vec2::<u32>().expect("u32"), [[7, 8, END], [END, PAD, PAD], [9, END, PAD]]);
        let (none, _) = inputs_and_targets(&[], &Device::Cpu).expect("no texts");
        assert_eq!(none.dims(), [0, 1]);
    }
}
