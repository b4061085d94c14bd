// A block in the compilers' layout.
#pragma once

struct BlockDescription {
    unsigned long reserved, size;
    void (*copy)(void *to, const void *from);
    void (*dispose)(void *block);
};

struct Block {
    void *isa;
    int flags, references;
    void (*invoke)(void *block, ...);
    BlockDescription *description;
};

extern "C" void *_Block_copy(const void *block);
extern "C" void _Block_release(const void *block);
