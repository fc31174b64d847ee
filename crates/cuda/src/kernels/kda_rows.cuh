// The rows of a chunk: convolution, SiLU and decays. What the rest of the preparation begins with.

DEVICE float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The policy that `createpolicy` gives for what is evicted first: as a constant it needs no moves between registers.
#define ONCE 0x12f0000000000000ull
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
#ifndef AHEAD
#define AHEAD 4
#endif

// Rows of a block of 16 whose numbers come to registers: the first ones, and as many from LATE on.
#define REGISTER_ROWS 3
#define LATE 11

// Two channels of q, k, v and the gate in a block of 16 rows a thread: rows that come to registers.
struct Rows {
    float2 raw[REGISTER_ROWS][4];

    // Row `row` of `proj` and `gates`, channels from `column` on.
    __device__ __forceinline__ void ask(const Args &in, u64 row, int column, int i) {
        const float *from = in.proj + row * in.proj_stride + column;
#pragma unroll
        for (int p = 0; p < 3; p++) raw[i][p] = load_two(from + p * in.heads * DIM, ONCE);
        raw[i][3] = load_two(in.gates + row * in.gates_stride + column, ONCE);
    }
    __device__ __forceinline__ void begin(const Args &in, const Segment &s, int first, int head, int tid) {
        const u64 row = s.first_row + first + 16 * (tid >> 6);
#pragma unroll
        for (int i = 0; i < REGISTER_ROWS; i++) ask(in, row + i, head * DIM + 2 * (tid & 63), i);
    }
};

// The other rows come to shared memory, by warps: 64 channels of q, k, v and the gate are 256 bytes each. They lie where what becomes of
// later rows will be: decays of one row, or halves of two; rows 3, 4, 14, 15 where keys of the image will be. So nearly all rows of
// a chunk are under way at once. Where part p of a row lies, from the beginning of the warp's halves and of its decays on:
DEVICE u32 coming_at(u32 halves, u32 decays, int row, int p) {
    if (row == 3 || row == 14) return halves + KEY + 256 * p;
    if (row == 4 || row == 15) return halves + KEY + 1024 + 256 * p;
    if (row == 10) return decays + (12 + p) * 512;
    if (p == 3) return decays + (row + 2) * 512;
    return halves + (p == 0 ? QUERY : p == 1 ? WEIGHT : UPDATE) + 256 * (row - 2);
}
// Groups of copies that may be under way when a row's must be there: rows are asked for in order, 14 and 15 behind 3 and 4.
constexpr int copies_behind(int row) { return row < 5 ? 7 : row < LATE ? 12 - row : 15 - row; }

// 16 bytes that are read once.
DEVICE void copy_once(u32 to, const float *from) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(ONCE) : "memory");
}
// `left` is known when this is compiled.
DEVICE void copies_wait(int left) {
    switch (left) {
        case 7: asm volatile("cp.async.wait_group 7;" ::: "memory"); break;
        case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
        case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
        case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
        case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
}

// Leaves q, k, v, decays and beta of a chunk; two channels and a block of 16 rows a thread. `before_writes` comes before anything
// is written.
template <class Hook>
DEVICE void convolve(const Args &in, const Segment &s, int first, int head, u32 base, int tid, Rows &rows, Hook before_writes) {
    const int block = tid >> 6, d = 2 * (tid & 63), top = first + 16 * block;
    Window c;
    open(c, in, s, top, head, d);
    const float rate = LOG2E * expf(in.a_log[head]), bound = LOG2E * in.bound;
    const float2 bias = *(const float2 *)(in.dt_bias + head * DIM + d);
    const float shift[2] = {rate * bias.x, rate * bias.y};
    float b = 0.0f;
    if (tid < CHUNK) b = in.proj[(u64)(s.first_row + first + tid) * in.proj_stride + 3 * in.heads * DIM + head];
    // A lane copies 16 bytes of q or k, and of v or the gate.
    const u32 halves = base + (d >> 6) * PIECE + 16 * block * 128, warp_decays = base + DECAYS + 16 * block * 512 + (d >> 6) * 256;
    const int lane = tid & 31, part = lane >> 4;
    const u64 first_row = s.first_row + top;
    const int column = head * DIM + (d & 64) + 4 * (lane & 15);
    const float *one = in.proj + first_row * in.proj_stride + part * in.heads * DIM + column;
    const float *two = part ? in.gates + first_row * in.gates_stride + column : in.proj + first_row * in.proj_stride + 2 * in.heads * DIM + column;
    const int apart = part ? in.gates_stride : in.proj_stride;
    auto bring = [&](int row) {
        const u32 to = 16 * (lane & 15);
        copy_once(to + (part ? coming_at(halves, warp_decays, row, 1) : coming_at(halves, warp_decays, row, 0)), one + (u64)row * in.proj_stride);
        copy_once(to + (part ? coming_at(halves, warp_decays, row, 3) : coming_at(halves, warp_decays, row, 2)), two + (u64)row * apart);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    before_writes();
#pragma unroll
    for (int r = 3; r < LATE; r++) bring(r);
    if (tid < CHUNK) store_float(base + BETA + 4 * tid, quick_sigmoid(b));
    float sum[2] = {1.0f, 1.0f};
    const u32 place = base + (d >> 6) * PIECE + (16 * block) * 128 + ((d & 63) >> 3) * 16 + (d & 7) * 2;
    const u32 decays = base + DECAYS + (16 * block) * 512 + (d >> 2) * 16 + (d & 3) * 4;
#pragma unroll
    for (int r = 0; r < 16; r++) {
        float2 now[4];
        if (r < REGISTER_ROWS || (r >= LATE && r < LATE + REGISTER_ROWS)) {
#pragma unroll
            for (int p = 0; p < 4; p++) now[p] = rows.raw[(r < LATE ? r : r - LATE) % REGISTER_ROWS][p];
        } else {
            copies_wait(copies_behind(r));
            __syncwarp();
#pragma unroll
            for (int p = 0; p < 4; p++) now[p] = read_two(coming_at(halves, warp_decays, r, p) + 8 * lane);
        }
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
        if (r < REGISTER_ROWS) rows.ask(in, first_row + LATE + r, head * DIM + d, r);
        if (r == 3 || r == 4) {
            __syncwarp();
            bring(r + 11);
        }
        const u32 at = (place ^ ((r & 7) << 4)) + r * 128;
        store_word(at + QUERY, two_halves(out[0][0], out[0][1]));
        store_word(at + WEIGHT, two_halves(out[1][0], out[1][1]));
        store_word(at + UPDATE, two_halves(out[2][0], out[2][1]));
        store_two((decays ^ ((r & 3) << 5)) + r * 512, sum[0], sum[1]);
    }
    store_two(base + TOTALS + (block * DIM + d) * 4, sum[0], sum[1]);
    store_word(base + TOTAL_HALVES + (block * DIM + d) * 2, two_halves(sum[0], sum[1]));
}
