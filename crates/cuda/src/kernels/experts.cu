// Grouped products of INT4 experts for few tokens each: every warp streams its own weights.
//
// A job is 32 rows of one expert over all columns (SWIGLU: 16 gate and the same 16 up rows). Each block takes a contiguous,
// equal share of all jobs, so that its warps mostly work on one expert and find its activations in the first-level cache. A
// job's columns fall into SEGMENTS; the warps of a block take contiguous, equal shares of its jobs' segments. A warp keeps
// DEPTH stages of weights under way with bulk copies into shared memory, across the ends of jobs, and sums in registers.
//
// A job's sum is ((s0 + s1) + s2) + ... over its segments' sums, whoever took them: pieces of a job that warps share wait in
// shared memory until all warps are done, and the owner of the last segment adds them in that order. So the bits do not
// depend on the shares, which depend on the other rows of the step.
//
// Constants: SWIGLU, PLANES (1 leaves the low part of activations out), NT (tiles of 8 tokens an item), GROUPS (groups of 128
// columns a stage), WARPS, DEPTH, UNROLL (groups), SEGMENTS.
#include "common.cuh"

#define TILE_BYTES 528
#define STAGE_BYTES (4 * GROUPS * TILE_BYTES)
#define TOKENS (8 * NT)
#define MAX_ITEMS 32
// Many tokens come with many jobs: whole jobs are shared evenly enough.
#define SPLIT (NT == 1 && SEGMENTS > 1)
#ifndef UNROLL
#define UNROLL 1
#endif

struct Weights {
    const u8 *gate, *up, *down;
};

struct Item {
    u32 expert, first, count;
};

// As in gemm.cu.
struct Args {
    const u8 *w0, *w1;
    const Weights *table;
    const Item *items;
    const u32 *item_count;
    const u32 *list;
    const u16 *x;
    const float *b0, *b1;
    float *y;
    u64 plane, y_plane;
    int rows, outputs, columns, pitch, w_pitch, y_stride, divisor, down;
    float limit;
};

struct Info {
    const u8 *w0, *w1;
    int count;
    u32 rows[TOKENS];
};

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\nbra again;\n"
        "over:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

DEVICE void multiply(float (&c)[2][4], const uint4 (&a)[4], uint4 b) {
#pragma unroll
    for (int i = 0; i < 2; i++) mma_half(c[i], a[2 * i].x, a[2 * i + 1].x, a[2 * i].y, a[2 * i + 1].y, b.x, b.y);
#pragma unroll
    for (int i = 0; i < 2; i++) mma_half(c[i], a[2 * i].z, a[2 * i + 1].z, a[2 * i].w, a[2 * i + 1].w, b.z, b.w);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) experts(const __grid_constant__ Args p) {
    extern __shared__ __align__(128) u8 room[];
    __shared__ Info infos[MAX_ITEMS];
    __shared__ __align__(8) u64 barriers[WARPS * DEPTH];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int rows_a_job = SWIGLU ? 16 : 32;
    const int jobs_an_item = (p.outputs + rows_a_job - 1) / rows_a_job;
    const int groups = p.columns / 128, parts = groups / GROUPS, tiles = p.outputs / 8;

    if (threadIdx.x < WARPS * DEPTH)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers[threadIdx.x])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");

    const int all = (int)*p.item_count * jobs_an_item;
    const int begin = (int)((u64)all * blockIdx.x / gridDim.x), end = (int)((u64)all * (blockIdx.x + 1) / gridDim.x);
    const int first_item = begin / jobs_an_item;
    if (begin < end) {
        const int n = (end - 1) / jobs_an_item - first_item + 1;
        for (int i = threadIdx.x; i < n * TOKENS; i += 32 * WARPS) {
            const Item item = p.items[first_item + i / TOKENS];
            Info &info = infos[i / TOKENS];
            const int token = i % TOKENS;
            info.rows[token] = p.list[item.first + (token < (int)item.count ? token : 0)];
            if (token == 0) {
                const Weights w = p.table[item.expert];
                info.w0 = p.down ? w.down : w.gate;
                info.w1 = w.up;
                info.count = item.count;
            }
        }
    }
    __syncthreads();
    // Units: segments of the block's jobs, in order; this warp takes `first` to `last`.
    const int jobs = end - begin;
    auto share = [&](int w) {
        return SPLIT ? (int)((u64)jobs * SEGMENTS * w / WARPS) : (int)((u64)jobs * w / WARPS) * SEGMENTS;
    };
    const int first = share(warp), last = share(warp + 1), segment_parts = parts / SEGMENTS;

    // Stages come in the order of parts and jobs. Lanes 0 to 3 copy a row tile each.
    u8 *const slots = room + warp * DEPTH * STAGE_BYTES;
    float *const pieces = (float *)(room + WARPS * DEPTH * STAGE_BYTES);
    int ahead_job = begin + first / SEGMENTS, ahead_part = first % SEGMENTS * segment_parts, ahead_slot = 0;
    int ahead = (last - first) * segment_parts;
    const u8 *from = 0;
    auto issue = [&]() {
        if (ahead == 0) return;
        ahead--;
        if (lane < 4) {
            if (ahead_part == 0 || from == 0) {
                const Info &info = infos[ahead_job / jobs_an_item - first_item];
                const int strip = ahead_job % jobs_an_item, tile = SWIGLU ? 2 * strip + (lane >> 1) : 4 * strip + lane;
                from = (SWIGLU && (lane & 1) ? info.w1 : info.w0) + ((u64)min_of(tile, tiles - 1) * groups + ahead_part * GROUPS) * TILE_BYTES;
            }
            const u32 barrier = shared_address(&barriers[warp * DEPTH + ahead_slot]);
            const u32 to = shared_address(slots + ahead_slot * STAGE_BYTES + lane * GROUPS * TILE_BYTES);
            if (lane == 0)
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(STAGE_BYTES)
                             : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                         "l"(from), "r"(GROUPS * TILE_BYTES), "r"(barrier)
                         : "memory");
            from += GROUPS * TILE_BYTES;
        }
        if (++ahead_slot == DEPTH) ahead_slot = 0;
        if (++ahead_part == parts) ahead_part = 0, ahead_job++;
    };
#pragma unroll 1
    for (int d = 0; d < DEPTH; d++) issue();

    const u8 *x_high = (const u8 *)p.x, *x_low = (const u8 *)(p.x + p.plane);
    int slot = 0;
    u32 parity = 0;
    // Sums of a shared job's piece: place 0 .. for segments that another warp's precede, the last place for a beginning.
    auto keep = [&](int place, float (&acc)[NT][2][4]) {
#pragma unroll
        for (int i = 0; i < 8; i++) pieces[((warp * SEGMENTS + place) * 8 + i) * 32 + lane] = acc[0][i >> 2][i & 3];
    };
    auto finish = [&](const Info &info, int strip, float (&acc)[NT][2][4]) {
        const int count = info.count;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int token = 8 * n + 2 * t + c;
                if (token >= count) continue;
                const u64 line = (u64)info.rows[token] * p.y_stride;
#pragma unroll
                for (int i = 0; i < 2; i++) {
#if SWIGLU
                    const int out = strip * 16 + 8 * i + g;
                    if (out >= p.outputs) continue;
                    const float v = clamped_swiglu(acc[n][i][c], acc[n][i][2 + c], p.limit);
                    if (p.y_plane) {
                        store_planes((u16 *)p.y + line + out, p.y_plane, v, true);
                    } else {
                        p.y[line + out] = v;
                    }
#else
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const int out = strip * 32 + 16 * i + 8 * r + g;
                        if (out < p.outputs) p.y[line + out] = acc[n][i][2 * r + c];
                    }
#endif
                }
            }
    };

#pragma unroll 1
    for (int unit = first; unit < last;) {
        const int job = begin + unit / SEGMENTS, segment = unit % SEGMENTS;
        const int segments = min_of(SEGMENTS - segment, last - unit);
        const Info &info = infos[job / jobs_an_item - first_item];
        const int strip = job % jobs_an_item;
        // Missing tokens read the first one's row; their sums are dropped.
        u32 place[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) place[n] = ((info.rows[8 * n + g] / p.divisor) * (p.pitch / 8) + t) * 16;
#if NT < 4
        float total[NT][2][4];
#endif
        uint4 high[NT][4];
#if PLANES > 1
        uint4 low[NT][4];
#endif
        auto activations = [&](int n, int k, int group) {
            const u32 at = place[n] + group * 256;
            high[n][k] = load_cached(x_high + at + 64 * k);
#if PLANES > 1
            low[n][k] = load_cached(x_low + at + 64 * k);
#endif
        };
        // Few tokens: taken up one group ahead. More: their products hide the loads.
#if NT < 4
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int n = 0; n < NT; n++) activations(n, k, segment * segment_parts * GROUPS);
#endif
#pragma unroll 1
        for (int s = 0; s < segments; s++) {
            float acc[NT][2][4];
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 8; i++) acc[n][i >> 2][i & 3] = 0.0f;
#pragma unroll 1
            for (int part = (segment + s) * segment_parts; part < (segment + s + 1) * segment_parts; part++) {
                wait(shared_address(&barriers[warp * DEPTH + slot]), parity);
                const u8 *stage = slots + slot * STAGE_BYTES;
#pragma unroll UNROLL
                for (int q = 0; q < GROUPS; q++) {
                    uint4 w[4];
                    float scale[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        w[j] = *(const uint4 *)(stage + (j * GROUPS + q) * TILE_BYTES + 16 * lane);
                        scale[j] = widen(*(const u16 *)(stage + (j * GROUPS + q) * TILE_BYTES + 512 + 2 * g));
                    }
#if NT < 4
                    const int next = min_of(part * GROUPS + q + 1, groups - 1);
#endif
                    // Two halves of a group are summed apart and added one after the other. With few tokens both are under
                    // way at once, since a product waits long for the one before it.
                    float sum[2][NT][2][4];
                    auto clear = [&](int half) {
#pragma unroll
                        for (int n = 0; n < NT; n++)
#pragma unroll
                            for (int i = 0; i < 8; i++) sum[half][n][i >> 2][i & 3] = 0.0f;
                    };
                    auto block = [&](int half, int k) {
                        uint4 a[4];
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            a[j] = unpack(k == 0 ? w[j].x : k == 1 ? w[j].y : k == 2 ? w[j].z : w[j].w);
#pragma unroll
                        for (int n = 0; n < NT; n++) {
#if NT >= 4
                            activations(n, k, part * GROUPS + q);
#endif
#if PLANES > 1
                            multiply(sum[half][n], a, low[n][k]);
#endif
                            multiply(sum[half][n], a, high[n][k]);
#if NT < 4
                            activations(n, k, next);
#endif
                        }
                    };
                    auto flush = [&](int half) {
#pragma unroll
                        for (int n = 0; n < NT; n++)
#pragma unroll
                            for (int i = 0; i < 8; i++)
                                acc[n][i >> 2][i & 3] =
                                    fmaf(scale[i >> 1], sum[half][n][i >> 2][i & 3], acc[n][i >> 2][i & 3]);
                    };
#if NT == 1
                    clear(0), clear(1);
                    block(0, 0), block(1, 2), block(0, 1), block(1, 3);
                    flush(0), flush(1);
#else
                    clear(0), block(0, 0), block(0, 1), flush(0);
                    clear(0), block(0, 2), block(0, 3), flush(0);
#endif
                }
                __syncwarp();
                issue();
                if (++slot == DEPTH) slot = 0, parity ^= 1;
            }
            if (SPLIT && segment > 0) {
                keep(s, acc);
                continue;
            }
#if NT >= 4
            // Registers are short: the running sum waits in shared memory.
#pragma unroll
            for (int i = 0; i < 8 * NT; i++) {
                float *to = &pieces[(warp * 8 * NT + i) * 32 + lane], &v = acc[i >> 3][(i >> 2) & 1][i & 3];
                if (s > 0) v += *to;
                *to = v;
            }
            if (s + 1 == segments) finish(info, strip, acc);
#else
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    total[n][i >> 2][i & 3] = (s == 0 ? -0.0f : total[n][i >> 2][i & 3]) + acc[n][i >> 2][i & 3];
#endif
        }
#if NT < 4
        if (segment == 0 && segments == SEGMENTS) finish(info, strip, total);
        else if (segment == 0) keep(SEGMENTS - 1, total);
#endif
        unit += segments;
    }

#if SPLIT
    // The first job of this warp, when others began it and this warp ends it.
    __syncthreads();
    const int began = first / SEGMENTS * SEGMENTS;
    if (first >= last || first == began || last < began + SEGMENTS) return;
    int owner = warp;
    while (share(owner) > began) owner--;
    float total[NT][2][4];
    auto piece = [&](int w, int place, int i) { return pieces[((w * SEGMENTS + place) * 8 + i) * 32 + lane]; };
#pragma unroll
    for (int i = 0; i < 8; i++) total[0][i >> 2][i & 3] = piece(owner, SEGMENTS - 1, i);
    for (int w = owner + 1; w <= warp; w++) {
        const int count = min_of(share(w + 1), began + SEGMENTS) - share(w);
        for (int s = 0; s < count; s++)
#pragma unroll
            for (int i = 0; i < 8; i++) total[0][i >> 2][i & 3] += piece(w, s, i);
    }
    const int job = begin + first / SEGMENTS;
    finish(infos[job / jobs_an_item - first_item], job % jobs_an_item, total);
#endif
}
