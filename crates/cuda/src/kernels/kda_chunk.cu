// Kimi delta attention over whole chunks of 64 rows, on tensor cores.
//
// Maths, a head, rows i of a chunk, G the sum of log-decays from the chunk's first row on, S the state in front of it:
//   A[i][j] = -beta_i sum_d k_i k_j exp(G_i - G_j)  (j < i);   P[i][j] = sum_d q_i k_j exp(G_i - G_j)  (j <= i)
//   T = (I - A)^-1;   W = T (beta k exp(G));   U = T (beta v);   V = U - W S
//   o = (q exp(G)) S + P V;   S <- diag(exp(G_63)) S + (k exp(G_63 - G))^T V
// A row loses at most e^-5, a chunk e^-320: only exponentials of sums over at most 16 rows are ever positive. Blocks of 16
// rows are taken relative to the row in front of them.
//
// `chunk_prepare` is parallel over chunks and heads and leaves Q = q exp(G), K = k exp(G_63 - G), W, P in bf16, U in f32 and
// exp(G_63). `chunk_walk` goes through the chunks of a segment in order; a block has 32 value columns of a head, which do not
// depend on the others, and keeps its part of S in the accumulators. S, V, W, T and the factors of A enter products as
// two bf16 each (hi + lo), because U - W S may be much smaller than both; Q, K, P and beta v as one: against the recurrence the
// error is that of a few roundings to bf16, 1e-3 to 3e-3. `chunk_gate` norms and gates the rows and writes the last ones to the
// ring of the convolution.
//
// Limits: bytes (six f32 a channel and row) 355 us for 16384 rows and 32 heads, intermediate results as much again; the first
// version takes 2423 us (row after row 19917): two thirds in `chunk_prepare`, by its instructions (exponentials and conversions
// of every pair of blocks, the substitution in two warps), 3.5 us a chunk in `chunk_walk`, where one warp a scheduler has its
// products in sequence. With keys rounded once in A it took 2108 us, with an error of 3.3e-3 where nothing decays.
//
// DIM is 128 here; TAPS: taps of the convolution.
#include "kda.cuh"

#define PITCH (DIM + 8)
#define COLUMNS 32
// One chunk of one head in scratch, in 16-bit numbers: Q, K, W [64][DIM], P [64][64], U [4][64][32] f32,
// exp(G_63) f32, what bf16 leaves of W.
#define QUERY 0
#define KEY (CHUNK * DIM)
#define WEIGHT (2 * CHUNK * DIM)
#define PAIRS (3 * CHUNK * DIM)
#define UPDATE (PAIRS + CHUNK * CHUNK)
#define DECAY (UPDATE + 2 * CHUNK * DIM)
#define WEIGHT_LOW (DECAY + 2 * DIM)
#define UNIT (WEIGHT_LOW + CHUNK * DIM)

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
DEVICE void matrices_turned(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
// Addresses of a lane: operand `a` 16 x 16 of rows with `pitch` 16-bit numbers, also `b` 16 x 16 (two of eight columns) when
// turned; and `a` from a matrix stored by columns, when turned.
DEVICE u32 straight(u32 base, int pitch, int lane) { return base + 2 * ((lane & 15) * pitch + (lane >> 4) * 8); }
DEVICE u32 crossed(u32 base, int pitch, int lane) {
    return base + 2 * (((lane >> 4) * 8 + (lane & 7)) * pitch + (lane >> 3 & 1) * 8);
}
DEVICE void copy_async(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void split(float a, float b, u32 &high, u32 &low) {
    high = narrow(a, b);
    low = narrow(a - widen_low(high), b - widen_high(high));
}

struct Prepared {
    u16 q[CHUNK][PITCH], k[CHUNK][PITCH], v[CHUNK][PITCH];
    float sums[CHUNK][DIM + 4], a[CHUNK][CHUNK + 4];
    u16 inverse[CHUNK][CHUNK + 8];
    float beta[CHUNK];
    // Squares of q and k of four rows: [half][turn][row][warp].
    float2 squares[2][2][4][DIM / 32];
};

// Grid (chunks of the window, heads, segments), 256 threads. q and k are kept as halves (they are at most 1), v as bf16.
extern "C" __global__ void __launch_bounds__(256)
    chunk_prepare(const Segment *segments, int first_chunk, const float *proj, int proj_stride, const float *gates,
                  int gates_stride, const u8 *taps, int bf16, int taps_pitch, const float *a_log, const float *dt_bias,
                  float bound, const __grid_constant__ Ring ring, int heads, u16 *scratch) {
    extern __shared__ __align__(16) u8 dynamic[];
    Prepared &m = *(Prepared *)dynamic;
    const Segment s = segments[blockIdx.z];
    const Chunks chunks = chunks_of(s);
    const int chunk = first_chunk + blockIdx.x, head = blockIdx.y;
    if (chunk >= chunks.count) return;
    u16 *unit = scratch + (((u64)blockIdx.z * gridDim.x + blockIdx.x) * heads + head) * UNIT;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int first = chunks.first + CHUNK * chunk;
    const u64 slot = (u64)s.slot * heads + head;

    // Convolution and decays: a channel, half of the rows.
    {
        const int d = tid % DIM, half = tid / DIM;
        float w[3][TAPS], x[3][TAPS];
#pragma unroll
        for (int p = 0; p < 3; p++)
#pragma unroll
            for (int j = 0; j < TAPS; j++) {
                const u64 at = (u64)((p * heads + head) * DIM + d) * taps_pitch + j;
                w[p][j] = bf16 ? widen(((const u16 *)taps)[at]) : ((const float *)taps)[at];
                // What precedes the first row: x[p][1 ..].
                const int row = first + 32 * half - TAPS + j, position = s.position + row;
                x[p][j] = 0.0f;
                if (j > 0 && row >= 0) x[p][j] = proj[(u64)(s.first_row + row) * proj_stride + (p * heads + head) * DIM + d];
                else if (j > 0 && position >= 0)
                    x[p][j] = ring.columns[((slot * ring.column_ring + column_at(ring, position)) * 3 + p) * DIM + d];
            }
        const float rate = expf(a_log[head]), shift = dt_bias[head * DIM + d];
        float sum = 0.0f;
#pragma unroll 1
        for (int turn = 0; turn < 8; turn++) {
            float q[4], k[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = 32 * half + 4 * turn + i;
                const u64 row = s.first_row + first + r;
                float out[3];
#pragma unroll
                for (int p = 0; p < 3; p++) {
#pragma unroll
                    for (int j = 0; j + 1 < TAPS; j++) x[p][j] = x[p][j + 1];
                    x[p][TAPS - 1] = proj[row * proj_stride + (p * heads + head) * DIM + d];
                    float c = w[p][0] * x[p][0];
#pragma unroll
                    for (int j = 1; j < TAPS; j++) c = fmaf(w[p][j], x[p][j], c);
                    out[p] = c * quick_sigmoid(c);
                }
                const float beta = quick_sigmoid(proj[row * proj_stride + 3 * heads * DIM + head]);
                if (d == 0) m.beta[r] = beta;
                sum += bound * quick_sigmoid(rate * (gates[row * gates_stride + head * DIM + d] + shift));
                m.sums[r][d] = sum;
                m.v[r][d] = narrow(beta * out[2], 0.0f);
                q[i] = out[0];
                k[i] = out[1];
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 pair = make_float2(warp_sum(q[i] * q[i]), warp_sum(k[i] * k[i]));
                if (lane == 0) m.squares[half][turn & 1][i][warp % 4] = pair;
            }
            asm volatile("bar.sync %0, %1;" ::"r"(1 + half), "n"(DIM) : "memory");
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float of_q = 0.0f, of_k = 0.0f;
#pragma unroll
                for (int j = 0; j < DIM / 32; j++) {
                    const float2 pair = m.squares[half][turn & 1][i][j];
                    of_q += pair.x;
                    of_k += pair.y;
                }
                const int r = 32 * half + 4 * turn + i;
                m.q[r][d] = narrow_half(q[i] * ((1.0f / sqrtf((float)DIM)) * quick_inverse_root(of_q + 1e-6f)), 0.0f);
                m.k[r][d] = narrow_half(k[i] * quick_inverse_root(of_k + 1e-6f), 0.0f);
            }
        }
        __syncthreads();
        if (half == 1) {
            const float before = m.sums[31][d];
            for (int r = 32; r < CHUNK; r++) m.sums[r][d] += before;
        }
        __syncthreads();
    }

    // A and P by blocks of 16 x 16: warp 2 i + h has the blocks (i, h), (i, h + 2).
    const int block = warp >> 1;
    for (int other = warp & 1; other <= block; other += 2) {
        float pairs[2][4] = {}, weights[2][4] = {};
#pragma unroll 2
        for (int step = 0; step < DIM / 16; step++) {
            // Each factor as two bf16: errors of A grow in its inverse.
            u32 qa[2][4], ka[2][4], kb[2][2][2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int d = 16 * step + 8 * h + 2 * t;
                const float2 from = block > 0 ? *(const float2 *)&m.sums[16 * block - 1][d] : make_float2(0.0f, 0.0f);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int r = 16 * block + g + 8 * i;
                    const float2 sum = *(const float2 *)&m.sums[r][d];
                    const float ex = quick_exp(sum.x - from.x), ey = quick_exp(sum.y - from.y);
                    const u32 q2 = *(const u32 *)&m.q[r][d], k2 = *(const u32 *)&m.k[r][d];
                    split(widen_half(q2) * ex, widen_half(q2 >> 16) * ey, qa[0][2 * h + i], qa[1][2 * h + i]);
                    split(widen_half(k2) * ex, widen_half(k2 >> 16) * ey, ka[0][2 * h + i], ka[1][2 * h + i]);
                }
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int r = 16 * other + 8 * n + g;
                    const float2 sum = *(const float2 *)&m.sums[r][d];
                    const u32 k2 = *(const u32 *)&m.k[r][d];
                    split(widen_half(k2) * quick_exp(from.x - sum.x), widen_half(k2 >> 16) * quick_exp(from.y - sum.y),
                          kb[0][n][h], kb[1][n][h]);
                }
            }
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int part = 0; part < 3; part++) {
                    const u32 *q = qa[part == 1], *k = ka[part == 1], *right = kb[part == 2][n];
                    mma(pairs[n], q[0], q[1], q[2], q[3], right[0], right[1]);
                    mma(weights[n], k[0], k[1], k[2], k[3], right[0], right[1]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int r = 16 * block + g + 8 * i, c = 16 * other + 8 * n + 2 * t;
                const float beta = -m.beta[r];
                m.a[r][c] = c < r ? beta * weights[n][2 * i] : 0.0f;
                m.a[r][c + 1] = c + 1 < r ? beta * weights[n][2 * i + 1] : 0.0f;
                *(u32 *)(unit + PAIRS + r * CHUNK + c) =
                    narrow(c <= r ? pairs[n][2 * i] : 0.0f, c + 1 <= r ? pairs[n][2 * i + 1] : 0.0f);
            }
    }
    __syncthreads();

    // T by forward substitution, a column a thread; the others write Q and K, and put beta k exp(G) where q
    // was, with what bf16 leaves of it where k was.
    if (tid < CHUNK) {
        float column[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            float sum = i == tid ? 1.0f : 0.0f, more = 0.0f;
#pragma unroll
            for (int j = 0; j + 1 < i; j += 2) {
                const float2 a = *(const float2 *)&m.a[i][j];
                sum = fmaf(a.x, column[j], sum);
                more = fmaf(a.y, column[j + 1], more);
            }
            if (i & 1) sum = fmaf(m.a[i][i - 1], column[i - 1], sum);
            column[i] = sum + more;
            m.inverse[i][tid] = narrow(column[i], 0.0f);
        }
        // What bf16 leaves of T goes where A was.
        asm volatile("bar.sync 3, 64;" ::: "memory");
        u16(*low)[PITCH] = (u16(*)[PITCH])m.a;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) low[i][tid] = narrow(column[i] - widen(m.inverse[i][tid]), 0.0f);
    } else {
        for (int at = tid - CHUNK; at < CHUNK * DIM / 2; at += 256 - CHUNK) {
            const int r = at / (DIM / 2), d = at % (DIM / 2) * 2;
            const float2 sum = *(const float2 *)&m.sums[r][d], last = *(const float2 *)&m.sums[CHUNK - 1][d];
            const float ex = quick_exp(sum.x), ey = quick_exp(sum.y), beta = m.beta[r];
            const u32 q2 = *(const u32 *)&m.q[r][d], k2 = *(const u32 *)&m.k[r][d];
            const float kx = widen_half(k2), ky = widen_half(k2 >> 16);
            *(u32 *)(unit + QUERY + r * DIM + d) = narrow(widen_half(q2) * ex, widen_half(q2 >> 16) * ey);
            *(u32 *)(unit + KEY + r * DIM + d) = narrow(kx * quick_exp(last.x - sum.x), ky * quick_exp(last.y - sum.y));
            split(beta * kx * ex, beta * ky * ey, *(u32 *)&m.q[r][d], *(u32 *)&m.k[r][d]);
            if (r == CHUNK - 1) *(float2 *)((float *)(unit + DECAY) + d) = make_float2(ex, ey);
        }
    }
    __syncthreads();

    // W and U: 16 rows and half of the columns a warp; T has nothing right of its diagonal.
    float of_k[8][4] = {}, of_v[8][4] = {};
    const int side = warp & 1;
    for (int step = 0; step <= block; step++) {
        u32 a[4], low[4];
        matrices(a, straight(shared_address(&m.inverse[16 * block][16 * step]), CHUNK + 8, lane));
        matrices(low, straight(shared_address((u16 *)m.a + 16 * block * PITCH + 16 * step), PITCH, lane));
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            u32 b[4];
            matrices_turned(b, straight(shared_address(&m.q[16 * step][64 * side + 8 * n]), PITCH, lane));
            mma(of_k[n], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma(of_k[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            mma(of_k[n], low[0], low[1], low[2], low[3], b[0], b[1]);
            mma(of_k[n + 1], low[0], low[1], low[2], low[3], b[2], b[3]);
            matrices_turned(b, straight(shared_address(&m.k[16 * step][64 * side + 8 * n]), PITCH, lane));
            mma(of_k[n], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma(of_k[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            matrices_turned(b, straight(shared_address(&m.v[16 * step][64 * side + 8 * n]), PITCH, lane));
            mma(of_v[n], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma(of_v[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            mma(of_v[n], low[0], low[1], low[2], low[3], b[0], b[1]);
            mma(of_v[n + 1], low[0], low[1], low[2], low[3], b[2], b[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = 16 * block + g + 8 * i, c = 64 * side + 8 * n + 2 * t;
            split(of_k[n][2 * i], of_k[n][2 * i + 1], *(u32 *)(unit + WEIGHT + r * DIM + c), *(u32 *)(unit + WEIGHT_LOW + r * DIM + c));
            float *to = (float *)(unit + UPDATE) + (c / COLUMNS * CHUNK + r) * COLUMNS + c % COLUMNS;
            *(float2 *)to = make_float2(of_v[n][2 * i], of_v[n][2 * i + 1]);
        }
}

// A chunk of a head in shared memory, and the two parts of V and S.
struct Stage {
    u16 q[CHUNK][PITCH], k[CHUNK][PITCH], w[2][CHUNK][PITCH], pairs[CHUNK][CHUNK + 8];
    float u[CHUNK][COLUMNS + 4], decay[DIM];
};
struct Walk {
    Stage stages[2];
    u16 v[2][CHUNK][COLUMNS + 8], s[2][DIM][COLUMNS + 8];
};

// Grid (4, heads, segments), 128 threads: the chunks of a window in order. The slot holds the state in front of the first chunk
// unless nothing is in front of it.
extern "C" __global__ void __launch_bounds__(128)
    chunk_walk(const Segment *segments, int first_chunk, int window, const __grid_constant__ Ring ring, int heads,
               const u16 *scratch, float *out, int out_stride) {
    extern __shared__ __align__(16) u8 dynamic[];
    Walk &m = *(Walk *)dynamic;
    const Segment s = segments[blockIdx.z];
    const Chunks chunks = chunks_of(s);
    const int count = min_of(chunks.count - first_chunk, window), head = blockIdx.y;
    if (count <= 0) return;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int first_column = COLUMNS * blockIdx.x;
    const u16 *units = scratch + ((u64)blockIdx.z * window * heads + head) * UNIT;

    auto fetch = [&](int chunk) {
        const u16 *unit = units + (u64)chunk * heads * UNIT;
        Stage &to = m.stages[chunk & 1];
        for (int i = tid; i < CHUNK * DIM / 8; i += 128) {
            const int r = i / (DIM / 8), c = i % (DIM / 8) * 8;
            copy_async(shared_address(&to.q[r][c]), unit + QUERY + 8 * i);
            copy_async(shared_address(&to.k[r][c]), unit + KEY + 8 * i);
            copy_async(shared_address(&to.w[0][r][c]), unit + WEIGHT + 8 * i);
            copy_async(shared_address(&to.w[1][r][c]), unit + WEIGHT_LOW + 8 * i);
        }
        const float *u = (const float *)(unit + UPDATE) + blockIdx.x * CHUNK * COLUMNS;
        for (int i = tid; i < CHUNK * CHUNK / 8; i += 128) {
            copy_async(shared_address(&to.pairs[i / 8][i % 8 * 8]), unit + PAIRS + 8 * i);
            copy_async(shared_address(&to.u[i / 8][i % 8 * 4]), u + 4 * i);
        }
        if (tid < DIM / 4) copy_async(shared_address(&to.decay[4 * tid]), (const float *)(unit + DECAY) + 4 * tid);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    fetch(0);

    // Keys 32 warp + 16 i + g (+ 8), columns 8 n + 2 t, + 1.
    float *state = ring.state + ((u64)s.slot * heads + head) * DIM * DIM + first_column;
    const bool fresh = first_chunk == 0 && chunks.first == 0 && s.position == 0;
    float S[2][4][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float *from = state + (32 * warp + 16 * i + g + 8 * h) * DIM + 8 * n + 2 * t;
                S[i][n][2 * h] = fresh ? 0.0f : from[0];
                S[i][n][2 * h + 1] = fresh ? 0.0f : from[1];
            }
    auto show = [&]() {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int r = 32 * warp + 16 * i + g + 8 * h, c = 8 * n + 2 * t;
                    split(S[i][n][2 * h], S[i][n][2 * h + 1], *(u32 *)&m.s[0][r][c], *(u32 *)&m.s[1][r][c]);
                }
    };
    show();

    for (int chunk = 0; chunk < count; chunk++) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        if (chunk + 1 < count) fetch(chunk + 1);
        const Stage &now = m.stages[chunk & 1];

        // V = U - W S and the first part of the output, 16 rows a warp.
        float V[4][4] = {}, o[4][4] = {};
#pragma unroll 2
        for (int step = 0; step < DIM / 16; step++) {
            u32 w[4], low[4], q[4];
            matrices(w, straight(shared_address(&now.w[0][16 * warp][16 * step]), PITCH, lane));
            matrices(low, straight(shared_address(&now.w[1][16 * warp][16 * step]), PITCH, lane));
            matrices(q, straight(shared_address(&now.q[16 * warp][16 * step]), PITCH, lane));
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    u32 b[4];
                    matrices_turned(b, straight(shared_address(&m.s[part][16 * step][8 * n]), COLUMNS + 8, lane));
                    mma(V[n], w[0], w[1], w[2], w[3], b[0], b[1]);
                    mma(V[n + 1], w[0], w[1], w[2], w[3], b[2], b[3]);
                    mma(o[n], q[0], q[1], q[2], q[3], b[0], b[1]);
                    mma(o[n + 1], q[0], q[1], q[2], q[3], b[2], b[3]);
                    if (part == 0) {
                        mma(V[n], low[0], low[1], low[2], low[3], b[0], b[1]);
                        mma(V[n + 1], low[0], low[1], low[2], low[3], b[2], b[3]);
                    }
                }
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int r = 16 * warp + g + 8 * h, c = 8 * n + 2 * t;
                const float2 u = *(const float2 *)&now.u[r][c];
                split(u.x - V[n][2 * h], u.y - V[n][2 * h + 1], *(u32 *)&m.v[0][r][c], *(u32 *)&m.v[1][r][c]);
            }
        __syncthreads();

        for (int step = 0; step <= warp; step++) {
            u32 p[4];
            matrices(p, straight(shared_address(&now.pairs[16 * warp][16 * step]), CHUNK + 8, lane));
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    u32 b[4];
                    matrices_turned(b, straight(shared_address(&m.v[part][16 * step][8 * n]), COLUMNS + 8, lane));
                    mma(o[n], p[0], p[1], p[2], p[3], b[0], b[1]);
                    mma(o[n + 1], p[0], p[1], p[2], p[3], b[2], b[3]);
                }
        }
        const u64 row = s.first_row + chunks.first + (u64)CHUNK * (first_chunk + chunk);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *(float2 *)(out + (row + 16 * warp + g + 8 * h) * out_stride + head * DIM + first_column + 8 * n + 2 * t) =
                    make_float2(o[n][2 * h], o[n][2 * h + 1]);

#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float upper = now.decay[32 * warp + 16 * i + g], lower = now.decay[32 * warp + 16 * i + g + 8];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                S[i][n][0] *= upper;
                S[i][n][1] *= upper;
                S[i][n][2] *= lower;
                S[i][n][3] *= lower;
            }
        }
#pragma unroll
        for (int step = 0; step < CHUNK / 16; step++) {
            u32 k[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++)
                matrices_turned(k[i], crossed(shared_address(&now.k[16 * step][32 * warp + 16 * i]), PITCH, lane));
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    u32 b[4];
                    matrices_turned(b, straight(shared_address(&m.v[part][16 * step][8 * n]), COLUMNS + 8, lane));
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        mma(S[i][n], k[i][0], k[i][1], k[i][2], k[i][3], b[0], b[1]);
                        mma(S[i][n + 1], k[i][0], k[i][1], k[i][2], k[i][3], b[2], b[3]);
                    }
                }
        }
        // Everybody has read the state behind the barrier above.
        show();
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *(float2 *)(state + (32 * warp + 16 * i + g + 8 * h) * DIM + 8 * n + 2 * t) =
                    make_float2(S[i][n][2 * h], S[i][n][2 * h + 1]);
}

// out = o / rms(o) * weight * sigmoid(z) in place for the rows of whole chunks; their last raw columns to the ring. Grid
// (rows of the step, heads / 8), 256 threads: a warp a head, four channels a lane.
extern "C" __global__ void __launch_bounds__(256)
    chunk_gate(const Segment *segments, const u32 *row_segment, const float *proj, int proj_stride, const float *gates,
               int gates_stride, const float *weight, float eps, const __grid_constant__ Ring ring, int heads, float *out,
               int out_stride) {
    const int row = blockIdx.x, head = 8 * blockIdx.y + (threadIdx.x >> 5), d = threadIdx.x & 31;
    const Segment s = segments[row_segment[row]];
    const Chunks chunks = chunks_of(s);
    const int at = row - s.first_row, t = at - chunks.first;
    if (head >= heads || t < 0 || t >= CHUNK * chunks.count) return;
    float *to = out + (u64)row * out_stride + head * DIM + d;
    const float *z = gates + (u64)row * gates_stride + (heads + head) * DIM + d;
    float o[DIM / 32], square = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
        o[i] = to[32 * i];
        square = fmaf(o[i], o[i], square);
    }
    const float scale = quick_inverse_root(warp_sum(square) * (1.0f / DIM) + eps);
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) to[32 * i] = o[i] * scale * weight[d + 32 * i] * quick_sigmoid(z[32 * i]);
    if (at >= (int)s.rows - ring.column_ring) {
        const u64 slot = (u64)s.slot * heads + head;
        float *column = ring.columns + (slot * ring.column_ring + column_at(ring, s.position + at)) * 3 * DIM + d;
        for (int p = 0; p < 3; p++)
            for (int i = 0; i < DIM; i += 32) column[p * DIM + i] = proj[(u64)row * proj_stride + (p * heads + head) * DIM + d + i];
    }
}
