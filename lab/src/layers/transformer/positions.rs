//! Sinusoidal encodings of positions.

use crate::Result;
use candle_core::Tensor;

/// The encodings of Vaswani et al. (2017, section 3.5): sines in the first half of the width and cosines in the second,
/// of wavelengths from 2 pi to 10,000 x 2 pi.
#[derive(Clone, Copy, Debug)]
pub struct Positions {
    /// The width of an encoding.
    pub width: usize,
}

impl Positions {
    /// Adds the encodings of the positions from `first` on to inputs `[batch, steps, width]`.
    pub fn add(self, inputs: &Tensor, first: usize) -> Result<Tensor> {
        let steps = inputs.dim(1)?;
        let half = self.width.div_ceil(2);
        let number = |position: usize, i: usize| {
            let angle = position as f64 / 10_000f64.powf((i % half) as f64 / half as f64);
            (if i < half { angle.sin() } else { angle.cos() }) as f32
        };
        let numbers = (first..first + steps).flat_map(|position| (0..self.width).map(move |i| number(position, i)));
        let encodings = Tensor::from_iter(numbers, inputs.device())?.reshape((steps, self.width))?;
        Ok(inputs.broadcast_add(&encodings.to_dtype(inputs.dtype())?)?)
    }
}
