// Grouped products of INT4 experts on warpgroup instructions; weights are the A operand, dequantized in registers.
//
// A tile is 256 rows of one expert (SWIGLU: 128 features, gate and up rows alternating by eight) by up to NMAX of its tokens.
// One warpgroup copies stages of 128 columns, weights and tokens, into a ring in shared memory; CW warpgroups of MT x 64 rows
// take them. A weight is unpacked once for all tokens of the item.
//
// Exact weights: a code in bits 2 .. 5 or 6 .. 9 of a half is the subnormal code 2^-22 or code 2^-18, so one multiply-add with
// s 2^22 or s 2^18 and -8 s gives s (code - 8). A BF16 scale times a code has 11 bits at most, which a half holds, so
// nothing is rounded (SHIFT keeps scales below 1 in range; with one below 2^-11 a weight loses what lies under 2^-19). Sums are
// f32.
//
// Shares: with SEGMENTS > 1 every block takes an equal, contiguous share of all segments (a segment is a part of a tile's
// columns). A tile that blocks share leaves each segment's sum in memory; the block with its last segment adds them. A
// tile's sum is ((s0 + s1) + s2) + ... in any case, so the bits do not depend on the other rows of the step. With SEGMENTS
// = 1 (many tokens) blocks take whole tiles in turn.
//
// Layouts. Weights: 64 rows by 128 columns are 4224 bytes, eight blocks of 8 rows: `[32 lanes][4 words]`, 8 bf16 scales; word i
// of lane (g, t) holds of row g the columns 32 i + 8 p + 2 t and + 1 as codes p and p + 4, rotated left by two bits. Tokens:
// `[columns / 64][slots][64]` halves, 16-byte pieces of slot s at their number ^ (s % 8); an item's slots begin at an eighth one.
//
// Constants: SWIGLU, NMAX (8, 16, 64 or 128), CW, MT (CW * MT = 4), STAGES, SEGMENTS.
#include "common.cuh"
#include "wgmma.cuh"

#define GROUP_BYTES 4224
#define BLOCK_BYTES 528
#define HALF_BYTES (NMAX * 128)
#define X_BYTES (2 * HALF_BYTES)
#define STAGE_BYTES (X_BYTES + 17408)
#define CONSUMERS (128 * CW)
#define SHARED (SEGMENTS > 1)
// Weights of the next stage are read with the third batch of a stage, where registers suffice.
#define READ_AHEAD (NMAX <= 64)
#define SHIFT 0.015625f

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
    const u32 *list;  // choice of a slot
    const u8 *x;      // tokens
    u8 *y;            // SWIGLU: tokens of the next product; else halves [choices, y_stride]
    float *pieces;    // [blocks][SEGMENTS][NMAX / 2][CONSUMERS]
    u32 *flags;       // [blocks], zero between launches
    int slots, outputs, groups, strips, y_stride;
    float limit;
};

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\nbra again;\n"
        "over:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

DEVICE void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Bytes to shared memory by the copy engine, counted by a barrier; multiples of 16.
DEVICE void copy(u32 to, const u8 *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

DEVICE u32 twice(float v) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(v));
    return pair;
}

DEVICE uint4 shared_words(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

DEVICE u16 shared_half(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}

DEVICE u32 times(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE u32 fused(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// An 8 x 8 matrix of halves, a row by four lanes, transposed.
DEVICE u32 transposed(u32 a) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// What a row's scale makes of its codes: factors for both places and the offset.
struct Scale {
    u32 low, high, offset;
};

DEVICE Scale scale_of(u16 bits) {
    Scale s;
    s.low = twice(widen(bits) * (SHIFT * 4194304.0f));
    s.high = times(s.low, 0x2c002c00u);    // / 16
    s.offset = times(s.low, 0x80208020u);  // * -8 / 2^22
    return s;
}

// A word's codes to halves, the pairs of two steps of 16 columns, into every other register of an A operand.
DEVICE void expand(u32 w, const Scale s, u32 *a) {
    const u32 v = __funnelshift_r(w, w, 8);
    a[0] = fused(w & 0x003c003cu, s.low, s.offset);
    a[2] = fused(w & 0x03c003c0u, s.high, s.offset);
    a[4] = fused(v & 0x003c003cu, s.low, s.offset);
    a[6] = fused(v & 0x03c003c0u, s.high, s.offset);
}

// A thread's weights of a stage: codes of two rows of every tile of 64, with their scales.
struct Codes {
    uint4 words[MT][2];
    u16 scales[MT][2];
};

// Where a thread stands among the stages.
struct Ring {
    u32 base, full, empty, own;  // `own`: this thread's first codes in a stage
    u32 slot, parity;            // of the stage to be read next
    int left;                    // stages to be read
    Codes next;

    // Reads the weights of the next stage, if there is one.
    __device__ __forceinline__ void read() {
        if (left == 0) return;
        left--;
        wait(full + 8 * slot, parity);
        const u32 at = own + slot * STAGE_BYTES;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 block = SWIGLU ? (m * 4 * BLOCK_BYTES + r * 2 * GROUP_BYTES) : m * GROUP_BYTES + r * BLOCK_BYTES;
                next.words[m][r] = shared_words(at + block + 16 * (threadIdx.x & 31));
                next.scales[m][r] = shared_half(at + block + 512 + (threadIdx.x & 28) / 2);
            }
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

// Registers of products: sums, and two batches of the A operand. All sizes of a product use the same ones: one that is under way
// holds its registers, and the compiler cannot see on which path it came.
struct Registers {
    float acc[MT][NMAX / 2];
    u32 a[2][MT][8];
};

// Products of two steps of 16 columns.
template <int N>
DEVICE void batch(Registers &regs, int side, u64 b, bool add) {
    products_begin();
#pragma unroll
    for (int step = 0; step < 2; step++)
#pragma unroll
        for (int m = 0; m < MT; m++)
            Warpgroup<N>::multiply(regs.acc[m], regs.a[side][m] + 4 * step, b + 2 * step, step > 0 || add);
    products_commit();
}

// regs.acc = products of `groups` stages. With READ_AHEAD the first one is in `ring.next`, as is afterwards the one that follows.
DEVICE void sum(Registers &regs, bool small, int groups, Ring &ring) {
    u32 before = 0;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < NMAX / 2; i++) asm volatile("" : "+f"(regs.acc[m][i])::"memory");
    u32 own = READ_AHEAD ? (ring.slot == 0 ? STAGES : ring.slot) - 1 : ring.slot;
#pragma unroll 1
    for (int q = 0; q < groups; q++) {
#if !READ_AHEAD
        ring.read();
#endif
        const Codes codes = ring.next;
        Scale scale[MT][2];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) scale[m][r] = scale_of(codes.scales[m][r]);
        const u64 b = describe(ring.base + own * STAGE_BYTES);
        // Batches of 32 columns.
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // The batch before the last one is done: its registers are free, and so is the stage before this one.
            products_done<1>();
            if (i == 1 && q > 0) {
                __syncwarp();
                if ((threadIdx.x & 31) == 0) arrive(before);
            }
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const uint4 c = codes.words[m][r];
                    expand(i == 0 ? c.x : i == 1 ? c.y : i == 2 ? c.z : c.w, scale[m][r], regs.a[i & 1][m] + r);
                }
#if READ_AHEAD
            if (i == 2) ring.read();
#endif
            const u64 at = b + (i >> 1) * (HALF_BYTES >> 4) + 4 * (i & 1);
            const bool add = i > 0 || q > 0;
            // Few tokens: a smaller product would be hardly faster.
#if NMAX > 32
            if (small) batch<NMAX / 2>(regs, i & 1, at, add);
            else
#endif
                batch<NMAX>(regs, i & 1, at, add);
        }
        before = ring.empty + 8 * own;
        if (++own == STAGES) own = 0;
    }
    products_done<0>();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < NMAX / 2; i++) asm volatile("" : "+f"(regs.acc[m][i])::"memory");
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(before);
}

// Writes a tile's sums.
DEVICE void finish(const Args &p, const Item &item, int strip, const float (&acc)[MT][NMAX / 2], int warp, int lane) {
    const int wg = warp >> 2, w = warp & 3, g = lane >> 2, t = lane & 3;
    const float back = 1.0f / SHIFT;
#pragma unroll
    for (int n = 0; n < NMAX / 8; n++) {
        if (8 * n >= (int)item.count) break;
        const int token = 8 * n + g;
        const bool there = token < (int)item.count;
        const u32 slot = item.first + token;
#if !SWIGLU
        const u64 line = there ? (u64)p.list[slot] * p.y_stride : 0;
#endif
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const int j = wg * MT + m;
            const float *c = acc[m] + 4 * n;
#if SWIGLU
            const int out = strip * 128 + 32 * j + 8 * w;
            const u32 v = transposed(narrow_half(clamped_swiglu(back * c[0], back * c[2], p.limit),
                                                 clamped_swiglu(back * c[1], back * c[3], p.limit)));
            if (there && out < p.outputs)
                *(u32 *)(p.y + ((u64)(out >> 6) * p.slots + slot) * 128 + ((((out >> 3) ^ slot) & 7) << 4) + 4 * t) = v;
#else
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int out = strip * 256 + 64 * j + 16 * w + 8 * r;
                const u32 v = transposed(narrow_half(back * c[2 * r], back * c[2 * r + 1]));
                if (there && out < p.outputs) *(u32 *)(p.y + 2 * (line + out + 2 * t)) = v;
            }
#endif
        }
    }
}

#if SHARED
DEVICE int share(u32 all, int block) { return (int)(all * (u32)block / gridDim.x); }

// The block with the first segment of a tile that begins before this block's share.
DEVICE int beginner(u32 all, int tile) {
    int block = blockIdx.x;
    while (share(all, block) > tile * SEGMENTS) block--;
    return block;
}

DEVICE float *piece(const Args &p, int block, int segment) {
    return p.pieces + (u64)(block * SEGMENTS + segment) * (NMAX / 2) * CONSUMERS + threadIdx.x;
}

#endif

// Products of a tile's segments first .. first + count.
DEVICE void take(const Args &p, const Item &item, int tile, int first, int count, u32 all, Registers &regs, Ring &ring,
                 int warp, int lane) {
    const int strip = tile % p.strips;
#if SHARED
    const int per = p.groups / SEGMENTS;
    const bool whole = count == SEGMENTS;
    float total[MT][NMAX / 2];
    const int block = whole ? 0 : beginner(all, tile);
#pragma unroll 1
    for (int s = 0; s < count; s++) {
        sum(regs, item.count <= NMAX / 2, per, ring);
        float *to = piece(p, block, first + s);
#pragma unroll
        for (int i = 0; i < NMAX / 2; i++) {
            if (2 * i >= (int)item.count + 7) break;
            total[0][i] = s == 0 ? regs.acc[0][i] : total[0][i] + regs.acc[0][i];
            if (!whole) to[i * CONSUMERS] = regs.acc[0][i];
        }
    }
    if (whole) {
        finish(p, item, strip, total, warp, lane);
    } else if (first + count < SEGMENTS) {
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
        if (threadIdx.x == 0)
            asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(p.flags + block) : "memory");
    }
#else
    sum(regs, item.count <= NMAX / 2, p.groups, ring);
    finish(p, item, strip, regs.acc, warp, lane);
#endif
}

#if SHARED
// Adds the segments of a tile that other blocks began and this one ended.
DEVICE void gather(const Args &p, const Item &item, int tile, int block, int warp, int lane) {
    float total[MT][NMAX / 2];
#pragma unroll 1
    for (int s = 0; s < SEGMENTS; s++) {
        const float *from = piece(p, block, s);
#pragma unroll
        for (int i = 0; i < NMAX / 2; i++) {
            if (2 * i >= (int)item.count + 7) break;
            const float v = __ldcg(from + i * CONSUMERS);
            total[0][i] = s == 0 ? v : total[0][i] + v;
        }
    }
    finish(p, item, tile % p.strips, total, warp, lane);
}
#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) experts(const __grid_constant__ Args p) {
    extern __shared__ u8 dynamic[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 own = shared_address(dynamic), base = (own + 1023) & ~1023u;
    const u32 full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * i) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * i), "r"(4 * CW) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    after_previous();
    let_next_begin();
    const u32 all = *p.item_count * p.strips * SEGMENTS;
#if SHARED
    const int begin = share(all, blockIdx.x), end = share(all, blockIdx.x + 1);
#else
    const int begin = blockIdx.x, end = all;
#endif

    if (warp >= 4 * CW) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        // One thread a warp copies 64 rows of weights a stage; of two of them each copies half of the tokens' columns, too.
        const int own = warp & 3;
        if (lane > 0) return;
        u32 slot = 0, parity = 1;
        const int last = (p.outputs + 63) / 64 - 1;
#pragma unroll 1
        for (int at = begin; at < end;) {
            const int tile = at / SEGMENTS, first = at % SEGMENTS, strip = tile % p.strips;
            const int count = SHARED ? min_of(SEGMENTS - first, end - at) : 1;
            const int from = first * (p.groups / SEGMENTS), until = (first + count) * (p.groups / SEGMENTS);
            at += SHARED ? count : gridDim.x;
            const Item item = p.items[tile / p.strips];
            const u32 x_bytes = 128 * item.count;
            const Weights w = p.table[item.expert];
            const int rows = SWIGLU ? 2 * strip + (own & 1) : 4 * strip + own;
            const u8 *source = SWIGLU ? (own < 2 ? w.gate : w.up) : w.down;
            source += ((u64)min_of(rows, last) * p.groups + from) * GROUP_BYTES;
            const u8 *x = p.x + ((u64)(2 * from + (own & 1)) * p.slots + item.first) * 128;
#pragma unroll 1
            for (int q = from; q < until; q++) {
                wait(empty + 8 * slot, parity);
                const u32 barrier = full + 8 * slot, to = base + slot * STAGE_BYTES;
                if (own == 0)
                    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                                 "r"(4 * GROUP_BYTES + 2 * x_bytes)
                                 : "memory");
                copy(to + X_BYTES + own * GROUP_BYTES, source, GROUP_BYTES, barrier);
                if (own < 2) copy(to + own * HALF_BYTES, x, x_bytes, barrier);
                source += GROUP_BYTES;
                x += (u64)p.slots * 256;
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CW == 4 ? 112 : 240));
        Registers regs;
        // Opaque, or it is computed anew in every stage.
        u32 start;
        asm volatile("mov.u32 %0, %1;" : "=r"(start) : "r"(base));
        const int j = (warp >> 2) * MT, w = warp & 3;
        const u32 block = SWIGLU ? (j >> 1) * GROUP_BYTES + (4 * (j & 1) + w) * BLOCK_BYTES : j * GROUP_BYTES + 2 * w * BLOCK_BYTES;
#if SHARED
        const int parts = end - begin;
#else
        const int parts = begin < end ? (end - begin + (int)gridDim.x - 1) / (int)gridDim.x : 0;
#endif
        Ring ring;
        ring.base = start, ring.full = start + STAGES * STAGE_BYTES, ring.empty = ring.full + 8 * STAGES;
        ring.own = start + X_BYTES + block, ring.slot = 0, ring.parity = 0, ring.left = parts * (p.groups / SEGMENTS);
#if READ_AHEAD
        ring.read();
#endif
#pragma unroll 1
        for (int at = begin; at < end;) {
            const int tile = at / SEGMENTS, first = at % SEGMENTS;
            const int count = SHARED ? min_of(SEGMENTS - first, end - at) : 1;
            at += SHARED ? count : gridDim.x;
            const Item item = p.items[tile / p.strips];
            take(p, item, tile, first, count, all, regs, ring, warp, lane);
        }

#if SHARED
        const int tile = begin / SEGMENTS;
        if (begin < end && begin > tile * SEGMENTS && end >= (tile + 1) * SEGMENTS) {
            const int block = beginner(all, tile);
            u32 others = 0;
            for (int b = block; b < (int)blockIdx.x; b++) others += share(all, b + 1) > share(all, b);
            if (lane == 0) {
                u32 seen;
                do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p.flags + block) : "memory");
                while (seen < others);
            }
            __syncwarp();
            const Item item = p.items[tile / p.strips];
            gather(p, item, tile, block, warp, lane);
            asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
            if (threadIdx.x == 0) p.flags[block] = 0;
        }
#endif
    }
}
