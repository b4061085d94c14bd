//! Imports never turn back: each module imports only modules that `lib.rs` lists below it, no files import each other
//! in a circle, and nothing is imported through `lib.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

type Files = BTreeMap<String, String>;

/// The code of every module, without comments and unit tests, by its path: `backend::cpu::rows`.
fn files(folder: &Path, module: &str, found: &mut Files) {
    for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        let name = entry.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned();
        let path = if ["mod", "lib"].contains(&&*name) { module.into() } else { format!("{module}::{name}") };
        if entry.is_dir() {
            files(&entry, &path, found);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&entry).expect("a text");
            let lines = text.lines().map(|line| line.split("//").next().unwrap_or("").to_owned() + "\n");
            let code: String = lines.collect();
            found.insert(path, code.split("#[cfg(test)]\nmod tests").next().unwrap_or("").to_owned());
        }
    }
}

/// The modules that a module names, by `crate::` or `super::`.
fn imports(module: &str, files: &Files) -> BTreeSet<String> {
    let starts = [("crate::", ""), ("super::", module.rsplit_once("::").map_or("", |(parent, _)| parent))];
    let paths =
        starts.iter().flat_map(|(start, base)| files[module].split(start).skip(1).map(move |rest| (base, rest)));
    let paths = paths.flat_map(|(base, rest)| {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != ':' && c != '_').unwrap_or(rest.len());
        let (path, rest) = rest.split_at(end);
        let items = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(items, _)| items);
        items.split(',').map(move |item| format!("{base}::{path}{}", item.trim()))
    });
    let home = |path: String| {
        let ends = path.rmatch_indices("::").map(|(end, _)| path[..end].to_owned());
        std::iter::once(path.clone()).chain(ends).find(|prefix| files.contains_key(prefix)).unwrap_or_default()
    };
    paths.map(home).filter(|home| home != module).collect()
}

#[test]
fn imports_never_turn_back() {
    let mut all = Files::new();
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "", &mut all);
    all.retain(|module, _| !module.contains("testing"));
    let order: Vec<&str> = all[""].lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';')).collect();
    let place = |module: &str| order.iter().position(|top| module.split("::").nth(1) == Some(top));
    let mut rest: BTreeMap<&String, BTreeSet<String>> = all.keys().map(|m| (m, imports(m, &all))).collect();
    rest.remove(&String::new());
    for (module, import) in rest.iter().flat_map(|(module, imports)| imports.iter().map(move |i| (module, i))) {
        assert!(place(import) >= place(module) && !import.is_empty(), "{module} imports {import:?}");
    }
    // What imports nothing that is left goes, until nothing does.
    while let Some(leaf) = rest.iter().find(|(_, i)| i.iter().all(|i| !rest.contains_key(i))).map(|(m, _)| *m) {
        rest.remove(leaf);
    }
    assert!(rest.is_empty(), "circles among {rest:#?}");
}
