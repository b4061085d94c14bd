// The kernels of scores: the scores of each position, and the masses that their upstream gradients give to ids.

// One block per position: computes its scores, [positions, count + 3], and the values of `scored` that the masses
// depend on. `log_probs` are those of every id; the kernel reads them only if the distribution is tempered, or a score
// of the position itself is needed. For the mass outside, it sets those of the candidates to minus infinity.
FUNCTION void position_scores(Logits logits, Rows rows, Scored scored, GLOBAL float *log_probs, GLOBAL float *scores,
                              uint block, uint tid, SHARED float *warp_values, SHARED Sum *warp_sums) {
    const i64 t = block;
    GLOBAL const float *position = logits.z + t * logits.components * logits.stride;
    GLOBAL float *log_p = log_probs + t * logits.stride;
    GLOBAL float *to = scores + t * scored.columns();
    float log_norm = 0.f;
    if (scored.power != 1.f) {
        Sum sum = {minus_infinity(), 0.f};
        for (int v = tid; v < logits.vocab; v += BLOCK) sum.add({scored.power * log_p[v], 1.f});
        log_norm = block_reduce(sum, tid, warp_sums).value();
    }
    float entropy = 0.f;
    if (scored.needs_entropy()) {
        for (int v = tid; v < logits.vocab; v += BLOCK) {
            const float log_q = scored.power * log_p[v] - log_norm, q = exponential(log_q);
            entropy -= q == 0.f ? 0.f : q * log_q;
        }
        entropy = block_reduce(entropy, tid, warp_values);
        // Rounding may move it beyond its bounds.
        const float most = logarithm((float)logits.vocab);
        entropy = entropy < 0.f ? 0.f : entropy > most ? most : entropy;
    }
    float log_collision = 0.f;
    if (scored.needs_collision()) {
        Sum sum = {minus_infinity(), 0.f};
        for (int v = tid; v < logits.vocab; v += BLOCK) sum.add({2.f * scored.power * log_p[v], 1.f});
        const float log_squares = block_reduce(sum, tid, warp_sums).value();
        log_collision = 0.f - not_negative(2.f * log_norm - log_squares);
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
        const float log_sum = block_reduce(sum, tid, warp_sums).value();
        log_outside = 0.f - not_negative(log_norm - log_sum);
    }
    if (tid == 0) {
        scored.log_norm(t) = log_norm;
        to[scored.count] = entropy;
        to[scored.count + 1] = log_outside;
        to[scored.count + 2] = log_collision;
    }
}

// One thread per position: computes the masses that the upstream gradients of its scores, [positions, count + 3], give
// to ids, up to the factor `power`; their scale, which is zero if no score has an upstream gradient; and the sum of the
// gradients' absolute values, which bounds the masses up to a logarithm.
FUNCTION void position_masses(Scored scored, GLOBAL const float *scores, GLOBAL const float *upstream,
                              GLOBAL float *scales, GLOBAL float *mass_bounds, int positions, int vocab, uint block,
                              uint tid) {
    const i64 t = (i64)block * BLOCK + tid;
    if (t >= positions) return;
    GLOBAL const float *gradients = upstream + t * scored.columns(), *values = scores + t * scored.columns();
    float log_prob_gradients = 0.f, mass_bound = 0.f;
    for (int i = 0; i < scored.count; ++i) {
        const bool is_id = scored.id(t, i, vocab) >= 0;
        scored.mass(t, i) = is_id ? -gradients[i] : weighted(-gradients[i], not_a_number());
        log_prob_gradients += gradients[i];
        mass_bound += absolute(gradients[i]);
    }
    const float entropy_gradient = scored.needs_entropy() ? gradients[scored.count] : 0.f;
    const float outside_gradient = scored.needs_outside() ? gradients[scored.count + 1] : 0.f;
    const float collision_gradient = scored.needs_collision() ? gradients[scored.count + 2] : 0.f;
    log_prob_gradients += outside_gradient;
    // The derivatives of the score by all log Q(v) add up to two.
    log_prob_gradients += 2.f * collision_gradient;
    mass_bound += absolute(entropy_gradient) + absolute(outside_gradient) + 2.f * absolute(collision_gradient);
    // With a power of one, log Q is log p, which no sum normalises.
    const float entropy = values[scored.count], log_outside = values[scored.count + 1];
    const float collision = -2.f * collision_gradient, log_collision = values[scored.count + 2];
    const float offset =
        scored.power == 1.f ? entropy_gradient : log_prob_gradients + weighted(entropy_gradient, entropy);
    for (int i = 0; scored.needs_outside() && i < scored.count; ++i) {
        bool is_first = true;
        for (int j = 0; j < i; ++j) is_first = is_first && scored.id(t, i, vocab) != scored.id(t, j, vocab);
        const float q = exponential(values[i]);
        const float collision_mass = weighted(collision, exponential(2.f * values[i] - log_collision));
        if (is_first) scored.mass(t, i) += weighted(q, offset + weighted(entropy_gradient, values[i])) + collision_mass;
    }
    scored.offset(t) = offset;
    scored.outside(t) = log_outside == minus_infinity() ? 0.f : -outside_gradient;
    scored.log_outside(t) = log_outside;
    scored.slope(t) = entropy_gradient;
    scored.collision(t) = collision;
    scored.log_collision(t) = log_collision;
    scales[t] = mass_bound == 0.f ? 0.f : 1.f;
    mass_bounds[t] = mass_bound;
}
