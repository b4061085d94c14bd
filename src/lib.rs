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
//! *softmax bottleneck*; the width does not bound the rank of a mixture of softmaxes (Yang et al., 2018). Three
//! heads differ only in the arguments that they pass to the mixture:
//!
//! | head | contexts and priors | cost |
//! |---|---|---|
//! | [`SoftmaxHead`] | the hidden state, one component | one softmax of width H |
//! | [`MixtureOfContexts`] | the prior-weighted mean of K contexts, one component | one softmax of width d |
//! | [`MixtureOfSoftmaxes`] | K contexts and log-priors | K softmaxes of width d |
//!
//! Each is a [`Head`], a projection and a decoder ([`parts`]); a projection of your own is a head in the same way. A
//! model that reads its head from a file has a [`HeadConfig`], saved beside the weights: a mixture's activation is in no
//! tensor.
//!
//! Two heads for large vocabularies, in [`two_level`], compute a softmax over frequent ids or classes, and of the rest
//! only the clusters that have a target. The heads above can also train on a sample of the vocabulary ([`sampled`]), and
//! with a decoder whose rows are computed from spellings ([`CharCnn`](parts::CharCnn)).
//!
//! All heads implement [`OutputLayer`], which a head of your own can implement too, and take the same [`LossOptions`];
//! heads that reduce to a mixture also implement [`MixtureLayer`]. [`Mixture`] is the fused operation itself, for
//! models with their own projection. [`linear_cross_entropy`] is the fused loss of a linear layer.
//!
//! The loss processes the positions in chunks ([`Plan`]): the logits of a chunk, their log-sum-exps, the
//! responsibilities of the components, the gradient of the logits in place, and from it the gradients of contexts and
//! decoder. These are three matrix products in all, the minimum for an exact method. The workspace holds the logits of
//! one chunk at a time, under a budget ([`LossOptions::with_workspace_bytes`]). It grows with the vocabulary, not with
//! the number of positions or components: by default a chunk on the CPU has up to 480 rows of logits (235 MiB at 128
//! 256 ids in f32), or more within 32 MiB. The contexts `[positions, K, d]` and the gradients are held whole.
//!
//! # Modules
//!
//! The root has what every program needs: heads, their configurations, losses and errors.
//!
//! | module | what a head is asked for, or built of |
//! |---|---|
//! | [`decode`] | the most probable token ids, samples, the next tokens of a server, beam search |
//! | [`sets`] | every result over the token ids that are allowed at a position |
//! | [`score`] | log-probabilities and entropies with gradients; losses of your own |
//! | [`policy`] | PPO and GRPO |
//! | [`distill`] | divergences from a teacher |
//! | [`sampled`] | training on a sample of the vocabulary |
//! | [`two_level`] | the adaptive and the hierarchical softmax |
//! | [`parts`] | projections, decoders, decoder rows from spellings, low-rank adapters |
//! | [`distributed`] | vocabularies and texts that are cut among the processes of a distributed program |
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
//! # Options of a loss
//!
//! The same for all heads that are mixtures ([`LossOptions`]); an option that a head, or another option, does not
//! support is an error:
//!
//! | option | |
//! |---|---|
//! | [`with_reduction`](LossOptions::with_reduction) | mean (the default), sum, or none: one loss per position, with any upstream gradient |
//! | [`with_denominator`](LossOptions::with_denominator), [`with_gradient_sum`](LossOptions::with_gradient_sum) | gradient accumulation: the mean over the targets of several batches, with memory for one gradient ([`GradientSum`]) |
//! | [`with_ignore_index`](LossOptions::with_ignore_index) | ignores positions with this target |
//! | [`with_position_weights`](LossOptions::with_position_weights), [`with_class_weights`](LossOptions::with_class_weights) | weights of positions and of token ids, with PyTorch's conventions |
//! | [`with_label_smoothing`](LossOptions::with_label_smoothing) | of the log-probabilities of the mixture |
//! | [`with_z_loss`](LossOptions::with_z_loss) | keeps the normalisers of the logits near zero |
//! | [`with_workspace_bytes`](LossOptions::with_workspace_bytes) | the budget of the workspace |
//! | [`with_precision`](LossOptions::with_precision) | products of f32 rounded to bf16, for CPUs with units for it |
//! | [`with_correct`](LossOptions::with_correct) | also tells which targets are the most probable ids, and counts them |
//! | [`with_sampled_softmax`](LossOptions::with_sampled_softmax), [`with_nce`](LossOptions::with_nce) | a training step over a sample of the vocabulary |
//! | [`with_decoder_rows`](LossOptions::with_decoder_rows) | the gradient of a sample's rows, in place of the whole decoder's |
//! | [`evaluation`](LossOptions::evaluation) | no gradients (one product instead of three), no dropout |
//!
//! Options of the model are in its configuration, for training and decoding alike: biases, activation, dropout, logit
//! scale, softcap ([`SoftmaxConfig`], [`MixtureConfig`]). To fine-tune a model, a head takes a low-rank adapter of its
//! decoder ([`Head::with_adapter`]); a frozen decoder ([`Head::with_frozen_decoder`]), or any operand that does not depend
//! on a variable, costs no product for its gradient.
//!
//! # Threads
//!
//! On the CPU the kernels run in rayon's current pool: the global one, with `RAYON_NUM_THREADS` threads or one for each
//! core, or the one whose `install` calls them. With the default budget, results do not depend on the number of threads, to
//! the last bit. A budget of your own ([`with_workspace_bytes`](LossOptions::with_workspace_bytes)) is shared by the threads:
//! their number then decides how many positions a chunk has, and losses and gradients differ by rounding.
//!
//! ```
//! # use candle_core::{DType, Device, Tensor};
//! # use mos_head::{LossOptions, Mixture};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let zeros = |rows| Tensor::zeros((rows, 16), DType::F32, &Device::Cpu);
//! # let mixture = Mixture::new(&zeros(8)?.unsqueeze(1)?, None, &zeros(1000)?, None)?;
//! let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build()?;
//! let plan = pool.install(|| mixture.plan(&LossOptions::default()))?;
//! assert_eq!(plan.threads, 3);
//! # Ok(())
//! # }
//! ```
//!
//! candle's own operations have a pool of their own (`CANDLE_NUM_THREADS`). After each operation its threads spin for
//! 25,000 iterations before they sleep; where both pools share few cores, that delays the kernels. candle 0.11.1 reads
//! the limit when it starts these threads, from `CANDLE_BARRIER_POOL_SPIN_LIMIT` alone: a program sets it to `100` before
//! its first tensor.
//!
//! # Features
//!
//! | feature | |
//! |---|---|
//! | `mkl`, `accelerate` | candle's own, for the products outside the mixture |
//! | `serde` | `Serialize` and `Deserialize` for configurations |
//! | `distributed` | heads whose vocabulary is cut among ranks, with their checkpoints, and ranks with texts of their own, in [`distributed`] |
//! | `mpi` | `distributed`, and its engine over MPI |
//! | `nccl` | `distributed`, and its engine over NCCL, for ranks with an NVIDIA GPU each; run on an emulated driver, not yet on a GPU |
//! | `cuda` | kernels for NVIDIA GPUs (f32, f16, bf16); run on an emulated driver, not yet on a GPU |
//! | `metal` | kernels for Apple GPUs (f32, f16, bf16); run on an emulated device, not yet on a GPU |
//!
//! This crate enables the feature `x86-v4` of the `gemm` crate. Features are shared by the whole dependency graph:
//! candle's own products then use AVX-512 too, where the machine has it.
//!
//! # Gradients that candle drops
//!
//! Fused operations of candle have no backward pass and detach their result without a word: an optimizer leaves the
//! variables before them as they are. Models of candle-transformers use them. [`Loss::check_gradients`], called once
//! after the first backward pass, is an error that names the variables without a gradient. In `candle_nn`:
//!
//! | detaches its result | has a backward pass |
//! |---|---|
//! | `RmsNorm::forward` and `ops::rms_norm`, of a contiguous tensor | `RmsNorm::forward_diff`, `ops::rms_norm_slow` |
//! | `LayerNorm::forward` with a bias, of a contiguous tensor; `ops::layer_norm` | `ops::layer_norm_slow` |
//! | `rotary_emb::rope`, `rope_i`, `rope_thd` | `rotary_emb::rope_slow`, `rope_i_slow` |
//! | `ops::softmax_last_dim`, `ops::sdpa` | `ops::softmax`, between matrix products |
//!
//! # References
//!
//! - Zhilin Yang, Zihang Dai, Ruslan Salakhutdinov, William W. Cohen: *Breaking the Softmax Bottleneck: A High-Rank RNN
//!   Language Model*. ICLR 2018, arXiv 1711.03953.

#![warn(unreachable_pub)]

mod public;

pub mod distributed;

mod head_config;

pub mod two_level;

mod allowed;

mod heads;

mod decoder;
mod decoding;
mod mixture;

mod loss;
mod scores;

mod backend;

mod tensors;

mod error;

pub use backend::plan::{Kernels, Plan};
pub use error::{Error, OptionName, Result};
pub use head_config::HeadConfig;
pub use heads::{
    ContextActivation, Head, MixtureConfig, MixtureLayer, MixtureOfContexts, MixtureOfSoftmaxes, MixtureTensors,
    OutputLayer, SoftmaxConfig, SoftmaxHead,
};
pub use loss::{GradientSum, Loss, LossOptions, Precision, Reduction};
pub use mixture::{linear_cross_entropy, Mixture};
pub use public::{decode, distill, parts, policy, sampled, score, sets};
pub use tensors::dropout::DropoutMasks;
