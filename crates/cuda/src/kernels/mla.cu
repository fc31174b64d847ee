// Latent attention over the selected tokens, absorbed: q~ = K^T q, p = softmax(q~ . c / sqrt(qk)), out = V sum p c.
// kv_b holds per head the key rows, then the value rows, each [latent] wide.
// LATENT (a multiple of 32), PAGE: tokens a page. f32 throughout, for caches of f32; those of halves go to sparse.cu
// (h200-attention.md). `absorb`: a row's queries of a head by its key rows; `attend`: softmax over the list in
// one pass with a running largest score; `values`: the sums by the value rows. Any number of heads, rows and listed tokens.
#include "common.cuh"

#define ROWS 8
#define TILE 32
#define HEADS 8
#define STRIDE (LATENT + 4)

DEVICE float weight(const u8 *w, int bf16, u64 at) { return bf16 ? widen(((const u16 *)w)[at]) : ((const float *)w)[at]; }

// absorbed[row, head, latent] = K^T q. Grid (LATENT / 128, heads, rows / 8), 128 threads; a weight serves eight rows.
KERNEL absorb(const float *query, int stride, int start, int rows, const u8 *kv_b, int bf16, int pitch, int qk, int v,
              int heads, void *absorbed, int half) {
    extern __shared__ __align__(16) float q[];
    after_previous();
    let_next_begin();
    const int l = blockIdx.x * 128 + threadIdx.x, head = blockIdx.y, first = blockIdx.z * ROWS;
    const int n = min_of(ROWS, rows - first);
    for (int i = threadIdx.x; i < ROWS * qk; i += 128)
        q[i] = i / qk < n ? query[(u64)(first + i / qk) * stride + start + head * qk + i % qk] : 0.0f;
    __syncthreads();
    if (l >= LATENT) return;
    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = 0.0f;
    const u64 base = (u64)head * (qk + v) * pitch + l;
    for (int d = 0; d < qk; d++) {
        const float w = weight(kv_b, bf16, base + (u64)d * pitch);
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum[r] = fmaf(w, q[r * qk + d], sum[r]);
    }
    for (int r = 0; r < n; r++) {
        const u64 at = ((u64)(first + r) * heads + head) * LATENT + l;
        if (half)
            ((u16 *)absorbed)[at] = narrow_half(sum[r], 0.0f);
        else
            ((float *)absorbed)[at] = sum[r];
    }
}

// Attended latents in place of the absorbed queries. Grid (heads / 8, rows), 256 threads: a warp a head, tiles of 32 tokens
// shared by the warps; softmax runs along.
KERNEL attend(const Segment *segments, const u32 *row_segment, const u32 *pages, const float *latents, const u32 *tokens,
              int width, const u32 *lens, float scale, int heads, float *absorbed) {
    extern __shared__ __align__(16) float room[];
    after_previous();
    let_next_begin();
    float *tile = room, *q = room + TILE * STRIDE;
    const int row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.x * HEADS + warp;
    const Segment s = segments[row_segment[row]];
    const u32 *list = tokens + (u64)row * width;
    const int count = lens[row];
    const bool active = head < heads;
    float *line = absorbed + ((u64)row * heads + min_of(head, heads - 1)) * LATENT;
#pragma unroll
    for (int i = 0; i < LATENT / 32; i++) q[warp * LATENT + 32 * i + lane] = line[32 * i + lane];
    float out[LATENT / 32], top = -INFINITY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < LATENT / 32; i++) out[i] = 0.0f;
    for (int start = 0; start < count; start += TILE) {
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * (LATENT / 4); i += 256) {
            const int j = i / (LATENT / 4), at = i % (LATENT / 4);
            const u32 token = list[min_of(start + j, count - 1)];
            const float *from = latents + ((u64)pages[s.first_page + token / PAGE] * PAGE + token % PAGE) * LATENT;
            *(float4 *)(tile + j * STRIDE + 4 * at) = *(const float4 *)(from + 4 * at);
        }
        __syncthreads();
        float score = 0.0f;
#pragma unroll 8
        for (int i = 0; i < LATENT; i += 4) {
            const float4 a = *(const float4 *)(tile + lane * STRIDE + i), b = *(const float4 *)(q + warp * LATENT + i);
            score = fmaf(a.x, b.x, score);
            score = fmaf(a.y, b.y, score);
            score = fmaf(a.z, b.z, score);
            score = fmaf(a.w, b.w, score);
        }
        score = start + lane < count ? score * scale : -INFINITY;
        float best = score;
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) best = fmaxf(best, __shfl_xor_sync(FULL, best, d));
        best = fmaxf(best, top);
        const float keep = expf(top - best), p = expf(score - best);
        total = fmaf(total, keep, warp_sum(p));
        top = best;
#pragma unroll
        for (int i = 0; i < LATENT / 32; i++) out[i] *= keep;
        const int n = min_of(TILE, count - start);
        for (int j = 0; j < n; j++) {
            const float pj = __shfl_sync(FULL, p, j);
#pragma unroll
            for (int i = 0; i < LATENT / 32; i++) out[i] = fmaf(pj, tile[j * STRIDE + 32 * i + lane], out[i]);
        }
    }
    if (!active) return;
#pragma unroll
    for (int i = 0; i < LATENT / 32; i++) line[32 * i + lane] = count > 0 ? out[i] / total : 0.0f;
}

// out[row, head, v] = V latent. Grid (v / 8, heads, rows / 8), 256 threads: a warp a value, for eight rows.
KERNEL values(const float *absorbed, int rows, const u8 *kv_b, int bf16, int pitch, int qk, int v, int heads, float *out,
              int out_stride) {
    const int lane = threadIdx.x & 31, at = blockIdx.x * 8 + (threadIdx.x >> 5), head = blockIdx.y;
    const int first = blockIdx.z * ROWS;
    after_previous();
    let_next_begin();
    if (at >= v) return;
    const u64 base = ((u64)head * (qk + v) + qk + at) * pitch;
    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = 0.0f;
#pragma unroll 4
    for (int l = lane; l < LATENT; l += 32) {
        const float w = weight(kv_b, bf16, base + l);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            sum[r] = fmaf(w, absorbed[((u64)min_of(first + r, rows - 1) * heads + head) * LATENT + l], sum[r]);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        sum[r] = warp_sum(sum[r]);
        if (lane == 0 && first + r < rows) out[(u64)(first + r) * out_stride + head * v + at] = sum[r];
    }
}
