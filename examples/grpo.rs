//! In this example of reinforcement learning by GRPO, a small model with a mixture of softmaxes learns which sequences
//! are rewarded.
//!
//!     cargo run --release --example grpo
//!
//! A sequence is 5 tokens of a vocabulary of 50, after a first one. Its reward is the share of its tokens that are 7
//! more than the token before (modulo 50): 0.02 by chance, 1 at most. In a control run the advantages are shuffled over
//! the sequences, so that they say nothing about the reward, which stays at chance. The example takes half a minute on
//! 2 cores.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, mos-head 0.6, rand 0.9, without features.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::{embedding, AdamW, Embedding, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use mos_head::{
    decode::{Sampler, Sampling},
    policy::{PolicyBatch, PolicyOptions},
    score::ScoreOptions,
    MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Result,
};
use rand::{rngs::StdRng, seq::SliceRandom, Rng, SeedableRng};

const VOCAB: usize = 50;
const HIDDEN: usize = 64;
const LENGTH: usize = 5;
/// The number of first tokens of a step. The sequences that are sampled after one of them are a group.
const GROUPS: usize = 50;
/// The number of sequences of a group.
const GROUP_SIZE: usize = 32;
const STEPS: usize = 200;
/// The number of optimizer steps on the samples of a step.
const UPDATES: usize = 2;

struct Model {
    vars: VarMap,
    /// The hidden state depends on the last token alone, as the reward does.
    embedding: Embedding,
    head: MixtureOfSoftmaxes,
}

impl Model {
    fn new() -> Result<Self> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(HIDDEN, VOCAB, 3).with_context_dim(32), vb.pp("head"))?;
        Ok(Model { embedding: embedding(VOCAB, HIDDEN, vb.pp("embedding"))?, head, vars })
    }

    /// Computes the hidden states `[.., hidden]` after tokens `[..]`.
    fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        Ok(self.embedding.forward(tokens)?)
    }

    /// Samples sequences `[sequences, 1 + LENGTH]` that begin with these tokens.
    fn sample(&self, first: &[u32], sampler: &mut Sampler) -> Result<Tensor> {
        let mut tokens = vec![Tensor::new(first, &Device::Cpu)?];
        for t in 0..LENGTH {
            tokens.push(self.head.sample(&self.hidden(&tokens[t])?.detach(), sampler)?);
        }
        Ok(Tensor::stack(&tokens, 1)?)
    }
}

/// Computes the share of a sequence's tokens that are rewarded.
fn reward(sequence: &[u32]) -> f32 {
    let rewarded = sequence.windows(2).filter(|pair| pair[1] == (pair[0] + 7) % VOCAB as u32).count();
    rewarded as f32 / LENGTH as f32
}

/// Computes the advantage of each sequence: its reward less the mean of its group, over the group's standard deviation.
fn advantages(rewards: &[f32]) -> Vec<f32> {
    let group_advantages = |group: &[f32]| {
        let mean = group.iter().sum::<f32>() / group.len() as f32;
        let variance = group.iter().map(|r| (r - mean).powi(2)).sum::<f32>() / group.len() as f32;
        group.iter().map(|r| (r - mean) / (variance.sqrt() + 1e-4)).collect::<Vec<_>>()
    };
    rewards.chunks(GROUP_SIZE).flat_map(group_advantages).collect()
}

/// Trains a model, in a control run with shuffled advantages. Returns the mean reward of the last ten steps.
fn train(name: &str, is_control: bool) -> Result<f32> {
    let model = Model::new()?;
    let mut optimizer =
        AdamW::new(model.vars.all_vars(), ParamsAdamW { lr: 0.01, weight_decay: 0.0, ..Default::default() })?;
    let mut sampler = Sampler::new(Sampling::new(), 1)?;
    let mut rng = StdRng::seed_from_u64(1);
    let options = PolicyOptions::new().with_clip(0.2, 0.28).with_entropy(0.05);
    let (start, mut mean_rewards) = (Instant::now(), Vec::new());
    for step in 0..=STEPS {
        let first: Vec<u32> = (0..GROUPS).flat_map(|_| [rng.random_range(0..VOCAB as u32); GROUP_SIZE]).collect();
        let sequences = model.sample(&first, &mut sampler)?;
        let rewards: Vec<f32> = sequences.to_vec2::<u32>()?.iter().map(|sequence| reward(sequence)).collect();
        let mut advantages = advantages(&rewards);
        if is_control {
            advantages.shuffle(&mut rng);
        }
        let mean = rewards.iter().sum::<f32>() / rewards.len() as f32;
        mean_rewards.push(mean);

        // Token t is predicted after token t - 1. All tokens of a sequence have its advantage.
        let (inputs, token_ids) = (sequences.narrow(1, 0, LENGTH)?, sequences.narrow(1, 1, LENGTH)?);
        let advantages = Tensor::from_vec(advantages, (GROUPS * GROUP_SIZE, 1), &Device::Cpu)?;
        let advantages = advantages.broadcast_as((GROUPS * GROUP_SIZE, LENGTH))?;
        let old_log_probs = model.head.log_prob(&model.hidden(&inputs)?, &token_ids)?.detach();
        let batch =
            PolicyBatch::new(token_ids.contiguous()?, advantages.contiguous()?).with_old_log_probs(old_log_probs);
        for _ in 0..UPDATES {
            let loss = model.head.policy_loss(&model.hidden(&inputs)?, &batch, &options)?;
            let gradients = loss.backward()?;
            if step == 0 {
                loss.check_gradients(&gradients, &model.vars)?; // an error if an operation has no backward pass
            }
            optimizer.step(&gradients)?;
        }
        if step % 25 == 0 {
            let entropy = model.head.score(
                &model.hidden(&inputs)?.detach(),
                &batch.token_ids,
                &ScoreOptions::new().with_entropy(true),
            )?;
            let entropy = entropy.entropy.map(|h| h.mean_all()?.to_scalar::<f32>()).transpose()?.unwrap_or(f32::NAN);
            let seconds = start.elapsed().as_secs_f32();
            println!("{name} step {step:3}: reward {mean:.3}, entropy {entropy:.2} nats, {seconds:.1} s");
        }
    }
    let sequences = model.sample(&[3, 20, 41], &mut sampler)?.to_vec2::<u32>()?;
    println!("{name} after 3, 20, 41: {:?}\n", sequences);
    Ok(mean_rewards[mean_rewards.len() - 10..].iter().sum::<f32>() / 10.0)
}

fn main() -> Result<()> {
    // On few cores, candle's threads that spin between operations slow others down.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let learned = train("GRPO", false)?;
    let control = train("shuffled advantages", true)?;
    println!("mean reward of the last ten steps: {learned:.3}, with shuffled advantages {control:.3} (chance 0.02)");
    println!(
        "{}",
        if learned > 0.9 { "The model has learned that 7 comes next." } else { "The model has not learned it." }
    );
    Ok(())
}
