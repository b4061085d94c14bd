//! The projection: from hidden states to contexts and log-priors.
//!
//! ```text
//! pi = softmax(W_prior h),    c_k = tanh(W_k h + b_k)            (Yang et al., 2018, section 2.3)
//! ```

use candle_core::{Tensor, D};
use candle_nn::VarBuilder;

use crate::autograd;
use crate::backend;
use crate::backend::contract::accumulation_dtype;
use crate::dropout::Dropout;
use crate::error::{Error, Result};
use crate::initial_values::linear;
use crate::mixture_config::{Activation, MixtureConfig, MixtureTensors};
use crate::permutation::inverse;
use crate::validate::{
    check_alike, check_dropout, check_elements, check_float, check_hidden, check_product, check_sizes,
};

/// The linear maps from a hidden state to the contexts and log-priors of K components.
#[derive(Clone, Debug)]
pub(crate) struct Projection {
    /// `[K, hidden]`
    prior_weight: Tensor,
    /// `[K]`
    prior_bias: Option<Tensor>,
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
        let init = linear(hidden);
        let (prior, latent) = (vb.pp("prior"), vb.pp("latent"));
        let prior_weight = prior.get_with_hints((components, hidden), "weight", init)?;
        let prior_bias = config.prior_bias.then(|| prior.get_with_hints(components, "bias", init)).transpose()?;
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
            [rows, columns] => check_elements(argument, tensor.dims()).map(|_| (rows, columns)),
            _ => Err(Error::shape(argument, "a matrix", tensor.dims())),
        };
        let (components, hidden) = matrix("prior.weight", &tensors.prior_weight)?;
        let (_, context) = matrix("decoder.weight", &tensors.decoder_weight)?;
        matrix("latent.weight", &tensors.latent_weight)?;
        check_sizes(&[("hidden", hidden), ("context", context), ("components", components)])?;
        check_product("components * context * hidden", &[components, context, hidden])?;
        let check = |argument, tensor: &Tensor, dims: &[usize]| match tensor.dims() == dims {
            true => Ok(()),
            false => Err(Error::shape(argument, format!("{dims:?}"), tensor.dims())),
        };
        check("latent.weight", &tensors.latent_weight, &[components * context, hidden])?;
        check("latent.bias", &tensors.latent_bias, &[components * context])?;
        if let Some(bias) = &tensors.prior_bias {
            check("prior.bias", bias, &[components])?;
        }
        check_float("decoder.weight", &tensors.decoder_weight)?;
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
            prior_bias: tensors.prior_bias.clone(),
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

    /// The parameters, together with those of the decoder.
    pub(crate) fn tensors(&self, decoder_weight: Tensor, decoder_bias: Option<Tensor>) -> MixtureTensors {
        MixtureTensors {
            prior_weight: self.prior_weight.clone(),
            prior_bias: self.prior_bias.clone(),
            latent_weight: self.latent_weight.clone(),
            latent_bias: self.latent_bias.clone(),
            decoder_weight,
            decoder_bias,
        }
    }

    pub(crate) fn hidden(&self) -> usize {
        self.hidden
    }

    pub(crate) fn components(&self) -> usize {
        self.components
    }

    /// hidden `[.., H]` -> contexts `[.., K, d]` and log-priors `[.., K]`, the latter in f32 for half-precision states.
    pub(crate) fn forward(&self, hidden: &Tensor, dropout: Dropout) -> Result<(Tensor, Tensor)> {
        check_hidden(hidden, self.hidden, &self.latent_weight)?;
        let leading = &hidden.dims()[..hidden.rank() - 1];
        let rows = hidden.reshape(((), self.hidden))?;
        let log_priors = self.log_priors(&rows, &[leading, &[self.components]].concat())?;
        let mut contexts = self.contexts(&rows, &[leading, &[self.components, self.context]].concat())?;
        if let Some(mask) = dropout.locked_mask(&contexts, self.dropout)? {
            contexts = contexts.broadcast_mul(&mask)?;
        }
        Ok((contexts, log_priors))
    }

    /// hidden `[.., H]` -> the context of one component of each position, `[.., 1, d]`. Not differentiable.
    pub(crate) fn chosen_contexts(&self, hidden: &Tensor, chosen: &[u32]) -> Result<Tensor> {
        let shape = [&hidden.dims()[..hidden.rank() - 1], &[1, self.context]].concat();
        let rows = hidden.reshape(((), self.hidden))?.detach();
        // Rows sorted by component, and the inverse permutation.
        let mut order: Vec<u32> = (0..chosen.len() as u32).collect();
        order.sort_by_key(|&row| chosen[row as usize]);
        let places = inverse(&order);
        let index = |rows: &[u32]| Tensor::new(rows, hidden.device());
        let contexts = order.chunk_by(|&a, &b| chosen[a as usize] == chosen[b as usize]).map(|of_one| {
            let first = chosen[of_one[0] as usize] as usize * self.context;
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

    /// `activation(W h + b)` of all components, `[rows, K * d]` in another shape.
    fn contexts(&self, rows: &Tensor, shape: &[usize]) -> Result<Tensor> {
        let activation = self.activation;
        let forward = move |z: Tensor, bias: Option<&Tensor>| match (activation, bias) {
            (Activation::Tanh, Some(bias)) => backend::bias_tanh(&z, bias),
            (Activation::Tanh, None) => Ok(z.tanh()?),
            (Activation::Identity, Some(bias)) => Ok(z.broadcast_add(bias)?),
            (Activation::Identity, None) => Ok(z),
        };
        let gradient = move |result: &Tensor, upstream: &Tensor| match activation {
            Activation::Tanh => backend::tanh_gradient(result, upstream),
            Activation::Identity => Ok(upstream.clone()),
        };
        layer("contexts", rows, &self.latent_weight, Some(&self.latent_bias), shape, forward, gradient)
    }

    /// hidden `[.., H]` -> log-priors `[positions, K]`. Not differentiable.
    pub(crate) fn detached_log_priors(&self, hidden: &Tensor) -> Result<Tensor> {
        check_hidden(hidden, self.hidden, &self.latent_weight)?;
        let rows = hidden.reshape(((), self.hidden))?;
        Ok(self.log_priors(&rows, &[rows.dim(0)?, self.components])?.detach())
    }

    /// `log softmax(W h + b)`, `[rows, K]` in another shape.
    fn log_priors(&self, rows: &Tensor, shape: &[usize]) -> Result<Tensor> {
        let forward = |z: Tensor, bias: Option<&Tensor>| {
            let z = match bias {
                Some(bias) => z.broadcast_add(bias)?,
                None => z,
            };
            let z = z.to_dtype(accumulation_dtype("hidden", z.dtype())?)?;
            // candle has no maximum of an empty tensor.
            let is_empty = z.elem_count() == 0;
            Ok(if is_empty { z } else { candle_nn::ops::log_softmax(&z, D::Minus1)? })
        };
        let gradient = |log_priors: &Tensor, upstream: &Tensor| {
            let total = upstream.sum_keepdim(D::Minus1)?;
            Ok((upstream - log_priors.exp()?.broadcast_mul(&total)?)?)
        };
        layer("priors", rows, &self.prior_weight, self.prior_bias.as_ref(), shape, forward, gradient)
    }
}

/// A linear layer and its activation as one node of the graph, which keeps only its result: `forward(W h, b)`, in
/// another shape, since candle would copy the gradient of a node for that. The gradient of `W h + b` is
/// `gradient(result, upstream)`.
pub(crate) fn layer(
    name: &'static str,
    rows: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &[usize],
    forward: impl Fn(Tensor, Option<&Tensor>) -> Result<Tensor>,
    gradient: impl Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let product = rows.detach().matmul(&weight.detach().t()?)?;
    let result = forward(product, bias.map(Tensor::detach).as_ref())?.reshape(shape)?;
    // A custom operation of candle has three operands.
    let no_bias = Tensor::zeros(1, rows.dtype(), rows.device())?;
    let operands = [rows, weight, bias.unwrap_or(&no_bias)];
    autograd::attach(name, result, operands, move |[rows, weight, bias], result, upstream| {
        // candle's Metal backend does not multiply empty matrices.
        if rows.elem_count() == 0 {
            let zeros = |operand: &Tensor| operand.track_op().then(|| operand.zeros_like()).transpose();
            return Ok([zeros(rows)?, zeros(weight)?, zeros(bias)?]);
        }
        let of_rows = |tensor: &Tensor| tensor.detach().reshape((rows.dim(0)?, ()));
        let dz = gradient(&of_rows(result)?, &of_rows(upstream)?)?.to_dtype(rows.dtype())?;
        let ones = Tensor::ones((1, dz.dim(0)?), dz.dtype(), dz.device())?;
        Ok([
            rows.track_op().then(|| dz.matmul(weight)).transpose()?,
            weight.track_op().then(|| dz.t()?.matmul(rows)).transpose()?,
            bias.track_op().then(|| ones.matmul(&dz)?.squeeze(0)).transpose()?,
        ])
    })
}
