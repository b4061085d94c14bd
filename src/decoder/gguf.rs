//! A decoder with the quantised rows of a GGUF file. Its results are those of the dequantised rows in f32, and no copy
//! of the rows is made.

use std::sync::Arc;

use candle_core::quantized::QTensor;
use candle_core::Tensor;

use super::quantised::check_on_cpu;
use super::{Decoder, WeightRows};
use crate::backend::logit_function::LogitFunction;
use crate::backend::quantised::QuantisedMatrix;
use crate::error::Result;
use crate::tensors::checks::{check_bias, check_vocab};

impl Decoder {
    /// Makes a decoder with the rows of a quantised tensor, such as `output.weight` of a GGUF file, or
    /// `token_embd.weight` if the model ties its embedding. The rows are read where the tensor lies, and shared with
    /// whatever else holds it.
    ///
    /// # Shapes
    ///
    /// - weight: `[vocab, d]`; Q8_0, Q6_K, Q5_K, Q4_K, Q4_0, F16, BF16 or F32
    /// - bias: `[vocab]`
    ///
    /// # Errors
    ///
    /// If the shapes do not match, the type is another (`QTensor::dequantize` makes a tensor of it), the tensor holds
    /// more or fewer bytes than its shape has, or it is not on the CPU. On a GPU, `QTensor::dequantize(&device)` makes
    /// a tensor for [`Decoder::from_tensors`].
    ///
    /// # Numerics
    ///
    /// Results are those of [`Decoder::weight`], the dequantised rows in f32, up to the rounding of f32 products:
    /// neither contexts nor sums are rounded to fewer bits. Contexts in f16 and bf16 are widened to f32, and f64 is an
    /// error. The rows are constants: hidden states, priors, the bias and an adapter get gradients, and the rows get
    /// none.
    ///
    /// [`Precision::Bf16Products`](crate::Precision::Bf16Products),
    /// [`LossOptions::with_decoder_rows`](crate::LossOptions::with_decoder_rows) and a vocabulary that ranks share are
    /// [`Error::Unsupported`](crate::Error::Unsupported).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use candle_core::quantized::{GgmlDType, QTensor};
    /// use candle_core::{Device, Tensor};
    /// use mos_head::parts::Decoder;
    /// use mos_head::Distributions;
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Tensor::randn(0f32, 0.1, (1000, 256), &Device::Cpu)?;
    /// let weight = Arc::new(QTensor::quantize(&weight, GgmlDType::Q6K)?); // a file has one already
    /// let decoder = Decoder::from_quantised(weight, None)?;
    /// let contexts = Tensor::randn(0f32, 1., (2, 1, 256), &Device::Cpu)?; // 2 positions, K = 1
    /// let best = decoder.mixture(&contexts, None)?.top_k(5)?;
    /// assert_eq!(best.token_ids.dims(), [2, 5]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_quantised(weight: Arc<QTensor>, bias: Option<Tensor>) -> Result<Self> {
        let matrix = QuantisedMatrix::new("decoder.weight", weight)?;
        let vocab_size = matrix.dims()[0];
        check_vocab(vocab_size)?;
        if let Some(bias) = &bias {
            check_bias("decoder.bias", bias, vocab_size)?;
            check_on_cpu("decoder.bias", bias)?;
        }
        let (rows, logit_function) = (WeightRows::Quantised(matrix), LogitFunction::Identity);
        Ok(Decoder { rows, adapter: None, bias, logit_scale: 1.0, logit_function })
    }
}
