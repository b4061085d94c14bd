// binary.metal: elementwise functions of two tensors.
#include "kernel.h"

namespace {

// How the index of an element of the result maps to one of an operand.
enum Indexing { CONTIGUOUS, STRIDED, SCALAR };

struct Variant {
    const char *suffix;
    Indexing left, right;
};

const Variant VARIANTS[] = {
    {"_strided", STRIDED, STRIDED}, {"_lstrided", STRIDED, CONTIGUOUS}, {"_rstrided", CONTIGUOUS, STRIDED},
    {"_scalar", SCALAR, SCALAR},    {"_cs", CONTIGUOUS, SCALAR},        {"_sc", SCALAR, CONTIGUOUS},
    {"_rss", SCALAR, STRIDED},      {"_lss", STRIDED, SCALAR},
};

size_t index(Indexing indexing, const Strides &strides, size_t i) {
    return indexing == CONTIGUOUS ? i : indexing == SCALAR ? 0 : strides(i);
}

// length, left, right, output; and length, rank, dims, left strides, right strides, left, right, output.
template <class T, class U> void binary(const std::string &name, U (*f)(T, T)) {
    kernel(name, "rrrw", [f](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0);
        View<T> left(launch, 1), right(launch, 2);
        View<U> output(launch, 3);
        covers(launch, length, per_thread<T>());
        for (size_t i = 0; i < length; i++) output.set(i, f(left.get(i), right.get(i)));
    });
    for (const Variant &variant : VARIANTS) {
        kernel(name + variant.suffix, "rrrrrrrw", [f, variant](const Launch &launch) {
            size_t length = scalar<uint64_t>(launch, 0);
            Strides left_at(launch, 1, 2, 3), right_at(launch, 1, 2, 4);
            View<T> left(launch, 5), right(launch, 6);
            View<U> output(launch, 7);
            covers(launch, length, per_thread<T>());
            for (size_t i = 0; i < length; i++) {
                T l = left.get(index(variant.left, left_at, i)), r = right.get(index(variant.right, right_at, i));
                output.set(i, f(l, r));
            }
        });
    }
}

// On a GPU an integer division by zero does not trap.
template <class T> T divided(T x, T y) {
    if (std::numeric_limits<T>::is_integer && float(y) == 0) return T(0);
    return T(x / y);
}

int all = [] {
    for_all([](auto zero) {
        typedef decltype(zero) T;
        std::string type = std::string("_") + Type<T>::name();
        binary<T, T>("badd" + type, [](T x, T y) { return T(x + y); });
        binary<T, T>("bsub" + type, [](T x, T y) { return T(x - y); });
        binary<T, T>("bmul" + type, [](T x, T y) { return T(x * y); });
        binary<T, T>("bdiv" + type, [](T x, T y) { return divided(x, y); });
        binary<T, T>("bminimum" + type, [](T x, T y) { return T(x < y ? x : y); });
        binary<T, T>("bmaximum" + type, [](T x, T y) { return T(x > y ? x : y); });
        binary<T, uint8_t>("eq" + type, [](T x, T y) { return uint8_t(x == y); });
        binary<T, uint8_t>("ne" + type, [](T x, T y) { return uint8_t(x != y); });
        binary<T, uint8_t>("le" + type, [](T x, T y) { return uint8_t(x <= y); });
        binary<T, uint8_t>("lt" + type, [](T x, T y) { return uint8_t(x < y); });
        binary<T, uint8_t>("ge" + type, [](T x, T y) { return uint8_t(x >= y); });
        binary<T, uint8_t>("gt" + type, [](T x, T y) { return uint8_t(x > y); });
    });
    return 0;
}();

} // namespace
