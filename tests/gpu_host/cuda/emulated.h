// What nvcc declares before the first line of a CUDA source file, as far as candle's and mos-head's kernels use it. The
// emulator that runs them provides the functions.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include "module.h"
namespace emulated {
#include "../numbers.h"
}

extern "C" {
// The index of the thread (0 to 2), of the block (3 to 5), the threads of a block (6 to 8), the blocks (9 to 11).
unsigned emulated_index(int which);
void emulated_barrier();
uint32_t emulated_shuffle_xor(uint32_t value, int lane);
void *emulated_dynamic_shared();
// An atomic operation begins (1) or ends (0).
void emulated_atomic(int begins);
void emulated_fail(const char *what);
}

#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

// Three of the indices, from `first` on.
template <int first> struct Indices {
    template <int i> struct Index {
        operator unsigned() const { return emulated_index(first + i); }
    };
    Index<0> x;
    Index<1> y;
    Index<2> z;
};
static const Indices<0> threadIdx{};
static const Indices<3> blockIdx{};
static const Indices<6> blockDim{};
static const Indices<9> gridDim{};

// The C library has a function of this name.
#define __expf(x) expf(x)

static inline void __syncthreads() { emulated_barrier(); }
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T value, int lane, int width = 32) {
    if (mask != 0xffffffff || width != 32) emulated_fail("a shuffle of a part of a warp");
    uint32_t words[(sizeof(T) + 3) / 4] = {};
    std::memcpy(words, &value, sizeof value);
    for (uint32_t &word : words) word = emulated_shuffle_xor(word, lane);
    std::memcpy(&value, words, sizeof value);
    return value;
}

// The values of all lanes of a warp.
static inline void emulated_gather(uint32_t value, uint32_t *all) {
    const unsigned mine = emulated_index(0) % 32;
    all[mine] = value;
    for (unsigned lane = 1; lane < 32; ++lane) all[mine ^ lane] = emulated_shuffle_xor(value, lane);
}

// The threads of a block take turns only at barriers and shuffles, so a plain update is atomic.
#define ATOMIC(name, combined)                                                   \
    template <typename T, typename From> static inline T name(T *at, From from) { \
        const T x = from;                                                         \
        emulated_atomic(1);                                                       \
        const T old = *at;                                                        \
        *at = combined;                                                           \
        emulated_atomic(0);                                                       \
        return old;                                                               \
    }
ATOMIC(atomicAdd, old + x)
ATOMIC(atomicMax, old > x ? old : x)
ATOMIC(atomicMin, old < x ? old : x)
#undef ATOMIC
template <typename T> static inline T atomicCAS(T *at, T expected, T x) {
    emulated_atomic(1);
    const T old = *at;
    if (old == expected) *at = x;
    emulated_atomic(0);
    return old;
}

template <typename To, typename From> static inline To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the sizes differ");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __int_as_float(int x) { return emulated_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
static inline int __float_as_int(float x) { return emulated_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
static inline long long __double_as_longlong(double x) { return emulated_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return emulated_bits<double>(x); }

using std::isnan;
using std::signbit;
static inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
static inline double normcdf(double x) { return std::erfc(-x * M_SQRT1_2) / 2; }
static inline float normcdff(float x) { return (float)normcdf(x); }
template <typename A, typename B> static inline std::common_type_t<A, B> min(A a, B b) {
    const std::common_type_t<A, B> x = a, y = b;
    return y < x ? y : x;
}
template <typename A, typename B> static inline std::common_type_t<A, B> max(A a, B b) {
    const std::common_type_t<A, B> x = a, y = b;
    return x < y ? y : x;
}

template <typename T> struct alignas(2 * sizeof(T)) Vector2 {
    T x, y;
};
template <typename T> struct alignas(sizeof(T) < 8 ? 4 * sizeof(T) : 16) Vector4 {
    T x, y, z, w;
};
typedef Vector2<float> float2;
typedef Vector4<float> float4;
static inline float2 make_float2(float x, float y) { return {x, y}; }

#undef assert
#define assert(condition) ((condition) ? (void)0 : emulated_fail("assertion failed: " #condition))
