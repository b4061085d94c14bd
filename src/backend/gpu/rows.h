// The row kernels of the mixture on GPUs: the computations on the logits between the products. The equations are at the
// head of cpu/objective/components.rs, whose names these kernels share.
//
// One source for two languages: cuda/mixture.cu and metal/mixture.metal include it, wrap these functions into kernels,
// and define first
//   GLOBAL, SHARED, LOCAL         the address spaces of the device, of a thread block, of a thread
//   FUNCTION                      the specifiers of a device function
//   i64                           the 64-bit integer
//   Half, Brain                   f16 and bf16, with `store`
//   load4, store4                 four consecutive elements in one access
//   minus_infinity, not_a_number, exponential, logarithm, hyperbolic_tangent, larger
//   shuffled(x, lane)             x of the thread whose lane in the warp is this thread's XOR `lane`
//   synchronize                   a barrier of the block that makes writes to SHARED visible
//
// A block has BLOCK threads, a warp 32; `block` and `tid` are the indices of the block and of the thread in it. A row
// is one component of one position. Rows of logits are f32, `stride` elements apart (a multiple of 4, so that every row
// is aligned to 16 bytes); only the first `vocab` elements are logits. Offsets have 64 bits. There are no atomics: the
// same input gives the same bits.

#define BLOCK 256
#define WARPS (BLOCK / 32)

// Targets that are no row of the weight: of an ignored position, of no id of the vocabulary, of another rank's id.
#define IGNORED (-1)
#define INVALID (-2)
#define ELSEWHERE (-3)

FUNCTION float finite_or_zero(float x) { return x == minus_infinity() ? 0.f : x; }
// Zero, not minus zero, for values that only rounding makes negative.
FUNCTION float not_negative(float x) { return x <= 0.f ? 0.f : x; }
// weight * x, and zero where the weight is zero, even for an infinite x or NaN.
FUNCTION float weighted(float weight, float x) { return weight == 0.f ? 0.f : weight * x; }

// The logits from the product, and the bias, scale and softcap to apply to them.
struct Logits {
    GLOBAL const float *z;    // [rows, stride]
    GLOBAL const float *bias; // [vocab], or null
    float scale;              // of the product and the bias
    float softcap;            // 0: none
    int vocab;
    i64 stride;
    int components;

    FUNCTION float at(GLOBAL const float *row, int v) const { return finish(row[v], v); }
    FUNCTION float finish(float logit, int v) const {
        if (bias) logit += bias[v];
        logit *= scale;
        return softcap == 0.f ? logit : softcap * hyperbolic_tangent(logit / softcap);
    }
    // The derivative of the softcap, from its result. The factor of the gradient contains the scale.
    FUNCTION float slope(float logit) const {
        return softcap == 0.f ? 1.f : 1.f - (logit / softcap) * (logit / softcap);
    }
};

// The numbers of an objective.
struct Terms {
    float z_loss;
    float unit; // another factor of the gradient of the logits, against underflow in f16
};

// The objective of each position of the chunk.
struct Objective {
    GLOBAL const int *ids;      // [positions]: the row of the target, or why there is none; with logits of its own it
                                // may be `vocab` or more
    GLOBAL const float *hard;   // [positions]: the mass of the target in q
    GLOBAL const float *scales; // [positions]: the scale of the gradient, up to a factor of all positions; null: 1
    GLOBAL const float *soft;   // [vocab] or [positions, soft_stride]: the rest of q; null: none
    GLOBAL const float *factor; // [1]: a factor of the gradient of the logits; null: 1
    i64 soft_stride;            // 0: the same for all positions
    Terms terms;

    FUNCTION GLOBAL const float *soft_of(i64 position) const { return soft ? soft + position * soft_stride : nullptr; }
    FUNCTION float scale(i64 position) const { return scales ? scales[position] : 1.f; }
    FUNCTION int id(i64 position) const { return ids ? ids[position] : IGNORED; }
};

// The log-priors and intermediate results of the rows of the chunk.
struct Rows {
    GLOBAL const float *log_priors; // [positions, K], or null for one component
    GLOBAL const float *own;        // [positions, K]: the target's logit, if it is an entry of its own; or null
    GLOBAL float *numbers;          // [7, count]: the values below
    i64 count;

    // The largest logit; zero if all are minus infinity.
    FUNCTION GLOBAL float &largest(i64 row) const { return numbers[row]; }
    // log sum_v exp(z_v - largest)
    FUNCTION GLOBAL float &log_sum(i64 row) const { return numbers[count + row]; }
    FUNCTION GLOBAL float &target_logit(i64 row) const { return numbers[2 * count + row]; }
    // The target's part of the mass; minus infinity marks a row without a gradient.
    FUNCTION GLOBAL float &hard_mass(i64 row) const { return numbers[3 * count + row]; }
    // R_k = sum_v q_v r_k(v)
    FUNCTION GLOBAL float &mass(i64 row) const { return numbers[4 * count + row]; }
    // The factor of softmax_k in the gradient.
    FUNCTION GLOBAL float &softmax_scale(i64 row) const { return numbers[5 * count + row]; }
    // sum_v |q_v| r_k(v), which is zero if no logit has a gradient: weights of both signs may cancel in the mass.
    FUNCTION GLOBAL float &size(i64 row) const { return numbers[6 * count + row]; }

    FUNCTION float joint(i64 row, float logit) const {
        return (log_priors ? log_priors[row] : 0.f) - log_sum(row) + (logit - largest(row));
    }
};

// What is scored of each position of the chunk, and the masses in q that the upstream gradients of the scores give to
// ids. With the tempered distribution log Q(v) = power log p(v) - log_norm, the scores are log Q of some candidates, the
// entropy of Q, and the logarithm of Q's mass outside the candidates.
struct Scored {
    GLOBAL const i64 *ids; // [positions, count]: the candidates; one outside the vocabulary has a NaN score
    GLOBAL float *numbers; // [positions, stride]: the values below
    i64 stride;            // 5 + (3 + K) count
    float power;           // the inverse of the temperature
    int count;             // of a position's candidates; 0 for other objectives
    i64 needs;             // 1: the entropy, 2: the mass outside

    FUNCTION bool needs_entropy() const { return needs & 1; }
    FUNCTION bool needs_outside() const { return needs & 2; }
    FUNCTION i64 columns() const { return count + 2; }
    // The candidate, or INVALID if it is not in the vocabulary.
    FUNCTION int id(i64 position, int candidate, int vocab) const {
        const i64 id = ids[position * count + candidate];
        return id >= 0 && id < vocab ? (int)id : INVALID;
    }
    // log sum_v p(v)^power; zero for a power of one
    FUNCTION GLOBAL float &log_norm(i64 position) const { return numbers[position * stride]; }
    // The mass of every id is Q(v) (offset + slope log Q(v)); if the mass outside is needed, that of every other id is
    // outside exp(log Q(v) - log_outside) more.
    FUNCTION GLOBAL float &offset(i64 position) const { return numbers[position * stride + 1]; }
    FUNCTION GLOBAL float &slope(i64 position) const { return numbers[position * stride + 2]; }
    FUNCTION GLOBAL float &outside(i64 position) const { return numbers[position * stride + 3]; }
    FUNCTION GLOBAL float &log_outside(i64 position) const { return numbers[position * stride + 4]; }
    // A candidate's log-probability in p is the sum of these two: the largest term, zero if it is minus infinity, and
    // the logarithm of the sum relative to it.
    FUNCTION GLOBAL float &largest(i64 position, int candidate) const {
        return numbers[position * stride + 5 + candidate];
    }
    FUNCTION GLOBAL float &log_sum(i64 position, int candidate) const {
        return numbers[position * stride + 5 + count + candidate];
    }
    // A candidate's mass besides that of every id; if the mass outside is needed, the first of equals has all of it
    FUNCTION GLOBAL float &mass(i64 position, int candidate) const {
        return numbers[position * stride + 5 + 2 * count + candidate];
    }
    // A candidate's logit in a component
    FUNCTION GLOBAL float &logit(i64 position, int candidate, int component) const {
        return numbers[position * stride + 5 + (3 + component) * count + candidate];
    }

    // A candidate's part of the mass of a component.
    FUNCTION float part(Rows rows, i64 position, int candidate, int component, int components) const {
        // A single component has all the responsibility, even for an impossible candidate.
        if (components == 1) return mass(position, candidate);
        const float joint = rows.joint(position * components + component, logit(position, candidate, component));
        const float share = exponential(joint - largest(position, candidate) - log_sum(position, candidate));
        return weighted(mass(position, candidate), share);
    }
};

// The masses of all ids of one position.
struct SoftMasses {
    GLOBAL const float *log_probs; // [vocab]; null: there are none
    GLOBAL const float *given;     // [vocab]; null: those of scores
    float power;
    float log_norm;
    float offset;
    float slope;
    float outside;
    float log_outside;

    FUNCTION float of(int v) const {
        if (given) return given[v];
        const float log_q = power * log_probs[v] - log_norm, q = exponential(log_q);
        // Both parts of the quotient may be below the smallest number.
        return q * (offset + slope * log_q) + weighted(outside, exponential(log_q - log_outside));
    }
    // Ids without mass contribute nothing, even if they are impossible.
    FUNCTION bool contributes(int v, float mass) const { return mass != 0.f && log_probs[v] != minus_infinity(); }
};

FUNCTION SoftMasses soft_masses(Logits logits, Objective objective, Scored scored, GLOBAL const float *log_probs,
                                i64 position) {
    GLOBAL const float *of_position = log_probs ? log_probs + position * logits.stride : nullptr;
    if (objective.soft || !log_probs) return {of_position, objective.soft_of(position), 1.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    return {of_position, nullptr, scored.power, scored.log_norm(position), scored.offset(position),
            scored.slope(position), scored.outside(position), scored.log_outside(position)};
}

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

FUNCTION float magnitude(float x) { return x < 0.f ? -x : x; }

struct Largest {
    float value;
    int at;

    // Ties go to the lower index; a NaN is larger than all numbers.
    FUNCTION void add(Largest other) {
        const bool is_nan = value != value, other_is_nan = other.value != other.value;
        const bool better = is_nan || other_is_nan ? other_is_nan && (!is_nan || other.at < at)
                                                   : other.value > value || (other.value == value && other.at < at);
        if (better) {
            value = other.value;
            at = other.at;
        }
    }
};

FUNCTION Sum shuffled(Sum x, int lane) { return {shuffled(x.largest, lane), shuffled(x.sum, lane)}; }
FUNCTION Largest shuffled(Largest x, int lane) { return {shuffled(x.value, lane), shuffled(x.at, lane)}; }
FUNCTION void join(LOCAL float &x, float other) { x += other; }
template <typename X> FUNCTION void join(LOCAL X &x, X other) { x.add(other); }

// Reduces the block's values in a fixed order; every thread gets the result.
template <typename X> FUNCTION X block_reduce(X x, uint tid, SHARED X *of_warps) {
    for (int lane = 16; lane; lane >>= 1) join(x, shuffled(x, lane));
    if (tid % 32 == 0) of_warps[tid / 32] = x;
    synchronize();
    x = of_warps[0];
    for (int w = 1; w < WARPS; ++w) {
        const X other = of_warps[w];
        join(x, other);
    }
    synchronize();
    return x;
}

// One block per row: the log-sum-exp, and the logit of the position's target.
FUNCTION void row_log_sum_exp(Logits logits, Objective objective, Rows rows, uint block, uint tid,
                              SHARED Sum *of_warps) {
    const i64 r = block;
    GLOBAL const float *row = logits.z + r * logits.stride;
    const int id = objective.id(r / logits.components);
    const int left_out = rows.own ? id : IGNORED;
    Sum sum = {minus_infinity(), 0.f};
    for (int first = tid * 4; first < logits.vocab; first += BLOCK * 4) {
        float x[4], m = sum.largest;
        load4(row + first, x);
        for (int i = 0; i < 4; ++i) {
            const int v = first + i;
            x[i] = v < logits.vocab && v != left_out ? logits.finish(x[i], v) : minus_infinity();
            m = larger(m, x[i]);
        }
        const float reference = finite_or_zero(m);
        float s = sum.sum * exponential(sum.largest - reference);
        for (int i = 0; i < 4; ++i) s += exponential(x[i] - reference);
        sum = {m, s};
    }
    sum = block_reduce(sum, tid, of_warps);
    if (tid == 0) {
        if (rows.own && id >= 0) sum.add({rows.own[r], 1.f});
        rows.largest(r) = finite_or_zero(sum.largest);
        rows.log_sum(r) = logarithm(sum.sum);
        if (objective.ids) rows.target_logit(r) = id < 0 ? 0.f : rows.own ? rows.own[r] : logits.at(row, id);
    }
}

// One thread per position: the part of the loss that depends on the target's logits, and the responsibilities.
FUNCTION void position_loss(Objective objective, Rows rows, GLOBAL float *nll, GLOBAL float *loss, int positions,
                            int components, uint block, uint tid) {
    const i64 t = (i64)block * BLOCK + tid;
    if (t >= positions) return;
    const int id = objective.id(t);
    float log_p = 0.f, hard = 0.f;
    Sum sum = {minus_infinity(), 0.f};
    const bool is_token = id >= 0 || id == ELSEWHERE;
    if (is_token) {
        hard = objective.hard[t];
        for (int k = 0; k < components; ++k) {
            sum.add({rows.joint(t * components + k, rows.target_logit(t * components + k)), 1.f});
        }
        log_p = sum.value();
    } else if (id == INVALID) {
        log_p = hard = not_a_number();
    }
    const float of_target = not_negative(-log_p);
    float of_position = weighted(hard, of_target), squares = 0.f;
    for (int k = 0; k < components; ++k) {
        const i64 r = t * components + k;
        // A single component has all the responsibility, even for an impossible target. A share is relative to the sum,
        // not to its logarithm, whose rounding error grows with its magnitude.
        const float part = exponential(rows.joint(r, rows.target_logit(r)) - finite_or_zero(sum.largest));
        const float share = components == 1 ? 1.f : part / sum.sum;
        const float mass = id == IGNORED ? 0.f : weighted(hard, share);
        rows.hard_mass(r) = mass;
        rows.mass(r) = mass;
        rows.size(r) = magnitude(mass);
        const float lse = rows.largest(r) + rows.log_sum(r);
        squares += lse * lse;
    }
    if (is_token && objective.terms.z_loss != 0.f) of_position += objective.terms.z_loss * squares / components;
    nll[t] = of_target;
    loss[t] = of_position;
}

// One block per position: log p(v) of every id, the soft part of the loss, and the most probable id; each is skipped if
// its pointer is null.
template <typename T>
FUNCTION void mixture_log_probs(Logits logits, Objective objective, Rows rows, GLOBAL T *log_probs, i64 out_stride,
                                GLOBAL float *loss, GLOBAL int *argmax, uint block, uint tid, SHARED float *of_warps,
                                SHARED Largest *largest_of_warps) {
    const i64 t = block;
    GLOBAL const float *position = logits.z + t * logits.components * logits.stride;
    GLOBAL const float *soft = objective.soft_of(t);
    float of_soft = 0.f;
    Largest best = {minus_infinity(), 0x7fffffff};
    for (int v = tid; v < logits.vocab; v += BLOCK) {
        Sum sum = {minus_infinity(), 0.f};
        for (int k = 0; k < logits.components; ++k) {
            const float term = rows.joint(t * logits.components + k, logits.at(position + k * logits.stride, v));
            if (logits.components == 1) sum = {term, 1.f};
            else sum.add({term, 1.f});
        }
        const float value = logits.components == 1 ? sum.largest : sum.value();
        // Rounding may make it positive.
        const float log_p = value > 0.f ? 0.f : value;
        if (log_probs) store(log_probs + t * out_stride + v, log_p);
        if (soft) of_soft += weighted(soft[v], -log_p);
        best.add({log_p, v});
    }
    if (loss && soft) {
        of_soft = block_reduce(of_soft, tid, of_warps);
        if (tid == 0 && (!objective.ids || objective.ids[t] != IGNORED)) loss[t] += of_soft;
    }
    if (argmax) {
        best = block_reduce(best, tid, largest_of_warps);
        if (tid == 0) argmax[t] = best.at;
    }
}

// One block per position: the k most probable ids and their log-probabilities, in descending order; ties go to the
// lower id, and a NaN comes first. Each scan finds the next rank among the ids that come after the last one found.
FUNCTION void top_k(GLOBAL const float *log_probs, i64 stride, int vocab, int k, GLOBAL int *ids,
                    GLOBAL float *id_log_probs, uint block, uint tid, SHARED Largest *of_warps) {
    const i64 t = block;
    GLOBAL const float *log_p = log_probs + t * stride;
    Largest last = {-minus_infinity(), -1};
    for (int i = 0; i < k; ++i) {
        Largest best = {minus_infinity(), 0x7fffffff};
        for (int v = tid; v < vocab; v += BLOCK) {
            const float x = log_p[v];
            const bool comes_after = x < last.value || (x == last.value && v > last.at);
            if (comes_after || x != x) best.add({x, v});
        }
        last = block_reduce(best, tid, of_warps);
        if (tid == 0) {
            ids[t * k + i] = last.at;
            id_log_probs[t * k + i] = last.value;
        }
    }
}

// One block per position: its scores, [positions, count + 2], and what of them the masses depend on. `log_probs` are
// those of every id; they are not read unless the distribution is tempered, or the entropy or the mass outside is needed.
// The mass outside sets the candidates' to minus infinity.
FUNCTION void position_scores(Logits logits, Rows rows, Scored scored, GLOBAL float *log_probs, GLOBAL float *scores,
                              uint block, uint tid, SHARED float *of_warps, SHARED Sum *sums_of_warps) {
    const i64 t = block;
    GLOBAL const float *position = logits.z + t * logits.components * logits.stride;
    GLOBAL float *log_p = log_probs + t * logits.stride;
    GLOBAL float *to = scores + t * scored.columns();
    float log_norm = 0.f;
    if (scored.power != 1.f) {
        Sum sum = {minus_infinity(), 0.f};
        for (int v = tid; v < logits.vocab; v += BLOCK) sum.add({scored.power * log_p[v], 1.f});
        log_norm = block_reduce(sum, tid, sums_of_warps).value();
    }
    float entropy = 0.f;
    if (scored.needs_entropy()) {
        for (int v = tid; v < logits.vocab; v += BLOCK) {
            const float log_q = scored.power * log_p[v] - log_norm, q = exponential(log_q);
            entropy -= q == 0.f ? 0.f : q * log_q;
        }
        entropy = block_reduce(entropy, tid, of_warps);
        // Rounding may move it beyond its bounds.
        const float most = logarithm((float)logits.vocab);
        entropy = entropy < 0.f ? 0.f : entropy > most ? most : entropy;
    }
    for (int i = tid; i < scored.count; i += BLOCK) {
        const int id = scored.id(t, i, logits.vocab);
        Sum sum = {minus_infinity(), 0.f};
        for (int k = 0; k < logits.components; ++k) {
            const float logit = id < 0 ? not_a_number() : logits.at(position + k * logits.stride, id);
            scored.logit(t, i, k) = logit;
            sum.add({rows.joint(t * logits.components + k, logit), 1.f});
        }
        scored.largest(t, i) = finite_or_zero(sum.largest);
        scored.log_sum(t, i) = logarithm(sum.sum);
        to[i] = 0.f - not_negative(log_norm - scored.power * sum.value());
    }
    float log_outside = 0.f;
    if (scored.needs_outside()) {
        // Each thread writes what it alone reads.
        for (int i = 0; i < scored.count; ++i) {
            const int id = scored.id(t, i, logits.vocab);
            if (id >= 0 && id % BLOCK == (int)tid) log_p[id] = minus_infinity();
        }
        Sum sum = {minus_infinity(), 0.f};
        for (int v = tid; v < logits.vocab; v += BLOCK) sum.add({scored.power * log_p[v], 1.f});
        const float log_sum = block_reduce(sum, tid, sums_of_warps).value();
        log_outside = 0.f - not_negative(log_norm - log_sum);
    }
    if (tid == 0) {
        scored.log_norm(t) = log_norm;
        to[scored.count] = entropy;
        to[scored.count + 1] = log_outside;
    }
}

// One thread per position: the masses that the upstream gradients of its scores, [positions, count + 2], give to ids up
// to the factor `power`, their scale, which is zero if there are none, and a magnitude that bounds them up to a
// logarithm.
FUNCTION void position_masses(Scored scored, GLOBAL const float *scores, GLOBAL const float *upstream,
                              GLOBAL float *scales, GLOBAL float *magnitudes, int positions, int vocab, uint block,
                              uint tid) {
    const i64 t = (i64)block * BLOCK + tid;
    if (t >= positions) return;
    GLOBAL const float *of_scores = upstream + t * scored.columns(), *own = scores + t * scored.columns();
    float of_log_probs = 0.f, size = 0.f;
    for (int i = 0; i < scored.count; ++i) {
        const bool is_id = scored.id(t, i, vocab) >= 0;
        scored.mass(t, i) = is_id ? -of_scores[i] : weighted(-of_scores[i], not_a_number());
        of_log_probs += of_scores[i];
        size += magnitude(of_scores[i]);
    }
    const float of_entropy = scored.needs_entropy() ? of_scores[scored.count] : 0.f;
    const float of_outside = scored.needs_outside() ? of_scores[scored.count + 1] : 0.f;
    of_log_probs += of_outside;
    size += magnitude(of_entropy) + magnitude(of_outside);
    // Without a temperature, log Q is log p, which no sum normalises.
    const float entropy = own[scored.count], log_outside = own[scored.count + 1];
    const float offset = scored.power == 1.f ? of_entropy : of_log_probs + weighted(of_entropy, entropy);
    for (int i = 0; scored.needs_outside() && i < scored.count; ++i) {
        bool is_first = true;
        for (int j = 0; j < i; ++j) is_first = is_first && scored.id(t, i, vocab) != scored.id(t, j, vocab);
        const float q = exponential(own[i]);
        if (is_first) scored.mass(t, i) += weighted(q, offset + weighted(of_entropy, own[i]));
    }
    scored.offset(t) = offset;
    scored.outside(t) = log_outside == minus_infinity() ? 0.f : -of_outside;
    scored.log_outside(t) = log_outside;
    scored.slope(t) = of_entropy;
    scales[t] = size == 0.f ? 0.f : 1.f;
    magnitudes[t] = size;
}

// One block per row: the part of the mass that soft targets and candidates have, sum_v soft_v r_k(v).
FUNCTION void row_soft_mass(Logits logits, Objective objective, Rows rows, Scored scored,
                            GLOBAL const float *log_probs, uint block, uint tid, SHARED float *of_warps) {
    const i64 r = block, t = r / logits.components;
    GLOBAL const float *row = logits.z + r * logits.stride;
    const SoftMasses soft = soft_masses(logits, objective, scored, log_probs, t);
    float mass = 0.f, size = 0.f;
    for (int v = tid; soft.log_probs && v < logits.vocab; v += BLOCK) {
        const float of_id = soft.of(v);
        if (!soft.contributes(v, of_id)) continue;
        const float share = exponential(rows.joint(r, logits.at(row, v)) - soft.log_probs[v]);
        mass += of_id * share;
        size += magnitude(of_id) * share;
    }
    for (int i = tid; i < scored.count; i += BLOCK) {
        const float part = scored.part(rows, t, i, r % logits.components, logits.components);
        mass += part;
        size += magnitude(part);
    }
    mass = block_reduce(mass, tid, of_warps);
    size = block_reduce(size, tid, of_warps);
    if (tid == 0 && (!objective.ids || objective.ids[t] != IGNORED)) {
        rows.mass(r) += mass;
        rows.size(r) += size;
    }
}

// One thread per position: the factors of its rows' gradients, the gradients of its log-priors and, unless null, of its
// target's own logits.
FUNCTION void position_scales(Objective objective, Rows rows, GLOBAL float *log_prior_gradient,
                              GLOBAL float *own_gradient, int positions, int components, uint block, uint tid) {
    const i64 t = (i64)block * BLOCK + tid;
    if (t >= positions) return;
    const float scale = objective.scale(t);
    for (int k = 0; k < components; ++k) {
        const i64 r = t * components + k;
        const float mass = rows.mass(r);
        log_prior_gradient[r] = weighted(scale, -mass);
        if (own_gradient) {
            const float of_target = exponential(rows.target_logit(r) - rows.largest(r) - rows.log_sum(r));
            own_gradient[r] = weighted(scale, weighted(mass, of_target) - rows.hard_mass(r));
        }
        const float lse = rows.largest(r) + rows.log_sum(r);
        const float softmax_scale = scale * (mass + 2.f * objective.terms.z_loss / components * lse);
        const bool ignored = objective.ids && objective.ids[t] == IGNORED;
        // The parts of the softmax and of the targets may cancel in their sum, but not in each logit.
        const bool is_zero = softmax_scale == 0.f && rows.size(r) == 0.f;
        const bool has_no_gradient = ignored || scale == 0.f || is_zero;
        rows.softmax_scale(r) = has_no_gradient ? 0.f : softmax_scale;
        if (has_no_gradient) rows.hard_mass(r) = minus_infinity();
    }
}

// What the gradient of one row's logits depends on.
struct RowGradient {
    float largest;
    float log_scale; // the joint log-probability at the largest logit
    float exp_scale;
    float scale;
    SoftMasses soft;

    // Of one logit, without the target's and the candidates' part and the slope of the softcap.
    FUNCTION float of(int v, float logit) const {
        const float relative = logit - largest;
        const float g = exp_scale * exponential(relative);
        const float mass = soft.log_probs ? soft.of(v) : 0.f;
        if (mass == 0.f || !soft.contributes(v, mass)) return g;
        return g - scale * mass * exponential(log_scale + relative - soft.log_probs[v]);
    }
};

// One block per row: the gradient of its logits, rounded to the type of the products. `gradient` may be the logits
// themselves if its type is f32.
template <typename T>
FUNCTION void row_gradient(Logits logits, Objective objective, Rows rows, Scored scored,
                           GLOBAL const float *log_probs, GLOBAL T *gradient, uint block, uint tid) {
    const i64 r = block, t = r / logits.components;
    GLOBAL const float *row = logits.z + r * logits.stride;
    GLOBAL T *to = gradient + r * logits.stride;
    const float hard_mass = rows.hard_mass(r);
    if (hard_mass == minus_infinity()) {
        for (int v = tid; v < logits.stride; v += BLOCK) store(to + v, 0.f);
        return;
    }
    const float unit = objective.factor ? objective.terms.unit * objective.factor[0] : objective.terms.unit;
    const float scale = unit * objective.scale(t), largest = rows.largest(r);
    const float exp_scale = unit * rows.softmax_scale(r) * exponential(-rows.log_sum(r));
    const RowGradient of_row = {largest, rows.joint(r, largest), exp_scale, scale,
                                soft_masses(logits, objective, scored, log_probs, t)};
    const int id = objective.id(t);
    for (int first = tid * 4; first < logits.stride; first += BLOCK * 4) {
        float z[4], g[4] = {0.f, 0.f, 0.f, 0.f};
        load4(row + first, z);
        for (int i = 0; i < 4; ++i) {
            const int v = first + i;
            if (v >= logits.vocab) break;
            // Its own logit is not among these.
            if (v == id && rows.own) continue;
            const float logit = logits.finish(z[i], v);
            g[i] = of_row.of(v, logit);
            if (v == id) g[i] -= scale * hard_mass;
            g[i] = g[i] == 0.f ? 0.f : g[i] * logits.slope(logit);
        }
        store4(to + first, g);
    }
    // The thread that wrote a candidate's element writes it again, rounded once. Equal candidates write the same sum.
    const int k = r % logits.components;
    for (int i = 0; i < scored.count; ++i) {
        const int v = scored.id(t, i, logits.vocab);
        if (v < 0 || v / 4 % BLOCK != (int)tid) continue;
        const float logit = scored.logit(t, i, k);
        float g = of_row.of(v, logit);
        for (int j = 0; j < scored.count; ++j) {
            if (scored.id(t, j, logits.vocab) == v) g -= scale * scored.part(rows, t, j, k, logits.components);
        }
        store(to + v, g == 0.f ? 0.f : g * logits.slope(logit));
    }
}

// One thread per position: the row of the target, which is among `rows` of the vocabulary's from `first` on, or why there is
// none, and its weights.
FUNCTION void position_targets(GLOBAL const i64 *targets, GLOBAL const float *position_weights,
                               GLOBAL const float *class_weights, i64 ignore_index, int ignores, float smoothing,
                               GLOBAL int *ids, GLOBAL float *hard, GLOBAL float *weights, GLOBAL float *counts,
                               int positions, i64 vocab, i64 first, int rows, uint block, uint tid) {
    const i64 t = (i64)block * BLOCK + tid;
    if (t >= positions) return;
    const i64 target = targets[t];
    const bool ignored = ignores && target == ignore_index;
    const bool is_id = !ignored && target >= 0 && target < vocab;
    const float class_weight = is_id && class_weights ? class_weights[target] : 1.f;
    const float weight = ignored ? 0.f : position_weights ? position_weights[t] : 1.f;
    const bool is_here = is_id && target >= first && target < first + rows;
    ids[t] = ignored ? IGNORED : is_here ? (int)(target - first) : is_id ? ELSEWHERE : INVALID;
    hard[t] = class_weight * (1.f - smoothing);
    weights[t] = weight;
    counts[t] = weight * class_weight;
}

// One thread per position: the scale of its gradients over `largest_upstream` times `largest_weight`.
FUNCTION void position_weighting(GLOBAL const float *weights, GLOBAL const float *upstream,
                                 GLOBAL const float *largest_upstream, GLOBAL const float *largest_weight,
                                 GLOBAL float *scales, int positions, uint block, uint tid) {
    const i64 t = (i64)block * BLOCK + tid;
    if (t >= positions) return;
    const float weight = weights[t] / *largest_weight;
    scales[t] = !upstream ? weight : *largest_upstream == 0.f ? 0.f : upstream[t] / *largest_upstream * weight;
}
