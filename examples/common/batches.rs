//! Splits a text into parallel streams, and these into windows for truncated backpropagation through time.

use super::Result;
use candle_core::{Device, Tensor};

/// Target of a position past the end of the text; the loss ignores it.
pub(crate) const IGNORED: i64 = -1;

/// `batch` parallel streams of equal length. The last stream is padded, so that every target occurs once.
pub(crate) struct Batches<'a> {
    text: &'a [u32],
    batch: usize,
    stream: usize, // targets per stream, padding included
    bptt: usize,
    at: usize,
}

/// Token ids and their successors, each [batch, steps].
pub(crate) struct Window {
    pub(crate) inputs: Vec<u32>,
    pub(crate) targets: Vec<i64>,
    pub(crate) batch: usize,
    pub(crate) steps: usize,
}

impl<'a> Batches<'a> {
    pub(crate) fn new(text: &'a [u32], batch: usize, bptt: usize) -> Self {
        let stream = (text.len() - 1).div_ceil(batch);
        Self { text, batch, stream, bptt, at: 0 }
    }
}

impl Iterator for Batches<'_> {
    type Item = Window;

    fn next(&mut self) -> Option<Window> {
        let steps = self.bptt.min(self.stream - self.at);
        if steps == 0 {
            return None;
        }
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for row in 0..self.batch {
            let start = row * self.stream + self.at;
            for input in start..start + steps {
                inputs.push(self.text.get(input).copied().unwrap_or(0));
                targets.push(self.text.get(input + 1).map_or(IGNORED, |&id| i64::from(id)));
            }
        }
        self.at += steps;
        Some(Window { inputs, targets, batch: self.batch, steps })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let windows = (self.stream - self.at).div_ceil(self.bptt);
        (windows, Some(windows))
    }
}

impl ExactSizeIterator for Batches<'_> {}

impl Window {
    pub(crate) fn tensors(&self, device: &Device) -> Result<(Tensor, Tensor)> {
        let shape = (self.batch, self.steps);
        Ok((Tensor::from_slice(&self.inputs, shape, device)?, Tensor::from_slice(&self.targets, shape, device)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_occurs_once_after_its_own_input() {
        for (targets, batch, bptt) in [(1, 1, 1), (7, 3, 2), (100, 7, 9), (101, 10, 35), (5, 8, 3), (64, 4, 16)] {
            let text: Vec<u32> = (100..101 + targets).collect();
            let batches = Batches::new(&text, batch, bptt);
            let windows = batches.len();
            let mut seen = Vec::new();
            let mut count = 0;
            for window in batches {
                count += 1;
                for (&input, &target) in window.inputs.iter().zip(&window.targets) {
                    if target != IGNORED {
                        assert_eq!(i64::from(input) + 1, target);
                        seen.push(target as u32);
                    }
                }
            }
            seen.sort_unstable();
            assert_eq!(seen, text[1..], "{targets} targets in {batch} streams of windows of {bptt}");
            assert_eq!(count, windows);
        }
    }

    #[test]
    fn a_stream_continues_in_the_next_window() {
        let text: Vec<u32> = (0..41).collect();
        let windows: Vec<Window> = Batches::new(&text, 2, 7).collect();
        for pair in windows.windows(2) {
            for row in 0..2 {
                assert_eq!(
                    i64::from(pair[1].inputs[row * pair[1].steps]),
                    pair[0].targets[(row + 1) * pair[0].steps - 1]
                );
            }
        }
    }
}
