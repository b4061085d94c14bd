//! The kernels' arguments in CUDA's layout. Addresses come from [`Gpu::address`](super::device::Gpu::address).

use crate::backend::objective;

/// `struct Logits` of `rows.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct LogitsArgument {
    pub(in crate::backend) z: u64,
    pub(in crate::backend) bias: u64,
    pub(in crate::backend) scale: f32,
    pub(in crate::backend) softcap: f32,
    pub(in crate::backend) vocab: i32,
    pub(in crate::backend) stride: i64,
    pub(in crate::backend) components: i32,
}

/// `struct Objective` of `rows.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::backend) struct ObjectiveArgument {
    pub(in crate::backend) ids: u64,
    pub(in crate::backend) hard: u64,
    pub(in crate::backend) scales: u64,
    pub(in crate::backend) soft: u64,
    pub(in crate::backend) factor: u64,
    pub(in crate::backend) soft_stride: i64,
    pub(in crate::backend) terms: TermsArgument,
}

/// `struct Terms` of `rows.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::backend) struct TermsArgument {
    z_loss: f32,
    unit: f32,
}

impl TermsArgument {
    /// `unit` multiplies the gradient of the logits.
    pub(in crate::backend) fn new(terms: &objective::LossTerms, unit: f32) -> Self {
        TermsArgument { z_loss: terms.z_loss as f32, unit }
    }

    /// The bytes in the order of the structure.
    #[cfg(any(feature = "metal", all(test, target_os = "linux")))]
    pub(in crate::backend) fn bytes(&self) -> Vec<u8> {
        [self.z_loss, self.unit].iter().flat_map(|x| x.to_ne_bytes()).collect()
    }
}

/// `struct Rows` of `rows.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct RowsArgument {
    pub(in crate::backend) log_priors: u64,
    pub(in crate::backend) own: u64,
    pub(in crate::backend) numbers: u64,
    pub(in crate::backend) count: i64,
}

/// `struct Scored` of `rows.h`; the default is for objectives that are no scores.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::backend) struct ScoredArgument {
    pub(in crate::backend) ids: u64,
    pub(in crate::backend) numbers: u64,
    pub(in crate::backend) stride: i64,
    pub(in crate::backend) power: f32,
    pub(in crate::backend) count: i32,
    pub(in crate::backend) needs: i64,
}

#[derive(Clone, Copy, Debug)]
pub(in crate::backend) enum Argument {
    Logits(LogitsArgument),
    Objective(ObjectiveArgument),
    Rows(RowsArgument),
    Scored(ScoredArgument),
    /// Memory that the kernel reads
    Read(u64),
    /// Memory that the kernel writes and may also read
    Write(u64),
    Int(i32),
    Long(i64),
    Float(f32),
}
