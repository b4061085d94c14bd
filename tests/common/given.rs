//! An output layer of given log-probabilities, for what is composed from them.

use candle_core::{DType, Device, Tensor};
use mos_head::{Loss, LossOptions, OutputLayer, Result};

/// Log-probabilities `[positions, vocab]`, whose hidden states are their places.
#[derive(Debug)]
pub struct Given(pub Tensor);

impl OutputLayer for Given {
    fn hidden_size(&self) -> usize {
        1
    }
    fn vocab_size(&self) -> usize {
        self.0.dims()[1]
    }
    fn loss(&self, _: &Tensor, _: &Tensor, _: &LossOptions) -> Result<Loss> {
        unreachable!("it is not asked for")
    }
    fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
        let places = hidden.flatten_all()?.to_dtype(DType::U32)?;
        let rows = match places.elem_count() {
            0 => self.0.narrow(0, 0, 0)?,
            _ => self.0.index_select(&places, 0)?,
        };
        Ok(rows.reshape([&hidden.dims()[..hidden.rank() - 1], &[self.vocab_size()]].concat())?)
    }
}

/// The hidden states of all log-probabilities, `[.., 1]`.
pub fn places(shape: &[usize]) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    Ok(Tensor::from_vec((0..n).map(|i| i as f64).collect(), shape, &Device::Cpu)?)
}
