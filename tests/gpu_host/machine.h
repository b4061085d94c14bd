// A GPU on the host: every thread of a block is a fiber, and a block's fibers take turns.
//
// A barrier that some threads of a block do not reach, and a shuffle that some lanes of a warp do not join, end the process
// with a message: on a GPU they would hang or give garbage. Shared memory is filled with NaN before each block, so that what is
// read before it is written shows. Threads take their turns in an order that changes from block to block, so that what depends
// on the order shows too.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <vector>

// Where a kernel's variables of a block live.
#define MACHINE_SHARED static __attribute__((section("machine_shared")))
extern "C" char __start_machine_shared __attribute__((weak, visibility("hidden")));
extern "C" char __stop_machine_shared __attribute__((weak, visibility("hidden")));

namespace machine {

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
static unsigned block, thread;

static void fail(const char *what) {
    std::fprintf(stderr, "block %u: %s\n", block, what);
    std::abort();
}

static void wait(State state) {
    fibers[thread].state = state;
    swapcontext(&fibers[thread].context, &scheduler);
}

static void enter() {
    body(arguments);
    fibers[thread].state = DONE;
}

static bool all(unsigned first, unsigned n, State state) {
    for (unsigned i = first; i < first + n; ++i) {
        if (fibers[i].state != state) return false;
    }
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
            const unsigned turn = block % 2 ? THREADS - 1 - i : i;
            if (fibers[turn].state != READY) continue;
            thread = turn;
            swapcontext(&scheduler, &fibers[turn].context);
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

static inline void barrier() { wait(AT_BARRIER); }

template <typename T> static T shuffle_xor(T x, int lane) {
    static_assert(sizeof(T) == 4, "a shuffle moves 4 bytes");
    Fiber &mine = fibers[thread];
    std::memcpy(&mine.given, &x, 4);
    mine.lane = lane;
    wait(AT_SHUFFLE);
    std::memcpy(&x, &mine.taken, 4);
    return x;
}

struct Kernel {
    const char *name;
    // Takes an address for each argument, as the device's own launch does.
    void (*run)(void **);
    // Of each argument: 1 if it is read only, 2 if it is memory that the kernel may write.
    std::vector<int> access;
};

static int launch(const Kernel *kernels, size_t count, const char *name, unsigned blocks, void **of_kernel) {
    for (size_t i = 0; i < count; ++i) {
        if (std::strcmp(kernels[i].name, name)) continue;
        body = kernels[i].run;
        arguments = of_kernel;
        for (block = 0; block < blocks; ++block) {
            if (&__start_machine_shared) {
                std::memset(&__start_machine_shared, 0xff, &__stop_machine_shared - &__start_machine_shared);
            }
            run_block();
        }
        return 0;
    }
    return 1;
}

template <typename T> constexpr int access_of() {
    return std::is_pointer_v<T> && !std::is_const_v<std::remove_pointer_t<T>> ? 2 : 1;
}

} // namespace machine
