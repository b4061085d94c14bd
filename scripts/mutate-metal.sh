#!/usr/bin/env bash
# Mutation tests of the Rust code that calls the Metal kernels. For each mutation it runs the tests that must catch it:
# unit tests on the host, or tests on the emulated device. (The unit tests contain the mutations of the kernels.) Each
# file is restored, even if the script is interrupted.
set -euo pipefail
cd "$(dirname "$0")/.."

export PROPTEST_DISABLE_FAILURE_PERSISTENCE=1
missed=0 count=0 file=
# Touches the file, so that cargo rebuilds it.
restore() { [[ ! -e $file.original ]] || { mv "$file.original" "$file" && touch "$file"; }; }
trap restore EXIT

on_host=(cargo test --locked --lib testing::tests)
on_device=(scripts/check-metal-on-linux.sh --test training)
on_products=(scripts/check-metal-on-linux.sh --test products)

# mutant FILE TEXT REPLACEMENT COMMAND..: TEXT must occur exactly once, and COMMAND must compile and fail.
mutant() {
    local text=$2 replacement=$3 content log
    file=src/backend/metal/$1
    shift 3
    content=$(cat "$file")
    [[ $(grep -oF -- "$text" "$file" | wc -l) == 1 ]] || { echo "$file: does not occur exactly once: $text"; exit 1; }
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
        echo "caught  $file: $text -> $replacement"
    fi
    restore
}

# The bindings of parameters, and the bits of absent ones
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

# The calls of candle's encoder
mutant device.rs 'set_param(encoder, slot, Output::with_offset(&buffer, offset));' 'set_param(encoder, slot, Input::with_offset(&buffer, offset));' "${on_device[@]}"
mutant device.rs 'set_param(encoder, slot, Input::with_offset(&buffer, offset));' 'set_param(encoder, slot, Input::with_offset(&buffer, 0));' "${on_device[@]}"
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

# The rows of the last tile, if the buffer ends within it
mutant device.rs 'offset + bytes(whole_tiles) <= out.length()' 'true' "${on_products[@]}"
mutant device.rs 'if p.lhs.transposed { before } else { before * p.lhs.stride }' 'before' "${on_products[@]}"
mutant device.rs 'p.out + bytes(before * p.out_stride) as u64' 'p.out' "${on_products[@]}"
mutant device.rs 'self.copy(last.out, copy,' 'self.copy(p.out, copy,' "${on_products[@]}"
mutant device.rs 'if before > 0' 'if true' "${on_products[@]}"

echo "$count mutations, $missed missed"
[[ $missed == 0 ]]
