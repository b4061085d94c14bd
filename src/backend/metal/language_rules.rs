//! Checks the source of the kernels under the rules of C++ for OpenCL, which has the address spaces of the Metal
//! shading language and, like it, a compiler based on clang: a missing or wrong address space, threadgroup memory
//! outside a kernel, a `double` and functions of the host's library are errors, as in Apple's compiler.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use super::kind::source;
use crate::backend::needs::CLANG;

/// Returns the errors in a source, or `None`, which a line or a failure says, without clang.
fn errors(text: &str) -> Option<String> {
    let check = |more: &[&str]| {
        let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu_host/language_rules");
        let program = std::env::var("CLANG").unwrap_or("clang".into());
        let mut clang = Command::new(&program);
        clang.args(
            "-x clcpp -cl-std=CLC++2021 -cl-no-stdinc -target spirv64 -fsyntax-only -Wall -Wextra -Werror".split(' '),
        );
        // Unlike OpenCL, Metal has neither program-scope variables nor kernels that launch kernels.
        clang.args(["-Xclang", "-cl-ext=-__opencl_c_program_scope_global_variables,-__opencl_c_device_enqueue"]);
        clang.args(["-Wno-unused-parameter", "-Wno-unknown-attributes", "-I"]).arg(headers).args(more).arg("-");
        let mut child = match clang.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
            Ok(child) => child,
            Err(error) => {
                CLANG.is_missing(format!("{program}: {error}"));
                return None;
            }
        };
        // Dropping stdin closes it. The write fails, harmlessly, if the compiler stops before the end.
        let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
        Some(child.wait_with_output().unwrap())
    };
    let output = check(&[])?;
    if !output.status.success() {
        return Some(String::from_utf8_lossy(&output.stderr).into());
    }
    // A pointer or reference without an address space is generic in OpenCL, but an error in Metal. Only the compiler's
    // own declarations have no name.
    let tree = check(&["-Xclang", "-ast-dump", "-fno-color-diagnostics"])?;
    let tree = String::from_utf8_lossy(&tree.stdout);
    let is_generic = |line: &&str| {
        let Some((head, kind)) = line.split_once('\'') else { return false };
        let name = head.trim_end().rsplit(' ').next().unwrap_or("");
        let is_named =
            name.starts_with(|c: char| c.is_alphabetic() || c == '_') && !["used", "operator="].contains(&name);
        is_named
            && !name.contains(':')
            && match head {
                _ if head.contains("VarDecl ") || head.contains("FieldDecl ") => kind.contains("__generic"),
                // The result type; an address space after the parameters belongs to `this`.
                _ if head.contains("FunctionDecl ") || head.contains("CXXMethodDecl ") => {
                    kind.split('(').next().is_some_and(|result| result.contains("__generic"))
                }
                _ => false,
            }
    };
    let generic = tree.lines().filter(is_generic);
    Some(generic.collect::<Vec<_>>().join("\n"))
}

#[test]
fn the_kernels_follow_the_rules_of_the_language() {
    let Some(errors) = errors(&source()) else { return };
    assert_eq!(errors, "");
}

#[test]
fn what_the_language_forbids_is_caught() {
    let changes = [
        // Pointers and references without an address space
        ("GLOBAL const float *bias; //", "const float *bias; //"),
        ("float at(GLOBAL const float *row", "float at(const float *row"),
        ("void join(LOCAL float &x", "void join(float &x"),
        ("FUNCTION GLOBAL float &mass(i64 row)", "FUNCTION float &mass(i64 row)"),
        ("device float *to, int count", "float *to, int count"),
        // A wrong address space
        ("uint tid, SHARED X *warp_values", "uint tid, GLOBAL X *warp_values"),
        (
            "GLOBAL const float *row = logits.z + r * logits.stride;\n    const int id",
            "LOCAL const float *row = logits.z + r * logits.stride;\n    const int id",
        ),
        ("device float *row_values, constant i64 &row_count", "device float *row_values, i64 &row_count"),
        // Threadgroup memory outside a kernel
        (
            "const i64 r = block;\n    GLOBAL",
            "threadgroup float mine[4]; const i64 r = block + (i64)mine[0];\n    GLOBAL",
        ),
        // A type and functions that the language does not have
        ("float target_loss = weighted", "double target_loss = weighted"),
        ("return precise::log(x);", "return logf(x);"),
        ("sums[j] += x * widened", "printf(\"\"); sums[j] += x * widened"),
    ];
    for (text, replacement) in changes {
        assert_eq!(source().matches(text).count(), 1, "{text} must occur exactly once");
        let Some(errors) = errors(&source().replace(text, replacement)) else { return };
        assert!(!errors.is_empty(), "not caught: {text} -> {replacement}");
    }
}
