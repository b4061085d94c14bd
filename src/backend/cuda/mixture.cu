// The CUDA kernels of the mixture: the functions of gpu/kernels under the names that the host launches. The
// parameters of each are the fields of its structure in gpu/kernels.rs, in their order.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define GLOBAL
#define SHARED
#define LOCAL
#define FUNCTION __device__ __forceinline__
typedef long long i64;
typedef unsigned int uint;
typedef __half Half;
typedef __nv_bfloat16 Brain;

namespace functions {

FUNCTION float minus_infinity() { return __int_as_float(0xff800000); }
FUNCTION float not_a_number() { return __int_as_float(0x7fc00000); }
FUNCTION float exponential(float x) { return expf(x); }
FUNCTION float fast_exponential(float x) { return __expf(x); }
FUNCTION float logarithm(float x) { return logf(x); }
FUNCTION float hyperbolic_tangent(float x) { return tanhf(x); }
FUNCTION float square_root(float x) { return sqrtf(x); }
FUNCTION float larger(float x, float y) { return fmaxf(x, y); }
FUNCTION float shuffled(float x, int lane) { return __shfl_xor_sync(0xffffffffu, x, lane); }
FUNCTION int shuffled(int x, int lane) { return __shfl_xor_sync(0xffffffffu, x, lane); }
FUNCTION void synchronize() { __syncthreads(); }

FUNCTION void store(float *to, float x) { *to = x; }
FUNCTION void store(Half *to, float x) { *to = __float2half_rn(x); }
FUNCTION void store(Brain *to, float x) { *to = __float2bfloat16_rn(x); }
FUNCTION float widened(const float *from) { return *from; }
FUNCTION float widened(const Half *from) { return __half2float(*from); }
FUNCTION float widened(const Brain *from) { return __bfloat162float(*from); }

// Four consecutive elements, which one instruction reads or writes.
template <typename T> struct alignas(4 * sizeof(T)) Four {
    T elements[4];
};
template <typename T> FUNCTION void load4(const T *from, float *x) {
    const Four<T> four = *reinterpret_cast<const Four<T> *>(from);
    for (int i = 0; i < 4; ++i) x[i] = widened(four.elements + i);
}
template <typename T> FUNCTION void store4(T *to, const float *x) {
    Four<T> four;
    for (int i = 0; i < 4; ++i) store(four.elements + i, x[i]);
    *reinterpret_cast<Four<T> *>(to) = four;
}
// Two elements, and a copy of 16 bytes.
FUNCTION void store2(Brain *to, const float *x) {
    struct alignas(4) Two {
        Brain elements[2];
    } two;
    for (int i = 0; i < 2; ++i) store(two.elements + i, x[i]);
    *reinterpret_cast<Two *>(to) = two;
}
FUNCTION void copy8(Brain *to, const Brain *from) {
    struct alignas(16) Eight {
        Brain elements[8];
    };
    *reinterpret_cast<Eight *>(to) = *reinterpret_cast<const Eight *>(from);
}

#include "../gpu/kernels/arguments.h"
#include "../gpu/kernels/reductions.h"
#include "../gpu/kernels/ranking.h"
#include "../gpu/kernels/loss.h"
#include "../gpu/kernels/log_probs.h"
#include "../gpu/kernels/scores.h"
#include "../gpu/kernels/gradients.h"
#include "../gpu/kernels/targets.h"
#include "../gpu/kernels/activation.h"
#include "../gpu/kernels/columns.h"
#include "../gpu/kernels/relative.h"
#include "tensor_cores.h"
#include "exponentials.h"

} // namespace functions

using namespace functions;

#define KERNEL extern "C" __global__ void
#define INDICES blockIdx.x, threadIdx.x

KERNEL row_log_sum_exp(Logits logits, Objective objective, Rows rows) {
    __shared__ Sum warp_sums[WARPS];
    functions::row_log_sum_exp(logits, objective, rows, INDICES, warp_sums);
}
KERNEL position_loss(Objective objective, Rows rows, float *nll, float *loss, int positions, int components) {
    functions::position_loss(objective, rows, nll, loss, positions, components, INDICES);
}
KERNEL top_k(const float *log_probs, i64 stride, int vocab, int k, int *ids, float *id_log_probs) {
    __shared__ Largest warp_largest[WARPS];
    functions::top_k(log_probs, stride, vocab, k, ids, id_log_probs, INDICES, warp_largest);
}
KERNEL position_scores(Logits logits, Rows rows, Scored scored, float *log_probs, float *scores) {
    __shared__ float warp_values[WARPS];
    __shared__ Sum warp_sums[WARPS];
    functions::position_scores(logits, rows, scored, log_probs, scores, INDICES, warp_values, warp_sums);
}
KERNEL position_masses(Scored scored, const float *scores, const float *upstream, float *scales, float *mass_bounds,
                       int positions, int vocab) {
    functions::position_masses(scored, scores, upstream, scales, mass_bounds, positions, vocab, INDICES);
}
KERNEL row_soft_mass(Logits logits, Objective objective, Rows rows, Scored scored, const float *log_probs) {
    __shared__ float warp_values[WARPS];
    functions::row_soft_mass(logits, objective, rows, scored, log_probs, INDICES, warp_values);
}
KERNEL log_prior_gradients(Objective objective, Rows rows, float *log_prior_gradient, float *own_gradient,
                           const float *gradient_factor, i64 count, int components) {
    functions::log_prior_gradients(objective, rows, log_prior_gradient, own_gradient, gradient_factor, count, components,
                                   INDICES);
}
KERNEL position_targets(const i64 *targets, const float *position_weights, const float *class_weights, i64 ignore_index,
                        int has_ignore_index, float smoothing, int *ids, float *hard, float *weights, float *counts,
                        int positions, i64 vocab, i64 first_row, int row_count) {
    functions::position_targets(targets, position_weights, class_weights, ignore_index, has_ignore_index, smoothing,
                                ids, hard, weights, counts, positions, vocab, first_row, row_count, INDICES);
}
KERNEL reduction_scales(const float *weights, const float *counts, const float *class_bound, int is_mean, float constant_scale,
                        float *scalars, int positions) {
    __shared__ Extent warp_extents[WARPS];
    functions::reduction_scales(weights, counts, class_bound, is_mean, constant_scale, scalars, positions, threadIdx.x,
                                warp_extents);
}
KERNEL weigh_losses(const float *weights, const float *losses, const float *count, float *objectives, float *values,
                    int positions) {
    __shared__ float warp_values[WARPS];
    functions::weigh_losses(weights, losses, count, objectives, values, positions, threadIdx.x, warp_values);
}
KERNEL position_gradient_scales(const float *weights, const float *upstream, const float *common_scale,
                                const float *largest_weight, float *scales, int positions) {
    functions::position_gradient_scales(weights, upstream, common_scale, largest_weight, scales, positions, INDICES);
}
KERNEL row_references(Logits logits, Rows rows, i64 stride, int ids, int count) {
    functions::row_references(logits, rows, stride, ids, count, INDICES);
}
KERNEL __launch_bounds__(BLOCK, 2) product_exponentials(Logits logits, Objective objective, Rows rows,
                                                        const Brain *contexts, const Brain *decoder, float *powers,
                                                        Brain *exponentials, int count, int depth) {
    __shared__ Tile tile;
    functions::product_exponentials(logits, objective, rows, contexts, decoder, powers, exponentials, count, depth,
                                    INDICES, tile);
}
KERNEL join_powers(Logits logits, Objective objective, Rows rows, const Brain *contexts, const Brain *decoder,
                    const float *powers, Brain *exponentials, int count, int depth) {
    functions::join_powers(logits, objective, rows, contexts, decoder, powers, exponentials, count, depth, INDICES);
}

#define FOR_TYPE(name, T)                                                                                              \
    KERNEL mixture_log_probs_##name(Logits logits, Objective objective, Rows rows, T *log_probs, i64 out_stride,       \
                                    float *loss, int *argmax) {                                                        \
        __shared__ float warp_values[WARPS];                                                                           \
        __shared__ Largest warp_largest[WARPS];                                                                        \
        functions::mixture_log_probs(logits, objective, rows, log_probs, out_stride, loss, argmax, INDICES,            \
                                     warp_values, warp_largest);                                                       \
    }                                                                                                                  \
    KERNEL row_gradient_##name(Logits logits, Objective objective, Rows rows, Scored scored, const float *log_probs,   \
                               T *gradient) {                                                                          \
        functions::row_gradient(logits, objective, rows, scored, log_probs, gradient, INDICES);                        \
    }                                                                                                                  \
    KERNEL row_target_gradient_##name(Logits logits, Objective objective, Rows rows, T *gradient) {                    \
        functions::row_target_gradient(logits, objective, rows, gradient, INDICES);                                    \
    }                                                                                                                  \
    KERNEL bias_tanh_##name(const T *z, const T *bias, T *result, int columns) {                                       \
        functions::bias_tanh(z, bias, result, columns, INDICES);                                                       \
    }                                                                                                                  \
    KERNEL tanh_gradient_##name(const T *result, const T *upstream, T *gradient, i64 count) {                          \
        functions::tanh_gradient(result, upstream, gradient, count, INDICES);                                          \
    }                                                                                                                  \
    KERNEL log_softmax_##name(const T *z, const T *bias, float *result, i64 count, int columns) {                      \
        functions::log_softmax(z, bias, result, count, columns, INDICES);                                              \
    }                                                                                                                  \
    KERNEL log_softmax_gradient_##name(const float *result, const float *upstream, T *gradient, i64 count,             \
                                       int columns) {                                                                  \
        functions::log_softmax_gradient(result, upstream, gradient, count, columns, INDICES);                          \
    }                                                                                                                  \
    KERNEL pad_rows_##name(const T *from, T *to, i64 count, i64 rows, int width, int stride, int has_ones) {           \
        functions::pad_rows(from, to, count, rows, width, stride, has_ones, INDICES);                                  \
    }                                                                                                                  \
    KERNEL round_rows_##name(const T *from, const float *factors, Brain *to, i64 count, int width, int stride) {       \
        functions::round_rows(from, factors, to, count, width, stride, INDICES);                                       \
    }                                                                                                                  \
    KERNEL row_exponentials_##name(Logits logits, Objective objective, Rows rows, T *exponentials) {                   \
        __shared__ Extent warp_extents[WARPS];                                                                          \
        functions::row_exponentials(logits, objective, rows, exponentials, INDICES, warp_extents);                     \
    }                                                                                                                  \
    KERNEL row_factors_##name(Logits logits, Objective objective, Rows rows, T *exponentials, T *factors, i64 count) { \
        functions::row_factors(logits, objective, rows, exponentials, factors, count, INDICES);                        \
    }                                                                                                                  \
    KERNEL scale_rows_##name(const T *from, const float *factors, T *to, i64 count, int stride) {                      \
        functions::scale_rows(from, factors, to, count, stride, INDICES);                                              \
    }
FOR_TYPE(f32, float)
FOR_TYPE(f16, Half)
FOR_TYPE(bf16, Brain)
