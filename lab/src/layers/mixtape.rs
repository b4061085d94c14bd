//! Mixtape, whose logits are mixed where a mixture of softmaxes mixes probabilities: one softmax follows (Yang, Luong,
//! Salakhutdinov, Le: Mixtape: Breaking the Softmax Bottleneck Efficiently. NeurIPS 2019). With a hidden state g,
//!
//! ```text
//! z_v = sum_k pi_k(v) c_k . w_v + b_v         c_k = tanh(H_k g), k = 1 .. 4
//! l_j(v) = v_v . tanh(U_j g) + u_j . g + b_jv    for frequent ids v, j = 1 .. 3 (vector gating)
//! l_j(v) = u_j . g                              for all other ids, which share one gate
//! ```
//!
//! and the priors are a tree of sigmoids, `s_j = sigma(l_j)`: `pi_1 = s_1 s_2`, `pi_2 = s_1 (1 - s_2)`,
//! `pi_3 = (1 - s_1) s_3`, `pi_4 = (1 - s_1) (1 - s_3)`. The logits of the ids that share a gate are one product with the
//! mixed context `sum_k pi_k c_k`.
//!
//! A loss and its gradients are computed chunk by chunk: what is held has the logits of one chunk of positions.

use candle_core::{DType, Tensor, Var, D};
use candle_nn::{ops, Init, VarBuilder};
use mos_head::{DropoutMasks, Loss, LossOptions, OutputLayer, Reduction, Result};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::ops::Range;

/// The number of contexts, K: the leaves of the tree.
const COMPONENTS: usize = 4;
/// The number of sigmoids of the tree.
const GATES: usize = COMPONENTS - 1;
/// The bytes of the logits of a chunk, with those of each context and gate.
const CHUNK_BYTES: usize = 64 << 20;

/// The sizes of a [`Mixtape`].
#[derive(Clone, Debug, PartialEq)]
pub struct MixtapeConfig {
    /// The size of a hidden state.
    pub hidden: usize,
    /// The number of token ids.
    pub vocab: usize,
    /// The size of a context, d.
    pub context: usize,
    /// The size of the vectors that gate a frequent id.
    pub gate: usize,
    /// The number of frequent ids, which have gates of their own.
    pub frequent: usize,
    /// Locked dropout of the contexts.
    pub dropout: f64,
}

impl MixtapeConfig {
    /// Returns the sizes at which the head has about as many parameters as a softmax over these hidden states: the
    /// gates have a quarter of the contexts' size, and half of the ids are frequent.
    pub fn equal_to_softmax(vocab: usize, hidden: usize) -> Self {
        let with_context = |context: usize| MixtapeConfig {
            hidden,
            vocab,
            context,
            gate: context.div_ceil(4),
            frequent: vocab / 2,
            dropout: 0.0,
        };
        let softmax = vocab * (hidden + 1);
        let error = |context: &usize| with_context(*context).parameters().abs_diff(softmax);
        with_context((1..=hidden).min_by_key(error).unwrap_or(1))
    }

    /// Returns the number of parameters.
    pub fn parameters(&self) -> usize {
        let MixtapeConfig { hidden, vocab, context, gate, frequent, .. } = *self;
        vocab * (context + 1)
            + COMPONENTS * context * (hidden + 1)
            + GATES * (gate + 1) * hidden
            + frequent * (gate + GATES)
    }
}

/// The places of the decoder among all parameters.
const DECODER: Range<usize> = 2..4;

/// The parameters of a [`Mixtape`].
#[derive(Clone, Debug)]
struct Parameters {
    /// `[4 d, hidden]` and `[4 d]`: H
    latent: [Tensor; 2],
    /// `[vocab, d]` and `[vocab]`
    decoder: [Tensor; 2],
    /// `[3 gate, hidden]`: U
    gate_latent: Tensor,
    /// `[3, hidden]`: u
    gate_weight: Tensor,
    /// `[frequent, gate]` and `[3, frequent]`: v and b of the frequent ids
    gate_rows: [Tensor; 2],
}

impl Parameters {
    /// Returns all parameters; those of the decoder are in the places [`DECODER`].
    fn all(&self) -> [&Tensor; 8] {
        let Parameters { latent, decoder, gate_latent, gate_weight, gate_rows } = self;
        [&latent[0], &latent[1], &decoder[0], &decoder[1], gate_latent, gate_weight, &gate_rows[0], &gate_rows[1]]
    }

    /// Returns these parameters with this function of each.
    fn map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let pair = |[weight, bias]: &[Tensor; 2]| Ok::<_, mos_head::Error>([f(weight)?, f(bias)?]);
        Ok(Parameters {
            latent: pair(&self.latent)?,
            decoder: pair(&self.decoder)?,
            gate_latent: f(&self.gate_latent)?,
            gate_weight: f(&self.gate_weight)?,
            gate_rows: pair(&self.gate_rows)?,
        })
    }

    /// Returns these parameters with the decoder's rows in the order of these ids.
    fn ordered(&self, ids: &Tensor) -> Result<Self> {
        let [weight, bias] = &self.decoder;
        Ok(Parameters { decoder: [weight.index_select(ids, 0)?, bias.index_select(ids, 0)?], ..self.clone() })
    }
}

/// An output layer with logits that are mixed by gates.
#[derive(Clone, Debug)]
pub struct Mixtape {
    config: MixtapeConfig,
    parameters: Parameters,
    /// `[vocab]`: the ids in descending order of their frequency
    ids: Tensor,
    /// `[vocab]`: the place of each id in that order
    places: Tensor,
}

impl Mixtape {
    /// Makes the head with variables `latent.weight`, `latent.bias`, `decoder.weight`, `decoder.bias`,
    /// `gate.latent.weight`, `gate.weight`, `gate.rows.weight` and `gate.rows.bias`; the most frequent ids by these
    /// counts have gates of their own.
    pub fn new(config: MixtapeConfig, counts: &[f64], vb: VarBuilder) -> crate::Result<Self> {
        let MixtapeConfig { hidden, vocab, context, gate, frequent, .. } = config;
        if counts.len() != vocab {
            return Err(format!("{} counts for a vocabulary of {vocab}", counts.len()).into());
        }
        let uniform = |bound: f64| Init::Uniform { lo: -bound, up: bound };
        let by_inputs = |inputs: usize| uniform(1.0 / (inputs as f64).sqrt());
        let zero = Init::Const(0.0);
        let parameters = Parameters {
            latent: [
                vb.get_with_hints((COMPONENTS * context, hidden), "latent.weight", by_inputs(hidden))?,
                vb.get_with_hints(COMPONENTS * context, "latent.bias", zero)?,
            ],
            decoder: [
                vb.get_with_hints((vocab, context), "decoder.weight", uniform(0.1))?,
                vb.get_with_hints(vocab, "decoder.bias", zero)?,
            ],
            gate_latent: vb.get_with_hints((GATES * gate, hidden), "gate.latent.weight", by_inputs(hidden))?,
            gate_weight: vb.get_with_hints((GATES, hidden), "gate.weight", by_inputs(hidden))?,
            gate_rows: [
                vb.get_with_hints((frequent, gate), "gate.rows.weight", uniform(0.1))?,
                vb.get_with_hints((GATES, frequent), "gate.rows.bias", zero)?,
            ],
        };
        let mut ids: Vec<u32> = (0..vocab as u32).collect();
        ids.sort_by(|&a, &b| counts[b as usize].total_cmp(&counts[a as usize]));
        let mut places = vec![0u32; vocab];
        ids.iter().enumerate().for_each(|(place, &id)| places[id as usize] = place as u32);
        let (ids, places) = (Tensor::new(ids, vb.device())?, Tensor::new(places, vb.device())?);
        Ok(Mixtape { config, parameters, ids, places })
    }

    /// Computes the logits `[positions, vocab]` of hidden states `[positions, hidden]`, in descending order of
    /// frequency, as the decoder's rows are. A mask `[positions, 4 d]` is that of the contexts' dropout.
    fn logits(&self, parameters: &Parameters, hidden: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let MixtapeConfig { vocab, context, gate, frequent, .. } = self.config;
        let Parameters { latent, decoder, gate_latent, gate_weight, gate_rows } = parameters;
        let positions = hidden.dim(0)?;
        let mut contexts = hidden.matmul(&latent[0].t()?)?.broadcast_add(&latent[1])?.tanh()?;
        if let Some(mask) = mask {
            contexts = (contexts * mask)?;
        }
        let contexts = contexts.reshape((positions, COMPONENTS, context))?;
        let [rows, bias] = decoder;
        // [positions, 3]: what the gates of all ids have in common
        let common = hidden.matmul(&gate_weight.t()?)?;

        let products = contexts.flatten_to(1)?.matmul(&rows.narrow(0, 0, frequent)?.t()?)?;
        let products = products.reshape((positions, COMPONENTS, frequent))?;
        let gates = hidden.matmul(&gate_latent.t()?)?.tanh()?.reshape((positions * GATES, gate))?;
        let gates = gates.matmul(&gate_rows[0].t()?)?.reshape((positions, GATES, frequent))?;
        let gates = gates.broadcast_add(&common.unsqueeze(2)?)?.broadcast_add(&gate_rows[1])?;
        let mut logits = vec![(tree(&gates)? * products)?.sum(1)?];

        if frequent < vocab {
            let priors = tree(&common.unsqueeze(2)?)?;
            let mixed = contexts.broadcast_mul(&priors)?.sum(1)?;
            logits.push(mixed.matmul(&rows.narrow(0, frequent, vocab - frequent)?.t()?)?);
        }
        Ok(Tensor::cat(&logits, 1)?.broadcast_add(bias)?)
    }

    /// Computes the negative log-likelihoods `[positions]` of the ids in these places.
    fn nll(&self, parameters: &Parameters, chunk: &Chunk) -> Result<Tensor> {
        let log_probs = ops::log_softmax(&self.logits(parameters, &chunk.hidden, chunk.mask.as_ref())?, D::Minus1)?;
        Ok(log_probs.gather(&chunk.places.unsqueeze(1)?, 1)?.squeeze(1)?.neg()?)
    }

    /// Returns the number of positions of a chunk.
    fn positions_per_chunk(&self) -> usize {
        let numbers = self.config.vocab + (COMPONENTS + GATES + COMPONENTS) * self.config.frequent;
        (CHUNK_BYTES / size_of::<f32>() / numbers).max(1)
    }

    /// Draws the mask of the contexts' dropout, `[positions, 4 d]`, the same for all steps of a sequence.
    fn mask(&self, hidden: &Tensor, masks: DropoutMasks) -> Result<Option<Tensor>> {
        let mut rng = match masks {
            DropoutMasks::Seeded(seed) => StdRng::seed_from_u64(seed),
            DropoutMasks::Random => StdRng::seed_from_u64(rand::rng().random()),
            _ => return Ok(None),
        };
        if self.config.dropout == 0.0 {
            return Ok(None);
        }
        let width = COMPONENTS * self.config.context;
        let (leading, steps) = match &hidden.dims()[..hidden.rank() - 1] {
            [leading @ .., steps] if !leading.is_empty() => (leading.iter().product::<usize>(), *steps),
            leading => (leading.iter().product(), 1),
        };
        let keep = 1.0 - self.config.dropout;
        let values = (0..leading * width).map(|_| if rng.random_bool(keep) { (1.0 / keep) as f32 } else { 0.0 });
        let mask = Tensor::from_iter(values, hidden.device())?.reshape((leading, 1, width))?;
        Ok(Some(mask.broadcast_as((leading, steps, width))?.contiguous()?.flatten_to(1)?))
    }
}

/// The operands of a chunk of positions.
struct Chunk {
    /// `[positions, hidden]`
    hidden: Tensor,
    /// `[positions]`: the places of the targets
    places: Tensor,
    /// `[positions, 4 d]`
    mask: Option<Tensor>,
}

/// Turns the logits `[positions, 3, n]` of the tree's sigmoids into the priors `[positions, 4, n]`.
fn tree(logits: &Tensor) -> Result<Tensor> {
    let gate = |j| -> Result<[Tensor; 2]> {
        let gate = ops::sigmoid(&logits.narrow(1, j, 1)?)?;
        let other = gate.affine(-1.0, 1.0)?;
        Ok([gate, other])
    };
    let ([root, not_root], left, right) = (gate(0)?, gate(1)?, gate(2)?);
    let leaves = [(&root, &left[0]), (&root, &left[1]), (&not_root, &right[0]), (&not_root, &right[1])];
    let leaves = leaves.into_iter().map(|(gate, leaf)| gate * leaf).collect::<candle_core::Result<Vec<_>>>()?;
    Ok(Tensor::cat(&leaves, 1)?)
}

impl OutputLayer for Mixtape {
    fn hidden_size(&self) -> usize {
        self.config.hidden
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab
    }

    /// The graph of a differentiable result holds the logits of all positions, contexts and gates.
    fn log_probs(&self, hidden: &Tensor) -> Result<Tensor> {
        let leading = &hidden.dims()[..hidden.rank() - 1];
        let shape = [leading, &[self.config.vocab]].concat();
        let hidden = hidden.flatten_to(hidden.rank() - 2)?;
        let parameters = self.parameters.ordered(&self.ids)?;
        let mut chunks = vec![];
        for first in (0..hidden.dim(0)?).step_by(self.positions_per_chunk()) {
            let n = self.positions_per_chunk().min(hidden.dim(0)? - first);
            let logits = self.logits(&parameters, &hidden.narrow(0, first, n)?, None)?;
            chunks.push(ops::log_softmax(&logits, D::Minus1)?.index_select(&self.places, 1)?);
        }
        if chunks.is_empty() {
            return Ok(Tensor::zeros(shape, DType::F32, hidden.device())?);
        }
        Ok(Tensor::cat(&chunks, 0)?.reshape(shape)?)
    }

    /// A loss without a reduction holds the graph of all positions.
    fn loss(&self, hidden: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        let mask = self.mask(hidden, options.dropout)?;
        let (masked, ids) = options.mask_ignored(hidden, targets)?;
        let positions = targets.elem_count();
        let flat = masked.reshape((positions, self.config.hidden))?;
        let places = self.places.index_select(&ids.flatten_all()?, 0)?;
        let upstream = match (options.train, options.positions.reduction) {
            (true, Reduction::Mean | Reduction::Sum) => Some(upstream(targets, options)?),
            _ => None,
        };
        let parameters = match (options.train, &upstream) {
            (true, None) => self.parameters.ordered(&self.ids)?,
            (false, _) => self.parameters.map(|tensor| Ok(tensor.detach()))?.ordered(&self.ids)?,
            // The gradients of a chunk reach no further than these variables.
            (true, Some(_)) => {
                let constants = self.parameters.map(|tensor| Ok(tensor.detach()))?.ordered(&self.ids)?;
                constants.map(|tensor| Ok(Var::from_tensor(tensor)?.into_inner()))?
            }
        };
        let mut nll = vec![];
        let mut sums: [Option<Tensor>; 8] = Default::default();
        let mut hidden_gradients = vec![];
        for first in (0..positions).step_by(self.positions_per_chunk()) {
            let n = self.positions_per_chunk().min(positions - first);
            let narrow = |tensor: &Tensor| tensor.narrow(0, first, n);
            let hidden = narrow(&flat)?;
            let mask = mask.as_ref().map(narrow).transpose()?;
            let chunk = |hidden: Tensor| -> Result<Chunk> {
                Ok(Chunk { hidden, places: narrow(&places)?, mask: mask.clone() })
            };
            let Some(upstream) = &upstream else {
                let hidden = if options.train { hidden } else { hidden.detach() };
                nll.push(self.nll(&parameters, &chunk(hidden)?)?);
                continue;
            };
            let variable = Var::from_tensor(&hidden.detach())?;
            let values = self.nll(&parameters, &chunk(variable.as_tensor().clone())?)?;
            let gradients = (&values * narrow(upstream)?)?.sum_all()?.backward()?;
            nll.push(values.detach());
            hidden_gradients.extend(gradients.get(&variable).cloned());
            for (sum, parameter) in sums.iter_mut().zip(parameters.all()) {
                let Some(gradient) = gradients.get(parameter) else { continue };
                *sum = Some(match sum.take() {
                    Some(sum) => (sum + gradient)?,
                    None => gradient.clone(),
                });
            }
        }
        if nll.is_empty() {
            return Loss::from_nll(&Tensor::zeros(targets.dims(), DType::F32, targets.device())?, targets, options);
        }
        let mut loss = Loss::from_nll(&Tensor::cat(&nll, 0)?.reshape(targets.dims())?, targets, options)?;
        if upstream.is_some() {
            let hidden_gradient = Tensor::cat(&hidden_gradients, 0)?;
            loss.value = with_gradient(&loss.value, &flat, &hidden_gradient)?;
            for (i, (parameter, sum)) in self.parameters.all().into_iter().zip(sums).enumerate() {
                let Some(sum) = sum else { continue };
                // The gradients of the decoder are in the order of its rows here.
                let sum = if DECODER.contains(&i) { sum.index_select(&self.places, 0)? } else { sum };
                loss.value = with_gradient(&loss.value, parameter, &sum)?;
            }
        }
        Ok(loss)
    }
}

/// Computes the derivative of a reduced loss in the negative log-likelihood of each position, `[positions]`.
fn upstream(targets: &Tensor, options: &LossOptions) -> Result<Tensor> {
    let nll = Var::zeros(targets.dims(), DType::F32, targets.device())?;
    let loss = Loss::from_nll(nll.as_tensor(), targets, options)?;
    match loss.value.backward()?.get(&nll) {
        Some(gradient) => Ok(gradient.flatten_all()?),
        None => Ok(Tensor::zeros(targets.elem_count(), DType::F32, targets.device())?),
    }
}

/// Returns the value, whose backward pass adds this gradient to that of a tensor.
fn with_gradient(value: &Tensor, tensor: &Tensor, gradient: &Tensor) -> Result<Tensor> {
    let zero = ((tensor - tensor.detach())? * gradient.detach())?.sum_all()?;
    Ok((value + zero)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use candle_nn::VarMap;

    const CONFIG: MixtapeConfig =
        MixtapeConfig { hidden: 5, vocab: 13, context: 4, gate: 3, frequent: 6, dropout: 0.0 };

    fn numbers(tensor: &Tensor) -> Vec<f64> {
        tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
    }

    /// Returns a head whose parameters are random and not small, with its variables.
    fn head(config: MixtapeConfig) -> (Mixtape, Vec<Var>) {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let counts: Vec<f64> = (0..config.vocab).map(|id| (id * 5 % config.vocab) as f64).collect();
        let head = Mixtape::new(config, &counts, vb).expect("valid sizes");
        let mut rng = StdRng::seed_from_u64(3);
        let variables: Vec<Var> = varmap.all_vars();
        for variable in &variables {
            let values: Vec<f32> = (0..variable.elem_count()).map(|_| rng.random_range(-1.0..1.0)).collect();
            variable.set(&Tensor::from_vec(values, variable.dims(), &Device::Cpu).unwrap()).unwrap();
        }
        (head, variables)
    }

    fn hidden() -> Var {
        let mut rng = StdRng::seed_from_u64(4);
        let values: Vec<f32> = (0..7 * 5).map(|_| rng.random_range(-1.0..1.0)).collect();
        Var::from_tensor(&Tensor::from_vec(values, (7, 5), &Device::Cpu).unwrap()).unwrap()
    }

    fn targets() -> Tensor {
        Tensor::new(&[0i64, 12, 5, -100, 3, 3, 8], &Device::Cpu).unwrap()
    }

    /// The logits by the equations, one at a time.
    fn plain_logits(head: &Mixtape, hidden: &[f64]) -> Vec<f64> {
        let MixtapeConfig { vocab, context, gate, frequent, .. } = head.config;
        let [latent, latent_bias, weight, bias, gate_latent, gate_weight, gate_rows, gate_bias] =
            head.parameters.all().map(numbers);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let row = |matrix: &[f64], i: usize, width: usize| matrix[i * width..][..width].to_vec();
        let sigma = |x: f64| 1.0 / (1.0 + (-x).exp());
        let places: Vec<u32> = head.places.to_vec1().unwrap();
        let logit = |id: usize| {
            let place = places[id] as usize;
            let l = |j: usize| {
                let common = dot(&row(&gate_weight, j, hidden.len()), hidden);
                let own = (0..gate).map(|i| {
                    gate_rows[place * gate + i] * dot(&row(&gate_latent, j * gate + i, hidden.len()), hidden).tanh()
                });
                if place < frequent {
                    common + own.sum::<f64>() + gate_bias[j * frequent + place]
                } else {
                    common
                }
            };
            let s = [sigma(l(0)), sigma(l(1)), sigma(l(2))];
            let priors = [s[0] * s[1], s[0] * (1.0 - s[1]), (1.0 - s[0]) * s[2], (1.0 - s[0]) * (1.0 - s[2])];
            let product = |k: usize| {
                let element = |i: usize| {
                    let i = k * context + i;
                    (dot(&row(&latent, i, hidden.len()), hidden) + latent_bias[i]).tanh()
                };
                (0..context).map(|i| element(i) * weight[id * context + i]).sum::<f64>()
            };
            (0..COMPONENTS).map(|k| priors[k] * product(k)).sum::<f64>() + bias[id]
        };
        (0..vocab).map(logit).collect()
    }

    #[test]
    fn log_probabilities_follow_the_equations() {
        for frequent in [0, 6, 13] {
            let (head, _) = head(MixtapeConfig { frequent, ..CONFIG });
            let hidden = hidden();
            let found = numbers(&head.log_probs(&hidden).unwrap());
            for (found, hidden) in found.chunks(13).zip(numbers(&hidden).chunks(5)) {
                let z = plain_logits(&head, hidden);
                let lse = z.iter().map(|z| z.exp()).sum::<f64>().ln();
                assert!(found.iter().zip(&z).all(|(found, z)| (found - (z - lse)).abs() < 1e-5), "{frequent}");
            }
        }
    }

    #[test]
    fn gradients_of_every_parameter_are_central_differences() {
        let (head, variables) = head(CONFIG);
        let hidden = hidden();
        let all: Vec<&Var> = variables.iter().chain([&hidden]).collect();
        for reduction in [Reduction::Mean, Reduction::Sum] {
            let options = LossOptions::new().with_ignore_index(-100).with_reduction(reduction);
            let value = || {
                let loss = head.loss(&hidden, &targets(), &options).unwrap();
                numbers(&loss.nll).iter().sum::<f64>() / if reduction == Reduction::Mean { 6.0 } else { 1.0 }
            };
            let loss = head.loss(&hidden, &targets(), &options).unwrap();
            assert!((numbers(&loss.value)[0] - value()).abs() < 1e-5);
            let gradients = loss.backward().unwrap();
            for variable in &all {
                let gradient = numbers(gradients.get(variable.as_tensor()).expect("a gradient"));
                assert!(gradient.iter().any(|g| *g != 0.0));
                let start: Vec<f32> = variable.flatten_all().unwrap().to_vec1().unwrap();
                for i in (0..start.len()).step_by(3) {
                    let at = |step: f32| {
                        let mut values = start.clone();
                        values[i] += step;
                        variable.set(&Tensor::from_vec(values, variable.dims(), &Device::Cpu).unwrap()).unwrap();
                        value()
                    };
                    let difference = (at(0.02) - at(-0.02)) / 0.04;
                    at(0.0);
                    assert!(
                        (difference - gradient[i]).abs() < 2e-3,
                        "{:?} {i}: {difference} {}",
                        variable.dims(),
                        gradient[i]
                    );
                }
            }
        }
    }

    #[test]
    fn a_loss_without_a_reduction_has_the_same_gradients() {
        let (head, variables) = head(CONFIG);
        let hidden = hidden();
        let options = LossOptions::new().with_ignore_index(-100);
        let gradients = |options: &LossOptions| {
            let value = head.loss(&hidden, &targets(), options).unwrap().value.sum_all().unwrap();
            let gradients = value.backward().unwrap();
            variables.iter().flat_map(|variable| numbers(gradients.get(variable).unwrap())).collect::<Vec<_>>()
        };
        let sum = gradients(&options.clone().with_reduction(Reduction::Sum));
        let each = gradients(&options.with_reduction(Reduction::None));
        assert!(sum.iter().zip(&each).all(|(a, b)| (a - b).abs() < 1e-5));
    }

    #[test]
    fn no_positions_have_a_loss() {
        let (head, _) = head(CONFIG);
        let hidden = Tensor::zeros((0, 5), DType::F32, &Device::Cpu).unwrap();
        let targets = Tensor::zeros(0, DType::U32, &Device::Cpu).unwrap();
        assert_eq!(numbers(&head.loss(&hidden, &targets, &LossOptions::new()).unwrap().value), [0.0]);
        assert_eq!(head.log_probs(&hidden).unwrap().dims(), [0, 13]);
    }

    #[test]
    fn contexts_are_dropped_in_training_alone() {
        let (head, _) = head(MixtapeConfig { dropout: 0.5, ..CONFIG });
        let value = |options: LossOptions| {
            numbers(&head.loss(&hidden(), &targets(), &options.with_ignore_index(-100)).unwrap().value)[0]
        };
        let seeded = |seed| value(LossOptions::new().with_dropout(DropoutMasks::Seeded(seed)));
        assert_eq!(seeded(1), seeded(1));
        assert_ne!(seeded(1), seeded(2));
        assert_eq!(value(LossOptions::evaluation()), value(LossOptions::evaluation()));
    }

    #[test]
    fn the_sizes_of_equal_parameters_are_close() {
        let config = MixtapeConfig::equal_to_softmax(10_000, 220);
        let softmax = 10_000 * 221;
        assert!(config.parameters().abs_diff(softmax) * 200 < softmax, "{config:?}");
        let (_, variables) = head(CONFIG);
        assert_eq!(variables.iter().map(|variable| variable.elem_count()).sum::<usize>(), CONFIG.parameters());
    }
}
