// Latent attention over selected tokens on warpgroup products: absorbed queries, one latent as key and value.
//
// o[h] = sum_j softmax_j(scale q~[h] . c[j]) c[j] over the tokens j of a row's list; q~ and c are halves, sums are f32.
//
// Operands are swapped: a tile of 64 tokens is the product's 64 rows and the heads are its columns, so 8, 16 or 32 heads fill
// the tensor cores without padding. S^T = C Q^T (64 x HEADS), then O^T = C^T P^T (512 x HEADS): both read the tile where it lies, once
// as rows of tokens and once, by the descriptor, as rows of latents.
//
// A block is four warpgroups (sparse.cuh has the last two): one has the scores of a tile and their weights, one multiplies weights
// and tile, with O^T in registers (HEADS x 4), one gathers and one looks ahead. So scores of a tile run beside sums of the one in
// front of it and beside the end of an item, and a tile leaves the ring as soon as both have read it: what it waits there for is
// time in which nothing can be asked for.
//
// Softmax: weights refer to a maximum that moves only where one would grow beyond 2^8, so most tiles need no exchange of maxima
// among the lanes and warps that share a head.
//
// A row's list is cut into parts by the number of its own tokens alone; how many there are says the step's number of rows (sparse.rs).
// A part is a work item, blocks take items in turn. `merge` adds parts in their order, a whole row's item is the result. So a
// row's bits depend neither on other rows nor on the device.
//
// The scouts begin before the launch in front has ended: lists and page tables must be older than that launch, which must have
// waited for the one in front of it before it lets the next begin. Here that launch absorbs the queries.
//
// Layout: latents [pages][PAGE][512] halves; queries [rows][heads][512] halves, infinite ones count as the largest; a result of one
// part as f32 or halves; pieces [rows, groups, parts] of HEADS times 512 f32 in the order of threads and registers, with their
// maximum (base 2) and sum [rows, groups, parts][HEADS][2].
// Constants: HEADS heads of an item (8, 16 or 32), PAGE tokens of a page.
//
// Limits: latents of 512; compute capability 9.0; shared memory of a whole multiprocessor.
//
// Versions are in benches/records/h200-attention.md. With descriptors that the compiler does not know to be uniform every
// product waits for moves to uniform registers: hence the shuffles from lane 0.
#include "common.cuh"
#include "wgmma.cuh"
#include "async.cuh"
#include "sparse.cuh"

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Infinite halves of a pair to the largest ones: queries may come of sums that did not fit.
DEVICE u32 finite(u32 pair) {
    u32 v;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(v) : "r"(pair), "r"(0x7bff7bffu));
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(v) : "r"(0xfbfffbffu));
    return v;
}

#define SCORERS 128

// The warpgroup of scores and weights.
DEVICE void score(const Args &p, u8 *room, u32 base, const Barriers &bars) {
    const int thread = threadIdx.x & 127, warp = __shfl_sync(FULL, thread >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float *tops = (float *)(room + TOP_AT);
    volatile u32 *mark = (volatile u32 *)(room + MARK_AT);
    u32 first_unit = 0, tiles = 0, number = 0;
    for (u32 at = blockIdx.x; at < p.items; at += gridDim.x, number++) {
        const Item item = take_item(p, room, bars, at, number);
        // Queries out of the ring: HEADS rows in eight pieces of 64 columns.
#pragma unroll
        for (int u = 0; u < QUERY_UNITS; u++) {
            const u32 unit = first_unit + u, slot = unit % UNITS;
            barrier_wait(bars.units_full + 8 * slot, unit / UNITS & 1);
#pragma unroll
            for (int i = 0; i < HEADS / (2 * QUERY_UNITS); i++) {
                const uint4 v = *(const uint4 *)(room + slot * UNIT + (128 * i + thread) * 16);
                *(uint4 *)(room + QUERY_AT + u * (HEADS * 1024 / QUERY_UNITS) + (128 * i + thread) * 16) =
                    make_uint4(finite(v.x), finite(v.y), finite(v.z), finite(v.w));
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(bars.units_empty + 8 * slot);
        }
        shared_written();
        meet(1, SCORERS);
        first_unit += QUERY_UNITS;

        float top[HEADS / 4], total[HEADS / 4];
#pragma unroll
        for (int i = 0; i < HEADS / 4; i++) {
            top[i] = -INFINITY;
            total[i] = 0.0f;
        }
        for (int tile = item.first_tile; tile < item.last_tile; tile++, tiles++, first_unit += 4) {
            float s[HEADS / 2];
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const u32 slot = (first_unit + q) % UNITS, from = base + slot * UNIT;
                barrier_wait(bars.units_full + 8 * slot, (first_unit + q) / UNITS & 1);
                shared_written();
                products_begin();
#pragma unroll
                for (int b = 0; b < 2; b++)
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        SharedProduct<HEADS, 0>::multiply(s, describe(from + b * (TILE * 128)) + 2 * k,
                                                          describe(base + QUERY_AT + (2 * q + b) * (HEADS * 128)) + 2 * k, q + b + k);
            }
            products_commit();
            products_done<0>();
            const u32 buffer = tiles & 1, weights = base + WEIGHT_AT + buffer * (HEADS * 128);
            const int token = tile * TILE + 16 * warp + g;
            const bool low = token < item.count, high = token + 8 < item.count;
#pragma unroll
            for (int i = 0; i < HEADS / 2; i++) s[i] = (i & 2 ? high : low) ? s[i] * p.scale : -INFINITY;
            // Weights from the reference so far; where one would grow beyond 2^8 (and for the first tile) the tile's maxima are found.
            float weight[HEADS / 2];
            auto store_weights = [&] {
#pragma unroll
                for (int i = 0; i < HEADS / 2; i++) weight[i] = exp2_fast(s[i] - top[(i >> 2) * 2 + (i & 1)]);
#pragma unroll
                for (int n = 0; n < HEADS / 8; n++) {
                    u32 a, b;
                    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(a) : "f"(weight[4 * n + 1]), "f"(weight[4 * n]));
                    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(b) : "f"(weight[4 * n + 3]), "f"(weight[4 * n + 2]));
                    const int head = 8 * n + (lane & 7), chunk = 2 * warp + ((lane >> 3) & 1);
                    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                                     weights + head * 128 + ((chunk ^ (head & 7)) << 4)),
                                 "r"(a), "r"(b)
                                 : "memory");
                }
                shared_written();
            };
            barrier_wait(bars.weights_empty + 8 * buffer, (tiles >> 1 & 1) ^ 1);
            const bool first = tile == item.first_tile;
            bool grown = first;
            if (!grown) {
                bool beyond = false;
#pragma unroll
                for (int i = 0; i < HEADS / 2; i++) beyond |= s[i] > top[(i >> 2) * 2 + (i & 1)] + 8.0f;
                if (__any_sync(FULL, beyond) && lane == 0) *mark = tiles + 1;
                store_weights();
                meet(1, SCORERS);
                grown = *mark == tiles + 1;
            }
            if (grown) {
                float best[HEADS / 4];
#pragma unroll
                for (int i = 0; i < HEADS / 4; i++) {
                    best[i] = fmaxf(s[(i >> 1) * 4 + (i & 1)], s[(i >> 1) * 4 + (i & 1) + 2]);
#pragma unroll
                    for (int d = 4; d < 32; d <<= 1) best[i] = fmaxf(best[i], __shfl_xor_sync(FULL, best[i], d));
                }
                if (g == 0)
#pragma unroll
                    for (int i = 0; i < HEADS / 8; i++)
                        *(float2 *)(tops + warp * HEADS + 8 * i + 2 * t) = make_float2(best[2 * i], best[2 * i + 1]);
                meet(1, SCORERS);
                float *keeps = (float *)(room + KEEP_AT) + buffer * HEADS;
#pragma unroll
                for (int i = 0; i < HEADS / 4; i++) {
                    const int head = 8 * (i >> 1) + 2 * t + (i & 1);
                    float m = fmaxf(fmaxf(tops[head], tops[HEADS + head]), fmaxf(tops[2 * HEADS + head], tops[3 * HEADS + head]));
                    m = m > top[i] + 8.0f ? m : top[i];
                    const float keep = exp2_fast(top[i] - m);
                    top[i] = m;
                    total[i] *= keep;
                    if (warp == 0 && g == 0) keeps[head] = keep;
                }
                store_weights();
                meet(1, SCORERS);
            }
#pragma unroll
            for (int i = 0; i < HEADS / 4; i++) total[i] += weight[(i >> 1) * 4 + (i & 1)] + weight[(i >> 1) * 4 + (i & 1) + 2];
            if (thread == 0) {
                mark[2 + buffer] = grown && !first;
                barrier_arrive(bars.weights_full + 8 * buffer);
            }
        }
        // Sums over the tokens: lanes, then warps.
#pragma unroll
        for (int i = 0; i < HEADS / 4; i++)
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) total[i] += __shfl_xor_sync(FULL, total[i], d);
        if (g == 0)
#pragma unroll
            for (int i = 0; i < HEADS / 4; i++) tops[warp * HEADS + 8 * (i >> 1) + 2 * t + (i & 1)] = total[i];
        meet(1, SCORERS);
        if (warp == 0) {
            if (p.parts == 1) barrier_wait(bars.factors_empty, (number & 1) ^ 1);
            if (g == 0)
#pragma unroll
                for (int i = 0; i < HEADS / 4; i++) {
                    const int head = 8 * (i >> 1) + 2 * t + (i & 1);
                    const float sum = (tops[head] + tops[HEADS + head]) + (tops[2 * HEADS + head] + tops[3 * HEADS + head]);
                    if (p.parts > 1)
                        p.stats[(u64)at * HEADS + head] = make_float2(top[i], sum);
                    else
                        ((float *)(room + FACTOR_AT))[head] = sum != 0.0f ? 1.0f / sum : 0.0f;
                }
            __syncwarp();
            if (p.parts == 1 && lane == 0) barrier_arrive(bars.factors_full);
        }
    }
}

// The warpgroup of sums of latents.
DEVICE void sum_up(const Args &p, u8 *room, u32 base, const Barriers &bars) {
    const int thread = threadIdx.x & 127, warp = __shfl_sync(FULL, thread >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    volatile u32 *mark = (volatile u32 *)(room + MARK_AT);
    u32 first_unit = 0, tiles = 0, number = 0;
    for (u32 at = blockIdx.x; at < p.items; at += gridDim.x, number++) {
        const Item item = take_item(p, room, bars, at, number);
        first_unit += QUERY_UNITS;
        float out[8][HEADS / 2];
#pragma unroll
        for (int i = 0; i < 4 * HEADS; i++) out[i / (HEADS / 2)][i % (HEADS / 2)] = 0.0f;
        for (int tile = item.first_tile; tile < item.last_tile; tile++, tiles++, first_unit += 4) {
            const u32 buffer = tiles & 1, weights = base + WEIGHT_AT + buffer * (HEADS * 128);
            barrier_wait(bars.weights_full + 8 * buffer, tiles >> 1 & 1);
            if (mark[2 + buffer]) {
                const float *keeps = (const float *)(room + KEEP_AT) + buffer * HEADS;
#pragma unroll
                for (int n = 0; n < HEADS / 8; n++) {
                    const float2 keep = *(const float2 *)(keeps + 8 * n + 2 * t);
#pragma unroll
                    for (int b = 0; b < 8; b++) {
                        out[b][4 * n] *= keep.x;
                        out[b][4 * n + 1] *= keep.y;
                        out[b][4 * n + 2] *= keep.x;
                        out[b][4 * n + 3] *= keep.y;
                    }
                }
            }
#pragma unroll
            for (int q = 0; q < 4; q++) barrier_wait(bars.units_full + 8 * ((first_unit + q) % UNITS), (first_unit + q) / UNITS & 1);
            shared_written();
            products_begin();
            // A quarter of the columns is free when its sums are there.
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const u32 from = base + (first_unit + q) % UNITS * UNIT;
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int b = 0; b < 2; b++)
                        SharedProduct<HEADS, 1>::multiply(out[2 * q + b], describe(from + b * (TILE * 128) + k * 2048),
                                                          describe(weights) + 2 * k, 1);
                products_commit();
            }
            auto release = [&](int q) {
                __syncwarp();
                if (lane == 0) barrier_arrive(bars.units_empty + 8 * ((first_unit + q) % UNITS));
            };
            products_done<3>();
            release(0);
            products_done<2>();
            release(1);
            products_done<1>();
            release(2);
            products_done<0>();
            release(3);
            if (lane == 0) barrier_arrive(bars.weights_empty + 8 * buffer);
        }
        if (p.parts > 1) {
            float4 *to = (float4 *)p.pieces + (u64)at * (HEADS * 128) + thread;
#pragma unroll
            for (int b = 0; b < 8; b++)
#pragma unroll
                for (int n = 0; n < HEADS / 8; n++)
                    to[(b * (HEADS / 8) + n) * 128] = make_float4(out[b][4 * n], out[b][4 * n + 1], out[b][4 * n + 2], out[b][4 * n + 3]);
            continue;
        }
        barrier_wait(bars.factors_full, number & 1);
        const u32 head = item.group * HEADS + 2 * t;
        const u64 place = ((u64)item.row * p.heads + head) * LATENT + 16 * warp;
        // Sums of a head, scaled: columns 64 b + g and + 8 further of block b.
        auto each_head = [&](auto write) {
#pragma unroll
            for (int n = 0; n < HEADS / 8; n++) {
                const float2 by = *(const float2 *)(room + FACTOR_AT + (8 * n + 2 * t) * 4);
#pragma unroll
                for (int e = 0; e < 2; e++)
#pragma unroll
                    for (int b = 0; b < 8; b++)
                        write(out[b][4 * n + e] * (e ? by.y : by.x), out[b][4 * n + 2 + e] * (e ? by.y : by.x), 8 * n + e, 64 * b);
            }
        };
        if (p.halves) {
            // Of the columns g and g + 8 to 2 g and 2 g + 1: 32 bytes of eight lanes.
            u16 *to = (u16 *)p.pieces + place + 2 * g;
            const int from = 8 * (g & 3) + t, bytes = g < 4 ? 0x5410 : 0x7632;
            each_head([&](float low, float high, int h, int column) {
                const u32 pair = narrow_half(low, high);
                const u32 even = __shfl_sync(FULL, pair, from), odd = __shfl_sync(FULL, pair, from + 4);
                if (head + h < p.heads) *(u32 *)(to + h * LATENT + column) = __byte_perm(even, odd, bytes);
            });
        } else {
            float *to = p.pieces + place + g;
            each_head([&](float low, float high, int h, int column) {
                if (head + h >= p.heads) return;
                to[h * LATENT + column] = low;
                to[h * LATENT + column + 8] = high;
            });
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(bars.factors_empty);
    }
}

extern "C" __global__ void __launch_bounds__(512, 1) attend_selected(const __grid_constant__ Args p) {
    extern __shared__ __align__(1024) u8 room[];
    const u32 base = shared_address(room);
    const Barriers b = barriers_at(base + BARRIER_AT);
    if (threadIdx.x == 0) {
        *(uint4 *)(room + MARK_AT) = make_uint4(0, 0, 0, 0);
        for (int i = 0; i < UNITS; i++) {
            barrier_init(b.units_full + 8 * i, GATHERERS);
            barrier_init(b.units_empty + 8 * i, 4);
        }
        for (int i = 0; i < PLACES; i++) {
            barrier_init(b.places_full + 8 * i, TILE);
            barrier_init(b.places_empty + 8 * i, GATHERERS / 32);
        }
        for (int i = 0; i < ITEMS; i++) {
            barrier_init(b.items_full + 8 * i, 1);
            barrier_init(b.items_empty + 8 * i, (CONSUMERS + GATHERERS) / 32);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(b.weights_full + 8 * i, 1);
            barrier_init(b.weights_empty + 8 * i, 4);
        }
        barrier_init(b.factors_full, 1);
        barrier_init(b.factors_empty, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS + GATHERERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        // Lists and pages are older than the launch in front, which has waited for theirs.
        scout(p, room, b);
    } else if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        after_previous();
        let_next_begin();
        gather(p, room, base, b);
    } else if (threadIdx.x >= SCORERS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        after_previous();
        sum_up(p, room, base, b);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
        after_previous();
        score(p, room, base, b);
    }
}

// out[row, head] = the parts' sums over the parts' totals. Grid (rows, eights of heads, 4), 128 threads, each with the registers of
// the thread that left them; zero for an empty list.
template <int PARTS>
DEVICE void merge(const float4 *pieces, const float2 *stats, int groups, int heads, float *out) {
    after_previous();
    let_next_begin();
    const int row = blockIdx.x, group = blockIdx.y / (HEADS / 8), n = blockIdx.y % (HEADS / 8);
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    const u64 first = ((u64)row * groups + group) * PARTS;
    float4 stat[PARTS], piece[2][PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) stat[i] = *(const float4 *)(stats + (first + i) * HEADS + 8 * n + 2 * t);
#pragma unroll
    for (int b = 0; b < 2; b++)
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            piece[b][i] = pieces[((first + i) * 4 + blockIdx.z) * (HEADS * 32) + (b * (HEADS / 8) + n) * 128 + threadIdx.x];
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f}, sum[2][4] = {};
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        top[0] = fmaxf(top[0], stat[i].x);
        top[1] = fmaxf(top[1], stat[i].z);
    }
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const float at[2] = {stat[i].x, stat[i].z}, of[2] = {stat[i].y, stat[i].w};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (of[e] == 0.0f) continue;
            const float keep = exp2_fast(at[e] - top[e]);
            total[e] = fmaf(keep, of[e], total[e]);
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const float4 v = piece[b][i];
                sum[b][e] = fmaf(keep, e ? v.y : v.x, sum[b][e]);
                sum[b][2 + e] = fmaf(keep, e ? v.w : v.z, sum[b][2 + e]);
            }
        }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int head = group * HEADS + 8 * n + 2 * t + e;
        if (head >= heads) continue;
        const float by = total[e] != 0.0f ? 1.0f / total[e] : 0.0f;
        float *to = out + ((u64)row * heads + head) * LATENT + 128 * blockIdx.z + 16 * warp + g;
#pragma unroll
        for (int b = 0; b < 2; b++) {
            to[64 * b] = sum[b][e] * by;
            to[64 * b + 8] = sum[b][2 + e] * by;
        }
    }
}
KERNEL merge_4(const float4 *pieces, const float2 *stats, int groups, int heads, float *out) {
    merge<4>(pieces, stats, groups, heads, out);
}
KERNEL merge_5(const float4 *pieces, const float2 *stats, int groups, int heads, float *out) {
    merge<5>(pieces, stats, groups, heads, out);
}
