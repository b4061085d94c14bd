//! Attention of Luong et al. (2015): "general" scores, and the attentional state tanh(W [context; hidden]).

use crate::Result;
use candle_core::{Module, Tensor, D};
use candle_nn::{linear_no_bias, ops::softmax, Linear, VarBuilder};

/// This is attention over a sequence.
pub struct Attention {
    score: Linear,
    combine: Linear,
}

/// A memory is the attended sequence: the encoder's outputs and their keys, each `[batch, positions, hidden]`, and its
/// mask.
#[derive(Clone)]
pub struct Memory {
    values: Tensor,
    keys: Tensor,
    mask: Tensor,
}

impl Attention {
    /// Makes attention of states of `hidden` elements, with variables `score.weight` and `combine.weight`.
    pub fn new(hidden: usize, vb: VarBuilder) -> Result<Self> {
        let score = linear_no_bias(hidden, hidden, vb.pp("score"))?;
        Ok(Self { score, combine: linear_no_bias(2 * hidden, hidden, vb.pp("combine"))? })
    }

    /// Returns the memory of `values`; the mask is added to the scores, so that minus a large number hides a position.
    pub fn memory(&self, values: Tensor, mask: Tensor) -> Result<Memory> {
        Ok(Memory { keys: self.score.forward(&values)?, values, mask })
    }

    /// Computes attentional states from hidden states `[batch, steps, hidden]`, in the same shape.
    pub fn forward(&self, hidden: &Tensor, memory: &Memory) -> Result<Tensor> {
        let scores = hidden.matmul(&memory.keys.transpose(1, 2)?)?.broadcast_add(&memory.mask)?;
        let context = softmax(&scores, D::Minus1)?.matmul(&memory.values)?;
        Ok(self.combine.forward(&Tensor::cat(&[&context, hidden], D::Minus1)?)?.tanh()?)
    }
}

impl Memory {
    /// Returns the memories of these rows.
    pub fn select(&self, rows: &Tensor) -> Result<Self> {
        let select = |tensor: &Tensor| tensor.index_select(rows, 0);
        Ok(Self { values: select(&self.values)?, keys: select(&self.keys)?, mask: select(&self.mask)? })
    }
}
