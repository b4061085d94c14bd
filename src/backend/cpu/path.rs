//! Which computation serves which task.

use crate::backend::contract::Task;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// One exponential per logit (`one_pass`): a loss over hard targets, alone or with its gradients.
    OnePass,
    /// Logits, then their gradient in their place (`chunks`): whatever needs every logit again once the log-sum-exps
    /// of all components are known. These are the mixture's log-probabilities of all ids (label smoothing, hits,
    /// log-probabilities, decoding) and the filter, which leaves rows out of the second product as well.
    TwoPasses,
}

impl Path {
    pub(super) fn of(task: &Task) -> Self {
        match task {
            Task { all_ids: true, .. } | Task { soft_targets: true, .. } => Path::TwoPasses,
            Task { filters: true, .. } | Task { few_rows: true, .. } => Path::TwoPasses,
            _ => Path::OnePass,
        }
    }
}
