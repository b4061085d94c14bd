//! From images to features at several positions: convolutions of pictures, or a linear map of features from a file.

use candle_core::{Module, Tensor};
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
    Convolutions(Vec<Convolution>),
    Projection(Linear),
}

impl Encoder {
    /// For images of these dimensions: height, width and channels of a picture, or positions and width of features.
    pub(crate) fn new(image: &[usize], hidden: usize, vb: VarBuilder) -> Result<Self> {
        let (layers, positions) = match *image {
            [height, width, channels] => {
                let (mut sides, mut channels, mut layers) = ([height, width], channels, vec![]);
                for (i, outputs) in CHANNELS.into_iter().chain([hidden]).enumerate() {
                    layers.push(Convolution::new(sides, [channels, outputs], vb.pp("convolution").pp(i))?);
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

    /// Images `[batch, ..]` -> features `[batch, positions, hidden]`; with `blind`, as if all features were zero before
    /// their positions are added.
    pub(crate) fn forward(&self, images: &Tensor, blind: bool) -> Result<Tensor> {
        if blind {
            return Ok(self.positions.broadcast_left(images.dim(0)?)?.contiguous()?);
        }
        let values = images.to_dtype(self.positions.dtype())?;
        let features = match &self.layers {
            Layers::Convolutions(layers) => {
                let pixels = ((values / 64.0)? - 2.0)?.flatten(1, 2)?;
                layers.iter().try_fold(pixels, |maps, layer| layer.forward(&maps))?
            }
            Layers::Projection(layer) => layer.forward(&values)?.relu()?,
        };
        Ok(features.broadcast_add(&self.positions)?)
    }
}

/// A convolution of 3x3 pixels with a stride of 2 and a rectifier, as a linear map of the 9 pixels. (candle's conv2d
/// computes the gradient of the pixels by a slow path.)
struct Convolution {
    layer: Linear,
    /// The places of the 9 pixels of each output; the place after the last pixel is outside.
    places: Tensor,
}

impl Convolution {
    fn new([height, width]: [usize; 2], [inputs, outputs]: [usize; 2], vb: VarBuilder) -> Result<Self> {
        let mut places = vec![];
        for (y, x) in (0..half(height)).flat_map(|y| (0..half(width)).map(move |x| (2 * y, 2 * x))) {
            for (down, right) in (y..y + 3).flat_map(|down| (x..x + 3).map(move |right| (down, right))) {
                // From the pixel before this one in each direction on.
                let is_inside = (1..=height).contains(&down) && (1..=width).contains(&right);
                places.push(if is_inside { (down - 1) * width + right - 1 } else { height * width } as u32);
            }
        }
        let places = Tensor::new(places, vb.device())?;
        Ok(Self { layer: linear(9 * inputs, outputs, vb)?, places })
    }

    /// Maps `[batch, height * width, inputs]` -> maps of half the height and width, `[batch, .., outputs]`.
    fn forward(&self, maps: &Tensor) -> Result<Tensor> {
        let (batch, _, inputs) = maps.dims3()?;
        let pixels = maps.pad_with_zeros(1, 0, 1)?.index_select(&self.places, 1)?;
        let maps = self.layer.forward(&pixels.reshape(((), 9 * inputs))?)?.relu()?;
        Ok(maps.reshape((batch, (), maps.dim(1)?))?)
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
        for sides in [[8, 6], [7, 5], [40, 40]] {
            let [height, width] = sides;
            let maps = random(&[2, height, width, 3], 1);
            let (weight, bias) = (random(&[4, 27], 2), random(&[4], 3));
            let varmap = VarMap::new();
            let vb = VarBuilder::from_varmap(&varmap, DType::F64, &Device::Cpu);
            let mut convolution = Convolution::new(sides, [3, 4], vb).unwrap();
            convolution.layer = Linear::new(weight.clone(), Some(bias.clone()));
            let found = convolution.forward(&maps.flatten(1, 2).unwrap()).unwrap();
            // [out, 3, 3, in] -> [out, in, 3, 3]
            let kernel = weight.reshape((4, 3, 3, 3)).unwrap().permute((0, 3, 1, 2)).unwrap().contiguous().unwrap();
            let planes = maps.permute((0, 3, 1, 2)).unwrap().contiguous().unwrap();
            let expected = planes.conv2d(&kernel, 1, 2, 1, 1).unwrap().permute((0, 2, 3, 1)).unwrap();
            let expected = expected.flatten(1, 2).unwrap().broadcast_add(&bias).unwrap().relu().unwrap();
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
