//! Prints the public interface that a file of rustdoc's JSON describes, one item a line. What every type has is left
//! out: implementations of auto traits and blanket implementations. An implementation of a trait is one line, without
//! its methods, which the trait lists.

use std::collections::HashSet;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let json = std::env::args().nth(1).ok_or("usage: public_api JSON")?;
    let interface = public_api::Builder::from_rustdoc_json(json)
        .omit_auto_trait_impls(true)
        .omit_blanket_impls(true)
        .include_function_parameter_names(true)
        .build()?;
    let is_trait_impl = |line: &str| line.starts_with("impl") && line.contains(" for ");
    let trait_impls: HashSet<_> =
        interface.items().filter(|item| is_trait_impl(&item.to_string())).map(|item| item.id()).collect();
    for item in interface.items() {
        let line = item.to_string();
        let repeats_trait = line.starts_with("pub fn") && item.parent_id().is_some_and(|id| trait_impls.contains(&id));
        if !repeats_trait && !line.contains("StructuralPartialEq") {
            println!("{}", line.replace("mos_head::", ""));
        }
    }
    Ok(())
}
