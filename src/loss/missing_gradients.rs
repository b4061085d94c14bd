//! Finds variables that a backward pass did not reach, because candle has fused operations that detach their result in
//! silence.

use std::sync::PoisonError;

use candle_core::backprop::GradStore;
use candle_core::Var;
use candle_nn::VarMap;

use super::results::Loss;
use crate::error::{Error, Result};

impl Loss {
    /// Returns an error that names the variables without a gradient, if there are any. Call it once, after the first
    /// backward pass: candle's fused operations have no backward pass and detach their result in silence, so that an
    /// optimizer leaves all variables before them as they are. The [crate's
    /// documentation](crate#gradients-that-candle-drops) lists these operations and what to use instead.
    ///
    /// Gradients that this loss spares by itself do not count as missing: a decoder has none if its rows have them
    /// instead ([`LossOptions::with_decoder_rows`](crate::LossOptions::with_decoder_rows)), nor have clusters and
    /// classes without a target ([`AdaptiveSoftmax`](crate::two_level::AdaptiveSoftmax),
    /// [`HierarchicalSoftmax`](crate::two_level::HierarchicalSoftmax)).
    ///
    /// # Errors
    ///
    /// [`Error::MissingGradients`] if a variable has no gradient. [`Loss::missing_gradients`] returns the names, if
    /// some variables are not meant to be trained.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
    /// use mos_head::{LossOptions, OutputLayer, SoftmaxConfig, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let vars = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// let layer = candle_nn::linear(16, 32, vb.pp("layer"))?;
    /// let norm = candle_nn::rms_norm(32, 1e-5, vb.pp("norm"))?;
    /// let head = SoftmaxHead::new(&SoftmaxConfig::new(32, 100), vb.pp("head"))?;
    /// let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW::default())?;
    /// let inputs = Tensor::randn(0f32, 1., (4, 16), &Device::Cpu)?;
    /// let targets = Tensor::new(&[1u32, 2, 3, 4], &Device::Cpu)?;
    /// for step in 0..3 {
    ///     let hidden = norm.forward_diff(&layer.forward(&inputs)?)?;
    ///     let loss = head.loss(&hidden, &targets, &LossOptions::default())?;
    ///     let gradients = loss.backward()?;
    ///     if step == 0 {
    ///         loss.check_gradients(&gradients, &vars)?;
    ///     }
    ///     optimizer.step(&gradients)?;
    /// }
    ///
    /// // The same with the fused operation.
    /// let hidden = norm.forward(&layer.forward(&inputs)?)?;
    /// let loss = head.loss(&hidden, &targets, &LossOptions::default())?;
    /// let error = loss.check_gradients(&loss.backward()?, &vars).unwrap_err().to_string();
    /// assert!(error.starts_with("3 of 5 variables have no gradient: layer.bias, layer.weight, norm.weight."));
    /// # Ok(())
    /// # }
    /// ```
    pub fn check_gradients(&self, gradients: &GradStore, variables: &VarMap) -> Result<()> {
        // A panic of another thread does not matter, because the map is only read.
        let variables = variables.data().lock().unwrap_or_else(PoisonError::into_inner);
        let names = self.missing_gradients(gradients, &*variables);
        if names.is_empty() {
            Ok(())
        } else {
            Err(Error::MissingGradients { names, variables: variables.len() })
        }
    }

    /// Returns the names of the variables without a gradient, in alphabetical order; see [`Loss::check_gradients`].
    ///
    /// # Examples
    ///
    /// ```
    /// use std::collections::HashMap;
    ///
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let weight = Var::randn(0f32, 1., (100, 8), &Device::Cpu)?;
    /// let other = Var::zeros(8, DType::F32, &Device::Cpu)?;
    /// let head = SoftmaxHead::from_tensors(weight.as_tensor().clone(), None)?;
    /// let hidden = Tensor::randn(0f32, 1., (3, 8), &Device::Cpu)?;
    /// let loss = head.loss(&hidden, &Tensor::new(&[1u32, 2, 3], &Device::Cpu)?, &LossOptions::default())?;
    /// let missing = loss.missing_gradients(&loss.backward()?, [("weight", &weight), ("other", &other)]);
    /// assert_eq!(missing, ["other"]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn missing_gradients<'a, N: Into<String>>(
        &self,
        gradients: &GradStore,
        variables: impl IntoIterator<Item = (N, &'a Var)>,
    ) -> Vec<String> {
        let is_missing = |var: &Var| gradients.get(var).is_none() && !self.spared.contains(&var.id());
        let missing = variables.into_iter().filter(|(_, var)| is_missing(var));
        let mut names: Vec<String> = missing.map(|(name, _)| name.into()).collect();
        names.sort_unstable();
        names
    }
}
