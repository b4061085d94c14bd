// The kernels that copy matrices whose rows are padded, for products. A warp copies a row.

// Copies `count` rows of `width` elements to rows of `stride` elements. Elements behind are zero, but for a one if
// `has_ones`; so are all rows from `count` to `rows`.
template <typename T>
FUNCTION void pad_rows(GLOBAL const T *from, GLOBAL T *to, i64 count, i64 rows, int width, int stride, int has_ones,
                       uint block, uint tid) {
    const i64 row = (i64)block * WARPS + tid / 32;
    if (row >= rows) return;
    for (int i = tid % 32; i < stride; i += 32) {
        const bool is_copied = row < count && i < width;
        const float padding = row < count && i == width && has_ones ? 1.f : 0.f;
        store(to + row * stride + i, is_copied ? widened(from + row * width + i) : padding);
    }
}

// Copies the first `width` elements of `count` rows of `stride` elements, times the factor of the row if `factors` is not
// null, rounded to bf16.
template <typename T>
FUNCTION void round_rows(GLOBAL const T *from, GLOBAL const float *factors, GLOBAL Brain *to, i64 count, int width,
                         int stride, uint block, uint tid) {
    const i64 row = (i64)block * WARPS + tid / 32;
    if (row >= count) return;
    for (int i = tid % 32; i < width; i += 32) {
        const float x = widened(from + row * stride + i);
        store(to + row * width + i, factors ? weighted(factors[row], x) : x);
    }
}
