#!/usr/bin/env bash
# Tests and benchmarks that need an NVIDIA GPU, in two steps, because the machine with the GPU may have no Rust and no
# network.
#
#   scripts/gpu.sh pack [ARCHIVE]                 needs nvcc: builds tests and benchmarks into one archive (gpu.tar.xz)
#   scripts/gpu.sh run [ARCHIVE] [OUT] [PART..]   needs a GPU: runs these parts, or all, and writes logs and tables to OUT
#
# The parts: tests; scale, more than 2^31 logits; model, a language model; steps, the step benchmark; budgets, the same
# with other workspaces; decoding; sanitizer, tests under compute-sanitizer; profile, the bandwidth of the kernels by ncu.
# `run` looks for the CUDA libraries in PyTorch's wheels and in /usr/local/cuda. No program runs longer than LIMIT
# seconds (120), so one that hangs does not cost the other results.
# With PEERS=benches/peers/step.py, or another Python program with the same flags, `steps` also times it on the same shapes
# (with --implementation set to each of PEER_IMPLEMENTATIONS).
set -euo pipefail
cd "$(dirname "$0")/.."

PROGRAMS=(step_time language_model)
BENCHES=(decoding)
SANITIZED=(options decoding sampled)
SHAPES=(ptb wt2 1b llm)
PARTS=(tests scale model steps budgets decoding sanitizer profile)
action=${1:-}
archive=${2:-gpu.tar.xz}

# The programs that cargo reports as JSON, if they are among the names.
copy_executables() {
    python3 -c '
import json, os, shutil, sys
for line in sys.stdin:
    artifact = json.loads(line)
    if artifact.get("executable") and artifact["target"]["name"] in sys.argv[3:]:
        shutil.copy(artifact["executable"], os.path.join(sys.argv[1], sys.argv[2] + artifact["target"]["name"]))
' "$folder" "$@"
}

# The tests that run on each device, and those of the driver.
device_tests() {
    grep -lE 'on_each_device|new_cuda|devices\(' tests/*.rs | xargs -n 1 basename -s .rs
    echo cuda_on_linux
}

pack() {
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    local tests
    mapfile -t tests < <(device_tests)
    local build=(--locked --features cuda --message-format=json)
    cargo test --release --no-run "${build[@]}" --features distributed "${tests[@]/#/--test=}" | copy_executables test- "${tests[@]}"
    cargo build --release -p lab "${build[@]}" "${PROGRAMS[@]/#/--bin=}" | copy_executables '' "${PROGRAMS[@]}"
    cargo bench --no-run "${build[@]}" "${BENCHES[@]/#/--bench=}" | copy_executables bench- "${BENCHES[@]}"
    strip "$folder"/*
    git rev-parse HEAD >"$folder/commit"
    # The binaries have most of their code in common, so the dictionary must be larger than one binary.
    tar -C "$folder" -c . | xz --lzma2=preset=1,dict=128MiB >"$archive"
    ls -l "$archive"
}

limited() { timeout -k 10 "${LIMIT:-120}" "$@"; }

# result NAME LOG: the line of a test's result.
result() { echo "$1: $(grep '^test result:' "$2" || echo 'did not finish')"; }

run_tests() {
    # One thread first: candle's default stream is another one on each thread.
    for threads in 1 4; do
        for program in "$folder"/test-*; do
            test=${program##*/test-}
            log=$out/test-$test-$threads.log
            limited "$program" --test-threads="$threads" >"$log" 2>&1 || true
            result "$test, --test-threads=$threads" "$log"
        done
    done
}

run_scale() {
    limited "$folder/test-scale" --ignored --test-threads=1 >"$out/scale.log" 2>&1 || true
    result "at scale" "$out/scale.log"
}

run_model() {
    (cd "$folder" && limited ./language_model --device cuda) 2>&1 | tee "$out/language_model.log" | tail -n 8 || true
}

run_steps() {
    : >"$out/steps.jsonl"
    for shape in "${SHAPES[@]}"; do
        for dtype in bf16 f32; do
            limited "$folder/step_time" --shape "$shape" --dtype "$dtype" --device cuda \
                >>"$out/steps.jsonl" 2>>"$out/steps.log" || echo "failed: $shape $dtype"
            for implementation in ${PEERS:+${PEER_IMPLEMENTATIONS:-products compile log-space eager}}; do
                limited python3 "$PEERS" --shape "$shape" --dtype "$dtype" --device cuda --implementation "$implementation" \
                    >>"$out/steps.jsonl" 2>>"$out/steps.log" || echo "failed: $shape $dtype, $implementation"
            done
        done
    done
    python3 - "$out/steps.jsonl" <<'TABLE'
import json, os, sys
print("| shape | dtype | implementation | step | extra MiB | mixture | over products |\n|---|---|---|---|---|---|---|")
for line in open(sys.argv[1]) if os.path.exists(sys.argv[1]) else []:
    if line.startswith("{"):
        row = json.loads(line)
        milliseconds = lambda name: f"{1e3 * row[name]:.2f} ms" if row.get(name) else ""
        extra, ratio = row.get("peak_extra_mib", row.get("extra_mib")), row.get("mixture_over_products")
        name = row.get("implementation") or row["library"].split()[0] + " " + row["impl"]
        print(f"| {row['shape']} | {row.get('dtype', 'f32')} | {name} | {milliseconds('seconds')} "
              f"| {'' if extra is None else round(extra)} | {milliseconds('mixture_seconds')} "
              f"| {'' if ratio is None else round(ratio, 2)} |")
TABLE
}

# From these the default budget follows.
run_budgets() {
    : >"$out/budgets.jsonl"
    for shape in ptb llm; do
        for mib in 8 32 128 256 512 1024; do
            limited "$folder/step_time" --shape "$shape" --dtype bf16 --device cuda --workspace-mib "$mib" \
                >>"$out/budgets.jsonl" 2>>"$out/steps.log" || echo "failed: $shape, $mib MiB"
        done
    done
    python3 -c '
import json, sys
for row in map(json.loads, open(sys.argv[1])):
    print(row["shape"], round(1e3 * row["seconds"], 2), "ms:", row["plan"])' "$out/budgets.jsonl"
}

run_decoding() {
    limited "$folder/bench-decoding" --bench --warm-up-time 0.2 --measurement-time 0.5 \
        '^cuda.*(sample|top_k10|log_probs)' 2>&1 |
        tee "$out/decoding.log" | awk '/^cuda/ { name = $0 } /time:/ { print name, $0 }' || echo "failed, or too slow"
}

run_sanitizer() {
    command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; return; }
    for tool in memcheck racecheck initcheck; do
        for test in "${SANITIZED[@]}"; do
            log=$out/$tool-$test.log
            limited compute-sanitizer --tool "$tool" --error-exitcode 1 "$folder/test-$test" --test-threads=1 \
                >"$log" 2>&1 || echo "failed: $tool, $test"
            echo "$tool, $test: $(grep 'SUMMARY' "$log" || echo 'did not finish')"
        done
    done
}

run_profile() {
    command -v ncu >/dev/null || { echo "no ncu"; return; }
    local kernels='regex:^(row_|position_|mixture_log_probs|top_k)'
    local metrics=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum
    metrics+=,gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed
    for shape in ptb llm; do
        limited ncu --csv --log-file "$out/profile-$shape.csv" --kernel-name "$kernels" --metrics "$metrics" \
            --launch-count 40 "$folder/step_time" --shape "$shape" --dtype bf16 --device cuda --reps 1 --warmup 0 \
            >"$out/profile-$shape.log" 2>&1 || echo "failed: $shape"
        echo "$shape: $(grep -c 'dram__bytes_read' "$out/profile-$shape.csv") launches"
    done
}

run() {
    out=$1
    shift
    mkdir -p "$out"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$archive" "$folder"
    local wheels part
    wheels=$(python3 -c '
import importlib.util
spec = importlib.util.find_spec("nvidia")
print(":".join(p + "/cu13/lib" for p in spec.submodule_search_locations) if spec else "")')
    export LD_LIBRARY_PATH="$wheels:${LD_LIBRARY_PATH:-}:/usr/local/cuda/lib64"
    {
        echo "commit $(cat "$folder/commit")"
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no GPU"
    } | tee "$out/machine.txt"
    local failures=()
    for part in "$@"; do
        echo "== $part"
        "run_$part" | tee "$out/$part.txt" || failures+=("$part")
        ! grep -q 'test result: F\|did not finish\|^failed' "$out/$part.txt" || failures+=("$part")
    done
    # The results are complete, so that a failure shows only now.
    ((!${#failures[@]})) || { echo "failed: ${failures[*]}"; exit 1; }
}

case $action in
pack) pack ;;
run)
    parts=("${@:4}")
    ((${#parts[@]})) || parts=("${PARTS[@]}")
    for part in "${parts[@]}"; do
        [[ " ${PARTS[*]} " == *" $part "* ]] || { echo "$part: no part; one of ${PARTS[*]}"; exit 2; }
    done
    run "${3:-gpu-results}" "${parts[@]}"
    ;;
*) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
