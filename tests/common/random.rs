//! Random problems for the property tests, the same in every run.

use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, RngSeed};

use super::case::{Case, Head, Sizes};

/// A problem of small, mostly irregular sizes, and the seed of its numbers.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    pub sizes: Sizes,
    pub positions: usize,
    pub seed: u64,
}

impl Problem {
    pub fn case(self, head: Head) -> Case {
        Case::random(head, self.sizes, &[self.positions], self.seed)
    }
}

/// Errors of gradients are relative to at least this: a vocabulary of one id has gradients of exactly zero.
pub const LEAST_SCALE: f64 = 1e-2;

pub fn problems() -> impl Strategy<Value = Problem> {
    (1..20_usize, 1..40_usize, 1..7_usize, 1..90_usize, 1..12_usize, any::<u64>()).prop_map(
        |(hidden, context, components, vocab, positions, seed)| Problem {
            sizes: Sizes::new(hidden, context, components, vocab),
            positions,
            seed,
        },
    )
}

/// A fixed seed; failing cases are written to the file `regressions`, to be committed.
pub fn config(regressions: &'static str) -> ProptestConfig {
    ProptestConfig {
        cases: 48,
        rng_seed: RngSeed::Fixed(0x6d6f73),
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(regressions))),
        ..ProptestConfig::default()
    }
}
