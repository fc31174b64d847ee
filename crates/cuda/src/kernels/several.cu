// y[row, out] = W x for up to 96 rows: W in BF16 as stored, x in f32, taken as two bf16 planes (16 to 17 bits), sums in f32.
//
// A tile is 64 WARPGROUPS outputs, a chunk 64 columns of it. A block has a run of the chunks of all tiles, one tile after the other. Its
// warps have roles: four copy weights into a ring in shared memory, four turn the rows' part of a chunk into planes beside them, and a
// warpgroup for each 64 outputs multiplies both planes at once with the weights (the tensor core's operand A). Weights are asked for
// before the launch in front has ended, as many as the ring holds; x behind it. With PLANES another launch (`turn`) has made the planes,
// as they lie in the ring, and they are copied whole: for more rows the arithmetic of a chunk is more than its weights take.
//
// A tile with parts in several runs: each block leaves its sums in memory, waits for the others' and adds a share of the tile's. The
// blocks of a launch run at once.
//
// Order of a sum: chunks of a run by the tensor core, 16 columns at a time, high and low planes apart; their sum; runs in turn. It
// depends on the matrices of the launch and the number of blocks, not on the rows.
//
// With SWIGLU a tile has eight rows of each of two matrices in turn and y is silu(min(gate, limit)) clamp(up).
//
// Tried and slower, on one NVIDIA H200: planes made in the kernel for many rows, pairs of blocks that share the rows, runs across
// tiles wherever tiles come out even (benches/records/h200-dense.md).
//
// Constants: NT (tiles of 8 rows of x), WARPGROUPS, STAGES, SWIGLU.
#include "common.cuh"
#include "wgmma.cuh"
#include "async.cuh"

#define N (8 * NT)
// As several.rs has them.
#define PLANES (NT > 3)
#define RESIDENT (PLANES || WARPGROUPS > 2 ? 1 : 2)
#define AHEAD (RESIDENT > 1 ? 1 : 3)    // chunks of x on their way
#define TURNERS (PLANES ? 0 : 128)
#define TILE (64 * WARPGROUPS)
#define MULTIPLIERS (128 * WARPGROUPS)
#define COPIERS 128
#define LINES (COPIERS / 8)    // rows of weights that the copiers take at a time
#define THREADS (MULTIPLIERS + COPIERS + TURNERS)
#define PLANE_BYTES (N * 128)
#define WEIGHT_BYTES (TILE * 128)
#define STAGE_BYTES (WEIGHT_BYTES + 2 * PLANE_BYTES)

#define LIST_72 LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LIST_80 LIST_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define LIST_96 LIST_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_16 C8(0)
#define SUMS_32 C16(0)
#define SUMS_48 C16(0), C8(16)
#define SUMS_64 C32(0)
#define SUMS_96 C32(0), C16(32)
#define SUMS_128 C32(0), C32(32)
#define SUMS_192 C32(0), C32(32), C32(64)

template <int WIDTH>
struct Both;
#define BOTH(WIDTH, LIST, A, B, P)                                                                                     \
    template <>                                                                                                        \
    struct Both<WIDTH> {                                                                                               \
        static __device__ __forceinline__ void multiply(float *c, u64 a, u64 b, int add) {                             \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #WIDTH "k16.f32.bf16.bf16 {" LIST "}, %" A ", %" B        \
                         ", p, 1, 1, 0, 0;\n}\n"                                                                       \
                         : SUMS_##WIDTH                                                                                \
                         : "l"(a), "l"(b), "r"(add));                                                                  \
        }                                                                                                              \
    };
BOTH(16, LIST_8, "8", "9", "10")
BOTH(32, LIST_16, "16", "17", "18")
BOTH(48, LIST_24, "24", "25", "26")
BOTH(64, LIST_32, "32", "33", "34")
BOTH(96, LIST_48, "48", "49", "50")
BOTH(128, LIST_64, "64", "65", "66")
BOTH(192, LIST_96, "96", "97", "98")

struct Part {
    const u8 *w, *up;        // SWIGLU: gate and up
    const float *bias, *up_bias;
    float *y;
    int last, outputs;       // outputs of this part and those before it; its own
};

struct Args {
    Part parts[8];
    const float *x;
    const u32 *list;         // rows of x, or null: the first ones
    float4 *sums;            // of the first and of the last tile of every block
    u32 *counts;             // zero for every tile, and left so
    int rows, tiles, chunks, splits, w_bytes, x_stride, y_stride, outputs;
    float limit;
};

// Outputs of a tile: with SWIGLU a gate and an up row are one.
#define WIDTH (SWIGLU ? TILE / 2 : TILE)

// Which part an output is of.
DEVICE int part_of(const Args &p, int out) {
    int part = 0;
    while (part < 7 && out >= p.parts[part].last) part++;
    return part;
}

DEVICE void write(const Args &p, int out, int token, float v, float up) {
    if (out >= p.outputs || token >= p.rows) return;
    const Part &q = p.parts[part_of(p, out)];
    const int at = out - (q.last - q.outputs);
    if (q.bias) v += q.bias[at];
#if SWIGLU
    if (q.up_bias) up += q.up_bias[at];
    v = clamped_swiglu(v, up, p.limit);
#endif
    q.y[(u64)token * p.y_stride + at] = v;
}

// Four sums of a thread's: rows g and g + 8 of its warp's 16, two tokens.
DEVICE void write_four(const Args &p, int tile, int thread, int n, float4 c) {
    const int warp = thread >> 5, g = (thread & 31) >> 2, token = 8 * n + 2 * (thread & 3);
#if SWIGLU
    const int out = tile * WIDTH + 8 * warp + g;
    write(p, out, token, c.x, c.z);
    write(p, out, token + 1, c.y, c.w);
#else
    const int out = tile * WIDTH + 16 * warp + g;
    write(p, out, token, c.x, 0.0f);
    write(p, out, token + 1, c.y, 0.0f);
    write(p, out + 8, token, c.z, 0.0f);
    write(p, out + 8, token + 1, c.w, 0.0f);
#endif
}

// A block's run of the chunks of all tiles, and where it stands: chunks of one tile. With `splits` a run is one of so many parts of
// a tile, otherwise an even share of all chunks.
struct Run {
    u32 at, end, tile, from, count, first;

    __device__ __forceinline__ u32 begin(const Args &p, u32 block) const { return (u32)(p.tiles * p.chunks) * block / gridDim.x; }
    __device__ __forceinline__ explicit Run(const Args &p) {
        if (p.splits) {
            tile = first = blockIdx.x / p.splits;
            const u32 split = blockIdx.x - tile * p.splits, start = tile * p.chunks;
            at = start + (u32)p.chunks * split / p.splits, end = start + (u32)p.chunks * (split + 1) / p.splits;
            from = at - start, count = end - at;
        } else {
            at = begin(p, blockIdx.x), end = begin(p, blockIdx.x + 1), first = at / p.chunks;
            seek(p);
        }
    }
    __device__ __forceinline__ void seek(const Args &p) {
        tile = at / p.chunks, from = at - tile * p.chunks, count = min_of(p.chunks - from, end - at);
    }
    __device__ __forceinline__ void next(const Args &p) {
        at += count;
        if (at < end) seek(p);
    }
    __device__ __forceinline__ bool whole(const Args &p) const { return count == p.chunks; }
    // The block whose run has this chunk of all.
    __device__ __forceinline__ u32 block_of(const Args &p, u32 chunk) const {
        return ((chunk + 1) * gridDim.x - 1) / (u32)(p.tiles * p.chunks);
    }
};

DEVICE void copy_weights(const Args &p, u32 ring, u32 full, u32 empty, const u8 **rows) {
    const int t = threadIdx.x - MULTIPLIERS;
    const int row = t >> 3;
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    const u32 to = ring + row * 128 + (((t & 7) ^ (row & 7)) << 4);
    u32 stage = 0, parity = 1;
    Run run(p);
    const u32 start = run.at;
#if PLANES
    u32 x_stage = 0;
    u32 asked = 0;
    // Rows of the next chunk.
    auto ask_rows = [&]() {
        const u32 chunk = (start + asked++) % p.chunks;
        const u32 barrier = full + 8 * x_stage;
        barrier_expect(barrier, 2 * PLANE_BYTES);
        copy_bulk(ring + x_stage * STAGE_BYTES + WEIGHT_BYTES, (const u8 *)p.x + (u64)chunk * (2 * PLANE_BYTES), 2 * PLANE_BYTES, barrier);
        if (++x_stage == STAGES) x_stage = 0;
    };
    // Behind the weights of the first stages.
    auto start_rows = [&](u32 count) {
        if (t != 0) return;
        after_previous();
        while (asked < count) ask_rows();
    };
    u32 n = 0;
#endif
    for (; run.at < run.end; run.next(p)) {
        const int tile = (int)run.tile;
        __syncwarp();
        if ((t & 7) == 0) {
#pragma unroll 1
            for (int r = row; r < TILE; r += LINES) {
#if SWIGLU
                const int out = min_of(tile * WIDTH + (r >> 4) * 8 + (r & 7), p.outputs - 1);
                const Part &q = p.parts[0];
                rows[r] = (r & 8 ? q.up : q.w) + (u64)out * p.w_bytes;
#else
                const int out = min_of(tile * WIDTH + r, p.outputs - 1);
                const Part &q = p.parts[part_of(p, out)];
                rows[r] = q.w + (u64)(out - (q.last - q.outputs)) * p.w_bytes;
#endif
            }
        }
        __syncwarp();
        u32 column = run.from * 128 + 16 * (t & 7);
        for (u32 c = 0; c < run.count; c++, column += 128) {
#if PLANES
            if (n == STAGES) start_rows(STAGES);
#endif
            barrier_wait(empty + 8 * stage, parity);
            const u32 at = to + stage * STAGE_BYTES;
            // A chunk is half of what a row is asked for: memory serves longer pieces faster.
#pragma unroll
            for (int r = 0; r < TILE / LINES; r++)
                asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(at + r * (LINES * 128)),
                             "l"(rows[r * LINES + row] + column), "l"(once)
                             : "memory");
            copies_arrive(full + 8 * stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
#if PLANES
            if (++n > STAGES && t == 0) ask_rows();
#endif
        }
    }
#if PLANES
    if (n <= STAGES) start_rows(n);
#endif
    let_next_begin();
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Eight f32 as bf16: their high and their low part.
DEVICE void split(float4 x, float4 y, uint4 &high, uint4 &low) {
    high = make_uint4(narrow(x.x, x.y), narrow(x.z, x.w), narrow(y.x, y.y), narrow(y.z, y.w));
    low.x = narrow(x.x - widen_low(high.x), x.y - widen_high(high.x));
    low.y = narrow(x.z - widen_low(high.y), x.w - widen_high(high.y));
    low.z = narrow(y.x - widen_low(high.z), y.y - widen_high(high.z));
    low.w = narrow(y.z - widen_low(high.w), y.w - widen_high(high.w));
}

#if !PLANES
DEVICE void store(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE void turn_rows(const Args &p, u32 ring, u32 full, u32 empty) {
    constexpr int ROUNDS = (N * 8 + TURNERS - 1) / TURNERS;
    const int t = threadIdx.x - MULTIPLIERS - COPIERS;
    const int row = t >> 3;
    const u32 to = ring + WEIGHT_BYTES + row * 128 + (((t & 7) ^ (row & 7)) << 4);
    after_previous();
    const float *from[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int token = row + r * (TURNERS / 8);
        const u32 place = token < p.rows ? p.list ? p.list[token] : token : 0;
        from[r] = token < p.rows && row + r * (TURNERS / 8) < N ? p.x + (u64)place * p.x_stride + 8 * (t & 7) : nullptr;
    }
    float4 v[AHEAD][ROUNDS][2];
    u32 stage = 0, parity = 1;
    const Run run(p);
    auto fetch = [&](float4 (&v)[ROUNDS][2], u32 chunk) {
        if (chunk >= run.end) return;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const float4 *at = (const float4 *)(from[r] + chunk % p.chunks * 64);
            v[r][0] = v[r][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (from[r]) v[r][0] = at[0], v[r][1] = at[1];
        }
    };
#pragma unroll
    for (int a = 0; a < AHEAD; a++) fetch(v[a], run.at + a);
    for (u32 first = run.at; first < run.end; first += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (first + a >= run.end) break;
            barrier_wait(empty + 8 * stage, parity);
            const u32 at = to + stage * STAGE_BYTES;
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                if (N * 8 % TURNERS && row + r * (TURNERS / 8) >= N) break;
                uint4 high, low;
                split(v[a][r][0], v[a][r][1], high, low);
                const u32 place = at + r * (TURNERS / 8) * 128;
                store(place, high);
                store(place + PLANE_BYTES, low);
            }
            fetch(v[a], first + a + AHEAD);
            shared_written();
            __syncwarp();
            if ((threadIdx.x & 31) == 0) barrier_arrive(full + 8 * stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}
#endif

#define ALL (NT * MULTIPLIERS)

// This block's share of a tile's sums over the blocks that have a part of it.
DEVICE void add_up(const Args &p, const Run &run, int thread) {
    const u32 first = p.splits ? run.tile * p.splits : run.block_of(p, run.tile * p.chunks);
    const u32 parts = p.splits ? p.splits : run.block_of(p, (run.tile + 1) * p.chunks - 1) - first + 1;
    if (thread == 0) {
        u32 *count = p.counts + run.tile, there;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
        while (there < parts);
        // The last one that has seen them leaves zero.
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(there) : "l"(count) : "memory");
        if (there == 2 * parts - 1) *(volatile u32 *)count = 0;
    }
    meet(1, MULTIPLIERS);
    const u32 share = blockIdx.x - first, end = ALL * (share + 1) / parts;
    // The first part of a tile is the last one of its block, unless the block begins with it.
    const bool second = !p.splits && run.begin(p, first) / p.chunks != run.tile;
    const float4 *parts_of = p.sums + 2ull * first * ALL;
    for (u32 e = ALL * share / parts + thread; e < end; e += MULTIPLIERS) {
        float4 s = __ldcg(parts_of + (second ? ALL : 0) + e);
#pragma unroll 4
        for (u32 i = 1; i < parts; i++) {
            const float4 v = __ldcg(parts_of + 2 * i * ALL + e);
            s = make_float4(s.x + v.x, s.y + v.y, s.z + v.z, s.w + v.w);
        }
        write_four(p, run.tile, e % MULTIPLIERS, e / MULTIPLIERS, s);
    }
}

DEVICE void multiply(const Args &p, u32 ring, u32 full, u32 empty) {
    const int thread = threadIdx.x, group = thread >> 7;
    const bool elected = (thread & 31) == 0;
    u32 stage = 0, parity = 0;
    auto release = [&](u32 stage) {
        if (elected) barrier_arrive(empty + 8 * stage);
    };
    Run run(p);
    for (; run.at < run.end; run.next(p)) {
        // High and low plane side by side.
        float c[N];
#pragma unroll
        for (int e = 0; e < N; e++) c[e] = 0.0f;
        u32 before = 0;
        for (u32 chunk = 0; chunk < run.count; chunk++) {
            barrier_wait(full + 8 * stage, parity);
            shared_written();
            const u32 at = ring + stage * STAGE_BYTES;
            const u32 a = describe_low(at + group * 8192), b = describe_low(at + WEIGHT_BYTES);
            products_begin();
#pragma unroll
            for (int k = 0; k < 4; k++) Both<2 * N>::multiply(c, describe_at(a + 2 * k), describe_at(b + 2 * k), 1);
            products_commit();
            if (chunk > 0) {
                products_done<1>();
                release(before);
            }
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        products_done<0>();
        hold(c);
        release(before);
#pragma unroll
        for (int e = 0; e < N / 2; e++) c[e] += c[N / 2 + e];
        if (run.whole(p)) {
#pragma unroll
            for (int n = 0; n < NT; n++) write_four(p, run.tile, thread, n, make_float4(c[4 * n], c[4 * n + 1], c[4 * n + 2], c[4 * n + 3]));
            continue;
        }
        float4 *own = p.sums + (2ull * blockIdx.x + (run.tile != run.first)) * ALL + thread;
#pragma unroll
        for (int n = 0; n < NT; n++) own[n * MULTIPLIERS] = make_float4(c[4 * n], c[4 * n + 1], c[4 * n + 2], c[4 * n + 3]);
        __threadfence();
        meet(1, MULTIPLIERS);
        if (thread == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.counts + run.tile) : "memory");
    }
    // Of the first and of the last tile, where other blocks have parts of them.
    run = Run(p);
    for (int last = 0; last < 2 && run.at < run.end; last++) {
        if (!run.whole(p)) add_up(p, run, thread);
        run.at = max_of(run.at + run.count, (run.end - 1) / p.chunks * p.chunks);
        if (run.at < run.end) run.seek(p);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) several(const __grid_constant__ Args p) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ const u8 *rows[TILE];
    __shared__ u64 barriers[2 * STAGES];
    const u32 ring = (shared_address(shared) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, COPIERS + (PLANES ? 1 : TURNERS / 32));
            barrier_init(empty + 8 * s, 4 * WARPGROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < MULTIPLIERS) {
        multiply(p, ring, full, empty);
    } else if (PLANES || threadIdx.x < MULTIPLIERS + COPIERS) {
        copy_weights(p, ring, full, empty, rows);
    } else {
#if !PLANES
        turn_rows(p, ring, full, empty);
#endif
    }
}

// x[row] as the products copy it: for each chunk the high and the low plane of N rows, swizzled. A thread eight columns of a row.
KERNEL turn(const float *x, const u32 *list, int rows, int x_stride, int chunks, u8 *to) {
    const u32 at = blockIdx.x * 256 + threadIdx.x, piece = at & 7, row = at / 8 % N, chunk = at / 8 / N;
    let_next_begin();
    after_previous();
    if ((int)chunk >= chunks) return;
    float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
    if (row < rows) {
        const float4 *from = (const float4 *)(x + (u64)(list ? list[row] : row) * x_stride + chunk * 64 + 8 * piece);
        a = from[0], b = from[1];
    }
    uint4 high, low;
    split(a, b, high, low);
    u8 *place = to + (u64)chunk * (2 * PLANE_BYTES) + row * 128 + ((piece ^ (row & 7)) << 4);
    *(uint4 *)place = high;
    *(uint4 *)(place + PLANE_BYTES) = low;
}
