//! Checks of arguments, which come before any work: each error names the argument, the expected value and the actual
//! one.

use candle_core::{DType, Tensor, D};

use crate::error::{Error, Result};

/// The largest number of elements of a tensor: 2^40, eight TiB in f64. On a 32-bit machine the addresses allow fewer.
const MAX_ELEMENTS: usize = match 1usize.checked_shl(40) {
    Some(most) => most,
    None => isize::MAX as usize / 8,
};

/// The largest number of token ids: they are u32, and candle reads the largest u32 as no index.
const MAX_IDS: usize = u32::MAX as usize;

/// Checks that the last dimension, the dtype and the device of hidden states match the parameters of a head. An error
/// says by `compared` what the last dimension is compared with.
pub(crate) fn check_hidden(
    hidden: &Tensor,
    size: usize,
    compared: impl FnOnce() -> String,
    weight: &Tensor,
) -> Result<()> {
    check_hidden_size(hidden, size, compared)?;
    check_alike("hidden", hidden, "the head's parameters", weight)
}

/// Checks the last dimension of hidden states.
pub(crate) fn check_hidden_size(hidden: &Tensor, size: usize, compared: impl FnOnce() -> String) -> Result<()> {
    if hidden.dims().last() != Some(&size) {
        return Err(Error::shape("hidden", format!("[.., {size}], as {}", compared()), hidden.dims()));
    }
    check_elements("hidden", hidden.dims())?;
    Ok(())
}

/// Checks that a tensor has the dtype of another, and is on its device.
pub(crate) fn check_alike(argument: &'static str, tensor: &Tensor, other_name: &str, other: &Tensor) -> Result<()> {
    if tensor.dtype() != other.dtype() {
        let expected = format!("{:?}, as {other_name}", other.dtype());
        return Err(Error::DType { argument, expected, got: tensor.dtype() });
    }
    check_device(argument, tensor, other)
}

/// Checks that a tensor is on the device of another.
pub(crate) fn check_device(argument: &'static str, tensor: &Tensor, other: &Tensor) -> Result<()> {
    if tensor.device().same_device(other.device()) {
        return Ok(());
    }
    let location = |tensor: &Tensor| format!("{:?}", tensor.device().location());
    Err(Error::Device { argument, expected: location(other), got: location(tensor) })
}

/// Checks that targets, or other token ids, have these dimensions and an integer dtype.
pub(crate) fn check_targets(argument: &'static str, targets: &Tensor, dims: &[usize]) -> Result<()> {
    if targets.dims() != dims {
        return Err(Error::shape(argument, format!("{dims:?}"), targets.dims()));
    }
    match targets.dtype() {
        DType::U8 | DType::U32 | DType::I64 => Ok(()),
        got => Err(Error::DType { argument, expected: "u8, u32 or i64".into(), got }),
    }
}

/// Returns the leading dimensions of hidden states, whose product is at most the number of elements of a tensor.
pub(crate) fn leading(hidden: &Tensor) -> Result<&[usize]> {
    check_elements("hidden", hidden.dims())?;
    match hidden.dims() {
        [leading @ .., _] => Ok(leading),
        [] => Err(Error::shape("hidden", "[.., hidden]", &[])),
    }
}

/// Checks that weights of positions or classes, log-priors or log-probabilities have these dimensions, a float dtype
/// and the device of another tensor.
pub(crate) fn check_weights(argument: &'static str, weights: &Tensor, dims: &[usize], other: &Tensor) -> Result<()> {
    if weights.dims() != dims {
        return Err(Error::shape(argument, format!("{dims:?}"), weights.dims()));
    }
    check_float(argument, weights)?;
    check_device(argument, weights, other)
}

/// Returns the dtype in which tensors of `dtype` are computed; an unsupported dtype is an error that names `argument`.
pub(crate) fn accumulation_dtype(argument: &'static str, dtype: DType) -> Result<DType> {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 => Ok(DType::F32),
        DType::F64 => Ok(DType::F64),
        got => Err(Error::DType { argument, expected: "f16, bf16, f32 or f64".into(), got }),
    }
}

/// Checks that a parameter has a dtype that the kernels support.
pub(crate) fn check_float(argument: &'static str, tensor: &Tensor) -> Result<()> {
    accumulation_dtype(argument, tensor.dtype()).map(drop)
}

/// Checks the shape and the dtype of a bias.
pub(crate) fn check_bias(argument: &'static str, bias: &Tensor, outputs: usize) -> Result<()> {
    if bias.dims() != [outputs] {
        return Err(Error::shape(argument, format!("[{outputs}]"), bias.dims()));
    }
    check_float(argument, bias)
}

/// What errors name as expected of a sum of frequencies.
pub(crate) const FREQUENCY_SUM: &str = "a positive, finite sum";

/// Checks frequencies, and returns their sum.
pub(crate) fn check_frequencies(argument: &'static str, frequencies: &[f64]) -> Result<f64> {
    if let Some(index) = frequencies.iter().position(|x| !(*x >= 0.0 && x.is_finite())) {
        let got = format!("{} at index {index}", frequencies[index]);
        return Err(Error::config(argument, "finite numbers, at least 0", got));
    }
    let sum: f64 = frequencies.iter().sum();
    check_number(sum > 0.0 && sum.is_finite(), argument, FREQUENCY_SUM, sum)?;
    Ok(sum)
}

/// The values that errors name as expected of log-probabilities.
pub(crate) const LOG_PROBS: &str = "log-probabilities, at most 0";

/// Returns the largest number that is accepted as a log-probability in a dtype, in which rounding may bring one above
/// zero.
pub(crate) fn max_log_prob(dtype: DType) -> f64 {
    match dtype {
        DType::F16 | DType::BF16 => 1.0 / 64.0,
        _ => 1e-4,
    }
}

/// Checks that no log-probability `[n, vocab]` is above zero by more than rounding in the dtype that they were computed
/// in. An error names the position that `position` gives to a row. On a GPU it checks nothing, because it would wait
/// for the values there. (`check_host_log_probs` in `decoding/log_probs.rs` checks values that the host has read, and
/// finds a NaN too.)
pub(crate) fn check_log_prob_tensor(
    argument: &'static str,
    log_probs: &Tensor,
    rounded: DType,
    position: impl Fn(usize) -> usize,
) -> Result<()> {
    if !log_probs.device().is_cpu() || log_probs.elem_count() == 0 {
        return Ok(());
    }
    let limit = max_log_prob(rounded);
    let largest = log_probs.detach().max(D::Minus1)?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    let Some(row) = largest.iter().position(|&x| x > limit) else { return Ok(()) };
    let index = log_probs.get(row)?.argmax(0)?.to_scalar::<u32>()? as usize;
    Err(Error::Value { argument, expected: LOG_PROBS, position: position(row), index, got: largest[row] })
}

/// Checks that no size is zero.
pub(crate) fn check_sizes(sizes: &[(&'static str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((argument, size)) => Err(Error::config(argument, "at least 1", size)),
        None => Ok(()),
    }
}

/// Checks that a tensor of this shape can exist, and returns the number of its elements. candle multiplies without a
/// check for overflow: a tensor of 2^62 x 4 elements would have none.
pub(crate) fn check_elements(argument: &'static str, dims: &[usize]) -> Result<usize> {
    let expected = || format!("of at most {MAX_ELEMENTS} elements");
    element_count(dims).ok_or_else(|| Error::shape(argument, expected(), dims))
}

/// Checks that a tensor can have as many elements as the product of `sizes`, which `argument` names.
pub(crate) fn check_product(argument: &'static str, sizes: &[usize]) -> Result<()> {
    if element_count(sizes).is_some() {
        return Ok(());
    }
    let got = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(" * ");
    Err(Error::config(argument, format!("at most {MAX_ELEMENTS}"), got))
}

/// Returns the product of sizes, if a tensor can have so many elements.
fn element_count(sizes: &[usize]) -> Option<usize> {
    // One zero makes the product zero, even where the other sizes would overflow.
    if sizes.contains(&0) {
        return Some(0);
    }
    let product = sizes.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
    product.filter(|product| *product <= MAX_ELEMENTS)
}

/// Checks that a vocabulary has a token id, and no more than u32 can number.
pub(crate) fn check_vocab(vocab_size: usize) -> Result<()> {
    check_sizes(&[("vocab_size", vocab_size)])?;
    check_at_most("vocab_size", vocab_size, MAX_IDS)
}

/// Checks that a size is at most `limit`.
pub(crate) fn check_at_most(argument: &'static str, size: usize, limit: usize) -> Result<()> {
    if size <= limit {
        Ok(())
    } else {
        Err(Error::config(argument, format!("at most {limit}"), size))
    }
}

/// Returns an error that names the first id that is not in the vocabulary.
pub(crate) fn check_ids<'a>(
    argument: &'static str,
    ids: impl IntoIterator<Item = &'a u32>,
    vocab: usize,
) -> Result<()> {
    match ids.into_iter().enumerate().find(|(_, &id)| id as usize >= vocab) {
        Some((index, id)) => {
            let expected = format!("token ids below vocab_size {vocab}");
            Err(Error::config(argument, expected, format!("{id} at index {index}")))
        }
        None => Ok(()),
    }
}

/// Checks that a mask of ids has a bit for each id of the vocabulary, in as few words as possible.
pub(crate) fn check_mask(argument: &'static str, words: &[u32], vocab: usize) -> Result<()> {
    let expected = vocab.div_ceil(u32::BITS as usize);
    if words.len() == expected {
        Ok(())
    } else {
        let expected = format!("{expected} words for vocab_size {vocab}");
        Err(Error::config(argument, expected, words.len()))
    }
}

/// Returns an error that names the number `got`, unless it `is_valid`.
pub(crate) fn check_number(is_valid: bool, argument: &'static str, expected: &str, got: f64) -> Result<()> {
    if is_valid {
        Ok(())
    } else {
        Err(Error::config(argument, expected, got))
    }
}

/// Checks the probability of dropout.
pub(crate) fn check_dropout(dropout: f64) -> Result<()> {
    check_number((0.0..1.0).contains(&dropout), "dropout", "at least 0 and below 1", dropout)
}

/// Reads token ids, such as targets, on the host: `None` where they are ignored. An error names the argument, and the
/// first id that is not in the vocabulary. It waits for their device.
pub(crate) fn read_ids(
    argument: &'static str,
    token_ids: &Tensor,
    ignore_index: Option<i64>,
    vocab_size: usize,
) -> Result<Vec<Option<usize>>> {
    if token_ids.elem_count() == 0 {
        // candle's GPU backends do not convert empty tensors.
        return Ok(Vec::new());
    }
    let token_ids = token_ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let check_id = |(position, &got): (usize, &i64)| {
        if ignore_index == Some(got) {
            return Ok(None);
        }
        match usize::try_from(got) {
            Ok(id) if id < vocab_size => Ok(Some(id)),
            _ => Err(Error::Target { argument, position, got, vocab_size }),
        }
    };
    token_ids.iter().enumerate().map(check_id).collect()
}
