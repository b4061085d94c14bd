#!/usr/bin/env bash
# What a training step of `step_time` asks of CUDA, by the emulated driver, which counts and computes nothing: kernels,
# products, bytes allocated, cleared and copied. Then each kernel and product with its count.
#
#     scripts/cuda-counts.sh [SHAPE [ARGUMENT OF step_time..]]     ptb, in bf16, by default
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

shape=${1:-ptb}
calls=$(mktemp)
trap 'rm -f "$calls" "$calls.step"' EXIT
MOS_HEAD_CUDA_COUNT=$calls PROGRAM=step_time scripts/check-cuda-on-linux.sh --shape "$shape" --dtype bf16 --device cuda \
    --warmup 1 --reps 2 --step-only "${@:2}" >/dev/null

# The third step is between the third pair of waits that has products.
awk '/^wait/ { if (has_product && ++steps == 3) printf "%s", lines; lines = ""; has_product = 0; next }
     { lines = lines $0 "\n" } /^product/ { has_product = 1 }' "$calls" >"$calls.step"
awk -v shape="$shape" '{ count[$1]++; bytes[$1] += $2 } END {
    printf "%s: %d kernels, %d products; %d allocations, %.1f MB; cleared %.1f MB, copied %.1f MB; %d uploads, %d downloads\n",
        shape, count["kernel"], count["product"], count["allocate"], bytes["allocate"] / 1e6, bytes["set"] / 1e6,
        bytes["copy"] / 1e6, count["upload"], count["download"] }' "$calls.step"
awk '/^kernel/ { print $1, $2 } /^product/' "$calls.step" | sort | uniq -c | sort -rn
