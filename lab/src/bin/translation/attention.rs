//! Attention of Luong et al. (2015): "general" scores, and the attentional state tanh(W [context; hidden]).

use candle_core::{Module, Tensor, D};
use candle_nn::{linear_no_bias, ops::softmax, Linear, VarBuilder};
use lab::Result;

pub(crate) struct Attention {
    score: Linear,
    combine: Linear,
}

/// The attended sequence: the encoder's outputs and their keys, each [batch, positions, hidden], and its mask.
#[derive(Clone)]
pub(crate) struct Memory {
    values: Tensor,
    keys: Tensor,
    mask: Tensor,
}

impl Attention {
    pub(crate) fn new(hidden: usize, vb: VarBuilder) -> Result<Self> {
        let score = linear_no_bias(hidden, hidden, vb.pp("score"))?;
        Ok(Self { score, combine: linear_no_bias(2 * hidden, hidden, vb.pp("combine"))? })
    }

    pub(crate) fn memory(&self, values: Tensor, mask: Tensor) -> Result<Memory> {
        Ok(Memory { keys: self.score.forward(&values)?, values, mask })
    }

    /// Hidden states [batch, steps, hidden] -> attentional states of the same shape.
    pub(crate) fn forward(&self, hidden: &Tensor, memory: &Memory) -> Result<Tensor> {
        let scores = hidden.matmul(&memory.keys.transpose(1, 2)?)?.broadcast_add(&memory.mask)?;
        let context = softmax(&scores, D::Minus1)?.matmul(&memory.values)?;
        Ok(self.combine.forward(&Tensor::cat(&[&context, hidden], D::Minus1)?)?.tanh()?)
    }
}

impl Memory {
    /// The memories of these rows.
    pub(crate) fn select(&self, rows: &Tensor) -> Result<Self> {
        let select = |tensor: &Tensor| tensor.index_select(rows, 0);
        Ok(Self { values: select(&self.values)?, keys: select(&self.keys)?, mask: select(&self.mask)? })
    }
}
