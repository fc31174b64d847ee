// y[row, out] = W x + bias for matrices of few columns: up to 128, W in BF16 as stored, x and sums in true f32. Several matrices,
// each with its own columns of x, by one launch (the low-rank gates of delta attention).
//
// Half a warp has 8 outputs by all columns, 8 columns a lane, in registers before the launch in front has ended. What a lane sums
// for 8 outputs and 2 rows becomes 16 sums of the half warp, one a lane, by 15 shuffles.
//
// Order of a sum: a lane's 8 columns in turn, a tree over the lanes. It depends on nothing else.
#include "common.cuh"
#include "lanes.cuh"

struct Part {
    const u16 *w;
    const float *x, *bias;
    float *y;
    int last, outputs, columns, pitch;    // tiles of 16 outputs of this part and those before it
};

struct Args {
    Part parts[4];
    int rows, x_stride, y_stride, tile;
};

// Grid (tiles of 16 outputs / 4, rows / tile), 128 threads.
extern "C" __global__ void __launch_bounds__(128) narrow(const __grid_constant__ Args p) {
    const int lane = threadIdx.x & 31, t = lane & 15, tile = blockIdx.x * 4 + (threadIdx.x >> 5);
    int part = 0, before = 0;
    while (part < 3 && tile >= p.parts[part].last) before = p.parts[part].last, part++;
    const Part &q = p.parts[part];
    const int first = (tile - before) * 16 + (lane >> 4) * 8;
    float a[8][8];
#pragma unroll
    for (int o = 0; o < 8; o++) {
        // The compiler must not move these loads behind the wait, as it does with loads of what it takes to be constant.
        uint4 v = make_uint4(0, 0, 0, 0);
        if (tile < q.last && first + o < q.outputs && 8 * t < q.columns)
            asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "l"(q.w + (u64)(first + o) * q.pitch + 8 * t)
                         : "memory");
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) a[o][2 * i] = widen_low(words[i]), a[o][2 * i + 1] = widen_high(words[i]);
    }
    after_previous();
    let_next_begin();
    const int begin = blockIdx.y * p.tile, end = min_of(begin + p.tile, p.rows);
    float next[2][8];
    auto load = [&](int row) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float4 *from = (const float4 *)(q.x + (u64)min_of(row + r, end - 1) * p.x_stride + 8 * t);
            const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const float4 low = 8 * t < q.columns ? from[0] : none, high = 8 * t < q.columns ? from[1] : none;
            next[r][0] = low.x, next[r][1] = low.y, next[r][2] = low.z, next[r][3] = low.w;
            next[r][4] = high.x, next[r][5] = high.y, next[r][6] = high.z, next[r][7] = high.w;
        }
    };
    load(begin);
    for (int row = begin; row < end; row += 2) {
        float s[16];
#pragma unroll
        for (int o = 0; o < 8; o++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float v = a[o][0] * next[r][0];
#pragma unroll
                for (int i = 1; i < 8; i++) v = fmaf(a[o][i], next[r][i], v);
                s[8 * r + o] = v;
            }
        if (row + 2 < end) load(row + 2);
        halve<8>(s);
        halve<4>(s);
        halve<2>(s);
        halve<1>(s);
        const int out = first + (t & 7), at = row + (t >> 3);
        if (tile < q.last && out < q.outputs && at < end)
            q.y[(u64)at * p.y_stride + out] = s[0] + (q.bias ? q.bias[out] : 0.0f);
    }
}
