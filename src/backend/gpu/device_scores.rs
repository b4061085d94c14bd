//! The scores of a chunk's positions on a GPU, from its logits, and the masses that their upstream gradients give to
//! ids: the kernels of `kernels/scores.h`, and `struct Scored` of `kernels/arguments.h`.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::arguments::{Read, ScoredArgument, Write};
use super::chunks::{is_argmax, ChunkArguments, Chunks, LogProbRows, MixtureResults};
use super::device::{Buffer, Gpu, BLOCK};
use super::kernels::{KernelArguments, PositionMassesArguments, PositionScoresArguments};
use super::objective::DeviceObjective;
use crate::backend::objective::{Scored, POSITION_SCORES};
use crate::backend::operands::Sizes;
use crate::error::Result;

/// The scores of all positions, and the values that the kernels keep of a chunk's.
pub(super) struct DeviceScores {
    /// `[positions, n]`, i64: the candidates of each position.
    candidates: Buffer,
    /// The number of candidates of each position.
    n: usize,
    /// The number of values of each position ([`values_per_position`]).
    stride: usize,
    /// A bit for each score besides the candidates', as in `struct Scored`.
    needs: i64,
    /// The inverse of the temperature.
    power: f32,
    /// `[positions of a chunk, stride]`
    values: Buffer,
    /// The log-probabilities of all ids of a chunk's positions, if the scores depend on them.
    pub(super) log_probs: Option<Buffer>,
    /// `[positions, n + 3]`
    scores: Buffer,
    /// `[positions]`: the most probable id, if it is needed.
    argmax: Option<Buffer>,
    /// `[positions]`: a bound on each position's masses, up to a logarithm.
    mass_bounds: Buffer,
}

/// The number of values that the kernels keep of the scores of one position.
pub(super) fn values_per_position(candidates: usize, components: usize) -> usize {
    7 + (3 + components) * candidates
}

impl DeviceScores {
    /// Buffers for the scores of all positions.
    pub(super) fn new<G: Gpu>(chunks: &Chunks<'_, G>, scored: &Scored) -> Result<Self> {
        let Sizes { positions, components, .. } = chunks.inputs.sizes;
        let (gpu, device) = (chunks.gpu, chunks.logits.tensor.device());
        let n = scored.token_ids.dim(1)?;
        let stride = values_per_position(n, components);
        let unwritten = |n| Buffer::unwritten(gpu, n, DType::F32, device);
        // A GPU cannot launch zero blocks, not even to convert a dtype.
        let candidates = match positions * n {
            0 => Tensor::zeros(1, DType::I64, device)?,
            _ => scored.token_ids.to_dtype(DType::I64)?,
        };
        Ok(DeviceScores {
            candidates: Buffer::new(gpu, candidates)?,
            n,
            stride,
            needs: i64::from(scored.needs_entropy)
                + 2 * i64::from(scored.needs_outside)
                + 4 * i64::from(scored.needs_collision),
            power: (1.0 / scored.temperature) as f32,
            values: unwritten(chunks.rows_per_chunk / components * stride)?,
            log_probs: scored.needs_all_ids().then(|| chunks.log_prob_rows()).transpose()?,
            scores: unwritten(positions * (n + POSITION_SCORES))?,
            argmax: scored.needs_argmax.then(|| Buffer::unwritten(gpu, positions, DType::U32, device)).transpose()?,
            mass_bounds: unwritten(positions)?,
        })
    }

    /// The kernels' argument for a chunk's positions.
    pub(super) fn argument(&self, positions: &Range<usize>) -> ScoredArgument {
        ScoredArgument {
            candidates: self.candidates.at(positions.start * self.n),
            values: self.values.at(0),
            stride: self.stride as i64,
            power: self.power,
            count: self.n as i32,
            needs: self.needs,
        }
    }

    /// Computes the scores of a chunk's positions from its logits.
    pub(super) fn compute<G: Gpu>(
        &self,
        chunks: &Chunks<'_, G>,
        positions: &Range<usize>,
        arguments: ChunkArguments,
    ) -> Result<()> {
        if self.log_probs.is_some() || self.argmax.is_some() {
            let results = MixtureResults {
                log_probs: self.log_probs.as_ref().map(|buffer| LogProbRows {
                    buffer,
                    first: 0,
                    stride: chunks.stride,
                }),
                losses: 0,
                argmax: self.argmax.as_ref().map_or(0, |argmax| argmax.at(positions.start)),
            };
            chunks.mix(positions, arguments, results)?;
        }
        let arguments = PositionScoresArguments {
            logits: arguments.logits,
            rows: arguments.rows,
            scored: self.argument(positions),
            log_probs: Write(Buffer::or_null(&self.log_probs)),
            scores: Write(self.first_score(positions)),
        };
        arguments.launch(chunks.gpu, positions.len())
    }

    /// Computes the masses of a chunk's positions from the upstream gradients of its scores, `[chunk, n + 3]`,
    /// and writes the scales of the objective. Returns the bounds on the masses, `[chunk]`.
    pub(super) fn take_upstream<G: Gpu>(
        &self,
        chunks: &Chunks<'_, G>,
        positions: &Range<usize>,
        upstream: Tensor,
        objective: &DeviceObjective,
    ) -> Result<Tensor> {
        let upstream = Buffer::new(chunks.gpu, upstream)?;
        let arguments = PositionMassesArguments {
            scored: self.argument(positions),
            scores: Read(self.first_score(positions)),
            upstream: Read(upstream.at(0)),
            scales: Write(objective.argument(positions.start).scales),
            mass_bounds: Write(self.mass_bounds.at(positions.start)),
            positions: positions.len() as i32,
            vocab: chunks.inputs.sizes.vocab as i32,
        };
        arguments.launch(chunks.gpu, positions.len().div_ceil(BLOCK))?;
        Ok(self.mass_bounds.tensor.narrow(0, positions.start, positions.len())?)
    }

    /// The scores of some positions, `[positions, n + 3]`.
    pub(super) fn scores(&self, positions: Range<usize>) -> Result<Tensor> {
        let columns = self.n + POSITION_SCORES;
        let scores = self.scores.tensor.narrow(0, positions.start * columns, positions.len() * columns)?;
        Ok(scores.reshape((positions.len(), columns))?)
    }

    /// Whether each candidate is the most probable id, `[positions, n]` in u8, if it is needed.
    pub(super) fn are_argmax(&self, positions: usize) -> Result<Option<Tensor>> {
        let Some(argmax) = &self.argmax else { return Ok(None) };
        let shape = (positions, self.n);
        if positions * self.n == 0 {
            return Ok(Some(Tensor::zeros(shape, DType::U8, argmax.tensor.device())?));
        }
        let argmax = argmax.tensor.narrow(0, 0, positions)?.to_dtype(DType::I64)?.unsqueeze(1)?.broadcast_as(shape)?;
        let log_probs = self.scores(0..positions)?.narrow(1, 0, self.n)?;
        let candidates = self.candidates.tensor.reshape(shape)?;
        Ok(Some(is_argmax(&argmax.contiguous()?, &candidates, &log_probs.contiguous()?)?))
    }

    /// The address of the scores of the first of some positions.
    fn first_score(&self, positions: &Range<usize>) -> u64 {
        self.scores.at(positions.start * (self.n + POSITION_SCORES))
    }
}
