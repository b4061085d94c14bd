//! The activation of the contexts, applied before the mixture, and its gradient, each in one pass.

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::dtype::{with_slice, Element};
use super::math::tanh;
use super::memory::zeros;
use super::simd::{Float, Isa, Kernel, Vector, ROW_ALIGN};
use crate::error::Result;

/// Elements per block: a thread's buffers stay in its first-level cache.
const BLOCK: usize = 2048;

/// `tanh(z + bias)` for `z` `[rows, n]` and `bias` `[n]`.
pub(super) fn bias_tanh(z: &Tensor, bias: &Tensor) -> Result<Tensor> {
    struct BiasTanh;
    impl<F: Float> Pairwise<F> for BiasTanh {
        #[inline(always)]
        fn apply<V: Vector<F>>(v: V, z: V::Reg, bias: V::Reg) -> V::Reg {
            tanh(v, v.add(z, bias))
        }
    }
    pairwise::<BiasTanh>(z, bias)
}

/// `upstream (1 - result^2)`, the gradient of the argument of `tanh`.
pub(super) fn tanh_gradient(result: &Tensor, upstream: &Tensor) -> Result<Tensor> {
    struct TanhGradient;
    impl<F: Float> Pairwise<F> for TanhGradient {
        #[inline(always)]
        fn apply<V: Vector<F>>(v: V, result: V::Reg, upstream: V::Reg) -> V::Reg {
            v.mul(upstream, v.sub(v.splat(F::one()), v.mul(result, result)))
        }
    }
    pairwise::<TanhGradient>(result, upstream)
}

/// An elementwise function of two arguments.
trait Pairwise<F: Float> {
    fn apply<V: Vector<F>>(v: V, a: V::Reg, b: V::Reg) -> V::Reg;
}

/// `P(a, b)` element by element; `b` is repeated if it is shorter than `a`.
fn pairwise<P: Pairwise<f32> + Pairwise<f64>>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    match a.dtype() {
        DType::F64 => run::<f64, P>(a, b),
        DType::F16 => run::<half::f16, P>(a, b),
        DType::BF16 => run::<half::bf16, P>(a, b),
        _ => run::<f32, P>(a, b),
    }
}

fn run<T: Element, P: Pairwise<T::Acc>>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let isa = Isa::best()?;
    let values = with_slice("hidden", a, |a: &[T]| {
        with_slice("hidden", b, |b: &[T]| {
            let mut out = vec![T::zero(); a.len()];
            // A bias is repeated for every row; any other `b` has the size of `a`.
            let is_bias = b.len() < a.len();
            let part = if is_bias { b.len() } else { BLOCK };
            let buffers = || (zeros::<T::Acc>(BLOCK), zeros::<T::Acc>(BLOCK));
            let parts = out.par_chunks_mut(part).zip(a.par_chunks(part)).enumerate();
            parts.for_each_init(buffers, |(x, y), (i, (out, a))| {
                let b = if is_bias { b } else { &b[i * part..] };
                let blocks = out.chunks_mut(BLOCK).zip(a.chunks(BLOCK)).zip(b.chunks(BLOCK));
                for ((out, a), b) in blocks {
                    let padded = a.len().next_multiple_of(ROW_ALIGN);
                    for (x, a) in x.iter_mut().zip(a) {
                        *x = a.widen();
                    }
                    for (y, b) in y.iter_mut().zip(b) {
                        *y = b.widen();
                    }
                    let kernel = PairwiseRow::<_, P>(&mut x[..padded], &y[..padded], std::marker::PhantomData);
                    T::Acc::dispatch(isa, kernel);
                    for (out, &x) in out.iter_mut().zip(&*x) {
                        *out = T::narrow(x);
                    }
                }
            });
            Ok(out)
        })
    })?;
    Ok(Tensor::from_vec(values, a.shape(), &Device::Cpu)?)
}

/// `row := P(row, other)`
struct PairwiseRow<'a, F, P>(&'a mut [F], &'a [F], std::marker::PhantomData<P>);

impl<F: Float, P: Pairwise<F>> Kernel<F> for PairwiseRow<'_, F, P> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        for (a, &b) in V::registers_mut(self.0).iter_mut().zip(V::registers(self.1)) {
            *a = P::apply(v, *a, b);
        }
    }
}
