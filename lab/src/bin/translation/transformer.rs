//! The Transformer: an encoder of the source, and a decoder of the target with attention over its outputs.

use crate::{batches::Sources, kinds::TransformerShape, setting::Setting};
use candle_core::{Module, Tensor};
use candle_nn::{Embedding, VarBuilder};
use lab::layers::transformer::{Decoder, DecoderState, Encoder, Positions, TransformerSizes};
use lab::layers::{dropout::dropout, HeadKind, HeadSizes};
use lab::{training::Recipe, Result};
use rand::rngs::StdRng;

pub(crate) struct Transformer {
    source_embedding: Embedding,
    encoder: Encoder,
    target_embedding: Embedding,
    decoder: Decoder,
    positions: Positions,
    dropout: f64,
}

impl Transformer {
    pub(crate) fn new(setting: &Setting, shape: TransformerShape, recipe: &Recipe, vb: VarBuilder) -> Result<Self> {
        recipe.require_no_cells()?;
        let (TransformerShape { heads, inner }, Recipe { hidden: width, layers, dropout, .. }) = (shape, *recipe);
        if recipe.embedding() != width {
            let embedding = recipe.embedding();
            return Err(
                format!("--embedding is {embedding}, but a Transformer's has the width of --hidden {width}").into()
            );
        }
        let sizes = TransformerSizes { layers, width, heads, inner, dropout };
        Ok(Self {
            source_embedding: candle_nn::embedding(setting.source.len(), width, vb.pp("source"))?,
            encoder: Encoder::new(sizes, vb.pp("encoder"))?,
            target_embedding: candle_nn::embedding(setting.target.len(), width, vb.pp("target"))?,
            decoder: Decoder::new(sizes, vb.pp("decoder"))?,
            positions: Positions { width },
            dropout,
        })
    }

    /// Returns the bound of a variable's initial values; scales of normalisations are ones. Embeddings times the root
    /// of their width, and all that follows up to the logits, start with numbers of about one.
    pub(crate) fn bound(shape: TransformerShape, kind: HeadKind, sizes: HeadSizes, name: &str) -> f64 {
        let keeps_scale = |inputs: usize| (3.0 / inputs as f64).sqrt();
        match name {
            "head.decoder.weight" => keeps_scale(sizes.decoder_width(kind)),
            "head.latent.weight" | "source.weight" | "target.weight" => keeps_scale(sizes.hidden),
            name if name.ends_with("bias") => 0.0,
            // Glorot and Bengio (2010): between the scales of the forward and of the backward pass.
            name if name.contains("feed_forward") => (6.0 / (sizes.hidden + shape.inner) as f64).sqrt(),
            _ => keeps_scale(sizes.hidden),
        }
    }

    fn embed(&self, embedding: &Embedding, ids: &Tensor, first: usize, rng: Option<&mut StdRng>) -> Result<Tensor> {
        let values = (embedding.forward(ids)? * (embedding.hidden_size() as f64).sqrt())?;
        dropout(self.positions.add(&values, first)?, self.dropout, rng)
    }

    /// Returns the decoder's state before the first token.
    pub(crate) fn encode(&self, sources: &Sources, mut rng: Option<&mut StdRng>) -> Result<DecoderState> {
        let mask = sources.mask.unsqueeze(1)?;
        let inputs = self.embed(&self.source_embedding, &sources.tokens, 0, rng.as_deref_mut())?;
        let outputs = self.encoder.forward(&inputs, Some(&mask), rng)?;
        self.decoder.start(&outputs, mask)
    }

    /// Computes the same as `RecurrentDecoder::decode`.
    pub(crate) fn decode(
        &self,
        ids: &Tensor,
        state: &mut DecoderState,
        mut rng: Option<&mut StdRng>,
    ) -> Result<Tensor> {
        let inputs = self.embed(&self.target_embedding, ids, state.positions()?, rng.as_deref_mut())?;
        self.decoder.forward(&inputs, state, rng)
    }
}
