// NCCL's operations between threads, each a rank. (NCCL itself demands another GPU for each rank; here all have the
// one.)
#include <condition_variable>
#include <cstring>
#include <map>

#include "driver.h"

using namespace emulated;

typedef int Status;
enum { FAILED = 1, INVALID_ARGUMENT = 4 };
enum Type { F32 = 7, F64 = 8 };

struct Id {
    char bytes[128];
};

// What a rank calls, and what it sends.
struct Call {
    std::string what;
    std::vector<char> bytes;
};

struct Group {
    std::vector<Call> sent, received;
    int arrived = 0;
    uint64_t round = 0;
};
static auto &groups = *new std::map<std::string, Group>;
static std::condition_variable_any changed;

struct Communicator {
    Group *group;
    int rank;
    // The clock of its last operation's stream.
    Clock clock;
};

typedef std::unique_lock<std::recursive_mutex> Lock;
#define ENTER_NCCL                                       \
    Lock lock(emulated::one);                            \
    if (emulated::is_injected(__func__)) return FAILED;  \
    if (!emulated::has_context()) die(std::string(__func__) + " without a context")

// Sends a call, waits for the other ranks, and returns what all ranks have sent.
static std::vector<Call> exchange(Lock &lock, const Communicator &rank, Call call) {
    Group &group = *rank.group;
    group.sent[rank.rank] = std::move(call);
    const uint64_t round = group.round;
    if (++group.arrived == int(group.sent.size())) {
        for (const Call &other : group.sent) {
            if (other.what != group.sent[0].what)
                die("one rank calls " + group.sent[0].what + ", another " + other.what);
        }
        group.arrived = 0;
        group.received = group.sent;
        group.round++;
        changed.notify_all();
    }
    // The next round cannot end before this rank has begun it.
    changed.wait(lock, [&] { return group.round != round; });
    return group.received;
}

static size_t size_of(int type) {
    if (type != F32 && type != F64) die("NCCL's type " + std::to_string(type));
    return type == F32 ? 4 : 8;
}

// Runs an operation that sends `count` numbers; `receive` makes the received bytes of what all ranks have sent.
static Status run(Lock &lock, const char *name, const void *from, void *to, size_t count, int type, int argument,
                  Communicator *comm, void *stream,
                  void (*receive)(const std::vector<Call> &, int, int, std::vector<char> &)) {
    const size_t size = count * size_of(type);
    const std::string what = std::string(name) + " of " + std::to_string(count) + " numbers of type " +
                             std::to_string(type) + " with " + std::to_string(argument);
    begin(stream_of(stream), what);
    use(uintptr_t(from), size, false);
    const char *bytes = static_cast<const char *>(from);
    const std::vector<Call> all = exchange(lock, *comm, {what, {bytes, bytes + size}});
    std::vector<char> received(all[0].bytes);
    receive(all, type, argument, received);
    // Other ranks' operations have run in between.
    begin(stream_of(stream), what);
    use(uintptr_t(to), received.size(), true);
    memcpy(to, received.data(), received.size());
    comm->clock = stream_of(stream).clock;
    return 0;
}

template <typename T> static void add(const std::vector<Call> &all, std::vector<char> &to) {
    T *sums = reinterpret_cast<T *>(to.data());
    for (size_t rank = 1; rank < all.size(); ++rank) {
        const T *numbers = reinterpret_cast<const T *>(all[rank].bytes.data());
        for (size_t i = 0; i < to.size() / sizeof(T); ++i) sums[i] += numbers[i];
    }
}

extern "C" {

Status ncclGetUniqueId(Id *id) {
    Lock lock(one);
    if (is_injected(__func__)) return FAILED;
    static int count = 0;
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "emulated %d", ++count);
    return 0;
}
Status ncclCommInitRank(Communicator **made, int ranks, Id id, int rank) {
    ENTER_NCCL;
    if (ranks < 1 || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    Group &group = groups[std::string(id.bytes, strnlen(id.bytes, sizeof id.bytes))];
    group.sent.resize(std::max(group.sent.size(), size_t(ranks)));
    *made = new Communicator{&group, rank, {}};
    exchange(lock, **made, {"a group of " + std::to_string(ranks), {}});
    return 0;
}
Status ncclCommAbort(Communicator *comm) {
    Lock lock(one);
    if (!host_has_waited_for(comm->clock)) die("a communicator is aborted before its operations end");
    if (comm->group->arrived) die("a rank leaves while others wait for it");
    delete comm;
    return 0;
}
Status ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *comm,
                     void *stream) {
    ENTER_NCCL;
    if (operation != 0) die("a reduction that is no sum");
    return run(lock, __func__, from, to, count, type, operation, comm, stream,
               [](const std::vector<Call> &all, int type, int, std::vector<char> &to) {
                   if (type == F32) add<float>(all, to);
                   else add<double>(all, to);
               });
}
Status ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *comm, void *stream) {
    ENTER_NCCL;
    return run(lock, __func__, from, to, count, type, 0, comm, stream,
               [](const std::vector<Call> &all, int, int, std::vector<char> &to) {
                   for (size_t rank = 1; rank < all.size(); ++rank)
                       to.insert(to.end(), all[rank].bytes.begin(), all[rank].bytes.end());
               });
}
Status ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *comm, void *stream) {
    ENTER_NCCL;
    return run(lock, __func__, from, to, count, type, root, comm, stream,
               [](const std::vector<Call> &all, int, int root, std::vector<char> &to) { to = all[root].bytes; });
}
}
