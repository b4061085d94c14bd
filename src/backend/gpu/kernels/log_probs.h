// The kernel of the mixture's log-probabilities.

// One block per position: computes log p(v) of every id, adds the soft part of the objective to `loss`, and finds the
// most probable id; each is left out if its pointer is null.
template <typename T>
FUNCTION void mixture_log_probs(Logits logits, Objective objective, Rows rows, GLOBAL T *log_probs, i64 out_stride,
                                GLOBAL float *loss, GLOBAL int *argmax, uint block, uint tid,
                                SHARED float *warp_values, SHARED Largest *warp_largest) {
    const i64 t = block;
    GLOBAL const float *position = logits.z + t * logits.components * logits.stride;
    GLOBAL const float *soft = objective.soft_row(t);
    float soft_loss = 0.f;
    Largest largest = {minus_infinity(), 0x7fffffff};
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
        if (soft) soft_loss += weighted(soft[v], -log_p);
        largest.add({log_p, v});
    }
    if (loss && soft) {
        soft_loss = block_reduce(soft_loss, tid, warp_values);
        if (tid == 0 && (!objective.ids || objective.ids[t] != IGNORED)) loss[t] += soft_loss;
    }
    if (argmax) {
        largest = block_reduce(largest, tid, warp_largest);
        if (tid == 0) argmax[t] = largest.id;
    }
}
