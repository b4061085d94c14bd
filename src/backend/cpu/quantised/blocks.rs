//! Rows of blocks: copies of them, and their products with contexts.

use std::ops::Range;

use super::block;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::few::{Dequantise, FewDots};
use super::kind::BlockType;
use super::many::{self, ManyDots};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::unpacking::Unpacking;
use crate::backend::cpu::operands::context_rows::ContextRows;
use crate::backend::cpu::operands::matrix::ViewMut;
use crate::backend::cpu::products::gemv::DecoderDots;
use crate::backend::cpu::vector::simd::{Float, Isa};

/// Rows of whole blocks, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'a> {
    kind: BlockType,
    bytes: &'a [u8],
    /// The number of weights of a row.
    width: usize,
}

impl<'a> Blocks<'a> {
    /// Takes bytes as rows of `width` weights.
    pub(crate) fn new(kind: BlockType, bytes: &'a [u8], width: usize) -> Self {
        assert!(width > 0 && width.is_multiple_of(kind.weights()));
        let blocks = Blocks { kind, bytes, width };
        assert!(bytes.len().is_multiple_of(blocks.row_bytes()));
        blocks
    }

    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.bytes.len() / self.row_bytes()
    }

    /// Returns the number of bytes of a row.
    fn row_bytes(&self) -> usize {
        self.width / self.kind.weights() * self.kind.bytes()
    }

    /// Writes the rows of some ids, the i-th at `to[i * stride..]`, with the bits of candle's `dequantize`.
    pub(crate) fn dequantise(&self, isa: Isa, ids: Range<usize>, stride: usize, to: &mut [f32]) {
        let rows = self.bytes_of(ids);
        let row_bytes = self.row_bytes();
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if let Some(unpacking) = Unpacking::new(isa) {
            let width = self.width;
            return unpacking.run(self.kind, Dequantise { rows, row_bytes, width, stride, to });
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = isa;
        for (row, to) in rows.chunks_exact(row_bytes).zip(to.chunks_mut(stride)) {
            let to = to[..self.width].chunks_exact_mut(self.kind.weights());
            row.chunks_exact(self.kind.bytes()).zip(to).for_each(|(block, to)| block::dequantise(self.kind, block, to));
        }
    }

    /// Computes `to[row, id - ids.start] = contexts[row] . rows[id]` for contexts of `width` columns, or adds these
    /// products to what `to` holds. The order of a sum does not depend on the number of contexts.
    pub(crate) fn dots(
        &self,
        isa: Isa,
        contexts: ContextRows<'_, f32>,
        ids: Range<usize>,
        is_added: bool,
        to: &mut ViewMut<'_, f32>,
    ) {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        let isa = match Unpacking::new(isa) {
            Some(unpacking) if contexts.len() <= unpacking.most_rows() => {
                let (rows, row_bytes, width) = (self.bytes_of(ids), self.row_bytes(), self.width);
                return unpacking.run(self.kind, FewDots { contexts, rows, row_bytes, width, is_added, to });
            }
            Some(unpacking) => unpacking.isa(),
            None => isa,
        };
        // Copies of a few rows at a time.
        let at_a_time = (TILE_BYTES / (self.width * size_of::<f32>())).max(1).next_multiple_of(4);
        let mut tile = vec![0.0; at_a_time.min(ids.len()) * self.width];
        for first in ids.clone().step_by(at_a_time) {
            let block = first..ids.end.min(first + at_a_time);
            let decoder = &mut tile[..block.len() * self.width];
            self.dequantise(isa, block.clone(), self.width, decoder);
            let to = &mut to.columns(first - ids.start..block.end - ids.start);
            if many::serves(contexts.len(), self.width) {
                f32::dispatch(isa, ManyDots { contexts, tile: decoder, width: self.width, is_added, to });
            } else {
                f32::dispatch(isa, DecoderDots { contexts, decoder: &*decoder, d: self.width, is_added, to });
            }
        }
    }

    /// Returns the bytes of the rows of some ids.
    fn bytes_of(&self, ids: Range<usize>) -> &'a [u8] {
        assert!(ids.end <= self.rows());
        &self.bytes[ids.start * self.row_bytes()..ids.end * self.row_bytes()]
    }
}

/// The bytes of the dequantised rows that are multiplied at a time: they stay in the second-level cache.
const TILE_BYTES: usize = 192 << 10;
