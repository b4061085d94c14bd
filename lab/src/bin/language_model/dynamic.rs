//! Dynamic evaluation: the model goes on learning from the text that it is evaluated on, after each of its segments
//! (Krause, Kahembwe, Murray, Renals: Dynamic Evaluation of Neural Sequence Models. ICML 2018).
//!
//! ```text
//! theta <- theta + min(1, lambda RMS / sum of mean RMS) (theta_0 - theta) - eta g / (RMS + epsilon)
//! ```
//!
//! RMS is the root mean square of an element's gradient over the training text; the sum is over the parameter tensors.
//! The code that was released with the mixture of softmaxes takes the root of the *sum* of squares over n segments: its
//! eta and epsilon, divided by sqrt(n), are those here.

use candle_core::{DType, Tensor, Var};
use lab::layers::inplace::{self, Adapt};
use lab::training::{LanguageModel, Model, Pass, Recipe};
use lab::{layers::init::sorted, show::progress, Result};
use mos_head::{DropoutMasks, Loss, LossOptions};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DynamicSettings {
    /// eta
    pub(crate) lr: f64,
    /// lambda
    pub(crate) decay: f64,
    pub(crate) epsilon: f64,
}

/// The number of parallel streams of the training text from which the statistics are taken.
const STREAMS: usize = 100;

/// Returns the root mean square of every parameter's gradient over segments of `steps` steps of the training text; in
/// the order of the names.
pub(crate) fn gradient_rms(model: &LanguageModel, train: &[u32], steps: usize) -> Result<Vec<Tensor>> {
    let vars = sorted(model.varmap());
    let recipe = Recipe { batch: STREAMS.min(train.len() - 1), bptt: steps, ..Recipe::BASE };
    let pass = Pass::Training { epoch: 0 };
    let batches = model.batches(train, &recipe, pass);
    let bar = progress::bar(batches.len(), "gradient statistics".into());
    let mut state = model.start(&recipe, pass)?;
    let mut squares: Vec<Tensor> = vars.iter().map(|(_, var)| Ok(var.zeros_like()?)).collect::<Result<_>>()?;
    let options = LossOptions::new().with_dropout(DropoutMasks::Off).with_ignore_index(LanguageModel::IGNORED);
    for batch in &batches {
        let forward = model.forward(train, batch, &mut state, None)?;
        let gradients = model.head().loss(&forward.hidden, &forward.targets, &options)?.backward()?;
        for ((_, var), square) in vars.iter().zip(&mut squares) {
            if let Some(gradient) = gradients.get(var) {
                *square = (&*square + gradient.sqr()?)?;
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    squares.into_iter().map(|square| Ok((square / batches.len() as f64)?.sqrt()?)).collect()
}

/// The adaptation of a model, whose parameters are as before when it ends.
pub(crate) struct Adaptation {
    parameters: Vec<Parameter>,
}

struct Parameter {
    var: Var,
    start: Tensor,
    /// The share of the way back to `start` that a step takes, and its learning rate; by element.
    decay: Tensor,
    rate: Tensor,
}

impl Adaptation {
    pub(crate) fn new(model: &LanguageModel, rms: &[Tensor], settings: DynamicSettings) -> Result<Self> {
        let DynamicSettings { lr, decay, epsilon } = settings;
        let mean =
            |rms: &Tensor| -> Result<f64> { Ok(f64::from(rms.to_dtype(DType::F32)?.mean_all()?.to_scalar::<f32>()?)) };
        let total = rms.iter().map(mean).sum::<Result<f64>>()?;
        let parameter = |((_, var), rms): ((String, Var), &Tensor)| {
            Ok(Parameter {
                start: var.copy()?,
                decay: (rms * (decay / total))?.minimum(1f64)?,
                rate: ((rms + epsilon)?.recip()? * lr)?,
                var,
            })
        };
        Ok(Self { parameters: sorted(model.varmap()).into_iter().zip(rms).map(parameter).collect::<Result<_>>()? })
    }

    /// Learns from a segment.
    pub(crate) fn step(&self, loss: &Loss) -> Result<()> {
        let gradients = loss.backward()?;
        for Parameter { var, start, decay, rate } in &self.parameters {
            let zeros = || var.zeros_like();
            let gradient = gradients.get(var).map_or_else(zeros, |gradient| gradient.contiguous())?;
            if inplace::supports(var) {
                var.inplace_op1(&Adapt { start, decay, rate, gradient: &gradient })?;
            } else {
                let back = ((start - var.as_tensor())? * decay)?;
                var.set(&((var.as_tensor() + back)? - (&gradient * rate)?)?)?;
            }
        }
        Ok(())
    }
}

impl Drop for Adaptation {
    fn drop(&mut self) {
        for Parameter { var, start, .. } in &self.parameters {
            if let Err(error) = var.set(start) {
                eprintln!("a parameter is not restored: {error}");
            }
        }
    }
}
