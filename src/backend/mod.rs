//! The devices. Each gives the same few kernels ([`Backend`]); this is the only place that chooses between them.

mod cpu;
#[cfg(any(feature = "cuda", all(test, target_os = "linux")))]
mod cuda;
#[cfg(any(feature = "cuda", feature = "metal", all(test, target_os = "linux")))]
mod gpu;
#[cfg(any(feature = "metal", all(test, target_os = "linux")))]
mod metal;
pub(crate) mod plan;

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

pub(crate) use cpu::Float;

use crate::loss::LossOptions;
use crate::{Error, Result};
use plan::{Plan, Sizes};

/// The kernels of one device, at work on one mixture, chunk by chunk: `positions` are those of the chunk. What the chunks
/// leave behind is the backend's state.
pub(crate) trait Backend {
    /// First product: the logits of all components of the chunk's positions, and the log-sum-exp of each row.
    fn logits(&mut self, positions: Range<usize>) -> Result<()>;
    /// The loss of each position from its logits, and, if gradients are wanted, their gradient in their place.
    fn loss_rows(&mut self, positions: Range<usize>) -> Result<()>;
    /// First product and the loss of each position, for when nothing else is wanted: the logits need not be kept.
    fn loss_only(&mut self, positions: Range<usize>) -> Result<()>;
    /// Second product: the gradient of the chunk's contexts.
    fn context_gradient(&mut self, positions: Range<usize>) -> Result<()>;
    /// Third product: the chunk's part of the gradient of the decoder's weight.
    fn decoder_gradient(&mut self, positions: Range<usize>) -> Result<()>;
    /// The mixture's log-probabilities of each position from its logits.
    fn log_prob_rows(&mut self, positions: Range<usize>) -> Result<()>;
    /// The most probable token id of each position from its logits.
    fn argmax_rows(&mut self, positions: Range<usize>) -> Result<()>;

    /// The loss and its gradients: three products in all, as many as an exact method can do; one without gradients.
    fn run_loss(&mut self, plan: &Plan, wanted: Wanted) -> Result<()> {
        for positions in plan.chunks() {
            if !plan.keeps_logits {
                self.loss_only(positions)?;
                continue;
            }
            self.logits(positions.clone())?;
            self.loss_rows(positions.clone())?;
            if wanted.contexts {
                self.context_gradient(positions.clone())?;
            }
            if wanted.weight {
                self.decoder_gradient(positions)?;
            }
        }
        Ok(())
    }

    fn run_log_probs(&mut self, plan: &Plan) -> Result<()> {
        for positions in plan.chunks() {
            self.logits(positions.clone())?;
            self.log_prob_rows(positions)?;
        }
        Ok(())
    }

    fn run_argmax(&mut self, plan: &Plan) -> Result<()> {
        for positions in plan.chunks() {
            self.logits(positions.clone())?;
            self.argmax_rows(positions)?;
        }
        Ok(())
    }
}

/// The tensors of a mixture, checked to fit each other, contiguous, and on one device.
#[derive(Clone, Debug)]
pub(crate) struct Operands {
    pub(crate) sizes: Sizes,
    /// `[positions, K, d]`
    pub(crate) contexts: Tensor,
    /// `[positions, K]`, in the accumulation dtype
    pub(crate) log_priors: Option<Tensor>,
    /// `[vocab, d]`
    pub(crate) weight: Tensor,
    /// `[vocab]`, in the accumulation dtype
    pub(crate) bias: Option<Tensor>,
    /// The bound of the logits, `z <- cap tanh(z / cap)`.
    pub(crate) softcap: Option<f64>,
}

/// Which operands want a gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) contexts: bool,
    pub(crate) log_priors: bool,
    pub(crate) weight: bool,
    pub(crate) bias: bool,
}

/// What a plan is for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    /// Whether the logits of a position are needed again once their log-sum-exp is known.
    pub(crate) keeps_logits: bool,
    pub(crate) bias_gradient: bool,
    /// Whether the mixture's log-probability of every token id is needed.
    pub(crate) all_ids: bool,
    /// Whether there are soft targets: label smoothing, or a gradient of the log-probabilities.
    pub(crate) soft_targets: bool,
    /// Whether rows are left out of the gradient's products. (The CPU needs no room for that.)
    #[cfg_attr(not(any(feature = "cuda", feature = "metal")), allow(dead_code))]
    pub(crate) filters: bool,
    /// Whether the logits of a few positions at a time will do.
    pub(crate) few_rows: bool,
}

impl Task {
    /// A loss with these options.
    pub(crate) fn loss(options: &LossOptions, wanted: Wanted) -> Self {
        let soft_targets = options.label_smoothing > 0.0;
        let all_ids = soft_targets || options.hits;
        let filters = options.responsibility_filter > 0.0 && wanted.any();
        let keeps_logits = wanted.any() || all_ids;
        Task { keeps_logits, bias_gradient: wanted.bias, all_ids, soft_targets, filters, few_rows: false }
    }

    /// A look at the distribution of each position, tile by tile.
    pub(crate) fn decoding() -> Self {
        Task { few_rows: true, all_ids: false, ..Self::log_probs(Wanted::default()) }
    }

    /// Log-probabilities or the most probable token id, and the gradient of the former.
    pub(crate) fn log_probs(wanted: Wanted) -> Self {
        let soft_targets = wanted.any();
        Task {
            keeps_logits: true,
            bias_gradient: wanted.bias,
            all_ids: true,
            soft_targets,
            filters: false,
            few_rows: false,
        }
    }
}

impl Wanted {
    pub(crate) fn any(self) -> bool {
        self.contexts || self.log_priors || self.weight || self.bias
    }
}

/// What is minimised: of checked targets, or a given gradient of the log-probabilities.
#[derive(Clone, Debug)]
pub(crate) enum Objective {
    /// The loss of `targets` (`[positions]`). `position_weights` (`[positions]`, accumulation dtype) and `class_weights` (`[vocab]`,
    /// accumulation dtype) are those of the options.
    Targets {
        targets: Tensor,
        position_weights: Option<Tensor>,
        class_weights: Option<Tensor>,
        options: LossOptions,
        /// What the gradient of each position's objective is multiplied by; `None`: what the reduction says.
        upstream: Option<Tensor>,
    },
    /// The inner product of the log-probabilities and this tensor, `[positions, vocab]` in the accumulation dtype.
    LogProbs { upstream: Tensor },
}

/// The gradients that were wanted, each of its operand's shape, in the accumulation dtype.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gradients {
    pub(crate) contexts: Option<Tensor>,
    pub(crate) log_priors: Option<Tensor>,
    pub(crate) weight: Option<Tensor>,
    pub(crate) bias: Option<Tensor>,
}

/// The results of a loss.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// `[positions]`: the objective of each position, times its weight
    pub(crate) objective: Tensor,
    /// `[positions]`
    pub(crate) nll: Tensor,
    pub(crate) sum: Tensor,
    pub(crate) count: Tensor,
    pub(crate) hits: Option<Tensor>,
    pub(crate) dropped_mass: Option<Tensor>,
    pub(crate) gradients: Gradients,
}

/// The token ids of a distribution are looked at in tiles of this many.
pub(crate) const TILE: usize = 512;

/// The distribution of one position over the token ids, computed where it is looked at.
pub(crate) trait Distribution<F>: Sync {
    fn vocab(&self) -> usize;
    /// Whether its log-probabilities are numbers.
    fn is_valid(&self) -> bool;
    /// The log-probabilities of the token ids from `tile * TILE` on, [`TILE`] of them unless the vocabulary ends; `buffer` may
    /// be used to hold them. Those below `floor` need not be computed: they may be given as minus infinity.
    fn tile<'a>(&'a self, tile: usize, floor: F, buffer: &'a mut Vec<F>) -> &'a [F];

    fn tiles(&self) -> usize {
        self.vocab().div_ceil(TILE)
    }
}

/// Something to be found out about the distribution of each position.
pub(crate) trait Visit: Sync {
    type Output: Send;
    fn visit<F: Float>(&self, position: usize, distribution: &impl Distribution<F>) -> Result<Self::Output>;
}

/// Log-probabilities that have been computed already.
pub(crate) struct Computed<'a>(pub(crate) &'a [f32]);

impl Distribution<f32> for Computed<'_> {
    fn vocab(&self) -> usize {
        self.0.len()
    }

    fn is_valid(&self) -> bool {
        !self.0.iter().any(|x| x.is_nan())
    }

    fn tile<'a>(&'a self, tile: usize, _: f32, _: &'a mut Vec<f32>) -> &'a [f32] {
        &self.0[tile * TILE..self.0.len().min((tile + 1) * TILE)]
    }
}

/// The dtype that tensors of `dtype` are computed in, or an error that names `argument`.
pub(crate) fn accumulation_dtype(argument: &'static str, dtype: DType) -> Result<DType> {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 => Ok(DType::F32),
        DType::F64 => Ok(DType::F64),
        got => Err(Error::DType { argument, expected: "f16, bf16, f32 or f64".into(), got }),
    }
}

/// Evaluates an expression with `$T` as the Rust type of a dtype that has been checked.
macro_rules! with_type {
    ($dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            DType::F64 => {
                type $T = f64;
                $call
            }
            DType::F16 => {
                type $T = half::f16;
                $call
            }
            DType::BF16 => {
                type $T = half::bf16;
                $call
            }
            _ => {
                type $T = f32;
                $call
            }
        }
    };
}

/// Calls a function of the GPU's backend that has kernels for the operands' device.
macro_rules! on_gpu {
    ($operands:expr, $function:ident ( $($argument:expr),* )) => {{
        // Without the features of GPUs nothing else looks at them.
        let _ = ($(&$argument),*);
        match $operands.contexts.device() {
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => gpu::$function(&cuda::Cuda::of($operands)?, $($argument),*),
            #[cfg(feature = "metal")]
            Device::Metal(_) => gpu::$function(&metal::Metal::of($operands)?, $($argument),*),
            device => Err(wrong_device(device)),
        }
    }};
}

/// Calls a function of the backend that has kernels for the operands' device; on the CPU generic in the dtype.
macro_rules! on_device {
    ($operands:expr, $function:ident ( $($argument:expr),* )) => {
        match $operands.contexts.device() {
            Device::Cpu => with_type!($operands.contexts.dtype(), T => cpu::$function::<T>($($argument),*)),
            _ => on_gpu!($operands, $function($($argument),*)),
        }
    };
}

/// The error for a device that this build has no kernels for.
fn wrong_device(device: &Device) -> Error {
    let mut expected = vec!["Cpu"];
    expected.extend(cfg!(feature = "cuda").then_some("Cuda"));
    expected.extend(cfg!(feature = "metal").then_some("Metal"));
    Error::Device { argument: "hidden", expected: expected.join(" or "), got: format!("{:?}", device.location()) }
}

/// `tanh(z + bias)` of `z` `[rows, n]` and `bias` `[n]`.
pub(crate) fn bias_tanh(z: &Tensor, bias: &Tensor) -> Result<Tensor> {
    match z.device() {
        Device::Cpu => cpu::bias_tanh(z, bias),
        _ => Ok(z.broadcast_add(bias)?.tanh()?),
    }
}

/// The gradient of the argument of a hyperbolic tangent, from its result and the gradient of that.
pub(crate) fn tanh_gradient(result: &Tensor, upstream: &Tensor) -> Result<Tensor> {
    match result.device() {
        Device::Cpu => cpu::tanh_gradient(result, &upstream.contiguous()?),
        _ => Ok((upstream - (result.sqr()? * upstream)?)?),
    }
}

/// The plan of a loss.
pub(crate) fn plan(operands: &Operands, task: Task, budget: Option<usize>) -> Result<Plan> {
    on_device!(operands, plan(operands, task, budget))
}

/// The objective and the gradients of the operands that want one.
pub(crate) fn loss(operands: &Operands, objective: &Objective, wanted: Wanted, plan: &Plan) -> Result<Outcome> {
    on_device!(operands, loss(operands, objective, wanted, plan))
}

/// Log-probabilities `[positions, vocab]`, in the operands' dtype.
pub(crate) fn log_probs(operands: &Operands, plan: &Plan) -> Result<Tensor> {
    let dtype = operands.contexts.dtype();
    match operands.contexts.device() {
        Device::Cpu => with_type!(dtype, T => cpu::log_probs::<T>(operands, plan)),
        _ => on_gpu!(operands, log_probs(operands, dtype, plan)),
    }
}

/// The most probable token ids `[positions]`, `u32`.
pub(crate) fn argmax(operands: &Operands, plan: &Plan) -> Result<Tensor> {
    on_device!(operands, argmax(operands, plan))
}

/// The `k` most probable token ids and their log-probabilities, `[positions, k]`, u32 and f32, where the device has a kernel for that:
/// of equals the token id with the lowest id, of a distribution that is not one a NaN.
pub(crate) fn top_k(operands: &Operands, k: usize) -> Result<Option<(Tensor, Tensor)>> {
    // It looks at all token ids for each of them.
    const MOST: usize = 64;
    let is_cpu = operands.contexts.device().is_cpu();
    if is_cpu || k > MOST {
        return Ok(None);
    }
    let plan = plan(operands, Task { soft_targets: true, ..Task::log_probs(Wanted::default()) }, None)?;
    on_gpu!(operands, top_k(operands, k, &plan)).map(Some)
}

/// What there is to be found out about each position's distribution. On the CPU no more than a tile of it is ever written at a
/// time; other devices hand over their log-probabilities.
pub(crate) fn visit<V: Visit>(operands: &Operands, visit: &V) -> Result<Vec<V::Output>> {
    let task = Task::decoding();
    if operands.contexts.device().is_cpu() {
        let plan = plan(operands, task, None)?;
        return with_type!(operands.contexts.dtype(), T => cpu::visit::<T, V>(operands, &plan, visit));
    }
    let plan = plan(operands, Task { all_ids: true, ..task }, None)?;
    let log_probs: Tensor = on_gpu!(operands, log_probs(operands, DType::F32, &plan))?;
    let log_probs = log_probs.to_device(&Device::Cpu)?.to_vec2()?;
    log_probs.par_iter().enumerate().map(|(position, row)| visit.visit(position, &Computed(row))).collect()
}
