//! Imports never turn back: each module imports only modules that `lib.rs` lists below it, no files import each other
//! in a circle, no two modules import each other's layer, and nothing is imported through `lib.rs`. Run it with
//! `-- --nocapture` to see the folders and children that would import each other if re-exports counted.

#[path = "common/needs.rs"]
mod needs;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// How many entries `src` may have, `lib.rs` among them.
const TOP_LEVEL: usize = 15;

type Files = BTreeMap<String, String>;
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The code of every module, without comments and unit tests, by its path: `::backend::cpu::rows`.
fn files(folder: &Path, module: &str, found: &mut Files) {
    for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        let name = entry.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned();
        let is_root = ["mod", "lib", "main"].contains(&&*name);
        let path = if is_root { module.into() } else { format!("{module}::{name}") };
        if entry.is_dir() {
            files(&entry, &path, found);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&entry).expect("a text");
            let lines = text.lines().map(|line| line.split("//").next().unwrap_or("").to_owned() + "\n");
            let code: String = lines.collect();
            found.insert(path, without_tests(&code));
        }
    }
}

/// A file's code up to its unit tests, without what only tests import.
fn without_tests(code: &str) -> String {
    let mut parts = code.split("#[cfg(test)]\n");
    let mut text = parts.next().unwrap_or("").to_owned();
    for part in parts {
        let (line, rest) = part.split_once('\n').unwrap_or((part, ""));
        if line.contains("mod tests {") {
            break;
        }
        text += if line.ends_with(';') { rest } else { part };
    }
    text
}

/// The modules that a module names, by `crate::`, by `super::`, or its children by their own names.
fn imports(module: &str, files: &Files) -> BTreeSet<String> {
    // Neither a visibility nor what the modules inside a file begin with, `super::*`, is an import.
    let code = files[module].replace("(in crate::", "(").replace("super::*", "");
    let parent = |path: &str| path.rsplit_once("::").map_or(String::new(), |(parent, _)| parent.to_owned());
    let mut starts = vec![("crate::".to_owned(), String::new()), ("super::".to_owned(), parent(module))];
    starts.push(("super::super::".to_owned(), parent(&parent(module))));
    let children = files.keys().filter_map(|path| path.strip_prefix(module)?.strip_prefix("::"));
    starts.extend(children.map(|child| (format!("{child}::"), format!("{module}::{child}"))));
    let is_in_path = |c: char| c.is_alphanumeric() || c == ':' || c == '_';
    let mut paths = Vec::new();
    for (start, base) in starts {
        for (at, _) in code.match_indices(&start).filter(|(at, _)| !code[..*at].ends_with(is_in_path)) {
            let rest = &code[at + start.len()..];
            if rest.starts_with("super::") {
                continue;
            }
            let (path, rest) = rest.split_at(rest.find(|c| !is_in_path(c)).unwrap_or(rest.len()));
            let items = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(items, _)| items);
            let items = items.trim().trim_end_matches(',').split(',');
            paths.extend(items.map(|item| format!("{base}::{path}{}", item.trim())));
        }
    }
    let home = |path: String| {
        let ends = path.rmatch_indices("::").map(|(end, _)| path[..end].to_owned());
        std::iter::once(path.clone()).chain(ends).find(|prefix| files.contains_key(prefix)).unwrap_or_default()
    };
    paths.into_iter().map(home).filter(|home| home != module).collect()
}

fn all_imports(files: &Files) -> Imports {
    files.keys().filter(|module| !module.is_empty()).map(|module| (module.clone(), imports(module, files))).collect()
}

/// The two modules in which an import's ends lie where their paths part: `::cpu::one_pass` and `::cpu::two_pass` if
/// `::cpu::one_pass::product` imports `::cpu::two_pass::rows`; a folder and its child if one end is the folder's
/// `mod.rs`.
fn layers<'a>(module: &'a str, import: &'a str) -> (&'a str, &'a str) {
    let same = module.split("::").zip(import.split("::")).take_while(|(a, b)| a == b).count();
    let layer = |path: &'a str| path.match_indices("::").nth(same).map_or(path, |(end, _)| &path[..end]);
    (layer(module), layer(import))
}

/// The pairs of modules, folders or files at any depth, of which each imports something of the other. A folder and its
/// child are such a pair if `mod.rs` uses the child, which uses items of `mod.rs`: these belong in a file of their own.
fn pairs(imports: &Imports) -> BTreeSet<(&str, &str)> {
    let edges = imports.iter().flat_map(|(module, imports)| imports.iter().map(|import| layers(module, import)));
    let edges: BTreeSet<_> = edges.collect();
    edges.iter().copied().filter(|&(a, b)| a < b && edges.contains(&(b, a))).collect()
}

/// A `mod.rs` may define what its children import, and re-export them: that gives them shorter paths, and no use.
fn without_re_exports(files: &Files) -> Files {
    let own = |line: &&str| !(line.trim_start().starts_with("pub") && line.contains(" use "));
    let code = |code: &String| code.lines().filter(own).map(|line| line.to_owned() + "\n").collect();
    files.iter().map(|(module, text)| (module.clone(), code(text))).collect()
}

#[test]
fn imports_never_turn_back() {
    let mut all = Files::new();
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "", &mut all);
    // What only tests have.
    all.retain(|module, _| !module.contains("testing") && !module.ends_with("language_rules"));
    let order = order(&all);
    assert!(order.len() < TOP_LEVEL, "{} entries in src", order.len());
    for (folder, child) in pairs(&all_imports(&all)) {
        println!("{folder} and {child} import each other's layer, if re-exports count");
    }
    let imports = all_imports(&without_re_exports(&all));
    let from_root = imports.iter().find(|(_, imports)| imports.contains(""));
    assert!(from_root.is_none(), "an import through lib.rs: {from_root:?}");
    assert_order(&imports, &order);
    assert_no_circles(imports);
}

/// The modules that `lib.rs` lists.
fn order(files: &Files) -> Vec<&str> {
    let module = |line| str::strip_prefix(line, "pub ").unwrap_or(line).strip_prefix("mod ")?.strip_suffix(';');
    files[""].lines().filter_map(module).collect()
}

/// Each module imports only modules that are listed below it; the root is below all.
fn assert_order(imports: &Imports, order: &[&str]) {
    let place = |module: &str| order.iter().position(|top| module.split("::").nth(1) == Some(top));
    for (module, import) in imports.iter().flat_map(|(module, imports)| imports.iter().map(move |i| (module, i))) {
        assert!(import.is_empty() || place(import) >= place(module), "{module} imports {import}");
    }
}

fn assert_no_circles(mut rest: Imports) {
    let found = pairs(&rest);
    assert!(found.is_empty(), "modules that import each other's layer: {found:#?}");
    // What imports nothing that is left goes, until nothing does.
    while let Some(leaf) = rest.iter().find(|(_, i)| i.iter().all(|i| !rest.contains_key(i))).map(|(m, _)| m.clone()) {
        rest.remove(&leaf);
    }
    assert!(rest.is_empty(), "circles among {rest:#?}");
}

/// The lab's library has an order as this crate has. Its root, which defines what all use, uses none of its folders;
/// the root of a program uses its files, and they use nothing of it. No file imports through the `mod.rs` of its own
/// folder, whose re-exports would hide a circle.
#[test]
fn the_labs_imports_never_turn_back() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if is_published(root) {
        return;
    }
    let read = |folder: &Path| {
        let mut found = Files::new();
        files(folder, "", &mut found);
        found.retain(|module, _| !module.ends_with("::tests") && !module.starts_with("::bin::"));
        let found = without_re_exports(&found);
        let imports: Imports = all_imports(&found).into_iter().chain([(String::new(), imports("", &found))]).collect();
        for (module, import) in imports.iter().flat_map(|(module, imports)| imports.iter().map(move |i| (module, i))) {
            let is_own = !import.is_empty() && module.starts_with(&format!("{import}::"));
            assert!(!is_own, "{module} imports through the mod.rs of its folder");
        }
        (found, imports)
    };
    let (library, imports) = read(&root.join("lab/src"));
    let order = order(&library);
    assert_eq!(order.len(), 5, "{order:?}");
    assert_order(&imports, &order);
    assert_no_circles(imports);
    let programs = std::fs::read_dir(root.join("lab/src/bin")).expect("a folder").map(|entry| entry.expect("an entry"));
    let programs: Vec<_> = programs.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    assert!(programs.len() > 8, "{programs:?}");
    programs.iter().for_each(|program| assert_no_circles(read(program).1));
}

#[test]
fn pairs_are_found_at_any_depth() {
    let files = |texts: &[(&str, &str)]| -> Files {
        texts.iter().map(|(module, code)| (format!("::{module}"), (*code).to_owned())).collect()
    };
    // No two files import each other, yet the folders `cpu::one` and `cpu::two` do; so do `head` and its child
    // `config`.
    let made_up = files(&[
        ("cpu", "mod one;\nuse two::rows;"),
        ("cpu::one::layout", "use crate::plan::{Plan, Size};"),
        ("cpu::one::product", "use crate::cpu::two::{\n    rows,\n};"),
        ("cpu::two", "pub(super) mod rows;"),
        ("cpu::two::rows", "pub(in crate::cpu) fn rows() {}"),
        ("cpu::two::chunks", "fn panel() -> super::super::one::layout::Panel {}"),
        ("head", "mod config;\npub use config::Config;"),
        ("head::config", "use super::Head;"),
        ("plan", "mod tests { use super::*; }"),
    ]);
    let found = all_imports(&made_up);
    assert_eq!(Vec::from_iter(&found["::cpu"]), ["::cpu::two::rows"]);
    assert_eq!(Vec::from_iter(&found["::cpu::one::layout"]), ["::plan"]);
    assert_eq!(Vec::from_iter(pairs(&found)), [("::cpu::one", "::cpu::two"), ("::head", "::head::config")]);
    assert_eq!(Vec::from_iter(pairs(&all_imports(&without_re_exports(&made_up)))), [("::cpu::one", "::cpu::two")]);
}

/// All files and folders of the repository, by their paths.
fn paths(root: &Path, folder: &str, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(root.join(folder)).expect("a folder").map(|entry| entry.expect("an entry")) {
        let path = format!("{folder}{}", entry.file_name().to_string_lossy());
        let is_ours = !path.ends_with("target") && path != ".git";
        if is_ours && entry.file_type().expect("a type").is_dir() {
            found.push(format!("/{path}/"));
            paths(root, &format!("{path}/"), found);
        } else if is_ours {
            found.push(format!("/{path}"));
        }
    }
}

/// Whether this is the published crate, which says that its documents are not compared: they name the lab and scripts,
/// which it lacks. Cargo puts the manifest that it was made from into each crate that it packs.
fn is_published(root: &Path) -> bool {
    let is_published = root.join("Cargo.toml.orig").exists();
    if is_published {
        needs::is_skipped("the files that the documents name", "the published crate has no lab");
    }
    is_published
}

#[test]
fn every_file_that_the_documents_name_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if is_published(root) {
        return;
    }
    let mut found = vec![];
    paths(root, "", &mut found);
    for document in ["docs/ARCHITECTURE.md", "tests/README.md"] {
        let text = std::fs::read_to_string(root.join(document)).expect("a text");
        let names: BTreeSet<_> = text.split('`').skip(1).step_by(2).filter(|name| is_file(name)).collect();
        assert!(names.len() > 20, "{document} names {names:?}");
        for name in names {
            assert!(found.iter().any(|path| path.ends_with(&format!("/{name}"))), "{document}: there is no {name}");
        }
    }
}

#[test]
fn every_file_that_the_documents_link_to_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if is_published(root) {
        return;
    }
    let mut found = vec![];
    paths(root, "", &mut found);
    let documents = found.iter().filter(|path| path.ends_with(".md"));
    let mut links = 0;
    for document in documents {
        let path = root.join(&document[1..]);
        let text = std::fs::read_to_string(&path).expect("a text");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            if !link.is_empty() && !link.contains("://") {
                links += 1;
                assert!(path.parent().expect("a folder").join(link).exists(), "{document}: there is no {link}");
            }
        }
    }
    assert!(links > 50, "{links} links");
}

/// Whether a name between backquotes is that of a file or a folder.
fn is_file(name: &str) -> bool {
    let is_in_path = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let endings = ["/", ".rs", ".h", ".cu", ".metal", ".md", ".sh"];
    name.chars().all(is_in_path) && endings.iter().any(|ending| name.ends_with(ending))
}

#[test]
fn the_contract_of_a_device_is_documented_whole() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect("a text");
    let (contract, document) = (read("src/backend/mod.rs"), read("docs/ARCHITECTURE.md"));
    let operations = contract.split("\npub(crate) fn ").skip(1);
    let names: Vec<_> = operations.map(|operation| operation.split(['(', '<']).next().expect("a name")).collect();
    assert!(names.contains(&"plan") && names.contains(&"visit"), "{names:?}");
    let (_, section) = document.split_once("## The contract of a device").expect("a section");
    let (section, _) = section.split_once("\n## ").expect("another one");
    for name in names {
        assert!(section.contains(&format!("`{name}`")), "docs/ARCHITECTURE.md does not name {name}");
    }
}
