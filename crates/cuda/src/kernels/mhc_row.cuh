// What a row of a hyper-connection site needs by itself: short functions to two units in the last place, sums of ten numbers over
// a warp, the coefficients that leave the site. N: streams.

DEVICE float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float quick_exp(float x) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 1.4426950408889634f));
    return e;
}
DEVICE float quick_sigmoid(float x) { return reciprocal(1.0f + quick_exp(-x)); }
DEVICE float inverse_root(float x) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float other_lane(float v, int by) { return __shfl_xor_sync(FULL, v, by); }

// Sums of ten numbers over a warp; even lanes with place(lane) >= 0 have the sum of that number.
DEVICE float ten_sums(const float (&v)[10], int lane) {
    float a[6], b[4], c[2];
#pragma unroll
    for (int i = 0; i < 5; i++) a[i] = (lane & 16 ? v[5 + i] : v[i]) + other_lane(lane & 16 ? v[i] : v[5 + i], 16);
    a[5] = 0.0f;
#pragma unroll
    for (int i = 0; i < 3; i++) b[i] = (lane & 8 ? a[3 + i] : a[i]) + other_lane(lane & 8 ? a[i] : a[3 + i], 8);
    b[3] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) c[i] = (lane & 4 ? b[2 + i] : b[i]) + other_lane(lane & 4 ? b[i] : b[2 + i], 4);
    const float d = (lane & 2 ? c[1] : c[0]) + other_lane(lane & 2 ? c[0] : c[1], 2);
    return d + other_lane(d, 1);
}
DEVICE int ten_place(int lane) {
    const int within = 2 * (lane >> 2 & 1) + (lane >> 1 & 1), in_five = 3 * (lane >> 3 & 1) + within;
    return (lane & 1) || within > 2 || in_five > 4 ? -1 : 5 * (lane >> 4) + in_five;
}

// Coefficients that leave the site, a row by 16 lanes: they share the exponentials; every lane has the whole matrix then, since
// the iteration is a chain.
DEVICE void coefficients(const float *sums, float inverse, const float *base, const float *scale, float eps, int iters, int lane,
                         bool here, float *post, float *comb) {
    const int own = lane & 15;
    const float to_post = 2.0f * quick_sigmoid(fmaf(sums[own & 3] * inverse, scale[1], base[N + (own & 3)]));
    float v = fmaf(sums[N + own] * inverse, scale[2], base[2 * N + own]);
    float top = fmaxf(v, other_lane(v, 1));
    top = fmaxf(top, other_lane(top, 2));
    v = quick_exp(v - top);
    float sum = v + other_lane(v, 1);
    sum += other_lane(sum, 2);
    v = fmaf(v, reciprocal(sum), eps);
    float c[N][N];
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < N; j++) c[i][j] = __shfl_sync(FULL, v, (lane & 16) + N * i + j);
    if (!here) return;
#pragma unroll 1
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
    if (own < N) post[own] = to_post;
    if (own == 0)
#pragma unroll
        for (int i = 0; i < N; i++) *(float4 *)(comb + N * i) = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
}
