#!/usr/bin/env bash
# Type-checks and lints the feature `metal` for Apple silicon on a machine that is not a Mac: library, examples, tests,
# benchmarks. Nothing is linked or run, and no shader is compiled. Arguments are passed to clippy after `--`.
#
# The target's standard library comes from rustup. If rustup cannot download it, Debian's compiler builds it from
# Debian's sources of the same version. apt-get downloads both (160 MB, once) into the target folder; nothing is
# installed, and root is not needed.
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

target=aarch64-apple-darwin
suite=trixie # the first Debian release whose compiler is at least this crate's rust-version
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/check-darwin"
mkdir -p "$CARGO_TARGET_DIR"
CARGO_TARGET_DIR=$(realpath "$CARGO_TARGET_DIR")
debian="$CARGO_TARGET_DIR/debian-$suite"

main() {
    stand_in_for_c
    if ! has_target && [[ ! -e $debian/complete ]] && ! add_target; then
        echo "rustup cannot download the standard library of $target; using Debian's compiler and sources"
        download_debian
    fi
    if has_target; then
        cargo clippy --locked --all-targets --features metal --target "$target" -- "$@"
        report "$(rustc --version)" "rustup's standard library"
    else
        local flags=""
        for flag in "$@"; do flags+="${flag}__CLIPPY_HACKERY__"; done
        # Does what cargo clippy does, which would look for a clippy-driver next to itself. The last variable permits
        # `-Z`.
        RUSTC="$debian/bin/rustc" RUSTC_WORKSPACE_WRAPPER="$debian/bin/clippy-driver" CLIPPY_ARGS="$flags" \
            RUSTC_BOOTSTRAP=1 cargo check --locked --all-targets --features metal --target "$target" -Z build-std
        report "$("$debian/bin/rustc" --version)" "a standard library built from source"
    fi
}

report() {
    echo "checked for $target with feature metal: library, examples, tests and benchmarks, by $1 with $2"
}

has_target() {
    [[ -d $(rustc --print target-libdir --target "$target") ]]
}

add_target() {
    command -v rustup >/dev/null && timeout 180 rustup target add "$target" && has_target
}

# A development dependency compiles C, and Linux has no C compiler for macOS: a stand-in creates empty files.
stand_in_for_c() {
    [[ $(uname) != Darwin ]] || return 0
    local stand_in="$CARGO_TARGET_DIR/stand-in"
    cat >"$stand_in" <<'CC'
#!/usr/bin/env bash
for argument; do
    case $argument in
        *.a) : >"$argument" ;;
    esac
done
while (($#)); do
    [[ $1 != -o ]] || : >"$2"
    shift
done
CC
    chmod +x "$stand_in"
    export CC_aarch64_apple_darwin="$stand_in" AR_aarch64_apple_darwin="$stand_in"
}

# Downloads the compiler, clippy and the sources of the standard library, with the shared libraries of the compiler,
# whose versions depend on the release.
download_debian() {
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    for tool in apt-get apt-cache dpkg; do command -v "$tool" >/dev/null || fail "$tool is missing"; done
    [[ -e $keyring ]] || fail "$keyring (package debian-archive-keyring) is missing"
    rm -rf "$debian"
    mkdir -p "$debian"/{lists/partial,cache/archives/partial,packages,root,bin}
    echo "deb [signed-by=$keyring] http://deb.debian.org/debian $suite main" >"$debian/sources.list"
    cat >"$debian/apt.conf" <<CONF
Dir::State::lists "$debian/lists";
Dir::Cache "$debian/cache";
Dir::Etc::sourcelist "$debian/sources.list";
Dir::Etc::sourceparts "-";
Acquire::Languages "none";
APT::Sandbox::User "root";
CONF
    export APT_CONFIG="$debian/apt.conf"
    apt-get update --quiet || fail "apt-get cannot read Debian's list of packages"
    local packages
    packages=$(apt-cache depends --recurse --no-{recommends,suggests,conflicts,breaks,replaces,enhances} \
        libstd-rust-web-dev | grep '^[a-z]' | sort -u) || fail "Debian $suite has no package libstd-rust-web-dev"
    # shellcheck disable=SC2086 # one package name per word
    (cd "$debian/packages" && apt-get download --quiet rustc-web rust-web-clippy rust-web-src $packages) ||
        fail "apt-get cannot download Debian's compiler"
    unset APT_CONFIG
    for package in "$debian"/packages/*.deb; do dpkg -x "$package" "$debian/root"; done
    local libraries loader
    libraries="$debian/root/usr/lib/$(uname -m)-linux-gnu"
    loader=$(echo "$libraries"/ld-linux-*.so.*)
    for tool in rustc clippy-driver; do
        printf '#!/bin/sh\nexec "%s" --library-path "%s" "%s" "$@"\n' \
            "$loader" "$libraries" "$debian/root/usr/bin/$tool" >"$debian/bin/$tool"
        chmod +x "$debian/bin/$tool"
    done
    "$debian/bin/rustc" --version || fail "Debian's compiler does not start"
    rm -rf "$debian"/{packages,cache,lists}
    touch "$debian/complete"
}

fail() {
    echo "cannot check for $target: rustup does not have the target, and $1" >&2
    exit 1
}

main "$@"
