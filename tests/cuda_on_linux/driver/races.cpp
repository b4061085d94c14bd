// Races within a launch. Accesses of one byte by two threads, of which one writes and not both are atomic, must have a
// barrier of their block between them; nothing orders two blocks. Shuffles order no accesses either.
#include "driver.h"

namespace emulated {

// An access packed into one number: the interval between two barriers, the thread, and two flags.
static const uint64_t FLAGS = 2, THREAD = 10;
static uint64_t packed(const Moment &moment, uint64_t flags) {
    return (moment.interval << THREAD | moment.thread) << FLAGS | flags;
}
static uint64_t interval_of(uint64_t access) { return access >> (THREAD + FLAGS); }
static unsigned thread_of(uint64_t access) { return access >> FLAGS & ((1 << THREAD) - 1); }
// Of a write: it is atomic.
static const uint64_t IS_ATOMIC = 1;
// Of a read: other threads have read in the same interval; earlier blocks have read.
static const uint64_t SEVERAL_THREADS = 1, EARLIER_BLOCKS = 2;

[[noreturn]] static void race(bool writes, const char *did, uint64_t other, const Moment &now) {
    const bool same_block = interval_of(other) >= now.block;
    die(std::string(writes ? "writes" : "reads") + " what " +
        (same_block ? "thread " + std::to_string(thread_of(other)) : "another block") + " " + did +
        (same_block ? ", without a barrier in between" : " in the same launch"));
}

void Accesses::read(const Moment &now, bool is_shared) {
    const uint64_t launch = is_shared ? now.block : now.launch;
    // Each block has other shared memory.
    if (is_shared && interval_of(writer) < launch) die("reads shared memory that nothing has written");
    if (now.is_atomic) return;
    if (const uint64_t at = interval_of(writer); at >= launch) {
        if (at < now.block || (at == now.interval && thread_of(writer) != now.thread)) race(false, "writes", writer, now);
    }
    uint64_t flags = 0;
    if (const uint64_t at = interval_of(reader); at >= launch) {
        flags = reader & EARLIER_BLOCKS;
        if (at < now.block) flags |= EARLIER_BLOCKS;
        else if (at == now.interval && thread_of(reader) != now.thread) flags |= SEVERAL_THREADS;
        if (at == now.interval) flags |= reader & SEVERAL_THREADS;
    }
    reader = packed(now, flags);
}

void Accesses::write(const Moment &now, bool is_shared) {
    const uint64_t launch = is_shared ? now.block : now.launch;
    const bool both_atomic = now.is_atomic && writer & IS_ATOMIC;
    if (const uint64_t at = interval_of(writer); at >= launch && !both_atomic) {
        if (at < now.block || (at == now.interval && thread_of(writer) != now.thread)) race(true, "writes", writer, now);
    }
    if (const uint64_t at = interval_of(reader); at >= launch) {
        const bool by_others = reader & SEVERAL_THREADS || thread_of(reader) != now.thread;
        if (reader & EARLIER_BLOCKS || at < now.block || (at == now.interval && by_others)) race(true, "reads", reader, now);
    }
    writer = packed(now, now.is_atomic ? IS_ATOMIC : 0);
}

} // namespace emulated
