//! Distillation: values and gradients equal candle's operations in f64, the laws of divergences hold, and bad arguments are
//! errors.

mod common;

use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::ops::log_softmax;
use candle_nn::{VarBuilder, VarMap};
use common::given::{places, Given};
use common::scores::{check_central_differences, compare, Case};
use common::{dtypes, on_each_device};
use mos_head::distill::{DistillOptions, Divergence, MissingIds, Teacher};
use mos_head::score::ChunkTerms;
use mos_head::two_level::{AdaptiveConfig, AdaptiveSoftmax};
use mos_head::{
    Distributions, DropoutMasks, Error, Mixture, MixtureConfig, MixtureLayer, MixtureOfSoftmaxes, OutputLayer,
    Reduction, Result, SoftmaxHead,
};
use rand::{rngs::StdRng, Rng, SeedableRng};
use rand_distr::StandardNormal;

const DIVERGENCES: [Divergence; 4] =
    [Divergence::ForwardKl, Divergence::ReverseKl, Divergence::JensenShannon(0.5), Divergence::JensenShannon(0.1)];
const MISSING: [MissingIds; 3] = [MissingIds::Zero, MissingIds::Renormalized, MissingIds::Tail];

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
    student: Case,
    teacher: Case,
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
            student: Case::new(positions, components, 6, vocab),
            teacher: Case { spread: 1.7, ..Case::new(positions, 2, 9, vocab) },
            kind,
            divergence,
            hard_weight: 0.0,
            weighted: false,
            ignores: false,
            reduction: Reduction::Mean,
        }
    }

    fn mixture(case: &Case, [contexts, logits, weight, bias]: &[Tensor; 4]) -> Result<Mixture> {
        let dtype = if contexts.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let log_priors = log_softmax(&logits.to_dtype(dtype)?, D::Minus1)?;
        let log_priors = Some(&log_priors).filter(|_| case.components > 1);
        let mixture = Mixture::new(contexts, log_priors, weight, Some(bias))?.with_logit_scale(case.logit_scale)?;
        match case.softcap {
            Some(cap) => mixture.with_softcap(cap),
            None => Ok(mixture),
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
    fn log_teacher(&self, operands: &[Tensor; 4]) -> Result<Tensor> {
        Ok(Case { temperature: 1.0, ..self.teacher }.composed_log_probs(operands)?)
    }

    /// The teacher's most probable ids, `[positions, n]`, and their log-probabilities in f64.
    fn list(&self, log_teacher: &Tensor, n: usize) -> Result<(Tensor, Tensor)> {
        let ids = log_teacher.arg_sort_last_dim(false)?.narrow(1, 0, n)?.contiguous()?;
        Ok((ids.clone(), log_teacher.gather(&ids, 1)?))
    }

    fn teacher(&self, operands: &[Tensor; 4], device: &Device, dtype: DType) -> Result<Teacher> {
        let in_f64: Vec<Tensor> =
            operands.iter().map(|t| t.to_dtype(DType::F64)).collect::<candle_core::Result<_>>()?;
        let log_teacher = self.log_teacher(&std::array::from_fn(|i| in_f64[i].clone()))?;
        let on = |tensor: Tensor, dtype: DType| tensor.to_dtype(dtype)?.to_device(device);
        let accumulation = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        Ok(match self.kind {
            Kind::Mixture => {
                let operands = operands.each_ref().map(|t| t.to_device(device).expect("a copy"));
                Teacher::from_mixture(&Self::mixture(&self.teacher, &operands)?)
            }
            Kind::Tensor => Teacher::from_log_probs(&on(log_teacher, accumulation)?),
            Kind::List(n, missing) => {
                let (ids, log_probs) = self.list(&log_teacher, n)?;
                Teacher::from_top_k(&ids.to_device(device)?, &on(log_probs, accumulation)?, missing)
            }
        })
    }

    /// The objective of each position from candle's operations.
    fn composed(&self, student: &[Tensor; 4], teacher: &[Tensor; 4]) -> Result<Tensor> {
        let log_q = self.student.composed_log_probs(student)?;
        let log_teacher = self.log_teacher(teacher)?;
        let tempered = |log_p: &Tensor| log_softmax(&(log_p / self.student.temperature)?, D::Minus1);
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
                let of_teacher = weighted(&t, &(&log_t - &log_m)?)?;
                ((of_teacher * beta)? + (weighted(&q, &(&log_q - &log_m)?)? * (1.0 - beta))?)?
            }
            _ => unreachable!("no other divergence"),
        };
        if self.hard_weight == 0.0 {
            return Ok(divergence);
        }
        let ids: Vec<u32> = self.targets().into_iter().map(|id| id.max(0) as u32).collect();
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(1)?;
        let plain = Case { temperature: 1.0, ..self.student }.composed_log_probs(student)?;
        let nll = plain.gather(&ids, 1)?.squeeze(1)?.neg()?;
        Ok(((divergence * (1.0 - self.hard_weight))? + (nll * self.hard_weight)?)?)
    }

    fn check(&self, dtype: DType, tolerance: f64) -> Result<()> {
        self.check_on(&Device::Cpu, dtype, tolerance)
    }

    fn check_on(&self, device: &Device, dtype: DType, tolerance: f64) -> Result<()> {
        let operands = self.student.operands(dtype)?;
        let vars = operands
            .iter()
            .map(|t| Var::from_tensor(&t.to_device(device)?))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let truth = operands
            .iter()
            .map(|t| Var::from_tensor(&t.to_dtype(DType::F64)?))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let of = |vars: &[Var]| -> [Tensor; 4] { std::array::from_fn(|i| vars[i].as_tensor().clone()) };
        let of_teacher = self.teacher.operands(dtype)?;
        let in_f64 = of_teacher.each_ref().map(|t| t.to_dtype(DType::F64).expect("a copy"));
        let teacher = self.teacher(&of_teacher, device, dtype)?;
        let loss = Self::mixture(&self.student, &of(&vars))?.distill(&teacher, &self.options(device, dtype)?)?;

        let objective = self.composed(&of(&truth), &in_f64)?;
        let mut weights = self.weights();
        weights.iter_mut().zip(self.targets()).filter(|(_, id)| *id < 0).for_each(|(weight, _)| *weight = 0.0);
        let count: f64 = weights.iter().sum();
        let denominator = if self.reduction == Reduction::Mean { count } else { 1.0 };
        let expected = ((&objective * Tensor::new(weights.clone(), &Device::Cpu)?)?.sum_all()? / denominator)?;
        compare("value", self, dtype, &loss.value, &expected, tolerance)?;
        compare("sum", self, dtype, &loss.sum, &(&expected * denominator)?, tolerance)?;
        assert!((loss.count.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar::<f64>()? - count).abs() < 1e-5);
        let counted: Vec<u32> = (0u32..).zip(&weights).filter(|(_, &w)| w != 0.0).map(|(t, _)| t).collect();
        let of_counted = objective.index_select(&Tensor::new(counted, &Device::Cpu)?, 0)?;
        compare("nll", self, dtype, &loss.nll, &of_counted, tolerance)?;
        let (found, expected) = (loss.backward()?, expected.backward()?);
        for ((name, var), truth) in ["contexts", "log_priors", "weight", "bias"].into_iter().zip(&vars).zip(&truth) {
            if self.student.components == 1 && name == "log_priors" {
                continue;
            }
            let (Some(found), Some(expected)) = (found.get(var), expected.get(truth)) else {
                panic!("{name} has no gradient: {self:?}");
            };
            let of_rounding = match dtype {
                DType::F64 | DType::F32 => 0.0,
                _ => 1e-2,
            };
            compare(name, self, dtype, found, expected, 4.0 * tolerance + of_rounding)?;
        }
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
                let of_student = |student: Case| Distill { student, ..case() };
                let student = case().student;
                of_student(Case { softcap: Some(1.5), logit_scale: 0.6, ..student }).check(dtype, tolerance)?;
                of_student(Case { spread: 8.0, ..student }).check(dtype, 10.0 * tolerance)?;
                let tempered = of_student(Case { temperature: 1.7, ..student });
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
                    let student = Case { temperature: 1.7, ..case().student };
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
        let of_budget = |bytes| Distill { student: Case { workspace_bytes: Some(bytes), ..case().student }, ..case() };
        let least = match of_budget(0).check(DType::F32, 1.0) {
            Err(Error::Workspace { least, .. }) => least,
            other => panic!("a workspace of 0 bytes: {other:?}"),
        };
        for factor in [2, 4] {
            of_budget(factor * least).check(DType::F32, 2e-5)?;
        }
    }
    Ok(())
}

/// Two mixtures of four positions over 23 ids, and a variable that the first depends on.
fn pair(seed: u64) -> Result<(Mixture, Mixture, Var)> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut normal = |shape: &[usize]| {
        let values: Vec<f64> = (0..shape.iter().product()).map(|_| rng.sample(StandardNormal)).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)
    };
    let contexts = Var::from_tensor(&normal(&[4, 2, 5])?)?;
    let weight = normal(&[23, 5])?;
    let log_priors = log_softmax(&normal(&[4, 2])?, 1)?;
    let student = Mixture::new(&contexts, Some(&log_priors), &weight, None)?;
    let other = normal(&[4, 2, 5])?;
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
            let gradients = loss.backward()?;
            let largest = gradients.get(&contexts).expect("a gradient").abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(largest < 1e-15, "{divergence:?}: {largest}");
        }
        let symmetric = Divergence::JensenShannon(0.5);
        let difference = value(&student, &teacher, symmetric)? - value(&teacher, &student, symmetric)?;
        assert!(difference.abs() < 1e-14, "{difference}");
        assert!(value(&student, &teacher, symmetric)? < 2f64.ln());
        let difference =
            value(&student, &teacher, Divergence::ForwardKl)? - value(&teacher, &student, Divergence::ReverseKl)?;
        assert!(difference.abs() < 1e-13, "{difference}");
        // Its limits at the ends, which peers replace by them.
        for (beta, limit) in [(1e-9, Divergence::ForwardKl), (1.0 - 1e-9, Divergence::ReverseKl)] {
            let scaled = value(&student, &teacher, Divergence::JensenShannon(beta))? / (beta * (1.0 - beta));
            let limit = value(&student, &teacher, limit)?;
            assert!((scaled / limit - 1.0).abs() < 1e-4, "{scaled} {limit}");
        }
        // A list of all ids is the distribution.
        let top = teacher.top_k(23)?;
        for divergence in DIVERGENCES {
            let list = Teacher::from_top_k(&top.token_ids, &top.log_probs, MissingIds::Tail);
            let of_list = student.distill(&list, &DistillOptions::new(divergence))?.value.to_scalar::<f64>()?;
            assert!((of_list - value(&student, &teacher, divergence)?).abs() < 1e-12, "{divergence:?}");
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
        let var =
            |shape: (usize, usize)| Var::from_tensor(&Tensor::randn(0f64, 1.0, shape, &Device::Cpu)?.to_dtype(dtype)?);
        let (contexts, weight) = (var((6, 5))?, var((30, 5))?);
        for (of_student, of_teacher) in [(Some(&bias), Some(&bias)), (None, Some(&bias))] {
            let student = Mixture::new(&contexts.unsqueeze(1)?, None, &weight, of_student)?;
            let other = (contexts.detach() * -0.5)?.unsqueeze(1)?;
            let teacher = Mixture::new(&other, None, &weight, of_teacher)?;
            for divergence in DIVERGENCES {
                let is_infinite = divergence == Divergence::ReverseKl && of_student.is_none();
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
            let difference = (plain.value.to_scalar::<f64>()? - padded.value.to_scalar::<f64>()?).abs();
            assert!(difference < 1e-14, "{divergence:?} {missing:?}: {difference}");
            let (plain, padded) = (plain.backward()?, padded.backward()?);
            let of =
                |gradients: &candle_core::backprop::GradStore| gradients.get(&contexts).expect("a gradient").clone();
            let difference = (of(&plain) - of(&padded))?.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(difference < 1e-14, "{divergence:?} {missing:?}: {difference}");
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
    let expected = 0.8 * (0.4f32 / 0.5).ln() + 0.2 * (0.2f32.ln() + 40.0);
    assert!((loss.value.to_scalar::<f32>()? - expected).abs() < 1e-4, "{}", loss.value);
    let gradients = loss.backward()?;
    let of_weight = gradients.get(&weight).expect("a gradient").flatten_all()?.to_vec1::<f32>()?;
    for (found, expected) in of_weight.into_iter().zip([0.5 - 0.4, 0.5 - 0.4, -0.1, -0.1]) {
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
    Ok(())
}

#[test]
fn gradients_equal_central_differences() -> Result<()> {
    for divergence in DIVERGENCES {
        for kind in [Kind::Mixture, Kind::List(4, MissingIds::Tail)] {
            let case = Distill { hard_weight: 0.25, ..Distill::new(3, 2, 11, kind, divergence) };
            let teacher = case.teacher(&case.teacher.operands(DType::F64)?, &Device::Cpu, DType::F64)?;
            let options = case.options(&Device::Cpu, DType::F64)?;
            let value = |operands: &[Tensor; 4]| Distill::mixture(&case.student, operands)?.distill(&teacher, &options);
            let vars = case.student.operands(DType::F64)?.map(|t| Var::from_tensor(&t).expect("a variable"));
            let operands = vars.each_ref().map(|v| v.as_tensor().clone());
            let gradients = value(&operands)?.backward()?;
            check_central_differences(&vars, &gradients, |operands| Ok(value(operands)?.value))?;
        }
    }
    Ok(())
}

/// Heads of two levels compute from what every output layer has.
#[test]
fn every_output_layer_distills() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let hidden = Tensor::randn(0f64, 1.0, (2, 3, 8), &Device::Cpu)?;
    let teacher = SoftmaxHead::from_tensors(Tensor::randn(0f64, 1.0, (60, 8), &Device::Cpu)?, None)?;
    let top = teacher.top_k(&hidden, 5)?;
    let of_mixture = Teacher::from_mixture(&teacher.mixture(&hidden, DropoutMasks::Off)?);
    let of_list = Teacher::from_top_k(&top.token_ids, &top.log_probs, MissingIds::Tail);
    let students: [Box<dyn OutputLayer>; 2] = [
        Box::new(AdaptiveSoftmax::new(&AdaptiveConfig::new(8, 60, vec![20]), vb.pp("adaptive"))?),
        Box::new(MixtureOfSoftmaxes::new(&MixtureConfig::new(8, 60, 3), vb.pp("mos"))?),
    ];
    let targets = Tensor::new(&[[1i64, -1, 3], [59, 5, 6]], &Device::Cpu)?;
    for student in &students {
        // A tensor of its log-probabilities is a student too.
        let log_probs = student.log_probs(&hidden)?;
        for divergence in DIVERGENCES {
            for teacher in [&of_mixture, &of_list] {
                let options = DistillOptions::new(divergence).with_targets(targets.clone()).with_ignore_index(-1);
                let options = options.with_hard_weight(0.4);
                let loss = student.distill(&hidden, teacher, &options)?;
                let of_log_probs = Given(log_probs.reshape((6, 60))?);
                let expected = of_log_probs.distill(&places(&[2, 3, 1])?, teacher, &options)?;
                let (found, truth) = (loss.value.to_scalar::<f64>()?, expected.value.to_scalar::<f64>()?);
                assert!((found - truth).abs() < 1e-12, "{divergence:?}: {found} {truth}");
                assert_eq!(loss.count.to_scalar::<f64>()?, 5.0);
                let (found, truth) = (loss.backward()?, expected.backward()?);
                for var in vars.all_vars() {
                    let (found, truth) = (found.get(&var), truth.get(&var));
                    assert_eq!(found.is_some(), truth.is_some());
                    let Some((found, truth)) = found.zip(truth) else { continue };
                    let difference = (found - truth)?.abs()?.max_all()?.to_scalar::<f64>()?;
                    assert!(difference < 1e-12, "{divergence:?}: {difference}");
                }
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
    assert!((loss.value.to_scalar::<f64>()? - expected.to_scalar::<f64>()?).abs() < 1e-13);
    for _ in 0..2 {
        // The second backward pass computes them again.
        let (found, expected) = (loss.backward()?, expected.backward()?);
        let (found, expected) =
            (found.get(&contexts).expect("a gradient"), expected.get(&contexts).expect("a gradient"));
        assert!((found - expected)?.abs()?.max_all()?.to_scalar::<f64>()? < 1e-13);
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
