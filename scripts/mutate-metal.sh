#!/usr/bin/env bash
# Mutation tests of the Rust code that calls the Metal kernels. For each mutation it runs the tests that must catch it:
# unit tests on the host, or tests on the emulated device. (The unit tests contain the mutations of the kernels.)
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

. scripts/mutants.sh


# The bindings of parameters, and the bits of absent ones
expect cargo test --locked --lib testing::tests
mutant metal/arguments.rs 'read(x.scales),' 'Binding::Absent,'
mutant metal/arguments.rs 'x.cap.to_ne_bytes()' '0f32.to_ne_bytes()'
mutant metal/arguments.rs '*binding != Binding::Absent' 'true'
expect scripts/check-metal-on-linux.sh --test training
mutant metal/arguments.rs 'if address == 0 { Binding::Absent } else { Binding::Write(address) }' 'Binding::Write(address)'

# Products, tile by tile
expect cargo test --locked --lib testing::tests
mutant metal/f32_products.rs 'product.accumulates || first > 0' 'product.accumulates'
mutant metal/f32_products.rs 'out: product.out + offset(first)' 'out: product.out'
mutant metal/f32_products.rs 'lhs.address + offset(first_of_lhs)' 'lhs.address'
mutant metal/f32_products.rs '.min(rows - first)' '.min(rows)'
mutant metal/f32_products.rs 'Read(lhs.address),' 'Read(rhs.address),'
mutant metal/f32_products.rs 'n.div_ceil(BLOCK / WARP)' 'n / (BLOCK / WARP)'

# The calls of candle's encoder
expect scripts/check-metal-on-linux.sh --test training
mutant metal/device.rs 'set_param(encoder, slot, Output::with_offset(&buffer, offset));' 'set_param(encoder, slot, Input::with_offset(&buffer, offset));'
mutant metal/device.rs 'set_param(encoder, slot, Input::with_offset(&buffer, offset));' 'set_param(encoder, slot, Input::with_offset(&buffer, 0));'
mutant metal/device.rs 'set_param(encoder, 3, Output::with_offset(&out.0, out.1));' 'set_param(encoder, 3, Input::with_offset(&out.0, out.1));'
mutant metal/device.rs 'set_param(encoder, 0, Input::with_offset(&lhs.0, lhs.1));' 'set_param(encoder, 0, Input::with_offset(&lhs.0, 0));'
mutant metal/device.rs 'let offset = layout.start_offset() * storage.dtype().size_in_bytes();' 'let offset = layout.start_offset();'
mutant metal/device.rs 'size(blocks, 1), size(BLOCK, 1)' 'size(blocks, 1), size(BLOCK / 2, 1)'
mutant metal/device.rs '(100, Value::Bool(product.accumulates))' '(100, Value::Bool(false))'
mutant metal/device.rs 'product.k.is_multiple_of(tiling.step)' 'true'
mutant metal/device.rs 'whole_steps: (product.k / tiling.step) as i32' 'whole_steps: product.k.div_ceil(tiling.step) as i32'
mutant metal/device.rs 'lhs_stride: product.lhs.stride as i32' 'lhs_stride: product.k as i32'
mutant metal/device.rs 'out_stride: product.out_stride as i32,' 'out_stride: product.n as i32,'
mutant metal/device.rs 'row_stride: product.out_stride as i32' 'row_stride: product.m as i32'
mutant metal/device.rs 'size(sizes.tiles_n as usize, sizes.tiles_m as usize)' 'size(sizes.tiles_m as usize, sizes.tiles_n as usize)'
mutant metal/device.rs 'pipelines.get(&(id, kernel.to_owned()))' 'pipelines.values().next()'

# The rows of the last tile, if the buffer ends within it
expect scripts/check-metal-on-linux.sh --test products
mutant metal/device.rs 'offset + bytes(whole_tiles) <= out.length()' 'true'
mutant metal/device.rs 'if product.lhs.is_transposed { before } else { before * product.lhs.stride }' 'before'
mutant metal/device.rs 'product.out + bytes(before * product.out_stride) as u64' 'product.out'
mutant metal/device.rs 'self.copy(last.out, copy,' 'self.copy(product.out, copy,'
mutant metal/device.rs 'if before > 0' 'if true'

report
