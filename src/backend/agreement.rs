//! Ranks compare what they are about to compute together, so that none waits for a rank that does something else.

use std::hash::{DefaultHasher, Hasher};

use crate::backend::collectives::Collectives;
use crate::error::{Error, Result};

/// The calls that all ranks make together.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    /// The vocabulary is cut into shards.
    Cut,
    /// A loss is computed.
    Loss,
    /// The gradients of a loss are computed.
    Backward,
    /// A rank has an error before it makes its call.
    Refused,
    /// Token ids are ranked or drawn.
    Decoding,
    /// A checkpoint is written.
    #[cfg(feature = "distributed")]
    Save,
    /// The targets of a batch that ranks share are counted.
    #[cfg(feature = "distributed")]
    Count,
    /// The gradients of a batch that ranks share are added up.
    #[cfg(feature = "distributed")]
    Gradients,
}

/// A number that stands for an argument of a call, and how much it may differ between ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreed {
    argument: &'static str,
    value: f64,
    /// The largest difference between two ranks.
    tolerance: f64,
}

impl Agreed {
    /// Requires the same number on every rank.
    pub(crate) fn equal(argument: &'static str, value: f64) -> Self {
        Agreed { argument, value, tolerance: 0.0 }
    }

    /// Requires that `hash` hashes the same on every rank.
    pub(crate) fn hashed(argument: &'static str, hash: impl FnOnce(&mut DefaultHasher)) -> Self {
        let mut state = DefaultHasher::new();
        hash(&mut state);
        // f64 represents so many bits exactly.
        Agreed::equal(argument, (state.finish() >> 12) as f64)
    }

    /// Returns the number that stands for the argument.
    #[cfg(feature = "distributed")]
    pub(crate) fn value(&self) -> f64 {
        self.value
    }

    /// Requires numbers that differ by `tolerance` at most, as sums do that are rounded differently.
    pub(crate) fn close(argument: &'static str, value: f64, tolerance: f64) -> Self {
        Agreed { argument, value, tolerance }
    }

    /// Sends a number that each rank chooses for itself, and requires nothing.
    pub(crate) fn own(argument: &'static str, value: f64) -> Self {
        Agreed { argument, value, tolerance: f64::INFINITY }
    }
}

/// The number of values in a first exchange. It is the same for each call, because engines expect as many from each
/// rank.
const NUMBERS: usize = 16;

/// The argument that [`Error::Ranks`] names on the other ranks if a rank has an error of its own.
pub(crate) const WITHOUT_ERROR: &str = "arguments without an error";

/// Sends which call this rank makes, whether it has no error, and the numbers of the call. Returns the values of all
/// ranks for each of these.
fn exchange(collectives: &dyn Collectives, call: Call, is_ok: bool, numbers: &[Agreed]) -> Result<Vec<Vec<f64>>> {
    debug_assert!(numbers.len() + 2 <= NUMBERS);
    let mut sent = vec![call as u8 as f64, f64::from(u8::from(is_ok))];
    sent.extend(numbers.iter().map(|number| number.value));
    sent.resize(NUMBERS, 0.0);
    let all = collectives.all_gather(&sent)?;
    Ok((0..NUMBERS).map(|i| all.iter().copied().skip(i).step_by(NUMBERS).collect()).collect())
}

/// Returns the index of the first element of a list that is not the same on every rank, from a number that stands for
/// each element. It is `None` if the lists differ in length, or do not differ. Every rank calls it after an error that
/// all of them have.
#[cfg(feature = "distributed")]
pub(crate) fn first_other(collectives: &dyn Collectives, elements: &[f64]) -> Result<Option<usize>> {
    let n = elements.len();
    let lengths = collectives.all_gather(&[n as f64])?;
    if n == 0 || lengths.iter().any(|length| *length != n as f64) {
        return Ok(None);
    }
    let all = collectives.all_gather(elements)?;
    Ok((0..n).find(|&i| all.iter().skip(i).step_by(n).any(|element| *element != all[i])))
}

/// Returns what this rank's check has found, and the values of all ranks for each number. It is an error on every rank
/// if one of them has found an error, if a number is not the same everywhere, or if a rank makes another call. Every
/// rank calls it with the same names, unless it has an error.
pub(crate) fn agree<T>(
    collectives: &dyn Collectives,
    call: Call,
    checked: Result<T>,
    numbers: &[Agreed],
) -> Result<(T, Vec<Vec<f64>>)> {
    let mut exchanged = exchange(collectives, call, checked.is_ok(), numbers)?;
    let checked = checked?;
    // A rank with an error may not know the call that the others make.
    exchanged.swap(0, 1);
    let call_numbers = [Agreed::equal(WITHOUT_ERROR, 0.0), Agreed::equal("the call", 0.0)];
    for (number, values) in call_numbers.iter().chain(numbers).zip(&exchanged) {
        let first = values[0];
        let is_same = |value: f64| {
            if first.is_nan() {
                value.is_nan()
            } else {
                value == first || (value - first).abs() <= number.tolerance
            }
        };
        if number.tolerance.is_finite() && !values.iter().copied().all(is_same) {
            return Err(Error::Ranks { argument: number.argument, element: None, values: values.clone() });
        }
    }
    Ok((checked, exchanged.split_off(call_numbers.len())))
}
