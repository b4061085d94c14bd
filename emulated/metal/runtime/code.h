// The code of a compute pipeline, and its arguments.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "objects.h"

const size_t SLOTS = 31;

struct Size {
    size_t width, height, depth;
    size_t count() const { return width * height * depth; }
};

// The values of a function's constants, by their indices.
typedef std::map<size_t, uint64_t> Constants;

// The memory bound to a slot: the bytes of a buffer from the offset on, or those of `setBytes`.
struct Slot {
    char *bytes = nullptr;
    size_t size = 0;
};

// One dispatch.
struct Launch {
    const struct Code *code = nullptr;
    Slot slots[SLOTS];
    // The number of threadgroups, and of threads in each.
    Size groups{}, group{};
    // The number of threads; less than the product of both if the last groups are not full.
    Size threads{};
    bool in_threads = false;
};

struct Code {
    std::string name;
    // One letter for each slot: r read, w written (and possibly read), . not used.
    std::string roles;
    Constants constants;
    virtual void run(const Launch &) const = 0;
    // Whether this launch ignores a slot that has a binding.
    virtual bool ignores(const Launch &, size_t) const { return false; }
    virtual ~Code() {}

    [[noreturn]] void fail(const std::string &what) const { die(name + ": " + what); }
};

// The functions of a library by name; if there is no such function, `error` is the reason.
struct Functions {
    virtual std::shared_ptr<const Code> find(const std::string &name, const Constants &, std::string &error) const = 0;
    virtual ~Functions() {}
};

// mos-head's shader, compiled from `text`; the stand-ins for candle's kernels, which need no text.
std::shared_ptr<const Functions> shader(const std::string &text);
std::shared_ptr<const Functions> candle();
