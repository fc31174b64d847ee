// y[row, out] = W x for up to 24 rows: W in BF16 as stored, x in f32, taken as two bf16 planes (16 to 17 bits), sums in f32.
//
// A slice is 512 columns, a tile 16 rows of W. Each of a block's eight warps has 64 columns of the slice: it keeps its part of
// x as operands of the tensor core in registers, copies its part of every tile (whole lines, 16 bytes a copy) into a ring of its own
// in shared memory and multiplies; the block's warps then add their sums. No warp waits for another one's copies.
// The blocks of a cluster have different columns of the same tiles; a block takes PASSES slices in turn. The slices' sums of
// a tile go to the shared memory of one block of the cluster, which adds them and writes.
//
// Order of a sum: 64 columns by the tensor core, high and low planes apart; eight warps in turn; a block's slices in turn; the
// cluster's blocks in turn. It depends on the number of columns alone, not on the rows beside a row.
//
// Weights are asked for before the launch in front has ended, x behind it.
//
// With SWIGLU a tile is eight rows of each of two matrices and y is silu(min(gate, limit)) clamp(up).
//
// Versions tried, on one NVIDIA H200, in per cent of the read rate at 3 rows of [24896, 4096] / [4096, 4096] / [4096, 1024]: a warp that
// copies for the block, rows of 1 KB by the copy engine, 64 to 87 / 59 / 43; 16 bytes a copy, 77 to 84 / 61 / 40; boxes of 64
// columns, 77 to 88 / 66 / 47; every warp its own copies, as here, 93 / 66 to 70 / 45 to 49 (the first of two figures: one block a
// multiprocessor). Asking the second-level cache for tiles ahead of the ring halved the rate. benches/records/h200-dense.md has more.
//
// Constants: NT (tiles of 8 rows of x), PLANES, CLUSTER, PASSES, SWIGLU, STAGES.
#include "common.cuh"
#include "async.cuh"
#include "few.cuh"

// Tiles between two meetings of the warps, and buffers for their sums.
#define BATCH (NT == 1 ? 2 : 1)
#define BUFFERS (NT == 1 ? 2 : 1)
// The next slice's part of x is asked for while this one's is multiplied, where registers suffice.
#define NEXT (PASSES > 1 && NT == 1)
#define TILE (128 * NT)      // sums of a tile
#define BUFFER_BYTES (BATCH * WARPS * TILE * 4)
#define PARTIAL_BYTES (BUFFERS * BUFFER_BYTES)

struct Part {
    const u8 *w, *up;        // SWIGLU: gate and up
    const float *bias, *up_bias;
    float *y;
    int last, outputs;       // tiles of this part and those before it
};

struct Args {
    Part parts[8];
    const float *x;
    const u32 *list;         // rows of x, or null: the first ones
    int rows, tiles, w_bytes, x_stride, y_stride, round, slots, areas;
    float limit;
    int aligned;
};

// A place in a block's list of tiles: rounds of passes of tiles.
struct Cursor {
    int round, pass, tile, from, to, part, before;

    __device__ __forceinline__ void seek(const Args &p) {
        while (tile >= p.parts[part].last) before = p.parts[part].last, part++;
    }
    __device__ __forceinline__ void begin(const Args &p, int first, int count, int rounds) {
        round = pass = part = before = 0;
        tile = from = first;
        to = first + count / rounds;
        seek(p);
    }
    __device__ __forceinline__ void next(const Args &p, int first, int count, int rounds) {
        if (++tile == to) {
            if (++pass == PASSES) {
                pass = 0;
                if (++round == rounds) return;
                from = to;
                to = first + count * (round + 1) / rounds;
            }
            tile = from;
            if (PASSES > 1) part = before = 0;
        }
        seek(p);
    }
    // A row of the tile.
    __device__ __forceinline__ const u8 *row(const Args &p, int i) const {
        const Part &q = p.parts[part];
#if SWIGLU
        return (i < 8 ? q.w : q.up) + (u64)min_of((tile - before) * 8 + (i & 7), q.outputs - 1) * p.w_bytes;
#else
        return q.w + (u64)min_of((tile - before) * 16 + i, q.outputs - 1) * p.w_bytes;
#endif
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) few(const __grid_constant__ Args p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = shared_address(shared);
    const u32 ready = base, ring = base + 128, partial = ring + STAGES * STAGE_BYTES, sums = partial + PARTIAL_BYTES;
    const u32 area = sums + (PASSES > 1 ? p.round * TILE * 4 : 0);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int rank = CLUSTER > 1 ? cluster_rank() : 0, group = blockIdx.x / CLUSTER, groups = gridDim.x / CLUSTER;
    const int first = (int)((u64)p.tiles * group / groups), count = (int)((u64)p.tiles * (group + 1) / groups) - first;
    const int rounds = (count + p.round - 1) / p.round, pieces = count * PASSES;
    if (threadIdx.x == 0) {
        barrier_init(ready, CLUSTER);
        barrier_init(ready + 8, CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    Cursor ahead;
    ahead.begin(p, first, count, rounds);
    int asked = 0;
    u32 filling = 0;
    const u64 once = read_once();
    const u32 to = copies_to(ring);
    auto ask = [&]() {
        if (asked < pieces) {
            const u32 column = (rank * PASSES + ahead.pass) * (SLICE * 2);
            copy_tile(to + filling * STAGE_BYTES, column, once, [&](int i) { return ahead.row(p, i); });
            ahead.next(p, first, count, rounds);
            if (++filling == STAGES) filling = 0;
            if (++asked == pieces) let_next_begin();
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int i = 0; i < STAGES - 1; i++) ask();

    // Barriers are there for the whole cluster.
    if (CLUSTER > 1) cluster_meet(); else __syncthreads();
    after_previous();

    const u32 own = weights_at(ring);
    u32 slot = 0, turn = 0;
    // Lane (g, t) has of row 8 n + g the columns 32 k + 8 t .. + 7: two operands of 16 columns.
    u32 b[NT][2][PLANES][4];
    float4 v[NT][2][2];
    auto fetch = [&](int pass) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int row = 8 * n + g;
            const u64 place = row < p.rows ? p.list ? p.list[row] : row : 0;
            const float *x = p.x + place * p.x_stride + (rank * PASSES + pass) * SLICE + warp * 64 + 8 * t;
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    v[n][k][h] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    const float *at = x + 32 * k + 4 * h;
                    if (row < p.rows) v[n][k][h] = p.aligned ? *(const float4 *)at : make_float4(at[0], at[1], at[2], at[3]);
                }
        }
    };
    if (NEXT) fetch(0);
    for (int round = 0; round < rounds; round++) {
        const int from = first + count * round / rounds, tiles = first + count * (round + 1) / rounds - from;
        for (int pass = 0; pass < PASSES; pass++) {
            if (!NEXT && (PASSES > 1 || round == 0)) fetch(pass);
            if (PASSES > 1 || round == 0) {
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int k = 0; k < 2; k++)
#pragma unroll
                        for (int h = 0; h < 2; h++) split(b[n][k], 2 * h, v[n][k][h]);
            }
            if (NEXT) fetch(pass + 1 < PASSES ? pass + 1 : 0);
            for (int i = 0; i < tiles; i += BATCH) {
                if (BUFFERS > 1) turn ^= 1;
                const u32 buffer = partial + turn * BUFFER_BYTES;
#pragma unroll
                for (int j = 0; j < BATCH; j++) {
                    if (i + j >= tiles) break;
                    uint4 a[2][2];
                    take_tile(a, own, slot);
                    ask();
                    if (++slot == STAGES) slot = 0;
                    float c[PLANES][NT][4];
#pragma unroll
                    for (int e = 0; e < PLANES * NT * 4; e++) c[e / (NT * 4)][e / 4 % NT][e % 4] = 0.0f;
#pragma unroll
                    for (int k = 0; k < 2; k++)
#pragma unroll
                        for (int n = 0; n < NT; n++)
#pragma unroll
                            for (int q = 0; q < PLANES; q++)
                                mma(c[q][n], a[k][0].x, a[k][1].x, a[k][0].y, a[k][1].y, b[n][k][q][0], b[n][k][q][1]);
#pragma unroll
                    for (int k = 0; k < 2; k++)
#pragma unroll
                        for (int n = 0; n < NT; n++)
#pragma unroll
                            for (int q = 0; q < PLANES; q++)
                                mma(c[q][n], a[k][0].z, a[k][1].z, a[k][0].w, a[k][1].w, b[n][k][q][2], b[n][k][q][3]);
                    // The sums of the batch before have been read.
                    if (BUFFERS == 1 && j == 0 && (i > 0 || round > 0 || pass > 0)) meet(2, THREADS);
#pragma unroll
                    for (int n = 0; n < NT; n++) {
#if PLANES > 1
#pragma unroll
                        for (int e = 0; e < 4; e++) c[0][n][e] += c[1][n][e];
#endif
                        store_sums(buffer + ((j * WARPS + warp) * TILE + n * 128 + lane * 4) * 4, c[0][n]);
                    }
                }
                meet(1, THREADS);
                const float *read = (const float *)(shared + (buffer - base));
                const int sum_count = min_of(BATCH, tiles - i) * TILE;
#pragma unroll
                for (int e = threadIdx.x; e < BATCH * TILE; e += THREADS) {
                    if (e >= sum_count) break;
                    const int j = e / TILE, at = e % TILE, tile = i + j;
                    float s = sum_of_warps(read + j * WARPS * TILE + at, TILE);
#if PASSES > 1
                    float *before = (float *)(shared + (sums - base)) + tile * TILE + at;
                    if (pass > 0) s += *before;
                    if (pass + 1 < PASSES) {
                        *before = s;
                        continue;
                    }
#endif
                    const int side = p.areas > 1 ? (round & 1) * p.slots : 0;
                    const u32 place = area + ((side + tile / CLUSTER * CLUSTER + rank) * TILE + at) * 4;
                    if (CLUSTER > 1)
                        peer_store(peer(place, tile % CLUSTER), s);
                    else
                        *(float *)(shared + (place - base)) = s;
                }
            }
        }
        if (CLUSTER > 1) asm volatile("fence.acq_rel.cluster;" ::: "memory");
        meet(1, THREADS);
        if (CLUSTER > 1) {
            if (threadIdx.x < CLUSTER) peer_arrive(peer(ready + 8 * (round & 1), threadIdx.x));
            cluster_wait(ready + 8 * (round & 1), (round >> 1) & 1);
        }
        const float *from_all = (const float *)(shared + (area - base)) + (p.areas > 1 ? (round & 1) * p.slots * TILE : 0);
        const int owned = (tiles - rank + CLUSTER - 1) / CLUSTER;
        auto total = [&](const float *at) {
            float s = at[0];
#pragma unroll
            for (int c = 1; c < CLUSTER; c++) s += at[c * TILE];
            return s;
        };
        const int width = SWIGLU ? 8 : 16;
        for (int e = threadIdx.x; e < owned * p.rows * width; e += THREADS) {
            const int row = e % width, rest = e / width, token = rest % p.rows, o = rest / p.rows, tile = from + o * CLUSTER + rank;
            const int element = ((token >> 3) * 32 + (row & 7) * 4 + ((token & 7) >> 1)) * 4 + (row >> 3) * 2 + (token & 1);
            const float *at = from_all + o * CLUSTER * TILE + element;
            int part = 0, before = 0;
            while (tile >= p.parts[part].last) before = p.parts[part].last, part++;
            const Part &q = p.parts[part];
            const int out = (tile - before) * width + row;
            if (out >= q.outputs) continue;
            float s = total(at);
            if (q.bias) s += q.bias[out];
#if SWIGLU
            float up = total(at + 2);
            if (q.up_bias) up += q.up_bias[out];
            s = clamped_swiglu(s, up, p.limit);
#endif
            q.y[(u64)token * p.y_stride + out] = s;
        }
    }
}
