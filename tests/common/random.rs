//! Random problems for the property tests, the same in every run.

use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, RngSeed};

use super::case::{Case, Head, Sizes};

/// A problem of small and mostly odd sizes, and the seed of its numbers.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    pub sizes: Sizes,
    pub rows: usize,
    pub seed: u64,
}

impl Problem {
    pub fn case(self, head: Head) -> Case {
        Case::random(head, self.sizes, &[self.rows], self.seed)
    }
}

/// A vocabulary of one word has gradients of exactly zero: errors of gradients are relative to at least this.
pub const LEAST_SCALE: f64 = 1e-2;

pub fn problems() -> impl Strategy<Value = Problem> {
    (1..20_usize, 1..40_usize, 1..7_usize, 1..90_usize, 1..12_usize, any::<u64>()).prop_map(
        |(hidden, context, components, vocab, rows, seed)| Problem {
            sizes: Sizes::new(hidden, context, components, vocab),
            rows,
            seed,
        },
    )
}

/// Fixed seed; failures are kept in `regressions`, to be committed.
pub fn config(regressions: &'static str) -> ProptestConfig {
    ProptestConfig {
        cases: 48,
        rng_seed: RngSeed::Fixed(0x6d6f73),
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(regressions))),
        ..ProptestConfig::default()
    }
}
