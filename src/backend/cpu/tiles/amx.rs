//! Products on Intel AMX. Rust has no stable intrinsics for it yet: its instructions stand in one block of assembly,
//! which leaves the unit as it found it.

use std::arch::asm;
use std::marker::PhantomData;
use std::sync::OnceLock;

use half::bf16;

use super::product::{Parts, TileProduct, PAIRS, SIDE, SQUARE};
use super::rounding::Pair;

/// The proof that this process may use AMX for bf16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(PhantomData<()>);

impl Amx {
    /// Returns the proof if the processor has AMX and the operating system lets this process use it. Both are asked
    /// once.
    pub(super) fn detect() -> Option<Self> {
        static DETECTED: OnceLock<bool> = OnceLock::new();
        let is_usable = DETECTED.get_or_init(|| processor_has_amx() && request_permission());
        is_usable.then_some(Amx(PhantomData))
    }

    /// Computes the product, a group of squares at a time.
    ///
    /// # Safety
    ///
    /// `product.check()` has passed.
    pub(super) unsafe fn multiply(self, product: TileProduct<'_>) {
        let TileProduct { parts, left, right, steps, to, to_row, rows, columns, is_added } = product;
        let (first_left, first_right, to) = (left.values.as_ptr(), right.values.as_ptr(), to.as_mut_ptr());
        let mut squares = [Square::default(); AT_A_TIME];
        let mut count = 0;
        for row in 0..rows {
            for column in 0..columns {
                squares[count] = Square {
                    left: first_left.wrapping_add(row * left.square),
                    left_row: SIDE * size_of::<bf16>(),
                    left_step: left.step * size_of::<bf16>(),
                    right: first_right.wrapping_add(column * right.square),
                    right_row: SIDE * size_of::<Pair>(),
                    right_step: right.step * size_of::<Pair>(),
                    to: to.wrapping_add(SIDE * (row * to_row + column)),
                    to_row: to_row * size_of::<f32>(),
                    steps,
                    add: usize::from(is_added),
                };
                count += 1;
                if count == AT_A_TIME || row + 1 == rows && column + 1 == columns {
                    // SAFETY: `self` proves that the instructions may be used, and by the check of the product the
                    // operands and the result of all squares lie in borrowed slices.
                    unsafe { multiply(&squares[..count], parts) };
                    count = 0;
                }
            }
        }
    }
}

/// The number of squares for which the unit is configured once.
const AT_A_TIME: usize = 16;

/// The addresses of a square of the result and of its operands, as the assembly reads them. All distances are in bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Square {
    left: *const bf16,
    left_row: usize,
    left_step: usize,
    right: *const Pair,
    right_row: usize,
    right_step: usize,
    to: *mut f32,
    to_row: usize,
    steps: usize,
    add: usize,
}

impl Default for Square {
    fn default() -> Self {
        Square {
            left: std::ptr::null(),
            left_row: 0,
            left_step: 0,
            right: std::ptr::null(),
            right_row: 0,
            right_step: 0,
            to: std::ptr::null_mut(),
            to_row: 0,
            steps: 0,
            add: 0,
        }
    }
}

/// A configuration of the unit, in Intel's format.
#[repr(C, align(64))]
struct Configuration([u8; 64]);

/// The configuration in which all tile registers have 16 rows of 64 bytes.
static CONFIGURATION: Configuration = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    Configuration(bytes)
};

/// Computes squares of a result, each as 2 x 2 tiles. The arguments are the instructions of a step, which multiply a
/// square of each operand: the tiles 4 and 5 have the upper and the lower half of a left part, the tiles 6 and 7 the
/// left and the right half of a right part.
macro_rules! multiply {
    ($squares:expr, $($step:literal),* $(,)?) => {
        asm!(
            "ldtilecfg [{configuration}]",
            "2:",
            "mov {to}, [{square} + 48]",
            "mov {to_row}, [{square} + 56]",
            "mov {to_below}, {to_row}",
            "shl {to_below}, 4",
            "add {to_below}, {to}",
            "cmp qword ptr [{square} + 72], 0",
            "je 3f",
            "tileloadd tmm0, [{to} + {to_row}*1]",
            "tileloadd tmm1, [{to} + {to_row}*1 + 64]",
            "tileloadd tmm2, [{to_below} + {to_row}*1]",
            "tileloadd tmm3, [{to_below} + {to_row}*1 + 64]",
            "jmp 4f",
            "3:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "4:",
            "mov {left}, [{square}]",
            "mov {left_row}, [{square} + 8]",
            "mov {left_below}, {left_row}",
            "shl {left_below}, 4",
            "add {left_below}, {left}",
            "mov {right}, [{square} + 24]",
            "mov {right_row}, [{square} + 32]",
            "mov {steps}, [{square} + 64]",
            "5:",
            $($step,)*
            "add {left}, [{square} + 16]",
            "add {left_below}, [{square} + 16]",
            "add {right}, [{square} + 40]",
            "dec {steps}",
            "jnz 5b",
            "tilestored [{to} + {to_row}*1], tmm0",
            "tilestored [{to} + {to_row}*1 + 64], tmm1",
            "tilestored [{to_below} + {to_row}*1], tmm2",
            "tilestored [{to_below} + {to_row}*1 + 64], tmm3",
            "add {square}, 80",
            "dec {count}",
            "jnz 2b",
            "tilerelease",
            configuration = in(reg) &CONFIGURATION,
            square = inout(reg) $squares.as_ptr() => _,
            count = inout(reg) $squares.len() => _,
            to = out(reg) _,
            to_row = out(reg) _,
            to_below = out(reg) _,
            left = out(reg) _,
            left_row = out(reg) _,
            left_below = out(reg) _,
            right = out(reg) _,
            right_row = out(reg) _,
            steps = out(reg) _,
            options(nostack),
        )
    };
}

/// Computes squares of a result, whose operands have these parts.
///
/// # Safety
///
/// The process may use AMX. There is at least one square, and each has at least one step. The operands that a square
/// addresses are readable, and its result is writable.
unsafe fn multiply(squares: &[Square], parts: Parts) {
    const {
        assert!(std::mem::offset_of!(Square, left_step) == 16 && std::mem::offset_of!(Square, right) == 24);
        assert!(std::mem::offset_of!(Square, to) == 48 && std::mem::offset_of!(Square, steps) == 64);
        assert!(std::mem::offset_of!(Square, add) == 72 && size_of::<Square>() == 80);
        // The distance between parts, in bytes.
        assert!(SQUARE * size_of::<bf16>() == 2048 && PAIRS * SIDE * size_of::<Pair>() == 2048);
    }
    match parts {
        // SAFETY: the caller's. The compiler itself never uses the tile registers, and they are released at the end.
        Parts::One => unsafe {
            multiply!(
                squares,
                "tileloadd tmm4, [{left} + {left_row}*1]",
                "tileloadd tmm6, [{right} + {right_row}*1]",
                "tileloadd tmm7, [{right} + {right_row}*1 + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{left_below} + {left_row}*1]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
            )
        },
        // SAFETY: as above. The order is that of `Parts::products`.
        Parts::Three => unsafe {
            multiply!(
                squares,
                // 0, 2
                "tileloadd tmm4, [{left} + {left_row}*1]",
                "tileloadd tmm6, [{right} + {right_row}*1 + 4096]",
                "tileloadd tmm7, [{right} + {right_row}*1 + 4160]",
                "tileloadd tmm5, [{left_below} + {left_row}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                // 0, 1
                "tileloadd tmm6, [{right} + {right_row}*1 + 2048]",
                "tileloadd tmm7, [{right} + {right_row}*1 + 2112]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                // 1, 1
                "tileloadd tmm4, [{left} + {left_row}*1 + 2048]",
                "tileloadd tmm5, [{left_below} + {left_row}*1 + 2048]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                // 1, 0
                "tileloadd tmm6, [{right} + {right_row}*1]",
                "tileloadd tmm7, [{right} + {right_row}*1 + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                // 2, 0
                "tileloadd tmm4, [{left} + {left_row}*1 + 4096]",
                "tileloadd tmm5, [{left_below} + {left_row}*1 + 4096]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                // 0, 0
                "tileloadd tmm4, [{left} + {left_row}*1]",
                "tileloadd tmm5, [{left_below} + {left_row}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
            )
        },
    }
}

/// Returns whether the processor has AMX-TILE and AMX-BF16, and the operating system saves the state of the tiles.
fn processor_has_amx() -> bool {
    use std::arch::x86_64::{__cpuid_count, _xgetbv};

    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const TILES: u64 = 1 << 17 | 1 << 18;
    if !std::is_x86_feature_detected!("xsave") || !std::is_x86_feature_detected!("avx512f") {
        return false;
    }
    // The processor has AVX-512, hence leaf 7.
    let features = __cpuid_count(7, 0).edx;
    if features & AMX_BF16 == 0 || features & AMX_TILE == 0 {
        return false;
    }
    // SAFETY: the processor has XSAVE, and an operating system that uses AVX has enabled it.
    let enabled = unsafe { _xgetbv(0) };
    enabled & TILES == TILES
}

/// Asks Linux for the permission to use the tiles, which concerns the whole process. Returns whether it is given.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: this call changes the permissions of the process and accesses none of its memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

/// Returns false: this system has no such permission to ask for.
#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}
