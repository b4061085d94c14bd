//! Tensors of GGUF files, and heads over them and over the same rows in f32 or f64.

use std::io::Cursor;
use std::sync::Arc;

use candle_core::quantized::gguf_file::{self, Content};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use mos_head::parts::{Contexts, Decoder};
use mos_head::{ContextActivation, Head, MixtureOfSoftmaxes, MixtureTensors, Result, SoftmaxHead};

use super::values::uniform;

/// The types in blocks.
pub const BLOCKS: [GgmlDType; 5] = [GgmlDType::Q8_0, GgmlDType::Q6K, GgmlDType::Q5K, GgmlDType::Q4K, GgmlDType::Q4_0];

/// All types that a decoder reads.
pub const TYPES: [GgmlDType; 8] = [
    GgmlDType::Q8_0,
    GgmlDType::Q6K,
    GgmlDType::Q5K,
    GgmlDType::Q4K,
    GgmlDType::Q4_0,
    GgmlDType::F16,
    GgmlDType::BF16,
    GgmlDType::F32,
];

/// A tensor of random numbers, written to a GGUF file and read again.
pub fn quantised(dtype: GgmlDType, rows: usize, columns: usize, seed: u64) -> Result<Arc<QTensor>> {
    let tensor = QTensor::quantize(&uniform(&[rows, columns], 0.3, seed)?.to_dtype(DType::F32)?, dtype)?;
    let mut file = Cursor::new(Vec::new());
    gguf_file::write(&mut file, &[], &[("output.weight", &tensor)])?;
    file.set_position(0);
    let content = Content::read(&mut file)?;
    let read = content.tensor(&mut file, "output.weight", &Device::Cpu)?;
    assert_eq!((read.dtype(), read.shape()), (dtype, tensor.shape()));
    Ok(Arc::new(read))
}

/// The rows in f32, as candle dequantises them.
pub fn rows(tensor: &QTensor) -> Result<Tensor> {
    Ok(tensor.dequantize(&Device::Cpu)?)
}

/// The parameters of heads beside the decoder's rows.
pub struct Parameters {
    pub weight: Arc<QTensor>,
    pub bias: Tensor,
    /// `[K, hidden]`, `[K * d, hidden]` and `[K * d]`
    projection: [Tensor; 3],
}

impl Parameters {
    /// Random parameters of a mixture of three softmaxes, and of a softmax whose hidden states are the contexts.
    pub fn random(dtype: GgmlDType, vocab: usize, d: usize) -> Result<Self> {
        let tensor = |shape: &[usize], bound, seed| uniform(shape, bound, seed)?.to_dtype(DType::F32);
        let projection =
            [tensor(&[3, HIDDEN], 1.0, 11)?, tensor(&[3 * d, HIDDEN], 0.5, 12)?, tensor(&[3 * d], 0.5, 13)?];
        Ok(Parameters { weight: quantised(dtype, vocab, d, 7)?, bias: tensor(&[vocab], 0.5, 14)?, projection })
    }

    /// The softmax over the quantised rows.
    pub fn softmax(&self) -> Result<SoftmaxHead> {
        SoftmaxHead::from_quantised(self.weight.clone(), Some(self.bias.clone()))
    }

    /// The softmax over the dequantised rows, in this dtype.
    pub fn dense_softmax(&self, dtype: DType) -> Result<SoftmaxHead> {
        SoftmaxHead::from_tensors(rows(&self.weight)?.to_dtype(dtype)?, Some(self.bias.to_dtype(dtype)?))
    }

    /// The mixture over the dequantised rows, in this dtype.
    pub fn dense_mixture(&self, dtype: DType) -> Result<MixtureOfSoftmaxes> {
        let [prior_weight, latent_weight, latent_bias] = &self.projection;
        let tensors = MixtureTensors {
            prior_weight: prior_weight.to_dtype(dtype)?,
            prior_bias: None,
            latent_weight: latent_weight.to_dtype(dtype)?,
            latent_bias: latent_bias.to_dtype(dtype)?,
            decoder_weight: rows(&self.weight)?.to_dtype(dtype)?,
            decoder_bias: Some(self.bias.to_dtype(dtype)?),
        };
        MixtureOfSoftmaxes::from_tensors(tensors, ContextActivation::Tanh)
    }

    /// The mixture over the quantised rows.
    pub fn mixture(&self) -> Result<Head<Contexts>> {
        let projection = self.dense_mixture(DType::F32)?.projection().clone();
        Head::from_parts(projection, Decoder::from_quantised(self.weight.clone(), Some(self.bias.clone()))?)
    }
}

/// The size of a hidden state of the mixtures.
pub const HIDDEN: usize = 6;
