// reduce.metal: reductions over the last dimension, softmax, norms. The order and type of a sum are candle's: a sum of
// f16 is in f16.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernel.h"

namespace {

// The offsets of the elements to reduce, from 32-bit dims and strides.
struct Indexer {
    std::vector<uint32_t> dims, strides;

    Indexer(const Launch &launch, bool strided) {
        size_t rank = scalar<uint32_t>(launch, 1);
        for (size_t d = 0; d < rank; d++) {
            dims.push_back(View<uint32_t>(launch, 2).get(d));
            if (strided) strides.push_back(View<uint32_t>(launch, 3).get(d));
        }
    }
    size_t operator()(size_t i) const {
        if (strides.empty()) return i;
        size_t at = 0;
        for (size_t d = dims.size(); d-- > 0;) {
            at += i % dims[d] * strides[d];
            i /= dims[d];
        }
        return at;
    }
};

bool power_of_two(size_t n) { return n && !(n & (n - 1)); }

// One result for each threadgroup: each thread combines a strided subset of the elements, then the results are combined
// pairwise.
template <class V, class Load, class Combine>
V block(const Launch &launch, size_t group, size_t each, size_t length, V start, Load load, Combine combine) {
    size_t threads = launch.group.width;
    if (!power_of_two(threads)) launch.code->fail("a threadgroup of " + std::to_string(threads) + " threads");
    size_t stop = std::min(length, (group + 1) * each);
    std::vector<V> values(threads, start);
    for (size_t thread = 0; thread < threads; thread++)
        for (size_t i = group * each + thread; i < stop; i += threads)
            values[thread] = combine(values[thread], load(i));
    for (size_t half = threads / 2; half; half /= 2)
        for (size_t thread = 0; thread < half; thread++)
            values[thread] = combine(values[thread], values[thread + half]);
    return values[0];
}

// length, rank, dims, (strides,) elements of each result, input, output.
template <class T> void reduction(const std::string &name, T start, T (*combine)(T, T)) {
    for (bool strided : {false, true}) {
        kernel(name + (strided ? "_strided" : ""), strided ? "rrrrrrw" : "rrrrrw", [=](const Launch &launch) {
            size_t length = scalar<uint32_t>(launch, 0), each = scalar<uint32_t>(launch, 3 + strided);
            Indexer at(launch, strided);
            View<T> input(launch, 4 + strided), output(launch, 5 + strided);
            auto load = [&](size_t i) { return input.get(at(i)); };
            for (size_t group = 0; group < launch.groups.width; group++)
                output.set(group, block<T>(launch, group, each, length, start, load, combine));
        });
    }
}

template <class T> struct Indexed {
    uint32_t index;
    T value;
};

// A reduction whose result is the index of the element.
template <class T> void arg_reduction(const std::string &name, T start, bool (*is_before)(T, T)) {
    for (bool strided : {false, true}) {
        kernel(name + (strided ? "_strided" : ""), strided ? "rrrrrrw" : "rrrrrw", [=](const Launch &launch) {
            size_t length = scalar<uint32_t>(launch, 0), each = scalar<uint32_t>(launch, 3 + strided);
            Indexer at(launch, strided);
            View<T> input(launch, 4 + strided);
            View<uint32_t> output(launch, 5 + strided);
            auto load = [&](size_t i) { return Indexed<T>{uint32_t(i % at.dims.back()), input.get(at(i))}; };
            auto combine = [&](Indexed<T> a, Indexed<T> b) {
                return is_before(a.value, b.value) || (a.value == b.value && a.index < b.index) ? a : b;
            };
            for (size_t group = 0; group < launch.groups.width; group++)
                output.set(group, block<Indexed<T>>(launch, group, each, length, {0, start}, load, combine).index);
        });
    }
}

// length, elements of each row, input, output.
template <class T> void softmax(const std::string &name) {
    kernel(name, "rrrw", [](const Launch &launch) {
        size_t length = scalar<uint32_t>(launch, 0), each = scalar<uint32_t>(launch, 1);
        View<T> input(launch, 2), output(launch, 3);
        for (size_t group = 0; group < launch.groups.width; group++) {
            size_t start = group * each, stop = std::min(length, start + each);
            float most = float(Type<T>::lowest()), sum = 0;
            for (size_t i = start; i < stop; i++) most = std::max(most, float(input.get(i)));
            for (size_t i = start; i < stop; i++) sum += std::exp(float(input.get(i)) - most);
            for (size_t i = start; i < stop; i++) output.set(i, T(std::exp(float(input.get(i)) - most) / sum));
        }
    });
}

// length, elements of each row, input, output, scale, (shift,) epsilon.
template <class T> void norm(const std::string &name, bool layer) {
    kernel(name, layer ? "rrrwrrr" : "rrrwrr", [layer](const Launch &launch) {
        size_t length = scalar<uint32_t>(launch, 0), each = scalar<uint32_t>(launch, 1);
        View<T> input(launch, 2), output(launch, 3), scale(launch, 4), shift(launch, 5);
        float epsilon = scalar<float>(launch, layer ? 6 : 5);
        for (size_t group = 0; group < launch.groups.width; group++) {
            size_t start = group * each, stop = std::min(length, start + each);
            float mean = 0, squares = 0;
            for (size_t i = start; layer && i < stop; i++) mean += float(input.get(i)) / each;
            for (size_t i = start; i < stop; i++) squares += std::pow(float(input.get(i)) - mean, 2.f);
            float inverse = 1 / std::sqrt(squares / each + epsilon);
            for (size_t i = start; i < stop; i++) {
                float value = (float(input.get(i)) - mean) * inverse * float(scale.get(i - start));
                output.set(i, T(layer ? value + float(shift.get(i - start)) : value));
            }
        }
    });
}

int all = [] {
    for_all([](auto zero) {
        typedef decltype(zero) T;
        std::string type = std::string("_") + Type<T>::name();
        T least = Type<T>::lowest(), most = Type<T>::highest();
        reduction<T>("fast_sum" + type, T(0), [](T a, T b) { return T(a + b); });
        reduction<T>("fast_mul" + type, T(1), [](T a, T b) { return T(a * b); });
        reduction<T>("fast_max" + type, least, [](T a, T b) { return a > b ? a : b; });
        reduction<T>("fast_min" + type, most, [](T a, T b) { return a < b ? a : b; });
        arg_reduction<T>("fast_argmax" + type, least, [](T a, T b) { return a > b; });
        arg_reduction<T>("fast_argmin" + type, most, [](T a, T b) { return a < b; });
    });
    for_floats([](auto zero) {
        typedef decltype(zero) T;
        std::string type = std::string("_") + Type<T>::name();
        softmax<T>("softmax" + type);
        norm<T>("rmsnorm" + type, false);
        norm<T>("layernorm" + type, true);
    });
    return 0;
}();

} // namespace
