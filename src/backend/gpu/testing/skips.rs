//! Without a compiler a test says that it is skipped, or fails if the compiler is demanded.

use std::process::{Command, Output};

use crate::backend::needs::{Need, CLANG, CXX};

/// Runs a test of this program with a compiler that does not exist, which is demanded or not.
fn run(test: &str, compiler: &str, need: Need, is_demanded: bool) -> Output {
    let mut this = Command::new(std::env::current_exe().unwrap());
    this.args(["--exact", test]).env(compiler, "/nowhere/compiler");
    this.env(need.variable, u8::from(is_demanded).to_string()).output().unwrap()
}

#[test]
fn a_missing_compiler_is_said_or_is_a_failure_if_it_is_demanded() {
    for (test, compiler, need) in [
        ("backend::gpu::testing::tests::f64_is_an_error_that_names_the_backend", "CXX", CXX),
        ("backend::gpu::testing::mutants::wrong_cuda_kernels_are_caught", "CXX", CXX),
        ("backend::gpu::testing::mutants::an_access_outside_a_tensor_ends_the_process", "CXX", CXX),
        ("backend::metal::language_rules::the_kernels_follow_the_rules_of_the_language", "CLANG", CLANG),
        ("backend::metal::language_rules::what_the_language_forbids_is_caught", "CLANG", CLANG),
    ] {
        let reason = format!("no {} (/nowhere/compiler: No such file or directory", need.name);
        let skipped = run(test, compiler, need, false);
        let lines = String::from_utf8_lossy(&skipped.stderr).into_owned();
        assert!(skipped.status.success() && lines.starts_with(&format!("skipped: {test}: {reason}")), "{lines}");
        assert_eq!(lines.lines().count(), 1, "{lines}");
        let failed = run(test, compiler, need, true);
        let printed = String::from_utf8_lossy(&failed.stdout).into_owned();
        let message = format!("{test} needs what {}=1 demands: {reason}", need.variable);
        assert!(!failed.status.success() && printed.contains(&message), "{printed}");
    }
}
