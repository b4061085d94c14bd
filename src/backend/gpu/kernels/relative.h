// The kernels of a gradient of the logits that is not written as such: with targets alone, it is the difference of the
// softmax and the target, times a factor of the row. The first pass over the logits writes their exponentials relative
// to a reference, the products take these for the gradient, and the factors multiply the contexts and the results
// instead.

// The exponentials of a row are relative to zero, or to one of its logits, but never to a number that is farther from
// the largest logit than this: they and their sum would leave the range of f32.
#define LARGEST_LOGIT 60.f

// What is subtracted from the logits of a row, whose largest is `largest`, before their exponentials: `reference`, if
// it is near enough.
FUNCTION float exponential_reference(float largest, float reference) {
    return absolute(largest - reference) <= LARGEST_LOGIT ? reference : largest;
}

// One block per row: computes what `row_log_sum_exp` does, and the exponentials of the logits.
template <typename T>
FUNCTION void row_exponentials(Logits logits, Objective objective, Rows rows, GLOBAL T *exponentials, uint block,
                               uint tid, SHARED Extent *warp_extents) {
    const i64 r = block;
    GLOBAL const float *row = logits.z + r * logits.stride;
    GLOBAL T *to = exponentials + r * logits.stride;
    float reference = 0.f;
    Extent extent;
    for (int pass = 0; pass < 2; ++pass) {
        extent = {minus_infinity(), 0.f};
        for (int first = tid * 4; first < logits.stride; first += STEP) {
            float x[4 * PARTS];
            for (int part = 0; part < PARTS; ++part) logits.load(row, first + part * BLOCK * 4, x + 4 * part);
            for (int part = 0; part < PARTS; ++part) {
                const int v = first + part * BLOCK * 4;
                for (int i = 0; i < 4; ++i) {
                    const float logit = v + i < logits.vocab ? logits.finish(x[4 * part + i], v + i) : minus_infinity();
                    extent.largest = larger(extent.largest, logit);
                    x[4 * part + i] = exponential(logit - reference);
                    extent.sum += x[4 * part + i];
                }
                if (v < logits.stride) store4(to + v, x + 4 * part);
            }
        }
        extent = block_reduce(extent, tid, warp_extents);
        const float needed = exponential_reference(finite_or_zero(extent.largest), reference);
        if (reference == needed) break;
        reference = needed;
    }
    if (tid == 0) {
        const int id = objective.id(r / logits.components);
        const float largest = finite_or_zero(extent.largest);
        rows.largest(r) = largest;
        rows.log_sum(r) = logarithm(extent.sum * exponential(reference - largest));
        rows.target_logit(r) = id < 0 ? 0.f : logits.at(row, id);
    }
}

// One warp per row: subtracts the target from the exponentials of the row, and computes the factor that makes them its
// gradient, written to `factors` too unless it is null. The exponentials of a row without a gradient become zero,
// because they may be NaN.
template <typename T>
FUNCTION void row_factors(Logits logits, Objective objective, Rows rows, GLOBAL T *exponentials, GLOBAL T *factors,
                          i64 count, uint block, uint tid) {
    const i64 r = (i64)block * WARPS + tid / 32;
    if (r >= count) return;
    GLOBAL T *row = exponentials + r * logits.stride;
    const int lane = tid % 32, id = objective.id(r / logits.components);
    const bool has_gradient = rows.hard_mass(r) != minus_infinity();
    const float largest = rows.largest(r), log_sum = rows.log_sum(r);
    // The exponential of the largest logit, as the others are.
    const float shift = exponential(largest - exponential_reference(largest, rows.reference(r)));
    const float unit = objective.unit();
    const float factor = has_gradient ? unit * rows.softmax_scale(r) * exponential(-log_sum) / shift : 0.f;
    if (lane == 0) {
        rows.factor(r) = factor;
        if (factors) store(factors + r, factor);
        // Without a z-loss, the mass of the target is that of the whole row.
        const float target = shift * (exponential(rows.target_logit(r) - largest) - exponential(log_sum));
        if (has_gradient && id >= 0 && id < logits.vocab) store(row + id, target);
    }
    for (int v = lane; !has_gradient && v < logits.stride; v += 32) store(row + v, 0.f);
}

// One warp per row: multiplies the elements of `count` rows by the factor of the row.
template <typename T>
FUNCTION void scale_rows(GLOBAL const T *from, GLOBAL const float *factors, GLOBAL T *to, i64 count, int stride,
                         uint block, uint tid) {
    const i64 row = (i64)block * WARPS + tid / 32;
    if (row < count) copy_row(from + row * stride, to + row * stride, stride, factors + row, tid % 32);
}
