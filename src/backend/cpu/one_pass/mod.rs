//! A loss, alone or with its gradients, from one exponential per logit.
//!
//! With `E = exp(z - offset)` for an offset of each row, the gradient of row r of the logits is
//! `f_r E_r - h_r [v = y]`, where the factor `f_r` and the target's mass `h_r` are numbers, known once the row's
//! log-sum-exp is. So no gradient of logits is ever written, and the second product does not wait for the log-sum-exp:
//!
//! ```text
//! first product, tile by tile:  z = W c^T + b,   E = exp(z - offset) (0 for the target),   O += W^T E
//! objective, row by row:        lse, loss, f, m = h - f E of the target
//! gradient of the contexts:     dC = f O - m W[y]
//! third product, tile by tile:  dW += E (f C),   db += E f,   less the targets' m c and m
//! ```
//!
//! The target is left out of the products because `h` and its `f E` nearly cancel where it is predicted well. A
//! position may have several such *listed* ids, whose scores the objective depends on, besides the mass of all other
//! ids.
//!
//! Logits are kept as `[id][row]`: maxima and sums over ids add up whole vectors, and each result is the right operand
//! of the next product. An offset stays until a logit is far above it, so that sums are hardly ever rescaled. A loss
//! without gradients ends after the objective. The exponentials of a chunk are kept for the third product alone, which
//! gives those of the last chunk back as it reads them, unless the next call uses their memory again (`cpu/scratch.rs`);
//! if the decoder is frozen, a buffer holds those of one tile.

mod argmax;
mod exponentials;
mod first_product;
mod format;
mod gradients;
mod layout;
mod rows;
mod tile_operands;
mod tiles;
mod top_logits;
mod vectors;

use std::ops::Range;

use super::inputs::Inputs;
use super::memory::{Aligned, Workspace};
use super::objective::components::PositionLoss;
use super::objective::ranks::Ranks;
use super::objective::results::BufferedGradients;
use super::objective::targets::{Candidates, ListedIds, Targets};
use super::operands::dtype::Accumulator;
use super::scratch::Scratch;
use super::vector::math::defect_of;
use super::vector::simd::{Float, ROW_ALIGN};
use crate::backend::objective::{Scored, Task};
use crate::backend::operands::Sizes;
use crate::backend::plan::{Planned, Steps};
use crate::backend::ranking::{order, Ranked};
use crate::backend::shard::VocabShard;
use crate::backend::shared_rows::join;
use crate::error::Result;
use argmax::ArgmaxSearch;
use exponentials::FirstProductResults;
use first_product::{segment_bytes, ChunkBuffers, ChunkProducts, FirstProductRequest};
pub(crate) use format::Format;
use format::ThirdOperands;
use gradients::{ContextGradient, ThirdProduct};
use layout::{ChunkIds, Layout};
use rows::{own_logits, segment_factors, ChunkRows, Factors, SummedChunk};
use top_logits::Floors;

/// Returns the workspace of a task. Besides small numbers, the decoder's gradient needs the exponentials of a chunk,
/// and the contexts' gradient a product for each of its pieces.
pub(super) fn workspace<F: Accumulator, X: Format<F>>(format: X, sizes: Sizes, task: &Task) -> Workspace {
    /// The number of elements that the numbers of a row take.
    const ROW_NUMBERS: usize = 32;
    /// The number of elements that the numbers of a listed id take, besides the first.
    const LISTED_NUMBERS: usize = 16;
    let needs_grad = task.needs_grad();
    let candidates = if let Task::Scores { scores, .. } = task { scores.candidates } else { 1 };
    let listed = LISTED_NUMBERS * candidates.saturating_sub(1);
    let Sizes { context_dim: d, vocab, .. } = sizes;
    let element = size_of::<F>();
    let layout = Layout::new::<F>(format.blocks(), 1, sizes, needs_grad);
    let (panel, ids) = (layout.panel_rows, layout.padded(layout.tile_ids));
    let product_bytes = if needs_grad.contexts { layout.padded(d) * element } else { 0 };
    let scaled_bytes = if needs_grad.decoder() { format.scaled_context_bytes(d) } else { 0 };
    // For the decoder's gradient, a row has its exponentials, the offsets of each tile, the factors of each segment,
    // and what the segment's tiles share. Otherwise it has the sums and factors of each segment.
    let sum_bytes = if needs_grad.decoder() {
        let exponentials = layout.padded(vocab) * format.kept_per_exponential() * size_of::<X::Exponential>();
        exponentials + 2 * layout.tiles() * element + scaled_bytes
    } else {
        let segment = segment_bytes::<F>(panel) + usize::from(needs_grad.contexts) * element;
        segment * layout.segments()
    };
    // The search for the argmax needs the largest logit of each tile, and buffers for a position and a tile.
    let (tile_largest_bytes, search_bytes) = if task.needs_argmax() {
        let packed = layout.columns(sizes.components) * format.packed_per_row(d) * size_of::<X::Packed>();
        (layout.tiles() * element, packed + (panel + 1) * ids * element + layout.tiles() * size_of::<f64>())
    } else {
        (0, 0)
    };
    let top_k_bytes = if let Task::TopK { k } = *task { layout.segments() * top_logits::row_bytes(k) } else { 0 };
    // All panels but the last are full.
    let piece_bytes = (layout.extra_pieces() + 1) * panel * (product_bytes + scaled_bytes);
    // The contexts exist packed and gathered.
    let packed = format.packed_per_row(d) * size_of::<X::Packed>();
    let numbers = (d + ROW_NUMBERS + listed) * element;
    let per_row = sum_bytes + tile_largest_bytes + top_k_bytes + product_bytes + packed + numbers;
    let per_thread = format.thread_bytes(d, ids, needs_grad.decoder()) + panel * product_bytes + search_bytes;
    let fixed = layout.lanes * per_row + piece_bytes + vocab.next_multiple_of(ROW_ALIGN) * element;
    Workspace { per_row, fixed, per_thread }
}

/// What is requested of each position.
#[derive(Clone, Copy)]
pub(super) enum OnePassRequest<'a, F> {
    /// The loss of its target. With a shard, the ranks of the shard have the vocabulary together.
    Loss { targets: &'a Targets<F>, shard: Option<&'a VocabShard> },
    /// The scores of its candidates.
    Scores { candidates: &'a Candidates, scored: &'a Scored },
    /// Its `k` most probable ids. The mixture has a single component.
    TopK { k: usize },
}

impl<'a, F: Float> OnePassRequest<'a, F> {
    /// Returns the targets of a loss.
    fn targets(&self) -> Option<&'a Targets<F>> {
        if let OnePassRequest::Loss { targets, .. } = self {
            Some(targets)
        } else {
            None
        }
    }

    /// Returns the ids whose logits the first product lists one by one.
    fn listed_ids(&self) -> ListedIds<'a> {
        match self {
            OnePassRequest::Loss { targets, .. } => targets.listed(),
            OnePassRequest::Scores { candidates, .. } => ListedIds::Candidates(candidates),
            OnePassRequest::TopK { .. } => ListedIds::Nothing,
        }
    }

    /// Returns whether it is requested which listed id is the argmax.
    fn needs_argmax(&self) -> bool {
        match self {
            OnePassRequest::Loss { targets, .. } => targets.needs_correct(),
            OnePassRequest::Scores { scored, .. } => scored.needs_argmax,
            OnePassRequest::TopK { .. } => false,
        }
    }

    /// Returns what the first product must deliver for this request.
    fn first_product(&self) -> FirstProductRequest {
        FirstProductRequest {
            moment: matches!(self, OnePassRequest::Scores { scored, .. } if scored.needs_entropy),
            tile_largest: self.needs_argmax(),
            top_k: if let OnePassRequest::TopK { k } = *self { Some(k) } else { None },
        }
    }
}

/// The state of a pass over the chunks of a plan. Each chunk replaces the one before; losses and gradients accumulate.
pub(super) struct OnePass<'a, F: Accumulator, X: Format<F>> {
    format: X,
    inputs: Inputs<'a, F>,
    request: OnePassRequest<'a, F>,
    /// The ranks that share the vocabulary, if there are any.
    ranks: Option<Ranks<'a, F>>,
    layout: Layout,
    /// `[positions]`
    losses: Vec<PositionLoss>,
    gradients: BufferedGradients<F>,

    buffers: ChunkBuffers<F, X>,
    /// `[rows, d]`: the contexts, unless they are stored in this form
    gathered: Vec<F>,
    chunk: Chunk<'a, F>,
}

/// The state of a pass, whatever multiplies. What uses it is compiled once for all multipliers.
pub(super) trait Pass<'a, F: Accumulator>: Steps {
    /// Returns the `k` most probable ids of each of the chunk's positions and their log-probabilities, in descending
    /// order.
    fn most_probable(&self, k: usize) -> Result<Vec<Vec<Ranked>>>;

    /// Returns whether each candidate of the chunk's positions is the argmax, `[positions, n]`, if that is requested.
    fn are_argmax(&self, candidates: &Candidates) -> Vec<u8>;

    /// Returns the scores of the chunk's positions, `[positions, n + 3]`.
    fn scores(&self, candidates: &Candidates, scored: &Scored) -> Vec<F>;

    /// Computes the loss of each of the chunk's positions over these targets, and its rows.
    fn objective_rows(&mut self, targets: &Targets<F>);

    /// Returns the losses `[positions]`, the gradients, and the ranks that may still sum those of the contexts.
    fn finish(self: Box<Self>) -> (Vec<PositionLoss>, BufferedGradients<F>, Option<Ranks<'a, F>>);
}

/// The present chunk.
struct Chunk<'a, F> {
    /// The positions that are not ignored.
    positions: Vec<usize>,
    /// `None` if all positions are ignored
    first_product: Option<FirstProductResults<'a, F>>,
    /// `[positions]`: the place of the argmax among the listed ids; `None` if it is not listed. Empty unless requested
    argmax: Vec<Option<usize>>,
    /// What the objective leaves for the gradients.
    rows: ChunkRows<F>,
    /// `[segment][column]`
    segment_factors: Vec<Vec<F>>,
}

impl<F: Default> Chunk<'_, F> {
    /// Starts a chunk before its first product.
    fn new(positions: Vec<usize>) -> Self {
        Chunk { positions, first_product: None, argmax: vec![], rows: ChunkRows::default(), segment_factors: vec![] }
    }
}

impl<'a, F: Accumulator, X: Format<F>> OnePass<'a, F, X> {
    pub(super) fn new(
        format: X,
        inputs: Inputs<'a, F>,
        request: OnePassRequest<'a, F>,
        gradients: BufferedGradients<F>,
        Planned { needs_grad, plan, .. }: &Planned,
    ) -> Self {
        let Sizes { positions, context_dim: d, vocab, .. } = inputs.sizes;
        let rows = plan.rows_per_chunk;
        let layout = Layout::new::<F>(format.blocks(), rows, inputs.sizes, *needs_grad);
        let pieces = if needs_grad.contexts { layout.pieces(rows) } else { 0 };
        let columns = layout.columns(rows);
        let kept = format.kept_per_exponential();
        let exponentials = if needs_grad.decoder() { columns * layout.padded(vocab) * kept } else { 0 };
        let shard = if let OnePassRequest::Loss { shard, .. } = request { shard } else { None };
        OnePass {
            format,
            inputs,
            request,
            ranks: shard.map(Ranks::new),
            layout,
            losses: vec![PositionLoss::default(); positions],
            gradients,
            buffers: ChunkBuffers {
                exponentials: Scratch::new(exponentials),
                products: Aligned::zeros(pieces * layout.panel_rows * layout.padded(d)),
                packed: Aligned::zeros(columns * format.packed_per_row(d)),
            },
            gathered: Vec::new(),
            chunk: Chunk::new(vec![]),
        }
    }

    /// Returns the bytes of the large buffers.
    #[cfg(test)]
    pub(super) fn allocated(&self) -> usize {
        let ChunkBuffers { exponentials, products, packed } = &self.buffers;
        size_of_val(&**exponentials) + size_of_val(&**products) + size_of_val(&**packed)
    }

    /// Gathers the contexts of these positions of a chunk, unless the stored contexts are an operand as they are.
    fn gather_contexts(&mut self, chunk: &Range<usize>, positions: &[usize]) {
        let size = self.inputs.sizes.components * self.inputs.sizes.context_dim;
        self.gathered.clear();
        if self.inputs.contexts.wide().is_none() || positions.len() < chunk.len() {
            for t in positions {
                self.inputs.contexts.slice(t * size..(t + 1) * size).append_to(&mut self.gathered);
            }
        }
    }

    /// Lets the ranks join the rows of a chunk whose listed ids are targets.
    fn join_ranks(&mut self, positions: &[usize], first_product: &mut FirstProductResults<'_, F>) -> Result<()> {
        let (Some(ranks), Some(targets)) = (&mut self.ranks, self.request.targets()) else { return Ok(()) };
        ranks.finish_sum(&mut self.gradients.contexts)?;
        let owner = |&t: &usize| targets.id(t).map(|id| ranks.shard.owner(id));
        let owners: Vec<_> = positions.iter().map(owner).collect();
        join(ranks.shard, &owners, first_product.shared_rows())
    }
}

impl<'a, F: Accumulator, X: Format<F>> Pass<'a, F> for OnePass<'a, F, X> {
    fn most_probable(&self, k: usize) -> Result<Vec<Vec<Ranked>>> {
        let Some(first_product) = &self.chunk.first_product else { return Ok(vec![]) };
        let rank_position = |(row, &position): (usize, &usize)| {
            let (lse, log_prior) = (first_product.lse(row), self.inputs.log_priors[position]);
            if let Some(defect) = defect_of(std::iter::once((lse, log_prior))) {
                return Err(defect.at(position));
            }
            let log_scale = log_prior - lse.log_sum;
            let mut ranked = Vec::new();
            for (sums, r) in first_product.row_segments(row) {
                ranked.extend_from_slice(sums.top_logits.as_ref().map_or(&[], |top| top.row(r)));
            }
            ranked.sort_unstable_by(order);
            ranked.truncate(k);
            let log_prob = |z: f64| (F::from_f64(z) - lse.largest + log_scale).f64().min(0.0);
            Ok(ranked.into_iter().map(|(z, id)| (log_prob(z), id)).collect())
        };
        self.chunk.positions.iter().enumerate().map(rank_position).collect()
    }

    fn are_argmax(&self, candidates: &Candidates) -> Vec<u8> {
        let compare_position = |(&argmax, &t): (&Option<usize>, &usize)| {
            candidates.places(t).iter().map(move |&place| u8::from(argmax == Some(place)))
        };
        self.chunk.argmax.iter().zip(&self.chunk.positions).flat_map(compare_position).collect()
    }

    fn scores(&self, candidates: &Candidates, scored: &Scored) -> Vec<F> {
        let Chunk { positions, first_product, .. } = &self.chunk;
        let Some(first_product) = first_product else { return vec![] };
        SummedChunk { inputs: &self.inputs, positions, first_product }.scores(candidates, scored)
    }

    fn objective_rows(&mut self, targets: &Targets<F>) {
        let components = self.inputs.sizes.components;
        let Chunk { positions, first_product, argmax, rows, segment_factors } = &mut self.chunk;
        let Some(first_product) = first_product else { return };
        let losses;
        (losses, *rows) = SummedChunk { inputs: &self.inputs, positions, first_product }.objective(targets);
        if self.gradients.are_needed {
            *segment_factors = self::segment_factors(first_product, rows);
        }
        let by_position = positions.iter().zip(losses).zip(rows.rows.chunks_exact(components));
        for (i, ((&t, loss), rows)) in by_position.enumerate() {
            let is_correct = argmax.get(i) == Some(&Some(0));
            self.losses[t] = PositionLoss { is_correct, ..loss };
            if self.gradients.are_needed {
                let gradients = &mut self.gradients.log_priors[t * components..][..components];
                gradients.iter_mut().zip(rows).for_each(|(gradient, row)| *gradient = row.log_prior);
            }
        }
    }

    fn finish(self: Box<Self>) -> (Vec<PositionLoss>, BufferedGradients<F>, Option<Ranks<'a, F>>) {
        (self.losses, self.gradients, self.ranks)
    }
}

/// Returns the contexts of a chunk's rows, `[rows, d]`: as they are stored, or `gathered` if they are not stored in
/// this form or only these `positions` of the chunk are not ignored.
fn contexts<'c, F: Accumulator>(
    inputs: &'c Inputs<'_, F>,
    gathered: &'c [F],
    chunk: &Range<usize>,
    positions: &[usize],
) -> &'c [F] {
    let size = inputs.sizes.components * inputs.sizes.context_dim;
    let stored = inputs.contexts.slice(chunk.start * size..chunk.end * size).wide();
    stored.filter(|_| positions.len() == chunk.len()).unwrap_or(gathered)
}

impl<F: Accumulator, X: Format<F>> Steps for OnePass<'_, F, X> {
    /// Computes the first and the second product of the chunk, without the factors of the rows.
    fn first_product(&mut self, chunk: Range<usize>) -> Result<()> {
        let (components, request) = (self.inputs.sizes.components, self.request.first_product());
        let listed = self.request.listed_ids();
        let positions: Vec<usize> = chunk.clone().filter(|&t| listed.at(t).is_some()).collect();
        self.chunk = Chunk::new(vec![]);
        self.gather_contexts(&chunk, &positions);
        if positions.is_empty() {
            return Ok(());
        }
        let panels = self.layout.panels(positions.len() * components);
        let ids = ChunkIds::new(listed, &positions, components);
        let (format, inputs) = (self.format, &self.inputs);
        let contexts = contexts(inputs, &self.gathered, &chunk, &positions);
        let targets = self.request.targets();
        let products = ChunkProducts {
            format,
            inputs,
            layout: &self.layout,
            panels: &panels,
            contexts,
            ids: &ids,
            targets_are_own: targets.is_some_and(Targets::are_own),
            request,
            floors: request.top_k.map(|_| Floors::new(positions.len())),
        };
        let segments = products.run(&mut self.buffers);
        let own_logits = targets.map_or(vec![], |targets| own_logits(inputs, targets, &positions, contexts));
        let mut first_product = FirstProductResults::new(self.layout, panels, ids, segments, own_logits);
        self.join_ranks(&positions, &mut first_product)?;
        let argmax = if self.request.needs_argmax() {
            let inputs = &self.inputs;
            let contexts = self::contexts(inputs, &self.gathered, &chunk, &positions);
            ArgmaxSearch { format, inputs, contexts, first_product: &first_product }.run(&positions)
        } else {
            vec![]
        };
        self.chunk = Chunk { argmax, first_product: Some(first_product), ..Chunk::new(positions) };
        Ok(())
    }

    /// Computes the objective of a loss. That of scores is known to the caller, which calls [`Self::objective_rows`].
    fn objective(&mut self, _: Range<usize>) -> Result<()> {
        if let Some(targets) = self.request.targets() {
            self.objective_rows(targets);
        }
        Ok(())
    }

    /// Multiplies the second product by the rows' factors, and starts the sum over the ranks, if there are any.
    fn context_gradient(&mut self, chunk: Range<usize>) -> Result<()> {
        let Sizes { components, context_dim: d, .. } = self.inputs.sizes;
        let Chunk { positions, first_product, rows, segment_factors, .. } = &self.chunk;
        let (Some(&first), Some(first_product)) = (positions.first(), first_product) else { return Ok(()) };
        let mut positions = positions.iter().copied().peekable();
        let by_position = self.gradients.contexts[first * components * d..].chunks_exact_mut(components * d);
        let mut to = Vec::with_capacity(rows.rows.len());
        for (t, rows) in (first..).zip(by_position) {
            if positions.next_if_eq(&t).is_some() {
                to.extend(rows.chunks_exact_mut(d));
            }
        }
        let gradient = ContextGradient { inputs: &self.inputs, first_product, rows, factors: segment_factors };
        gradient.compute(&mut self.buffers.products, to);
        if let Some(ranks) = &mut self.ranks {
            ranks.start_sum(&self.gradients.contexts, chunk.start * components * d..chunk.end * components * d);
        }
        Ok(())
    }

    /// Computes the third product of the exponentials that the first product has left.
    fn decoder_gradient(&mut self, chunk: Range<usize>) -> Result<()> {
        let Chunk { positions, first_product, rows: ChunkRows { rows, entries }, segment_factors, .. } = &self.chunk;
        let Some(first_product) = first_product else { return Ok(()) };
        let operands = ThirdOperands {
            factors: Factors { first_product, rows, entries, by_segment: segment_factors },
            contexts: contexts(&self.inputs, &self.gathered, &chunk, positions),
            d: self.inputs.sizes.context_dim,
        };
        let product = ThirdProduct { format: self.format, operands };
        let is_last_chunk = chunk.end == self.inputs.sizes.positions;
        let ChunkBuffers { exponentials, packed, products } = &mut self.buffers;
        if is_last_chunk {
            // Before the gradient takes memory.
            *products = Aligned::default();
        }
        let gives_back = is_last_chunk && !exponentials.is_kept();
        product.add_to(&mut self.gradients.decoder, exponentials, packed, gives_back);
        Ok(())
    }
}
