// y[token, out] = W x with W stored as BF16 or INT4 (group 128), x as two bf16 planes, sums in f32.
//
// The weights are the tensor core's A operand (16 outputs), the tokens its B operand (8 tokens): few tokens cost no padding,
// and a token's sum is taken in the same order whatever stands beside it.
//
// x = high + low, bf16 beside BF16 weights (16 to 17 bits of an f32 activation) and halves beside INT4 codes (22 bits), so
// that weights are exact. A group of 128 columns is summed from zero by the tensor core and then added (INT4: times the row's
// scale) in f32. PLANES = 1 leaves the low part out.
//
// Physical order of columns: in each block of 32, lane t of a quarter-warp takes columns 8 t .. 8 t + 7, in one 16-byte load of
// a stored row and of an activation plane alike. The order inside a sum is free, so nothing is shuffled.
//
// INT4 has the layout of experts.cu, whose columns are in the tensor core's own order: beside it a lane collects its activations
// from four places.
//
// Compile-time constants: INT4, SWIGLU (rows of two matrices interleaved by 8, activation applied), GROUPED (work items
// name an expert and a run of a token list), PLANES, NT (tiles of 8 tokens), WK (warps along K; the others along outputs).
#include "common.cuh"

#define WARPS 4
#define WM (WARPS / WK)
#define TOKENS (8 * NT)
#define TILE 32
#define TILE_BYTES 528
#define GROUP_BYTES 4224
// Stages of weights in registers ahead of their use, and blocks of 128 threads a multiprocessor is to hold.
#ifndef DEPTH
#define DEPTH (INT4 ? (NT <= 1 ? 2 : 1) : (NT <= 1 ? 4 : (NT <= 4 ? 2 : 1)))
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS (INT4 ? (NT <= 2 ? 3 : 2) : (NT <= 4 ? 3 : 2))
#endif

// Where an expert's matrices are.
struct Weights {
    const u8 *gate, *up, *down;
};

struct Item {
    u32 expert, first, count;
};

struct Args {
    const u8 *w0, *w1;     // ungrouped: the matrix (SWIGLU: gate and up)
    const Weights *table;  // grouped
    const Item *items;
    const u32 *item_count;
    const u32 *list;        // grouped: choices by expert
    const u16 *x;           // high plane [rows, pitch]; the low one follows after `plane` elements
    const float *b0, *b1;   // biases or null
    float *y;               // output, or with `y_plane` the high plane of a split output
    u64 plane, y_plane;
    int rows, outputs, columns, pitch, w_pitch, y_stride, divisor, down;
    float limit;
};

#if INT4
#define MMA mma_half
#else
#define MMA mma
#endif

// Products of 32 columns: `a` holds the four row tiles, `b` a token tile of a plane.
DEVICE void multiply(float (&c)[2][4], const uint4 (&a)[4], uint4 b) {
#pragma unroll
    for (int i = 0; i < 2; i++) MMA(c[i], a[2 * i].x, a[2 * i + 1].x, a[2 * i].y, a[2 * i + 1].y, b.x, b.y);
#pragma unroll
    for (int i = 0; i < 2; i++) MMA(c[i], a[2 * i].z, a[2 * i + 1].z, a[2 * i].w, a[2 * i + 1].w, b.z, b.w);
}

#if INT4
struct Stage {
    uint4 w[4];
    u16 s[4];
};
#else
struct Stage {
    uint4 w[4];
};
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) gemm(const __grid_constant__ Args p) {
    __shared__ float sums[WK][WM * TILE][TOKENS + 1];
    __shared__ u32 rows_in[TOKENS], rows_out[TOKENS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int wk = warp % WK, wm = warp / WK;

#if GROUPED
    after_previous();
    let_next_begin();
    if (blockIdx.y >= *p.item_count) return;
    const Item item = p.items[blockIdx.y];
    const Weights weights = p.table[item.expert];
    const u8 *w0 = p.down ? weights.down : weights.gate, *w1 = weights.up;
    const int count = item.count;
    if (threadIdx.x < TOKENS) {
        u32 choice = threadIdx.x < count ? p.list[item.first + threadIdx.x] : 0;
        rows_out[threadIdx.x] = choice;
        rows_in[threadIdx.x] = choice / p.divisor;
    }
#else
    const u8 *w0 = p.w0, *w1 = p.w1;
    const int first = blockIdx.y * TOKENS, count = min_of(TOKENS, p.rows - first);
    if (threadIdx.x < TOKENS) {
        rows_out[threadIdx.x] = first + threadIdx.x;
        rows_in[threadIdx.x] = first + threadIdx.x;
    }
#endif

    // Row tiles: SWIGLU alternates gate and up of the same eight features.
#if SWIGLU
    const int base = (blockIdx.x * WM + wm) * (TILE / 2);
#else
    const int base = (blockIdx.x * WM + wm) * TILE;
#endif
#if INT4
    const int groups = p.columns / 128;
#else
    const int groups = (p.w_pitch + 127) / 128, blocks = p.w_pitch / 32;
#endif
    // Places in bytes; a matrix is smaller than 4 GiB.
    u32 a[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int row = SWIGLU ? base + 8 * (j >> 1) : base + 8 * j;
#if INT4
        const u32 tile = min_of(row, p.outputs - 8) / 8;
        a[j] = tile / 8 * groups * GROUP_BYTES + tile % 8 * TILE_BYTES;
#else
        a[j] = ((u32)min_of(row + g, p.outputs - 1) * p.w_pitch + 8 * t) * 2;
#endif
    }
    const int begin = groups * wk / WK, end = groups * (wk + 1) / WK;

    float acc[NT][2][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) acc[n][i >> 2][i & 3] = 0.0f;

    // One stage: INT4 a group of 128 columns, BF16 a block of 32.
#if INT4
    const int steps_begin = begin, steps_end = end;
#else
    const int steps_begin = begin * 4, steps_end = min_of(end * 4, blocks);
#endif
    Stage ring[DEPTH];
    auto fetch = [&](Stage &stage, int step) {
        if (step >= steps_end) return;
#pragma unroll
        for (int j = 0; j < 4; j++) {
#if INT4
            const u8 *from = (SWIGLU && (j & 1) ? w1 : w0) + (a[j] + step * (u32)GROUP_BYTES);
            stage.w[j] = load_stream(from + 16 * lane);
            stage.s[j] = ((const u16 *)(from + 512))[g];
#else
            stage.w[j] = load_stream((SWIGLU && (j & 1) ? w1 : w0) + (a[j] + step * 64u));
#endif
        }
    };
#pragma unroll
    for (int d = 0; d < DEPTH; d++) fetch(ring[d], steps_begin + d);

#if !GROUPED
    // Weights are there before anything else is.
    after_previous();
    let_next_begin();
#endif
    __syncthreads();
    // Places of the token tiles in units of 8 columns.
    const u8 *x = (const u8 *)p.x, *x_low = (const u8 *)(p.x + p.plane);
    u32 b[NT];
    const int valid = count - g;
#pragma unroll
    for (int n = 0; n < NT; n++) b[n] = rows_in[8 * n < valid ? 8 * n + g : 0] * (p.pitch / 8) + (INT4 ? 0 : t);
#if INT4
    // Columns 2 t, 8 + 2 t, 16 + 2 t, 24 + 2 t of 32.
    auto collect = [&](const u8 *from) {
        const u32 *words = (const u32 *)from + t;
        return make_uint4(__ldg(words), __ldg(words + 4), __ldg(words + 8), __ldg(words + 12));
    };
#endif

    float part[NT][2][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) part[n][i >> 2][i & 3] = 0.0f;
    const uint4 zero = make_uint4(0, 0, 0, 0);

    for (int at = steps_begin; at < steps_end; at += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int step = at + d;
            if (step >= steps_end) break;
            const Stage stage = ring[d];
            fetch(ring[d], step + DEPTH);
#if INT4
            float scale[4];
#pragma unroll
            for (int j = 0; j < 4; j++) scale[j] = widen(stage.s[j]);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint4 w[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const u32 word = k == 0 ? stage.w[j].x : k == 1 ? stage.w[j].y : k == 2 ? stage.w[j].z : stage.w[j].w;
                    w[j] = unpack(word);
                }
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const u64 at = (u64)(b[n] + step * 16 + 4 * k) * 16;
                    const uint4 high = 8 * n < valid ? collect(x + at) : zero;
#if PLANES > 1
                    const uint4 low = 8 * n < valid ? collect(x_low + at) : zero;
                    multiply(part[n], w, low);
#endif
                    multiply(part[n], w, high);
                }
            }
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    acc[n][i >> 2][i & 3] = fmaf(scale[i >> 1], part[n][i >> 2][i & 3], acc[n][i >> 2][i & 3]);
                    part[n][i >> 2][i & 3] = 0.0f;
                }
#else
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const u64 at = (u64)(b[n] + step * 4) * 16;
                const uint4 high = 8 * n < valid ? load_cached(x + at) : zero;
#if PLANES > 1
                const uint4 low = 8 * n < valid ? load_cached(x_low + at) : zero;
                multiply(part[n], stage.w, low);
#endif
                multiply(part[n], stage.w, high);
            }
            if ((step & 3) == 3 || step + 1 == steps_end) {
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        acc[n][i >> 2][i & 3] += part[n][i >> 2][i & 3];
                        part[n][i >> 2][i & 3] = 0.0f;
                    }
            }
#endif
        }
    }

#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            sums[wk][wm * TILE + 16 * (i >> 2) + 8 * ((i >> 1) & 1) + g][8 * n + 2 * t + (i & 1)] = acc[n][i >> 2][i & 3];
    __syncthreads();

    auto total = [&](int row, int token) {
        float sum = sums[0][row][token];
#pragma unroll
        for (int k = 1; k < WK; k++) sum += sums[k][row][token];
        return sum;
    };
#if SWIGLU
    const int width = WM * TILE / 2;
#else
    const int width = WM * TILE;
#endif
    for (int i = threadIdx.x; i < width * count; i += 32 * WARPS) {
        const int column = i % width, token = i / width, out = blockIdx.x * width + column;
        if (out >= p.outputs) continue;
#if SWIGLU
        const int row = 16 * (column >> 3) + (column & 7);
        float gate = total(row, token), up = total(row + 8, token);
        if (p.b0) gate += p.b0[out];
        if (p.b1) up += p.b1[out];
        const float v = clamped_swiglu(gate, up, p.limit);
#else
        float v = total(column, token);
        if (p.b0) v += p.b0[out];
#endif
        const u64 place = (u64)rows_out[token] * p.y_stride + out;
        if (p.y_plane) {
            store_planes((u16 *)p.y + place, p.y_plane, v, INT4);
        } else {
            p.y[place] = v;
        }
    }
}
