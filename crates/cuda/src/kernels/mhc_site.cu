// A site of the hyper-connections in one kernel (four streams, BF16 mixing matrix, compute capability 9.0 on).
//
// Maths, a row with streams S [4, hidden], y the output of the sub-block in front:
//   S'[j] = post[j] y + sum_i comb[i][j] S[i];   m = mix . S' / sqrt(mean(S'^2) + rms_eps)      (24 products)
//   pre, post, comb: sigmoid, 2 sigmoid, Sinkhorn of the softmax of m scale + base;   u = sum_i pre[i] S'[i];   x = norm(u)
//
// Layout. A cluster of hidden / 256 blocks (up to 16) takes `together` rows at a time, at most eight; a block owns 256 columns of
// every stream. Two warps have a row, a lane four columns of its streams: they merge, cut S' into three bf16 numbers (whose sum
// it is to 2^-25, so products have the accuracy of f32), leave these in shared memory as operands, and sum the ten products of
// streams with streams. Then the 24 products are tensor-core products, all rows in one, a sixteenth of the columns a warp, with
// the mixing matrix as operand of 16 + 8 rows in shared memory, in the order of the fragments. Partial sums go to all blocks
// of the cluster through distributed shared memory, their arrival counted at the receiver, and are added in the order of the
// blocks; no sum depends on the rows beside it. From the products of streams with streams every block has the square
// of u. Where u is so much smaller than the streams that this would lose more than two digits, a second exchange sums the
// squares of u itself, for that row alone.
//
// Rows in turn: while the sums of a group travel, the next group is merged and multiplied; S' of the one before waits in shared
// memory. A block sends a group's sums when all blocks have sent those of the group before last, so four places for them suffice.
//
// The Sinkhorn iteration (39 dependent normalisations, up to two microseconds) is not in the way of x: a warp of its own does
// it, the rows shared among the blocks of the cluster.
//
// Limits: reads and writes 11 x hidden floats a row (streams twice, y, u, x), at many rows the memory; at few rows the latencies
// of a launch, of one read, of an exchange in the cluster. Few rows are spread over all clusters that the device holds.
// At many rows it is neither: ten thousand cycles for eight rows are spread over merge, products, sums and exchange, with one block
// a multiprocessor and 112 of 132 of them in clusters of sixteen.
// Versions, 1 / 8 / 8192 rows on one H200, us: clusters of 16 x 256 columns, streams in the registers of the lanes that multiply,
// two exchanges by cluster barriers 8.2 / 9.0 / 648; one exchange 8.7 / 9.5 / 650; 8 x 512 columns 10.4 / 11.4 / 620; arrivals
// counted at the receiver 8.9 / 11.1 / 582 (3500 instructions in a row, fetched anew in every launch); a lane four columns of one
// row, operands through shared memory, so that few rows take few instructions, 4.0 / 5.8 / 778; the next group merged while
// sums travel, few rows over half of the clusters 4.2 / 4.9 / 642.
#include "common.cuh"

#if __CUDA_ARCH__ >= 900
#include "wgmma.cuh"
#include "async.cuh"

#define N 4
#define COEFFICIENTS (2 * N + N * N)
#include "mhc_row.cuh"
#define COLUMNS 256
#define WARPS (COLUMNS / 16)
#define DATA_THREADS (2 * COLUMNS)
#define MAX_BLOCKS 16
// Steps of 16 columns of a stream in a block, and of a warp.
#define STEPS (N * COLUMNS / 16)
#define OWN_STEPS (STEPS / WARPS)
// Words of a step's parts: three of 32 lanes x 2, and eight so that steps lie in other banks.
#define STEP_WORDS 200
// 24 products and 10 of streams with streams (0 0, 0 1 .. 3 3), of eight rows. What every block needs comes first: the first
// four products and the streams' ones, [14][8]; then the others, [8][20].
#define SUMS 272
#define COMMON 112
#define OTHERS 20
// Squares of u below the square of its terms by more than this are summed themselves.
#define CANCELS 64.0f

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void data_sync() { asm volatile("bar.sync 1, %0;" ::"n"(DATA_THREADS) : "memory"); }
// Numbers to a block of the cluster; their arrival counts at the barrier there.
DEVICE void send_one(u32 address, u32 barrier, u32 block, float v) {
    asm volatile(
        "{\n.reg .u32 a, b;\nmapa.shared::cluster.u32 a, %0, %2;\nmapa.shared::cluster.u32 b, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [a], %3, [b];\n}" ::"r"(address),
        "r"(barrier), "r"(block), "f"(v)
        : "memory");
}
DEVICE void send_four(u32 address, u32 barrier, u32 block, float4 v) {
    asm volatile(
        "{\n.reg .u32 a, b;\nmapa.shared::cluster.u32 a, %0, %2;\nmapa.shared::cluster.u32 b, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [a], {%3, %4, %5, %6}, [b];\n}" ::"r"(address),
        "r"(barrier), "r"(block), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
        : "memory");
}
DEVICE void wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
}
// Dynamic shared memory, in words.
#define MATRIX (STEPS * STEP_WORDS)
#define NORM (MATRIX + STEPS * 192)
#define STASH (NORM + 4 * DATA_THREADS)
#define GATHERED (STASH + 4 * N * DATA_THREADS)
#define OF_OTHERS (GATHERED + 4 * MAX_BLOCKS * COMMON)
#define SHARED_WORDS (OF_OTHERS + 4 * MAX_BLOCKS * OTHERS)

extern "C" __global__ void __launch_bounds__(DATA_THREADS + 32, 1)
    site(float *streams, const float *y, int y_stride, float *post, float *comb, const u16 *mix, int mix_pitch,
         const float *base, const float *scale, float rms_eps, float eps, int iters, float *collapsed, int collapsed_stride,
         const float *norm, float norm_eps, float *x, int x_stride, int hidden, int rows, int blocks, int together) {
    extern __shared__ __align__(16) u32 split[];
    __shared__ __align__(16) float old[2][WARPS][20];
    __shared__ __align__(16) float parts[WARPS][8 * COEFFICIENTS], square_parts[WARPS][10], own[2][SUMS], sums[2][SUMS];
    __shared__ float squares[2][8][2 * MAX_BLOCKS], factors[COEFFICIENTS], scales[3];
    __shared__ __align__(8) u64 arrived[4], exact_arrived[2][8];
    float *gathered = (float *)split + GATHERED, *others = (float *)split + OF_OTHERS;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const u32 rank = blockIdx.x % blocks;
    const int clusters = gridDim.x / blocks, groups = (rows + together - 1) / together;
    let_next_begin();
    if (tid < COEFFICIENTS) factors[tid] = base[tid];
    if (tid < 3) scales[tid] = scale[tid];
    if (blocks > 1) {
        if (tid < 20) barrier_init(shared_address(tid < 4 ? arrived + tid : exact_arrived[0] + tid - 4), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        cluster_arrive();
    }
    // Rows rank, rank + blocks, ... have their coefficients made here.
    const int own_rows = (8 + blocks - 1 - (int)rank) / blocks;

    if (warp == WARPS) {
        after_previous();
        __syncthreads();
        if (blocks > 1) cluster_wait();
        u32 turn = 0;
        for (int group = blockIdx.x / blocks; group < groups; group += clusters, turn++) {
            __syncthreads();
            const float *from_sums = sums[turn & 1];
            for (int i = 0; i < own_rows; i += 2) {
                const int r = rank + (i + (lane >> 4)) * blocks, row = together * group + r;
                const bool here = r < together && row < rows;
                const float *from = from_sums + (here ? r : 0);
                const float square = from[4 * 8] + from[8 * 8] + from[11 * 8] + from[13 * 8];
                const float inverse = inverse_root(square / (N * hidden) + rms_eps);
                coefficients(from_sums + COMMON + (here ? r : 0) * OTHERS, inverse, factors, scales, eps, iters, lane, here,
                             post + row * N, comb + row * N * N);
                __syncwarp();
            }
        }
        return;
    }
    const int slot = warp >> 1, column = rank * COLUMNS + 4 * (tid & 63);
    // The matrix: products g, g + 8, g + 16 at the columns 4 t .. of this warp's steps.
    uint2 *matrix = (uint2 *)(split + MATRIX) + OWN_STEPS * 96 * warp + lane;
    const float4 nothing = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int s = 0; s < OWN_STEPS; s++) {
        const int step = OWN_STEPS * warp + s, at = rank * COLUMNS + 16 * (step % (COLUMNS / 16)) + 4 * t;
#pragma unroll
        for (int m = 0; m < 3; m++)
            matrix[96 * s + 32 * m] = at < hidden ? *(const uint2 *)(mix + (u64)(8 * m + g) * mix_pitch + step / (COLUMNS / 16) * hidden + at) : make_uint2(0, 0);
    }
    const bool inside = column < hidden;
    float4 *own_norm = (float4 *)(split + NORM) + tid;
    *own_norm = inside ? *(const float4 *)(norm + column) : nothing;
    float4 *stash = (float4 *)(split + STASH) + tid;
    after_previous();
    float4 coming[N + 1];
    auto fetch = [&](int group, int side) {
        const int row = together * group + slot;
#pragma unroll
        for (int i = 0; i <= N; i++) coming[i] = nothing;
        if (slot < together && row < rows) {
            if (y && lane <= N)
                copy_16(shared_address(&old[side][warp][4 * lane]), lane < N ? comb + row * N * N + 4 * lane : post + row * N);
            if (inside) {
#pragma unroll
                for (int i = 0; i < N; i++) coming[i] = *(const float4 *)(streams + ((u64)row * N + i) * hidden + column);
                if (y) coming[N] = *(const float4 *)(y + (u64)row * y_stride + column);
            }
        }
    };
    int group = blockIdx.x / blocks;
    if (group < groups) fetch(group, 0);
    __syncthreads();
    if (blocks > 1) cluster_wait();
    u32 exact_turn = 0;
    for (u32 turn = 0;; turn++, group += clusters) {
        float s[N][4];
        const bool more = group < groups, here = more && slot < together && together * group + slot < rows;
        if (more) {
            if (here) {
                float v[N + 1][4];
#pragma unroll
                for (int i = 0; i <= N; i++) {
                    v[i][0] = coming[i].x;
                    v[i][1] = coming[i].y;
                    v[i][2] = coming[i].z;
                    v[i][3] = coming[i].w;
                }
                if (y) {
                    asm volatile("cp.async.wait_all;" ::: "memory");
                    __syncwarp();
                    const float4 *c = (const float4 *)old[turn & 1][warp];
                    const float4 from_y = c[4];
                    const float add[4] = {from_y.x, from_y.y, from_y.z, from_y.w};
#pragma unroll
                    for (int j = 0; j < N; j++)
#pragma unroll
                        for (int k = 0; k < 4; k++) s[j][k] = add[j] * v[N][k];
#pragma unroll
                    for (int i = 0; i < N; i++) {
                        const float4 c4 = c[i];
                        const float by[4] = {c4.x, c4.y, c4.z, c4.w};
#pragma unroll
                        for (int j = 0; j < N; j++)
#pragma unroll
                            for (int k = 0; k < 4; k++) s[j][k] = fmaf(by[j], v[i][k], s[j][k]);
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < N; i++)
#pragma unroll
                        for (int k = 0; k < 4; k++) s[i][k] = v[i][k];
                }
                // Three bf16 numbers each, as operand of the products: row `slot`, columns 4 (lane % 4) .. of a step.
                u32 *to = split + (8 * (warp & 1) + g) * STEP_WORDS + 2 * (4 * slot + t);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    float rest[4] = {s[i][0], s[i][1], s[i][2], s[i][3]};
#pragma unroll
                    for (int p = 0; p < 3; p++) {
                        const u32 low = narrow(rest[0], rest[1]), high = narrow(rest[2], rest[3]);
                        *(uint2 *)(to + i * (COLUMNS / 16) * STEP_WORDS + 64 * p) = make_uint2(low, high);
                        rest[0] -= widen_low(low);
                        rest[1] -= widen_high(low);
                        rest[2] -= widen_low(high);
                        rest[3] -= widen_high(high);
                    }
                }
                float of_streams[10];
#pragma unroll
                for (int i = 0, p = 0; i < N; i++)
#pragma unroll
                    for (int j = i; j < N; j++, p++) {
                        of_streams[p] = s[i][0] * s[j][0];
#pragma unroll
                        for (int k = 1; k < 4; k++) of_streams[p] = fmaf(s[i][k], s[j][k], of_streams[p]);
                    }
                const float sum = ten_sums(of_streams, lane);
                const int p = ten_place(lane);
                if (p >= 0) square_parts[warp][p] = sum;
            }
            data_sync();
            {
                float low[2][4] = {}, high[2][4] = {};
                const uint2 *from = (const uint2 *)split + (OWN_STEPS * warp) * (STEP_WORDS / 2) + lane;
#pragma unroll
                for (int k = 0; k < OWN_STEPS; k++) {
                    const uint2 a0 = matrix[96 * k], a1 = matrix[96 * k + 32], a2 = matrix[96 * k + 64];
#pragma unroll
                    for (int p = 0; p < 3; p++) {
                        const uint2 b = from[k * (STEP_WORDS / 2) + 32 * p];
                        mma(low[p > 0], a0.x, a1.x, a0.y, a1.y, b.x, b.y);
                        mma(high[p > 0], a2.x, 0, a2.y, 0, b.x, b.y);
                    }
                }
                // Products g, g + 8, g + 16 of the rows 2 t and 2 t + 1.
                float *part = parts[warp] + 8 * g + 2 * t;
                *(float2 *)part = make_float2(low[0][0] + low[1][0], low[0][1] + low[1][1]);
                *(float2 *)(part + 64) = make_float2(low[0][2] + low[1][2], low[0][3] + low[1][3]);
                *(float2 *)(part + 128) = make_float2(high[0][0] + high[1][0], high[0][1] + high[1][1]);
            }
            if (group + clusters < groups) fetch(group + clusters, turn + 1 & 1);
            data_sync();
            if (tid < SUMS) {
                float sum = 0.0f;
                int at;
                if (tid < 8 * COEFFICIENTS) {
#pragma unroll
                    for (int w = 0; w < WARPS; w++) sum += parts[w][tid];
                    at = tid < 32 ? tid : COMMON + (tid & 7) * OTHERS + (tid >> 3) - 4;
                } else {
                    const int p = (tid - 8 * COEFFICIENTS) >> 3, r = tid & 7;
                    sum = square_parts[2 * r][p] + square_parts[2 * r + 1][p];
                    at = 32 + tid - 8 * COEFFICIENTS;
                }
                own[turn & 1][at] = sum;
            }
            if (blocks > 1) {
                const u32 barrier = shared_address(arrived + (turn & 3));
                if (tid == 0) barrier_expect(barrier, 4 * blocks * (COMMON + own_rows * OTHERS));
                data_sync();
                // Every block needs the common sums, one block those of a row's coefficients: pieces of four numbers.
                const int other = tid - COMMON / 4 * MAX_BLOCKS;
                if (other < 0) {
                    const int to = tid / (COMMON / 4), piece = tid % (COMMON / 4);
                    if (to < blocks)
                        send_four(shared_address(gathered + ((turn & 3) * MAX_BLOCKS + rank) * COMMON + 4 * piece), barrier, to,
                                  *(const float4 *)(own[turn & 1] + 4 * piece));
                } else if (other < 8 * OTHERS / 4) {
                    const int of_row = other / (OTHERS / 4);
                    send_four(shared_address(others + ((turn & 3) * MAX_BLOCKS + of_row / blocks * blocks + rank) * OTHERS + 4 * (other % (OTHERS / 4))),
                              barrier, of_row % blocks, *(const float4 *)(own[turn & 1] + COMMON + 4 * other));
                }
            }
            // The streams are on their way to memory meanwhile.
            if (y && here && inside)
#pragma unroll
                for (int i = 0; i < N; i++)
                    *(float4 *)(streams + ((u64)(together * group + slot) * N + i) * hidden + column) = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
        }
        if (turn > 0) {
            // The group before: its sums were under way while this one's were made.
            const u32 last = turn - 1;
            const int row = together * (group - clusters) + slot;
            if (blocks > 1) {
                wait(shared_address(arrived + (last & 3)), last >> 2 & 1);
                if (tid < COMMON + own_rows * OTHERS) {
                    const int j = tid - COMMON;
                    const float *from = j < 0 ? gathered + (last & 3) * MAX_BLOCKS * COMMON + tid
                                              : others + ((last & 3) * MAX_BLOCKS + j / OTHERS * blocks) * OTHERS + j % OTHERS;
                    const int stride = j < 0 ? COMMON : OTHERS;
                    float sum = 0.0f;
#pragma unroll
                    for (int b = 0; b < MAX_BLOCKS; b++) sum += b < blocks ? from[b * stride] : 0.0f;
                    sums[last & 1][j < 0 ? tid : COMMON + (rank + j / OTHERS * blocks) * OTHERS + j % OTHERS] = sum;
                }
            } else {
                data_sync();
                if (tid < SUMS) sums[last & 1][tid] = own[last & 1][tid];
            }
            __syncthreads();
            if (slot < together && row < rows) {
                // The factors of the row, and the square of u from the products of streams with streams.
                const float *from = sums[last & 1] + slot;
                const float inverse = inverse_root((from[4 * 8] + from[8 * 8] + from[11 * 8] + from[13 * 8]) / (N * hidden) + rms_eps);
                float pre[N], square = 0.0f, most = 0.0f;
#pragma unroll
                for (int i = 0; i < N; i++) pre[i] = quick_sigmoid(fmaf(from[8 * i] * inverse, scales[0], factors[i])) + eps;
#pragma unroll
                for (int i = 0, p = 0; i < N; i++)
#pragma unroll
                    for (int j = i; j < N; j++, p++) {
                        const float term = (i == j ? 1.0f : 2.0f) * pre[i] * pre[j] * from[8 * (4 + p)];
                        square += term;
                        most = i == j ? most + term : most;
                    }
                float u[4] = {};
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float4 v = stash[i * DATA_THREADS];
                    u[0] = i ? fmaf(pre[i], v.x, u[0]) : pre[i] * v.x;
                    u[1] = i ? fmaf(pre[i], v.y, u[1]) : pre[i] * v.y;
                    u[2] = i ? fmaf(pre[i], v.z, u[2]) : pre[i] * v.z;
                    u[3] = i ? fmaf(pre[i], v.w, u[3]) : pre[i] * v.w;
                }
                // NaN takes the second exchange too. The sum of four terms has at most four times the square of each.
                if (!(square * CANCELS > 4.0f * most) && !(most == 0.0f)) {
                    // Both warps of the row, in every block, come here.
                    const float part = warp_sum(fmaf(u[0], u[0], u[1] * u[1]) + fmaf(u[2], u[2], u[3] * u[3]));
                    float *of_row = squares[exact_turn & 1][slot];
                    if (blocks > 1) {
                        const u32 barrier = shared_address(exact_arrived[exact_turn & 1] + slot);
                        if (lane == 0 && !(warp & 1)) barrier_expect(barrier, 8 * blocks);
                        if (lane < blocks) send_one(shared_address(of_row + 2 * rank + (warp & 1)), barrier, lane, part);
                        wait(barrier, exact_turn >> 1 & 1);
                    } else {
                        if (lane == 0) of_row[warp & 1] = part;
                        asm volatile("bar.sync %0, 64;" ::"r"(2 + slot) : "memory");
                    }
                    exact_turn++;
                    square = 0.0f;
                    for (int b = 0; b < 2 * blocks; b++) square += of_row[b];
                }
                const float by = inverse_root(square / hidden + norm_eps);
                if (inside) {
                    *(float4 *)(collapsed + (u64)row * collapsed_stride + column) = make_float4(u[0], u[1], u[2], u[3]);
                    const float4 to_norm = *own_norm;
                    *(float4 *)(x + (u64)row * x_stride + column) =
                        make_float4(u[0] * by * to_norm.x, u[1] * by * to_norm.y, u[2] * by * to_norm.z, u[3] * by * to_norm.w);
                }
            }
        }
        if (!more) break;
        if (here)
#pragma unroll
            for (int i = 0; i < N; i++) stash[i * DATA_THREADS] = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
    }
    // Whatever other blocks send here has arrived; nobody writes to a block that has ended.
}
#endif
