// The kernels of the projection: the activation of the contexts, and its gradient.

// One block per row: computes tanh(z + bias).
template <typename T>
FUNCTION void bias_tanh(GLOBAL const T *z, GLOBAL const T *bias, GLOBAL T *result, int columns, uint block, uint tid) {
    const i64 first = (i64)block * columns;
    for (int i = tid; i < columns; i += BLOCK) {
        store(result + first + i, hyperbolic_tangent(widened(z + first + i) + widened(bias + i)));
    }
}

// One thread per element: computes the gradient of the argument of tanh, from its result and the gradient of the result.
template <typename T>
FUNCTION void tanh_gradient(GLOBAL const T *result, GLOBAL const T *upstream, GLOBAL T *gradient, i64 count, uint block,
                            uint tid) {
    const i64 i = (i64)block * BLOCK + tid;
    if (i >= count) return;
    const float y = widened(result + i), g = widened(upstream + i);
    store(gradient + i, g - y * y * g);
}
