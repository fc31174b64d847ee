// Router, and the weighted sum of what experts give in f32; the work list is in slots.cu.
// TOP: experts a row; EXPERTS; GROUPS, KEPT: expert groups and how many are kept.
#include "common.cuh"

#define SIZE (EXPERTS / GROUPS)

// Whether a score comes before another one that has a lower index: only when it is greater; NaN comes last.
DEVICE bool beats(float score, float other) { return score > other || (other != other && score == score); }

// Best of (score, index) over a warp; the lower index of equals.
DEVICE void warp_best(float &score, int &index) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const float s = __shfl_xor_sync(FULL, score, d);
        const int i = __shfl_xor_sync(FULL, index, d);
        if (i >= 0 && (index < 0 || beats(s, score) || (!beats(score, s) && i < index))) {
            score = s;
            index = i;
        }
    }
}

// Chooses the experts of a row from its logits; a warp a row. Chosen ascending by expert, with weights.
KERNEL choose(const float *logits, const float *bias, int rows, int normalize, float factor, u32 *experts, float *weights) {
    __shared__ float scores[4][EXPERTS], biased[4][EXPERTS];
    __shared__ int open[4][EXPERTS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.x * 4 + warp;
    after_previous();
    let_next_begin();
    if (row >= rows) return;
    bool healthy = true;
    for (int e = lane; e < EXPERTS; e += 32) {
        scores[warp][e] = sigmoid(logits[(u64)row * EXPERTS + e]);
        biased[warp][e] = scores[warp][e] + bias[e];
        open[warp][e] = 1;
        healthy &= biased[warp][e] == biased[warp][e];
    }
    __syncwarp();
    healthy = __all_sync(FULL, healthy);
#if GROUPS > KEPT
    float group[GROUPS];
    for (int q = 0; q < GROUPS; q++) {
        float first = 0.0f, second = 0.0f;
        int at = -1, other = -1;
        for (int e = q * SIZE + lane; e < (q + 1) * SIZE; e += 32)
            if (at < 0 || beats(biased[warp][e], first)) first = biased[warp][e], at = e;
        warp_best(first, at);
        for (int e = q * SIZE + lane; e < (q + 1) * SIZE; e += 32)
            if (e != at && (other < 0 || beats(biased[warp][e], second))) second = biased[warp][e], other = e;
        warp_best(second, other);
        group[q] = first + (other < 0 ? 0.0f : second);
    }
    for (int q = 0; q < GROUPS; q++) {
        int before = 0;
        for (int o = 0; o < GROUPS; o++)
            if (o != q && (o < q ? !beats(group[q], group[o]) : beats(group[o], group[q]))) before++;
        if (before >= KEPT)
            for (int e = q * SIZE + lane; e < (q + 1) * SIZE; e += 32) open[warp][e] = 0;
    }
    __syncwarp();
#endif
    for (int k = 0; k < TOP; k++) {
        float best = 0.0f;
        int at = -1;
        for (int e = lane; e < EXPERTS; e += 32)
            if (open[warp][e] == 1 && (at < 0 || beats(biased[warp][e], best))) best = biased[warp][e], at = e;
        warp_best(best, at);
        if (lane == 0) open[warp][at] = 2;
        __syncwarp();
    }
    if (lane > 0) return;
    float sum = 0.0f;
    int n = 0;
    for (int e = 0; e < EXPERTS; e++)
        if (open[warp][e] == 2) {
            experts[row * TOP + n] = e;
            weights[row * TOP + n++] = scores[warp][e];
            sum += scores[warp][e];
        }
    for (int k = 0; k < TOP; k++) {
        float w = weights[row * TOP + k];
        if (normalize) w /= sum + 1e-20f;
        // The choice among the others would look healthy: a score that is no number must be seen in the result.
        weights[row * TOP + k] = healthy ? w * factor : __int_as_float(0x7fffffff);
    }
}

// out[row] = sum over the row's experts, ascending, of weight * down[choice], then + shared. Grid (columns / 1024, rows).
KERNEL combine(const float *down, int down_stride, const float *weights, const float *shared, int shared_stride, int hidden,
               float *out, int out_stride) {
    const int row = blockIdx.y, column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    after_previous();
    let_next_begin();
    if (column >= hidden) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < TOP; k++) {
        const u64 choice = (u64)row * TOP + k;
        const float w = weights[choice];
        const float4 v = *(const float4 *)(down + choice * down_stride + column);
        sum.x = fmaf(w, v.x, sum.x);
        sum.y = fmaf(w, v.y, sum.y);
        sum.z = fmaf(w, v.z, sum.z);
        sum.w = fmaf(w, v.w, sum.w);
    }
    if (shared) {
        const float4 v = *(const float4 *)(shared + (u64)row * shared_stride + column);
        sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    *(float4 *)(out + (u64)row * out_stride + column) = sum;
}
