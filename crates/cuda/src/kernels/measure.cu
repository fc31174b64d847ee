// What measurements need: random contents, a pure read.
#include "common.cuh"

DEVICE u32 mixed(u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (u32)(x >> 32);
}

// Random words. kind 0: any bits; 1: f32 in -1 .. 1; 2: blocks of INT4 (see gemm.cu) with scales in 1/256 .. 1/128; 3: pairs of
// bf16 in -1 .. 1.
KERNEL fill(u32 *to, u64 words, u64 seed, int kind) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += (u64)gridDim.x * blockDim.x) {
        const u32 r = mixed(i ^ seed * 0xd1342543de82ef95ull);
        const float a = (float)(int)r * (1.0f / 2147483648.0f);
        const float b = (float)(int)(r << 16) * (1.0f / 2147483648.0f);
        to[i] = kind == 0 ? r
              : kind == 1 ? __float_as_uint(a)
              : kind == 2 ? i % 132 < 128 ? r : narrow((1.0f + 0.5f * (a + 1.0f)) / 256.0f, (1.0f + 0.5f * (b + 1.0f)) / 256.0f)
                          : narrow(a, b);
    }
}

// Reads everything once.
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4 *from, u64 count, u32 *out) {
    u32 x = 0;
    u64 i = (u64)blockIdx.x * 512 + threadIdx.x;
    const u64 step = (u64)gridDim.x * 512;
    for (; i + 7 * step < count; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = load_stream(from + i + j * step);
#pragma unroll
        for (int j = 0; j < 8; j++) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < count; i += step) {
        const uint4 v = load_stream(from + i);
        x ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (x == 0x12345678u) *out = x;
}
