//! The plan of a call: the computation that serves it, and how its positions are cut into chunks, so that the workspace
//! stays within a budget in bytes; and the loop over chunks, with the steps of each.

use std::fmt;
use std::ops::Range;

use candle_core::Device;

use crate::backend::operands::{NeedsGrad, Operands};
use crate::error::{Error, Result};

/// The operands of a task, those of them whose gradients it computes, and the plan that is made for these.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) operands: Operands,
    pub(crate) needs_grad: NeedsGrad,
    pub(crate) plan: Plan,
}

impl Planned {
    /// Returns the device of the operands.
    pub(crate) fn device(&self) -> &Device {
        self.operands.device()
    }

    /// Detaches the operands from the graph.
    pub(crate) fn detach(self) -> Self {
        Planned { operands: self.operands.detach(), ..self }
    }
}

/// The workspace that a backend needs, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// The bytes of each position of a chunk: its rows of logits and the buffers that go with them.
    pub(crate) per_position: usize,
    /// The bytes of a chunk of any size.
    pub(crate) fixed: usize,
    /// The bytes of each thread of the host that computes.
    pub(crate) per_thread: usize,
    /// The budget if the caller gives none; it is raised if a single position needs more.
    pub(crate) default_budget: usize,
    /// The most positions of a chunk; larger chunks are not faster.
    pub(crate) most_positions: usize,
    /// Whether the workspace holds a chunk's logits.
    pub(crate) keeps_logits: bool,
    pub(super) computation: Computation,
    pub(crate) kernels: Kernels,
    /// The number of threads of the host. Fewer compute if the budget is too small for the workspace of all.
    pub(crate) threads: usize,
}

/// The computation that serves a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Computation {
    /// The CPU's `one_pass`, which computes one exponential per logit, and CUDA's first product, if it writes
    /// exponentials.
    OnePass,
    /// The CPU's `two_pass`, and that of GPUs, which compute logits, and then their gradient in place of the logits.
    TwoPasses,
}

/// The kernels of an instruction set of the CPU, or of a kind of GPU. `Display` prints the name in lower case.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::{Kernels, LossOptions, MixtureLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((1000, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((4, 8), DType::F32, &Device::Cpu)?;
/// let kernels = head.plan(&hidden, &LossOptions::default())?.kernels;
/// assert!(!matches!(kernels, Kernels::Cuda | Kernels::Metal)); // the tensors are on a CPU
/// println!("{kernels}"); // such as "avx2"
/// assert_eq!(Kernels::Avx2.to_string(), "avx2");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kernels {
    /// AMX, for products of bf16 and of numbers that are split into three of bf16, and AVX-512, on x86-64.
    Amx,
    /// AVX512-BF16 for products of bf16 and AVX-512, on x86-64.
    Avx512Bf16,
    /// AVX-512, on x86-64.
    Avx512,
    /// AVX2 and FMA, on x86-64.
    Avx2,
    /// NEON, on AArch64.
    Neon,
    /// Code without vector instructions, on any CPU.
    Scalar,
    /// NVIDIA GPUs.
    Cuda,
    /// Apple GPUs.
    Metal,
}

impl Kernels {
    /// The kernels whose products of bf16, or of f32 in parts, a tile unit computes.
    pub(crate) const WITH_TILES: [Kernels; 2] = [Kernels::Amx, Kernels::Avx512Bf16];
}

impl fmt::Display for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}

/// The plan of a loss: its chunks and its workspace. [`MixtureLayer::plan`](crate::MixtureLayer::plan) returns it, and
/// `Display` prints a summary.
///
/// All components of a position are in one chunk, because a responsibility depends on every component.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use mos_head::{LossOptions, MixtureLayer, SoftmaxHead};
///
/// # fn main() -> mos_head::Result<()> {
/// let head = SoftmaxHead::from_tensors(Tensor::zeros((1000, 8), DType::F32, &Device::Cpu)?, None)?;
/// let hidden = Tensor::zeros((4, 500, 8), DType::F32, &Device::Cpu)?;
/// let plan = head.plan(&hidden, &LossOptions::evaluation().with_workspace_bytes(4 << 20))?;
/// println!("{plan}"); // "2000 positions in 3 chunks of 667 (667 rows), .."
/// assert!(plan.workspace_bytes <= plan.budget_bytes);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// Total number of positions.
    pub positions: usize,
    /// Positions per chunk.
    pub positions_per_chunk: usize,
    /// Rows of logits per chunk: positions times components.
    pub rows_per_chunk: usize,
    /// Whether the workspace holds a chunk's logits. On the CPU, the loss alone of more than 4 rows does not need them.
    pub keeps_logits: bool,
    /// Bytes of workspace, allocated by the call and freed before it returns; zero without positions.
    pub workspace_bytes: usize,
    /// Upper limit of the workspace in bytes.
    pub budget_bytes: usize,
    /// The kernels that compute the loss.
    pub kernels: Kernels,
    /// Number of threads of the host that compute: rayon's pool, or fewer if the budget is too small for all; 1 on a
    /// GPU.
    pub threads: usize,
    pub(super) computation: Computation,
}

impl Plan {
    /// Splits `positions`, of K components each, into chunks that fit the budget.
    pub(crate) fn new(positions: usize, components: usize, needs: Needs, budget: Option<usize>) -> Result<Self> {
        let Needs { per_position, per_thread, .. } = needs;
        let least = needs.fixed + per_thread + per_position;
        let budget = match budget {
            Some(got) if got < least && positions > 0 => {
                return Err(Error::Workspace { least, fixed: least - per_position, got });
            }
            Some(budget) => budget,
            None => needs.default_budget.max(least),
        };
        // A chunk has at least one position, whatever is left for further threads.
        let for_threads = budget.saturating_sub(needs.fixed + per_position);
        let threads = for_threads.checked_div(per_thread).unwrap_or(needs.threads).clamp(1, needs.threads.max(1));
        let fixed = needs.fixed + threads * per_thread;
        let most = (budget.saturating_sub(fixed) / per_position).min(needs.most_positions).max(1);
        // Chunks of equal size avoid a small last chunk.
        let chunks = positions.div_ceil(most).max(1);
        let positions_per_chunk = positions.div_ceil(chunks);
        Ok(Plan {
            positions,
            positions_per_chunk,
            rows_per_chunk: positions_per_chunk * components,
            // Without positions nothing is computed.
            workspace_bytes: if positions > 0 { fixed + positions_per_chunk * per_position } else { 0 },
            budget_bytes: budget,
            keeps_logits: needs.keeps_logits,
            computation: needs.computation,
            kernels: needs.kernels,
            threads,
        })
    }

    /// Returns the plan with smaller chunks.
    pub(crate) fn with_positions_per_chunk(self, positions: usize) -> Self {
        let components = self.rows_per_chunk.checked_div(self.positions_per_chunk).unwrap_or(0);
        Plan { positions_per_chunk: positions, rows_per_chunk: positions * components, ..self }
    }

    /// Returns the chunks, as ranges of positions.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = Range<usize>> {
        let (positions, step) = (self.positions, self.positions_per_chunk.max(1));
        (0..positions).step_by(step).map(move |first| first..positions.min(first + step))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = (1 << 20) as f64;
        let counted = |n: usize, noun: &str| format!("{n} {noun}{}", if n == 1 { "" } else { "s" });
        write!(
            f,
            "{} in {} of {} ({}), {:.1} of {:.1} MiB workspace, {}",
            counted(self.positions, "position"),
            counted(self.chunks().count(), "chunk"),
            self.positions_per_chunk,
            counted(self.rows_per_chunk, "row"),
            self.workspace_bytes as f64 / MIB,
            self.budget_bytes as f64 / MIB,
            self.kernels,
        )?;
        match self.kernels {
            Kernels::Cuda | Kernels::Metal => Ok(()),
            _ => write!(f, " on {}", counted(self.threads, "thread")),
        }
    }
}

/// The steps of a loss on a device, each for the chunk that has the given `positions`. An implementation accumulates
/// the results. It may compute a product as soon as its operands are known: the CPU's `OnePass` multiplies the
/// exponentials of a tile by the decoder in `first_product`, while both are in the cache.
pub(super) trait Steps {
    /// Computes the first product, the logits of the chunk's rows, and the log-sum-exp of each row.
    fn first_product(&mut self, positions: Range<usize>) -> Result<()>;
    /// Computes the objective of each position and, if gradients are needed, those of the logits and the log-priors.
    /// The logits' gradient replaces the logits, or is left as factors of their exponentials.
    fn objective(&mut self, positions: Range<usize>) -> Result<()>;
    /// Computes the second product, the gradient of the chunk's contexts, or what is missing of it.
    fn context_gradient(&mut self, positions: Range<usize>) -> Result<()>;
    /// Computes the third product, and adds it to the gradients of the decoder.
    fn decoder_gradient(&mut self, positions: Range<usize>) -> Result<()>;

    /// Runs the steps of all chunks. An exact method needs at least these three matrix products; the loss alone needs
    /// only the first.
    fn run_loss(&mut self, planned: &Planned) -> Result<()> {
        for positions in planned.plan.chunks() {
            self.first_product(positions.clone())?;
            self.objective(positions.clone())?;
            self.chunk_gradients(positions, planned.needs_grad)?;
        }
        Ok(())
    }

    /// Runs those steps of a chunk that compute gradients which are needed, once its objective is known.
    fn chunk_gradients(&mut self, positions: Range<usize>, needs_grad: NeedsGrad) -> Result<()> {
        if needs_grad.contexts {
            self.context_gradient(positions.clone())?;
        }
        if needs_grad.decoder() {
            self.decoder_gradient(positions)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs = Needs {
        per_position: 1000,
        fixed: 500,
        per_thread: 0,
        default_budget: 8500,
        most_positions: usize::MAX,
        keeps_logits: true,
        computation: Computation::TwoPasses,
        kernels: Kernels::Scalar,
        threads: 1,
    };

    #[test]
    fn a_plan_is_printed_in_one_line() {
        let needs = Needs { default_budget: 4 << 20, ..NEEDS };
        let plan = Plan::new(10_000, 3, needs, None).unwrap();
        let expected = "10000 positions in 3 chunks of 3334 (10002 rows), 3.2 of 4.0 MiB workspace, scalar on 1 thread";
        assert_eq!(plan.to_string(), expected);
        let plan = Plan::new(1, 1, Needs { kernels: Kernels::Cuda, ..needs }, None).unwrap();
        assert_eq!(plan.to_string(), "1 position in 1 chunk of 1 (1 row), 0.0 of 4.0 MiB workspace, cuda");
    }

    #[test]
    fn chunks_cover_every_position_once_within_the_budget() {
        for budget in 1500..40_000 {
            let plan = Plan::new(100, 3, NEEDS, Some(budget)).unwrap();
            let covered: Vec<usize> = plan.chunks().flatten().collect();
            assert_eq!(covered, (0..100).collect::<Vec<_>>());
            assert!(plan.workspace_bytes <= budget);
        }
    }

    #[test]
    fn the_least_budget_is_accepted_and_one_byte_less_is_an_error() {
        assert!(Plan::new(100, 3, NEEDS, Some(1500)).is_ok());
        let error = Plan::new(100, 3, NEEDS, Some(1499)).unwrap_err();
        assert!(matches!(error, Error::Workspace { least: 1500, fixed: 500, got: 1499 }));
        let expected = "workspace_bytes: expected at least 1500 (500 fixed, 1000 for one position), got 1499";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn the_default_budget_is_used_unless_one_position_needs_more() {
        assert_eq!(Plan::new(100, 3, NEEDS, None).unwrap().budget_bytes, 8500);
        let needs = Needs { default_budget: 700, ..NEEDS };
        assert_eq!(Plan::new(100, 3, needs, None).unwrap().budget_bytes, 1500);
    }

    #[test]
    fn a_small_budget_is_for_fewer_threads() {
        let needs = Needs { fixed: 200, per_thread: 300, threads: 4, ..NEEDS };
        let plan = |budget| Plan::new(100, 3, needs, Some(budget));
        assert!(matches!(plan(1499).unwrap_err(), Error::Workspace { least: 1500, fixed: 500, got: 1499 }));
        for (budget, threads, positions) in [(1500, 1, 1), (1799, 1, 1), (1800, 2, 1), (2400, 4, 1), (3400, 4, 2)] {
            let plan = plan(budget).unwrap();
            assert_eq!((plan.threads, plan.positions_per_chunk), (threads, positions), "{budget}");
            assert!(plan.workspace_bytes <= budget);
        }
    }

    #[test]
    fn zero_positions_give_zero_chunks_within_any_budget() {
        for budget in [None, Some(0), Some(10_000)] {
            let plan = Plan::new(0, 3, Needs { per_thread: 300, threads: 4, ..NEEDS }, budget).unwrap();
            assert_eq!((plan.chunks().count(), plan.workspace_bytes), (0, 0));
        }
    }
}
