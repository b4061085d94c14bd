// In place of <ucontext.h> where the harness of tests/gpu_host is compiled: the same functions without the system call that
// each switch of glibc's makes for the sake of signals. A test of many thousand rows would take minutes otherwise.
#pragma once
#include <ucontext.h>

#ifdef __x86_64__
#include <cstddef>
#include <cstdint>

struct LightContext {
    struct {
        void *ss_sp;
        size_t ss_size;
    } uc_stack;
    LightContext *uc_link;
    void (*function)();
    void *top;
};

// Keeps the registers that a call must keep on the stack, and goes on where another stack was left so.
extern "C" void light_switch(void **from, void *to);
asm(R"(
.text
.globl light_switch
.hidden light_switch
.type light_switch, @function
light_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size light_switch, . - light_switch
)");

static LightContext *light_running;

static inline void light_swap(LightContext *from, LightContext *to) {
    light_running = to;
    light_switch(&from->top, to->top);
}

static void light_start() {
    LightContext *self = light_running;
    self->function();
    light_swap(self, self->uc_link);
}

static inline void light_make(LightContext *context, void (*function)(), int) {
    context->function = function;
    uintptr_t end = (reinterpret_cast<uintptr_t>(context->uc_stack.ss_sp) + context->uc_stack.ss_size) & ~uintptr_t(15);
    // Six registers, where to begin, and what a call would have put there.
    void **top = reinterpret_cast<void **>(end) - 8;
    for (int i = 0; i < 6; i++) top[i] = nullptr;
    top[6] = reinterpret_cast<void *>(light_start);
    top[7] = nullptr;
    context->top = top;
}

#define ucontext_t LightContext
#define getcontext(context) ((void)(context))
#define makecontext light_make
#define swapcontext light_swap
#endif
