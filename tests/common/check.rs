//! Runs the library on one [`Case`] and one [`Objective`], and compares every result with the reference.

use std::collections::BTreeMap;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use mos_head::{
    Distributions, Error, Loss, LossOptions, Mixture, MixtureLayer, MixtureOfContexts, MixtureOfSoftmaxes,
    MixtureTensors, OutputLayer, Reduction, Result, SoftmaxHead,
};

use super::case::{upstream, Case, Head, Tensors};
use super::compare::{assert_close, Tolerance};
use super::composed::Operands;
use super::objective::Objective;
use super::on;
use super::reference::{truth, Truth};
use super::values::{self, gradient, numbers, Numbers};

/// Gradients by the name of the operand.
pub type Gradients = BTreeMap<&'static str, Numbers>;

/// A head with its hidden states, or the fused op alone.
#[derive(Debug)]
pub enum Layer {
    Head(Box<dyn MixtureLayer>, Tensor),
    Mixture(Mixture),
}

impl Layer {
    /// The library's layer for `case` on `tensors`, which are named as in the case.
    pub fn new(case: &Case, tensors: &Tensors) -> Result<Self> {
        if case.head == Head::Mixture {
            let mixture = Mixture::new(
                &tensors["contexts"],
                tensors.get("log_priors"),
                &tensors["decoder.weight"],
                tensors.get("decoder.bias"),
            )?;
            let mixture = mixture.with_logit_scale(case.logits.scale)?;
            return Ok(Self::Mixture(mixture.with_logit_function(case.logits.function)?));
        }
        Ok(Self::Head(build(case, tensors)?, tensors["hidden"].clone()))
    }

    pub fn loss(&self, targets: &Tensor, options: &LossOptions) -> Result<Loss> {
        match self {
            Self::Head(head, hidden) => head.loss(hidden, targets, options),
            Self::Mixture(mixture) => mixture.loss(targets, options),
        }
    }

    pub fn log_probs(&self) -> Result<Tensor> {
        match self {
            Self::Head(head, hidden) => head.log_probs(hidden),
            Self::Mixture(mixture) => mixture.log_probs(),
        }
    }

    pub fn argmax(&self) -> Result<Tensor> {
        match self {
            Self::Head(head, hidden) => head.argmax(hidden),
            Self::Mixture(mixture) => mixture.argmax(),
        }
    }
}

/// The head with the case's logit scale and logit function.
macro_rules! finished {
    ($head:expr, $case:expr) => {{
        $head.with_logit_scale($case.logits.scale)?.with_logit_function($case.logits.function)?
    }};
}

/// The tensors of a mixture.
pub fn parts(tensors: &Tensors) -> MixtureTensors {
    let tensor = |name: &str| tensors[name].clone();
    let optional = |name: &str| tensors.get(name).cloned();
    MixtureTensors {
        prior_weight: tensor("prior.weight"),
        prior_bias: optional("prior.bias"),
        latent_weight: tensor("latent.weight"),
        latent_bias: tensor("latent.bias"),
        decoder_weight: tensor("decoder.weight"),
        decoder_bias: optional("decoder.bias"),
    }
}

/// The head of `case`, from its tensors.
pub fn build(case: &Case, tensors: &Tensors) -> Result<Box<dyn MixtureLayer>> {
    if case.head == Head::Softmax {
        let bias = tensors.get("decoder.bias").cloned();
        let head = SoftmaxHead::from_tensors(tensors["decoder.weight"].clone(), bias)?;
        return Ok(Box::new(finished!(head, case)));
    }
    let parts = parts(tensors);
    Ok(match case.head {
        Head::MixtureOfContexts => Box::new(finished!(MixtureOfContexts::from_tensors(parts, case.activation)?, case)),
        _ => Box::new(finished!(MixtureOfSoftmaxes::from_tensors(parts, case.activation)?, case)),
    })
}

/// The smallest workspace that the library accepts for this loss.
pub fn least_workspace(layer: &Layer, targets: &Tensor, options: &LossOptions) -> usize {
    match layer.loss(targets, &options.clone().with_workspace_bytes(0)) {
        Err(Error::Workspace { least, got: 0, .. }) => least,
        other => panic!("expected a workspace of 0 bytes to be refused, got {other:?}"),
    }
}

/// The gradient of every tensor that has one.
pub fn gradients(store: &GradStore, tensors: &Tensors) -> Gradients {
    tensors.iter().filter_map(|(&name, tensor)| Some((name, gradient(store, tensor)?.named(name)))).collect()
}

/// Demands the gradients of the same operands, which differ by at most a share of the largest number of each; it counts
/// as at least 1e-3, since some are zero.
pub fn assert_near(name: &str, found: &Gradients, expected: &Gradients, tolerance: f64) {
    assert_near_from(1e-3, name, found, expected, tolerance);
}

/// The same where the largest number counts as at least `least`.
pub fn assert_near_from(least: f64, name: &str, found: &Gradients, expected: &Gradients, tolerance: f64) {
    let has_all = !found.is_empty() && found.keys().eq(expected.keys());
    assert!(has_all, "{name}: {:?} {:?}", found.keys(), expected.keys());
    for (operand, found) in found {
        let found = found.clone().named(format!("{operand}, {name}"));
        assert_relative_eq!(found, expected[operand], epsilon = least * tolerance, max_relative = tolerance);
    }
}

/// The central differences of a function in every number of a case, each of the shape of its operand.
pub fn central_differences(case: &Case, f: impl Fn(&Case) -> Result<f64>) -> Result<Gradients> {
    let with = |values: BTreeMap<_, _>| Case { values, ..case.clone() };
    let slopes = values::central_differences(&case.values, 1e-5, |moved| f(&with(moved.clone())))?;
    let slopes = with(slopes).constants(DType::F64, &Device::Cpu)?;
    Ok(slopes.iter().map(|(&name, slope)| (name, numbers(slope))).collect())
}

/// Asserts that a scalar of the tensors of a case has its central differences as gradients, in f64.
pub fn assert_central_differences(case: &Case, value: impl Fn(&Tensors) -> Result<Tensor>) -> Result<()> {
    let vars = case.variables(DType::F64, &Device::Cpu)?;
    let expected =
        central_differences(case, |moved| Ok(value(&moved.constants(DType::F64, &Device::Cpu)?)?.to_scalar()?))?;
    let found = gradients(&value(&vars)?.backward()?, &vars);
    assert_eq!(found.len(), vars.len());
    for (name, found) in found {
        assert_abs_diff_eq!(found, expected[name], epsilon = 1e-8);
    }
    Ok(())
}

/// The gradients of `value` for the upstream gradient `upstream`.
pub fn backward(value: &Tensor, upstream: &[f64]) -> Result<GradStore> {
    let upstream = Tensor::new(upstream, &Device::Cpu)?.reshape(value.shape())?.to_dtype(value.dtype())?;
    Ok((value * on(value.device(), &upstream)?)?.sum_all()?.backward()?)
}

/// The settings of a check besides the case and the objective.
#[derive(Clone, Debug)]
pub struct Check {
    pub dtype: DType,
    /// See [`Tolerance::condition`].
    pub condition: f64,
    /// See [`Tolerance::least_scale`].
    pub least_scale: f64,
    /// The workspace budget as a multiple of the least that is accepted; `None` for the default.
    pub workspace: Option<usize>,
}

impl Check {
    pub fn new(dtype: DType) -> Self {
        Self { dtype, condition: 1.0, least_scale: f64::MIN_POSITIVE, workspace: None }
    }

    fn value(&self) -> Tolerance {
        Tolerance::value(self.dtype).condition(self.condition)
    }

    fn gradient(&self) -> Tolerance {
        Tolerance::gradient(self.dtype).condition(self.condition).least_scale(self.least_scale)
    }

    /// Computes the loss with all its fields and its gradients, the loss of an evaluation, both with counted
    /// predictions and without, which the CPU computes in different ways, log-probabilities and argmax, and compares
    /// each.
    pub fn run(&self, case: &Case, objective: &Objective, device: &Device) -> Result<Truth> {
        let case = case.clone().rounded(self.dtype)?;
        let length = match objective.reduction {
            Reduction::None => case.positions(),
            _ => 1,
        };
        let upstream = upstream(length, 17);
        let truth = truth(&case, objective, &upstream);

        let tensors = case.variables(self.dtype, device)?;
        let layer = Layer::new(&case, &tensors)?;
        let targets = case.target_tensor(device)?;
        let ask = |base: LossOptions| {
            let mut options = objective.apply(base, &case.lead, device)?;
            if let Some(multiple) = self.workspace {
                let least = least_workspace(&layer, &targets, &options);
                options = options.with_workspace_bytes(multiple * least);
            }
            layer.loss(&targets, &options)
        };
        let losses = [
            ("training", ask(LossOptions::new())?),
            ("training with correct", ask(LossOptions::new().with_correct(true))?),
            ("evaluation", ask(LossOptions::evaluation())?),
            ("evaluation with correct", ask(LossOptions::evaluation().with_correct(true))?),
        ];
        let log_probs = layer.log_probs()?;
        let vocab = case.sizes.vocab;
        assert_eq!(log_probs.dims(), [&case.lead[..], &[vocab]].concat(), "shape of log_probs");
        let argmax = layer.argmax()?;
        assert_eq!(argmax.dims(), case.lead, "shape of argmax");

        let composed = self.compose(&case, objective, &upstream)?;
        // In half precision even the composed form and the reference may differ in the most probable id.
        let is_strict = matches!(self.dtype, DType::F64 | DType::F32);
        let name = |what: &str| format!("{:?} {what} in {:?}", case.head, self.dtype);
        let value = |what: &str, got: &Tensor, truth: &[f64], composed: Option<&[f64]>| {
            assert_close(&name(what), &numbers(got), truth, composed, self.value());
        };
        value("log_probs", &log_probs, &truth.log_probs, composed.get("log_probs"));
        for (mode, loss) in &losses {
            assert_eq!(loss.nll.dims(), case.lead, "shape of nll");
            assert_eq!(loss.value.elem_count(), length, "size of value");
            let value = |what: &str, got: &Tensor, truth: &[f64]| {
                value(&format!("{what} of {mode}"), got, truth, composed.get(what));
            };
            value("value", &loss.value, &truth.value);
            value("nll", &loss.nll, &truth.nll);
            value("sum", &loss.sum, &[truth.sum]);
            value("count", &loss.count, &[truth.count]);
            assert_eq!(loss.correct.is_some(), mode.ends_with("with correct"), "{mode}");
            if let Some(correct) = loss.correct.as_ref().filter(|_| is_strict) {
                assert_eq!(numbers(correct), [truth.correct], "{}", name(&format!("correct of {mode}")));
                let is_correct = numbers(loss.is_correct.as_ref().expect("is_correct"));
                assert_eq!(is_correct.iter().sum::<f64>(), truth.correct, "{}", name(mode));
                let is_argmax = |(is_correct, (best, target)): (&f64, (&u32, &i64))| {
                    *is_correct == 0.0 || i64::from(*best) == *target
                };
                assert!(is_correct.iter().zip(truth.argmax.iter().zip(&case.targets)).all(is_argmax), "{}", name(mode));
            }
        }
        if is_strict {
            let argmax: Vec<u32> = argmax.flatten_all()?.to_vec1()?;
            assert_eq!(argmax, truth.argmax, "{}", name("argmax"));
        }
        for (mode, loss) in losses.iter().filter(|(mode, _)| mode.starts_with("training")) {
            let found = gradients(&backward(&loss.value, &upstream)?, &tensors);
            for operand in case.values.keys() {
                let what = format!("gradient of {operand}, {mode}");
                let got = found.get(operand).unwrap_or_else(|| panic!("no {}", name(&what)));
                let truth = &truth.gradients[operand];
                assert_close(&name(&what), got, truth, composed.get(operand), self.gradient());
            }
        }
        Ok(truth)
    }

    /// The results of the composed form in the same dtype.
    fn compose(&self, case: &Case, objective: &Objective, upstream: &[f64]) -> Result<Composed> {
        if case.positions() == 0 {
            return Ok(Composed::default());
        }
        let tensors = case.variables(self.dtype, &Device::Cpu)?;
        let operands = Operands::project(case.head, &tensors, case.activation)?;
        let (value, nll) = operands.loss(&case.targets, objective, case.logits)?;
        let mut results = BTreeMap::from([
            ("value", numbers(&value)),
            ("nll", numbers(&nll)),
            ("log_probs", numbers(&operands.log_probs(case.logits)?.0)),
        ]);
        results.extend(gradients(&backward(&value, upstream)?, &tensors));
        Ok(Composed(results))
    }
}

/// The results of the composed form by name.
#[derive(Default)]
struct Composed(Gradients);

impl Composed {
    fn get(&self, name: &str) -> Option<&[f64]> {
        self.0.get(name).map(|numbers| &**numbers)
    }
}
