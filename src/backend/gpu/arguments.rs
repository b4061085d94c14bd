//! The arguments that kernels share, in CUDA's layout, and what an argument of a kernel can be. Addresses come from
//! [`Gpu::address`](super::device::Gpu::address), and zero is null. The structures of `kernels/arguments.h` say what
//! each field is.

use crate::backend::logit_function::LogitFunction;
use crate::backend::objective;

/// `struct Logits` of `kernels/arguments.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct LogitsArgument {
    pub(in crate::backend) z: u64,
    pub(in crate::backend) bias: u64,
    pub(in crate::backend) scale: f32,
    pub(in crate::backend) cap: f32,
    pub(in crate::backend) function: i32,
    pub(in crate::backend) vocab: i32,
    pub(in crate::backend) stride: i64,
    pub(in crate::backend) components: i32,
}

/// Returns the number of a function of the logits in `kernels/arguments.h`, and the cap, which only a softcap has.
pub(super) fn function_and_cap(function: LogitFunction) -> (i32, f32) {
    match function {
        LogitFunction::Identity => (0, 0.0),
        LogitFunction::Softcap(cap) => (1, cap as f32),
        LogitFunction::Sigsoftmax => (2, 0.0),
    }
}

/// `struct Objective` of `kernels/arguments.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::backend) struct ObjectiveArgument {
    pub(in crate::backend) ids: u64,
    pub(in crate::backend) hard: u64,
    pub(in crate::backend) scales: u64,
    pub(in crate::backend) soft: u64,
    pub(in crate::backend) factor: u64,
    pub(in crate::backend) soft_stride: i64,
    pub(in crate::backend) terms: LossTermsArgument,
}

/// `struct LossTerms` of `kernels/arguments.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::backend) struct LossTermsArgument {
    z_loss: f32,
    unit: f32,
}

impl LossTermsArgument {
    /// The terms of a loss, and the `unit` that the gradient of the logits is multiplied by.
    pub(in crate::backend) fn new(terms: &objective::LossTerms, unit: f32) -> Self {
        LossTermsArgument { z_loss: terms.z_loss as f32, unit }
    }

    /// The bytes in the order of the structure.
    #[cfg(any(feature = "metal", all(test, target_os = "linux")))]
    pub(in crate::backend) fn bytes(&self) -> Vec<u8> {
        [self.z_loss, self.unit].iter().flat_map(|x| x.to_ne_bytes()).collect()
    }
}

/// `struct Rows` of `kernels/arguments.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct RowsArgument {
    pub(in crate::backend) log_priors: u64,
    pub(in crate::backend) own_logits: u64,
    pub(in crate::backend) values: u64,
    pub(in crate::backend) count: i64,
}

/// `struct Scored` of `kernels/arguments.h`; the default is that of other objectives, without candidates.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::backend) struct ScoredArgument {
    pub(in crate::backend) candidates: u64,
    pub(in crate::backend) values: u64,
    pub(in crate::backend) stride: i64,
    pub(in crate::backend) power: f32,
    pub(in crate::backend) count: i32,
    pub(in crate::backend) needs: i64,
}

/// The address of memory that a kernel reads, or null.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct Read(pub(in crate::backend) u64);

/// The address of memory that a kernel writes and may also read, or null.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct Write(pub(in crate::backend) u64);

/// One argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) enum Argument {
    Logits(LogitsArgument),
    Objective(ObjectiveArgument),
    Rows(RowsArgument),
    Scored(ScoredArgument),
    Read(u64),
    Write(u64),
    Int(i32),
    Long(i64),
    Float(f32),
}

/// Converts the types that the fields of a kernel's arguments can have.
macro_rules! convert {
    ($($value:pat => $kind:ty: $argument:expr,)*) => {$(
        impl From<$kind> for Argument {
            fn from($value: $kind) -> Self {
                $argument
            }
        }
    )*};
}
convert! {
    logits => LogitsArgument: Argument::Logits(logits),
    objective => ObjectiveArgument: Argument::Objective(objective),
    rows => RowsArgument: Argument::Rows(rows),
    scored => ScoredArgument: Argument::Scored(scored),
    Read(address) => Read: Argument::Read(address),
    Write(address) => Write: Argument::Write(address),
    number => i32: Argument::Int(number),
    number => i64: Argument::Long(number),
    number => f32: Argument::Float(number),
}
