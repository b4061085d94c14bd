//! The caption model: features of the image, an LSTM with attention over them, and an output layer.

use crate::{data::Pair, encoder::Encoder};
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use lab::data::words::{Words, PAD};
use lab::layers::recurrent_decoder::{RecurrentDecoder, State};
use lab::layers::{init, HeadKind, HeadSizes};
use lab::training::{Base, Forward, Model, Pass, Recipe};
use lab::{data::sequences::inputs_and_targets, Result};
use rand::seq::SliceRandom;
use rand::{rngs::StdRng, SeedableRng};
use std::collections::HashMap;

/// A setting says what the captions of all parts are about, and in which words.
#[derive(Clone)]
pub(crate) struct Setting {
    pub(crate) images: Tensor,
    pub(crate) words: Words,
    /// Whether the model sees no image.
    pub(crate) blind: bool,
}

pub(crate) struct Captioner {
    pub(crate) setting: Setting,
    kind: HeadKind,
    sizes: HeadSizes,
    encoder: Encoder,
    embedding: usize,
    layers: usize,
    pub(crate) decoder: RecurrentDecoder,
    base: Base,
}

impl Captioner {
    pub(crate) fn new(kind: HeadKind, setting: Setting, recipe: &Recipe, device: &Device) -> Result<Self> {
        recipe.require_no_cells()?;
        let sizes = recipe.head(setting.words.len());
        let HeadSizes { vocab, hidden, .. } = sizes;
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let model = Self {
            kind,
            sizes,
            encoder: Encoder::new(&setting.images.dims()[1..], hidden, vb.pp("encoder"))?,
            embedding: recipe.embedding(),
            layers: recipe.layers,
            decoder: RecurrentDecoder::new(recipe.decoder(vocab), "embedding", vb.clone())?,
            base: Base { head: sizes.build(kind, 0.0, None, vb.pp("head"))?, varmap, device: device.clone() },
            setting,
        };
        // Values keep their scale from layer to layer, also through the rectifiers, which halve the variance.
        let even_bound = |inputs: usize| (3.0 / inputs as f64).sqrt();
        let shapes: HashMap<String, Vec<usize>> =
            init::sorted(model.varmap()).into_iter().map(|(name, var)| (name, var.dims().to_vec())).collect();
        init::uniform(model.varmap(), recipe.seed, |name| match name {
            "embedding.weight" | "encoder.positions" => 1.0,
            "head.decoder.weight" => even_bound(sizes.decoder_width(kind)),
            "head.decoder.bias" => 0.0,
            name if name.starts_with("encoder.") => match shapes[name][..] {
                [_, inputs] => (6.0 / inputs as f64).sqrt(),
                [_, channels, height, width] => (6.0 / (channels * height * width) as f64).sqrt(),
                _ => 0.0,
            },
            name if name.starts_with("attention.") || name == "head.latent.weight" => even_bound(hidden),
            _ => 1.0 / (hidden as f64).sqrt(),
        })?;
        sizes.start_alike(model.varmap(), recipe.spread)?;
        Ok(model)
    }

    /// Returns the recipe of a head's model with as many parameters as the softmax's: a mixture has fewer LSTM units,
    /// and contexts of half the softmax's units. (With all units, nine contexts would have a dozen dimensions.)
    pub(crate) fn equal(kind: HeadKind, setting: &Setting, recipe: &Recipe, device: &Device) -> Result<Recipe> {
        if kind == HeadKind::Softmax {
            return Ok(*recipe);
        }
        let context = recipe.context.unwrap_or(recipe.hidden.div_ceil(2));
        let with = |hidden| Recipe { hidden, embedding: Some(recipe.embedding()), context: Some(context), ..*recipe };
        let parameters = |kind, recipe: &Recipe| -> Result<usize> {
            Ok(Self::new(kind, setting.clone(), recipe, device)?.parameters())
        };
        let wanted = parameters(HeadKind::Softmax, recipe)?;
        let (mut low, mut high) = (1, recipe.hidden);
        while low < high {
            let middle = (low + high) / 2;
            if parameters(kind, &with(middle))? < wanted {
                low = middle + 1
            } else {
                high = middle
            }
        }
        let (above, below) = (with(low), with((low - 1).max(1)));
        let distance = |recipe| Ok::<_, Box<dyn std::error::Error>>(parameters(kind, recipe)?.abs_diff(wanted));
        Ok(if distance(&below)? < distance(&above)? { below } else { above })
    }

    /// Returns the number of units of an LSTM layer.
    pub(crate) fn units(&self) -> usize {
        self.sizes.hidden
    }

    /// Returns the decoder's initial state for these images: from the mean of their features.
    pub(crate) fn encode(&self, images: &[usize]) -> Result<State> {
        let rows: Vec<u32> = images.iter().map(|&image| image as u32).collect();
        let images = self.setting.images.index_select(&Tensor::new(rows, self.device())?, 0)?;
        let features = self.encoder.forward(&images, self.setting.blind)?;
        let (batch, positions, _) = features.dims3()?;
        let mask = Tensor::zeros((batch, 1, positions), features.dtype(), self.device())?;
        let mean = features.mean(1)?;
        self.decoder.start(features, &mean, mask)
    }
}

/// The number of images of a batch in an evaluation.
const EVALUATION_BATCH: usize = 32;

impl Model for Captioner {
    type Item = Pair;
    type Batch = Vec<usize>;
    type State = ();
    const IGNORED: i64 = PAD as i64;

    fn base(&self) -> &Base {
        &self.base
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let mut settings = self.sizes.settings(self.kind);
        settings.push(("embedding", self.embedding.to_string()));
        settings.push(("layers", self.layers.to_string()));
        settings.push(("blind", self.setting.blind.to_string()));
        settings
    }

    fn notes(&self) -> Result<Vec<(&'static str, String)>> {
        Ok(vec![("vocabulary", serde_json::to_string(self.setting.words.all())?)])
    }

    fn batches(&self, pairs: &[Pair], recipe: &Recipe, pass: Pass) -> Vec<Vec<usize>> {
        // The captions of an image are in one batch, which computes the image's features once.
        let all: Vec<usize> = (0..pairs.len()).collect();
        let mut images: Vec<&[usize]> = all.chunk_by(|&a, &b| pairs[a].image == pairs[b].image).collect();
        let batch = match pass {
            Pass::Training { epoch } => {
                images.shuffle(&mut StdRng::seed_from_u64(recipe.seed ^ (epoch as u64) << 32));
                recipe.batch
            }
            Pass::Evaluation { .. } => EVALUATION_BATCH,
        };
        images.chunks(batch).map(<[&[usize]]>::concat).collect()
    }

    fn start(&self, _: &Recipe, _: Pass) -> Result<()> {
        Ok(())
    }

    fn forward(&self, pairs: &[Pair], chosen: &Vec<usize>, _: &mut (), rng: Option<&mut StdRng>) -> Result<Forward> {
        let captions: Vec<&[u32]> = chosen.iter().map(|&i| pairs[i].caption.as_slice()).collect();
        let caption_images: Vec<usize> = chosen.iter().map(|&i| pairs[i].image).collect();
        let mut images = caption_images.clone();
        images.dedup();
        let row = |image: &usize| images.iter().position(|other| other == image).map_or(0, |row| row as u32);
        let rows = Tensor::new(caption_images.iter().map(row).collect::<Vec<_>>(), self.device())?;
        let (inputs, targets) = inputs_and_targets(&captions, self.device())?;
        let hidden = self.decoder.decode(&inputs, &mut self.encode(&images)?.select(&rows)?, rng)?;
        Ok(Forward { hidden, targets, penalty: None })
    }
}
