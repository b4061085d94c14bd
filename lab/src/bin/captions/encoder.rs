//! From images to features at several positions: convolutions of pictures, or a linear map of features from a file.

use candle_core::{Module, Tensor, D};
use candle_nn::{linear, Init, Linear, VarBuilder};
use lab::Result;

/// Channels of the first two convolutions; the third has as many as the decoder has units.
const CHANNELS: [usize; 2] = [16, 32];

pub(crate) struct Encoder {
    layers: Layers,
    /// What is added at each position, `[positions, hidden]`.
    positions: Tensor,
}

enum Layers {
    /// Convolutions of 3x3 with a stride of 2, as linear maps of the 9 pixels.
    Convolutions(Vec<Linear>),
    Projection(Linear),
}

impl Encoder {
    /// For images of these dimensions: height, width and channels of a picture, or positions and width of features.
    pub(crate) fn new(image: &[usize], hidden: usize, vb: VarBuilder) -> Result<Self> {
        let (layers, positions) = match *image {
            [height, width, channels] => {
                let widths = [channels, CHANNELS[0], CHANNELS[1], hidden];
                let layer = |i: usize| linear(9 * widths[i], widths[i + 1], vb.pp("convolution").pp(i));
                let positions = (0..3).fold([height, width], |sides, _| sides.map(|side| side.div_ceil(2)));
                let layers = (0..3).map(layer).collect::<candle_core::Result<_>>()?;
                (Layers::Convolutions(layers), positions.iter().product())
            }
            [positions, width] => (Layers::Projection(linear(width, hidden, vb.pp("projection"))?), positions),
            _ => return Err(format!("expected images of 2 or 3 dimensions, got {image:?}").into()),
        };
        let positions = vb.get_with_hints((positions, hidden), "positions", Init::Const(0.0))?;
        Ok(Self { layers, positions })
    }

    /// Images `[batch, ..]` -> features `[batch, positions, hidden]`; with `blind`, as if all features were zero before
    /// their positions are added.
    pub(crate) fn forward(&self, images: &Tensor, blind: bool) -> Result<Tensor> {
        let batch = images.dim(0)?;
        if blind {
            return Ok(self.positions.broadcast_left(batch)?.contiguous()?);
        }
        let dtype = self.positions.dtype();
        let features = match &self.layers {
            Layers::Convolutions(layers) => {
                let scaled = ((images.to_dtype(dtype)? / 64.0)? - 2.0)?;
                let maps = layers.iter().try_fold(scaled, |maps, layer| convolve(&maps, layer))?;
                maps.flatten(1, 2)?
            }
            Layers::Projection(layer) => layer.forward(&images.to_dtype(dtype)?)?.relu()?,
        };
        Ok(features.broadcast_add(&self.positions)?)
    }
}

/// Maps `[batch, height, width, channels]` -> maps of half the height and width.
fn convolve(maps: &Tensor, layer: &Linear) -> Result<Tensor> {
    let (batch, height, width, _) = maps.dims4()?;
    let (down, right) = (height.div_ceil(2), width.div_ceil(2));
    // Padded so that pixel 2 i + d, d from 0 to 2, is at 2 i + d.
    let maps = maps.pad_with_zeros(1, 1, 2 * down + 1 - height)?.pad_with_zeros(2, 1, 2 * right + 1 - width)?;
    let every_second = |maps: &Tensor, axis: usize, first: usize, count: usize| -> Result<Tensor> {
        let mut shape = maps.dims().to_vec();
        shape.splice(axis..=axis, [maps.dim(axis)? / 2, 2]);
        let pairs = maps.reshape(shape)?.narrow(axis, first / 2, count)?;
        Ok(pairs.narrow(axis + 1, first % 2, 1)?.squeeze(axis + 1)?)
    };
    let mut pixels = vec![];
    for dy in 0..3 {
        let rows = every_second(&maps, 1, dy, down)?.contiguous()?;
        for dx in 0..3 {
            pixels.push(every_second(&rows, 2, dx, right)?);
        }
    }
    // One matrix product for all places.
    let pixels = Tensor::cat(&pixels, D::Minus1)?.contiguous()?.flatten_to(2)?;
    Ok(layer.forward(&pixels)?.relu()?.reshape((batch, down, right, ()))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Var};
    use candle_nn::VarMap;
    use lab::attention::Attention;
    use lab::init;
    use rand::{rngs::StdRng, Rng, SeedableRng};

    fn random(shape: &[usize], seed: u64) -> Tensor {
        let mut rng = StdRng::seed_from_u64(seed);
        let values = (0..shape.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
        Tensor::from_vec::<_, f64>(values, shape, &Device::Cpu).unwrap()
    }

    #[test]
    fn convolutions_equal_those_of_candle() {
        for sides in [(8, 6), (7, 5), (40, 40)] {
            let maps = random(&[2, sides.0, sides.1, 3], 1);
            let (weight, bias) = (random(&[4, 27], 2), random(&[4], 3));
            let found = convolve(&maps, &Linear::new(weight.clone(), Some(bias.clone()))).unwrap();
            // [out, 3, 3, in] -> [out, in, 3, 3]
            let kernel = weight.reshape((4, 3, 3, 3)).unwrap().permute((0, 3, 1, 2)).unwrap().contiguous().unwrap();
            let planes = maps.permute((0, 3, 1, 2)).unwrap().contiguous().unwrap();
            let expected = planes.conv2d(&kernel, 1, 2, 1, 1).unwrap().permute((0, 2, 3, 1)).unwrap();
            let expected = expected.broadcast_add(&bias).unwrap().relu().unwrap();
            assert_eq!(found.dims(), expected.dims());
            let difference = (found - expected).unwrap().abs().unwrap().max_all().unwrap();
            assert!(difference.to_scalar::<f64>().unwrap() < 1e-12);
        }
    }

    #[test]
    fn gradients_are_those_of_central_differences() {
        for image in [&[9, 8, 3][..], &[4, 6]] {
            let varmap = VarMap::new();
            let vb = VarBuilder::from_varmap(&varmap, DType::F64, &Device::Cpu);
            let encoder = Encoder::new(image, 5, vb.pp("encoder")).unwrap();
            let attention = Attention::new(5, vb.pp("attention")).unwrap();
            init::uniform(&varmap, 1, |_| 0.6).unwrap();
            let images = (random(&[&[2], image].concat(), 2) * 100.0).unwrap();
            let (hidden, weight) = (random(&[2, 3, 5], 3), random(&[2, 3, 5], 4));
            let value = || {
                let features = encoder.forward(&images, false).unwrap();
                let mask = Tensor::zeros((2, 1, features.dim(1).unwrap()), DType::F64, &Device::Cpu).unwrap();
                let memory = attention.memory(features, mask).unwrap();
                (attention.forward(&hidden, &memory).unwrap() * &weight).unwrap().sum_all().unwrap()
            };
            let gradients = value().backward().unwrap();
            for (name, var) in init::sorted(&varmap) {
                let gradient = gradients.get(&var).unwrap_or_else(|| panic!("{name} has no gradient"));
                let direction = random(var.dims(), 5);
                let found = (gradient * &direction).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
                let start = var.as_tensor().copy().unwrap();
                let at = |step: f64, var: &Var| {
                    var.set(&(&start + (&direction * step).unwrap()).unwrap()).unwrap();
                    value().to_scalar::<f64>().unwrap()
                };
                let expected = (at(1e-6, &var) - at(-1e-6, &var)) / 2e-6;
                var.set(&start).unwrap();
                assert!((found - expected).abs() < 1e-6 * (1.0 + expected.abs()), "{name}: {found}, {expected}");
                assert!(found != 0.0, "{name}");
            }
        }
    }
}
