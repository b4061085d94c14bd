//! The whole backend on the host, compared with the CPU in f64; and kernels that are wrong, which must be noticed.

use proptest::prelude::*;

use super::*;
use crate::backend::gpu::{argmax_on, log_probs_on, loss_on, plan_of};
use crate::backend::plan::Sizes;
use crate::backend::{self, Objective, Operands, Task, Wanted};
use crate::loss::{LossOptions, Reduction};

const ALL: Wanted = Wanted { contexts: true, log_priors: true, weight: true, bias: true };

/// A mixture of random operands, and targets.
struct Case {
    sizes: Sizes,
    dtype: DType,
    scale: f64,
    softcap: Option<f64>,
    options: LossOptions,
    /// Tokens of a chunk.
    chunk: usize,
}

fn random(seed: u64, shape: &[usize], scale: f64) -> Tensor {
    // A small generator is enough, and the same on every machine.
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
    fn operands(&self, dtype: DType) -> Operands {
        let Sizes { tokens, components, context, vocab } = self.sizes;
        // candle has no softmax of nothing.
        let log_priors = candle_nn::ops::log_softmax(&random(1, &[tokens.max(1), components], 2.0), 1).unwrap();
        let log_priors = log_priors.narrow(0, 0, tokens).unwrap().contiguous().unwrap();
        let accumulation = backend::accumulation_dtype("contexts", dtype).unwrap();
        // Rounded to the dtype first, so that the truth is that of the same numbers.
        let rounded = |t: Tensor| t.to_dtype(self.dtype).unwrap().to_dtype(dtype).unwrap();
        Operands {
            sizes: self.sizes,
            contexts: rounded(random(2, &[tokens, components, context], 1.0)),
            log_priors: Some(log_priors.to_dtype(DType::F32).unwrap().to_dtype(accumulation).unwrap()),
            weight: rounded(random(3, &[vocab, context], self.scale)),
            bias: Some(random(4, &[vocab], 1.0).to_dtype(DType::F32).unwrap().to_dtype(accumulation).unwrap()),
            softcap: self.softcap,
        }
    }

    fn objective(&self, dtype: DType) -> Objective {
        let Sizes { tokens, vocab, .. } = self.sizes;
        let targets: Vec<i64> = (0..tokens).map(|t| ((t * 7919 + 3) % vocab) as i64).collect();
        let weights = |seed, n| (random(seed, &[n], 1.0) + 1.0).unwrap().to_dtype(DType::F32).unwrap();
        let options = &self.options;
        Objective::Targets {
            targets: Tensor::from_vec(targets, tokens, &Device::Cpu).unwrap(),
            token_weights: Some(weights(5, tokens).to_dtype(dtype).unwrap()),
            class_weights: Some(weights(6, vocab).to_dtype(dtype).unwrap()),
            options: options.clone(),
            upstream: (options.reduction == Reduction::None)
                .then(|| random(7, &[tokens], 3.0).to_dtype(DType::F32).unwrap().to_dtype(dtype).unwrap()),
        }
    }

    fn plan(&self, host: &Host) -> backend::plan::Plan {
        let task = Task::loss(&self.options, ALL);
        let plan = |budget| plan_of(host.kind(), self.sizes, self.dtype, task, budget);
        let Err(crate::Error::Workspace { least, .. }) = plan(Some(0)) else { panic!("a budget of nothing") };
        // That of all tokens in one chunk.
        let whole = plan(Some(usize::MAX / 2)).unwrap().workspace_bytes;
        let per_token = (whole.saturating_sub(least)) / (self.sizes.tokens.max(2) - 1);
        plan(Some(least + (self.chunk - 1) * per_token)).unwrap()
    }

    /// The largest error of all results of a loss, each relative to the largest number of its kind.
    fn loss_error(&self, host: &Host, objective: impl Fn(DType) -> Objective) -> (f64, &'static str) {
        let truth_operands = self.operands(DType::F64);
        let task = Task::loss(&self.options, ALL);
        let plan = backend::plan(&truth_operands, task, None).unwrap();
        let truth = backend::loss(&truth_operands, &objective(DType::F64), ALL, &plan).unwrap();
        let got = loss_on(host, &self.operands(self.dtype), &objective(DType::F32), ALL, &self.plan(host)).unwrap();
        let mut pairs = vec![
            ("contexts", got.gradients.contexts, truth.gradients.contexts),
            ("log_priors", got.gradients.log_priors, truth.gradients.log_priors),
            ("weight", got.gradients.weight, truth.gradients.weight),
            ("bias", got.gradients.bias, truth.gradients.bias),
        ];
        if matches!(objective(DType::F64), Objective::Targets { .. }) {
            pairs.extend([
                ("objective", Some(got.objective), Some(truth.objective)),
                ("nll", Some(got.nll), Some(truth.nll)),
                ("sum", Some(got.sum), Some(truth.sum)),
                ("count", Some(got.count), Some(truth.count)),
                ("hits", got.hits, truth.hits),
                ("dropped_mass", got.dropped_mass, truth.dropped_mass),
            ]);
        }
        let errors = pairs.into_iter().map(|(name, got, truth)| {
            assert_eq!(got.is_some(), truth.is_some(), "{name}");
            (got.zip(truth).map_or(0.0, |(got, truth)| error(&got, &truth)), name)
        });
        errors.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
    }

    fn tolerance(&self) -> f64 {
        match self.dtype {
            DType::F32 => 2e-5,
            DType::F16 => 2e-3,
            _ => 1e-2,
        }
    }

    fn check(&self, host: &Host) {
        let (error, name) = self.loss_error(host, |dtype| self.objective(dtype));
        assert!(error <= self.tolerance(), "{name}: {error} with {:?} {:?} {:?}", self.sizes, self.dtype, self.options);
    }
}

/// The largest difference, relative to the largest number (or a half, where all are smaller); infinite where only
/// one is not a number.
fn error(got: &Tensor, truth: &Tensor) -> f64 {
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

fn case(tokens: usize, components: usize, context: usize, vocab: usize) -> Case {
    Case {
        sizes: Sizes { tokens, components, context, vocab },
        dtype: DType::F32,
        scale: 1.0,
        softcap: None,
        options: LossOptions::new(),
        chunk: 2,
    }
}

fn options(reduction: Reduction, smoothing: f64, z_loss: f64, ignore: bool) -> LossOptions {
    let options = LossOptions::new().with_reduction(reduction).with_label_smoothing(smoothing).with_z_loss(z_loss);
    match ignore {
        true => options.with_ignore_index(3).with_hits(true),
        false => options.with_hits(true),
    }
}

#[test]
fn losses_and_gradients_equal_those_of_the_cpu_in_double_precision() {
    for host in Host::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                for (smoothing, z_loss, softcap) in [(0.0, 0.0, None), (0.1, 0.0, None), (0.2, 0.01, Some(5.0))] {
                    let options = options(reduction, smoothing, z_loss, true);
                    Case { dtype, softcap, options, ..case(5, 3, 6, 37) }.check(&host);
                }
            }
        }
    }
}

#[test]
fn sizes_of_all_kinds_work() {
    for host in Host::all() {
        for (tokens, components, context, vocab) in
            [(0, 2, 3, 5), (1, 1, 1, 1), (3, 1, 7, 2), (2, 17, 5, 9), (3, 4, 8, 1025), (1, 2, 3, 4099), (300, 1, 2, 3)]
        {
            for chunk in [1, 300] {
                Case { chunk, ..case(tokens, components, context, vocab) }.check(&host);
            }
        }
    }
}

#[test]
fn large_logits_keep_their_precision() {
    for host in Host::all() {
        for scale in [10.0, 100.0] {
            let case = Case { scale, ..case(4, 3, 6, 50) };
            let (error, name) = case.loss_error(&host, |dtype| case.objective(dtype));
            assert!(error <= 1e-5 * scale, "{name}: {error} at scale {scale}");
        }
    }
}

#[test]
fn the_filter_drops_what_it_drops_on_the_cpu() {
    for host in Host::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for filter in [0.01, 0.2, 0.999] {
                let options = LossOptions::new().with_responsibility_filter(filter).with_ignore_index(3);
                let case = Case { dtype, options, chunk: 4, ..case(7, 5, 6, 40) };
                case.check(&host);
                let tokens_ignored = Case { options: case.options.clone().with_ignore_index(10), ..case };
                tokens_ignored.check(&host);
            }
        }
    }
}

#[test]
fn many_live_rows_keep_their_order() {
    for host in Host::all() {
        let options = LossOptions::new().with_responsibility_filter(0.1);
        Case { options, chunk: 200, ..case(201, 4, 3, 6) }.check(&host);
    }
}

#[test]
fn a_filter_without_gradients_reports_what_it_would_drop() {
    for host in Host::all() {
        let case = Case { options: LossOptions::evaluation().with_responsibility_filter(0.2), ..case(6, 5, 6, 40) };
        let truth = case.operands(DType::F64);
        let plan = backend::plan(&truth, Task::loss(&case.options, Wanted::default()), None).unwrap();
        let truth = backend::loss(&truth, &case.objective(DType::F64), Wanted::default(), &plan).unwrap();
        let operands = case.operands(DType::F32);
        let got = loss_on(&host, &operands, &case.objective(DType::F32), Wanted::default(), &case.plan(&host)).unwrap();
        assert!(error(&got.dropped_mass.unwrap(), &truth.dropped_mass.unwrap()) <= 1e-5);
        assert!(error(&got.sum, &truth.sum) <= 1e-5);
    }
}

#[test]
fn large_weights_do_not_overflow_half_precision() {
    for host in Host::all() {
        let case = Case { dtype: DType::F16, ..case(5, 3, 6, 37) };
        let heavy = |dtype| match case.objective(dtype) {
            Objective::Targets { targets, token_weights, class_weights, options, upstream } => Objective::Targets {
                token_weights: token_weights.map(|w| (w * 1000.0).unwrap()),
                class_weights: class_weights.map(|w| (w * 1000.0).unwrap()),
                targets,
                options,
                upstream,
            },
            objective => objective,
        };
        let (error, name) = case.loss_error(&host, heavy);
        assert!(error <= case.tolerance(), "{name}: {error}");
        let ones = |dtype| Objective::LogProbs { upstream: Tensor::ones((5, 37), dtype, &Device::Cpu).unwrap() };
        let (error, name) = case.loss_error(&host, ones);
        assert!(error <= case.tolerance(), "{name}: {error}");
    }
}

#[test]
fn log_probabilities_and_their_gradient_equal_those_of_the_cpu() {
    for host in Host::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let case = Case { dtype, ..case(5, 3, 6, 37) };
            let (operands, truth) = (case.operands(dtype), case.operands(DType::F64));
            let plan = case.plan(&host);
            let cpu_plan = backend::plan(&truth, Task::log_probs(Wanted::default()), None).unwrap();
            let log_probs = backend::log_probs(&truth, &cpu_plan).unwrap();
            assert!(error(&log_probs_on(&host, &operands, &plan).unwrap(), &log_probs) <= case.tolerance());
            let argmax = backend::argmax(&truth, &cpu_plan).unwrap().to_vec1::<u32>().unwrap();
            assert_eq!(argmax_on(&host, &operands, &plan).unwrap().to_vec1::<u32>().unwrap(), argmax);

            let upstream = random(8, &[5, 37], 1.0);
            let objective = |dtype| Objective::LogProbs { upstream: upstream.to_dtype(dtype).unwrap() };
            let (error, name) = case.loss_error(&host, objective);
            assert!(error <= case.tolerance(), "{name}: {error} in {dtype:?}");
        }
    }
}

#[test]
fn a_target_outside_the_vocabulary_makes_its_loss_nan_and_reads_nothing() {
    for host in Host::all() {
        let case = case(4, 2, 3, 10);
        let objective = Objective::Targets {
            targets: Tensor::new(&[1i64, 10, i64::MAX, -1], &Device::Cpu).unwrap(),
            token_weights: None,
            class_weights: None,
            options: LossOptions::new(),
            upstream: None,
        };
        let outcome = loss_on(&host, &case.operands(DType::F32), &objective, ALL, &case.plan(&host)).unwrap();
        let nll = outcome.nll.to_vec1::<f32>().unwrap();
        assert!(nll[0].is_finite() && nll[1..].iter().all(|x| x.is_nan()), "{nll:?}");
        assert!(outcome.sum.to_scalar::<f32>().unwrap().is_nan());
    }
}

#[test]
fn infinities_and_nan_stand_where_they_stand_on_the_cpu() {
    for host in Host::all() {
        for (row, value) in [(0, f32::NAN), (3, f32::INFINITY), (5, f32::NEG_INFINITY)] {
            for components in [1, 2] {
                let case = Case { chunk: 6, ..case(6, components, 4, 12) };
                let change = |operands: Operands| {
                    let mut bias = vec![0f32; 12];
                    bias[row] = value;
                    let bias = Tensor::new(bias, &Device::Cpu).unwrap();
                    Operands { bias: Some(bias.to_dtype(operands.bias.unwrap().dtype()).unwrap()), ..operands }
                };
                let (truth, got) = (change(case.operands(DType::F64)), change(case.operands(DType::F32)));
                let plan = backend::plan(&truth, Task::loss(&case.options, ALL), None).unwrap();
                let truth = backend::loss(&truth, &case.objective(DType::F64), ALL, &plan).unwrap();
                let got = loss_on(&host, &got, &case.objective(DType::F32), ALL, &case.plan(&host)).unwrap();
                assert!(error(&got.nll, &truth.nll) <= 1e-5, "{value} {:?} {:?}", got.nll, truth.nll);
                let (got, truth) = (got.gradients.contexts.unwrap(), truth.gradients.contexts.unwrap());
                assert!(error(&got, &truth) <= 1e-4, "{value} K = {components}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn any_sizes_and_options_work(
        tokens in 1usize..9, components in 1usize..6, context in 1usize..12, vocab in 1usize..70, chunk in 1usize..9,
        smoothing in prop_oneof![Just(0.0), 0.0..0.9], z_loss in prop_oneof![Just(0.0), 0.0..0.1],
        softcap in prop_oneof![Just(None), (2.0..30.0).prop_map(Some)], ignore: bool,
        reduction in prop_oneof![Just(Reduction::Mean), Just(Reduction::Sum), Just(Reduction::None)],
    ) {
        for host in Host::all() {
            let options = LossOptions { hits: false, ..options(reduction, smoothing, z_loss, ignore) };
            // In f32: the rounding of the half types would have to be measured by what cancels in a gradient.
            Case { softcap, options, chunk, ..case(tokens, components, context, vocab) }.check(&host);
        }
    }
}

/// Changes that somebody could make by accident, in the text that both languages share.
const WRONG_ROWS: [(&str, &str); 15] = [
    ("first + i < logits.vocab ? logits.finish", "first + i < logits.vocab - 1 ? logits.finish"),
    ("if (v == word) g[i] -= scale * hard_mass;", ""),
    ("for (int w = 1; w < WARPS; ++w)", "for (int w = 2; w < WARPS; ++w)"),
    ("g[i] = g[i] == 0.f ? 0.f : g[i] * logits.slope(logit);", ""),
    ("rows.mass(r) += mass;", "rows.mass(r) = mass;"),
    ("2.f * objective.z_loss / components", "objective.z_loss / components"),
    ("log_prior_gradient[r] = weighted(scale, -mass);", "log_prior_gradient[r] = weighted(scale, mass);"),
    ("weights[t] / *largest_weight", "weights[t]"),
    ("hard[t] = class_weight * (1.f - smoothing);", "hard[t] = class_weight;"),
    ("counts[t] = weight * class_weight;", "counts[t] = weight;"),
    ("if (bias) logit += bias[v];", ""),
    ("i64 r = live ? live[block] : block", "i64 r = block"),
    ("T *from = all + (i64)live[block] * columns", "T *from = all + (i64)block * columns"),
    ("float *to = all + (i64)live[block] * columns", "float *to = all + (i64)block * columns"),
    ("|| mass < least;", ";"),
];

/// The same, in what only Metal has.
const WRONG_METAL: [(&str, &str); 9] = [
    ("GIVEN(first + 1, bias)", "GIVEN(first + 2, nullptr)"),
    ("GIVEN(first + 4, factor)", "nullptr"),
    ("GIVEN(13, live)", "nullptr"),
    ("GIVEN(2, class_weights)", "nullptr"),
    ("uint(from->bits) << 16", "uint(from->bits) << 15"),
    ("(bits + 0x7fff + (bits >> 16 & 1)) >> 16", "bits >> 17"),
    ("x * widened(lhs + (i64)(first + j) * k + i)", "x * widened(lhs + (i64)j * k + i)"),
    ("for (int i = lane; i < k; i += 32)", "for (int i = lane; i + 32 < k; i += 32)"),
    ("if (i < count) to[i] = widened(from + i);", "if (i + 1 < count) to[i] = widened(from + i);"),
];

#[test]
fn the_checks_reject_kernels_that_are_wrong() {
    for language in LANGUAGES {
        let Some(host) = Host::new(language) else { return };
        let all = options(Reduction::Mean, 0.1, 0.01, true);
        let filter = LossOptions::new().with_responsibility_filter(0.2);
        let mut cases = [all.clone(), filter]
            .map(|options| Case { softcap: Some(5.0), options, chunk: 4, ..case(5, 3, 6, 300) })
            .into_iter()
            .collect::<Vec<_>>();
        // Few rows and many, in half precision.
        cases.extend([(4, 70), (7, 33)].map(|(chunk, context)| Case {
            dtype: DType::BF16,
            options: all.clone(),
            chunk,
            scale: 0.2,
            ..case(7, 3, context, 40)
        }));
        let mut changes = WRONG_ROWS.to_vec();
        if language == Language::Metal {
            changes.extend(WRONG_METAL);
        }
        // A NaN is the largest of errors.
        let exceeds = |error: f64, tolerance: f64| error.is_nan() || error > tolerance;
        let is_wrong = |host: &Host| {
            let log_probs_are_wrong = || {
                let (operands, truth) = (cases[2].operands(DType::BF16), cases[2].operands(DType::F64));
                let plan = backend::plan(&truth, Task::log_probs(Wanted::default()), None).unwrap();
                let truth = backend::log_probs(&truth, &plan).unwrap();
                exceeds(error(&log_probs_on(host, &operands, &cases[2].plan(host)).unwrap(), &truth), 1e-2)
            };
            let is_wrong =
                |case: &Case| exceeds(case.loss_error(host, |dtype| case.objective(dtype)).0, case.tolerance());
            cases.iter().any(is_wrong) || log_probs_are_wrong()
        };
        assert!(!is_wrong(&host), "{language:?}");
        for (text, replacement) in changes {
            let Some(mutant) = Host::mutant(language, text, replacement) else { return };
            assert!(is_wrong(&mutant), "not caught: {text} -> {replacement} ({language:?})");
        }
    }
}

/// Kernels that go beyond a tensor: this test calls itself for each of them, since each ends its process.
#[test]
fn an_access_outside_a_tensor_ends_the_process() {
    const CHOICE: &str = "MOS_HEAD_TEST_MUTANT";
    let changes = [
        ("", ""),
        ("is_word && class_weights ?", "class_weights ?"),
        ("*count = at;", "count[1] = at;"),
        ("first < logits.vocab; first +=", "first < logits.stride + 4; first +="),
        // Only in Metal: what is absent is read.
        ("GIVEN(1, upstream)", "upstream"),
    ];
    let of_cuda = changes.split_last().unwrap().1.iter().map(|&(text, to)| (Language::Cuda, text, to));
    let choices = of_cuda.chain(changes.map(|(text, to)| (Language::Metal, text, to)));
    if let Ok(choice) = std::env::var(CHOICE) {
        let (language, text, replacement) = choices.clone().nth(choice.parse().unwrap()).unwrap();
        let host =
            if text.is_empty() { Host::new(language) } else { Host::mutant(language, text, replacement) }.unwrap();
        let options = LossOptions::new().with_responsibility_filter(0.2);
        let case = Case { options, ..case(4, 2, 3, 1024) };
        let objective = |dtype| match case.objective(dtype) {
            Objective::Targets { token_weights, class_weights, options, upstream, .. } => Objective::Targets {
                targets: Tensor::new(&[1i64, 2, 1024, 3], &Device::Cpu).unwrap(),
                token_weights,
                class_weights,
                options,
                upstream,
            },
            objective => objective,
        };
        loss_on(&host, &case.operands(DType::F32), &objective(DType::F32), ALL, &case.plan(&host)).unwrap();
        return;
    }
    if Host::all().next().is_none() {
        return;
    }
    let name = std::thread::current().name().unwrap().to_owned();
    for (choice, (language, text, _)) in choices.enumerate() {
        let mut this = Command::new(std::env::current_exe().unwrap());
        let output = this.args(["--exact", &name]).env(CHOICE, choice.to_string()).output().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
        let expected = (!text.is_empty()).then_some(libc::SIGSEGV);
        assert_eq!(signal, expected, "{language:?} {text}: {}", String::from_utf8_lossy(&output.stdout));
    }
}
