// Vision attention: q/k norm with rotation, then bidirectional attention inside each frame; merging of patch groups.
// DIM: width of a head, a multiple of 32, at most 128.
#include "common.cuh"

#define QUERIES 2
#define KEYS 32

// Grid (rows, heads), DIM threads: q and k normed and turned to [heads, rows, DIM]. turns: [patches, 2, DIM / 2].
KERNEL prepare(const float *qkv, int stride, int heads, int patches, const float *q_norm, float q_eps, const float *k_norm,
               float k_eps, const float *turns, float *q, float *k) {
    __shared__ float room[DIM / 32], line[DIM];
    const int row = blockIdx.x, head = blockIdx.y, d = threadIdx.x, hidden = heads * DIM, rows = gridDim.x;
    const float *turn = turns + (u64)(row % patches) * DIM;
    const float c = turn[d % (DIM / 2)], s = turn[DIM / 2 + d % (DIM / 2)];
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const float x = qkv[(u64)row * stride + part * hidden + head * DIM + d];
        const float scale = 1.0f / sqrtf(block_sum<DIM>(x * x, room) / DIM + (part ? k_eps : q_eps));
        line[d] = x * scale * (part ? k_norm : q_norm)[d];
        __syncthreads();
        const float other = line[d < DIM / 2 ? d + DIM / 2 : d - DIM / 2];
        const float v = d < DIM / 2 ? line[d] * c - other * s : line[d] * c + other * s;
        (part ? k : q)[((u64)head * rows + row) * DIM + d] = v;
        __syncthreads();
    }
}

// Grid (queries / 16, heads, frames), 256 threads: a warp two queries, tiles of 32 keys.
KERNEL attend(const float *q, const float *k, const float *qkv, int stride, int heads, int patches, int rows, float scale,
              float *out, int out_stride) {
    __shared__ __align__(16) float keys[KEYS][DIM + 4], values[KEYS][DIM], query[16][DIM];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.y, frame = blockIdx.z * patches;
    const int first = blockIdx.x * 16 + warp * QUERIES;
    for (int i = threadIdx.x; i < 16 * DIM; i += 256) {
        const int at = min_of(blockIdx.x * 16 + i / DIM, patches - 1);
        query[i / DIM][i % DIM] = q[((u64)head * rows + frame + at) * DIM + i % DIM];
    }
    float top[QUERIES], total[QUERIES], acc[QUERIES][DIM / 32];
#pragma unroll
    for (int n = 0; n < QUERIES; n++) {
        top[n] = -INFINITY;
        total[n] = 0.0f;
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) acc[n][i] = 0.0f;
    }
    for (int start = 0; start < patches; start += KEYS) {
        __syncthreads();
        for (int i = threadIdx.x; i < KEYS * DIM; i += 256) {
            const int at = frame + min_of(start + i / DIM, patches - 1);
            keys[i / DIM][i % DIM] = k[((u64)head * rows + at) * DIM + i % DIM];
            values[i / DIM][i % DIM] = qkv[(u64)at * stride + 2 * heads * DIM + head * DIM + i % DIM];
        }
        __syncthreads();
        const int n_keys = min_of(KEYS, patches - start);
#pragma unroll
        for (int n = 0; n < QUERIES; n++) {
            float score = 0.0f;
#pragma unroll 8
            for (int d = 0; d < DIM; d += 4) {
                const float4 a = *(const float4 *)&keys[lane][d], b = *(const float4 *)&query[warp * QUERIES + n][d];
                score = fmaf(a.x, b.x, score);
                score = fmaf(a.y, b.y, score);
                score = fmaf(a.z, b.z, score);
                score = fmaf(a.w, b.w, score);
            }
            score = lane < n_keys ? score * scale : -INFINITY;
            float best = score;
#pragma unroll
            for (int d = 16; d > 0; d >>= 1) best = fmaxf(best, __shfl_xor_sync(FULL, best, d));
            best = fmaxf(best, top[n]);
            const float keep = expf(top[n] - best), p = expf(score - best);
            total[n] = fmaf(total[n], keep, warp_sum(p));
            top[n] = best;
#pragma unroll
            for (int i = 0; i < DIM / 32; i++) acc[n][i] *= keep;
            for (int j = 0; j < n_keys; j++) {
                const float pj = __shfl_sync(FULL, p, j);
#pragma unroll
                for (int i = 0; i < DIM / 32; i++) acc[n][i] = fmaf(pj, values[j][32 * i + lane], acc[n][i]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < QUERIES; n++)
        if (first + n < patches)
#pragma unroll
            for (int i = 0; i < DIM / 32; i++)
                out[(u64)(frame + first + n) * out_stride + head * DIM + 32 * i + lane] = acc[n][i] / total[n];
}
