//! The stand-ins for candle's kernels are those that candle's texts have, under the same names, with buffers in the same
//! slots that are read and written alike. The C++ preprocessor expands the texts' macros; what it leaves is read here.

use std::collections::BTreeMap;
use std::ffi::{c_char, CStr};
use std::path::Path;
use std::process::Command;

use candle_metal_kernels::source;

extern "C" {
    fn make_believe_kernels() -> *const c_char;
}

/// One letter for each slot, by the names of kernels.
type Kernels = BTreeMap<String, String>;

/// The texts that have stand-ins.
const TEXTS: [&str; 13] = [
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

/// Kernels of these texts that have none: what they do, nobody here asks for.
fn left_out(name: &str) -> bool {
    name.starts_with("rope_")
        || name.contains("_nc1_")
        || name.contains("mbsort")
        || name.starts_with("block_sort")
        || name.starts_with("ncarg_block_sort")
        || name.starts_with("nc_block_sort")
        || name.starts_with("c_block_sort")
}

fn stand_ins() -> Kernels {
    // The stand-ins come with Objective-C, which a device needs.
    metal_on_linux::metal();
    // SAFETY: It gives a C string that nobody else asks for.
    let text = unsafe { CStr::from_ptr(make_believe_kernels()) }.to_str().expect("ASCII");
    let pair = |line: &str| line.split_once(' ').map(|(name, roles)| (name.to_owned(), roles.to_owned()));
    text.lines().map(|line| pair(line).expect("a name and roles")).collect()
}

/// The text as Metal's compiler sees it behind the preprocessor, with single spaces.
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

/// What stands between the bracket that `text` begins with, after what is no bracket, and the one that closes it.
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

/// The parameters of a function, split at the commas between them.
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

fn kernels(text: &str) -> Kernels {
    // What the functions take that are made into kernels later: `[[kernel, ..]] void name(..)`.
    let mut takes = BTreeMap::new();
    for (i, _) in text.match_indices("[[kernel") {
        let after = &text[i + text[i..].find("]]").expect("the attribute's end") + 2..];
        if let Some(rest) = after.strip_prefix(" void ") {
            let head = &rest[..rest.find('(').expect("parameters")];
            if !head.contains('<') {
                takes.insert(last_identifier(head), roles(bracketed(rest, ['(', ')'])));
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
        // Its pieces are strings one after the other.
        let name: String = bracketed(&text[i..], ['(', ')']).split('"').skip(1).step_by(2).collect();
        let head = &text[i + text[i..].find("[[kernel]]").expect("a kernel")..];
        let function = last_identifier(&head[..head.find('<').expect("arguments of a template")]);
        kernels.insert(name, takes[function].clone());
    }
    kernels
}

#[test]
fn stand_ins_are_what_the_texts_have() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("texts");
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut texts = Kernels::new();
    for text in TEXTS {
        texts.extend(kernels(&preprocessed(text, &folder)));
    }
    let here = stand_ins();
    for (name, roles) in &texts {
        let Some(ours) = here.get(name) else {
            assert!(left_out(name), "{name} has no stand-in");
            continue;
        };
        // Without a sum, nobody reads what would be added.
        let wanted = if name.ends_with("axpby0") { roles.replacen("rrr", "rr.", 1) } else { roles.clone() };
        assert_eq!(*ours, wanted, "{name}");
    }
    for name in here.keys() {
        assert!(texts.contains_key(name), "{name} is in none of candle's texts");
    }
    println!("{} kernels, {} of them with a stand-in", texts.len(), here.len());
}
