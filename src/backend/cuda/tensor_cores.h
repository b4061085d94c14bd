// What the tensor cores of compute capability 8.0 and later do for a warp, copies that do not wait, and powers. Behind
// `#else` is what the host does in their place when it emulates a GPU.

#ifdef __CUDACC__

// Copies 16 bytes from global to shared memory, or clears them if `has_source` is false. The copy is complete after its
// group has been waited for, and seen by other threads after a barrier.
FUNCTION void copy_async(void *to, const void *from, bool has_source) {
    const uint at = static_cast<uint>(__cvta_generic_to_shared(to));
    const int bytes = has_source ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
// Ends a group of copies.
FUNCTION void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of this thread but the last `count`.
template <int count> FUNCTION void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(count) : "memory");
}

// Reads four matrices of 8 x 8 elements of 16 bits: lane i gives the address of row i % 8 of matrix i / 8, and gets
// the elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4 of each matrix.
FUNCTION void load_matrices(const void *from, uint *matrices) {
    const uint at = static_cast<uint>(__cvta_generic_to_shared(from));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(at)
                 : "memory");
}

// Adds to a tile of 16 x 8 sums the product of tiles of 16 x 16 and 16 x 8 elements in bf16. Lane i has the sums (i /
// 4, 2 (i % 4)), the next column, and both 8 rows below; the left tile as four matrices of `load_matrices` (upper
// left, lower left, upper right, lower right), the right tile's transpose as two.
FUNCTION void multiply_add(float *sums, const uint *left, const uint *right) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

// 2^x, with a relative error of 2^-22; zero below the normal numbers.
FUNCTION float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

#else

FUNCTION void copy_async(void *to, const void *from, bool has_source) {
    // A copy, unlike memset, is seen by the emulated driver, which looks for reads of what nothing has written.
    const uint zeros[4] = {};
    memcpy(to, has_source ? from : zeros, 16);
}
FUNCTION void commit_copies() {}
template <int count> FUNCTION void wait_for_copies() {}
FUNCTION void load_matrices(const void *from, uint *matrices) {
    uint low[32], high[32];
    emulated_gather((uint)reinterpret_cast<size_t>(from), low);
    emulated_gather((uint)(reinterpret_cast<size_t>(from) >> 32), high);
    const uint lane = threadIdx.x % 32;
    for (uint matrix = 0; matrix < 4; ++matrix) {
        const uint row = 8 * matrix + lane / 4;
        const size_t at = (size_t)high[row] << 32 | low[row];
        memcpy(matrices + matrix, reinterpret_cast<const char *>(at) + lane % 4 * 4, 4);
    }
}
FUNCTION void multiply_add(float *sums, const uint *left, const uint *right) {
    uint lefts[4][32], rights[2][32];
    for (int i = 0; i < 4; ++i) emulated_gather(left[i], lefts[i]);
    for (int i = 0; i < 2; ++i) emulated_gather(right[i], rights[i]);
    const uint lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        for (int k = 0; k < 16; ++k) {
            Brain x[2], y[2];
            const int part = k % 8 / 2;
            memcpy(x, &lefts[k / 8 * 2 + i / 2][lane / 4 * 4 + part], 4);
            memcpy(y, &rights[k / 8][(lane % 4 * 2 + i % 2) * 4 + part], 4);
            sums[i] += widened(x + k % 2) * widened(y + k % 2);
        }
    }
}

FUNCTION float power_of_two(float x) { return exp2f(x); }

#endif
