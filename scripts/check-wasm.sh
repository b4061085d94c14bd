#!/usr/bin/env bash
# Type-checks the library for wasm32-unknown-unknown as an application uses it: candle's dependencies take their random
# numbers from getrandom, for which an application on that target chooses a source.
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

rustup target add wasm32-unknown-unknown >/dev/null 2>&1 || true
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/src"
echo 'pub use mos_head::OutputLayer;' >"$folder/src/lib.rs"
cp Cargo.lock "$folder"
cat >"$folder/Cargo.toml" <<TOML
[package]
name = "wasm"
version = "0.0.0"
edition = "2021"
[dependencies]
mos-head = { path = "$PWD" }
getrandom = { version = "0.3", features = ["wasm_js"] }
[workspace]
TOML
export RUSTFLAGS='-D warnings --cfg getrandom_backend="wasm_js"'
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/check-wasm"
CARGO_TARGET_DIR=$(realpath -m "$CARGO_TARGET_DIR")
cargo check --manifest-path "$folder/Cargo.toml" --target wasm32-unknown-unknown
