// The kernels that prepare the targets and weights of all positions before the chunks, and weigh their losses after
// them.

// One thread per position: computes the row of the target, which is among the `row_count` ids of the vocabulary from
// `first_row` on, or why there is none; the mass of the target; the weight of the position; and what it adds to the
// denominator of the mean.
FUNCTION void position_targets(GLOBAL const i64 *targets, GLOBAL const float *position_weights,
                               GLOBAL const float *class_weights, i64 ignore_index, int has_ignore_index,
                               float smoothing, GLOBAL int *ids, GLOBAL float *hard, GLOBAL float *weights,
                               GLOBAL float *counts, int positions, i64 vocab, i64 first_row, int row_count,
                               uint block, uint tid) {
    const i64 t = (i64)block * BLOCK + tid;
    if (t >= positions) return;
    const i64 target = targets[t];
    const bool is_ignored = has_ignore_index && target == ignore_index;
    const bool is_id = !is_ignored && target >= 0 && target < vocab;
    const float class_weight = is_id && class_weights ? class_weights[target] : 1.f;
    const float weight = is_ignored ? 0.f : position_weights ? position_weights[t] : 1.f;
    const bool is_here = is_id && target >= first_row && target < first_row + row_count;
    ids[t] = is_ignored ? IGNORED : is_here ? (int)(target - first_row) : is_id ? ELSEWHERE : INVALID;
    hard[t] = class_weight * (1.f - smoothing);
    weights[t] = weight;
    counts[t] = weight * class_weight;
}

// One block: computes four scalars from all positions. The first is `count`, the denominator of the mean. The second is
// the factor of all gradients that the reduction gives: `constant_scale`, or for a mean the reciprocal of `count`, and
// zero if that is zero. The third is a bound on the magnitude of a position's weight, `class_bound` times the largest,
// or 1 in place of 0, by which others divide. The last is the product of these two.
FUNCTION void reduction_scales(GLOBAL const float *weights, GLOBAL const float *counts, GLOBAL const float *class_bound,
                               int is_mean, float constant_scale, GLOBAL float *scalars, int positions, uint tid,
                               SHARED Extent *warp_extents) {
    Extent extent = {0.f, 0.f};
    for (int t = tid; t < positions; t += BLOCK) extent.add({absolute(weights[t]), counts[t]});
    extent = block_reduce(extent, tid, warp_extents);
    if (tid != 0) return;
    const float mean_scale = extent.sum == 0.f ? 0.f : 1.f / extent.sum;
    const float bound = class_bound ? extent.largest * *class_bound : extent.largest;
    scalars[0] = extent.sum;
    scalars[1] = is_mean ? mean_scale : constant_scale;
    scalars[2] = bound == 0.f ? 1.f : bound;
    scalars[3] = scalars[1] * scalars[2];
}

// One block: multiplies the loss of each position by its weight, and computes the sum of these objectives. A position
// without weight has none, even if its loss is infinite or NaN. The two `values` are the mean, which is the sum
// divided by `count`, or zero if that is zero; and the sum.
FUNCTION void weigh_losses(GLOBAL const float *weights, GLOBAL const float *losses, GLOBAL const float *count,
                           GLOBAL float *objectives, GLOBAL float *values, int positions, uint tid,
                           SHARED float *warp_values) {
    float part = 0.f;
    for (int t = tid; t < positions; t += BLOCK) {
        const float objective = weighted(weights[t], losses[t]);
        objectives[t] = objective;
        part += objective;
    }
    part = block_reduce(part, tid, warp_values);
    if (tid != 0) return;
    values[0] = *count == 0.f ? 0.f : part / *count;
    values[1] = part;
}

// One thread per position: computes the scale of its gradients, divided by `common_scale` and by `largest_weight`.
FUNCTION void position_gradient_scales(GLOBAL const float *weights, GLOBAL const float *upstream,
                                       GLOBAL const float *common_scale, GLOBAL const float *largest_weight,
                                       GLOBAL float *scales, int positions, uint block, uint tid) {
    const i64 t = (i64)block * BLOCK + tid;
    if (t >= positions) return;
    const float weight = weights[t] / *largest_weight;
    scales[t] = !upstream ? weight : *common_scale == 0.f ? 0.f : upstream[t] / *common_scale * weight;
}
