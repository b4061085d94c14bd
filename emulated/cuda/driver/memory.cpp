// The device's memory. Kernels are compiled with calls at each access (those of ThreadSanitizer, which are defined
// here), so an access outside of an allocation, to freed memory, or a read of bytes that nothing has written ends the
// process with a message. So does an operation that is not ordered after those it depends on.
#include <sys/mman.h>

#include <cstring>
#include <map>

#include "driver.h"

namespace emulated {

enum State : uint8_t { NONE, UNWRITTEN, WRITTEN };
static const size_t BYTES = size_t(64) << 30, PAGE = 4096;

template <typename T> static T *reserve(size_t count) {
    void *all = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                     -1, 0);
    if (all == MAP_FAILED) die("no address space for the device's memory");
    return static_cast<T *>(all);
}

static struct {
    size_t stream;
    const Clock *clock;
    uint64_t serial = 0;
    std::string what;
} current;

// The memory, the state of each byte, its last accesses by kernels, and the allocation in each page.
static char *const memory = reserve<char>(BYTES);
static uint8_t *const states = reserve<uint8_t>(BYTES);
static Accesses *const all_accesses = reserve<Accesses>(BYTES);
static Allocation **const owners = reserve<Allocation *>(BYTES / PAGE);
static const uintptr_t base = uintptr_t(memory);
// Never destroyed, since other threads may outlive the end of `main`. This also holds for other containers.
static auto &live = *new std::map<uintptr_t, Allocation>;
// The end of the highest allocation so far.
static uintptr_t highest = base;
static thread_local long live_of_thread = 0;
static thread_local bool keeps = false;

static std::string hex(uintptr_t address) {
    char text[32];
    snprintf(text, sizeof text, "0x%zx", size_t(address));
    return text;
}

void die(const std::string &what) {
    const std::string where = current.what + (kernel_runs ? place() : "");
    fprintf(stderr, "emulated CUDA: %s: %s\n", where.c_str(), what.c_str());
    abort();
}

void Clock::join(const Clock &other) {
    if (size() < other.size()) resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) (*this)[i] = std::max((*this)[i], other[i]);
}

void Resource::use(bool writes) {
    uint64_t &last = writes ? written_by : read_by;
    if (last == current.serial) return;
    last = current.serial;
    const Use mine{current.stream, current.clock->operations(current.stream), current.what};
    auto after = [&](const Use &other, const char *did) {
        if (other.stream == mine.stream || other.time <= current.clock->operations(other.stream)) return;
        die("uses " + name + ", which \"" + other.what + "\" " + did + " on another stream, without waiting for it");
    };
    if (writer.time) after(writer, "writes");
    if (writes) {
        for (const Use &reader : readers) after(reader, "reads");
        readers.clear();
        writer = mine;
        return;
    }
    for (Use &reader : readers) {
        if (reader.stream != mine.stream) continue;
        reader = mine;
        return;
    }
    readers.push_back(mine);
}

void begin(Stream &stream, std::string what) {
    stream.clock.resize(std::max(stream.clock.size(), stream.index + 1));
    stream.clock[stream.index]++;
    current.stream = stream.index;
    current.clock = &stream.clock;
    current.serial++;
    current.what = std::move(what);
}

size_t used_now = 0, used_at_most = 0;

// Returns the address of fresh memory, or zero. Memory that was freed is used again only after all of the address
// space.
uintptr_t allocate(size_t size) {
    static uintptr_t next = base;
    // At least one byte between two allocations belongs to none.
    const size_t pages = size / PAGE + 1;
    bool wrapped = false;
    for (auto after = live.lower_bound(next);;) {
        const uintptr_t end = after == live.end() ? base + BYTES : after->first;
        if (end - next >= pages * PAGE) break;
        if (after == live.end() && wrapped) return 0;
        wrapped |= after == live.end();
        next = after == live.end() ? base : after->first + (after->second.size / PAGE + 1) * PAGE;
        after = live.lower_bound(next);
    }
    const uintptr_t address = next;
    next += pages * PAGE;
    highest = std::max(highest, next);
    Allocation &made = live[address];
    made.name = "an allocation of " + std::to_string(size) + " bytes";
    made.base = address;
    made.size = size;
    made.is_kept = keeps;
    if (!is_counting()) {
        memset(states + (address - base), UNWRITTEN, size);
        // These bytes are NaN in every floating-point type, and not a valid index.
        memset(memory + (address - base), 0xff, size);
    }
    for (size_t i = 0; i < pages; ++i) owners[(address - base) / PAGE + i] = &made;
    made.use(true);
    live_of_thread++;
    used_now += size;
    used_at_most = std::max(used_at_most, used_now);
    return address;
}

void free(uintptr_t address) {
    auto found = live.find(address);
    if (found == live.end()) die("frees " + hex(address) + ", which is no allocation");
    Allocation &freed = found->second;
    freed.use(true);
    used_now -= freed.size;
    const size_t first = address - base, size = (freed.size / PAGE + 1) * PAGE;
    // All become zero, which for the states is NONE.
    madvise(memory + first, size, MADV_DONTNEED);
    madvise(states + first, size, MADV_DONTNEED);
    madvise(all_accesses + first, size * sizeof *all_accesses, MADV_DONTNEED);
    memset(owners + first / PAGE, 0, size / PAGE * sizeof *owners);
    live.erase(found);
    live_of_thread--;
}

std::vector<std::string> live_allocations() {
    std::vector<std::string> all;
    for (const auto &[address, allocation] : live) {
        if (allocation.is_kept) continue;
        all.push_back(allocation.name + ", last written by \"" + allocation.writer.what + "\"");
    }
    return all;
}

bool is_device(uintptr_t address) { return address - base < BYTES; }

bool is_live(uintptr_t address) {
    if (!is_device(address)) return false;
    const Allocation *owner = owners[(address - base) / PAGE];
    return owner && address <= owner->base + owner->size;
}

struct Allowed {
    uintptr_t first;
    size_t size;
    Accesses *accesses;
};
static std::vector<Allowed> allowed;
void allow(uintptr_t first, size_t size, Accesses *accesses) { allowed.push_back({first, size, accesses}); }
void disallow_last() { allowed.pop_back(); }

[[noreturn]] static void fault(uintptr_t address, size_t size, bool writes, uint8_t state) {
    std::string what = std::string(writes ? "writes " : "reads ") + std::to_string(size) + " bytes at " + hex(address);
    if (state == UNWRITTEN && !writes) die(what + ", which nothing has written");
    const Allocation *owner = is_device(address) ? owners[(address - base) / PAGE] : nullptr;
    if (!owner) die(what + (address < highest ? ", which are freed" : ", which are in no allocation"));
    die(what + ", " + std::to_string(address - owner->base) + " bytes from the start of " + owner->name);
}

void use(uintptr_t address, size_t size, bool writes) {
    if (!size) return;
    const size_t first = address - base;
    if (first >= BYTES || size > BYTES - first) fault(address, size, writes, NONE);
    if (is_counting()) {
        if (!is_live(address) || !is_live(address + size)) fault(address, size, writes, NONE);
        return;
    }
    for (size_t i = 0; i < size; ++i) {
        if (states[first + i] < (writes ? UNWRITTEN : WRITTEN)) fault(address + i, size - i, writes, states[first + i]);
    }
    if (writes) memset(states + first, WRITTEN, size);
    owners[first / PAGE]->use(writes);
}

void copy(uintptr_t to, uintptr_t from, size_t size) {
    if (!size) return;
    if (is_counting()) {
        use(from, size, false);
        return use(to, size, true);
    }
    for (uintptr_t at : {to, from}) {
        for (size_t i = 0; i < size; ++i) {
            if (!is_device(at + i) || states[at - base + i] < UNWRITTEN) fault(at + i, size - i, at == to, NONE);
        }
        owners[(at - base) / PAGE]->use(at == to);
    }
    memcpy(states + (to - base), states + (from - base), size);
    memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), size);
}

static void check_races(Accesses *accesses, size_t size, bool writes, bool is_shared) {
    const Moment moment = now();
    for (size_t i = 0; i < size; ++i) {
        if (writes) accesses[i].write(moment, is_shared);
        else accesses[i].read(moment, is_shared);
    }
}

// A kernel's access. `alignment` is that of the type, or 1 if the compiler splits the access.
static inline void access(const void *pointer, size_t size, bool writes, size_t alignment = 1) {
    const uintptr_t address = uintptr_t(pointer);
    if (address % alignment) die("a misaligned access to " + hex(address));
    if (is_device(address)) {
        use(address, size, writes);
        return check_races(all_accesses + (address - base), size, writes, false);
    }
    // The last first: the memory that a block shares is a part of its kernel's library.
    for (size_t i = allowed.size(); i-- > 0;) {
        const Allowed &here = allowed[i];
        if (address - here.first >= here.size) continue;
        if (here.accesses) check_races(here.accesses + (address - here.first), size, writes, true);
        return;
    }
    if (kernel_runs) die(std::string(writes ? "writes to " : "reads from ") + hex(address) + ", memory of the host");
}

} // namespace emulated

extern "C" {
// The allocations that this thread has made, less those that it has freed.
long emulated_live_allocations() { return emulated::live_of_thread; }
// Whether allocations of this thread from now on may live until the process ends.
void emulated_keep_allocations(int keeps) { emulated::keeps = keeps; }

#define ACCESS(size)                                                                       \
    void __tsan_read##size(void *at) { emulated::access(at, size, false, size); }          \
    void __tsan_write##size(void *at) { emulated::access(at, size, true, size); }          \
    void __tsan_unaligned_read##size(void *at) { emulated::access(at, size, false); }      \
    void __tsan_unaligned_write##size(void *at) { emulated::access(at, size, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void *at, size_t size) { emulated::access(at, size, false); }
void __tsan_write_range(void *at, size_t size) { emulated::access(at, size, true); }
// Some compilers call these functions, others those of the C library, which `bin/nvcc` renames.
void *__tsan_memcpy(void *to, const void *from, size_t size) {
    emulated::access(from, size, false);
    emulated::access(to, size, true);
    return memcpy(to, from, size);
}
void *__tsan_memmove(void *to, const void *from, size_t size) {
    emulated::access(from, size, false);
    emulated::access(to, size, true);
    return memmove(to, from, size);
}
void *__tsan_memset(void *to, int value, size_t size) {
    emulated::access(to, size, true);
    return memset(to, value, size);
}
void *__wrap_memcpy(void *to, const void *from, size_t size) { return __tsan_memcpy(to, from, size); }
void *__wrap_memmove(void *to, const void *from, size_t size) { return __tsan_memmove(to, from, size); }
void *__wrap_memset(void *to, int value, size_t size) { return __tsan_memset(to, value, size); }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
