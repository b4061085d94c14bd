//! A frozen linear layer with the quantised matrix of a GGUF file.

use std::sync::Arc;

use candle_core::quantized::QTensor;
use candle_core::{Module, Tensor};

use super::quantised::{check_on_cpu, check_operand, HIDDEN};
use crate::backend::frozen_linear::frozen_linear;
use crate::backend::quantised::QuantisedMatrix;
use crate::error::{Error, Result};
use crate::tensors::checks::{check_bias, check_elements};

/// A frozen linear layer with a quantised matrix, `y = x W^T + b`: what candle's `QMatMul` is, with a gradient of its
/// input. A trunk of these layers trains what is before or beside them, such as low-rank adapters (Dettmers, Pagnoni,
/// Holtzman, Zettlemoyer: QLoRA: Efficient Finetuning of Quantized LLMs. NeurIPS 2023, arXiv 2305.14314).
///
/// The matrix is read where the tensor lies, and gets no gradient. The input is not rounded, unlike that of `QMatMul`,
/// whose products round it to 8 bits and have no backward pass.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
///
/// use candle_core::quantized::{GgmlDType, QTensor};
/// use candle_core::{Device, Module, Tensor, Var};
/// use mos_head::parts::QuantisedLinear;
///
/// # fn main() -> mos_head::Result<()> {
/// let weight = Tensor::randn(0f32, 0.1, (96, 64), &Device::Cpu)?;
/// let layer = QuantisedLinear::new(Arc::new(QTensor::quantize(&weight, GgmlDType::Q8_0)?), None)?;
/// let input = Var::randn(0f32, 1., (2, 7, 64), &Device::Cpu)?; // [batch, seq, inputs]
/// let output = layer.forward(&input)?;
/// assert_eq!(output.dims(), [2, 7, 96]);
/// let gradients = output.sqr()?.sum_all()?.backward()?;
/// assert_eq!(gradients.get(&input).unwrap().dims(), [2, 7, 64]); // QMatMul has none
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct QuantisedLinear {
    matrix: QuantisedMatrix,
    bias: Option<Tensor>,
}

impl QuantisedLinear {
    /// Makes a layer with the matrix of a quantised tensor.
    ///
    /// # Shapes
    ///
    /// - weight: `[outputs, inputs]`; Q8_0, Q6_K, Q5_K, Q4_K, Q4_0, F16, BF16 or F32
    /// - bias: `[outputs]`
    ///
    /// # Errors
    ///
    /// If the shapes do not match, the type is another, the tensor holds more or fewer bytes than its shape has, or it
    /// is not on the CPU.
    pub fn new(weight: Arc<QTensor>, bias: Option<Tensor>) -> Result<Self> {
        let matrix = QuantisedMatrix::new("weight", weight)?;
        if let Some(bias) = &bias {
            check_bias("bias", bias, matrix.dims()[0])?;
            check_on_cpu("bias", bias)?;
        }
        Ok(QuantisedLinear { matrix, bias })
    }

    /// Returns the quantised tensor.
    pub fn weight(&self) -> &Arc<QTensor> {
        self.matrix.tensor()
    }

    /// Returns the bias, `[outputs]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Computes the layer, in the dtype of its input.
    fn apply(&self, input: &Tensor) -> Result<Tensor> {
        let &[_, inputs] = self.matrix.dims();
        let leading = match input.dims() {
            [leading @ .., last] if *last == inputs => leading,
            dims => return Err(Error::shape("input", format!("[.., {inputs}]"), dims)),
        };
        check_operand("input", input, &HIDDEN)?;
        check_elements("input", leading)?;
        frozen_linear(input, self.bias.as_ref(), &self.matrix)
    }
}

impl Module for QuantisedLinear {
    /// Computes the layer for an input `[.., inputs]` in f32, f16 or bf16, in the dtype of the input; sums are in f32.
    fn forward(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.apply(input)?)
    }
}
