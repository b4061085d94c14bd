#!/usr/bin/env bash
# Runs tests/mpi.rs with 1 to 4 processes, and the example vocab_parallel, which two processes begin and three go on
# with, against one. Needs an MPI and libclang, on Debian `apt-get install openmpi-bin libopenmpi-dev libclang-dev`.
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."
executable() {
    cargo "$@" --locked --features mpi --message-format json | grep -o '"executable":"[^"]*"' | tail -n 1 | cut -d '"' -f 4
}
test=$(executable test --release --test mpi --no-run)
example=$(executable build --release --example vocab_parallel)
source scripts/mpi-env
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
run() { RAYON_NUM_THREADS=1 timeout 300 mpirun -n "$@"; }
for processes in 1 2 3 4; do
    run "$processes" "$test" | tee "$folder/first"
    run "$processes" "$test" | diff "$folder/first" - # the same bits in every run
done

epochs() { run "$1" "$example" --double --dir "$folder/$2" --epochs "${@:3}" | grep ^epoch; }
one=$(epochs 1 one 2)
several=$(epochs 2 several 1 && epochs 3 several 2 --resume)
[[ $one == "$several" ]] || { printf 'One process:\n%s\nSeveral:\n%s\n' "$one" "$several"; exit 1; }
echo "vocab_parallel: the perplexities of several processes equal those of one"
