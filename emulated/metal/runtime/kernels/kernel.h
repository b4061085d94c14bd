// candle's kernels by name. Their sources are not compiled: each has a stand-in here that takes the same arguments in
// the same slots, does the same arithmetic in one thread, and checks the bounds of its buffers.
#pragma once
#include <functional>

#include "../../../../tests/gpu_host/numbers.h"
#include "code.h"

typedef std::function<void(const Launch &)> Run;

// Registers a kernel. `roles` is that of `Code`, with C for a slot that is read only if use_out_source is set.
void kernel(const std::string &name, const std::string &roles, Run run);

// The memory bound to a slot, as an array of numbers.
template <class T> class View {
    const Code *code;
    size_t slot, count;
    char *bytes;

  public:
    View(const Launch &launch, size_t slot)
        : code(launch.code), slot(slot), count(launch.slots[slot].size / sizeof(T)), bytes(launch.slots[slot].bytes) {}

    T get(size_t i) const {
        T value;
        memcpy(&value, at(i), sizeof(T));
        return value;
    }
    void set(size_t i, T value) const { memcpy(at(i), &value, sizeof(T)); }

  private:
    char *at(size_t i) const {
        if (i >= count)
            code->fail("buffer " + std::to_string(slot) + ": element " + std::to_string(i) + " of " +
                       std::to_string(count));
        return bytes + i * sizeof(T);
    }
};

template <class T> T scalar(const Launch &launch, size_t slot) { return View<T>(launch, slot).get(0); }

// Checks that the grid has a thread for every `each` elements. It may have more threads than it needs.
inline void covers(const Launch &launch, size_t elements, size_t each = 1) {
    size_t needed = (elements + each - 1) / each;
    if (launch.threads.count() < needed)
        launch.code->fail(std::to_string(launch.threads.count()) + " threads for " + std::to_string(elements) +
                          " elements");
}

// The number of elements per thread of candle's elementwise kernels.
template <class T> size_t per_thread() { return (8 + sizeof(T) - 1) / sizeof(T); }

// The offsets of the elements of a strided tensor; the arguments are the slots of its rank, dimensions and strides.
class Strides {
    size_t rank;
    View<uint64_t> dims, strides;

  public:
    Strides(const Launch &launch, size_t rank, size_t dims, size_t strides)
        : rank(scalar<uint64_t>(launch, rank)), dims(launch, dims), strides(launch, strides) {}

    size_t operator()(size_t i) const {
        size_t at = 0;
        for (size_t d = rank; d-- > 0;) {
            at += i % dims.get(d) * strides.get(d);
            i /= dims.get(d);
        }
        return at;
    }
};
