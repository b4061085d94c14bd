//! Qwen2 of candle-transformers: its model without the output layer, and this crate's softmax.

use crate::backbone::Backbone;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, VarBuilder, VarMap};
use candle_transformers::models::qwen2::{Config, Model};
use lab::Result;
use mos_head::{OutputLayer, SoftmaxHead};
use std::path::Path;

pub(crate) struct Qwen2 {
    /// The model without a text. Its clones share the weights.
    model: Model,
    head: SoftmaxHead,
}

impl Qwen2 {
    /// Returns the model of a folder with `config.json` and `model.safetensors`, or random weights of Qwen2 0.5B's
    /// sizes. The output layer is that of the model, or of a GGUF file with the same sizes.
    pub(crate) fn new(folder: Option<&Path>, layers: usize, gguf: Option<&Path>) -> Result<Self> {
        let variables = VarMap::new();
        let (config, vb) = match folder {
            Some(folder) => {
                let config = serde_json::from_str(&std::fs::read_to_string(folder.join("config.json"))?)?;
                let weights = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
                (config, VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu))
            }
            None => (half_a_billion_parameters(layers), VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu)),
        };
        let Config { vocab_size, hidden_size, .. } = config;
        let name = if config.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let model = Model::new(&config, vb.clone())?;
        let head = match gguf {
            Some(file) => lab::layers::gguf::softmax_head(file, [vocab_size, hidden_size])?,
            None => SoftmaxHead::from_tensors(vb.get((vocab_size, hidden_size), name)?, None)?,
        };
        Ok(Qwen2 { model, head })
    }
}

fn half_a_billion_parameters(layers: usize) -> Config {
    Config {
        vocab_size: 151_936,
        hidden_size: 896,
        intermediate_size: 4864,
        num_hidden_layers: layers,
        num_attention_heads: 14,
        num_key_value_heads: 2,
        max_position_embeddings: 4096,
        sliding_window: 4096,
        max_window_layers: layers,
        tie_word_embeddings: true,
        rope_theta: 1e6,
        rms_norm_eps: 1e-6,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    }
}

impl Backbone for Qwen2 {
    /// The model with the keys and values of a text, and the number of ids that it has read.
    type State = (Model, usize);

    fn head(&self) -> &dyn OutputLayer {
        &self.head
    }

    fn start(&self) -> Result<Self::State> {
        Ok((self.model.clone(), 0))
    }

    fn read(&self, texts: &mut [(&mut Self::State, &[u32])]) -> Result<Tensor> {
        let hidden = texts.iter_mut().map(|((model, read), ids)| {
            let hidden = model.forward(&Tensor::new(*ids, &Device::Cpu)?.unsqueeze(0)?, *read, None)?;
            *read += ids.len();
            Ok(hidden.narrow(1, ids.len() - 1, 1)?.squeeze(1)?)
        });
        Ok(Tensor::cat(&hidden.collect::<Result<Vec<_>>>()?, 0)?)
    }
}
