// mos-head: the Metal kernels of the mixture: the functions of gpu/rows.h under the names that the host launches, and
// the kernels for products of half-precision operands.
//
// The tensors of a kernel are bound one by one, in the order of its parameters; bit n of `present` says whether
// parameter n is present. Compile with safe math: infinities and NaN are valid inputs.

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
FUNCTION float logarithm(float x) { return precise::log(x); }
FUNCTION float hyperbolic_tangent(float x) { return precise::tanh(x); }
FUNCTION float larger(float x, float y) { return fmax(x, y); }
FUNCTION float shuffled(float x, int lane) { return simd_shuffle_xor(x, ushort(lane)); }
FUNCTION int shuffled(int x, int lane) { return simd_shuffle_xor(x, ushort(lane)); }
FUNCTION void synchronize() { threadgroup_barrier(mem_flags::mem_threadgroup); }

FUNCTION void store(device float *to, float x) { *to = x; }
FUNCTION void store(device Half *to, float x) { *to = Half(x); }
// Rounded to nearest, ties to even; a NaN stays one.
FUNCTION void store(device Brain *to, float x) {
    const uint bits = as_type<uint>(x);
    to->bits = ushort(x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
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

#include "../gpu/rows.h"

// One thread per element.
template <typename T> FUNCTION void widen(device const T *from, device float *to, int count, uint block, uint tid) {
    const i64 i = (i64)block * BLOCK + tid;
    if (i < count) to[i] = widened(from + i);
}

// One warp per row of `rhs` [n, k]: its inner products with the rows of `lhs` [m, k], a few at a time, in `out` [m, n].
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

struct LogitsNumbers {
    i64 stride;
    float scale;
    float softcap;
    int vocab;
    int components;
};
struct ObjectiveNumbers {
    i64 soft_stride;
    Terms terms;
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
#define GIVEN(parameter, pointer) (present >> (parameter) & 1 ? pointer : nullptr)

// The parameters that make up a Logits, an Objective, a Rows and a Scored; and these structures, given the index of their first
// parameter.
#define LOGITS device const float *z, device const float *bias, constant LogitsNumbers &of_logits
#define OBJECTIVE                                                                                                      \
    device const int *ids, device const float *hard, device const float *scales, device const float *soft,             \
        device const float *factor, constant ObjectiveNumbers &of_objective
#define ROWS                                                                                                           \
    device const float *log_priors, device const float *own, device float *numbers, constant i64 &row_numbers
#define SCORED device const i64 *candidates, device float *of_candidates, constant ScoredNumbers &of_scored
#define LOGITS_AT(first)                                                                                               \
    Logits {                                                                                                           \
        z, GIVEN(first + 1, bias), of_logits.scale, of_logits.softcap, of_logits.vocab, of_logits.stride,              \
            of_logits.components                                                                                       \
    }
// Field by field, because no constructor copies a whole struct out of the constant address space.
#define TERMS(terms) { terms.z_loss, terms.unit }
#define OBJECTIVE_AT(first)                                                                                            \
    Objective {                                                                                                        \
        GIVEN(first, ids), GIVEN(first + 1, hard), GIVEN(first + 2, scales), GIVEN(first + 3, soft),                   \
            GIVEN(first + 4, factor), of_objective.soft_stride, TERMS(of_objective.terms)                              \
    }
#define ROWS_AT(first) Rows { GIVEN(first, log_priors), GIVEN(first + 1, own), numbers, row_numbers }
// No kernel reads absent candidates.
#define SCORED_GIVEN                                                                                                   \
    Scored { candidates, of_candidates, of_scored.stride, of_scored.power, of_scored.count, of_scored.needs }

KERNEL row_log_sum_exp(LOGITS, OBJECTIVE, ROWS, INDICES) {
    SHARED_ARRAY(Sum, of_warps, WARPS);
    functions::row_log_sum_exp(LOGITS_AT(0), OBJECTIVE_AT(3), ROWS_AT(9), block, tid, of_warps);
}
KERNEL position_loss(OBJECTIVE, ROWS, device float *nll, device float *loss, constant int &positions,
                     constant int &components, INDICES) {
    functions::position_loss(OBJECTIVE_AT(0), ROWS_AT(6), nll, loss, positions, components, block, tid);
}
KERNEL top_k(device const float *log_probs, constant i64 &stride, constant int &vocab, constant int &k, device int *ids,
             device float *id_log_probs, INDICES) {
    SHARED_ARRAY(Largest, of_warps, WARPS);
    functions::top_k(log_probs, stride, vocab, k, ids, id_log_probs, block, tid, of_warps);
}
KERNEL position_scores(LOGITS, ROWS, SCORED, device float *log_probs, device float *scores, INDICES) {
    SHARED_ARRAY(float, of_warps, WARPS);
    SHARED_ARRAY(Sum, sums_of_warps, WARPS);
    functions::position_scores(LOGITS_AT(0), ROWS_AT(3), SCORED_GIVEN, log_probs, scores, block, tid, of_warps,
                               sums_of_warps);
}
KERNEL position_masses(SCORED, device const float *scores, device const float *upstream,
                       device float *scales, device float *magnitudes, constant int &positions, constant int &vocab,
                       INDICES) {
    functions::position_masses(SCORED_GIVEN, scores, upstream, scales, magnitudes, positions, vocab, block,
                               tid);
}
KERNEL row_soft_mass(LOGITS, OBJECTIVE, ROWS, SCORED, device const float *log_probs, INDICES) {
    SHARED_ARRAY(float, of_warps, WARPS);
    functions::row_soft_mass(LOGITS_AT(0), OBJECTIVE_AT(3), ROWS_AT(9), SCORED_GIVEN, GIVEN(16, log_probs), block, tid,
                             of_warps);
}
KERNEL position_scales(OBJECTIVE, ROWS, device float *log_prior_gradient, device float *own_gradient,
                       constant int &positions, constant int &components, INDICES) {
    functions::position_scales(OBJECTIVE_AT(0), ROWS_AT(6), log_prior_gradient, GIVEN(11, own_gradient), positions,
                               components, block, tid);
}
KERNEL row_gradient_f32(LOGITS, OBJECTIVE, ROWS, SCORED, device const float *log_probs, device float *gradient,
                        INDICES) {
    functions::row_gradient(LOGITS_AT(0), OBJECTIVE_AT(3), ROWS_AT(9), SCORED_GIVEN, GIVEN(16, log_probs), gradient,
                            block, tid);
}
KERNEL position_targets(device const i64 *targets, device const float *position_weights,
                        device const float *class_weights, constant i64 &ignore_index, constant int &ignores,
                        constant float &smoothing, device int *ids, device float *hard, device float *weights,
                        device float *counts, constant int &positions, constant i64 &vocab, constant i64 &first,
                        constant int &rows, INDICES) {
    functions::position_targets(targets, GIVEN(1, position_weights), GIVEN(2, class_weights), ignore_index, ignores,
                                smoothing, ids, hard, weights, counts, positions, vocab, first, rows, block, tid);
}
KERNEL position_weighting(device const float *weights, device const float *upstream,
                          device const float *largest_upstream, device const float *largest_weight,
                          device float *scales, constant int &positions, INDICES) {
    functions::position_weighting(weights, GIVEN(1, upstream), largest_upstream, largest_weight, scales, positions,
                                  block, tid);
}

#define FOR_TYPE(name, T)                                                                                              \
    KERNEL mixture_log_probs_##name(LOGITS, OBJECTIVE, ROWS, device T *log_probs, constant i64 &out_stride,            \
                                    device float *loss, device int *argmax, INDICES) {                                 \
        SHARED_ARRAY(float, of_warps, WARPS);                                                                          \
        SHARED_ARRAY(Largest, largest_of_warps, WARPS);                                                                \
        functions::mixture_log_probs(LOGITS_AT(0), OBJECTIVE_AT(3), ROWS_AT(9), GIVEN(13, log_probs), out_stride,      \
                                     GIVEN(15, loss), GIVEN(16, argmax), block, tid, of_warps, largest_of_warps);      \
    }
FOR_TYPE(f32, float)
FOR_TYPE(f16, Half)
FOR_TYPE(bf16, Brain)

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
