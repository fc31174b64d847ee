// The work list of the experts, their tokens in slots, and the weighted sum of what they give.
//
// Choices (row * TOP + k) are grouped by expert; an expert's slots begin at an eighth one and hold its choices ascending. `list`
// names the choice of a slot, `slots` the slot of a choice. Work items have up to `tokens` choices, as equal as eighths allow.
//
// Tokens in slots: halves `[columns / 64][pitch][64]`, 16-byte pieces of slot s at their number ^ (s % 8). A code at the higher
// place of a word weighs 16 times (see experts.cuh), so columns of odd pieces are held at a quarter, the others at four times.
//
// Beside BF16 weights tokens are planes of bf16 at their own value instead, high and low, `[columns / 64][planes][pitch][64]`.
//
// Constants: TOP, experts a row; EXPERTS.
#include "common.cuh"

// Choices of a block's rows that are taken at a time.
#define OWN (64 * TOP)
#define PER ((EXPERTS + 255) / 256)

struct Item {
    u32 expert, first, count;
};

// Eight values of a row, of the columns 8 * at .., as halves.
DEVICE uint4 halves(const float4 a, const float4 b, int at) {
    const float m = at & 1 ? 0.25f : 4.0f;
    return make_uint4(narrow_half(m * a.x, m * a.y), narrow_half(m * a.z, m * a.w), narrow_half(m * b.x, m * b.y),
                      narrow_half(m * b.z, m * b.w));
}

DEVICE uint4 eight(const float *x, int at) {
    return halves(*(const float4 *)(x + 8 * at), *(const float4 *)(x + 8 * at + 4), at);
}

// The place of columns 8 * at .. in a slot.
DEVICE u64 place_of(int pitch, u32 slot, int at) {
    return ((u64)(at >> 3) * pitch + slot) * 128 + (((at ^ slot) & 7) << 4);
}

struct Counts {
    u32 count[EXPERTS], start[EXPERTS], first[EXPERTS], sums[2][8];
};

// From `count` an expert's first slot and first item; gives the number of items. A block of 256 threads at least.
DEVICE u32 starts(Counts &c, int tokens) {
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    u32 slots = 0, items = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = tid * PER + i;
        if (e < EXPERTS) slots += (c.count[e] + 7) & ~7u, items += (c.count[e] + tokens - 1) / tokens;
    }
    u32 slot = slots, item = items;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 a = __shfl_up_sync(FULL, slot, d), b = __shfl_up_sync(FULL, item, d);
        if (lane >= d) slot += a, item += b;
    }
    if (lane == 31 && warp < 8) c.sums[0][warp] = slot, c.sums[1][warp] = item;
    __syncthreads();
    u32 all = 0;
    slot -= slots, item -= items;
#pragma unroll
    for (int w = 0; w < 8; w++) {
        if (w < warp) slot += c.sums[0][w], item += c.sums[1][w];
        all += c.sums[1][w];
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = tid * PER + i;
        if (e >= EXPERTS) break;
        c.start[e] = slot, c.first[e] = item;
        slot += (c.count[e] + 7) & ~7u, item += (c.count[e] + tokens - 1) / tokens;
    }
    __syncthreads();
    return all;
}

// Writes the work items; one block.
DEVICE void write_items(const Counts &c, int tokens, u32 all, Item *items, u32 *item_count) {
    for (int e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
        const u32 own = c.count[e], parts = (own + tokens - 1) / tokens;
        if (own == 0) continue;
        const u32 size = ((own + parts - 1) / parts + 7) & ~7u;
        for (u32 i = 0; i < parts; i++)
            items[c.first[e] + i] = Item{(u32)e, c.start[e] + i * size, (u32)min_of(size, own - i * size)};
    }
    if (threadIdx.x == 0) *item_count = all;
}

// Few rows: list, slots, items and the rows in their slots in one launch; every block counts all choices. `packed` may be
// absent. Grid (parts of the columns, rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256) arrange(const u32 *experts, int choices, int tokens, u32 *list, u32 *slots,
                                                          Item *items, u32 *item_count, const float *x, int x_stride,
                                                          int hidden, u8 *packed, int pitch) {
    __shared__ Counts c;
    __shared__ u32 own[TOP], ahead[TOP];
    const int tid = threadIdx.x, row = blockIdx.y;
    after_previous();
    let_next_begin();
    for (int i = tid; i < EXPERTS; i += 256) c.count[i] = 0;
    if (tid < TOP) own[tid] = experts[row * TOP + tid], ahead[tid] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = tid; i < choices; i += 256) {
        const u32 e = experts[i];
        atomicAdd(&c.count[e], 1);
        if (i >= (row + 1) * TOP) continue;
#pragma unroll
        for (int k = 0; k < TOP; k++)
            if (own[k] == e && i < row * TOP + k) atomicAdd(&ahead[k], 1);
    }
    __syncthreads();
    const u32 all = starts(c, tokens);
    if (blockIdx.x == 0 && tid < TOP) {
        const u32 slot = c.start[own[tid]] + ahead[tid];
        list[slot] = row * TOP + tid;
        slots[row * TOP + tid] = slot;
    }
    if (blockIdx.x == 0 && row == 0) write_items(c, tokens, all, items, item_count);
    if (!packed) return;
    for (int at = blockIdx.x * 256 + tid; 8 * at < hidden; at += gridDim.x * 256) {
        const uint4 v = eight(x + (u64)row * x_stride, at);
#pragma unroll
        for (int k = 0; k < TOP; k++) *(uint4 *)(packed + place_of(pitch, c.start[own[k]] + ahead[k], at)) = v;
    }
}

// The same for many rows: every block counts all choices, too, but for `per` rows of its own. Fewer than 65536 rows, each with
// TOP different experts. One block a share of the rows, 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) arrange_many(const u32 *experts, int choices, int per, int tokens, u32 *list,
                                                                u32 *slots, Item *items, u32 *item_count, const float *x,
                                                                int x_stride, int hidden, u8 *packed, int pitch) {
    __shared__ Counts c;
    __shared__ u32 before[EXPERTS], own[OWN], slot_of[OWN];
    const int tid = threadIdx.x, begin = blockIdx.x * per * TOP, end = min_of(begin + per * TOP, choices);
    for (int i = tid; i < EXPERTS; i += 1024) c.count[i] = 0;
    after_previous();
    let_next_begin();
    __syncthreads();
    // An expert's choices: in the lower half of a word all, in the upper one those ahead of this block's.
#pragma unroll 4
    for (int i = tid; i < choices / 4; i += 1024) {
        const uint4 e = ((const uint4 *)experts)[i];
        const int ahead = begin - 4 * i;
        atomicAdd(&c.count[e.x], ahead > 0 ? 0x10001 : 1), atomicAdd(&c.count[e.y], ahead > 1 ? 0x10001 : 1);
        atomicAdd(&c.count[e.z], ahead > 2 ? 0x10001 : 1), atomicAdd(&c.count[e.w], ahead > 3 ? 0x10001 : 1);
    }
    for (int i = (choices & ~3) + tid; i < choices; i += 1024) atomicAdd(&c.count[experts[i]], i < begin ? 0x10001 : 1);
    __syncthreads();
    for (int i = tid; i < EXPERTS; i += 1024) {
        const u32 v = c.count[i];
        c.count[i] = v & 0xffff, before[i] = v >> 16;
    }
    __syncthreads();
    const u32 all = starts(c, tokens);
    if (blockIdx.x == 0) write_items(c, tokens, all, items, item_count);
    const int eights = (hidden + 7) / 8;
#pragma unroll 1
    for (int at = begin; at < end; at += OWN) {
        const int n = min_of(OWN, end - at);
        for (int j = tid; j < n; j += 1024) own[j] = experts[at + j];
        __syncthreads();
        for (int j = tid; j < n; j += 1024) {
            const u32 e = own[j];
            u32 slot = c.start[e] + before[e];
#pragma unroll 8
            for (int i = 0; i < j; i++) slot += own[i] == e;
            slot_of[j] = slot;
            slots[at + j] = slot;
            list[slot] = at + j;
        }
        __syncthreads();
        for (int j = tid; j < n; j += 1024) atomicAdd(&before[own[j]], 1);
        if (packed) {
            const int count = n / TOP * eights;
            float4 a, b;
            const auto read = [&](int i) {
                const float *from = x + (u64)(at / TOP + i / eights) * x_stride + 8 * (i % eights);
                a = *(const float4 *)from, b = *(const float4 *)(from + 4);
            };
            if (tid < count) read(tid);
#pragma unroll 1
            for (int i = tid; i < count; i += 1024) {
                const int row = i / eights, place = i % eights;
                const uint4 v = halves(a, b, place);
                if (i + 1024 < count) read(i + 1024);
#pragma unroll
                for (int k = 0; k < TOP; k++) *(uint4 *)(packed + place_of(pitch, slot_of[row * TOP + k], place)) = v;
            }
        }
        __syncthreads();
    }
}

// Rows into the slots of their choices, `top` a row. Grid (columns / 1024, rows), 128 threads.
KERNEL fill(const float *x, int x_stride, int hidden, int top, const u32 *slots, u8 *packed, int pitch) {
    const int row = blockIdx.y, at = blockIdx.x * 128 + threadIdx.x;
    after_previous();
    let_next_begin();
    if (8 * at >= hidden) return;
    const uint4 v = eight(x + (u64)row * x_stride, at);
    for (int k = 0; k < top; k++) *(uint4 *)(packed + place_of(pitch, slots[row * top + k], at)) = v;
}

// The same as planes of bf16.
KERNEL fill_planes(const float *x, int x_stride, int hidden, int top, const u32 *slots, u8 *packed, int pitch, int planes) {
    const int row = blockIdx.y, at = blockIdx.x * 128 + threadIdx.x;
    after_previous();
    let_next_begin();
    if (8 * at >= hidden) return;
    const float4 *from = (const float4 *)(x + (u64)row * x_stride + 8 * at);
    const float4 a = from[0], b = from[1];
    const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        high[i] = narrow(v[2 * i], v[2 * i + 1]);
        low[i] = narrow(v[2 * i] - widen_low(high[i]), v[2 * i + 1] - widen_high(high[i]));
    }
    for (int k = 0; k < top; k++) {
        const u32 slot = slots[row * top + k];
        u8 *to = packed + ((u64)(at >> 3) * planes * pitch + slot) * 128 + (((at ^ slot) & 7) << 4);
        *(uint4 *)to = make_uint4(high[0], high[1], high[2], high[3]);
        if (planes > 1) *(uint4 *)(to + (u64)pitch * 128) = make_uint4(low[0], low[1], low[2], low[3]);
    }
}

// out[row] = sum over the row's experts, ascending, of weight * down[slot of the choice], then + shared. `down` is halves in
// slots. Grid (columns / 1024, rows), 128 threads.
KERNEL combine(const u8 *down, int pitch, const u32 *slots, const float *weights, const float *shared, int shared_stride,
               int hidden, float *out, int out_stride) {
    const int row = blockIdx.y, at = blockIdx.x * blockDim.x + threadIdx.x;
    after_previous();
    let_next_begin();
    if (8 * at >= hidden) return;
    uint4 v[TOP];
#pragma unroll
    for (int k = 0; k < TOP; k++) v[k] = *(const uint4 *)(down + place_of(pitch, slots[row * TOP + k], at));
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < TOP; k++) {
        const float w = weights[row * TOP + k];
        const u32 word[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = fmaf(w, widen_half(word[i / 2] >> (16 * (i & 1))), sum[i]);
    }
    if (shared)
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += shared[(u64)row * shared_stride + 8 * at + i];
    float4 *to = (float4 *)(out + (u64)row * out_stride + 8 * at);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}
