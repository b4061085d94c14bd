// sort.metal, and from mlx_sort.metal the sorts of rows that fit into a threadgroup: the order of each row's elements.
#include <algorithm>
#include <numeric>
#include <vector>

#include "kernel.h"

namespace {

// input, output, columns, columns with padding. The sorting network is candle's, so that ties have the same order.
template <class T> void network(const std::string &name, bool ascending) {
    kernel(name, "rwrr", [ascending](const Launch &launch) {
        View<T> input(launch, 0);
        View<uint32_t> output(launch, 1);
        size_t columns = scalar<int64_t>(launch, 2), padded = scalar<int64_t>(launch, 3);
        if (launch.group.width < padded) launch.code->fail("fewer threads than columns");
        for (size_t row = 0; row < launch.groups.height; row++) {
            std::vector<size_t> order(padded);
            std::iota(order.begin(), order.end(), 0);
            auto value = [&](size_t i) { return input.get(row * columns + order[i]); };
            // Whether the element at `i` comes after that at `j`; padding comes last.
            auto after = [&](size_t i, size_t j) {
                if (order[i] >= columns) return true;
                return order[j] < columns && (ascending ? value(i) > value(j) : value(i) < value(j));
            };
            for (size_t k = 2; k <= padded; k *= 2)
                for (size_t j = k / 2; j; j /= 2)
                    for (size_t i = 0; i < padded; i++) {
                        size_t other = i ^ j;
                        if (other > i && (i & k ? after(other, i) : after(i, other))) std::swap(order[i], order[other]);
                    }
            for (size_t i = 0; i < columns; i++) output.set(row * columns + i, uint32_t(order[i]));
        }
    });
}

// input, output, columns, two strides within a row, two between rows.
template <class T> void block(const std::string &name, size_t threads, size_t each) {
    kernel(name, "rwrrrrr", [threads, each](const Launch &launch) {
        View<T> input(launch, 0);
        View<uint32_t> output(launch, 1);
        size_t columns = scalar<int32_t>(launch, 2);
        size_t in_stride = scalar<int32_t>(launch, 3), out_stride = scalar<int32_t>(launch, 4);
        size_t in_row = scalar<int32_t>(launch, 5), out_row = scalar<int32_t>(launch, 6);
        if (launch.group.width != threads || columns > threads * each)
            launch.code->fail("a threadgroup cannot hold the row");
        for (size_t row = 0; row < launch.groups.height; row++) {
            std::vector<uint32_t> order(columns);
            std::iota(order.begin(), order.end(), 0);
            auto value = [&](uint32_t i) { return input.get(row * in_row + i * in_stride); };
            std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return value(a) < value(b); });
            for (size_t i = 0; i < columns; i++) output.set(row * out_row + i * out_stride, order[i]);
        }
    });
}

template <class T> void blocks(const std::string &type) {
    for (size_t threads : {128, 256, 512})
        if (threads < 512 || sizeof(T) <= 4)
            block<T>("carg_block_sort_" + type + "_uint32_bn" + std::to_string(threads) + "_tn8", threads, 8);
}

int all = [] {
    for_all([](auto zero) {
        typedef decltype(zero) T;
        network<T>(std::string("asort_asc_") + Type<T>::name(), true);
        network<T>(std::string("asort_desc_") + Type<T>::name(), false);
    });
    blocks<float>("float32");
    blocks<Half>("float16");
    blocks<Bfloat>("bfloat16");
    blocks<uint8_t>("uint8");
    blocks<uint32_t>("uint32");
    blocks<int64_t>("int64");
    return 0;
}();

} // namespace
