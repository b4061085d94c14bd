//! The sampled softmax as a fused loss over a small vocabulary, the negatives (Jean et al., 2015; Jozefowicz et al.,
//! 2016):
//!
//! ```text
//! -log sum_k pi_k exp(z'_ky) / sum_{v in {y} + S} exp(z'_kv),    z' = z - log E[count]
//! ```
//!
//! Each position's target is an entry of its own, and is left out of the negatives if it is one of them
//! ([`TargetLoss::own_shifts`]). The shifts of the negatives are a part of their bias.

use super::sample::Sample;
use crate::backend::objective::TargetLoss;
use crate::backend::operands::{Operands, Sizes};
use crate::error::Result;
use crate::loss::{Negatives, Request, IGNORED};
use crate::tensors::checks::accumulation_dtype;
use crate::tensors::transfer::{to_device, vector};

/// Makes the operands and the objective of the fused loss from operands whose vocabulary is the sample.
pub(super) fn operands_and_loss(
    operands: Operands,
    sample: &Sample,
    request: &Request,
) -> Result<(Operands, TargetLoss)> {
    let Sample { negatives, targets, target_rows, .. } = sample;
    let accumulation = accumulation_dtype("contexts", operands.contexts.dtype())?;
    let numbers = |values: Vec<f64>| vector(values, accumulation, operands.device());

    // An id that was drawn n times counts n times, but not where it is the target.
    let log_repeats: Vec<f64> = negatives.repeats().iter().map(|&n| (n as f64).ln()).collect();
    let log_repeats = |row: usize| log_repeats.get(row).copied().unwrap_or(0.0);
    // The shift is divided by the scale, which multiplies the bias.
    let shift =
        |(row, &id): (usize, &usize)| (log_repeats(row) - negatives.expected_count(id).ln()) / operands.logit_scale;
    let shifts = numbers(sample.ids.iter().enumerate().map(shift).collect())?;
    let bias = match &operands.bias {
        Some(bias) => (bias + shifts)?,
        None => shifts,
    };
    let row = |(&row, target): (&u32, &Option<usize>)| target.map_or(IGNORED, |_| i64::from(row));
    let rows: Vec<i64> = target_rows.iter().zip(targets).map(row).collect();
    let own_shifts = target_rows.iter().map(|&row| -log_repeats(row as usize)).collect();
    let loss = TargetLoss {
        targets: to_device(rows, target_rows.len(), operands.device())?,
        ignore_index: Some(IGNORED),
        // These contain the class weights, because the targets are not token ids here.
        position_weights: if request.positions.is_weighted() {
            Some(numbers(request.positions.read_weights(targets)?)?)
        } else {
            None
        },
        class_weights: None,
        terms: Default::default(),
        scale: request.positions.gradient_scale(),
        so_far: None,
        shard: None,
        own_shifts: Some(numbers(own_shifts)?),
    };
    let sizes = sizes(operands.sizes, negatives);
    Ok((Operands { sizes, bias: Some(bias), ..operands }, loss))
}

/// Returns the sizes of the fused loss over the sample.
pub(super) fn sizes(sizes: Sizes, negatives: &Negatives) -> Sizes {
    Sizes { vocab: negatives.token_ids().len(), ..sizes }
}
