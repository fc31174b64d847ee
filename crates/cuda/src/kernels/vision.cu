// Vision attention: q/k norm with rotation, then bidirectional attention inside each frame.
// DIM: width of a head, a multiple of 32, at most 128.
//
// Both products are tensor-core products of two 16-bit numbers for each f32 (high high + high low + low high): of halves for
// scores, which carry 22 bits of the normed q and k; of bf16, which have f32's range and carry 16 bits, for softmax weights and
// values. Sums, maxima and exponentials are f32.
//
// Limit: 4 x patches^2 x DIM operations a head and frame, three times because of the planes.
#include "common.cuh"
#include "fragments.cuh"

#define KEYS 64
// Queries of a warp: as many fragments of 16 as registers allow.
#define TILES (DIM <= 64 ? 2 : 1)
#define QUERIES (64 * TILES)
// 16-byte pieces of a row of a plane; bytes between rows in shared memory, an odd number of pieces.
#define PIECES (DIM / 8)
#define PITCH (2 * DIM + 16)
#define PLANE (KEYS * PITCH)
// Planes of keys, then of values.
#define BUFFER (4 * PLANE)

// Grid (rows, heads / 8), 256 threads, a warp a head: q and k normed and turned, q, k and v in two planes, [heads, rows, 2, DIM].
// turns: [patches, 2, DIM / 2].
KERNEL prepare(const float *qkv, int stride, int heads, int patches, const float *q_norm, float q_eps, const float *k_norm,
               float k_eps, const float *turns, u16 *q, u16 *k, u16 *v) {
    const int row = blockIdx.x, lane = threadIdx.x & 31, head = 8 * blockIdx.y + (threadIdx.x >> 5), hidden = heads * DIM;
    if (head >= heads) return;
    const float *turn = turns + (u64)(row % patches) * DIM, *from = qkv + (u64)row * stride + head * DIM;
    const u64 to = ((u64)head * gridDim.x + row) * 2 * DIM;
#pragma unroll
    for (int part = 0; part < 3; part++) {
        float low[(DIM + 63) / 64], high[(DIM + 63) / 64], square = 0.0f;
#pragma unroll
        for (int i = 0; i < (DIM + 63) / 64; i++) {
            const int d = 32 * i + lane;
            low[i] = d < DIM / 2 ? from[part * hidden + d] : 0.0f;
            high[i] = d < DIM / 2 ? from[part * hidden + d + DIM / 2] : 0.0f;
            square = fmaf(low[i], low[i], fmaf(high[i], high[i], square));
        }
        if (part < 2) square = 1.0f / sqrtf(warp_sum(square) / DIM + (part ? k_eps : q_eps));
        const float *norm = part ? k_norm : q_norm;
        u16 *planes = (part == 0 ? q : part == 1 ? k : v) + to;
#pragma unroll
        for (int i = 0; i < (DIM + 63) / 64; i++) {
            const int d = 32 * i + lane;
            if (d >= DIM / 2) continue;
            float a = low[i], b = high[i];
            if (part < 2) {
                const float c = turn[d], s = turn[DIM / 2 + d], x = a * square * norm[d], y = b * square * norm[d + DIM / 2];
                a = x * c - y * s;
                b = y * c + x * s;
            }
            store_planes(planes + d, DIM, a, part < 2);
            store_planes(planes + d + DIM / 2, DIM, b, part < 2);
        }
    }
}

DEVICE float power_of_two(float x) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
    return e;
}

// Grid (queries / QUERIES, heads, frames), 128 threads, a warp 16 TILES queries; tiles of KEYS keys, the next one under way.
// `scale` has log2(e) in it.
extern "C" __global__ void __launch_bounds__(128, DIM <= 64 ? 2 : 1)
    attend(const u16 *q, const u16 *k, const u16 *v, int patches, int rows, float scale, float *out, int out_stride) {
    extern __shared__ __align__(16) u8 tiles[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int head = blockIdx.y, frame = blockIdx.z * patches, first = blockIdx.x * QUERIES + 16 * TILES * warp;
    const u64 base = ((u64)head * rows + frame) * 2 * DIM;
    const u32 room = (u32)__cvta_generic_to_shared(tiles);
    auto fetch = [&](int start, int side) {
#pragma unroll 1
        for (int i = threadIdx.x; i < 4 * PIECES * KEYS; i += 128) {
            const int row = i / (4 * PIECES), piece = i % (2 * PIECES), of_values = i / (2 * PIECES) % 2;
            const u16 *from = (of_values ? v : k) + base + (u64)min_of(start + row, patches - 1) * 2 * DIM + 8 * piece;
            const u32 to = room + side * BUFFER + (2 * of_values + piece / PIECES) * PLANE + row * PITCH + 16 * (piece % PIECES);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    fetch(0, 0);
    u32 query[2][TILES][DIM / 16][4];
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u64 row = min_of(first + 16 * m + g + 8 * (i & 1), patches - 1);
            const u16 *from = q + base + row * 2 * DIM + 2 * t + 4 * (i & 2);
#pragma unroll
            for (int d = 0; d < DIM / 16; d++) {
                query[0][m][d][i] = *(const u32 *)(from + 16 * d);
                query[1][m][d][i] = *(const u32 *)(from + 16 * d + DIM);
            }
        }
    float top[TILES][2], total[TILES][2], acc[TILES][DIM / 8][4];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        top[m][0] = top[m][1] = -INFINITY;
        total[m][0] = total[m][1] = 0.0f;
#pragma unroll
        for (int d = 0; d < DIM / 8; d++) acc[m][d][0] = acc[m][d][1] = acc[m][d][2] = acc[m][d][3] = 0.0f;
    }
    // Rows of the eight by eight matrices that this lane points at.
    const u32 of_key = (lane & 7) * PITCH + 16 * (lane >> 3), of_value = 2 * PLANE + ((lane & 7) + (lane & 8)) * PITCH + 16 * (lane >> 4);
    for (int start = 0, side = 0; start < patches; start += KEYS, side ^= 1) {
        if (start + KEYS < patches) {
            fetch(start + KEYS, side ^ 1);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
#pragma unroll 1
        for (int sub = 0; sub < KEYS && start + sub < patches; sub += 32) {
            const u32 at = room + side * BUFFER + sub * PITCH;
            float s[TILES][4][4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
#pragma unroll
                for (int m = 0; m < TILES; m++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
#pragma unroll
                for (int d = 0; d < DIM / 16; d += 2) {
                    u32 high[4], low[4];
                    matrices(high, at + of_key + 8 * n * PITCH + 32 * d);
                    matrices(low, at + of_key + 8 * n * PITCH + 32 * d + PLANE);
#pragma unroll
                    for (int e = 0; e < 2; e++)
#pragma unroll
                        for (int m = 0; m < TILES; m++) {
                            const u32 *a = query[0][m][d + e], *b = query[1][m][d + e];
                            mma_half(s[m][n], a[0], a[1], a[2], a[3], low[2 * e], low[2 * e + 1]);
                            mma_half(s[m][n], b[0], b[1], b[2], b[3], high[2 * e], high[2 * e + 1]);
                            mma_half(s[m][n], a[0], a[1], a[2], a[3], high[2 * e], high[2 * e + 1]);
                        }
                }
            }
            const bool cut = start + sub + 32 > patches;
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float best = top[m][h];
#pragma unroll
                    for (int n = 0; n < 4; n++)
#pragma unroll
                        for (int c = 0; c < 2; c++) {
                            float &score = s[m][n][2 * h + c];
                            score = cut && start + sub + 8 * n + 2 * t + c >= patches ? -INFINITY : score * scale;
                            best = fmaxf(best, score);
                        }
                    best = fmaxf(best, __shfl_xor_sync(FULL, best, 1));
                    best = fmaxf(best, __shfl_xor_sync(FULL, best, 2));
                    // Rare after the first tiles.
                    if (__any_sync(FULL, best > top[m][h])) {
                        const float keep = power_of_two(top[m][h] - best);
                        top[m][h] = best;
                        total[m][h] *= keep;
#pragma unroll
                        for (int d = 0; d < DIM / 8; d++) {
                            acc[m][d][2 * h] *= keep;
                            acc[m][d][2 * h + 1] *= keep;
                        }
                    }
#pragma unroll
                    for (int n = 0; n < 4; n++)
#pragma unroll
                        for (int c = 0; c < 2; c++) {
                            float &score = s[m][n][2 * h + c];
                            score = power_of_two(score - top[m][h]);
                            total[m][h] += score;
                        }
                }
            u32 high[2][TILES][4], low[2][TILES][4];
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float a = s[m][2 * n + (i >> 1)][2 * (i & 1)], b = s[m][2 * n + (i >> 1)][2 * (i & 1) + 1];
                        high[n][m][i] = narrow(a, b);
                        low[n][m][i] = narrow(a - widen_low(high[n][m][i]), b - widen_high(high[n][m][i]));
                    }
            // Tensor cores cut sums off instead of rounding them, so these begin anew.
#pragma unroll
            for (int d = 0; d < DIM / 8; d += 2) {
                float sums[TILES][2][4] = {};
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    u32 much[4], rest[4];
                    matrices_turned(much, at + of_value + 16 * n * PITCH + 16 * d);
                    matrices_turned(rest, at + of_value + 16 * n * PITCH + 16 * d + PLANE);
#pragma unroll
                    for (int e = 0; e < 2; e++)
#pragma unroll
                        for (int m = 0; m < TILES; m++) {
                            const u32 *a = high[n][m], *b = low[n][m];
                            mma(sums[m][e], a[0], a[1], a[2], a[3], rest[2 * e], rest[2 * e + 1]);
                            mma(sums[m][e], b[0], b[1], b[2], b[3], much[2 * e], much[2 * e + 1]);
                            mma(sums[m][e], a[0], a[1], a[2], a[3], much[2 * e], much[2 * e + 1]);
                        }
                }
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
#pragma unroll
                        for (int i = 0; i < 4; i++) acc[m][d + e][i] += sums[m][e][i];
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = total[m][h];
            sum += __shfl_xor_sync(FULL, sum, 1);
            sum += __shfl_xor_sync(FULL, sum, 2);
            const int row = first + 16 * m + 8 * h + g;
            if (row < patches)
#pragma unroll
                for (int d = 0; d < DIM / 8; d++)
                    *(float2 *)(out + (u64)(frame + row) * out_stride + head * DIM + 8 * d + 2 * t) =
                        make_float2(acc[m][d][2 * h] / sum, acc[m][d][2 * h + 1] / sum);
        }
}
