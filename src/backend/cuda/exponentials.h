// The kernels that make the exponentials of `row_exponentials` (gpu/kernels/relative.h) part of the first product, so
// that no logits are in memory but those of the first ids: it pays where contexts are so narrow that memory, and not
// the tensor cores, limits the product. Exponentials are computed as powers of two. The stride of `logits` is that of
// the exponentials.

// A block multiplies TILE rows of the contexts by TILE rows of the decoder, DEPTH of their elements at a time; STAGES
// pieces of the operands are on their way or in shared memory. A warp has 64 rows and 32 ids of the tile.
#define TILE 128
#define DEPTH 32
#define STAGES 3
// The 16-byte parts of a row of a piece.
#define PARTS_OF_PIECE (DEPTH / 8)
// The rows that the threads of a block copy at once, a part each.
#define ROWS_AT_ONCE (BLOCK / PARTS_OF_PIECE)
// Elements from one row of exponentials to the next in shared memory; lanes that write 8 rows meet no bank twice.
#define PITCH (TILE + 8)

#define LOG2_E 1.44269504f
#define LOG_2 0.69314718f

// The shared memory of a block.
union Tile {
    alignas(128) Brain pieces[STAGES][2][TILE * DEPTH];
    struct {
        Brain exponentials[TILE * PITCH];
        // The largest exponent of two of a row's ids in a warp, and the sum of the powers.
        Extent powers[4][TILE];
        float references[TILE], biases[TILE];
        int targets[TILE];
    } results;
};

// The element of a piece at which a part of a row begins. The parts of eight rows lie in different banks.
FUNCTION int part_at(int row, int part) { return row * DEPTH + (part ^ (row / 2 % 4)) * 8; }

// The number of tiles that the ids of a row are in.
FUNCTION int id_tiles(int vocab) { return (vocab + TILE - 1) / TILE; }

// The logit whose exponential is 2^exponent relative to a reference.
FUNCTION float logit_of(float exponent, float reference) { return reference + exponent * LOG_2; }

// One warp per row: chooses what the exponentials of the row are relative to, from the logits of the first `ids` ids.
FUNCTION void row_references(Logits logits, Rows rows, i64 stride, int ids, int count, uint block, uint tid) {
    const i64 r = (i64)block * WARPS + tid / 32;
    Extent extent = {minus_infinity(), 0.f};
    for (int v = tid % 32; v < ids && r < count; v += 32) {
        extent.add({logits.finish(logits.z[r * stride + v], v), 0.f});
    }
    const float largest = finite_or_zero(warp_reduce(extent).largest);
    if (tid % 32 == 0 && r < count) rows.reference(r) = exponential_reference(largest, 0.f);
}

// One block per tile, those of all rows side by side: computes the exponentials of the tile's logits relative to the
// rows' references, and from them, as powers of two, the logits of targets and `powers[count, tiles of ids]`. The
// operands have rows of `depth` elements, a multiple of 8, and the logits no function.
FUNCTION void product_exponentials(Logits logits, Objective objective, Rows rows, const Brain *contexts,
                                   const Brain *decoder, float *powers, Brain *exponentials, int count, int depth,
                                   uint block, uint tid, Tile &tile) {
    const int row_tiles = (count + TILE - 1) / TILE, steps = (depth + DEPTH - 1) / DEPTH;
    const int first_row = block % row_tiles * TILE, first_id = block / row_tiles * TILE;
    const int warp = tid / 32, lane = tid % 32, warp_row = warp / 4 * 64, warp_id = warp % 4 * 32;

    // This thread copies the same part of two rows of each operand.
    const int copied_row = tid / PARTS_OF_PIECE, copied_part = tid % PARTS_OF_PIECE;
    const int copied_at = part_at(copied_row, copied_part);
    const Brain *left_row = contexts + (i64)(first_row + copied_row) * depth + copied_part * 8;
    const Brain *right_row = decoder + (i64)(first_id + copied_row) * depth + copied_part * 8;
    const i64 next = (i64)ROWS_AT_ONCE * depth;
    bool has_left[2], has_right[2];
    for (int i = 0; i < 2; ++i) {
        has_left[i] = first_row + copied_row + i * ROWS_AT_ONCE < count;
        has_right[i] = first_id + copied_row + i * ROWS_AT_ONCE < logits.vocab;
    }
    int copied = 0, copied_stage = 0;
    const auto copy = [&]() {
        if (copied < steps) {
            const int k = copied * DEPTH;
            const bool is_inside = k + copied_part * 8 < depth;
            Brain(*to)[TILE * DEPTH] = tile.pieces[copied_stage];
            for (int i = 0; i < 2; ++i) {
                const int at = copied_at + i * ROWS_AT_ONCE * DEPTH;
                const bool is_left = has_left[i] && is_inside, is_right = has_right[i] && is_inside;
                copy_async(to[0] + at, is_left ? left_row + i * next + k : contexts, is_left);
                copy_async(to[1] + at, is_right ? right_row + i * next + k : decoder, is_right);
            }
        }
        commit_copies();
        ++copied;
        copied_stage = copied_stage + 1 == STAGES ? 0 : copied_stage + 1;
    };

    // What the results need of a row or of an id, read long before: by the first half of the threads and by the second.
    const int own_row = first_row + (int)tid, own_id = first_id + (int)tid - TILE;
    const float scale = logits.scale * LOG2_E;
    float reference_or_bias = minus_infinity();
    int own_target = -1;
    if (tid < TILE && own_row < count) {
        reference_or_bias = rows.reference(own_row);
        own_target = objective.id(own_row / logits.components) - first_id;
    } else if (tid >= TILE && own_id < logits.vocab) {
        reference_or_bias = logits.bias ? logits.bias[own_id] * scale : 0.f;
    }

    // The parts that this lane gives to `load_matrices`, for each half of a piece: a row of the left operand and 16
    // elements, or two rows of the right operand.
    int left_at[2], right_at[2];
    for (int half = 0; half < 2; ++half) {
        left_at[half] = part_at(warp_row + lane % 16, 2 * half + lane / 16);
        right_at[half] = part_at(warp_id + lane / 16 * 8 + lane % 8, 2 * half + lane / 8 % 2);
    }
    float sums[4][4][4] = {};
    for (int stage = 0; stage < STAGES - 1; ++stage) copy();
    for (int step = 0, stage = 0; step < steps; ++step) {
        wait_for_copies<STAGES - 2>();
        synchronize();
        copy();
        const Brain *left = tile.pieces[stage][0], *right = tile.pieces[stage][1];
        for (int half = 0; half < 2; ++half) {
            if (step * DEPTH + half * 16 >= depth) break;
            uint lefts[4][4], rights[2][4];
            for (int i = 0; i < 4; ++i) load_matrices(left + left_at[half] + i * 16 * DEPTH, lefts[i]);
            for (int j = 0; j < 2; ++j) load_matrices(right + right_at[half] + j * 16 * DEPTH, rights[j]);
            for (int i = 0; i < 4; ++i) {
                for (int j = 0; j < 4; ++j) multiply_add(sums[i][j], lefts[i], rights[j / 2] + j % 2 * 2);
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    synchronize();

    if (tid < TILE) {
        tile.results.references[tid] = reference_or_bias;
        tile.results.targets[tid] = own_target;
    } else {
        tile.results.biases[tid - TILE] = reference_or_bias;
    }
    synchronize();

    // This thread has two neighbouring ids in each of four groups, from `thread_id` of the tile on, and two rows in
    // each of four. An id outside the vocabulary has the exponential zero by its bias.
    const int thread_id = warp_id + lane % 4 * 2;
    float biases[4][2];
    for (int j = 0; j < 4; ++j) {
        for (int n = 0; n < 2; ++n) biases[j][n] = tile.results.biases[thread_id + 8 * j + n];
    }
    bool has_target = false;
    for (int i = 0; i < 8; ++i) {
        const int row = warp_row + 8 * i + lane / 4;
        const float shift = tile.results.references[row] * LOG2_E;
        Extent sum = {minus_infinity(), 0.f};
        for (int j = 0; j < 4; ++j) {
            float pair[2];
            for (int n = 0; n < 2; ++n) {
                float &exponent = sums[i / 2][j][i % 2 * 2 + n];
                exponent = exponent * scale + (biases[j][n] - shift);
                pair[n] = power_of_two(exponent);
                sum.add({exponent, pair[n]});
            }
            store2(tile.results.exponentials + row * PITCH + thread_id + 8 * j, pair);
        }
        has_target |= (uint)(tile.results.targets[row] - thread_id) < 32;
        for (int neighbour = 1; neighbour < 4; neighbour *= 2) sum.add(shuffled(sum, neighbour));
        if (lane % 4 == 0) tile.results.powers[warp % 4][row] = sum;
    }
    for (int i = 0; has_target && i < 8; ++i) {
        const int row = warp_row + 8 * i + lane / 4, target = tile.results.targets[row] - thread_id;
        for (int j = 0; j < 4; ++j) {
            for (int n = 0; n < 2; ++n) {
                if (target != 8 * j + n) continue;
                const float exponent = sums[i / 2][j][i % 2 * 2 + n];
                rows.target_logit(first_row + row) = logit_of(exponent, tile.results.references[row]);
            }
        }
    }
    synchronize();
    for (int i = tid; i < TILE * TILE / 8; i += BLOCK) {
        const int row = i / (TILE / 8), r = first_row + row, part = i % (TILE / 8) * 8;
        if (r < count && first_id + part < logits.stride) {
            copy8(exponentials + r * logits.stride + first_id + part, tile.results.exponentials + row * PITCH + part);
        }
    }
    if (tid < TILE && first_row + (int)tid < count) {
        Extent sum = tile.results.powers[0][tid];
        for (int w = 1; w < 4; ++w) sum.add(tile.results.powers[w][tid]);
        float *to = powers + 2 * ((i64)(first_row + tid) * id_tiles(logits.vocab) + first_id / TILE);
        to[0] = sum.largest;
        to[1] = sum.sum;
    }
}

// One warp per row: joins the powers of the row's tiles. If the exponentials cannot be relative to the row's
// reference, it computes them again relative to the largest logit.
FUNCTION void join_powers(Logits logits, Objective objective, Rows rows, const Brain *contexts, const Brain *decoder,
                          const float *powers, Brain *exponentials, int count, int depth, uint block, uint tid) {
    const i64 r = (i64)block * WARPS + tid / 32;
    const int lane = tid % 32;
    const bool has_row = r < count;
    const int end = has_row ? id_tiles(logits.vocab) : 0;
    float reference = has_row ? rows.reference(r) : 0.f;
    Extent sum = {minus_infinity(), 0.f};
    for (int i = lane; i < end; i += 32) {
        const float *from = powers + 2 * (r * id_tiles(logits.vocab) + i);
        sum.add({from[0], from[1]});
    }
    sum = warp_reduce(sum);
    const float largest = finite_or_zero(logit_of(sum.largest, reference));
    if (has_row && exponential_reference(largest, reference) != reference) {
        reference = largest;
        sum = {0.f, 0.f};
        for (int v = lane; v < logits.stride; v += 32) {
            float term = 0.f;
            if (v < logits.vocab) {
                float product = 0.f;
                for (int k = 0; k < depth; ++k) {
                    product += widened(contexts + r * depth + k) * widened(decoder + (i64)v * depth + k);
                }
                term = exponential(logits.finish(product, v) - reference);
            }
            store(exponentials + r * logits.stride + v, term);
            sum.sum += term;
        }
        sum = warp_reduce(sum);
    }
    if (lane != 0 || !has_row) return;
    rows.largest(r) = largest;
    rows.log_sum(r) = logarithm(sum.sum / power_of_two(finite_or_zero(sum.largest)));
    if (objective.id(r / logits.components) < 0) rows.target_logit(r) = 0.f;
}
