// The row kernels of the mixture on CUDA: what happens to the logits between the products. The equations stand at the
// head of cpu/rows.rs, whose names these kernels share.
//
// A row is one component of one token; rows of logits are f32, `stride` elements apart (a multiple of 4, so that every row
// starts on 16 bytes), of which the first `vocab` count. Offsets are 64 bits wide. Nothing here is atomic: the same input
// gives the same bits.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef long long i64;

#define BLOCK 256

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }
__device__ __forceinline__ float finite_or_zero(float x) { return x == minus_infinity() ? 0.f : x; }
// weight * x, where weight zero takes away even an infinite or undefined x.
__device__ __forceinline__ float weighted(float weight, float x) { return weight == 0.f ? 0.f : weight * x; }

__device__ __forceinline__ void store(float *to, float x) { *to = x; }
__device__ __forceinline__ void store(__half *to, float x) { *to = __float2half_rn(x); }
__device__ __forceinline__ void store(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }

// Four neighbours in one access.
template <typename T> struct alignas(4 * sizeof(T)) Four {
    T of[4];
};
template <typename T> __device__ __forceinline__ Four<T> load4(const T *from) { return *reinterpret_cast<const Four<T> *>(from); }
template <typename T> __device__ __forceinline__ void store4(T *to, const float (&x)[4]) {
    Four<T> four;
    for (int i = 0; i < 4; ++i) store(four.of + i, x[i]);
    *reinterpret_cast<Four<T> *>(to) = four;
}

// Logits as they come from the product, and what is still to be done to them.
struct Logits {
    const float *z;    // [rows, stride]
    const float *bias; // [vocab], or null
    float softcap;     // 0: none
    i64 stride;
    int vocab;
    int components;

    __device__ __forceinline__ float at(const float *row, int v) const { return finish(row[v], v); }
    __device__ __forceinline__ float finish(float logit, int v) const {
        if (bias) logit += bias[v];
        return softcap == 0.f ? logit : softcap * tanhf(logit / softcap);
    }
    // d finish / d logit, from its result.
    __device__ __forceinline__ float slope(float logit) const {
        return softcap == 0.f ? 1.f : 1.f - (logit / softcap) * (logit / softcap);
    }
};

// The logarithm of a sum of exponentials in two parts, as it is being summed up: the largest term, and the sum relative to it.
struct Sum {
    float largest;
    float sum;

    __device__ __forceinline__ static Sum none() { return {minus_infinity(), 0.f}; }
    __device__ __forceinline__ void add(Sum other) {
        float m = fmaxf(largest, other.largest), reference = finite_or_zero(m);
        sum = sum * expf(largest - reference) + other.sum * expf(other.largest - reference);
        largest = m;
    }
    __device__ __forceinline__ float value() const { return finite_or_zero(largest) + logf(sum); }
};

struct Largest {
    float value;
    int at;

    // The first of equals; a NaN before all numbers.
    __device__ __forceinline__ void add(Largest other) {
        bool mine = value != value, its = other.value != other.value;
        bool better = mine || its ? its && (!mine || other.at < at)
                                  : other.value > value || (other.value == value && other.at < at);
        if (better) *this = other;
    }
};

__device__ __forceinline__ float shuffled(float x, int lane) { return __shfl_xor_sync(0xffffffffu, x, lane); }
__device__ __forceinline__ Sum shuffled(Sum x, int lane) { return {shuffled(x.largest, lane), shuffled(x.sum, lane)}; }
__device__ __forceinline__ Largest shuffled(Largest x, int lane) {
    return {shuffled(x.value, lane), __shfl_xor_sync(0xffffffffu, x.at, lane)};
}
__device__ __forceinline__ void join(float &x, float other) { x += other; }
template <typename X> __device__ __forceinline__ void join(X &x, X other) { x.add(other); }

// Room for eight bytes of each warp.
static __device__ float2 *warp_memory() {
    __shared__ float2 of_warp[BLOCK / 32];
    return of_warp;
}

// Of the block's values, in an order that is always the same; every thread gets it.
template <typename X> __device__ X block_reduce(X x) {
    static_assert(sizeof(X) <= sizeof(float2), "a warp has eight bytes");
    X *of_warp = reinterpret_cast<X *>(warp_memory());
    for (int lane = 16; lane; lane >>= 1) join(x, shuffled(x, lane));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warp[0];
    for (int w = 1; w < BLOCK / 32; ++w) join(x, of_warp[w]);
    __syncthreads();
    return x;
}

// What is minimised, for each token of the chunk.
struct Objective {
    const int *words;        // [tokens]: the target; -1: ignored; -2: not a word
    const float *hard;       // [tokens]: the mass of the target in q
    const float *scales;     // [tokens]: what the gradient is multiplied by, up to a factor of all tokens; null: 1
    const float *soft;       // [vocab] or [tokens, soft_stride]: the rest of q; null: none
    i64 soft_stride;         // 0: the same for all tokens
    float z_loss;
    float filter;
    float unit;              // what the gradient of the logits is multiplied by, so that it does not vanish in f16

    __device__ __forceinline__ const float *soft_of(i64 token) const { return soft ? soft + token * soft_stride : nullptr; }
};

// What is known of the rows and tokens of the chunk.
struct Rows {
    const float *log_priors; // [tokens, K], or null for one component
    float *largest;          // [rows]: the largest logit; zero if all are minus infinity
    float *log_sum;          // [rows]: log sum_v exp(z_v - largest)
    float *target_logit;     // [rows]
    float *hard_mass;        // [rows]: the target's part of the mass
    float *mass;             // [rows]: R_k = sum_v q_v r_k(v)
    float *softmax_scale;    // [rows]: what softmax_k is multiplied by in the gradient

    __device__ __forceinline__ float log_prior(i64 row) const { return log_priors ? log_priors[row] : 0.f; }
    __device__ __forceinline__ float joint(i64 row, float logit) const {
        return log_prior(row) - log_sum[row] + (logit - largest[row]);
    }
};

// One block per row: the log-sum-exp, and the logit of the token's target.
extern "C" __global__ void row_log_sum_exp(Logits logits, Objective objective, Rows rows) {
    const i64 r = blockIdx.x;
    const float *row = logits.z + r * logits.stride;
    Sum sum = Sum::none();
    for (int first = threadIdx.x * 4; first < logits.vocab; first += BLOCK * 4) {
        const Four<float> z = load4(row + first);
        float x[4], m = sum.largest;
        for (int i = 0; i < 4; ++i) {
            x[i] = first + i < logits.vocab ? logits.finish(z.of[i], first + i) : minus_infinity();
            m = fmaxf(m, x[i]);
        }
        const float reference = finite_or_zero(m);
        float s = sum.sum * expf(sum.largest - reference);
        for (int i = 0; i < 4; ++i) s += expf(x[i] - reference);
        sum = {m, s};
    }
    sum = block_reduce(sum);
    if (threadIdx.x == 0) {
        rows.largest[r] = finite_or_zero(sum.largest);
        rows.log_sum[r] = logf(sum.sum);
        if (objective.words) {
            const int word = objective.words[r / logits.components];
            rows.target_logit[r] = word < 0 ? 0.f : logits.at(row, word);
        }
    }
}

// One thread per token: the loss as far as it depends on the target's logits, and the responsibilities.
extern "C" __global__ void token_loss(Objective objective, Rows rows, float *nll, float *loss, int tokens, int components) {
    const i64 t = (i64)blockIdx.x * BLOCK + threadIdx.x;
    if (t >= tokens) return;
    const int word = objective.words ? objective.words[t] : -1;
    float log_p = 0.f, hard = 0.f;
    Sum sum = Sum::none();
    if (word >= 0) {
        hard = objective.hard[t];
        for (int k = 0; k < components; ++k) {
            sum.add({rows.joint(t * components + k, rows.target_logit[t * components + k]), 1.f});
        }
        log_p = sum.value();
    } else if (word == -2) {
        log_p = hard = not_a_number();
    }
    float of_token = weighted(hard, -log_p), squares = 0.f;
    for (int k = 0; k < components; ++k) {
        const i64 r = t * components + k;
        // One component has all the responsibility, even for an impossible target.
        const float share = components == 1 ? 1.f : expf(rows.joint(r, rows.target_logit[r]) - log_p);
        const float mass = word == -1 ? 0.f : weighted(hard, share);
        rows.hard_mass[r] = rows.mass[r] = mass;
        const float lse = rows.largest[r] + rows.log_sum[r];
        squares += lse * lse;
    }
    if (word >= 0 && objective.z_loss != 0.f) of_token += objective.z_loss * squares / components;
    nll[t] = -log_p;
    loss[t] = of_token;
}

// One block per token: log p(v) of every word; the soft part of the loss; the most probable word. The last two are left out
// where null.
template <typename T>
__device__ void mixture_log_probs(const Logits &logits, const Objective &objective, const Rows &rows, T *log_probs, i64 out_stride,
                                  float *loss, int *argmax) {
    const i64 t = blockIdx.x;
    const float *token = logits.z + t * logits.components * logits.stride;
    const float *soft = objective.soft_of(t);
    float of_soft = 0.f;
    Largest best = {minus_infinity(), 0x7fffffff};
    for (int v = threadIdx.x; v < logits.vocab; v += BLOCK) {
        Sum sum = Sum::none();
        for (int k = 0; k < logits.components; ++k) {
            const float term = rows.joint(t * logits.components + k, logits.at(token + k * logits.stride, v));
            if (logits.components == 1) sum = {term, 1.f}; else sum.add({term, 1.f});
        }
        const float log_p = logits.components == 1 ? sum.largest : sum.value();
        if (log_probs) store(log_probs + t * out_stride + v, log_p);
        if (soft) of_soft += weighted(soft[v], -log_p);
        best.add({log_p, v});
    }
    if (loss && soft) {
        of_soft = block_reduce(of_soft);
        if (threadIdx.x == 0 && (!objective.words || objective.words[t] != -1)) loss[t] += of_soft;
    }
    if (argmax) {
        best = block_reduce(best);
        if (threadIdx.x == 0) argmax[t] = best.at;
    }
}

// One block per row: the soft targets' part of the mass, sum_v soft_v r_k(v).
extern "C" __global__ void row_soft_mass(Logits logits, Objective objective, Rows rows, const float *log_probs) {
    const i64 r = blockIdx.x, t = r / logits.components;
    const float *row = logits.z + r * logits.stride;
    const float *soft = objective.soft_of(t), *log_p = log_probs + t * logits.stride;
    float mass = 0.f;
    for (int v = threadIdx.x; v < logits.vocab; v += BLOCK) {
        // Words without mass have none to share, even if they are impossible.
        if (soft[v] == 0.f) continue;
        mass += soft[v] * (log_p[v] == minus_infinity() ? 0.f : expf(rows.joint(r, logits.at(row, v)) - log_p[v]));
    }
    mass = block_reduce(mass);
    if (threadIdx.x == 0 && (!objective.words || objective.words[t] != -1)) rows.mass[r] += mass;
}

// One thread per token: what the gradients of its rows are multiplied by, the gradient of its log-priors (unless null), and the
// share of its mass that the filter drops.
extern "C" __global__ void token_scales(Objective objective, Rows rows, float *log_prior_gradient, float *dropped, int tokens,
                                        int components) {
    const i64 t = (i64)blockIdx.x * BLOCK + threadIdx.x;
    if (t >= tokens) return;
    const float scale = objective.scales ? objective.scales[t] : 1.f;
    float total = 0.f, lost = 0.f;
    for (int k = 0; k < components; ++k) total += rows.mass[t * components + k];
    // Nothing is below this, not even the negative masses of a gradient from upstream.
    const float least = objective.filter == 0.f ? minus_infinity() : objective.filter * total;
    for (int k = 0; k < components; ++k) {
        const i64 r = t * components + k;
        const float mass = rows.mass[r];
        if (log_prior_gradient) log_prior_gradient[r] = weighted(scale, -mass);
        if (mass < least) lost += mass;
        const float softmax_scale = scale * (mass + 2.f * objective.z_loss / components * (rows.largest[r] + rows.log_sum[r]));
        const bool ignored = objective.words && objective.words[t] == -1;
        const bool is_zero = ignored || scale == 0.f || (softmax_scale == 0.f && !objective.soft) || mass < least;
        rows.softmax_scale[r] = is_zero ? 0.f : softmax_scale;
        if (is_zero) rows.hard_mass[r] = minus_infinity(); // the mark of a row without gradient
    }
    if (dropped) dropped[t] = lost > 0.f ? lost / total : 0.f;
}

// One block: the rows that have a gradient, in their order, and how many they are.
extern "C" __global__ void live_rows(Rows rows, int *live, int *count, int row_count) {
    __shared__ int of_thread[BLOCK];
    const int each = (row_count + BLOCK - 1) / BLOCK;
    const int first = min((int)threadIdx.x * each, row_count), last = min(first + each, row_count);
    int n = 0;
    for (int r = first; r < last; ++r) n += rows.hard_mass[r] != minus_infinity();
    of_thread[threadIdx.x] = n;
    __syncthreads();
    int at = 0;
    for (int thread = 0; thread < threadIdx.x; ++thread) at += of_thread[thread];
    for (int r = first; r < last; ++r) {
        if (rows.hard_mass[r] != minus_infinity()) live[at++] = r;
    }
    if (threadIdx.x == BLOCK - 1) *count = at;
}

// One block per row of the result: the gradient of the logits, rounded to the type of the products, of the row of that number
// or, unless `live` is null, of the live row of that number. `gradient` may be the logits themselves if its type is f32 and
// `live` is null.
template <typename T>
__device__ void row_gradient(const Logits &logits, const Objective &objective, const Rows &rows, const float *log_probs,
                             const int *live, T *gradient) {
    const i64 r = live ? live[blockIdx.x] : blockIdx.x, t = r / logits.components;
    const float *row = logits.z + r * logits.stride;
    T *to = gradient + (i64)blockIdx.x * logits.stride;
    const float hard_mass = rows.hard_mass[r];
    if (hard_mass == minus_infinity()) {
        for (int v = threadIdx.x; v < logits.stride; v += BLOCK) store(to + v, 0.f);
        return;
    }
    const float scale = objective.unit * (objective.scales ? objective.scales[t] : 1.f), largest = rows.largest[r];
    const float exp_scale = objective.unit * rows.softmax_scale[r] * expf(-rows.log_sum[r]);
    const int word = objective.words ? objective.words[t] : -1;
    const float *soft = objective.soft_of(t), *log_p = soft ? log_probs + t * logits.stride : nullptr;
    for (int first = threadIdx.x * 4; first < logits.stride; first += BLOCK * 4) {
        const Four<float> z = load4(row + first);
        float g[4] = {0.f, 0.f, 0.f, 0.f};
        for (int i = 0; i < 4; ++i) {
            const int v = first + i;
            if (v >= logits.vocab) break;
            const float logit = logits.finish(z.of[i], v);
            g[i] = exp_scale * expf(logit - largest);
            if (v == word) g[i] -= scale * hard_mass;
            if (soft && soft[v] != 0.f && log_p[v] != minus_infinity()) {
                g[i] -= scale * soft[v] * expf(rows.joint(r, logit) - log_p[v]);
            }
            g[i] = g[i] == 0.f ? 0.f : g[i] * logits.slope(logit);
        }
        store4(to + first, g);
    }
}

// One block per live row: its elements, among those of the other live rows.
template <typename T> __device__ void gather_rows(const T *all, const int *live, T *gathered, int columns) {
    const T *from = all + (i64)live[blockIdx.x] * columns;
    T *to = gathered + (i64)blockIdx.x * columns;
    for (int i = threadIdx.x; i < columns; i += BLOCK) to[i] = from[i];
}

// One block per live row: its elements, from among those of the other live rows back to their place.
extern "C" __global__ void scatter_rows(const float *gathered, const int *live, float *all, int columns) {
    const float *from = gathered + (i64)blockIdx.x * columns;
    float *to = all + (i64)live[blockIdx.x] * columns;
    for (int i = threadIdx.x; i < columns; i += BLOCK) to[i] = from[i];
}

// One thread per token: the target as a word, and its weights.
extern "C" __global__ void token_targets(const i64 *targets, const float *token_weights, const float *class_weights, i64 ignore_index,
                                         int ignores, float smoothing, int *words, float *hard, float *weights, float *counts,
                                         int tokens, int vocab) {
    const i64 t = (i64)blockIdx.x * BLOCK + threadIdx.x;
    if (t >= tokens) return;
    const i64 target = targets[t];
    const bool ignored = ignores && target == ignore_index;
    const bool is_word = !ignored && target >= 0 && target < vocab;
    const float class_weight = is_word && class_weights ? class_weights[target] : 1.f;
    const float weight = ignored ? 0.f : token_weights ? token_weights[t] : 1.f;
    words[t] = ignored ? -1 : is_word ? (int)target : -2;
    hard[t] = class_weight * (1.f - smoothing);
    weights[t] = weight;
    counts[t] = weight * class_weight;
}

// One thread per token: its part in the scale of the gradients, which is `largest_upstream` times `largest_weight` times this.
extern "C" __global__ void token_weighting(const float *weights, const float *upstream, const float *largest_upstream,
                                           const float *largest_weight, float *scales, int tokens) {
    const i64 t = (i64)blockIdx.x * BLOCK + threadIdx.x;
    if (t >= tokens) return;
    const float weight = weights[t] / *largest_weight;
    scales[t] = !upstream ? weight : *largest_upstream == 0.f ? 0.f : upstream[t] / *largest_upstream * weight;
}

#define FOR_TYPE(name, T) \
    extern "C" __global__ void mixture_log_probs_##name(Logits logits, Objective objective, Rows rows, T *log_probs, i64 out_stride, \
                                                        float *loss, int *argmax) { \
        mixture_log_probs(logits, objective, rows, log_probs, out_stride, loss, argmax); \
    } \
    extern "C" __global__ void row_gradient_##name(Logits logits, Objective objective, Rows rows, const float *log_probs, \
                                                   const int *live, T *gradient) { \
        row_gradient(logits, objective, rows, log_probs, live, gradient); \
    } \
    extern "C" __global__ void gather_rows_##name(const T *all, const int *live, T *gathered, int columns) { \
        gather_rows(all, live, gathered, columns); \
    }
FOR_TYPE(f32, float)
FOR_TYPE(f16, __half)
FOR_TYPE(bf16, __nv_bfloat16)
