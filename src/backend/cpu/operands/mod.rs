//! The operands of a mixture as the kernels read them: element types, matrices, and their conversion.

pub(crate) mod blocks;
pub(crate) mod context_rows;
pub(crate) mod decoder;
pub(crate) mod dtype;
pub(crate) mod matrix;
pub(crate) mod transpose;
