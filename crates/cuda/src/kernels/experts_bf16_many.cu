// Grouped products of BF16 experts for many tokens an expert, on warpgroup instructions; the weights are the A operand as they are
// stored, the tokens, two bf16 planes (16 to 17 bits of an f32), the B operand, sums are f32.
//
// A tile is 256 rows of one expert (SWIGLU: 128 features, gate and up) by up to NMAX of its tokens. One thread has the copy engine
// fill stages of 64 columns, two boxes of 128 rows of weights and both planes of the tokens, in a ring in shared memory that runs on
// from tile to tile; two warpgroups take 64 rows of each box. Blocks take tiles in turn.
//
// Order of a sum: columns by sixteens, the high plane's products, then the low plane's: the same whatever the tokens of an item are.
//
// Tokens in slots: planes of bf16 `[columns / 64][PLANES][slots][64]`, as slots.cu has them. A tile's end: with SWIGLU both planes of
// the activations go through shared memory into their slots, 32 tokens at a time; outputs go as f32 to the rows of their choices.
//
// What else was tried, us at 8192 rows of 1024 features: the choice of a token read when its outputs are stored, down 2207 instead of
// 1680 to 1950 (sixteen reads one after the other end a tile of sixteen stages); outputs through shared memory, as 16 bytes a
// thread, as these. The device is at its power limit there, so the whole chain hardly moved: 5880 to 6170 in all versions.
//
// Limits: compute capability 9.0; columns, and with SWIGLU rows, in pieces of 64; items of up to NMAX tokens.
//
// Constants: SWIGLU, PLANES, NMAX (16, 32, 80 or 128), STAGES.
#include "common.cuh"
#include "wgmma.cuh"
#include "async.cuh"
#include "fragments.cuh"

#define CONSUMERS 256
#define BOX_BYTES 16384
#define PLANE_BYTES (NMAX * 128)
#define STAGE_BYTES (2 * BOX_BYTES + PLANES * PLANE_BYTES)
// Activations of a warpgroup on their way out: planes of 32 tokens by 64 features.
#define PART 4096
#define ROOM_BYTES (SWIGLU ? 2 * PLANES * PART : 0)
// Widths of products: an item's are the narrowest that hold its tokens.
#if NMAX == 128
#define WIDTHS 128, 120, 112, 104, 96, 64
#elif NMAX == 80
#define WIDTHS 80, 72, 64, 56, 48, 40
#elif NMAX == 32
#define WIDTHS 32, 24, 16
#else
#define WIDTHS 16, 8
#endif

// How a matrix lies, as the copy engine takes it.
struct Map {
    u64 words[16];
};

struct Maps {
    Map gate, up, down;
};

struct Item {
    u32 expert, first, count;
};

struct Args {
    const Maps *maps;
    const Item *items;
    const u32 *item_count;
    const u32 *list;          // choices by expert
    const u8 *x;              // tokens in slots
    u8 *y;                    // activations in slots (SWIGLU), or f32 [choices, y_stride]
    int slots, outputs, pieces, strips, y_stride;
    float limit;
};

// c += a b, a 64 x 16 and b 16 x N in bf16, both described.
template <int N>
struct Product;

#define PRODUCT(N, LIST, A, B, P, ...)                                                                                   \
    template <>                                                                                                        \
    struct Product<N> {                                                                                                \
        static __device__ __forceinline__ void add(float *c, u64 a, u64 b, int more) {                                 \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, %" A ", %" B            \
                         ", p, 1, 1, 0, 0;\n}\n"                                                                       \
                         : __VA_ARGS__                                                                                 \
                         : "l"(a), "l"(b), "r"(more));                                                                 \
        }                                                                                                              \
    };

#if NMAX == 16
PRODUCT(8, LIST_4, "4", "5", "6", C4(0))
PRODUCT(16, LIST_8, "8", "9", "10", C8(0))
#elif NMAX == 32
PRODUCT(16, LIST_8, "8", "9", "10", C8(0))
PRODUCT(24, LIST_12, "12", "13", "14", C8(0), C4(8))
PRODUCT(32, LIST_16, "16", "17", "18", C16(0))
#elif NMAX == 80
PRODUCT(40, LIST_20, "20", "21", "22", C16(0), C4(16))
PRODUCT(48, LIST_24, "24", "25", "26", C16(0), C8(16))
PRODUCT(56, LIST_28, "28", "29", "30", C16(0), C8(16), C4(24))
PRODUCT(64, LIST_32, "32", "33", "34", C32(0))
PRODUCT(72, LIST_36, "36", "37", "38", C32(0), C4(32))
PRODUCT(80, LIST_40, "40", "41", "42", C32(0), C8(32))
#else
PRODUCT(64, LIST_32, "32", "33", "34", C32(0))
PRODUCT(96, LIST_48, "48", "49", "50", C32(0), C16(32))
PRODUCT(104, LIST_52, "52", "53", "54", C32(0), C16(32), C4(48))
PRODUCT(112, LIST_56, "56", "57", "58", C32(0), C16(32), C8(48))
PRODUCT(120, LIST_60, "60", "61", "62", C32(0), C16(32), C8(48), C4(56))
PRODUCT(128, LIST_64, "64", "65", "66", C32(0), C32(32))
#endif

// A box of 128 rows by 64 columns; what lies beyond the matrix is zero.
DEVICE void copy_box(u32 to, const Map *map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

// The copying thread.
DEVICE void copy_stages(const Args &p, u32 base, u32 full, u32 empty, u32 header) {
    const int end = (int)*p.item_count * p.strips;
    u32 slot = 0, parity = 1;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < end; tile += gridDim.x) {
        const Item item = p.items[tile / p.strips];
        const int strip = tile % p.strips;
        const Maps *maps = p.maps + item.expert;
        const Map *first = SWIGLU ? &maps->gate : &maps->down, *second = SWIGLU ? &maps->up : &maps->down;
        const int row = SWIGLU ? 128 * strip : 256 * strip, next = SWIGLU ? row : row + 128;
        const u8 *x = p.x + (u64)item.first * 128;
#pragma unroll 1
        for (int q = 0; q < p.pieces; q++) {
            barrier_wait(empty + 8 * slot, parity);
            const u32 barrier = full + 8 * slot, to = base + slot * STAGE_BYTES;
            store_four(header + 16 * slot, make_uint4(item.first, item.count, strip, 0));
            barrier_expect(barrier, 2 * BOX_BYTES + PLANES * 128 * item.count);
            copy_box(to, first, 64 * q, row, barrier);
            copy_box(to + BOX_BYTES, second, 64 * q, next, barrier);
#pragma unroll
            for (int i = 0; i < PLANES; i++)
                copy_bulk(to + 2 * BOX_BYTES + i * PLANE_BYTES, x + (u64)i * p.slots * 128, 128 * item.count, barrier);
            x += (u64)PLANES * p.slots * 128;
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
    }
}

// Choices of a tile's tokens: lane l has those of the tokens l, l + 32, ...
struct Choices {
    u32 held[(NMAX + 31) / 32];

    __device__ __forceinline__ void read(const Args &p, u32 first, int count) {
#pragma unroll
        for (int i = 0; i < (NMAX + 31) / 32; i++) {
            const int token = 32 * i + (int)(threadIdx.x & 31);
            held[i] = p.list[first + min_of(token, count - 1)];
        }
    }
    // Of token 8 * n + more; `more` is below eight.
    __device__ __forceinline__ u32 of(int n, int more) const { return __shfl_sync(FULL, held[n / 4], 8 * (n % 4) + more); }
};

// Where a warpgroup stands among the stages.
struct Ring {
    u32 base, full, empty, slot, parity;

    __device__ __forceinline__ void release(u32 stage) const {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(empty + 8 * stage);
    }
};

struct Sums {
    float c[2][NMAX / 2];
};

// Products of a tile; its first stage is there.
template <int N>
DEVICE void sum(Sums &s, int pieces, Ring &ring) {
    u32 before = 0;
    hold(s.c[0]);
    hold(s.c[1]);
#pragma unroll 1
    for (int q = 0; q < pieces; q++) {
        barrier_wait(ring.full + 8 * ring.slot, ring.parity);
        const u32 at = ring.base + ring.slot * STAGE_BYTES;
        const u64 a = describe(at + (threadIdx.x >> 7) * (BOX_BYTES / 2)), b = describe(at + 2 * BOX_BYTES);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int plane = 0; plane < PLANES; plane++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    Product<N>::add(s.c[i], a + (i * (BOX_BYTES >> 4) + 2 * k), b + (plane * (PLANE_BYTES >> 4) + 2 * k),
                                    k > 0 || plane > 0 || q > 0);
        products_commit();
        products_done<1>();
        if (q > 0) ring.release(before);
        before = ring.slot;
        if (++ring.slot == STAGES) ring.slot = 0, ring.parity ^= 1;
    }
    products_done<0>();
    hold(s.c[0]);
    hold(s.c[1]);
    ring.release(before);
}

template <int... ALL>
struct Width;
template <int N>
struct Width<N> {
    static __device__ __forceinline__ void sum_of(Sums &s, int, int pieces, Ring &ring) { sum<N>(s, pieces, ring); }
};
template <int N, int NEXT, int... REST>
struct Width<N, NEXT, REST...> {
    static __device__ __forceinline__ void sum_of(Sums &s, int tokens, int pieces, Ring &ring) {
        if (tokens > NEXT) sum<N>(s, pieces, ring);
        else Width<NEXT, REST...>::sum_of(s, tokens, pieces, ring);
    }
};

#if SWIGLU
// Activations of a tile as planes into their slots.
DEVICE void finish(const Args &p, u32 first, int count, int strip, const Sums &s, u32 room) {
    const int wg = threadIdx.x >> 7, w = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, row = lane & 7, m = lane >> 3;
    const bool copies = (threadIdx.x & 127) == 0;
    const u32 own = room + wg * PLANES * PART;
    const u32 at = own + (8 * (m >> 1) + row) * 128 + (((2 * w + (m & 1)) ^ row) << 4);
    const int piece = 2 * strip + wg;
#pragma unroll
    for (int n = 0; n < NMAX / 8; n += 2) {
        if (8 * n >= count) break;
        if (n % 4 == 0) {
            if (copies) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            meet(1 + wg, 128);
        }
        u32 high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *g = s.c[0] + 4 * n + 2 * i, *u = s.c[1] + 4 * n + 2 * i;
            const float a = quick_swiglu(g[0], u[0], p.limit), b = quick_swiglu(g[1], u[1], p.limit);
            high[i] = narrow(a, b);
            low[i] = narrow(a - widen_low(high[i]), b - widen_high(high[i]));
        }
        store_matrices_turned(at + n % 4 * 1024, high);
        if (PLANES > 1) store_matrices_turned(at + n % 4 * 1024 + PART, low);
        if (n % 4 == 2 || 8 * n + 16 >= count) {
            const int from = n / 4 * 32;
            shared_written();
            meet(1 + wg, 128);
            if (copies) {
                u8 *to = p.y + ((u64)piece * PLANES * p.slots + first + from) * 128;
                if (64 * piece < p.outputs)
#pragma unroll
                    for (int i = 0; i < PLANES; i++)
                        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + (u64)i * p.slots * 128),
                                     "r"(own + i * PART), "r"(128 * min_of(32, count - from))
                                     : "memory");
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
        }
    }
}
#else
// Outputs of a tile to the rows of their choices.
DEVICE void finish(const Args &p, const Choices &choices, int count, int strip, const Sums &s) {
    const int wg = threadIdx.x >> 7, w = threadIdx.x >> 5 & 3, g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
    const int out = 256 * strip + 64 * wg + 16 * w + g;
    float *y = (float *)p.y + out;
#pragma unroll
    for (int n = 0; n < NMAX / 8; n++) {
        if (8 * n >= count) break;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float *to = y + (u64)choices.of(n, 2 * t + i) * p.y_stride;
            const bool there = 8 * n + 2 * t + i < count;
#pragma unroll
            for (int box = 0; box < 2; box++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    if (there && out + 128 * box + 8 * r < p.outputs) to[128 * box + 8 * r] = s.c[box][4 * n + 2 * r + i];
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) many_experts(const __grid_constant__ Args p) {
    extern __shared__ u8 dynamic[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 base = (shared_address(dynamic) + 1023) & ~1023u, room = base + STAGES * STAGE_BYTES;
    const u32 full = room + ROOM_BYTES, empty = full + 8 * STAGES, header = (empty + 8 * STAGES + 15) & ~15u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, CONSUMERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    after_previous();
    let_next_begin();
    if (warp == CONSUMERS / 32) {
        if (lane == 0) copy_stages(p, base, full, empty, header);
        return;
    }
    Sums s;
    Ring ring;
    ring.base = base, ring.full = full, ring.empty = empty, ring.slot = 0, ring.parity = 0;
    const int end = (int)*p.item_count * p.strips;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < end; tile += gridDim.x) {
        barrier_wait(full + 8 * ring.slot, ring.parity);
        const uint4 item = read_four(header + 16 * ring.slot);
#if SWIGLU
        Width<WIDTHS>::sum_of(s, item.y, p.pieces, ring);
        finish(p, item.x, item.y, item.z, s, room);
#else
        Choices choices;
        choices.read(p, item.x, item.y);
        Width<WIDTHS>::sum_of(s, item.y, p.pieces, ring);
        finish(p, choices, item.y, item.z, s);
#endif
    }
    if (SWIGLU && (threadIdx.x & 127) == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
