// Grouped products of INT4 experts for many tokens an expert, on warpgroup instructions; weights are the A operand, dequantized
// in registers.
//
// A tile is 256 rows of one expert (SWIGLU: 128 features, gate and up rows alternating by eight) by up to NMAX of its tokens.
// Four threads copy stages of 128 columns, weights and tokens, into a ring in shared memory that runs on from tile to tile;
// four warpgroups of 64 rows take them. A weight is unpacked once for all tokens of the item. Blocks take tiles in turn.
//
// Exact weights: a masked code is a subnormal half (experts.cuh), so one multiply-add with s 2^16 and with -8 times that at the
// code's place gives s (code - 8) / 64 or s (code - 8) / 4. A BF16 scale times a code has 11 bits at most, which a half holds, so
// nothing is rounded for scales below 1 (with one below 2^-11 a weight loses what lies under 2^-19). Sums are f32, in the order
// of the columns.
//
// A tile's end: sums become halves in shared memory, token by token, and one copy a piece of 64 features takes them to their
// slots while the next tile's products begin.
//
// Limits: compute capability 9.0; items of up to NMAX tokens.
//
// Constants: SWIGLU, NMAX (32, 80 or 128), STAGES, UNROLL.
#include "common.cuh"
#include "wgmma.cuh"
#include "async.cuh"
#include "experts.cuh"

#define CONSUMERS 512
#define HALF_BYTES (NMAX * 128)
#define X_BYTES (2 * HALF_BYTES)
#define STAGE_BYTES (X_BYTES + 17408)
// Results on their way out: pieces of 64 features. They are written for 32 (SWIGLU) or 16 tokens at a time.
#define ROOM_TOKENS ((NMAX + 31) / 32 * 32)
#define PIECE_BYTES (ROOM_TOKENS * 128)
#define ROOM_BYTES ((SWIGLU ? 2 : 4) * PIECE_BYTES)
// Steps of 16 columns of a batch of products, of which one is under way while the next one is unpacked; and the weights of the next
// stage are read in the middle of a stage: where registers suffice.
#define STEPS (NMAX <= 80 ? 4 : 2)
#define BATCHES (8 / STEPS)
#define READ_AHEAD (NMAX <= 80)
// Stages of a turn: their places in the ring are known when the kernel is compiled. UNROLL divides STAGES and the groups.
#define TURNS (STAGES / UNROLL)
// Widths of products: an item's are the narrowest that hold its tokens.
#if NMAX == 128
#define WIDTHS 128, 120, 112, 96, 64
#elif NMAX == 80
#define WIDTHS 80, 64, 56, 48
#else
#define WIDTHS 32, 24, 16
#endif
#define SHIFT 0.0625f

DEVICE u32 twice(float v) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(v));
    return pair;
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

// What a row's scale makes of its codes: a factor, and offsets for both places.
struct Scale {
    u32 factor, low, high;
};

DEVICE Scale scale_of(u16 bits) {
    Scale s;
    s.factor = twice(widen(bits) * (SHIFT * 1048576.0f));
    s.low = times(s.factor, LOW_OFFSET);
    s.high = times(s.factor, HIGH_OFFSET);
    return s;
}

// A word's codes to halves, the pairs of two steps of 16 columns, into every other register of an A operand.
DEVICE void expand(u32 w, const Scale s, u32 *a) {
    const u32 v = rotated(w);
    a[0] = fused(w & LOW_CODES, s.factor, s.low);
    a[2] = fused(w & HIGH_CODES, s.factor, s.high);
    a[4] = fused(v & LOW_CODES, s.factor, s.low);
    a[6] = fused(v & HIGH_CODES, s.factor, s.high);
}

// A thread's weights of a stage: codes of two rows, with their scales.
struct Codes {
    uint4 words[2];
    u16 scales[2];
};

// Where a thread stands among the stages, which it takes UNROLL at a turn.
struct Ring {
    u32 full, empty, header;  // of slot 0, as what follows
    u32 codes, scales;        // this thread's
    u32 place;                // of the tokens, as a product's descriptor begins
    u32 turn, parity;         // of the turn that comes now, and of its stages
    int left;                 // READ_AHEAD: turns of which no stage was read; else stages
    Codes next;

    // Reads the weights of a stage.
    __device__ __forceinline__ void read(u32 slot) {
        barrier_wait(full + 8 * slot, parity);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 block = slot * STAGE_BYTES + r * (SWIGLU ? 2 * GROUP_BYTES : BLOCK_BYTES);
            next.words[r] = shared_words(codes + block);
            next.scales[r] = shared_half(scales + block);
        }
    }

    __device__ __forceinline__ void advance() {
        if (++turn == TURNS) turn = 0, parity ^= 1;
    }

    __device__ __forceinline__ void release(u32 barrier) const {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
    }
};

// Registers of products: sums, and A operands. All sizes of a product use the same ones: one that is under way holds its
// registers, and the compiler cannot see on which path it came.
struct Registers {
    float acc[ROOM_TOKENS / 2];
    u32 a[2][4 * STEPS];
};

// Products of a batch.
template <int N>
DEVICE void batch(Registers &regs, int side, u32 b, int add) {
    products_begin();
#pragma unroll
    for (int i = 0; i < STEPS; i++) Warpgroup<N>::multiply(regs.acc, regs.a[side] + 4 * i, describe_at(b + 2 * i), add || i > 0);
    products_commit();
}

// Which of the widths a tile's products have. It is decided once: a comparison in front of each batch costs more than the batch.
struct Width {
    static constexpr int all[] = {WIDTHS}, count = sizeof(all) / sizeof(int);
    int wider[count];  // than the width of that number

    __device__ __forceinline__ Width(int tokens) {
#pragma unroll
        for (int i = 0; i < count; i++) {
            wider[i] = i + 1 < count && tokens > all[(i + 1) % count];
            // Opaque, or it is computed anew.
            asm volatile("" : "+r"(wider[i]));
        }
    }

    // The branches stay even where one width would do: without them the compiler lets every product wait for the one before.
    template <int I = 0>
    __device__ __forceinline__ void batch_for(Registers &regs, int side, u32 b, int add) const {
        if constexpr (I + 1 < count) {
            if (wider[I]) batch<all[I]>(regs, side, b, add);
            else batch_for<I + 1>(regs, side, b, add);
        } else {
            batch<all[I]>(regs, side, b, add);
        }
    }
};

DEVICE void settle(Registers &regs) {
#pragma unroll
    for (int i = 0; i < NMAX / 2; i++) asm volatile("" : "+f"(regs.acc[i])::"memory");
}

// regs.acc = products of `turns` turns of stages. With READ_AHEAD the first one is in `ring.next`, as is afterwards the one that follows.
DEVICE void sum(Registers &regs, int tokens, int turns, Ring &ring) {
    const Width width(tokens);
    settle(regs);
    u32 before = 0;
    int more = 0;
#pragma unroll 1
    for (int q = 0; q < turns; q++) {
        const u32 first = UNROLL * ring.turn, empty = ring.empty + 8 * first, place = ring.place + first * (STAGE_BYTES >> 4);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
#if !READ_AHEAD
            // Always. Without a branch here, too, products wait for each other.
            if (ring.left) ring.read(first + u), ring.left--;
#endif
            const Codes codes = ring.next;
            const Scale scale[2] = {scale_of(codes.scales[0]), scale_of(codes.scales[1])};
#pragma unroll
            for (int i = 0; i < BATCHES; i++) {
                // The batch that had these registers is done, and so is, with the second one, the stage before this one.
                products_done<1>();
                if (i == 1 && (u > 0 || more)) ring.release(u > 0 ? empty + 8 * (u - 1) : before);
#pragma unroll
                for (int k = 0; k < STEPS / 2; k++)
#pragma unroll
                    for (int r = 0; r < 2; r++)
                        expand(word_of(codes.words[r], STEPS / 2 * i + k), scale[r], regs.a[i & 1] + 8 * k + r);
#if READ_AHEAD
                if (i == BATCHES / 2) {
                    if (u + 1 < UNROLL) {
                        ring.read(first + u + 1);
                    } else {
                        ring.advance();
                        if (ring.left) ring.read(UNROLL * ring.turn), ring.left--;
                    }
                }
#endif
                const int column = 16 * STEPS * i;
                const u32 b = place + u * (STAGE_BYTES >> 4) + column / 64 * (HALF_BYTES >> 4) + column % 64 / 8;
                width.batch_for(regs, i & 1, b, u > 0 || i > 0 || more);
            }
        }
        before = empty + 8 * (UNROLL - 1), more = 1;
#if !READ_AHEAD
        ring.advance();
#endif
    }
    products_done<0>();
    settle(regs);
    ring.release(before);
}

DEVICE void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// A tile's sums as halves into its slots, by way of `room` and the copy engine.
DEVICE void finish(const Args &p, u32 first, int count, int strip, const Registers &regs, u32 room) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wg = warp >> 2, w = warp & 3;
    // The warpgroups of a piece of 64 features: two with SWIGLU, else one.
    const int piece = SWIGLU ? wg >> 1 : wg, threads = SWIGLU ? 256 : 128;
    const bool copies = threadIdx.x % threads == 0;
    const u32 own = room + piece * PIECE_BYTES;
    const float back = 1.0f / SHIFT;
    if (copies) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    meet(1 + piece, threads);
    const int row = lane & 7, m = lane >> 3;
#if SWIGLU
    const u32 at = own + (8 * m + row) * 128 + (((4 * (wg & 1) + w) ^ row) << 4);
    const float place = w & 1 ? 0.25f : 4.0f;
#pragma unroll
    for (int n = 0; n < NMAX / 8; n += 4) {
        if (8 * n >= count) break;
        u32 h[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *c = regs.acc + 4 * (n + i);
            h[i] = narrow_half(place * quick_swiglu(back * c[0], back * c[2], p.limit),
                               place * quick_swiglu(back * c[1], back * c[3], p.limit));
        }
        store_matrices(at + n * 1024, h[0], h[1], h[2], h[3]);
    }
#else
    const u32 at = own + (8 * (m >> 1) + row) * 128 + (((2 * w + (m & 1)) ^ row) << 4);
#pragma unroll
    for (int n = 0; n < NMAX / 8; n += 2) {
        if (8 * n >= count) break;
        const float *c = regs.acc + 4 * n;
        store_matrices(at + n * 1024, narrow_half(back * c[0], back * c[1]), narrow_half(back * c[2], back * c[3]),
                       narrow_half(back * c[4], back * c[5]), narrow_half(back * c[6], back * c[7]));
    }
#endif
    shared_written();
    meet(1 + piece, threads);
    if (copies) {
        const int out = (SWIGLU ? 2 : 4) * strip + piece;
        if (64 * out < p.outputs)
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                             p.y + ((u64)out * p.slots + first) * 128),
                         "r"(own), "r"(128 * count)
                         : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
}

// A copying thread: 64 rows of weights a stage; two of them each half of the tokens' columns, too.
DEVICE void copy_stages(const Args &p, int begin, int end, u32 base, u32 full, u32 empty, u32 header) {
    const int own = threadIdx.x >> 5 & 3, last = (p.outputs + 63) / 64 - 1, step = gridDim.x;
    u32 slot = 0, parity = 1;
    Item item = begin < end ? item_at(p, begin / p.strips) : Item{0, 0, 0};
#pragma unroll 1
    for (int tile = begin; tile < end;) {
        const Weights w = p.table[item.expert];
        const u32 first = item.first, count = item.count, strip = tile % p.strips;
        tile += step;
        if (tile < end) item = item_at(p, tile / p.strips);
        const int rows = SWIGLU ? 2 * strip + (own & 1) : 4 * strip + own;
        const u8 *source = SWIGLU ? (own < 2 ? w.gate : w.up) : w.down;
        source += (u64)min_of(rows, last) * p.groups * GROUP_BYTES;
        const u8 *x = p.x + ((u64)(own & 1) * p.slots + first) * 128;
#pragma unroll 1
        for (int q = 0; q < p.groups; q++) {
            barrier_wait(empty + 8 * slot, parity);
            const u32 barrier = full + 8 * slot, to = base + slot * STAGE_BYTES;
            if (own == 0) {
                store_words(header + 16 * slot, make_uint4(first, count, strip, 0));
                barrier_expect(barrier, 4 * GROUP_BYTES + 256 * count);
            }
            copy_bulk(to + X_BYTES + own * GROUP_BYTES, source, GROUP_BYTES, barrier);
            if (own < 2) copy_bulk(to + own * HALF_BYTES, x, 128 * count, barrier);
            source += GROUP_BYTES;
            x += (u64)p.slots * 256;
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) experts(const __grid_constant__ Args p) {
    extern __shared__ u8 dynamic[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 base = (shared_address(dynamic) + 1023) & ~1023u, room = base + STAGES * STAGE_BYTES;
    const u32 full = room + ROOM_BYTES, empty = full + 8 * STAGES, header = empty + 8 * STAGES;
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 16);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    after_previous();
    let_next_begin();
    const int end = load_far(p.item_count) * p.strips, begin = blockIdx.x;
    if (warp >= 16) {
        // Registers of a block of 20 warps: 16 x 112 + 4 x 32 are all there are.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (lane == 0) copy_stages(p, begin, end, base, full, empty, header);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        Registers regs;
        // Opaque, or it is computed anew in every stage.
        u32 start;
        asm volatile("mov.u32 %0, %1;" : "=r"(start) : "r"(base));
        const int j = warp >> 2, w = warp & 3, tiles = begin < end ? (end - begin + gridDim.x - 1) / gridDim.x : 0;
        Ring ring;
        ring.place = describe_low(start);
        ring.full = start + STAGES * STAGE_BYTES + ROOM_BYTES, ring.empty = ring.full + 8 * STAGES, ring.header = ring.empty + 8 * STAGES;
        const u32 own = start + X_BYTES +
                        (SWIGLU ? (j >> 1) * GROUP_BYTES + (4 * (j & 1) + w) * BLOCK_BYTES : j * GROUP_BYTES + 2 * w * BLOCK_BYTES);
        ring.codes = own + 16 * lane, ring.scales = own + 512 + (lane & 28) / 2;
        asm volatile("" : "+r"(ring.codes), "+r"(ring.scales));
        const int turns = p.groups / UNROLL;
        ring.turn = 0, ring.parity = 0, ring.left = tiles * (READ_AHEAD ? turns : (int)p.groups);
#if READ_AHEAD
        if (ring.left) ring.read(0), ring.left--;
#endif
#pragma unroll 1
        for (int n = 0; n < tiles; n++) {
            const u32 stage = UNROLL * ring.turn;
#if !READ_AHEAD
            barrier_wait(ring.full + 8 * stage, ring.parity);
#endif
            const uint4 head = shared_words(ring.header + 16 * stage);
            sum(regs, head.y, turns, ring);
            finish(p, head.x, head.y, head.z, regs, room);
        }
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
