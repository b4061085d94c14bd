#!/usr/bin/env bash
# Tests the published crates from their archives, as a registry hands them out: mos-codes and mos-head, neither of which
# needs the other.
#
#   scripts/package.sh [ARGUMENTS of cargo test]
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."
cargo package --locked --no-verify -p mos-codes -p mos-head
target=$(realpath "${CARGO_TARGET_DIR:-target}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for archive in "$target"/package/{mos-codes,mos-head}-"$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)".crate; do
    tar -xf "$archive" -C "$folder"
    features=()
    [[ $archive != */mos-head-* ]] || features=(--features distributed)
    (cd "$folder/$(basename "$archive" .crate)" && CARGO_TARGET_DIR=$target cargo test --locked --release "${features[@]}" "$@")
done
