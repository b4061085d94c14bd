//! This example trains, evaluates, ranks, samples, saves and loads a head.
//!
//!     cargo run --release --example quickstart
//!
//! In the language, after token t comes 5 t, 5 t + 1 or 5 t + 2 (modulo 200), each with probability 1/3. Its entropy is
//! ln 3 = 1.099 nats per position, which the model reaches in some seconds.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, mos-head 0.6, rand 0.9, without features.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{embedding, AdamW, Embedding, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use mos_head::{
    decode::{Sampler, Sampling},
    LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer,
};
use rand::{rngs::StdRng, Rng, SeedableRng};

const VOCAB: usize = 200;
const HIDDEN: usize = 32;

/// Makes a model and its head. Any model will do that ends in hidden states; this one is the embedding of the last
/// token.
fn model(vars: &VarMap) -> Result<(Embedding, MixtureOfSoftmaxes)> {
    let vb = VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu);
    let config = MixtureConfig::new(HIDDEN, VOCAB, 2); // hidden size, vocabulary, components
    Ok((embedding(VOCAB, HIDDEN, vb.pp("embedding"))?, MixtureOfSoftmaxes::new(&config, vb.pp("head"))?))
}

fn main() -> Result<()> {
    // On few cores, candle's threads that spin between operations slow others down.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let mut rng = StdRng::seed_from_u64(1);
    let mut batch = || {
        let last: Vec<u32> = (0..512).map(|_| rng.random_range(0..VOCAB as u32)).collect();
        let next: Vec<u32> = last.iter().map(|t| (5 * t + rng.random_range(0..3)) % VOCAB as u32).collect();
        Ok::<_, candle_core::Error>((Tensor::new(last, &Device::Cpu)?, Tensor::new(next, &Device::Cpu)?))
    };
    let vars = VarMap::new();
    let (embedding, head) = model(&vars)?;
    let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 0.01, ..Default::default() })?;
    for step in 0..=400 {
        let (tokens, targets) = batch()?;
        let loss = head.loss(&embedding.forward(&tokens)?, &targets, &LossOptions::default())?;
        optimizer.step(&loss.backward()?)?;
        if step % 100 == 0 {
            println!("step {step:3}: {:.3} nats", loss.value.to_scalar::<f32>()?);
        }
    }
    let (tokens, targets) = batch()?;
    let evaluation = head.loss(&embedding.forward(&tokens)?, &targets, &LossOptions::evaluation())?.value;
    println!("evaluation: {:.3} nats, entropy {:.3}", evaluation.to_scalar::<f32>()?, 3f32.ln());

    let hidden = embedding.forward(&Tensor::new(&[7u32], &Device::Cpu)?)?;
    let top = head.top_k(&hidden, 3)?;
    println!("after 7: {:?} with {:.2?}", top.token_ids.to_vec2::<u32>()?, top.log_probs.exp()?.to_vec2::<f32>()?);
    let mut sampler = Sampler::new(Sampling::new().with_temperature(0.8).with_top_p(0.95), 42)?;
    println!("a sample: {:?}", head.sample(&hidden, &mut sampler)?.to_vec1::<u32>()?);

    // The file holds the tensors alone: the configuration, with the activation, is this program's. A program that reads
    // the configuration from a file saves a `HeadConfig` beside the tensors (feature `serde`).
    let file = std::env::temp_dir().join("quickstart.safetensors");
    vars.save(&file)?;
    let mut loaded = VarMap::new();
    let (_, head) = model(&loaded)?;
    loaded.load(&file)?;
    println!("loaded from {}: {:?}", file.display(), head.argmax(&hidden)?.to_vec1::<u32>()?);
    Ok(())
}
