//! The scores of a mixture: log-probabilities of token ids, the entropy and the mass outside the ids, with gradients.

use candle_core::{DType, Tensor};

use super::node::{self, needs_grad};
use super::Mixture;
use crate::backend;
use crate::backend::objective::Scored;
use crate::backend::operands::{accumulation_dtype, NeedsGrad};
use crate::error::Result;
use crate::loss::{LossOptions, Reduction};
use crate::scores::{candidate_count, ScoreOptions, Scores};
use crate::tensors::autograd::Leaf;

impl Mixture {
    /// Computes the log-probability of given token ids at each position and, if the options ask for them, the entropy,
    /// the mass outside the ids, and whether an id is the most probable of all, from one product and without a tensor
    /// of the vocabulary's size. The scores are differentiable: the backward pass takes three products.
    ///
    /// # Shapes
    ///
    /// - token_ids: `[..]`, the leading dimensions of the contexts, or `[.., n]` for `n` candidates at each position;
    ///   u8, u32 or i64
    /// - returns log-probabilities and `is_argmax` of the shape of `token_ids`, the entropy `[..]`, and the logarithm
    ///   of the mass outside `[..]`, in nats
    ///
    /// # Errors
    ///
    /// The errors of the ids are those of the targets of [`Mixture::loss`]. It is an error too if an option is out of
    /// range.
    pub fn score(&self, token_ids: &Tensor, options: &ScoreOptions) -> Result<Scores> {
        options.validate()?;
        let n = candidate_count("token_ids", token_ids, &self.leading)?;
        let is_plain = !options.entropy && !options.outside && options.temperature == 1.0;
        if token_ids.dims() == self.leading && is_plain {
            let loss_options = LossOptions::new().with_reduction(Reduction::None).with_correct(options.is_argmax);
            let loss_options = LossOptions { workspace_bytes: options.workspace_bytes, ..loss_options };
            let loss = self.loss(token_ids, &loss_options).map_err(|error| error.renamed("targets", "token_ids"))?;
            let leaves = loss.leaves().collect();
            // `neg` would make a minus zero.
            let log_prob = loss.value.affine(-1.0, 0.0)?;
            return Ok(Scores { log_prob, entropy: None, log_outside: None, is_argmax: loss.is_correct, leaves });
        }
        let operands = &self.operands;
        let rows = token_ids.reshape((operands.sizes.positions, n))?;
        let scored = options.scored(rows);
        let plan = |needs_grad| backend::plan(operands, scored.task(operands, needs_grad)?, options.workspace_bytes);
        // The backward pass must fit the budget too.
        let (gradients, value) = (plan(needs_grad(operands))?, plan(NeedsGrad::default())?);
        let (mut scores, is_argmax) = backend::scores(&value, &scored)?;
        let is_argmax = is_argmax.map(|is_argmax| is_argmax.reshape(token_ids.shape())).transpose()?;
        let scored = Scored { needs_argmax: false, ..scored };
        if gradients.needs_grad.any() {
            scores = node::attach_scores(scores, gradients, scored)?;
        }
        let variable = Some(&self.operands.weight).filter(|weight| weight.is_variable());
        let leaves = variable.map(|weight| Leaf { node: scores.id(), variable: weight.clone() }).into_iter().collect();
        Ok(Scores { is_argmax, leaves, ..Scores::from_columns(&scores, token_ids.dims(), &self.leading, options)? })
    }

    /// Computes the log-probability of given token ids at each position, f32 (f64 for heads in f64). It is
    /// differentiable; see [`Mixture::score`].
    ///
    /// # Shapes
    ///
    /// - token_ids: `[..]`, the leading dimensions of the contexts, or `[.., n]`; u8, u32 or i64
    /// - returns the shape of `token_ids`
    ///
    /// # Errors
    ///
    /// The errors are those of the targets of [`Mixture::loss`].
    pub fn log_prob(&self, token_ids: &Tensor) -> Result<Tensor> {
        Ok(self.score(token_ids, &ScoreOptions::new())?.log_prob)
    }

    /// Computes the entropy of each position's distribution, `-sum_v P(v) log P(v)` in nats, f32 (f64 for heads in
    /// f64). It is differentiable; see [`Mixture::score`].
    ///
    /// # Shapes
    ///
    /// - returns `[..]`
    ///
    /// # Errors
    ///
    /// If there are no kernels for the device.
    pub fn entropy(&self) -> Result<Tensor> {
        let no_ids = Tensor::zeros([&self.leading[..], &[0]].concat(), DType::U32, self.operands.contexts.device())?;
        let scores = self.score(&no_ids, &ScoreOptions::new().with_entropy(true))?;
        match scores.entropy {
            Some(entropy) => Ok(entropy),
            None => {
                let dtype = accumulation_dtype("contexts", self.operands.contexts.dtype())?;
                Ok(Tensor::zeros(self.leading.as_slice(), dtype, self.operands.contexts.device())?)
            }
        }
    }
}
