//! Compiles the emulated Objective-C runtime and Metal driver into the library that `objc2` links to.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("set by cargo"));
    let sources = [sources("runtime"), sources("runtime/kernels")].concat();
    let next = std::sync::Mutex::new(sources.iter());
    let jobs: usize = std::env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some(source) = { next.lock().expect("no panic").next() } {
                    compile(source, &object(source, &out), &out);
                }
            });
        }
    });

    let objects = sources.iter().map(|source| object(source, &out));
    let library = out.join("libobjc.so");
    run(Command::new("c++").args(["-shared", "-pthread", "-o"]).arg(&library).args(objects).arg("-ldl"));
    // On platforms other than Apple's, blocks come from libdispatch.
    let dispatch = out.join("libdispatch.so");
    let _ = std::fs::remove_file(&dispatch);
    std::os::unix::fs::symlink("libobjc.so", &dispatch).expect("a link");

    println!("cargo::rerun-if-changed=runtime");
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", out.display());
}

/// The source files in a folder.
fn sources(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the runtime's folder");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "cpp"));
    paths.sort();
    paths
}

/// The object file of a source file.
fn object(source: &Path, out: &Path) -> PathBuf {
    out.join(source.file_stem().expect("a name")).with_extension("o")
}

/// Compiles one source file, with the paths of the repository and of the compiled shaders.
fn compile(source: &Path, object: &Path, out: &Path) {
    let repository = std::env::current_dir().expect("the package's folder").join("../..");
    run(Command::new("c++")
        .args(["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-fPIC", "-pthread", "-Iruntime", "-c"])
        .arg(format!("-DREPOSITORY=\"{}\"", repository.display()))
        .arg(format!("-DSHADERS=\"{}\"", out.join("shaders").display()))
        .arg(source)
        .arg("-o")
        .arg(object));
}

/// Runs a command, which must succeed.
fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}
