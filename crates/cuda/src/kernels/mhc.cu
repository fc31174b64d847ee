// Hyper-connections: merging a sub-block's output into the streams, the coefficients of the next mixer, the collapsed input.
//
// `site` does a whole site (4 streams, BF16 mixing matrix); see there. Other shapes take `merge`, a plain f32 dot product
// (dense.cu) and `mix`, and `mean_norm` ends a trunk. N: streams.
#include "common.cuh"

#define COEFFICIENTS (2 * N + N * N)

#if N == 4 && __CUDA_ARCH__ >= 900
// A site in one kernel. Maths, a row with streams S [4, hidden], y the output of the sub-block in front:
//   S'[j] = post[j] y + sum_i comb[i][j] S[i];   m = mix . S' / sqrt(mean(S'^2) + rms_eps)      (24 products)
//   pre, post, comb: sigmoid, 2 sigmoid, Sinkhorn of the softmax of m scale + base;   u = sum_i pre[i] S'[i];   x = norm(u)
//
// Layout. A cluster of hidden / 512 blocks takes eight rows at a time; a block owns 512 columns of every stream, a warp 32.
// Lane (g, t) holds row g and the columns 4 t + 0..3 and 16 + 4 t + 0..3 of its warp: S' stays in registers from the merge to
// the collapse, so that streams are read once and written once. The 24 products are tensor-core products with the mixing
// matrix as operand of 16 + 8 rows (in shared memory, in the order of the fragments) and the eight rows as columns. S' is
// taken as three bf16 numbers, whose sum it is to 2^-25, so the products have the accuracy of f32. Partial sums go to all
// blocks of the cluster through distributed shared memory and are added in the order of the blocks: a row's result does not
// depend on the rows beside it. The same exchange carries the ten products of streams with streams, from which every block
// has the square of u. Where u is so much smaller than the streams that this would lose more than two digits, a second
// exchange sums the squares of u itself, for that row alone.
//
// Limits: reads and writes 11 x hidden floats a row (streams twice, y, u, x), at many rows the memory; at few rows an
// exchange in a cluster and the latencies around it. The Sinkhorn iteration (39 dependent normalisations, about one
// microsecond) is not in the way of x: a warp of its own does it, the rows shared among the blocks of the cluster. Today it is
// neither: the 3500 instructions, once a launch at few rows, again for every eight rows at many.
// Versions, 1 (8192) rows on one H200: clusters of 16 x 256 columns, two exchanges by cluster barriers 8.2 us (648); one
// exchange 8.7 (650); 8 x 512 columns 10.4 (620); arrivals counted at the receiver 8.9 (582), since a cluster barrier waits
// until a block's stores are in memory.
#define COLUMNS 512
#define WARPS (COLUMNS / 32)
#define MAX_BLOCKS 8
// 24 products and 10 of streams with streams (0 0, 0 1 .. 3 3), of eight rows. What every block needs comes first: the first
// four products and the streams' ones, [14][8]; then the others, [8][20].
#define SUMS 272
#define COMMON 112
#define OTHERS 20
// Squares of u below the square of its terms by more than this are summed themselves.
#define CANCELS 64.0f
#define DATA_THREADS COLUMNS

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void copy_async(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void data_sync() { asm volatile("bar.sync 1, %0;" ::"n"(DATA_THREADS) : "memory"); }
DEVICE void store_at(u32 address, u32 block, float v) {
    asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nst.shared::cluster.f32 [a], %2;\n}" ::"r"(address),
                 "r"(block), "f"(v)
                 : "memory");
}
// Four numbers to a block of the cluster; their arrival counts at the barrier there.
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
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
}
// Place of product m of row r among the sums, and of the streams' product number p.
DEVICE int product_at(int m, int r) { return m < 4 ? m * 8 + r : COMMON + r * OTHERS + m - 4; }
DEVICE int streams_at(int p, int r) { return (4 + p) * 8 + r; }
// The thread's number, read anew: what follows from it need not be kept in registers meanwhile.
DEVICE int thread() {
    int tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}
DEVICE float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// 1 / (1 + e^-x) and 1 / sqrt(x) to two units in the last place.
DEVICE float quick_sigmoid(float x) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
    return reciprocal(1.0f + e);
}
DEVICE float inverse_root(float x) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Coefficients that leave the site from the 20 products behind the first four.
DEVICE void coefficients(const float *sums, float inverse, const float *base, const float *scale, float eps, int iters,
                         float *post, float *comb) {
    float c[N][N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        post[i] = 2.0f * sigmoid(fmaf(sums[i] * inverse, scale[1], base[N + i]));
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const int at = 2 * N + N * i + j;
            c[i][j] = fmaf(sums[at - N] * inverse, scale[2], base[at]);
            top = c[i][j] > top ? c[i][j] : top;
        }
#pragma unroll
        for (int j = 0; j < N; j++) sum += c[i][j] = expf(c[i][j] - top);
        const float by = 1.0f / sum;
#pragma unroll
        for (int j = 0; j < N; j++) c[i][j] = fmaf(c[i][j], by, eps);
    }
    for (int k = 0; k < iters; k++) {
        float by[N], change = 0.0f;
        if (k > 0) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                by[i] = reciprocal((c[i][0] + c[i][1]) + (c[i][2] + c[i][3]) + eps);
                change = fmaxf(change, fabsf(by[i] - 1.0f));
            }
#pragma unroll
            for (int i = 0; i < N; i++)
#pragma unroll
                for (int j = 0; j < N; j++) c[i][j] *= by[i];
        }
#pragma unroll
        for (int j = 0; j < N; j++) by[j] = reciprocal((c[0][j] + c[1][j]) + (c[2][j] + c[3][j]) + eps);
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int j = 0; j < N; j++) c[i][j] *= by[j];
        // Rows and columns stay as they are from here on, to rounding.
        if (k > 0 && change < 3e-7f) break;
    }
#pragma unroll
    for (int i = 0; i < N; i++) *(float4 *)(comb + N * i) = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
}

// Clusters of `blocks` blocks: sixteen warps of data and the one of the coefficients. Row groups in turn.
extern "C" __global__ void __launch_bounds__(DATA_THREADS + 32, 1)
    site(float *streams, const float *y, int y_stride, float *post, float *comb, const u16 *mix, int mix_pitch,
         const float *base, const float *scale, float rms_eps, float eps, int iters, float *collapsed, int collapsed_stride,
         const float *norm, float norm_eps, float *x, int x_stride, int hidden, int rows, int blocks) {
    // Fragments of the matrix [warp][stream, half][16-row part][lane]; what is on its way [piece][thread]; old coefficients.
    extern __shared__ __align__(16) u8 dynamic[];
    uint2 *matrix = (uint2 *)dynamic;
    float4 *coming = (float4 *)(dynamic + WARPS * 8 * 3 * 32 * 8);
    __shared__ __align__(16) float old[2][8][20];
    __shared__ __align__(16) float parts[WARPS][SUMS], gathered[2][MAX_BLOCKS][COMMON], others[2][14 * OTHERS], sums[SUMS], own[SUMS];
    __shared__ float square_parts[WARPS][8], squares[MAX_BLOCKS][8], factors[N + 1];
    __shared__ __align__(8) u64 arrived[2];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const u32 rank = blockIdx.x % blocks;
    const int first_column = rank * COLUMNS + 32 * warp + 4 * t, clusters = gridDim.x / blocks;
    const int groups = (rows + 7) / 8;
    if (tid < N) factors[tid] = base[tid];
    if (tid == N) factors[N] = scale[0];
    if (blocks > 1) {
        if (tid == 0) {
            for (int i = 0; i < 2; i++)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrived + i)) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        cluster_arrive();
    }

    if (warp < WARPS) {
#pragma unroll
        for (int s = 0; s < 8; s++)
#pragma unroll
            for (int m = 0; m < 3; m++) {
                const int column = first_column + 16 * (s & 1);
                const u16 *from = mix + (u64)(8 * m + g) * mix_pitch + (s >> 1) * hidden + column;
                matrix[((warp * 8 + s) * 3 + m) * 32 + lane] = column < hidden ? *(const uint2 *)from : make_uint2(0, 0);
            }
    }
    after_previous();

    auto fetch = [&](int group) {
        const int tid = thread(), row = 8 * group + (tid >> 2 & 7);
        const int first_column = rank * COLUMNS + (tid >> 5) * 32 + 4 * (tid & 3);
        if (row < rows) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int column = first_column + 16 * h;
                if (column < hidden) {
#pragma unroll
                    for (int i = 0; i < N; i++)
                        copy_async(shared_address(coming + (2 * i + h) * DATA_THREADS + tid), streams + ((u64)row * N + i) * hidden + column);
                    if (y) copy_async(shared_address(coming + (8 + h) * DATA_THREADS + tid), y + (u64)row * y_stride + column);
                }
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    // The coefficients' warp brings the old ones, 32 + 8 pieces.
    auto fetch_old = [&](int group, int side) {
        if (8 * group + g < rows) copy_async(shared_address(&old[side][g][4 * t]), comb + (8 * group + g) * N * N + 4 * t);
        if (lane < 8 && 8 * group + lane < rows) copy_async(shared_address(&old[side][lane][16]), post + (8 * group + lane) * N);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    int group = blockIdx.x / blocks;
    if (group < groups) {
        if (warp < WARPS) fetch(group);
        else if (y) fetch_old(group, 0);
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    let_next_begin();
    __syncthreads();

    // Rows rank, rank + blocks, ... have their coefficients made here.
    const int own_rows = (8 + blocks - 1 - (int)rank) / blocks;
    if (blocks > 1) cluster_wait();
    for (u32 turn = 0; group < groups; group += clusters, turn++) {
        const u32 side = turn & 1;
        const int row = 8 * group + g;
        float s[N][8];
        if (warp < WARPS) {
            const bool here = row < rows;
            asm volatile("cp.async.wait_group 0;" ::: "memory");
            __syncwarp();
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const bool inside = here && first_column + 16 * h < hidden;
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float4 v = inside ? coming[(2 * i + h) * DATA_THREADS + tid] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    s[i][4 * h] = v.x;
                    s[i][4 * h + 1] = v.y;
                    s[i][4 * h + 2] = v.z;
                    s[i][4 * h + 3] = v.w;
                }
            }
            if (y) {
                float add[8], c[20];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const bool inside = here && first_column + 16 * h < hidden;
                    const float4 v = inside ? coming[(8 + h) * DATA_THREADS + tid] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    add[4 * h] = v.x;
                    add[4 * h + 1] = v.y;
                    add[4 * h + 2] = v.z;
                    add[4 * h + 3] = v.w;
                }
#pragma unroll
                for (int i = 0; i < 20; i += 4) {
                    const float4 v = here ? *(const float4 *)&old[side][g][i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    c[i] = v.x;
                    c[i + 1] = v.y;
                    c[i + 2] = v.z;
                    c[i + 3] = v.w;
                }
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    float merged[N];
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        merged[j] = c[16 + j] * add[k];
#pragma unroll
                        for (int i = 0; i < N; i++) merged[j] = fmaf(c[N * i + j], s[i][k], merged[j]);
                    }
#pragma unroll
                    for (int j = 0; j < N; j++) s[j][k] = merged[j];
                }
            }
            __syncwarp();
            if (group + clusters < groups) fetch(group + clusters);

            // A chain of products for the first part of S', one for the others.
            float low[2][4] = {}, high[2][4] = {}, of_streams[10] = {};
#pragma unroll
            for (int step = 0; step < 8; step++) {
                const float *v = &s[step >> 1][4 * (step & 1)];
                const uint2 *a = matrix + (warp * 8 + step) * 96 + lane;
                const uint2 a0 = a[0], a1 = a[32], a2 = a[64];
                float rest[4] = {v[0], v[1], v[2], v[3]};
#pragma unroll
                for (int p = 0; p < 3; p++) {
                    const u32 b0 = narrow(rest[0], rest[1]), b1 = narrow(rest[2], rest[3]);
                    mma(low[p > 0], a0.x, a1.x, a0.y, a1.y, b0, b1);
                    mma(high[p > 0], a2.x, 0, a2.y, 0, b0, b1);
                    rest[0] -= widen_low(b0);
                    rest[1] -= widen_high(b0);
                    rest[2] -= widen_low(b1);
                    rest[3] -= widen_high(b1);
                }
            }
#pragma unroll
            for (int i = 0, p = 0; i < N; i++)
#pragma unroll
                for (int j = i; j < N; j++, p++) {
#pragma unroll
                    for (int k = 0; k < 8; k++) of_streams[p] = fmaf(s[i][k], s[j][k], of_streams[p]);
                    of_streams[p] += __shfl_xor_sync(FULL, of_streams[p], 1);
                    of_streams[p] += __shfl_xor_sync(FULL, of_streams[p], 2);
                }
            // Products g (g + 8, g + 16) of the rows 2 t and 2 t + 1; streams' products of row g, shared among its lanes.
            float *part = parts[warp];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                part[product_at(g, 2 * t + k)] = low[0][k] + low[1][k];
                part[product_at(g + 8, 2 * t + k)] = low[0][2 + k] + low[1][2 + k];
                part[product_at(g + 16, 2 * t + k)] = high[0][k] + high[1][k];
            }
#pragma unroll
            for (int p = 0; p < 10; p++)
                if (p % 4 == t) part[streams_at(p, g)] = of_streams[p];
            data_sync();
            for (int at = tid; at < SUMS; at += DATA_THREADS) {
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) sum += parts[w][at];
                own[at] = sum;
            }
            data_sync();
            // Every block needs the common sums, one block those of a row's coefficients: pieces of four numbers.
            if (blocks > 1) {
                const u32 barrier = shared_address(arrived + side);
                for (int at = tid; at < COMMON / 4 * blocks; at += DATA_THREADS) {
                    const int to = at / (COMMON / 4), piece = at % (COMMON / 4);
                    send_four(shared_address(gathered[side][rank] + 4 * piece), barrier, to, *(const float4 *)(own + 4 * piece));
                }
                const int other = DATA_THREADS - 1 - tid, of_row = other / (OTHERS / 4);
                if (of_row < 8)
                    send_four(shared_address(others[side] + (of_row / blocks * blocks + rank) * OTHERS + 4 * (other % (OTHERS / 4))),
                              barrier, of_row % blocks, *(const float4 *)(own + COMMON + 4 * other));
            }
        } else {
            if (y && group + clusters < groups) fetch_old(group + clusters, side ^ 1);
            if (blocks > 1 && lane == 0)
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived + side)),
                             "r"(4 * blocks * (COMMON + own_rows * OTHERS))
                             : "memory");
        }
        // The streams are on their way to memory meanwhile.
        const int tid = thread(), first_column = rank * COLUMNS + (tid >> 5) * 32 + 4 * (tid & 3);
        if (warp < WARPS && y && row < rows) {
#pragma unroll
            for (int i = 0; i < N; i++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (first_column + 16 * h < hidden)
                        *(float4 *)(streams + ((u64)row * N + i) * hidden + first_column + 16 * h) =
                            make_float4(s[i][4 * h], s[i][4 * h + 1], s[i][4 * h + 2], s[i][4 * h + 3]);
        }
        if (blocks > 1) wait(shared_address(arrived + side), turn >> 1 & 1);
        else __syncthreads();
        // The coefficients' warp has done with the sums of the group before: it takes part in every arrival.
        if (blocks == 1) {
            if (tid < SUMS) sums[tid] = own[tid];
        } else if (tid < COMMON + own_rows * OTHERS) {
            const int j = tid - COMMON;
            const float *from = j < 0 ? gathered[side][0] + tid : others[side] + j / OTHERS * blocks * OTHERS + j % OTHERS;
            const int stride = j < 0 ? COMMON : OTHERS;
            float sum = 0.0f;
#pragma unroll
            for (int b = 0; b < MAX_BLOCKS; b++) sum += b < blocks ? from[b * stride] : 0.0f;
            sums[j < 0 ? tid : product_at(4 + j % OTHERS, rank + j / OTHERS * blocks)] = sum;
        }
        if (warp == WARPS) asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();

        // Every thread: the factors of its row, and the square of u from the products of streams with streams.
        const float squares_of = sums[streams_at(0, g)] + sums[streams_at(4, g)] + sums[streams_at(7, g)] + sums[streams_at(9, g)];
        const float inverse = inverse_root(squares_of / (N * hidden) + rms_eps);
        float pre[N], square = 0.0f, most = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) pre[i] = quick_sigmoid(fmaf(sums[product_at(i, g)] * inverse, factors[N], factors[i])) + eps;
#pragma unroll
        for (int i = 0, p = 0; i < N; i++)
#pragma unroll
            for (int j = i; j < N; j++, p++) {
                const float term = (i == j ? 1.0f : 2.0f) * pre[i] * pre[j] * sums[streams_at(p, g)];
                square += term;
                most = i == j ? most + term : most;
            }
        // NaN takes the second exchange too. The sum of four terms has at most four times the square of each.
        const bool exact = !(square * CANCELS > 4.0f * most) && !(most == 0.0f);
        const bool second = __any_sync(FULL, exact);
        if (warp == WARPS) {
            if (blocks > 1 && second) cluster_arrive();
            const int r = rank + lane * blocks;
            const float own_inverse = __shfl_sync(FULL, inverse, 4 * (r & 7));
            if (r < 8 && 8 * group + r < rows)
                coefficients(sums + COMMON + r * OTHERS, own_inverse, base, scale, eps, iters, post + (8 * group + r) * N,
                             comb + (8 * group + r) * N * N);
            __syncwarp();
            if (blocks > 1 && second) cluster_wait();
        } else {
            float u[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                u[k] = pre[0] * s[0][k];
#pragma unroll
                for (int i = 1; i < N; i++) u[k] = fmaf(pre[i], s[i][k], u[k]);
            }
            if (second) {
                float whole = 0.0f;
#pragma unroll
                for (int k = 0; k < 8; k++) whole = fmaf(u[k], u[k], whole);
                whole += __shfl_xor_sync(FULL, whole, 1);
                whole += __shfl_xor_sync(FULL, whole, 2);
                if (t == 0) square_parts[warp][g] = whole;
                data_sync();
                if (tid < 8 * blocks) {
                    float sum = 0.0f;
#pragma unroll
                    for (int w = 0; w < WARPS; w++) sum += square_parts[w][tid % 8];
                    if (blocks == 1) squares[0][tid] = sum;
                    else store_at(shared_address(&squares[rank][tid % 8]), tid / 8, sum);
                }
                if (blocks > 1) {
                    cluster_arrive();
                    cluster_wait();
                } else data_sync();
                whole = 0.0f;
                for (int b = 0; b < blocks; b++) whole += squares[b][g];
                if (exact) square = whole;
            }
            const float by = inverse_root(square / hidden + norm_eps);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int column = first_column + 16 * h;
                if (row < rows && column < hidden) {
                    const float4 w = *(const float4 *)(norm + column);
                    *(float4 *)(collapsed + (u64)row * collapsed_stride + column) =
                        make_float4(u[4 * h], u[4 * h + 1], u[4 * h + 2], u[4 * h + 3]);
                    *(float4 *)(x + (u64)row * x_stride + column) = make_float4(
                        u[4 * h] * by * w.x, u[4 * h + 1] * by * w.y, u[4 * h + 2] * by * w.z, u[4 * h + 3] * by * w.w);
                }
            }
        }
    }
    // Nobody leaves while others may still send.
    if (blocks > 1) {
        cluster_arrive();
        cluster_wait();
    }
}
#endif

// S'[j] = post[j] y + sum_i comb[i][j] S[i], in place.
KERNEL merge(float *streams, const float *y, int y_stride, const float *post, const float *comb, int hidden) {
    const int row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= hidden) return;
    float *s = streams + (u64)row * N * hidden + column;
    float old[N], v = y[(u64)row * y_stride + column];
#pragma unroll
    for (int i = 0; i < N; i++) old[i] = s[i * hidden];
#pragma unroll
    for (int j = 0; j < N; j++) {
        float sum = post[row * N + j] * v;
#pragma unroll
        for (int i = 0; i < N; i++) sum = fmaf(comb[row * N * N + i * N + j], old[i], sum);
        s[j * hidden] = sum;
    }
}

// Coefficients from the mixing products, the collapsed input and its norm; a block a row.
KERNEL mix(const float *streams, const float *products, const float *base, const float *scale, float rms_eps, float eps,
           int iters, float *post, float *comb, float *collapsed, int collapsed_stride, const float *norm, float norm_eps,
           float *x, int x_stride, int hidden) {
    __shared__ float room[8], pre[N];
    const int row = blockIdx.x;
    const float *s = streams + (u64)row * N * hidden;
    float square = 0.0f;
    for (int i = threadIdx.x; i < N * hidden; i += 256) square = fmaf(s[i], s[i], square);
    const float inverse = 1.0f / sqrtf(block_sum<256>(square, room) / (N * hidden) + rms_eps);
    if (threadIdx.x == 0) {
        const float *m = products + (u64)row * COEFFICIENTS;
        float c[N][N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            pre[i] = sigmoid(fmaf(m[i] * inverse, scale[0], base[i])) + eps;
            post[row * N + i] = 2.0f * sigmoid(fmaf(m[N + i] * inverse, scale[1], base[N + i]));
            float top = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int j = 0; j < N; j++) {
                const int at = 2 * N + N * i + j;
                c[i][j] = fmaf(m[at] * inverse, scale[2], base[at]);
                top = c[i][j] > top ? c[i][j] : top;
            }
#pragma unroll
            for (int j = 0; j < N; j++) sum += c[i][j] = expf(c[i][j] - top);
#pragma unroll
            for (int j = 0; j < N; j++) c[i][j] = c[i][j] / sum + eps;
        }
        for (int k = 0; k < iters; k++) {
            if (k > 0) {
#pragma unroll
                for (int i = 0; i < N; i++) {
                    float sum = 0.0f;
#pragma unroll
                    for (int j = 0; j < N; j++) sum += c[i][j];
                    sum += eps;
#pragma unroll
                    for (int j = 0; j < N; j++) c[i][j] /= sum;
                }
            }
#pragma unroll
            for (int j = 0; j < N; j++) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < N; i++) sum += c[i][j];
                sum += eps;
#pragma unroll
                for (int i = 0; i < N; i++) c[i][j] /= sum;
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int j = 0; j < N; j++) comb[row * N * N + i * N + j] = c[i][j];
    }
    __syncthreads();
    float *u = collapsed + (u64)row * collapsed_stride;
    square = 0.0f;
    for (int i = threadIdx.x; i < hidden; i += 256) {
        float v = pre[0] * s[i];
#pragma unroll
        for (int j = 1; j < N; j++) v = fmaf(pre[j], s[j * hidden + i], v);
        u[i] = v;
        square = fmaf(v, v, square);
    }
    const float inner = 1.0f / sqrtf(block_sum<256>(square, room) / hidden + norm_eps);
    for (int i = threadIdx.x; i < hidden; i += 256) x[(u64)row * x_stride + i] = u[i] * inner * norm[i];
}

// norm(mean over streams).
KERNEL mean_norm(const float *streams, float *collapsed, int collapsed_stride, const float *norm, float eps, float *out,
                 int out_stride, int hidden) {
    __shared__ float room[8];
    const int row = blockIdx.x;
    const float *s = streams + (u64)row * N * hidden;
    float *u = collapsed + (u64)row * collapsed_stride;
    float square = 0.0f;
    for (int i = threadIdx.x; i < hidden; i += 256) {
        float v = s[i];
#pragma unroll
        for (int j = 1; j < N; j++) v += s[j * hidden + i];
        v /= N;
        u[i] = v;
        square = fmaf(v, v, square);
    }
    const float scale = 1.0f / sqrtf(block_sum<256>(square, room) / hidden + eps);
    for (int i = threadIdx.x; i < hidden; i += 256) out[(u64)row * out_stride + i] = u[i] * scale * norm[i];
}
