//! This example shows two heads of your own: a projection, which becomes a mixture of softmaxes with every loss and way
//! of decoding of the crate, and an output layer of another kind, which is made of candle's operations.
//!
//!     cargo run --release --example custom_head
//!
//! In the language, after token t comes 5 t, 5 t + 1 or 5 t + 2 (modulo 200), each with probability 1/3. Its entropy is
//! ln 3 = 1.099 nats per position; both heads get within 0.05 of it in some seconds on 2 cores.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, mos-head 0.6, rand 0.9, without features.

use candle_core::{DType, Device, Tensor, D};
use candle_nn::{embedding, linear, ops, AdamW, Init, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use mos_head::{
    decode::{Sampler, Sampling},
    parts::{Decoder, DecoderConfig, Projection},
    DropoutMasks, Head, Loss, LossOptions, OutputLayer, Result,
};
use rand::{rngs::StdRng, Rng, SeedableRng};

const VOCAB: usize = 200;
const HIDDEN: usize = 32;

/// The contexts are gated, c_k = sigmoid(G_k h) * V_k h (Dauphin et al., 2017), and the priors are softmax(P h).
#[derive(Debug)]
struct Gated {
    gates: Linear,
    values: Linear,
    priors: Linear,
}

impl Gated {
    const COMPONENTS: usize = 3;
    const CONTEXT: usize = 16;

    fn new(vb: VarBuilder) -> Result<Self> {
        let contexts = Self::COMPONENTS * Self::CONTEXT;
        let (gates, values) = (linear(HIDDEN, contexts, vb.pp("gates"))?, linear(HIDDEN, contexts, vb.pp("values"))?);
        Ok(Gated { gates, values, priors: linear(HIDDEN, Self::COMPONENTS, vb.pp("priors"))? })
    }
}

impl Projection for Gated {
    fn hidden_size(&self) -> usize {
        HIDDEN
    }

    fn context_dim(&self) -> usize {
        Self::CONTEXT
    }

    fn components(&self) -> usize {
        Self::COMPONENTS
    }

    /// Computes the contexts `[.., K, d]` and the log-priors `[.., K]` of hidden states `[.., hidden]`.
    fn forward(&self, hidden: &Tensor, _: DropoutMasks) -> Result<(Tensor, Option<Tensor>)> {
        let contexts = (ops::sigmoid(&self.gates.forward(hidden)?)? * self.values.forward(hidden)?)?;
        let shape = [&hidden.dims()[..hidden.rank() - 1], &[Self::COMPONENTS, Self::CONTEXT]].concat();
        let priors = ops::log_softmax(&self.priors.forward(hidden)?, D::Minus1)?;
        Ok((contexts.reshape(shape)?, Some(priors)))
    }
}

/// A softmax of cosines has the logits z_v = s cos(h, w_v) with a learned scale s (Wang et al.: NormFace, 2017): the
/// frequency of a token does not show in the length of its row.
#[derive(Debug)]
struct CosineSoftmax {
    /// `[vocab, hidden]`
    weight: Tensor,
    /// `[1]`
    scale: Tensor,
}

/// Divides the last dimension by its Euclidean norm.
fn normalised(x: &Tensor) -> Result<Tensor> {
    let squares = x.sqr()?.sum_keepdim(D::Minus1)?;
    Ok(x.broadcast_div(&(squares + 1e-12)?.sqrt()?)?)
}

impl OutputLayer for CosineSoftmax {
    fn hidden_size(&self) -> usize {
        self.weight.dims()[1]
    }

    fn vocab_size(&self) -> usize {
        self.weight.dims()[0]
    }

    fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
        let cosines = normalised(hidden)?.broadcast_matmul(&normalised(&self.weight)?.t()?)?;
        Ok(ops::log_softmax(&cosines.broadcast_mul(&self.scale)?, D::Minus1)?)
    }

    /// `Loss::from_nll` applies the weights, the ignored targets and the reduction of the options.
    fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let (hidden, ids) = options.mask_ignored(hidden, targets)?;
        let log_probs = self.log_probs(&hidden)?.gather(&ids.unsqueeze(D::Minus1)?, D::Minus1)?;
        Loss::from_nll(&log_probs.squeeze(D::Minus1)?.neg()?, targets, options)
    }
}

/// Trains an embedding with a head. Prints the loss, the most probable tokens after token 7, and a sample.
fn train(name: &str, build: impl Fn(VarBuilder) -> Result<Box<dyn OutputLayer>>) -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let (embedding, head) = (embedding(VOCAB, HIDDEN, vb.pp("embedding"))?, build(vb.pp("head"))?);
    let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 0.01, ..Default::default() })?;
    let mut rng = StdRng::seed_from_u64(1);
    for step in 0..=600 {
        let last: Vec<u32> = (0..512).map(|_| rng.random_range(0..VOCAB as u32)).collect();
        let next: Vec<u32> = last.iter().map(|t| (5 * t + rng.random_range(0..3)) % VOCAB as u32).collect();
        let hidden = embedding.forward(&Tensor::new(last, &Device::Cpu)?)?;
        let loss = head.loss(&hidden, &Tensor::new(next, &Device::Cpu)?, &LossOptions::default())?;
        let gradients = loss.backward()?;
        if step == 0 {
            loss.check_gradients(&gradients, &vars)?; // an error if an operation has no backward pass
        }
        optimizer.step(&gradients)?;
        if step % 200 == 0 {
            println!("{name} step {step:3}: {:.3} nats", loss.value.to_scalar::<f32>()?);
        }
    }
    let hidden = embedding.forward(&Tensor::new(&[7u32], &Device::Cpu)?)?;
    let (ids, log_probs) = head.top_k(&hidden, 3).map(|top| (top.token_ids, top.log_probs))?;
    println!("{name} after 7: {:?} with {:.2?}", ids.to_vec2::<u32>()?, log_probs.exp()?.to_vec2::<f32>()?);
    let mut sampler = Sampler::new(Sampling::new().with_top_p(0.95), 42)?;
    println!("{name} a sample: {:?}\n", head.sample(&hidden, &mut sampler)?.to_vec1::<u32>()?);
    Ok(())
}

fn main() -> Result<()> {
    // On few cores, candle's threads that spin between operations slow others down.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    train("gated mixture", |vb| {
        let decoder = Decoder::new(&DecoderConfig::new(VOCAB, Gated::CONTEXT), vb.clone())?;
        Ok(Box::new(Head::from_parts(Gated::new(vb)?, decoder)?))
    })?;
    train("cosine softmax", |vb| {
        let weight = vb.get_with_hints((VOCAB, HIDDEN), "weight", Init::Randn { mean: 0.0, stdev: 1.0 })?;
        Ok(Box::new(CosineSoftmax { weight, scale: vb.get_with_hints(1, "scale", Init::Const(10.0))? }))
    })
}
