// What measurements need: random contents, a pure read.
#include "common.cuh"
#if __CUDA_ARCH_FEAT_SM90_ALL
#include "wgmma.cuh"
#endif

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

// Copies everything once.
extern "C" __global__ void __launch_bounds__(512) copy_all(const uint4 *from, u64 count, uint4 *to) {
    u64 i = (u64)blockIdx.x * 512 + threadIdx.x;
    const u64 step = (u64)gridDim.x * 512;
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = load_stream(from + i + j * step);
#pragma unroll
        for (int j = 0; j < 4; j++) to[i + j * step] = v[j];
    }
    for (; i < count; i += step) to[i] = load_stream(from + i);
}

// Products of random halves, as fast as they go: `steps` products 64 x 128 x 16 a warpgroup.
extern "C" __global__ void __launch_bounds__(512) multiply_all(int steps, u64 seed, float *out) {
    float c[64] = {};
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = mixed(seed * 77 + threadIdx.x * 4 + i) & 0xbbffbbffu;
#if __CUDA_ARCH_FEAT_SM90_ALL
    __shared__ __align__(1024) u32 b[128 * 32];
    for (int i = threadIdx.x; i < 128 * 32; i += 512) b[i] = mixed(seed ^ i) & 0xbbffbbffu;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const u64 place = describe((u32)__cvta_generic_to_shared(b));
    // The four warpgroups of a multiprocessor cover each other's waits.
#pragma unroll 1
    for (int i = 0; i < steps; i += 16) {
        products_begin();
#pragma unroll
        for (int j = 0; j < 16; j++) Warpgroup<128>::multiply(c, a, place + 2 * (j % 4), 1);
        products_commit();
        products_done<0>();
    }
#else
#pragma unroll 1
    for (int i = 0; i < steps; i++)
#pragma unroll
        for (int j = 0; j < 16; j++) mma_half(*(float(*)[4])(c + 4 * j), a[0], a[1], a[2], a[3], a[j % 4], a[(j + 1) % 4]);
#endif
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; i++) sum += c[i];
    out[blockIdx.x * 512 + threadIdx.x] = sum;
}

// A launch and nothing else.
KERNEL nothing() { after_previous(); }
