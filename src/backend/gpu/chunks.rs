//! The state of a mixture on a GPU, and the steps of its chunks.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::arguments::{Argument, Logits, Rows};
use super::device::{Buffer, Gpu, Matrix, Product, BLOCK};
use super::objective::Prepared;
use crate::backend::contract::{Gradients, NeedsGrad, Operands, Sizes};
use crate::backend::plan::Plan;
use crate::backend::schedule::Steps;
use crate::error::Result;

/// One mixture on a GPU. The kernels write into fresh tensors that nothing else refers to; each of them has at least
/// one element, even for an empty batch.
pub(super) struct Chunks<'a, G> {
    gpu: &'a G,
    sizes: Sizes,
    stride: usize,
    dtype: DType,
    contexts: Buffer,
    weight: Buffer,
    /// Whether `weight` is `[d, vocab]`
    weight_is_transposed: bool,
    logit_scale: f32,
    log_priors: Option<Buffer>,
    /// `[positions, K]`: the logits of targets that are entries of their own, and their gradient if any is needed
    own: Option<Buffer>,
    own_gradients: Option<Buffer>,
    bias: Option<Buffer>,
    softcap: f32,

    /// `[rows of a chunk, stride]`: logits, f32
    logits: Buffer,
    /// `[rows of a chunk, stride]`: their gradient as an operand of products, unless it overwrites them
    gradient: Option<Buffer>,
    /// If the filter drops rows
    live: Option<Live>,
    /// `[positions of a chunk, stride]`: the mixture's log-probabilities, if they are needed as an intermediate result
    log_probs: Option<Buffer>,
    /// `[7, rows of a chunk]`: see [`Rows`]
    rows: Buffer,
    rows_per_chunk: usize,

    /// If an objective is computed
    prepared: Option<Prepared>,
    /// `[positions]` each
    pub(super) nll: Buffer,
    pub(super) losses: Buffer,
    pub(super) argmax: Buffer,
    /// `[positions, 2]`: the magnitude of the mass that the filter drops, and of all mass
    pub(super) masses: Buffer,
    /// `[positions, vocab]`, if log-probabilities are computed
    pub(super) all_log_probs: Option<Buffer>,

    /// The gradients that are needed; that of the log-priors if any is
    context_gradients: Option<Buffer>,
    log_prior_gradients: Option<Buffer>,
    weight_gradient: Option<Buffer>,
    bias_gradient: Option<Buffer>,
    /// `[rows of a chunk]`, in the dtype of `gradient`: a product with it sums rows
    ones: Option<Buffer>,
}

/// The rows of a chunk that the filter keeps. Products with the gradient of the logits use only these.
struct Live {
    /// `[rows of a chunk]`: their indices
    rows: Buffer,
    /// `[1]`: their number, on the device
    count: Buffer,
    /// The same, read back
    known_count: usize,
    /// `[rows of a chunk, d]`: their contexts, and the gradient of these
    contexts: Buffer,
    context_gradients: Buffer,
}

/// Rows of logits are padded to a multiple of this many elements, so that each is aligned to 16 bytes in every dtype.
pub(super) const ROW_ALIGN: usize = 8;

impl<'a, G: Gpu> Chunks<'a, G> {
    pub(super) fn new(
        gpu: &'a G,
        operands: &'a Operands,
        prepared: Option<Prepared>,
        needs_grad: NeedsGrad,
        keeps_log_probs: bool,
        plan: &Plan,
    ) -> Result<Self> {
        let Sizes { positions, components, context, vocab } = operands.sizes;
        let (device, dtype) = (operands.contexts.device(), operands.contexts.dtype());
        let gradient_dtype = gpu.kind().gradient_dtype(dtype);
        let stride = vocab.next_multiple_of(ROW_ALIGN);
        let rows = plan.rows_per_chunk.max(1);
        let zeros = |n: usize, dtype| Buffer::new(gpu, Tensor::zeros(n.max(1), dtype, device)?);
        let optional = |is_needed: bool, n, dtype| is_needed.then(|| zeros(n, dtype)).transpose();
        let filters = needs_grad.any() && prepared.as_ref().is_some_and(|prepared| prepared.filter > 0.0);
        let (weight, weight_is_transposed) = match operands.stored_weight()? {
            stored @ (_, false) => stored,
            stored if gpu.kind().reads_transposed => stored,
            _ => (operands.weight.contiguous()?, false),
        };
        let needs_log_probs = keeps_log_probs || prepared.as_ref().is_some_and(Prepared::is_soft);
        Ok(Chunks {
            gpu,
            sizes: operands.sizes,
            stride,
            dtype,
            contexts: Buffer::new(gpu, operands.contexts.clone())?,
            weight: Buffer::new(gpu, weight)?,
            weight_is_transposed,
            logit_scale: operands.logit_scale as f32,
            log_priors: Buffer::of(gpu, &operands.log_priors)?,
            own: None,
            own_gradients: None,
            bias: Buffer::of(gpu, &operands.bias)?,
            softcap: operands.softcap.unwrap_or(0.0) as f32,
            logits: zeros(rows * stride, DType::F32)?,
            gradient: optional(
                needs_grad.any() && (gradient_dtype != DType::F32 || filters),
                rows * stride,
                gradient_dtype,
            )?,
            live: match filters {
                true => Some(Live {
                    rows: zeros(rows, DType::U32)?,
                    count: zeros(1, DType::U32)?,
                    known_count: 0,
                    contexts: zeros(rows * context, dtype)?,
                    context_gradients: zeros(rows * context, DType::F32)?,
                }),
                false => None,
            },
            log_probs: optional(needs_log_probs, rows / components * stride, DType::F32)?,
            rows: zeros(7 * rows, DType::F32)?,
            rows_per_chunk: rows,
            prepared,
            nll: zeros(positions, DType::F32)?,
            losses: zeros(positions, DType::F32)?,
            argmax: zeros(positions, DType::U32)?,
            masses: zeros(2 * positions.max(1), DType::F32)?,
            all_log_probs: None,
            context_gradients: optional(needs_grad.contexts, positions * components * context, DType::F32)?,
            log_prior_gradients: optional(needs_grad.any(), positions * components, DType::F32)?,
            weight_gradient: optional(needs_grad.weight, vocab * context, DType::F32)?,
            bias_gradient: optional(needs_grad.bias, vocab, DType::F32)?,
            ones: match needs_grad.bias {
                true => Some(Buffer::new(gpu, Tensor::ones(rows, gradient_dtype, device)?)?),
                false => None,
            },
        })
    }

    /// Makes each target an entry of its own, with these logits `[positions, K]`.
    pub(super) fn set_own_logits(&mut self, logits: &Tensor, needs_grad: NeedsGrad) -> Result<()> {
        self.own = Some(Buffer::new(self.gpu, logits.flatten_all()?)?);
        if needs_grad.any() {
            self.own_gradients = Some(Buffer::new(self.gpu, logits.flatten_all()?.zeros_like()?)?);
        }
        Ok(())
    }

    /// The gradient of the own logits, `[positions, K]`.
    pub(super) fn own_gradient(&self) -> Result<Option<Tensor>> {
        let Sizes { positions, components, .. } = self.sizes;
        let Some((gradient, prepared)) = self.own_gradients.as_ref().zip(self.prepared.as_ref()) else {
            return Ok(None);
        };
        Ok(Some(gradient.tensor.reshape((positions, components))?.broadcast_mul(&prepared.factor)?))
    }

    /// The gradients. Only that of the log-priors remains to be multiplied by the factor.
    pub(super) fn into_gradients(self, needs_grad: NeedsGrad) -> Result<Gradients> {
        let Sizes { positions, components, context, vocab } = self.sizes;
        let shaped = |gradient: Option<Buffer>, shape: &[usize]| {
            gradient.map(|g| g.tensor.narrow(0, 0, shape.iter().product())?.reshape(shape)).transpose()
        };
        let log_priors = shaped(self.log_prior_gradients, &[positions, components])?.filter(|_| needs_grad.log_priors);
        let factor = self.prepared.map(|prepared| prepared.factor);
        Ok(Gradients {
            contexts: shaped(self.context_gradients, &[positions, components, context])?,
            log_priors: match log_priors.zip(factor) {
                Some((gradient, factor)) => Some(gradient.broadcast_mul(&factor)?),
                None => None,
            },
            weight: shaped(self.weight_gradient, &[vocab, context])?,
            bias: shaped(self.bias_gradient, &[vocab])?,
        })
    }

    pub(super) fn prepared(&self) -> Option<&Prepared> {
        self.prepared.as_ref()
    }

    /// The first arguments of most kernels.
    fn arguments(&self, positions: &Range<usize>) -> [Argument; 3] {
        let logits = Logits {
            z: self.logits.at(0),
            bias: Buffer::or_null(&self.bias),
            scale: self.logit_scale,
            softcap: self.softcap,
            stride: self.stride as i64,
            vocab: self.sizes.vocab as i32,
            components: self.sizes.components as i32,
        };
        let rows = Rows {
            log_priors: self.log_priors.as_ref().map_or(0, |p| p.at(positions.start * self.sizes.components)),
            own: self.own.as_ref().map_or(0, |own| own.at(positions.start * self.sizes.components)),
            numbers: self.rows.at(0),
            count: self.rows_per_chunk as i64,
        };
        let objective = self.prepared.as_ref().map(|prepared| prepared.argument(positions.start)).unwrap_or_default();
        [Argument::Logits(logits), Argument::Objective(objective), Argument::Rows(rows)]
    }

    /// Computes the mixture's log-probabilities, the soft part of the loss and the most probable ids, each if it has a
    /// destination. That of the log-probabilities is a buffer, the index of the first position's element, and the
    /// stride between positions.
    fn mix(&self, positions: &Range<usize>, out: Option<(&Buffer, usize, usize)>, argmax: bool) -> Result<()> {
        let (dtype, address, stride) = match out {
            Some((buffer, first, stride)) => (buffer.tensor.dtype(), buffer.at(first), stride),
            None => (DType::F32, 0, 0),
        };
        let loss = if self.prepared.is_some() { self.losses.at(positions.start) } else { 0 };
        let argmax = if argmax { self.argmax.at(positions.start) } else { 0 };
        let outputs =
            [Argument::Write(address), Argument::Long(stride as i64), Argument::Write(loss), Argument::Write(argmax)];
        let arguments = [&self.arguments(positions)[..], &outputs].concat();
        self.gpu.launch(&format!("mixture_log_probs_{}", dtype.as_str()), positions.len(), &arguments)
    }

    /// Computes the `k` most probable ids of the chunk's positions and their log-probabilities, `[positions, k]`, from
    /// the logits.
    pub(super) fn top_k_rows(
        &self,
        positions: &Range<usize>,
        k: usize,
        ids: &Buffer,
        id_log_probs: &Buffer,
    ) -> Result<()> {
        let Some(log_probs) = &self.log_probs else { return Ok(()) };
        self.mix(positions, Some((log_probs, 0, self.stride)), false)?;
        let arguments = [
            Argument::Read(log_probs.at(0)),
            Argument::Long(self.stride as i64),
            Argument::Int(self.sizes.vocab as i32),
            Argument::Int(k as i32),
            Argument::Write(ids.at(positions.start * k)),
            Argument::Write(id_log_probs.at(positions.start * k)),
        ];
        self.gpu.launch("top_k", positions.len(), &arguments)
    }

    /// Computes the log-probabilities of the chunk's positions from the logits.
    pub(super) fn log_prob_rows(&self, positions: Range<usize>) -> Result<()> {
        let vocab = self.sizes.vocab;
        let out = self.all_log_probs.as_ref().map(|log_probs| (log_probs, positions.start * vocab, vocab));
        self.mix(&positions, out, false)
    }

    /// Finds the rows that have a gradient. Reading back their number, the size of the next products, synchronizes.
    fn find_live(&mut self, positions: &Range<usize>) -> Result<()> {
        let [.., row_values] = self.arguments(positions);
        let (rows, d) = (self.rows(positions), self.sizes.context);
        let Some(live) = &mut self.live else { return Ok(()) };
        let (indices, count) = (live.rows.at(0), Argument::Write(live.count.at(0)));
        let row_count = Argument::Int(rows.len() as i32);
        self.gpu.launch("live_rows", 1, &[row_values, Argument::Write(indices), count, row_count])?;
        live.known_count = live.count.tensor.to_vec1::<u32>()?[0] as usize;
        let arguments = [
            Argument::Read(self.contexts.at(rows.start * d)),
            Argument::Read(indices),
            Argument::Write(live.contexts.at(0)),
            Argument::Int(d as i32),
        ];
        self.gpu.launch(&format!("gather_rows_{}", self.dtype.as_str()), live.known_count, &arguments)
    }

    /// The number of rows of the gradient of the chunk's logits, and the contexts of these rows.
    fn gradient_rows(&self, positions: &Range<usize>) -> (usize, Matrix) {
        let (rows, d) = (self.rows(positions), self.sizes.context);
        match &self.live {
            Some(live) => (live.known_count, matrix(&live.contexts, 0, d)),
            None => (rows.len(), matrix(&self.contexts, rows.start, d)),
        }
    }

    /// The gradient of the chunk's logits, `[rows, vocab]`, as an operand of a product.
    fn gradient_matrix(&self) -> Matrix {
        matrix(self.gradient.as_ref().unwrap_or(&self.logits), 0, self.stride)
    }

    /// The decoder `[vocab, d]`, or its transpose, as an operand of a product.
    fn decoder(&self, transposed: bool) -> Matrix {
        let stride = if self.weight_is_transposed { self.sizes.vocab } else { self.sizes.context };
        Matrix { transposed: transposed != self.weight_is_transposed, ..matrix(&self.weight, 0, stride) }
    }

    /// The address of the factor of products with the gradient of the logits.
    fn alpha(&self) -> Option<u64> {
        self.prepared.as_ref().and_then(Prepared::alpha)
    }

    fn rows(&self, positions: &Range<usize>) -> Range<usize> {
        positions.start * self.sizes.components..positions.end * self.sizes.components
    }
}

/// A row-major matrix, from `first_row` on.
fn matrix(buffer: &Buffer, first_row: usize, stride: usize) -> Matrix {
    Matrix { address: buffer.at(first_row * stride), dtype: buffer.tensor.dtype(), stride, transposed: false }
}

impl<G: Gpu> Steps for Chunks<'_, G> {
    fn logits(&mut self, positions: Range<usize>) -> Result<()> {
        let Sizes { context: d, vocab, .. } = self.sizes;
        let rows = self.rows(&positions);
        self.gpu.multiply(&Product {
            m: rows.len(),
            n: vocab,
            k: d,
            lhs: matrix(&self.contexts, rows.start, d),
            rhs: self.decoder(true),
            out: self.logits.at(0),
            out_stride: self.stride,
            alpha: None,
            accumulate: false,
        })?;
        self.gpu.launch("row_log_sum_exp", rows.len(), &self.arguments(&positions))
    }

    fn loss_rows(&mut self, positions: Range<usize>) -> Result<()> {
        let Some(prepared) = &self.prepared else { return Ok(()) };
        let rows = self.rows(&positions);
        let position_blocks = positions.len().div_ceil(BLOCK);
        let [logits, objective, row_values] = self.arguments(&positions);
        let [position_count, components] = [positions.len(), self.sizes.components].map(|n| Argument::Int(n as i32));

        let nll = Argument::Write(self.nll.at(positions.start));
        let losses = Argument::Write(self.losses.at(positions.start));
        self.gpu.launch(
            "position_loss",
            position_blocks,
            &[objective, row_values, nll, losses, position_count, components],
        )?;

        if prepared.is_soft() || prepared.hits {
            let out = self.log_probs.as_ref().map(|log_probs| (log_probs, 0, self.stride));
            self.mix(&positions, out, prepared.hits)?;
        }
        let log_probs = Argument::Read(Buffer::or_null(&self.log_probs));
        if prepared.is_soft() {
            self.gpu.launch("row_soft_mass", rows.len(), &[logits, objective, row_values, log_probs])?;
        }
        if self.log_prior_gradients.is_none() && prepared.filter == 0.0 {
            return Ok(());
        }
        let log_priors = Argument::Write(self.log_prior_gradients.as_ref().map_or(0, |g| g.at(rows.start)));
        let own = Argument::Write(self.own_gradients.as_ref().map_or(0, |g| g.at(rows.start)));
        let masses = Argument::Write(self.masses.at(2 * positions.start));
        let arguments = [objective, row_values, log_priors, own, masses, position_count, components];
        self.gpu.launch("position_scales", position_blocks, &arguments)?;
        if self.log_prior_gradients.is_none() {
            return Ok(());
        }
        self.find_live(&positions)?;
        let (row_count, _) = self.gradient_rows(&positions);
        let live = Argument::Read(self.live.as_ref().map_or(0, |live| live.rows.at(0)));
        let gradient = Argument::Write(self.gradient_matrix().address);
        let kernel = format!("row_gradient_{}", self.gpu.kind().gradient_dtype(self.dtype).as_str());
        self.gpu.launch(&kernel, row_count, &[logits, objective, row_values, log_probs, live, gradient])?;

        // Without live rows there is nothing to add: the gradients start as zeros.
        let bias = self.bias_gradient.as_ref().filter(|_| row_count > 0);
        if let Some((bias, ones)) = bias.zip(self.ones.as_ref()) {
            self.gpu.multiply(&Product {
                m: self.sizes.vocab,
                n: 1,
                k: row_count,
                lhs: Matrix { transposed: true, ..self.gradient_matrix() },
                rhs: matrix(ones, 0, 1),
                out: bias.at(0),
                out_stride: 1,
                alpha: self.alpha(),
                accumulate: positions.start > 0,
            })?;
        }
        Ok(())
    }

    fn context_gradient(&mut self, positions: Range<usize>) -> Result<()> {
        let Sizes { context: d, vocab, .. } = self.sizes;
        let Some(gradients) = &self.context_gradients else { return Ok(()) };
        let (row_count, _) = self.gradient_rows(&positions);
        let destination = gradients.at(self.rows(&positions).start * d);
        self.gpu.multiply(&Product {
            m: row_count,
            n: d,
            k: vocab,
            lhs: self.gradient_matrix(),
            rhs: self.decoder(false),
            out: self.live.as_ref().map_or(destination, |live| live.context_gradients.at(0)),
            out_stride: d,
            alpha: self.alpha(),
            accumulate: false,
        })?;
        let Some(live) = &self.live else { return Ok(()) };
        let arguments = [
            Argument::Read(live.context_gradients.at(0)),
            Argument::Read(live.rows.at(0)),
            Argument::Write(destination),
            Argument::Int(d as i32),
        ];
        self.gpu.launch("scatter_rows", row_count, &arguments)
    }

    fn decoder_gradient(&mut self, positions: Range<usize>) -> Result<()> {
        let Sizes { context: d, vocab, .. } = self.sizes;
        let Some(gradient) = &self.weight_gradient else { return Ok(()) };
        let (row_count, contexts) = self.gradient_rows(&positions);
        if row_count == 0 {
            return Ok(());
        }
        self.gpu.multiply(&Product {
            m: vocab,
            n: d,
            k: row_count,
            lhs: Matrix { transposed: true, ..self.gradient_matrix() },
            rhs: contexts,
            out: gradient.at(0),
            out_stride: d,
            alpha: self.alpha(),
            // The first chunk overwrites.
            accumulate: positions.start > 0,
        })
    }
}
