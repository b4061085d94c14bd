//! This example shows direct preference optimization (Rafailov et al.: *Direct Preference Optimization: Your Language
//! Model is Secretly a Reward Model*. NeurIPS 2023, arXiv 2305.18290, equation 7): a small model learns from pairs of
//! texts which of two is preferred.
//!
//!     cargo run --release --example dpo
//!
//! The model first learns a language in which the token t + 1 or the token t + 7 (modulo 50) comes after the token t,
//! each with probability 1/2. A frozen copy of it is the reference, which writes two continuations of each prompt. The
//! one with more steps of 7 is chosen, and the other rejected. The reward of a continuation is
//! `beta (log policy - log reference)`, and a pair is ranked correctly if the chosen one has the larger reward. On
//! pairs that were held out, the share of such pairs rises from 0 to nearly 1, and nearly all steps of what the model
//! then writes are steps of 7. The example takes a few seconds on 2 cores.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, mos-head 0.6, rand 0.9, without features. Unless
//! `CANDLE_BARRIER_POOL_SPIN_LIMIT` is set, as it is here, candle's idle threads slow the others down on few cores.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::ops::log_softmax;
use candle_nn::{embedding, AdamW, Embedding, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use mos_head::decode::{Sampler, Sampling};
use mos_head::score::{ScoreOptions, Scores};
use mos_head::{LossOptions, OutputLayer, Result, SoftmaxConfig, SoftmaxHead};
use rand::{rngs::StdRng, Rng, SeedableRng};

const VOCAB: usize = 50;
const HIDDEN: usize = 32;
/// The lengths of a prompt and of its continuation.
const PROMPT: usize = 3;
const LENGTH: usize = 8;
/// The numbers of pairs of a training step, and of those that are held out.
const PAIRS: usize = 128;
const HELD_OUT: usize = 1000;
const PRETRAINING_STEPS: usize = 300;
const STEPS: usize = 200;
/// How strongly the policy is held to the reference.
const BETA: f64 = 0.1;

/// In this model the hidden state depends on the last token alone, as the language does.
struct Model {
    embedding: Embedding,
    head: SoftmaxHead,
}

impl Model {
    fn new(vb: VarBuilder) -> Result<Self> {
        let head = SoftmaxHead::new(&SoftmaxConfig::new(HIDDEN, VOCAB), vb.pp("head"))?;
        Ok(Model { embedding: embedding(VOCAB, HIDDEN, vb.pp("embedding"))?, head })
    }

    /// Makes a copy of a model with these variables, which is a constant.
    fn frozen_copy(vars: &VarMap) -> Result<Self> {
        let mut tensors = HashMap::new();
        for (name, var) in vars.data().lock().unwrap().iter() {
            tensors.insert(name.clone(), var.as_detached_tensor().copy()?);
        }
        Self::new(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu))
    }

    /// Computes the hidden states `[.., hidden]` after tokens `[..]`.
    fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        Ok(self.embedding.forward(tokens)?)
    }

    /// Computes the log-probability of each token of the texts `[texts, PROMPT + LENGTH]` after the ones before it.
    fn scores(&self, texts: &Tensor) -> Result<Scores> {
        let (inputs, targets) = (texts.narrow(1, 0, PROMPT + LENGTH - 1)?, texts.narrow(1, 1, PROMPT + LENGTH - 1)?);
        self.head.score(&self.hidden(&inputs)?, &targets.contiguous()?, &ScoreOptions::new())
    }

    /// Continues these prompts `[texts, PROMPT]` to texts `[texts, PROMPT + LENGTH]`.
    fn write(&self, prompts: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
        let mut texts = prompts.clone();
        for t in 0..LENGTH {
            let last = texts.narrow(1, PROMPT + t - 1, 1)?.squeeze(1)?;
            let next = self.head.sample(&self.hidden(&last)?.detach(), sampler)?;
            texts = Tensor::cat(&[&texts, &next.unsqueeze(1)?], 1)?;
        }
        Ok(texts)
    }
}

/// Computes the loss of the pairs, the mean of `-log sigmoid(reward of chosen - reward of rejected)`, and the rewards.
///
/// The log-probabilities `[2 * pairs]` of continuations under policy and reference are those of the chosen ones, then
/// those of the rejected ones in the same order.
pub(crate) fn dpo_loss(policy: &Tensor, reference: &Tensor, beta: f64) -> Result<(Tensor, Tensor)> {
    let rewards = ((policy - reference)? * beta)?;
    // The sigmoid of a difference is the softmax of the two, whose logarithm does not overflow.
    let log_shares = log_softmax(&rewards.reshape((2, ()))?, 0)?; // chosen, rejected
    Ok((log_shares.get(0)?.mean_all()?.neg()?, rewards))
}

/// Makes the mask of the continuation's tokens, `[texts, PROMPT + LENGTH - 1]`.
fn mask(texts: usize) -> Result<Tensor> {
    let prompt = Tensor::zeros((texts, PROMPT - 1), DType::U8, &Device::Cpu)?;
    Ok(Tensor::cat(&[prompt, Tensor::ones((texts, LENGTH), DType::U8, &Device::Cpu)?], 1)?)
}

/// Computes the loss of pairs, `[2 * pairs, PROMPT + LENGTH]`, and the rewards of their texts.
fn preferences(policy: &Model, reference: &Model, texts: &Tensor) -> Result<(Tensor, Tensor, Scores)> {
    let (mask, scores) = (mask(texts.dim(0)?)?, policy.scores(texts)?);
    let reference_sums = reference.scores(texts)?.sum_by_sequence(&mask)?;
    let (loss, rewards) = dpo_loss(&scores.sum_by_sequence(&mask)?, &reference_sums, BETA)?;
    Ok((loss, rewards, scores))
}

/// Writes prompts, or whole texts, of the language, `[texts, length]`.
fn texts(texts: usize, length: usize, rng: &mut StdRng) -> Result<Tensor> {
    let mut tokens: Vec<u32> = Vec::new();
    for i in 0..texts * length {
        let next = match i % length {
            0 => rng.random_range(0..VOCAB as u32),
            _ => (tokens[i - 1] + [1, 7][rng.random_range(0..2)]) % VOCAB as u32,
        };
        tokens.push(next);
    }
    Ok(Tensor::from_vec(tokens, (texts, length), &Device::Cpu)?)
}

/// Counts the continuation's steps of 7.
fn preferred_steps(text: &[u32]) -> usize {
    text[PROMPT - 1..].windows(2).filter(|pair| pair[1] == (pair[0] + 7) % VOCAB as u32).count()
}

/// Lets the reference write pairs of texts: the chosen ones, then the rejected ones. Ties are left out.
fn pairs(reference: &Model, count: usize, sampler: &mut Sampler, rng: &mut StdRng) -> Result<Tensor> {
    let (mut chosen, mut rejected) = (Vec::new(), Vec::new());
    while chosen.len() < count {
        let prompts = texts(count, PROMPT, rng)?;
        let write = |sampler: &mut Sampler| Ok::<_, mos_head::Error>(reference.write(&prompts, sampler)?.to_vec2()?);
        for (a, b) in write(sampler)?.into_iter().zip(write(sampler)?) {
            match preferred_steps(&a).cmp(&preferred_steps(&b)) {
                _ if chosen.len() == count => break,
                std::cmp::Ordering::Greater => (chosen.push(a), rejected.push(b)),
                std::cmp::Ordering::Less => (chosen.push(b), rejected.push(a)),
                std::cmp::Ordering::Equal => continue,
            };
        }
    }
    chosen.append(&mut rejected);
    Ok(Tensor::new(chosen, &Device::Cpu)?)
}

/// Prints the margin of the rewards and the share of pairs that are ranked correctly, which it returns.
fn evaluate(name: &str, policy: &Model, reference: &Model, held_out: &Tensor) -> Result<f32> {
    let (loss, rewards, _) = preferences(policy, reference, held_out)?;
    let margins = (rewards.narrow(0, 0, HELD_OUT)? - rewards.narrow(0, HELD_OUT, HELD_OUT)?)?;
    let accuracy = margins.gt(0f32)?.to_dtype(DType::F32)?.mean_all()?.to_scalar::<f32>()?;
    let (loss, margin) = (loss.to_scalar::<f32>()?, margins.mean_all()?.to_scalar::<f32>()?);
    let prompts = held_out.narrow(1, 0, PROMPT)?.contiguous()?;
    let written = policy.write(&prompts, &mut Sampler::new(Sampling::new(), 3)?)?.to_vec2::<u32>()?;
    let steps: usize = written.iter().map(|text| preferred_steps(text)).sum();
    let share = steps as f32 / (written.len() * LENGTH) as f32;
    println!("{name}: loss {loss:.3}, margin {margin:.3}, accuracy {accuracy:.3}, steps of 7 {share:.3}");
    Ok(accuracy)
}

fn main() -> Result<()> {
    // On few cores, candle's threads that spin between operations slow others down.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let (start, vars) = (Instant::now(), VarMap::new());
    let policy = Model::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let (mut rng, mut sampler) = (StdRng::seed_from_u64(1), Sampler::new(Sampling::new(), 1)?);

    let settings = ParamsAdamW { lr: 0.01, weight_decay: 0.0, ..Default::default() };
    let mut optimizer = AdamW::new(vars.all_vars(), settings.clone())?;
    for step in 0..PRETRAINING_STEPS {
        let texts = texts(PAIRS, PROMPT + LENGTH, &mut rng)?;
        let (inputs, targets) = (texts.narrow(1, 0, PROMPT + LENGTH - 1)?, texts.narrow(1, 1, PROMPT + LENGTH - 1)?);
        let loss = policy.head.loss(&policy.hidden(&inputs)?, &targets.contiguous()?, &LossOptions::default())?;
        let gradients = loss.backward()?;
        if step == 0 {
            loss.check_gradients(&gradients, &vars)?; // an error if an operation has no backward pass
        }
        optimizer.step(&gradients)?;
        if step % 50 == 0 {
            eprintln!("language, step {step:3}: loss {:.3}", loss.value.to_scalar::<f32>()?);
        }
    }

    let reference = Model::frozen_copy(&vars)?;
    let held_out = pairs(&reference, HELD_OUT, &mut sampler, &mut rng)?;
    evaluate("before", &policy, &reference, &held_out)?;
    let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 0.003, ..settings })?;
    for step in 0..STEPS {
        let texts = pairs(&reference, PAIRS, &mut sampler, &mut rng)?;
        let (loss, _, scores) = preferences(&policy, &reference, &texts)?;
        optimizer.step(&scores.backward(&loss)?)?;
        if step % 25 == 0 {
            eprintln!("preferences, step {step:3}: loss {:.3}", loss.to_scalar::<f32>()?);
        }
    }
    let accuracy = evaluate("after", &policy, &reference, &held_out)?;
    println!(
        "{} {:.0} seconds.",
        if accuracy > 0.9 { "The model has learned what is preferred." } else { "The model has not learned it." },
        start.elapsed().as_secs_f32()
    );
    Ok(())
}
