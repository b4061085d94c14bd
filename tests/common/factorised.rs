//! Heads with a vocabulary of two levels, and their formula in plain `f64` loops, whose gradients are central
//! differences.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::{DType, Device, Result as CandleResult, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax, Classes, HierarchicalConfig, HierarchicalSoftmax};
use mos_head::{MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Reduction, Result};
use rand::{rngs::StdRng, Rng, SeedableRng};

use super::objective::Objective;
use super::on;
use super::reference::{log_softmax, log_sum_exp};

pub const HIDDEN: usize = 8;
pub const VOCAB: usize = 23;
pub const CUTOFFS: [usize; 3] = [4, 9, 15];
pub const COMPONENTS: usize = 3;
pub const CONTEXT: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Adaptive,
    AdaptiveWithBias,
    AdaptiveMixture,
    Hierarchical,
    /// The classes of the ids are given, and not in their order.
    Classes,
    /// The layer over the classes is a mixture of softmaxes.
    ClassMixture,
}

pub const KINDS: [Kind; 6] = [
    Kind::Adaptive,
    Kind::AdaptiveWithBias,
    Kind::AdaptiveMixture,
    Kind::Hierarchical,
    Kind::Classes,
    Kind::ClassMixture,
];

/// Parameters and `hidden`, by name.
pub type Values = BTreeMap<String, Vec<f64>>;

/// Random ones, with their shapes.
#[derive(Clone)]
pub struct Random {
    shapes: BTreeMap<String, Vec<usize>>,
    pub values: Values,
}

impl Kind {
    pub fn adaptive(self) -> AdaptiveConfig {
        AdaptiveConfig::new(HIDDEN, VOCAB, CUTOFFS.to_vec())
            .with_div_value(2.0)
            .with_head_bias(self == Kind::AdaptiveWithBias)
    }

    pub fn hierarchical(self) -> HierarchicalConfig {
        let config = HierarchicalConfig::new(HIDDEN, VOCAB);
        match self {
            Kind::Classes => config.with_classes(Classes::Given((0..VOCAB).map(given_class).collect())),
            _ => config,
        }
    }

    pub fn build(self, vb: VarBuilder) -> Result<Box<dyn OutputLayer>> {
        let mixture = |vocab, vb| -> Result<_> {
            let config = MixtureConfig::new(HIDDEN, vocab, COMPONENTS).with_context_dim(CONTEXT).with_prior_bias(true);
            Ok(Arc::new(MixtureOfSoftmaxes::new(&config.with_dropout(0.3), vb)?))
        };
        Ok(match self {
            Kind::Adaptive | Kind::AdaptiveWithBias => Box::new(AdaptiveSoftmax::new(&self.adaptive(), vb)?),
            Kind::AdaptiveMixture => {
                let head = mixture(self.adaptive().head_size(), vb.pp("head"))?;
                Box::new(AdaptiveSoftmax::with_head(&self.adaptive(), head, vb)?)
            }
            Kind::Hierarchical | Kind::Classes => Box::new(HierarchicalSoftmax::new(&self.hierarchical(), vb)?),
            Kind::ClassMixture => {
                let classes = mixture(5, vb.pp("class"))?;
                Box::new(HierarchicalSoftmax::with_class_layer(&self.hierarchical(), classes, vb)?)
            }
        })
    }

    /// Random parameters, and hidden states with these leading dimensions.
    pub fn random(self, lead: &[usize], seed: u64) -> Result<Random> {
        let vars = VarMap::new();
        self.build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
        let vars = vars.data().lock().expect("variables");
        let mut shapes: BTreeMap<_, _> = vars.iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect();
        shapes.insert("hidden".into(), [lead, &[HIDDEN]].concat());
        let mut rng = StdRng::seed_from_u64(seed);
        // Numbers that bf16 holds.
        let mut draw = |n: usize| (0..n).map(|_| f64::from(rng.random_range(-100..=100_i32)) / 64.0).collect();
        let values = shapes.iter().map(|(name, shape)| (name.clone(), draw(shape.iter().product()))).collect();
        Ok(Random { shapes, values })
    }

    /// The place of an id: an entry of the root, and a cluster with the ids of it in their order.
    pub fn place(self, id: usize) -> (usize, Option<(usize, Vec<usize>)>) {
        match self {
            Kind::Adaptive | Kind::AdaptiveWithBias | Kind::AdaptiveMixture => {
                if id < CUTOFFS[0] {
                    return (id, None);
                }
                let ends = [CUTOFFS[0], CUTOFFS[1], CUTOFFS[2], VOCAB];
                let cluster = (0..3).find(|&i| id < ends[i + 1]).expect("a cluster");
                (CUTOFFS[0] + cluster, Some((cluster, (ends[cluster]..ends[cluster + 1]).collect())))
            }
            _ => {
                let class = |id: usize| match self {
                    Kind::Classes => given_class(id) as usize,
                    // Starts at 23 c / 5: 0, 4, 9, 13, 18.
                    _ => [4, 9, 13, 18, 23].iter().position(|&end| id < end).expect("a class"),
                };
                let members = (0..VOCAB).filter(|&other| class(other) == class(id)).collect();
                (class(id), Some((class(id), members)))
            }
        }
    }

    /// The log-probabilities of all positions by the formula.
    pub fn log_probs(self, values: &Values) -> Vec<Vec<f64>> {
        let get = |name: &str| values.get(name).map(Vec::as_slice);
        let prefix = if get("head.weight").or(get("head.decoder.weight")).is_some() { "head" } else { "class" };
        let parameter = |name: &str| get(&format!("{prefix}.{name}"));
        let position = |hidden: &[f64]| {
            let softmax = |weight: &[f64], bias: Option<&[f64]>, x: &[f64]| {
                let mut z = linear(weight, bias, x);
                log_softmax(&mut z);
                z
            };
            let root = match parameter("weight") {
                Some(weight) => softmax(weight, parameter("bias"), hidden),
                None => {
                    let priors = softmax(parameter("prior.weight").expect("priors"), parameter("prior.bias"), hidden);
                    let contexts =
                        linear(parameter("latent.weight").expect("contexts"), parameter("latent.bias"), hidden);
                    let contexts: Vec<f64> = contexts.iter().map(|x| x.tanh()).collect();
                    let component = |context: &[f64]| {
                        softmax(parameter("decoder.weight").expect("a decoder"), parameter("decoder.bias"), context)
                    };
                    let components: Vec<Vec<f64>> = contexts.chunks(CONTEXT).map(component).collect();
                    let mixed = |v: usize| {
                        let joint: Vec<f64> = priors.iter().zip(&components).map(|(p, z)| p + z[v]).collect();
                        log_sum_exp(&joint)
                    };
                    (0..components[0].len()).map(mixed).collect()
                }
            };
            let id = |id: usize| {
                let (entry, within) = self.place(id);
                let Some((cluster, members)) = within else { return root[entry] };
                let index = members.iter().position(|&member| member == id).expect("a member");
                let within = match get(&format!("tail.{cluster}.0.weight")) {
                    Some(projection) => {
                        let weight = get(&format!("tail.{cluster}.1.weight")).expect("a decoder");
                        softmax(weight, None, &linear(projection, None, hidden))
                    }
                    None => {
                        let weight = get(&format!("word.{cluster}.weight")).expect("a decoder");
                        softmax(weight, get(&format!("word.{cluster}.bias")), hidden)
                    }
                };
                root[entry] + within[index]
            };
            (0..VOCAB).map(id).collect()
        };
        values["hidden"].chunks(HIDDEN).map(position).collect()
    }

    /// The value of an objective by the formula, times `upstream`, and negative log-likelihoods, sum and count.
    pub fn loss(self, values: &Values, targets: &[i64], objective: &Objective, upstream: &[f64]) -> Expected {
        let mut expected = Expected::default();
        for (t, (row, &y)) in self.log_probs(values).iter().zip(targets).enumerate() {
            let (weight, nll) = if objective.ignore_index == Some(y) {
                (0.0, 0.0)
            } else {
                (objective.position_weight(t, y) * objective.class_weight(y as usize), -row[y as usize])
            };
            expected.count += weight;
            expected.nll.push(nll);
            expected.each.push(weight * nll);
        }
        expected.sum = expected.each.iter().sum();
        expected.value = match objective.reduction {
            Reduction::None => expected.each.clone(),
            Reduction::Mean if expected.count == 0.0 => vec![0.0],
            Reduction::Mean => vec![expected.sum / expected.count],
            _ => vec![expected.sum],
        };
        expected.total = expected.value.iter().zip(upstream).map(|(x, u)| x * u).sum();
        expected
    }
}

#[derive(Clone, Debug, Default)]
pub struct Expected {
    pub value: Vec<f64>,
    pub each: Vec<f64>,
    pub nll: Vec<f64>,
    pub sum: f64,
    pub count: f64,
    /// The inner product of the value and its upstream gradient.
    pub total: f64,
}

fn given_class(id: usize) -> u32 {
    ((id * 3 + id / 5) % 4) as u32
}

fn linear(weight: &[f64], bias: Option<&[f64]>, x: &[f64]) -> Vec<f64> {
    let row = |(i, row): (usize, &[f64])| {
        row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>() + bias.map_or(0.0, |bias| bias[i])
    };
    weight.chunks(x.len()).enumerate().map(row).collect()
}

/// A head, its hidden states, and all variables by name.
pub type Built = (Box<dyn OutputLayer>, Tensor, HashMap<String, Tensor>);

/// The head of `kind` on variables of these values, its hidden states, and all of them by name.
pub fn build(kind: Kind, random: &Random, dtype: DType, device: &Device) -> Result<Built> {
    let variable = |(name, values): (&String, &Vec<f64>)| {
        let tensor = Tensor::from_slice(values, random.shapes[name].as_slice(), &Device::Cpu)?.to_dtype(dtype)?;
        Ok((name.clone(), Var::from_tensor(&on(device, &tensor)?)?.into_inner()))
    };
    let tensors: HashMap<_, _> = random.values.iter().map(variable).collect::<CandleResult<_>>()?;
    let head = kind.build(VarBuilder::from_tensors(tensors.clone(), dtype, device))?;
    Ok((head, tensors["hidden"].clone(), tensors))
}
