// Grouped products of INT4 experts for few tokens an expert: as fast as the weights arrive.
//
// A tile is 64 ROWS rows of A, weights of one expert (SWIGLU: 32 ROWS features, gate and up rows alternating by eight), by all
// their columns and up to 8 TILES of the expert's tokens. One warp copies stages of TOGETHER groups of columns (weights in runs of
// 4224 TOGETHER bytes, tokens) into a ring that runs on from tile to tile. ROWS x PARTS warps multiply by m16n8k16: warp (r, s)
// takes 64 rows of the groups s, s + PARTS, ..; a group is one job, 64 x 128 weights, and a stage is given back by the warps
// that take its groups, whichever come first. At a tile's end the PARTS sums meet in shared memory, counted by barriers.
//
// Arithmetic of a group: codes go into the product as they are (subnormal halves, one mask for two; see experts.cuh). A product
// with constant A gives -8 times the sum of the tokens' columns, from which the sums of the group start; a fused multiply-add
// with the scale in f32 adds them to the tile's. So weights are exact, with 5 integer operations for 8 codes instead of 9, half
// of them conversions.
//
// Order of a sum: groups of a warp ascending, then pairs of warps. It depends on the columns alone: a row's bits do not depend on
// the rows beside it. Tiles go to blocks in turn.
//
// Early: a launch whose work list was there before the launch in front of it began requests its first stages' weights while
// that one still runs, and waits for it only with the tokens.
//
// Limits: compute capability 9.0; PARTS divides the groups and TOGETHER divides PARTS; ROWS PARTS a multiple of 4.
//
// Constants: SWIGLU, TILES (1 or 2), ROWS (even with SWIGLU), PARTS, TOGETHER, STAGES.
#include "common.cuh"
#include "wgmma.cuh"
#include "async.cuh"
#include "experts.cuh"

// A warp's group of a tile behind which the tile before ends, or 0: a tile ends with its own last group. It gains 2 to 4 % where two
// tiles of tokens make products the longer part, and costs as much elsewhere.
#define LATE (TILES == 1 ? 0 : SWIGLU ? 2 : 1)
#define WARPS (ROWS * PARTS)
#define WEIGHT_BYTES (ROWS * TOGETHER * GROUP_BYTES)
#define PIECE_BYTES (TILES * 1024)
#define STAGE_BYTES (WEIGHT_BYTES + 2 * TOGETHER * PIECE_BYTES)
// A tile's sums as a warp holds them, [PARTS] of them.
#define SUMS (ROWS * 4 * TILES)
#define SUM_BYTES (PARTS * SUMS * 512)
// The result of products of codes at their places.
#define WEIGHT 1048576.0f

DEVICE void load_matrices(u32 (&b)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address));
}

// An 8 x 8 matrix of halves, a row by four lanes, transposed.
DEVICE u32 transposed(u32 a) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// d = a b + c, as `mma_half`.
DEVICE void product(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, "
        "%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// A tile: where its weights and tokens are.
struct Tile {
    Item item;
    u32 strip;
    const u8 *weights;  // this lane's strip of 64 rows
};

// Stages of a block's tiles, one after the other, as the copying warp sees them. Lanes below ROWS copy weights, the next
// 2 TOGETHER tokens.
struct Source {
    int next, step, stage, per;  // next tile; stage in this tile of `per`
    Tile tile;

    __device__ __forceinline__ Source(const Args &p, int begin, int step)
        : next(begin), step(step), stage(0), per(p.groups / TOGETHER), tile(at(p, begin)) {
        next += step;
    }

    static __device__ __forceinline__ Tile at(const Args &p, int i) {
        const int lane = threadIdx.x & 31, half = SWIGLU ? ROWS / 2 : ROWS, last = (p.outputs + 63) / 64 - 1;
        Tile t;
        t.item = item_at(p, i / p.strips);
        t.strip = i % p.strips;
        const Weights *w = p.table + t.item.expert;
        const u8 *matrix = !SWIGLU ? w->down : lane < half ? w->gate : w->up;
        t.weights = matrix + (u64)min_of(half * (int)t.strip + lane % half, last) * p.groups * GROUP_BYTES;
        return t;
    }

    // Announces the stage of number `n` and requests its weights.
    __device__ __forceinline__ void weights(int n, u32 to, u32 full, u32 header) const {
        const int lane = threadIdx.x & 31;
        if (lane == 0) {
            store_words(header, make_uint4(tile.item.first, tile.item.count, tile.strip, n));
            barrier_expect(full, WEIGHT_BYTES + 2 * TOGETHER * 128 * tile.item.count);
        }
        __syncwarp();
        if (lane < ROWS)
            copy_bulk(to + lane * TOGETHER * GROUP_BYTES, tile.weights + (u64)stage * TOGETHER * GROUP_BYTES,
                      TOGETHER * GROUP_BYTES, full);
    }

    // Requests a stage's tokens.
    __device__ __forceinline__ void tokens(const Args &p, u32 to, u32 full) const {
        const int piece = (int)(threadIdx.x & 31) - ROWS;
        if (piece >= 0 && piece < 2 * TOGETHER)
            copy_bulk(to + WEIGHT_BYTES + piece * PIECE_BYTES,
                      p.x + ((u64)(2 * TOGETHER * stage + piece) * p.slots + tile.item.first) * 128, 128 * tile.item.count,
                      full);
    }
};

// The copying warp. `count` stages in all.
DEVICE void copy_stages(const Args &p, int begin, int step, int count, u32 base, u32 full, u32 empty, u32 header) {
    if (count == 0) {
        after_previous();
        let_next_begin();
        return;
    }
    const int last = begin + step * (count / (p.groups / TOGETHER) - 1);
    Source source(p, begin, step);
    // What follows is known a tile ahead.
    Tile following = Source::at(p, min_of(source.next, last));
    const auto advance = [&] {
        if (++source.stage < source.per) return;
        source.stage = 0;
        source.tile = following;
        source.next += step;
        following = Source::at(p, min_of(source.next, last));
    };
    int n = 0;
    if (p.early) {
        const int ahead = min_of(count, STAGES);
        const Source start = source;
        const Tile start_following = following;
#pragma unroll 1
        for (; n < ahead; n++) {
            source.weights(n, base + n * STAGE_BYTES, full + 8 * n, header + 16 * n);
            advance();
        }
        after_previous();
        source = start, following = start_following;
#pragma unroll 1
        for (n = 0; n < ahead; n++) {
            source.tokens(p, base + n * STAGE_BYTES, full + 8 * n);
            advance();
        }
    }
    let_next_begin();
    u32 slot = n % STAGES, parity = (n / STAGES & 1) ^ 1;
#pragma unroll 1
    for (; n < count; n++) {
        barrier_wait(empty + 8 * slot, parity);
        source.weights(n, base + slot * STAGE_BYTES, full + 8 * slot, header + 16 * slot);
        source.tokens(p, base + slot * STAGE_BYTES, full + 8 * slot);
        advance();
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
}

// Waits until a word in shared memory has a value. A loop in C would be taken for one that ends at once.
DEVICE void wait_for(u32 address, u32 value) {
    asm volatile(
        "{\n.reg .pred there;\n.reg .u32 v;\nlook:\nld.volatile.shared.u32 v, [%0];\nsetp.eq.u32 there, v, %1;\n@!there bra "
        "look;\n}\n" ::"r"(address),
        "r"(value)
        : "memory");
}

// total += products of a group, 64 rows by `TILES` tiles of tokens, of which `more` says whether there is a second one.
DEVICE void multiply(float (&total)[4][TILES][4], u32 low, u32 high, u32 tokens, bool more) {
    const int lane = threadIdx.x & 31;
    const u32 next = SWIGLU ? BLOCK_BYTES : 2 * BLOCK_BYTES;
    float offset[TILES][4];
    u32 b[TILES][4][4];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        if (j > 0 && !more) break;
#pragma unroll
        for (int k = 0; k < 4; k++)
            load_matrices(b[j][k], tokens + (k >> 1) * PIECE_BYTES + j * 1024 + (lane & 7) * 128 +
                                       (((4 * (k & 1) + (lane >> 3)) ^ (lane & 7)) << 4));
#pragma unroll
        for (int e = 0; e < 4; e++) offset[j][e] = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int h = 0; h < 4; h += 2)
                product(offset[j], LOW_OFFSET, LOW_OFFSET, HIGH_OFFSET, HIGH_OFFSET, b[j][k][h], b[j][k][h + 1], offset[j]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 v = shared_words(low + i * next + 16 * lane), w = shared_words(high + i * next + 16 * lane);
        const float scale = widen(shared_half(low + i * next + 512 + 2 * (lane >> 2)));
        const float other = widen(shared_half(high + i * next + 512 + 2 * (lane >> 2)));
        float sum[TILES][4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 a = word_of(v, k), c = word_of(w, k);
#pragma unroll
            for (int h = 0; h < 4; h += 2) {
#pragma unroll
                for (int j = 0; j < TILES; j++) {
                    if (j > 0 && !more) break;
                    product(sum[j], a & LOW_CODES, c & LOW_CODES, a & HIGH_CODES, c & HIGH_CODES, b[j][k][h], b[j][k][h + 1],
                            k + h == 0 ? offset[j] : sum[j]);
                }
                a = rotated(a), c = rotated(c);
            }
        }
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            if (j > 0 && !more) break;
            total[i][j][0] = fmaf(scale, sum[j][0], total[i][j][0]);
            total[i][j][1] = fmaf(scale, sum[j][1], total[i][j][1]);
            total[i][j][2] = fmaf(other, sum[j][2], total[i][j][2]);
            total[i][j][3] = fmaf(other, sum[j][3], total[i][j][3]);
        }
    }
}

// Writes 16 rows (`i` of the 64 of warp `r`) by 8 tokens (`j`); c = rows g and g + 8 at the tokens 2 t, 2 t + 1.
DEVICE void write(const Args &p, float4 c, u32 first, u32 count, u32 strip, int r, int i, int j) {
    const int lane = threadIdx.x & 31, token = 8 * j + (lane >> 2), pair = 4 * (lane & 3);
    const u32 slot = first + token;
    const bool there = token < (int)count;
#if SWIGLU
    const int out = (int)strip * 32 * ROWS + 32 * r + 8 * i;
    const float m = i & 1 ? 0.25f : 4.0f;
    const u32 v = transposed(narrow_half(m * quick_swiglu(c.x, c.z, p.limit), m * quick_swiglu(c.y, c.w, p.limit)));
    if (there && out < p.outputs)
        *(u32 *)(p.y + ((u64)(out >> 6) * p.slots + slot) * 128 + ((((out >> 3) ^ slot) & 7) << 4) + pair) = v;
#else
    const int out = (int)strip * 64 * ROWS + 64 * r + 16 * i;
    const u32 v = transposed(narrow_half(c.x, c.y)), w = transposed(narrow_half(c.z, c.w));
    u8 *to = p.y + ((u64)(out >> 6) * p.slots + slot) * 128 + pair;
    if (there && out < p.outputs) *(u32 *)(to + ((((out >> 3) ^ slot) & 7) << 4)) = v;
    if (there && out + 8 < p.outputs) *(u32 *)(to + ((((out >> 3) + 1 ^ slot) & 7) << 4)) = w;
#endif
}

// A warp's sums of a tile for the others.
DEVICE void leave(const float (&total)[4][TILES][4], u32 room) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = warp % ROWS, s = warp / ROWS;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            const float *t = total[i][j];
            store_words(room + (s * SUMS + (r * 4 + i) * TILES + j) * 512 + 16 * lane,
                        make_uint4(__float_as_uint(t[0]), __float_as_uint(t[1]), __float_as_uint(t[2]), __float_as_uint(t[3])));
        }
}

DEVICE float4 part_at(u32 address) {
    const uint4 w = shared_words(address);
    return make_float4(__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w));
}

// The sum of COUNT parts from `first` on, pairs first.
template <int COUNT>
DEVICE float4 sum_of(u32 first) {
    if constexpr (COUNT == 1) {
        return part_at(first);
    } else {
        const float4 a = sum_of<COUNT / 2>(first), b = sum_of<COUNT / 2>(first + COUNT / 2 * SUMS * 512);
        return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    }
}

// A tile's end, in each warp a share: the sums of the warps over groups meet.
DEVICE void finish(const Args &p, u32 room, uint4 head) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
    for (int v = warp; v < SUMS; v += WARPS) {
        const int j = v % TILES;
        if (8 * j >= (int)head.y) continue;
        const float4 sum = sum_of<PARTS>(room + v * 512 + 16 * lane);
        write(p, make_float4(sum.x * WEIGHT, sum.y * WEIGHT, sum.z * WEIGHT, sum.w * WEIGHT), head.x, head.y, head.z, v / TILES / 4,
              v / TILES % 4, j);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS + 128, 1) experts(const __grid_constant__ Args p) {
    extern __shared__ u8 dynamic[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 base = (shared_address(dynamic) + 127) & ~127u, room = base + STAGES * STAGE_BYTES;
    const u32 full = room + SUM_BYTES, empty = full + 8 * STAGES, header = empty + 8 * STAGES;
    // A tile's sums are all there; and have all been read.
    const u32 ready = header + 16 * STAGES, done = ready + 8;
    if (threadIdx.x == 0) {
        barrier_init(ready, WARPS), barrier_init(done, WARPS);
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, ROWS * TOGETHER);
            store_words(header + 16 * i, make_uint4(0, 0, 0, FULL));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (!p.early) after_previous();
    const int all = load_far(p.item_count) * p.strips, begin = blockIdx.x, step = gridDim.x;
    const int tiles = begin < all ? (all - begin + step - 1) / step : 0, per = p.groups / TOGETHER;
    if (warp >= WARPS) {
#if WARPS == 16
        // Registers of a block of 20 warps: 16 x 112 + 4 x 32 are all there are.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
        if (warp == WARPS) copy_stages(p, begin, step, tiles * per, base, full, empty, header);
    } else {
#if WARPS == 16
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
#endif
        // Before the first write; and what it replaces has been read.
        if (p.early) after_previous();
        const int r = warp % ROWS, s = warp / ROWS, k = s % TOGETHER;
        // This warp's first blocks in a stage, of the rows g and g + 8 of an A tile.
        const u32 low = k * GROUP_BYTES + (SWIGLU ? (r >> 1) * TOGETHER * GROUP_BYTES + (r & 1) * 4 * BLOCK_BYTES : r * TOGETHER * GROUP_BYTES);
        const u32 high = low + (SWIGLU ? ROWS / 2 * TOGETHER * GROUP_BYTES : BLOCK_BYTES);
        // A tile ends behind a group of the next one (LATE), so that few warps wait for others.
        const int late = s + min_of(LATE - 1, p.groups / PARTS - 1) * PARTS;
        uint4 head = make_uint4(0, 0, 0, 0);
        const auto end_tile = [&](int n, uint4 of) {
            barrier_wait(ready, n & 1);
            finish(p, room, of);
            __syncwarp();
            if (lane == 0) barrier_arrive(done);
        };
#pragma unroll 1
        for (int n = 0; n < tiles; n++) {
            float total[4][TILES][4] = {};
            const uint4 before = head;
#pragma unroll 1
            for (int q = s; q < p.groups; q += PARTS) {
                const u32 stage = n * per + q / TOGETHER, slot = stage % STAGES, at = base + slot * STAGE_BYTES;
                // A warp does not see every use of a slot, so a barrier's parity alone could be that of an earlier one.
                wait_for(header + 16 * slot + 12, stage);
                barrier_wait(full + 8 * slot, stage / STAGES & 1);
                head = shared_words(header + 16 * slot);
                multiply(total, at + low, at + high, at + WEIGHT_BYTES + 2 * k * PIECE_BYTES, head.y > 8);
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + 8 * slot);
                if (LATE && n > 0 && q == late) end_tile(n - 1, before);
            }
            if (n > 0) barrier_wait(done, (n - 1) & 1);
            leave(total, room);
            __syncwarp();
            if (lane == 0) barrier_arrive(ready);
            if (!LATE) end_tile(n, head);
        }
        if (LATE && tiles > 0) end_tile(tiles - 1, head);
    }
}
