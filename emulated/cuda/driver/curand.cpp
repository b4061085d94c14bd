// cuRAND's generators, with other numbers.
#include <cmath>
#include <random>
#include <set>

#include "driver.h"

using namespace emulated;

typedef int Status;
enum { NOT_INITIALIZED = 101, LENGTH_NOT_MULTIPLE = 105, FAILED = 201 };

struct Generator {
    void *stream = nullptr;
    std::mt19937_64 state;
};
static auto &generators = *new std::set<Generator *>;

// Fills memory with samples: uniform ones from (0, 1], or normal ones.
template <typename T>
static Status fill(Generator *generator, T *to, size_t count, bool is_normal, T mean, T deviation) {
    if (!generators.count(generator)) return NOT_INITIALIZED;
    if (is_normal && count % 2) return LENGTH_NOT_MULTIPLE;
    begin(stream_of(generator->stream), "cuRAND");
    use(uintptr_t(to), count * sizeof(T), true);
    emulated::count("random " + std::to_string(count * sizeof(T)));
    if (is_counting()) return 0;
    auto uniform = [&] { return T((generator->state() >> 40) + 1) / T(1 << 24); };
    for (size_t i = 0; i < count; ++i) {
        if (!is_normal) {
            to[i] = uniform();
        } else if (i % 2 == 0) {
            const T radius = deviation * std::sqrt(-2 * std::log(uniform())), angle = T(2 * M_PI) * uniform();
            to[i] = mean + radius * std::cos(angle);
            to[i + 1] = mean + radius * std::sin(angle);
        }
    }
    return 0;
}

extern "C" {

Status curandCreateGenerator(Generator **made, int) {
    ENTER_LIBRARY(FAILED);
    generators.insert(*made = new Generator);
    return 0;
}
Status curandDestroyGenerator(Generator *generator) {
    RELEASE(FAILED);
    if (!generators.erase(generator)) die("a generator is destroyed twice");
    delete generator;
    return status;
}
Status curandSetStream(Generator *generator, void *stream) {
    ENTER_LIBRARY(FAILED);
    generator->stream = stream;
    return 0;
}
Status curandSetPseudoRandomGeneratorSeed(Generator *generator, unsigned long long seed) {
    ENTER_LIBRARY(FAILED);
    generator->state.seed(seed);
    return 0;
}
Status curandGenerateUniform(Generator *generator, float *to, size_t count) {
    ENTER_LIBRARY(FAILED);
    return fill<float>(generator, to, count, false, 0, 0);
}
Status curandGenerateUniformDouble(Generator *generator, double *to, size_t count) {
    ENTER_LIBRARY(FAILED);
    return fill<double>(generator, to, count, false, 0, 0);
}
Status curandGenerateNormal(Generator *generator, float *to, size_t count, float mean, float deviation) {
    ENTER_LIBRARY(FAILED);
    return fill(generator, to, count, true, mean, deviation);
}
Status curandGenerateNormalDouble(Generator *generator, double *to, size_t count, double mean, double deviation) {
    ENTER_LIBRARY(FAILED);
    return fill(generator, to, count, true, mean, deviation);
}
}
