// The state of the emulated driver: memory, streams and the operation that runs.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace emulated {

// Ends the process with a message that names the operation that runs.
[[noreturn]] void die(const std::string &what);

// Held during each call of the interface, so kernels run one after another.
extern std::recursive_mutex one;
// Whether the current call of this thread must fail, as a test has asked for.
bool is_injected(const char *function);
#define ENTER(error)                                           \
    std::lock_guard<std::recursive_mutex> guard(emulated::one); \
    if (emulated::is_injected(__func__)) return error
#define ENTER_CONTEXT(error)                       \
    ENTER(error);                                  \
    if (!emulated::has_context()) return emulated::INVALID_CONTEXT
// cuBLAS and cuRAND would use the first GPU.
#define ENTER_LIBRARY(error)     \
    ENTER(error);                \
    if (!emulated::has_context()) emulated::die(std::string(__func__) + " without a context")
// Calls that release something do so even if they return an error.
#define RELEASE(error)                                          \
    std::lock_guard<std::recursive_mutex> guard(emulated::one); \
    const auto status = emulated::is_injected(__func__) ? error : decltype(error)(0)

const int INVALID_CONTEXT = 201;
// Whether this thread has a context.
bool has_context();

// The operations that have happened before, as their number in each stream.
struct Clock : std::vector<uint64_t> {
    uint64_t operations(size_t stream) const { return stream < size() ? (*this)[stream] : 0; }
    void join(const Clock &other);
};

struct Stream {
    size_t index;
    Clock clock;
    Stream();
};
// The stream of a handle; each thread has a default stream of its own.
Stream &stream_of(void *handle);
// The host has waited for a stream.
void host_waits_for(const Stream &stream);
// Whether the host has waited for the operations of a clock.
bool host_has_waited_for(const Clock &clock);

// An operation of a stream that has used memory.
struct Use {
    size_t stream = 0;
    uint64_t time = 0;
    std::string what;
};

// Memory that operations use. An operation that writes it must be ordered after all others, one that reads it after the
// writer.
struct Resource {
    std::string name;
    Use writer;
    std::vector<Use> readers;
    // The operation that has read or written it last.
    uint64_t read_by = 0, written_by = 0;
    void use(bool writes);
};

struct Allocation : Resource {
    uintptr_t base;
    size_t size;
    // Whether it may live until the process ends.
    bool is_kept;
};

// Whether calls are counted and nothing is computed: memory that a kernel would write keeps what it has.
bool is_counting();
// Writes a line for a call, if calls are counted.
void count(const std::string &line);

// Begins an operation on a stream, which later calls refer to.
void begin(Stream &stream, std::string what);

// The bytes of all live allocations, now and at most.
extern size_t used_now, used_at_most;
uintptr_t allocate(size_t size);
void free(uintptr_t address);
// The operation uses these bytes. Reading requires that they have been written.
void use(uintptr_t address, size_t size, bool writes);
// The operation copies bytes that may be unwritten.
void copy(uintptr_t to, uintptr_t from, size_t size);
// Whether an address is in the device's memory, and whether in a live allocation or at its end.
bool is_device(uintptr_t address);
bool is_live(uintptr_t address);

// The live allocations of all threads, without those that may be kept.
std::vector<std::string> live_allocations();

// When an access of a kernel happens: the interval between two barriers, counted over all launches, the first interval
// of the block and of the launch, and the thread.
struct Moment {
    uint64_t interval, block, launch;
    unsigned thread;
    bool is_atomic;
};
Moment now();

// The last accesses of a byte by kernels. A race ends the process.
struct Accesses {
    uint64_t writer = 0, reader = 0;
    void read(const Moment &now, bool is_shared);
    void write(const Moment &now, bool is_shared);
};

// Lets kernels access memory of the host: stacks, arguments and their own variables. With `accesses`, one for each
// byte, the threads of a block share the memory.
void allow(uintptr_t first, size_t size, Accesses *accesses = nullptr);
void disallow_last();
// Where the running kernel is, for messages.
std::string place();
extern bool kernel_runs;

} // namespace emulated
