// The router: scores in true f32 and the choice of a row's experts.
//
// A block of `score` has 16 experts by 512 columns, in registers before the launch in front has ended; a warp has 8 by 256. What a
// lane sums for 8 experts and 4 rows becomes 32 sums of a warp, one a lane, by 31 shuffles. A slice's sums go to memory, and who
// chooses adds the slices.
//
// Order of a sum: a lane's 8 columns in turn; a tree over the lanes; two halves of a slice; the slices in turn. It depends on the
// number of columns alone, not on the rows beside a row.
//
// Versions tried, on one NVIDIA H200, us of scores and choice at 3 / 24 / 96 rows: a warp an output, a warp a row 90 / - / -; the
// scores as here, a warp a row 7.9 / 10.9 / 17.7; as here 4.3 / 6.8 / -. One launch for the choice, the work list and the rows in
// their slots, for which every block chooses for all rows, took longer than two: 8.0 against 7.1 with 3 rows.
//
// Constants: TOP, experts a row; EXPERTS; GROUPS, KEPT: expert groups and how many are kept; SLICES of a sum.
#include "common.cuh"
#include "lanes.cuh"

#define BLOCK_EXPERTS 16
#define SLICE 512
#define MOST_TILE 64      // rows of a block of `score`
#define WARPS ((EXPERTS + 31) / 32)
#define CANDIDATES (WARPS * TOP)
#define HELD ((CANDIDATES + 31) / 32)
#define SIZE (EXPERTS / GROUPS)

// Four weights of a row. They are asked for here: a load that may be moved (ld.global.nc) is moved behind the wait for the launch
// in front.
struct Floats {
    float4 v;
    __device__ __forceinline__ void ask(const u8 *row, int column) {
        asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "l"(row + 4 * column)
                     : "memory");
    }
    __device__ __forceinline__ float4 get() const { return v; }
};
struct Bf16s {
    uint2 v;
    __device__ __forceinline__ void ask(const u8 *row, int column) {
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(row + 2 * column) : "memory");
    }
    __device__ __forceinline__ float4 get() const {
        return make_float4(widen_low(v.x), widen_high(v.x), widen_low(v.y), widen_high(v.y));
    }
};

// Sums of slices, [slices, rows, experts]. Grid (experts / 16, slices, rows / tile), 128 threads; rows of W are `pitch` bytes.
template <class Four>
DEVICE void sum_slices(const u8 *w, int pitch, const float *x, int x_stride, int rows, int columns, int tile, float *sums) {
    __shared__ float room[MOST_TILE / 4][4][32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int expert = blockIdx.x * BLOCK_EXPERTS + (warp >> 1) * 8;
    const int column = blockIdx.y * SLICE + (warp & 1) * 256 + 4 * lane, begin = blockIdx.z * tile;
    const int count = min_of(tile, rows - begin);
    const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    Four asked[8][2];
#pragma unroll
    for (int e = 0; e < 8; e++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (expert + e < EXPERTS && column + 128 * j < columns)
                asked[e][j].ask(w + (u64)(expert + e) * pitch, column + 128 * j);
    after_previous();
    let_next_begin();
    float4 a[8][2], next[4][2];
#pragma unroll
    for (int e = 0; e < 8; e++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            a[e][j] = expert + e < EXPERTS && column + 128 * j < columns ? asked[e][j].get() : none;
    auto load = [&](int row) {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                next[r][j] = column + 128 * j < columns
                                 ? *(const float4 *)(x + (u64)(begin + min_of(row + r, count - 1)) * x_stride + column + 128 * j)
                                 : none;
    };
    load(0);
    for (int row = 0; row < count; row += 4) {
        float s[32];
#pragma unroll
        for (int e = 0; e < 8; e++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float v = a[e][0].x * next[r][0].x;
                v = fmaf(a[e][0].y, next[r][0].y, v);
                v = fmaf(a[e][0].z, next[r][0].z, v);
                v = fmaf(a[e][0].w, next[r][0].w, v);
                v = fmaf(a[e][1].x, next[r][1].x, v);
                v = fmaf(a[e][1].y, next[r][1].y, v);
                v = fmaf(a[e][1].z, next[r][1].z, v);
                s[4 * e + r] = fmaf(a[e][1].w, next[r][1].w, v);
            }
        if (row + 4 < count) load(row + 4);
        halve<16>(s);
        halve<8>(s);
        halve<4>(s);
        halve<2>(s);
        halve<1>(s);
        room[row / 4][warp][lane] = s[0];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * BLOCK_EXPERTS; i += 128) {
        const int row = i / BLOCK_EXPERTS, e = i % BLOCK_EXPERTS;
        if (blockIdx.x * BLOCK_EXPERTS + e >= EXPERTS) continue;
        const float *at = room[row / 4][e / 8 * 2] + e % 8 * 4 + row % 4;
        sums[((u64)blockIdx.y * rows + begin + row) * EXPERTS + blockIdx.x * BLOCK_EXPERTS + e] = at[0] + at[32];
    }
}

extern "C" __global__ void __launch_bounds__(128) score(const u8 *w, int pitch, const float *x, int x_stride, int rows,
                                                        int columns, int tile, float *sums) {
    sum_slices<Floats>(w, pitch, x, x_stride, rows, columns, tile, sums);
}
extern "C" __global__ void __launch_bounds__(128) score_bf16(const u8 *w, int pitch, const float *x, int x_stride, int rows,
                                                             int columns, int tile, float *sums) {
    sum_slices<Bf16s>(w, pitch, x, x_stride, rows, columns, tile, sums);
}

// A number's place among scores: greater for greater ones, equal for equal ones, NaN last, above 0.
DEVICE u32 place(float v) {
    const u32 bits = __float_as_uint(v + 0.0f);
    return v == v ? (bits & 0x80000000u ? ~bits : bits | 0x80000000u) + 1 : 1;
}

// A warp's best: the greatest place, and of equal ones the lowest `at`.
DEVICE u32 lowest_best(u32 most, u32 at) {
    const u32 top = __reduce_max_sync(FULL, most);
    return __reduce_min_sync(FULL, most == top ? at : FULL);
}

#if GROUPS > KEPT
// Closes the groups whose two best scores add up to less than those of KEPT others; a warp.
DEVICE void close_groups(u32 *places, const float *scores, const float *bias) {
    const int lane = threadIdx.x & 31;
    u32 sums[GROUPS];
    for (int q = 0; q < GROUPS; q++) {
        float sum = 0.0f;
        u32 taken = FULL;
        for (int k = 0; k < (SIZE > 1 ? 2 : 1); k++) {
            u32 most = 0, at = FULL;
            for (int e = q * SIZE + lane; e < (q + 1) * SIZE; e += 32)
                if (places[e] > most && (u32)e != taken) most = places[e], at = e;
            taken = lowest_best(most, at);
            sum += scores[taken] + bias[taken];
        }
        sums[q] = place(sum);
    }
    __syncwarp();
    for (int q = 0; q < GROUPS; q++) {
        int before = 0;
        for (int o = 0; o < GROUPS; o++) before += sums[o] > sums[q] || (sums[o] == sums[q] && o < q);
        if (before >= KEPT)
            for (int e = q * SIZE + lane; e < (q + 1) * SIZE; e += 32) places[e] = 0;
    }
}
#endif

// Chooses the experts of a row from its sums. Chosen ascending by expert, with weights. A block of 32 WARPS threads a row, an
// expert a thread: every warp finds the best of its experts, then one the best of those.
extern "C" __global__ void __launch_bounds__(32 * WARPS) choose(const float *sums, const float *bias, int rows, int normalize,
                                                                float factor, u32 *experts, float *weights) {
    __shared__ float scores[EXPERTS], chosen[TOP];
    __shared__ u32 keys[CANDIDATES], owners[CANDIDATES];
    const int e = threadIdx.x, warp = e >> 5, lane = e & 31, row = blockIdx.x;
    const bool active = e < EXPERTS;
    after_previous();
    let_next_begin();
    float part[SLICES];
#pragma unroll
    for (int s = 0; s < SLICES; s++) part[s] = active ? sums[((u64)s * rows + row) * EXPERTS + e] : 0.0f;
    const float b = active ? bias[e] : 0.0f;
    float score = part[0];
#pragma unroll
    for (int s = 1; s < SLICES; s++) score += part[s];
    score = sigmoid(score);
    const float biased = score + b;
    u32 own = active ? place(biased) : 0;
    if (active) scores[e] = score;
#if GROUPS > KEPT
    __shared__ u32 places[EXPERTS];
    if (active) places[e] = own;
    __syncthreads();
    if (warp == 0) close_groups(places, scores, bias);
    __syncthreads();
    if (active) own = places[e];
#endif
    // The best of 32 experts, the best first; of equal ones the lower expert.
    u32 key = 0, owner = 0;
#pragma unroll
    for (int k = 0; k < TOP; k++) {
        const u32 top = __reduce_max_sync(FULL, own);
        const int at = __ffs(__ballot_sync(FULL, own == top)) - 1;
        if (lane == at) own = 0;
        if (lane == k) key = top, owner = 32 * warp + at;
    }
    if (lane < TOP) keys[warp * TOP + lane] = key, owners[warp * TOP + lane] = owner;
    const int healthy = __syncthreads_and(biased == biased);
    if (warp > 0) return;
    // The best of those: they lie in the order of experts where they are equal.
    u32 held[HELD], mine = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) held[i] = lane + 32 * i < CANDIDATES ? keys[lane + 32 * i] : 0;
#pragma unroll
    for (int k = 0; k < TOP; k++) {
        u32 most = 0, at = FULL;
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (held[i] > most) most = held[i], at = lane + 32 * i;
        at = lowest_best(most, at);
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (at == (u32)(lane + 32 * i)) held[i] = 0;
        if (lane == k) mine = owners[at];
    }
    int rank = 0;
#pragma unroll
    for (int k = 0; k < TOP; k++) rank += __shfl_sync(FULL, mine, k) < mine;
    if (lane < TOP) {
        experts[row * TOP + rank] = mine;
        chosen[rank] = scores[mine];
    }
    __syncwarp();
    if (lane >= TOP) return;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < TOP; k++) sum += chosen[k];
    const float w = normalize ? chosen[lane] / (sum + 1e-20f) : chosen[lane];
    // The choice among the others would look healthy: a score that is no number must be seen in the result.
    weights[row * TOP + lane] = healthy ? w * factor : __int_as_float(0x7fffffff);
}
