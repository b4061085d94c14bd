//! Distillation: values and gradients equal candle's operations in f64, the laws of divergences hold, and bad arguments
//! are errors.

mod common;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::{VarBuilder, VarMap};
use common::case::Tensors;
use common::check::{assert_near, central_differences, gradients};
use common::composed::log_softmax;
use common::divergences::{DIVERGENCES, MISSING};
use common::given::{places, Given};
use common::problem::Problem;
use common::values::{self, numbers, uniform, Numbers};
use common::{dtypes, on_each_device};
use mos_head::distill::{DistillOptions, Divergence, MissingIds, Teacher};
use mos_head::parts::LogitFunction;
use mos_head::score::ChunkTerms;
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax};
use mos_head::{
    Distributions, DropoutMasks, Error, LossOptions, Mixture, MixtureConfig, MixtureLayer, MixtureOfSoftmaxes,
    OutputLayer, Reduction, Result, SoftmaxHead,
};

/// How the student knows the teacher.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Mixture,
    Tensor,
    /// The most probable ids
    List(usize, MissingIds),
}

#[derive(Clone, Debug)]
struct Distill {
    student: Problem,
    teacher: Problem,
    kind: Kind,
    divergence: Divergence,
    hard_weight: f64,
    weighted: bool,
    ignores: bool,
    reduction: Reduction,
}

/// The sum of `probability * x`, where there is a probability.
fn weighted(probability: &Tensor, x: &Tensor) -> Result<Tensor> {
    let is_zero = probability.eq(0.0)?;
    Ok(is_zero.where_cond(&probability.zeros_like()?, &(probability * x)?)?.sum(D::Minus1)?)
}

impl Distill {
    fn new(positions: usize, components: usize, vocab: usize, kind: Kind, divergence: Divergence) -> Self {
        Distill {
            student: Problem::new(positions, components, 6, vocab),
            teacher: Problem { spread: 1.7, ..Problem::new(positions, 2, 9, vocab) },
            kind,
            divergence,
            hard_weight: 0.0,
            weighted: false,
            ignores: false,
            reduction: Reduction::Mean,
        }
    }

    /// Targets, every third of which is ignored if the case ignores some.
    fn targets(&self) -> Vec<i64> {
        let id = |t: usize| ((t * 7 + 3) % self.student.vocab) as i64;
        (0..self.student.positions).map(|t| if self.ignores && t % 3 == 1 { -100 } else { id(t) }).collect()
    }

    fn weights(&self) -> Vec<f64> {
        (0..self.student.positions).map(|t| if self.weighted { [0.5, 2.0, 0.0, 1.25][t % 4] } else { 1.0 }).collect()
    }

    fn options(&self, device: &Device, dtype: DType) -> Result<DistillOptions> {
        let options = DistillOptions::new(self.divergence).with_temperature(self.student.temperature);
        let mut options = options.with_reduction(self.reduction).with_hard_weight(self.hard_weight);
        options.workspace_bytes = self.student.workspace_bytes;
        if self.hard_weight > 0.0 || self.ignores {
            options = options.with_targets(Tensor::new(self.targets(), device)?);
        }
        if self.ignores {
            options = options.with_ignore_index(-100);
        }
        if self.weighted {
            let weights = Tensor::new(self.weights(), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
            options = options.with_position_weights(weights);
        }
        Ok(options)
    }

    /// The teacher's log-probabilities at temperature 1, `[positions, vocab]`, in f64.
    fn log_teacher(&self, dtype: DType) -> Result<Tensor> {
        let tensors = self.teacher.drawn(dtype).constants(DType::F64, &Device::Cpu)?;
        Ok(self.teacher.composed_log_probs(&tensors)?)
    }

    /// The teacher's most probable ids, `[positions, n]`, and their log-probabilities in f64.
    fn list(&self, log_teacher: &Tensor, n: usize) -> Result<(Tensor, Tensor)> {
        let ids = log_teacher.arg_sort_last_dim(false)?.narrow(1, 0, n)?.contiguous()?;
        Ok((ids.clone(), log_teacher.gather(&ids, 1)?))
    }

    fn teacher(&self, device: &Device, dtype: DType) -> Result<Teacher> {
        let log_teacher = self.log_teacher(dtype)?;
        let on = |tensor: Tensor, dtype: DType| tensor.to_dtype(dtype)?.to_device(device);
        let accumulation = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        Ok(match self.kind {
            Kind::Mixture => Teacher::from_mixture(&self.teacher.drawn(dtype).mixture(dtype, device)?),
            Kind::Tensor => Teacher::from_log_probs(&on(log_teacher, accumulation)?),
            Kind::List(n, missing) => {
                let (ids, log_probs) = self.list(&log_teacher, n)?;
                Teacher::from_top_k(&ids.to_device(device)?, &on(log_probs, accumulation)?, missing)
            }
        })
    }

    /// The objective of each position from candle's operations.
    fn composed(&self, student: &Tensors, dtype: DType) -> Result<Tensor> {
        let log_q = self.student.composed_log_probs(student)?;
        let log_teacher = self.log_teacher(dtype)?;
        let tempered = |log_p: &Tensor| log_softmax(&(log_p / self.student.temperature)?);
        let (log_t, log_q) = match self.kind {
            Kind::Mixture | Kind::Tensor => (tempered(&log_teacher)?, log_q),
            Kind::List(n, missing) => {
                let (ids, listed) = self.list(&log_teacher, n)?;
                let in_list = log_q.gather(&ids, 1)?;
                let rest = (log_q.exp()?.sum_keepdim(1)? - in_list.exp()?.sum_keepdim(1)?)?.log()?;
                let log_q = Tensor::cat(&[in_list, rest], 1)?;
                let none = (log_q.narrow(1, 0, 1)?.zeros_like()? + f64::NEG_INFINITY)?;
                let log_t = match missing {
                    MissingIds::Zero => Tensor::cat(&[listed, none], 1)?,
                    MissingIds::Renormalized => Tensor::cat(&[tempered(&listed)?, none], 1)?,
                    _ => {
                        let rest = (listed.exp()?.sum_keepdim(1)?.neg()? + 1.0)?.log()?;
                        Tensor::cat(&[listed, rest], 1)?
                    }
                };
                (log_t, log_q)
            }
        };
        let (t, q) = (log_t.exp()?, log_q.exp()?);
        let divergence = match self.divergence {
            Divergence::ForwardKl => weighted(&t, &(&log_t - &log_q)?)?,
            Divergence::ReverseKl => weighted(&q, &(&log_q - &log_t)?)?,
            Divergence::JensenShannon(beta) => {
                let log_m = ((&t * beta)? + (&q * (1.0 - beta))?)?.log()?;
                let teacher_part = weighted(&t, &(&log_t - &log_m)?)?;
                ((teacher_part * beta)? + (weighted(&q, &(&log_q - &log_m)?)? * (1.0 - beta))?)?
            }
            Divergence::TotalVariation => (&t - &q)?.relu()?.sum(D::Minus1)?,
            Divergence::NegLogAcceptance => t.minimum(&q)?.sum(D::Minus1)?.log()?.neg()?,
            Divergence::LkHybrid(eta) => {
                let lambda = (t.minimum(&q)?.sum(D::Minus1)?.detach() * -eta)?.exp()?;
                let variation = (&t - &q)?.relu()?.sum(D::Minus1)?;
                let kl = weighted(&t, &(&log_t - &log_q)?)?;
                ((&lambda * kl)? + ((1.0 - &lambda)? * variation)?)?
            }
            _ => unreachable!("no other divergence"),
        };
        if self.hard_weight == 0.0 {
            return Ok(divergence);
        }
        let ids: Vec<u32> = self.targets().into_iter().map(|id| id.max(0) as u32).collect();
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(1)?;
        let plain = Problem { temperature: 1.0, ..self.student }.composed_log_probs(student)?;
        let nll = plain.gather(&ids, 1)?.squeeze(1)?.neg()?;
        Ok(((divergence * (1.0 - self.hard_weight))? + (nll * self.hard_weight)?)?)
    }

    fn check(&self, dtype: DType, tolerance: f64) -> Result<()> {
        self.check_on(&Device::Cpu, dtype, tolerance)
    }

    fn check_on(&self, device: &Device, dtype: DType, tolerance: f64) -> Result<()> {
        let case = self.student.drawn(dtype);
        let (vars, truth) = (case.variables(dtype, device)?, case.variables(DType::F64, &Device::Cpu)?);
        let teacher = self.teacher(device, dtype)?;
        let loss = self.student.mixture(&vars)?.distill(&teacher, &self.options(device, dtype)?)?;

        let objective = self.composed(&truth, dtype)?;
        let mut weights = self.weights();
        weights.iter_mut().zip(self.targets()).filter(|(_, id)| *id < 0).for_each(|(weight, _)| *weight = 0.0);
        let count: f64 = weights.iter().sum();
        let denominator = if self.reduction == Reduction::Mean { count } else { 1.0 };
        let expected = ((&objective * Tensor::new(weights.clone(), &Device::Cpu)?)?.sum_all()? / denominator)?;
        let counted: Vec<u32> = (0u32..).zip(&weights).filter(|(_, &w)| w != 0.0).map(|(t, _)| t).collect();
        let counted_nll = objective.index_select(&Tensor::new(counted, &Device::Cpu)?, 0)?;
        let name = format!("{self:?} in {dtype:?}");
        for (found, expected) in
            [(&loss.value, &expected), (&loss.sum, &(&expected * denominator)?), (&loss.nll, &counted_nll)]
        {
            let found = numbers(found).named(&name);
            assert_relative_eq!(found, numbers(expected), max_relative = tolerance);
        }
        assert_abs_diff_eq!(numbers(&loss.count), [count], epsilon = 1e-5);
        let rounding = if matches!(dtype, DType::F64 | DType::F32) { 0.0 } else { 1e-2 };
        let (found, expected) = (gradients(&loss.backward()?, &vars), gradients(&expected.backward()?, &truth));
        assert_near(&name, &found, &expected, 4.0 * tolerance + rounding);
        Ok(())
    }
}

fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F64 {
        1e-11
    } else {
        2e-5
    }
}

/// The kinds of teachers, full ones and lists, for which the divergence is finite.
fn kinds(divergence: Divergence) -> Vec<Kind> {
    let is_finite = |missing: &MissingIds| divergence != Divergence::ReverseKl || *missing == MissingIds::Tail;
    let lists = MISSING.into_iter().filter(is_finite).flat_map(|missing| [1, 8].map(|n| Kind::List(n, missing)));
    [Kind::Mixture, Kind::Tensor].into_iter().chain(lists).collect()
}

#[test]
fn values_and_gradients_equal_composed_operations() -> Result<()> {
    for divergence in DIVERGENCES {
        for kind in kinds(divergence) {
            for (positions, components, vocab) in [(5, 3, 37), (1, 1, 9), (70, 1, 131), (7, 15, 520)] {
                for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
                    Distill::new(positions, components, vocab, kind, divergence).check(dtype, tolerance(dtype))?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn so_they_do_with_every_option() -> Result<()> {
    for divergence in DIVERGENCES {
        for kind in kinds(divergence) {
            for components in [1, 3] {
                let case = || Distill::new(11, components, 40, kind, divergence);
                let (dtype, tolerance) = (DType::F64, tolerance(DType::F64));
                Distill { hard_weight: 0.3, ..case() }.check(dtype, tolerance)?;
                Distill { hard_weight: 1.0, ..case() }.check(dtype, tolerance)?;
                Distill { hard_weight: 0.3, ignores: true, weighted: true, ..case() }.check(dtype, tolerance)?;
                Distill { ignores: true, reduction: Reduction::Sum, ..case() }.check(dtype, tolerance)?;
                let with_student = |student: Problem| Distill { student, ..case() };
                let student = case().student;
                for function in [LogitFunction::Softcap(1.5), LogitFunction::Sigsoftmax] {
                    with_student(Problem { function, logit_scale: 0.6, ..student }).check(dtype, tolerance)?;
                }
                with_student(Problem { spread: 8.0, ..student }).check(dtype, 10.0 * tolerance)?;
                let tempered = with_student(Problem { temperature: 1.7, ..student });
                tempered.check(dtype, tolerance)?;
                tempered.check(DType::F32, 1e-4)?;
                if !matches!(kind, Kind::List(..)) {
                    Distill { hard_weight: 0.3, ..tempered }.check(dtype, tolerance)?;
                }
            }
        }
    }
    Ok(())
}

on_each_device! {
    fn each_device_distills(device: &Device) -> Result<()> {
        for &dtype in dtypes(device) {
            for divergence in DIVERGENCES {
                for kind in kinds(divergence) {
                    let case = || Distill::new(5, 3, 37, kind, divergence);
                    case().check_on(device, dtype, 1e-4)?;
                    Distill { hard_weight: 0.3, ignores: true, weighted: true, ..case() }.check_on(device, dtype, 1e-4)?;
                    let student = Problem { temperature: 1.7, ..case().student };
                    Distill { student, ..case() }.check_on(device, dtype, 1e-4)?;
                }
            }
        }
        Ok(())
    }
}

#[test]
fn chunks_do_not_change_them() -> Result<()> {
    for kind in [Kind::Mixture, Kind::Tensor, Kind::List(8, MissingIds::Tail)] {
        let case = || Distill { ignores: true, ..Distill::new(61, 3, 300, kind, Divergence::ForwardKl) };
        let with_budget =
            |bytes| Distill { student: Problem { workspace_bytes: Some(bytes), ..case().student }, ..case() };
        let least = match with_budget(0).check(DType::F32, 1.0) {
            Err(Error::Workspace { least, .. }) => least,
            other => panic!("a workspace of 0 bytes: {other:?}"),
        };
        for factor in [2, 4] {
            with_budget(factor * least).check(DType::F32, 2e-5)?;
        }
    }
    Ok(())
}

/// Two mixtures of four positions over 23 ids, and a variable that the first depends on.
fn pair(seed: u64) -> Result<(Mixture, Mixture, Var)> {
    let random = |shape: &[usize], i: u64| uniform(shape, 1.7, 4 * seed + i);
    let contexts = Var::from_tensor(&random(&[4, 2, 5], 0)?)?;
    let weight = random(&[23, 5], 1)?;
    let log_priors = log_softmax(&random(&[4, 2], 2)?)?;
    let student = Mixture::new(&contexts, Some(&log_priors), &weight, None)?;
    let other = random(&[4, 2, 5], 3)?;
    Ok((student, Mixture::new(&other, Some(&log_priors), &weight, None)?, contexts))
}

fn value(student: &Mixture, teacher: &Mixture, divergence: Divergence) -> Result<f64> {
    let loss = student.distill(&Teacher::from_mixture(teacher), &DistillOptions::new(divergence))?;
    Ok(loss.value.to_scalar()?)
}

#[test]
fn the_laws_of_divergences_hold() -> Result<()> {
    for seed in 0..20 {
        let (student, teacher, contexts) = pair(seed)?;
        for divergence in DIVERGENCES {
            assert!(value(&student, &teacher, divergence)? > 1e-3);
            // A teacher equal to the student.
            let options = DistillOptions::new(divergence);
            let loss = student.distill(&Teacher::from_mixture(&student), &options)?;
            assert!((0.0..1e-14).contains(&loss.value.to_scalar::<f64>()?), "{divergence:?}");
            let gradient = values::gradient(&loss.backward()?, &contexts).expect("a gradient");
            assert_abs_diff_eq!(gradient, [0.0; 40], epsilon = 1e-15);
        }
        let symmetric = Divergence::JensenShannon(0.5);
        let swapped = value(&teacher, &student, symmetric)?;
        assert_abs_diff_eq!(value(&student, &teacher, symmetric)?, swapped, epsilon = 1e-14);
        assert!(value(&student, &teacher, symmetric)? < 2f64.ln());
        let reverse = value(&teacher, &student, Divergence::ReverseKl)?;
        assert_abs_diff_eq!(value(&student, &teacher, Divergence::ForwardKl)?, reverse, epsilon = 1e-13);
        // Its limits at the ends, which peers replace by them.
        for (beta, limit) in [(1e-9, Divergence::ForwardKl), (1.0 - 1e-9, Divergence::ReverseKl)] {
            let scaled = value(&student, &teacher, Divergence::JensenShannon(beta))? / (beta * (1.0 - beta));
            let limit = value(&student, &teacher, limit)?;
            assert_abs_diff_eq!(scaled / limit, 1.0, epsilon = 1e-4);
        }
        // A list of all ids is the distribution.
        let top = teacher.top_k(23)?;
        for divergence in DIVERGENCES {
            let list = Teacher::from_top_k(&top.token_ids, &top.log_probs, MissingIds::Tail);
            let list_value = student.distill(&list, &DistillOptions::new(divergence))?.value.to_scalar::<f64>()?;
            assert_abs_diff_eq!(list_value, value(&student, &teacher, divergence)?, epsilon = 1e-12);
        }
    }
    Ok(())
}

/// Finite losses with NaN gradients are what peers had here.
#[test]
fn impossible_ids_have_finite_values_and_gradients() -> Result<()> {
    let bias: Vec<f64> = (0..30).map(|v| if v % 3 == 1 { f64::NEG_INFINITY } else { 0.0 }).collect();
    for dtype in [DType::F64, DType::F32] {
        let bias = Tensor::new(bias.clone(), &Device::Cpu)?.to_dtype(dtype)?;
        let var = |shape: &[usize]| Var::from_tensor(&values::tensor(shape, shape[0], dtype).expect("numbers"));
        let (contexts, weight) = (var(&[6, 5])?, var(&[30, 5])?);
        for (student_bias, teacher_bias) in [(Some(&bias), Some(&bias)), (None, Some(&bias))] {
            let student = Mixture::new(&contexts.unsqueeze(1)?, None, &weight, student_bias)?;
            let other = (contexts.detach() * -0.5)?.unsqueeze(1)?;
            let teacher = Mixture::new(&other, None, &weight, teacher_bias)?;
            for divergence in DIVERGENCES {
                let is_infinite = divergence == Divergence::ReverseKl && student_bias.is_none();
                for temperature in [1.0, 2.0] {
                    let options = DistillOptions::new(divergence).with_temperature(temperature);
                    let loss = student.distill(&Teacher::from_mixture(&teacher), &options);
                    if is_infinite {
                        assert!(matches!(loss, Err(Error::InfiniteDivergence { position: 0 })), "{loss:?}");
                        continue;
                    }
                    let loss = loss?;
                    assert!(loss.value.to_dtype(DType::F64)?.to_scalar::<f64>()?.is_finite(), "{divergence:?}");
                    for var in [&contexts, &weight] {
                        let gradients = loss.backward()?;
                        let sum = gradients.get(var).expect("a gradient").sqr()?.sum_all()?;
                        let sum = sum.to_dtype(DType::F64)?.to_scalar::<f64>()?;
                        assert!(sum.is_finite() && sum > 0.0, "{divergence:?}: {sum}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// What pads a list to the length of the others has no part in it, wherever it stands.
#[test]
fn padding_of_a_list_counts_as_missing() -> Result<()> {
    let (student, teacher, contexts) = pair(1)?;
    let top = teacher.top_k(4)?;
    let none = Tensor::full(f64::NEG_INFINITY, (4, 2), &Device::Cpu)?;
    let zeros = Tensor::zeros((4, 2), DType::U32, &Device::Cpu)?;
    let [ids, log_probs] = [
        Tensor::cat(&[&zeros.narrow(1, 0, 1)?, &top.token_ids, &zeros.narrow(1, 0, 1)?], 1)?,
        Tensor::cat(&[&none.narrow(1, 0, 1)?, &top.log_probs, &none.narrow(1, 0, 1)?], 1)?,
    ];
    for divergence in DIVERGENCES {
        for missing in MISSING {
            if divergence == Divergence::ReverseKl && missing != MissingIds::Tail {
                continue;
            }
            let targets = Tensor::new(&[0i64, 3, 5, 7], &Device::Cpu)?;
            let options = DistillOptions::new(divergence).with_targets(targets).with_hard_weight(0.2);
            let plain = student.distill(&Teacher::from_top_k(&top.token_ids, &top.log_probs, missing), &options)?;
            let padded = student.distill(&Teacher::from_top_k(&ids, &log_probs, missing), &options)?;
            assert_abs_diff_eq!(numbers(&plain.value), numbers(&padded.value), epsilon = 1e-14);
            let [plain, padded] = [plain.backward()?, padded.backward()?]
                .map(|store| values::gradient(&store, &contexts).expect("a gradient"));
            assert_abs_diff_eq!(plain, padded, epsilon = 1e-14);
        }
    }
    Ok(())
}

#[test]
fn a_tail_without_mass_stays_exact() -> Result<()> {
    // The student's mass outside the list is e^-40, which one minus its complement would lose.
    let logits = Tensor::new(&[[0f32, 0.0, -40.0, -40.0]], &Device::Cpu)?;
    let contexts = Var::from_tensor(&Tensor::ones((1, 1, 1), DType::F32, &Device::Cpu)?)?;
    let weight = Var::from_tensor(&logits.t()?.contiguous()?)?;
    let student = Mixture::new(&contexts, None, &weight, None)?;
    let ids = Tensor::new(&[[0u32, 1]], &Device::Cpu)?;
    let half = Tensor::new(&[[0.4f32.ln(), 0.4f32.ln()]], &Device::Cpu)?;
    let list = Teacher::from_top_k(&ids, &half, MissingIds::Tail);
    let loss = student.distill(&list, &DistillOptions::new(Divergence::ForwardKl))?;
    let expected = 0.8 * (0.4f64 / 0.5).ln() + 0.2 * (0.2f64.ln() + 40.0);
    assert_abs_diff_eq!(numbers(&loss.value), [expected], epsilon = 1e-4);
    let gradient = values::gradient(&loss.backward()?, &weight).expect("a gradient");
    assert_abs_diff_eq!(gradient, [0.5 - 0.4, 0.5 - 0.4, -0.1, -0.1], epsilon = 1e-5);
    Ok(())
}

#[test]
fn gradients_equal_central_differences() -> Result<()> {
    // The weight of the hybrid has no gradient.
    let differentiable = |divergence: &Divergence| !matches!(divergence, Divergence::LkHybrid(_));
    for divergence in DIVERGENCES.into_iter().filter(differentiable) {
        for kind in [Kind::Mixture, Kind::List(4, MissingIds::Tail)] {
            let case = Distill { hard_weight: 0.25, ..Distill::new(3, 2, 11, kind, divergence) };
            let teacher = case.teacher(&Device::Cpu, DType::F64)?;
            let options = case.options(&Device::Cpu, DType::F64)?;
            let loss = |tensors: &Tensors| case.student.mixture(tensors)?.distill(&teacher, &options);
            let vars = case.student.variables(DType::F64)?;
            let expected = central_differences(&case.student.drawn(DType::F64), |moved| {
                Ok(loss(&moved.constants(DType::F64, &Device::Cpu)?)?.value.to_scalar()?)
            })?;
            let found = gradients(&loss(&vars)?.backward()?, &vars);
            assert_eq!(found.len(), vars.len());
            for (name, found) in found {
                assert_abs_diff_eq!(found, expected[name], epsilon = 1e-8);
            }
        }
    }
    Ok(())
}

/// Heads of two levels compute from what every output layer has.
#[test]
fn every_output_layer_distills() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let hidden = uniform(&[2, 3, 8], 1.7, 1)?;
    let teacher = SoftmaxHead::from_tensors(uniform(&[60, 8], 1.7, 2)?, None)?;
    let top = teacher.top_k(&hidden, 5)?;
    let mixture_teacher = Teacher::from_mixture(&teacher.mixture(&hidden, DropoutMasks::Off)?);
    let list_teacher = Teacher::from_top_k(&top.token_ids, &top.log_probs, MissingIds::Tail);
    let students: [Box<dyn OutputLayer>; 2] = [
        Box::new(AdaptiveSoftmax::new(&AdaptiveConfig::new(8, 60, vec![20]), vb.pp("adaptive"))?),
        Box::new(MixtureOfSoftmaxes::new(&MixtureConfig::new(8, 60, 3), vb.pp("mos"))?),
    ];
    let targets = Tensor::new(&[[1i64, -1, 3], [59, 5, 6]], &Device::Cpu)?;
    for student in &students {
        // A tensor of its log-probabilities is a student too.
        let log_probs = student.log_probs(&hidden)?;
        for divergence in DIVERGENCES {
            for teacher in [&mixture_teacher, &list_teacher] {
                let options = DistillOptions::new(divergence).with_targets(targets.clone()).with_ignore_index(-1);
                let options = options.with_hard_weight(0.4);
                let loss = student.distill(&hidden, teacher, &options)?;
                let given = Given(log_probs.reshape((6, 60))?);
                let expected = given.distill(&places(&[2, 3, 1])?, teacher, &options)?;
                assert_abs_diff_eq!(numbers(&loss.value), numbers(&expected.value), epsilon = 1e-12);
                assert_eq!(loss.count.to_scalar::<f64>()?, 5.0);
                let vars = vars.all_vars();
                let [found, expected] = [loss.backward()?, expected.backward()?]
                    .map(|store| values::gradients(&store, vars.iter().map(Var::as_tensor)));
                assert_abs_diff_eq!(found[..], expected[..], epsilon = 1e-12);
            }
        }
    }
    Ok(())
}

#[test]
fn a_loss_of_all_log_probabilities_has_its_gradient() -> Result<()> {
    let (student, _, contexts) = pair(1)?;
    let loss = student.log_prob_loss(None, |chunk| {
        let squares = (chunk.log_probs * 2.0)?.exp()?;
        Ok(ChunkTerms::new(squares.sum(1)?, (squares * 2.0)?))
    })?;
    let expected = (student.log_probs()? * 2.0)?.exp()?.sum_all()?;
    assert_abs_diff_eq!(numbers(&loss.value), numbers(&expected), epsilon = 1e-13);
    for _ in 0..2 {
        // The second backward pass computes them again.
        let [found, expected] = [loss.backward()?, expected.backward()?]
            .map(|store| values::gradient(&store, &contexts).expect("a gradient"));
        assert_abs_diff_eq!(found, expected, epsilon = 1e-13);
    }
    let wrong = student.log_prob_loss(None, |chunk| Ok(ChunkTerms::new(chunk.log_probs.clone(), chunk.log_probs)));
    assert!(matches!(wrong.unwrap_err(), Error::Shape { argument: "values", .. }));
    Ok(())
}

#[test]
fn bad_arguments_are_errors() -> Result<()> {
    let hidden = Tensor::zeros((2, 3, 4), DType::F32, &Device::Cpu)?;
    let head = SoftmaxHead::from_tensors(Tensor::zeros((10, 4), DType::F32, &Device::Cpu)?, None)?;
    let full = Teacher::from_log_probs(&Tensor::zeros((2, 3, 10), DType::F32, &Device::Cpu)?);
    let ids = Tensor::zeros((2, 3, 2), DType::U32, &Device::Cpu)?;
    let list =
        |missing| Teacher::from_top_k(&ids, &Tensor::zeros((2, 3, 2), DType::F32, &Device::Cpu).unwrap(), missing);
    let new = DistillOptions::default;
    let error =
        |teacher: &Teacher, options: DistillOptions| head.distill(&hidden, teacher, &options).unwrap_err().to_string();
    let expected = [
        (error(&full, new().with_temperature(0.0)), "temperature: expected from 1e-6 to 1e6, got 0"),
        (error(&full, new().with_hard_weight(1.5)), "hard_weight: expected from 0 to 1, got 1.5"),
        (error(&full, new().with_hard_weight(0.5)), "targets: expected targets, because of hard_weight or ignore_index, got none"),
        (error(&full, new().with_denominator(0.0)), "denominator: expected finite, above 0, got 0"),
        (error(&full, new().with_reduction(Reduction::None)), "reduction: not supported by distillation"),
        (
            error(&full, DistillOptions::new(Divergence::JensenShannon(1.0))),
            "beta: expected above 0 and below 1 (at the ends the divergence is zero: use ForwardKl or ReverseKl), got 1",
        ),
        (
            error(&list(MissingIds::Zero), DistillOptions::new(Divergence::ReverseKl)),
            "missing: expected Tail, because ReverseKl is infinite without, got Zero",
        ),
        (
            error(&full, new().with_targets(Tensor::new(&[1u32], &Device::Cpu)?)),
            "targets: expected shape [2, 3], got [1]",
        ),
        (
            error(&full, new().with_targets(Tensor::full(10u32, (2, 3), &Device::Cpu)?)),
            "targets: 10 at position 0 is not in 0..10, the vocabulary",
        ),
        (
            error(&Teacher::from_log_probs(&Tensor::zeros((2, 3, 9), DType::F32, &Device::Cpu)?), new()),
            "log_probs of the teacher: expected shape [2, 3, 10], got [2, 3, 9]",
        ),
        (
            error(&Teacher::from_top_k(&ids, &Tensor::zeros((2, 3, 3), DType::F32, &Device::Cpu)?, MissingIds::Zero), new()),
            "log_probs of the teacher: expected shape [2, 3, 2], got [2, 3, 3]",
        ),
    ];
    for (found, expected) in expected {
        assert_eq!(found, expected);
    }
    let other = SoftmaxHead::from_tensors(Tensor::zeros((11, 4), DType::F32, &Device::Cpu)?, None)?;
    let teacher = Teacher::from_mixture(&other.mixture(&hidden, DropoutMasks::Off)?);
    assert_eq!(error(&teacher, new()), "vocab_size of the teacher: expected 10, got 11");
    Ok(())
}

#[test]
fn an_id_outside_the_vocabulary_is_named_by_its_place_in_the_list() -> Result<()> {
    let head = SoftmaxHead::from_tensors(Tensor::zeros((10, 4), DType::F32, &Device::Cpu)?, None)?;
    let composed = Given(Tensor::full(-(10f32.ln()), (4, 10), &Device::Cpu)?);
    let hidden =
        [Tensor::zeros((4, 4), DType::F32, &Device::Cpu)?, Tensor::arange(0f32, 4., &Device::Cpu)?.unsqueeze(1)?];
    let token_ids = Tensor::new(&[[0u32, 1], [2, 3], [4, 5], [6, 10]], &Device::Cpu)?;
    let teacher = Teacher::from_top_k(&token_ids, &Tensor::full(-2f32, (4, 2), &Device::Cpu)?, MissingIds::Tail);
    let targets = Tensor::new(&[1i64, -100, 2, 3], &Device::Cpu)?;
    // The second position does not count; with a hard weight, the target is scored beside the list.
    for hard_weight in [0.0, 0.5] {
        let options = DistillOptions::new(Divergence::ForwardKl).with_targets(targets.clone());
        let options = options.with_ignore_index(-100).with_hard_weight(hard_weight);
        for (head, hidden) in [&head as &dyn OutputLayer, &composed].into_iter().zip(&hidden) {
            let error = head.distill(hidden, &teacher, &options).unwrap_err().to_string();
            assert_eq!(error, "token_ids of the teacher: 10 at position 7 is not in 0..10, the vocabulary");
        }
    }
    Ok(())
}

/// A teacher that is certain of each target: the negative logarithm of the acceptance is the cross-entropy.
#[test]
fn the_acceptance_of_a_certain_teacher_is_the_probability_of_its_id() -> Result<()> {
    let (student, _, contexts) = pair(3)?;
    let ids = Tensor::new(&[4u32, 0, 22, 4], &Device::Cpu)?;
    let log_teacher = Tensor::full(f64::NEG_INFINITY, (4, 23), &Device::Cpu)?;
    log_teacher.scatter_set(&ids.unsqueeze(1)?, &Tensor::zeros((4, 1), DType::F64, &Device::Cpu)?, 1)?;
    let list =
        Teacher::from_top_k(&ids.unsqueeze(1)?, &Tensor::zeros((4, 1), DType::F64, &Device::Cpu)?, MissingIds::Zero);
    let expected = student.loss(&ids, &LossOptions::new())?;
    let expected_gradient = values::gradient(&expected.backward()?, &contexts).expect("a gradient");
    for teacher in [Teacher::from_log_probs(&log_teacher), list] {
        let loss = student.distill(&teacher, &DistillOptions::new(Divergence::NegLogAcceptance))?;
        assert_relative_eq!(numbers(&loss.nll), numbers(&expected.nll), max_relative = 1e-12);
        let gradient = values::gradient(&loss.backward()?, &contexts).expect("a gradient");
        assert_abs_diff_eq!(gradient, expected_gradient, epsilon = 1e-13);
        // The total variation is the probability that the draft is rejected.
        let variation = student.distill(&teacher, &DistillOptions::new(Divergence::TotalVariation))?;
        let rejected = numbers(&expected.nll.neg()?.exp()?).into_iter().map(|accepted| 1.0 - accepted);
        assert_relative_eq!(numbers(&variation.nll), Numbers::from_iter(rejected), max_relative = 1e-12);
    }
    Ok(())
}

/// The acceptance over a list is too high with the missing ids as one outcome, and too low without them.
#[test]
fn a_list_bounds_the_acceptance() -> Result<()> {
    for seed in 0..10 {
        let (student, teacher, _) = pair(seed)?;
        let options = DistillOptions::new(Divergence::NegLogAcceptance);
        let exact = value(&student, &teacher, Divergence::NegLogAcceptance)?;
        let top = teacher.top_k(6)?;
        let bound = |missing| {
            let list = Teacher::from_top_k(&top.token_ids, &top.log_probs, missing);
            student.distill(&list, &options)?.value.to_scalar::<f64>().map_err(Error::from)
        };
        let (upper, lower) = (bound(MissingIds::Tail)?, bound(MissingIds::Zero)?);
        assert!(upper < exact && exact < lower, "{upper} {exact} {lower}");
    }
    Ok(())
}

/// The hybrid's weight is that of its paper, at both ends.
#[test]
fn the_hybrid_lies_between_the_forward_divergence_and_the_total_variation() -> Result<()> {
    let (student, teacher, _) = pair(5)?;
    let [kl, variation] = [Divergence::ForwardKl, Divergence::TotalVariation].map(|d| value(&student, &teacher, d));
    assert_relative_eq!(value(&student, &teacher, Divergence::LkHybrid(0.0))?, kl?, max_relative = 1e-13);
    assert_relative_eq!(value(&student, &teacher, Divergence::LkHybrid(1e4))?, variation?, max_relative = 1e-13);
    for eta in [-1.0, f64::NAN, f64::INFINITY] {
        let error = value(&student, &teacher, Divergence::LkHybrid(eta)).unwrap_err().to_string();
        assert!(error.contains("eta") && error.contains("at least 0"), "{error}");
    }
    Ok(())
}
