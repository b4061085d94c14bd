// The matrix products of cuBLAS that candle and mos-head call. Their parameters are checked as cuBLAS checks them, and
// what cuBLAS would not notice ends the process; the products are computed in f32, or in f64.
#include <cstring>
#include <limits>
#include <set>

#include "driver.h"
namespace emulated {
#include "../../../tests/gpu_host/numbers.h"
}

using namespace emulated;

typedef int Status;
enum { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };
enum Compute { IN_F16 = 64, IN_F32 = 68, IN_F32_BY_F16 = 74, IN_F32_BY_BF16 = 75, IN_F32_BY_TF32 = 77, IN_F64 = 70 };

struct Handle {
    void *stream = nullptr;
    bool factors_on_device = false;
    // Every product may write the workspace of its handle.
    Resource workspace{"the workspace of a cuBLAS handle", {}, {}};
};
static auto &handles = *new std::set<Handle *>;

static size_t size_of(int type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

static double load(int type, const void *at) {
    switch (type) {
    case F32: return *static_cast<const float *>(at);
    case F64: return *static_cast<const double *>(at);
    case F16: return *static_cast<const Half *>(at);
    default: return *static_cast<const Bfloat *>(at);
    }
}
static void store(int type, void *at, double value) {
    switch (type) {
    case F32: *static_cast<float *>(at) = float(value); break;
    case F64: *static_cast<double *>(at) = value; break;
    case F16: *static_cast<Half *>(at) = Half(float(value)); break;
    default: *static_cast<Bfloat *>(at) = Bfloat(float(value));
    }
}

// A column-major matrix in the device's memory.
struct Matrix {
    uintptr_t address;
    int type, rows, columns, stride;

    uintptr_t at(int row, int column) const { return address + (size_t(column) * stride + row) * size_of(type); }
    bool overlaps(const Matrix &other) const {
        return rows && columns && other.rows && other.columns && address < other.at(other.rows, other.columns - 1) &&
               other.address < at(rows, columns - 1);
    }
    void use(bool writes) const {
        for (int j = 0; j < columns; ++j) emulated::use(at(0, j), rows * size_of(type), writes);
    }
};

static bool supports(int type, int out, int compute) {
    switch (compute) {
    case IN_F64: return type == F64 && out == F64;
    case IN_F16: return type == F16 && out == F16;
    case IN_F32: return type != F64 && (out == type || out == F32);
    case IN_F32_BY_F16:
    case IN_F32_BY_BF16:
    case IN_F32_BY_TF32: return type == F32 && out == F32;
    default: return false;
    }
}

// The number of terms of a sum that are added one after another; cuBLAS splits long sums, too.
static const int TERMS = 512;

// Computes out = alpha a b + beta out, where the operands are transposed or not.
template <typename Sum>
static void multiply(Sum alpha, const Matrix &a, bool transpose_a, const Matrix &b, bool transpose_b, Sum beta,
                     const Matrix &out) {
    const int terms = transpose_a ? a.rows : a.columns;
    // The left operand, column by column.
    std::vector<Sum> left(size_t(out.rows) * terms), sums(out.rows), part(out.rows);
    for (int p = 0; p < terms; ++p)
        for (int i = 0; i < out.rows; ++i)
            left[size_t(p) * out.rows + i] = Sum(load(a.type, (void *)(transpose_a ? a.at(p, i) : a.at(i, p))));
    for (int j = 0; j < out.columns; ++j) {
        std::fill(sums.begin(), sums.end(), Sum(0));
        for (int first = 0; first < terms; first += TERMS) {
            std::fill(part.begin(), part.end(), Sum(0));
            for (int p = first; p < std::min(terms, first + TERMS); ++p) {
                const Sum factor = Sum(load(b.type, (void *)(transpose_b ? b.at(j, p) : b.at(p, j))));
                const Sum *column = left.data() + size_t(p) * out.rows;
                for (int i = 0; i < out.rows; ++i) part[i] += column[i] * factor;
            }
            for (int i = 0; i < out.rows; ++i) sums[i] += part[i];
        }
        for (int i = 0; i < out.rows; ++i) {
            void *at = (void *)out.at(i, j);
            store(out.type, at, alpha * sums[i] + (beta == 0 ? 0 : beta * Sum(load(out.type, at))));
        }
    }
}

// A factor, which must be where the handle's mode says.
static double factor(const Handle &handle, const void *at, int compute) {
    const int type = compute == IN_F64 ? F64 : compute == IN_F16 ? F16 : F32;
    if (handle.factors_on_device != is_device(uintptr_t(at)))
        die(handle.factors_on_device ? "a factor in the host's memory" : "a factor in the device's memory");
    if (handle.factors_on_device) use(uintptr_t(at), size_of(type), false);
    return load(type, at);
}

static Status gemm(Handle *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha,
                   const void *a, int type_a, int stride_a, long long next_a, const void *b, int type_b, int stride_b,
                   long long next_b, const void *beta, void *c, int type_c, int stride_c, long long next_c, int count,
                   int compute) {
    if (!handles.count(handle)) return NOT_INITIALIZED;
    const int rows_a = transpose_a ? k : m, rows_b = transpose_b ? n : k;
    if (m < 0 || n < 0 || k < 0 || count < 0 || transpose_a > 1 || transpose_b > 1 || stride_a < std::max(1, rows_a) ||
        stride_b < std::max(1, rows_b) || stride_c < std::max(1, m))
        return INVALID_VALUE;
    if (type_a != type_b || !supports(type_a, type_c, compute)) return NOT_SUPPORTED;
    if (uintptr_t(a) % size_of(type_a) || uintptr_t(b) % size_of(type_b) || uintptr_t(c) % size_of(type_c))
        die("a misaligned matrix");
    begin(stream_of(handle->stream), "a product of cuBLAS, " + std::to_string(m) + " by " + std::to_string(n) + " by " +
                                         std::to_string(k));
    handle->workspace.use(true);
    const auto name = [](int type) { return type == F64 ? "f64" : type == F32 ? "f32" : type == F16 ? "f16" : "bf16"; };
    const double by = factor(*handle, alpha, compute), kept = factor(*handle, beta, compute);
    emulated::count("product " + std::to_string(m) + " " + std::to_string(n) + " " + std::to_string(k) + " x" +
                    std::to_string(count) + " " + name(type_a) + " " + name(type_c) + " " + std::to_string(compute) +
                    (kept != 0 ? " adds" : ""));
    for (int i = 0; i < count; ++i) {
        const Matrix left{uintptr_t(a) + i * next_a * size_of(type_a), type_a, rows_a, transpose_a ? m : k, stride_a};
        const Matrix right{uintptr_t(b) + i * next_b * size_of(type_b), type_b, rows_b, transpose_b ? k : n, stride_b};
        const Matrix out{uintptr_t(c) + i * next_c * size_of(type_c), type_c, m, n, stride_c};
        if (out.overlaps(left) || out.overlaps(right)) die("the result overlaps an operand");
        left.use(false);
        right.use(false);
        if (kept != 0) out.use(false);
        out.use(true);
        if (is_counting()) continue;
        if (compute == IN_F64) multiply<double>(by, left, transpose_a, right, transpose_b, kept, out);
        else multiply<float>(float(by), left, transpose_a, right, transpose_b, float(kept), out);
    }
    return SUCCESS;
}

extern "C" {

Status cublasCreate_v2(Handle **made) {
    ENTER_LIBRARY(FAILED);
    handles.insert(*made = new Handle);
    return SUCCESS;
}
Status cublasDestroy_v2(Handle *handle) {
    RELEASE(FAILED);
    if (!handles.erase(handle)) die("a cuBLAS handle is destroyed twice");
    delete handle;
    return status;
}
Status cublasSetStream_v2(Handle *handle, void *stream) {
    ENTER_LIBRARY(FAILED);
    if (!handles.count(handle)) return NOT_INITIALIZED;
    handle->stream = stream;
    return SUCCESS;
}
Status cublasSetPointerMode_v2(Handle *handle, int mode) {
    ENTER_LIBRARY(FAILED);
    if (!handles.count(handle)) return NOT_INITIALIZED;
    handle->factors_on_device = mode == 1;
    return SUCCESS;
}
Status cublasSetMathMode(Handle *handle, int) {
    ENTER_LIBRARY(FAILED);
    return handles.count(handle) ? SUCCESS : NOT_INITIALIZED;
}

Status cublasGemmEx(Handle *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha,
                    const void *a, int type_a, int stride_a, const void *b, int type_b, int stride_b, const void *beta,
                    void *c, int type_c, int stride_c, int compute, int) {
    ENTER_LIBRARY(FAILED);
    return gemm(handle, transpose_a, transpose_b, m, n, k, alpha, a, type_a, stride_a, 0, b, type_b, stride_b, 0, beta,
                c, type_c, stride_c, 0, 1, compute);
}
Status cublasGemmStridedBatchedEx(Handle *handle, int transpose_a, int transpose_b, int m, int n, int k,
                                  const void *alpha, const void *a, int type_a, int stride_a, long long next_a,
                                  const void *b, int type_b, int stride_b, long long next_b, const void *beta, void *c,
                                  int type_c, int stride_c, long long next_c, int count, int compute, int) {
    ENTER_LIBRARY(FAILED);
    return gemm(handle, transpose_a, transpose_b, m, n, k, alpha, a, type_a, stride_a, next_a, b, type_b, stride_b,
                next_b, beta, c, type_c, stride_c, next_c, count, compute);
}
Status cublasDgemmStridedBatched(Handle *handle, int transpose_a, int transpose_b, int m, int n, int k,
                                 const double *alpha, const double *a, int stride_a, long long next_a, const double *b,
                                 int stride_b, long long next_b, const double *beta, double *c, int stride_c,
                                 long long next_c, int count) {
    ENTER_LIBRARY(FAILED);
    return gemm(handle, transpose_a, transpose_b, m, n, k, alpha, a, F64, stride_a, next_a, b, F64, stride_b, next_b,
                beta, c, F64, stride_c, next_c, count, IN_F64);
}
}
