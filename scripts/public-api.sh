#!/usr/bin/env bash
# Compares the public interface with docs/public-api.txt and prints the difference; `--update` writes that file anew.
# Where Rust 1.95 or the few dependencies of tests/public_api cannot be had, it says so and compares nothing,
# or with MOS_HEAD_NEED_PUBLIC_API=1 ends with an error.
set -euo pipefail
cd "$(dirname "$0")/.."

update=
case "${1-}" in
--update) update=1 ;;
-h | --help) sed -n '2,4s/^# //p' "$0" && exit ;;
?*) echo "usage: $0 [--update]" >&2 && exit 2 ;;
esac
snapshot=docs/public-api.txt
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
skip() {
    if [[ $update || ${MOS_HEAD_NEED_PUBLIC_API-} == 1 ]]; then
        echo "The public interface cannot be compared with $snapshot: $1." >&2
        exit 1
    fi
    echo "skipped: $0: $1; MOS_HEAD_NEED_PUBLIC_API=1 makes this an error" >&2
    exit 0
}

# The format of rustdoc's JSON changes with Rust; tests/public_api reads the one of this release.
toolchain=1.95.0
if [[ "$(rustc --version)" != "rustc ${toolchain%.*}."* ]]; then
    export RUSTUP_TOOLCHAIN=$toolchain
    rustc --version >/dev/null 2>&1 || rustup toolchain install "$toolchain" --profile minimal ||
        skip "Rust $toolchain cannot be installed"
fi
tool=(--quiet --locked --manifest-path tests/public_api/Cargo.toml)
cargo fetch "${tool[@]}" || skip "the dependencies of tests/public_api cannot be fetched"
cargo build "${tool[@]}" --target-dir "$target/public-api"

# `distributed` adds items, `serde` implementations, `mpi` the type `Mpi`, which needs an MPI to build, `nccl` the type `Nccl`,
# which needs CUDA; the other features add no items.
RUSTDOC=$PWD/tests/public_api/rustdoc cargo rustdoc --quiet --locked --lib --features distributed,serde --target-dir "$target" -- \
    -Z unstable-options --output-format json --cap-lints allow
"$target/public-api/debug/public_api" "$target/doc/mos_head.json" >"$target/public-api.txt"

if [[ $update ]]; then
    cp "$target/public-api.txt" "$snapshot"
elif ! diff -u "$snapshot" "$target/public-api.txt"; then
    echo "The public interface differs from $snapshot; if that is intended, run $0 --update." >&2
    exit 1
fi
