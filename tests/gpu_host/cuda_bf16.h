// CUDA's bfloat16 type on the host: rounded to nearest, ties to even.
#pragma once
#include <cstdint>
#include <cstring>
struct __nv_bfloat16 {
    uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {(uint16_t)(bits >> 16 | 0x40)};
    return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
