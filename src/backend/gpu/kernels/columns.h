// The kernels that copy matrices whose rows are padded, for products. A warp copies a row.

// Whether an address is a multiple of the size of four elements.
template <typename T> FUNCTION bool is_aligned(GLOBAL const T *address) {
    return reinterpret_cast<size_t>(address) % (4 * sizeof(T)) == 0;
}

// Copies a row of `width` elements by a warp, times `factor` unless it is null. In a row with the factor zero, infinite
// elements and NaN become zero too.
template <typename From, typename To>
FUNCTION void copy_row(GLOBAL const From *from, GLOBAL To *to, int width, GLOBAL const float *factor, int lane) {
    const float by = factor ? *factor : 1.f;
    if (width % 4 == 0 && is_aligned(from) && is_aligned(to)) {
        for (int first = 4 * lane; first < width; first += 4 * 32) {
            float x[4];
            load4(from + first, x);
            for (int i = 0; i < 4; ++i) x[i] = weighted(by, x[i]);
            store4(to + first, x);
        }
        return;
    }
    for (int i = lane; i < width; i += 32) store(to + i, weighted(by, widened(from + i)));
}

// Copies `count` rows of `width` elements to rows of `stride` elements. Elements behind are zero, but for a one if
// `has_ones`; so are all rows from `count` to `rows`.
template <typename T>
FUNCTION void pad_rows(GLOBAL const T *from, GLOBAL T *to, i64 count, i64 rows, int width, int stride, int has_ones,
                       uint block, uint tid) {
    const i64 row = (i64)block * WARPS + tid / 32;
    if (row >= rows) return;
    const int lane = tid % 32;
    const bool is_copied = row < count;
    to += row * stride;
    if (is_copied) copy_row(from + row * width, to, width, nullptr, lane);
    for (int i = (is_copied ? width : 0) + lane; i < stride; i += 32) {
        store(to + i, is_copied && i == width && has_ones ? 1.f : 0.f);
    }
}

// Copies the first `width` elements of `count` rows of `stride` elements, times the factor of the row if `factors` is
// not null, rounded to bf16.
template <typename T>
FUNCTION void round_rows(GLOBAL const T *from, GLOBAL const float *factors, GLOBAL Brain *to, i64 count, int width,
                         int stride, uint block, uint tid) {
    const i64 row = (i64)block * WARPS + tid / 32;
    if (row >= count) return;
    copy_row(from + row * stride, to + row * width, width, factors ? factors + row : nullptr, tid % 32);
}
