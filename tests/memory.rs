//! The workspace stays within its budget for any number of positions and components: a loss with its gradients, an
//! evaluation and decoding never hold all logits, `[positions, K, vocab]`.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use common::case::{Case, Head, Sizes};
use common::check::{least_workspace, Layer};
use mos_head::decode::{Sampler, Sampling, TokenRequest};
use mos_head::parts::{CharCnn, CharCnnConfig, LowRankAdapter, LowRankConfig, QuantisedLinear};
use mos_head::sampled::NoiseDistribution;
use mos_head::score::{ChunkScores, ChunkTerms, ScoreOptions};
use mos_head::{Distributions, GradientSum, LossOptions, Mixture, OutputLayer, Result, SoftmaxHead};

/// The system's allocator, which counts the bytes in use and their peak.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every request is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let used = USED.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(used, Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the pointer came from `System` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result of `work`, and the peak of the bytes that it had in use.
fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = USED.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    (result, PEAK.load(Relaxed) - before)
}

const WIDTH: usize = 16;
const VOCAB: usize = 4000;

// The only test in this file, because the allocator counts all threads.
#[test]
fn the_workspace_is_within_its_budget_for_any_number_of_positions_and_components() -> Result<()> {
    // The allocator sees all memory, and each call has its own.
    std::env::set_var("MOS_HEAD_KEEP_MEMORY", "0");
    let all = [LossOptions::new(), LossOptions::new().with_label_smoothing(0.1), LossOptions::evaluation()];
    for (positions, components) in [(64, 1), (512, 1), (64, 4), (512, 4), (2048, 4), (512, 16)] {
        let case = Case::random(Head::Mixture, Sizes::new(WIDTH, WIDTH, components, VOCAB), &[positions], 95);
        let tensors = case.variables(DType::F32, &Device::Cpu)?;
        let layer = Layer::new(&case, &tensors)?;
        let targets = case.target_tensor(&Device::Cpu)?;
        // The gradients, each twice where candle adds it to zeros, and a few numbers per position.
        let operands: usize = case.values.values().map(Vec::len).sum::<usize>() * 4;
        let results = 2 * operands + positions * 100;
        // The buffers of the matrix products in each thread.
        let products = (1 + rayon::current_num_threads()) << 20;

        for options in &all {
            let budget = 2 * least_workspace(&layer, &targets, options).max(1 << 20);
            let options = options.clone().with_workspace_bytes(budget);
            let step = || {
                let loss = layer.loss(&targets, &options)?;
                options.train.then(|| loss.backward()).transpose()
            };
            // The first call starts the threads.
            step()?;
            let (gradients, peak) = peak_of(step);
            gradients?;
            let limit = budget + results + products;
            let logits = positions * components * VOCAB * 4;
            eprintln!("{positions} positions, K = {components}: {peak} bytes of {limit}; the logits would be {logits}");
            assert!(peak <= limit, "{positions} positions, K = {components}: {peak} bytes of {limit} with {options:?}");
        }
    }
    the_decoders_gradient_is_held_once()?;
    a_frozen_decoder_costs_no_logits_and_no_gradient()?;
    an_adapter_costs_nothing_of_the_decoders_size()?;
    a_transposed_decoder_is_not_copied()?;
    a_quantised_decoder_is_not_copied()?;
    the_intermediate_results_of_computed_rows_are_within_their_budget()?;
    a_sampled_loss_holds_no_copy_of_all_contexts()?;
    the_gradient_of_a_wide_result_is_not_copied()?;
    scores_hold_no_logits()?;
    decoding_holds_the_logits_of_a_few_positions()
}

/// Log-probabilities and entropies with their gradients, and a policy loss, whose decoder has a gradient of its own.
fn scores_hold_no_logits() -> Result<()> {
    const VOCAB: usize = 40_000;
    const BUDGET: usize = 16 << 20;
    let (positions, components) = (128, 4);
    let contexts = Var::randn(0f32, 1.0, (positions, components, WIDTH), &Device::Cpu)?;
    let log_priors = Tensor::full(0.25f32.ln(), (positions, components), &Device::Cpu)?;
    let weight = Var::randn(0f32, 0.3, (VOCAB, WIDTH), &Device::Cpu)?;
    let token_ids = Tensor::from_iter((0..positions as u32).map(|i| i * 97), &Device::Cpu)?;
    let options = ScoreOptions::new().with_entropy(true).with_temperature(0.9).with_workspace_bytes(BUDGET);
    let frozen = Mixture::new(&contexts, Some(&log_priors), &weight.as_detached_tensor(), None)?;
    let scores = || -> Result<_> {
        let scores = frozen.score(&token_ids, &options)?;
        let entropy = scores.entropy.expect("asked for");
        Ok((scores.log_prob + entropy)?.sum_all()?.backward()?)
    };
    let trained = Mixture::new(&contexts, Some(&log_priors), &weight, None)?;
    let policy = || -> Result<_> {
        let terms = |scores: ChunkScores| {
            let by_log_prob = scores.log_prob.ones_like()?.neg()?;
            let values = (scores.log_prob.neg()? - &scores.entropy)?;
            Ok(ChunkTerms::new(values, by_log_prob.clone()).with_by_entropy(by_log_prob))
        };
        trained.score_loss(&token_ids, &options, terms)?.backward()
    };
    let (logits, decoder) = (positions * components * VOCAB * 4, VOCAB * WIDTH * 4);
    scores()?;
    for (name, step, gradient) in [("scores", &scores as &dyn Fn() -> Result<_>, 0), ("policy", &policy, decoder)] {
        let (gradients, peak) = peak_of(step);
        assert!(gradients?.get(&contexts).is_some());
        let limit = BUDGET + gradient + (4 << 20);
        assert!(peak <= limit && limit < logits / 3, "{name}: {peak} bytes of {limit}; the logits have {logits}");
    }
    Ok(())
}

fn decoding_holds_the_logits_of_a_few_positions() -> Result<()> {
    const VOCAB: usize = 40_000;
    let case = Case::random(Head::Mixture, Sizes::new(WIDTH, WIDTH, 8, VOCAB), &[128], 97);
    let mixture = case.mixture(DType::F32, &Device::Cpu)?;
    let mut sampler = Sampler::new(Sampling::new().with_top_p(0.9), 1)?;
    mixture.argmax()?;
    let (found, peak) = peak_of(|| mixture.top_k(10));
    let (drawn, peak_of_sample) = peak_of(|| mixture.sample(&mut sampler));
    found?;
    drawn?;
    // The default budget, and for each thread the candidates of one position.
    let limit = (32 << 20) + (8 << 20);
    let logits = 128 * 8 * VOCAB * 4;
    assert!(peak.max(peak_of_sample) <= limit, "{peak} and {peak_of_sample} bytes; the logits would be {logits}");
    Ok(())
}

fn the_decoders_gradient_is_held_once() -> Result<()> {
    const VOCAB: usize = 40_000;
    const WIDTH: usize = 256;
    let case = Case::random(Head::Mixture, Sizes::new(WIDTH, WIDTH, 2, VOCAB), &[3], 96);
    let tensors = case.variables(DType::F32, &Device::Cpu)?;
    let layer = Layer::new(&case, &tensors)?;
    let targets = case.target_tensor(&Device::Cpu)?;
    let options = LossOptions::new().with_workspace_bytes(8 << 20);
    let (gradients, peak) = peak_of(|| layer.loss(&targets, &options)?.backward());
    gradients?;
    let (decoder, rest) = (VOCAB * WIDTH * 4, 16 << 20);
    assert!(peak <= decoder + rest, "{peak} bytes, of which the decoder's gradient has {decoder}");

    // A second batch adds to it in place.
    let (weight, hidden) =
        (Var::randn(0f32, 0.1, (VOCAB, WIDTH), &Device::Cpu)?, Tensor::ones((3, WIDTH), DType::F32, &Device::Cpu)?);
    let (head, sum) = (SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?, GradientSum::new());
    let (targets, options) = (Tensor::new(&[1u32, 2, 3], &Device::Cpu)?, options.with_gradient_sum(&sum));
    let (summed, peak) = peak_of(|| (0..3).try_for_each(|_| sum.add(&head.loss(&hidden, &targets, &options)?)));
    summed?;
    assert!(peak <= decoder + rest, "{peak} bytes for three batches, of which the decoder's gradient has {decoder}");
    Ok(())
}

fn a_frozen_decoder_costs_no_logits_and_no_gradient() -> Result<()> {
    const VOCAB: usize = 40_000;
    const WIDTH: usize = 64;
    const POSITIONS: usize = 256;
    let weight = Tensor::randn(0f32, 0.1, (VOCAB, WIDTH), &Device::Cpu)?;
    let hidden = Var::randn(0f32, 1.0, (POSITIONS, WIDTH), &Device::Cpu)?;
    let targets = Tensor::from_iter((0..POSITIONS as u32).map(|i| i * 97), &Device::Cpu)?;
    let head = SoftmaxHead::from_tensors(weight, None)?;
    let step = || head.loss(&hidden, &targets, &LossOptions::new())?.backward();
    step()?;
    let (gradients, peak) = peak_of(step);
    assert!(gradients?.get(&hidden).is_some());
    let (logits, limit) = (POSITIONS * VOCAB * 4, 8 << 20);
    assert!(peak <= limit, "{peak} bytes; the logits have {logits}, the decoder {}", VOCAB * WIDTH * 4);
    Ok(())
}

fn an_adapter_costs_nothing_of_the_decoders_size() -> Result<()> {
    const VOCAB: usize = 40_000;
    const WIDTH: usize = 1024;
    const RANK: usize = 4;
    let (vars, device) = (VarMap::new(), Device::Cpu);
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
    let adapter = LowRankAdapter::new(&LowRankConfig::new(VOCAB, WIDTH, RANK), vb)?;
    let head = SoftmaxHead::from_tensors(Tensor::randn(0f32, 0.1, (VOCAB, WIDTH), &device)?, None)?;
    let head = head.with_adapter(adapter)?;
    let hidden = Var::randn(0f32, 1.0, (5, WIDTH), &device)?;
    let targets = Tensor::new(&[1u32, 2, 3, 4, 5], &device)?;
    let options = LossOptions::new().with_workspace_bytes(16 << 20);
    let step = || head.loss(&hidden, &targets, &options)?.backward();
    step()?;
    let (gradients, peak) = peak_of(step);
    let gradients = gradients?;
    assert!(vars.all_vars().iter().chain([&hidden]).all(|var| gradients.get(var).is_some()));
    // B, its gradient and its copies in the node.
    let (decoder, limit) = (VOCAB * WIDTH * 4, (16 << 20) + 10 * VOCAB * RANK * 4 + (2 << 20));
    assert!(limit < decoder / 4 && peak <= limit, "{peak} bytes of {limit}; the decoder has {decoder}");
    Ok(())
}

fn a_transposed_decoder_is_not_copied() -> Result<()> {
    const VOCAB: usize = 40_000;
    const WIDTH: usize = 256;
    let weight = Tensor::randn(0f32, 0.1, (WIDTH, VOCAB), &Device::Cpu)?;
    let hidden = Tensor::randn(0f32, 1.0, (3, WIDTH), &Device::Cpu)?;
    let targets = Tensor::new(&[1u32, 2, 3], &Device::Cpu)?;
    let head = SoftmaxHead::from_tensors(weight.t()?, None)?;
    let options = LossOptions::evaluation().with_workspace_bytes(8 << 20);
    head.loss(&hidden, &targets, &options)?;
    let (loss, peak) = peak_of(|| head.loss(&hidden, &targets, &options));
    loss?;
    let (decoder, limit) = (VOCAB * WIDTH * 4, 16 << 20);
    assert!(peak <= limit, "{peak} bytes; the decoder has {decoder}");
    Ok(())
}

/// Neither a loss with the gradients of hidden states and adapter nor decoding makes anything of the rows' size.
fn a_quantised_decoder_is_not_copied() -> Result<()> {
    const VOCAB: usize = 40_000;
    const WIDTH: usize = 512;
    const BUDGET: usize = 16 << 20;
    let weight = Arc::new(QTensor::quantize(&Tensor::randn(0f32, 0.1, (VOCAB, WIDTH), &Device::Cpu)?, GgmlDType::Q6K)?);
    let stored = weight.storage_size_in_bytes();
    let [a, b] = [(1, WIDTH), (VOCAB, 1)].map(|shape| Var::randn(0f32, 0.1, shape, &Device::Cpu));
    let (a, b) = (a?, b?);
    let adapter = LowRankAdapter::from_tensors(a.as_tensor().clone(), b.as_tensor().clone(), 1.0)?;
    let head = SoftmaxHead::from_quantised(weight, None)?.with_adapter(adapter)?;
    let hidden = Var::randn(0f32, 1.0, (32, WIDTH), &Device::Cpu)?;
    let targets = Tensor::from_iter((0..32u32).map(|i| i * 97), &Device::Cpu)?;
    let options = LossOptions::new().with_workspace_bytes(BUDGET);
    let step = || head.loss(&hidden, &targets, &options)?.backward();
    let request = TokenRequest::new(Sampling::greedy(), 0)?.with_best(5);
    let states = hidden.as_detached_tensor();
    let decode = || head.next_tokens(&states, &[&request; 32]);
    // The first calls start the threads.
    step()?;
    decode()?;
    let (gradients, peak) = peak_of(step);
    gradients?;
    eprintln!("a loss over quantised rows: {peak} bytes; the rows have {stored}");
    let (limit, rows) = (BUDGET + (4 << 20), VOCAB * WIDTH * 4);
    assert!(limit < rows / 3 && peak <= limit, "{peak} bytes of {limit}; the rows would have {rows} in f32");
    let (tokens, peak) = peak_of(decode);
    tokens?;
    eprintln!("decoding from quantised rows: {peak} bytes; the rows have {stored}");
    assert!(peak < 8 << 20, "{peak} bytes");
    Ok(())
}

/// candle copies the gradient of each node that adds a bias, or changes the shape of a result.
fn the_gradient_of_a_wide_result_is_not_copied() -> Result<()> {
    const OUTPUTS: usize = 40_000;
    const WIDTH: usize = 32;
    let weight = Tensor::randn(0f32, 0.1, (OUTPUTS, WIDTH), &Device::Cpu)?;
    let bias = Tensor::zeros(OUTPUTS, DType::F32, &Device::Cpu)?;
    let layer = QuantisedLinear::new(Arc::new(QTensor::quantize(&weight, GgmlDType::Q8_0)?), Some(bias))?;
    for leading in [&[64][..], &[2, 32]] {
        let input = Var::randn(0f32, 1.0, [leading, &[WIDTH]].concat(), &Device::Cpu)?;
        let output = layer.forward(&input)?;
        output.backward()?;
        let (gradients, peak) = peak_of(|| output.backward());
        gradients?;
        let result = 64 * OUTPUTS * 4;
        assert!(peak <= result * 3 / 2, "{leading:?}: {peak} bytes; the result has {result}");
    }
    Ok(())
}

fn the_intermediate_results_of_computed_rows_are_within_their_budget() -> Result<()> {
    const BUDGET: usize = 4 << 20;
    const CONTEXT: usize = 8;
    let config = CharCnnConfig::new(CONTEXT).with_filters(&[(2, 32), (4, 32)]).with_budget_bytes(BUDGET);
    for words in [1000, 8000] {
        let words: Vec<String> = (0..words).map(|id| format!("{id:b}")).collect();
        let vars = VarMap::new();
        let cnn = CharCnn::new(&config, &words, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
        let step = || Ok::<_, mos_head::Error>(cnn.rows()?.sqr()?.sum_all()?.backward()?);
        step()?;
        let (gradients, peak) = peak_of(step);
        gradients?;
        // Rows, their square, gradients, each twice where candle adds it to zeros, and sorted; spellings as numbers.
        let rows = words.len() * (CONTEXT * 4 * 12 + 200);
        let parameters = 20 * vars.all_vars().iter().map(|var| var.elem_count() * 4).sum::<usize>();
        let limit = BUDGET + rows + parameters + (2 << 20);
        assert!(peak <= limit, "{peak} of {limit} bytes for {} words", words.len());
    }
    Ok(())
}

fn a_sampled_loss_holds_no_copy_of_all_contexts() -> Result<()> {
    const WIDTH: usize = 64;
    const POSITIONS: usize = 100_000;
    let contexts = Var::from_tensor(&Tensor::randn(0f32, 0.1, (POSITIONS, 2, WIDTH), &Device::Cpu)?)?;
    let log_priors = Tensor::full(0.5f32.ln(), (POSITIONS, 2), &Device::Cpu)?;
    let weight = Var::from_tensor(&Tensor::randn(0f32, 0.1, (5000, WIDTH), &Device::Cpu)?)?;
    let mixture = Mixture::new(&contexts, Some(&log_priors), &weight, None)?;
    let targets = Tensor::from_iter((0..POSITIONS as u32).map(|i| i % 5000), &Device::Cpu)?;
    let options = LossOptions::new().with_sampled_softmax(NoiseDistribution::log_uniform(5000)?.draw(16, 1)?);
    let step = || mixture.loss(&targets, &options)?.backward();
    step()?;
    let (gradients, peak) = peak_of(step);
    gradients?;
    // The gradient of the contexts, twice where candle adds it to zeros; copies of a group, with theirs; results.
    let contexts = POSITIONS * 2 * WIDTH * 4;
    let limit = 2 * contexts + 6 * (16 << 20) + 5 * 5000 * WIDTH * 4 + POSITIONS * 200;
    assert!(peak <= limit, "{peak} of {limit} bytes; the contexts have {contexts}");
    Ok(())
}
