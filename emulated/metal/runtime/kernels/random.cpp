// random.metal: candle's generator, reproduced exactly, since the tests depend on its quality.
#include <cmath>

#include "kernel.h"

namespace {

uint32_t tausworthe(uint32_t z, int a, int b, int c, uint32_t mask) {
    return ((z & mask) << c) ^ (((z << a) ^ z) >> b);
}
uint32_t linear(uint32_t z) { return 1664525 * z + 1013904223u; }

// Metal's conversion of a float outside the range of the type.
uint32_t saturated(float value) { return value >= 4294967296.f ? 0xffffffff : value <= 0 ? 0 : uint32_t(value); }

class Generator {
    float state;

    static uint32_t mix(uint32_t z) {
        return tausworthe(z, 13, 19, 12, 429496729u) ^ tausworthe(z, 2, 25, 4, 4294967288u) ^
               tausworthe(z, 3, 11, 17, 429496280u) ^ linear(z);
    }
    static float unit(uint32_t bits) { return float(bits) * 2.328306436538696289e-10f; }

  public:
    Generator(uint64_t seed, uint64_t thread) {
        uint64_t x = seed * 0x9E3779B97F4A7C15u * 1099087573u, y = thread * 0xF39CC0605CEDC834u * 1099087573u;
        uint64_t z = 0x1082276BF3A27251u * 1099087573u, w = 0xF86C6A11D0C18E95u * 1099087573u;
        uint32_t first = tausworthe(uint32_t(x), 13, 19, 12, 4294967294u) ^
                         tausworthe(uint32_t(y), 2, 25, 4, 4294967288u) ^
                         tausworthe(uint32_t(z), 3, 11, 17, 4294967280u) ^ linear(uint32_t(x));
        uint32_t second = mix(first ^ uint32_t(y)), third = mix(second ^ uint32_t(z));
        state = unit(mix(third ^ uint32_t(w)));
    }
    float next() {
        float result = state;
        state = unit(mix(saturated(state * 4294967296.f)));
        return result;
    }
};

// length, two parameters, seed, output. Each thread writes one number at either end, and the first also the next seed.
// On a GPU other threads may read the next seed; here they all read the old one.
template <class T, class F> void random(const std::string &name, F pair) {
    kernel(name, "rrrww", [pair](const Launch &launch) {
        size_t length = scalar<uint64_t>(launch, 0);
        float a = scalar<float>(launch, 1), b = scalar<float>(launch, 2);
        View<uint32_t> state(launch, 3);
        View<T> output(launch, 4);
        uint64_t seed = uint64_t(state.get(0)) << 32 | state.get(1);
        bool even = length % 2 == 0;
        covers(launch, length, 2);
        for (size_t i = 0; i < std::min(length, launch.threads.count()); i++) {
            Generator generator(seed, i);
            float first, last;
            pair(generator, a, b, first, last, [&] {
                if (i) return;
                state.set(0, 0);
                state.set(1, saturated(generator.next() * 4294967296.f));
            });
            output.set(i, T(first));
            if (i || even) output.set(length - even - i, T(last));
        }
    });
}

int all = [] {
    for_floats([](auto zero) {
        typedef decltype(zero) T;
        std::string type = std::string("_") + Type<T>::name();
        random<T>("rand_uniform" + type,
                  [](Generator &generator, float min, float max, float &first, float &last, auto leave_seed) {
                      float width = std::fabs(min - max);
                      first = generator.next() * width + min;
                      leave_seed();
                      last = generator.next() * width + min;
                  });
        random<T>("rand_normal" + type,
                  [](Generator &generator, float mean, float deviation, float &first, float &last, auto leave_seed) {
                      float radius = generator.next(), angle = float(2 * M_PI) * generator.next();
                      radius = deviation * std::sqrt(-2 * std::log(radius));
                      first = radius * std::cos(angle) + mean;
                      last = radius * std::sin(angle) + mean;
                      leave_seed();
                  });
    });
    return 0;
}();

} // namespace
