// Router and the work list of the experts; their products are in gemm.cu.
// CHUNK: choices that are counted together. PACKED_ROWS: rows of a step whose slots the work list fills at once. TOP: experts a row; EXPERTS; GROUPS, KEPT: expert groups and how many are kept.
#include "common.cuh"

#define SIZE (EXPERTS / GROUPS)
#define PACKED_ROWS 128
#define CHUNK 2048

struct Item {
    u32 expert, first, count;
};

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

// Eight values as halves into a slot: `[columns / 64][pitch][64]`, pieces of eight at their number ^ (slot % 8).
DEVICE void put(u8 *packed, int pitch, u32 slot, int eighth, uint4 v) {
    *(uint4 *)(packed + ((u64)(eighth >> 3) * pitch + slot) * 128 + (((eighth ^ slot) & 7) << 4)) = v;
}

DEVICE uint4 eight(const float *x) {
    const float4 a = *(const float4 *)x, b = *(const float4 *)(x + 4);
    return make_uint4(narrow_half(a.x, a.y), narrow_half(a.z, a.w), narrow_half(b.x, b.y), narrow_half(b.z, b.w));
}

// How often each expert is chosen among the choices of a chunk. A block a chunk, 256 threads.
KERNEL count(const u32 *experts, int choices, u32 *counts) {
    __shared__ u32 count[EXPERTS];
    after_previous();
    let_next_begin();
    for (int i = threadIdx.x; i < EXPERTS; i += 256) count[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < CHUNK; i += 256) {
        const int at = blockIdx.x * CHUNK + i + threadIdx.x;
        if (at < choices) atomicAdd(&count[experts[at]], 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < EXPERTS; i += 256) counts[blockIdx.x * EXPERTS + i] = count[i];
}

// Groups choices (row * TOP + k) by expert: a block an expert. An expert's slots begin at an eighth one; `list` names the
// choice of a slot, ascending in an expert, `slots` the slot of a choice. Work items have up to `tokens` choices, as equal as
// eighths allow. `counts` has the chunks' counts when there is more than one chunk. With `packed` the rows go into their slots
// as halves as well.
extern "C" __global__ void __launch_bounds__(256) plan(const u32 *experts, int choices, int tokens, const u32 *counts,
                                                       u32 *list, u32 *slots, Item *items, u32 *item_count,
                                                       const float *x, int x_stride, int hidden, u8 *packed, int pitch) {
    __shared__ u32 count[EXPERTS], sums[2][8], mine[PACKED_ROWS];
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, e = blockIdx.x, chunks = (choices + CHUNK - 1) / CHUNK;
    after_previous();
    let_next_begin();
    if (chunks > 1) {
        for (int i = tid; i < EXPERTS; i += 256) {
            u32 sum = 0;
#pragma unroll 8
            for (int b = 0; b < chunks; b++) sum += counts[b * EXPERTS + i];
            count[i] = sum;
        }
    } else {
        for (int i = tid; i < EXPERTS; i += 256) count[i] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < CHUNK; i += 256)
            if (i + tid < choices) atomicAdd(&count[experts[i + tid]], 1);
    }
    __syncthreads();
    u32 before = 0, pieces = 0;
    for (int i = tid; i < e; i += 256) before += (count[i] + 7) & ~7u, pieces += (count[i] + tokens - 1) / tokens;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        before += __shfl_xor_sync(FULL, before, d);
        pieces += __shfl_xor_sync(FULL, pieces, d);
    }
    if (lane == 0) sums[0][warp] = before, sums[1][warp] = pieces;
    __syncthreads();
    u32 start = 0, first = 0;
#pragma unroll
    for (int w = 0; w < 8; w++) start += sums[0][w], first += sums[1][w];
    const u32 own = count[e], parts = (own + tokens - 1) / tokens;
    if (e == EXPERTS - 1 && tid == 0) *item_count = first + parts;
    if (own == 0) return;
    const u32 size = ((own + parts - 1) / parts + 7) & ~7u;
    for (u32 i = tid; i < parts; i += 256) {
        const Item it = {(u32)e, start + i * size, (u32)min_of(size, own - i * size)};
        items[first + i] = it;
    }
    // A warp a chunk, four choices a lane.
    for (int b = warp; b < chunks; b += 8) {
        u32 rank = 0;
        for (int c = lane; c < b; c += 32) rank += counts[c * EXPERTS + e];
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) rank += __shfl_xor_sync(FULL, rank, d);
        const int length = min_of(CHUNK, choices - b * CHUNK);
#pragma unroll 4
        for (int i = 0; i < length; i += 128) {
            const int at = b * CHUNK + i + 4 * lane;
            u32 hit[4], all = 0, ahead = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                hit[j] = at + j < choices && experts[at + j] == (u32)e;
                const u32 mask = __ballot_sync(FULL, hit[j]);
                all += __popc(mask);
                ahead += __popc(mask & ((1u << lane) - 1));
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (hit[j]) {
                    const u32 place = rank + ahead++;
                    list[start + place] = at + j;
                    slots[at + j] = start + place;
                    if (packed) mine[place] = (at + j) / TOP;
                }
            rank += all;
        }
    }
    if (!packed) return;
    __syncthreads();
    const u32 eighths = hidden / 8;
#pragma unroll 2
    for (u32 i = tid; i < own * eighths; i += 256) {
        const u32 row = i / eighths, at = i % eighths;
        put(packed, pitch, start + row, at, eight(x + (u64)mine[row] * x_stride + 8 * at));
    }
}

// Rows into the slots of their choices. Grid (columns / 1024, rows), 128 threads.
KERNEL pack(const float *x, int x_stride, int hidden, int top, const u32 *slots, u8 *packed, int pitch) {
    const int row = blockIdx.y, at = blockIdx.x * 128 + threadIdx.x;
    after_previous();
    let_next_begin();
    if (8 * at >= hidden) return;
    const uint4 v = eight(x + (u64)row * x_stride + 8 * at);
    for (int k = 0; k < top; k++) put(packed, pitch, slots[row * top + k], at, v);
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

// As `combine`, with outputs of experts in halves. Grid (columns / 1024, rows), 128 threads.
KERNEL combine_halves(const u16 *down, int down_stride, const float *weights, const float *shared, int shared_stride,
                      int hidden, float *out, int out_stride) {
    const int row = blockIdx.y, column = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    after_previous();
    let_next_begin();
    if (column >= hidden) return;
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < TOP; k++) {
        const u64 choice = (u64)row * TOP + k;
        const float w = weights[choice];
        const uint4 v = *(const uint4 *)(down + choice * down_stride + column);
        const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = fmaf(w, widen_half(word[i / 2] >> (16 * (i & 1))), sum[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        out[(u64)row * out_stride + column + i] = shared ? sum[i] + shared[(u64)row * shared_stride + column + i] : sum[i];
}
