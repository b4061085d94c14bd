//! Blocks as registers of weights, for the instruction sets that have kernels of their own.

use crate::backend::cpu::vector::simd::Vector;

/// Unpacks the blocks of one type. A block is read by units of consecutive weights, so that the units of several ids
/// take turns: the sum of one id waits for each of its products.
pub(super) trait Unpack: Copy {
    /// The vectors of the instruction set.
    type Simd: Vector<f32>;
    /// The bytes of a block.
    type Block: Copy;
    /// The scales of a block.
    type Scales: Copy;
    /// The registers of a unit.
    type Unit: Copy + AsRef<[<Self::Simd as Vector<f32>>::Reg]>;
    /// The number of weights of a unit.
    const WEIGHTS: usize;
    /// The number of units of a block, at most 8.
    const UNITS: usize;
    /// The most contexts whose sums are worth unpacking for once more, 4 or 8.
    const MOST_ROWS: usize;

    /// Returns the vectors.
    fn simd(self) -> Self::Simd;
    /// Cuts whole blocks.
    fn blocks(bytes: &[u8]) -> &[Self::Block];
    /// Computes the scales of a block.
    fn scales(self, block: &Self::Block) -> Self::Scales;
    /// Computes the weights of the unit `U`.
    fn unit<const U: usize>(self, block: &Self::Block, scales: &Self::Scales) -> Self::Unit;
}

/// The scales of a block in memory, whence each is broadcast by a load.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct InMemory(pub(super) [f32; 16]);

impl InMemory {
    /// Keeps the scales out of registers: the compiler would replace each load by shuffles, which are slower.
    #[inline(always)]
    pub(super) fn kept(mut self) -> Self {
        std::hint::black_box(&mut self);
        self
    }
}

/// A computation over blocks, compiled for each type and instruction set.
pub(super) trait BlockKernel {
    /// Computes. Implementations are `#[inline(always)]`.
    fn run<B: Unpack>(self, unpack: B);
}

/// Defines the unpacking of types by a proof of the instructions, from which `$vectors` makes the vectors: a block has
/// so many bytes, and so many units, each of some registers of `$lanes` weights. Its type has the functions
/// `block_scales` and `weights`.
macro_rules! unpacks {
    ($proof:ident, $simd:ty, $vectors:expr, $lanes:literal lanes; $(
        $name:ident, $bytes:literal bytes, $units:literal x $registers:literal registers, $scales:ty;
    )*) => { $(
        #[derive(Clone, Copy)]
        struct $name($proof);

        impl Unpack for $name {
            type Simd = $simd;
            type Block = [u8; $bytes];
            type Scales = $scales;
            type Unit = [<$simd as pulp::Simd>::f32s; $registers];
            const WEIGHTS: usize = $lanes * $registers;
            const UNITS: usize = $units;
            const MOST_ROWS: usize = MOST_ROWS;

            #[inline(always)]
            fn simd(self) -> $simd {
                $vectors(self.0)
            }
            #[inline(always)]
            fn blocks(bytes: &[u8]) -> &[[u8; $bytes]] {
                bytes.as_chunks().0
            }
            #[inline(always)]
            fn scales(self, block: &[u8; $bytes]) -> $scales {
                self.block_scales(block)
            }
            #[inline(always)]
            fn unit<const U: usize>(self, block: &[u8; $bytes], scales: &$scales) -> Self::Unit {
                pulp::cast(self.weights::<U>(block, scales))
            }
        }
    )* };
}
pub(super) use unpacks;

/// Evaluates an expression for each unit of a block, which is a constant in it.
macro_rules! for_each_unit {
    ($B:ident, $unit:ident => $body:expr) => {
        for_each_unit!($B, $unit => $body; 0 1 2 3 4 5 6 7)
    };
    ($B:ident, $unit:ident => $body:expr; $($value:literal)*) => { $(
        if const { $value < $B::UNITS } {
            const $unit: usize = $value;
            $body
        }
    )* };
}
pub(super) use for_each_unit;
