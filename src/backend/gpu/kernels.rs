//! The row kernels: their source, and the arguments of each.
//!
//! A kernel `name` has a structure `NameArguments`, whose fields are its parameters in `cuda/mixture.cu` and
//! `metal/mixture.metal`, by name and in their order. A test (`testing/parameters.rs`) compares the three. What a
//! kernel computes, and what a block and a thread of it stand for, is written at its function in the headers.

use candle_core::DType;

use super::arguments::{Argument, LogitsArgument, ObjectiveArgument, Read, RowsArgument, ScoredArgument, Write};
use super::device::Gpu;
use crate::error::Result;

/// The headers of the kernels, by their names in `gpu/kernels`, in the order in which the sources include them.
#[cfg(any(feature = "metal", test))]
pub(in crate::backend) const HEADERS: [(&str, &str); 11] = [
    ("arguments.h", include_str!("kernels/arguments.h")),
    ("reductions.h", include_str!("kernels/reductions.h")),
    ("ranking.h", include_str!("kernels/ranking.h")),
    ("loss.h", include_str!("kernels/loss.h")),
    ("log_probs.h", include_str!("kernels/log_probs.h")),
    ("scores.h", include_str!("kernels/scores.h")),
    ("gradients.h", include_str!("kernels/gradients.h")),
    ("targets.h", include_str!("kernels/targets.h")),
    ("activation.h", include_str!("kernels/activation.h")),
    ("columns.h", include_str!("kernels/columns.h")),
    ("relative.h", include_str!("kernels/relative.h")),
];

/// The arguments of a kernel.
pub(in crate::backend) trait KernelArguments: Sized {
    /// The name of the kernel. A kernel that is compiled for several types has the name of the type behind it.
    const NAME: &'static str;

    /// The name and type of each parameter.
    #[cfg(all(test, target_os = "linux"))]
    const PARAMETERS: &'static [(&'static str, &'static str)];

    /// The arguments in the order of the parameters.
    fn arguments(self) -> impl AsRef<[Argument]>;

    /// Launches the kernel with `blocks` blocks.
    fn launch<G: Gpu>(self, gpu: &G, blocks: usize) -> Result<()> {
        gpu.launch(Self::NAME, blocks, self.arguments().as_ref())
    }

    /// Launches the kernel for elements of a type, with `blocks` blocks.
    fn launch_for<G: Gpu>(self, gpu: &G, dtype: DType, blocks: usize) -> Result<()> {
        gpu.launch(&format!("{}_{}", Self::NAME, dtype.as_str()), blocks, self.arguments().as_ref())
    }
}

/// Declares the structures of kernels' arguments.
macro_rules! kernels {
    ($($name:ident($arguments:ident) { $($parameter:ident: $kind:ty,)* })*) => {$(
        #[doc = concat!("The arguments of the kernel `", stringify!($name), "`.")]
        pub(in crate::backend) struct $arguments {
            $(pub(in crate::backend) $parameter: $kind,)*
        }

        impl $crate::backend::gpu::kernels::KernelArguments for $arguments {
            const NAME: &'static str = stringify!($name);

            #[cfg(all(test, target_os = "linux"))]
            const PARAMETERS: &'static [(&'static str, &'static str)] =
                &[$((stringify!($parameter), stringify!($kind)),)*];

            fn arguments(self) -> impl AsRef<[$crate::backend::gpu::arguments::Argument]> {
                [$(self.$parameter.into(),)*]
            }
        }
    )*};
}
// Metal declares its own kernels.
#[cfg(any(feature = "metal", all(test, target_os = "linux")))]
pub(in crate::backend) use kernels;

// In loss.h:
kernels! {
    row_log_sum_exp(RowLogSumExpArguments) {
        logits: LogitsArgument,
        objective: ObjectiveArgument,
        rows: RowsArgument,
    }
    position_loss(PositionLossArguments) {
        objective: ObjectiveArgument,
        rows: RowsArgument,
        nll: Write,
        loss: Write,
        positions: i32,
        components: i32,
    }
}

// In ranking.h:
kernels! {
    top_k(TopKArguments) {
        log_probs: Read,
        stride: i64,
        vocab: i32,
        k: i32,
        ids: Write,
        id_log_probs: Write,
    }
}

// In log_probs.h:
kernels! {
    mixture_log_probs(MixtureLogProbsArguments) {
        logits: LogitsArgument,
        objective: ObjectiveArgument,
        rows: RowsArgument,
        log_probs: Write,
        out_stride: i64,
        loss: Write,
        argmax: Write,
    }
}

// In scores.h:
kernels! {
    position_scores(PositionScoresArguments) {
        logits: LogitsArgument,
        rows: RowsArgument,
        scored: ScoredArgument,
        log_probs: Write,
        scores: Write,
    }
    position_masses(PositionMassesArguments) {
        scored: ScoredArgument,
        scores: Read,
        upstream: Read,
        scales: Write,
        mass_bounds: Write,
        positions: i32,
        vocab: i32,
    }
}

// In gradients.h:
kernels! {
    row_soft_mass(RowSoftMassArguments) {
        logits: LogitsArgument,
        objective: ObjectiveArgument,
        rows: RowsArgument,
        scored: ScoredArgument,
        log_probs: Read,
    }
    log_prior_gradients(LogPriorGradientsArguments) {
        objective: ObjectiveArgument,
        rows: RowsArgument,
        log_prior_gradient: Write,
        own_gradient: Write,
        gradient_factor: Read,
        count: i64,
        components: i32,
    }
    row_gradient(RowGradientArguments) {
        logits: LogitsArgument,
        objective: ObjectiveArgument,
        rows: RowsArgument,
        scored: ScoredArgument,
        log_probs: Read,
        gradient: Write,
    }
    row_target_gradient(RowTargetGradientArguments) {
        logits: LogitsArgument,
        objective: ObjectiveArgument,
        rows: RowsArgument,
        gradient: Write,
    }
}

// In targets.h:
kernels! {
    position_targets(PositionTargetsArguments) {
        targets: Read,
        position_weights: Read,
        class_weights: Read,
        ignore_index: i64,
        has_ignore_index: i32,
        smoothing: f32,
        ids: Write,
        hard: Write,
        weights: Write,
        counts: Write,
        positions: i32,
        vocab: i64,
        first_row: i64,
        row_count: i32,
    }
    reduction_scales(ReductionScalesArguments) {
        weights: Read,
        counts: Read,
        class_bound: Read,
        is_mean: i32,
        constant_scale: f32,
        scalars: Write,
        positions: i32,
    }
    weigh_losses(WeighLossesArguments) {
        weights: Read,
        losses: Read,
        count: Read,
        objectives: Write,
        values: Write,
        positions: i32,
    }
    position_gradient_scales(PositionGradientScalesArguments) {
        weights: Read,
        upstream: Read,
        common_scale: Read,
        largest_weight: Read,
        scales: Write,
        positions: i32,
    }
}

// In activation.h:
kernels! {
    bias_tanh(BiasTanhArguments) {
        z: Read,
        bias: Read,
        result: Write,
        columns: i32,
    }
    tanh_gradient(TanhGradientArguments) {
        result: Read,
        upstream: Read,
        gradient: Write,
        count: i64,
    }
    log_softmax(LogSoftmaxArguments) {
        z: Read,
        bias: Read,
        result: Write,
        count: i64,
        columns: i32,
    }
    log_softmax_gradient(LogSoftmaxGradientArguments) {
        result: Read,
        upstream: Read,
        gradient: Write,
        count: i64,
        columns: i32,
    }
}

// In columns.h, for CUDA:
kernels! {
    pad_rows(PadRowsArguments) {
        from: Read,
        to: Write,
        count: i64,
        rows: i64,
        width: i32,
        stride: i32,
        has_ones: i32,
    }
    round_rows(RoundRowsArguments) {
        from: Read,
        factors: Read,
        to: Write,
        count: i64,
        width: i32,
        stride: i32,
    }
}

// In relative.h, for CUDA:
kernels! {
    row_exponentials(RowExponentialsArguments) {
        logits: LogitsArgument,
        objective: ObjectiveArgument,
        rows: RowsArgument,
        exponentials: Write,
    }
    row_factors(RowFactorsArguments) {
        logits: LogitsArgument,
        objective: ObjectiveArgument,
        rows: RowsArgument,
        exponentials: Write,
        factors: Write,
        count: i64,
    }
    row_references(RowReferencesArguments) {
        logits: LogitsArgument,
        rows: RowsArgument,
        stride: i64,
        ids: i32,
        count: i32,
    }
    product_exponentials(ProductExponentialsArguments) {
        logits: LogitsArgument,
        objective: ObjectiveArgument,
        rows: RowsArgument,
        contexts: Read,
        decoder: Read,
        powers: Write,
        exponentials: Write,
        count: i32,
        depth: i32,
    }
    join_powers(JoinPowersArguments) {
        logits: LogitsArgument,
        objective: ObjectiveArgument,
        rows: RowsArgument,
        contexts: Read,
        decoder: Read,
        powers: Read,
        exponentials: Write,
        count: i32,
        depth: i32,
    }
    scale_rows(ScaleRowsArguments) {
        from: Read,
        factors: Read,
        to: Write,
        count: i64,
        stride: i32,
    }
}
