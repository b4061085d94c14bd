//! Mutation tests: kernels with a mistake, which the checks must catch.

use super::case::{case, error, options, random, top_k_and_truth, Case};
use super::scores::{scored, ScoreCase};
use super::tests::error_of_a_late_logit;
use super::*;

use crate::backend::gpu;
use crate::backend::logit_function::LogitFunction::{Sigsoftmax, Softcap};
use crate::backend::objective::{Objective, TargetLoss};
use crate::loss::{LossOptions, Reduction};
use crate::tensors::log_softmax;

/// Plausible mistakes in the source that both languages share.
const SHARED_MUTATIONS: [(&str, &str); 59] = [
    ("v < logits.vocab && v != left_out", "v < logits.vocab - 1 && v != left_out"),
    ("v < logits.vocab && v != left_out", "v < logits.vocab"),
    ("if (rows.own_logits && id >= 0) sum.add({rows.own_logits[r], 1.f});", ""),
    ("rows.own_logits ? rows.own_logits[r] : logits.at(row, id)", "logits.at(row, id)"),
    ("store(to + id, rows.own_logits ? 0.f : g);", "store(to + id, g);"),
    ("- unit * objective.scale(t) * hard_mass;", ";"),
    ("widened(z + first + i) + widened(bias + i)", "widened(z + first + i)"),
    ("g - y * y * g", "g"),
    ("bias ? widened(z + i) + widened(bias + i) : widened(z + i)", "widened(z + i)"),
    ("log_sum = logarithm(sum.sum);", "log_sum = 0.f;"),
    ("total = warp_reduce(total);\n", ""),
    ("upstream[i] - exponential(result[i]) * total", "upstream[i] - exponential(result[i])"),
    ("part / *count", "part"),
    ("extent.sum == 0.f ? 0.f : 1.f / extent.sum", "1.f"),
    ("const float objective = weighted(weights[t], losses[t]);", "const float objective = losses[t];"),
    ("id / 4 % BLOCK == (int)tid", "id % BLOCK == (int)tid"),
    (
        "const float value = exp_scale * exponential_for<T>(relative);",
        "const float value = exponential_for<T>(relative);",
    ),
    ("weighted(mass, target_softmax) - rows.hard_mass(r)", "-rows.hard_mass(r)"),
    ("if (v == id) g[i] -= scale * hard_mass;", ""),
    ("for (int w = 1; w < WARPS; ++w)", "for (int w = 2; w < WARPS; ++w)"),
    ("g[i] = g[i] == 0.f ? 0.f : g[i] * logits.slope(logit);", ""),
    ("rows.mass(r) += mass;", "rows.mass(r) = mass;"),
    ("2.f * objective.terms.z_loss / components", "objective.terms.z_loss / components"),
    ("weighted(scale, -mass) * gradient_factor[0]", "weighted(scale, mass) * gradient_factor[0]"),
    ("weighted(scale, -mass) * gradient_factor[0]", "weighted(scale, -mass)"),
    ("rows.hard_mass(r)) * gradient_factor[0]", "rows.hard_mass(r))"),
    ("weights[t] / *largest_weight", "weights[t]"),
    ("hard[t] = class_weight * (1.f - smoothing);", "hard[t] = class_weight;"),
    ("counts[t] = weight * class_weight;", "counts[t] = weight;"),
    ("if (bias) logit += bias[v];", ""),
    ("logit *= scale;", ""),
    ("x == last.value && v > last.id", "x == last.value && v >= last.id"),
    ("last = block_reduce(next, tid, warp_largest);\n        if", "last = next;\n        if"),
    ("log_norm = block_reduce(sum, tid, warp_sums).value();", "log_norm = sum.value();"),
    ("entropy = block_reduce(entropy, tid, warp_values);", ""),
    ("entropy -= q == 0.f ? 0.f : q * log_q;", "entropy -= q * log_q;"),
    ("not_negative(log_norm - scored.power * sum.value())", "not_negative(-sum.value())"),
    ("log_prob_gradients + weighted(entropy_gradient, entropy)", "log_prob_gradients"),
    ("scored.slope(t) = entropy_gradient;", "scored.slope(t) = 0.f;"),
    ("if (id >= 0 && id % BLOCK == (int)tid) log_p[id] = minus_infinity();", ""),
    ("log_outside = 0.f - not_negative(log_norm - log_sum);", "log_outside = log_sum;"),
    ("log_prob_gradients += outside_gradient;", ""),
    ("sum.add({2.f * scored.power * log_p[v], 1.f})", "sum.add({scored.power * log_p[v], 1.f})"),
    ("const float log_squares = block_reduce(sum, tid, warp_sums).value();", "const float log_squares = sum.value();"),
    ("not_negative(2.f * log_norm - log_squares)", "not_negative(-log_squares)"),
    ("log_prob_gradients += 2.f * collision_gradient;", ""),
    ("scored.collision(t) = collision;", "scored.collision(t) = 0.f;"),
    ("exponential(2.f * log_q - log_collision)", "exponential(log_q - log_collision)"),
    ("weighted(collision, exponential(2.f * values[i] - log_collision));", "0.f;"),
    ("if (is_first) scored.mass(t, i) +=", "scored.mass(t, i) +="),
    ("weighted(outside, exponential(log_q - log_outside))", "0.f"),
    ("scales[t] = mass_bound == 0.f ? 0.f : 1.f;", "scales[t] = 1.f / mass_bound;"),
    (
        "const float candidate_mass = scored.component_mass(rows, t, i, r % logits.components",
        "const float candidate_mass = scored.component_mass(rows, t, i, 0",
    ),
    ("if (scored.id(t, j, logits.vocab) == v) {", "if (j == i) {"),
    ("v / 4 % BLOCK != (int)tid", "v % BLOCK != (int)tid"),
    ("store(to + v, g == 0.f ? 0.f : g * logits.slope(logit));", "store(to + v, g);"),
    ("logit < 0.f ? 2.f * logit : logit", "logit"),
    ("logarithm(1.f + exponential(-absolute(logit)))", "exponential(-absolute(logit))"),
    ("square_root(w * (w + 4.f))", "w"),
];

/// Plausible mistakes in kernels that only CUDA launches.
const CUDA_MUTATIONS: [(&str, &str); 18] = [
    ("is_copied && i == width && has_ones ? 1.f : 0.f", "0.f"),
    ("copy_row(from + row * stride, to + row * width", "copy_row(from + row * width, to + row * width"),
    ("x[i] = weighted(by, x[i]);", ""),
    ("store(to + i, weighted(by, widened(from + i)))", "store(to + i, widened(from + i))"),
    ("- largest) - exponential(log_sum));", "- largest));"),
    ("exponential(-log_sum) / shift : 0.f", "exponential(-log_sum) : 0.f"),
    ("rows.softmax_scale(r) * exponential(-log_sum) /", "exponential(-log_sum) /"),
    ("extent.sum * exponential(reference - largest)", "extent.sum"),
    ("#define LARGEST_LOGIT 60.f", "#define LARGEST_LOGIT 1000.f"),
    ("step * DEPTH + half * 16 >= depth", "step * DEPTH + half * 16 + 16 >= depth"),
    ("objective.id(own_row / logits.components) - first_id", "objective.id(own_row / logits.components)"),
    ("reference + exponent * LOG_2", "reference + exponent"),
    ("logits.bias ? logits.bias[own_id] * scale : 0.f", "0.f"),
    ("scale = logits.scale * LOG2_E", "scale = LOG2_E"),
    ("for (int w = 1; w < 4; ++w) sum.add(tile.results.powers[w][tid]);", ""),
    (
        "for (int neighbour = 1; neighbour < 4; neighbour *= 2)",
        "for (int neighbour = 1; neighbour < 2; neighbour *= 2)",
    ),
    (
        "for (int i = lane; i < end; i += 32) {\n        const float *from",
        "if (int i = 0; i < end) {\n        const float *from",
    ),
    ("reference = largest;\n", ""),
];

/// Plausible mistakes in the Metal source.
const METAL_MUTATIONS: [(&str, &str); 8] = [
    ("GIVEN(first + 1, bias)", "GIVEN(first + 2, nullptr)"),
    ("GIVEN(first + 4, factor)", "nullptr"),
    ("GIVEN(2, class_weights)", "nullptr"),
    ("uint(from->bits) << 16", "uint(from->bits) << 15"),
    ("(bits + 0x7fff + (bits >> 16 & 1)) >> 16", "bits >> 17"),
    ("x * widened(lhs + (i64)(first + j) * k + i)", "x * widened(lhs + (i64)j * k + i)"),
    ("for (int i = lane; i < k; i += 32)", "for (int i = lane; i + 32 < k; i += 32)"),
    ("if (i < count) to[i] = widened(from + i);", "if (i + 1 < count) to[i] = widened(from + i);"),
];

#[test]
fn wrong_cuda_kernels_are_caught() {
    catch_mutants(Language::Cuda, &CUDA_MUTATIONS);
}

#[test]
fn wrong_metal_kernels_are_caught() {
    catch_mutants(Language::Metal, &METAL_MUTATIONS);
}

/// Panics unless the checks accept the kernels, and none of their mutants.
fn catch_mutants(language: Language, mutations: &[(&str, &str)]) {
    let Some(gpu) = EmulatedGpu::new(language) else { return };
    let all = options(Reduction::Mean, 0.1, 0.01, true);
    let mut cases = [all.clone(), LossOptions::new()]
        .map(|options| Case { logit_scale: 0.7, function: Softcap(5.0), options, chunk: 4, ..case(5, 3, 6, 300) })
        .into_iter()
        .collect::<Vec<_>>();
    // Few rows and many, in half precision.
    cases.extend([(4, 70), (7, 33)].map(|(chunk, context_dim)| Case {
        dtype: DType::BF16,
        options: all.clone(),
        chunk,
        scale: 0.2,
        ..case(7, 3, context_dim, 40)
    }));
    // Targets alone, and targets that are entries of their own.
    cases.push(Case { options: LossOptions::new(), chunk: 4, ..case(5, 3, 6, 300) });
    // So many rows that they are padded.
    cases.extend([(5, false), (12, true)].map(|(context_dim, transposed)| Case {
        dtype: DType::BF16,
        options: LossOptions::new(),
        transposed,
        chunk: 90,
        ..case(90, 3, context_dim, 12)
    }));
    // So many ids and rows that the first product has several tiles.
    cases.push(Case {
        dtype: DType::BF16,
        options: LossOptions::new(),
        logit_scale: 0.7,
        chunk: 50,
        ..case(50, 3, 40, 150)
    });
    cases.push(Case { own: Some(3), ..case(9, 2, 6, 20) });
    let softcap = Case { function: Softcap(2.0), chunk: 4, ..case(5, 3, 6, 300) };
    let sigsoftmax = || Case { function: Sigsoftmax, chunk: 4, ..case(5, 3, 6, 300) };
    cases.push(sigsoftmax());
    let masked = ScoreCase { masked: true, ..scored(case(4, 2, 6, 300), 3, true, 1.0) };
    let outside = ScoreCase { outside: true, ..scored(case(4, 2, 6, 300), 4, true, 0.7) };
    let collision = ScoreCase { collision: true, ..scored(case(4, 2, 6, 300), 2, false, 0.7) };
    let outside_and_collision =
        ScoreCase { outside: true, collision: true, ..scored(case(4, 2, 6, 300), 4, false, 0.7) };
    let score_cases = [
        scored(softcap, 3, true, 0.7),
        scored(sigsoftmax(), 3, true, 1.0),
        masked,
        outside,
        collision,
        outside_and_collision,
    ];
    // A NaN exceeds every tolerance.
    let exceeds = |error: f64, tolerance: f64| error.is_nan() || error > tolerance;
    let is_wrong = |gpu: &EmulatedGpu| {
        let log_probs_are_wrong = || {
            let planned = cases[2].plan_for(gpu, &cases[2].operands(DType::BF16));
            exceeds(error(&gpu::log_probs(gpu, &planned, DType::BF16).unwrap(), &cases[2].true_log_probs()), 1e-2)
        };
        let is_wrong = |case: &Case| exceeds(case.loss_error(gpu, |dtype| case.objective(dtype)).0, case.tolerance());
        let ids_are_wrong = || {
            let (ids, _, expected, _) = top_k_and_truth(gpu, &cases[0], 7);
            ids != expected
        };
        let scores_are_wrong = |case: &ScoreCase| exceeds(case.error(gpu, 1.0).0, case.mixture.tolerance());
        let activation_is_wrong = || {
            let [z, upstream] = [1, 2].map(|seed| random(seed, &[3, 300], 1.0));
            let bias = random(3, &[300], 1.0);
            let operand = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap();
            let exact = z.broadcast_add(&bias).unwrap().tanh().unwrap();
            let found = gpu::bias_tanh(gpu, &operand(&z), &operand(&bias)).unwrap();
            let exact_gradient = (&upstream * (1.0 - exact.sqr().unwrap()).unwrap()).unwrap();
            let gradient = gpu::tanh_gradient(gpu, &operand(&exact), &operand(&upstream)).unwrap();
            exceeds(error(&found, &exact), 1e-5) || exceeds(error(&gradient, &exact_gradient), 1e-5)
        };
        let priors_are_wrong = || {
            let [z, upstream] = [1, 2].map(|seed| random(seed, &[9, 40], 1.0));
            let bias = random(3, &[40], 1.0);
            let operand = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap();
            let exact = log_softmax::biased(&z, Some(&bias)).unwrap();
            let found = gpu::log_softmax(gpu, &operand(&z), Some(&operand(&bias))).unwrap();
            let exact_gradient = log_softmax::gradient(&exact, &upstream, DType::F64).unwrap();
            let (exact_f32, upstream) = (operand(&exact), operand(&upstream));
            let gradient = gpu::log_softmax_gradient(gpu, &exact_f32, &upstream, DType::F32).unwrap();
            exceeds(error(&found, &exact), 1e-5) || exceeds(error(&gradient, &exact_gradient), 1e-5)
        };
        // Only CUDA launches these kernels.
        let late_logits_are_wrong = || {
            let is_wrong = |(width, late)| {
                let is_wrong = |&logits| exceeds(error_of_a_late_logit(gpu, width, logits, late), 1e-2);
                [(0.0, 120.0), (f32::NEG_INFINITY, -150.0)].iter().any(is_wrong)
            };
            language == Language::Cuda && [(4, 2048), (8, 500)].into_iter().any(is_wrong)
        };
        score_cases.iter().any(scores_are_wrong)
            || activation_is_wrong()
            || priors_are_wrong()
            || late_logits_are_wrong()
            || cases.iter().any(is_wrong)
            || log_probs_are_wrong()
            || ids_are_wrong()
    };
    assert!(!is_wrong(&gpu), "{language:?}");
    for (text, replacement) in SHARED_MUTATIONS.iter().chain(mutations) {
        let Some(mutant) = EmulatedGpu::mutant(language, text, replacement) else { return };
        assert!(is_wrong(&mutant), "not caught: {text} -> {replacement} ({language:?})");
    }
}

/// Kernels that access memory outside a tensor. Each ends its process, so the test runs itself in a new one for each.
#[test]
fn an_access_outside_a_tensor_ends_the_process() {
    const CHOICE: &str = "MOS_HEAD_TEST_MUTANT";
    let changes = [
        ("", ""),
        ("is_id && class_weights ?", "class_weights ?"),
        ("counts[t] = weight * class_weight;", "counts[t + 1] = weight * class_weight;"),
        ("if (first + 4 <= vocab) return load4", "if (first <= vocab) return load4"),
        // Only in Metal: an absent buffer is read.
        ("GIVEN(1, upstream)", "upstream"),
    ];
    let cuda = changes.split_last().unwrap().1.iter().map(|&(text, to)| (Language::Cuda, text, to));
    let choices = cuda.chain(changes.map(|(text, to)| (Language::Metal, text, to)));
    if let Ok(choice) = std::env::var(CHOICE) {
        let (language, text, replacement) = choices.clone().nth(choice.parse().unwrap()).unwrap();
        let gpu =
            if text.is_empty() { EmulatedGpu::new(language) } else { EmulatedGpu::mutant(language, text, replacement) }
                .unwrap();
        let case = case(4, 2, 3, 1024);
        let objective = |dtype| match case.objective(dtype) {
            Objective::Targets(loss) => Objective::Targets(TargetLoss {
                targets: Tensor::new(&[1i64, 2, 1024, 3], &Device::Cpu).unwrap(),
                ..loss
            }),
            objective => objective,
        };
        gpu::loss(&gpu, &case.plan(&gpu), &objective(DType::F32)).unwrap();
        return;
    }
    if EmulatedGpu::all().next().is_none() {
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
