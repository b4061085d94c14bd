#!/usr/bin/env bash
# What becomes of several MPI processes if one of them fails: of tests/mpi.rs, and of a training (examples/vocab_parallel.rs).
# Each time all processes end in time and say why, and a resumption prints what an uninterrupted run does. Three minutes on 2
# cores; needs what scripts/mpi.sh needs.
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."
cargo build --quiet --locked --release --features mpi --example vocab_parallel
example=$(realpath "${CARGO_TARGET_DIR:-target}/release/examples/vocab_parallel")
test=$(cargo test --locked --release --features mpi --test mpi --no-run --message-format json |
    grep -o '"executable":"[^"]*"' | tail -n 1 | cut -d '"' -f 4)
source scripts/mpi-env
export RAYON_NUM_THREADS=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}
# Trains in $2 with $1 processes.
# A write beyond the size that files may have is an error there, and no signal.
train() {
    timeout 150 mpirun -n "$1" sh -c 'trap "" XFSZ; exec "$0" "$@"' "$example" --double --dir "$folder/$2" --time-limit 5 "${@:3}"
}
# $1: what has happened; $2: what a process must say. The processes had the exit status $3.
has_ended() {
    (($3 != 0 && $3 != 124)) || fail "$1: exit status $3" "$(cat "$folder/log")"
    grep -q "$2" "$folder/log" || fail "$1: expected $2, got" "$(cat "$folder/log")"
    echo "$1: $(grep -m 1 "$2" "$folder/log" | cut -c 1-140)"
}
ends() {
    local status=0
    "${@:3}" >"$folder/log" 2>&1 || status=$?
    has_ended "$1" "$2" "$status"
}

# One of three processes comes to no operation, does not end, panics, or stops while MPI moves numbers; the others wait 2 s.
for fault in "absent/rank 0: ranks \[2\]" "at the end/rank [01]: ranks \[2\]" "panics/as it should" "stops/ranks \[[01, ]*2\]"; do
    start=$SECONDS
    ends "${fault%%/*}" "${fault#*/}" timeout 60 mpirun -n 3 "$test" "${fault%%/*}"
    ! grep "assertion" "$folder/log" || fail "${fault%%/*}: $(cat "$folder/log")"
    ((SECONDS - start < 15)) || fail "${fault%%/*}: ended after $((SECONDS - start)) s"
done

train 2 whole --epochs 3 | grep ^epoch >"$folder/expected"

# Others than the first two processes have other flags, or another checkpoint.
differs() {
    timeout 150 mpirun -n 2 "$example" --dir "$folder/other" --epochs 2 --time-limit 5 : -n 1 "$example" --dir "$folder/other" "$@"
}
ends "another dtype" "expected the same on every rank" differs --double
ends "fewer epochs" "expected the same on every rank" differs --epochs 1
train 2 one --epochs 1 >"$folder/log"
train 2 two --epochs 2 >"$folder/log"
resume() { timeout 150 mpirun -n 2 "$example" --double --dir "$folder/$1" --resume : -n 1 "$example" --double --dir "$folder/$2" --resume; }
ends "another checkpoint" "expected the same on every rank" resume one two
shard=$(ls "$folder"/one/*-00002-of-*.safetensors)
truncate -s -100 "$shard"
ends "a truncated shard" "$(basename "$shard")" train 3 one --resume

# Something befalls a process once three have saved: $1, which a process reports as $2. The rest is a command on its number.
befalls() {
    rm -rf "$folder/failed" "$folder/after"
    train 3 failed --epochs 3 >"$folder/before" 2>"$folder/log" &
    until [[ -e $folder/failed/model.safetensors.index.json ]]; do sleep 0.2; done
    sleep 1
    "${@:3}" "$(pgrep -n -f "^$example --double --dir $folder/failed")"
    local start=$SECONDS status=0
    wait $! || status=$?
    has_ended "$1" "$2" "$status"
    local ended=$((SECONDS - start))
    train 2 failed --epochs 3 --resume | grep --line-buffered ^epoch >"$folder/after" &
    until [[ -s $folder/after ]]; do sleep 0.2; done
    local resumed=$((SECONDS - start))
    wait $!
    diff "$folder/expected" <(grep ^epoch "$folder/before"; cat "$folder/after") || fail "$1: other perplexities"
    ((resumed < 60)) || fail "$1: the first epoch after it ends after $resumed s"
    echo "    all ended after $ended s, the first epoch of the resumption after $resumed s"
}
befalls "a process is killed" "signal 9" kill -KILL
befalls "a process hangs" "rank [01]: ranks \[[01, ]*2\]: expected an answer within 5s" kill -STOP
befalls "a full disk" "expected a file that can be written" prlimit --fsize=100000 --pid
