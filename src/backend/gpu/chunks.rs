//! A mixture on a GPU, chunk by chunk: its logits, and the log-probabilities and most probable ids that follow from
//! them.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::arguments::{function_and_cap, LogitsArgument, ObjectiveArgument, Read, RowsArgument, Write};
use super::columns::{product_dtype, DeviceColumns};
use super::device::{Buffer, DeviceProduct, Gpu};
use super::kernels::{KernelArguments, MixtureLogProbsArguments, RowLogSumExpArguments, TopKArguments};
use crate::backend::logit_function::LogitFunction;
use crate::backend::operands::Sizes;
use crate::backend::plan::{Computation, Planned};
use crate::backend::shard::VocabShard;
use crate::backend::shared_rows::{join, SharedRow};
use crate::error::Result;

/// The operands of a mixture in device memory.
pub(super) struct DeviceOperands {
    pub(super) sizes: Sizes,
    /// The dtype of the operands of products.
    pub(super) dtype: DType,
    /// The weight and, if there is one, the adapter, with the contexts that each is multiplied by.
    pub(super) columns: Vec<DeviceColumns>,
    log_priors: Option<Buffer>,
    bias: Option<Buffer>,
    logit_scale: f32,
    pub(super) logit_function: LogitFunction,
}

impl DeviceOperands {
    /// The operands as buffers.
    fn new<G: Gpu>(gpu: &G, planned: &Planned) -> Result<Self> {
        let operands = &planned.operands;
        Ok(DeviceOperands {
            sizes: operands.sizes,
            dtype: product_dtype(operands),
            columns: DeviceColumns::all(gpu, planned)?,
            log_priors: Buffer::from_option(gpu, &operands.log_priors)?,
            bias: Buffer::from_option(gpu, &operands.bias)?,
            logit_scale: operands.logit_scale as f32,
            logit_function: operands.logit_function,
        })
    }

    /// The rows of some positions.
    pub(super) fn rows(&self, positions: &Range<usize>) -> Range<usize> {
        positions.start * self.sizes.components..positions.end * self.sizes.components
    }
}

/// One mixture on a GPU. The kernels write into fresh tensors that nothing else refers to; each of them has at least
/// one element, even for an empty batch.
pub(super) struct Chunks<'a, G> {
    pub(super) gpu: &'a G,
    pub(super) planned: &'a Planned,
    pub(super) inputs: DeviceOperands,
    /// The number of elements from one row of logits to the next.
    pub(super) stride: usize,
    pub(super) rows_per_chunk: usize,
    /// `[rows of a chunk, logit_columns]`, f32
    pub(super) logits: Buffer,
    /// The ids whose logits are in memory: all, unless the first product writes exponentials in place of logits.
    pub(super) logit_columns: usize,
    /// `[ROW_VALUES, rows of a chunk]`: see `struct Rows` of `kernels/arguments.h`.
    row_values: Buffer,
}

/// The arguments that most kernels take, for one chunk.
#[derive(Clone, Copy)]
pub(super) struct ChunkArguments {
    pub(super) logits: LogitsArgument,
    pub(super) objective: ObjectiveArgument,
    pub(super) rows: RowsArgument,
}

/// Where the kernel of the mixture's log-probabilities writes its results, each if it is present.
#[derive(Default)]
pub(super) struct MixtureResults<'b> {
    pub(super) log_probs: Option<LogProbRows<'b>>,
    /// The address of the first position's loss, to which the kernel adds the soft part.
    pub(super) losses: u64,
    /// The address of the first position's most probable id.
    pub(super) argmax: u64,
}

/// The place of the log-probabilities of a chunk's positions.
pub(super) struct LogProbRows<'b> {
    pub(super) buffer: &'b Buffer,
    /// The element of the first position.
    pub(super) first: usize,
    /// The number of elements from one position to the next.
    pub(super) stride: usize,
}

/// The ids whose logits are computed first where the first product writes exponentials, to choose what those of a row
/// are relative to.
pub(super) const FIRST_IDS: usize = 64;
/// The number of values that the kernels keep of each row.
const ROW_VALUES: usize = 9;
/// The index of the factors among the values of a row (`Rows` in `kernels/arguments.h`).
const ROW_FACTOR: usize = 7;
/// Rows of logits are padded to a multiple of this many elements, so that each is aligned to 16 bytes in every dtype.
pub(super) const ROW_ALIGN: usize = 8;

impl<'a, G: Gpu> Chunks<'a, G> {
    /// The operands, and the workspace of a chunk.
    pub(super) fn new(gpu: &'a G, planned: &'a Planned) -> Result<Self> {
        let Planned { operands, plan, .. } = planned;
        let stride = operands.sizes.vocab.next_multiple_of(ROW_ALIGN);
        let logit_columns = match plan.computation {
            Computation::OnePass => stride.min(FIRST_IDS),
            Computation::TwoPasses => stride,
        };
        let rows = plan.rows_per_chunk.max(1);
        let device = operands.contexts.device();
        Ok(Chunks {
            gpu,
            planned,
            inputs: DeviceOperands::new(gpu, planned)?,
            stride,
            rows_per_chunk: rows,
            logits: Buffer::unwritten(gpu, rows * logit_columns, DType::F32, device)?,
            logit_columns,
            // The last chunk may have fewer rows than ranks read.
            row_values: Buffer::zeros(gpu, ROW_VALUES * rows, DType::F32, device)?,
        })
    }

    /// A buffer for the log-probabilities of a chunk's positions, `[positions of a chunk, stride]`.
    pub(super) fn log_prob_rows(&self) -> Result<Buffer> {
        let elements = self.rows_per_chunk / self.inputs.sizes.components * self.stride;
        Buffer::unwritten(self.gpu, elements, DType::F32, self.logits.tensor.device())
    }

    /// The factors of the chunk's rows (`relative.h`).
    pub(super) fn row_factors(&self) -> Read {
        Read(self.row_values.at(ROW_FACTOR * self.rows_per_chunk))
    }

    /// The arguments of the chunk that has the given positions, without an objective.
    pub(super) fn arguments(&self, positions: &Range<usize>) -> ChunkArguments {
        let DeviceOperands { sizes, log_priors, bias, logit_scale, logit_function, .. } = &self.inputs;
        let (function, cap) = function_and_cap(*logit_function);
        let first_row = positions.start * sizes.components;
        ChunkArguments {
            logits: LogitsArgument {
                z: self.logits.at(0),
                bias: Buffer::or_null(bias),
                scale: *logit_scale,
                cap,
                function,
                vocab: sizes.vocab as i32,
                stride: self.stride as i64,
                components: sizes.components as i32,
            },
            objective: ObjectiveArgument::default(),
            rows: RowsArgument {
                log_priors: log_priors.as_ref().map_or(0, |log_priors| log_priors.at(first_row)),
                own_logits: 0,
                values: self.row_values.at(0),
                count: self.rows_per_chunk as i64,
            },
        }
    }

    /// Computes the first product, the logits of the chunk's rows, and the log-sum-exp of each row.
    pub(super) fn compute_logits(&self, positions: &Range<usize>, arguments: ChunkArguments) -> Result<()> {
        self.first_product(positions)?;
        let ChunkArguments { logits, objective, rows } = arguments;
        RowLogSumExpArguments { logits, objective, rows }.launch(self.gpu, self.inputs.rows(positions).len())
    }

    /// Computes the first product.
    pub(super) fn first_product(&self, positions: &Range<usize>) -> Result<()> {
        let rows = self.inputs.rows(positions);
        for (i, columns) in self.inputs.columns.iter().enumerate() {
            self.gpu.multiply(&DeviceProduct {
                m: rows.len(),
                n: columns.decoder_rows.min(self.logit_columns),
                k: columns.stride,
                lhs: columns.contexts.matrix(rows.start, columns.stride),
                rhs: columns.decoder(true),
                out: self.logits.at(0),
                out_dtype: DType::F32,
                out_stride: self.logit_columns,
                alpha: None,
                accumulates: i > 0,
            })?;
        }
        Ok(())
    }

    /// Turns the log-sum-exps of the chunk's rows over this rank's ids, and the logits of the targets that it has, into
    /// the ones over the vocabulary that the ranks of `shard` share. Waits for the device.
    pub(super) fn join_ranks(&self, shard: &VocabShard, owners: &[Option<usize>]) -> Result<()> {
        let rows = self.rows_per_chunk;
        let device = self.row_values.tensor.device();
        let mut values = self.row_values.tensor.narrow(0, 0, 3 * rows)?.to_vec1::<f32>()?;
        let (largest, others) = values.split_at_mut(rows);
        let (log_sums, target_logits) = others.split_at_mut(rows);
        let row_count = owners.len() * self.inputs.sizes.components;
        let row_values = largest.iter_mut().zip(log_sums).zip(target_logits).take(row_count);
        let shared = row_values.map(|((largest, log_sum), target_logit)| SharedRow { largest, log_sum, target_logit });
        join(shard, owners, shared.collect())?;
        Ok(self.row_values.tensor.slice_set(&Tensor::from_vec(values, 3 * rows, device)?, 0, 0)?)
    }

    /// Computes the mixture's log-probabilities from the logits, and the results that have a place.
    pub(super) fn mix(
        &self,
        positions: &Range<usize>,
        arguments: ChunkArguments,
        results: MixtureResults<'_>,
    ) -> Result<()> {
        let (dtype, address, stride) = match results.log_probs {
            Some(LogProbRows { buffer, first, stride }) => (buffer.tensor.dtype(), buffer.at(first), stride),
            None => (DType::F32, 0, 0),
        };
        let ChunkArguments { logits, objective, rows } = arguments;
        let arguments = MixtureLogProbsArguments {
            logits,
            objective,
            rows,
            log_probs: Write(address),
            out_stride: stride as i64,
            loss: Write(results.losses),
            argmax: Write(results.argmax),
        };
        arguments.launch_for(self.gpu, dtype, positions.len())
    }

    /// Computes the log-probabilities of the chunk's positions, written to their rows of `[positions, vocab]`.
    pub(super) fn log_probs(&self, positions: Range<usize>, to: &Buffer) -> Result<()> {
        let vocab = self.inputs.sizes.vocab;
        self.write_log_probs(&positions, LogProbRows { buffer: to, first: positions.start * vocab, stride: vocab })
    }

    /// Computes the log-probabilities of the chunk's positions in a buffer of [`Chunks::log_prob_rows`], and copies them
    /// to the host.
    pub(super) fn read_log_probs(&self, positions: &Range<usize>, rows: &Buffer) -> Result<Vec<Vec<f32>>> {
        let vocab = self.inputs.sizes.vocab;
        self.write_log_probs(positions, LogProbRows { buffer: rows, first: 0, stride: vocab })?;
        Ok(rows.shaped((positions.len(), vocab))?.to_device(&Device::Cpu)?.to_vec2()?)
    }

    /// Computes the log-probabilities of the chunk's positions.
    fn write_log_probs(&self, positions: &Range<usize>, to: LogProbRows<'_>) -> Result<()> {
        let arguments = self.arguments(positions);
        self.compute_logits(positions, arguments)?;
        self.mix(positions, arguments, MixtureResults { log_probs: Some(to), ..MixtureResults::default() })
    }

    /// Computes the `k` most probable ids of the chunk's positions and their log-probabilities, written to their rows
    /// of `[positions, k]`. The log-probabilities of all ids are an intermediate result.
    pub(super) fn top_k(
        &self,
        positions: Range<usize>,
        k: usize,
        log_probs: &Buffer,
        ids: &Buffer,
        id_log_probs: &Buffer,
    ) -> Result<()> {
        self.write_log_probs(&positions, LogProbRows { buffer: log_probs, first: 0, stride: self.stride })?;
        let arguments = TopKArguments {
            log_probs: Read(log_probs.at(0)),
            stride: self.stride as i64,
            vocab: self.inputs.sizes.vocab as i32,
            k: k as i32,
            ids: Write(ids.at(positions.start * k)),
            id_log_probs: Write(id_log_probs.at(positions.start * k)),
        };
        arguments.launch(self.gpu, positions.len())
    }
}

/// Where `ids` are the most probable ids, and have a probability.
pub(super) fn is_argmax(argmax: &Tensor, ids: &Tensor, log_prob: &Tensor) -> candle_core::Result<Tensor> {
    argmax.eq(ids)? * log_prob.gt(f32::NEG_INFINITY)?
}
