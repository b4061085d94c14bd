//! A mixture on a GPU, chunk by chunk: its logits, and the log-probabilities and best ids that follow from them.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::arguments::{Argument, LogitsArgument, ObjectiveArgument, RowsArgument};
use super::device::{Buffer, DeviceMatrix, DeviceProduct, Gpu};
use crate::backend::operands::{Operands, Sizes};
use crate::backend::plan::Plan;
use crate::backend::shard::VocabShard;
use crate::backend::shared_rows::{join, SharedRow};
use crate::error::{Error, Result};

/// The operands of a mixture in device memory.
pub(super) struct DeviceOperands {
    pub(super) sizes: Sizes,
    pub(super) dtype: DType,
    /// The weight and, if there is one, the adapter, with the contexts that each is multiplied by
    pub(super) parts: Vec<InputPart>,
    log_priors: Option<Buffer>,
    bias: Option<Buffer>,
    logit_scale: f32,
    softcap: f32,
}

/// Some columns of the contexts and of the decoder.
pub(super) struct InputPart {
    /// Number of columns
    pub(super) width: usize,
    /// `[positions, K, width]`
    pub(super) contexts: Buffer,
    /// `[vocab, width]`
    weight: Buffer,
    /// Whether `weight` is `[width, vocab]`
    is_transposed: bool,
}

impl InputPart {
    /// The decoder `[vocab, width]`, or its transpose, as an operand of a product.
    pub(super) fn decoder(&self, transposed: bool) -> DeviceMatrix {
        let vocab = self.weight.tensor.elem_count() / self.width;
        let stride = if self.is_transposed { vocab } else { self.width };
        DeviceMatrix { transposed: transposed != self.is_transposed, ..matrix(&self.weight, 0, stride) }
    }
}

impl DeviceOperands {
    fn new<G: Gpu>(gpu: &G, operands: &Operands) -> Result<Self> {
        let (weight, weight_is_transposed) = match operands.stored_weight()? {
            stored @ (_, false) => stored,
            stored if gpu.kind().reads_transposed => stored,
            _ => (operands.weight.contiguous()?, false),
        };
        let part = |columns: Range<usize>, weight, is_transposed| {
            let contexts = operands.contexts.narrow(2, columns.start, columns.len())?;
            let (contexts, weight) = (Buffer::new(gpu, contexts)?, Buffer::new(gpu, weight)?);
            Ok::<_, Error>(InputPart { width: columns.len(), contexts, weight, is_transposed })
        };
        let adapter_columns = operands.adapter_columns()?;
        let of_weight = part(0..adapter_columns.start, weight, weight_is_transposed)?;
        let of_adapter = operands.adapter.clone().map(|adapter| part(adapter_columns, adapter, false)).transpose()?;
        Ok(DeviceOperands {
            sizes: operands.sizes,
            dtype: operands.contexts.dtype(),
            parts: std::iter::once(of_weight).chain(of_adapter).collect(),
            log_priors: Buffer::from_option(gpu, &operands.log_priors)?,
            bias: Buffer::from_option(gpu, &operands.bias)?,
            logit_scale: operands.logit_scale as f32,
            softcap: operands.softcap.unwrap_or(0.0) as f32,
        })
    }

    pub(super) fn rows(&self, positions: &Range<usize>) -> Range<usize> {
        positions.start * self.sizes.components..positions.end * self.sizes.components
    }
}

/// One mixture on a GPU. The kernels write into fresh tensors that nothing else refers to; each of them has at least
/// one element, even for an empty batch.
pub(super) struct Chunks<'a, G> {
    pub(super) gpu: &'a G,
    pub(super) inputs: DeviceOperands,
    /// Elements from one row of logits to the next
    pub(super) stride: usize,
    pub(super) rows_per_chunk: usize,
    /// `[rows of a chunk, stride]`, f32
    pub(super) logits: Buffer,
    /// `[7, rows of a chunk]`: see [`RowsArgument`]
    numbers: Buffer,
}

/// What the kernel of the mixture's log-probabilities writes, each if it is present.
#[derive(Default)]
pub(super) struct Mixed<'b> {
    /// A buffer, the index of the first position's element, and the stride between positions
    pub(super) log_probs: Option<(&'b Buffer, usize, usize)>,
    /// The address of the first position's loss, to which the kernel adds the soft part
    pub(super) losses: u64,
    /// The address of the first position's most probable id
    pub(super) argmax: u64,
}

/// Rows of logits are padded to a multiple of this many elements, so that each is aligned to 16 bytes in every dtype.
pub(super) const ROW_ALIGN: usize = 8;

impl<'a, G: Gpu> Chunks<'a, G> {
    pub(super) fn new(gpu: &'a G, operands: &Operands, plan: &Plan) -> Result<Self> {
        let stride = operands.sizes.vocab.next_multiple_of(ROW_ALIGN);
        let rows = plan.rows_per_chunk.max(1);
        let zeros = |n| Buffer::zeros(gpu, n, DType::F32, operands.contexts.device());
        Ok(Chunks {
            gpu,
            inputs: DeviceOperands::new(gpu, operands)?,
            stride,
            rows_per_chunk: rows,
            logits: zeros(rows * stride)?,
            numbers: zeros(7 * rows)?,
        })
    }

    /// Room for the log-probabilities of a chunk's positions, `[positions of a chunk, stride]`.
    pub(super) fn log_prob_rows(&self) -> Result<Buffer> {
        let elements = self.rows_per_chunk / self.inputs.sizes.components * self.stride;
        Buffer::zeros(self.gpu, elements, DType::F32, self.logits.tensor.device())
    }

    /// The first arguments of most kernels. `own` are the logits of targets that are entries of their own.
    pub(super) fn arguments(
        &self,
        positions: &Range<usize>,
        objective: ObjectiveArgument,
        own: Option<&Buffer>,
    ) -> [Argument; 3] {
        let DeviceOperands { sizes, log_priors, bias, logit_scale, softcap, .. } = &self.inputs;
        let first_row = positions.start * sizes.components;
        let logits = LogitsArgument {
            z: self.logits.at(0),
            bias: Buffer::or_null(bias),
            scale: *logit_scale,
            softcap: *softcap,
            stride: self.stride as i64,
            vocab: sizes.vocab as i32,
            components: sizes.components as i32,
        };
        let rows = RowsArgument {
            log_priors: log_priors.as_ref().map_or(0, |log_priors| log_priors.at(first_row)),
            own: own.map_or(0, |own| own.at(first_row)),
            numbers: self.numbers.at(0),
            count: self.rows_per_chunk as i64,
        };
        [Argument::Logits(logits), Argument::Objective(objective), Argument::Rows(rows)]
    }

    /// First product: the logits of the chunk's rows, and the log-sum-exp of each row.
    pub(super) fn logits(&self, positions: &Range<usize>, arguments: &[Argument; 3]) -> Result<()> {
        let rows = self.inputs.rows(positions);
        for (i, part) in self.inputs.parts.iter().enumerate() {
            self.gpu.multiply(&DeviceProduct {
                m: rows.len(),
                n: self.inputs.sizes.vocab,
                k: part.width,
                lhs: matrix(&part.contexts, rows.start, part.width),
                rhs: part.decoder(true),
                out: self.logits.at(0),
                out_stride: self.stride,
                alpha: None,
                accumulate: i > 0,
            })?;
        }
        self.gpu.launch("row_log_sum_exp", rows.len(), arguments)
    }

    /// Turns the log-sum-exps of the chunk's rows over this rank's ids, and the logits of the targets that it has, into
    /// the ones over the vocabulary that the ranks of `shard` share. Waits for the device.
    pub(super) fn join_ranks(&self, shard: &VocabShard, owners: &[Option<usize>]) -> Result<()> {
        let rows = self.rows_per_chunk;
        let device = self.numbers.tensor.device();
        let mut numbers = self.numbers.tensor.narrow(0, 0, 3 * rows)?.to_vec1::<f32>()?;
        let (largest, rest) = numbers.split_at_mut(rows);
        let (log_sums, target_logits) = rest.split_at_mut(rows);
        let of_rows =
            largest.iter_mut().zip(log_sums).zip(target_logits).take(owners.len() * self.inputs.sizes.components);
        let shared = of_rows.map(|((largest, log_sum), target_logit)| SharedRow { largest, log_sum, target_logit });
        join(shard, owners, shared)?;
        Ok(self.numbers.tensor.slice_set(&Tensor::from_vec(numbers, 3 * rows, device)?, 0, 0)?)
    }

    /// Computes the mixture's log-probabilities from the logits, and what else has a destination.
    pub(super) fn mix(&self, positions: &Range<usize>, arguments: &[Argument; 3], to: Mixed<'_>) -> Result<()> {
        let (dtype, address, stride) = match to.log_probs {
            Some((buffer, first, stride)) => (buffer.tensor.dtype(), buffer.at(first), stride),
            None => (DType::F32, 0, 0),
        };
        let [losses, argmax] = [to.losses, to.argmax].map(Argument::Write);
        let outputs = [Argument::Write(address), Argument::Long(stride as i64), losses, argmax];
        let kernel = format!("mixture_log_probs_{}", dtype.as_str());
        self.gpu.launch(&kernel, positions.len(), &[&arguments[..], &outputs].concat())
    }

    /// Computes the log-probabilities of the chunk's positions, written to their rows of `[positions, vocab]`.
    pub(super) fn log_probs(&self, positions: Range<usize>, to: &Buffer) -> Result<()> {
        let arguments = self.arguments(&positions, ObjectiveArgument::default(), None);
        self.logits(&positions, &arguments)?;
        let Sizes { vocab, .. } = self.inputs.sizes;
        let log_probs = Some((to, positions.start * vocab, vocab));
        self.mix(&positions, &arguments, Mixed { log_probs, ..Mixed::default() })
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
        let arguments = self.arguments(&positions, ObjectiveArgument::default(), None);
        self.logits(&positions, &arguments)?;
        self.mix(&positions, &arguments, Mixed { log_probs: Some((log_probs, 0, self.stride)), ..Mixed::default() })?;
        let arguments = [
            Argument::Read(log_probs.at(0)),
            Argument::Long(self.stride as i64),
            Argument::Int(self.inputs.sizes.vocab as i32),
            Argument::Int(k as i32),
            Argument::Write(ids.at(positions.start * k)),
            Argument::Write(id_log_probs.at(positions.start * k)),
        ];
        self.gpu.launch("top_k", positions.len(), &arguments)
    }
}

/// Where `ids` are the most probable ids, and have a probability.
pub(super) fn is_argmax(argmax: &Tensor, ids: &Tensor, log_prob: &Tensor) -> candle_core::Result<Tensor> {
    argmax.eq(ids)? * log_prob.gt(f32::NEG_INFINITY)?
}

/// A row-major matrix, from `first_row` on.
pub(super) fn matrix(buffer: &Buffer, first_row: usize, stride: usize) -> DeviceMatrix {
    DeviceMatrix { address: buffer.at(first_row * stride), dtype: buffer.tensor.dtype(), stride, transposed: false }
}
