//! The maker and the family of the processor, where measurements of a family choose between instructions. No
//! measurement at run time does: so the results of a program are the same in every run, and all its processes use the
//! same kernels.

use std::arch::x86_64::__cpuid;
use std::sync::OnceLock;

/// The family, base plus extended, of AMD's Zen 5. Later processors have larger numbers.
const ZEN_5: u32 = 0x1a;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Processor {
    Amd { family: u32 },
    Intel,
    Other,
}

impl Processor {
    /// Returns the processor of this machine.
    #[inline(always)]
    pub(super) fn this() -> Self {
        // In a virtual machine, each instruction that asks for the family exits to the hypervisor.
        static PROCESSOR: OnceLock<Processor> = OnceLock::new();
        *PROCESSOR.get_or_init(|| {
            let vendor = __cpuid(0);
            let vendor = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
            Self::new(vendor.as_flattened(), __cpuid(1).eax)
        })
    }

    /// Returns the processor with this vendor and signature.
    fn new(vendor: &[u8], signature: u32) -> Self {
        let (base, extended) = (signature >> 8 & 0xf, signature >> 20 & 0xff);
        match vendor {
            b"AuthenticAMD" => Processor::Amd { family: base + extended },
            b"GenuineIntel" => Processor::Intel,
            _ => Processor::Other,
        }
    }

    /// Returns whether AVX512-BF16 multiplies pairs of bf16 so much faster than numbers in f32 that rounding the
    /// operands is worthwhile. On AMD's Zen 5 it does, and later processors of AMD are taken to as well; on Intel's
    /// Sapphire Rapids it did not, with a slower kernel than today's. Others have not been measured.
    pub(super) fn has_fast_bf16_dots(self) -> bool {
        matches!(self, Processor::Amd { family: ZEN_5.. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_family_of_the_processor_decides() {
        // EPYC of Zen 4 and Zen 5, and Sapphire Rapids.
        for (vendor, signature, expected) in [
            (b"AuthenticAMD", 0x00a1_0f11, false),
            (b"AuthenticAMD", 0x00b0_0f21, true),
            (b"GenuineIntel", 0x0008_06f8, false),
            (b"HygonGenuine", 0x00b0_0f21, false),
        ] {
            let processor = Processor::new(vendor, signature);
            assert_eq!(processor.has_fast_bf16_dots(), expected, "{processor:?}");
        }
        assert_eq!(Processor::new(b"GenuineIntel", 0), Processor::Intel);
    }
}
