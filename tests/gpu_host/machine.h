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
#include <sys/mman.h>
#include <type_traits>
#include <ucontext.h>
#include <vector>

// The section of the variables that a block shares.
#define MACHINE_SHARED static __attribute__((section("machine_shared")))
extern "C" char __start_machine_shared __attribute__((weak, visibility("hidden")));
extern "C" char __stop_machine_shared __attribute__((weak, visibility("hidden")));

namespace machine {

constexpr unsigned MOST_THREADS = 1024, WARP = 32;
constexpr size_t STACK = 64 << 10;
enum State { READY, AT_BARRIER, AT_SHUFFLE, DONE };

struct Fiber {
    ucontext_t first;
    jmp_buf rest;
    bool has_begun;
    State state;
    uint32_t sent, received;
    int lane;
};
static std::vector<Fiber> fibers(MOST_THREADS);
static jmp_buf scheduler;
static void (*body)(void **);
static void **arguments;
// The number of threads of a block, and the indices of the block and thread that run.
static unsigned threads = 256, block, thread;
// The current interval between two barriers, counted over all blocks and launches, and the block's first one.
[[maybe_unused]] static uint64_t interval, first_interval;

// Reports a fault and ends the process. A file that includes this one may define it first, with a longer message.
#ifndef MACHINE_FAIL
#define MACHINE_FAIL(what)                                     \
    do {                                                       \
        std::fprintf(stderr, "block %u: %s\n", block, what); \
        std::abort();                                          \
    } while (false)
#endif
static void fail(const char *what) { MACHINE_FAIL(what); }

// The stacks of the fibers, one after another; the system provides pages when they are used.
static char *stacks() {
    static void *const all = mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) fail("no memory for the stacks");
    return static_cast<char *>(all);
}

// Gives the stacks back to the system, which bounds the number of a process's mappings: each stack is two of them. No
// kernel may be launched afterwards.
[[maybe_unused]] static void release() { munmap(stacks(), MOST_THREADS * STACK); }

// The C library's `longjmp` by another name: for its own, a header may substitute a function that refuses to jump to
// another stack.
extern "C" [[noreturn]] void jump(jmp_buf, int) __asm__("_longjmp");

// Waits in a state until the scheduler resumes this fiber. The jump between stacks, unlike `swapcontext`, needs no
// system call.
static void wait(State state) {
    fibers[thread].state = state;
    if (!_setjmp(fibers[thread].rest)) jump(scheduler, 1);
}

// The body of each fiber.
static void enter() {
    for (;;) {
        body(arguments);
        wait(DONE);
    }
}

// Runs a fiber until it waits.
static void resume(Fiber &fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.has_begun) jump(fiber.rest, 1);
    fiber.has_begun = true;
    getcontext(&fiber.first);
    char *const stack = stacks() + (&fiber - fibers.data()) * STACK;
    mprotect(stack, 4096, PROT_NONE); // a guard page
    fiber.first.uc_stack.ss_sp = stack;
    fiber.first.uc_stack.ss_size = STACK;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, enter, 0);
    setcontext(&fiber.first);
}

// Whether the fibers of n threads, from `first` on, are in a state.
static bool all(unsigned first, unsigned n, State state) {
    for (unsigned i = first; i < first + n; ++i) {
        if (fibers[i].state != state) return false;
    }
    return true;
}

// Runs the threads of a block until all are done.
static void run_block() {
    first_interval = ++interval;
    for (unsigned i = 0; i < threads; ++i) fibers[i].state = READY;
    while (!all(0, threads, DONE)) {
        for (unsigned i = 0; i < threads; ++i) {
            const unsigned turn = block % 2 ? threads - 1 - i : i;
            if (fibers[turn].state != READY) continue;
            thread = turn;
            resume(fibers[turn]);
        }
        bool progress = false;
        for (unsigned first = 0; first < threads; first += WARP) {
            // The last warp of a block may have fewer lanes.
            const unsigned lanes = threads - first < WARP ? threads - first : WARP;
            if (!all(first, lanes, AT_SHUFFLE)) continue;
            for (unsigned i = first; i < first + lanes; ++i) {
                if (fibers[i].lane != fibers[first].lane) fail("lanes shuffle by different masks");
                const unsigned from = i ^ fibers[i].lane;
                // A lane that does not exist sends an arbitrary value.
                fibers[i].received = from < threads ? fibers[from].sent : 0xffffffff;
                fibers[i].state = READY;
            }
            progress = true;
        }
        if (all(0, threads, AT_BARRIER)) {
            ++interval;
            for (unsigned i = 0; i < threads; ++i) fibers[i].state = READY;
            progress = true;
        }
        if (!progress && !all(0, threads, DONE)) fail("threads diverge at a barrier or a shuffle");
    }
}

static inline void barrier() { wait(AT_BARRIER); }

// Returns x of the thread whose lane is this thread's XOR `lane`.
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
    // The bytes of each argument, if a launch gives them.
    std::vector<size_t> sizes;
};

// Runs a kernel's blocks. The bytes from `shared` on are what the threads of a block share.
static void run(void (*kernel)(void **), unsigned blocks, void **kernel_arguments, char *shared, size_t bytes) {
    body = kernel;
    arguments = kernel_arguments;
    for (block = 0; block < blocks; ++block) {
        if (bytes) std::memset(shared, 0xff, bytes);
        run_block();
    }
}

// Finds a kernel by its name and runs it. Returns 0, or 1 if there is no such kernel.
[[maybe_unused]] static int launch(const Kernel *kernels, size_t count, const char *name, unsigned blocks,
                                   void **kernel_arguments, const std::vector<size_t> &sizes = {}) {
    char *const shared = &__start_machine_shared;
    const size_t bytes = shared ? &__stop_machine_shared - shared : 0;
    for (size_t i = 0; i < count; ++i) {
        if (std::strcmp(kernels[i].name, name)) continue;
        if (sizes != kernels[i].sizes) fail("the number or the sizes of the arguments differ from the kernel's");
        run(kernels[i].run, blocks, kernel_arguments, shared, bytes);
        return 0;
    }
    return 1;
}

// The access (see `Kernel`) of an argument of type T.
template <typename T> constexpr int argument_access() {
    return std::is_pointer_v<T> && !std::is_const_v<std::remove_pointer_t<T>> ? 2 : 1;
}

} // namespace machine
