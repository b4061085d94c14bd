// Sums and other values that the threads of a block join.

// A running log-sum-exp: the largest term, and the sum of the exponentials relative to it.
struct Sum {
    float largest;
    float sum;

    FUNCTION void add(Sum other) {
        const float m = larger(largest, other.largest), reference = finite_or_zero(m);
        sum = sum * exponential(largest - reference) + other.sum * exponential(other.largest - reference);
        largest = m;
    }
    FUNCTION float value() const { return finite_or_zero(largest) + logarithm(sum); }
};

FUNCTION Sum shuffled(Sum x, int lane) { return {shuffled(x.largest, lane), shuffled(x.sum, lane)}; }

// The largest of some terms, and a sum over them.
struct Extent {
    float largest;
    float sum;

    FUNCTION void add(Extent other) {
        largest = larger(largest, other.largest);
        sum += other.sum;
    }
};

FUNCTION Extent shuffled(Extent x, int lane) { return {shuffled(x.largest, lane), shuffled(x.sum, lane)}; }
FUNCTION void join(LOCAL float &x, float other) { x += other; }
template <typename X> FUNCTION void join(LOCAL X &x, X other) { x.add(other); }

// Joins the values of the warp's threads in a fixed order; every thread gets the result.
template <typename X> FUNCTION X warp_reduce(X x) {
    for (int lane = 16; lane; lane >>= 1) join(x, shuffled(x, lane));
    return x;
}

// Joins the values of the block's threads in a fixed order; every thread gets the result. `warp_values` has room for a
// value of each warp.
template <typename X> FUNCTION X block_reduce(X x, uint tid, SHARED X *warp_values) {
    x = warp_reduce(x);
    if (tid % 32 == 0) warp_values[tid / 32] = x;
    synchronize();
    x = warp_values[0];
    for (int w = 1; w < WARPS; ++w) {
        const X other = warp_values[w];
        join(x, other);
    }
    synchronize();
    return x;
}
