// MTLBuffer. Each has its own pages between two guard pages, and ends at the second guard page, up to the alignment of
// its start, so that a shader that accesses memory past its end fails. The unused bytes of its pages are checked when
// it is released.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "metal.h"

static Class buffer_class("MTLBuffer");

static const size_t ALIGNMENT = 16;
static const unsigned char UNWRITTEN = 0xff;
static const unsigned long STORAGE_MODE_PRIVATE = 2 << 4, STORAGE_MODES = 15 << 4;

Buffer::Buffer(size_t length, unsigned long options)
    : Object(&buffer_class), length(length), shared((options & STORAGE_MODES) != STORAGE_MODE_PRIVATE) {
    size_t page = sysconf(_SC_PAGESIZE);
    size_t inner = (length + page - 1) / page * page;
    mapped = inner + 2 * page;
    map = static_cast<char *>(mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (map == MAP_FAILED) die("no memory for a buffer of " + std::to_string(length) + " bytes");
    mprotect(map, page, PROT_NONE);
    mprotect(map + page + inner, page, PROT_NONE);
    bytes = map + page + (inner - length) / ALIGNMENT * ALIGNMENT;
    // Fresh memory is not zero: its bytes are NaN in every floating-point type, and not a valid index.
    memset(map + page, UNWRITTEN, inner);
}

Buffer::~Buffer() {
    size_t page = sysconf(_SC_PAGESIZE);
    char *first = map + page, *last = map + mapped - page;
    auto unwritten = [](const char *from, const char *to) {
        while (from < to && *from == char(UNWRITTEN)) from++;
        return from == to;
    };
    if (!unwritten(first, bytes) || !unwritten(bytes + length, last))
        die("memory around a buffer of " + std::to_string(length) + " bytes was written");
    munmap(map, mapped);
}

static int methods = [] {
    Class &buffer = buffer_class;
    method(buffer, "length", [](Buffer *self, SEL) { return self->length; });
    method(buffer, "didModifyRange:", [](id, SEL, size_t, size_t) {});
    method(buffer, "setLabel:", [](id, SEL, id) {});
    method(buffer, "contents", [](Buffer *self, SEL) -> void * {
        if (!self->shared) die("access to the contents of a private buffer");
        if (self->unfinished) die("access to the contents of a buffer before the commands that use it were waited for");
        return self->bytes;
    });
    return 0;
}();
