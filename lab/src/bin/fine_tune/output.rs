//! The ways to train the output layer that the program compares.

use crate::model::{Config, Llama};
use candle_core::{backprop::GradStore, DType, Device, Tensor, Var};
use candle_nn::loss::cross_entropy;
use candle_nn::{Linear, Module, VarBuilder, VarMap};
use clap::ValueEnum;
use lab::layers::{init, Checkpoint};
use lab::Result;
use mos_head::parts::{LowRankAdapter, LowRankConfig};
use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
use std::collections::HashMap;
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// `Linear` and `cross_entropy`: the logits of all positions are in memory
    Logits,
    /// `SoftmaxHead`
    Head,
    /// `SoftmaxHead`, and the embedding that is also its decoder is not trained
    Frozen,
    /// As `frozen`, with a low-rank adapter of the decoder
    Adapter,
}

enum Layer {
    Logits(Linear),
    Head(SoftmaxHead),
}

/// A model and its output layer.
pub(crate) struct FineTuned {
    pub(crate) model: Llama,
    output: Layer,
    /// The variables that are trained.
    pub(crate) trained: VarMap,
    /// The variables that are not.
    frozen: VarMap,
}

impl FineTuned {
    /// Makes a model with random initial values of this seed. Those of an adapter are without effect. With a GGUF file,
    /// a decoder that is not trained is its quantised output layer.
    pub(crate) fn new(config: Config, output: Output, rank: usize, seed: u64, gguf: Option<&Path>) -> Result<Self> {
        let Config { vocab, hidden, .. } = config;
        let (trained, frozen) = (VarMap::new(), VarMap::new());
        let builder = |vars: &VarMap| VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu);
        let is_frozen = matches!(output, Output::Frozen | Output::Adapter);
        if gguf.is_some() && !is_frozen {
            return Err("--gguf needs --output frozen or adapter: quantised rows are not trained".into());
        }
        let embedding_builder = builder(if is_frozen { &frozen } else { &trained });
        let embedding = embedding_builder.get((vocab, hidden), "model.embed_tokens.weight")?;
        // No gradient goes to a tensor that is no variable: the embedding's use in the model is not trained either.
        let model_embedding = if is_frozen { embedding.detach() } else { embedding.clone() };
        let model = Llama::new(config, model_embedding, builder(&trained).pp("model"))?;
        let head = || match gguf {
            Some(path) => lab::layers::gguf::softmax_head(path, [vocab, hidden]),
            None => Ok(SoftmaxHead::from_tensors(embedding.clone(), None)?),
        };
        let output = match output {
            Output::Logits => Layer::Logits(Linear::new(embedding.clone(), None)),
            Output::Head => Layer::Head(head()?),
            Output::Frozen => Layer::Head(head()?.with_frozen_decoder()?),
            Output::Adapter => {
                let sizes = LowRankConfig::new(vocab, hidden, rank);
                let adapter = LowRankAdapter::new(&sizes, builder(&trained).pp("lm_head"))?;
                Layer::Head(head()?.with_frozen_decoder()?.with_adapter(adapter)?)
            }
        };
        let tuned = Self { model, output, trained, frozen };
        tuned.initialise(config, seed)?;
        Ok(tuned)
    }

    /// Draws the initial values. A variable starts with the same values whatever the output layer is.
    fn initialise(&self, config: Config, seed: u64) -> Result<()> {
        // Numbers of standard deviation 0.02, as Llama's.
        let scale = 0.02 * 3f64.sqrt();
        for (name, var) in self.variables() {
            let ones = name.ends_with("norm.weight");
            if ones || name.ends_with("lora_B.weight") {
                var.set(&if ones { var.ones_like()? } else { var.zeros_like()? })?;
                continue;
            }
            let scale = if name.ends_with("lora_A.weight") { 1.0 / (config.hidden as f64).sqrt() } else { scale };
            init::uniform_by_name(&var, seed, &name, scale)?;
        }
        Ok(())
    }

    /// Returns all variables, by name.
    pub(crate) fn variables(&self) -> Vec<(String, Var)> {
        [&self.trained, &self.frozen].into_iter().flat_map(init::sorted).collect()
    }

    /// Returns the names of the variables that are trained but get no gradient.
    pub(crate) fn without_gradient(&self, gradients: &GradStore) -> Vec<String> {
        let trained = init::sorted(&self.trained).into_iter();
        trained.filter(|(_, var)| gradients.get(var).is_none()).map(|(name, _)| name).collect()
    }

    /// Sets the variables from a checkpoint, which need not have an adapter, but has no tensor that is not used.
    pub(crate) fn load(&self, path: &Path) -> Result<()> {
        let checkpoint = Checkpoint::load(path, &Device::Cpu)?;
        let variables = self.variables();
        let is_known = |name: &String| variables.iter().any(|(known, _)| known == name);
        if let Some(name) = checkpoint.tensors.keys().filter(|name| !is_known(name)).min() {
            let why = match name.as_str() {
                "lm_head.weight" => "the decoder of this model is its embedding",
                name if name.starts_with("lm_head.lora_") => "use --output adapter",
                _ => "this model has no such tensor",
            };
            return Err(format!("{} has {name}: {why}", path.display()).into());
        }
        for (name, var) in variables {
            match checkpoint.tensors.get(&name) {
                Some(saved) if saved.dims() == var.dims() => var.set(&saved.to_dtype(DType::F32)?)?,
                Some(saved) => {
                    let (path, found, expected) = (path.display(), saved.dims(), var.dims());
                    return Err(format!("{path}: {name} is {found:?}, expected {expected:?}").into());
                }
                None if name.starts_with("lm_head.lora_") => {}
                None => return Err(format!("{} has no tensor {name}", path.display()).into()),
            }
        }
        Ok(())
    }

    /// Writes the variables.
    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        let tensors: HashMap<_, _> =
            self.variables().into_iter().map(|(name, var)| (name, var.as_tensor().clone())).collect();
        Checkpoint { tensors, metadata: HashMap::new() }.save(path)
    }

    /// Returns the mean loss of the targets in nats, and the gradients; both `[batch, positions]`.
    pub(crate) fn step(&self, tokens: &Tensor, targets: &Tensor) -> Result<(f64, GradStore)> {
        let hidden = self.model.forward(tokens)?;
        match &self.output {
            Layer::Logits(linear) => {
                let logits = linear.forward(&hidden.flatten_to(1)?)?;
                let loss = cross_entropy(&logits, &targets.flatten_all()?)?;
                let gradients = loss.backward()?;
                Ok((f64::from(loss.to_scalar::<f32>()?), gradients))
            }
            Layer::Head(head) => {
                let loss = head.loss(&hidden, targets, &LossOptions::default())?;
                let gradients = loss.backward()?;
                Ok((f64::from(loss.value.to_scalar::<f32>()?), gradients))
            }
        }
    }
}
