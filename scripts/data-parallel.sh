#!/usr/bin/env bash
# Data-parallel training of the lab's language model under MPI. Needs what scripts/mpi.sh needs, and jq.
#
#   scripts/data-parallel.sh check               any number of processes trains as one, also in legs: half a minute
#   scripts/data-parallel.sh time DIR [ROUNDS]   words per second on the text of DIR, of two processes of one thread and of
#                                                one process of two threads in turn: two minutes a round, on 2 cores
#                                                which should have nothing else to do. Prints JSON lines
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
[[ -z ${2:-} ]] || set -- "$1" "$(realpath "$2")" "${@:3}"
cd "$(dirname "$0")/.."
usage() { sed -n 's/^# \? \?//; 4,7p' "$0" >&2; exit 2; }
cargo build --quiet --locked --release -p lab --features mpi --bin language_model
program=$(realpath "${CARGO_TARGET_DIR:-target}")/release/language_model
source scripts/mpi-env
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# The model of so many processes of one thread; of one without MPI, if it is 0.
train() {
    local processes=$1 launch=()
    shift
    [[ $processes == 0 ]] || launch=(mpirun -n "$processes")
    [[ $processes == 0 ]] || set -- --mpi "$@"
    RAYON_NUM_THREADS=${threads:-1} timeout 600 "${launch[@]}" "$program" --head softmax "$@"
}

check() {
    # Steps that are so short that rounding stays small.
    local flags=(--batch 128 --small-batch 32 --dropout 0.1 --lr 0.003)
    for processes in 0 1 2 3 4; do
        train "$processes" "${flags[@]}" --epochs 1 --results "$folder/$processes.jsonl"
    done
    same "$folder"/{0,1,2,3,4}.jsonl
    # The time of a leg is up after one step.
    train 0 "${flags[@]}" --epochs 2 --results "$folder/whole.jsonl"
    for processes in 2 3 4 1 4; do
        train "$processes" "${flags[@]}" --epochs 2 --results "$folder/legs.jsonl" --save "$folder/legs" --minutes 1e-9 |
            tee -a "$folder/legs.txt"
    done
    train 2 "${flags[@]}" --epochs 2 --results "$folder/legs.jsonl" --save "$folder/legs" --minutes 10
    [[ $(grep -c "paused after 1 steps" "$folder/legs.txt") == 5 ]]
    same "$folder"/{whole,legs}.jsonl
    fails "2 parts of --small-batch 64" --batch 128 --small-batch 64
    # The first process alone writes files: the others end too.
    fails "cannot write" --results /dev/full
}

# Whether three processes end with this error.
fails() {
    local status=0
    train 3 --epochs 1 "${@:2}" 2>"$folder/error" || status=$?
    [[ $status == 1 ]] && grep -m 1 -e "$1" "$folder/error"
}

# Whether files of --results have the same epochs, steps and NLLs but for rounding.
same() {
    local first=$1
    for file in "${@:2}"; do
        jq -e -s --slurpfile other "$first" '
            def near($a; $b): ($a - $b) | fabs < 1e-6;
            length == ($other | length) and ([., $other] | transpose | all(
                .[0].steps == .[1].steps and near(.[0].train_nll; .[1].train_nll) and near(.[0].valid_nll; .[1].valid_nll)
            ))' "$file" >"$folder/same" || { cat "$first" "$file"; echo "$file differs from $first"; exit 1; }
    done
    echo "the same NLLs: ${*##*/}"
}

# The seconds of a step, in a leg of half a minute.
seconds() {
    rm -rf "$folder/leg"
    threads=$1 train "$2" "${@:3}" --minutes 0.5 --save "$folder/leg" | sed -n 's/.*paused after .* steps of \(.*\) s$/\1/p'
}

# Two processes of one thread over one process of two threads.
compare() {
    local positions=$1 one two
    one=$(seconds 2 0 "${@:2}")
    two=$(seconds 1 2 "${@:2}")
    jq -c -n --argjson positions "$positions" --argjson one "$one" --argjson two "$two" '{
        program: "data-parallel", positions: $positions, one_process: ($positions / $one), two_processes: ($positions / $two),
        ratio: ($one / $two)}'
}

case ${1:-} in
check) check ;;
time)
    [[ -f ${2:-}/train.txt ]] || usage
    for ((round = 0; round < ${3:-3}; round++)); do
        compare 14000 --data "$2" --batch 400 --bptt 35 --small-batch 20
        compare 700 --data "$2" --batch 20 --bptt 35
    done
    ;;
*) usage ;;
esac
