//! Moves numbers between the device and the host, where token ids are chosen.

use candle_core::{DType, Device, Shape, Tensor, WithDType, D};

use crate::error::Result;

/// Makes a tensor of values of the host. Empty ones are special, because candle's Metal backend does not allocate empty
/// buffers.
pub(crate) fn to_device<T: WithDType>(values: Vec<T>, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    if values.is_empty() {
        Ok(Tensor::zeros(shape, T::DTYPE, device)?)
    } else {
        Ok(Tensor::from_vec(values, shape, device)?)
    }
}

/// Makes a tensor of values of the host, which the host rounds to `dtype`, because not every device has f64.
pub(crate) fn to_device_as(values: Vec<f64>, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    if values.is_empty() {
        Ok(Tensor::zeros(shape, dtype, device)?)
    } else {
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
    }
}

/// Makes a vector of values of the host, as [`to_device_as`] does.
pub(crate) fn vector(values: Vec<f64>, dtype: DType, device: &Device) -> Result<Tensor> {
    let n = values.len();
    to_device_as(values, &[n], dtype, device)
}

/// Makes a number a tensor with the dtype and the device of another one. candle's `broadcast_maximum` and
/// `broadcast_minimum` take it. (Its `maximum`, `minimum` and `clamp` are generic, and would compile their operation
/// for each dtype once more.)
pub(crate) fn number_like(like: &Tensor, number: f64) -> Result<Tensor> {
    to_device_as(vec![number], &[], like.dtype(), like.device())
}

/// Selects the rows of these indices `[n]`. Differentiable. (candle's `index_select` takes neither empty tensors nor, on
/// the CPU, strided ones.)
pub(crate) fn select_rows(tensor: &Tensor, indices: &Tensor) -> Result<Tensor> {
    match indices.elem_count() {
        0 => Ok(tensor.narrow(0, 0, 0)?),
        _ => Ok(tensor.contiguous()?.index_select(indices, 0)?),
    }
}

/// Selects some of the positions, which ascend, of a tensor `[.., n]`: `[positions, n]`. If they are all, nothing is
/// copied. Differentiable.
pub(crate) fn select_positions(tensor: &Tensor, positions: &[u32]) -> Result<Tensor> {
    let (n, leading) = tensor.dims().split_last().unwrap_or((&1, &[]));
    let rows = tensor.reshape((leading.iter().product::<usize>(), *n))?;
    if positions.len() == rows.dim(0)? {
        return Ok(rows);
    }
    select_rows(&rows, &to_device(positions.to_vec(), positions.len(), rows.device())?)
}

/// Makes the numbers of all `n` positions from those of some positions, `[places]`: the others are zero.
/// Differentiable.
pub(crate) fn spread(numbers: &Tensor, places: &[u32], n: usize) -> Result<Tensor> {
    // Behind the numbers is a zero, which the other positions select.
    let mut sources = vec![places.len() as u32; n];
    places.iter().zip(0..).for_each(|(&place, source)| sources[place as usize] = source);
    let zero = Tensor::zeros(1, numbers.dtype(), numbers.device())?;
    Ok(Tensor::cat(&[numbers, &zero], 0)?.index_select(&Tensor::new(sources, numbers.device())?, 0)?)
}

/// Sums all elements, in f64 on the CPU, where candle adds numbers in f32 in a few long sums; not every GPU has this dtype.
/// Differentiable; the result has the dtype of the elements.
pub(crate) fn sum_all(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.to_dtype(sum_dtype(tensor))?.sum_all()?.to_dtype(tensor.dtype())?)
}

/// Sums each row, as [`sum_all`] does.
pub(crate) fn sum_rows(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.to_dtype(sum_dtype(tensor))?.sum(D::Minus1)?.to_dtype(tensor.dtype())?)
}

/// Returns the dtype in which the elements of a tensor are added.
pub(crate) fn sum_dtype(tensor: &Tensor) -> DType {
    if tensor.device().is_cpu() {
        DType::F64
    } else {
        tensor.dtype()
    }
}

/// Returns the dtype in which the numbers of a tensor are computed: f64 for f64, otherwise f32.
pub(crate) fn accurate_dtype(tensor: &Tensor) -> DType {
    if tensor.dtype() == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

/// Reads a matrix on the host, in f64.
pub(crate) fn read_matrix(tensor: &Tensor) -> Result<Vec<Vec<f64>>> {
    Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec2()?)
}
