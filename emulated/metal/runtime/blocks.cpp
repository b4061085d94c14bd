// Blocks: closures that are copied from the stack to the heap when they are retained.
#include "blocks.h"

#include <cstdlib>
#include <cstring>
#include <mutex>

static const int HAS_COPY_AND_DISPOSE = 1 << 25;
static void *heap_block[32];
static std::mutex one;

extern "C" {
void *_NSConcreteStackBlock[32];
void *_NSConcreteGlobalBlock[32];

void *_Block_copy(const void *original) {
    auto block = static_cast<Block *>(const_cast<void *>(original));
    std::lock_guard<std::mutex> lock(one);
    if (block->isa == _NSConcreteGlobalBlock) return block;
    if (block->isa == heap_block) {
        block->references++;
        return block;
    }
    auto copy = static_cast<Block *>(malloc(block->description->size));
    memcpy(copy, block, block->description->size);
    copy->isa = heap_block;
    copy->references = 1;
    if (copy->flags & HAS_COPY_AND_DISPOSE) copy->description->copy(copy, block);
    return copy;
}

void _Block_release(const void *released) {
    auto block = static_cast<Block *>(const_cast<void *>(released));
    {
        std::lock_guard<std::mutex> lock(one);
        if (block->isa != heap_block || --block->references) return;
    }
    if (block->flags & HAS_COPY_AND_DISPOSE) block->description->dispose(block);
    free(block);
}
}
