//! The parameters of each kernel have the names, types and order that its structure in `gpu/kernels.rs` says.

use super::*;

use crate::backend::gpu::kernels::{
    BiasTanhArguments, KernelArguments, LogPriorGradientsArguments, LogSoftmaxArguments, LogSoftmaxGradientArguments,
    MixtureLogProbsArguments, PadRowsArguments, PositionGradientScalesArguments, PositionLossArguments,
    PositionMassesArguments, PositionScoresArguments, PositionTargetsArguments, ReductionScalesArguments,
    RoundRowsArguments, RowExponentialsArguments, RowFactorsArguments, RowGradientArguments, RowLogSumExpArguments,
    RowSoftMassArguments, RowTargetGradientArguments, ScaleRowsArguments, TanhGradientArguments, TopKArguments,
    WeighLossesArguments,
};
use crate::backend::metal::f32_products::{InnerProductsArguments, WidenArguments};

/// The parameters of a kernel: name and type of each, as in `gpu/kernels.rs`.
type Parameters = Vec<(String, &'static str)>;

/// The type of a field that is the argument of a parameter with this declaration.
fn field_type(declaration: &str) -> &'static str {
    let is_pointer = declaration.contains('*');
    match declaration.trim_start_matches("constant ").split([' ', '*', '&']).next() {
        _ if is_pointer && declaration.contains("const ") => "Read",
        _ if is_pointer => "Write",
        Some("Logits" | "LOGITS") => "LogitsArgument",
        Some("Objective" | "OBJECTIVE") => "ObjectiveArgument",
        Some("Rows" | "ROWS") => "RowsArgument",
        Some("Scored" | "SCORED") => "ScoredArgument",
        Some("int") => "i32",
        Some("i64") => "i64",
        Some("float") => "f32",
        _ => panic!("a parameter of another type: {declaration}"),
    }
}

/// The parameters of a kernel in the source of a language.
fn parameters(language: Language, name: &str) -> Parameters {
    let source = language.source().1.replace('\\', "").replace("__launch_bounds__(BLOCK, 2) ", "");
    let start = [format!("KERNEL {name}("), format!("KERNEL {name}_f32("), format!("KERNEL {name}_##name(")]
        .iter()
        .find_map(|head| source.find(head).map(|at| at + head.len()))
        .unwrap_or_else(|| panic!("no kernel {name} in {language:?}"));
    let list = &source[start..start + source[start..].find(')').expect("the end of the parameters")];
    let list = list.split(',').map(str::trim).filter(|declaration| *declaration != "INDICES");
    let parameter = |declaration: &str| {
        let start = declaration.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |at| at + 1);
        (declaration[start..].to_lowercase(), field_type(declaration))
    };
    list.map(parameter).collect()
}

/// Asserts that the parameters of a kernel are the fields of its structure.
fn check_in<K: KernelArguments>(language: Language) {
    let fields: Parameters = K::PARAMETERS.iter().map(|&(name, kind)| (name.to_owned(), kind)).collect();
    assert_eq!(parameters(language, K::NAME), fields, "{} in {language:?}", K::NAME);
}

/// [`check_in`] each language.
fn check<K: KernelArguments>() {
    LANGUAGES.into_iter().for_each(check_in::<K>);
}

#[test]
fn the_parameters_of_the_kernels_are_the_fields_of_their_structures() {
    check::<RowLogSumExpArguments>();
    check::<PositionLossArguments>();
    check::<MixtureLogProbsArguments>();
    check::<TopKArguments>();
    check::<PositionScoresArguments>();
    check::<PositionMassesArguments>();
    check::<RowSoftMassArguments>();
    check::<LogPriorGradientsArguments>();
    check::<RowGradientArguments>();
    check::<PositionTargetsArguments>();
    check::<PositionGradientScalesArguments>();
    check::<RowTargetGradientArguments>();
    check::<ReductionScalesArguments>();
    check::<WeighLossesArguments>();
    check::<BiasTanhArguments>();
    check::<TanhGradientArguments>();
    check::<LogSoftmaxArguments>();
    check::<LogSoftmaxGradientArguments>();
    check_in::<PadRowsArguments>(Language::Cuda);
    check_in::<RoundRowsArguments>(Language::Cuda);
    check_in::<RowExponentialsArguments>(Language::Cuda);
    check_in::<RowFactorsArguments>(Language::Cuda);
    check_in::<ScaleRowsArguments>(Language::Cuda);
    check_in::<InnerProductsArguments>(Language::Metal);
    check_in::<WidenArguments>(Language::Metal);
}
