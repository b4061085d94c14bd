// Races within a launch. Accesses of one byte by two threads, at least one of which writes and not both of which are
// atomic, must have a barrier of their block between them; nothing orders two blocks. Shuffles order no accesses
// either. Only the last write is known: an atomic one hides an earlier plain one.
#include "driver.h"

namespace emulated {

// An access packed into one number: the interval between two barriers, the thread, and two flags.
static const uint64_t FLAGS = 2, THREAD = 10;
static uint64_t packed(const Moment &moment, uint64_t flags) {
    return (moment.interval << THREAD | moment.thread) << FLAGS | flags;
}
static uint64_t interval_of(uint64_t access) { return access >> (THREAD + FLAGS); }
static unsigned thread_of(uint64_t access) { return access >> FLAGS & ((1 << THREAD) - 1); }
// The flag of a write that is atomic.
static const uint64_t IS_ATOMIC = 1;
// The flags of a read: other threads have read in the same interval; earlier blocks have read.
static const uint64_t SEVERAL_THREADS = 1, EARLIER_BLOCKS = 2;

[[noreturn]] static void race(bool writes, const char *did, uint64_t other, bool is_other_block, const Moment &now) {
    const unsigned thread = thread_of(other);
    // If this thread has read last, others have before it.
    const std::string who = thread == now.thread ? "another thread" : "thread " + std::to_string(thread);
    die(std::string(writes ? "writes" : "reads") + " what " + (is_other_block ? "another block" : who) + " " + did +
        (is_other_block ? " in the same launch" : ", without a barrier in between"));
}

// Checks an access that comes after a write.
static void check_after_write(bool writes, uint64_t writer, uint64_t launch, const Moment &now) {
    const uint64_t at = interval_of(writer);
    if (at < launch) return;
    const bool is_other_block = at < now.block;
    if (is_other_block || (at == now.interval && thread_of(writer) != now.thread))
        race(writes, "writes", writer, is_other_block, now);
}

void Accesses::read(const Moment &now, bool is_shared) {
    const uint64_t launch = is_shared ? now.block : now.launch;
    // Each block has its own shared memory.
    if (is_shared && interval_of(writer) < launch) die("reads shared memory that nothing has written");
    if (now.is_atomic) return;
    check_after_write(false, writer, launch, now);
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
    if (!both_atomic) check_after_write(true, writer, launch, now);
    if (const uint64_t at = interval_of(reader); at >= launch) {
        const bool by_others = reader & SEVERAL_THREADS || thread_of(reader) != now.thread;
        const bool is_other_block = reader & EARLIER_BLOCKS || at < now.block;
        if (is_other_block || (at == now.interval && by_others)) race(true, "reads", reader, is_other_block, now);
    }
    writer = packed(now, now.is_atomic ? IS_ATOMIC : 0);
}

} // namespace emulated
