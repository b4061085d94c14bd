//! Compiles the CUDA kernels if the feature `cuda` is on: machine code for compute capabilities 8.0 and 9.0, and PTX
//! for later ones.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/backend/cuda");
    println!("cargo::rerun-if-changed=src/backend/gpu/kernels");
    println!("cargo::rerun-if-env-changed=NVCC");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    #[cfg(feature = "cuda")]
    if let Err(error) = compile() {
        println!("cargo::error=the CUDA kernels were not compiled: {error}");
    }
}

/// Compiles the kernels with nvcc.
#[cfg(feature = "cuda")]
fn compile() -> Result<(), Box<dyn std::error::Error>> {
    use std::path::PathBuf;
    use std::process::Command;

    // docs.rs has no CUDA and needs no kernels.
    let out = PathBuf::from(std::env::var("OUT_DIR")?).join("mixture.fatbin");
    if std::env::var_os("DOCS_RS").is_some() {
        return Ok(std::fs::write(out, [])?);
    }
    let nvcc = match (std::env::var_os("NVCC"), std::env::var_os("CUDA_HOME")) {
        (Some(nvcc), _) => PathBuf::from(nvcc),
        (None, Some(home)) => PathBuf::from(home).join("bin/nvcc"),
        (None, None) => PathBuf::from("nvcc"),
    };
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-std=c++17", "-O3", "-lineinfo"]);
    command.args(["-gencode=arch=compute_80,code=[sm_80,compute_80]", "-gencode=arch=compute_90,code=sm_90"]);
    command.arg("-o").arg(&out).arg("src/backend/cuda/mixture.cu");
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{command:?}\n{}", String::from_utf8_lossy(&output.stderr)).into())
    }
}
