// CUDA's half-precision type on the host. Each operation is computed in f32 and rounded to half precision.
#pragma once
#include "emulated.h"

// The operations that CUDA declares for both 16-bit types, which convert from and to `float`.
#define EMULATED_NUMBER(T, Bits)                                                                              \
    struct T : emulated::Bits {                                                                               \
        T() = default;                                                                                        \
        template <typename From, typename = std::enable_if_t<std::is_arithmetic<From>::value>>                \
        T(From from) : emulated::Bits((float)from) {}                                                         \
    };                                                                                                        \
    static inline T operator+(T a, T b) { return (float)a + (float)b; }                                       \
    static inline T operator-(T a, T b) { return (float)a - (float)b; }                                       \
    static inline T operator*(T a, T b) { return (float)a * (float)b; }                                       \
    static inline T operator/(T a, T b) { return (float)a / (float)b; }                                       \
    static inline T operator-(T a) { return -(float)a; }                                                      \
    static inline T &operator+=(T &a, T b) { return a = a + b; }                                              \
    static inline T &operator-=(T &a, T b) { return a = a - b; }                                              \
    static inline T &operator*=(T &a, T b) { return a = a * b; }                                              \
    static inline T &operator/=(T &a, T b) { return a = a / b; }                                              \
    static inline bool operator==(T a, T b) { return (float)a == (float)b; }                                  \
    static inline bool operator!=(T a, T b) { return (float)a != (float)b; }                                  \
    static inline bool operator<(T a, T b) { return (float)a < (float)b; }                                    \
    static inline bool operator>(T a, T b) { return (float)a > (float)b; }                                    \
    static inline bool operator<=(T a, T b) { return (float)a <= (float)b; }                                  \
    static inline bool operator>=(T a, T b) { return (float)a >= (float)b; }                                  \
    static inline bool __hisnan(T a) { return std::isnan((float)a); }                                         \
    static inline T __habs(T a) { return std::fabs((float)a); }                                               \
    static inline T hsqrt(T a) { return std::sqrt((float)a); }                                                \
    static inline T hcos(T a) { return std::cos((float)a); }                                                  \
    static inline T hsin(T a) { return std::sin((float)a); }                                                  \
    static inline T hlog(T a) { return std::log((float)a); }                                                  \
    static inline T hexp(T a) { return std::exp((float)a); }                                                  \
    static inline T __hmax_nan(T a, T b) { return __hisnan(a) ? a : __hisnan(b) || a < b ? b : a; }           \
    static inline T __hmin_nan(T a, T b) { return __hisnan(a) ? a : __hisnan(b) || b < a ? b : a; }

EMULATED_NUMBER(__half, Half)

static inline float __half2float(__half a) { return a; }
static inline __half __float2half(float a) { return a; }
static inline __half __float2half_rn(float a) { return a; }
static inline unsigned short __half_as_ushort(__half a) { return a.bits; }
static inline __half __ushort_as_half(unsigned short bits) {
    __half a;
    a.bits = bits;
    return a;
}
