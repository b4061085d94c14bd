//! What ranks compare before they compute together, so that none waits for a rank that does something else.

use std::hash::{DefaultHasher, Hasher};

use crate::backend::collectives::Collectives;
use crate::error::{Error, Result};

/// The calls that all ranks make together.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    /// The vocabulary is cut.
    Cut,
    Loss,
    Backward,
    Decoding,
    #[cfg(feature = "distributed")]
    Save,
    #[cfg(feature = "distributed")]
    Count,
    #[cfg(feature = "distributed")]
    Gradients,
}

/// A number that stands for an argument.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreed {
    argument: &'static str,
    value: f64,
    /// How much the numbers of two ranks may differ.
    tolerance: f64,
}

impl Agreed {
    /// The same on every rank.
    pub(crate) fn equal(argument: &'static str, value: f64) -> Self {
        Agreed { argument, value, tolerance: 0.0 }
    }

    /// What is hashed, the same on every rank.
    pub(crate) fn hashed(argument: &'static str, hash: impl FnOnce(&mut DefaultHasher)) -> Self {
        let mut state = DefaultHasher::new();
        hash(&mut state);
        // f64 has these bits exactly.
        Agreed::equal(argument, (state.finish() >> 12) as f64)
    }

    /// The number.
    #[cfg(feature = "distributed")]
    pub(crate) fn value(&self) -> f64 {
        self.value
    }

    /// The same on every rank but for rounding.
    pub(crate) fn close(argument: &'static str, value: f64, tolerance: f64) -> Self {
        Agreed { argument, value, tolerance }
    }

    /// Of this rank alone.
    pub(crate) fn own(argument: &'static str, value: f64) -> Self {
        Agreed { argument, value, tolerance: f64::INFINITY }
    }
}

/// The numbers of a first exchange: as many for each call, as engines expect.
const NUMBERS: usize = 16;

/// What [`Error::Ranks`] names where a rank has an error of its own.
pub(crate) const WITHOUT_ERROR: &str = "arguments without an error";

/// The numbers that all ranks send: which call they make, whether they have no error, and numbers of the call.
fn exchange(collectives: &dyn Collectives, call: Call, is_ok: bool, numbers: &[Agreed]) -> Result<Vec<Vec<f64>>> {
    debug_assert!(numbers.len() + 2 <= NUMBERS);
    let mut sent = vec![call as u8 as f64, f64::from(u8::from(is_ok))];
    sent.extend(numbers.iter().map(|number| number.value));
    sent.resize(NUMBERS, 0.0);
    let all = collectives.all_gather(&sent)?;
    Ok((0..NUMBERS).map(|i| all.iter().copied().skip(i).step_by(NUMBERS).collect()).collect())
}

/// The first element of a list that is not the same on every rank, from a number that stands for each; `None` if the lists
/// are not of the same length, or do not differ. Every rank calls it, after an error that all of them have.
#[cfg(feature = "distributed")]
pub(crate) fn first_other(collectives: &dyn Collectives, of_elements: &[f64]) -> Result<Option<usize>> {
    let n = of_elements.len();
    let lengths = collectives.all_gather(&[n as f64])?;
    if n == 0 || lengths.iter().any(|of_rank| *of_rank != n as f64) {
        return Ok(None);
    }
    let all = collectives.all_gather(of_elements)?;
    Ok((0..n).find(|&i| all.iter().skip(i).step_by(n).any(|of_rank| *of_rank != all[i])))
}

/// What this rank's check has found, and the numbers of all ranks; an error on every rank if one of them has found one, if a
/// number is not the same everywhere, or if a rank makes another call. Every rank calls it with the same names, unless it
/// has an error.
pub(crate) fn agree<T>(
    collectives: &dyn Collectives,
    call: Call,
    checked: Result<T>,
    numbers: &[Agreed],
) -> Result<(T, Vec<Vec<f64>>)> {
    let mut of_ranks = exchange(collectives, call, checked.is_ok(), numbers)?;
    let checked = checked?;
    let of_calls = [Agreed::equal("the call", 0.0), Agreed::equal(WITHOUT_ERROR, 0.0)];
    for (number, of_ranks) in of_calls.iter().chain(numbers).zip(&of_ranks) {
        let is_same = |of_rank: f64| match of_ranks[0] {
            first if first.is_nan() => of_rank.is_nan(),
            first => of_rank == first || (of_rank - first).abs() <= number.tolerance,
        };
        if number.tolerance.is_finite() && !of_ranks.iter().copied().all(is_same) {
            return Err(Error::Ranks { argument: number.argument, element: None, of_ranks: of_ranks.clone() });
        }
    }
    Ok((checked, of_ranks.split_off(of_calls.len())))
}
