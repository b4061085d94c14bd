#!/usr/bin/env bash
# Runs all tests with the features `cuda` and `nccl` on an emulated driver (emulated/cuda), which needs a Rust
# toolchain and a C++ compiler, but neither CUDA nor a GPU. Arguments are those of `cargo test`, such as `--test laws`.
# With EXAMPLE=NAME or PROGRAM=NAME it runs that example, or that program of the lab, instead, with the arguments.
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/cuda-on-linux"
toolkit=$PWD/emulated/cuda
libraries=$(realpath -m "$CARGO_TARGET_DIR")/toolkit/lib64
mkdir -p "$libraries"
# One library has the functions of all that candle links to.
"${CXX:-c++}" -std=c++17 -O2 -g1 -Wall -Wextra -shared -fPIC -pthread "$toolkit"/driver/*.cpp -o "$libraries/libcuda.so.new" -ldl
mv -f "$libraries/libcuda.so.new" "$libraries/libcuda.so"
for name in cublas cublasLt cudart curand nccl nvrtc; do ln -sf libcuda.so "$libraries/lib$name.so"; done
ln -sfn "$toolkit/bin" "$libraries/../bin"

# Cargo does not know what the compiler consists of.
sources=$({
    "${CXX:-c++}" --version
    cat "$toolkit/bin/nvcc" scripts/nvcc-without-quantised tests/gpu_host/{numbers.h,cuda/*.h,cuda/cuda/std/*}
} | sha256sum)
if [[ $(cat "$libraries/../sources" 2>/dev/null) != "$sources" ]]; then
    cargo clean --quiet --release -p candle-kernels -p mos-head
    echo "$sources" >"$libraries/../sources"
fi

export CUDA_HOME=${libraries%/lib64} NVCC=$toolkit/bin/nvcc PATH=$toolkit/bin:$PATH CUDA_COMPUTE_CAP=80
unset CUDA_PATH CUDA_ROOT
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
if [[ -n ${EXAMPLE:-} ]]; then
    exec cargo run --locked --release --features cuda --example "$EXAMPLE" -- "$@"
elif [[ -n ${PROGRAM:-} ]]; then
    exec cargo run --locked --release --features cuda -p lab --bin "$PROGRAM" -- "$@"
fi
# The emulated driver must open: else the tests would run on the CPU alone.
export MOS_HEAD_NEED_GPU=1 MOS_HEAD_NEED_EMULATED_DRIVER=1
exec cargo test --locked --release --features nccl "$@"
