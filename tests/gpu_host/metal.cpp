// Runs the kernels of src/backend/metal/mixture.metal on the emulated GPU.

#include "machine.h"

#include <tuple>
#include <utility>

// A kernel is a function of its buffers, followed by the indices of the block and of the thread.
template <auto function> struct Unpack;

#include "mixture.metal" // on the include path

#undef thread

// A tensor is bound by its address, a number or structure by the address of its bytes.
template <typename A> static A bound(void *slot) {
    if constexpr (std::is_pointer_v<A>) {
        return static_cast<A>(slot);
    } else {
        return *static_cast<std::remove_reference_t<A> *>(slot);
    }
}

template <typename... A, void (*function)(A...)> struct Unpack<function> {
    using All = std::tuple<A...>;
    static constexpr size_t BUFFERS = sizeof...(A) - 2;
    template <size_t... I> static void call(void **slots, std::index_sequence<I...>) {
        function(bound<std::tuple_element_t<I, All>>(slots[I])..., machine::block, machine::thread);
    }
    template <size_t... I> static std::vector<int> access(std::index_sequence<I...>) {
        return {machine::argument_access<std::tuple_element_t<I, All>>()...};
    }
    static void run(void **slots) { call(slots, std::make_index_sequence<BUFFERS>()); }
    static machine::Kernel kernel(const char *name) {
        return {name, run, access(std::make_index_sequence<BUFFERS>()), {}};
    }
};

#undef KERNEL
#define KERNEL(name) Unpack<&::name>::kernel(#name)
static const machine::Kernel kernels[] = {
    KERNEL(row_log_sum_exp),
    KERNEL(position_loss),
    KERNEL(top_k),
    KERNEL(position_scores),
    KERNEL(position_masses),
    KERNEL(row_soft_mass),
    KERNEL(log_prior_gradients),
    KERNEL(position_targets),
    KERNEL(position_gradient_scales),
    KERNEL(reduction_scales),
    KERNEL(weigh_losses),
    KERNEL(mixture_log_probs_f32),
    KERNEL(mixture_log_probs_f16),
    KERNEL(mixture_log_probs_bf16),
    KERNEL(bias_tanh_f32),
    KERNEL(bias_tanh_f16),
    KERNEL(bias_tanh_bf16),
    KERNEL(tanh_gradient_f32),
    KERNEL(tanh_gradient_f16),
    KERNEL(tanh_gradient_bf16),
    KERNEL(log_softmax_f32),
    KERNEL(log_softmax_f16),
    KERNEL(log_softmax_bf16),
    KERNEL(log_softmax_gradient_f32),
    KERNEL(log_softmax_gradient_f16),
    KERNEL(log_softmax_gradient_bf16),
    KERNEL(row_gradient_f32),
    KERNEL(row_target_gradient_f32),
    KERNEL(widen_f16),
    KERNEL(widen_bf16),
    KERNEL(inner_products_f16),
    KERNEL(inner_products_bf16),
};

static const machine::Kernel *find(const char *name) {
    for (const machine::Kernel &kernel : kernels)
        if (!std::strcmp(kernel.name, name)) return &kernel;
    return nullptr;
}

// Returns 0, or 1 if there is no such kernel.
extern "C" int launch(const char *name, unsigned blocks, void **slots, const size_t *, size_t) {
    return machine::launch(kernels, std::size(kernels), name, blocks, slots);
}
// Returns the number of a kernel's buffers, or -1 if there is no such kernel.
extern "C" int slots(const char *name) {
    const machine::Kernel *kernel = find(name);
    return kernel ? int(kernel->access.size()) : -1;
}
// Returns 1 if the kernel only reads this buffer, 2 if it may write it.
extern "C" int access(const char *name, int slot) { return find(name)->access.at(slot); }

extern "C" void release() { machine::release(); }
