// Latent attention over selected tokens on warpgroup products: absorbed queries, one latent as key and value.
//
// o[h] = sum_j softmax_j(scale q~[h] . c[j]) c[j] over the tokens j of a row's list; q~ and c are halves, sums are f32.
//
// Operands are swapped: a tile of 64 tokens is the product's 64 rows and the heads are its columns, so 8, 16 or 32 heads fill
// the tensor cores without padding. S^T = C Q^T (64 x HEADS), then O^T = C^T P^T (512 x HEADS): both read the tile where it lies, once
// as rows of tokens and once, by the descriptor, as rows of latents.
//
// A block is two warpgroups that compute, one that gathers and one that looks ahead (sparse.cuh). The computing ones take tiles in
// turn, each with its own running softmax and O^T in registers (HEADS x 4), so that one's products run beside the other's
// exponentials; at the end of an item they are added through shared memory.
//
// Softmax: weights refer to a maximum that moves only where one would grow beyond 2^8, so most tiles need no exchange of maxima
// among the lanes and warps that share a head.
//
// A row's list is cut into parts (four, or one for steps of more than 320 rows) by the number of its own tokens alone; a part is
// a work item, blocks take items in turn. `merge` adds four parts in their order, a whole row's item is the result. So a row's
// bits depend neither on other rows nor on the device.
//
// The scouts begin before the launch in front has ended: lists and page tables must be older than that launch, which must have
// waited for the one in front of it before it lets the next begin. Here that launch absorbs the queries.
//
// Layout: latents [pages][PAGE][512] halves; queries [rows][heads][512] halves, infinite ones count as the largest; a result of one
// part as f32 or halves; pieces [rows, groups, parts] of HEADS times 512
// f32 in the order of threads and registers, with their maximum (base 2) and sum [rows, groups, parts][HEADS][2].
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

// Results go to memory by the copy engine, from rows of 128 columns.
#define ROW (128 + 4)

// Blocks FROM, FROM + 1 of O^T to rows of heads.
template <int FROM>
DEVICE void give(const float (&out)[8][HEADS / 2], float *rows, int warp, int g, int t) {
#pragma unroll
    for (int b = 0; b < 2; b++)
#pragma unroll
        for (int i = 0; i < HEADS / 2; i++)
            rows[(8 * (i >> 2) + 2 * t + (i & 1)) * ROW + 64 * b + 16 * warp + g + 8 * ((i >> 1) & 1)] = out[FROM + b][i];
}

// Adds them to what the other warpgroup gave, the first one's in front. Factors of a head: of both and of the whole.
template <int FROM>
DEVICE void add(const float (&out)[8][HEADS / 2], float *rows, const float4 *factors, int w, int warp, int g, int t) {
#pragma unroll
    for (int n = 0; n < HEADS / 8; n++) {
        float *at = rows + (8 * n + 2 * t) * ROW + 16 * warp + g;
        float theirs[8];
        float4 by[2];
#pragma unroll
        for (int e = 0; e < 2; e++) by[e] = factors[8 * n + 2 * t + e];
#pragma unroll
        for (int i = 0; i < 8; i++) theirs[i] = at[(i & 1) * ROW + 8 * (i >> 1 & 1) + 64 * (i >> 2)];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float own = out[FROM + (i >> 2)][4 * n + (i & 3)], first = w ? theirs[i] : own, second = w ? own : theirs[i];
            at[(i & 1) * ROW + 8 * (i >> 1 & 1) + 64 * (i >> 2)] = fmaf(second, by[i & 1].y, first * by[i & 1].x) * by[i & 1].z;
        }
    }
}

// The same for sums that stay in the order of threads and registers: HEADS / 4 times four of a thread.
template <int FROM>
DEVICE void give_parts(const float (&out)[8][HEADS / 2], float4 *to, int thread) {
#pragma unroll
    for (int j = 0; j < HEADS / 4; j++) {
        const float *v = out[FROM + j / (HEADS / 8)] + j % (HEADS / 8) * 4;
        to[j * 128 + thread] = make_float4(v[0], v[1], v[2], v[3]);
    }
}

template <int FROM>
DEVICE void add_parts(const float (&out)[8][HEADS / 2], const float4 *from, const float4 *factors, int w, float4 *to, int thread) {
#pragma unroll
    for (int n = 0; n < HEADS / 8; n++) {
        float4 by[2];
#pragma unroll
        for (int e = 0; e < 2; e++) by[e] = factors[8 * n + 2 * (thread & 3) + e];
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const int j = b * (HEADS / 8) + n;
            const float4 v = from[j * 128 + thread];
            const float theirs[4] = {v.x, v.y, v.z, v.w};
            float sum[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float own = out[FROM + b][4 * n + i], first = w ? theirs[i] : own, second = w ? own : theirs[i];
                sum[i] = fmaf(second, by[i & 1].y, first * by[i & 1].x);
            }
            to[j * 128 + thread] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
    }
}

// Infinite halves of a pair to the largest ones: queries may come of sums that did not fit.
DEVICE u32 finite(u32 pair) {
    u32 v;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(v) : "r"(pair), "r"(0x7bff7bffu));
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(v) : "r"(0xfbfffbffu));
    return v;
}

DEVICE void store_bulk(void *to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

DEVICE void attend(const Args &p, u8 *room, u32 base, const Barriers &bars) {
    const int w = __shfl_sync(FULL, threadIdx.x >> 7, 0), thread = threadIdx.x & 127, warp = thread >> 5, lane = threadIdx.x & 31;
    const int g = lane >> 2, t = lane & 3;
    const u32 full = bars.units_full, empty = bars.units_empty;
    float *tops = (float *)(room + TOP_AT) + w * 4 * HEADS;
    float2 *stats = (float2 *)(room + STATS_AT);
    const u32 weights = base + WEIGHT_AT + w * (HEADS * 128);
    u32 first_unit = 0;
    volatile u32 *mark = (volatile u32 *)(room + MARK_AT) + w;
    // The item's number and the length of its list wait there until they are wanted: the products leave few registers.
    volatile u32 *kept = (volatile u32 *)(room + MARK_AT) + 2;
    for (u32 at = blockIdx.x; at < p.items;) {
        const Item item = take_item(p, room, bars, at, (at - blockIdx.x) / gridDim.x);
        meet(1, CONSUMERS);
        // Queries: HEADS rows in eight pieces of 64 columns; a warpgroup takes a unit of them out of the ring.
        if (w < QUERY_UNITS) {
            const u32 unit = first_unit + w, slot = unit % UNITS;
            barrier_wait(full + 8 * slot, unit / UNITS & 1);
            uint4 chunks[HEADS / (2 * QUERY_UNITS)];
#pragma unroll
            for (int i = 0; i < HEADS / (2 * QUERY_UNITS); i++)
                chunks[i] = *(const uint4 *)(room + slot * UNIT + (128 * i + thread) * 16);
#pragma unroll
            for (int i = 0; i < HEADS / (2 * QUERY_UNITS); i++)
                *(uint4 *)(room + QUERY_AT + w * (HEADS * 1024 / QUERY_UNITS) + (128 * i + thread) * 16) =
                    make_uint4(finite(chunks[i].x), finite(chunks[i].y), finite(chunks[i].z), finite(chunks[i].w));
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * slot);
        }
        if (threadIdx.x == 0) {
            kept[0] = at;
            kept[1] = item.count;
        }
        first_unit += QUERY_UNITS - 4 * item.first_tile;  // of tile 0, as it were
        shared_written();
        meet(1, CONSUMERS);

        float out[8][HEADS / 2], top[HEADS / 4], total[HEADS / 4];
#pragma unroll
        for (int i = 0; i < 4 * HEADS; i++) out[i / (HEADS / 2)][i % (HEADS / 2)] = 0.0f;
#pragma unroll
        for (int i = 0; i < HEADS / 4; i++) {
            top[i] = -INFINITY;
            total[i] = 0.0f;
        }
        bool begun = false;
        for (int tile = item.first_tile + w; tile < item.last_tile; tile += 2) {
            const u32 unit = first_unit + 4 * tile;
            // The second warpgroup starts behind the first one's first product, so that they alternate.
            if (w && !begun) meet(4, CONSUMERS);
            float s[HEADS / 2];
#pragma unroll
            for (int q = 0; q < 4; q++) barrier_wait(full + 8 * ((unit + q) % UNITS), (unit + q) / UNITS & 1);
            shared_written();
            products_begin();
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const u32 from = base + (unit + q) % UNITS * UNIT;
#pragma unroll
                for (int b = 0; b < 2; b++)
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        SharedProduct<HEADS, 0>::multiply(
                            s, describe(from + b * (TILE * 128)) + 2 * k,
                            describe(base + QUERY_AT + (2 * q + b) * (HEADS * 128)) + 2 * k, q + b + k);
            }
            products_commit();
            products_done<0>();
            if (!w && !begun && tile + 1 < item.last_tile)
                asm volatile("bar.arrive 4, 256;" ::: "memory");
            const int token = tile * TILE + 16 * warp + g;
            const int count = kept[1];
            const bool low = token < count, high = token + 8 < count;
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
            bool grown = !begun;
            begun = true;
            if (!grown) {
                bool beyond = false;
#pragma unroll
                for (int i = 0; i < HEADS / 2; i++) beyond |= s[i] > top[(i >> 2) * 2 + (i & 1)] + 8.0f;
                if (__any_sync(FULL, beyond) && lane == 0) *mark = unit + 1;
                store_weights();
                meet(2 + w, 128);
                grown = *mark == unit + 1;
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
                meet(2 + w, 128);
#pragma unroll
                for (int i = 0; i < HEADS / 4; i++) {
                    const int head = 8 * (i >> 1) + 2 * t + (i & 1);
                    float m = fmaxf(fmaxf(tops[head], tops[HEADS + head]), fmaxf(tops[2 * HEADS + head], tops[3 * HEADS + head]));
                    m = m > top[i] + 8.0f ? m : top[i];
                    const float keep = exp2_fast(top[i] - m);
                    top[i] = m;
                    total[i] *= keep;
#pragma unroll
                    for (int b = 0; b < 8; b++) {
                        out[b][(i >> 1) * 4 + (i & 1)] *= keep;
                        out[b][(i >> 1) * 4 + (i & 1) + 2] *= keep;
                    }
                }
                store_weights();
                meet(2 + w, 128);
            }
#pragma unroll
            for (int i = 0; i < HEADS / 4; i++) total[i] += weight[(i >> 1) * 4 + (i & 1)] + weight[(i >> 1) * 4 + (i & 1) + 2];
            products_begin();
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const u32 from = base + (unit + q) % UNITS * UNIT;
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
                if (lane == 0) barrier_arrive(empty + 8 * ((unit + q) % UNITS));
            };
            products_done<3>();
            release(0);
            products_done<2>();
            release(1);
            products_done<1>();
            release(2);
            products_done<0>();
            release(3);
        }
        first_unit += 4 * item.last_tile;
        // Sums over the tokens: lanes, then warps; then the two warpgroups.
#pragma unroll
        for (int i = 0; i < HEADS / 4; i++)
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) total[i] += __shfl_xor_sync(FULL, total[i], d);
        if (g == 0)
#pragma unroll
            for (int i = 0; i < HEADS / 4; i++) tops[warp * HEADS + 8 * (i >> 1) + 2 * t + (i & 1)] = total[i];
        meet(2 + w, 128);
        if (warp == 0 && g == 0)
#pragma unroll
            for (int i = 0; i < HEADS / 4; i++) {
                const int head = 8 * (i >> 1) + 2 * t + (i & 1);
                stats[w * HEADS + head] = make_float2(
                    top[i], (tops[head] + tops[HEADS + head]) + (tops[2 * HEADS + head] + tops[3 * HEADS + head]));
            }
        meet(1, CONSUMERS);
        // Factors of both warpgroups' sums and of the whole, where the first one's maxima were.
        // Read again, lest what follows from it is kept in registers through the products.
        u32 tid;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
        at = kept[0];
        const Item done = item_of(p, at, 0);
        const int own_warp = tid >> 5 & 3, row = (tid & 31) >> 2, column = tid & 3;
        float *area = (float *)(room + QUERY_AT);
        float4 *factors = (float4 *)(room + TOP_AT);
        if (tid < HEADS) {
            const float2 a = stats[tid], b = stats[HEADS + tid];
            const float most = fmaxf(a.x, b.x);
            const float first = a.y == 0.0f ? 0.0f : exp2_fast(a.x - most), second = b.y == 0.0f ? 0.0f : exp2_fast(b.x - most);
            const float sum = fmaf(b.y, second, a.y * first);
            factors[tid] = make_float4(first, second, p.parts > 1 ? 1.0f : sum != 0.0f ? 1.0f / sum : 0.0f, 0.0f);
            if (p.parts > 1) p.stats[(u64)at * HEADS + tid] = make_float2(most, sum);
        }
        // A warpgroup adds half of the columns, in two rounds.
        if (p.parts > 1) {
            float4 *mine = (float4 *)area + w * (HEADS * 32), *others = (float4 *)area + (w ^ 1) * (HEADS * 32);
            float4 *to = (float4 *)p.pieces + ((u64)at * 4 + 2 * w) * (HEADS * 32);
            const int own = tid & 127;
#pragma unroll
            for (int round = 0; round < 2; round++) {
                if (round) meet(1, CONSUMERS);
                if (w)
                    round ? give_parts<2>(out, others, own) : give_parts<0>(out, others, own);
                else
                    round ? give_parts<6>(out, others, own) : give_parts<4>(out, others, own);
                meet(1, CONSUMERS);
                if (w)
                    round ? add_parts<6>(out, mine, factors, 1, to + HEADS * 32, own) : add_parts<4>(out, mine, factors, 1, to, own);
                else
                    round ? add_parts<2>(out, mine, factors, 0, to + HEADS * 32, own) : add_parts<0>(out, mine, factors, 0, to, own);
            }
        } else {
            // Rows are free again when the copy engine has read them.
            float *mine = area + w * (HEADS * ROW), *others = area + (w ^ 1) * (HEADS * ROW);
#pragma unroll
            for (int round = 0; round < 2; round++) {
                if (round) meet(1, CONSUMERS);
                if (w)
                    round ? give<2>(out, others, own_warp, row, column) : give<0>(out, others, own_warp, row, column);
                else
                    round ? give<6>(out, others, own_warp, row, column) : give<4>(out, others, own_warp, row, column);
                meet(1, CONSUMERS);
                if (w)
                    round ? add<6>(out, mine, factors, 1, own_warp, row, column) : add<4>(out, mine, factors, 1, own_warp, row, column);
                else
                    round ? add<2>(out, mine, factors, 0, own_warp, row, column) : add<0>(out, mine, factors, 0, own_warp, row, column);
                shared_written();
                meet(2 + w, 128);
                if (p.halves) {
#pragma unroll
                    for (int i = 0; i < HEADS / 8; i++) {
                        const int line = 8 * i + (tid >> 4 & 7), eight = tid & 15;
                        const float4 *from = (const float4 *)(mine + line * ROW + 8 * eight);
                        const float4 low = from[0], high = from[1];
                        const u32 h = done.group * HEADS + line;
                        if (h < p.heads)
                            *(uint4 *)((u16 *)p.pieces + ((u64)done.row * p.heads + h) * LATENT + 256 * w + 128 * round + 8 * eight) =
                                make_uint4(narrow_half(low.x, low.y), narrow_half(low.z, low.w), narrow_half(high.x, high.y),
                                           narrow_half(high.z, high.w));
                    }
                } else if (own_warp == 0) {
                    const u32 from = shared_address(mine);
                    const u32 h = done.group * HEADS + tid % 32;
                    if (tid % 32 < HEADS && h < p.heads)
                        store_bulk(p.pieces + ((u64)done.row * p.heads + h) * LATENT + 256 * w + 128 * round, from + tid % 32 * (ROW * 4), 512);
                    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
                    __syncwarp();
                }
            }
        }
        at += gridDim.x;
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
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
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        after_previous();
        attend(p, room, base, b);
    }
}

// out[row, head] = the parts' sums over the parts' totals. Grid (rows, eights of heads, 4), 128 threads, each with the registers of
// the thread that left them; zero for an empty list.
KERNEL merge(const float4 *pieces, const float2 *stats, int groups, int heads, float *out) {
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
