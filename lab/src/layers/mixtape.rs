//! Mixtape, whose logits are mixed where a mixture of softmaxes mixes probabilities: one softmax follows (Yang, Luong,
//! Salakhutdinov, Le: Mixtape: Breaking the Softmax Bottleneck Efficiently. NeurIPS 2019). With a hidden state g,
//!
//! ```text
//! z_v = sum_k pi_k(v) c_k . w_v + b_v         c_k = tanh(H_k g), k = 1 .. 4
//! l_j(v) = v_v . tanh(U_j g) + u_j . g + b_jv    for frequent ids v, j = 1 .. 3 (vector gating)
//! l_j(v) = u_j . g                              for all other ids, which share one gate
//! ```
//!
//! and the priors are a tree of sigmoids, `s_j = sigma(l_j)`: `pi_1 = s_1 s_2`, `pi_2 = s_1 (1 - s_2)`, `pi_3 = (1 -
//! s_1) s_3`, `pi_4 = (1 - s_1) (1 - s_3)`. The logits of the ids that share a gate are one product with the mixed
//! context `sum_k pi_k c_k`.
//!
//! A loss and its gradients are computed chunk by chunk: what is held has the logits of one chunk of positions.

use candle_core::{DType, Tensor, Var, D};
use candle_nn::{ops, Embedding, Init, VarBuilder};
use mos_head::{DropoutMasks, Loss, LossOptions, OutputLayer, Reduction, Result};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::ops::Range;

/// The number of contexts, K: the leaves of the tree.
pub const COMPONENTS: usize = 4;
/// The number of sigmoids of the tree.
const GATES: usize = COMPONENTS - 1;
/// The tensor of a checkpoint that has the ids in descending order of their frequency.
pub const ORDER: &str = "head.ids";
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
        let with_context = |context: usize| Self::with_context(vocab, hidden, context);
        let softmax = vocab * (hidden + 1);
        let error = |context: &usize| with_context(*context).parameters().abs_diff(softmax);
        with_context((1..=hidden).min_by_key(error).unwrap_or(1))
    }

    /// Returns the sizes with contexts of this size, gates of a quarter of it, and half of the ids as frequent ones.
    pub fn with_context(vocab: usize, hidden: usize, context: usize) -> Self {
        MixtapeConfig { hidden, vocab, context, gate: context.div_ceil(4), frequent: vocab / 2, dropout: 0.0 }
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
        let uniform = Init::Uniform { lo: -0.1, up: 0.1 };
        let weight = vb.get_with_hints((config.vocab, config.context), "decoder.weight", uniform)?;
        Self::with_decoder(config, counts, weight, vb)
    }

    /// Makes the head as [`Mixtape::new`] does, but for `decoder.weight`: it is the weight `[vocab, d]` of this
    /// embedding.
    pub fn tied(config: MixtapeConfig, counts: &[f64], embedding: &Embedding, vb: VarBuilder) -> crate::Result<Self> {
        let (weight, shape) = (embedding.embeddings(), [config.vocab, config.context]);
        if weight.dims() != shape {
            return Err(format!("the embedding is {:?}, but a tied decoder is {shape:?}", weight.dims()).into());
        }
        Self::with_decoder(config, counts, weight.clone(), vb)
    }

    fn with_decoder(
        config: MixtapeConfig,
        counts: &[f64],
        decoder_weight: Tensor,
        vb: VarBuilder,
    ) -> crate::Result<Self> {
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
            decoder: [decoder_weight, vb.get_with_hints(vocab, "decoder.bias", zero)?],
            gate_latent: vb.get_with_hints((GATES * gate, hidden), "gate.latent.weight", by_inputs(hidden))?,
            gate_weight: vb.get_with_hints((GATES, hidden), "gate.weight", by_inputs(hidden))?,
            gate_rows: [
                vb.get_with_hints((frequent, gate), "gate.rows.weight", uniform(0.1))?,
                vb.get_with_hints((GATES, frequent), "gate.rows.bias", zero)?,
            ],
        };
        let ids = by_frequency(counts);
        let mut places = vec![0u32; vocab];
        ids.iter().enumerate().for_each(|(place, &id)| places[id as usize] = place as u32);
        let (ids, places) = (Tensor::new(ids, vb.device())?, Tensor::new(places, vb.device())?);
        Ok(Mixtape { config, parameters, ids, places })
    }

    /// Computes the logits `[positions, vocab]` of hidden states `[positions, hidden]`, in descending order of
    /// frequency, as the decoder's rows are. A mask `[positions, 4 d]` is that of the contexts' dropout.
    fn logits(&self, parameters: &Parameters, hidden: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let MixtapeConfig { vocab, context, frequent, .. } = self.config;
        let Parameters { latent, decoder, .. } = parameters;
        let positions = hidden.dim(0)?;
        let mut contexts = hidden.matmul(&latent[0].t()?)?.broadcast_add(&latent[1])?.tanh()?;
        if let Some(mask) = mask {
            contexts = (contexts * mask)?;
        }
        let contexts = contexts.reshape((positions, COMPONENTS, context))?;
        let [rows, bias] = decoder;
        let (priors, shared) = self.priors_by_frequency(parameters, hidden)?;
        let products = contexts.flatten_to(1)?.matmul(&rows.narrow(0, 0, frequent)?.t()?)?;
        let products = products.reshape((positions, COMPONENTS, frequent))?;
        let mut logits = vec![(priors * products)?.sum(1)?];
        if frequent < vocab {
            let mixed = contexts.broadcast_mul(&shared)?.sum(1)?;
            logits.push(mixed.matmul(&rows.narrow(0, frequent, vocab - frequent)?.t()?)?);
        }
        Ok(Tensor::cat(&logits, 1)?.broadcast_add(bias)?)
    }

    /// Computes the priors of the frequent ids `[positions, 4, frequent]`, in descending order of frequency, and those
    /// that all other ids share, `[positions, 4, 1]`.
    fn priors_by_frequency(&self, parameters: &Parameters, hidden: &Tensor) -> Result<(Tensor, Tensor)> {
        let MixtapeConfig { gate, frequent, .. } = self.config;
        let Parameters { gate_latent, gate_weight, gate_rows: [rows, bias], .. } = parameters;
        let positions = hidden.dim(0)?;
        // [positions, 3, 1]: what the gates of all ids have in common
        let common = hidden.matmul(&gate_weight.t()?)?.unsqueeze(2)?;
        let gates = hidden.matmul(&gate_latent.t()?)?.tanh()?.reshape((positions * GATES, gate))?;
        let gates = gates.matmul(&rows.t()?)?.reshape((positions, GATES, frequent))?;
        let gates = gates.broadcast_add(&common)?.broadcast_add(bias)?;
        Ok((tree(&gates)?, tree(&common)?))
    }

    /// Computes the priors `[positions, 4, vocab]` of each id's contexts after hidden states `[positions, hidden]`.
    pub fn priors(&self, hidden: &Tensor) -> Result<Tensor> {
        let MixtapeConfig { vocab, frequent, .. } = self.config;
        let (priors, shared) = self.priors_by_frequency(&self.parameters, hidden)?;
        let shared = shared.broadcast_as((hidden.dim(0)?, COMPONENTS, vocab - frequent))?;
        Ok(Tensor::cat(&[priors, shared.contiguous()?], 2)?.index_select(&self.places, 2)?)
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

/// Returns the ids in descending order of these counts; ids of equal counts stay in their order.
pub fn by_frequency(counts: &[f64]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..counts.len() as u32).collect();
    ids.sort_by(|&a, &b| counts[b as usize].total_cmp(&counts[a as usize]));
    ids
}

/// Returns counts by which the ids are in this order.
pub fn counts_in_order(ids: &[u32]) -> crate::Result<Vec<f64>> {
    let mut counts = vec![0.0; ids.len()];
    for (place, &id) in ids.iter().enumerate() {
        match counts.get_mut(id as usize) {
            Some(count) if *count == 0.0 => *count = (ids.len() - place) as f64,
            _ => return Err(format!("the order of {} ids has {id} twice, or it is not below it", ids.len()).into()),
        }
    }
    Ok(counts)
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
mod tests;
