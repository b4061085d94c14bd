//! When a result is accepted: its error against the `f64` reference is at most twice that of the composed form in the
//! same dtype, plus a floor, and in any case below a ceiling. NaN and the two infinities must be where the reference
//! has them.
//!
//! An error is relative to the largest finite number of the reference array; for values, to at least 1.

use candle_core::DType;

use super::values::difference;

/// What an array holds, which determines how exact it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Losses, log-probabilities.
    Value,
    /// Gradients.
    Gradient,
}

/// How exact a result must be.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    pub dtype: DType,
    pub kind: Kind,
    /// How much the problem itself amplifies rounding, which raises ceiling and floor: 1, or more if logits are large.
    pub condition: f64,
    /// Errors of gradients are relative to at least this.
    pub least_scale: f64,
}

impl Tolerance {
    pub fn value(dtype: DType) -> Self {
        Self { dtype, kind: Kind::Value, condition: 1.0, least_scale: 1.0 }
    }

    pub fn gradient(dtype: DType) -> Self {
        Self { kind: Kind::Gradient, least_scale: f64::MIN_POSITIVE, ..Self::value(dtype) }
    }

    pub fn condition(self, condition: f64) -> Self {
        Self { condition: condition.max(1.0), ..self }
    }

    pub fn least_scale(self, least_scale: f64) -> Self {
        Self { least_scale, ..self }
    }

    /// `(ceiling, floor)`, each about three times the largest error observed in these tests.
    fn limits(self) -> (f64, f64) {
        match (self.dtype, self.kind) {
            (DType::F64, Kind::Value) => (1e-13, 1e-14),
            (DType::F64, Kind::Gradient) => (1e-12, 2e-13),
            (DType::F32, Kind::Value) => (2e-6, 5e-7),
            (DType::F32, Kind::Gradient) => (5e-5, 5e-6),
            (DType::F16, Kind::Value) => (2e-3, 5e-4),
            (DType::F16, Kind::Gradient) => (6e-3, 1.5e-3),
            (DType::BF16, Kind::Value) => (2e-2, 2e-3),
            (DType::BF16, Kind::Gradient) => (4e-2, 4e-3),
            (other, _) => panic!("no tolerance for {other:?}"),
        }
    }
}

/// The largest error of an accepted result, and that of the composed form: infinite if undefined or absent.
#[derive(Clone, Copy, Debug)]
pub struct Errors {
    pub got: f64,
    pub composed: f64,
}

/// The errors of `got`, or a message that lists the mismatches.
pub fn compare(got: &[f64], truth: &[f64], composed: Option<&[f64]>, tolerance: Tolerance) -> Result<Errors, String> {
    if got.len() != truth.len() {
        return Err(format!("{} values for {}", got.len(), truth.len()));
    }
    let sizes = truth.iter().filter(|x| x.is_finite()).map(|x| x.abs());
    let scale = sizes.fold(tolerance.least_scale, f64::max);
    let composed_error = composed.map_or(f64::INFINITY, |composed| {
        // If the composed form is undefined, its error is infinite, and only the ceiling applies.
        let errors = composed.iter().zip(truth).map(|(c, t)| difference(*c, *t) / scale);
        errors.fold(0.0, f64::max)
    });
    let (ceiling, floor) = tolerance.limits();
    // The composed form may round a large logit as the reference does, by the same order of its sum; another order
    // gives its neighbour.
    let epsilon = if tolerance.dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
    let floor = if tolerance.condition > 1.0 { floor.max(epsilon * tolerance.condition) } else { floor };
    let limit = (ceiling * tolerance.condition).min(2.0 * composed_error + floor);

    let mut worst = 0.0_f64;
    let mut mismatches = vec![];
    for (i, (&g, &t)) in got.iter().zip(truth).enumerate() {
        let error = difference(g, t) / scale;
        worst = worst.max(error);
        if error > limit {
            mismatches.push(format!("[{i}] got {g:e}, expected {t:e}, error {error:.1e}"));
        }
    }
    if mismatches.is_empty() {
        return Ok(Errors { got: worst, composed: composed_error });
    }
    let (count, all) = (mismatches.len(), got.len());
    mismatches.truncate(5);
    Err(format!(
        "{count} of {all} beyond {limit:.1e} (composed: {composed_error:.1e}, scale {scale:.1e}, {tolerance:?}): {}",
        mismatches.join("; ")
    ))
}

/// Panics unless `got` is accepted. With `SHOW_ERRORS` in the environment (and `--nocapture`) it prints the error, to
/// keep the limits tight.
pub fn assert_close(name: &str, got: &[f64], truth: &[f64], composed: Option<&[f64]>, tolerance: Tolerance) {
    match compare(got, truth, composed, tolerance) {
        Ok(errors) if std::env::var_os("SHOW_ERRORS").is_some() => {
            let Tolerance { dtype, kind, condition, .. } = tolerance;
            let Errors { got, composed } = errors;
            eprintln!("{dtype:?} {kind:?} error {got:.2e} composed {composed:.2e} condition {condition:.0e} {name}");
        }
        Ok(_) => {}
        Err(message) => panic!("{name}: {message}"),
    }
}
