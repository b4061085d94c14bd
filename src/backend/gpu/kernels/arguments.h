// The arguments that the row kernels share, and their constants and small functions. A row kernel computes on the
// logits of a chunk, between the matrix products. The equations are at the head of cpu/objective/components.rs, whose
// names the kernels share.
//
// The kernels have one source for two languages: cuda/mixture.cu includes all of these headers, and
// metal/mixture.metal those up to activation.h, in the order arguments.h, reductions.h, ranking.h, loss.h, log_probs.h,
// scores.h, gradients.h, targets.h, activation.h, columns.h, relative.h, and wraps their functions into kernels. Before
// that they define
//   GLOBAL, SHARED, LOCAL         the address spaces of the device, of a thread block, of a thread
//   FUNCTION                      the specifiers of a device function
//   i64                           the 64-bit integer
//   Half, Brain                   f16 and bf16, with `store` and `widened`, which f32 has too
//   load4, store4                 which access four consecutive elements at once
//   minus_infinity, not_a_number, exponential, fast_exponential, logarithm, hyperbolic_tangent, square_root,
//   larger
//   shuffled(x, lane)             x of the thread whose lane in the warp is this thread's XOR `lane`
//   synchronize                   a barrier of the block that makes writes to SHARED visible
//
// A block has BLOCK threads, a warp 32; `block` and `tid` are the indices of the block and of the thread in it. A row
// is one component of one position. Rows of logits are f32, `stride` elements apart (a multiple of 4, so that every row
// is aligned to 16 bytes); only the first `vocab` elements are logits. Offsets have 64 bits. There are no atomics: the
// same input gives the same bits.

#define BLOCK 256
#define WARPS (BLOCK / 32)

// A thread that passes over a row reads this many groups of four elements before it computes, BLOCK groups apart, so
// that enough reads are under way; a block then continues STEP elements later.
#define PARTS 2
#define STEP (BLOCK * 4 * PARTS)

// The targets that are no row of the weight: that of an ignored position, one outside the vocabulary, an id of another
// rank.
#define IGNORED (-1)
#define INVALID (-2)
#define ELSEWHERE (-3)

FUNCTION float finite_or_zero(float x) { return x == minus_infinity() ? 0.f : x; }
// Returns zero, not minus zero, for values that only rounding makes negative.
FUNCTION float not_negative(float x) { return x <= 0.f ? 0.f : x; }
// Returns weight * x, and zero where the weight is zero, even for an infinite x or NaN.
FUNCTION float weighted(float weight, float x) { return weight == 0.f ? 0.f : weight * x; }
FUNCTION float absolute(float x) { return x < 0.f ? -x : x; }

// The functions of the logits.
#define IDENTITY 0
#define SOFTCAP 1
#define SIGSOFTMAX 2

// The logits from the product, and the bias, scale and function to apply to them.
struct Logits {
    GLOBAL const float *z;    // [rows, stride]
    GLOBAL const float *bias; // [vocab], or null
    float scale;              // of the product and the bias
    float cap;                // of a softcap
    int function;             // IDENTITY, SOFTCAP or SIGSOFTMAX
    int vocab;
    i64 stride;
    int components;

    FUNCTION float at(GLOBAL const float *row, int v) const { return finish(row[v], v); }
    // Reads four elements of a row from `first` on; zero for those behind the vocabulary, which may not be written.
    FUNCTION void load(GLOBAL const float *row, int first, LOCAL float *x) const {
        if (first + 4 <= vocab) return load4(row + first, x);
        for (int i = 0; i < 4; ++i) x[i] = first + i < vocab ? row[first + i] : 0.f;
    }
    FUNCTION float finish(float logit, int v) const {
        if (bias) logit += bias[v];
        logit *= scale;
        if (function == SOFTCAP) return cap * hyperbolic_tangent(logit / cap);
        // logit + log sigma(logit)
        if (function == SIGSOFTMAX) {
            return (logit < 0.f ? 2.f * logit : logit) - logarithm(1.f + exponential(-absolute(logit)));
        }
        return logit;
    }
    // The derivative of the function, from its result. The factor of the gradient contains the scale.
    FUNCTION float slope(float logit) const {
        if (function == SOFTCAP) return 1.f - (logit / cap) * (logit / cap);
        if (function == SIGSOFTMAX) {
            // 1 + 1 / (1 + exp(u)) with exp(u) = (w + sqrt(w^2 + 4 w)) / 2; from 40 on, it is one to rounding.
            const float w = exponential(logit > 40.f ? 40.f : logit);
            return 1.f + 2.f / (2.f + w + square_root(w * (w + 4.f)));
        }
        return 1.f;
    }
};

// The numbers of an objective.
struct LossTerms {
    float z_loss;
    float unit; // another factor of the gradient of the logits, against underflow in f16
};

// The objective of each position of the chunk.
struct Objective {
    GLOBAL const int *ids;      // [positions]: the row of the target, or why there is none; that of an own target may be
                                // `vocab` or more
    GLOBAL const float *hard;   // [positions]: the mass of the target in q
    GLOBAL const float *scales; // [positions]: the scale of the gradient, up to a factor of all positions; null: 1
    GLOBAL const float *soft;   // [vocab] or [positions, soft_stride]: masses of all ids, which q adds; null: none
    GLOBAL const float *factor; // [1]: a factor of the gradient of the logits; null: 1
    i64 soft_stride;            // 0: the same masses for all positions
    LossTerms terms;

    FUNCTION GLOBAL const float *soft_row(i64 position) const { return soft ? soft + position * soft_stride : nullptr; }
    FUNCTION float scale(i64 position) const { return scales ? scales[position] : 1.f; }
    FUNCTION float unit() const { return factor ? terms.unit * factor[0] : terms.unit; }
    FUNCTION int id(i64 position) const { return ids ? ids[position] : IGNORED; }
};

// The log-priors and intermediate results of the rows of the chunk.
struct Rows {
    GLOBAL const float *log_priors; // [positions, K], or null for one component
    GLOBAL const float *own_logits; // [positions, K]: the logits of own targets, or null
    GLOBAL float *values;           // [9, count]: the values below
    i64 count;

    // The largest logit; zero if all are minus infinity.
    FUNCTION GLOBAL float &largest(i64 row) const { return values[row]; }
    // log sum_v exp(z_v - largest)
    FUNCTION GLOBAL float &log_sum(i64 row) const { return values[count + row]; }
    FUNCTION GLOBAL float &target_logit(i64 row) const { return values[2 * count + row]; }
    // The target's part of the mass; minus infinity marks a row without a gradient.
    FUNCTION GLOBAL float &hard_mass(i64 row) const { return values[3 * count + row]; }
    // R_k = sum_v q_v r_k(v)
    FUNCTION GLOBAL float &mass(i64 row) const { return values[4 * count + row]; }
    // The factor of softmax_k in the gradient.
    FUNCTION GLOBAL float &softmax_scale(i64 row) const { return values[5 * count + row]; }
    // sum_v |q_v| r_k(v), which is zero if no logit has a gradient: masses of both signs may cancel in R_k.
    FUNCTION GLOBAL float &absolute_mass(i64 row) const { return values[6 * count + row]; }
    // What the exponentials of the row are multiplied by to be its gradient (relative.h).
    FUNCTION GLOBAL float &factor(i64 row) const { return values[7 * count + row]; }
    // What the exponentials of the row are relative to, unless the largest logit is too far from it (relative.h); zero
    // unless it is chosen.
    FUNCTION GLOBAL float &reference(i64 row) const { return values[8 * count + row]; }

    // log pi_k + log p_k(v), from the logit of v.
    FUNCTION float joint(i64 row, float logit) const {
        return (log_priors ? log_priors[row] : 0.f) - log_sum(row) + (logit - largest(row));
    }
};

// The candidates of each position of the chunk, and the masses in q that the upstream gradients of the scores give to
// ids. With the tempered distribution log Q(v) = power log p(v) - log_norm, the scores are log Q of the candidates, the
// entropy of Q, the logarithm of Q's mass outside the candidates, and that of the collision probability sum_v Q(v)^2.
struct Scored {
    GLOBAL const i64 *candidates; // [positions, count]: ids; one outside the vocabulary has a NaN score
    GLOBAL float *values;         // [positions, stride]: the values below
    i64 stride;                   // 7 + (3 + K) count
    float power;                  // the inverse of the temperature
    int count;                    // of a position's candidates; 0 for other objectives
    i64 needs;                    // 1: the entropy, 2: the mass outside, 4: the collision probability

    FUNCTION bool needs_entropy() const { return needs & 1; }
    FUNCTION bool needs_outside() const { return needs & 2; }
    FUNCTION bool needs_collision() const { return needs & 4; }
    FUNCTION i64 columns() const { return count + 3; }
    // The id of a candidate, or INVALID if it is not in the vocabulary.
    FUNCTION int id(i64 position, int candidate, int vocab) const {
        const i64 id = candidates[position * count + candidate];
        return id >= 0 && id < vocab ? (int)id : INVALID;
    }
    // log sum_v p(v)^power; zero for a power of one
    FUNCTION GLOBAL float &log_norm(i64 position) const { return values[position * stride]; }
    // The mass of every id is Q(v) (offset + slope log Q(v)); if the mass outside is needed, that of every other id is
    // outside exp(log Q(v) - log_outside) more.
    FUNCTION GLOBAL float &offset(i64 position) const { return values[position * stride + 1]; }
    FUNCTION GLOBAL float &slope(i64 position) const { return values[position * stride + 2]; }
    FUNCTION GLOBAL float &outside(i64 position) const { return values[position * stride + 3]; }
    FUNCTION GLOBAL float &log_outside(i64 position) const { return values[position * stride + 4]; }
    // If the collision probability is needed, the mass of every id is collision exp(2 log Q(v) - log_collision) more.
    FUNCTION GLOBAL float &collision(i64 position) const { return values[position * stride + 5]; }
    FUNCTION GLOBAL float &log_collision(i64 position) const { return values[position * stride + 6]; }
    // A candidate's log-probability in p is the sum of these two: the largest term, zero if it is minus infinity, and
    // the logarithm of the sum relative to it.
    FUNCTION GLOBAL float &largest(i64 position, int candidate) const {
        return values[position * stride + 7 + candidate];
    }
    FUNCTION GLOBAL float &log_sum(i64 position, int candidate) const {
        return values[position * stride + 7 + count + candidate];
    }
    // The mass of a candidate besides that of every id. If the mass outside is needed, the first of equal candidates
    // has what the id has of it.
    FUNCTION GLOBAL float &mass(i64 position, int candidate) const {
        return values[position * stride + 7 + 2 * count + candidate];
    }
    // The logit of a candidate in a component.
    FUNCTION GLOBAL float &logit(i64 position, int candidate, int component) const {
        return values[position * stride + 7 + (3 + component) * count + candidate];
    }

    // What a candidate adds to the mass R_k of a component: its mass times the component's responsibility.
    FUNCTION float component_mass(Rows rows, i64 position, int candidate, int component, int components) const {
        // A single component has all the responsibility, even for an impossible candidate.
        if (components == 1) return mass(position, candidate);
        const float joint = rows.joint(position * components + component, logit(position, candidate, component));
        const float share = exponential(joint - largest(position, candidate) - log_sum(position, candidate));
        return weighted(mass(position, candidate), share);
    }
};
