//! A random problem: one head, its parameters and one batch, as `f64` numbers by the name of the operand.

use std::collections::BTreeMap;

use super::composed::{log_softmax, Operands};
use super::on;
use super::values::draw;
use candle_core::{DType, Device, Result, Tensor, Var};
use mos_head::parts::LogitFunction;
use mos_head::{ContextActivation, Mixture};
use rand::{rngs::StdRng, Rng, SeedableRng};

/// Tensors by the crate's parameter names, with `hidden`, `contexts` and `log_priors` for the inputs.
pub type Tensors = BTreeMap<&'static str, Tensor>;

/// The part of the crate that a case tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    Softmax,
    MixtureOfContexts,
    MixtureOfSoftmaxes,
    /// The fused op itself, on given contexts and log-priors.
    Mixture,
}

/// The three heads.
pub const HEADS: [Head; 3] = [Head::Softmax, Head::MixtureOfContexts, Head::MixtureOfSoftmaxes];

/// The three heads and the op beneath them.
pub const ENTRIES: [Head; 4] = [Head::Softmax, Head::MixtureOfContexts, Head::MixtureOfSoftmaxes, Head::Mixture];

/// The sizes of a case; a softmax uses only `hidden` and `vocab`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub hidden: usize,
    pub context: usize,
    pub components: usize,
    pub vocab: usize,
}

impl Sizes {
    pub const fn new(hidden: usize, context: usize, components: usize, vocab: usize) -> Self {
        Self { hidden, context, components, vocab }
    }
}

/// The transformation of the logits: `z = f(scale (c W^T + b))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logits {
    pub scale: f64,
    pub function: LogitFunction,
}

impl Logits {
    /// The identity.
    pub const PLAIN: Self = Self { scale: 1.0, function: LogitFunction::Identity };

    /// The logit z and dz / du from the product `u` of context and decoder, bias included.
    pub fn value_and_slope(&self, u: f64) -> (f64, f64) {
        let u = self.scale * u;
        let (z, slope) = match self.function {
            LogitFunction::Identity => (u, 1.0),
            LogitFunction::Softcap(cap) => (cap * (u / cap).tanh(), 1.0 - (u / cap).tanh().powi(2)),
            LogitFunction::Sigsoftmax if u < 0.0 => (2.0 * u - u.exp().ln_1p(), 1.0 + 1.0 / (1.0 + u.exp())),
            LogitFunction::Sigsoftmax => (u - (-u).exp().ln_1p(), 1.0 + (-u).exp() / (1.0 + (-u).exp())),
            other => panic!("{other:?} has no reference"),
        };
        (z, self.scale * slope)
    }
}

#[derive(Clone, Debug)]
pub struct Case {
    pub head: Head,
    pub sizes: Sizes,
    /// The shape of the targets: every dimension of `hidden` but the last.
    pub lead: Vec<usize>,
    pub activation: ContextActivation,
    pub logits: Logits,
    /// Whether the decoder's tensor is `[d, vocab]`; its values are `[vocab, d]` in any case.
    pub transposed: bool,
    pub values: BTreeMap<&'static str, Vec<f64>>,
    pub targets: Vec<i64>,
}

impl Case {
    /// A case with every bias; `seed` determines its numbers.
    pub fn random(head: Head, sizes: Sizes, lead: &[usize], seed: u64) -> Self {
        let mut sizes = sizes;
        if head == Head::Softmax {
            sizes.context = sizes.hidden;
            sizes.components = 1;
        }
        let mut rng = StdRng::seed_from_u64(seed);
        let positions: usize = lead.iter().product();
        let mut case = Self {
            head,
            sizes,
            lead: lead.to_vec(),
            activation: ContextActivation::Tanh,
            logits: Logits::PLAIN,
            transposed: false,
            values: BTreeMap::new(),
            targets: (0..positions).map(|_| rng.random_range(0..sizes.vocab as i64)).collect(),
        };
        for &(name, spread) in case.spreads() {
            let length = case.shape(name).iter().product();
            let mut values = draw(&mut rng, length, spread);
            if name == "log_priors" {
                values.chunks_mut(sizes.components).for_each(super::reference::log_softmax);
            }
            case.values.insert(name, values);
        }
        case
    }

    fn spreads(&self) -> &'static [(&'static str, f64)] {
        match self.head {
            Head::Softmax => &[("hidden", 1.5), ("decoder.weight", 1.0), ("decoder.bias", 1.0)],
            Head::Mixture => &[("contexts", 1.5), ("log_priors", 1.5), ("decoder.weight", 1.0), ("decoder.bias", 1.0)],
            Head::MixtureOfContexts | Head::MixtureOfSoftmaxes => &[
                ("hidden", 1.5),
                ("prior.weight", 0.7),
                ("prior.bias", 0.7),
                ("latent.weight", 0.7),
                ("latent.bias", 0.7),
                ("decoder.weight", 1.5),
                ("decoder.bias", 1.0),
            ],
        }
    }

    /// The number of positions.
    pub fn positions(&self) -> usize {
        self.lead.iter().product()
    }

    /// The shape of the operand called `name`.
    pub fn shape(&self, name: &str) -> Vec<usize> {
        let Sizes { hidden, context, components, vocab } = self.sizes;
        let with_lead = |tail: &[usize]| [&self.lead, tail].concat();
        match name {
            "hidden" => with_lead(&[hidden]),
            "contexts" => with_lead(&[components, context]),
            "log_priors" => with_lead(&[components]),
            "prior.weight" => vec![components, hidden],
            "prior.bias" => vec![components],
            "latent.weight" => vec![components * context, hidden],
            "latent.bias" => vec![components * context],
            "decoder.weight" => vec![vocab, context],
            "decoder.bias" => vec![vocab],
            other => panic!("no operand is called {other}"),
        }
    }

    /// The case without the operand called `name`.
    pub fn without(mut self, name: &str) -> Self {
        self.values.remove(name).expect(name);
        self
    }

    /// The case with the operand called `name` multiplied by `factor`.
    pub fn scaled(mut self, name: &str, factor: f64) -> Self {
        let values = self.values.get_mut(name).expect(name);
        values.iter_mut().for_each(|x| *x *= factor);
        self
    }

    /// The case at these of its positions, in their order.
    pub fn at(&self, positions: impl IntoIterator<Item = usize>) -> Self {
        let positions: Vec<usize> = positions.into_iter().collect();
        let targets = positions.iter().map(|&t| self.targets[t]).collect();
        let mut part = Self { lead: vec![positions.len()], targets, ..self.clone() };
        for name in ["hidden", "contexts", "log_priors"] {
            if let Some(values) = part.values.get_mut(name) {
                let width = values.len() / self.positions();
                *values = positions.iter().flat_map(|&t| &self.values[name][t * width..][..width]).copied().collect();
            }
        }
        part
    }

    /// The case rounded to `dtype`, so that the rounding of the inputs is not counted as an error.
    pub fn rounded(mut self, dtype: DType) -> Result<Self> {
        for values in self.values.values_mut() {
            let stored = Tensor::new(values.as_slice(), &Device::Cpu)?.to_dtype(dtype)?;
            *values = stored.to_dtype(DType::F64)?.to_vec1()?;
        }
        Ok(self)
    }

    /// Every operand as a variable.
    pub fn variables(&self, dtype: DType, device: &Device) -> Result<Tensors> {
        let mut tensors = self.constants(dtype, device)?;
        for tensor in tensors.values_mut() {
            *tensor = Var::from_tensor(tensor)?.into_inner();
        }
        Ok(tensors)
    }

    /// Every operand as a tensor that needs no gradient.
    pub fn constants(&self, dtype: DType, device: &Device) -> Result<Tensors> {
        let tensor = |(&name, values): (&&'static str, &Vec<f64>)| {
            let mut stored = Tensor::from_slice(values, self.shape(name), &Device::Cpu)?;
            if self.transposed && name == "decoder.weight" {
                stored = stored.t()?.contiguous()?;
            }
            Ok((name, on(device, &stored.to_dtype(dtype)?)?))
        };
        self.values.iter().map(tensor).collect()
    }

    /// What the head passes to the mixture, from the tensors of its operands; log-priors are normalized.
    pub fn operands(&self, tensors: &Tensors) -> Result<Operands> {
        let mut tensors = tensors.clone();
        if self.transposed {
            tensors.insert("decoder.weight", tensors["decoder.weight"].t()?);
        }
        let mut operands = Operands::project(self.head, &tensors, self.activation)?;
        if let Some(log_priors) = &operands.log_priors {
            let dtype = if log_priors.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            operands.log_priors = Some(log_softmax(&log_priors.to_dtype(dtype)?)?);
        }
        Ok(operands)
    }

    /// The library's mixture of constants.
    pub fn mixture(&self, dtype: DType, device: &Device) -> mos_head::Result<Mixture> {
        self.operands(&self.constants(dtype, device)?)?.mixture(self.logits)
    }

    /// The targets as a tensor of `i64`.
    pub fn target_tensor(&self, device: &Device) -> Result<Tensor> {
        on(device, &Tensor::from_slice(&self.targets, self.lead.as_slice(), &Device::Cpu)?)
    }
}

/// Weights that `f32` holds exactly, from 1/8 to 2.
pub fn weights(length: usize, seed: u64) -> Vec<f64> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..length).map(|_| f64::from(rng.random_range(8..=128_u32)) / 64.0).collect()
}

/// Signed numbers that `f32` holds exactly, as an upstream gradient.
pub fn upstream(length: usize, seed: u64) -> Vec<f64> {
    let sign = |i: usize| if i.is_multiple_of(3) { -1.0 } else { 1.0 };
    let weights = weights(length, seed).into_iter().enumerate();
    weights.map(|(i, w)| sign(i) * w).collect()
}
