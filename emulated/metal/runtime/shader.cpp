// mos-head's shader, compiled as C++ with the emulator of tests/gpu_host. Compiled shaders are cached, since every test
// binary loads the same one.
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <vector>

#include "code.h"

namespace {

const std::string EMULATOR = REPOSITORY "/tests/gpu_host";

struct Shader : Functions {
    int (*launch)(const char *name, unsigned blocks, void **slots, const size_t *, size_t);
    int (*slots)(const char *name);
    int (*access)(const char *name, int slot);

    explicit Shader(const std::string &path) {
        void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) throw std::string(dlerror());
        launch = symbol<decltype(launch)>(library, "launch");
        slots = symbol<decltype(slots)>(library, "slots");
        access = symbol<decltype(access)>(library, "access");
    }

    std::shared_ptr<const Code> find(const std::string &name, const Constants &, std::string &error) const override;

  private:
    template <class F> static F symbol(void *library, const char *name) {
        void *found = dlsym(library, name);
        if (!found) die(std::string("the compiled shader has no ") + name);
        return reinterpret_cast<F>(found);
    }
};

const unsigned THREADS = 256;

struct ShaderKernel : Code {
    const Shader *shader;

    // Bit n of the last argument says whether argument n is present.
    bool ignores(const Launch &launch, size_t slot) const override {
        const Slot &last = launch.slots[roles.size() - 1];
        if (last.size != 4) fail("the last argument is not 32 bits");
        uint32_t present;
        memcpy(&present, last.bytes, 4);
        return !(present >> slot & 1) && slot + 1 < roles.size();
    }

    void run(const Launch &launch) const override {
        if (launch.in_threads) fail("dispatched in threads, not in threadgroups");
        if (launch.group.width != THREADS || launch.group.height != 1 || launch.group.depth != 1)
            fail("a threadgroup that is not (256, 1, 1)");
        if (launch.groups.height != 1 || launch.groups.depth != 1) fail("a grid of more than one dimension");
        std::vector<void *> pointers;
        for (size_t i = 0; i < roles.size(); i++)
            pointers.push_back(ignores(launch, i) ? nullptr : launch.slots[i].bytes);
        // The emulator runs one launch at a time.
        static std::mutex one;
        std::lock_guard<std::mutex> lock(one);
        if (shader->launch(name.c_str(), unsigned(launch.groups.width), pointers.data(), nullptr, 0)) fail("did not run");
    }
};

std::shared_ptr<const Code> Shader::find(const std::string &name, const Constants &, std::string &error) const {
    int count = slots(name.c_str());
    if (count < 0) {
        error = "the shader has no function " + name;
        return nullptr;
    }
    auto kernel = std::make_shared<ShaderKernel>();
    kernel->name = name;
    kernel->shader = this;
    for (int i = 0; i < count; i++) kernel->roles += access(name.c_str(), i) == 2 ? 'w' : 'r';
    return kernel;
}

// The text of a file.
std::string contents(const std::string &path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

// The text of the emulator's files: a cached shader is valid as long as they are unchanged.
std::string emulator() {
    std::vector<std::string> files;
    for (const auto &entry : std::filesystem::directory_iterator(EMULATOR))
        if (entry.is_regular_file()) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    std::string all;
    for (const std::string &file : files) all += file + contents(file);
    return all;
}

// The hash FNV-1a of a text.
std::string hash(const std::string &text) {
    uint64_t state = 14695981039346656037u;
    for (unsigned char byte : text) state = (state ^ byte) * 1099511628211u;
    return std::to_string(state);
}

// The text with a mutation from the environment, to test the tests.
std::string mutated(std::string text) {
    const char *set = getenv("MOS_HEAD_METAL_MUTANT");
    if (!set) return text;
    std::string mutant = set;
    size_t arrow = mutant.find("=>");
    if (arrow == std::string::npos) die("MOS_HEAD_METAL_MUTANT is not from=>to");
    std::string from = mutant.substr(0, arrow), to = mutant.substr(arrow + 2);
    size_t at = text.find(from);
    if (at == std::string::npos || text.find(from, at + 1) != std::string::npos)
        die("'" + from + "' does not occur exactly once");
    return text.replace(at, from.size(), to);
}

// Compiles a shader, if no earlier process has, and returns the path of the library.
std::string compile(const std::string &text) {
    std::string path = SHADERS "/" + hash(text + emulator()) + ".so";
    if (!access(path.c_str(), R_OK)) return path;
    mkdir(SHADERS, 0777);
    std::string folder = SHADERS "/compiling.XXXXXX";
    if (!mkdtemp(folder.data())) die("no folder " + folder);
    std::ofstream(folder + "/mixture.metal") << text;
    std::string made = folder + "/libmixture.so", messages = folder + "/messages";
    std::string command = "c++ -std=c++17 -O1 -shared -fPIC -I '" + folder + "' -I '" + EMULATOR + "' '" + EMULATOR +
                          "/metal.cpp' -o '" + made + "' 2> '" + messages + "'";
    if (system(command.c_str())) throw command + "\n" + contents(messages);
    // Another process may have been faster, with the same result.
    if (rename(made.c_str(), path.c_str())) die("the compiled shader cannot be moved to " + path);
    for (const char *left : {"/mixture.metal", "/messages", ""}) remove((folder + left).c_str());
    return path;
}

} // namespace

std::shared_ptr<const Functions> shader(const std::string &text) {
    return std::make_shared<Shader>(compile(mutated(text)));
}
