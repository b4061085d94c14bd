//! A quantised matrix, whose rows are read where the tensor of a file lies.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};

use crate::error::{Error, OptionName, Result};
use crate::tensors::checks::{check_elements, check_sizes};

/// A matrix `[rows, columns]` on the CPU, in blocks of a few bits for each weight or in f16, bf16 or f32. Its products
/// are computed in f32, with the numbers that candle's `dequantize` returns.
#[derive(Clone, Debug)]
pub(crate) struct QuantisedMatrix {
    tensor: Arc<QTensor>,
    dims: [usize; 2],
}

/// The types of numbers that rows are read in.
const TYPES: &str = "Q8_0, Q6K, Q5K, Q4K, Q4_0, F16, BF16 or F32; `QTensor::dequantize` makes a tensor of another type";

impl QuantisedMatrix {
    /// Takes a tensor that `argument` names as a matrix.
    ///
    /// # Errors
    ///
    /// If it is not a matrix, is on a GPU, is of a type without kernels, or holds more or fewer bytes than its shape
    /// has.
    pub(crate) fn new(argument: &'static str, tensor: Arc<QTensor>) -> Result<Self> {
        let &[rows, columns] = tensor.shape().dims() else {
            return Err(Error::shape(argument, "[rows, columns]", tensor.shape().dims()));
        };
        let elements = check_elements(argument, &[rows, columns])?;
        check_sizes(&[(argument, elements)])?;
        if !tensor.device().is_cpu() {
            return Err(Self::unsupported_device());
        }
        let dtype = tensor.dtype();
        match dtype {
            GgmlDType::Q8_0 | GgmlDType::Q6K | GgmlDType::Q5K | GgmlDType::Q4K | GgmlDType::Q4_0 => {}
            GgmlDType::F16 | GgmlDType::BF16 | GgmlDType::F32 => {}
            other => return Err(Error::config(argument, TYPES, format!("{other:?}"))),
        }
        let (expected, got) = (elements / dtype.block_size() * dtype.type_size(), tensor.storage_size_in_bytes());
        if expected != got || !columns.is_multiple_of(dtype.block_size()) {
            let expected = format!("{expected} bytes, the size of {:?} in {dtype:?}", [rows, columns]);
            return Err(Error::config(argument, expected, format!("{got} bytes")));
        }
        Ok(QuantisedMatrix { tensor, dims: [rows, columns] })
    }

    /// Returns the shape.
    pub(crate) fn dims(&self) -> &[usize; 2] {
        &self.dims
    }

    /// Returns the tensor.
    pub(crate) fn tensor(&self) -> &Arc<QTensor> {
        &self.tensor
    }

    /// Returns the bytes of the tensor, where they lie.
    pub(crate) fn bytes(&self) -> Result<&[u8]> {
        match self.tensor.data()? {
            Cow::Borrowed(bytes) => Ok(bytes),
            Cow::Owned(_) => Err(Self::unsupported_device()),
        }
    }

    /// Returns whether the products read copies of the rows, in f32.
    pub(crate) fn is_copied(&self) -> bool {
        self.tensor.dtype() != GgmlDType::F32
    }

    /// Returns a copy of all rows in f32.
    pub(crate) fn dequantised(&self) -> Result<Tensor> {
        Ok(self.tensor.dequantize(&Device::Cpu)?)
    }

    /// Returns a copy of the rows of these ids `[n]`, `[n, columns]` in f32.
    pub(crate) fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        Ok(self.tensor.embedding(ids)?)
    }

    /// Copies the rows of these ids, which are below the number of rows, as a matrix of the same type.
    pub(crate) fn select(&self, ids: &[u32]) -> Result<Self> {
        let [rows, columns] = self.dims;
        let bytes = self.bytes()?;
        let row_bytes = bytes.len() / rows;
        // candle takes bytes that are aligned as numbers of four bytes.
        let mut selected: Vec<u8> = Vec::with_capacity(ids.len() * row_bytes + size_of::<f32>());
        let first = selected.as_ptr().align_offset(align_of::<f32>());
        selected.resize(first, 0);
        ids.iter().for_each(|&id| selected.extend_from_slice(&bytes[id as usize * row_bytes..][..row_bytes]));
        let storage = QStorage::from_data(Cow::Borrowed(&selected[first..]), &Device::Cpu, self.tensor.dtype())?;
        Ok(QuantisedMatrix {
            tensor: Arc::new(QTensor::new(storage, (ids.len(), columns))?),
            dims: [ids.len(), columns],
        })
    }

    /// Returns the error of a device other than the CPU.
    pub(crate) fn unsupported_device() -> Error {
        let head = "a GPU, on which `QTensor::dequantize(&device)` makes a tensor of the rows";
        Error::Unsupported { option: OptionName::QuantisedRows, head }
    }
}
