#!/usr/bin/env bash
# What the library costs to compile, in turn with candle-core: scripts/compile-cost.sh [COMMIT..], HEAD by default. For each
# profile it prints the CPU seconds of rustc, the size of the rlib and its functions; then the CPU seconds of an incremental
# debug build after a change in src/heads. Nothing else may run meanwhile.
#
#     scripts/compile-cost.sh 4b72161 HEAD
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || set -- HEAD

folder=$(mktemp -d)
export CARGO_TARGET_DIR=$folder/target CARGO_INCREMENTAL=0
trap 'for commit in "$@"; do git worktree remove --force "$folder/$commit" >/dev/null 2>&1 || true; done; rm -rf "$folder"' EXIT

# cpu_seconds COMMAND..: the CPU seconds of the command and its children.
cpu_seconds() {
    local TIMEFORMAT='%U %S'
    { time "$@" >/dev/null 2>&1; } 2>&1 | awk '{ printf "%.1f", $1 + $2 }'
}
# cost NAME CRATE CARGO-BUILD-ARGUMENTS..: builds a crate again, and prints what it costs.
cost() {
    local name=$1 crate=$2 seconds rlib
    shift 2
    cargo clean --quiet "${profile[@]}" -p "$crate"
    touch "$folder/stamp"
    seconds=$(cpu_seconds cargo build --locked "$@")
    rlib=$(find "$CARGO_TARGET_DIR/$directory/deps" -name "lib${crate//-/_}-*.rlib" -newer "$folder/stamp" | head -n 1)
    printf '%-8s %-14s %7s s %8.1f MB %7d functions\n' "$directory" "$name" "$seconds" \
        "$(($(stat -c %s "$rlib") / 100000))e-1" "$(nm --defined-only "$rlib" 2>/dev/null | grep -c ' [tTwW] ')"
}

for commit in "$@"; do
    git worktree add --quiet --detach "$folder/$commit" "$commit"
done
for directory in release debug; do
    profile=()
    [ $directory = debug ] || profile=(--release)
    (cd "$folder/$1" && cargo build --locked --quiet "${profile[@]}" --lib && cost candle-core candle-core "${profile[@]}" -p candle-core)
    for commit in "$@"; do
        # What depends on candle-core was removed with it.
        (cd "$folder/$commit" && cargo build --locked --quiet "${profile[@]}" -p candle-nn && cost "$commit" mos-head "${profile[@]}" --lib)
    done
done
export CARGO_INCREMENTAL=1
for commit in "$@"; do
    cd "$folder/$commit"
    find src -name '*.rs' -exec touch {} +
    cargo build --locked --quiet --lib
    # In the body of a function.
    sed -i '0,/-> Result<.*{$/s//&\n        std::hint::black_box(());/' src/heads/head.rs
    printf '%-8s %-14s %7s s after a change in src/heads\n' debug "$commit" "$(cpu_seconds cargo build --locked --lib)"
done
