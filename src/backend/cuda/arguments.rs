//! The arguments of the kernels, laid out as `mixture.cu` declares them. Addresses are those of the device.

/// `struct Logits` of `mixture.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Logits {
    pub(super) z: u64,
    pub(super) bias: u64,
    pub(super) softcap: f32,
    pub(super) stride: i64,
    pub(super) vocab: i32,
    pub(super) components: i32,
}

/// `struct Objective` of `mixture.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Objective {
    pub(super) words: u64,
    pub(super) hard: u64,
    pub(super) scales: u64,
    pub(super) soft: u64,
    pub(super) soft_stride: i64,
    pub(super) z_loss: f32,
    pub(super) filter: f32,
    pub(super) unit: f32,
}

/// `struct Rows` of `mixture.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) log_priors: u64,
    pub(super) largest: u64,
    pub(super) log_sum: u64,
    pub(super) target_logit: u64,
    pub(super) hard_mass: u64,
    pub(super) mass: u64,
    pub(super) softmax_scale: u64,
}

/// One argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Argument {
    Logits(Logits),
    Objective(Objective),
    Rows(Rows),
    Address(u64),
    Int(i32),
    Long(i64),
    Float(f32),
}
