//! The scores of a chunk's positions on a GPU, from its logits, and the masses that their upstream gradients give to
//! ids: `struct Scored` of `rows.h`.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::arguments::{self, Argument};
use super::chunks::{is_argmax, Chunks, Mixed};
use super::device::{Buffer, Gpu, BLOCK};
use super::objective::DeviceObjective;
use crate::backend::objective::{Scored, POSITION_SCORES};
use crate::backend::operands::Sizes;
use crate::error::Result;

/// The scores of all positions, and what the kernels keep of a chunk's.
pub(super) struct DeviceScores {
    /// `[positions, n]`, i64
    ids: Buffer,
    candidates: usize,
    /// `numbers_of_scores`
    stride: usize,
    /// `struct Scored`'s
    needs: i64,
    power: f32,
    /// `[positions of a chunk, stride]`
    numbers: Buffer,
    /// The log-probabilities of all ids of a chunk's positions, if the scores depend on them
    pub(super) log_probs: Option<Buffer>,
    /// `[positions, n + 2]`
    scores: Buffer,
    /// `[positions]`: the most probable id, if it is needed
    argmax: Option<Buffer>,
    /// `[positions]`: what bounds each position's masses up to a logarithm
    magnitudes: Buffer,
}

/// How many numbers the kernels keep of the scores of one position.
pub(super) fn numbers_of_scores(candidates: usize, components: usize) -> usize {
    5 + (3 + components) * candidates
}

impl DeviceScores {
    pub(super) fn new<G: Gpu>(chunks: &Chunks<'_, G>, scored: &Scored) -> Result<Self> {
        let Sizes { positions, components, .. } = chunks.inputs.sizes;
        let (gpu, device) = (chunks.gpu, chunks.logits.tensor.device());
        let candidates = scored.token_ids.dim(1)?;
        let stride = numbers_of_scores(candidates, components);
        let zeros = |n| Buffer::zeros(gpu, n, DType::F32, device);
        // A GPU cannot launch zero blocks, not even to convert a dtype.
        let ids = match positions * candidates {
            0 => Tensor::zeros(1, DType::I64, device)?,
            _ => scored.token_ids.to_dtype(DType::I64)?,
        };
        Ok(DeviceScores {
            ids: Buffer::new(gpu, ids)?,
            candidates,
            stride,
            needs: i64::from(scored.needs_entropy) + 2 * i64::from(scored.needs_outside),
            power: (1.0 / scored.temperature) as f32,
            numbers: zeros(chunks.rows_per_chunk / components * stride)?,
            log_probs: scored.needs_all_ids().then(|| chunks.log_prob_rows()).transpose()?,
            scores: zeros(positions * (candidates + POSITION_SCORES))?,
            argmax: scored.needs_argmax.then(|| Buffer::zeros(gpu, positions, DType::U32, device)).transpose()?,
            magnitudes: zeros(positions)?,
        })
    }

    /// The kernels' argument for a chunk's positions.
    pub(super) fn argument(&self, positions: &Range<usize>) -> arguments::ScoredArgument {
        arguments::ScoredArgument {
            ids: self.ids.at(positions.start * self.candidates),
            numbers: self.numbers.at(0),
            stride: self.stride as i64,
            power: self.power,
            count: self.candidates as i32,
            needs: self.needs,
        }
    }

    /// Computes the scores of a chunk's positions from its logits.
    pub(super) fn compute<G: Gpu>(
        &self,
        chunks: &Chunks<'_, G>,
        positions: &Range<usize>,
        arguments: &[Argument; 3],
    ) -> Result<()> {
        if self.log_probs.is_some() || self.argmax.is_some() {
            let log_probs = self.log_probs.as_ref().map(|log_probs| (log_probs, 0, chunks.stride));
            let argmax = self.argmax.as_ref().map_or(0, |argmax| argmax.at(positions.start));
            chunks.mix(positions, arguments, Mixed { log_probs, argmax, ..Mixed::default() })?;
        }
        let [logits, _, rows] = *arguments;
        let arguments = [
            logits,
            rows,
            Argument::Scored(self.argument(positions)),
            Argument::Write(Buffer::or_null(&self.log_probs)),
            Argument::Write(self.first_score(positions)),
        ];
        chunks.gpu.launch("position_scores", positions.len(), &arguments)
    }

    /// Computes the masses of a chunk's positions from the upstream gradients of its scores, `[chunk, n + 2]`,
    /// and the scales of the objective. Returns the masses' magnitudes, `[chunk]`.
    pub(super) fn take_upstream<G: Gpu>(
        &self,
        chunks: &Chunks<'_, G>,
        positions: &Range<usize>,
        upstream: Tensor,
        objective: &DeviceObjective,
    ) -> Result<Tensor> {
        let upstream = Buffer::new(chunks.gpu, upstream)?;
        let arguments = [
            Argument::Scored(self.argument(positions)),
            Argument::Read(self.first_score(positions)),
            Argument::Read(upstream.at(0)),
            Argument::Write(objective.argument(positions.start).scales),
            Argument::Write(self.magnitudes.at(positions.start)),
            Argument::Int(positions.len() as i32),
            Argument::Int(chunks.inputs.sizes.vocab as i32),
        ];
        chunks.gpu.launch("position_masses", positions.len().div_ceil(BLOCK), &arguments)?;
        Ok(self.magnitudes.tensor.narrow(0, positions.start, positions.len())?)
    }

    /// The scores of some positions, `[positions, n + 2]`.
    pub(super) fn rows(&self, positions: Range<usize>) -> Result<Tensor> {
        let columns = self.candidates + POSITION_SCORES;
        let scores = self.scores.tensor.narrow(0, positions.start * columns, positions.len() * columns)?;
        Ok(scores.reshape((positions.len(), columns))?)
    }

    /// Whether each id is the most probable of all, `[positions, n]` in u8, if it is needed.
    pub(super) fn are_argmax(&self, positions: usize) -> Result<Option<Tensor>> {
        let Some(argmax) = &self.argmax else { return Ok(None) };
        let shape = (positions, self.candidates);
        if positions * self.candidates == 0 {
            return Ok(Some(Tensor::zeros(shape, DType::U8, argmax.tensor.device())?));
        }
        let argmax = argmax.tensor.narrow(0, 0, positions)?.to_dtype(DType::I64)?.unsqueeze(1)?.broadcast_as(shape)?;
        let log_probs = self.rows(0..positions)?.narrow(1, 0, self.candidates)?;
        let ids = self.ids.tensor.reshape(shape)?;
        Ok(Some(is_argmax(&argmax.contiguous()?, &ids, &log_probs.contiguous()?)?))
    }

    fn first_score(&self, positions: &Range<usize>) -> u64 {
        self.scores.at(positions.start * (self.candidates + POSITION_SCORES))
    }
}
