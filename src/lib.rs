//! Output layers for language models in [candle](https://github.com/huggingface/candle): from a hidden state to a
//! probability for every token id, at the cost of the matrix products.
//!
//! ```text
//! hidden [.., H] --projection--> contexts [.., K, d], log-priors [.., K]
//!                --mixture-----> log P(v) = logsumexp_k( log pi_k + z_kv - lse_k ),   z = c W^T + b
//!                --------------> loss | log-probabilities | top-k | samples | sequences
//! ```
//!
//! One softmax over a linear map forms log-probability matrices of rank at most H + 2 (H + 1 without a bias), the
//! *softmax bottleneck*; the width does not bound the rank of a mixture of softmaxes (Yang et al., 2018). Three heads
//! differ only in the contexts and priors of their mixture:
//!
//! | head | contexts and priors | cost |
//! |---|---|---|
//! | [`SoftmaxHead`] | the hidden state, one component | one softmax of width H |
//! | [`MixtureOfContexts`] | the prior-weighted mean of K contexts, one component | one softmax of width d |
//! | [`MixtureOfSoftmaxes`] | K contexts and log-priors | K softmaxes of width d |
//!
//! Each is a [`Head`], a projection and a decoder; with a projection of your own, `Head` is a head of your own. All
//! heads implement [`OutputLayer`], and those that are one mixture also [`MixtureLayer`]. A head gives a distribution
//! at each position, and results are asked of it: [`Distributions`] has them all. [`Mixture`] is the fused operation
//! itself, and [`linear_cross_entropy`] is the fused loss of a linear layer. [`HeadConfig`] is saved beside the weights
//! of a model that reads its head from a file.
//!
//! A loss and its gradients take three matrix products, the minimum for an exact method, or four if each position has a
//! loss of its own. The positions are processed in chunks ([`Plan`]), so that the logits of one chunk are in memory at
//! a time, under a budget ([`LossOptions::with_workspace_bytes`]). By default a chunk on the CPU has up to 480 rows of
//! logits (235 MiB at 128 256 ids in f32, 352 MiB with AMX), or more within 32 MiB; in bf16 with AMX, or with
//! AVX512-BF16 on AMD, it has 768 or more. The contexts `[positions, K, d]` and the gradients are held whole. An
//! operand that does not depend on a variable, such as a frozen decoder ([`Head::with_frozen_decoder`]), costs no
//! product for its gradient.
//!
//! # Modules
//!
//! The root has what nearly every program needs: heads, their configurations, losses and errors.
//!
//! | module | what it has |
//! |---|---|
//! | [`decode`] | the most probable token ids, samples, the next tokens of texts that are served, beam search |
//! | [`sets`] | all results of a head over the token ids that are allowed at a position |
//! | [`score`] | log-probabilities and entropies with gradients, losses of your own |
//! | [`policy`] | PPO and GRPO |
//! | [`distill`] | divergences from a teacher |
//! | [`sampled`] | losses over a sample of the vocabulary |
//! | [`two_level`] | the adaptive and the hierarchical softmax, for large vocabularies |
//! | [`parts`] | projections, decoders, decoder rows from spellings, low-rank adapters |
//! | [`distributed`] | vocabularies and texts that are cut among the ranks of a distributed program |
//! | [`trainers`] | documentation alone: the losses of TRL's trainers, from SFT and DPO to GRPO, and of several future tokens |
//!
//! # Example
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
//! use mos_head::{LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer};
//!
//! # fn main() -> mos_head::Result<()> {
//! let vars = VarMap::new();
//! let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//! let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(32, 1000, 4).with_context_dim(16), vb.pp("head"))?;
//! let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW::default())?;
//!
//! let hidden = Tensor::randn(0f32, 1., (8, 20, 32), &Device::Cpu)?; // [batch, seq, hidden], from your model
//! let targets = Tensor::ones((8, 20), DType::U32, &Device::Cpu)?; // [batch, seq]
//! for _ in 0..3 {
//!     let loss = head.loss(&hidden, &targets, &LossOptions::default())?;
//!     optimizer.step(&loss.backward()?)?;
//! }
//! let loss = head.loss(&hidden, &targets, &LossOptions::evaluation())?;
//! println!("perplexity {}", loss.value.to_scalar::<f32>()?.exp());
//! # Ok(())
//! # }
//! ```
//!
//! The options of a loss are [`LossOptions`]; one that a head, or another option, does not support is an error. Options
//! of the model, such as biases, activation, dropout and softcap, are in its configuration ([`SoftmaxConfig`],
//! [`MixtureConfig`]), for training and decoding alike.
//!
//! # Threads
//!
//! On the CPU the kernels run in rayon's current pool: the pool whose `install` calls them, or the global one, with
//! `RAYON_NUM_THREADS` threads or one for each core. With the default budget, results do not depend on the number of
//! threads, to the last bit. With a budget of your own, which the threads share, the number of threads decides how many
//! positions a chunk has, so that losses and gradients differ by rounding.
//!
//! A call from outside the pool wakes one thread more for each parallel loop than a call from inside (`rayon::scope`),
//! which counts in a training of small steps. Ranks within one process need threads of their own, outside the pool: a
//! thread of the pool that waits for a loop may start another task, and so another rank, which then waits for its own.
//! Up to 32 MiB of a call's workspace is kept for the next call, beside that call's budget, unless the environment
//! variable `MOS_HEAD_KEEP_MEMORY` is `0`.
//!
//! candle's own operations have a pool of their own (`CANDLE_NUM_THREADS`). After each operation its threads spin for
//! 25,000 iterations before they sleep, which delays the kernels where both pools share few cores. candle 0.11.1 reads
//! this number from `CANDLE_BARRIER_POOL_SPIN_LIMIT` when it starts the threads: a program sets it to `100` before its
//! first tensor.
//!
//! # Features
//!
//! | feature | |
//! |---|---|
//! | `mkl`, `accelerate` | candle's own, for the products outside the mixture |
//! | `serde` | `Serialize` and `Deserialize` for configurations of heads, adapters, char-CNNs and sampling |
//! | `distributed` | heads whose vocabulary is cut among ranks, with their checkpoints, and ranks with texts of their own, in [`distributed`] |
//! | `mpi` | `distributed`, and its engine over MPI |
//! | `nccl` | `distributed`, and its engine over NCCL, for ranks with an NVIDIA GPU each; run on an emulated driver, not yet on a GPU |
//! | `cuda` | kernels for NVIDIA GPUs (f32, f16, bf16); all tests of earlier commits passed on an H200 and an H100, later changes have run on an emulated driver |
//! | `metal` | kernels for Apple GPUs (f32, f16, bf16); run on an emulated device, not yet on a GPU |
//!
//! This crate enables the feature `x86-v4` of the `gemm` crate. Features are shared by the whole dependency graph:
//! candle's own products then use AVX-512 too, where the machine has it.
//!
//! # Gradients that candle drops
//!
//! Fused operations of candle have no backward pass and detach their result in silence: an optimizer leaves the
//! variables before them as they are. Models of candle-transformers use them. [`Loss::check_gradients`], which is
//! called once after the first backward pass, returns an error that names the variables without a gradient. In
//! `candle_nn`, and in `candle_core` the product with a quantised matrix:
//!
//! | detaches its result | has a backward pass |
//! |---|---|
//! | `RmsNorm::forward` and `ops::rms_norm`, of a contiguous tensor | `RmsNorm::forward_diff`, `ops::rms_norm_slow` |
//! | `LayerNorm::forward` with a bias, of a contiguous tensor; `ops::layer_norm` | `ops::layer_norm_slow` |
//! | `rotary_emb::rope`, `rope_i`, `rope_thd` | `rotary_emb::rope_slow`, `rope_i_slow` |
//! | `ops::softmax_last_dim`, `ops::sdpa` | `ops::softmax`, between matrix products |
//! | `quantized::QMatMul::forward` of a quantised tensor | [`parts::QuantisedLinear`] |
//!
//! # References
//!
//! - Zhilin Yang, Zihang Dai, Ruslan Salakhutdinov, William W. Cohen: *Breaking the Softmax Bottleneck: A High-Rank RNN
//!   Language Model*. ICLR 2018, arXiv 1711.03953.

#![warn(unreachable_pub)]

mod public;

pub mod distributed;

pub mod two_level;

mod allowed;

mod heads;

mod distributions;

mod decoder;
mod decoding;
mod mixture;

mod scores;

mod loss;

mod backend;

mod tensors;

mod error;

pub use backend::plan::{Kernels, Plan};
pub use distributions::{linear_cross_entropy, Distributions};
pub use error::{Error, OptionName, Result};
pub use heads::{
    ContextActivation, Head, MixtureConfig, MixtureLayer, MixtureOfContexts, MixtureOfSoftmaxes, MixtureTensors,
    OutputLayer, SoftmaxConfig, SoftmaxHead,
};
pub use loss::{GradientSum, Loss, LossOptions, PositionOptions, Precision, Reduction};
pub use mixture::Mixture;
pub use public::{decode, distill, parts, policy, sampled, score, sets, trainers, HeadConfig};
pub use tensors::dropout::DropoutMasks;
