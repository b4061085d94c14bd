// The kernels of a loss: the log-sum-exp of each row, and what the objective of each position has from its target.

// One block per row: computes the log-sum-exp of the row, and the logit of the position's target. An own target is an
// entry of the sum, in place of the id of the vocabulary that it equals.
FUNCTION void row_log_sum_exp(Logits logits, Objective objective, Rows rows, uint block, uint tid,
                              SHARED Sum *warp_sums) {
    const i64 r = block;
    GLOBAL const float *row = logits.z + r * logits.stride;
    const int id = objective.id(r / logits.components);
    const int left_out = rows.own_logits ? id : IGNORED;
    Sum sum = {minus_infinity(), 0.f};
    for (int first = tid * 4; first < logits.vocab; first += STEP) {
        float x[4 * PARTS], m = sum.largest;
        for (int part = 0; part < PARTS; ++part) logits.load(row, first + part * BLOCK * 4, x + 4 * part);
        for (int i = 0; i < 4 * PARTS; ++i) {
            const int v = first + i / 4 * BLOCK * 4 + i % 4;
            x[i] = v < logits.vocab && v != left_out ? logits.finish(x[i], v) : minus_infinity();
            m = larger(m, x[i]);
        }
        const float reference = finite_or_zero(m);
        float s = sum.sum * exponential(sum.largest - reference);
        for (int i = 0; i < 4 * PARTS; ++i) s += exponential(x[i] - reference);
        sum = {m, s};
    }
    sum = block_reduce(sum, tid, warp_sums);
    if (tid == 0) {
        if (rows.own_logits && id >= 0) sum.add({rows.own_logits[r], 1.f});
        rows.largest(r) = finite_or_zero(sum.largest);
        rows.log_sum(r) = logarithm(sum.sum);
        if (objective.ids) {
            rows.target_logit(r) = id < 0 ? 0.f : rows.own_logits ? rows.own_logits[r] : logits.at(row, id);
        }
    }
}

// One warp per position: computes the negative log-likelihood of the target, the part of the objective that depends on
// the target's logits and the log-sum-exps, and the masses that the target gives to its rows.
FUNCTION void position_loss(Objective objective, Rows rows, GLOBAL float *nll, GLOBAL float *loss, int positions,
                            int components, uint block, uint tid) {
    const i64 t = (i64)block * WARPS + tid / 32;
    if (t >= positions) return;
    const int id = objective.id(t), lane = tid % 32;
    float log_p = 0.f, hard = 0.f;
    Sum sum = {minus_infinity(), 0.f};
    const bool is_token = id >= 0 || id == ELSEWHERE;
    if (is_token) {
        hard = objective.hard[t];
        for (int k = lane; k < components; k += 32) {
            sum.add({rows.joint(t * components + k, rows.target_logit(t * components + k)), 1.f});
        }
    }
    sum = warp_reduce(sum);
    if (is_token) log_p = sum.value();
    else if (id == INVALID) log_p = hard = not_a_number();
    const float target_nll = not_negative(-log_p);
    float squares = 0.f;
    for (int k = lane; k < components; k += 32) {
        const i64 r = t * components + k;
        // A single component has all the responsibility, even for an impossible target. A share is relative to the sum,
        // not to its logarithm, whose rounding error grows with its magnitude.
        const float target_logit = is_token ? rows.target_logit(r) : 0.f;
        const float term = exponential(rows.joint(r, target_logit) - finite_or_zero(sum.largest));
        const float share = components == 1 ? 1.f : term / sum.sum;
        const float mass = id == IGNORED ? 0.f : weighted(hard, share);
        rows.hard_mass(r) = mass;
        rows.mass(r) = mass;
        rows.absolute_mass(r) = absolute(mass);
        const float lse = rows.largest(r) + rows.log_sum(r);
        squares += lse * lse;
    }
    squares = warp_reduce(squares);
    if (lane != 0) return;
    float target_loss = weighted(hard, target_nll);
    if (is_token && objective.terms.z_loss != 0.f) target_loss += objective.terms.z_loss * squares / components;
    nll[t] = target_nll;
    loss[t] = target_loss;
}
