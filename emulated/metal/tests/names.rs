//! The stand-ins have the names of candle's kernels, and read and write the same slots. The C++ preprocessor expands
//! the macros of candle's sources; the test parses the result.

use std::collections::BTreeMap;
use std::ffi::{c_char, CStr};
use std::path::Path;
use std::process::Command;

use candle_metal_kernels::source;

extern "C" {
    fn emulated_kernels() -> *const c_char;
}

/// The roles of a kernel's slots, one letter for each, by the name of the kernel.
type Kernels = BTreeMap<String, String>;

/// The sources whose kernels have stand-ins.
const SOURCES: [&str; 13] = [
    source::AFFINE,
    source::BINARY,
    source::CAST,
    source::FILL,
    source::GEMV,
    source::INDEXING,
    source::MLX_GEMM,
    source::MLX_SORT,
    source::RANDOM,
    source::REDUCE,
    source::SORT,
    source::TERNARY,
    source::UNARY,
];

/// Whether a kernel of these sources has no stand-in because no test uses it.
fn is_unsupported(name: &str) -> bool {
    name.starts_with("rope_")
        || name.contains("_nc1_")
        || name.contains("mbsort")
        || name.starts_with("block_sort")
        || name.starts_with("ncarg_block_sort")
        || name.starts_with("nc_block_sort")
        || name.starts_with("c_block_sort")
}

/// The stand-ins for candle's kernels.
fn stand_ins() -> Kernels {
    // The stand-ins are in the emulated Objective-C library, which is linked for the device.
    metal_on_linux::metal();
    // SAFETY: it returns a C string, valid until the next call, and only this test calls it.
    let text = unsafe { CStr::from_ptr(emulated_kernels()) }.to_str().expect("ASCII");
    let pair = |line: &str| line.split_once(' ').map(|(name, roles)| (name.to_owned(), roles.to_owned()));
    text.lines().map(|line| pair(line).expect("a name and roles")).collect()
}

/// The text after the preprocessor, as Metal's compiler sees it, with single spaces.
fn preprocessed(text: &str, folder: &Path) -> String {
    for line in text.lines().filter(|line| line.starts_with("#include <")) {
        let header = line.trim_start_matches("#include <").trim_end_matches('>');
        std::fs::write(folder.join(header), "").expect("an empty header");
    }
    let file = folder.join("text.cpp");
    std::fs::write(&file, text).expect("the text");
    let output = Command::new("c++")
        .args(["-E", "-P", "-D__METAL_VERSION__=310", "-D__HAVE_BFLOAT__=1", "-I"])
        .arg(folder)
        .arg(&file)
        .output()
        .expect("a C++ compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The text between the first opening bracket and the matching closing bracket.
fn bracketed(text: &str, [open, close]: [char; 2]) -> &str {
    let start = text.find(open).expect("an opening bracket") + 1;
    let mut depth = 1;
    for (i, c) in text[start..].char_indices() {
        depth += i32::from(c == open) - i32::from(c == close);
        if depth == 0 {
            return &text[start..start + i];
        }
    }
    panic!("no closing bracket: {}", &text[..text.len().min(100)]);
}

/// The parameters of a function, split at top-level commas.
fn parameters(list: &str) -> Vec<&str> {
    let mut depth = 0;
    let split = move |c: char| {
        depth += i32::from("(<[".contains(c)) - i32::from(")>]".contains(c));
        depth == 0 && c == ','
    };
    list.split(split).map(str::trim).collect()
}

/// One letter for each slot: see `Code` in the runtime.
fn roles(list: &str) -> String {
    let mut roles = vec![];
    for parameter in parameters(list) {
        let device = parameter.contains("device ");
        if !device && !parameter.contains("constant ") {
            continue;
        }
        let conditional =
            parameter.split_once("function_constant(").map(|(_, rest)| rest.split(')').next().unwrap_or(""));
        let role = match conditional {
            Some("use_out_source") => 'C',
            Some("do_gather" | "gather_bias") => continue,
            _ if device && !parameter.contains("const ") => 'w',
            _ => 'r',
        };
        let explicit = parameter.split_once("buffer(").map(|(_, rest)| rest.split(')').next().unwrap_or(""));
        let slot = explicit.map_or(roles.len(), |n| n.trim().parse().expect("a number"));
        roles.resize(roles.len().max(slot + 1), '.');
        roles[slot] = role;
    }
    roles.into_iter().collect()
}

/// The identifier at the end of `text`.
fn last_identifier(text: &str) -> &str {
    let end = text.trim_end();
    let start = end.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |i| i + 1);
    &end[start..]
}

/// The kernels in a source.
fn kernels(text: &str) -> Kernels {
    // Function templates that are instantiated as kernels later: `[[kernel, ..]] void name(..)`.
    let mut templates = BTreeMap::new();
    for (i, _) in text.match_indices("[[kernel") {
        let after = &text[i + text[i..].find("]]").expect("the attribute's end") + 2..];
        if let Some(rest) = after.strip_prefix(" void ") {
            let head = &rest[..rest.find('(').expect("parameters")];
            if !head.contains('<') {
                templates.insert(last_identifier(head), roles(bracketed(rest, ['(', ')'])));
            }
        }
    }
    let mut kernels = Kernels::new();
    for (i, found) in text.match_indices("kernel void ") {
        let rest = &text[i + found.len()..];
        let head = &rest[..rest.find('(').expect("parameters")];
        kernels.insert(last_identifier(head).to_owned(), roles(bracketed(rest, ['(', ')'])));
    }
    for (i, _) in text.match_indices("host_name(") {
        // The name is a sequence of adjacent string literals.
        let name: String = bracketed(&text[i..], ['(', ')']).split('"').skip(1).step_by(2).collect();
        let head = &text[i + text[i..].find("[[kernel]]").expect("a kernel")..];
        let function = last_identifier(&head[..head.find('<').expect("arguments of a template")]);
        kernels.insert(name, templates[function].clone());
    }
    kernels
}

#[test]
fn stand_ins_have_the_names_and_slots_of_candles_kernels() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sources");
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut originals = Kernels::new();
    for source in SOURCES {
        originals.extend(kernels(&preprocessed(source, &folder)));
    }
    let stand_ins = stand_ins();
    for (name, roles) in &originals {
        let Some(got) = stand_ins.get(name) else {
            assert!(is_unsupported(name), "{name} has no stand-in");
            continue;
        };
        // Without an addition, the bias is not read.
        let expected = if name.ends_with("axpby0") { roles.replacen("rrr", "rr.", 1) } else { roles.clone() };
        assert_eq!(*got, expected, "{name}");
    }
    for name in stand_ins.keys() {
        assert!(originals.contains_key(name), "{name} is in none of candle's sources");
    }
    println!("{} kernels, {} of them with a stand-in", originals.len(), stand_ins.len());
}
