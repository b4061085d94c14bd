// Half precision under CUDA's names, on the host.
#pragma once
struct __half {
    _Float16 value;
};
inline __half __float2half_rn(float x) { return {(_Float16)x}; }
