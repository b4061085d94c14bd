#!/usr/bin/env bash
# Type-checks and lints the feature `cuda` on a machine without CUDA: a stand-in for nvcc creates empty files instead of
# compiled ones. Nothing is linked or run. Arguments are passed to clippy after `--`.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/nvcc" <<'NVCC'
#!/usr/bin/env bash
if [[ " $* " == *" --version "* ]]; then
    # Build scripts read the version from the fourth line.
    printf 'a stand-in\nfor\nnvcc\nCuda compilation tools, release 13.0, V13.0.88\n'
    exit
fi
while (($#)); do
    case $1 in
        -o) : >"$2"; exit ;;
        --output-directory) folder=$2; shift ;;
        *.cu) source=$1 ;;
    esac
    shift
done
: >"$folder/$(basename "$source" .cu).ptx"
NVCC
chmod +x "$folder/nvcc"

export NVCC="$folder/nvcc" PATH="$folder:$PATH" CUDA_COMPUTE_CAP="${CUDA_COMPUTE_CAP:-90}"
unset CUDA_HOME CUDA_PATH CUDA_ROOT
# A separate target folder, so that the empty files are never used as compiled kernels.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/check-cuda"
cargo clippy --locked --all-targets --features cuda -- "$@"
