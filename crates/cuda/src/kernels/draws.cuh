// What both kernels of draws share: a row's rule, weights, sums of a block of WARPS warps.

// A row's rule as uploaded: see sampler.cu.
struct Rule {
    u32 row, first, count, mask;
};

struct Change {
    u32 token;
    float bias, repetition, minus;
};

// How a row is drawn: one over the temperature, the lowest logit below the best (minus infinity: any), the mass that is kept, a
// number in [0, 1), how many tokens are kept (0: all).
struct Draw {
    double steepness, floor, top_p, uniform;
    u32 top_k, spare;
};

// 2^x, to 2^-22 of its value.
DEVICE float power(float x) {
    float w;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"(x));
    return w;
}

DEVICE float most(float a, float b) {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
    return m;
}

DEVICE double warp_total(double v) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(FULL, v, d);
    return v;
}

// The sum of the values of all threads before this one; `total` is that of all. `room` holds WARPS numbers and is free after.
template <typename T>
DEVICE T before_thread(T v, T *room, T &total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    T sum = v;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const T other = __shfl_up_sync(FULL, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) room[warp] = sum;
    __syncthreads();
    T before = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const T part = room[w];
        if (w < warp) before += part;
        total += part;
    }
    __syncthreads();
    return before + sum - v;
}
