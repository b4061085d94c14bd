// Queues, command buffers and encoders. They record commands and run them only when the CPU waits for them, which
// exposes a program that reads results too early; on a fast GPU it may seem to work.
#include "metal.h"

static Class queue_class("MTLCommandQueue");
static Class command_buffer_class("MTLCommandBuffer");
static Class encoder_class("MTLCommandEncoder");

Queue::Queue() : Object(&queue_class) {}
Queue *new_queue() { return new Queue; }

CommandBuffer::CommandBuffer(Queue *queue) : Object(&command_buffer_class), queue(queue) {}
CommandBuffer::~CommandBuffer() {
    for (Block *block : when_done) _Block_release(block);
}

Encoder::Encoder() : Object(&encoder_class) {}
Encoder::~Encoder() {
    for (Command &command : commands) {
        for (Argument &argument : command.arguments)
            if (argument.buffer) argument.buffer->unfinished--;
        if (command.source) command.source->unfinished--;
        if (command.target) command.target->unfinished--;
    }
}

void Encoder::record(Command command) {
    if (ended) die("a command after endEncoding");
    for (Argument &argument : command.arguments)
        if (argument.buffer) argument.buffer->unfinished++;
    if (command.source) command.source->unfinished++;
    if (command.target) command.target->unfinished++;
    commands.push_back(std::move(command));
}

void run(CommandBuffer *until) {
    Queue *queue = until->queue.get();
    std::lock_guard<std::recursive_mutex> lock(queue->one);
    while (until->status != COMPLETED) {
        if (until->status < COMMITTED) die("waiting for a command buffer that was not committed");
        Ref<CommandBuffer> next = queue->pending.front();
        queue->pending.erase(queue->pending.begin());
        for (Ref<Encoder> &encoder : next->encoders) run(encoder.get(), next.get());
        next->encoders.clear();
        next->status = COMPLETED;
        for (Block *block : next->when_done) {
            reinterpret_cast<void (*)(void *, id)>(block->invoke)(block, next.get());
            _Block_release(block);
        }
        next->when_done.clear();
    }
}

static void dispatch(Encoder *encoder, Size grid, Size group, bool in_threads) {
    Command command(Command::DISPATCH);
    if (!encoder->code) die("a dispatch without a pipeline");
    const Code &code = *encoder->code;
    if (!grid.count()) code.fail("a dispatch of no threads");
    if (!group.count() || group.count() > 1024)
        code.fail("a threadgroup of " + std::to_string(group.count()) + " threads");
    command.code = encoder->code;
    command.arguments = encoder->arguments;
    command.grid = grid;
    command.group = group;
    command.in_threads = in_threads;
    encoder->record(std::move(command));
}

static Argument &argument(Encoder *encoder, size_t index) {
    if (index >= SLOTS) die("argument " + std::to_string(index) + " of a kernel");
    encoder->arguments.resize(SLOTS);
    encoder->arguments[index] = Argument();
    encoder->arguments[index].set = true;
    return encoder->arguments[index];
}

static id new_encoder(CommandBuffer *buffer) {
    if (buffer->status >= COMMITTED) die("a new encoder of a command buffer already committed");
    if (!buffer->encoders.empty() && !buffer->encoders.back()->ended) die("a new encoder before the last one ended");
    Encoder *encoder = new Encoder;
    buffer->encoders.push_back(encoder);
    return autoreleased(encoder);
}

static int methods = [] {
    Class &queue = queue_class;
    method(queue, "device", [](id, SEL) -> id { return the_device(); });
    method(queue, "setLabel:", [](id, SEL, id) {});
    method(queue, "addResidencySet:", [](id, SEL, id) {});
    method(queue, "commandBuffer", [](Queue *self, SEL) -> id { return autoreleased(new CommandBuffer(self)); });

    Class &buffer = command_buffer_class;
    method(buffer, "device", [](id, SEL) -> id { return the_device(); });
    method(buffer, "status", [](CommandBuffer *self, SEL) -> size_t { return self->status; });
    method(buffer, "error", [](id, SEL) -> id { return nullptr; });
    method(buffer, "setLabel:", [](id, SEL, id) {});
    method(buffer, "commit", [](CommandBuffer *self, SEL) {
        std::lock_guard<std::recursive_mutex> lock(self->queue->one);
        if (self->status >= COMMITTED) die("a command buffer is committed twice");
        for (Ref<Encoder> &encoder : self->encoders)
            if (!encoder->ended) die("a command buffer is committed whose encoder has not ended");
        self->over = self->queue->over;
        self->status = COMMITTED;
        self->queue->pending.push_back(self);
    });
    method(buffer, "waitUntilCompleted", [](CommandBuffer *self, SEL) { run(self); });
    method(buffer, "addCompletedHandler:", [](CommandBuffer *self, SEL, const void *block) {
        if (self->status >= COMMITTED) die("a handler for a command buffer already committed");
        self->when_done.push_back(static_cast<Block *>(_Block_copy(block)));
    });
    method(buffer, "computeCommandEncoderWithDispatchType:", [](CommandBuffer *self, SEL, unsigned long) {
        return new_encoder(self);
    });
    method(buffer, "computeCommandEncoder", [](CommandBuffer *self, SEL) { return new_encoder(self); });
    method(buffer, "blitCommandEncoder", [](CommandBuffer *self, SEL) { return new_encoder(self); });

    Class &encoder = encoder_class;
    method(encoder, "setLabel:", [](id, SEL, id) {});
    method(encoder, "endEncoding", [](Encoder *self, SEL) {
        if (self->ended) die("endEncoding twice");
        self->ended = true;
    });
    method(encoder, "waitForFence:", [](Encoder *self, SEL, Fence *fence) {
        bool more = !self->commands.empty() && self->commands.back().kind == Command::WAIT;
        if (!more) self->record(Command(Command::WAIT));
        self->commands.back().fences.push_back(fence);
    });
    method(encoder, "updateFence:", [](Encoder *self, SEL, Fence *fence) {
        Command command(Command::UPDATE);
        command.fences.push_back(fence);
        self->record(std::move(command));
    });

    // Arguments that were set for another pipeline are removed; on a GPU they would remain bound, wrongly.
    method(encoder, "setComputePipelineState:", [](Encoder *self, SEL, Pipeline *pipeline) {
        self->code = pipeline->code;
        self->arguments.assign(SLOTS, Argument());
    });
    method(encoder, "setBuffer:offset:atIndex:", [](Encoder *self, SEL, Buffer *buffer, size_t offset, size_t index) {
        Argument &to = argument(self, index);
        to.set = buffer;
        to.buffer = buffer;
        to.offset = offset;
        if (buffer && offset >= buffer->length)
            die("an offset of " + std::to_string(offset) + " in a buffer of " + std::to_string(buffer->length) +
                " bytes");
    });
    method(encoder, "setBytes:length:atIndex:", [](Encoder *self, SEL, const char *bytes, size_t length, size_t index) {
        if (length > 4096) die("setBytes of more than 4096 bytes");
        // candle passes the dimensions of a scalar as no bytes.
        if (length) argument(self, index).bytes.assign(bytes, bytes + length);
        else argument(self, index);
    });
    method(encoder, "setThreadgroupMemoryLength:atIndex:", [](Encoder *, SEL, size_t length, size_t) {
        if (length > 32 << 10 || length % 16) die("threadgroup memory of " + std::to_string(length) + " bytes");
    });
    method(encoder, "dispatchThreadgroups:threadsPerThreadgroup:", [](Encoder *self, SEL, Size grid, Size group) {
        dispatch(self, grid, group, false);
    });
    method(encoder, "dispatchThreads:threadsPerThreadgroup:", [](Encoder *self, SEL, Size grid, Size group) {
        dispatch(self, grid, group, true);
    });
    method(encoder, "memoryBarrierWithScope:", [](Encoder *self, SEL, unsigned long) {
        self->record(Command(Command::BARRIER));
    });

    method(encoder, "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:",
           [](Encoder *self, SEL, Buffer *source, size_t from, Buffer *target, size_t at, size_t length) {
               Command command(Command::COPY);
               if (from + length > source->length || at + length > target->length)
                   die("a copy from or to memory outside a buffer");
               command.source = source;
               command.target = target;
               command.from = from;
               command.at = at;
               command.length = length;
               self->record(std::move(command));
           });
    method(encoder,
           "fillBuffer:range:value:", [](Encoder *self, SEL, Buffer *target, size_t at, size_t length, uint8_t value) {
               Command command(Command::FILL);
               if (at + length > target->length) die("a fill outside a buffer");
               command.target = target;
               command.at = at;
               command.length = length;
               command.value = value;
               self->record(std::move(command));
           });
    return 0;
}();
