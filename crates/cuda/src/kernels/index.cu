// Scores of the index on warpgroup products, with keys kept as halves: score[row, pool] = sum over heads of
// w[h] relu(q[h] . K[pool] / sqrt(128)). choose.cu then takes the best ones.
//
// A tile of 64 pools is the rows of a warpgroup product, four rows of the step with their 32 heads are its
// 128 columns, halves, sums in f32; relu, weights and the sum over heads follow in registers (a lane has eight heads of a row,
// in their order, then the four lanes of a quarter). A block keeps its queries and walks a run of pools; pages are stored as the
// product wants them, so the copy engine brings a tile in eight pieces of 2 KB, four tiles deep, two blocks a multiprocessor.
//
// Layout: pool keys [pages][2][16][64] halves, 16-byte chunk c of pool r at c ^ (r % 8). scores [rows, stride] f32.
//
// Limits: 32 heads of 128, 16 pools a page. On one H200, 96 rows over 131072 tokens: 81 us; runs of 1024, 2048 and 4096
// pools a block differ by 4 us.
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
    let_next_begin();
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
