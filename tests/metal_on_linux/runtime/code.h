// What a compute pipeline runs, and what it is given to run with.
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

// What is bound to a slot: the bytes of a buffer from the offset on, or those that came with the command.
struct Slot {
    char *bytes = nullptr;
    size_t size = 0;
};

// One dispatch.
struct Launch {
    const struct Code *code = nullptr;
    Slot slots[SLOTS];
    // In threadgroups, and in threads of each.
    Size groups{}, group{};
    // In threads; less than the product of both where the last groups are not full.
    Size threads{};
    bool in_threads = false;
};

struct Code {
    std::string name;
    // One letter for each slot: r read, w written (and perhaps read), . not used.
    std::string roles;
    Constants constants;
    virtual void run(const Launch &) const = 0;
    // Whether this launch is told to leave a slot alone, though something is bound to it.
    virtual bool leaves_alone(const Launch &, size_t) const { return false; }
    virtual ~Code() {}

    [[noreturn]] void fail(const std::string &what) const { die(name + ": " + what); }
};

// The functions of a library by their names; `error` says why there is no such function.
struct Functions {
    virtual std::shared_ptr<const Code> find(const std::string &name, const Constants &, std::string &error) const = 0;
    virtual ~Functions() {}
};

// Our own shader, compiled from `text`; candle's kernels, whatever the text.
std::shared_ptr<const Functions> shader(const std::string &text);
std::shared_ptr<const Functions> candle();
