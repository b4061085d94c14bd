// The CUDA kernels of the mixture: the functions of gpu/rows.h under the names that the host launches.

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
FUNCTION float logarithm(float x) { return logf(x); }
FUNCTION float hyperbolic_tangent(float x) { return tanhf(x); }
FUNCTION float larger(float x, float y) { return fmaxf(x, y); }
FUNCTION float shuffled(float x, int lane) { return __shfl_xor_sync(0xffffffffu, x, lane); }
FUNCTION int shuffled(int x, int lane) { return __shfl_xor_sync(0xffffffffu, x, lane); }
FUNCTION void synchronize() { __syncthreads(); }

FUNCTION void store(float *to, float x) { *to = x; }
FUNCTION void store(Half *to, float x) { *to = __float2half_rn(x); }
FUNCTION void store(Brain *to, float x) { *to = __float2bfloat16_rn(x); }

template <typename T> struct alignas(4 * sizeof(T)) Four {
    T of[4];
};
FUNCTION void load4(const float *from, float *x) {
    const Four<float> four = *reinterpret_cast<const Four<float> *>(from);
    for (int i = 0; i < 4; ++i) x[i] = four.of[i];
}
template <typename T> FUNCTION void store4(T *to, const float *x) {
    Four<T> four;
    for (int i = 0; i < 4; ++i) store(four.of + i, x[i]);
    *reinterpret_cast<Four<T> *>(to) = four;
}

#include "../gpu/rows.h"

} // namespace functions

using namespace functions;

#define KERNEL extern "C" __global__ void
#define INDICES blockIdx.x, threadIdx.x

KERNEL row_log_sum_exp(Logits logits, Objective objective, Rows rows) {
    __shared__ Sum of_warps[WARPS];
    functions::row_log_sum_exp(logits, objective, rows, INDICES, of_warps);
}
KERNEL position_loss(Objective objective, Rows rows, float *nll, float *loss, int positions, int components) {
    functions::position_loss(objective, rows, nll, loss, positions, components, INDICES);
}
KERNEL top_k(const float *log_probs, i64 stride, int vocab, int k, int *ids, float *id_log_probs) {
    __shared__ Largest of_warps[WARPS];
    functions::top_k(log_probs, stride, vocab, k, ids, id_log_probs, INDICES, of_warps);
}
KERNEL position_scores(Logits logits, Rows rows, Scored scored, float *log_probs, float *scores) {
    __shared__ float of_warps[WARPS];
    __shared__ Sum sums_of_warps[WARPS];
    functions::position_scores(logits, rows, scored, log_probs, scores, INDICES, of_warps, sums_of_warps);
}
KERNEL position_masses(Scored scored, const float *scores, const float *upstream, float *scales, float *magnitudes,
                       int positions, int vocab) {
    functions::position_masses(scored, scores, upstream, scales, magnitudes, positions, vocab, INDICES);
}
KERNEL row_soft_mass(Logits logits, Objective objective, Rows rows, Scored scored, const float *log_probs) {
    __shared__ float of_warps[WARPS];
    functions::row_soft_mass(logits, objective, rows, scored, log_probs, INDICES, of_warps);
}
KERNEL position_scales(Objective objective, Rows rows, float *log_prior_gradient, float *own_gradient, int positions,
                       int components) {
    functions::position_scales(objective, rows, log_prior_gradient, own_gradient, positions, components, INDICES);
}
KERNEL position_targets(const i64 *targets, const float *position_weights, const float *class_weights, i64 ignore_index,
                        int ignores, float smoothing, int *ids, float *hard, float *weights, float *counts,
                        int positions, i64 vocab, i64 first, int rows) {
    functions::position_targets(targets, position_weights, class_weights, ignore_index, ignores, smoothing, ids, hard,
                                weights, counts, positions, vocab, first, rows, INDICES);
}
KERNEL position_weighting(const float *weights, const float *upstream, const float *largest_upstream,
                          const float *largest_weight, float *scales, int positions) {
    functions::position_weighting(weights, upstream, largest_upstream, largest_weight, scales, positions, INDICES);
}

#define FOR_TYPE(name, T)                                                                                              \
    KERNEL mixture_log_probs_##name(Logits logits, Objective objective, Rows rows, T *log_probs, i64 out_stride,       \
                                    float *loss, int *argmax) {                                                        \
        __shared__ float of_warps[WARPS];                                                                              \
        __shared__ Largest largest_of_warps[WARPS];                                                                    \
        functions::mixture_log_probs(logits, objective, rows, log_probs, out_stride, loss, argmax, INDICES, of_warps,  \
                                     largest_of_warps);                                                                \
    }                                                                                                                  \
    KERNEL row_gradient_##name(Logits logits, Objective objective, Rows rows, Scored scored, const float *log_probs,   \
                               T *gradient) {                                                                          \
        functions::row_gradient(logits, objective, rows, scored, log_probs, gradient, INDICES);                        \
    }
FOR_TYPE(f32, float)
FOR_TYPE(f16, Half)
FOR_TYPE(bf16, Brain)
