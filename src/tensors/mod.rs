//! What candle lacks: nodes of its graph, transfers, masks, log-softmaxes, initial values, files of tensors and checks
//! of arguments.

pub(crate) mod autograd;
pub(crate) mod checks;
pub(crate) mod dropout;
pub(crate) mod id_lists;
pub(crate) mod initial_values;
pub(crate) mod joined;
pub(crate) mod linear;
pub(crate) mod log_softmax;
pub(crate) mod permutation;
pub(crate) mod tensor_file;
pub(crate) mod transfer;
