#!/usr/bin/env bash
# Puts one mistake after another into the Metal backend's caller, in Rust, and runs the tests that must notice it: those of the
# host, or those on the make-believe device. (Mistakes in the kernels are the business of the unit tests.) Each file is put
# back, even if this is interrupted.
set -euo pipefail
cd "$(dirname "$0")/.."

export PROPTEST_DISABLE_FAILURE_PERSISTENCE=1
missed=0 count=0 file=
# Touched, so that cargo builds it again.
restore() { [[ ! -e $file.original ]] || { mv "$file.original" "$file" && touch "$file"; }; }
trap restore EXIT

on_host=(cargo test --locked --lib host::tests)
on_device=(scripts/check-metal-on-linux.sh --test training)

# mutant FILE TEXT REPLACEMENT COMMAND..: the text must be there once, and the command must fail, but not to compile.
mutant() {
    local text=$2 replacement=$3 content log
    file=src/backend/metal/$1
    shift 3
    content=$(cat "$file")
    [[ $(grep -oF -- "$text" "$file" | wc -l) == 1 ]] || { echo "$file: not there once: $text"; exit 1; }
    mv "$file" "$file.original"
    printf '%s\n' "${content/"$text"/"$replacement"}" >"$file"
    count=$((count + 1))
    if log=$("$@" 2>&1); then
        echo "MISSED  $file: $text -> $replacement"
        missed=$((missed + 1))
    elif grep -q "could not compile" <<<"$log"; then
        printf '%s\n' "$log" | grep -A5 '^error' | head -n 20
        echo "$file: does not compile: $text -> $replacement"
        exit 1
    else
        echo "noticed $file: $text -> $replacement"
    fi
    restore
}

# What is bound to which parameter, and what is said to be absent
mutant arguments.rs 'read(x.scales),' 'Binding::Absent,' "${on_host[@]}"
mutant arguments.rs 'x.softcap.to_ne_bytes()' '0f32.to_ne_bytes()' "${on_host[@]}"
mutant arguments.rs '*binding != Binding::Absent' 'true' "${on_host[@]}"
mutant arguments.rs 'if address == 0 { Binding::Absent } else { Binding::Write(address) }' 'Binding::Write(address)' "${on_device[@]}"

# Products, tile by tile
mutant products.rs 'product.accumulate || first > 0' 'product.accumulate' "${on_host[@]}"
mutant products.rs 'out: product.out + offset(first)' 'out: product.out' "${on_host[@]}"
mutant products.rs 'lhs.address + offset(first_of_lhs)' 'lhs.address' "${on_host[@]}"
mutant products.rs '.min(rows - first)' '.min(rows)' "${on_host[@]}"
mutant products.rs 'Argument::Read(lhs.address),' 'Argument::Read(rhs.address),' "${on_host[@]}"
mutant products.rs 'n.div_ceil(BLOCK / WARP)' 'n / (BLOCK / WARP)' "${on_host[@]}"

# What candle's encoder is told
mutant device.rs 'set_param(encoder, place, Output::with_offset(&buffer, offset));' 'set_param(encoder, place, Input::with_offset(&buffer, offset));' "${on_device[@]}"
mutant device.rs 'set_param(encoder, place, Input::with_offset(&buffer, offset));' 'set_param(encoder, place, Input::with_offset(&buffer, 0));' "${on_device[@]}"
mutant device.rs 'set_param(encoder, 3, Output::with_offset(&out.0, out.1));' 'set_param(encoder, 3, Input::with_offset(&out.0, out.1));' "${on_device[@]}"
mutant device.rs 'set_param(encoder, 0, Input::with_offset(&lhs.0, lhs.1));' 'set_param(encoder, 0, Input::with_offset(&lhs.0, 0));' "${on_device[@]}"
mutant device.rs 'let offset = layout.start_offset() * storage.dtype().size_in_bytes();' 'let offset = layout.start_offset();' "${on_device[@]}"
mutant device.rs 'size(blocks, 1), size(BLOCK, 1)' 'size(blocks, 1), size(BLOCK / 2, 1)' "${on_device[@]}"
mutant device.rs '(100, Value::Bool(p.accumulate))' '(100, Value::Bool(false))' "${on_device[@]}"
mutant device.rs 'p.k.is_multiple_of(tiles.terms)' 'true' "${on_device[@]}"
mutant device.rs 'whole_steps: (p.k / tiles.terms) as i32' 'whole_steps: p.k.div_ceil(tiles.terms) as i32' "${on_device[@]}"
mutant device.rs 'lhs_stride: p.lhs.stride as i32' 'lhs_stride: p.k as i32' "${on_device[@]}"
mutant device.rs 'out_stride: p.out_stride as i32,' 'out_stride: p.n as i32,' "${on_device[@]}"
mutant device.rs 'row_stride: p.out_stride as i32' 'row_stride: p.m as i32' "${on_device[@]}"
mutant device.rs 'size(sizes.tiles_n as usize, sizes.tiles_m as usize)' 'size(sizes.tiles_m as usize, sizes.tiles_n as usize)' "${on_device[@]}"
mutant device.rs 'pipelines.get(&(id, kernel.to_owned()))' 'pipelines.values().next()' "${on_device[@]}"

echo "$count mistakes, $missed of them missed"
[[ $missed == 0 ]]
