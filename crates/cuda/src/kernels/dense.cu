// Dense stages that are not tensor-core products: splitting activations, f32 dot products, embedding, norms, copies.
//
// Layout: rows of f32 with a stride, planes of 16-bit numbers with a pitch of whole blocks of 64 columns, zeros beyond. Each kernel reads
// and writes everything once and is bound by that (50 to 75 % of the rate from 2048 rows on, the small table of h200-kernels.md);
// few rows cost a launch, 1.5 to 8 us. Sums go over a row in one order, whatever the other rows are.
#include "common.cuh"

// x[row, start ..] to planes high + low, [rows, pitch] each, zero beyond `columns`; bf16 or halves. `list` names the rows.
KERNEL split(const float *x, int stride, int start, int columns, int pitch, const u32 *list, int half, u16 *planes,
             u64 plane) {
    const int row = blockIdx.y, column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    after_previous();
    let_next_begin();
    if (column >= pitch) return;
    const float *from = x + (u64)(list ? list[row] : row) * stride + start;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = column + i < columns ? from[column + i] : 0.0f;
    uint2 high, low;
    if (half) {
        high = make_uint2(narrow_half(v[0], v[1]), narrow_half(v[2], v[3]));
        low.x = narrow_half(v[0] - widen_half(high.x), v[1] - widen_half(high.x >> 16));
        low.y = narrow_half(v[2] - widen_half(high.y), v[3] - widen_half(high.y >> 16));
    } else {
        high = make_uint2(narrow(v[0], v[1]), narrow(v[2], v[3]));
        low.x = narrow(v[0] - widen_low(high.x), v[1] - widen_high(high.x));
        low.y = narrow(v[2] - widen_low(high.y), v[3] - widen_high(high.y));
    }
    u16 *to = planes + (u64)row * pitch + column;
    *(uint2 *)to = high;
    *(uint2 *)(to + plane) = low;
}

// Planes of silu(min(gate, limit)) * clamp(up) for sums [rows, width] each: halves, of which the high plane is enough, or bf16.
// Four columns a thread.
KERNEL activate(const float *gate, const float *up, int width, float limit, u16 *act, u64 plane, int half) {
    const int row = blockIdx.y, column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= width) return;
    const u64 at = (u64)row * width + column;
    const float4 g = *(const float4 *)(gate + at), u = *(const float4 *)(up + at);
    const float a = clamped_swiglu(g.x, u.x, limit), b = clamped_swiglu(g.y, u.y, limit);
    const float c = clamped_swiglu(g.z, u.z, limit), d = clamped_swiglu(g.w, u.w, limit);
    uint2 high, low;
    if (half) {
        high = make_uint2(narrow_half(a, b), narrow_half(c, d));
        low.x = narrow_half(a - widen_half(high.x), b - widen_half(high.x >> 16));
        low.y = narrow_half(c - widen_half(high.y), d - widen_half(high.y >> 16));
    } else {
        high = make_uint2(narrow(a, b), narrow(c, d));
        low.x = narrow(a - widen_low(high.x), b - widen_high(high.x));
        low.y = narrow(c - widen_low(high.y), d - widen_high(high.y));
    }
    *(uint2 *)(act + at) = high;
    *(uint2 *)(act + at + plane) = low;
}

// y = a (+ b) (+ bias) of rows, four columns a thread.
KERNEL add_rows(const float *a, const float *b, int pitch, const float *bias, int width, float *y, int y_pitch) {
    const int row = blockIdx.y, column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= width) return;
    const u64 at = (u64)row * pitch + column;
    float4 v = *(const float4 *)(a + at);
    if (b) {
        const float4 w = *(const float4 *)(b + at);
        v = make_float4(v.x + w.x, v.y + w.y, v.z + w.z, v.w + w.w);
    }
    if (bias) v = make_float4(v.x + bias[column], v.y + bias[column + 1], v.z + bias[column + 2], v.w + bias[column + 3]);
    *(float4 *)(y + (u64)row * y_pitch + column) = v;
}

// bf16 times a power of two to halves, eight a thread; `count` is a multiple of eight.
KERNEL turn_to_halves(const uint4 *from, u64 count, float scale, uint4 *to) {
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (8 * at >= count) return;
    const uint4 v = from[at];
    auto turn = [&](u32 pair) { return narrow_half(scale * widen_low(pair), scale * widen_high(pair)); };
    to[at] = make_uint4(turn(v.x), turn(v.y), turn(v.z), turn(v.w));
}

// Pairs of bf16 to f32.
KERNEL turn_to_floats(const u32 *from, u64 count, float2 *to) {
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (2 * at < count) to[at] = make_float2(widen_low(from[at]), widen_high(from[at]));
}

// f32 to halves, four a thread.
KERNEL to_halves(const float *from, u64 count, u16 *to) {
    const u64 at = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= count) return;
    const float4 v = *(const float4 *)(from + at);
    *(uint2 *)(to + at) = make_uint2(narrow_half(v.x, v.y), narrow_half(v.z, v.w));
}

// One weight of a stored row.
DEVICE float stored(const u8 *row, int bf16, int k) {
    return bf16 ? widen(((const u16 *)row)[k]) : ((const float *)row)[k];
}

// y[row, out] = W[out] . x[row] (+ bias) in true f32, a warp an output and four rows: lane l sums the columns l, l + 32, ...
KERNEL dot(const float *x, int x_stride, int start, int rows, const u8 *w, int bf16, int w_pitch, int outputs, int columns,
           const float *bias, const u32 *list, float *y, int y_stride) {
    const int lane = threadIdx.x & 31, out = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), first = 4 * blockIdx.y;
    after_previous();
    let_next_begin();
    if (out >= outputs) return;
    const u8 *weights = w + (u64)out * w_pitch * (bf16 ? 2 : 4);
    const float *from[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int row = min_of(first + r, rows - 1);
        from[r] = x + (u64)(list ? list[row] : row) * x_stride + start;
    }
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (int k = lane; k < columns; k += 32) {
        const float v = stored(weights, bf16, k);
#pragma unroll
        for (int r = 0; r < 4; r++) sum[r] = fmaf(v, from[r][k], sum[r]);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        sum[r] = warp_sum(sum[r]);
        if (lane == 0 && first + r < rows) y[(u64)(first + r) * y_stride + out] = sum[r] + (bias ? bias[out] : 0.0f);
    }
}

// streams[row, i] = table[token] or an image feature.
KERNEL embed(const u32 *tokens, const int *feature, const u8 *table, int bf16, int pitch, const float *features,
             int feature_stride, float *streams, int stride, int n, int hidden) {
    const int row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    after_previous();
    let_next_begin();
    if (column >= hidden) return;
    const int image = feature[row];
    const float v = image >= 0 ? features[(u64)image * feature_stride + column]
                               : stored(table + (u64)tokens[row] * pitch * (bf16 ? 2 : 4), bf16, column);
    for (int i = 0; i < n; i++) streams[(u64)row * stride + i * hidden + column] = v;
}

// RMS norm of a row by a block.
DEVICE float inverse_rms(const float *x, int width, float eps, float *room) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += 256) sum = fmaf(x[i], x[i], sum);
    return 1.0f / sqrtf(block_sum<256>(sum, room) / width + eps);
}

// x += y (when given), out = norm(x): RMSNorm, LayerNorm with a bias, GELU after the norm when `gelu`.
KERNEL add_norm(float *x, int x_stride, const float *y, int y_stride, const float *weight, const float *bias, float eps,
                int width, int gelu, float *out, int out_stride) {
    __shared__ float room[8];
    after_previous();
    let_next_begin();
    float *row = x + (u64)blockIdx.x * x_stride, *to = out + (u64)blockIdx.x * out_stride;
    if (y) {
        const float *add = y + (u64)blockIdx.x * y_stride;
        for (int i = threadIdx.x; i < width; i += 256) row[i] += add[i];
        __syncthreads();
    }
    float mean = 0.0f;
    if (bias) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < width; i += 256) sum += row[i];
        mean = block_sum<256>(sum, room) / width;
    }
    float square = 0.0f;
    for (int i = threadIdx.x; i < width; i += 256) square = fmaf(row[i] - mean, row[i] - mean, square);
    const float scale = 1.0f / sqrtf(block_sum<256>(square, room) / width + eps);
    for (int i = threadIdx.x; i < width; i += 256) {
        const float v = (row[i] - mean) * scale;
        float r = bias ? fmaf(v, weight[i], bias[i]) : v * weight[i];
        if (gelu) r = (float)(0.5 * (double)r * erfc(-(double)r * 0.70710678118654752440));
        to[i] = r;
    }
}

// out = [norm(table[token]) | norm(hidden[source])].
KERNEL mtp_input(const u32 *tokens, const u8 *table, int bf16, int pitch, const float *enorm, float e_eps,
                 const float *hnorm, float h_eps, const float *hidden, int hidden_stride, const u32 *source, float *out,
                 int out_stride, int width) {
    __shared__ float room[8];
    after_previous();
    let_next_begin();
    const int row = blockIdx.x;
    float *to = out + (u64)row * out_stride;
    const u8 *from = table + (u64)tokens[row] * pitch * (bf16 ? 2 : 4);
    for (int i = threadIdx.x; i < width; i += 256) to[i] = stored(from, bf16, i);
    __syncthreads();
    float scale = inverse_rms(to, width, e_eps, room);
    for (int i = threadIdx.x; i < width; i += 256) to[i] = to[i] * scale * enorm[i];
    const float *h = hidden + (u64)source[row] * hidden_stride;
    scale = inverse_rms(h, width, h_eps, room);
    for (int i = threadIdx.x; i < width; i += 256) to[width + i] = h[i] * scale * hnorm[i];
}

// Raw INT4 rows (eight columns a word, lowest nibble first) and their scales to the blocks of the products; see gemm.cu.
KERNEL pack_int4(const u32 *raw, const u16 *scale, int outputs, int columns, u32 *packed) {
    const int words = columns / 8, groups = columns / 128;
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (u64)outputs * words) return;
    const int row = at / words, word = at % words, group = word / 16, i = (word % 16) / 4, t = word % 4;
    const u32 *from = raw + (at - t);
    u32 v = 0;
#pragma unroll
    for (int p = 0; p < 4; p++) v |= ((from[p] >> (8 * t)) & 15) << (4 * p) | ((from[p] >> (8 * t + 4)) & 15) << (4 * p + 16);
    u32 *block = packed + ((u64)(row / 64 * groups + group) * 8 + row / 8 % 8) * 132;
    block[(4 * (row % 8) + t) * 4 + i] = __funnelshift_l(v, v, 2);
    if (word % 16 == 0) ((u16 *)(block + 128))[row % 8] = scale[(u64)row * groups + group];
}

// to[i] = from[rows[i]] of words; the lengths go along.
KERNEL copy_lists(const u32 *from, const u32 *from_len, const u32 *rows, int width, u32 *to, u32 *to_len) {
    after_previous();
    let_next_begin();
    const u32 row = rows[blockIdx.x];
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[(u64)blockIdx.x * width + i] = from[(u64)row * width + i];
    if (threadIdx.x == 0) to_len[blockIdx.x] = from_len[row];
}
