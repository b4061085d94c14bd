// mlx_gemm.metal: D = A B, or A B + C, or alpha A B + beta C. Sums are kept in float and rounded once.
#include <algorithm>
#include <vector>

#include "kernel.h"

namespace {

// Slot 4.
struct Params {
    int32_t m, n, k, lda, ldb, ldd, tiles_n, tiles_m;
    uint64_t batch_stride_a, batch_stride_b, batch_stride_d;
    int32_t swizzle_log, k_iterations, batch_ndim;
};
static_assert(sizeof(Params) == 72, "as Metal lays it out");

// Slot 5, if there is a C.
struct AddParams {
    int32_t ldc, fdc;
    uint64_t batch_stride_c;
    float alpha, beta;
};
static_assert(sizeof(AddParams) == 24, "as Metal lays it out");

struct Tile {
    int m, n, k, wm, wn;
};
const Tile TILES[] = {
    {32, 32, 16, 2, 2}, {64, 64, 16, 2, 2}, {64, 64, 16, 1, 2}, {64, 32, 32, 2, 2}, {32, 64, 16, 1, 2}};

enum Constant {
    HAS_BATCH = 10,
    USE_OUT_SOURCE = 100,
    DO_AXPBY = 110,
    ALIGN_M = 200,
    ALIGN_N = 201,
    ALIGN_K = 202,
    DO_GATHER = 300
};

bool constant(const Launch &launch, Constant which) {
    auto found = launch.code->constants.find(which);
    if (found == launch.code->constants.end())
        launch.code->fail("function constant " + std::to_string(which) + " is not set");
    return found->second;
}

void expect(const Launch &launch, bool holds, const char *what) {
    if (!holds) launch.code->fail(what);
}

// One product: the tensors, and the parameters of the kernel.
template <class T> struct Product {
    const Launch &launch;
    Tile tile;
    bool transposed_a, transposed_b;
    Params p;
    AddParams add{};
    bool out_source, axpby;
    View<T> a, b, c, d;

    Product(const Launch &launch, Tile tile, bool transposed_a, bool transposed_b)
        : launch(launch), tile(tile), transposed_a(transposed_a), transposed_b(transposed_b),
          p(scalar<Params>(launch, 4)), a(launch, 0), b(launch, 1), c(launch, 2), d(launch, 3) {
        out_source = constant(launch, USE_OUT_SOURCE);
        axpby = constant(launch, DO_AXPBY);
        if (out_source) add = scalar<AddParams>(launch, 5);
        expect(launch, !constant(launch, DO_GATHER), "gathering is not emulated");
        expect(launch, p.m > 0 && p.n > 0 && p.k > 0, "an empty product");
        expect(launch, !constant(launch, ALIGN_M) || p.m % tile.m == 0, "align_M, but M is no multiple of the tile's");
        expect(launch, !constant(launch, ALIGN_N) || p.n % tile.n == 0, "align_N, but N is no multiple of the tile's");
        expect(launch, !constant(launch, ALIGN_K) || p.k % tile.k == 0, "align_K, but K is no multiple of the tile's");
        expect(launch, p.k_iterations == p.k / tile.k, "gemm_k_iterations_aligned is not K by the tile's");
        expect(launch, p.tiles_m == (p.m + tile.m - 1) / tile.m && p.tiles_n == (p.n + tile.n - 1) / tile.n,
               "the number of tiles");
        expect(launch, p.lda >= (transposed_a ? p.m : p.k), "lda is less than a row of A");
        expect(launch, p.ldb >= (transposed_b ? p.k : p.n), "ldb is less than a row of B");
        expect(launch, p.ldd >= p.n, "ldd is less than a row of D");
        const Size &group = launch.group;
        expect(launch, group.width == 32 && int(group.height) == tile.wn && int(group.depth) == tile.wm,
               "a threadgroup of a wrong shape");
    }

    void run() const {
        for (size_t z = 0; z < launch.groups.depth; z++)
            for (size_t y = 0; y < launch.groups.height; y++)
                for (size_t x = 0; x < launch.groups.width; x++) {
                    int row = int(y << p.swizzle_log) + int(x & ((size_t(1) << p.swizzle_log) - 1)),
                        column = int(x >> p.swizzle_log);
                    if (column < p.tiles_n && row < p.tiles_m) block(z, row * tile.m, column * tile.n);
                }
    }

  private:
    // The offset of batch `z` of operand `which` (A, B, C).
    size_t batch(size_t z, size_t which, uint64_t stride) const {
        if (!constant(launch, HAS_BATCH)) return z * stride;
        View<int32_t> shape(launch, 6);
        View<uint64_t> strides(launch, 7);
        size_t at = 0;
        for (size_t d = p.batch_ndim; d-- > 0;) {
            at += z % shape.get(d) * strides.get(which * p.batch_ndim + d);
            z /= shape.get(d);
        }
        return at;
    }

    void block(size_t z, size_t row, size_t column) const {
        size_t a_offset = batch(z, 0, p.batch_stride_a), b_offset = batch(z, 1, p.batch_stride_b), d_offset = z * p.batch_stride_d;
        size_t c_offset = out_source ? batch(z, 2, add.batch_stride_c) : 0;
        size_t rows = std::min<size_t>(tile.m, p.m - row), columns = std::min<size_t>(tile.n, p.n - column);
        std::vector<float> right(columns), sums(rows * columns, 0);
        for (size_t k = 0; k < size_t(p.k); k++) {
            for (size_t j = 0; j < columns; j++)
                right[j] = float(b.get(b_offset + (transposed_b ? (column + j) * p.ldb + k : k * p.ldb + column + j)));
            for (size_t i = 0; i < rows; i++) {
                float left = float(a.get(a_offset + (transposed_a ? k * p.lda + row + i : (row + i) * p.lda + k)));
                for (size_t j = 0; j < columns; j++) sums[i * columns + j] += left * right[j];
            }
        }
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < columns; j++) {
                float sum = sums[i * columns + j];
                if (out_source) {
                    float old = float(c.get(c_offset + (row + i) * add.ldc + (column + j) * add.fdc));
                    sum = axpby ? sum * add.alpha + add.beta * old : sum + old;
                }
                d.set(d_offset + (row + i) * p.ldd + column + j, T(sum));
            }
        // A thread takes every `step`-th row of a tile. It compares the first with the number of rows, and then reads
        // all of them in C, even those past the last row, whose sums it does not store.
        size_t step = 8 * tile.wm;
        for (size_t i = rows; out_source && i < size_t(tile.m); i++)
            for (size_t j = 0; i % step < rows && j < columns; j++)
                c.get(c_offset + (row + i) * add.ldc + (column + j) * add.fdc);
    }
};

int all = [] {
    for_floats([](auto zero) {
        typedef decltype(zero) T;
        for (const Tile &tile : TILES)
            for (bool a : {false, true})
                for (bool b : {false, true}) {
                    std::string name = std::string("gemm_") + (a ? "t" : "n") + (b ? "t" : "n") + "_" +
                                       Type<T>::name() + "_" + Type<T>::name();
                    for (int number : {tile.m, tile.n, tile.k, tile.wm, tile.wn}) name += "_" + std::to_string(number);
                    kernel(name, "rrCwrCrr", [=](const Launch &launch) { Product<T>(launch, tile, a, b).run(); });
                }
    });
    return 0;
}();

} // namespace
