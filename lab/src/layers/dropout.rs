//! Dropout with masks of a seeded generator: candle's takes no seed.

use crate::Result;
use candle_core::{Device, Tensor};
use rand::{rngs::StdRng, Rng};

/// Drops each value of a tensor of f32 by itself. Without a generator nothing is dropped.
pub fn dropout(values: Tensor, rate: f64, rng: Option<&mut StdRng>) -> Result<Tensor> {
    match mask(values.dims(), rate, values.device(), rng)? {
        Some(mask) => Ok((values * mask)?),
        None => Ok(values),
    }
}

/// Drops values `[batch, steps, width]` of f32 by one mask per sequence, which its time steps share. Without a
/// generator nothing is dropped.
pub fn locked_dropout(values: Tensor, dropout: f64, rng: Option<&mut StdRng>) -> Result<Tensor> {
    let (batch, _, width) = values.dims3()?;
    match mask(&[batch, 1, width], dropout, values.device(), rng)? {
        Some(mask) => Ok(values.broadcast_mul(&mask)?),
        None => Ok(values),
    }
}

/// Returns a mask of zeros with probability `dropout`, else of the number that keeps the mean; `None` without dropout
/// or a generator.
pub(crate) fn mask(dims: &[usize], dropout: f64, device: &Device, rng: Option<&mut StdRng>) -> Result<Option<Tensor>> {
    let Some(rng) = rng.filter(|_| dropout > 0.0) else { return Ok(None) };
    let keep = 1.0 - dropout;
    let (limit, kept) = ((keep * f64::from(u32::MAX)) as u32, (1.0 / keep) as f32);
    let count: usize = dims.iter().product();
    let mask: Vec<f32> = (0..count).map(|_| if rng.random::<u32>() < limit { kept } else { 0.0 }).collect();
    Ok(Some(Tensor::from_vec(mask, dims, device)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;
    use rand::SeedableRng;

    fn numbers(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn masks_keep_the_mean_and_a_locked_one_is_shared_over_time() {
        type Drop = fn(Tensor, f64, Option<&mut StdRng>) -> Result<Tensor>;
        // Each drops its values by this many elements of a mask.
        for (drop, count, is_locked) in [(locked_dropout as Drop, 2400, true), (dropout as Drop, 9600, false)] {
            let ones = Tensor::ones((60, 4, 40), DType::F32, &Device::Cpu).unwrap();
            let dropped = drop(ones.clone(), 0.3, Some(&mut StdRng::seed_from_u64(1))).unwrap();
            let step = |step| numbers(&dropped.narrow(1, step, 1).unwrap());
            assert!((1..4).all(|other| (step(other) == step(0)) == is_locked), "steps share a mask if it is locked");
            let values = if is_locked { step(0) } else { numbers(&dropped) };
            assert!(values.iter().all(|&value| value == 0.0 || (value - 1.0 / 0.7).abs() < 1e-6));
            // Six standard deviations of the mean.
            let mean = values.iter().sum::<f32>() / count as f32;
            assert!((mean - 1.0).abs() < 6.0 * (0.3f32 / 0.7 / count as f32).sqrt(), "{mean}");
            assert_ne!(values[..40], values[40..80], "every sequence, or step, has its own mask");
            assert_eq!(numbers(&drop(ones, 0.3, None).unwrap()), vec![1.0; 9600]);
        }
    }
}
