//! Hidden states become contexts and log-priors.
//!
//! ```text
//! pi = softmax(W_prior h),    c_k = tanh(W_k h + b_k)            (Yang et al., 2018, section 2.3)
//! ```

use candle_core::{Tensor, D};
use candle_nn::{Init, VarBuilder};

use crate::autograd;
use crate::backend;
use crate::check::{check_alike, check_dropout, check_hidden, check_sizes};
use crate::decoding::Sampler;
use crate::{Error, Result};

/// What is applied to the contexts after their linear map.
///
/// # Examples
///
/// ```
/// use mos_head::{Activation, MixtureConfig};
///
/// let config = MixtureConfig::new(64, 32, 1000, 5).with_activation(Activation::Identity);
/// assert_ne!(config.activation, Activation::default());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// The hyperbolic tangent, as in the paper.
    #[default]
    Tanh,
    /// Nothing.
    Identity,
}

/// The sizes and options of a [`MixtureOfSoftmaxes`](crate::MixtureOfSoftmaxes) or a
/// [`MixtureOfContexts`](crate::MixtureOfContexts).
///
/// # Examples
///
/// ```
/// use mos_head::{Activation, MixtureConfig};
///
/// // The paper's Penn Treebank model: hidden size 620, d = 280, 10,000 token ids, 15 components.
/// let config = MixtureConfig::new(620, 280, 10_000, 15).with_dropout(0.29);
/// assert_eq!(config.activation, Activation::Tanh);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MixtureConfig {
    /// Size of a hidden state.
    pub hidden: usize,
    /// Size of a context, d.
    pub context: usize,
    /// Number of token ids.
    pub vocab: usize,
    /// Components of the mixture, K.
    pub components: usize,
    /// Whether the decoder has a bias. It has by default.
    pub decoder_bias: bool,
    /// Whether the priors have a bias. They have none by default, as in the paper.
    pub prior_bias: bool,
    /// What is applied to the contexts. The default is tanh, as in the paper.
    pub activation: Activation,
    /// Locked dropout on the contexts while training: one mask for each sequence, the same at all its steps (the
    /// paper's context vector V-dropout). The default is 0.
    pub dropout: f64,
}

impl MixtureConfig {
    /// The configuration of the paper with these sizes, without dropout.
    pub fn new(hidden: usize, context: usize, vocab: usize, components: usize) -> Self {
        MixtureConfig {
            hidden,
            context,
            vocab,
            components,
            decoder_bias: true,
            prior_bias: false,
            activation: Activation::Tanh,
            dropout: 0.0,
        }
    }

    /// Sets whether the decoder has a bias.
    pub fn with_decoder_bias(self, decoder_bias: bool) -> Self {
        MixtureConfig { decoder_bias, ..self }
    }

    /// Sets whether the priors have a bias.
    pub fn with_prior_bias(self, prior_bias: bool) -> Self {
        MixtureConfig { prior_bias, ..self }
    }

    /// Sets what is applied to the contexts.
    pub fn with_activation(self, activation: Activation) -> Self {
        MixtureConfig { activation, ..self }
    }

    /// Sets the probability with which locked dropout zeroes an element of the contexts.
    pub fn with_dropout(self, dropout: f64) -> Self {
        MixtureConfig { dropout, ..self }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        let sizes = [
            ("hidden", self.hidden),
            ("context", self.context),
            ("vocab", self.vocab),
            ("components", self.components),
        ];
        check_sizes(&sizes)?;
        check_dropout(self.dropout)
    }
}

/// The parameters of a [`MixtureOfSoftmaxes`](crate::MixtureOfSoftmaxes) or a
/// [`MixtureOfContexts`](crate::MixtureOfContexts) as tensors, for `from_tensors`.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::{Activation, MixtureOfSoftmaxes, MixtureTensors, OutputLayer};
///
/// # fn main() -> mos_head::Result<()> {
/// let (hidden, d, vocab, components) = (16, 8, 100, 3);
/// let random = |shape: (usize, usize)| Tensor::randn(0f32, 0.1, shape, &Device::Cpu);
/// let tensors = MixtureTensors {
///     prior_weight: random((components, hidden))?,
///     prior_bias: None,
///     latent_weight: random((components * d, hidden))?,
///     latent_bias: random((1, components * d))?.squeeze(0)?,
///     decoder_weight: random((vocab, d))?,
///     decoder_bias: None,
/// };
/// let head = MixtureOfSoftmaxes::from_tensors(tensors, Activation::Tanh)?;
/// assert_eq!((head.hidden_size(), head.vocab_size()), (16, 100));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct MixtureTensors {
    /// `[K, hidden]`
    pub prior_weight: Tensor,
    /// `[K]`
    pub prior_bias: Option<Tensor>,
    /// `[K * d, hidden]`: rows `k d .. (k + 1) d` make the context of component k
    pub latent_weight: Tensor,
    /// `[K * d]`
    pub latent_bias: Tensor,
    /// `[vocab, d]`
    pub decoder_weight: Tensor,
    /// `[vocab]`
    pub decoder_bias: Option<Tensor>,
}

/// The linear maps from a hidden state to the contexts and log-priors of K components.
#[derive(Clone, Debug)]
pub(crate) struct Projection {
    /// `[K, hidden]`
    prior_weight: Tensor,
    /// `[K]`: zeros, if the priors have no bias
    prior_bias: Tensor,
    /// `[K * d, hidden]`
    latent_weight: Tensor,
    /// `[K * d]`
    latent_bias: Tensor,
    activation: Activation,
    dropout: f64,
    hidden: usize,
    components: usize,
    context: usize,
}

impl Projection {
    /// Variables `prior.weight`, `prior.bias`, `latent.weight`, `latent.bias`, initialised as PyTorch's `nn.Linear`:
    /// uniform within 1 / sqrt(hidden).
    pub(crate) fn new(config: &MixtureConfig, vb: &VarBuilder) -> Result<Self> {
        config.validate()?;
        let &MixtureConfig { hidden, context, components, .. } = config;
        let bound = 1.0 / (hidden as f64).sqrt();
        let init = Init::Uniform { lo: -bound, up: bound };
        let (prior, latent) = (vb.pp("prior"), vb.pp("latent"));
        let prior_weight = prior.get_with_hints((components, hidden), "weight", init)?;
        let prior_bias = match config.prior_bias {
            true => prior.get_with_hints(components, "bias", init)?,
            false => Tensor::zeros(components, vb.dtype(), vb.device())?,
        };
        Ok(Projection {
            prior_weight,
            prior_bias,
            latent_weight: latent.get_with_hints((components * context, hidden), "weight", init)?,
            latent_bias: latent.get_with_hints(components * context, "bias", init)?,
            activation: config.activation,
            dropout: config.dropout,
            hidden,
            components,
            context,
        })
    }

    pub(crate) fn from_tensors(tensors: &MixtureTensors, activation: Activation) -> Result<Self> {
        let matrix = |argument, tensor: &Tensor| match *tensor.dims() {
            [rows, columns] => Ok((rows, columns)),
            _ => Err(Error::shape(argument, "a matrix", tensor.dims())),
        };
        let (components, hidden) = matrix("prior.weight", &tensors.prior_weight)?;
        let (_, context) = matrix("decoder.weight", &tensors.decoder_weight)?;
        check_sizes(&[("hidden", hidden), ("context", context), ("components", components)])?;
        let check = |argument, tensor: &Tensor, dims: &[usize]| match tensor.dims() == dims {
            true => Ok(()),
            false => Err(Error::shape(argument, format!("{dims:?}"), tensor.dims())),
        };
        check("latent.weight", &tensors.latent_weight, &[components * context, hidden])?;
        check("latent.bias", &tensors.latent_bias, &[components * context])?;
        if let Some(bias) = &tensors.prior_bias {
            check("prior.bias", bias, &[components])?;
        }
        let others = [
            ("prior.weight", Some(&tensors.prior_weight)),
            ("prior.bias", tensors.prior_bias.as_ref()),
            ("latent.weight", Some(&tensors.latent_weight)),
            ("latent.bias", Some(&tensors.latent_bias)),
        ];
        for (argument, tensor) in others {
            if let Some(tensor) = tensor {
                check_alike(argument, tensor, "decoder.weight", &tensors.decoder_weight)?;
            }
        }
        Ok(Projection {
            prior_weight: tensors.prior_weight.clone(),
            prior_bias: match &tensors.prior_bias {
                Some(bias) => bias.clone(),
                None => Tensor::zeros(components, tensors.prior_weight.dtype(), tensors.prior_weight.device())?,
            },
            latent_weight: tensors.latent_weight.clone(),
            latent_bias: tensors.latent_bias.clone(),
            activation,
            dropout: 0.0,
            hidden,
            components,
            context,
        })
    }

    pub(crate) fn with_dropout(self, dropout: f64) -> Result<Self> {
        check_dropout(dropout)?;
        Ok(Projection { dropout, ..self })
    }

    pub(crate) fn hidden(&self) -> usize {
        self.hidden
    }

    pub(crate) fn components(&self) -> usize {
        self.components
    }

    /// hidden `[.., H]` -> contexts `[.., K, d]` and log-priors `[.., K]`, these in f32 for half-precision states.
    pub(crate) fn forward(&self, hidden: &Tensor, train: bool) -> Result<(Tensor, Tensor)> {
        check_hidden(hidden, self.hidden, &self.latent_weight)?;
        let leading = &hidden.dims()[..hidden.rank() - 1];
        let rows = hidden.reshape(((), self.hidden))?;
        let log_priors = self.log_priors(&rows)?;
        let mut contexts = self.contexts(&rows)?.reshape([leading, &[self.components, self.context]].concat())?;
        if train && self.dropout > 0.0 {
            contexts = contexts.broadcast_mul(&locked_mask(&contexts, self.dropout)?)?;
        }
        let log_priors = log_priors.reshape([leading, &[self.components]].concat())?;
        Ok((contexts, log_priors))
    }

    /// hidden `[.., H]` -> the context of one component `[.., 1, d]`, drawn from the priors.
    pub(crate) fn forward_drawn(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Tensor> {
        check_hidden(hidden, self.hidden, &self.latent_weight)?;
        let shape = [&hidden.dims()[..hidden.rank() - 1], &[1, self.context]].concat();
        let rows = hidden.reshape(((), self.hidden))?.detach();
        let drawn = sampler.choose(&self.log_priors(&rows)?)?;
        // The rows of each component together, and where they go from there.
        let mut order: Vec<u32> = (0..drawn.len() as u32).collect();
        order.sort_by_key(|&row| drawn[row as usize]);
        let mut places = vec![0u32; order.len()];
        order.iter().zip(0..).for_each(|(&row, place)| places[row as usize] = place);
        let index = |rows: &[u32]| Tensor::new(rows, hidden.device());
        let contexts = order.chunk_by(|&a, &b| drawn[a as usize] == drawn[b as usize]).map(|of_one| {
            let first = drawn[of_one[0] as usize] as usize * self.context;
            let weight = self.latent_weight.narrow(0, first, self.context)?.detach();
            let bias = self.latent_bias.narrow(0, first, self.context)?.detach();
            let z = rows.index_select(&index(of_one)?, 0)?.matmul(&weight.t()?)?.broadcast_add(&bias)?;
            Ok(match self.activation {
                Activation::Tanh => z.tanh()?,
                Activation::Identity => z,
            })
        });
        let contexts = contexts.collect::<Result<Vec<_>>>()?;
        if contexts.is_empty() {
            return Ok(Tensor::zeros(shape, hidden.dtype(), hidden.device())?);
        }
        Ok(Tensor::cat(&contexts, 0)?.index_select(&index(&places)?, 0)?.reshape(shape)?)
    }

    /// `activation(W h + b)` of all components, `[rows, K * d]`.
    fn contexts(&self, rows: &Tensor) -> Result<Tensor> {
        let activation = self.activation;
        let forward = move |z: Tensor, bias: &Tensor| match activation {
            Activation::Tanh => backend::bias_tanh(&z, bias),
            Activation::Identity => Ok(z.broadcast_add(bias)?),
        };
        let gradient = move |result: &Tensor, upstream: &Tensor| match activation {
            Activation::Tanh => backend::tanh_gradient(result, upstream),
            Activation::Identity => Ok(upstream.clone()),
        };
        layer("contexts", [rows, &self.latent_weight, &self.latent_bias], forward, gradient)
    }

    /// `log softmax(W h + b)`, `[rows, K]`.
    fn log_priors(&self, rows: &Tensor) -> Result<Tensor> {
        let forward = |z: Tensor, bias: &Tensor| {
            let z = z.broadcast_add(bias)?;
            let z = z.to_dtype(backend::accumulation_dtype("hidden", z.dtype())?)?;
            // candle has no maximum of nothing.
            let is_empty = z.elem_count() == 0;
            Ok(if is_empty { z } else { candle_nn::ops::log_softmax(&z, D::Minus1)? })
        };
        let gradient = |log_priors: &Tensor, upstream: &Tensor| {
            let total = upstream.sum_keepdim(D::Minus1)?;
            Ok((upstream - log_priors.exp()?.broadcast_mul(&total)?)?)
        };
        layer("priors", [rows, &self.prior_weight, &self.prior_bias], forward, gradient)
    }
}

/// A linear layer and what follows it, as one node of the graph, which keeps nothing but its result: `forward(W h, b)`, where
/// `gradient(result, upstream)` is the gradient of `W h + b`.
fn layer(
    name: &'static str,
    operands: [&Tensor; 3],
    forward: impl Fn(Tensor, &Tensor) -> Result<Tensor>,
    gradient: impl Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let [rows, weight, bias] = operands;
    let product = rows.detach().matmul(&weight.detach().t()?)?;
    let result = forward(product, &bias.detach())?;
    autograd::attach(name, result, operands, move |[rows, weight, bias], result, upstream| {
        // candle's Metal does not multiply nothing.
        if rows.elem_count() == 0 {
            let zeros = |operand: &Tensor| operand.track_op().then(|| operand.zeros_like()).transpose();
            return Ok([zeros(rows)?, zeros(weight)?, zeros(bias)?]);
        }
        let dz = gradient(result, upstream)?.to_dtype(rows.dtype())?;
        let ones = Tensor::ones((1, dz.dim(0)?), dz.dtype(), dz.device())?;
        Ok([
            rows.track_op().then(|| dz.matmul(weight)).transpose()?,
            weight.track_op().then(|| dz.t()?.matmul(rows)).transpose()?,
            bias.track_op().then(|| ones.matmul(&dz)?.squeeze(0)).transpose()?,
        ])
    })
}

/// One Bernoulli mask, scaled to keep the mean, for each sequence: `[.., 1, K, d]` for `[.., seq, K, d]`, so that it is the
/// same at all steps. (Gal & Ghahramani, 2016)
fn locked_mask(contexts: &Tensor, dropout: f64) -> Result<Tensor> {
    let mut dims = contexts.dims().to_vec();
    if let [_, .., seq, _, _] = dims.as_mut_slice() {
        *seq = 1;
    }
    let keep = 1.0 - dropout;
    let uniform = Tensor::rand(0f32, 1f32, dims, contexts.device())?;
    let mask = uniform.lt(keep)?.to_dtype(contexts.dtype())?;
    Ok((mask / keep)?)
}
