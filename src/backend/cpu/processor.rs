//! The maker of the processor, where measurements of its processors choose between instructions. No measurement at run
//! time does: so the results of a program are the same in every run, and all its processes use the same kernels.

use std::arch::x86_64::__cpuid;
use std::sync::OnceLock;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Processor {
    Amd,
    Intel,
    Other,
}

impl Processor {
    /// Returns the processor of this machine.
    #[inline(always)]
    pub(super) fn this() -> Self {
        // In a virtual machine, each instruction that asks for the maker exits to the hypervisor.
        static PROCESSOR: OnceLock<Processor> = OnceLock::new();
        *PROCESSOR.get_or_init(|| {
            let vendor = __cpuid(0);
            Self::new([vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened())
        })
    }

    /// Returns the processor of this vendor.
    fn new(vendor: &[u8]) -> Self {
        match vendor {
            b"AuthenticAMD" => Processor::Amd,
            b"GenuineIntel" => Processor::Intel,
            _ => Processor::Other,
        }
    }

    /// Returns whether AVX512-BF16, if the processor has it, multiplies pairs of bf16 so much faster than numbers in f32
    /// that rounding the operands is worthwhile. On AMD's Zen 5 it does. On Zen 4 this kernel has not been measured, but
    /// PyTorch's products with the instruction took about half the time of those in f32. On Intel's Emerald Rapids a step
    /// takes up to twice as long with it, and on Sapphire Rapids it did with an earlier kernel. Others have not been
    /// measured.
    pub(super) fn has_fast_bf16_dots(self) -> bool {
        self == Processor::Amd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_maker_of_the_processor_decides() {
        let vendors = [*b"AuthenticAMD", *b"GenuineIntel", *b"HygonGenuine"];
        assert_eq!(vendors.map(|vendor| Processor::new(&vendor)), [Processor::Amd, Processor::Intel, Processor::Other]);
        assert_eq!(vendors.map(|vendor| Processor::new(&vendor).has_fast_bf16_dots()), [true, false, false]);
    }
}
