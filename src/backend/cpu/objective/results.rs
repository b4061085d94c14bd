//! The accumulated gradients and the results of a loss, as tensors, after the last chunk.

use std::ops::Range;

use candle_core::{Device, Tensor, WithDType};
use half::bf16;

use super::components::PositionLoss;
use super::targets::Targets;
use crate::backend::contract::{Gradients, LossResults};
use crate::backend::cpu::memory::zeros;
use crate::backend::cpu::operands::dtype::Element;
use crate::backend::cpu::vector::math::weighted;
use crate::backend::operands::{NeedsGrad, Sizes};
use crate::error::{Error, Result};

/// The gradients accumulated over the chunks; empty unless they are needed.
pub(crate) struct BufferedGradients<T: Element> {
    pub(crate) needed: bool,
    /// `[positions, K, d]`
    pub(crate) contexts: Vec<T::Acc>,
    /// `[positions, K]`
    pub(crate) log_priors: Vec<T::Acc>,
    pub(crate) decoder: DecoderGradients<T::Acc>,
    weight_rows: usize,
}

/// The gradients of the decoder that are needed.
#[derive(Default)]
pub(crate) struct DecoderGradients<F> {
    pub(crate) weight: Option<ColumnGradient<F>>,
    pub(crate) adapter: Option<ColumnGradient<F>>,
    /// `[rows of the weight]`
    pub(crate) bias: Option<Vec<F>>,
}

/// The gradient of some columns of the decoder.
pub(crate) struct ColumnGradient<F> {
    pub(crate) columns: Range<usize>,
    /// `[rows of the weight, columns]`
    pub(crate) values: Vec<F>,
    /// `[rows of the weight, columns]`, in place of `values`, if a single chunk writes the gradient and rounds it
    pub(crate) rounded: Vec<bf16>,
    /// Whether `values` already holds the contribution of an earlier chunk or loss.
    pub(crate) is_started: bool,
}

impl<F> DecoderGradients<F> {
    /// The gradients of the matrices, and the bias's.
    pub(crate) fn parts(&mut self) -> (impl Iterator<Item = &mut ColumnGradient<F>>, Option<&mut Vec<F>>) {
        (self.weight.iter_mut().chain(&mut self.adapter), self.bias.as_mut())
    }
}

impl<T: Element> BufferedGradients<T> {
    /// No gradients.
    pub(crate) fn none(sizes: Sizes) -> Self {
        Self::new(sizes, 0, 0..0, NeedsGrad::default(), None, false)
    }

    /// `so_far` is the weight's gradient of earlier losses. With `rounds`, the weight's gradient is in bf16.
    pub(crate) fn new(
        sizes: Sizes,
        weight_rows: usize,
        adapter_columns: Range<usize>,
        needs_grad: NeedsGrad,
        so_far: Option<Vec<T::Acc>>,
        rounds: bool,
    ) -> Self {
        let Sizes { positions, components, context_dim, .. } = sizes;
        let rows = positions * components;
        let columns = |columns: Range<usize>, so_far: Option<Vec<T::Acc>>, rounds: bool| {
            let size = weight_rows * columns.len();
            let rounds = rounds && so_far.is_none();
            ColumnGradient {
                is_started: so_far.is_some(),
                values: so_far.unwrap_or_else(|| zeros(if rounds { 0 } else { size })),
                rounded: zeros(if rounds { size } else { 0 }),
                columns,
            }
        };
        BufferedGradients {
            needed: needs_grad.any(),
            contexts: zeros(if needs_grad.contexts { rows * context_dim } else { 0 }),
            log_priors: zeros(if needs_grad.any() { rows } else { 0 }),
            decoder: DecoderGradients {
                weight: needs_grad.weight.then(|| columns(0..adapter_columns.start, so_far, rounds)),
                adapter: needs_grad.adapter.then(|| columns(adapter_columns, None, false)),
                bias: needs_grad.bias.then(|| zeros(weight_rows)),
            },
            weight_rows,
        }
    }

    fn into_tensors(self, sizes: Sizes, needs_grad: NeedsGrad) -> Result<Gradients> {
        let Sizes { positions, components, context_dim, .. } = sizes;
        let tensor = |is_needed: bool, values: Vec<T::Acc>, shape: &[usize]| {
            is_needed.then(|| Tensor::from_vec(values, shape, &Device::Cpu)).transpose()
        };
        let columns = |gradient: Option<ColumnGradient<T::Acc>>| {
            let of_part = |part: ColumnGradient<T::Acc>| {
                let shape = (self.weight_rows, part.columns.len());
                if part.rounded.is_empty() {
                    Tensor::from_vec(part.values, shape, &Device::Cpu)
                } else {
                    Tensor::from_vec(part.rounded, shape, &Device::Cpu)
                }
            };
            gradient.map(of_part).transpose()
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

pub(crate) fn results<T: Element>(
    sizes: Sizes,
    needs_grad: NeedsGrad,
    targets: &Targets<T::Acc>,
    losses: &[PositionLoss],
    gradients: BufferedGradients<T>,
) -> Result<LossResults> {
    // The sum of no numbers is minus zero.
    let scalar = |value: f64| Ok::<_, Error>(Tensor::from_vec(vec![T::Acc::from_f64(value + 0.0)], (), &Device::Cpu)?);
    let vector = |values: &[f64]| {
        let values: Vec<T::Acc> = values.iter().map(|&x| T::Acc::from_f64(x)).collect();
        Ok::<_, Error>(Tensor::from_vec(values, sizes.positions, &Device::Cpu)?)
    };
    let objective = |(t, loss): (usize, &PositionLoss)| weighted(targets.position_weight(t), loss.objective);
    let objective: Vec<f64> = losses.iter().enumerate().map(objective).collect();
    let nll: Vec<f64> = losses.iter().map(|loss| loss.nll).collect();
    let count: f64 = (0..sizes.positions).map(|t| targets.count(t)).sum();
    let is_correct = || {
        let is_correct: Vec<u8> = losses.iter().map(|loss| u8::from(loss.is_correct)).collect();
        Tensor::from_vec(is_correct, sizes.positions, &Device::Cpu)
    };
    Ok(LossResults {
        objective: vector(&objective)?,
        nll: vector(&nll)?,
        sum: scalar(objective.iter().sum())?,
        count: scalar(count)?,
        is_correct: targets.terms.correct.then(is_correct).transpose()?,
        gradients: gradients.into_tensors(sizes, needs_grad)?,
    })
}
