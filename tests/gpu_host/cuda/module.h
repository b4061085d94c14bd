// The table of a module's kernels, which `bin/nvcc` appends to a CUDA source file.
#pragma once
#include <cstddef>
#include <type_traits>
#include <utility>

// The first line of a module's image is one of these, followed by the path of its library. The threads of independent
// kernels never wait for each other.
#define EMULATED_COOPERATIVE "emulated kernels, cooperative: "
#define EMULATED_INDEPENDENT "emulated kernels, independent: "

struct EmulatedKernel {
    const char *name;
    // Takes an address for each argument.
    void (*run)(void **);
    int arity;
    const size_t *sizes;
    // For each argument, whether it is a pointer.
    const bool *are_pointers;
};

struct EmulatedModule {
    // Ends with a kernel without a name.
    const EmulatedKernel *kernels;
    // The variables that the threads of a block share.
    char *shared, *shared_end;
};

// Unpacks the arguments of a kernel by its type.
template <auto function> struct EmulatedCall;
template <typename... A, void (*function)(A...)> struct EmulatedCall<function> {
    template <size_t... I>
    __attribute__((no_sanitize_thread)) static void call(void **arguments, std::index_sequence<I...>) {
        function(*static_cast<A *>(arguments[I])...);
    }
    __attribute__((no_sanitize_thread)) static void run(void **arguments) {
        call(arguments, std::index_sequence_for<A...>());
    }
    static constexpr size_t sizes[] = {sizeof(A)..., 0};
    static constexpr bool are_pointers[] = {std::is_pointer_v<A>..., false};
    static constexpr EmulatedKernel kernel(const char *name) { return {name, run, sizeof...(A), sizes, are_pointers}; }
};
