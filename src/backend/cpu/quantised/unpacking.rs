//! The instruction sets that have kernels over blocks, and the choice among them.

#[cfg(target_arch = "x86_64")]
use super::avx2::{self, Avx2};
#[cfg(target_arch = "x86_64")]
use super::avx512::{self, Vbmi};
use super::kind::BlockType;
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::unpack::BlockKernel;
use crate::backend::cpu::vector::simd::Isa;

/// An instruction set that has kernels over blocks.
#[derive(Clone, Copy)]
pub(super) enum Unpacking {
    #[cfg(target_arch = "x86_64")]
    Avx512(Vbmi),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "aarch64")]
    Neon(pulp::aarch64::Neon),
}

impl Unpacking {
    /// Returns the kernels for an instruction set. AVX-512 without permutations of bytes has those of AVX2.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(v) => Vbmi::new(v).map(Unpacking::Avx512).or_else(|| Self::new(Isa::Avx2(*v))),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(v) => Avx2::new(v).map(Unpacking::Avx2),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(v) => Some(Unpacking::Neon(v)),
            Isa::Scalar(_) => None,
        }
    }

    /// Returns the instruction set, in whose order all products are summed.
    pub(super) fn isa(self) -> Isa {
        match self {
            #[cfg(target_arch = "x86_64")]
            Unpacking::Avx512(unpacking) => Isa::Avx512(unpacking.simd()),
            #[cfg(target_arch = "x86_64")]
            Unpacking::Avx2(unpacking) => Isa::Avx2(*unpacking),
            #[cfg(target_arch = "aarch64")]
            Unpacking::Neon(v) => Isa::Neon(v),
        }
    }

    /// Returns the most contexts whose sums are worth unpacking for once more.
    pub(super) fn most_rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Unpacking::Avx512(_) => avx512::MOST_ROWS,
            #[cfg(target_arch = "x86_64")]
            Unpacking::Avx2(_) => avx2::MOST_ROWS,
            #[cfg(target_arch = "aarch64")]
            Unpacking::Neon(_) => neon::MOST_ROWS,
        }
    }

    /// Runs a kernel over blocks.
    pub(super) fn run(self, kind: BlockType, kernel: impl BlockKernel) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Unpacking::Avx512(unpacking) => unpacking.run(kind, kernel),
            #[cfg(target_arch = "x86_64")]
            Unpacking::Avx2(unpacking) => unpacking.run(kind, kernel),
            #[cfg(target_arch = "aarch64")]
            Unpacking::Neon(v) => neon::run(v, kind, kernel),
        }
    }
}
