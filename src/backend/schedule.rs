//! The loop over chunks: the steps of each chunk, in order.

use std::ops::Range;

use crate::backend::operands::NeedsGrad;
use crate::backend::plan::Planned;
use crate::error::Result;

/// The steps of a loss on a device, each for the chunk that has the given `positions`. An implementation accumulates
/// the results. It may compute a product as soon as its operands are known: the CPU's `OnePass` multiplies the
/// exponentials of a tile by the decoder in `first_product`, while both are in the cache.
pub(super) trait Steps {
    /// Computes the first product, the logits of the chunk's rows, and the log-sum-exp of each row.
    fn first_product(&mut self, positions: Range<usize>) -> Result<()>;
    /// Computes the objective of each position and, if gradients are needed, those of the logits and the log-priors.
    /// The logits' gradient replaces the logits, or is left as factors of their exponentials.
    fn objective(&mut self, positions: Range<usize>) -> Result<()>;
    /// Computes the second product, the gradient of the chunk's contexts, or what is missing of it.
    fn context_gradient(&mut self, positions: Range<usize>) -> Result<()>;
    /// Computes the third product, and adds it to the gradients of the decoder.
    fn decoder_gradient(&mut self, positions: Range<usize>) -> Result<()>;

    /// Runs the steps of all chunks. An exact method needs at least these three matrix products; the loss alone needs
    /// only the first.
    fn run_loss(&mut self, planned: &Planned) -> Result<()> {
        for positions in planned.plan.chunks() {
            self.first_product(positions.clone())?;
            self.objective(positions.clone())?;
            self.chunk_gradients(positions, planned.needs_grad)?;
        }
        Ok(())
    }

    /// Runs those steps of a chunk that compute gradients which are needed, once its objective is known.
    fn chunk_gradients(&mut self, positions: Range<usize>, needs_grad: NeedsGrad) -> Result<()> {
        if needs_grad.contexts {
            self.context_gradient(positions.clone())?;
        }
        if needs_grad.decoder() {
            self.decoder_gradient(positions)?;
        }
        Ok(())
    }
}
