#!/usr/bin/env bash
# What becomes of a training of several MPI processes (examples/vocab_parallel.rs) if one of them fails: it is killed, has
# other options, or ends early. All processes end in time, and a resumption prints what an uninterrupted run does. Needs what
# scripts/mpi.sh needs.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --quiet --locked --release --features mpi --example vocab_parallel
example=$(realpath "${CARGO_TARGET_DIR:-target}/release/examples/vocab_parallel")
# Of Open MPI: more processes than cores, and as root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 RAYON_NUM_THREADS=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() { echo "$1" >&2; exit 1; }

# Three processes, of which the last has other flags; they fail within a minute, and say why.
differs() {
    status=0
    timeout 60 mpirun -n 2 "$example" --dir "$folder/other" --epochs 2 : -n 1 "$example" --dir "$folder/other" "$@" \
        >"$folder/log" 2>&1 || status=$?
    ((status != 0 && status != 124)) || fail "another process with $*: exit status $status"
    # mpirun ends the others once the first has ended.
    grep -q "Ranks {" "$folder/log" || fail "another process with $*: $(cat "$folder/log")"
}
differs --double
differs --epochs 1

# One of two is killed once it has saved; the other ends within half a minute.
train() { mpirun -n "$1" "$example" --double --dir "$folder/killed" --epochs 3 "${@:2}"; }
mpirun -n 2 "$example" --double --dir "$folder/whole" --epochs 3 | grep ^epoch >"$folder/expected"
train 2 >"$folder/before" 2>/dev/null &
until [[ -e $folder/killed/model.safetensors.index.json ]]; do sleep 0.2; done
sleep 1
pkill -KILL -n -f "$example --double --dir $folder/killed"
killed=$SECONDS
wait $! && fail "the training goes on without a process"
((SECONDS - killed < 30)) || fail "the other process ended after $((SECONDS - killed)) seconds"
train 3 --resume | grep ^epoch >"$folder/after"
epochs() { grep ^epoch "$folder/before"; cat "$folder/after"; }
diff "$folder/expected" <(epochs)
echo "after a process was killed: ended in $((SECONDS - killed)) s with the resumption, the same perplexities"
