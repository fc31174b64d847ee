// The rows of a chunk: convolution, SiLU and decays. What the rest of the preparation begins with.

DEVICE float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Read once, by this block.
DEVICE float2 load_two(const float *p, u64 policy) {
    float2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.f32 {%0, %1}, [%2], %3;" : "=f"(v.x), "=f"(v.y) : "l"(p), "l"(policy));
    return v;
}

// Two channels of q, k and v: taps, and the raw numbers that move past them. Taps are in units of ln 2, so that exponentials take
// what the convolution gives as it is; q and k are normed later, beta takes v's units off.
struct Window {
    float w[3][TAPS][2], x[3][TAPS][2];
};
// What precedes row `top` of the segment, and the taps.
DEVICE void open(Window &c, const Args &in, const Segment &s, int top, int head, int d) {
    const int step = in.heads * DIM;
    const float *from = in.proj + (long long)(s.first_row + top) * in.proj_stride + head * DIM + d;
#pragma unroll
    for (int p = 0; p < 3; p++)
#pragma unroll
        for (int j = 1; j < TAPS; j++) {
            float2 v = make_float2(0.0f, 0.0f);
            if (top >= TAPS - 1) v = *(const float2 *)(from + p * step - (long long)(TAPS - j) * in.proj_stride);
            c.x[p][j][0] = v.x;
            c.x[p][j][1] = v.y;
        }
    if (top < TAPS - 1) {
        // The first rows of the segment: columns of the ring.
#pragma unroll
        for (int j = 1; j < TAPS; j++) {
            const int row = top - TAPS + j, position = s.position + row;
            const u64 entry = ((u64)s.slot * in.heads + head) * in.ring.column_ring + (position < 0 ? 0 : column_at(in.ring, position));
            const float *old = in.ring.columns + entry * 3 * DIM + d;
#pragma unroll
            for (int p = 0; p < 3; p++) {
                float2 v = make_float2(0.0f, 0.0f);
                if (row >= 0) v = *(const float2 *)(from + p * step - (long long)(TAPS - j) * in.proj_stride);
                else if (position >= 0) v = *(const float2 *)(old + p * DIM);
                c.x[p][j][0] = v.x;
                c.x[p][j][1] = v.y;
            }
        }
    }
    if (TAPS == 4 && in.bf16 && in.taps_pitch == 4) {
#pragma unroll
        for (int p = 0; p < 3; p++) {
            const uint4 v = *(const uint4 *)(in.taps + (u64)((p * in.heads + head) * DIM + d) * 8);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < TAPS; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 word = words[2 * i + j / 2];
                    c.w[p][j][i] = LOG2E * (j & 1 ? widen_high(word) : widen_low(word));
                }
        }
    } else {
#pragma unroll
        for (int p = 0; p < 3; p++)
#pragma unroll
            for (int j = 0; j < TAPS; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u64 at = (u64)((p * in.heads + head) * DIM + d + i) * in.taps_pitch + j;
                    c.w[p][j][i] = LOG2E * (in.bf16 ? widen(((const u16 *)in.taps)[at]) : ((const float *)in.taps)[at]);
                }
    }
}

// Rows whose numbers are on their way.
#define AHEAD 4

// Leaves q, k, v, decays and beta of a chunk; two channels and a block of 16 rows a thread. `before_writes` comes when numbers have
// been asked for and nothing has been written.
template <class Hook>
DEVICE void convolve(const Args &in, const Segment &s, int first, int head, u32 base, int tid, Hook before_writes) {
    const int block = tid >> 6, d = 2 * (tid & 63), top = first + 16 * block, step = in.heads * DIM;
    const float *from = in.proj + (u64)(s.first_row + top) * in.proj_stride + head * DIM + d;
    const float *gate = in.gates + (u64)(s.first_row + top) * in.gates_stride + head * DIM + d;
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    float2 raw[AHEAD][4];
    auto ask = [&](int row) {
#pragma unroll
        for (int p = 0; p < 3; p++) raw[row % AHEAD][p] = load_two(from + p * step, policy);
        raw[row % AHEAD][3] = load_two(gate, policy);
        from += in.proj_stride;
        gate += in.gates_stride;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) ask(i);
    Window c;
    open(c, in, s, top, head, d);
    const float rate = LOG2E * expf(in.a_log[head]), bound = LOG2E * in.bound;
    const float2 bias = *(const float2 *)(in.dt_bias + head * DIM + d);
    const float shift[2] = {rate * bias.x, rate * bias.y};
    float b = 0.0f;
    if (tid < CHUNK) b = in.proj[(u64)(s.first_row + first + tid) * in.proj_stride + 3 * in.heads * DIM + head];
    before_writes();
    if (tid < CHUNK) store_float(base + BETA + 4 * tid, quick_sigmoid(b));
    float sum[2] = {1.0f, 1.0f};
    const u32 place = base + (d >> 6) * PIECE + (16 * block) * 128 + ((d & 63) >> 3) * 16 + (d & 7) * 2;
    const u32 decays = base + DECAYS + (16 * block) * 512 + (d >> 2) * 16 + (d & 3) * 4;
#pragma unroll
    for (int r = 0; r < 16; r++) {
        const float2(&now)[4] = raw[r % AHEAD];
        float out[3][2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
#pragma unroll
            for (int p = 0; p < 3; p++) {
#pragma unroll
                for (int j = 0; j + 1 < TAPS; j++) c.x[p][j][k] = c.x[p][j + 1][k];
                c.x[p][TAPS - 1][k] = k ? now[p].y : now[p].x;
                float v = c.w[p][0][k] * c.x[p][0][k];
#pragma unroll
                for (int j = 1; j < TAPS; j++) v = fmaf(c.w[p][j][k], c.x[p][j][k], v);
                out[p][k] = v * quick_inverse(1.0f + power(-v));
            }
            const float opened = quick_inverse(1.0f + power(-fmaf(rate, k ? now[3].y : now[3].x, shift[k])));
            sum[k] *= power(bound * opened);
        }
        if (r + AHEAD < 16) ask(r + AHEAD);
        const u32 at = (place ^ ((r & 7) << 4)) + r * 128;
        store_word(at + QUERY, two_halves(out[0][0], out[0][1]));
        store_word(at + WEIGHT, two_halves(out[1][0], out[1][1]));
        store_word(at + UPDATE, two_halves(out[2][0], out[2][1]));
        store_two((decays ^ ((r & 3) << 5)) + r * 512, sum[0], sum[1]);
    }
    store_two(base + TOTALS + (block * DIM + d) * 4, sum[0], sum[1]);
    store_word(base + TOTAL_HALVES + (block * DIM + d) * 2, two_halves(sum[0], sum[1]));
}
