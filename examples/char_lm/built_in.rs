//! The built-in text: documentation and sources of the crate.

/// About 150,000 characters; the end is for validation and test.
pub(crate) fn text() -> String {
    [
        include_str!("../../README.md"),
        include_str!("../../src/lib.rs"),
        include_str!("../../src/output_layer.rs"),
        include_str!("../../src/mixture_of_softmaxes.rs"),
        include_str!("../../src/projection.rs"),
        include_str!("../../src/loss/options.rs"),
        include_str!("../../src/mixture/mod.rs"),
        include_str!("../../src/mixture/node.rs"),
        include_str!("../../src/autograd.rs"),
        include_str!("../../src/backend/mod.rs"),
        include_str!("../../src/backend/plan.rs"),
        include_str!("../../src/backend/cpu/simd.rs"),
        include_str!("../../src/backend/cpu/rows.rs"),
        include_str!("../../src/backend/cpu/gemm.rs"),
        include_str!("../../src/decoder.rs"),
        include_str!("../../src/error.rs"),
        include_str!("../../src/softmax_head.rs"),
        include_str!("../../src/mixture_of_contexts.rs"),
    ]
    .concat()
}
