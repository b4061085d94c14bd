//! The responsibilities of the components for targets.

use candle_core::{Tensor, D};

use super::Distributions;
use crate::backend::operands::Sizes;
use crate::error::Result;
use crate::mixture::Mixture;
use crate::tensors::checks::check_targets;

impl Mixture {
    /// Computes the responsibility of each component for the target at its position, the probability of the component
    /// after the target is known:
    ///
    /// ```text
    /// r_k = pi_k p_k(target) / P(target)
    /// ```
    ///
    /// Each component's context gets `r_k` of the gradient of the loss. The result is a constant. It costs as much as a
    /// loss without gradients. Responsibilities for a target of probability zero are NaN.
    ///
    /// # Shapes
    ///
    /// - targets: `[..]`, the leading dimensions of the contexts; u8, u32 or i64
    /// - returns `[.., K]` in f32 (f64 for f64)
    ///
    /// # Errors
    ///
    /// The errors that [`Distributions::score`] has for token ids.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use mos_head::Mixture;
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let contexts = Tensor::new(&[[[2f32], [-2.]]], &Device::Cpu)?; // one position, K = 2, d = 1
    /// let log_priors = Tensor::full(0.5f32.ln(), (1, 2), &Device::Cpu)?;
    /// let weight = Tensor::new(&[[1f32], [-1.]], &Device::Cpu)?; // the first component prefers id 0, the second id 1
    /// let mixture = Mixture::new(&contexts, Some(&log_priors), &weight, None)?;
    /// let responsibilities = mixture.responsibilities(&Tensor::new(&[0u32], &Device::Cpu)?)?.to_vec2::<f32>()?;
    /// assert!(responsibilities[0][0] > 0.98 && responsibilities[0][1] < 0.02);
    /// # Ok(())
    /// # }
    /// ```
    pub fn responsibilities(&self, targets: &Tensor) -> Result<Tensor> {
        check_targets("targets", targets, self.leading())?;
        let mixture = self.detach();
        let Sizes { positions, components, .. } = mixture.operands().sizes;
        if positions == 0 {
            return mixture.log_priors();
        }
        let targets = targets.flatten_all()?.unsqueeze(1)?.broadcast_as((positions, components))?.flatten_all()?;
        let by_row: Vec<u32> = (0..positions as u32).flat_map(|t| (0..components).map(move |_| t)).collect();
        let log_probs = mixture.component_softmaxes()?.log_prob(&targets);
        let log_probs = log_probs.map_err(|error| error.with_position_from(&by_row).renamed("token_ids", "targets"))?;
        let log_priors = mixture.log_priors()?;
        let log_joint = (log_probs.reshape(log_priors.shape())? + log_priors)?;
        Ok(candle_nn::ops::softmax(&log_joint, D::Minus1)?)
    }
}
