// Products of each head's own matrix with few or some rows: absorption (y = K^T x, halves) and values (y = V x, f32), the two halves of
// a head's part of kv_b, in BF16 as stored; x in f32, taken as two bf16 planes (16 to 17 bits), sums in f32.
//
// A block has a part of a head's matrix of 64 KB, each of its eight warps a square of 64 x 64 of it: copies of its own, asked for before
// the launch in front has ended, and operands of x in registers. Warps with other columns of the same outputs add their sums in turn.
//
// Order of a sum: 64 columns by the tensor core, high and low planes apart, then the warps in turn. It depends on the number of
// columns alone.
//
// QK: columns of absorption (64, 128, 256 or 512; those of values are 512); NT: tiles of 8 rows of x that a block takes at a time.
#include "common.cuh"
#include "async.cuh"
#include "fragments.cuh"

#define THREADS 256
#define SQUARE 64
#define SQUARE_BYTES (SQUARE * SQUARE * 2)

struct Args {
    const float *x;
    const u8 *w;
    void *y;
    u64 x_stride, y_stride;             // elements a row
    u64 w_head, w_bytes;                // bytes of a head, of a row of its matrix
    int x_head, y_head;                 // elements of a head
    int parts, rows, through;           // blocks of a head, rows, rows of a block
};

template <int ACROSS>
DEVICE void multiply(const Args &p) {
    constexpr int DEEP = ACROSS ? QK / SQUARE : 8, BROAD = 8 / DEEP, OUTS = SQUARE * BROAD, PIECES = BROAD * 4 * NT;
    extern __shared__ __align__(128) u8 shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, deep = warp % DEEP, broad = warp / DEEP;
    const int head = blockIdx.x / p.parts, out = blockIdx.x % p.parts * OUTS;
    const u32 base = shared_address(shared), square = base + warp * SQUARE_BYTES, partial = base + 8 * SQUARE_BYTES;
    {
        const u8 *from = p.w + head * p.w_head + (lane >> 3) * p.w_bytes + 16 * (lane & 7);
        from += ACROSS ? deep * SQUARE * p.w_bytes + (out + broad * SQUARE) * 2 : out * p.w_bytes + deep * SQUARE * 2;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int r = 4 * i + (lane >> 3);
            copy_16(square + r * 128 + (((lane & 7) ^ (r & 7)) << 4), from + 4 * i * p.w_bytes);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    // The launch behind absorption takes lists for older than it, so it may begin only behind the wait.
    after_previous();
    let_next_begin();
    const int last = min_of(blockIdx.y * p.through + p.through, p.rows);
    for (int first = blockIdx.y * p.through; first < last; first += 8 * NT) {
        // Lane (g, t) has of row 8 n + g the columns 8 c + 2 t, + 1.
        float2 v[NT][8];
        u32 b[NT][2][8];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int row = first + 8 * n + g;
            const float *x = p.x + row * p.x_stride + head * p.x_head + deep * SQUARE + 2 * t;
#pragma unroll
            for (int c = 0; c < 8; c++) v[n][c] = row < last ? *(const float2 *)(x + 8 * c) : make_float2(0.0f, 0.0f);
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const u32 high = narrow(v[n][c].x, v[n][c].y);
                b[n][0][c] = high;
                b[n][1][c] = narrow(v[n][c].x - widen_low(high), v[n][c].y - widen_high(high));
            }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
        const int i = lane >> 3, r = lane & 7;
#pragma unroll
        for (int m = 0; m < 4; m++) {
            float sums[2][NT][4];
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 8; e++) sums[e / 4][n][e % 4] = 0.0f;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 a[4];
                if (ACROSS)
                    matrices_turned(a, square + (16 * k + (i >> 1) * 8 + r) * 128 + (((2 * m + (i & 1)) ^ r) << 4));
                else
                    matrices(a, square + (16 * m + (i & 1) * 8 + r) * 128 + (((2 * k + (i >> 1)) ^ r) << 4));
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int q = 0; q < 2; q++) mma(sums[q][n], a[0], a[1], a[2], a[3], b[n][q][2 * k], b[n][q][2 * k + 1]);
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const u32 at = partial + ((deep * PIECES + (broad * 4 + m) * NT + n) * 32 + lane) * 16;
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(sums[0][n][0] + sums[1][n][0]),
                             "f"(sums[0][n][1] + sums[1][n][1]), "f"(sums[0][n][2] + sums[1][n][2]), "f"(sums[0][n][3] + sums[1][n][3])
                             : "memory");
            }
        }
        __syncthreads();
        for (int piece = warp; piece < PIECES; piece += 8) {
            float4 s = read_floats(partial + (piece * 32 + lane) * 16);
#pragma unroll
            for (int d = 1; d < DEEP; d++) {
                const float4 more = read_floats(partial + ((d * PIECES + piece) * 32 + lane) * 16);
                s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
            }
            const int o = out + piece / NT * 16 + g, row = first + piece % NT * 8 + 2 * t;
            const u64 at = row * p.y_stride + head * p.y_head + o;
            if (ACROSS) {
                u16 *y = (u16 *)p.y;
                if (row < last) y[at] = narrow_half(s.x, 0.0f), y[at + 8] = narrow_half(s.z, 0.0f);
                if (row + 1 < last) y[at + p.y_stride] = narrow_half(s.y, 0.0f), y[at + p.y_stride + 8] = narrow_half(s.w, 0.0f);
            } else {
                float *y = (float *)p.y;
                if (row < last) y[at] = s.x, y[at + 8] = s.z;
                if (row + 1 < last) y[at + p.y_stride] = s.y, y[at + p.y_stride + 8] = s.w;
            }
        }
        if (first + 8 * NT < last) __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) absorb_few(const __grid_constant__ Args p) { multiply<1>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) values_few(const __grid_constant__ Args p) { multiply<0>(p); }
