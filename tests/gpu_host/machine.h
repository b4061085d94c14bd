// An emulated GPU: every thread of a block is a fiber on the host, and the fibers of a block run in turn.
//
// A barrier that some threads of a block do not reach, or a shuffle that some lanes of a warp do not join, ends the
// process with a message; on a GPU it would hang or return garbage. Shared memory is filled with NaN before each block,
// which exposes reads before the first write. The order of the threads alternates between blocks, which exposes results
// that depend on the order.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <vector>

// The section of the variables that a block shares.
#define MACHINE_SHARED static __attribute__((section("machine_shared")))
extern "C" char __start_machine_shared __attribute__((weak, visibility("hidden")));
extern "C" char __stop_machine_shared __attribute__((weak, visibility("hidden")));

namespace machine {

constexpr unsigned THREADS = 256, WARP = 32;
enum State { READY, AT_BARRIER, AT_SHUFFLE, DONE };

struct Fiber {
    ucontext_t first;
    jmp_buf rest;
    bool has_begun;
    std::vector<char> stack;
    State state;
    uint32_t sent, received;
    int lane;
};
static std::vector<Fiber> fibers(THREADS);
static jmp_buf scheduler;
static void (*body)(void **);
static void **arguments;
static unsigned block, thread;

static void fail(const char *what) {
    std::fprintf(stderr, "block %u: %s\n", block, what);
    std::abort();
}

// Jumps between stacks, which unlike `swapcontext` needs no system call.
static void wait(State state) {
    fibers[thread].state = state;
    if (!_setjmp(fibers[thread].rest)) _longjmp(scheduler, 1);
}

static void enter() {
    for (;;) {
        body(arguments);
        wait(DONE);
    }
}

// Runs a fiber until it waits.
static void resume(Fiber &fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.has_begun) _longjmp(fiber.rest, 1);
    fiber.has_begun = true;
    fiber.stack.resize(64 << 10);
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack.data();
    fiber.first.uc_stack.ss_size = fiber.stack.size();
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, enter, 0);
    setcontext(&fiber.first);
}

static bool all(unsigned first, unsigned n, State state) {
    for (unsigned i = first; i < first + n; ++i) {
        if (fibers[i].state != state) return false;
    }
    return true;
}

static void run_block() {
    for (Fiber &fiber : fibers) fiber.state = READY;
    while (!all(0, THREADS, DONE)) {
        for (unsigned i = 0; i < THREADS; ++i) {
            const unsigned turn = block % 2 ? THREADS - 1 - i : i;
            if (fibers[turn].state != READY) continue;
            thread = turn;
            resume(fibers[turn]);
        }
        bool progress = false;
        for (unsigned first = 0; first < THREADS; first += WARP) {
            if (!all(first, WARP, AT_SHUFFLE)) continue;
            for (unsigned i = first; i < first + WARP; ++i) {
                if (fibers[i].lane != fibers[first].lane) fail("lanes shuffle by different masks");
                fibers[i].received = fibers[i ^ fibers[i].lane].sent;
                fibers[i].state = READY;
            }
            progress = true;
        }
        if (all(0, THREADS, AT_BARRIER)) {
            for (Fiber &fiber : fibers) fiber.state = READY;
            progress = true;
        }
        if (!progress && !all(0, THREADS, DONE)) fail("threads diverge at a barrier or a shuffle");
    }
}

static inline void barrier() { wait(AT_BARRIER); }

template <typename T> static T shuffle_xor(T x, int lane) {
    static_assert(sizeof(T) == 4, "a shuffle moves 4 bytes");
    Fiber &mine = fibers[thread];
    std::memcpy(&mine.sent, &x, 4);
    mine.lane = lane;
    wait(AT_SHUFFLE);
    std::memcpy(&x, &mine.received, 4);
    return x;
}

struct Kernel {
    const char *name;
    // Takes an address for each argument, as a launch on the device does.
    void (*run)(void **);
    // For each argument: 1 if it is read-only, 2 if it is memory that the kernel may write.
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
