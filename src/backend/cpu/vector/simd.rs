//! The instruction sets of the row kernels: a small vector trait, so that each kernel is written once and compiled for
//! each instruction set.
//!
//! [`Vector`] has the few operations that the kernels need. It is implemented, for `f32` and `f64`, on the `Simd` types
//! of the `pulp` crate: AVX-512, AVX2 + FMA, NEON, and scalar code. A value of such a type can only be obtained on a
//! machine that has the instructions, so nothing here is `unsafe`.

use std::sync::OnceLock;

use bytemuck::Pod;
use pulp::Simd as _;

use super::transposed;
use crate::backend::operands::Real;
use crate::backend::plan::Kernels;
use crate::error::{Error, Result};

/// Rows are padded to a multiple of this many elements: the lanes of the widest vector (AVX-512, `f32`).
pub(crate) const ROW_ALIGN: usize = 16;

/// A vector instruction set for elements of type `F`.
pub(crate) trait Vector<F: Copy>: Copy {
    /// A register of elements.
    type Reg: Copy;
    /// As many numbers of any type as a register has lanes.
    type Lanes<T: Copy>: Copy + AsRef<[T]> + AsMut<[T]>;
    /// The number of registers.
    const REGISTERS: usize;

    /// Views a row whose length is a multiple of [`ROW_ALIGN`] as registers.
    fn registers(row: &[F]) -> &[Self::Reg];
    /// As [`Self::registers`], for writing.
    fn registers_mut(row: &mut [F]) -> &mut [Self::Reg];
    /// Views a row of any length as registers and a remainder.
    fn split(row: &[F]) -> (&[Self::Reg], &[F]);
    /// As [`Self::split`], for writing.
    fn split_mut(row: &mut [F]) -> (&mut [Self::Reg], &mut [F]);
    /// Views a row of any type as the lanes of registers and a remainder.
    fn split_lanes<T: Copy>(row: &[T]) -> (&[Self::Lanes<T>], &[T]);
    /// Returns the value in every lane.
    fn filled<T: Copy>(value: T) -> Self::Lanes<T>;
    /// Loads a register.
    fn load(self, lanes: Self::Lanes<F>) -> Self::Reg;
    /// Loads fewer elements than fill a register; the other lanes become zero.
    fn load_partial(self, values: &[F]) -> Self::Reg;
    /// Stores as many elements as `to` has, at most those of a register.
    fn store_partial(self, a: Self::Reg, to: &mut [F]);
    /// Returns a register with the value in every lane.
    fn splat(self, value: F) -> Self::Reg;
    fn add(self, a: Self::Reg, b: Self::Reg) -> Self::Reg;
    fn sub(self, a: Self::Reg, b: Self::Reg) -> Self::Reg;
    fn mul(self, a: Self::Reg, b: Self::Reg) -> Self::Reg;
    fn div(self, a: Self::Reg, b: Self::Reg) -> Self::Reg;
    fn sqrt(self, a: Self::Reg) -> Self::Reg;
    /// Computes `a * b + c`, fused where the instruction set has that.
    fn mul_add(self, a: Self::Reg, b: Self::Reg, c: Self::Reg) -> Self::Reg;
    /// Returns the larger of the two; which one is unspecified if either is NaN.
    fn max(self, a: Self::Reg, b: Self::Reg) -> Self::Reg;
    /// Returns `if a < b { yes } else { no }`, lane by lane.
    fn if_less(self, a: Self::Reg, b: Self::Reg, yes: Self::Reg, no: Self::Reg) -> Self::Reg;
    /// Returns `if a == b { yes } else { no }`, lane by lane.
    fn if_equal(self, a: Self::Reg, b: Self::Reg, yes: Self::Reg, no: Self::Reg) -> Self::Reg;
    /// Adds up the lanes.
    fn sum(self, a: Self::Reg) -> F;
    /// Returns the largest lane.
    fn largest(self, a: Self::Reg) -> F;
    /// Computes `a * 2^n` for `shifted = n + ROUND` ([`Float::ROUND`]), by adding `n` to the exponent bits of `a`.
    fn scale_by_power(self, a: Self::Reg, shifted: Self::Reg) -> Self::Reg;
    /// Transposes as many registers as each has lanes.
    fn transposed(self, rows: Self::Lanes<Self::Reg>) -> Self::Lanes<Self::Reg>;
    /// Returns `(m, e)` with `a = m * 2^e` and `1 <= m < 2`, for finite `a >= 1`.
    fn mantissa_exponent(self, a: Self::Reg) -> (Self::Reg, Self::Reg);
}

/// A computation over rows of `F`, compiled for each instruction set.
pub(crate) trait Kernel<F: Copy> {
    type Output;
    /// Computes. Implementations are `#[inline(always)]`, so that they are compiled for the instruction set of `V`.
    fn run<V: Vector<F>>(self, v: V) -> Self::Output;
}

/// The element types that rows are computed in.
pub(crate) trait Float: Real + num_traits::FloatConst + std::iter::Sum + Default + Pod {
    /// The number 1.5 x 2^(mantissa bits). Adding it leaves the nearest integer in the lowest bits, and subtracting it
    /// again gives that integer.
    const ROUND: Self;
    /// The exponent below which an exponential is subnormal, and is set to zero.
    const EXP_UNDERFLOW: Self;
    /// The exponent, relative to a row's largest logit, below which an exponential is set to zero. Such exponentials
    /// are far below the rounding of the sum, and no product of a larger one and a factor of [`Float::NEGLIGIBLE`] or
    /// more is subnormal.
    const NEGLIGIBLE_EXPONENT: Self;
    /// The absolute value below which a row's factor of its exponentials is set to zero.
    const NEGLIGIBLE: Self;
    /// The absolute value below which a gradient of a logit is stored as zero. Its products with the decoder and the
    /// contexts would be subnormal numbers, which some processors multiply twenty times slower.
    const LEAST_GRADIENT: Self;
    /// The high part of ln 2, whose products with small integers are exact.
    const LN_2_HIGH: Self;
    /// ln 2 less [`Self::LN_2_HIGH`].
    const LN_2_LOW: Self;
    /// The coefficients 1/n!, n descending to 0: the Taylor series of exp is exact to rounding on |x| <= ln 2 / 2.
    const EXP_COEFFICIENTS: &'static [Self];
    /// The coefficients 1/(2n+1), n descending to 0: the series of artanh(s)/s, exact to rounding on |s| <= 0.172.
    const ARTANH_COEFFICIENTS: &'static [Self];

    /// Runs `kernel` with the instructions of `isa`.
    fn dispatch<K: Kernel<Self>>(isa: Isa, kernel: K) -> K::Output;
}

/// An instruction set, with the proof that this machine has it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
    #[cfg(target_arch = "x86_64")]
    Avx2(pulp::x86::V3),
    #[cfg(target_arch = "aarch64")]
    Neon(pulp::aarch64::Neon),
    Scalar(pulp::Scalar),
}

impl Isa {
    /// Returns the fastest instruction set of this machine, detected once. The environment variable `MOS_HEAD_SIMD`
    /// (`amx`, `avx512bf16`, `avx512`, `avx2`, `neon`, `scalar`) selects another.
    ///
    /// # Errors
    ///
    /// If the variable selects one that this machine lacks.
    pub(crate) fn detected() -> Result<Self> {
        static DETECTED: OnceLock<std::result::Result<Isa, String>> = OnceLock::new();
        let detected = DETECTED.get_or_init(|| Self::choose(Self::selected().map(str::to_owned)));
        detected.clone().map_err(Self::lacking)
    }

    /// Returns the error for an instruction set or unit that this machine lacks.
    pub(crate) fn lacking(got: String) -> Error {
        let names: Vec<_> = Self::available().into_iter().map(|isa| isa.kernels().to_string()).collect();
        Error::config("MOS_HEAD_SIMD", format!("one of {} on this machine", names.join(", ")), got)
    }

    /// Returns the value of `MOS_HEAD_SIMD`, which is read once.
    pub(crate) fn selected() -> Option<&'static str> {
        static SELECTED: OnceLock<Option<String>> = OnceLock::new();
        let selected = SELECTED.get_or_init(|| {
            let name = std::env::var_os("MOS_HEAD_SIMD").filter(|name| !name.is_empty());
            name.map(|name| name.to_string_lossy().into_owned())
        });
        selected.as_deref()
    }

    /// Returns the instruction set called `name`, or the fastest if no name is given. The name of a tile unit selects
    /// the vectors that prepare its operands. The error is a name that this machine lacks.
    fn choose(name: Option<String>) -> std::result::Result<Self, String> {
        let mut available = Self::available().into_iter();
        match name {
            // Whether the machine has the unit itself is checked by `TileUnit::detected`.
            Some(name) if Kernels::WITH_TILES.iter().any(|kernels| kernels.to_string() == name) => {
                available.find(Self::prepares_tiles).ok_or(name)
            }
            Some(name) => available.find(|isa| isa.kernels().to_string() == name).ok_or(name),
            None => Ok(available.next().unwrap_or(Isa::Scalar(pulp::Scalar))),
        }
    }

    /// Returns whether these vectors can prepare the operands of a tile unit.
    pub(crate) fn prepares_tiles(&self) -> bool {
        self.kernels() == Kernels::Avx512
    }

    /// Returns all instruction sets of this machine, the fastest first.
    pub(crate) fn available() -> Vec<Self> {
        let mut isas = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            isas.extend(pulp::x86::V4::try_new().map(Isa::Avx512));
            isas.extend(pulp::x86::V3::try_new().map(Isa::Avx2));
        }
        #[cfg(target_arch = "aarch64")]
        isas.extend(pulp::aarch64::Neon::try_new().map(Isa::Neon));
        isas.push(Isa::Scalar(pulp::Scalar));
        isas
    }

    /// Returns the kernels that a plan with this instruction set has.
    pub(crate) fn kernels(self) -> Kernels {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) => Kernels::Avx512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => Kernels::Avx2,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(_) => Kernels::Neon,
            Isa::Scalar(_) => Kernels::Scalar,
        }
    }
}

/// A kernel and its instruction set, as a function that `pulp` compiles with the right target features.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
struct KernelCall<K, F, V>(K, V, std::marker::PhantomData<F>);

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl<F: Copy, K: Kernel<F>, V: Vector<F>> pulp::NullaryFnOnce for KernelCall<K, F, V> {
    type Output = K::Output;

    #[inline(always)]
    fn call(self) -> K::Output {
        self.0.run(self.1)
    }
}

macro_rules! impl_float {
    ($float:ident, $($constants:tt)*) => {
        impl Float for $float {
            $($constants)*

            fn dispatch<K: Kernel<Self>>(isa: Isa, kernel: K) -> K::Output {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512(v) => v.vectorize(KernelCall(kernel, v, std::marker::PhantomData)),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2(v) => v.vectorize(KernelCall(kernel, v, std::marker::PhantomData)),
                    #[cfg(target_arch = "aarch64")]
                    Isa::Neon(v) => v.vectorize(KernelCall(kernel, v, std::marker::PhantomData)),
                    Isa::Scalar(v) => kernel.run(v),
                }
            }
        }
    };
}

impl_float! { f32,
    const ROUND: f32 = 12_582_912.0;
    const EXP_UNDERFLOW: f32 = -87.336_55;
    const NEGLIGIBLE_EXPONENT: f32 = -41.0;
    const NEGLIGIBLE: f32 = 1e-18;
    const LEAST_GRADIENT: f32 = 1e-30;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const EXP_COEFFICIENTS: &'static [f32] =
        &[1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    const ARTANH_COEFFICIENTS: &'static [f32] = &[1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0];
}
impl_float! { f64,
    const ROUND: f64 = 6_755_399_441_055_744.0;
    const EXP_UNDERFLOW: f64 = -708.396_418_532_264_1;
    const NEGLIGIBLE_EXPONENT: f64 = -340.0;
    const NEGLIGIBLE: f64 = 1e-148;
    const LEAST_GRADIENT: f64 = 1e-290;
    const LN_2_HIGH: f64 = 0.693_145_751_953_125;
    const LN_2_LOW: f64 = 1.428_606_820_309_417_2e-6;
    const EXP_COEFFICIENTS: &'static [f64] = &[
        1.0 / 6_227_020_800.0, 1.0 / 479_001_600.0, 1.0 / 39_916_800.0, 1.0 / 3_628_800.0, 1.0 / 362_880.0,
        1.0 / 40_320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0,
    ];
    const ARTANH_COEFFICIENTS: &'static [f64] = &[
        1.0 / 21.0, 1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0,
        1.0 / 3.0, 1.0,
    ];
}

/// Implements functions of two registers by those of `pulp` that have the same names.
macro_rules! binary {
    ($float:ident: $($name:ident)*) => { ::pastey::paste! { $(
        #[inline(always)]
        fn $name(self, a: Self::Reg, b: Self::Reg) -> Self::Reg {
            self.[<$name _ $float s>](a, b)
        }
    )* } };
}

/// Implements [`Vector`] on a `Simd` type of `pulp` for one element type. `$shl` and `$shr` shift the bits of a
/// register by the number of mantissa bits; `$transposed` transposes registers.
macro_rules! impl_vector {
    (
        $simd:ty, $float:ident, $bits:ident, mantissa $mantissa:literal, |$v:ident, $x:ident| $shl:expr, $shr:expr,
        $transposed:expr
    ) => {
        ::pastey::paste! {
            impl Vector<$float> for $simd {
                type Reg = <$simd as pulp::Simd>::[<$float s>];
                type Lanes<T: Copy> = [T; size_of::<<$simd as pulp::Simd>::[<$float s>]>() / size_of::<$float>()];
                const REGISTERS: usize = <$simd as pulp::Simd>::REGISTER_COUNT;

                #[inline(always)]
                fn registers(row: &[$float]) -> &[Self::Reg] {
                    let (registers, rest) = <$simd as pulp::Simd>::[<as_simd_ $float s>](row);
                    debug_assert!(rest.is_empty(), "rows must be padded to whole registers");
                    registers
                }
                #[inline(always)]
                fn registers_mut(row: &mut [$float]) -> &mut [Self::Reg] {
                    let (registers, rest) = <$simd as pulp::Simd>::[<as_mut_simd_ $float s>](row);
                    debug_assert!(rest.is_empty(), "rows must be padded to whole registers");
                    registers
                }
                #[inline(always)]
                fn split(row: &[$float]) -> (&[Self::Reg], &[$float]) {
                    <$simd as pulp::Simd>::[<as_simd_ $float s>](row)
                }
                #[inline(always)]
                fn split_mut(row: &mut [$float]) -> (&mut [Self::Reg], &mut [$float]) {
                    <$simd as pulp::Simd>::[<as_mut_simd_ $float s>](row)
                }
                #[inline(always)]
                fn store_partial(self, a: Self::Reg, to: &mut [$float]) {
                    self.[<partial_store_ $float s>](to, a)
                }
                #[inline(always)]
                fn split_lanes<T: Copy>(row: &[T]) -> (&[Self::Lanes<T>], &[T]) {
                    row.as_chunks()
                }
                #[inline(always)]
                fn filled<T: Copy>(value: T) -> Self::Lanes<T> {
                    [value; _]
                }
                #[inline(always)]
                fn load(self, lanes: Self::Lanes<$float>) -> Self::Reg {
                    pulp::cast(lanes)
                }
                #[inline(always)]
                fn load_partial(self, values: &[$float]) -> Self::Reg {
                    self.[<partial_load_ $float s>](values)
                }
                #[inline(always)]
                fn splat(self, value: $float) -> Self::Reg {
                    self.[<splat_ $float s>](value)
                }
                binary!($float: add sub mul div max);
                #[inline(always)]
                fn sqrt(self, a: Self::Reg) -> Self::Reg {
                    self.[<sqrt_ $float s>](a)
                }
                #[inline(always)]
                fn mul_add(self, a: Self::Reg, b: Self::Reg, c: Self::Reg) -> Self::Reg {
                    self.[<mul_add_e_ $float s>](a, b, c)
                }
                #[inline(always)]
                fn if_less(self, a: Self::Reg, b: Self::Reg, yes: Self::Reg, no: Self::Reg) -> Self::Reg {
                    self.[<select_ $float s>](self.[<less_than_ $float s>](a, b), yes, no)
                }
                #[inline(always)]
                fn if_equal(self, a: Self::Reg, b: Self::Reg, yes: Self::Reg, no: Self::Reg) -> Self::Reg {
                    self.[<select_ $float s>](self.[<equal_ $float s>](a, b), yes, no)
                }
                #[inline(always)]
                fn sum(self, a: Self::Reg) -> $float {
                    self.[<reduce_sum_ $float s>](a)
                }
                #[inline(always)]
                fn largest(self, a: Self::Reg) -> $float {
                    self.[<reduce_max_ $float s>](a)
                }
                #[inline(always)]
                fn scale_by_power(self, a: Self::Reg, shifted: Self::Reg) -> Self::Reg {
                    let ($v, $x) = (self, self.[<transmute_ $bits s_ $float s>](shifted));
                    let exponent = $shl;
                    let a = self.[<transmute_ $bits s_ $float s>](a);
                    self.[<transmute_ $float s_ $bits s>](self.[<add_ $bits s>](a, exponent))
                }
                #[inline(always)]
                fn transposed(self, rows: Self::Lanes<Self::Reg>) -> Self::Lanes<Self::Reg> {
                    $transposed(self, rows)
                }
                #[inline(always)]
                fn mantissa_exponent(self, a: Self::Reg) -> (Self::Reg, Self::Reg) {
                    // With the exponent of 2^mantissa, an integer in the low bits gives the float 2^mantissa + that
                    // integer.
                    let two_to_mantissa = (1u64 << $mantissa) as $float;
                    let bias = $float::MAX_EXP - 1;
                    let ($v, $x) = (self, self.[<transmute_ $bits s_ $float s>](a));
                    let exponent = self.[<or_ $bits s>]($shr, self.[<splat_ $bits s>](two_to_mantissa.to_bits()));
                    let exponent = self.[<sub_ $float s>](
                        self.[<transmute_ $float s_ $bits s>](exponent),
                        self.[<splat_ $float s>](two_to_mantissa + bias as $float),
                    );
                    let mantissa = self.[<and_ $bits s>]($x, self.[<splat_ $bits s>]((1 << $mantissa) - 1));
                    let mantissa = self.[<or_ $bits s>](mantissa, self.[<splat_ $bits s>]((1.0 as $float).to_bits()));
                    (self.[<transmute_ $float s_ $bits s>](mantissa), exponent)
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use pulp::x86::{V3, V4};
    impl_vector!(
        V4, f32, u32, mantissa 23, |v, x| v.shl_const_u32x16::<23>(x), v.shr_const_u32x16::<23>(x),
        transposed::transpose_16
    );
    impl_vector!(
        V4, f64, u64, mantissa 52, |v, x| v.shl_const_u64x8::<52>(x), v.shr_const_u64x8::<52>(x),
        transposed::transpose_any::<f64, _, _, _>
    );
    impl_vector!(
        V3, f32, u32, mantissa 23, |v, x| v.shl_const_u32x8::<23>(x), v.shr_const_u32x8::<23>(x),
        transposed::transpose_8
    );
    impl_vector!(
        V3, f64, u64, mantissa 52, |v, x| v.shl_const_u64x4::<52>(x), v.shr_const_u64x4::<52>(x),
        transposed::transpose_any::<f64, _, _, _>
    );
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use super::*;
    use pulp::aarch64::Neon;
    impl_vector!(
        Neon, f32, u32, mantissa 23, |v, x| v.shl_const_u32x4::<23>(x), v.shr_const_u32x4::<23>(x),
        transposed::transpose_any::<f32, _, _, _>
    );
    impl_vector!(
        Neon, f64, u64, mantissa 52, |v, x| v.shl_const_u64x2::<52>(x), v.shr_const_u64x2::<52>(x),
        transposed::transpose_any::<f64, _, _, _>
    );
}

impl_vector!(
    pulp::Scalar, f32, u32, mantissa 23, |_v, x| x << 23, x >> 23, transposed::transpose_any::<f32, _, _, _>
);
impl_vector!(
    pulp::Scalar, f64, u64, mantissa 52, |_v, x| x << 52, x >> 52, transposed::transpose_any::<f64, _, _, _>
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_instruction_set_is_an_error() {
        assert_eq!(Isa::choose(Some("scalar".into())).unwrap().kernels(), Kernels::Scalar);
        assert_eq!(Isa::choose(None).unwrap().kernels(), Isa::available()[0].kernels());
        assert_eq!(Isa::choose(Some("nonsense".into())).unwrap_err(), "nonsense");
    }
}
