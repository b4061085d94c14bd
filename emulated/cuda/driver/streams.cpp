// Devices, contexts, streams, events, and the operations on memory. Operations run at once; clocks record what each
// stream has been ordered after, from which memory.cpp finds uses that a GPU could run in another order.
#include <cstring>
#include <map>
#include <set>

#include "driver.h"

using namespace emulated;

typedef int Status;
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_HANDLE = 400, FAILED = 719 };

std::recursive_mutex emulated::one;

static thread_local long calls_until_failure = 0;
// An allocation of this thread that still lacks events, its stream, and the number of events that it lacks.
static thread_local struct {
    uintptr_t address;
    void *stream;
    int missing_events;
} incomplete;

bool emulated::is_injected(const char *function) {
    const std::string name = function;
    const bool creates_events = name == "cuEventCreate" || name == "cuCtxGetCurrent" || name == "cuCtxSetCurrent";
    if (!creates_events) incomplete.missing_events = 0;
    if (!calls_until_failure || --calls_until_failure) return false;
    // cudarc loses an allocation if it cannot create its two events.
    if (incomplete.missing_events) {
        begin(stream_of(incomplete.stream), "cudarc");
        emulated::free(incomplete.address);
        incomplete.missing_events = 0;
    }
    return true;
}

// How often the only context is retained; the context; and the one that this thread has, or null.
static long retained = 0;
static int context;
static thread_local void *thread_context = nullptr;
bool emulated::has_context() { return thread_context && retained; }

// The streams that are not destroyed, all streams that have ever been, and the events that are not destroyed.
static auto &streams = *new std::set<Stream *>, &all_streams = *new std::set<Stream *>;
static auto &events = *new std::map<void *, Clock>;
// What the host has waited for. Threads of the host are assumed to tell each other.
static auto &host = *new Clock;

Stream::Stream() : index(all_streams.size()) { all_streams.insert(this); }

Stream &emulated::stream_of(void *handle) {
    static thread_local Stream *const default_stream = new Stream;
    if (!handle || handle == (void *)1) die("the legacy default stream, which is not emulated");
    Stream *stream = handle == (void *)2 ? default_stream : static_cast<Stream *>(handle);
    if (handle != (void *)2 && !streams.count(stream)) die("a stream that does not exist");
    stream->clock.join(host);
    return *stream;
}

// The copies of this thread from the host, and the calls in which it has waited for the device.
static thread_local long uploads = 0, waits = 0;

void emulated::host_waits_for(const Stream &stream) { host.join(stream.clock); }
bool emulated::host_has_waited_for(const Clock &clock) {
    for (size_t i = 0; i < clock.size(); ++i)
        if (host.operations(i) < clock[i]) return false;
    return true;
}

extern "C" {

// The n-th call of this thread from now on fails; none if n is 0.
void emulated_fail_call(long n) { calls_until_failure = n; }
// Whether the call that was to fail has not come yet.
int emulated_failure_is_pending() { return calls_until_failure != 0; }

long emulated_uploads() { return uploads; }
long emulated_waits() { return waits; }

Status cuInit(unsigned) { ENTER(FAILED); return 0; }
Status cuDeviceGetCount(int *count) { ENTER(FAILED); *count = 1; return 0; }
Status cuDeviceGet(int *device, int ordinal) {
    ENTER(FAILED);
    *device = 0;
    return ordinal ? INVALID_DEVICE : 0;
}
Status cuDeviceTotalMem_v2(size_t *bytes, int) {
    ENTER(FAILED);
    *bytes = size_t(8) << 30;
    return 0;
}
Status cuDeviceGetAttribute(int *value, int attribute, int) {
    ENTER(FAILED);
    const std::map<int, int> known{{75, 8} /* compute capability */, {76, 0}, {115, 1} /* memory pools */};
    auto found = known.find(attribute);
    if (found == known.end()) die("attribute " + std::to_string(attribute) + " of a device");
    *value = found->second;
    return 0;
}
Status cuDevicePrimaryCtxRetain(void **made, int) {
    ENTER(FAILED);
    retained++;
    *made = &context;
    return 0;
}
Status cuDevicePrimaryCtxRelease_v2(int) {
    RELEASE(FAILED);
    if (--retained < 0) die("the context is released too often");
    if (!retained && !live_allocations().empty()) die("the context is released before its memory");
    return status;
}
Status cuCtxDestroy_v2(void *) { die("no context but the primary one exists"); }
Status cuCtxGetCurrent(void **now) { ENTER(FAILED); *now = thread_context; return 0; }
Status cuCtxSetCurrent(void *to) {
    ENTER(FAILED);
    if (to && (to != &context || !retained)) return INVALID_CONTEXT;
    thread_context = to;
    return 0;
}
Status cuCtxSynchronize() {
    ENTER_CONTEXT(FAILED);
    waits++;
    count("wait");
    for (const Stream *stream : all_streams) host_waits_for(*stream);
    return 0;
}
Status cuGetErrorName(int error, const char **text) {
    *text = error == FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "an error of the emulated driver";
    return 0;
}
Status cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

Status cuStreamCreate(void **made, unsigned) {
    ENTER_CONTEXT(FAILED);
    Stream *stream = new Stream;
    streams.insert(stream);
    *made = stream;
    return 0;
}
Status cuStreamDestroy_v2(void *handle) {
    RELEASE(FAILED);
    if (!streams.erase(static_cast<Stream *>(handle))) die("a stream is destroyed twice");
    return status;
}
Status cuStreamSynchronize(void *handle) {
    ENTER_CONTEXT(FAILED);
    waits++;
    count("wait");
    host_waits_for(stream_of(handle));
    return 0;
}
Status cuStreamIsCapturing(void *, int *capture) { ENTER_CONTEXT(FAILED); *capture = 0; return 0; }

Status cuEventCreate(void **made, unsigned) {
    ENTER_CONTEXT(FAILED);
    static uintptr_t count = 0;
    *made = reinterpret_cast<void *>(++count);
    events[*made];
    if (incomplete.missing_events) incomplete.missing_events--;
    return 0;
}
Status cuEventDestroy_v2(void *event) {
    RELEASE(FAILED);
    if (!events.erase(event)) die("an event is destroyed twice");
    return status;
}
Status cuEventRecord(void *event, void *stream) {
    ENTER_CONTEXT(FAILED);
    if (!events.count(event)) return INVALID_HANDLE;
    events[event] = stream_of(stream).clock;
    return 0;
}
Status cuStreamWaitEvent(void *stream, void *event, unsigned) {
    ENTER_CONTEXT(FAILED);
    if (!events.count(event)) return INVALID_HANDLE;
    stream_of(stream).clock.join(events[event]);
    return 0;
}
Status cuEventSynchronize(void *event) {
    ENTER_CONTEXT(FAILED);
    if (!events.count(event)) return INVALID_HANDLE;
    waits++;
    count("wait");
    host.join(events[event]);
    return 0;
}

// No memory is allocated for no bytes.
Status cuMemAllocAsync(uintptr_t *made, size_t size, void *stream) {
    ENTER_CONTEXT(FAILED);
    begin(stream_of(stream), "an allocation");
    count("allocate " + std::to_string(size));
    *made = size ? allocate(size) : 0;
    if (size && !*made) return OUT_OF_MEMORY;
    incomplete = {*made, stream, size ? 2 : 0};
    return 0;
}
Status cuMemFreeAsync(uintptr_t address, void *stream) {
    RELEASE(FAILED);
    if (!has_context()) return INVALID_CONTEXT;
    begin(stream_of(stream), "a free");
    if (address) emulated::free(address);
    return status;
}
Status cuMemAlloc_v2(uintptr_t *, size_t) { die("memory that no stream allocates"); }
Status cuMemFree_v2(uintptr_t) { die("memory that no stream frees"); }

// The pool that allocations are from: the bytes in use, now and at most. The bytes that it keeps change nothing here.
static uint64_t release_threshold;
enum { RELEASE_THRESHOLD = 4, USED_NOW = 7, USED_AT_MOST = 8 };
Status cuDeviceGetDefaultMemPool(void **pool, int) {
    ENTER(FAILED);
    *pool = &used_now;
    return 0;
}
Status cuMemPoolGetAttribute(void *, int attribute, uint64_t *value) {
    ENTER(FAILED);
    if (attribute != USED_NOW && attribute != USED_AT_MOST && attribute != RELEASE_THRESHOLD) return INVALID_VALUE;
    *value = attribute == USED_NOW ? used_now : attribute == USED_AT_MOST ? used_at_most : release_threshold;
    return 0;
}
Status cuMemPoolSetAttribute(void *, int attribute, const uint64_t *value) {
    ENTER(FAILED);
    if (attribute == USED_AT_MOST && *value == 0) used_at_most = used_now;
    else if (attribute == RELEASE_THRESHOLD) release_threshold = *value;
    else return INVALID_VALUE;
    return 0;
}

Status cuMemsetD8Async(uintptr_t to, unsigned char value, size_t size, void *stream) {
    ENTER_CONTEXT(FAILED);
    begin(stream_of(stream), "memset");
    use(to, size, true);
    count("set " + std::to_string(size));
    if (size && !is_counting()) memset(reinterpret_cast<void *>(to), value, size);
    return 0;
}
// The host's memory is pageable: a copy from it returns when it is read, a copy to it when it is written.
Status cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t size, void *stream) {
    ENTER_CONTEXT(FAILED);
    begin(stream_of(stream), "a copy from the host");
    uploads++;
    count("upload " + std::to_string(size));
    if (is_device(uintptr_t(from))) die("an address of the device as one of the host");
    use(to, size, true);
    if (size) memcpy(reinterpret_cast<void *>(to), from, size);
    return 0;
}
Status cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, void *stream) {
    ENTER_CONTEXT(FAILED);
    begin(stream_of(stream), "a copy to the host");
    count("download " + std::to_string(size));
    if (is_device(uintptr_t(to))) die("an address of the device as one of the host");
    use(from, size, false);
    if (size) memcpy(to, reinterpret_cast<void *>(from), size);
    waits++;
    host_waits_for(stream_of(stream));
    return 0;
}
Status cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t size, void *stream) {
    ENTER_CONTEXT(FAILED);
    begin(stream_of(stream), "a copy");
    count("copy " + std::to_string(size));
    copy(to, from, size);
    return 0;
}
Status cuMemcpyPeerAsync(uintptr_t to, void *, uintptr_t from, void *, size_t size, void *stream) {
    return cuMemcpyDtoDAsync_v2(to, from, size, stream);
}
}

// What remains at the end of the process.
__attribute__((destructor)) static void report_leaks() {
    const auto never_freed = live_allocations();
    if (never_freed.empty()) return;
    for (const std::string &allocation : never_freed)
        fprintf(stderr, "emulated CUDA: never freed: %s\n", allocation.c_str());
    _Exit(1);
}
