//! The results of a loss: the gradients that its chunks accumulate, and the tensors that it returns after the last
//! chunk.

use std::ops::Range;

use candle_core::{Device, Tensor};

use super::components::PositionLoss;
use super::targets::Targets;
use crate::backend::cpu::memory::{untouched_zeros, zeros};
use crate::backend::cpu::operands::dtype::Accumulator;
use crate::backend::cpu::vector::math::weighted;
use crate::backend::objective::{Gradients, LossResults};
use crate::backend::operands::{NeedsGrad, Sizes};
use crate::backend::plan::Planned;
use crate::error::{Error, Result};

/// The gradients that the chunks accumulate. Those that are not needed are empty.
pub(crate) struct BufferedGradients<F: Accumulator> {
    /// Whether any gradient is needed.
    pub(crate) are_needed: bool,
    /// `[positions, K, d]`.
    pub(crate) contexts: Vec<F>,
    /// `[positions, K]`.
    pub(crate) log_priors: Vec<F>,
    pub(crate) decoder: DecoderGradients<F>,
    weight_rows: usize,
}

/// The gradients of the decoder that are needed.
pub(crate) struct DecoderGradients<F: Accumulator> {
    pub(crate) weight: Option<ColumnGradient<F>>,
    pub(crate) adapter: Option<ColumnGradient<F>>,
    /// `[rows of the weight]`.
    pub(crate) bias: Option<Vec<F>>,
}

/// The gradient of some columns of the decoder.
pub(crate) struct ColumnGradient<F: Accumulator> {
    pub(crate) columns: Range<usize>,
    /// `[rows of the weight, columns]`.
    pub(crate) values: Vec<F>,
    /// `[rows of the weight, columns]`, in place of `values`, if a single chunk writes the gradient and rounds it.
    pub(crate) rounded: Vec<F::Bf16>,
    /// Whether `values` already holds the contribution of an earlier chunk or loss.
    pub(crate) is_started: bool,
}

impl<F: Accumulator> DecoderGradients<F> {
    /// Returns the gradients of the weight and the adapter, and that of the bias.
    pub(crate) fn parts(&mut self) -> (impl Iterator<Item = &mut ColumnGradient<F>>, Option<&mut Vec<F>>) {
        (self.weight.iter_mut().chain(&mut self.adapter), self.bias.as_mut())
    }
}

/// The buffer of the weight's gradient before the first chunk.
pub(crate) enum WeightBuffer<F> {
    /// Zeros, to which the chunks add.
    Zeros,
    /// The gradient of earlier losses, to which the chunks add.
    SoFar(Vec<F>),
    /// A buffer in bf16, to which a single chunk writes the rounded gradient.
    Rounded,
}

impl<F: Accumulator> ColumnGradient<F> {
    /// Makes the gradient of these columns of a matrix with so many rows. It takes memory as it is written, while a single
    /// chunk in one pass gives its exponentials back.
    fn new(rows: usize, columns: Range<usize>, buffer: WeightBuffer<F>) -> Self {
        let size = rows * columns.len();
        let (values, rounded, is_started) = match buffer {
            WeightBuffer::Zeros => (untouched_zeros(size), Vec::new(), false),
            WeightBuffer::SoFar(values) => (values, Vec::new(), true),
            WeightBuffer::Rounded => (Vec::new(), untouched_zeros(size), false),
        };
        ColumnGradient { columns, values, rounded, is_started }
    }

    /// Makes a tensor `[rows, columns]` of the gradient.
    fn into_tensor(self, rows: usize) -> candle_core::Result<Tensor> {
        let shape = (rows, self.columns.len());
        if self.rounded.is_empty() {
            Tensor::from_vec(self.values, shape, &Device::Cpu)
        } else {
            Tensor::from_vec(self.rounded, shape, &Device::Cpu)
        }
    }
}

impl<F: Accumulator> BufferedGradients<F> {
    /// Makes the gradients of a call that needs none.
    pub(crate) fn none() -> Self {
        BufferedGradients {
            are_needed: false,
            contexts: Vec::new(),
            log_priors: Vec::new(),
            decoder: DecoderGradients { weight: None, adapter: None, bias: None },
            weight_rows: 0,
        }
    }

    /// Allocates the gradients of the operands that need one.
    pub(crate) fn new(planned: &Planned, weight_buffer: WeightBuffer<F>) -> Result<Self> {
        let Planned { operands, needs_grad, .. } = planned;
        let Sizes { positions, components, context_dim, .. } = operands.sizes;
        let (rows, weight_rows) = (positions * components, operands.weight_rows()?);
        let adapter_columns = operands.adapter_columns()?;
        let weight_columns = 0..adapter_columns.start;
        let columns = |columns, buffer| ColumnGradient::new(weight_rows, columns, buffer);
        Ok(BufferedGradients {
            are_needed: needs_grad.any(),
            contexts: zeros(if needs_grad.contexts { rows * context_dim } else { 0 }),
            log_priors: zeros(if needs_grad.any() { rows } else { 0 }),
            decoder: DecoderGradients {
                weight: needs_grad.weight.then(|| columns(weight_columns, weight_buffer)),
                adapter: needs_grad.adapter.then(|| columns(adapter_columns, WeightBuffer::Zeros)),
                bias: needs_grad.bias.then(|| zeros(weight_rows)),
            },
            weight_rows,
        })
    }

    /// Makes tensors of the gradients that are needed.
    fn into_tensors(self, sizes: Sizes, needs_grad: NeedsGrad) -> Result<Gradients> {
        let Sizes { positions, components, context_dim, .. } = sizes;
        let tensor = |is_needed: bool, values: Vec<F>, shape: &[usize]| {
            is_needed.then(|| Tensor::from_vec(values, shape, &Device::Cpu)).transpose()
        };
        let columns = |gradient: Option<ColumnGradient<F>>| {
            gradient.map(|gradient| gradient.into_tensor(self.weight_rows)).transpose()
        };
        let DecoderGradients { weight, adapter, bias } = self.decoder;
        Ok(Gradients {
            contexts: tensor(needs_grad.contexts, self.contexts, &[positions, components, context_dim])?,
            log_priors: tensor(needs_grad.log_priors, self.log_priors, &[positions, components])?,
            weight: columns(weight)?,
            adapter: columns(adapter)?,
            bias: tensor(needs_grad.bias, bias.unwrap_or_default(), &[self.weight_rows])?,
        })
    }
}

/// Makes the results of a loss. `targets` are those that were known before the first chunk: if there are none, each
/// position has a weight of one.
pub(crate) fn results<F: Accumulator>(
    planned: &Planned,
    targets: Option<&Targets<F>>,
    losses: &[PositionLoss],
    gradients: BufferedGradients<F>,
) -> Result<LossResults> {
    let sizes = planned.operands.sizes;
    // The sum of no numbers is minus zero.
    let scalar = |value: f64| Ok::<_, Error>(Tensor::from_vec(vec![F::from_f64(value + 0.0)], (), &Device::Cpu)?);
    let vector = |values: &[f64]| {
        let values: Vec<F> = values.iter().map(|&x| F::from_f64(x)).collect();
        Ok::<_, Error>(Tensor::from_vec(values, sizes.positions, &Device::Cpu)?)
    };
    let weight = |t: usize| targets.map_or(1.0, |targets| targets.position_weight(t));
    let objective = |(t, loss): (usize, &PositionLoss)| weighted(weight(t), loss.objective);
    let objective: Vec<f64> = losses.iter().enumerate().map(objective).collect();
    let nll: Vec<f64> = losses.iter().map(|loss| loss.nll).collect();
    let count: f64 = (0..sizes.positions).map(|t| targets.map_or(1.0, |targets| targets.count(t))).sum();
    let is_correct = || {
        let is_correct: Vec<u8> = losses.iter().map(|loss| u8::from(loss.is_correct)).collect();
        Tensor::from_vec(is_correct, sizes.positions, &Device::Cpu)
    };
    Ok(LossResults {
        objective: vector(&objective)?,
        nll: vector(&nll)?,
        sum: scalar(objective.iter().sum())?,
        count: scalar(count)?,
        mean: None,
        is_correct: targets.is_some_and(Targets::needs_correct).then(is_correct).transpose()?,
        gradients: gradients.into_tensors(sizes, planned.needs_grad)?,
    })
}
