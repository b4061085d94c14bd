//! The loop over chunks: what happens to one chunk's logits, in which order.

use std::ops::Range;

use crate::backend::contract::NeedsGrad;
use crate::backend::plan::Plan;
use crate::error::Result;

/// The steps of a loss on a device, chunk by chunk: `positions` are those of the chunk. What the chunks leave
/// behind is the device's state.
pub(super) trait Steps {
    /// First product: the logits of all components of the chunk's positions, and the log-sum-exp of each row.
    fn logits(&mut self, positions: Range<usize>) -> Result<()>;
    /// The loss of each position from its logits, and, if gradients are needed, their gradient in their place.
    fn loss_rows(&mut self, positions: Range<usize>) -> Result<()>;
    /// Second product: the gradient of the chunk's contexts.
    fn context_gradient(&mut self, positions: Range<usize>) -> Result<()>;
    /// Third product: the chunk's part of the gradient of the decoder's weight.
    fn decoder_gradient(&mut self, positions: Range<usize>) -> Result<()>;

    /// The loss and its gradients: three products in all, as many as an exact method can do; one without gradients.
    fn run_loss(&mut self, plan: &Plan, needs_grad: NeedsGrad) -> Result<()> {
        for positions in plan.chunks() {
            self.logits(positions.clone())?;
            self.loss_rows(positions.clone())?;
            if needs_grad.contexts {
                self.context_gradient(positions.clone())?;
            }
            if needs_grad.weight {
                self.decoder_gradient(positions)?;
            }
        }
        Ok(())
    }
}
