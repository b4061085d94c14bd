// The 8-bit type that candle's kernels name. No test uses it, so a conversion fails.
#pragma once
#include "cuda_fp16.h"

struct __nv_fp8_e4m3 {
    uint8_t __x;
    __nv_fp8_e4m3() = default;
    template <typename From> __nv_fp8_e4m3(From) : __x(0) { emulated_fail("8-bit floating-point numbers"); }
};
#define __NV_E4M3 0
static inline __half __nv_cvt_fp8_to_halfraw(uint8_t, int) {
    emulated_fail("8-bit floating-point numbers");
    return 0;
}
