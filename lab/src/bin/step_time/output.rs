//! The cheaper vocabularies, as heads whose variables candle initialises.

use crate::{args::Output, steps::Sizes};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use lab::layers::mixtape::{Mixtape, MixtapeConfig};
use mos_head::parts::{CharCnn, CharCnnConfig};
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, SoftmaxConfig, SoftmaxHead};

pub(crate) struct System {
    head: Box<dyn OutputLayer>,
    hidden: Var,
    /// The targets, which are drawn by Zipf's law, as the cost may depend on them: `P(id) = log((id + 2) / (id + 1)) /
    /// log(vocab + 1)`.
    targets: Tensor,
}

impl System {
    /// Makes a system of these sizes.
    pub(crate) fn new(output: Output, sizes: Sizes, dtype: DType, device: &Device) -> lab::Result<Self> {
        let Sizes { positions, components, context, vocab, hidden } = sizes;
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, device);
        let softmax = SoftmaxConfig::new(hidden, vocab);
        let mixture = MixtureConfig::new(hidden, vocab, components).with_context_dim(context);
        let head: Box<dyn OutputLayer> = match output {
            Output::CharCnn => {
                let words: Vec<String> = (0..vocab).map(word).collect();
                let width = if components > 1 { context } else { hidden };
                let cnn = CharCnn::new(&CharCnnConfig::new(width), &words, vb.pp("rows"))?;
                match components {
                    1 => Box::new(SoftmaxHead::with_char_cnn(&softmax, cnn, vb)?),
                    _ => Box::new(MixtureOfSoftmaxes::with_char_cnn(&mixture, cnn, vb)?),
                }
            }
            Output::Adaptive => {
                let cutoffs = vec![vocab / 50, vocab / 10, vocab / 2];
                Box::new(AdaptiveSoftmax::new(&AdaptiveConfig::new(hidden, vocab, cutoffs), vb)?)
            }
            Output::Mixtape if dtype != DType::F32 => {
                return Err(format!("--output mixtape is for --dtype f32, not {}", dtype.as_str()).into());
            }
            Output::Mixtape => {
                let counts: Vec<f64> = (0..vocab).map(|id| 1.0 / (id + 1) as f64).collect();
                Box::new(Mixtape::new(MixtapeConfig::with_context(vocab, hidden, context), &counts, vb)?)
            }
            Output::Hierarchical => Box::new(HierarchicalSoftmax::new(&HierarchicalConfig::new(hidden, vocab), vb)?),
        };
        let ids = (0..positions).map(|i| {
            let quantile = (i as f64 * 0.618_033_988_749_894_9).fract();
            ((quantile * (vocab as f64).ln_1p()).exp_m1() as u32).min(vocab as u32 - 1)
        });
        Ok(System {
            head,
            hidden: Var::from_tensor(&Tensor::randn(0f32, 1., (positions, hidden), device)?.to_dtype(dtype)?)?,
            targets: Tensor::from_iter(ids, device)?,
        })
    }

    pub(crate) fn step(&self, options: &LossOptions) -> Result<Option<Tensor>> {
        let loss = self.head.loss(&self.hidden, &self.targets, options)?;
        if loss.value.track_op() {
            loss.backward()?;
        }
        Ok(Some(loss.value.detach()))
    }
}

/// Returns the spelling of an id in three to ten letters. Rarer ids have longer spellings.
fn word(id: usize) -> String {
    let length = 3 + id % 5 + id.max(1).ilog2() as usize / 6;
    let mut rest = id.wrapping_mul(0x9E37_79B9);
    let letters = (0..length).map(|_| {
        rest = rest.wrapping_mul(31).wrapping_add(17);
        char::from(b'a' + (rest >> 8) as u8 % 26)
    });
    letters.collect()
}
