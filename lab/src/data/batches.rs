//! Splits a text into parallel streams, and these into windows for truncated backpropagation through time.

use crate::Result;
use candle_core::{Device, Tensor};
use rand::{rngs::StdRng, Rng};
use rand_distr::{Distribution, Normal};
use std::ops::Range;

/// The target of a position past the end of the text; the loss ignores it.
pub const IGNORED: i64 = -1;

/// Parallel streams of equal length. The last one is padded, so that every target occurs once.
#[derive(Clone, Copy)]
pub struct Streams {
    /// The number of targets of the text.
    targets: usize,
    /// The number of streams.
    pub count: usize,
    /// The number of targets of a stream, with the padding.
    length: usize,
}

/// A window has some steps of some streams, which one backward pass sees.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// The streams of this window.
    pub streams: Range<usize>,
    /// The index of the first step.
    pub at: usize,
    /// The number of steps.
    pub steps: usize,
    /// The index of this part of the streams.
    pub part: usize,
    /// The part's share of the targets of all parts, from 0 to 1.
    pub share: f64,
    /// Whether the optimizer takes a step after this window.
    pub is_last_part: bool,
    /// The factor of the learning rate: the drawn length over `bptt`.
    pub lr_factor: f64,
}

impl Streams {
    /// Cuts the text into `count` streams of equal length.
    pub fn new(text: &[u32], count: usize) -> Self {
        let targets = text.len() - 1;
        Self { targets, count, length: targets.div_ceil(count) }
    }

    /// Returns windows of `bptt` steps with all streams.
    pub fn windows(self, bptt: usize) -> Vec<Window> {
        self.windows_in_parts(bptt, self.count)
    }

    /// Returns windows of `bptt` steps, each in parts of at most `part` streams.
    pub(crate) fn windows_in_parts(self, bptt: usize, part: usize) -> Vec<Window> {
        self.split(part, || (bptt, 1.0))
    }

    /// Returns windows of random lengths around `bptt`, at most `most` above it, in parts of at most `part` streams.
    pub(crate) fn random_windows(self, bptt: usize, most: usize, part: usize, rng: &mut StdRng) -> Vec<Window> {
        self.split(part, || {
            let steps = random_length(bptt, most, rng);
            (steps, steps as f64 / bptt as f64)
        })
    }

    fn split(self, part: usize, mut length: impl FnMut() -> (usize, f64)) -> Vec<Window> {
        let mut windows = vec![];
        let mut at = 0;
        while at < self.length {
            let (steps, lr_factor) = length();
            let steps = steps.min(self.length - at);
            let targets = |streams: Range<usize>| -> usize { streams.map(|s| self.targets_of(s, at, steps)).sum() };
            let all = targets(0..self.count) as f64;
            for (i, first) in (0..self.count).step_by(part).enumerate() {
                let streams = first..(first + part).min(self.count);
                let is_last_part = streams.end == self.count;
                let share = targets(streams.clone()) as f64 / all;
                windows.push(Window { streams, at, steps, part: i, share, is_last_part, lr_factor });
            }
            at += steps;
        }
        windows
    }

    /// Returns the targets of a stream in a window that are not padding.
    fn targets_of(self, stream: usize, at: usize, steps: usize) -> usize {
        self.targets.saturating_sub(stream * self.length + at).min(steps)
    }

    /// Returns token ids and their successors, each `[streams, steps]`.
    pub fn tensors(self, text: &[u32], window: &Window, device: &Device) -> Result<(Tensor, Tensor)> {
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for stream in window.streams.clone() {
            let start = stream * self.length + window.at;
            for input in start..start + window.steps {
                inputs.push(text.get(input).copied().unwrap_or(0));
                targets.push(text.get(input + 1).map_or(IGNORED, |&id| i64::from(id)));
            }
        }
        let shape = (window.streams.len(), window.steps);
        Ok((Tensor::from_vec(inputs, shape, device)?, Tensor::from_vec(targets, shape, device)?))
    }
}

/// Returns a random number of steps (Merity et al., 2018, section 5): `bptt`, or half of it in one of twenty windows,
/// with a standard deviation of 5; at least 5, and at most `most` above `bptt`.
fn random_length(bptt: usize, most: usize, rng: &mut StdRng) -> usize {
    let mean = if rng.random::<f64>() < 0.95 { bptt as f64 } else { bptt as f64 / 2.0 };
    let drawn = Normal::new(mean, 5.0).expect("a finite deviation").sample(rng);
    (drawn.max(5.0) as usize).min(bptt + most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn every_target_occurs_once_after_its_own_input() {
        for (targets, batch, bptt) in [(1, 1, 1), (7, 3, 2), (100, 7, 9), (101, 10, 35), (5, 8, 3), (64, 4, 16)] {
            let text: Vec<u32> = (100..101 + targets).collect();
            let streams = Streams::new(&text, batch);
            let random = |most, part| streams.random_windows(bptt, most, part, &mut StdRng::seed_from_u64(1));
            // Windows with all streams, in parts, of random lengths, and both.
            let all = [streams.windows(bptt), streams.windows_in_parts(bptt, 2), random(3, batch), random(1, 3)];
            for windows in all {
                let mut seen = Vec::new();
                let mut share = 0.0;
                for window in windows {
                    let (inputs, wanted) = streams.tensors(&text, &window, &Device::Cpu).unwrap();
                    let inputs = inputs.flatten_all().unwrap().to_vec1::<u32>().unwrap();
                    let wanted = wanted.flatten_all().unwrap().to_vec1::<i64>().unwrap();
                    for (input, target) in inputs.into_iter().zip(wanted) {
                        if target != IGNORED {
                            assert_eq!(i64::from(input) + 1, target);
                            seen.push(target as u32);
                        }
                    }
                    share += window.share;
                    if window.is_last_part {
                        assert!((share - 1.0).abs() < 1e-9, "the shares of a step sum to one: {share}");
                        share = 0.0;
                    }
                }
                seen.sort_unstable();
                assert_eq!(seen, text[1..], "{targets} targets in {batch} streams of windows of {bptt}");
            }
        }
    }

    #[test]
    fn a_stream_continues_in_the_next_window() {
        let text: Vec<u32> = (0..41).collect();
        let streams = Streams::new(&text, 2);
        let windows = streams.windows(7);
        let read = |window| {
            let (inputs, targets) = streams.tensors(&text, window, &Device::Cpu).unwrap();
            (inputs.to_vec2::<u32>().unwrap(), targets.to_vec2::<i64>().unwrap())
        };
        for pair in windows.windows(2) {
            let ((_, before), (after, _)) = (read(&pair[0]), read(&pair[1]));
            for stream in 0..2 {
                assert_eq!(Some(&i64::from(after[stream][0])), before[stream].last());
            }
        }
    }

    #[test]
    fn random_lengths_are_those_of_the_paper() {
        let mut rng = StdRng::seed_from_u64(1);
        let lengths: Vec<usize> = (0..20_000).map(|_| random_length(70, 8, &mut rng)).collect();
        let short = lengths.iter().filter(|&&steps| steps < 53).count() as f64 / 20_000.0;
        assert!((short - 0.05).abs() < 0.01, "{short} are about 35");
        assert_eq!((lengths.iter().max(), lengths.iter().min() > Some(&5)), (Some(&78), true));
        let long: Vec<f64> = lengths.iter().filter(|&&steps| steps >= 53).map(|&steps| steps as f64).collect();
        let mean = long.iter().sum::<f64>() / long.len() as f64;
        assert!((mean - 69.5).abs() < 0.5, "{mean}");
        assert!((0..1000).all(|_| random_length(6, 0, &mut rng) >= 5));
    }
}
