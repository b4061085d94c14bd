#!/usr/bin/env bash
# Mutation tests of the kernels over quantised rows: for each mutation, their tests must fail. On a processor with AVX-512 and
# its permutations of bytes; about six minutes.
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

. scripts/mutants.sh

expect cargo test --locked --lib quantised::

# Scales and codes
mutant cpu/quantised/bytes.rs 'word >> 2 & 0x3030_3030' 'word >> 4 & 0x3030_3030'
mutant cpu/quantised/bytes.rs 'rest >> 4 & 0x0f0f_0f0f' 'rest & 0x0f0f_0f0f'
mutant cpu/quantised/avx512.rs 'self.0.halves(0, 30)' 'self.0.halves(0, 28)'
mutant cpu/quantised/avx512.rs 'scales.0[4 * U + j]' 'scales.0[4 * U]'
mutant cpu/quantised/avx512.rs 'self.0.halves(4 - 2 * U as i32, 3 - 2 * U as i32)' 'self.0.halves(4 - 2 * U as i32, 4 - 2 * U as i32)'
mutant cpu/quantised/avx512.rs '_mm512_set1_ps(160.0)' '_mm512_set1_ps(128.0)'
mutant cpu/quantised/avx512.rs 'NIBBLES.map(|q| q - 8.0)' 'NIBBLES'

# Products
mutant cpu/quantised/few.rs '(i * IDS + n).min(ids - 1)' '(i * IDS + n).min(ids - 1) / 2'
mutant cpu/quantised/few.rs 'if self.is_added { *to + sum } else { sum }' 'sum'
mutant cpu/quantised/few.rs 'let at = b * B::UNITS + UNIT;' 'let at = b * B::UNITS;'
mutant cpu/quantised/few.rs 'part(row.min(last), first..' 'part(0, first..'
mutant cpu/quantised/few.rs ', first..self.width)' ', 0..self.width)'
mutant cpu/quantised/many.rs 'columns.start == 0' 'true'
mutant cpu/quantised/many.rs 'first_row + row' 'row'
mutant cpu/quantised/blocks.rs 'first - ids.start..block.end - ids.start' '0..block.len()'
mutant cpu/quantised/unpacking.rs 'Isa::Avx512(unpacking.simd()),' 'Isa::Avx2(*unpacking.simd()),'

report
