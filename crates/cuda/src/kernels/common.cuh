// What all kernels share: types, conversions, sums of a fixed order, the tensor-core product.
// Sums are trees of a shape that depends on the number of threads alone, so a result does not depend on the launch.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define FULL 0xffffffffu
#define INFINITY __int_as_float(0x7f800000)

DEVICE float widen(u16 x) { return __uint_as_float((u32)x << 16); }
DEVICE float widen_low(u32 x) { return __uint_as_float(x << 16); }
DEVICE float widen_high(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// Two f32 to a pair of bf16, `low` in the lower half, nearest even.
DEVICE u32 narrow(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// As `narrow` and `widen`, for IEEE half; values beyond its range are cut to its largest.
DEVICE u32 narrow_half(float low, float high) {
    const float most = 65504.0f;
    low = low > most ? most : (low < -most ? -most : low);
    high = high > most ? most : (high < -most ? -most : high);
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE float widen_half(u32 bits) {
    float v;
    asm("{\n.reg .b16 h;\ncvt.u16.u32 h, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(v) : "r"(bits & 0xffffu));
    return v;
}

// A value as two 16-bit numbers whose sum it is, nearly: bf16 carry 16 to 17 bits of it, halves 22 within their range.
DEVICE void store_planes(u16 *to, u64 plane, float v, bool half) {
    if (half) {
        const u32 high = narrow_half(v, 0.0f) & 0xffffu;
        to[0] = high;
        to[plane] = narrow_half(v - widen_half(high), 0.0f) & 0xffffu;
    } else {
        const u32 high = narrow(v, 0.0f) & 0xffffu;
        to[0] = high;
        to[plane] = narrow(v - widen(high), 0.0f) & 0xffffu;
    }
}

DEVICE int min_of(int a, int b) { return a < b ? a : b; }
DEVICE int max_of(int a, int b) { return a > b ? a : b; }

// 1 / (1 + e^-x), accurate on both sides.
DEVICE float sigmoid(float x) {
    float e = expf(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

DEVICE float silu(float x) { return x * sigmoid(x); }

// silu(min(gate, limit)) * clamp(up, -limit, limit); NaN passes.
DEVICE float clamped_swiglu(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
    return silu(gate) * up;
}

// `clamped_swiglu` by the fast exponential and division: within 2^-21 of it, for results that are rounded to 17 bits or fewer.
DEVICE float quick_swiglu(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

DEVICE float warp_sum(float v) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(FULL, v, d);
    return v;
}

// Sum over a block of `THREADS`, in every thread. `room` holds THREADS / 32 floats and is free again afterwards.
template <int THREADS>
DEVICE float block_sum(float v, float *room) {
    v = warp_sum(v);
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = v;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) sum += room[w];
    __syncthreads();
    return sum;
}

// 16 bytes that are read once: they bypass the first-level cache.
DEVICE uint4 load_stream(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

DEVICE uint4 load_cached(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// c += a b: a 16 x 16 and b 16 x 8 in bf16, c in f32. Lane (g, t) = (lane / 4, lane % 4) holds of `a` the rows g and g + 8,
// of `b` the column g and of `c` the rows g, g + 8 at the columns 2 t, 2 t + 1.
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// As `mma` with halves.
DEVICE void mma_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Eight INT4 codes to halves `code - 8`, exactly. The codes of a word start at bit 2 (the last one's end is in the lowest bits),
// so that two pairs of each half need no shift: put into the mantissa of 1024 they give 1024 + 4 code and 1024 + 64 code, and
// the offset goes in one operation.
DEVICE uint4 unpack(u32 w) {
    const u32 low = 0x003c003cu, high = 0x03c003c0u, base = 0x64006400u;
    const u32 quarter = 0x34003400u, minus = 0xdc20dc20u;      // 1/4, -264
    const u32 part = 0x24002400u, minus_high = 0xce00ce00u;    // 1/64, -24
    const u32 v = __funnelshift_r(w, w, 8);
    uint4 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d.x) : "r"(w), "r"(low), "r"(base));
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d.y) : "r"(w), "r"(high), "r"(base));
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d.z) : "r"(v), "r"(low), "r"(base));
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d.w) : "r"(v), "r"(high), "r"(base));
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(d.x) : "r"(quarter), "r"(minus));
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(d.y) : "r"(part), "r"(minus_high));
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(d.z) : "r"(quarter), "r"(minus));
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(d.w) : "r"(part), "r"(minus_high));
    return d;
}

// A launch may begin before the one in front of it has ended; from here on what that one wrote is there. And: the next launch
// may begin.
DEVICE void after_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A segment of the step as uploaded: see `step.rs`.
struct Segment {
    u32 slot, position, rows, fold, commit, first_page, first_row, pages;
};
