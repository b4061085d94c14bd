//! Random tensors, and the numbers of tensors, which `approx` compares.
// Every test binary uses only some of it.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fmt::{Debug, Formatter};
use std::ops::{Deref, DerefMut};

use approx::{AbsDiffEq, RelativeEq};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use mos_head::Result;
use rand::{rngs::StdRng, Rng, SeedableRng};

/// So many random numbers within `bound` of zero.
pub fn draw(rng: &mut StdRng, n: usize, bound: f64) -> Vec<f64> {
    (0..n).map(|_| rng.random_range(-bound..bound)).collect()
}

/// Numbers within `bound` of zero, which the seed determines, in f64.
pub fn uniform(shape: &[usize], bound: f64, seed: u64) -> Result<Tensor> {
    let values = draw(&mut StdRng::seed_from_u64(seed), shape.iter().product(), bound);
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// Numbers from -2 to 2, which the seed determines.
pub fn tensor(shape: &[usize], seed: usize, dtype: DType) -> Result<Tensor> {
    Ok(uniform(shape, 2.0, seed as u64)?.to_dtype(dtype)?)
}

/// Gives every variable numbers within `bound` of zero, in the order of their names.
pub fn fill(vars: &VarMap, bound: f64) -> Result<()> {
    let vars = vars.data().lock().expect("no panic");
    for (seed, (_, var)) in (0..).zip(vars.iter().collect::<BTreeMap<_, _>>()) {
        var.set(&uniform(var.dims(), bound, seed)?.to_dtype(var.dtype())?.to_device(var.device())?)?;
    }
    Ok(())
}

/// The numbers of a tensor on any device, in any dtype.
pub fn numbers(tensor: &Tensor) -> Numbers {
    let flat = tensor.to_device(&Device::Cpu).and_then(|t| t.flatten_all()).and_then(|t| t.to_dtype(DType::F64));
    let values = flat.and_then(|t| t.to_vec1()).expect("a readable tensor");
    Numbers { dims: Some(tensor.dims().to_vec()), values, name: String::new() }
}

/// The gradient of a tensor, of its shape and dtype.
pub fn gradient(store: &GradStore, tensor: &Tensor) -> Option<Numbers> {
    let gradient = store.get(tensor)?;
    assert_eq!(gradient.dims(), tensor.dims(), "shape of a gradient");
    assert_eq!(gradient.dtype(), tensor.dtype(), "dtype of a gradient");
    Some(numbers(gradient))
}

/// The gradient of each tensor; one that is absent has no numbers.
pub fn gradients<'a>(store: &GradStore, tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<Numbers> {
    let gradient = |(i, tensor)| gradient(store, tensor).unwrap_or_default().named(format!("gradient {i}"));
    tensors.into_iter().enumerate().map(gradient).collect()
}

/// The central differences of a function of named numbers in every number.
pub fn central_differences<K: Clone + Ord>(
    values: &BTreeMap<K, Vec<f64>>,
    step: f64,
    f: impl Fn(&BTreeMap<K, Vec<f64>>) -> Result<f64>,
) -> Result<BTreeMap<K, Vec<f64>>> {
    let (mut moved, mut slopes) = (values.clone(), values.clone());
    for (name, values) in values {
        for (i, &x) in values.iter().enumerate() {
            let mut at = |x: f64| {
                moved.get_mut(name).expect("the same names")[i] = x;
                f(&moved)
            };
            let (high, low) = (at(x + step)?, at(x - step)?);
            at(x)?;
            slopes.get_mut(name).expect("the same names")[i] = (high - low) / (2.0 * step);
        }
    }
    Ok(slopes)
}

/// The numbers of a tensor, with its shape and perhaps a name; or numbers alone, which have a length.
///
/// `approx` demands of two of them that their shapes agree, that NaN is where NaN is and each infinity where it is, and
/// that all other numbers differ by at most `epsilon`, or by `max_relative` times the largest finite number: that of
/// the array in which it is smaller. Both are zero by default.
#[derive(Clone, Default)]
pub struct Numbers {
    name: String,
    /// `None` if only the length is known.
    dims: Option<Vec<usize>>,
    values: Vec<f64>,
}

impl Numbers {
    /// With a name, for messages.
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }

    pub fn into_vec(self) -> Vec<f64> {
        self.values
    }

    /// Says which number differs most if one differs too much.
    fn is_near<B: Values + ?Sized>(&self, expected: &B, epsilon: f64, max_relative: f64) -> bool {
        let (name, others) = (&self.name, expected.values());
        if !self.fits(expected) {
            eprintln!("another shape: {self:?}, expected {expected:?}");
            return false;
        }
        let largest = largest(self).min(largest(others));
        let limit = epsilon.max(max_relative * largest);
        let differences = self.iter().zip(others).map(|(a, b)| difference(*a, *b));
        let Some((i, worst)) = differences.enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b)) else { return true };
        let is_near = worst <= limit;
        if !is_near {
            let (a, b) = (self[i], others[i]);
            eprintln!("{name}[{i}]: {a:e}, expected {b:e}: they differ by more than {limit:e} (largest {largest:e})");
        }
        is_near
    }

    fn fits<B: Values + ?Sized>(&self, other: &B) -> bool {
        let is_same = self.dims.as_deref().zip(other.dims()).is_none_or(|(a, b)| a == b);
        is_same && self.len() == other.values().len()
    }
}

/// The largest finite number, without its sign.
fn largest(values: &[f64]) -> f64 {
    values.iter().filter(|x| x.is_finite()).fold(0.0, |largest, x| largest.max(x.abs()))
}

/// The distance of two numbers: infinite if one is NaN or infinite and the other is not the same.
pub fn difference(a: f64, b: f64) -> f64 {
    if a == b || a.is_nan() && b.is_nan() {
        0.0
    } else if a.is_finite() && b.is_finite() {
        (a - b).abs()
    } else {
        f64::INFINITY
    }
}

impl Debug for Numbers {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        const SHOWN: usize = 8;
        write!(f, "{} ", self.name)?;
        match &self.dims {
            Some(dims) => write!(f, "{dims:?} ")?,
            None => write!(f, "[{}] ", self.len())?,
        }
        f.debug_list().entries(self.iter().take(SHOWN)).finish()?;
        f.write_str(if self.len() > SHOWN { " .." } else { "" })
    }
}

impl From<Vec<f64>> for Numbers {
    fn from(values: Vec<f64>) -> Self {
        Self { values, ..Self::default() }
    }
}

impl FromIterator<f64> for Numbers {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        Vec::from_iter(values).into()
    }
}

impl IntoIterator for Numbers {
    type Item = f64;
    type IntoIter = std::vec::IntoIter<f64>;

    fn into_iter(self) -> Self::IntoIter {
        self.values.into_iter()
    }
}

impl<'a> IntoIterator for &'a Numbers {
    type Item = &'a f64;
    type IntoIter = std::slice::Iter<'a, f64>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl Deref for Numbers {
    type Target = [f64];

    fn deref(&self) -> &[f64] {
        &self.values
    }
}

impl DerefMut for Numbers {
    fn deref_mut(&mut self) -> &mut [f64] {
        &mut self.values
    }
}

/// What [`Numbers`] are compared with.
pub trait Values: Debug {
    fn values(&self) -> &[f64];

    fn dims(&self) -> Option<&[usize]> {
        None
    }
}

impl Values for Numbers {
    fn values(&self) -> &[f64] {
        self
    }

    fn dims(&self) -> Option<&[usize]> {
        self.dims.as_deref()
    }
}

impl<T: AsRef<[f64]> + Debug + ?Sized> Values for T {
    fn values(&self) -> &[f64] {
        self.as_ref()
    }
}

impl<B: Values + ?Sized> PartialEq<B> for Numbers {
    fn eq(&self, other: &B) -> bool {
        self.fits(other) && **self == *other.values()
    }
}

impl<B: Values + ?Sized> AbsDiffEq<B> for Numbers {
    type Epsilon = f64;

    fn default_epsilon() -> f64 {
        0.0
    }

    fn abs_diff_eq(&self, other: &B, epsilon: f64) -> bool {
        self.is_near(other, epsilon, 0.0)
    }
}

impl<B: Values + ?Sized> RelativeEq<B> for Numbers {
    fn default_max_relative() -> f64 {
        0.0
    }

    fn relative_eq(&self, other: &B, epsilon: f64, max_relative: f64) -> bool {
        self.is_near(other, epsilon, max_relative)
    }
}
