#!/usr/bin/env bash
# Mutation tests of the Rust code that calls the CUDA kernels and cuBLAS, and of the kernels' barriers. For each mutation,
# tests on the emulated driver must fail. (The unit tests contain the other mutations of the kernels.)
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

. scripts/mutants.sh

expect scripts/check-cuda-on-linux.sh --test training --test cuda_on_linux -- --skip faults --skip injected

# Addresses and launches
mutant cuda/device.rs '(layout.start_offset() * size_of::<T>()) as u64' 'layout.start_offset() as u64'
mutant cuda/device.rs 'DType::I64 => self.element_address::<i64>' 'DType::I64 => self.element_address::<u32>'
mutant cuda/device.rs 'block_dim: (BLOCK as u32' 'block_dim: (BLOCK as u32 / 2'
mutant cuda/device.rs 'grid_dim: (blocks as u32' 'grid_dim: (blocks as u32 + 1'
mutant cuda/device.rs 'Argument::Long(x) => builder.arg(x)' 'Argument::Long(_) => builder.arg(&0i64)'
mutant cuda/device.rs 'Argument::Rows(x) => builder.arg(x)' 'Argument::Rows(_) => &mut builder'
mutant cuda/device.rs 'self.kernels.load_function(kernel)' 'self.kernels.load_function("row_log_sum_exp")'

# State of a thread and a stream
mutant cuda/device.rs 'stream.cu_stream() as usize);' '0);'
mutant cuda/device.rs 'CudaBlas::new(stream.clone())' 'CudaBlas::new(stream.context().new_stream().w()?)'
mutant cuda/device.rs '(CUBLAS_POINTER_MODE_DEVICE,' '(CUBLAS_POINTER_MODE_HOST,'
mutant cuda/device.rs '(CUBLAS_POINTER_MODE_HOST,' '(CUBLAS_POINTER_MODE_DEVICE,'
mutant cuda/device.rs '&[0f32, 1.0]' '&[1f32, 0.0]'
mutant cuda/device.rs 'usize::from(product.accumulates) * size_of' 'usize::from(product.accumulates) * 2 * size_of'

# Products
mutant cuda/device.rs 'DType::F16 => CUDA_R_16F,' 'DType::F16 => CUDA_R_16BF,'
mutant cuda/device.rs '(one, beta) = (1f32,' '(one, beta) = (0f32,'
mutant cuda/device.rs 'alpha as *const f32, beta' 'beta as *const f32, beta'
mutant cuda/device.rs 'f32::from(u8::from(product.accumulates))' '1f32'
mutant cuda/device.rs 'f32::from(u8::from(product.accumulates))' '0f32'
mutant cuda/device.rs 'operation(&product.rhs),' 'operation(&product.lhs),'
mutant cuda/device.rs 'product.k as i32' 'product.k as i32 - 1'
mutant cuda/device.rs 'product.rhs.stride as i32' 'product.n as i32'
mutant cuda/device.rs 'product.lhs.stride as i32' 'product.k as i32'
mutant cuda/device.rs 'product.out_stride as i32' 'product.n as i32'
mutant cuda/device.rs 'product.out as *mut _' 'product.lhs.address as *mut _'

# The memory and the arguments of the chunks
mutant gpu/chunks.rs 'Buffer::zeros(gpu, ROW_VALUES * rows' 'Buffer::zeros(gpu, (ROW_VALUES - 1) * rows'
mutant gpu/chunks.rs 'Buffer::unwritten(gpu, rows * logit_columns' 'Buffer::unwritten(gpu, rows * (logit_columns - 1)'
mutant gpu/chunks.rs 'self.rows_per_chunk / self.inputs.sizes.components * self.stride' '(self.rows_per_chunk / self.inputs.sizes.components - 1) * self.stride'
mutant gpu/chunks.rs 'count: self.rows_per_chunk as i64' 'count: self.rows_per_chunk as i64 + 1'
mutant gpu/chunks.rs 'Write(ids.at(positions.start * k))' 'Write(ids.at(positions.start * k + 1))'

# Barriers
mutant gpu/kernels/reductions.h $'synchronize();\n    x = warp_values[0];' 'x = warp_values[0];'
mutant gpu/kernels/reductions.h $'synchronize();\n    return x;' 'return x;'

# A first product that writes exponentials
expect scripts/check-cuda-on-linux.sh --test scale several
mutant gpu/exponentials.rs '2 * tiles_per_row' 'tiles_per_row'
mutant gpu/exponentials.rs 'columns.contexts.at(chunk_rows.start * columns.stride)' 'columns.contexts.at(chunk_rows.start)'
mutant gpu/exponentials.rs 'count.div_ceil(TILE) * tiles' '(count / TILE) * tiles'
mutant gpu/exponentials.rs 'depth: columns.stride as i32' 'depth: columns.stride as i32 - 8'
mutant cuda/exponentials.h $'wait_for_copies<STAGES - 2>();\n        synchronize();' 'wait_for_copies<STAGES - 2>();'
mutant cuda/exponentials.h $'    wait_for_copies<0>();\n    synchronize();' '    wait_for_copies<0>();'
mutant cuda/exponentials.h $'    synchronize();\n\n    // This thread has two' $'\n    // This thread has two'
mutant cuda/exponentials.h $'    synchronize();\n    for (int i = tid; i < TILE' '    for (int i = tid; i < TILE'

# A vocabulary that ranks share
expect scripts/check-cuda-on-linux.sh --test vocab_parallel gpu
mutant gpu/kernels/loss.h 'id >= 0 || id == ELSEWHERE' 'id >= 0'
mutant gpu/kernels/targets.h '(int)(target - first_row)' '(int)target'
mutant gpu/kernels/targets.h 'is_id && target >= first_row && target < first_row + row_count' 'is_id && target >= first_row'
mutant gpu/chunks.rs 'self.row_values.tensor.slice_set' 'self.row_values.tensor.copy()?.slice_set'
mutant gpu/loss_chunks.rs 'targets.owners[positions]' 'targets.owners'
mutant gpu/loss.rs 'Some(shard) => sum_context_gradients(shard, gradients)?' 'Some(_) => gradients'
mutant gpu/target_ids.rs 'Some(shard) => (shard.vocab_size(), shard.range())' 'Some(shard) => (shard.range().end, shard.range())'
expect scripts/check-cuda-on-linux.sh --test cuda_on_linux nccl
mutant cuda/communicator.rs 'order_after(&comm.stream(), &stream)?;' ''
mutant cuda/communicator.rs 'order_after(&stream, &comm.stream())?;' ''
mutant cuda/communicator.rs 'let _ = self.0.stream().synchronize();' ''
mutant cuda/communicator.rs 'slice(start..start + n)' 'slice(0..n)'

# Empty batches
expect scripts/check-cuda-on-linux.sh --test edges
mutant cuda/device.rs 'if blocks == 0 {' 'if false {'

report
