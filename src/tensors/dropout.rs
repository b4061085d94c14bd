//! Locked dropout of the contexts: one mask for all steps of a sequence (Gal & Ghahramani, 2016, arXiv 1512.05287).

use candle_core::Tensor;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::transfer::to_device;
use crate::error::Result;

/// Whether the dropout of a head is applied, and where its masks come from.
///
/// # Examples
///
/// ```
/// use mos_head::{DropoutMasks, LossOptions};
///
/// let step = 42;
/// let options = LossOptions::new().with_dropout(DropoutMasks::Seeded(step));
/// assert_eq!(LossOptions::new().dropout, DropoutMasks::Random);
/// assert_eq!(LossOptions::evaluation().dropout, DropoutMasks::Off);
/// # assert_eq!(options.dropout, DropoutMasks::Seeded(42));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DropoutMasks {
    /// There is no dropout, as in evaluation and decoding.
    #[default]
    Off,
    /// The masks are from candle's generator, which on the CPU cannot be seeded.
    Random,
    /// The masks are from this seed, and the same on every device.
    Seeded(u64),
}

impl DropoutMasks {
    /// Draws one Bernoulli mask per sequence, scaled to keep the mean: `[.., 1, K, d]` for contexts `[.., seq, K, d]`,
    /// the same at all steps (Gal & Ghahramani: A Theoretically Grounded Application of Dropout in Recurrent Neural
    /// Networks. NeurIPS 2016, arXiv 1512.05287). It returns `None` if there is no dropout.
    pub(crate) fn locked_mask(self, contexts: &Tensor, probability: f64) -> Result<Option<Tensor>> {
        if probability == 0.0 {
            return Ok(None);
        }
        let mut dims = contexts.dims().to_vec();
        if let [_, .., seq, _, _] = dims.as_mut_slice() {
            *seq = 1;
        }
        let keep = 1.0 - probability;
        let uniform = match self {
            DropoutMasks::Off => return Ok(None),
            DropoutMasks::Seeded(seed) => {
                let mut rng = StdRng::seed_from_u64(seed);
                let count: usize = dims.iter().product();
                let values: Vec<f32> = (0..count).map(|_| rng.random()).collect();
                to_device(values, dims, contexts.device())?
            }
            DropoutMasks::Random => Tensor::rand(0f32, 1f32, dims, contexts.device())?,
        };
        let mask = uniform.lt(keep)?.to_dtype(contexts.dtype())?;
        Ok(Some((mask / keep)?))
    }
}
