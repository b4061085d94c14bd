//! Policy losses: PPO and GRPO over sampled tokens, with their gradients.
//!
//! [`PolicyBatch`] has the tokens with their advantages, and as far as the options need them the log-probabilities
//! under the policy that drew the tokens, those under a reference, and a mask. [`PolicyOptions`] are the clipping, the
//! divergence from the reference, the entropy bonus and the temperature; [`PolicyNormalization`] says what the sum of
//! all tokens is divided by. Begin with [`OutputLayer::policy_loss`](crate::OutputLayer::policy_loss), which takes
//! them: for a head that is one mixture, the loss and its gradients cost three products.
//!
//! # References
//!
//! - PPO: Schulman, Wolski, Dhariwal, Radford, Klimov: *Proximal Policy Optimization Algorithms*. 2017, arXiv
//!   1707.06347.
//! - GRPO: Shao et al.: *DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models*. 2024,
//!   arXiv 2402.03300.

pub use crate::scores::policy::{PolicyBatch, PolicyNormalization, PolicyOptions};
