//! The types of blocks, and their sizes.

use candle_core::quantized::GgmlDType;

/// The type of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockType {
    Q8_0,
    Q6K,
    Q4K,
    Q5K,
    Q4_0,
}

impl BlockType {
    /// Returns the type of candle's blocks; `None` for types without kernels.
    pub(crate) fn new(dtype: GgmlDType) -> Option<Self> {
        match dtype {
            GgmlDType::Q8_0 => Some(BlockType::Q8_0),
            GgmlDType::Q6K => Some(BlockType::Q6K),
            GgmlDType::Q4K => Some(BlockType::Q4K),
            GgmlDType::Q5K => Some(BlockType::Q5K),
            GgmlDType::Q4_0 => Some(BlockType::Q4_0),
            _ => None,
        }
    }

    /// Returns the number of weights of a block.
    pub(crate) fn weights(self) -> usize {
        match self {
            BlockType::Q8_0 | BlockType::Q4_0 => 32,
            BlockType::Q6K | BlockType::Q4K | BlockType::Q5K => 256,
        }
    }

    /// Returns the number of bytes of a block.
    pub(crate) fn bytes(self) -> usize {
        match self {
            BlockType::Q8_0 => 34,
            BlockType::Q6K => 210,
            BlockType::Q4K => 144,
            BlockType::Q5K => 176,
            BlockType::Q4_0 => 18,
        }
    }
}
