//! The recurrent encoder-decoder: a bidirectional LSTM over the source, and a decoder with attention.

use crate::{batches::Sources, setting::Setting};
use candle_core::{Module, Tensor, D};
use candle_nn::{Embedding, VarBuilder};
use lab::layers::recurrent::{Lstm, LstmDropout};
use lab::layers::recurrent_decoder::{RecurrentDecoder, State};
use lab::layers::{HeadKind, HeadSizes};
use lab::{training::Recipe, Result};
use rand::rngs::StdRng;

pub(crate) struct Recurrent {
    source_embedding: Embedding,
    forwards: Lstm,
    backwards: Lstm,
    pub(crate) decoder: RecurrentDecoder,
}

impl Recurrent {
    pub(crate) fn new(setting: &Setting, recipe: &Recipe, vb: VarBuilder) -> Result<Self> {
        recipe.require_no_cells()?;
        let Recipe { hidden, layers, dropout, .. } = *recipe;
        if hidden % 2 != 0 {
            return Err(format!("--hidden is {hidden}, expected an even number: half for each direction").into());
        }
        let embedding = recipe.embedding();
        let units = vec![hidden / 2; layers];
        let encoder = |name| Lstm::new(embedding, &units, LstmDropout::locked(dropout), vb.pp(name));
        Ok(Self {
            source_embedding: candle_nn::embedding(setting.source.len(), embedding, vb.pp("source"))?,
            forwards: encoder("forwards")?,
            backwards: encoder("backwards")?,
            decoder: RecurrentDecoder::new(recipe.decoder(setting.target.len()), "target", vb.clone())?,
        })
    }

    /// Returns the bound of a variable's initial values. They keep their scale from the embeddings to the logits. With
    /// smaller initial values all positions of the source look alike, and attention takes epochs to form, more of them
    /// the smaller the contexts are.
    pub(crate) fn bound(kind: HeadKind, sizes: HeadSizes, name: &str) -> f64 {
        let linear = 1.0 / (sizes.hidden as f64).sqrt();
        match name {
            "source.weight" | "target.weight" => 1.0,
            "attention.score.weight" | "attention.combine.weight" | "head.latent.weight" => 3.0 * linear,
            "head.decoder.weight" => (3.0 / sizes.decoder_width(kind) as f64).sqrt(),
            "head.decoder.bias" => 0.0,
            _ => linear,
        }
    }

    /// Returns the decoder's initial state, from the mean of the encoder's outputs without the padding.
    pub(crate) fn encode(&self, sources: &Sources, mut rng: Option<&mut StdRng>) -> Result<State> {
        let mut read = |lstm: &Lstm, ids: &Tensor| {
            let inputs = self.source_embedding.forward(ids)?;
            lstm.forward(&inputs, &mut lstm.start(ids.dim(0)?)?, rng.as_deref_mut())
        };
        let forwards = read(&self.forwards, &sources.tokens)?;
        let backwards = read(&self.backwards, &sources.reversed)?;
        let backwards = backwards.flatten_to(1)?.index_select(&sources.back, 0)?.reshape(forwards.shape())?;
        let outputs = Tensor::cat(&[forwards, backwards], D::Minus1)?;

        let mean = sources.average.matmul(&outputs)?.squeeze(1)?;
        self.decoder.start(outputs, &mean, sources.mask.clone())
    }
}
