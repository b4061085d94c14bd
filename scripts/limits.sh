#!/usr/bin/env bash
# The models of "Exploring the Limits of Language Modeling" in small, on Penn Treebank: words, spelled inputs and the
# CNN softmax, a sampled softmax and a full one. The same command continues where it stopped.
#
#     scripts/limits.sh DIR [OUT]
#
# DIR has train.txt and valid.txt; OUT (default: limits) gets the checkpoints, logs and results. EPOCHS (5), MINUTES (60, of
# a leg of each model) and JOBS (2, models at a time, each on one thread) change what is run.
set -euo pipefail
if [[ ${1:---help} == -* ]]; then
    sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit
fi
data=$(realpath "$1") out=$(realpath -m "${2:-limits}")
cd "$(dirname "$0")/.."
mkdir -p "$out"
failed=0
cargo build --release --locked -p lab --bin language_model
program=${CARGO_TARGET_DIR:-target}/release/language_model
export RAYON_NUM_THREADS=1
run() {
    local name=$1
    shift
    while (($(jobs -rp | wc -l) >= ${JOBS:-2})); do wait -n || failed=1; done
    echo "== $name"
    "$program" --data "$data" --preset limits-small --epochs "${EPOCHS:-5}" --minutes "${MINUTES:-60}" \
        --save "$out/$name.safetensors" --results "$out/$name.jsonl" "$@" >>"$out/$name.log" 2>&1 &
}
run words
run words-full --output full
run spelled --spelled-inputs true
# At the learning rate of the others the CNN softmax diverges.
run spelled-cnn --spelled-inputs true --output char-cnn --correction 0 --lr 0.05
run spelled-cnn-corrected --spelled-inputs true --output char-cnn --correction 32 --lr 0.05
for job in $(jobs -p); do wait "$job" || failed=1; done
for log in "$out"/*.log; do printf '%s: %s\n' "$(basename "$log" .log)" "$(tail -n 1 "$log")"; done
exit $failed
