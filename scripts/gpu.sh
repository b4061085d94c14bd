#!/usr/bin/env bash
# Tests and benchmarks that need an NVIDIA GPU, in two steps, because the machine with the GPU may have no Rust and no
# network, and may be there for minutes only.
#
#   scripts/gpu.sh pack [ARCHIVE]                    needs nvcc: builds tests and programs into one archive (gpu.tar.xz)
#   scripts/gpu.sh run ARCHIVE OUT SECONDS [PART..]  needs a GPU: runs these parts, or all, and ends within SECONDS
#   scripts/gpu.sh record OUT                        writes what a run measured to benches/results/gpu.jsonl
#
# The parts, in the order of their worth: smoke, one small step; exact, values against f64; bf16, the step benchmark; tests,
# all others; peers, PyTorch on the same shapes; f32; chunks, other sizes of them; profile, the time of each kernel by
# ncu; sanitizer, tests under compute-sanitizer; benches, those of criterion; model, a language model. A smoke test that
# fails ends the run.
#
# `model` takes MODEL_FLAGS and MODEL_SECONDS, `benches` BENCH_SECONDS for each of two. Each result is written as soon as it
# is known, into few files: results.txt, steps.jsonl, peers.jsonl, profile.txt, ncu-*.csv, logs.tgz. CUDA's libraries are
# those of PyTorch's wheels, or of /usr/local/cuda; the peers need PyTorch.
set -euo pipefail
cd "$(dirname "$0")/.."

PROGRAMS=(step_time language_model)
BENCHES=(heads decoding)
SHAPES=(ptb llm wt2 1b)
EXACT=(golden gradients cuda_on_linux)
PARTS=(smoke exact bf16 tests peers f32 chunks profile sanitizer benches model)

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
    echo scale
}

pack() {
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    local tests
    mapfile -t tests < <(device_tests)
    export MOS_HEAD_NVCC=${MOS_HEAD_NVCC:-${NVCC:-$(command -v nvcc)}} NVCC=$PWD/scripts/nvcc-without-quantised
    export CARGO_PROFILE_RELEASE_STRIP=true CARGO_PROFILE_BENCH_STRIP=true
    local build=(--locked --features cuda --message-format=json-render-diagnostics)
    cargo build --release -p lab "${build[@]}" "${PROGRAMS[@]/#/--bin=}" | copy_executables '' "${PROGRAMS[@]}"
    cargo test --release --no-run "${build[@]}" --features distributed "${tests[@]/#/--test=}" | copy_executables test- "${tests[@]}"
    cargo bench --no-run "${build[@]}" "${BENCHES[@]/#/--bench=}" | copy_executables bench- "${BENCHES[@]}"
    git describe --always --dirty --abbrev=12 --exclude='*' >"$folder/commit"
    # The binaries have most of their code in common, so the dictionary must be larger than one binary.
    tar -C "$folder" -c . | xz -T2 --block-size=4GiB --lzma2=preset=1,dict=256MiB >"$1"
    ls -l "$1"
}

# say TEXT: a line of the results, with the seconds since the start.
say() { printf '%4ds  %s\n' $SECONDS "$*" | tee -a "$out/results.txt"; }
# Lines of standard input that belong to the last `say`.
details() { sed 's/^/       /' | tee -a "$out/results.txt"; }
seconds_left() { echo $((end - SECONDS - 8)); }

# limited SECONDS COMMAND..: as long as that, and as the whole run, may take.
limited() {
    local seconds=$1 left
    shift
    left=$(seconds_left)
    ((seconds <= left)) || seconds=$left
    ((seconds > 2)) || { say "out of time: ${1##*/}" >&2; return 1; }
    timeout -k 3 "$seconds" "$@"
}

keep_logs() { tar -C "$logs" -czf "$folder/logs.tgz" . && cp "$folder/logs.tgz" "$out"; }

run_smoke() {
    say "commit $(cat "$folder/commit"), $(nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit \
        --format=csv,noheader 2>&1 | head -n 1)"
    ldd "$folder/step_time" | grep 'not found' | details || true
    # In the second process the driver has compiled candle's kernels before.
    for process in first second; do
        local log=$logs/smoke-$process.json begin=$EPOCHREALTIME
        if limited 90 "$folder/step_time" --shape small --dtype bf16 --device cuda --reps 3 >"$log" 2>"$logs/smoke.log" &&
            python3 -c '
import json, math, sys
loss = json.load(open(sys.argv[1]))["loss"]
# 2000 ids whose probabilities are nearly equal
sys.exit(not abs(loss - math.log(2000)) < 0.3)' "$log"; then
            say "smoke, $process process: $(python3 -c "print(round($EPOCHREALTIME - $begin, 1))") s, $(grep -o '"loss":[^,]*' "$log")"
        else
            say "the smoke test failed: $(tail -n 3 "$logs/smoke.log" | tr '\n' ' ') $(head -c 600 "$log")"
            keep_logs
            exit 3
        fi
    done
}

# one_test TEST SECONDS THREADS [FLAG..]: runs a test until `deadline` at most, and prints its result and what failed.
one_test() {
    local test=$1 seconds=$2 threads=$3 log=$logs/test-$1${4:-}.log status=0
    ((EPOCHSECONDS + seconds <= deadline)) || seconds=$((deadline - EPOCHSECONDS))
    ((seconds > 2)) || { echo "$test${4:-}: out of time"; return; }
    MOS_HEAD_NEED_GPU=1 RAYON_NUM_THREADS=$threads timeout -k 3 "$seconds" "$folder/test-$test" --test-threads=2 --nocapture "${@:4}" \
        >"$log" 2>&1 || status=$?
    echo "$test${4:-}: $(grep '^test result:' "$log" | cut -d';' -f1-2 || true); status $status," \
        "$(grep -c 'device: Cuda' "$log") bodies on the GPU$(grep -E '^test .* FAILED|panicked at|^Error:' "$log" | head -n 12 |
            sed 's/^/; /' | tr -d '\n' | cut -c1-600)"
}

# run_these SECONDS TEST..: each test for as long as that at most, six at a time.
run_these() {
    local seconds=$1
    shift
    export -f one_test
    printf '%s\n' "$@" | xargs -P 6 -I{} bash -c "one_test {} $seconds 3" | details
}

run_exact() { run_these 60 "${EXACT[@]}"; }

run_tests() {
    local program test others=()
    for program in "$folder"/test-*; do
        test=${program##*/test-}
        [[ " ${EXACT[*]} " == *" $test "* ]] || others+=("$test")
    done
    run_these 110 "${others[@]}"
    one_test scale 60 16 --ignored | details
}

# steps DTYPE SHAPES FLAGS..: the step benchmark.
steps() {
    local dtype=$1 shape
    for shape in $2; do
        if limited 45 "$folder/step_time" --shape "$shape" --dtype "$dtype" --device cuda --reps 20 --warmup 3 "${@:3}" \
            >"$logs/step.json" 2>>"$logs/steps.log"; then
            sed "s/^{/{\"flags\": \"${*:3}\", /" "$logs/step.json" >>"$out/steps.jsonl"
            python3 - "$logs/step.json" "${*:3}" <<'LINE' | details
import json, sys
row = json.load(open(sys.argv[1]))
def ms(*names): return " / ".join(f"{1e3 * row[name]:.3f}" if row.get(name) else "-" for name in names)
print(row["shape"], row["dtype"], sys.argv[2], "| step", ms("seconds", "pipelined_seconds"),
      "| mixture", ms("mixture_seconds", "mixture_pipelined_seconds"),
      "| products", ms("gemm3_seconds", "products_pipelined_seconds"), "ms | extra", round(row.get("peak_extra_mib") or 0),
      "MiB |", row.get("plan"))
LINE
        else
            say "failed: $shape $dtype ${*:3}: $(tail -n 1 "$logs/steps.log")"
        fi
    done
}

run_bf16() { steps bf16 "${SHAPES[*]}"; }
run_f32() { steps f32 "${SHAPES[*]}"; }
run_chunks() {
    local rows
    for rows in 512 1024 2048; do steps bf16 llm --step-only --chunk-rows $rows; done
    for rows in 1024 2048 4096 16384; do steps bf16 "ptb wt2 1b" --step-only --chunk-rows $rows; done
}

run_peers() {
    if [[ -d .whl ]]; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$folder/site" .whl/*.whl \
            >"$logs/pip.log" 2>&1 || say "the wheels were not installed"
    fi
    PYTHONPATH=$folder/site limited 150 python3 -u benches/peers/gpu_steps.py --seconds "${PEER_SECONDS:-110}" --shapes llm,ptb,wt2 \
        >>"$out/peers.jsonl" 2>"$logs/peers.log" || true
    python3 - "$out/peers.jsonl" <<'TABLE' | details
import json, sys
for row in map(json.loads, open(sys.argv[1])):
    print(row["shape"], row["dtype"], "|", row["implementation"], "|", f"{1e3 * row['seconds']:.3f} /",
          f"{1e3 * row['pipelined_seconds']:.3f} ms |", round(row["extra_mib"]), "MiB")
TABLE
    grep -E '^(failed|out of time|no |Traceback|\w*Error)' "$logs/peers.log" | cut -c1-300 | details || true
}

# Every kernel of a process with two steps, at the clock rates of the machine.
run_profile() {
    command -v ncu >/dev/null || { say "no ncu"; return 0; }
    local shape metrics=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,launch__registers_per_thread
    for shape in llm ptb wt2; do
        limited 60 ncu --clock-control none --csv --log-file "$out/ncu-$shape.csv" --metrics "$metrics" \
            "$folder/step_time" --shape "$shape" --dtype bf16 --device cuda --reps 1 --warmup 0 --step-only \
            >"$logs/ncu-$shape.log" 2>&1 || say "failed: ncu, $shape"
        python3 - "$out/ncu-$shape.csv" <<'TABLE' | tee -a "$out/profile.txt" | sed -n 1,20p | details
import collections, csv, sys
UNITS = {"ns": 1e-3, "us": 1, "ms": 1e3, "nsecond": 1e-3, "usecond": 1, "msecond": 1e3, "byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1, "Gbyte": 1e3}
kernels = collections.defaultdict(lambda: {"launches": set(), "us": 0.0, "MB": 0.0, "registers": 0})
for row in csv.DictReader(line for line in open(sys.argv[1], errors="replace") if line.startswith('"')):
    kernel = kernels[row["Kernel Name"].split("(")[0][:70]]
    value = float(row["Metric Value"].replace(",", "") or 0) * UNITS.get(row["Metric Unit"], 1)
    kernel["launches"].add(row["ID"])
    name = row["Metric Name"]
    key = "us" if name.startswith("gpu__time") else "registers" if name.startswith("launch__") else "MB"
    kernel[key] = max(kernel[key], value) if key == "registers" else kernel[key] + value
print(sys.argv[1], f"{sum(kernel['us'] for kernel in kernels.values()) / 1e3:.2f} ms of kernels")
for name, kernel in sorted(kernels.items(), key=lambda item: -item[1]["us"])[:40]:
    n, us = len(kernel["launches"]), kernel["us"]
    print(f"{n:5} x {us / n:9.1f} us = {us / 1e3:8.3f} ms, {kernel['MB'] / max(us, 1e-9):5.2f} TB/s, "
          f"{kernel['registers']:.0f} registers  {name}")
TABLE
    done
}

# one_sanitizer "TOOL TEST" SECONDS
one_sanitizer() {
    local status=0 tool=${1% *} test=${1#* }
    local log=$logs/$tool-$test.log
    MOS_HEAD_NEED_GPU=1 timeout -k 3 "$2" compute-sanitizer --tool "$tool" --error-exitcode 1 "$folder/test-$test" --test-threads=1 \
        >"$log" 2>&1 || status=$?
    echo "$tool, $test: status $status, $(grep -h 'SUMMARY' "$log" || echo 'did not finish'), $(grep -c '^test .* ok' "$log") tests passed"
}

run_sanitizer() {
    command -v compute-sanitizer >/dev/null || { say "no compute-sanitizer"; return 0; }
    local seconds
    seconds=$(seconds_left)
    ((seconds < 75)) || seconds=75
    ((seconds > 15)) || return 0
    export -f one_sanitizer
    printf '%s\n' 'memcheck golden' 'racecheck golden' 'initcheck golden' 'synccheck golden' 'memcheck sampled' 'racecheck is_argmax' |
        xargs -P 6 -I{} bash -c "one_sanitizer '{}' $seconds" | details
}

run_benches() {
    local bench
    for bench in 'heads ^cuda.*loss_backward' 'decoding ^cuda.*mixture/(top_k10|sample|log_probs)'; do
        (cd "$folder" && limited "${BENCH_SECONDS:-60}" "$folder/bench-${bench%% *}" --bench --noplot --warm-up-time 0.2 --measurement-time 0.5 \
            --nresamples 1000 "${bench#* }" 2>&1) | tee -a "$logs/benches.log" |
            awk '/^cuda/ { name = $0 } /time:/ { print name, $0 }' | details || true
    done
}

run_model() {
    local flags
    read -ra flags <<<"${MODEL_FLAGS:-}"
    limited "${MODEL_SECONDS:-60}" "$folder/language_model" --device cuda "${flags[@]}" >"$logs/language_model.log" 2>&1 ||
        say "the language model did not end"
    tail -n 8 "$logs/language_model.log" | details
}

run() {
    local archive=$1 part wheels
    mkdir -p "$2"
    out=$(realpath "$2") end=$((SECONDS + $3)) deadline=$((EPOCHSECONDS + $3 - 8))
    [[ ! -e $out/results.txt ]] || { echo "$2 has the results of another run"; exit 2; }
    shift 3
    folder=$(mktemp -d)
    logs=$folder/logs
    trap 'rm -rf "$folder"' EXIT
    mkdir -p "$logs"
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$archive" "$folder"
    wheels=$(python3 -c '
import importlib.util
spec = importlib.util.find_spec("nvidia")
print(":".join(path + "/cu13/lib" for path in spec.submodule_search_locations) if spec else "")')
    export LD_LIBRARY_PATH="${wheels:+$wheels:}${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64:/usr/local/cuda/lib64"
    # candle's kernels are PTX, which the driver compiles once if it can keep the result.
    export CUDA_CACHE_DISABLE=0 CUDA_CACHE_PATH=$folder/ptx CUDA_CACHE_MAXSIZE=4294967296
    export folder logs out deadline
    for part in "$@"; do
        (($(seconds_left) > 5)) || { say "out of time before $part"; break; }
        say "== $part"
        "run_$part" || say "$part failed"
        keep_logs
    done
    say "done"
}

record() {
    local lines
    lines=$(python3 - "$1" <<'LINES'
import datetime, json, os, re, sys
folder = sys.argv[1]
path = os.path.join(folder, "results.txt")
with open(path) as results:
    found = re.search(r"commit ([0-9a-f]+), ([^,]+),", results.read())
if not found:
    sys.exit(f"{path}: no commit, or one with changes")
commit, processor = found.groups()
date = datetime.date.fromtimestamp(os.path.getmtime(path)).isoformat()
def lines(name):
    path = os.path.join(folder, name)
    return map(json.loads, open(path)) if os.path.exists(path) else []
def emit(figure, row, **values):
    values = {"figure": figure, "shape": row["shape"], "dtype": row["dtype"], **values, "processor": processor, "date": date,
              "commit": commit}
    print(json.dumps({key: round(x, 7) if isinstance(x, float) else x for key, x in values.items() if x is not None}))
for row in lines("steps.jsonl"):
    times = {"seconds": row["seconds"], "extra_mib": round(row["peak_extra_mib"], 1)}
    if "--chunk-rows" in row["flags"]:
        emit("gpu-chunks", row, chunk_rows=int(row["flags"].split()[-1]), **times, command="scripts/gpu.sh run chunks")
    elif not row["flags"]:
        emit("gpu-step", row, implementation="mos-head", **times, pipelined_seconds=row["pipelined_seconds"],
             mixture_seconds=row.get("mixture_seconds"), products_seconds=row.get("gemm3_seconds"),
             mixture_over_products=row.get("mixture_over_products"), command=f"scripts/gpu.sh run {row['dtype']}")
for row in lines("peers.jsonl"):
    if not row["implementation"].startswith(("product", "three")):
        emit("gpu-step", row, implementation=row["implementation"], library=row["library"], seconds=row["seconds"],
             pipelined_seconds=row["pipelined_seconds"], extra_mib=row["extra_mib"], command="scripts/gpu.sh run peers")
LINES
    )
    echo "$lines" >>benches/results/gpu.jsonl
}

case ${1:-} in
record) record "$2" ;;
pack) pack "${2:-gpu.tar.xz}" ;;
run)
    (($# >= 4)) || { echo "usage: $0 run ARCHIVE OUT SECONDS [PART..]"; exit 2; }
    parts=("${@:5}")
    ((${#parts[@]})) || parts=("${PARTS[@]}")
    for part in "${parts[@]}"; do
        [[ " ${PARTS[*]} " == *" $part "* ]] || { echo "$part: no part; one of ${PARTS[*]}"; exit 2; }
    done
    run "$2" "$3" "$4" "${parts[@]}"
    ;;
*)
    sed -n '/^set/q; 2,$s/^# \{0,1\}//p' "$0"
    [[ ${1-} == --help || ${1-} == -h ]] || exit 2
    ;;
esac
