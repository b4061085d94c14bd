// CUDA's bfloat16 type on the host, and its pairs.
#pragma once
#include "cuda_fp16.h"

EMULATED_NUMBER(__nv_bfloat16, Bfloat)

static inline float __bfloat162float(__nv_bfloat16 a) { return a; }
static inline __nv_bfloat16 __float2bfloat16(float a) { return a; }
static inline __nv_bfloat16 __float2bfloat16_rn(float a) { return a; }

struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
typedef __nv_bfloat162 EmulatedPair;
static inline EmulatedPair __hadd2(EmulatedPair a, EmulatedPair b) { return {a.x + b.x, a.y + b.y}; }
static inline EmulatedPair __hsub2(EmulatedPair a, EmulatedPair b) { return {a.x - b.x, a.y - b.y}; }
static inline EmulatedPair __hmul2(EmulatedPair a, EmulatedPair b) { return {a.x * b.x, a.y * b.y}; }
static inline EmulatedPair __h2div(EmulatedPair a, EmulatedPair b) { return {a.x / b.x, a.y / b.y}; }
