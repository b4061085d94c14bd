//! The encoder makes features at several positions from images: by convolutions of pictures, or a linear map of
//! features from a file.

use candle_core::{Module, Tensor};
use candle_nn::{conv2d, linear, Conv2d, Conv2dConfig, Init, Linear, VarBuilder};
use lab::Result;

/// Channels of the first two convolutions; the third has as many as the decoder has units.
const CHANNELS: [usize; 2] = [16, 32];

pub(crate) struct Encoder {
    layers: Layers,
    /// The numbers that are added at each position, `[positions, hidden]`.
    positions: Tensor,
}

enum Layers {
    /// Each convolution is over 3x3 pixels, with a stride of 2 and a rectifier.
    Convolutions(Vec<Conv2d>),
    Projection(Linear),
}

impl Encoder {
    /// Makes an encoder of images of these dimensions: height, width and channels of a picture, or positions and width
    /// of features.
    pub(crate) fn new(image: &[usize], hidden: usize, vb: VarBuilder) -> Result<Self> {
        let (layers, positions) = match *image {
            [height, width, channels] => {
                let (mut sides, mut channels, mut layers) = ([height, width], channels, vec![]);
                let config = Conv2dConfig { padding: 1, stride: 2, ..Conv2dConfig::default() };
                for (i, outputs) in CHANNELS.into_iter().chain([hidden]).enumerate() {
                    layers.push(conv2d(channels, outputs, 3, config, vb.pp("convolution").pp(i))?);
                    (sides, channels) = (sides.map(half), outputs);
                }
                (Layers::Convolutions(layers), sides[0] * sides[1])
            }
            [positions, width] => (Layers::Projection(linear(width, hidden, vb.pp("projection"))?), positions),
            _ => return Err(format!("expected images of 2 or 3 dimensions, got {image:?}").into()),
        };
        let positions = vb.get_with_hints((positions, hidden), "positions", Init::Const(0.0))?;
        Ok(Self { layers, positions })
    }

    /// Computes the features `[batch, positions, hidden]` of images `[batch, ..]`. With `blind`, all features are zero
    /// before their positions are added.
    pub(crate) fn forward(&self, images: &Tensor, blind: bool) -> Result<Tensor> {
        if blind {
            return Ok(self.positions.broadcast_left(images.dim(0)?)?.contiguous()?);
        }
        let values = images.to_dtype(self.positions.dtype())?;
        let features = match &self.layers {
            Layers::Convolutions(layers) => {
                let pixels = ((values / 64.0)? - 2.0)?.permute((0, 3, 1, 2))?.contiguous()?;
                let maps = layers.iter().try_fold(pixels, |maps, layer| layer.forward(&maps)?.relu())?;
                maps.flatten_from(2)?.transpose(1, 2)?.contiguous()?
            }
            Layers::Projection(layer) => layer.forward(&values)?.relu()?,
        };
        Ok(features.broadcast_add(&self.positions)?)
    }
}

fn half(side: usize) -> usize {
    side.div_ceil(2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Var};
    use candle_nn::VarMap;
    use lab::layers::{init, Attention};
    use rand::{rngs::StdRng, Rng, SeedableRng};

    fn random(shape: &[usize], seed: u64) -> Tensor {
        let mut rng = StdRng::seed_from_u64(seed);
        let values = (0..shape.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
        Tensor::from_vec::<_, f64>(values, shape, &Device::Cpu).unwrap()
    }

    #[test]
    fn gradients_are_those_of_central_differences() {
        for image in [&[9, 9, 3][..], &[14, 14, 3], &[4, 6]] {
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
