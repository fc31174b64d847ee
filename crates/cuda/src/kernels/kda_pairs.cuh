// Products of the rows of a chunk with each other, A and P, and the inverse of A's diagonal blocks. A warp has a block of 16 rows
// and half of the channels.
//
// exp(G_i - G_j) is cut at the beginning of i's block: one factor goes with i, the other with j. In the diagonal block j's
// factor is up to e^80 and products are tf32; for blocks in front j's row decays to its block's end, i's takes in the blocks that
// lie between one after the other, the nearest first, and both are halves. What i's factors are behind the last of them is
// exp(G_i), which q and k of the image need.

// Sums of a warp: of the block `back` blocks in front, columns 0 .. 7 and 8 .. 15, as `mma` leaves them.
struct Pairs {
    float a[4][2][4], p[4][2][4];
};

// A lane's place when matrices are loaded or stored by fours: rows 0 .. 7, 8 .. 15 at 16 bytes, then at the 16 bytes behind them.
DEVICE u32 place_of(u32 base, int warp, int lane) {
    return base + (warp & 1) * PIECE + (16 * (warp >> 1) + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
}

// The diagonal block; leaves rows that decay from its beginning (QUERY, WEIGHT) and to its end (KEY), and their squares.
DEVICE void near_pairs(Pairs &sums, u32 base, int warp, int lane) {
    const int block = warp >> 1, side = warp & 1, g = lane >> 2, t = lane & 3;
    const u32 mine = place_of(base, warp, lane), total_at = base + TOTALS + (block * DIM + 64 * side + 2 * t) * 4;
    const u32 decay_at = base + DECAYS + (16 * block + g) * 512 + (((16 * side + (t >> 1)) ^ ((g & 3) << 1)) << 4) + (t & 1) * 8;
    float of_q[2] = {}, of_k[2] = {};
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const u32 at = mine ^ (step << 5);
        u32 q[4], k[4], r[4];
        matrices(q, at + QUERY);
        matrices(k, at + WEIGHT);
        // Channels 2 t, 2 t + 1 (i = 0), 8 more (i = 1); rows g and g + 8.
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float by_q[2][2], by_k[2][2], b[2][2];
            const float2 total = read_two(total_at + (16 * step + 8 * i) * 4);
            const u32 here = decay_at ^ (step << 6 | i << 5);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 e = read_two(here + 8 * h * 512);
                const float2 q2 = wide_halves(q[2 * i + h]), k2 = wide_halves(k[2 * i + h]);
                of_q[h] = fmaf(q2.x, q2.x, fmaf(q2.y, q2.y, of_q[h]));
                of_k[h] = fmaf(k2.x, k2.x, fmaf(k2.y, k2.y, of_k[h]));
                by_q[h][0] = q2.x * e.x;
                by_q[h][1] = q2.y * e.y;
                by_k[h][0] = k2.x * e.x;
                by_k[h][1] = k2.y * e.y;
                b[h][0] = k2.x * quick_inverse(e.x);
                b[h][1] = k2.y * quick_inverse(e.y);
                q[2 * i + h] = two_halves(by_q[h][0], by_q[h][1]);
                k[2 * i + h] = two_halves(by_k[h][0], by_k[h][1]);
                r[2 * i + h] = two_halves(b[h][0] * total.x, b[h][1] * total.y);
            }
            const u32 q0 = tf32(by_q[0][0]), q1 = tf32(by_q[1][0]), q2 = tf32(by_q[0][1]), q3 = tf32(by_q[1][1]);
            const u32 k0 = tf32(by_k[0][0]), k1 = tf32(by_k[1][0]), k2 = tf32(by_k[0][1]), k3 = tf32(by_k[1][1]);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const u32 b0 = tf32(b[n][0]), b1 = tf32(b[n][1]);
                mma_tf32(sums.p[0][n], q0, q1, q2, q3, b0, b1);
                mma_tf32(sums.a[0][n], k0, k1, k2, k3, b0, b1);
            }
        }
        store_matrices(at + QUERY, q);
        store_matrices(at + WEIGHT, k);
        store_matrices(at + KEY, r);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int by = 1; by < 4; by *= 2) {
            of_q[h] += __shfl_xor_sync(FULL, of_q[h], by);
            of_k[h] += __shfl_xor_sync(FULL, of_k[h], by);
        }
        if (t == 0) {
            const u32 to = base + SQUARES + (side * CHUNK + 16 * block + 8 * h + g) * 4;
            store_float(to, of_q[h]);
            store_float(to + 2 * CHUNK * 4, of_k[h]);
        }
    }
}

// Squares are in units of ln^2 2, as what they are made of.
DEVICE float scale_of(u32 squares, float by) {
    return by * quick_inverse_root(read_float(squares) + read_float(squares + CHUNK * 4) + LOG2E * LOG2E * 1e-6f);
}
#define QUERY_SCALE 0.08838834764831845f

// Decays of the blocks behind each block and of the chunk, scales of the rows.
DEVICE void scales(u32 base, int tid) {
    if (tid < DIM) {
        float behind = 1.0f;
#pragma unroll
        for (int i = 3; i >= 0; i--) {
            store_half(base + BEHIND_HALVES + (i * DIM + tid) * 2, behind);
            behind *= read_float(base + TOTALS + (i * DIM + tid) * 4);
        }
        store_float(base + DECAY + 4 * tid, behind);
    } else {
        const int i = tid - DIM;
        const u32 squares = base + SQUARES + ((i >> 6) * 2 * CHUNK + (i & 63)) * 4;
        store_float(base + SCALES + i * 4, scale_of(squares, i < CHUNK ? QUERY_SCALE : 1.0f));
    }
}

// The blocks in front; leaves q exp(G), normed, and k exp(G).
DEVICE void far_pairs(Pairs &sums, u32 base, int warp, int lane) {
    const int block = warp >> 1, side = warp & 1, g = lane >> 2, t = lane & 3;
    const u32 mine = place_of(base, warp, lane), total_at = base + TOTAL_HALVES + (64 * side + 2 * t) * 2;
    // Rows 0 .. 7 at 16 bytes and the 16 bytes behind them, then rows 8 .. 15.
    const u32 others = base + KEY + side * PIECE + ((lane & 7) + 8 * (lane >> 4)) * 128 + (((lane >> 3 & 1) ^ (lane & 7)) << 4);
    u32 by_q[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float scale = scale_of(base + SQUARES + (16 * block + 8 * h + g) * 4, QUERY_SCALE);
        by_q[h] = two_halves(scale, scale);
    }
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const u32 at = mine ^ (step << 5);
        u32 q[4], k[4];
        matrices(q, at + QUERY);
        matrices(k, at + WEIGHT);
#pragma unroll
        for (int back = 1; back < 4; back++) {
            const int other = block - back;
            if (other >= 0) {
                u32 r[4];
                matrices(r, (others ^ (step << 5)) + other * 2048);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    mma_half(sums.p[back][n], q[0], q[1], q[2], q[3], r[2 * n], r[2 * n + 1]);
                    mma_half(sums.a[back][n], k[0], k[1], k[2], k[3], r[2 * n], r[2 * n + 1]);
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 total = read_word(total_at + other * (DIM * 2) + (16 * step + 8 * i) * 2);
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        q[2 * i + h] = times(q[2 * i + h], total);
                        k[2 * i + h] = times(k[2 * i + h], total);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = times(q[i], by_q[i & 1]);
        store_matrices(at + QUERY, q);
        if (block > 0) store_matrices(at + WEIGHT, k);
    }
}

// Of two warps that share a block of rows the first ends A, the second P: where the parts of each lie.
DEVICE u32 share_of(u32 base, int block, bool of_p, int lane) {
    return base + SHARES + (block * (block + 1) + of_p * (block + 1)) * 1024 + lane * 4;
}
DEVICE void give(const float (&part)[4][2][4], u32 to, int block) {
#pragma unroll
    for (int back = 0; back < 4; back++)
        if (back <= block)
#pragma unroll
            for (int i = 0; i < 8; i++) store_float(to + (back * 8 + i) * 128, part[back][i >> 2][i & 3]);
}
DEVICE void take(float (&part)[4][2][4], u32 from, int block) {
#pragma unroll
    for (int back = 0; back < 4; back++)
        if (back <= block)
#pragma unroll
            for (int i = 0; i < 8; i++) part[back][i >> 2][i & 3] += read_float(from + (back * 8 + i) * 128);
}

// A by blocks, those on the diagonal inverted.
DEVICE void end_a(Pairs &sums, u32 base, int block, int lane) {
    const int g = lane >> 2, t = lane & 3;
    take(sums.a, share_of(base, block, false, lane), block);
    float by[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = 16 * block + 8 * h + g;
        by[h] = -read_float(base + BETA + 4 * row) * read_float(base + SCALES + (CHUNK + row) * 4);
    }
#pragma unroll
    for (int back = 0; back < 4; back++)
        if (back <= block) {
            const int other = block - back;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int c = 8 * n + 2 * t;
                const float2 scale = read_two(base + SCALES + (CHUNK + 16 * other + c) * 4);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int r = 8 * h + g;
                    const float v0 = sums.a[back][n][2 * h] * by[h] * scale.x, v1 = sums.a[back][n][2 * h + 1] * by[h] * scale.y;
                    if (back == 0) store_two(base + DIAGONAL + block * 1024 + (16 * r + c) * 4, v0, v1);
                    else store_word(base + LOWER + (block * (block - 1) / 2 + other) * 768 + r * 48 + c * 2, two_halves(v0, v1));
                }
            }
        }
    __syncwarp();
    // The inverse of I - A's block by substitution, a column a lane.
    const u32 a = base + DIAGONAL + block * 1024;
    const int c = lane & 15;
    float column[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float v = i == c ? 1.0f : 0.0f, more = 0.0f;
#pragma unroll
        for (int j = 0; j < i; j += 2) {
            const float2 a2 = read_two(a + (16 * i + j) * 4);
            v = fmaf(a2.x, column[j], v);
            if (j + 1 < i) more = fmaf(a2.y, column[j + 1], more);
        }
        column[i] = v + more;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) store_half(base + INVERSE + block * 768 + i * 48 + c * 2, column[i]);
}

// P, and the keys of the block's rows decayed to the end of the chunk.
DEVICE void end_p(Pairs &sums, u32 base, int block, int lane) {
    const int g = lane >> 2, t = lane & 3;
    take(sums.p, share_of(base, block, true, lane), block);
    float by[2];
#pragma unroll
    for (int h = 0; h < 2; h++) by[h] = read_float(base + SCALES + (16 * block + 8 * h + g) * 4);
    const u32 row = base + PAIRS + (16 * block + g) * 128 + (g << 4) + 4 * t;
#pragma unroll
    for (int back = 0; back < 4; back++)
        if (back <= block) {
            const int other = block - back;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int c = 8 * n + 2 * t;
                const float2 scale = read_two(base + SCALES + (CHUNK + 16 * other + c) * 4);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int r = 8 * h + g;
                    const float v0 = back == 0 && c > r ? 0.0f : sums.p[back][n][2 * h] * by[h] * scale.x;
                    const float v1 = back == 0 && c + 1 > r ? 0.0f : sums.p[back][n][2 * h + 1] * by[h] * scale.y;
                    store_word((row ^ (other << 5 | n << 4)) + h * 1024, two_halves(v0, v1));
                }
            }
        }
    const u32 key = base + KEY + (lane >> 3 & 1) * PIECE + (16 * block + (lane >> 4)) * 128 + (((lane & 7) ^ (lane >> 4)) << 4);
    const uint4 behind = read_four(base + BEHIND_HALVES + (block * DIM + 8 * (lane & 15)) * 2);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 to = (key ^ ((2 * i & 7) << 4)) + 2 * i * 128;
        const float scale = read_float(base + SCALES + (CHUNK + 16 * block + 2 * i + (lane >> 4)) * 4);
        const u32 by2 = two_halves(scale, scale);
        uint4 v = read_four(to);
        v.x = times(times(v.x, behind.x), by2);
        v.y = times(times(v.y, behind.y), by2);
        v.z = times(times(v.z, behind.z), by2);
        v.w = times(times(v.w, behind.w), by2);
        store_four(to, v);
    }
}

// Nothing stands right of P's diagonal blocks; nobody else writes there.
DEVICE void clear_pairs(u32 base, int tid) {
    for (int i = tid; i < CHUNK * CHUNK / 8; i += 256) {
        const int row = i >> 3, piece = i & 7;
        if (piece >> 1 > row >> 4) store_four(base + PAIRS + row * 128 + ((piece ^ (row & 7)) << 4), make_uint4(0, 0, 0, 0));
    }
}
