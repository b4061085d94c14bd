//! The loop over chunks: the steps of each chunk, in order.

use std::ops::Range;

use crate::backend::operands::NeedsGrad;
use crate::backend::plan::Plan;
use crate::error::Result;

/// The steps of a loss on a device, each for the chunk that has the given `positions`. The implementation accumulates
/// the results. It may compute a product as soon as its operands are known: the CPU multiplies the exponentials of a
/// tile by the decoder while both are in the cache, in `logits`.
pub(super) trait Steps {
    /// First product: the logits of all rows of the chunk, and the log-sum-exp of each row.
    fn logits(&mut self, positions: Range<usize>) -> Result<()>;
    /// The loss of each position and, if gradients are needed, the gradient of its logits, written over them.
    fn loss_rows(&mut self, positions: Range<usize>) -> Result<()>;
    /// Second product: the gradient of the chunk's contexts.
    fn context_gradient(&mut self, positions: Range<usize>) -> Result<()>;
    /// Third product: the chunk's contribution to the gradients of the decoder.
    fn decoder_gradient(&mut self, positions: Range<usize>) -> Result<()>;

    /// Three matrix products are the minimum of an exact method; the loss alone needs only the first.
    fn run_loss(&mut self, plan: &Plan, needs_grad: NeedsGrad) -> Result<()> {
        for positions in plan.chunks() {
            self.logits(positions.clone())?;
            self.loss_rows(positions.clone())?;
            self.gradients_of_rows(positions, needs_grad)?;
        }
        Ok(())
    }

    /// The second and third product of a chunk.
    fn gradients_of_rows(&mut self, positions: Range<usize>, needs_grad: NeedsGrad) -> Result<()> {
        if needs_grad.contexts {
            self.context_gradient(positions.clone())?;
        }
        if needs_grad.decoder() {
            self.decoder_gradient(positions)?;
        }
        Ok(())
    }
}
