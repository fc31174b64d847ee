// Scores of the index on warpgroup products, with keys kept as halves: score[row, pool] = sum over heads of
// w[h] relu(q[h] . K[pool] / sqrt(128)). `choose_pools` then takes the best ones, ties going to the
// lower pool, and adds the tail.
//
// A tile of 64 pools is the rows of a warpgroup product, four rows of the step with their 32 heads are its
// 128 columns, halves, sums in f32; relu, weights and the sum over heads follow in registers (a lane has eight heads of a row,
// in their order, then the four lanes of a quarter). A block keeps its queries and walks a run of pools; pages are stored as the
// product wants them, so the copy engine brings a tile in eight pieces of 2 KB, four tiles deep, two blocks a multiprocessor.
//
// Layout: pool keys [pages][2][16][64] halves, 16-byte chunk c of pool r at c ^ (r % 8). scores [rows, stride] f32.
//
// Limits: 32 heads of 128, 16 pools a page. On one H200, 96 rows over 131072 tokens: 81 us for the scores, 26 us for the choice;
// runs of 1024, 2048 and 4096 pools a block differ by 4 us.
// Constants: PAGE tokens of a page, KPOOL tokens of a pool.
#include "common.cuh"
#include "wgmma.cuh"
#include "async.cuh"

#define POOLS (PAGE / KPOOL)
#define DIM 128
#define HEADS 32
#define ROWS 4
#define TILE 64
#define STAGE (TILE * DIM * 2)
#define STAGES 4
#define QUERY_AT (STAGES * STAGE)
#define FACTOR_AT (QUERY_AT + ROWS * HEADS * DIM * 2)
#define BARRIER_AT (FACTOR_AT + ROWS * HEADS * 4)

struct Args {
    const Segment *segments;
    const u32 *row_segment, *pages, *groups;  // groups: first rows of up to four of a segment
    const float *query, *proj;
    const u8 *pool_keys;
    float *scores;
    int query_stride, proj_stride, keep, stride, first_row, run;  // run: pools of a block
    int aligned;                                                   // queries may be read 16 bytes at a time
    float scale;                                                   // of a product times a head's weight
};

// NaN passes.
DEVICE float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

extern "C" __global__ void __launch_bounds__(288, 2) score_pools(const __grid_constant__ Args p) {
    extern __shared__ __align__(1024) u8 room[];
    const u32 base = shared_address(room), full = base + BARRIER_AT, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    after_previous();
    const int first = p.groups[blockIdx.y];
    const Segment s = p.segments[p.row_segment[first]];
    const int rows = min_of(ROWS, s.first_row + s.rows - first), position = s.position + first - s.first_row;
    const int pools = __shfl_sync(FULL, (position + rows) / KPOOL, 0), begin = blockIdx.x * p.run, end = min_of(begin + p.run, pools);
    if (pools <= p.keep || begin >= end) return;
    const int tiles = (end - begin + TILE - 1) / TILE, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (warp == 8) {
        // Lanes 0 .. 7: page lane / 2 of a tile, half lane % 2 of its columns.
        const int last = (pools - 1) / POOLS;
        auto page = [&](int tile) { return p.pages[s.first_page + min_of(begin / POOLS + 4 * tile + (lane >> 1 & 3), last)]; };
        u32 next = page(0);
        for (int tile = 0; tile < tiles; tile++) {
            const u32 current = next, slot = tile % STAGES;
            if (tile + 1 < tiles) next = page(tile + 1);
            barrier_wait(empty + 8 * slot, (tile / STAGES & 1) ^ 1);
            if (lane == 0) barrier_expect(full + 8 * slot, STAGE);
            __syncwarp();
            if (lane < 8)
                copy_bulk(base + slot * STAGE + (lane & 1) * (STAGE / 2) + (lane >> 1) * 2048,
                          p.pool_keys + (u64)current * (POOLS * DIM * 2) + (lane & 1) * (POOLS * DIM), 2048, full + 8 * slot);
        }
        return;
    }
    // Queries as halves: column 32 r + h of the product, two pieces of 64 wide.
    for (int i = threadIdx.x; i < ROWS * HEADS * DIM / 8; i += 256) {
        const int column = i / 16, chunk = i % 16, r = min_of(column / HEADS, rows - 1);
        const float *from = p.query + (u64)(first + r) * p.query_stride + column % HEADS * DIM + 8 * chunk;
        float4 a, b;
        if (p.aligned) {
            a = *(const float4 *)from;
            b = *(const float4 *)(from + 4);
        } else {
            a = make_float4(from[0], from[1], from[2], from[3]);
            b = make_float4(from[4], from[5], from[6], from[7]);
        }
        *(uint4 *)(room + QUERY_AT + (chunk >> 3) * (ROWS * HEADS * 128) + column * 128 +
                   (((chunk & 7) ^ (column & 7)) << 4)) =
            make_uint4(narrow_half(a.x, a.y), narrow_half(a.z, a.w), narrow_half(b.x, b.y), narrow_half(b.z, b.w));
    }
    float *factor = (float *)(room + FACTOR_AT);
    if (threadIdx.x < ROWS * HEADS)
        factor[threadIdx.x] = p.proj[(u64)(first + min_of(threadIdx.x / HEADS, rows - 1)) * p.proj_stride +
                                     threadIdx.x % HEADS] * p.scale;
    shared_written();
    meet(1, 256);
    const int w = __shfl_sync(FULL, warp >> 2, 0), g = lane >> 2, t = lane & 3;
    const bool mine = t < rows;
    const int visible = min_of(end, (position + t + 1) / KPOOL);
    float *to = p.scores + (u64)(first + t - p.first_row) * p.stride;
    for (int tile = w; tile < tiles; tile += 2) {
        const u32 slot = tile % STAGES, from = base + slot * STAGE;
        barrier_wait(full + 8 * slot, tile / STAGES & 1);
        float c[64];
        products_begin();
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                SharedProduct<128, 0>::multiply(c, describe(from + b * (STAGE / 2)) + 2 * k,
                                                describe(base + QUERY_AT + b * (ROWS * HEADS * 128)) + 2 * k, b + k);
        products_commit();
        products_done<0>();
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * slot);
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float a = 0.0f, b = 0.0f;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float2 by = *(const float2 *)(factor + 32 * r + 8 * n + 2 * t);
                const float *v = c + 16 * r + 4 * n;
                a = fmaf(by.x, relu(v[0]), a);
                a = fmaf(by.y, relu(v[1]), a);
                b = fmaf(by.x, relu(v[2]), b);
                b = fmaf(by.y, relu(v[3]), b);
            }
#pragma unroll
            for (int d = 1; d < 4; d <<= 1) {
                a += __shfl_xor_sync(FULL, a, d);
                b += __shfl_xor_sync(FULL, b, d);
            }
            if (r == t) {
                low = a;
                high = b;
            }
        }
        const int pool = begin + tile * TILE + 16 * (warp & 3) + g;
        if (mine && pool < visible) to[pool] = low + 0.0f;
        if (mine && pool + 8 < visible) to[pool + 8] = high + 0.0f;
    }
}

// Bits whose unsigned order is that of the scores; NaN counts as the lowest.
DEVICE u32 ordered(float score) {
    if (score != score) score = -INFINITY;
    const u32 bits = __float_as_uint(score + 0.0f);
    return (bits >> 31) ? ~bits : bits | 0x80000000u;
}

#define PER 32
#define THREADS 1024
#define BATCH (THREADS * PER)

// Chooses the best pools of a row and adds the tail. Grid (rows), 1024 threads. The bits of a score, made monotone, are narrowed by
// 12, 10 and 10 bits with a histogram in shared memory; up to 32768 scores stay in registers meanwhile, longer rows are read
// again. Warps own runs of 1024 pools, so that places in the list follow from two counts.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    choose_pools(const Segment *segments, const u32 *row_segment, int first_row, const float *scores, int stride, int keep,
                 u32 *tokens, int width, u32 *lens) {
    __shared__ u32 bins[4096], warps[32], equals[32];
    __shared__ u32 chosen, rest;
    after_previous();
    const int row = first_row + blockIdx.x, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const Segment s = segments[row_segment[row]];
    const int position = s.position + row - s.first_row, pools = (position + 1) / KPOOL;
    u32 *out = tokens + (u64)row * width;
    if (pools <= keep) {
        for (int i = tid; i <= position; i += THREADS) out[i] = i;
        if (tid == 0) lens[row] = position + 1;
        return;
    }
    const float *score = scores + (u64)blockIdx.x * stride;
    u32 bits[PER];
    // Warp w holds the pools start + 1024 w .. of a batch, lane l every 32nd.
    auto load = [&](int start) {
        const int at = start + 32 * PER * warp + lane;
#pragma unroll
        for (int part = 0; part < PER; part += 16) {
            float v[16];
#pragma unroll
            for (int j = 0; j < 16; j++) v[j] = at + 32 * (part + j) < pools ? score[at + 32 * (part + j)] : 0.0f;
            // No score has the bits 0: they stand for none.
#pragma unroll
            for (int j = 0; j < 16; j++) bits[part + j] = at + 32 * (part + j) < pools ? ordered(v[j]) : 0;
        }
    };
    const bool held = pools <= BATCH;
    if (held) load(0);
    u32 prefix = 0, mask = 0, left = keep;
#pragma unroll 1
    for (int pass = 0; pass < 3; pass++) {
        const int shift = pass == 0 ? 20 : pass == 1 ? 10 : 0;
        const int count = pass == 0 ? 4096 : 1024, each = count / THREADS;
        for (int i = tid; i < count; i += THREADS) bins[i] = 0;
        __syncthreads();
        for (int start = 0; start < pools; start += BATCH) {
            if (!held) load(start);
#pragma unroll
            for (int j = 0; j < PER; j++)
                if (bits[j] && (bits[j] & mask) == prefix)
                    atomicAdd(&bins[(bits[j] >> shift) & (count - 1)], 1);
        }
        __syncthreads();
        // The bin, from the top, in which the `left`th lies.
        u32 sum = 0;
        for (int k = 0; k < each; k++) sum += bins[count - 1 - (tid * each + k)];
        u32 upto = sum;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const u32 v = __shfl_up_sync(FULL, upto, d);
            if (lane >= d) upto += v;
        }
        if (lane == 31) warps[warp] = upto;
        __syncthreads();
        for (int w = 0; w < warp; w++) upto += warps[w];
        if (upto >= left && upto - sum < left) {
            u32 above = upto - sum;
            for (int k = 0; k < each; k++) {
                const u32 n = bins[count - 1 - (tid * each + k)];
                if (above + n >= left) {
                    chosen = count - 1 - (tid * each + k);
                    rest = left - above;
                    break;
                }
                above += n;
            }
        }
        __syncthreads();
        prefix |= chosen << shift;
        mask |= (u32)(count - 1) << shift;
        left = rest;
        __syncthreads();
    }
    // Those above the threshold, and the first `left` that equal it, ascending.
    u32 written = 0, seen = 0;
    for (int start = 0; start < pools; start += BATCH) {
        if (!held) load(start);
        const int at = start + 32 * PER * warp + lane;
        u32 a = 0, e = 0;
#pragma unroll
        for (int j = 0; j < PER; j++) {
            a += __popc(__ballot_sync(FULL, bits[j] > prefix));
            e += __popc(__ballot_sync(FULL, bits[j] == prefix));
        }
        if (lane == 0) {
            warps[warp] = a;
            equals[warp] = e;
        }
        __syncthreads();
        u32 a_all = 0, e_all = 0;
        a = written;
        e = seen;
        for (int w = 0; w < THREADS / 32; w++) {
            if (w < warp) {
                a += warps[w];
                e += equals[w];
            }
            a_all += warps[w];
            e_all += equals[w];
        }
        const u32 below = (1u << lane) - 1;
#pragma unroll
        for (int j = 0; j < PER; j++) {
            const bool above = bits[j] > prefix, equal = bits[j] == prefix;
            const u32 above_mask = __ballot_sync(FULL, above), equal_mask = __ballot_sync(FULL, equal);
            const u32 before = e + __popc(equal_mask & below);
            if (above || (equal && before < left)) {
                const u32 place = (a + __popc(above_mask & below) + (before < left ? before : left)) * KPOOL;
#pragma unroll
                for (int k = 0; k < KPOOL; k++) out[place + k] = (at + 32 * j) * KPOOL + k;
            }
            a += __popc(above_mask);
            e += __popc(equal_mask);
        }
        written += a_all;
        seen += e_all;
        __syncthreads();
    }
    for (int i = pools * KPOOL + tid; i <= position; i += THREADS) out[keep * KPOOL + i - pools * KPOOL] = i;
    if (tid == 0) lens[row] = keep * KPOOL + position + 1 - pools * KPOOL;
}
