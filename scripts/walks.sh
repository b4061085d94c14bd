#!/usr/bin/env bash
# Lists the files of src that hold a function which a call visits, for each test of tests/walks.rs, and their number. It
# compares two runs under valgrind (callgrind), with the call and without, of a build in which nothing is inlined. Valgrind
# emulates AVX2; the tile units and AVX-512 have the same files but for their own.
#
#     scripts/walks.sh [TEST ..]          # loss_and_gradient, token_request, sampled_loss, teacher, shard_loss
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

command -v valgrind >/dev/null || { echo "this script needs valgrind" >&2; exit 2; }
tests=("$@")
[ $# -gt 0 ] || tests=(loss_and_gradient token_request sampled_loss teacher shard_loss)
export CARGO_PROFILE_DEV_DEBUG=1 CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/walks
program=$(cargo test --quiet --features distributed --test walks --no-run --message-format=json |
    grep -o '"executable":"[^"]*/walks-[^"]*"' | tail -n 1 | cut -d '"' -f 4)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Prints each function of src with its file, and its cost. What the compiler gives no line has the file lib.rs, which has no
# functions.
costs() {
    awk -v root="$PWD/src/" '
        /^f[lie]=/ { file = substr($0, 4); next }
        /^fn=/ { fn = substr($0, 4); next }
        /^calls=/ { getline; next }
        /^[0-9]/ && index(file, root) == 1 && file != root "lib.rs" { cost[substr(file, length(root) + 1) "\t" fn] += $2 }
        END { for (key in cost) print key "\t" cost[key] }' "$1"
}

for test in "${tests[@]}"; do
    for run in setup whole; do
        RAYON_NUM_THREADS=1 MOS_HEAD_WALK=$run valgrind --tool=callgrind \
            --compress-strings=no --compress-pos=no --callgrind-out-file="$folder/$run" \
            "$program" --exact "$test" --test-threads=1 >"$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }
        costs "$folder/$run" | sort >"$folder/$run.txt"
    done
    awk -F '\t' 'NR == FNR { before[$1 FS $2] = $3; next } $3 > before[$1 FS $2] { print $1 }' \
        "$folder/setup.txt" "$folder/whole.txt" | sort -u >"$folder/files"
    echo "$test: $(wc -l <"$folder/files") files"
    sed 's/^/    /' "$folder/files"
done
