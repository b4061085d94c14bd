#!/usr/bin/env bash
# What the library costs to compile, beside candle-core: scripts/compile-cost.sh [COMMIT..], HEAD by default. For each profile
# it prints the CPU seconds of rustc, the size of the rlib and its functions; then the CPU seconds of an incremental debug build
# after a change in src/heads. Nothing else may run meanwhile. PROFILES="release" leaves the others out.
#
#     scripts/compile-cost.sh 4b72161 HEAD
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || set -- HEAD

folder=$(mktemp -d)
export CARGO_TARGET_DIR=$folder/target CARGO_INCREMENTAL=0
trap 'for commit in "$@"; do git worktree remove --force "$folder/$commit" >/dev/null 2>&1 || true; done; rm -rf "$folder"' EXIT

# Writes the CPU seconds of each crate's rustc to a file. (Those of `cargo build` would count other crates: `cargo clean -p
# mos-head` also removes serde, on which candle depends.)
cat >"$folder/rustc" <<'WRAPPER'
#!/usr/bin/env bash
name=$(printf '%s\n' "$@" | grep -A 1 -x -e --crate-name | tail -n 1)
TIMEFORMAT="$name %U %S"
exec 19>&2
{ time "$@" 2>&19; } 2>>"$(dirname "$0")/seconds"
WRAPPER
chmod +x "$folder/rustc"
touch "$folder/seconds"

# cpu_seconds COMMAND..: the CPU seconds of the command and its children.
cpu_seconds() {
    local TIMEFORMAT='%U %S'
    { time "$@" >/dev/null 2>&1; } 2>&1 | awk '{ printf "%.1f", $1 + $2 }'
}
# cost NAME CRATE: prints what a crate that has just been built costs.
cost() {
    local seconds rlib
    seconds=$(awk -v crate="$2" '$1 == crate { sum += $2 + $3 } END { printf "%.1f", sum }' "$folder/seconds")
    rlib=$(find "$CARGO_TARGET_DIR/$directory/deps" -name "lib$2-*.rlib" -newer "$folder/stamp" | head -n 1)
    printf '%-8s %-14s %7s s %8.1f MB %7d functions\n' "$directory" "$1" "$seconds" \
        "$(($(stat -c %s "$rlib") / 100000))e-1" "$(nm --defined-only "$rlib" 2>/dev/null | grep -c ' [tTwW] ')"
}

for commit in "$@"; do
    git worktree add --quiet --detach "$folder/$commit" "$commit"
done
for directory in ${PROFILES:-release debug}; do
    profile=()
    [ $directory = debug ] || profile=(--release)
    for commit in "$@"; do
        cd "$folder/$commit"
        export RUSTC_WRAPPER=$folder/rustc
        cargo build --locked --quiet "${profile[@]}" --lib
        cargo clean --quiet "${profile[@]}" -p candle-core -p mos-head
        : >"$folder/seconds"
        touch "$folder/stamp"
        cargo build --locked --quiet "${profile[@]}" --lib
        unset RUSTC_WRAPPER
        cost candle-core candle_core
        cost "$commit" mos_head
    done
done
[ -z "${PROFILES:-}" ] || exit 0
export CARGO_INCREMENTAL=1
for commit in "$@"; do
    cd "$folder/$commit"
    find src -name '*.rs' -exec touch {} +
    cargo build --locked --quiet --lib
    # In the body of a function.
    sed -i '0,/-> Result<.*{$/s//&\n        std::hint::black_box(());/' src/heads/head.rs
    # On a line of its own, where a failure ends the script.
    seconds=$(cpu_seconds cargo build --locked --lib)
    printf '%-8s %-14s %7s s after a change in src/heads\n' debug "$commit" "$seconds"
done
