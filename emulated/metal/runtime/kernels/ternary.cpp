// ternary.metal: an elementwise choice between two tensors.
#include "kernel.h"

namespace {

// The constants 0, 1 and 2: whether the condition, the first and the second operand are contiguous.
bool constant(const Launch &launch, size_t i) {
    auto found = launch.code->constants.find(i);
    if (found == launch.code->constants.end())
        launch.code->fail("function constant " + std::to_string(i) + " is not set");
    return found->second;
}

// length, rank, dims, three strides, condition, first, second, output.
template <class I, class T> void where(const std::string &name) {
    kernel(name, "rrrrrrrrrw", [](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0);
        Strides condition_at(launch, 1, 2, 3), first_at(launch, 1, 2, 4), second_at(launch, 1, 2, 5);
        bool plain_condition = constant(launch, 0), plain_first = constant(launch, 1),
             plain_second = constant(launch, 2);
        View<I> condition(launch, 6);
        View<T> first(launch, 7), second(launch, 8), output(launch, 9);
        covers(launch, length, per_thread<T>());
        for (size_t i = 0; i < length; i++) {
            bool is = condition.get(plain_condition ? i : condition_at(i));
            // Both are read, as in the shader.
            T a = first.get(plain_first ? i : first_at(i)), b = second.get(plain_second ? i : second_at(i));
            output.set(i, is ? a : b);
        }
    });
}

int all = [] {
    for_integers([](auto index) {
        for_all([](auto zero) {
            typedef decltype(index) I;
            typedef decltype(zero) T;
            where<I, T>(std::string("where_") + Type<I>::name() + "_" + Type<T>::name());
        });
    });
    return 0;
}();

} // namespace
