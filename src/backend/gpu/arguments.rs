//! The kernels' arguments in CUDA's layout. Addresses come from [`Gpu::address`](super::device::Gpu::address).

/// `struct Logits` of `rows.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct Logits {
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
pub(in crate::backend) struct Objective {
    pub(in crate::backend) ids: u64,
    pub(in crate::backend) hard: u64,
    pub(in crate::backend) scales: u64,
    pub(in crate::backend) soft: u64,
    pub(in crate::backend) factor: u64,
    pub(in crate::backend) soft_stride: i64,
    pub(in crate::backend) z_loss: f32,
    pub(in crate::backend) filter: f32,
    pub(in crate::backend) unit: f32,
}

/// `struct Rows` of `rows.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct Rows {
    pub(in crate::backend) log_priors: u64,
    pub(in crate::backend) own: u64,
    pub(in crate::backend) numbers: u64,
    pub(in crate::backend) count: i64,
}

/// One argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) enum Argument {
    Logits(Logits),
    Objective(Objective),
    Rows(Rows),
    /// Memory that the kernel reads
    Read(u64),
    /// Memory that the kernel writes and may also read
    Write(u64),
    Int(i32),
    Long(i64),
    Float(f32),
}
