// unary.metal, affine.metal and fill.metal: elementwise functions of one tensor, copies, constants.
#include <cmath>

#include "kernel.h"

namespace {

// An elementwise function that is computed in float and rounded once.
typedef float (*Function)(float);

template <class T> T apply(Function f, T value) { return T(f(float(value))); }

struct Named {
    const char *name;
    Function function;
};

float gelu(float x) { return 0.5f * x * (1 + std::tanh(std::sqrt(2 / float(M_PI)) * (x + 0.044715f * x * x * x))); }

const Named FUNCTIONS[] = {
    {"gelu_erf", [](float x) { return x * (1 + std::erf(x * float(M_SQRT1_2))) / 2; }},
    {"sqrt", [](float x) { return std::sqrt(x); }},
    {"sqr", [](float x) { return x * x; }},
    {"neg", [](float x) { return -x; }},
    {"recip", [](float x) { return 1 / x; }},
    {"silu", [](float x) { return x / (1 + std::exp(-x)); }},
    {"gelu", gelu},
    {"relu", [](float x) { return x < 0 ? 0 : x; }},
    {"cos", [](float x) { return std::cos(x); }},
    {"sin", [](float x) { return std::sin(x); }},
    {"exp", [](float x) { return std::exp(x); }},
    {"log", [](float x) { return std::log(x); }},
    {"abs", [](float x) { return std::fabs(x); }},
    {"ceil", [](float x) { return std::ceil(x); }},
    {"floor", [](float x) { return std::floor(x); }},
    {"round", [](float x) { return std::round(x); }},
    {"erf", [](float x) { return std::erf(x); }},
    {"sign", [](float x) { return x > 0 ? 1.f : x < 0 ? -1.f : 0.f; }},
    {"sigmoid", [](float x) { return 1 / (1 + std::exp(-x)); }},
    {"tanh", [](float x) { return std::tanh(x); }},
};

// length, input, output; and length, rank, dims, strides, input, output.
template <class T, class F> void unary(const std::string &name, F f) {
    kernel(name, "rrw", [f](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0);
        View<T> input(launch, 1), output(launch, 2);
        covers(launch, length, per_thread<T>());
        for (size_t i = 0; i < length; i++) output.set(i, f(input.get(i)));
    });
    kernel(name + "_strided", "rrrrrw", [f](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0);
        Strides at(launch, 1, 2, 3);
        View<T> input(launch, 4), output(launch, 5);
        covers(launch, length);
        for (size_t i = 0; i < length; i++) output.set(i, f(input.get(at(i))));
    });
}

// length, value, output; and length, rank, dims, strides of the output, value, output.
template <class T> void const_set(const std::string &name) {
    kernel(name, "rrw", [](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0);
        T value = scalar<T>(launch, 1);
        View<T> output(launch, 2);
        covers(launch, length, per_thread<T>());
        for (size_t i = 0; i < length; i++) output.set(i, value);
    });
    kernel(name + "_strided", "rrrrrw", [](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0);
        Strides at(launch, 1, 2, 3);
        T value = scalar<T>(launch, 4);
        View<T> output(launch, 5);
        covers(launch, length);
        for (size_t i = 0; i < length; i++) output.set(at(i), value);
    });
}

// output, value, length.
template <class T> void fill(const std::string &name) {
    kernel(name, "wrr", [](const Launch &launch) {
        View<T> output(launch, 0);
        T value = scalar<T>(launch, 1);
        size_t length = scalar<uint64_t>(launch, 2);
        covers(launch, length);
        for (size_t i = 0; i < length; i++) output.set(i, value);
    });
}

// Rows, columns, row strides of both, input, output.
template <class T> void copy2d(const std::string &name) {
    kernel(name, "rrrrrw", [](const Launch &launch) {
        size_t rows = scalar<int64_t>(launch, 0), columns = scalar<int64_t>(launch, 1);
        size_t from = scalar<int64_t>(launch, 2), to = scalar<int64_t>(launch, 3);
        View<T> input(launch, 4), output(launch, 5);
        if (launch.threads.width < rows || launch.threads.height < columns)
            launch.code->fail("a grid smaller than the copy");
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < columns; j++) output.set(i * to + j, input.get(i * from + j));
    });
}

// A function with parameters: length, parameters, input, output; and length, rank, dims, strides, parameters, input,
// output.
template <class T, size_t PARAMETERS, class F> void parametric(const std::string &name, F f) {
    std::string parameters(PARAMETERS, 'r');
    kernel(name, "r" + parameters + "rw", [f](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0);
        float first = scalar<float>(launch, 1), last = scalar<float>(launch, PARAMETERS);
        View<T> input(launch, 1 + PARAMETERS), output(launch, 2 + PARAMETERS);
        covers(launch, length, per_thread<T>());
        for (size_t i = 0; i < length; i++) output.set(i, T(f(float(input.get(i)), first, last)));
    });
    kernel(name + "_strided", "rrrr" + parameters + "rw", [f](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0);
        Strides at(launch, 1, 2, 3);
        float first = scalar<float>(launch, 4), last = scalar<float>(launch, 3 + PARAMETERS);
        View<T> input(launch, 4 + PARAMETERS), output(launch, 5 + PARAMETERS);
        covers(launch, length);
        for (size_t i = 0; i < length; i++) output.set(i, T(f(float(input.get(at(i))), first, last)));
    });
}

int all = [] {
    for_floats([](auto zero) {
        typedef decltype(zero) T;
        std::string type = std::string("_") + Type<T>::name();
        for (const Named &named : FUNCTIONS) {
            Function f = named.function;
            unary<T>(named.name + type, [f](T x) { return apply(f, x); });
        }
        parametric<T, 1>("powf" + type, [](float x, float power, float) { return std::pow(x, power); });
        parametric<T, 1>("elu" + type,
                         [](float x, float slope, float) { return x > 0 ? x : slope * (std::exp(x) - 1); });
    });
    for_all([](auto zero) {
        typedef decltype(zero) T;
        std::string type = std::string("_") + Type<T>::name();
        unary<T>("copy" + type, [](T x) { return x; });
        const_set<T>("const_set" + type);
        copy2d<T>("copy2d" + type);
        fill<T>("fill" + type);
        parametric<T, 2>("affine" + type,
                         [](float x, float factor, float summand) { return std::fma(x, factor, summand); });
    });
    copy2d<int32_t>("copy2d_i32");
    copy2d<int16_t>("copy2d_i16");
    return 0;
}();

} // namespace
