// The kernels of the projection: the activation of the contexts, the log-softmax of the priors, and their gradients.

// One block per row: computes tanh(z + bias).
template <typename T>
FUNCTION void bias_tanh(GLOBAL const T *z, GLOBAL const T *bias, GLOBAL T *result, int columns, uint block, uint tid) {
    const i64 first = (i64)block * columns;
    for (int i = tid; i < columns; i += BLOCK) {
        store(result + first + i, hyperbolic_tangent(widened(z + first + i) + widened(bias + i)));
    }
}

// One thread per element: computes the gradient of the argument of tanh, from its result and the gradient of the
// result.
template <typename T>
FUNCTION void tanh_gradient(GLOBAL const T *result, GLOBAL const T *upstream, GLOBAL T *gradient, i64 count, uint block,
                            uint tid) {
    const i64 i = (i64)block * BLOCK + tid;
    if (i >= count) return;
    const float y = widened(result + i), g = widened(upstream + i);
    store(gradient + i, g - y * y * g);
}

// One warp per row: computes log softmax(z + bias) of `count` rows. The bias may be null.
template <typename T>
FUNCTION void log_softmax(GLOBAL const T *z, GLOBAL const T *bias, GLOBAL float *result, i64 count, int columns,
                          uint block, uint tid) {
    const i64 row = (i64)block * WARPS + tid / 32;
    const int lane = tid % 32, end = row < count ? columns : 0;
    z += row * columns;
    result += row * columns;
    Sum sum = {minus_infinity(), 0.f};
    for (int i = lane; i < end; i += 32) {
        const float x = bias ? widened(z + i) + widened(bias + i) : widened(z + i);
        result[i] = x;
        sum.add({x, 1.f});
    }
    sum = warp_reduce(sum);
    const float largest = finite_or_zero(sum.largest), log_sum = logarithm(sum.sum);
    for (int i = lane; i < end; i += 32) result[i] = result[i] - largest - log_sum;
}

// One warp per row: computes the gradient of the argument of the log-softmax, from its result and the gradient of the
// result.
template <typename T>
FUNCTION void log_softmax_gradient(GLOBAL const float *result, GLOBAL const float *upstream, GLOBAL T *gradient,
                                   i64 count, int columns, uint block, uint tid) {
    const i64 row = (i64)block * WARPS + tid / 32;
    const int lane = tid % 32, end = row < count ? columns : 0;
    result += row * columns;
    upstream += row * columns;
    float total = 0.f;
    for (int i = lane; i < end; i += 32) total += upstream[i];
    total = warp_reduce(total);
    for (int i = lane; i < end; i += 32) store(gradient + row * columns + i, upstream[i] - exponential(result[i]) * total);
}
