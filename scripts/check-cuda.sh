#!/usr/bin/env bash
# Type-checks and lints the features `cuda` and `nccl` on a machine without CUDA: a stand-in for nvcc compiles the kernels for the
# host. Nothing is linked or run. Arguments are passed to clippy after `--`.
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

toolkit=$PWD/emulated/cuda
export NVCC=$toolkit/bin/nvcc PATH=$toolkit/bin:$PATH CUDA_COMPUTE_CAP="${CUDA_COMPUTE_CAP:-90}"
unset CUDA_HOME CUDA_PATH CUDA_ROOT
# A separate target folder, so that these kernels are never used as compiled ones.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/check-cuda"
cargo clippy --locked --workspace --all-targets --features mos-head/nccl,lab/cuda -- "$@"
