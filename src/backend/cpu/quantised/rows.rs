//! Rows in blocks as the products of f32 read them.

use std::ops::Range;

use super::blocks::Blocks;
use crate::backend::cpu::operands::blocks::BlockRows;
use crate::backend::cpu::operands::context_rows::ContextRows;
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::vector::simd::Isa;

/// Rows in blocks, and the instruction set that reads them.
pub(crate) struct QuantisedRows<'a> {
    pub(crate) blocks: Blocks<'a>,
    pub(crate) isa: Isa,
}

impl BlockRows<f32> for QuantisedRows<'_> {
    fn dequantise(&self, ids: Range<usize>, stride: usize, to: &mut [f32]) {
        self.blocks.dequantise(self.isa, ids, stride, to);
    }

    fn multiply(&self, contexts: ContextRows<'_, f32>, ids: Range<usize>, is_added: bool, to: &mut ViewMut<'_, f32>) {
        self.blocks.dots(self.isa, contexts, ids, is_added, to);
    }
}
