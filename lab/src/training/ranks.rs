//! The processes that train one model together, each with its parts of every batch.

use crate::Result;
use candle_core::{backprop::GradStore, Tensor, Var};
use mos_head::distributed::{Collectives, DataParallel, Numbers};
use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

/// The ranks of a distributed program, all with the same model and the same data: each computes the gradients of its
/// parts of a step, and takes the step with the gradients of all. By default a single process.
///
/// Every rank makes the same calls of `sums`, `wait`, `all_reduce` and `share`. If one of them ends with an error, the
/// others get an error at their next call.
#[derive(Clone, Debug, Default)]
pub struct Ranks {
    /// `None` for a single process.
    several: Option<DataParallel>,
}

impl Ranks {
    /// Makes ranks that exchange what they compute by this engine.
    pub fn new(collectives: Arc<dyn Collectives>) -> Self {
        Self { several: Some(DataParallel::new(collectives)) }
    }

    fn collectives(&self) -> Option<&dyn Collectives> {
        self.several.as_ref().map(|several| &**several.collectives())
    }

    /// Returns the number of ranks.
    pub fn count(&self) -> usize {
        self.collectives().map_or(1, Collectives::ranks)
    }

    /// Returns whether this is the rank that prints and writes files.
    pub fn is_first(&self) -> bool {
        self.collectives().is_none_or(|collectives| collectives.rank() == 0)
    }

    /// Prints a line, once.
    pub fn print(&self, line: impl Display) {
        if self.is_first() {
            println!("{line}");
        }
    }

    /// Prints an error, if others may have another one.
    pub fn report(&self, error: &dyn std::error::Error) {
        if let Some(collectives) = self.collectives() {
            eprintln!("process {}: {error}", collectives.rank());
        }
    }

    /// Returns what the first rank finds, on every rank.
    pub(crate) fn first_finds(&self, is_so: bool) -> Result<bool> {
        let [answer] = self.sums([f64::from(u8::from(is_so && self.is_first()))])?;
        Ok(answer > 0.0)
    }

    /// Returns the places of this rank's parts, one after the other.
    pub(crate) fn own(&self, parts: usize) -> Range<usize> {
        self.parts_of(self.collectives().map_or(0, Collectives::rank), parts)
    }

    fn parts_of(&self, rank: usize, parts: usize) -> Range<usize> {
        rank * parts / self.count()..(rank + 1) * parts / self.count()
    }

    /// Returns the sums over all ranks.
    pub(crate) fn sums<const N: usize>(&self, numbers: [f64; N]) -> Result<[f64; N]> {
        match &self.several {
            None => Ok(numbers),
            Some(several) => Ok(several.sums(numbers)?),
        }
    }

    /// Waits until every rank calls it.
    pub(crate) fn wait(&self) -> Result<()> {
        self.sums([0.0]).map(|_| ())
    }

    /// Replaces the gradients by their sums over all ranks.
    pub(crate) fn all_reduce(&self, gradients: &mut GradStore, variables: &[(String, Var)]) -> Result<()> {
        match &self.several {
            None => Ok(()),
            Some(several) => Ok(several.all_reduce_named(gradients, variables)?),
        }
    }

    /// Gives every rank the tensors, of f32, that the owner of a part has for it.
    pub(crate) fn share(&self, parts: &mut [Vec<&mut Tensor>]) -> Result<()> {
        let Some(collectives) = self.collectives() else { return Ok(()) };
        for rank in 0..collectives.ranks() {
            let own = self.parts_of(rank, parts.len());
            for tensor in parts[own].iter_mut().flatten() {
                let mut numbers = tensor.flatten_all()?.to_vec1::<f32>()?;
                collectives.broadcast(Numbers::F32(&mut numbers), rank)?;
                **tensor = Tensor::from_vec(numbers, tensor.shape(), tensor.device())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
