//! The projection of Yang et al. (2018, arXiv 1711.03953), section 2.3, from a hidden state to K contexts and their
//! priors by linear maps, and the output layer that mixes K softmaxes of these contexts.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::config::{ContextActivation, MixtureConfig, MixtureTensors};
use super::head::Head;
use super::identity::SoftmaxHead;
use super::projection::{Configured, Projection};
use crate::backend;
use crate::decoder::{Decoder, DecoderConfig};
use crate::decoding::Sampler;
use crate::error::{Error, Result};
use crate::tensors::autograd::into_variable;
use crate::tensors::checks::{check_alike, check_dropout, check_elements, check_float, check_product, check_sizes};
use crate::tensors::dropout::DropoutMasks;
use crate::tensors::initial_values::linear_init;
use crate::tensors::linear::{as_matrix, linear_layer, LinearOperands};
use crate::tensors::permutation::{inverse, sorted};

/// A mixture of K softmaxes, each with its own context:
///
/// ```text
/// P(v) = sum_k pi_k softmax(W c_k + b)_v,    pi = softmax(W_prior h),    c_k = tanh(W_k h + b_k)
/// ```
///
/// The logarithm of a sum of softmaxes is not linear in the contexts, so d does not bound the rank of the matrix of
/// log-probabilities, as it does with one softmax. It costs the time of K softmaxes of width d, and the workspace of
/// one; the contexts `[positions, K, d]` and their gradients grow with K.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::{LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(64, 1000, 5).with_context_dim(32), vb)?;
/// let hidden = Tensor::randn(0f32, 1., (2, 3, 64), &Device::Cpu)?;
/// let targets = Tensor::new(&[[1u32, 2, 3], [4, 5, 6]], &Device::Cpu)?;
/// let gradients = head.loss(&hidden, &targets, &LossOptions::default())?.backward()?;
/// assert_eq!(vars.all_vars().iter().filter(|var| gradients.get(var).is_some()).count(), 5);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// Yang, Dai, Salakhutdinov, Cohen: Breaking the Softmax Bottleneck: A High-Rank RNN Language Model. ICLR 2018, arXiv
/// 1711.03953, section 2.3.
pub type MixtureOfSoftmaxes = Head<Contexts>;

/// The projection of a [`MixtureOfSoftmaxes`]: linear maps to K contexts and their priors.
///
/// ```text
/// pi = softmax(W_prior h),    c_k = tanh(W_k h + b_k)
/// ```
///
/// # Examples
///
/// Contexts and priors without a decoder:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mos_head::parts::{Configured, Contexts, Projection};
/// use mos_head::{DropoutMasks, MixtureConfig};
///
/// # fn main() -> mos_head::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let projection = Contexts::new(&MixtureConfig::new(64, 1000, 5).with_context_dim(32), &vb)?;
/// let hidden = Tensor::randn(0f32, 1., (2, 7, 64), &Device::Cpu)?; // [batch, seq, hidden]
/// let (contexts, log_priors) = projection.forward(&hidden, DropoutMasks::Off)?;
/// assert_eq!(contexts.dims(), [2, 7, 5, 32]);
/// let sums = log_priors.expect("5 components").exp()?.sum(2)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 1e-5));
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// Yang, Dai, Salakhutdinov, Cohen: Breaking the Softmax Bottleneck: A High-Rank RNN Language Model. ICLR 2018, arXiv
/// 1711.03953, section 2.3, and the code that was released with it.
#[derive(Clone, Debug)]
pub struct Contexts {
    /// `[K, hidden]`
    prior_weight: Tensor,
    /// `[K]`
    prior_bias: Option<Tensor>,
    /// `[K * d, hidden]`
    latent_weight: Tensor,
    /// `[K * d]`
    latent_bias: Tensor,
    activation: ContextActivation,
    dropout: f64,
}

impl Projection for Contexts {
    fn hidden_size(&self) -> usize {
        self.latent_weight.dims()[1]
    }

    fn context_dim(&self) -> usize {
        self.latent_weight.dims()[0] / self.components()
    }

    fn components(&self) -> usize {
        self.prior_weight.dims()[0]
    }

    /// Computes contexts and log-priors; the log-priors are in f32 for half-precision states.
    fn forward(&self, hidden: &Tensor, dropout: DropoutMasks) -> Result<(Tensor, Option<Tensor>)> {
        let leading = &hidden.dims()[..hidden.rank() - 1];
        let states = self.states(hidden)?;
        let log_priors = self.log_priors(&states, &[leading, &[self.components()]].concat())?;
        let mut contexts = self.contexts(&states, &[leading, &[self.components(), self.context_dim()]].concat())?;
        if let Some(mask) = dropout.locked_mask(&contexts, self.dropout)? {
            contexts = contexts.broadcast_mul(&mask)?;
        }
        Ok((contexts, Some(log_priors)))
    }

    /// Draws a component at each position, and computes the contexts of these components only.
    fn draw(&self, hidden: &Tensor, sampler: &mut Sampler) -> Result<Option<Tensor>> {
        let states = self.states(hidden)?;
        let log_priors = self.log_priors(&states, &[states.dim(0)?, self.components()])?;
        Ok(Some(self.drawn_contexts(hidden, &sampler.draw_components(&log_priors.detach(), log_priors.dtype())?)?))
    }

    fn frozen(&self) -> Result<Box<dyn Projection + '_>> {
        Ok(Box::new(Contexts {
            prior_weight: self.prior_weight.detach(),
            prior_bias: self.prior_bias.as_ref().map(Tensor::detach),
            latent_weight: self.latent_weight.detach(),
            latent_bias: self.latent_bias.detach(),
            ..*self
        }))
    }
}

impl Configured for Contexts {
    type Config = MixtureConfig;

    /// Makes the variables `prior.weight` `[K, hidden]`, `latent.weight` `[K * d, hidden]`, `latent.bias` `[K * d]`
    /// and, if configured, `prior.bias` `[K]`: uniform within 1 / sqrt(hidden), as in the released code and in
    /// PyTorch's `nn.Linear`.
    fn new(config: &MixtureConfig, vb: &VarBuilder) -> Result<Self> {
        config.validate()?;
        let &MixtureConfig { hidden_size, context_dim, components, .. } = config;
        let init = linear_init(hidden_size);
        let (prior, latent) = (vb.pp("prior"), vb.pp("latent"));
        let prior_weight = prior.get_with_hints((components, hidden_size), "weight", init)?;
        let prior_bias = config.prior_bias.then(|| prior.get_with_hints(components, "bias", init)).transpose()?;
        Ok(Contexts {
            prior_weight,
            prior_bias,
            latent_weight: latent.get_with_hints((components * context_dim, hidden_size), "weight", init)?,
            latent_bias: latent.get_with_hints(components * context_dim, "bias", init)?,
            activation: config.activation,
            dropout: config.dropout,
        })
    }

    fn decoder(config: &MixtureConfig) -> DecoderConfig {
        let &MixtureConfig { vocab_size, context_dim, decoder_bias, logit_scale, logit_function, .. } = config;
        DecoderConfig { bias: decoder_bias, logit_scale, logit_function, ..DecoderConfig::new(vocab_size, context_dim) }
    }
}

impl Contexts {
    /// Returns hidden states `[.., hidden]` as a matrix, which have the dtype and the device of the parameters.
    fn states(&self, hidden: &Tensor) -> Result<Tensor> {
        check_alike("hidden", hidden, "the projection's parameters", &self.latent_weight)?;
        as_matrix(hidden)
    }

    /// Returns the parameters: the weight of the priors and their bias, if there is one, and those of the contexts.
    pub fn parameters(&self) -> Vec<&Tensor> {
        let prior = [Some(&self.prior_weight), self.prior_bias.as_ref()];
        prior.into_iter().flatten().chain([&self.latent_weight, &self.latent_bias]).collect()
    }

    /// Checks the parameters of a head, and makes its projection, without dropout.
    fn from_tensors(tensors: &MixtureTensors, activation: ContextActivation) -> Result<Self> {
        let matrix = |argument, tensor: &Tensor| match *tensor.dims() {
            [rows, columns] => check_elements(argument, tensor.dims()).map(|_| (rows, columns)),
            _ => Err(Error::shape(argument, "a matrix", tensor.dims())),
        };
        let (components, hidden_size) = matrix("prior.weight", &tensors.prior_weight)?;
        let (_, context_dim) = matrix("decoder.weight", &tensors.decoder_weight)?;
        matrix("latent.weight", &tensors.latent_weight)?;
        check_sizes(&[("hidden_size", hidden_size), ("context_dim", context_dim), ("components", components)])?;
        check_product("components * context_dim * hidden_size", &[components, context_dim, hidden_size])?;
        check_float("decoder.weight", &tensors.decoder_weight)?;
        let check = |argument, tensor: &Tensor, dims: &[usize]| {
            if tensor.dims() == dims {
                check_alike(argument, tensor, "decoder.weight", &tensors.decoder_weight)
            } else {
                Err(Error::shape(argument, format!("{dims:?}"), tensor.dims()))
            }
        };
        check("prior.weight", &tensors.prior_weight, &[components, hidden_size])?;
        check("latent.weight", &tensors.latent_weight, &[components * context_dim, hidden_size])?;
        check("latent.bias", &tensors.latent_bias, &[components * context_dim])?;
        if let Some(bias) = &tensors.prior_bias {
            check("prior.bias", bias, &[components])?;
        }
        Ok(Contexts {
            prior_weight: tensors.prior_weight.clone(),
            prior_bias: tensors.prior_bias.clone(),
            latent_weight: tensors.latent_weight.clone(),
            latent_bias: tensors.latent_bias.clone(),
            activation,
            dropout: 0.0,
        })
    }

    /// Computes the contexts `[.., 1, d]` of the component that has been drawn at each position, from hidden states
    /// `[.., hidden]`. Not differentiable.
    fn drawn_contexts(&self, hidden: &Tensor, drawn: &[u32]) -> Result<Tensor> {
        let shape = [&hidden.dims()[..hidden.rank() - 1], &[1, self.context_dim()]].concat();
        let states = as_matrix(hidden)?.detach();
        // `order` has the positions sorted by component, and `places` is the inverse permutation.
        let order = sorted(drawn.len(), &|a, b| drawn[a].cmp(&drawn[b]));
        let places = inverse(&order);
        let index = |positions: &[u32]| Tensor::new(positions, hidden.device());
        let has_same_component = |&a: &u32, &b: &u32| drawn[a as usize] == drawn[b as usize];
        let contexts = order.chunk_by(has_same_component).map(|positions| {
            let first = drawn[positions[0] as usize] as usize * self.context_dim();
            let weight = self.latent_weight.narrow(0, first, self.context_dim())?.detach();
            let bias = self.latent_bias.narrow(0, first, self.context_dim())?.detach();
            self.activated(&backend::linear(&states.index_select(&index(positions)?, 0)?, &weight)?, &bias)
        });
        let contexts = contexts.collect::<Result<Vec<_>>>()?;
        if contexts.is_empty() {
            return Ok(Tensor::zeros(shape, hidden.dtype(), hidden.device())?);
        }
        Ok(Tensor::cat(&contexts, 0)?.index_select(&index(&places)?, 0)?.reshape(shape)?)
    }

    /// Computes `activation(W h + b)` of all components, `[positions, K * d]` in the given shape, from hidden states
    /// `[positions, hidden]`.
    fn contexts(&self, states: &Tensor, shape: &[usize]) -> Result<Tensor> {
        let activation = self.activation;
        let bias = self.latent_bias.detach();
        let forward = |layer: LinearOperands<'_>| self.activated(&backend::linear(layer.input, layer.weight)?, &bias);
        let gradient = move |result: &Tensor, upstream: &Tensor| match activation {
            ContextActivation::Tanh => backend::tanh_gradient(result, upstream),
            ContextActivation::Identity => Ok(upstream.clone()),
        };
        let operands = LinearOperands { input: states, weight: &self.latent_weight, bias: Some(&self.latent_bias) };
        linear_layer("contexts", operands, shape, &forward, backend::matmul, Box::new(gradient))
    }

    /// Computes `activation(z + bias)` for `z` `[rows, n]` and a constant bias `[n]`.
    fn activated(&self, z: &Tensor, bias: &Tensor) -> Result<Tensor> {
        match self.activation {
            ContextActivation::Tanh => backend::bias_tanh(z, &bias.contiguous()?),
            ContextActivation::Identity => Ok(z.broadcast_add(bias)?),
        }
    }

    /// Computes `log softmax(W h + b)`, `[positions, K]` in the given shape, from hidden states `[positions, hidden]`.
    fn log_priors(&self, states: &Tensor, shape: &[usize]) -> Result<Tensor> {
        let dtype = states.dtype();
        let forward =
            |layer: LinearOperands<'_>| backend::log_softmax(&backend::linear(layer.input, layer.weight)?, layer.bias);
        let gradient =
            move |log_priors: &Tensor, upstream: &Tensor| backend::log_softmax_gradient(log_priors, upstream, dtype);
        let operands = LinearOperands { input: states, weight: &self.prior_weight, bias: self.prior_bias.as_ref() };
        linear_layer("priors", operands, shape, &forward, backend::matmul, Box::new(gradient))
    }
}

/// Heads whose contexts are linear maps of the hidden state: [`MixtureOfSoftmaxes`] and
/// [`MixtureOfContexts`](crate::MixtureOfContexts).
impl<P: Projection + From<Contexts> + AsRef<Contexts>> Head<P> {
    /// Makes a head from its parameters.
    ///
    /// # Shapes
    ///
    /// The fields of [`MixtureTensors`] have them.
    ///
    /// # Errors
    ///
    /// If the shapes do not match, or a dtype is not a float type.
    pub fn from_tensors(tensors: MixtureTensors, activation: ContextActivation) -> Result<Self> {
        let contexts = Contexts::from_tensors(&tensors, activation)?;
        Head::from_parts(contexts.into(), Decoder::from_tensors(tensors.decoder_weight, tensors.decoder_bias)?)
    }

    /// Returns the parameters, to export, freeze, tie or watch: tensors that share their storage with the head, except
    /// computed rows and quantised ones, which each call dequantises to f32: about four times the memory of Q8_0. The
    /// scale and the function of the logits, an adapter and the dropout are not among them:
    /// [`Head::from_tensors`] makes a head without these.
    ///
    /// # Shapes
    ///
    /// The fields of [`MixtureTensors`] have them.
    ///
    /// # Errors
    ///
    /// The errors of [`Decoder::weight`].
    pub fn tensors(&self) -> Result<MixtureTensors> {
        let Contexts { prior_weight, prior_bias, latent_weight, latent_bias, .. } = self.projection().as_ref().clone();
        let (decoder_weight, decoder_bias) = (self.weight()?, self.bias().cloned());
        Ok(MixtureTensors { prior_weight, prior_bias, latent_weight, latent_bias, decoder_weight, decoder_bias })
    }

    /// Returns the head with another probability of locked dropout on its contexts while training, see
    /// [`MixtureConfig::dropout`].
    ///
    /// # Errors
    ///
    /// If the probability is not at least 0 and below 1.
    pub fn with_dropout(self, dropout: f64) -> Result<Self> {
        check_dropout(dropout)?;
        let contexts = Contexts { dropout, ..self.projection().as_ref().clone() };
        Head::from_parts(contexts.into(), self.decoder().clone())
    }
}

impl Head<Contexts> {
    /// Grows a softmax into a mixture of softmaxes: each of the K contexts is the hidden state itself, so that the
    /// first distributions are those of the softmax, up to rounding. The weights of the priors are random, which makes
    /// the components' gradients differ from the first step on; with equal priors, equal components would remain one
    /// softmax.
    ///
    /// The projection has new variables, of the dtype of the head's parameters: `prior_weight` `[K, hidden]`, uniform
    /// within `1 / sqrt(hidden)`, `latent_weight` `[K hidden, hidden]`, K identities, and `latent_bias` `[K hidden]`,
    /// zero, without an activation. The decoder is that of the head, with its adapter, scale and function of the
    /// logits.
    ///
    /// # Errors
    ///
    /// If `components` is zero, or the weights of the contexts would have more than 2^40 elements.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use mos_head::{LossOptions, MixtureOfSoftmaxes, OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let softmax = SoftmaxHead::from_tensors(Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?, None)?;
    /// let mixture = MixtureOfSoftmaxes::from_softmax(&softmax, 4, 42)?;
    /// let hidden = Tensor::randn(0f32, 1., (3, 8), &Device::Cpu)?;
    /// let difference = (mixture.log_probs(&hidden)? - softmax.log_probs(&hidden)?)?.abs()?.max_all()?;
    /// assert!(difference.to_scalar::<f32>()? < 1e-5);
    ///
    /// // The variables, for an optimizer.
    /// let projection = mixture.projection();
    /// let vars = projection.parameters().into_iter().map(Var::from_tensor).collect::<Result<Vec<_>, _>>()?;
    /// let targets = Tensor::new(&[1u32, 2, 3], &Device::Cpu)?;
    /// let gradients = mixture.loss(&hidden, &targets, &LossOptions::default())?.backward()?;
    /// assert!(vars.iter().all(|var| gradients.get(var).is_some()));
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_softmax(head: &SoftmaxHead, components: usize, seed: u64) -> Result<Self> {
        let (hidden_size, decoder) = (head.decoder().context_dim(), head.decoder().clone());
        check_sizes(&[("components", components)])?;
        check_product("components * hidden_size * hidden_size", &[components, hidden_size, hidden_size])?;
        let (dtype, device) = decoder.parameters_like();
        let variable = |values: Tensor| into_variable(values.to_dtype(dtype)?.to_device(&device)?);
        let bound = 1.0 / (hidden_size as f32).sqrt();
        let mut generator = StdRng::seed_from_u64(seed);
        let priors: Vec<f32> = (0..components * hidden_size).map(|_| generator.random_range(-bound..bound)).collect();
        let mut identities = vec![0f32; components * hidden_size * hidden_size];
        identities.chunks_exact_mut(hidden_size).enumerate().for_each(|(row, values)| values[row % hidden_size] = 1.0);
        let matrix = |values, rows| Tensor::from_vec(values, (rows, hidden_size), &Device::Cpu);
        let contexts = Contexts {
            prior_weight: variable(matrix(priors, components)?)?.into_inner(),
            prior_bias: None,
            latent_weight: variable(matrix(identities, components * hidden_size)?)?.into_inner(),
            latent_bias: variable(Tensor::zeros(components * hidden_size, DType::F32, &Device::Cpu)?)?.into_inner(),
            activation: ContextActivation::Identity,
            dropout: 0.0,
        };
        Head::from_parts(contexts, decoder)
    }
}

impl AsRef<Contexts> for Contexts {
    fn as_ref(&self) -> &Contexts {
        self
    }
}
