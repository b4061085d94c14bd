// cast.metal: conversions between types.
#include "kernel.h"

namespace {

// length, input, output; and length, rank, dims, strides, input, output.
template <class T, class U> void cast(const std::string &name) {
    kernel(name, "rrw", [](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0);
        View<T> input(launch, 1);
        View<U> output(launch, 2);
        covers(launch, length, per_thread<T>());
        for (size_t i = 0; i < length; i++) output.set(i, U(input.get(i)));
    });
    kernel(name + "_strided", "rrrrrw", [](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0);
        Strides at(launch, 1, 2, 3);
        View<T> input(launch, 4);
        View<U> output(launch, 5);
        covers(launch, length);
        for (size_t i = 0; i < length; i++) output.set(i, U(input.get(at(i))));
    });
}

int all = [] {
    for_all([](auto from) {
        for_all([](auto to) {
            typedef decltype(from) T;
            typedef decltype(to) U;
            cast<T, U>(std::string("cast_") + Type<T>::name() + "_" + Type<U>::name());
        });
    });
    return 0;
}();

} // namespace
