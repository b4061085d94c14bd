// The table of the stand-ins for candle's kernels.
#include "kernel.h"

namespace {

struct Entry {
    std::string roles;
    Run run;
};

std::map<std::string, Entry> &table() {
    static std::map<std::string, Entry> all;
    return all;
}

struct CandleKernel : Code {
    const Entry *entry;
    void run(const Launch &launch) const override { entry->run(launch); }
};

const size_t USE_OUT_SOURCE = 100;

struct Candle : Functions {
    std::shared_ptr<const Code> find(const std::string &name, const Constants &constants,
                                     std::string &error) const override {
        auto found = table().find(name);
        if (found == table().end()) {
            error = "candle's kernel " + name + " has no stand-in here";
            return nullptr;
        }
        auto kernel = std::make_shared<CandleKernel>();
        kernel->name = name;
        kernel->constants = constants;
        kernel->entry = &found->second;
        auto out_source = constants.find(USE_OUT_SOURCE);
        char when = out_source != constants.end() && out_source->second ? 'r' : '.';
        for (char role : found->second.roles) kernel->roles += role == 'C' ? when : role;
        return kernel;
    }
};

} // namespace

void kernel(const std::string &name, const std::string &roles, Run run) {
    if (!table().insert({name, {roles, std::move(run)}}).second) die("two stand-ins for " + name);
}

std::shared_ptr<const Functions> candle() { return std::make_shared<Candle>(); }

// For a test: all stand-ins, one line with name and roles for each.
extern "C" const char *emulated_kernels() {
    static std::string names;
    names.clear();
    for (auto &entry : table()) names += entry.first + " " + entry.second.roles + "\n";
    return names.c_str();
}
