// Latent attention over selected tokens on warpgroup products: absorbed queries, one latent as key and value.
//
// o[h] = sum_j softmax_j(scale q~[h] . c[j]) c[j] over the tokens j of a row's list; q~ and c are halves, sums are f32.
//
// Operands are swapped: a tile of 64 tokens is the product's 64 rows and the heads are its columns, so 8, 16 or 32 heads fill
// the tensor cores without padding. S^T = C Q^T (64 x HEADS), then O^T = C^T P^T (512 x HEADS): both read the tile where it lies, once
// as rows of tokens and once, by the descriptor, as rows of latents.
//
// A block is two warpgroups that compute and one that gathers. The computing ones take tiles in turn, each with its own running
// softmax and O^T in registers (HEADS x 4), so that one's products run beside the other's exponentials; at the end of an item
// they are added through shared memory. The gathering one copies 16 bytes a thread into a ring of eleven units of 64 tokens by 128
// columns (176 KB) and runs ahead over the ends of tiles and items.
//
// Softmax: weights refer to a maximum that moves only where one would grow beyond 2^8, so most tiles need no exchange of maxima
// among the lanes and warps that share a head.
//
// A row's list is cut into parts (four, or one for steps of more than 320 rows) by the number of its own tokens alone; a part is
// a work item, blocks take items in turn. `merge` adds the parts in their order. So a row's bits depend neither on other rows nor
// on the device.
//
// Layout: latents [pages][PAGE][512] halves; queries [rows][heads][512] halves; pieces [rows, groups, parts][HEADS][512] f32 with
// their maximum (base 2) and sum [rows, groups, parts][HEADS][2].
// Constants: HEADS heads of an item (8, 16 or 32), PAGE tokens of a page.
//
// Limits: latents of 512; compute capability 9.0; shared memory of a whole multiprocessor.
//
// Versions, 96 rows of 32 heads, 2051 tokens each, another list for each row / one list for the three rows of a sequence, one
// H200, us of this kernel alone: both warpgroups on one tile, S^T exchanged, 72 / 69; a tile each 74 / 62; places found ahead by
// `find_places` 73 / 58; a reference that moves seldom 72 / 56. The gather alone is 61 / 37. Clocks inside a block: a tile takes
// a warpgroup 980 in S^T, 500 in the softmax, 850 in O^T; the gather delivers one every 3750 (4.4 TB/s over the device); from the
// last tile of an item to the first of the next pass 13000, most of it loads under way behind the gather's, longer than
// the ring can bridge. With descriptors that the compiler does not know to be uniform every product waits for moves to uniform
// registers: hence the shuffles from lane 0.
#include "common.cuh"
#include "wgmma.cuh"
#include "async.cuh"

#define LATENT 512
#define TILE 64
#define UNIT (TILE * 256)
#define UNITS 11
#define CONSUMERS 256
#define QUERY_AT (UNITS * UNIT)
#define WEIGHT_AT (QUERY_AT + HEADS * 1024)
#define TOP_AT (WEIGHT_AT + 2 * HEADS * 128)
#define STATS_AT (TOP_AT + 2 * HEADS * 16)
#define MARK_AT (STATS_AT + 2 * HEADS * 8)
#define BARRIER_AT (MARK_AT + 16)

struct Args {
    const u16 *latents;
    const u32 *places, *lens;
    const u16 *queries;
    float *pieces;
    float2 *stats;
    u32 items, groups, parts, heads, pitch;
    float scale;  // times log2 e
};

// What an item covers.
struct Item {
    u32 row, group;
    int count, first_tile, last_tile;
};

DEVICE Item item_of(const Args &p, u32 at) {
    Item i;
    const u32 part = at % p.parts, rest = at / p.parts;
    i.group = rest % p.groups;
    i.row = rest / p.groups;
    // The same in all lanes, and known to be: descriptors are then computed once a warp.
    i.count = __shfl_sync(FULL, p.lens[i.row], 0);
    const u32 tiles = (i.count + TILE - 1) / TILE;
    i.first_tile = tiles * part / p.parts;
    i.last_tile = tiles * (part + 1) / p.parts;
    return i;
}

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE void gather(const Args &p, u32 base, u32 full, u32 empty) {
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    const int line = 2 * warp + (lane >> 4);
    const u32 inside = ((lane & 15) >> 3) * (TILE * 128) + line * 128 + (((lane & 7) ^ line) << 4);
    u32 slot = 0, phase = 1;
    // Lane l < 16 knows the place of the tile's token 8 (l / 2) + 2 warp + l % 2, a tile ahead.
    auto place = [&](const Item &item, int tile) {
        const int at = 8 * ((lane & 15) >> 1) + 2 * warp + (lane & 1);
        return tile < item.last_tile ? p.places[(u64)item.row * p.pitch + tile * TILE + at] : 0;
    };
    Item item = item_of(p, blockIdx.x);
    u32 next = place(item, item.first_tile);
    for (u32 at = blockIdx.x; at < p.items; at += gridDim.x) {
        const Item after = item_of(p, min_of(at + gridDim.x, p.items - 1));
        if (item.first_tile == item.last_tile) next = place(after, after.first_tile);
        for (int tile = item.first_tile; tile < item.last_tile; tile++) {
            const u32 current = next;
            next = tile + 1 < item.last_tile ? place(item, tile + 1) : place(after, after.first_tile);
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                barrier_wait(empty + 8 * slot, phase);
                const u32 to = base + slot * UNIT + inside;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const u32 row = __shfl_sync(FULL, current, 2 * i + (lane >> 4));
                    copy_16(to + i * 1024, p.latents + (u64)row * LATENT + 128 * quarter + 8 * (lane & 15));
                }
                copies_arrive(full + 8 * slot);
                if (++slot == UNITS) {
                    slot = 0;
                    phase ^= 1;
                }
            }
        }
        item = after;
    }
    // The copies of this thread end before it does.
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// A warpgroup's half of the sums through shared memory: FROM gives blocks FROM .. FROM + 3, the other adds them to its own.
template <int FROM>
DEVICE void give(const float (&out)[8][HEADS / 2], float *to, int thread) {
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
        for (int i = 0; i < HEADS / 2; i++) to[(b * (HEADS / 2) + i) * 128 + thread] = out[FROM + b][i];
}

template <int OWN>
DEVICE void finish(const float (&out)[8][HEADS / 2], const float *other, const float (&by)[2][HEADS / 4], float *to, int thread) {
    const int warp = thread >> 5, g = (thread & 31) >> 2, t = thread & 3;
#pragma unroll
    for (int b = 0; b < 4; b++) {
        float theirs[HEADS / 2];
#pragma unroll
        for (int i = 0; i < HEADS / 2; i++) theirs[i] = other[(b * (HEADS / 2) + i) * 128 + thread];
#pragma unroll
        for (int i = 0; i < HEADS / 2; i++) {
            const int head = (i >> 2) * 2 + (i & 1);
            const float first = OWN == 0 ? out[OWN + b][i] : theirs[i], second = OWN == 0 ? theirs[i] : out[OWN + b][i];
            to[(8 * (i >> 2) + 2 * t + (i & 1)) * LATENT + 64 * (OWN + b) + 16 * warp + g + 8 * ((i >> 1) & 1)] =
                fmaf(second, by[1][head], first * by[0][head]);
        }
    }
}

DEVICE void attend(const Args &p, u8 *room, u32 base, u32 full, u32 empty) {
    const int w = __shfl_sync(FULL, threadIdx.x >> 7, 0), thread = threadIdx.x & 127, warp = thread >> 5, lane = threadIdx.x & 31;
    const int g = lane >> 2, t = lane & 3;
    float *tops = (float *)(room + TOP_AT) + w * 4 * HEADS, *query = (float *)(room + QUERY_AT);
    float2 *stats = (float2 *)(room + STATS_AT);
    const u32 weights = base + WEIGHT_AT + w * (HEADS * 128);
    u32 first_unit = 0;
    volatile u32 *mark = (volatile u32 *)(room + MARK_AT) + w;
    for (u32 at = blockIdx.x; at < p.items; at += gridDim.x) {
        const Item item = item_of(p, at);
        meet(1, CONSUMERS);
        // Queries: HEADS rows in eight pieces of 64 columns.
        uint4 rows[HEADS / 4];
#pragma unroll
        for (int i = 0; i < HEADS / 4; i++) {
            const int h = item.group * HEADS + 4 * i + (threadIdx.x >> 6);
            rows[i] = make_uint4(0, 0, 0, 0);
            if (h < (int)p.heads)
                rows[i] = load_stream((const uint4 *)(p.queries + ((u64)item.row * p.heads + h) * LATENT) + (threadIdx.x & 63));
        }
#pragma unroll
        for (int i = 0; i < HEADS / 4; i++) {
            const int head = 4 * i + (threadIdx.x >> 6), chunk = threadIdx.x & 63;
            *(uint4 *)(room + QUERY_AT + (chunk >> 3) * (HEADS * 128) + head * 128 + (((chunk & 7) ^ (head & 7)) << 4)) = rows[i];
        }
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
        for (int tile = item.first_tile + w; tile < item.last_tile; tile += 2) {
            const u32 unit = first_unit + 4 * (tile - item.first_tile);
            // The second warpgroup starts behind the first one's first product, so that they alternate.
            if (w && tile == item.first_tile + 1) meet(4, CONSUMERS);
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
            if (!w && tile == item.first_tile && tile + 1 < item.last_tile)
                asm volatile("bar.arrive 4, 256;" ::: "memory");
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
            bool grown = tile < item.first_tile + 2;
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
        first_unit += 4 * (item.last_tile - item.first_tile);
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
        float by[2][HEADS / 4];
#pragma unroll
        for (int i = 0; i < HEADS / 4; i++) {
            const int head = 8 * (i >> 1) + 2 * t + (i & 1);
            const float2 a = stats[head], b = stats[HEADS + head];
            const float most = fmaxf(a.x, b.x);
            by[0][i] = a.y == 0.0f ? 0.0f : exp2_fast(a.x - most);
            by[1][i] = b.y == 0.0f ? 0.0f : exp2_fast(b.x - most);
            if (threadIdx.x < 4)
                p.stats[(u64)at * HEADS + head] = make_float2(most, fmaf(b.y, by[1][i], a.y * by[0][i]));
        }
        float *to = p.pieces + (u64)at * HEADS * LATENT;
        if (w) give<0>(out, query, thread);
        meet(1, CONSUMERS);
        if (!w) {
            finish<0>(out, query, by, to, thread);
            // What WG 1 needs next goes where WG 0 has read.
            give<4>(out, query, thread);
        }
        meet(1, CONSUMERS);
        if (w) finish<4>(out, query, by, to, thread);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) attend_selected(const __grid_constant__ Args p) {
    extern __shared__ __align__(1024) u8 room[];
    const u32 base = shared_address(room), full = base + BARRIER_AT, empty = full + 8 * UNITS;
    if (threadIdx.x == 0) {
        *(uint4 *)(room + MARK_AT) = make_uint4(0, 0, 0, 0);
        for (int i = 0; i < UNITS; i++) {
            barrier_init(full + 8 * i, 128);
            barrier_init(empty + 8 * i, 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    after_previous();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        gather(p, base, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        attend(p, room, base, full, empty);
    }
}

// Where a row's tokens lie in the cache, whole tiles; beyond the last token its place again. Grid (rows), 256 threads.
KERNEL find_places(const Segment *segments, const u32 *row_segment, const u32 *pages, const u32 *tokens, int width,
                   const u32 *lens, u32 *places, int pitch) {
    after_previous();
    let_next_begin();
    const int row = blockIdx.x, count = lens[row];
    const u32 first_page = segments[row_segment[row]].first_page;
    for (int i = threadIdx.x; i < pitch && count > 0; i += 256) {
        const u32 token = tokens[(u64)row * width + min_of(i, count - 1)];
        places[(u64)row * pitch + i] = pages[first_page + token / PAGE] * PAGE + token % PAGE;
    }
}

// out[row, head] = the parts' sums over the parts' totals. Grid (rows, heads), 128 threads; zero for an empty list.
KERNEL merge(const float *pieces, const float2 *stats, int parts, int groups, int heads, float *out) {
    after_previous();
    const int row = blockIdx.x, head = blockIdx.y, group = head / HEADS, at = head % HEADS;
    const u64 first = ((u64)row * groups + group) * parts;
    float top = -INFINITY;
    for (int i = 0; i < parts; i++) top = fmaxf(top, stats[(first + i) * HEADS + at].x);
    float total = 0.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < parts; i++) {
        const float2 s = stats[(first + i) * HEADS + at];
        if (s.y == 0.0f) continue;
        const float keep = exp2_fast(s.x - top);
        const float4 v = ((const float4 *)(pieces + ((first + i) * HEADS + at) * LATENT))[threadIdx.x];
        total = fmaf(keep, s.y, total);
        sum.x = fmaf(keep, v.x, sum.x);
        sum.y = fmaf(keep, v.y, sum.y);
        sum.z = fmaf(keep, v.z, sum.z);
        sum.w = fmaf(keep, v.w, sum.w);
    }
    const float by = total != 0.0f ? 1.0f / total : 0.0f;
    ((float4 *)(out + ((u64)row * heads + head) * LATENT))[threadIdx.x] =
        make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by);
}
