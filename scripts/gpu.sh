#!/usr/bin/env bash
# Tests and benchmarks that need an NVIDIA GPU, in two steps, because the machine with the GPU may have no Rust and no
# network.
#
#   scripts/gpu.sh pack [ARCHIVE]        needs nvcc: builds tests and benchmarks into one archive (gpu.tar.xz)
#   scripts/gpu.sh run [ARCHIVE] [OUT]   needs a GPU: tests, compute-sanitizer if installed, the step benchmark, a language model
#
# `run` looks for the CUDA libraries in PyTorch's wheels and in /usr/local/cuda. It writes logs and table.txt to OUT.
# With PEERS=FILE it also times FILE, a Python program with the same flags, on the same shapes (with --impl set to each
# of PEER_IMPLEMENTATIONS).
set -euo pipefail
cd "$(dirname "$0")/.."

TESTS=(api beam_search char_cnn cuda_on_linux custom_head decoder decoding dropout edges errors factorised factorised_decoding golden gradients
    laws options sampled save_load scale training)
SANITIZED=(options decoding sampled)
SHAPES=(ptb wt2 1b llm)
action=${1:-}
archive=${2:-gpu.tar.xz}

pack() {
    local tests=()
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    for test in "${TESTS[@]}"; do tests+=(--test "$test"); done
    cargo test --locked --release --features cuda --no-run --message-format=json "${tests[@]}" |
        python3 -c '
import json, os, shutil, sys
for line in sys.stdin:
    artifact = json.loads(line)
    if artifact.get("executable") and artifact["target"]["name"] in sys.argv[2:]:
        shutil.copy(artifact["executable"], os.path.join(sys.argv[1], artifact["target"]["name"]))
' "$folder" "${TESTS[@]}"
    for example in step_time lstm_lm; do
        cargo build --locked --release --features cuda --example "$example"
        cp "${CARGO_TARGET_DIR:-target}/release/examples/$example" "$folder"
    done
    strip "$folder"/*
    git rev-parse HEAD >"$folder/commit"
    # The binaries have most of their code in common, so the dictionary must be larger than one binary.
    tar -C "$folder" -c . | xz --lzma2=preset=1,dict=128MiB >"$archive"
    ls -l "$archive"
}

run() {
    local out=${1:-gpu-results} wheels
    mkdir -p "$out"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$archive" "$folder"
    wheels=$(python3 -c '
import importlib.util
spec = importlib.util.find_spec("nvidia")
print(":".join(p + "/cu13/lib" for p in spec.submodule_search_locations) if spec else "")')
    export LD_LIBRARY_PATH="$wheels:${LD_LIBRARY_PATH:-}:/usr/local/cuda/lib64"
    {
        echo "commit $(cat "$folder/commit")"
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no GPU"
    } | tee "$out/machine.txt"

    # One thread first: candle's default stream is another one on each thread.
    for threads in 1 4; do
        for test in "${TESTS[@]}"; do
            log=$out/test-$test-$threads.log
            "$folder/$test" --test-threads="$threads" >"$log" 2>&1 || true
            echo "$test, $threads threads: $(grep '^test result:' "$log" || echo 'did not finish')"
        done
    done | tee "$out/tests.txt"

    "$folder/scale" --ignored --test-threads=1 >"$out/scale.log" 2>&1 || true
    echo "at scale: $(grep '^test result:' "$out/scale.log" || echo 'did not finish')" | tee -a "$out/tests.txt"

    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck initcheck; do
            for test in "${SANITIZED[@]}"; do
                log=$out/$tool-$test.log
                compute-sanitizer --tool "$tool" "$folder/$test" --test-threads=1 >"$log" 2>&1 || true
                echo "$tool, $test: $(tail -n 1 "$log")"
            done
        done | tee "$out/sanitizer.txt"
    fi

    for shape in "${SHAPES[@]}"; do
        for dtype in bf16 f32; do
            for filter in 0 0.001; do
                "$folder/step_time" --shape "$shape" --dtype "$dtype" --device cuda --filter "$filter" \
                    >>"$out/steps.jsonl" 2>>"$out/steps.log" || true
            done
            for implementation in ${PEERS:+${PEER_IMPLEMENTATIONS:-gemm3 compile stable eager}}; do
                timeout 120 python3 "$PEERS" --shape "$shape" --dtype "$dtype" --device cuda --impl "$implementation" \
                    >>"$out/steps.jsonl" 2>>"$out/steps.log" || true
            done
        done
    done
    # From these the default budget follows.
    for shape in ptb llm; do
        for mib in 8 32 128 256 512 1024; do
            "$folder/step_time" --shape "$shape" --dtype bf16 --device cuda --workspace-mib "$mib" \
                >>"$out/budgets.jsonl" 2>>"$out/steps.log" || true
        done
    done
    (cd "$folder" && timeout 120 ./lstm_lm --device cuda) >"$out/lstm_lm.log" 2>&1 || true
    python3 - "$out/steps.jsonl" <<'TABLE' | tee "$out/table.txt"
import json, os, sys
print("| shape | dtype | implementation | step | extra MiB | mixture |\n|---|---|---|---|---|---|")
for line in open(sys.argv[1]) if os.path.exists(sys.argv[1]) else []:
    if line.startswith("{"):
        row = json.loads(line)
        milliseconds = lambda name: f"{1e3 * row[name]:.2f} ms" if row.get(name) else ""
        extra = row.get("peak_extra_mib")
        name = row["library"].split()[0] + " " + row["impl"] + (f", filter {row['filter']}" if row.get("filter") else "")
        print(f"| {row['shape']} | {row['dtype']} | {name} | {milliseconds('seconds')} "
              f"| {'' if extra is None else round(extra)} | {milliseconds('mixture_seconds')} |")
TABLE
    # The results are complete, so that a failed test shows only now.
    ! grep -v 'test result: ok' "$out/tests.txt"
}

case $action in
pack) pack ;;
run) run "${3:-gpu-results}" ;;
*) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
