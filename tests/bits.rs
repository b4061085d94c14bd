//! Hashes of the exact bits of results, one line per case, so that two commits can be compared: a refactoring changes
//! no line. README.md says how. `problem.rs` names most of the library's interface, so that it is quickly adapted to a
//! commit that renames some.
//!
//! The lines of `plan` and of cases with a `budget` depend on the number of threads: the workspace of each is part of
//! the budget, and the rest decides on the chunks.

#[path = "bits/cases.rs"]
mod cases;
#[path = "bits/decoding.rs"]
mod decoding;
#[path = "bits/digest.rs"]
mod digest;
#[path = "bits/losses.rs"]
mod losses;
#[path = "bits/options.rs"]
mod options;
#[path = "bits/outputs.rs"]
mod outputs;
#[path = "bits/problem.rs"]
mod problem;
#[path = "common/ranks.rs"]
mod ranks;

use std::collections::HashSet;

use cases::Cases;

#[test]
fn results_are_repeatable_to_the_bit() {
    let lines = lines();
    print!("{}", lines.concat());
    if let Ok(file) = std::env::var("MOS_HEAD_BITS") {
        std::fs::write(file, lines.concat()).expect("a file that can be written");
    }
    let names: HashSet<&str> = lines.iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names.len(), lines.len(), "two cases have the same name");
    assert_eq!(lines, self::lines());
}

/// Runs all cases.
fn lines() -> Vec<String> {
    let mut cases = Cases(Vec::new());
    losses::every_head(&mut cases);
    losses::every_option(&mut cases);
    losses::shapes(&mut cases);
    losses::views(&mut cases);
    losses::functions(&mut cases);
    decoding::draws(&mut cases);
    decoding::scores(&mut cases);
    decoding::kept_sets(&mut cases);
    decoding::sums_and_ranks(&mut cases);
    cases.0
}
