// Runs the kernels of src/backend/cuda/mixture.cu on the host: every CUDA thread is a fiber, and a block's fibers take turns.
//
// A barrier that some threads of a block do not reach, and a shuffle that some lanes of a warp do not join, end the process
// with a message: on a GPU they would hang or give garbage. Shared memory is filled with NaN before each block, so that what
// is read before it is written shows.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static __attribute__((section("cuda_shared")))

struct dim {
    unsigned x;
};
static dim threadIdx, blockIdx;
struct float2 {
    float x, y;
};
using std::min;
static inline float __int_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

namespace host {

constexpr unsigned THREADS = 256, WARP = 32;
enum State { READY, AT_BARRIER, AT_SHUFFLE, DONE };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    State state;
    uint32_t given, taken;
    int lane;
};
static std::vector<Fiber> fibers(THREADS);
static ucontext_t scheduler;
static void (*body)(void **);
static void **arguments;

static void fail(const char *what) {
    std::fprintf(stderr, "block %u: %s\n", blockIdx.x, what);
    std::abort();
}

static void wait(State state) {
    Fiber &mine = fibers[threadIdx.x];
    mine.state = state;
    swapcontext(&mine.context, &scheduler);
}

static void enter() {
    body(arguments);
    fibers[threadIdx.x].state = DONE;
}

static bool all(unsigned first, unsigned n, State state) {
    for (unsigned i = first; i < first + n; ++i)
        if (fibers[i].state != state) return false;
    return true;
}

static void run_block() {
    for (Fiber &fiber : fibers) {
        fiber.stack.resize(64 << 10);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        fiber.state = READY;
        makecontext(&fiber.context, enter, 0);
    }
    while (!all(0, THREADS, DONE)) {
        for (unsigned i = 0; i < THREADS; ++i) {
            if (fibers[i].state != READY) continue;
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].context);
        }
        bool progress = false;
        for (unsigned first = 0; first < THREADS; first += WARP) {
            if (!all(first, WARP, AT_SHUFFLE)) continue;
            for (unsigned i = first; i < first + WARP; ++i) {
                if (fibers[i].lane != fibers[first].lane) fail("lanes shuffle by different distances");
                fibers[i].taken = fibers[i ^ fibers[i].lane].given;
                fibers[i].state = READY;
            }
            progress = true;
        }
        if (all(0, THREADS, AT_BARRIER)) {
            for (Fiber &fiber : fibers) fiber.state = READY;
            progress = true;
        }
        if (!progress && !all(0, THREADS, DONE)) fail("threads part ways at a barrier or a shuffle");
    }
}

template <typename... A, size_t... I> static void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(arguments[I])...);
}

} // namespace host

static inline void __syncthreads() { host::wait(host::AT_BARRIER); }

template <typename T> static T __shfl_xor_sync(unsigned, T x, int lane) {
    static_assert(sizeof(T) == 4, "a shuffle moves 4 bytes");
    host::Fiber &mine = host::fibers[threadIdx.x];
    std::memcpy(&mine.given, &x, 4);
    mine.lane = lane;
    host::wait(host::AT_SHUFFLE);
    std::memcpy(&x, &mine.taken, 4);
    return x;
}

#include "mixture.cu" // from the folder that the compiler is told

extern "C" char __start_cuda_shared, __stop_cuda_shared;

namespace host {

// Of the kernel's type, so that `call` can take its arguments apart.
template <auto kernel> struct Unpack;
template <typename... A, void (*kernel)(A...)> struct Unpack<kernel> {
    static void run(void **arguments) { call(kernel, arguments, std::index_sequence_for<A...>()); }
};

#define KERNEL(name) {#name, Unpack<&name>::run}
static const std::map<std::string, void (*)(void **)> kernels = {
    KERNEL(row_log_sum_exp), KERNEL(token_loss), KERNEL(row_soft_mass), KERNEL(token_scales), KERNEL(token_targets),
    KERNEL(token_weighting), KERNEL(live_rows), KERNEL(scatter_rows),
#define KERNELS_FOR(type) KERNEL(mixture_log_probs_##type), KERNEL(row_gradient_##type), KERNEL(gather_rows_##type)
    KERNELS_FOR(f32), KERNELS_FOR(f16), KERNELS_FOR(bf16),
};

} // namespace host

// Runs a kernel; as cuLaunchKernel, it takes an address for each argument. Gives 0, or 1 if there is no such kernel.
extern "C" int launch(const char *name, unsigned blocks, void **arguments) {
    const auto kernel = host::kernels.find(name);
    if (kernel == host::kernels.end()) return 1;
    host::body = kernel->second;
    host::arguments = arguments;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        std::memset(&__start_cuda_shared, 0xff, &__stop_cuda_shared - &__start_cuda_shared);
        host::run_block();
    }
    return 0;
}
