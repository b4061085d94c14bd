// Modules and launches. A module is a library that `bin/nvcc` has compiled from a CUDA source file; kernels run on the
// emulator of `tests/gpu_host`, one fiber for each thread.
#include <dlfcn.h>
#include <link.h>

#include <map>
#include <set>

#include "driver.h"
#include "../../../tests/gpu_host/cuda/module.h"
#define MACHINE_FAIL(what) emulated::die(what)
#include "../../../tests/gpu_host/machine.h"

using namespace emulated;

typedef int Status;
enum { INVALID_VALUE = 1, INVALID_IMAGE = 200, NOT_FOUND = 500, FAILED = 719 };

static const unsigned MOST_BLOCKS_Y = 65535, SHARED_BYTES = 48 << 10;

bool emulated::kernel_runs = false;
// The threads of a block and the blocks of the launch, along three dimensions each.
static unsigned extent[6];
static std::vector<char> dynamic_shared;
static uint64_t launch;
static bool is_atomic = false;

std::string emulated::place() {
    return ", block " + std::to_string(machine::block) + ", thread " + std::to_string(machine::thread);
}

Moment emulated::now() { return {machine::interval, machine::first_interval, launch, machine::thread, is_atomic}; }

// Lets kernels access their own variables, which are in the pages of their library.
static void allow_variables(const EmulatedModule *module) {
    static std::set<const EmulatedModule *> known;
    if (!known.insert(module).second) return;
    auto visit = [](dl_phdr_info *info, size_t, void *address) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto &part = info->dlpi_phdr[i];
            const uintptr_t first = info->dlpi_addr + part.p_vaddr;
            if (part.p_type != PT_LOAD || uintptr_t(address) - first >= part.p_memsz) continue;
            for (int j = 0; j < info->dlpi_phnum; ++j) {
                const auto &other = info->dlpi_phdr[j];
                if (other.p_type == PT_LOAD) allow(info->dlpi_addr + other.p_vaddr, other.p_memsz);
            }
            return 1;
        }
        return 0;
    };
    dl_iterate_phdr(visit, const_cast<EmulatedModule *>(module));
}

struct Module;
// A kernel of a module.
struct Function {
    const Module *module;
    const EmulatedKernel *kernel;
};
struct Module {
    const EmulatedModule *table;
    bool is_cooperative;
    std::map<const EmulatedKernel *, Function> functions{};
};

// Runs the threads of a block one after another, on one fiber.
static void (*independent)(void **);
static unsigned block_threads;
static bool is_cooperative;
static void run_in_turn(void **arguments) {
    for (unsigned i = 0; i < block_threads; ++i) {
        machine::thread = machine::block % 2 ? block_threads - 1 - i : i;
        independent(arguments);
    }
    machine::thread = 0;
}

// An argument of a launch as text: an address, an integer or a number as its bits, or the size of a structure.
static std::string argument_text(const EmulatedKernel &kernel, int i, const void *at) {
    uint64_t value = 0;
    if (kernel.sizes[i] > sizeof value) return "(" + std::to_string(kernel.sizes[i]) + " bytes)";
    memcpy(&value, at, kernel.sizes[i]);
    return kernel.are_pointers[i] ? (value ? "address" : "null") : std::to_string(value);
}

extern "C" {

unsigned emulated_index(int which) {
    if (which >= 6) return extent[which - 6];
    const unsigned *sizes = extent + (which < 3 ? 0 : 3);
    const unsigned linear = which < 3 ? machine::thread : machine::block;
    return which % 3 == 0   ? linear % sizes[0]
           : which % 3 == 1 ? linear / sizes[0] % sizes[1]
                            : linear / sizes[0] / sizes[1];
}
void emulated_barrier() {
    if (!is_cooperative) die("a barrier in a kernel without one");
    machine::barrier();
}
uint32_t emulated_shuffle_xor(uint32_t value, int lane) {
    if (!is_cooperative) die("a shuffle in a kernel without one");
    return machine::shuffle_xor(value, lane);
}
void *emulated_dynamic_shared() { return dynamic_shared.data(); }
void emulated_atomic(int begins) { is_atomic = begins; }
void emulated_fail(const char *what) { die(what); }

Status cuModuleLoadData(void **made, const char *image) {
    ENTER_CONTEXT(FAILED);
    const std::string text(image, strcspn(image, "\n"));
    for (const std::string prefix : {EMULATED_COOPERATIVE, EMULATED_INDEPENDENT}) {
        if (text.compare(0, prefix.size(), prefix)) continue;
        void *library = dlopen(text.substr(prefix.size()).c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) die(dlerror());
        auto table = static_cast<const EmulatedModule *>(dlsym(library, "emulated_module"));
        allow_variables(table);
        *made = new Module{table, prefix == EMULATED_COOPERATIVE};
        return 0;
    }
    return INVALID_IMAGE;
}
Status cuModuleLoad(void **, const char *) { die("a module in a file"); }
Status cuModuleUnload(Module *module) {
    RELEASE(FAILED);
    delete module;
    return status;
}

Status cuModuleGetFunction(void **found, Module *module, const char *name) {
    ENTER_CONTEXT(FAILED);
    for (const EmulatedKernel *kernel = module->table->kernels; kernel->name; ++kernel) {
        if (strcmp(kernel->name, name)) continue;
        *found = &(module->functions[kernel] = {module, kernel});
        return 0;
    }
    fprintf(stderr, "emulated CUDA: there is no kernel %s\n", name);
    return NOT_FOUND;
}

Status cuLaunchKernel(void *handle, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
                      unsigned threads_y, unsigned threads_z, unsigned shared, void *stream, void **arguments,
                      void **) {
    ENTER_CONTEXT(FAILED);
    const Function &function = *static_cast<Function *>(handle);
    const uint64_t threads = uint64_t(threads_x) * threads_y * threads_z;
    const uint64_t blocks = uint64_t(blocks_x) * blocks_y * blocks_z;
    const EmulatedModule &module = *function.module->table;
    const EmulatedKernel &kernel = *function.kernel;
    if (!threads || threads > machine::MOST_THREADS || threads_z > 64 || !blocks || blocks_x > INT32_MAX ||
        blocks_y > MOST_BLOCKS_Y || blocks_z > MOST_BLOCKS_Y || shared > SHARED_BYTES)
        return INVALID_VALUE;
    begin(stream_of(stream), kernel.name);
    if (blocks > UINT32_MAX) die("more blocks than can be emulated");

    // The driver copies the arguments.
    static const size_t ALIGNMENT = 16;
    std::vector<size_t> places;
    size_t bytes = 0;
    for (int i = 0; i < kernel.arity; ++i) {
        places.push_back(bytes);
        bytes += (kernel.sizes[i] + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    std::vector<char> copies(bytes);
    std::vector<void *> copied;
    for (int i = 0; i < kernel.arity; ++i) {
        copied.push_back(copies.data() + places[i]);
        memcpy(copied[i], arguments[i], kernel.sizes[i]);
        uintptr_t address = 0;
        if (kernel.are_pointers[i]) memcpy(&address, arguments[i], sizeof address);
        if (address && !is_live(address)) die("argument " + std::to_string(i) + " is no address of an allocation");
    }

    if (is_counting()) {
        std::string line = std::string("kernel ") + kernel.name + " " + std::to_string(blocks) + " " + std::to_string(threads);
        for (int i = 0; i < kernel.arity; ++i) line += " " + argument_text(kernel, i, copied[i]);
        count(line);
        return 0;
    }
    dynamic_shared.assign(shared, char(0xff));
    allow(uintptr_t(machine::stacks()), machine::MOST_THREADS * machine::STACK);
    allow(uintptr_t(copies.data()), bytes);
    const size_t static_shared = module.shared_end - module.shared;
    std::vector<Accesses> static_accesses(static_shared), dynamic_accesses(shared);
    allow(uintptr_t(module.shared), static_shared, static_accesses.data());
    allow(uintptr_t(dynamic_shared.data()), shared, dynamic_accesses.data());
    const unsigned launch_extent[6] = {threads_x, threads_y, threads_z, blocks_x, blocks_y, blocks_z};
    memcpy(extent, launch_extent, sizeof extent);
    independent = kernel.run;
    block_threads = unsigned(threads);
    is_cooperative = function.module->is_cooperative;
    machine::threads = is_cooperative ? block_threads : 1;
    launch = machine::interval + 1;
    kernel_runs = true;
    machine::run(is_cooperative ? kernel.run : run_in_turn, unsigned(blocks), copied.data(), module.shared,
                 static_shared);
    kernel_runs = false;
    for (int i = 0; i < 4; ++i) disallow_last();
    return 0;
}
}
