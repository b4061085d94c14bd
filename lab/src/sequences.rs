//! Batches of sequences of similar length, padded to tensors.

use super::words::{END, PAD, START};
use super::Result;
use candle_core::{Device, Tensor};
use rand::seq::SliceRandom;
use rand::{rngs::StdRng, SeedableRng};

/// `count` items in random batches of similar `length`, in random order.
pub fn shuffled<K: Ord>(count: usize, batch: usize, seed: u64, length: impl Fn(usize) -> K) -> Vec<Vec<usize>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut order: Vec<usize> = (0..count).collect();
    order.shuffle(&mut rng);
    let mut batches = by_length(order, batch, length);
    batches.shuffle(&mut rng);
    batches
}

/// `order` split into batches of similar `length`; the sort is stable.
pub fn by_length<K: Ord>(mut order: Vec<usize>, batch: usize, length: impl Fn(usize) -> K) -> Vec<Vec<usize>> {
    order.sort_by_key(|&i| length(i));
    order.chunks(batch).map(<[usize]>::to_vec).collect()
}

/// A decoder's inputs, each text after START, and its targets, each text with END; both `[batch, steps]`, padded with PAD.
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
