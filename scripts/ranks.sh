#!/usr/bin/env bash
# Times a vocabulary-parallel loss: two processes of one thread, and one process of two threads with the whole vocabulary,
# in turn; then the memory of 1, 2 and 4 processes. Prints JSON lines. Needs what scripts/mpi.sh needs, and 8 GiB.
#
#   scripts/ranks.sh [ROUNDS]     ten minutes for 3 rounds on 2 cores, which should have nothing else to do
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."
cargo build --quiet --locked --release -p lab --features mpi --bin ranks
program=${CARGO_TARGET_DIR:-target}/release/ranks
source scripts/mpi-env
ranks() { RAYON_NUM_THREADS=1 mpirun -n "$1" "$program" "${@:2}"; }
for ((round = 0; round < ${1:-3}; round++)); do
    for shape in ptb llm; do
        ranks 2 --shape "$shape"
        RAYON_NUM_THREADS=2 "$program" --shape "$shape" --whole
    done
    ranks 2 --shape ptb --smoothing 0.1
    RAYON_NUM_THREADS=2 "$program" --shape ptb --smoothing 0.1 --whole
done
for processes in 1 2 4; do
    ranks "$processes" --shape llm --reps 1
done
