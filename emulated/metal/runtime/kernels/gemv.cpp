// gemv.metal: a matrix, or its transpose, times a vector.
#include "kernel.h"

namespace {

const struct Tile {
    bool transposed;
    int bm, bn, sm, sn, tm, tn;
} TILES[] = {
    {false, 1, 8, 1, 32, 4, 4}, {false, 1, 8, 1, 32, 1, 4}, {false, 1, 1, 8, 4, 4, 4},  {false, 1, 1, 8, 4, 1, 4},
    {false, 4, 1, 1, 32, 1, 4}, {false, 4, 1, 1, 32, 4, 4}, {false, 8, 1, 1, 32, 4, 4}, {true, 1, 2, 8, 4, 4, 1},
    {true, 1, 2, 8, 4, 4, 4},   {true, 1, 4, 8, 4, 4, 4},   {true, 1, 16, 8, 4, 4, 4},  {true, 1, 16, 4, 8, 4, 4},
};

// matrix, vector, bias, output, length of the vector, of the output, the matrix's row stride, alpha, beta, then those
// of batches: number of dimensions, shape, strides of the vector, the matrix and the bias; stride of the bias.
template <class T> void gemv(const std::string &name, Tile tile, bool axpby) {
    kernel(name, axpby ? "rrrwrrrrrrrrrrr" : "rr.wrrrrrrrrrrr", [tile, axpby](const Launch &launch) {
        View<T> matrix(launch, 0), vector(launch, 1), bias(launch, 2), output(launch, 3);
        size_t inner = scalar<int32_t>(launch, 4), outer = scalar<int32_t>(launch, 5),
               stride = scalar<int32_t>(launch, 6);
        float alpha = scalar<float>(launch, 7), beta = scalar<float>(launch, 8);
        size_t vector_stride = scalar<int64_t>(launch, 11), matrix_stride = scalar<int64_t>(launch, 12);
        size_t bias_batch_stride = scalar<int64_t>(launch, 13), bias_stride = scalar<int32_t>(launch, 14);
        size_t each = tile.transposed ? tile.bn * tile.sn * tile.tn : tile.bm * tile.sm * tile.tm;
        const Size &group = launch.group;
        if (group.width != 32 || group.height != size_t(tile.bn) || group.depth != size_t(tile.bm))
            launch.code->fail("a threadgroup of a wrong shape");
        if (launch.groups.width * each < outer) launch.code->fail("too few threadgroups");
        for (size_t batch = 0; batch < launch.groups.depth; batch++) {
            for (size_t i = 0; i < outer; i++) {
                float sum = 0;
                for (size_t k = 0; k < inner; k++) {
                    size_t at = tile.transposed ? k * stride + i : i * stride + k;
                    sum += float(matrix.get(batch * matrix_stride + at)) * float(vector.get(batch * vector_stride + k));
                }
                if (axpby) sum = alpha * sum + beta * float(bias.get(batch * bias_batch_stride + i * bias_stride));
                output.set(batch * outer + i, T(sum));
            }
        }
    });
}

int all = [] {
    for (const Tile &tile : TILES)
        for (bool axpby : {false, true}) {
            auto name = [&](const char *type) {
                auto number = [](int n) { return std::to_string(n); };
                return std::string(tile.transposed ? "gemv_t_" : "gemv_") + type + "_bm" + number(tile.bm) + "_bn" +
                       number(tile.bn) + "_sm" + number(tile.sm) + "_sn" + number(tile.sn) + "_tm" + number(tile.tm) +
                       "_tn" + number(tile.tn) + "_nc0_axpby" + number(axpby);
            };
            gemv<float>(name("float32"), tile, axpby);
            gemv<Half>(name("float16"), tile, axpby);
            gemv<Bfloat>(name("bfloat16"), tile, axpby);
        }
    return 0;
}();

} // namespace
