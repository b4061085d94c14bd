// mos-head: the Metal kernels of the mixture: the functions of gpu/kernels under the names that the host launches, and
// the kernels for products of half-precision operands. The parameters of each are the fields of its structure in
// gpu/kernels.rs (or metal/f32_products.rs), in their order, where LOGITS, OBJECTIVE, ROWS and SCORED stand for the
// parameters that metal/arguments.rs binds for one such argument.
//
// The host binds the parameters one by one, numbered from zero; bit n of `present`, the last one, says whether
// parameter n is present. The host compiles this with safe math: infinities and NaN are valid inputs.

#include <metal_stdlib>
using namespace metal;

#define GLOBAL device
#define SHARED threadgroup
#define LOCAL thread
#define FUNCTION METAL_FUNC
// Shared memory of a block, declared in a kernel.
#ifndef SHARED_ARRAY
#define SHARED_ARRAY(type, name, count) threadgroup type name[count]
#endif
typedef long i64;
typedef half Half;
// bf16 as its bits: not every GPU has the type, and the kernels do not need it.
struct Brain {
    ushort bits;
};

namespace functions {

FUNCTION float minus_infinity() { return as_type<float>(0xff800000u); }
FUNCTION float not_a_number() { return as_type<float>(0x7fc00000u); }
FUNCTION float exponential(float x) { return precise::exp(x); }
FUNCTION float fast_exponential(float x) { return fast::exp(x); }
FUNCTION float logarithm(float x) { return precise::log(x); }
FUNCTION float hyperbolic_tangent(float x) { return precise::tanh(x); }
FUNCTION float square_root(float x) { return precise::sqrt(x); }
FUNCTION float larger(float x, float y) { return fmax(x, y); }
FUNCTION float shuffled(float x, int lane) { return simd_shuffle_xor(x, ushort(lane)); }
FUNCTION int shuffled(int x, int lane) { return simd_shuffle_xor(x, ushort(lane)); }
FUNCTION void synchronize() { threadgroup_barrier(mem_flags::mem_threadgroup); }

FUNCTION void store(device float *to, float x) { *to = x; }
FUNCTION void store(device Half *to, float x) { *to = Half(x); }
// Rounds to nearest, ties to even; a NaN stays one.
FUNCTION void store(device Brain *to, float x) {
    const uint bits = as_type<uint>(x);
    to->bits = ushort(x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
FUNCTION float widened(device const float *from) { return *from; }
FUNCTION float widened(device const Half *from) { return float(*from); }
FUNCTION float widened(device const Brain *from) { return as_type<float>(uint(from->bits) << 16); }

FUNCTION void load4(device const float *from, thread float *x) {
    const float4 four = *reinterpret_cast<device const float4 *>(from);
    for (int i = 0; i < 4; ++i) x[i] = four[i];
}
FUNCTION void store4(device float *to, thread const float *x) {
    float4 four;
    for (int i = 0; i < 4; ++i) four[i] = x[i];
    *reinterpret_cast<device float4 *>(to) = four;
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

// One thread per element: converts the element to f32.
template <typename T> FUNCTION void widen(device const T *from, device float *to, int count, uint block, uint tid) {
    const i64 i = (i64)block * BLOCK + tid;
    if (i < count) to[i] = widened(from + i);
}

// One warp per row of `rhs` [n, k]: computes its inner products with the rows of `lhs` [m, k], a few at a time, in
// `out` [m, n].
template <typename T>
FUNCTION void inner_products(device const T *lhs, device const T *rhs, device float *out, i64 out_stride, int m, int n,
                             int k, uint block, uint tid) {
    const int AT_A_TIME = 8, lane = tid % 32;
    const i64 column = (i64)block * WARPS + tid / 32;
    // Whole warps return.
    if (column >= n) return;
    device const T *row = rhs + column * k;
    for (int first = 0; first < m; first += AT_A_TIME) {
        float sums[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        for (int i = lane; i < k; i += 32) {
            const float x = widened(row + i);
            for (int j = 0; j < AT_A_TIME; ++j) {
                if (first + j < m) sums[j] += x * widened(lhs + (i64)(first + j) * k + i);
            }
        }
        for (int j = 0; j < AT_A_TIME; ++j) {
            for (int distance = 16; distance; distance >>= 1) sums[j] += shuffled(sums[j], distance);
            if (lane == j && first + j < m) out[(first + j) * out_stride + column] = sums[j];
        }
    }
}

} // namespace functions

using namespace functions;

// The numbers of a Logits, of an Objective and of a Scored, in the order in which metal/arguments.rs writes them.
struct LogitsNumbers {
    i64 stride;
    float scale;
    float cap;
    int function;
    int vocab;
    int components;
};
struct ObjectiveNumbers {
    i64 soft_stride;
    LossTerms terms;
};
struct ScoredNumbers {
    i64 stride;
    float power;
    int count;
    i64 needs;
};

#ifndef KERNEL
#define KERNEL [[kernel, max_total_threads_per_threadgroup(BLOCK)]] void
#endif
#define INDICES                                                                                                        \
    constant uint &present, uint block [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]]
// The pointer of a parameter, or null if the parameter is absent.
#define GIVEN(parameter, pointer) (present >> (parameter) & 1 ? pointer : nullptr)

// The parameters that make up a Logits (3), an Objective (6), a Rows (4) and a Scored (3); and these structures, given
// the number of their first parameter.
#define LOGITS device const float *z, device const float *bias, constant LogitsNumbers &logits_numbers
#define OBJECTIVE                                                                                                      \
    device const int *ids, device const float *hard, device const float *scales, device const float *soft,             \
        device const float *factor, constant ObjectiveNumbers &objective_numbers
#define ROWS                                                                                                           \
    device const float *log_priors, device const float *own_logits, device float *row_values, constant i64 &row_count
#define SCORED device const i64 *candidates, device float *score_values, constant ScoredNumbers &scored_numbers
#define LOGITS_AT(first)                                                                                               \
    Logits {                                                                                                           \
        z, GIVEN(first + 1, bias), logits_numbers.scale, logits_numbers.cap, logits_numbers.function,                  \
            logits_numbers.vocab, logits_numbers.stride, logits_numbers.components                                     \
    }
// The fields are copied one by one, because no constructor copies a whole structure out of the constant address space.
#define LOSS_TERMS(terms) { terms.z_loss, terms.unit }
#define OBJECTIVE_AT(first)                                                                                            \
    Objective {                                                                                                        \
        GIVEN(first, ids), GIVEN(first + 1, hard), GIVEN(first + 2, scales), GIVEN(first + 3, soft),                   \
            GIVEN(first + 4, factor), objective_numbers.soft_stride, LOSS_TERMS(objective_numbers.terms)               \
    }
#define ROWS_AT(first) Rows { GIVEN(first, log_priors), GIVEN(first + 1, own_logits), row_values, row_count }
// No kernel reads absent candidates, so that their parameters need no number.
#define SCORED_GIVEN                                                                                                   \
    Scored {                                                                                                           \
        candidates, score_values, scored_numbers.stride, scored_numbers.power, scored_numbers.count,                   \
            scored_numbers.needs                                                                                       \
    }

KERNEL row_log_sum_exp(LOGITS, OBJECTIVE, ROWS, INDICES) {
    SHARED_ARRAY(Sum, warp_sums, WARPS);
    functions::row_log_sum_exp(LOGITS_AT(0), OBJECTIVE_AT(3), ROWS_AT(9), block, tid, warp_sums);
}
KERNEL position_loss(OBJECTIVE, ROWS, device float *nll, device float *loss, constant int &positions,
                     constant int &components, INDICES) {
    functions::position_loss(OBJECTIVE_AT(0), ROWS_AT(6), nll, loss, positions, components, block, tid);
}
KERNEL top_k(device const float *log_probs, constant i64 &stride, constant int &vocab, constant int &k, device int *ids,
             device float *id_log_probs, INDICES) {
    SHARED_ARRAY(Largest, warp_largest, WARPS);
    functions::top_k(log_probs, stride, vocab, k, ids, id_log_probs, block, tid, warp_largest);
}
KERNEL position_scores(LOGITS, ROWS, SCORED, device float *log_probs, device float *scores, INDICES) {
    SHARED_ARRAY(float, warp_values, WARPS);
    SHARED_ARRAY(Sum, warp_sums, WARPS);
    functions::position_scores(LOGITS_AT(0), ROWS_AT(3), SCORED_GIVEN, log_probs, scores, block, tid, warp_values,
                               warp_sums);
}
KERNEL position_masses(SCORED, device const float *scores, device const float *upstream, device float *scales,
                       device float *mass_bounds, constant int &positions, constant int &vocab, INDICES) {
    functions::position_masses(SCORED_GIVEN, scores, upstream, scales, mass_bounds, positions, vocab, block, tid);
}
KERNEL row_soft_mass(LOGITS, OBJECTIVE, ROWS, SCORED, device const float *log_probs, INDICES) {
    SHARED_ARRAY(float, warp_values, WARPS);
    functions::row_soft_mass(LOGITS_AT(0), OBJECTIVE_AT(3), ROWS_AT(9), SCORED_GIVEN, GIVEN(16, log_probs), block, tid,
                             warp_values);
}
KERNEL log_prior_gradients(OBJECTIVE, ROWS, device float *log_prior_gradient, device float *own_gradient,
                           device const float *gradient_factor, constant i64 &count, constant int &components, INDICES) {
    functions::log_prior_gradients(OBJECTIVE_AT(0), ROWS_AT(6), log_prior_gradient, GIVEN(11, own_gradient),
                                   gradient_factor, count, components, block, tid);
}
KERNEL position_targets(device const i64 *targets, device const float *position_weights,
                        device const float *class_weights, constant i64 &ignore_index, constant int &has_ignore_index,
                        constant float &smoothing, device int *ids, device float *hard, device float *weights,
                        device float *counts, constant int &positions, constant i64 &vocab, constant i64 &first_row,
                        constant int &row_count, INDICES) {
    functions::position_targets(targets, GIVEN(1, position_weights), GIVEN(2, class_weights), ignore_index,
                                has_ignore_index, smoothing, ids, hard, weights, counts, positions, vocab, first_row,
                                row_count, block, tid);
}
KERNEL reduction_scales(device const float *weights, device const float *counts, device const float *class_bound,
                        constant int &is_mean, constant float &constant_scale, device float *scalars,
                        constant int &positions, INDICES) {
    SHARED_ARRAY(Extent, warp_extents, WARPS);
    functions::reduction_scales(weights, counts, GIVEN(2, class_bound), is_mean, constant_scale, scalars, positions, tid,
                                warp_extents);
}
KERNEL weigh_losses(device const float *weights, device const float *losses, device const float *count,
                    device float *objectives, device float *values, constant int &positions, INDICES) {
    SHARED_ARRAY(float, warp_values, WARPS);
    functions::weigh_losses(weights, losses, count, objectives, values, positions, tid, warp_values);
}
KERNEL position_gradient_scales(device const float *weights, device const float *upstream,
                                device const float *common_scale, device const float *largest_weight,
                                device float *scales, constant int &positions, INDICES) {
    functions::position_gradient_scales(weights, GIVEN(1, upstream), common_scale, largest_weight, scales, positions,
                                        block, tid);
}

#define FOR_TYPE(name, T)                                                                                              \
    KERNEL mixture_log_probs_##name(LOGITS, OBJECTIVE, ROWS, device T *log_probs, constant i64 &out_stride,            \
                                    device float *loss, device int *argmax, INDICES) {                                 \
        SHARED_ARRAY(float, warp_values, WARPS);                                                                       \
        SHARED_ARRAY(Largest, warp_largest, WARPS);                                                                    \
        functions::mixture_log_probs(LOGITS_AT(0), OBJECTIVE_AT(3), ROWS_AT(9), GIVEN(13, log_probs), out_stride,      \
                                     GIVEN(15, loss), GIVEN(16, argmax), block, tid, warp_values, warp_largest);       \
    }                                                                                                                  \
    KERNEL bias_tanh_##name(device const T *z, device const T *bias, device T *result, constant int &columns,          \
                            INDICES) {                                                                                 \
        functions::bias_tanh(z, bias, result, columns, block, tid);                                                    \
    }                                                                                                                  \
    KERNEL tanh_gradient_##name(device const T *result, device const T *upstream, device T *gradient,                  \
                                constant i64 &count, INDICES) {                                                        \
        functions::tanh_gradient(result, upstream, gradient, count, block, tid);                                       \
    }                                                                                                                  \
    KERNEL log_softmax_##name(device const T *z, device const T *bias, device float *result, constant i64 &count,      \
                              constant int &columns, INDICES) {                                                        \
        functions::log_softmax(z, GIVEN(1, bias), result, count, columns, block, tid);                                 \
    }                                                                                                                  \
    KERNEL log_softmax_gradient_##name(device const float *result, device const float *upstream, device T *gradient,   \
                                       constant i64 &count, constant int &columns, INDICES) {                          \
        functions::log_softmax_gradient(result, upstream, gradient, count, columns, block, tid);                       \
    }
FOR_TYPE(f32, float)
FOR_TYPE(f16, Half)
FOR_TYPE(bf16, Brain)

// Products take the gradient of the logits in f32, whatever the type of the other operands.
KERNEL row_gradient_f32(LOGITS, OBJECTIVE, ROWS, SCORED, device const float *log_probs, device float *gradient,
                        INDICES) {
    functions::row_gradient(LOGITS_AT(0), OBJECTIVE_AT(3), ROWS_AT(9), SCORED_GIVEN, GIVEN(16, log_probs), gradient,
                            block, tid);
}

KERNEL row_target_gradient_f32(LOGITS, OBJECTIVE, ROWS, device float *gradient, INDICES) {
    functions::row_target_gradient(LOGITS_AT(0), OBJECTIVE_AT(3), ROWS_AT(9), gradient, block, tid);
}

#define FOR_HALF_TYPE(name, T)                                                                                         \
    KERNEL widen_##name(device const T *from, device float *to, constant int &count, INDICES) {                        \
        functions::widen(from, to, count, block, tid);                                                                 \
    }                                                                                                                  \
    KERNEL inner_products_##name(device const T *lhs, device const T *rhs, device float *out,                          \
                                 constant i64 &out_stride, constant int &m, constant int &n, constant int &k,          \
                                 INDICES) {                                                                            \
        functions::inner_products(lhs, rhs, out, out_stride, m, n, k, block, tid);                                     \
    }
FOR_HALF_TYPE(f16, Half)
FOR_HALF_TYPE(bf16, Brain)
