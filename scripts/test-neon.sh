#!/usr/bin/env bash
# Runs the tests of the CPU's kernels with NEON on a machine that is not AArch64: compiled for Linux on AArch64, linked
# statically, executed by QEMU's user-mode emulation. For Debian; what is missing is installed by apt-get, which needs
# root. Arguments go to the tests, instead of the names of the kernels' modules.
#
# The target's standard library comes from rustup. If rustup cannot download it, it is that of Debian's compiler, whose
# version must be at least this crate's rust-version (bookworm with security updates, or later).
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/test-neon"

main() {
    need qemu-aarch64 qemu-user
    need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
    if ! has_target && ! add_target; then
        echo "rustup cannot download the standard library of $target; using Debian's compiler"
        dpkg --add-architecture arm64
        install rustc-web libstd-rust-web-dev:arm64
        export RUSTC=/usr/bin/rustc
    fi
    # Under emulation the C library of Debian's cross compiler hangs in pthread_create unless it is linked statically.
    export RUSTFLAGS="-C target-feature=+crt-static"
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=qemu-aarch64
    local tests=("$@")
    ((${#tests[@]})) || tests=(backend::cpu)
    cargo test --locked --release --lib --target "$target" -- "${tests[@]}"
}

has_target() {
    [[ -d $("${RUSTC:-rustc}" --print target-libdir --target "$target") ]]
}

add_target() {
    command -v rustup >/dev/null && timeout 180 rustup target add "$target" && has_target
}

# A tool, and the packages that it comes with.
need() {
    command -v "$1" >/dev/null || install "${@:2}"
}

install() {
    local packages=("$@")
    (apt-get update && apt-get install --yes --no-install-recommends "${packages[@]}") >/dev/null ||
        { echo "apt-get cannot install ${packages[*]}" >&2; exit 1; }
}

main "$@"
