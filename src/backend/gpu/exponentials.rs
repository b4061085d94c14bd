//! The exponentials of a chunk's logits by its first product, without the logits (`cuda/exponentials.h`).

use std::ops::Range;

use candle_core::DType;

use super::arguments::{Read, Write};
use super::chunks::{ChunkArguments, Chunks};
use super::device::{Buffer, Gpu, WARPS};
use super::kernels::{JoinPowersArguments, KernelArguments, ProductExponentialsArguments, RowReferencesArguments};
use crate::error::Result;

/// The rows and ids of a tile, `TILE` in `cuda/exponentials.h`.
const TILE: usize = 128;

/// The number of tiles that the ids of a row are in.
pub(super) fn tiles_per_row(vocab: usize) -> usize {
    vocab.div_ceil(TILE)
}

/// The workspace of the first product.
pub(super) struct ProductExponentials {
    /// `[rows of a chunk, tiles of a row, 2]`: of each row of a tile, the largest logit as a power of two, and the sum.
    powers: Buffer,
}

impl ProductExponentials {
    pub(super) fn new<G: Gpu>(chunks: &Chunks<'_, G>) -> Result<Self> {
        let elements = 2 * tiles_per_row(chunks.inputs.sizes.vocab) * chunks.rows_per_chunk;
        let device = chunks.logits.tensor.device();
        Ok(ProductExponentials { powers: Buffer::unwritten(chunks.gpu, elements, DType::F32, device)? })
    }

    /// Computes the exponentials of a chunk's logits, and the log-sum-exp of each row.
    pub(super) fn compute<G: Gpu>(
        &self,
        chunks: &Chunks<'_, G>,
        positions: &Range<usize>,
        arguments: ChunkArguments,
        exponentials: &Buffer,
    ) -> Result<()> {
        let ChunkArguments { logits, objective, rows } = arguments;
        let (chunk_rows, columns) = (chunks.inputs.rows(positions), &chunks.inputs.columns[0]);
        let count = chunk_rows.len();
        chunks.first_product(positions)?;
        let references = RowReferencesArguments {
            logits,
            rows,
            stride: chunks.logit_columns as i64,
            ids: logits.vocab.min(chunks.logit_columns as i32),
            count: count as i32,
        };
        references.launch(chunks.gpu, count.div_ceil(WARPS))?;
        let product = ProductExponentialsArguments {
            logits,
            objective,
            rows,
            contexts: Read(columns.contexts.at(chunk_rows.start * columns.stride)),
            decoder: Read(columns.decoder(true).address),
            powers: Write(self.powers.at(0)),
            exponentials: Write(exponentials.at(0)),
            count: count as i32,
            depth: columns.stride as i32,
        };
        let join = JoinPowersArguments {
            logits,
            objective,
            rows,
            contexts: product.contexts,
            decoder: product.decoder,
            powers: Read(self.powers.at(0)),
            exponentials: product.exponentials,
            count: product.count,
            depth: product.depth,
        };
        product.launch(chunks.gpu, count.div_ceil(TILE) * tiles_per_row(chunks.inputs.sizes.vocab))?;
        join.launch(chunks.gpu, count.div_ceil(WARPS))
    }
}
