//! Which computation serves which task.

use crate::backend::contract::{Sizes, Task};

/// Maximum rows of a loss without gradients that inner products compute faster: in the kernels of `one_pass` a row is
/// one lane of a register.
const FEW_ROWS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// One exponential per logit (`one_pass`): a loss over hard targets, alone or with its gradients. It alone knows the
    /// targets of a sampled softmax.
    OnePass,
    /// Logits, then their gradient in their place (`chunks`): whatever needs every logit again once the log-sum-exps
    /// of all components are known. These are the mixture's log-probabilities of all ids (label smoothing, hits,
    /// log-probabilities, decoding) and the filter, which leaves rows out of the second product as well. And the loss
    /// alone of a few rows.
    TwoPasses,
}

impl Path {
    pub(super) fn of(task: &Task, sizes: Sizes) -> Self {
        match task {
            Task { own_targets: true, .. } => Path::OnePass,
            Task { all_ids: true, .. } | Task { soft_targets: true, .. } => Path::TwoPasses,
            Task { filters: true, .. } | Task { few_rows: true, .. } => Path::TwoPasses,
            Task { keeps_logits: false, .. } if sizes.positions * sizes.components <= FEW_ROWS => Path::TwoPasses,
            _ => Path::OnePass,
        }
    }
}
