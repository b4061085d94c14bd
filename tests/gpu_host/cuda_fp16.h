// CUDA's half-precision type on the host.
#pragma once
struct __half {
    _Float16 value;
};
inline __half __float2half_rn(float x) { return {(_Float16)x}; }
