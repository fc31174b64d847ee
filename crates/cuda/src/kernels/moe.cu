// The weighted sum of what experts give in f32; that of experts in slots is in slots.cu.
// TOP: experts a row. Bound by reading TOP rows of `down` for each written one; columns a multiple of 4.
#include "common.cuh"

// out[row] = sum over the row's experts, ascending, of weight * down[choice], then + shared. Grid (columns / 1024, rows).
KERNEL combine(const float *down, int down_stride, const float *weights, const float *shared, int shared_stride, int hidden,
               float *out, int out_stride) {
    const int row = blockIdx.y, column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    after_previous();
    let_next_begin();
    if (column >= hidden) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < TOP; k++) {
        const u64 choice = (u64)row * TOP + k;
        const float w = weights[choice];
        const float4 v = *(const float4 *)(down + choice * down_stride + column);
        sum.x = fmaf(w, v.x, sum.x);
        sum.y = fmaf(w, v.y, sum.y);
        sum.z = fmaf(w, v.z, sum.z);
        sum.w = fmaf(w, v.w, sum.w);
    }
    if (shared) {
        const float4 v = *(const float4 *)(shared + (u64)row * shared_stride + column);
        sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    *(float4 *)(out + (u64)row * out_stride + column) = sum;
}
