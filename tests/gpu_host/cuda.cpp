// Runs the kernels of src/backend/cuda/mixture.cu on the emulated GPU.

#include "machine.h"

#include <cmath>
#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ MACHINE_SHARED

// Read at every use, since the emulator changes it.
struct OfBlock {
    struct { operator unsigned() const { return machine::block; } } x;
};
struct OfThread {
    struct { operator unsigned() const { return machine::thread; } } x;
};
static const OfBlock blockIdx{};
static const OfThread threadIdx{};

static inline float __int_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
static inline void __syncthreads() { machine::barrier(); }
template <typename T> static T __shfl_xor_sync(unsigned, T x, int lane) { return machine::shuffle_xor(x, lane); }

#include "mixture.cu" // on the include path

// Unpacks the arguments of a kernel by its type.
template <auto kernel> struct Unpack;
template <typename... A, void (*kernel)(A...)> struct Unpack<kernel> {
    template <size_t... I> static void call(void **arguments, std::index_sequence<I...>) {
        kernel(*static_cast<A *>(arguments[I])...);
    }
    static void run(void **arguments) { call(arguments, std::index_sequence_for<A...>()); }
    static machine::Kernel named(const char *name) { return {name, run, {}, {sizeof(A)...}}; }
};

#undef KERNEL
#define KERNEL(name) Unpack<&::name>::named(#name)
#define KERNELS_FOR(type) KERNEL(mixture_log_probs_##type), KERNEL(row_gradient_##type), KERNEL(gather_rows_##type)
static const machine::Kernel kernels[] = {
    KERNEL(row_log_sum_exp),    KERNEL(position_loss),   KERNEL(top_k),
    KERNEL(row_soft_mass),      KERNEL(position_scales), KERNEL(position_targets),
    KERNEL(position_weighting), KERNEL(live_rows),       KERNEL(scatter_rows),
    KERNELS_FOR(f32),           KERNELS_FOR(f16),        KERNELS_FOR(bf16),
};

// Launches a kernel with arguments of these sizes. Returns 0, or 1 if there is no such kernel.
extern "C" int launch(const char *name, unsigned blocks, void **arguments, const size_t *sizes, size_t count) {
    return machine::launch(kernels, std::size(kernels), name, blocks, arguments, {sizes, sizes + count});
}
