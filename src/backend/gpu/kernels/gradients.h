// The kernels of gradients: the soft masses of each row, the factors of its gradient, and the gradient of its logits.

// The soft masses of one position, which all ids have.
struct SoftMasses {
    GLOBAL const float *log_probs; // [vocab]; null: there are none
    GLOBAL const float *given;     // [vocab]; null: the masses follow from the scores
    float power;
    float log_norm;
    float offset;
    float slope;
    float outside;
    float log_outside;
    float collision;
    float log_collision;

    FUNCTION float mass(int v) const {
        if (given) return given[v];
        const float log_q = power * log_probs[v] - log_norm, q = exponential(log_q);
        // Numerator and denominator of Q(v) / Q(outside) may both be below the smallest number, as may those of the
        // share Q(v)^2 / sum_u Q(u)^2.
        return q * (offset + slope * log_q) + weighted(outside, exponential(log_q - log_outside)) +
               weighted(collision, exponential(2.f * log_q - log_collision));
    }
    // Ids without mass contribute nothing, even if they are impossible.
    FUNCTION bool contributes(int v, float mass) const { return mass != 0.f && log_probs[v] != minus_infinity(); }
};

// The soft masses of a position: those of the objective, if it has any; otherwise, those of its scores.
FUNCTION SoftMasses soft_masses(Logits logits, Objective objective, Scored scored, GLOBAL const float *log_probs,
                                i64 position) {
    GLOBAL const float *log_prob_row = log_probs ? log_probs + position * logits.stride : nullptr;
    if (objective.soft || !log_probs) {
        return {log_prob_row, objective.soft_row(position), 1.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    }
    return {log_prob_row, nullptr, scored.power, scored.log_norm(position), scored.offset(position),
            scored.slope(position), scored.outside(position), scored.log_outside(position),
            scored.collision(position), scored.log_collision(position)};
}

// One block per row: adds to the mass of the row what soft masses and candidates have of it, sum_v q_v r_k(v).
FUNCTION void row_soft_mass(Logits logits, Objective objective, Rows rows, Scored scored,
                            GLOBAL const float *log_probs, uint block, uint tid, SHARED float *warp_values) {
    const i64 r = block, t = r / logits.components;
    GLOBAL const float *row = logits.z + r * logits.stride;
    const SoftMasses soft = soft_masses(logits, objective, scored, log_probs, t);
    float mass = 0.f, absolute_mass = 0.f;
    for (int v = tid; soft.log_probs && v < logits.vocab; v += BLOCK) {
        const float soft_mass = soft.mass(v);
        if (!soft.contributes(v, soft_mass)) continue;
        const float share = exponential(rows.joint(r, logits.at(row, v)) - soft.log_probs[v]);
        mass += soft_mass * share;
        absolute_mass += absolute(soft_mass) * share;
    }
    for (int i = tid; i < scored.count; i += BLOCK) {
        const float candidate_mass = scored.component_mass(rows, t, i, r % logits.components, logits.components);
        mass += candidate_mass;
        absolute_mass += absolute(candidate_mass);
    }
    mass = block_reduce(mass, tid, warp_values);
    absolute_mass = block_reduce(absolute_mass, tid, warp_values);
    if (tid == 0 && (!objective.ids || objective.ids[t] != IGNORED)) {
        rows.mass(r) += mass;
        rows.absolute_mass(r) += absolute_mass;
    }
}

// One thread per row: computes the factor of its gradient, the gradient of its log-prior and, unless the pointer is
// null, that of its own target's logit. `gradient_factor` [1] is a factor of both.
FUNCTION void log_prior_gradients(Objective objective, Rows rows, GLOBAL float *log_prior_gradient,
                                  GLOBAL float *own_gradient, GLOBAL const float *gradient_factor, i64 count,
                                  int components, uint block, uint tid) {
    const i64 r = (i64)block * BLOCK + tid, t = r / components;
    if (r >= count) return;
    const float scale = objective.scale(t), mass = rows.mass(r);
    log_prior_gradient[r] = weighted(scale, -mass) * gradient_factor[0];
    if (own_gradient) {
        const float target_softmax = exponential(rows.target_logit(r) - rows.largest(r) - rows.log_sum(r));
        own_gradient[r] = weighted(scale, weighted(mass, target_softmax) - rows.hard_mass(r)) * gradient_factor[0];
    }
    const float lse = rows.largest(r) + rows.log_sum(r);
    const float softmax_scale = scale * (mass + 2.f * objective.terms.z_loss / components * lse);
    const bool is_ignored = objective.ids && objective.ids[t] == IGNORED;
    // The parts of the softmax and of the targets may cancel in their sum, but not in each logit.
    const bool is_zero = softmax_scale == 0.f && rows.absolute_mass(r) == 0.f;
    const bool has_no_gradient = is_ignored || scale == 0.f || is_zero;
    rows.softmax_scale(r) = has_no_gradient ? 0.f : softmax_scale;
    if (has_no_gradient) rows.hard_mass(r) = minus_infinity();
}

// What the gradient of one row's logits depends on.
struct RowFactors {
    float largest;
    float log_scale; // the joint log-probability at the largest logit
    float exp_scale;
    float scale;
    SoftMasses soft;

    // The gradient of one logit from the softmax and the soft masses: target, candidates and the slope of the function
    // are left to the caller.
    FUNCTION float gradient(int v, float logit) const {
        const float relative = logit - largest;
        const float g = exp_scale * exponential(relative);
        const float mass = soft.log_probs ? soft.mass(v) : 0.f;
        if (mass == 0.f || !soft.contributes(v, mass)) return g;
        return g - scale * mass * exponential(log_scale + relative - soft.log_probs[v]);
    }
};

// The exponential for results of type T: one in half precision may be off by more than the last bit of f32.
template <typename T> FUNCTION float exponential_for(float x) { return fast_exponential(x); }
template <> FUNCTION float exponential_for<float>(float x) { return exponential(x); }

// One block per row: computes the same as `row_gradient` where only targets have mass and the logits have no function.
template <typename T>
FUNCTION void row_target_gradient(Logits logits, Objective objective, Rows rows, GLOBAL T *gradient, uint block,
                                  uint tid) {
    const i64 r = block, t = r / logits.components;
    GLOBAL const float *row = logits.z + r * logits.stride;
    GLOBAL T *to = gradient + r * logits.stride;
    const float hard_mass = rows.hard_mass(r);
    const bool has_gradient = hard_mass != minus_infinity();
    const float unit = objective.unit();
    const float largest = rows.largest(r), exp_scale = unit * rows.softmax_scale(r) * exponential(-rows.log_sum(r));
    const int id = objective.id(t);
    const bool has_target = has_gradient && id >= 0 && id < logits.vocab && id / 4 % BLOCK == (int)tid;
    // A gradient in f32 may replace the logits.
    const float target_logit = has_target ? logits.at(row, id) : 0.f;
    for (int first = tid * 4; first < logits.stride; first += STEP) {
        float g[4 * PARTS];
        for (int part = 0; part < PARTS; ++part) logits.load(row, first + part * BLOCK * 4, g + 4 * part);
        for (int part = 0; part < PARTS; ++part) {
            const int v = first + part * BLOCK * 4;
            for (int i = 0; i < 4; ++i) {
                const float relative = v + i < logits.vocab ? logits.finish(g[4 * part + i], v + i) - largest : 0.f;
                const float value = exp_scale * exponential_for<T>(relative);
                g[4 * part + i] = has_gradient && v + i < logits.vocab ? value : 0.f;
            }
            if (v < logits.stride) store4(to + v, g + 4 * part);
        }
    }
    // The thread that wrote the target's element writes it again. The logit of an own target is not among these.
    if (has_target) {
        const float g = exp_scale * exponential_for<T>(target_logit - largest) - unit * objective.scale(t) * hard_mass;
        store(to + id, rows.own_logits ? 0.f : g);
    }
}

// One block per row: computes the gradient of its logits, rounded to the type of the products. `gradient` may be the
// logits themselves if its type is f32.
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
    const float unit = objective.unit();
    const float scale = unit * objective.scale(t), largest = rows.largest(r);
    const float exp_scale = unit * rows.softmax_scale(r) * exponential(-rows.log_sum(r));
    const RowFactors factors = {largest, rows.joint(r, largest), exp_scale, scale,
                                soft_masses(logits, objective, scored, log_probs, t)};
    const int id = objective.id(t);
    for (int first = tid * 4; first < logits.stride; first += BLOCK * 4) {
        float z[4], g[4] = {0.f, 0.f, 0.f, 0.f};
        logits.load(row, first, z);
        for (int i = 0; i < 4; ++i) {
            const int v = first + i;
            if (v >= logits.vocab) break;
            const float logit = logits.finish(z[i], v);
            g[i] = factors.gradient(v, logit);
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
        float g = factors.gradient(v, logit);
        for (int j = 0; j < scored.count; ++j) {
            if (scored.id(t, j, logits.vocab) == v) {
                g -= scale * scored.component_mass(rows, t, j, k, logits.components);
            }
        }
        store(to + v, g == 0.f ? 0.f : g * logits.slope(logit));
    }
}
