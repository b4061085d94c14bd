// The driver's objects.
#pragma once
#include <mutex>
#include <set>
#include <vector>

#include "blocks.h"
#include "code.h"
#include "foundation.h"

Object *the_device();

struct Queue;

// Encoders are numbered in the order in which they run; see hazards.cpp.
typedef uint64_t Turn;

// Memory between two guard pages, initially NaN.
struct Buffer : Object {
    size_t length;
    bool shared;
    char *bytes;
    // The encoder that wrote it last, and those that have read it since.
    Turn writer = 0;
    std::set<Turn> readers;
    Queue *queue = nullptr;
    // The number of recorded commands that use it and have not run.
    std::atomic<long> unfinished{0};

    Buffer(size_t length, unsigned long options);
    ~Buffer() override;

  private:
    char *map;
    size_t mapped;
};

struct Fence : Object {
    // The turns that are over once this fence is updated, and the last of them.
    std::set<Turn> past;
    Turn last = 0;
    Fence();
};

struct Pipeline : Object {
    std::shared_ptr<const Code> code;
    explicit Pipeline(std::shared_ptr<const Code> code);
};

struct Argument {
    bool set = false;
    Ref<Buffer> buffer;
    size_t offset = 0;
    std::vector<char> bytes;
};

struct Command {
    enum Kind { DISPATCH, BARRIER, COPY, FILL, WAIT, UPDATE } kind;
    // DISPATCH
    std::shared_ptr<const Code> code;
    std::vector<Argument> arguments;
    Size grid{}, group{};
    bool in_threads = false;
    // COPY, FILL
    Ref<Buffer> source, target;
    size_t from = 0, at = 0, length = 0;
    int value = 0;
    // WAIT, UPDATE. candle waits for hundreds at once.
    std::vector<Ref<Fence>> fences;

    explicit Command(Kind kind) : kind(kind) {}
};

struct Encoder : Object {
    std::vector<Command> commands;
    // The code and arguments of the next dispatch.
    std::shared_ptr<const Code> code;
    std::vector<Argument> arguments;
    bool ended = false;
    Encoder();
    void record(Command command);
    ~Encoder() override;
};

// With Metal's values.
enum Status { NOT_ENQUEUED = 0, ENQUEUED = 1, COMMITTED = 2, COMPLETED = 4 };

struct CommandBuffer : Object {
    Ref<Queue> queue;
    std::vector<Ref<Encoder>> encoders;
    std::vector<Block *> when_done;
    std::atomic<long> status{NOT_ENQUEUED};
    // The last turn that the CPU had waited for when this was committed.
    Turn over = 0;
    explicit CommandBuffer(Queue *queue);
    ~CommandBuffer() override;
};

struct Queue : Object {
    // Held while the queue runs or takes command buffers.
    std::recursive_mutex one;
    std::vector<Ref<CommandBuffer>> pending;
    Turn over = 0;
    Queue();
};

Queue *new_queue();
// Runs the pending command buffers up to `until`.
void run(CommandBuffer *until);
// Runs one encoder of a command buffer.
void run(Encoder *encoder, const CommandBuffer *buffer);
