// W and U of a chunk, (I - A)^-1 of beta k exp(G) and of beta v: by blocks of 16 rows, from the first to the last,
//   X_i = (I - A_ii)^-1 (B_i + sum_(j < i) A_ij X_j),
// transposed: a warp has 32 of the columns (channels) and needs nothing of the others; its blocks are operands of the next
// ones as they are. In place: W is where k exp(G) was, U where v was. The walk adds products of W, so it is left negative.
DEVICE void solve(u32 base, int warp, int lane) {
    const int t = lane & 3;
    const bool of_u = warp >= 4;
    // Rows 0 .. 7 at 16 bytes and the 16 bytes behind them, then rows 8 .. 15; turned.
    const u32 mine = base + (of_u ? UPDATE : WEIGHT) + ((warp & 3) >> 1) * PIECE + ((lane & 7) + 8 * (lane >> 4)) * 128 +
                     (((4 * (warp & 1) + (lane >> 3 & 1)) ^ (lane & 7)) << 4);
    const u32 of_block = base + ((lane & 7) + 8 * (lane >> 4)) * 48 + (lane >> 3 & 1) * 16;
    u32 x[2][4][4];
#pragma unroll
    for (int now = 0; now < 4; now++) {
        float2 by[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int row = 16 * now + 8 * n + 2 * t;
            const float2 scale = read_two(base + SCALES + (CHUNK + row) * 4);
            by[n] = read_two(base + BETA + 4 * row);
            // v is in units of ln 2.
            by[n].x *= of_u ? 1.0f / LOG2E : -scale.x;
            by[n].y *= of_u ? 1.0f / LOG2E : -scale.y;
        }
        float sums[2][2][4];
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            u32 v[4];
            matrices_turned(v, (mine ^ (tile << 5)) + now * 2048);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float2 v2 = wide_halves(v[2 * n + h]);
                    sums[tile][n][2 * h] = v2.x * by[n].x;
                    sums[tile][n][2 * h + 1] = v2.y * by[n].y;
                }
        }
        u32 a[4];
#pragma unroll
        for (int other = 0; other < 3; other++)
            if (other < now) {
                matrices(a, of_block + LOWER + (now * (now - 1) / 2 + other) * 768);
#pragma unroll
                for (int tile = 0; tile < 2; tile++) {
                    const u32 *left = x[tile][other];
                    mma_half(sums[tile][0], left[0], left[1], left[2], left[3], a[0], a[1]);
                    mma_half(sums[tile][1], left[0], left[1], left[2], left[3], a[2], a[3]);
                }
            }
        matrices(a, of_block + INVERSE + now * 768);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            u32 left[4];
#pragma unroll
            for (int i = 0; i < 4; i++) left[i] = two_halves(sums[tile][i >> 1][2 * (i & 1)], sums[tile][i >> 1][2 * (i & 1) + 1]);
            float out[2][4] = {};
            mma_half(out[0], left[0], left[1], left[2], left[3], a[0], a[1]);
            mma_half(out[1], left[0], left[1], left[2], left[3], a[2], a[3]);
#pragma unroll
            for (int i = 0; i < 4; i++) x[tile][now][i] = two_halves(out[i >> 1][2 * (i & 1)], out[i >> 1][2 * (i & 1) + 1]);
            store_matrices_turned((mine ^ (tile << 5)) + now * 2048, x[tile][now]);
        }
    }
}
