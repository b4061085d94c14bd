// The order of ids, as in backend/ranking.rs: the more probable one comes first, and of equals the lower one. Here a
// NaN comes before all numbers, so that it is found.

// An id and its log-probability: the first of those that have been added.
struct Largest {
    float value;
    int id;

    FUNCTION bool precedes(Largest other) const {
        const bool is_nan = value != value, other_is_nan = other.value != other.value;
        return is_nan || other_is_nan ? is_nan && (!other_is_nan || id < other.id)
                                      : value > other.value || (value == other.value && id < other.id);
    }
    FUNCTION void add(Largest other) {
        if (other.precedes(*this)) {
            value = other.value;
            id = other.id;
        }
    }
};

FUNCTION Largest shuffled(Largest x, int lane) { return {shuffled(x.value, lane), shuffled(x.id, lane)}; }

// One block per position: finds the k most probable ids and their log-probabilities, in descending order. Each scan
// finds the first among the ids that come after the last one found; if there is a NaN, it finds the first NaN.
FUNCTION void top_k(GLOBAL const float *log_probs, i64 stride, int vocab, int k, GLOBAL int *ids,
                    GLOBAL float *id_log_probs, uint block, uint tid, SHARED Largest *warp_largest) {
    const i64 t = block;
    GLOBAL const float *log_p = log_probs + t * stride;
    Largest last = {-minus_infinity(), -1};
    for (int i = 0; i < k; ++i) {
        Largest next = {minus_infinity(), 0x7fffffff};
        for (int v = tid; v < vocab; v += BLOCK) {
            const float x = log_p[v];
            const bool comes_after = x < last.value || (x == last.value && v > last.id);
            if (comes_after || x != x) next.add({x, v});
        }
        last = block_reduce(next, tid, warp_largest);
        if (tid == 0) {
            ids[t * k + i] = last.id;
            id_log_probs[t * k + i] = last.value;
        }
    }
}
