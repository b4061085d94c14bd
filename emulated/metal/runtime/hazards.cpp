// Runs an encoder's commands and checks their order. A GPU may run the dispatches of an encoder in any order between
// two barriers, and encoders in any order that their fences allow; candle turns off Metal's hazard tracking. So two
// commands that use a buffer, one of which writes it, need a barrier or a fence between them, or the CPU must wait in
// between.
#include <cstring>

#include "metal.h"

namespace {

// An encoder whose commands run.
class Running {
    Queue *queue;
    // The CPU had waited for the turns up to this one when the command buffer was committed.
    Turn over;
    Turn now;
    // Later turns that fences put before this one.
    std::set<Turn> past;
    // The buffers that commands since the last barrier have read or written.
    std::set<Buffer *> read, written;

  public:
    Running(const CommandBuffer *buffer) : queue(buffer->queue.get()), over(buffer->over) {
        static std::atomic<Turn> turns{0};
        now = ++turns;
    }
    ~Running() { queue->over = now; }

    void run(const Command &command) {
        switch (command.kind) {
        case Command::BARRIER:
            read.clear();
            written.clear();
            break;
        case Command::WAIT:
            for (const Ref<Fence> &fence : command.fences)
                if (fence->last > over) past.insert(fence->past.upper_bound(over), fence->past.end());
            break;
        case Command::UPDATE:
            for (const Ref<Fence> &fence : command.fences) {
                fence->past = past;
                fence->past.insert(now);
                fence->last = now;
            }
            break;
        case Command::COPY:
            check("a copy", {command.source.get()}, {command.target.get()});
            memcpy(command.target->bytes + command.at, command.source->bytes + command.from, command.length);
            break;
        case Command::FILL:
            check("a fill", {}, {command.target.get()});
            memset(command.target->bytes + command.at, command.value, command.length);
            break;
        case Command::DISPATCH:
            dispatch(command);
        }
    }

  private:
    void dispatch(const Command &command) {
        const Code &code = *command.code;
        Launch launch;
        launch.code = &code;
        launch.group = command.group;
        launch.in_threads = command.in_threads;
        auto groups = [&](size_t grid, size_t group) { return command.in_threads ? (grid + group - 1) / group : grid; };
        auto threads = [&](size_t grid, size_t group) { return command.in_threads ? grid : grid * group; };
        const Size &grid = command.grid, &group = command.group;
        launch.groups = {groups(grid.width, group.width), groups(grid.height, group.height),
                         groups(grid.depth, group.depth)};
        launch.threads = {threads(grid.width, group.width), threads(grid.height, group.height),
                          threads(grid.depth, group.depth)};

        for (size_t i = 0; i < code.roles.size(); i++) {
            if (code.roles[i] == '.') continue;
            std::string who = "buffer " + std::to_string(i);
            if (i >= command.arguments.size() || !command.arguments[i].set) code.fail(who + " is not set");
            const Argument &argument = command.arguments[i];
            if (argument.buffer) {
                launch.slots[i] = {argument.buffer->bytes + argument.offset, argument.buffer->length - argument.offset};
            } else {
                if (code.roles[i] == 'w') code.fail(who + " is written, but only bytes were set");
                launch.slots[i] = {const_cast<char *>(argument.bytes.data()), argument.bytes.size()};
            }
        }
        std::set<Buffer *> reads, writes;
        for (size_t i = 0; i < code.roles.size(); i++) {
            if (code.roles[i] == '.' || !command.arguments[i].buffer || code.ignores(launch, i)) continue;
            (code.roles[i] == 'w' ? writes : reads).insert(command.arguments[i].buffer.get());
        }
        check(code.name, reads, writes);
        code.run(launch);
    }

    // Checks that a command is ordered after those that it depends on.
    void check(const std::string &who, const std::set<Buffer *> &reads, const std::set<Buffer *> &writes) {
        for (Buffer *buffer : reads) {
            belongs(who, buffer);
            if (written.count(buffer))
                die("hazard: " + who +
                    " reads what an earlier command of this encoder writes, with no barrier between");
            if (!before(buffer->writer))
                die("hazard: " + who + " reads what another encoder writes, whose fence is not waited for");
        }
        for (Buffer *buffer : writes) {
            belongs(who, buffer);
            if (written.count(buffer) || read.count(buffer))
                die("hazard: " + who + " writes what an earlier command of this encoder uses, with no barrier between");
            bool free = before(buffer->writer);
            for (Turn reader : buffer->readers) free = free && before(reader);
            if (!free) die("hazard: " + who + " writes what another encoder uses, whose fence is not waited for");
        }
        for (Buffer *buffer : reads) {
            read.insert(buffer);
            buffer->readers.insert(now);
        }
        for (Buffer *buffer : writes) {
            written.insert(buffer);
            buffer->writer = now;
            buffer->readers.clear();
        }
    }

    // Whether a turn is over when this one begins.
    bool before(Turn turn) const { return turn <= over || turn == now || past.count(turn); }

    // Checks that one queue alone uses a buffer.
    void belongs(const std::string &who, Buffer *buffer) const {
        if (buffer->queue && buffer->queue != queue) die(who + ": a buffer is used on two queues");
        buffer->queue = queue;
    }
};

} // namespace

void run(Encoder *encoder, const CommandBuffer *buffer) {
    Running running(buffer);
    for (const Command &command : encoder->commands) running.run(command);
}
