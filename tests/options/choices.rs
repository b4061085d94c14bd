//! The options that the losses of `options.rs` have.

use Choice::*;

/// What makes a loss, or its logits, other than the default: the mean of plain losses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Choice {
    IgnoredIndex,
    PositionWeights,
    ClassWeights,
    LabelSmoothing,
    ZLoss,
    Softcap,
    LogitScale,
    Sigsoftmax,
    SumReduction,
    NoReduction,
}

/// Every choice. If both reductions are chosen, it is the sum.
pub(crate) const CHOICES: [Choice; 10] = [
    IgnoredIndex,
    PositionWeights,
    ClassWeights,
    LabelSmoothing,
    ZLoss,
    Softcap,
    LogitScale,
    Sigsoftmax,
    SumReduction,
    NoReduction,
];

/// Every choice but a logit scale, reduced to the mean.
pub(crate) const MOST: &[Choice] = &[IgnoredIndex, PositionWeights, ClassWeights, LabelSmoothing, ZLoss, Softcap];
/// The same without a reduction.
pub(crate) const MOST_UNREDUCED: &[Choice] =
    &[IgnoredIndex, PositionWeights, ClassWeights, LabelSmoothing, ZLoss, Softcap, NoReduction];

/// No choice, and each by itself.
pub(crate) const ALONE: [&[Choice]; 11] = [
    &[],
    &[SumReduction],
    &[NoReduction],
    &[IgnoredIndex],
    &[PositionWeights],
    &[ClassWeights],
    &[LabelSmoothing],
    &[ZLoss],
    &[Softcap],
    &[LogitScale],
    &[Sigsoftmax],
];

/// Several choices at once.
pub(crate) const COMBINED: [&[Choice]; 28] = [
    &[IgnoredIndex, PositionWeights],
    &[IgnoredIndex, ClassWeights],
    &[IgnoredIndex, LabelSmoothing],
    &[IgnoredIndex, ZLoss],
    &[PositionWeights, ClassWeights],
    &[ClassWeights, LabelSmoothing],
    &[LabelSmoothing, ZLoss],
    &[LabelSmoothing, Softcap],
    &[ZLoss, Softcap],
    &[PositionWeights, SumReduction],
    &[ClassWeights, NoReduction],
    &[LabelSmoothing, NoReduction],
    &[ZLoss, NoReduction],
    &[Softcap, NoReduction],
    &[IgnoredIndex, PositionWeights, ClassWeights],
    &[ClassWeights, LabelSmoothing, ZLoss],
    &[LabelSmoothing, ZLoss, Softcap],
    &[PositionWeights, ClassWeights, LabelSmoothing, NoReduction],
    &[IgnoredIndex, ClassWeights, LabelSmoothing, SumReduction],
    MOST,
    &[IgnoredIndex, PositionWeights, ClassWeights, LabelSmoothing, ZLoss, Softcap, SumReduction],
    MOST_UNREDUCED,
    &[LogitScale, Softcap],
    &[LogitScale, Sigsoftmax],
    &[Sigsoftmax, LabelSmoothing, ZLoss],
    &[LogitScale, ZLoss, NoReduction],
    &[IgnoredIndex, PositionWeights, ClassWeights, LabelSmoothing, ZLoss, Softcap, LogitScale],
    &[IgnoredIndex, PositionWeights, ClassWeights, LabelSmoothing, ZLoss, Softcap, LogitScale, NoReduction],
];
