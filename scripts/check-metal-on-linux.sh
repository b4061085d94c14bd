#!/usr/bin/env bash
# Runs candle's and this crate's Metal backends without Metal, on the emulated device of emulated/metal. Needs a
# Rust toolchain and a C++ compiler. Arguments are passed to `cargo test`.
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

# A copy of objc2-metal from the registry, without the line that links Apple's framework.
version=0.3.2
copy=target/metal-on-linux/objc2-metal
if [[ ! -e $copy/.complete ]]; then
    manifest=$(cargo metadata --locked --format-version 1 --features metal --filter-platform aarch64-apple-darwin |
        grep -o "\"manifest_path\":\"[^\"]*/objc2-metal-$version/Cargo.toml\"" | head -n 1 | cut -d '"' -f 4)
    rm -rf "$copy"
    mkdir -p "$(dirname "$copy")"
    cp -r "$(dirname "$manifest")" "$copy"
    chmod -R u+w "$copy"
    rm -f "$copy/.cargo-ok" "$copy/.cargo_vcs_info.json" "$copy/Cargo.lock"
    line='#[link(name = "Metal", kind = "framework")]'
    files=$(grep -rlF --include=*.rs "$line" "$copy/src")
    for file in $files; do
        grep -vxF "$line" "$file" >"$file.less"
        mv "$file.less" "$file"
    done
    touch "$copy/.complete"
fi

# The emulated device must open: else the tests would run on the CPU alone.
export MOS_HEAD_NEED_GPU=1
exec cargo test --locked --manifest-path emulated/metal/Cargo.toml "$@"
