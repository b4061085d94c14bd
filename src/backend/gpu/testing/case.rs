//! Test cases for the whole backend, and the errors of its results relative to the CPU's in f64 (the truth).

use super::*;
use crate::backend::gpu::decoding::ranked;
use crate::backend::logit_function::LogitFunction;
use crate::backend::objective::{
    GradScale, Gradients, LossResults, LossTerms, Objective, TargetKind, TargetLoss, Task,
};
use crate::backend::operands::{NeedsGrad, Operands, Sizes};
use crate::backend::plan::Planned;
use crate::backend::weight::Weight;
use crate::backend::{self, gpu};
use crate::loss::{LossOptions, Reduction};
use crate::tensors::checks::accumulation_dtype;

/// The operands that every case has.
pub(super) const ALL: NeedsGrad =
    NeedsGrad { contexts: true, log_priors: true, weight: true, adapter: false, bias: true };

/// A mixture with random operands, and its targets.
pub(super) struct Case {
    pub(super) sizes: Sizes,
    pub(super) dtype: DType,
    /// The largest magnitude of the weights.
    pub(super) scale: f64,
    /// The largest magnitude of the biases.
    pub(super) bias: f64,
    pub(super) logit_scale: f64,
    pub(super) function: LogitFunction,
    /// Whether the decoder is stored as `[d, vocab]`.
    pub(super) transposed: bool,
    pub(super) options: LossOptions,
    /// The number of rows of the weight behind the vocabulary, if targets are entries of their own.
    pub(super) own: Option<usize>,
    /// The number of columns of the decoder that are an adapter's.
    pub(super) rank: usize,
    /// The number of positions per chunk.
    pub(super) chunk: usize,
}

/// Random numbers of at most this magnitude.
pub(super) fn random(seed: u64, shape: &[usize], scale: f64) -> Tensor {
    // A small generator (xorshift) with the same numbers on every machine.
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        scale * ((state >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
    };
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

impl Case {
    /// The operands in a dtype.
    pub(super) fn operands(&self, dtype: DType) -> Operands {
        let Sizes { positions, components, context_dim, vocab } = self.sizes;
        let (rows, d) = (vocab + self.own.unwrap_or(0), context_dim - self.rank);
        // candle has no softmax of an empty tensor.
        let log_priors = candle_nn::ops::log_softmax(&random(1, &[positions.max(1), components], 2.0), 1).unwrap();
        let log_priors = log_priors.narrow(0, 0, positions).unwrap().contiguous().unwrap();
        let accumulation = accumulation_dtype("contexts", dtype).unwrap();
        // They are rounded to the dtype of the case first, so that the truth has the same operands.
        let rounded = |t: Tensor| t.to_dtype(self.dtype).unwrap().to_dtype(dtype).unwrap();
        Operands {
            sizes: self.sizes,
            contexts: rounded(random(2, &[positions, components, context_dim], 1.0)),
            source: None,
            log_priors: Some(log_priors.to_dtype(DType::F32).unwrap().to_dtype(accumulation).unwrap()),
            weight: Weight::Dense(if !self.transposed {
                rounded(random(3, &[rows, d], self.scale))
            } else {
                rounded(random(3, &[d, rows], self.scale)).t().unwrap()
            }),
            adapter: (self.rank > 0).then(|| rounded(random(9, &[rows, self.rank], self.scale))),
            bias: Some(random(4, &[rows], self.bias).to_dtype(DType::F32).unwrap().to_dtype(accumulation).unwrap()),
            logit_scale: self.logit_scale,
            logit_function: self.function,
            precision: self.options.precision,
        }
    }

    /// The operands that need a gradient.
    pub(super) fn needs_grad(&self) -> NeedsGrad {
        NeedsGrad { adapter: self.rank > 0, ..ALL }
    }

    /// The loss, with the weights and upstream gradients of the options.
    pub(super) fn objective(&self, dtype: DType) -> Objective {
        let Sizes { positions, vocab, .. } = self.sizes;
        let rows = vocab + self.own.unwrap_or(0);
        let targets: Vec<i64> = (0..positions).map(|t| ((t * 7919 + 3) % rows) as i64).collect();
        let weights = |seed, n, mean: f64| (random(seed, &[n], 1.0) + mean).unwrap().to_dtype(DType::F32).unwrap();
        let options = &self.options;
        Objective::Targets(TargetLoss {
            targets: Tensor::from_vec(targets, positions, &Device::Cpu).unwrap(),
            ignore_index: options.positions.ignore_index,
            position_weights: Some(weights(5, positions, 1.0).to_dtype(dtype).unwrap()),
            // Some are negative.
            class_weights: self.own.is_none().then(|| weights(6, vocab, 0.6).to_dtype(dtype).unwrap()),
            terms: options.terms(),
            scale: match options.positions.reduction {
                Reduction::Mean => GradScale::OneOverCount,
                Reduction::Sum => GradScale::Constant(1.0),
                Reduction::None => {
                    let upstream = random(7, &[positions], 3.0).to_dtype(DType::F32).unwrap();
                    GradScale::Upstream(upstream.to_dtype(dtype).unwrap())
                }
            },
            shard: None,
            own_shifts: self.own.map(|_| weights(8, positions, -0.5).to_dtype(dtype).unwrap()),
            so_far: None,
        })
    }

    /// The plan for the loss.
    pub(super) fn plan(&self, gpu: &EmulatedGpu) -> Planned {
        self.plan_for(gpu, &self.operands(self.dtype))
    }

    /// The plan for the loss of other operands.
    pub(super) fn plan_for(&self, gpu: &EmulatedGpu, operands: &Operands) -> Planned {
        let targets = if self.own.is_some() { TargetKind::Own } else { TargetKind::Ids };
        let task = Task::Loss { terms: self.options.terms(), targets, needs_grad: self.needs_grad() };
        self.plan_task(gpu, operands, task)
    }

    /// The plan for a task, with as many positions per chunk as the case has.
    pub(super) fn plan_task(&self, gpu: &EmulatedGpu, operands: &Operands, task: Task) -> Planned {
        let plan = |budget| gpu::plan(gpu, operands, task, budget);
        if self.sizes.positions == 0 {
            return plan(None).unwrap();
        }
        let Err(crate::Error::Workspace { least, .. }) = plan(Some(0)) else { panic!("a budget of zero") };
        // The bytes of one chunk of all positions.
        let whole = plan(Some(usize::MAX / 2)).unwrap().plan.workspace_bytes;
        let per_position = (whole.saturating_sub(least)) / (self.sizes.positions.max(2) - 1);
        plan(Some(least + (self.chunk - 1) * per_position)).unwrap()
    }

    /// The largest error of the results of a loss, each relative to the result's largest value, and that result's name.
    pub(super) fn loss_error(&self, gpu: &EmulatedGpu, objective: impl Fn(DType) -> Objective) -> (f64, &'static str) {
        let true_objective = objective(DType::F64);
        let truth = true_loss(&self.operands(DType::F64), &true_objective, self.needs_grad());
        let got = gpu::loss(gpu, &self.plan(gpu), &objective(DType::F32)).unwrap();
        let mut pairs = gradient_pairs(got.gradients, truth.gradients);
        if matches!(true_objective, Objective::Targets(_)) {
            let number = |tensor: &Tensor| tensor.to_scalar::<f32>().unwrap();
            let mean = match (number(&got.sum), number(&got.count)) {
                (_, 0.0) => 0.0,
                (sum, count) => sum / count,
            };
            let mean = Tensor::new(mean, &Device::Cpu).unwrap();
            pairs.extend([
                ("mean", got.mean, Some(mean)),
                ("objective", Some(got.objective), Some(truth.objective)),
                ("nll", Some(got.nll), Some(truth.nll)),
                ("sum", Some(got.sum), Some(truth.sum)),
                ("count", Some(got.count), Some(truth.count)),
                ("is_correct", got.is_correct, truth.is_correct),
            ]);
        }
        largest_error(pairs)
    }

    /// The log-probabilities of all ids on the CPU in f64.
    pub(super) fn true_log_probs(&self) -> Tensor {
        let task = Task::LogProbs { needs_grad: NeedsGrad::default() };
        let planned = backend::plan(&self.operands(DType::F64), task, None).unwrap();
        backend::log_probs(&planned, DType::F64).unwrap()
    }

    /// The largest error that passes.
    pub(super) fn tolerance(&self) -> f64 {
        match self.dtype {
            DType::F32 => 2e-5,
            DType::F16 => 2e-3,
            _ => 1e-2,
        }
    }

    /// Asserts that the error of the loss is within the tolerance.
    pub(super) fn check(&self, gpu: &EmulatedGpu) {
        let (error, name) = self.loss_error(gpu, |dtype| self.objective(dtype));
        assert!(error <= self.tolerance(), "{name}: {error} with {:?} {:?} {:?}", self.sizes, self.dtype, self.options);
    }
}

/// A loss without weights or ignored positions.
pub(super) fn plain_objective(targets: Vec<i64>, terms: LossTerms, scale: GradScale) -> Objective {
    Objective::Targets(TargetLoss {
        targets: Tensor::new(targets, &Device::Cpu).unwrap(),
        position_weights: None,
        class_weights: None,
        ignore_index: None,
        terms,
        scale,
        shard: None,
        own_shifts: None,
        so_far: None,
    })
}

/// The operands with another bias.
pub(super) fn with_bias(operands: Operands, bias: &[f32]) -> Operands {
    let bias = Tensor::new(bias, &Device::Cpu).unwrap();
    Operands { bias: Some(bias.to_dtype(operands.bias.unwrap().dtype()).unwrap()), ..operands }
}

/// The loss on the CPU.
pub(super) fn true_loss(operands: &Operands, objective: &Objective, needs_grad: NeedsGrad) -> LossResults {
    let planned = backend::plan(operands, objective.task(operands, needs_grad).unwrap(), None).unwrap();
    backend::loss(&planned, objective).unwrap()
}

/// The name of a result, what is found, and the truth.
pub(super) type ResultPair = (&'static str, Option<Tensor>, Option<Tensor>);

/// The gradients of all operands, and the true ones.
pub(super) fn gradient_pairs(got: Gradients, truth: Gradients) -> Vec<ResultPair> {
    vec![
        ("contexts", got.contexts, truth.contexts),
        ("log_priors", got.log_priors, truth.log_priors),
        ("weight", got.weight, truth.weight),
        ("adapter", got.adapter, truth.adapter),
        ("bias", got.bias, truth.bias),
    ]
}

/// The largest [`error`] of these results, and that result's name. A result that is absent must be absent in truth.
pub(super) fn largest_error(pairs: Vec<ResultPair>) -> (f64, &'static str) {
    let errors = pairs.into_iter().map(|(name, got, truth)| {
        assert_eq!(got.is_some(), truth.is_some(), "{name}");
        (got.zip(truth).map_or(0.0, |(got, truth)| error(&got, &truth)), name)
    });
    errors.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

/// The largest difference, relative to the largest finite magnitude (at least 0.5). It is infinite if values that are
/// not finite differ.
pub(super) fn error(got: &Tensor, truth: &Tensor) -> f64 {
    assert_eq!(got.dims(), truth.dims());
    let numbers = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let (got, truth) = (numbers(got), numbers(truth));
    let scale = truth.iter().filter(|x| x.is_finite()).fold(0.5, |m: f64, x| m.max(x.abs()));
    let errors = got.iter().zip(&truth).map(|(&g, &t)| match (g.is_finite(), t.is_finite()) {
        (true, true) => (g - t).abs() / scale,
        (false, false) if g == t || (g.is_nan() && t.is_nan()) => 0.0,
        _ => f64::INFINITY,
    });
    errors.fold(0.0, f64::max)
}

/// A case of these sizes in f32, with default options.
pub(super) fn case(positions: usize, components: usize, context_dim: usize, vocab: usize) -> Case {
    Case {
        sizes: Sizes { positions, components, context_dim, vocab },
        dtype: DType::F32,
        scale: 1.0,
        bias: 1.0,
        logit_scale: 1.0,
        function: LogitFunction::Identity,
        transposed: false,
        options: LossOptions::new(),
        own: None,
        rank: 0,
        chunk: 2,
    }
}

/// Options that count correct targets, and may ignore id 3.
pub(super) fn options(reduction: Reduction, smoothing: f64, z_loss: f64, ignore: bool) -> LossOptions {
    let options = LossOptions::new().with_reduction(reduction).with_label_smoothing(smoothing).with_z_loss(z_loss);
    if ignore {
        options.with_ignore_index(3).with_correct(true)
    } else {
        options.with_correct(true)
    }
}

/// The ids and log-probabilities of `top_k`, and those from the f64 log-probabilities.
pub(super) fn top_k_and_truth(
    gpu: &EmulatedGpu,
    case: &Case,
    k: usize,
) -> (Vec<Vec<u32>>, Tensor, Vec<Vec<u32>>, Tensor) {
    let all = case.true_log_probs().to_vec2::<f64>().unwrap();
    let expected: Vec<Vec<u32>> = all
        .iter()
        .map(|row| {
            let mut ids: Vec<u32> = (0..row.len() as u32).collect();
            ids.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
            ids[..k].to_vec()
        })
        .collect();
    let values: Vec<f64> =
        all.iter().zip(&expected).flat_map(|(row, ids)| ids.iter().map(|&id| row[id as usize])).collect();
    let (ids, log_probs) = ranked(gpu, &case.plan(gpu), k).unwrap();
    let values = Tensor::from_vec(values, (expected.len(), k), &Device::Cpu).unwrap();
    (ids.to_vec2().unwrap(), log_probs, expected, values)
}
