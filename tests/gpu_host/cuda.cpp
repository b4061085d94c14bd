// Runs the kernels of src/backend/cuda/mixture.cu on the emulated GPU.

#include "machine.h"

#define __global__
#define __shared__ MACHINE_SHARED
#include "cuda/emulated.h"

extern "C" {
unsigned emulated_index(int which) {
    // The kernels use one dimension, and the number of neither threads nor blocks.
    return which == 0 ? machine::thread : which == 3 ? machine::block : 0xffffffff;
}
void emulated_barrier() { machine::barrier(); }
uint32_t emulated_shuffle_xor(uint32_t value, int lane) { return machine::shuffle_xor(value, lane); }
void emulated_fail(const char *what) { machine::fail(what); }
}

#include "mixture.cu" // on the include path

#undef KERNEL
#define KERNEL(name) kernel<&::name>(#name)
template <auto function> static machine::Kernel kernel(const char *name) {
    const EmulatedKernel emulated = EmulatedCall<function>::kernel(name);
    return {name, emulated.run, {}, {emulated.sizes, emulated.sizes + emulated.arity}};
}
#define KERNELS_FOR(type)                                                                              \
    KERNEL(mixture_log_probs_##type), KERNEL(row_gradient_##type), KERNEL(row_target_gradient_##type), \
        KERNEL(bias_tanh_##type), KERNEL(tanh_gradient_##type), KERNEL(log_softmax_##type),        \
        KERNEL(log_softmax_gradient_##type), KERNEL(pad_rows_##type),                                  \
        KERNEL(round_rows_##type), KERNEL(row_exponentials_##type), KERNEL(row_factors_##type), KERNEL(scale_rows_##type)
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
    KERNEL(row_references),
    KERNEL(product_exponentials),
    KERNEL(join_powers),
    KERNELS_FOR(f32),
    KERNELS_FOR(f16),
    KERNELS_FOR(bf16),
};

// Launches a kernel with arguments of these sizes. Returns 0, or 1 if there is no such kernel.
extern "C" int launch(const char *name, unsigned blocks, void **arguments, const size_t *sizes, size_t count) {
    return machine::launch(kernels, std::size(kernels), name, blocks, arguments, {sizes, sizes + count});
}

extern "C" void release() { machine::release(); }
