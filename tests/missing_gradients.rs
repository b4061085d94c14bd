//! Variables that a backward pass did not reach are named, and no others.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Module, Tensor, Var, D};
use candle_nn::{
    ops, rotary_emb, AdamW, Embedding, LayerNorm, Linear, Optimizer, ParamsAdamW, RmsNorm, VarBuilder, VarMap,
};
use mos_head::sampled::NoiseDistribution;
use mos_head::two_level::{HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{
    Error, LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Result, SoftmaxConfig, SoftmaxHead,
};

const VOCAB: usize = 12;
const HIDDEN: usize = 8;

/// Which of candle's operations the model before a head has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ops {
    /// All with a backward pass.
    Differentiable,
    FusedRmsNorm,
    FusedLayerNorm,
    FusedRope,
    FusedSoftmax,
}

/// A layer of attention.
struct Model {
    embedding: Embedding,
    layer_norm: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    norm: RmsNorm,
    ops: Ops,
}

impl Model {
    fn new(ops: Ops, vb: VarBuilder) -> Result<Self> {
        let linear = |name: &str| candle_nn::linear_no_bias(HIDDEN, HIDDEN, vb.pp(name));
        Ok(Model {
            embedding: candle_nn::embedding(VOCAB, HIDDEN, vb.pp("embedding"))?,
            layer_norm: candle_nn::layer_norm(HIDDEN, 1e-5, vb.pp("layer_norm"))?,
            query: linear("query")?,
            key: linear("key")?,
            value: linear("value")?,
            norm: candle_nn::rms_norm(HIDDEN, 1e-5, vb.pp("norm"))?,
            ops,
        })
    }

    /// Hidden states `[batch, seq, hidden]` of tokens `[batch, seq]`.
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let x = self.embedding.forward(tokens)?;
        let normed = match (self.ops, self.layer_norm.bias()) {
            (Ops::FusedLayerNorm, _) | (_, None) => self.layer_norm.forward(&x)?,
            (_, Some(bias)) => ops::layer_norm_slow(&x, self.layer_norm.weight(), bias, 1e-5)?,
        };
        let seq = tokens.dim(1)?;
        let angles = Tensor::arange(0f32, (seq * HIDDEN / 2) as f32, &Device::Cpu)?.reshape((seq, HIDDEN / 2))?;
        let rope = |x: Tensor| -> Result<Tensor> {
            let (x, cos, sin) = (x.unsqueeze(1)?, angles.cos()?, angles.sin()?);
            let rope = if self.ops == Ops::FusedRope { rotary_emb::rope } else { rotary_emb::rope_slow };
            Ok(rope(&x, &cos, &sin)?.squeeze(1)?)
        };
        let (query, key) = (rope(self.query.forward(&normed)?)?, rope(self.key.forward(&normed)?)?);
        let scores = query.matmul(&key.t()?)?;
        let weights = match self.ops {
            Ops::FusedSoftmax => ops::softmax_last_dim(&scores)?,
            _ => ops::softmax(&scores, D::Minus1)?,
        };
        let x = (x + weights.matmul(&self.value.forward(&normed)?)?)?;
        Ok(if self.ops == Ops::FusedRmsNorm { self.norm.forward(&x)? } else { self.norm.forward_diff(&x)? })
    }
}

fn tokens() -> Result<(Tensor, Tensor)> {
    let text: Vec<u32> = (0..13).map(|i| i * i % VOCAB as u32).collect();
    let part = |first: usize| Tensor::from_vec(text[first..first + 12].to_vec(), (2, 6), &Device::Cpu);
    Ok((part(0)?, part(1)?))
}

fn builder(vars: &VarMap) -> VarBuilder<'static> {
    VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu)
}

/// The variables by name, in order.
fn named(vars: &VarMap) -> BTreeMap<String, Var> {
    vars.data().lock().expect("variables").clone().into_iter().collect()
}

/// Trains a model and a head for some steps; returns the first and the last loss, or the error after the first backward
/// pass.
fn train(operations: Ops) -> Result<[f32; 2]> {
    let vars = VarMap::new();
    let model = Model::new(operations, builder(&vars))?;
    let config = MixtureConfig::new(HIDDEN, VOCAB, 2).with_context_dim(6);
    let head = MixtureOfSoftmaxes::new(&config, builder(&vars).pp("head"))?;
    let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 0.02, ..ParamsAdamW::default() })?;
    let (tokens, targets) = tokens()?;
    let mut losses = Vec::new();
    for step in 0..30 {
        let loss = head.loss(&model.forward(&tokens)?, &targets, &LossOptions::new())?;
        let gradients = loss.backward()?;
        if step == 0 {
            loss.check_gradients(&gradients, &vars)?;
        }
        optimizer.step(&gradients)?;
        losses.push(loss.value.to_scalar::<f32>()?);
    }
    Ok([losses[0], losses[29]])
}

#[test]
fn variables_behind_an_operation_without_a_backward_pass_are_named() {
    let cases: [(Ops, &[&str]); 4] = [
        (
            Ops::FusedRmsNorm,
            &[
                "embedding.weight",
                "key.weight",
                "layer_norm.bias",
                "layer_norm.weight",
                "norm.weight",
                "query.weight",
                "value.weight",
            ],
        ),
        (Ops::FusedLayerNorm, &["layer_norm.bias", "layer_norm.weight"]),
        (Ops::FusedRope, &["key.weight", "query.weight"]),
        (Ops::FusedSoftmax, &["key.weight", "query.weight"]),
    ];
    for (operations, expected) in cases {
        let error = train(operations).expect_err("variables without a gradient");
        let Error::MissingGradients { names, variables, .. } = &error else { panic!("{operations:?}: {error}") };
        assert_eq!(
            (&names[..], *variables),
            (&expected.iter().map(|name| name.to_string()).collect::<Vec<_>>()[..], 12)
        );
        let message = error.to_string();
        let start = format!("{} of 12 variables have no gradient: {}", expected.len(), expected.join(", "));
        assert!(message.starts_with(&start), "{message}");
        for part in ["RmsNorm", "forward_diff", "rope_slow", "layer_norm_slow", "softmax_last_dim", "ops::softmax"] {
            assert!(message.contains(part), "{message}");
        }
    }
}

#[test]
fn a_model_of_differentiable_operations_trains_all_variables() -> Result<()> {
    let [first, last] = train(Ops::Differentiable)?;
    assert!(last < 0.7 * first, "{last} after {first}");
    Ok(())
}

#[test]
fn rows_of_the_decoder_stand_for_the_decoder() -> Result<()> {
    let (tokens, targets) = tokens()?;
    let negatives = NoiseDistribution::log_uniform(VOCAB)?.draw(4, 1)?;
    let sampled = [LossOptions::new().with_sampled_softmax(negatives.clone()), LossOptions::new().with_nce(negatives)];
    let init = candle_nn::Init::Uniform { lo: -0.1, up: 0.1 };
    for (operations, missing) in [(Ops::Differentiable, &[][..]), (Ops::FusedRope, &["key.weight", "query.weight"])] {
        for is_product in [false, true] {
            let vars = VarMap::new();
            let (model, vb) = (Model::new(operations, builder(&vars))?, builder(&vars));
            let weight = if is_product {
                // A weight that is computed from a variable.
                let factor = vb.get_with_hints((3, VOCAB), "decoder", init)?;
                factor.t()?.matmul(&Tensor::ones((3, HIDDEN), DType::F32, &Device::Cpu)?)?
            } else {
                vb.get_with_hints((VOCAB, HIDDEN), "decoder", init)?
            };
            let bias = vb.get_with_hints(VOCAB, "bias", init)?;
            let head = SoftmaxHead::from_tensors(weight, Some(bias))?;
            for (options, decoder_rows) in sampled.iter().flat_map(|options| [(options, false), (options, true)]) {
                let hidden = model.forward(&tokens)?;
                let loss = head.loss(&hidden, &targets, &options.clone().with_decoder_rows(decoder_rows))?;
                for gradients in [loss.backward()?, loss.backward_with(&hidden.sqr()?.mean_all()?)?] {
                    assert_eq!(gradients.get(&named(&vars)["decoder"]).is_none(), decoder_rows);
                    assert_eq!(gradients.get(&named(&vars)["bias"]).is_none(), decoder_rows);
                    let found = loss.missing_gradients(&gradients, &named(&vars));
                    assert_eq!(found, missing, "{operations:?} {options:?}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn classes_without_a_target_are_not_missing() -> Result<()> {
    let (tokens, _) = tokens()?;
    let targets = Tensor::zeros((2, 6), DType::U32, &Device::Cpu)?;
    for (operations, missing) in [(Ops::Differentiable, 0), (Ops::FusedRmsNorm, 7)] {
        let vars = VarMap::new();
        let model = Model::new(operations, builder(&vars))?;
        let head = HierarchicalSoftmax::new(&HierarchicalConfig::new(HIDDEN, VOCAB), builder(&vars).pp("head"))?;
        let loss = head.loss(&model.forward(&tokens)?, &targets, &LossOptions::new())?;
        let gradients = loss.backward()?;
        assert!(gradients.get(&named(&vars)["head.word.1.weight"]).is_none(), "a class without a target");
        assert!(gradients.get(&named(&vars)["head.word.0.weight"]).is_some(), "the class of the target");
        assert_eq!(loss.missing_gradients(&gradients, &named(&vars)).len(), missing);
        assert_eq!(loss.check_gradients(&gradients, &vars).is_ok(), missing == 0);
    }
    Ok(())
}

#[test]
fn many_names_are_counted() -> Result<()> {
    let vars = VarMap::new();
    for i in 0..20 {
        builder(&vars).get_with_hints(1, &format!("unused.{i:02}"), candle_nn::Init::Const(0.0))?;
    }
    let head = SoftmaxHead::new(&SoftmaxConfig::new(HIDDEN, VOCAB), builder(&vars))?;
    let hidden = Tensor::zeros((2, HIDDEN), DType::F32, &Device::Cpu)?;
    let loss = head.loss(&hidden, &Tensor::zeros(2, DType::U32, &Device::Cpu)?, &LossOptions::new())?;
    let error = loss.check_gradients(&loss.backward()?, &vars).expect_err("nothing uses them").to_string();
    let names: Vec<String> = (0..8).map(|i| format!("unused.{i:02}")).collect();
    let start = format!("20 of 22 variables have no gradient: {} and 12 more", names.join(", "));
    assert!(error.starts_with(&start), "{error}");
    Ok(())
}
