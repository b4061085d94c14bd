//! The activation of the contexts, applied before the mixture, and its gradient, each in one pass.

use candle_core::{Device, Tensor};

use super::memory::zeros;
use super::operands::dtype::{with_slice, with_type, Element};
use super::vector::math::tanh;
use super::vector::simd::{Float, Isa, Kernel, Vector, ROW_ALIGN};
use crate::backend::parallel;
use crate::error::Result;

/// The number of elements of a block: a thread's buffers for one stay in its first-level cache.
const BLOCK: usize = 2048;

/// Computes `tanh(z + bias)` for `z` `[rows, n]` and `bias` `[n]`.
pub(crate) fn bias_tanh(z: &Tensor, bias: &Tensor) -> Result<Tensor> {
    with_type!(z.dtype(), T => tanh_or_gradient::<T, false>(z, bias))
}

/// Computes `upstream (1 - result^2)`, the gradient of the argument of `tanh`.
pub(crate) fn tanh_gradient(result: &Tensor, upstream: &Tensor) -> Result<Tensor> {
    let upstream = upstream.contiguous()?;
    with_type!(result.dtype(), T => tanh_or_gradient::<T, true>(result, &upstream))
}

/// Computes `tanh(a + b)` of each element, where `b` is a bias that is repeated for every row, or has the size of `a`.
/// With `GRADIENT`, computes the gradient of the argument of tanh from its result `a` and the result's gradient `b`.
fn tanh_or_gradient<T: Element, const GRADIENT: bool>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let isa = Isa::detected()?;
    let values = with_slice("hidden", a, |a: &[T]| {
        with_slice("hidden", b, |b: &[T]| {
            let mut out: Vec<T> = zeros(a.len());
            // A bias is repeated for every row; any other `b` has the size of `a`.
            let is_bias = b.len() < a.len();
            let row = if is_bias { b.len() } else { BLOCK };
            let buffers = || (zeros::<T::Acc>(BLOCK), zeros::<T::Acc>(BLOCK));
            let rows = out.chunks_mut(row).zip(a.chunks(row)).enumerate();
            parallel::for_each_with(rows, buffers, |(x, y), (i, (out, a))| {
                let b = if is_bias { b } else { &b[i * row..] };
                let blocks = out.chunks_mut(BLOCK).zip(a.chunks(BLOCK)).zip(b.chunks(BLOCK));
                for ((out, a), b) in blocks {
                    let padded = a.len().next_multiple_of(ROW_ALIGN);
                    for (x, a) in x.iter_mut().zip(a) {
                        *x = a.widen();
                    }
                    for (y, b) in y.iter_mut().zip(b) {
                        *y = b.widen();
                    }
                    T::Acc::dispatch(isa, TanhRow::<_, GRADIENT>(&mut x[..padded], &y[..padded]));
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

/// Computes `a := tanh(a + b)`, or `a := b (1 - a^2)` for the gradient.
struct TanhRow<'a, F, const GRADIENT: bool>(&'a mut [F], &'a [F]);

impl<F: Float, const GRADIENT: bool> Kernel<F> for TanhRow<'_, F, GRADIENT> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<F>>(self, v: V) {
        let one = v.splat(F::one());
        for (a, &b) in V::registers_mut(self.0).iter_mut().zip(V::registers(self.1)) {
            *a = if GRADIENT { v.mul(b, v.sub(one, v.mul(*a, *a))) } else { tanh(v, v.add(*a, b)) };
        }
    }
}
