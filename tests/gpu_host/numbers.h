// The element types of tensors. The two 16-bit floating-point types are converted to `float` for computations.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>

inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

struct Half {
    uint16_t bits;
    Half() = default;
    Half(float value) {
        uint32_t all = bits_of(value), sign = all >> 16 & 0x8000, magnitude = all & 0x7fffffff;
        if (magnitude > 0x7f800000) bits = sign | 0x7e00;
        else if (magnitude >= 0x477ff000) bits = sign | 0x7c00;
        // Below the smallest normal number, the unit in the last place is 2^-24, to which adding 1/2 rounds.
        else if (magnitude < 0x38800000) bits = sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
        else bits = sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    }
    operator float() const {
        uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
        if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | magnitude << 13);
        if (magnitude < 0x0400) return float_of(sign | bits_of(float(magnitude) * 0x1p-24f));
        return float_of(sign | ((magnitude << 13) + 0x38000000));
    }
};

struct Bfloat {
    uint16_t bits;
    Bfloat() = default;
    Bfloat(float value) {
        uint32_t all = bits_of(value);
        if ((all & 0x7fffffff) > 0x7f800000) bits = all >> 16 | 0x40;
        else bits = (all + 0x7fff + (all >> 16 & 1)) >> 16;
    }
    operator float() const { return float_of(uint32_t(bits) << 16); }
};

// candle's name of a type, and its smallest and largest finite values.
template <class T> struct Type;
#define NUMBER(T, called, least, most) \
    template <> struct Type<T> {       \
        static const char *name() { return #called; } \
        static T lowest() { return least; } \
        static T highest() { return most; } \
    };
NUMBER(float, f32, -std::numeric_limits<float>::max(), std::numeric_limits<float>::max())
NUMBER(Half, f16, Half(-65504.f), Half(65504.f))
NUMBER(Bfloat, bf16, Bfloat(float_of(0xff7f0000)), Bfloat(float_of(0x7f7f0000)))
NUMBER(uint8_t, u8, 0, 255)
NUMBER(uint32_t, u32, 0, 0xffffffff)
NUMBER(int64_t, i64, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max())
NUMBER(int32_t, i32, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max())
NUMBER(int16_t, i16, std::numeric_limits<int16_t>::min(), std::numeric_limits<int16_t>::max())
#undef NUMBER

// Calls `f` with a value of each type.
template <class F> void for_floats(F f) {
    f(float());
    f(Half(0));
    f(Bfloat(0));
}
template <class F> void for_integers(F f) {
    f(uint8_t());
    f(uint32_t());
    f(int64_t());
}
template <class F> void for_all(F f) {
    for_floats(f);
    for_integers(f);
}
