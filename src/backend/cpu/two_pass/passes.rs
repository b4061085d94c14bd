//! The state of the two passes over a chunk's logits, and the tasks that it is made for.

use std::ops::Range;

use super::first_product::LogitTiles;
use crate::backend::cpu::inputs::Inputs;
use crate::backend::cpu::objective::components::PositionLoss;
use crate::backend::cpu::objective::ranks::Ranks;
use crate::backend::cpu::objective::results::BufferedGradients;
use crate::backend::cpu::objective::targets::Targets;
use crate::backend::cpu::operands::dtype::Accumulator;
use crate::backend::cpu::scratch::Scratch;
use crate::backend::cpu::vector::math::LogSumExp;
use crate::backend::plan::Plan;
use crate::backend::shard::VocabShard;

/// The two passes over the logits of each chunk.
pub(crate) struct TwoPasses<'a, F: Accumulator> {
    pub(super) product: Box<dyn LogitTiles<F>>,
    pub(super) inputs: Inputs<'a, F>,
    /// The distance between rows of the logits, in elements.
    pub(super) stride: usize,
    /// Whether the results of a position have the same bits whatever the other positions are.
    pub(super) are_independent: bool,

    /// `[rows of a chunk, stride]`: the logits, then their gradient.
    pub(super) logits: Scratch<F>,
    /// `[rows of a chunk]`.
    pub(super) lse: Vec<LogSumExp<F>>,
    /// `[rows of a chunk, d]`: the contexts in the accumulation dtype, or the live rows' contexts; unused if the
    /// products read the stored contexts.
    pub(super) chunk_contexts: Vec<F>,
    /// `[rows of a chunk, d]`: the gradient of the live rows' contexts, unless all rows are live.
    pub(super) chunk_gradient: Vec<F>,
    /// The chunk's rows whose logits have a nonzero gradient. They come first in `logits` and in `chunk_contexts`.
    pub(super) live_rows: LiveRows,

    /// The ranks that share the vocabulary, if it is cut.
    pub(crate) ranks: Option<Ranks<'a, F>>,
    /// `[rows of a chunk]`: the logits of the targets, if ranks share the vocabulary.
    pub(super) target_logits: Vec<F>,

    /// The targets that are known before the first chunk, if there are any.
    pub(super) targets: Option<&'a Targets<F>>,
    /// `[positions]`.
    pub(crate) losses: Vec<PositionLoss>,
    pub(crate) gradients: BufferedGradients<F>,
}

/// The rows of a chunk that take part in the second and third product: those whose logits have a gradient. The rows of
/// an ignored position have none, whatever their contexts hold.
pub(super) enum LiveRows {
    /// All rows, which are so many.
    All(usize),
    /// The indices of rows of the chunk, in the order in which they now lie in front.
    Some(Vec<usize>),
}

impl LiveRows {
    /// Returns how many rows are live.
    pub(super) fn len(&self) -> usize {
        match self {
            LiveRows::All(rows) => *rows,
            LiveRows::Some(rows) => rows.len(),
        }
    }
}

impl<'a, F: Accumulator> TwoPasses<'a, F> {
    /// Makes passes that read each position's distribution, for log-probabilities or scores. They have no gradients.
    pub(crate) fn for_distributions(product: Box<dyn LogitTiles<F>>, inputs: Inputs<'a, F>, plan: &Plan) -> Self {
        Self::for_chunk_targets(product, inputs, BufferedGradients::none(), plan)
    }

    /// Makes passes that read each position's distribution for a query, or a shard's part of it. The results of a
    /// position have the same bits whatever the other positions are, so that a sampler draws the same ids in every
    /// batch.
    pub(crate) fn for_decoding(
        product: Box<dyn LogitTiles<F>>,
        inputs: Inputs<'a, F>,
        shard: Option<&'a VocabShard>,
        plan: &Plan,
    ) -> Self {
        let passes = Self::for_distributions(product, inputs, plan);
        TwoPasses { are_independent: true, ranks: shard.map(Ranks::new), ..passes }
    }

    /// Makes the passes of a loss over targets that are known before the first chunk. If there is a shard, they compute
    /// the loss of the whole vocabulary.
    pub(crate) fn for_targets(
        product: Box<dyn LogitTiles<F>>,
        inputs: Inputs<'a, F>,
        targets: &'a Targets<F>,
        shard: Option<&'a VocabShard>,
        gradients: BufferedGradients<F>,
        plan: &Plan,
    ) -> Self {
        let passes = Self::for_chunk_targets(product, inputs, gradients, plan);
        TwoPasses { targets: Some(targets), ranks: shard.map(Ranks::new), ..passes }
    }

    /// Makes the passes of a loss whose targets follow from the results of each chunk: the caller passes them to
    /// [`TwoPasses::objective_rows`].
    pub(crate) fn for_chunk_targets(
        product: Box<dyn LogitTiles<F>>,
        inputs: Inputs<'a, F>,
        gradients: BufferedGradients<F>,
        plan: &Plan,
    ) -> Self {
        let (positions, stride) = (inputs.sizes.positions, inputs.bias.len());
        TwoPasses {
            product,
            inputs,
            stride,
            are_independent: false,
            logits: Scratch::new(plan.rows_per_chunk * stride),
            lse: Vec::new(),
            chunk_contexts: Vec::new(),
            chunk_gradient: Vec::new(),
            live_rows: LiveRows::All(0),
            ranks: None,
            target_logits: Vec::new(),
            targets: None,
            losses: vec![PositionLoss::default(); positions],
            gradients,
        }
    }

    /// Returns the rows of these positions.
    pub(super) fn rows(&self, positions: Range<usize>) -> Range<usize> {
        positions.start * self.inputs.sizes.components..positions.end * self.inputs.sizes.components
    }
}
