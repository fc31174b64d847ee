// Grouped products of BF16 experts for few tokens an expert: y[choice] = W_e x[row], x in f32 taken as two bf16 planes (16 to 17
// bits), sums in f32; with SWIGLU W_e is gate and up and y is silu(min(gate, limit)) clamp(up).
//
// As few.cu, which says how columns are divided and summed: a slice of 512 columns a block, the slices of a cluster meet. Here a tile,
// 16 rows of W_e (SWIGLU: eight of gate and eight of up), belongs to a work item (slots.cu) of up to eight choices, and a
// cluster's tiles are a run of those of all items. A warp takes its part of x anew when the item changes.
//
// Order of a sum: 64 columns by the tensor core, high and low planes apart; eight warps in turn; the cluster's blocks in turn: a
// function of the number of columns alone.
//
// Limits: compute capability 9.0; columns of CLUSTER slices; up to eight choices an item.
//
// Constants: PLANES, CLUSTER (slices of 512 columns), SWIGLU, STAGES.
#include "common.cuh"
#include "async.cuh"
#include "few.cuh"

#define BATCH 2
#define TILE 128      // sums of a tile
#define BUFFER_BYTES (BATCH * WARPS * TILE * 4)
#define WIDTH (SWIGLU ? 8 : 16)

struct Weights {
    const u8 *gate, *up, *down;
};

struct Item {
    u32 expert, first, count;
};

struct Args {
    const Weights *table;
    const Item *items;
    const u32 *item_count;
    const u32 *list;  // choices by expert
    const float *x;
    float *y;
    // `tiles` of an item; rows of x are choices / divisor; sums of `round` tiles are held at a time.
    int outputs, tiles, w_bytes, x_stride, y_stride, divisor, round, slots;
    float limit;
};

// A place in a block's run of tiles: rounds of passes of tiles. This lane's first row of the item's matrices.
struct Cursor {
    int tile, item;
    const u8 *w, *up;

    __device__ __forceinline__ void seek(const Args &p) {
        const int now = tile / p.tiles;
        if (now == item) return;
        item = now;
        const Weights *weights = p.table + p.items[now].expert;
        w = SWIGLU ? weights->gate : weights->down;
        up = weights->up;
    }
    // A row of the tile.
    __device__ __forceinline__ const u8 *row(const Args &p, int i) const {
        const int at = tile - item * p.tiles;
#if SWIGLU
        return (i < 8 ? w : up) + (u64)min_of(at * 8 + (i & 7), p.outputs - 1) * p.w_bytes;
#else
        return w + (u64)min_of(at * 16 + i, p.outputs - 1) * p.w_bytes;
#endif
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) few_experts(const __grid_constant__ Args p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = shared_address(shared);
    const u32 ready = base, ring = base + 128, partial = ring + STAGES * STAGE_BYTES, area = partial + 2 * BUFFER_BYTES;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int rank = CLUSTER > 1 ? cluster_rank() : 0, group = blockIdx.x / CLUSTER, groups = gridDim.x / CLUSTER;
    if (threadIdx.x == 0) {
        barrier_init(ready, CLUSTER);
        barrier_init(ready + 8, CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Barriers are there for the whole cluster.
    if (CLUSTER > 1) cluster_meet(); else __syncthreads();
    after_previous();
    const int all = (int)*p.item_count * p.tiles;
    const int first = (int)((u64)all * group / groups), count = (int)((u64)all * (group + 1) / groups) - first;
    const int rounds = (count + p.round - 1) / p.round;
    if (count == 0) let_next_begin();

    Cursor ahead;
    ahead.tile = first, ahead.item = -1;
    if (count > 0) ahead.seek(p);
    int asked = 0;
    u32 filling = 0;
    const u64 once = read_once();
    const u32 to = copies_to(ring);
    auto ask = [&]() {
        if (asked < count) {
            copy_tile(to + filling * STAGE_BYTES, rank * (SLICE * 2), once, [&](int i) { return ahead.row(p, i); });
            if (++filling == STAGES) filling = 0;
            if (++asked == count) let_next_begin();
            else ahead.tile++, ahead.seek(p);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int i = 0; i < STAGES - 1; i++) ask();

    const u32 own = weights_at(ring);
    u32 slot = 0, turn = 0;
    // Lane (g, t) has of token g the columns 32 k + 8 t .. + 7: two operands of 16 columns.
    u32 b[2][PLANES][4];
    int item = -1;
    // This lane's part of x for a tile.
    auto take = [&](int tile) {
        const int now = tile / p.tiles;
        if (now == item) return;
        item = now;
        const Item i = p.items[now];
        const bool there = g < (int)i.count;
        const u32 row = there ? p.list[i.first + g] / (u32)p.divisor : 0;
        const float *from = p.x + (u64)row * p.x_stride + rank * SLICE + warp * 64 + 8 * t;
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float4 w = there ? *(const float4 *)(from + 32 * k + 4 * h) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                split(b[k], 2 * h, w);
            }
    };
    for (int round = 0; round < rounds; round++) {
        const int from = first + (int)((u64)count * round / rounds), tiles = first + (int)((u64)count * (round + 1) / rounds) - from;
        for (int i = 0; i < tiles; i += BATCH) {
            turn ^= 1;
            const u32 buffer = partial + turn * BUFFER_BYTES;
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                if (i + j >= tiles) break;
                take(from + i + j);
                uint4 a[2][2];
                take_tile(a, own, slot);
                ask();
                if (++slot == STAGES) slot = 0;
                float c[PLANES][4];
#pragma unroll
                for (int e = 0; e < PLANES * 4; e++) c[e / 4][e % 4] = 0.0f;
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int q = 0; q < PLANES; q++) mma(c[q], a[k][0].x, a[k][1].x, a[k][0].y, a[k][1].y, b[k][q][0], b[k][q][1]);
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int q = 0; q < PLANES; q++) mma(c[q], a[k][0].z, a[k][1].z, a[k][0].w, a[k][1].w, b[k][q][2], b[k][q][3]);
#if PLANES > 1
#pragma unroll
                for (int e = 0; e < 4; e++) c[0][e] += c[1][e];
#endif
                store_sums(buffer + ((j * WARPS + warp) * TILE + lane * 4) * 4, c[0]);
            }
            meet(1, THREADS);
            const float *read = (const float *)(shared + (buffer - base));
            // A thread a sum of the two tiles.
            const int j = threadIdx.x / TILE, at = threadIdx.x % TILE, tile = i + j;
            if (tile < tiles) {
                const float s = sum_of_warps(read + j * WARPS * TILE + at, TILE);
                const u32 place = area + (((round & 1) * p.slots + tile / CLUSTER * CLUSTER + rank) * TILE + at) * 4;
                if (CLUSTER > 1)
                    peer_store(peer(place, tile % CLUSTER), s);
                else
                    *(float *)(shared + (place - base)) = s;
            }
        }
        if (CLUSTER > 1) asm volatile("fence.acq_rel.cluster;" ::: "memory");
        meet(1, THREADS);
        if (CLUSTER > 1) {
            if (threadIdx.x < CLUSTER) peer_arrive(peer(ready + 8 * (round & 1), threadIdx.x));
            cluster_wait(ready + 8 * (round & 1), (round >> 1) & 1);
        }
        const float *from_all = (const float *)(shared + (area - base)) + (round & 1) * p.slots * TILE;
        const int owned = (tiles - rank + CLUSTER - 1) / CLUSTER;
        auto total = [&](const float *at) {
            float s = at[0];
#pragma unroll
            for (int c = 1; c < CLUSTER; c++) s += at[c * TILE];
            return s;
        };
        for (int e = threadIdx.x; e < owned * WIDTH; e += THREADS) {
            const int row = e % WIDTH, o = e / WIDTH, tile = from + o * CLUSTER + rank, of = tile / p.tiles;
            const int out = (tile - of * p.tiles) * WIDTH + row;
            if (out >= p.outputs) continue;
            const Item i = p.items[of];
            for (int token = 0; token < (int)i.count; token++) {
                const float *at = from_all + o * CLUSTER * TILE + ((row & 7) * 4 + (token >> 1)) * 4 + (row >> 3) * 2 + (token & 1);
                float s = total(at);
#if SWIGLU
                s = clamped_swiglu(s, total(at + 2), p.limit);
#endif
                p.y[(u64)p.list[i.first + token] * p.y_stride + out] = s;
            }
        }
    }
}
