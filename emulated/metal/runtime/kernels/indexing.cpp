// indexing.metal: gather and scatter by index. The largest value of the index type means no element.
#include <algorithm>

#include "kernel.h"

namespace {

template <class I> bool none(I index) { return index == Type<I>::highest(); }

// Elements, left size, source dim size, right size, ids, contiguous, source dims, source strides, input, ids, output.
template <class I, class T> void index_select(const std::string &name) {
    kernel(name, "rrrrrrrrrrw", [](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0), dim = scalar<uint64_t>(launch, 2),
               right = scalar<uint64_t>(launch, 3);
        size_t count = scalar<uint64_t>(launch, 4);
        bool contiguous = scalar<uint8_t>(launch, 5);
        // candle's shader takes the size of the dimension for the rank here.
        Strides strided(launch, 2, 6, 7);
        View<T> input(launch, 8), output(launch, 10);
        View<I> ids(launch, 9);
        covers(launch, length);
        for (size_t i = 0; i < length; i++) {
            I id = ids.get(i / right % count);
            size_t at = (i / right / count * dim + std::min(size_t(id), dim - 1)) * right + i % right;
            output.set(i, none(id) ? T(0) : input.get(contiguous ? at : strided(at)));
        }
    });
}

// Elements, left size, source dim size, right size, ids, input, ids, output.
template <class I, class T> void gather(const std::string &name) {
    kernel(name, "rrrrrrrw", [](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0), dim = scalar<uint64_t>(launch, 2),
               right = scalar<uint64_t>(launch, 3);
        size_t count = scalar<uint64_t>(launch, 4);
        View<T> input(launch, 5), output(launch, 7);
        View<I> ids(launch, 6);
        covers(launch, length);
        for (size_t i = 0; i < length; i++) {
            I id = ids.get(i);
            output.set(i, none(id) ? T(0) : input.get((i / right / count * dim + size_t(id)) * right + i % right));
        }
    });
}

template <class T> T put(T, T value) { return value; }
template <class T> T added(T old, T value) { return T(old + value); }

// Elements, left size, source dim size, right size, output dim size, input, ids, output; one id for each input.
template <class I, class T> void scatter(const std::string &name, T (*combine)(T, T)) {
    kernel(name, "rrrrrrrw", [combine](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0), dim = scalar<uint64_t>(launch, 2),
               right = scalar<uint64_t>(launch, 3);
        size_t output_dim = scalar<uint64_t>(launch, 4);
        View<T> input(launch, 5), output(launch, 7);
        View<I> ids(launch, 6);
        covers(launch, length);
        for (size_t i = 0; i < length; i++) {
            for (size_t j = 0; j < dim; j++) {
                size_t from = (i / right * dim + j) * right + i % right;
                I id = ids.get(from);
                if (none(id)) continue;
                size_t to = (i / right * output_dim + size_t(id)) * right + i % right;
                output.set(to, combine(output.get(to), input.get(from)));
            }
        }
    });
}

// Elements, left size, source dim size, right size, output dim size, ids, input, ids, output; one id for each row.
template <class I, class T> void index_add(const std::string &name) {
    kernel(name, "rrrrrrrrw", [](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0), dim = scalar<uint64_t>(launch, 2),
               right = scalar<uint64_t>(launch, 3);
        size_t output_dim = scalar<uint64_t>(launch, 4), count = scalar<uint64_t>(launch, 5);
        View<T> input(launch, 6), output(launch, 8);
        View<I> ids(launch, 7);
        covers(launch, length);
        for (size_t i = 0; i < length; i++) {
            for (size_t j = 0; j < count; j++) {
                I id = ids.get(j);
                if (none(id)) continue;
                size_t from = (i / right * dim + j) * right + i % right;
                size_t to = (i / right * output_dim + size_t(id)) * right + i % right;
                output.set(to, T(output.get(to) + input.get(from)));
            }
        }
    });
}

template <class I, class T> std::string name(const char *operation) {
    return std::string(operation) + "_" + Type<I>::name() + "_" + Type<T>::name();
}

// candle does not have every pair of types.
template <class I, class T> void select_and_add() {
    index_select<I, T>(name<I, T>("is"));
    index_add<I, T>(name<I, T>("ia"));
}
template <class I, class T> void gather() { gather<I, T>(name<I, T>("gather")); }
template <class I, class T> void scatter() {
    scatter<I, T>(name<I, T>("s"), put<T>);
    scatter<I, T>(name<I, T>("sa"), added<T>);
}

int all = [] {
    for_integers([](auto index) {
        for_floats([](auto zero) {
            typedef decltype(index) I;
            typedef decltype(zero) T;
            select_and_add<I, T>();
            gather<I, T>();
            scatter<I, T>();
        });
    });
    for_integers([](auto zero) {
        typedef decltype(zero) T;
        select_and_add<uint8_t, T>();
        select_and_add<uint32_t, T>();
        gather<uint8_t, T>();
        index_add<int64_t, T>(name<int64_t, T>("ia"));
    });
    index_select<int64_t, int64_t>("is_i64_i64");
    gather<uint32_t, uint32_t>();
    gather<uint32_t, int64_t>();
    gather<int64_t, uint32_t>();
    gather<int64_t, int64_t>();
    scatter<uint32_t, uint32_t>();
    return 0;
}();

} // namespace
