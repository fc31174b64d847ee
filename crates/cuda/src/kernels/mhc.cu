// Hyper-connections: merging a sub-block's output into the streams, the coefficients of the next mixer, the collapsed input.
//
// What `mhc_site.cu` does not take: `merge`, a plain f32 dot product (dense.cu) and `mix`; `mean_norm` ends a trunk. N: streams.
// All f32; any hidden width and number of rows. The fused site is faster (h200-kda.md): this is what
// other numbers of streams, F32 mixing matrices and older devices take.
#include "common.cuh"

#define COEFFICIENTS (2 * N + N * N)

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
