// The delta rule row after row where bulk copies are missing: a block a head of a segment does everything by itself; see `kda.cu`.

// What is read and written once.
DEVICE u64 once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE void store_once(float *p, float4 v, u64 policy) {
    asm volatile("st.global.L1::no_allocate.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "f"(v.x),
                 "f"(v.y), "f"(v.z), "f"(v.w), "l"(policy)
                 : "memory");
}
DEVICE float4 load_once(const float *p, u64 policy) {
    float4 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p), "l"(policy));
    return v;
}
// A row of a block, prepared, and what the warps leave of it.
struct Row {
    float qkv[3][DIM], decay[DIM], factor[DIM], update[DIM];
    // Sums over the keys of each warp of a group.
    float seen[GROUPS][DIM], o[GROUPS][DIM];
    float beta, product, room[4][GROUPS];
    // Whether the state behind this row is the one to be kept.
    int save, pad;
};

// Grid (heads, segments). `part`: 0 all rows; 1 the rows in front of the whole chunks, 2 those behind them.
extern "C" __global__ void __launch_bounds__(THREADS, DIM > 64 ? 2 : 1)
    delta(const Segment *segments, const float *proj, int proj_stride, const float *gates, int gates_stride, const u8 *taps,
          int bf16, int taps_pitch, const float *a_log, const float *dt_bias, float bound, const float *weight, float eps,
          const __grid_constant__ Ring ring, int heads, int part, float *out, int out_stride) {
    __shared__ __align__(16) Row rows[GROUPS];
    // What a block needs of its segment; in shared memory, because registers are what the state leaves.
    __shared__ struct {
        Segment s;
        // `base` is the first row of the current block.
        int from, to, save, fold, base;
    } range;
    if (threadIdx.x == 0) {
        const Segment s = segments[blockIdx.y];
        range.s = s;
        range.from = 0;
        range.to = s.rows;
        range.save = s.commit;
        range.fold = s.fold;
        if (part > 0) {
            const Chunks c = chunks_of(s);
            if (part == 1 && c.count > 0) range.to = range.save = c.first;
            if (part == 2) {
                range.from = c.count > 0 ? c.first + CHUNK * c.count : range.to;
                range.fold = 0;
                if (range.from == range.save) range.save = -1;
            }
        }
        range.base = range.from;
    }
    __syncthreads();
    const Segment &s = range.s;
    // No rows and nothing to fold.
    if (part > 0 && range.from == range.to && range.fold == 0) return;
    auto state = [&]() {
        const Place p(thread());
        return ring.state + (u64)(s.slot * heads + blockIdx.x) * DIM * DIM + p.key * DIM + p.column;
    };

    const bool fresh = part < 2 && s.position == s.fold;
    // The state is not what the launch in front of this one writes.
    float S[8][4];
    const float *state_at = state();
    const u64 policy = once();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float4 v = fresh ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : load_once(state_at + i * DIM, policy);
        S[i][0] = v.x;
        S[i][1] = v.y;
        S[i][2] = v.z;
        S[i][3] = v.w;
    }
    auto keep_state = [&]() {
        const u64 policy = once();
        float *to = state();
#pragma unroll
        for (int i = 0; i < 8; i++) store_once(to + i * DIM, make_float4(S[i][0], S[i][1], S[i][2], S[i][3]), policy);
    };
    after_previous();

    for (;;) {
        {
        // Row `b` of a block and channel `d` are this thread's while rows are prepared and finished.
        const int tid = thread(), b = tid / DIM, d = tid % DIM, t = range.base + b;
        const bool active = t < range.to;
        const u64 row = s.first_row + t;
        if (active) {
#pragma unroll 1
            for (int p = 0; p < 3; p++) {
                const int tid = thread(), b = tid / DIM, d = tid % DIM, t = range.base + b, position = s.position + t;
                const int channel = (p * heads + blockIdx.x) * DIM + d;
                const u64 row = s.first_row + t;
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < TAPS; j++) {
                    const int before = TAPS - 1 - j;
                    float x = 0.0f;
                    if (before <= t) x = proj[(row - before) * proj_stride + channel];
                    else if (before <= position)
                        x = ring.columns[(((u64)(s.slot * heads + blockIdx.x) * ring.column_ring + (position - before) % ring.column_ring) * 3 + p) * DIM + d];
                    const u64 at = (u64)channel * taps_pitch + j;
                    const float w = bf16 ? widen(((const u16 *)taps)[at]) : ((const float *)taps)[at];
                    sum = j == 0 ? w * x : fmaf(w, x, sum);
                }
                rows[b].qkv[p][d] = silu(sum);
            }
            const float f = gates[row * gates_stride + blockIdx.x * DIM + d];
            rows[b].decay[d] = expf(bound * sigmoid(expf(a_log[blockIdx.x]) * (f + dt_bias[blockIdx.x * DIM + d])));
            rows[b].factor[d] = weight[d] * sigmoid(gates[row * gates_stride + heads * DIM + blockIdx.x * DIM + d]);
            if (d == 0) {
                rows[b].beta = sigmoid(proj[row * proj_stride + 3 * heads * DIM + blockIdx.x]);
                rows[b].save = t + 1 == range.save;
            }
        }
            const float q = active ? rows[b].qkv[0][d] : 0.0f, k = active ? rows[b].qkv[1][d] : 0.0f;
            const float sums[3] = {warp_sum(q * q), warp_sum(k * k), warp_sum(q * k)};
            if (tid % 32 == 0) {
#pragma unroll
                for (int i = 0; i < 3; i++) rows[b].room[i][tid / 32 % GROUPS] = sums[i];
            }
            __syncthreads();
            float total[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 3; i++)
#pragma unroll
                for (int w = 0; w < GROUPS; w++) total[i] += rows[b].room[i][w];
            const float q_scale = 1.0f / sqrtf((float)DIM) / sqrtf(total[0] + 1e-6f), k_scale = 1.0f / sqrtf(total[1] + 1e-6f);
            if (active) {
                rows[b].qkv[0][d] = q * q_scale;
                rows[b].qkv[1][d] = k * k_scale;
                if (d == 0) rows[b].product = total[2] * (q_scale * k_scale);
            }
        }
        if (range.base == range.from) {
            const Place p(thread());
            for (int at = (int)s.position - range.fold; at < (int)s.position; at++) {
                const float *record = ring.records + ((u64)(s.slot * heads + blockIdx.x) * ring.record_ring + at % ring.record_ring) * 3 * DIM;
                const float4 u = *(const float4 *)(record + 2 * DIM + p.column);
#pragma unroll
                for (int i = 0; i < 8; i += 4) {
                    asm volatile("" ::: "memory");
                    const float4 k4 = *(const float4 *)(record + p.key + i), e4 = *(const float4 *)(record + DIM + p.key + i);
                    const float ks[4] = {k4.x, k4.y, k4.z, k4.w}, es[4] = {e4.x, e4.y, e4.z, e4.w};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        S[i + j][0] = fmaf(ks[j], u.x, S[i + j][0] * es[j]);
                        S[i + j][1] = fmaf(ks[j], u.y, S[i + j][1] * es[j]);
                        S[i + j][2] = fmaf(ks[j], u.z, S[i + j][2] * es[j]);
                        S[i + j][3] = fmaf(ks[j], u.w, S[i + j][3] * es[j]);
                    }
                }
            }
            // The folded rows are committed even when no row of this step is.
            if (range.save == range.from) keep_state();
        }
        __syncthreads();

#pragma unroll 1
        for (int r = 0; r < GROUPS && range.base + r < range.to; r++) {
            Row *now = rows + r;
            const Place p(thread());
            float seen[4] = {0.0f, 0.0f, 0.0f, 0.0f}, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                // One factor at a time: registers are short.
                const float4 e4 = *(const float4 *)(now->decay + p.key + i);
                const float es[4] = {e4.x, e4.y, e4.z, e4.w};
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++) S[i + j][c] *= es[j];
                asm volatile("" ::: "memory");
                const float4 k4 = *(const float4 *)(now->qkv[1] + p.key + i);
                const float ks[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++) seen[c] = fmaf(S[i + j][c], ks[j], seen[c]);
                const float4 q4 = *(const float4 *)(now->qkv[0] + p.key + i);
                const float qs[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++) o[c] = fmaf(S[i + j][c], qs[j], o[c]);
                asm volatile("" ::: "memory");
            }
            now->seen[0][p.own] = scatter_sum(seen, p.lane);
            now->o[0][p.own] = scatter_sum(o, p.lane);
            meet(p.group);
            float u[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int w = 0; w < GROUPS; w++) {
                const float4 part4 = *(const float4 *)(now->seen[w] + p.column);
                u[0] += part4.x;
                u[1] += part4.y;
                u[2] += part4.z;
                u[3] += part4.w;
            }
            const float4 v4 = *(const float4 *)(now->qkv[2] + p.column);
            const float beta = now->beta;
            u[0] = beta * (v4.x - u[0]);
            u[1] = beta * (v4.y - u[1]);
            u[2] = beta * (v4.z - u[2]);
            u[3] = beta * (v4.w - u[3]);
            if (p.key == 0) *(float4 *)(now->update + p.column) = make_float4(u[0], u[1], u[2], u[3]);
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                const float4 k4 = *(const float4 *)(now->qkv[1] + p.key + i);
                const float ks[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++) S[i + j][c] = fmaf(ks[j], u[c], S[i + j][c]);
            }
            if (now->save) keep_state();
        }
        __syncthreads();

        const int tid = thread(), b = tid / DIM, d = tid % DIM, t = range.base + b;
        const bool active = t < range.to;
        const u64 row = s.first_row + t;
        float o = 0.0f;
        if (active) {
#pragma unroll
            for (int w = 0; w < GROUPS; w++) o += rows[b].o[w][d];
            o = fmaf(rows[b].update[d], rows[b].product, o);
        }
        const float square = warp_sum(o * o);
        if (tid % 32 == 0) rows[b].room[3][tid / 32 % GROUPS] = square;
        __syncthreads();
        if (active) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < GROUPS; w++) sum += rows[b].room[3][w];
            out[row * out_stride + blockIdx.x * DIM + d] = o * (1.0f / sqrtf(sum / DIM + eps)) * rows[b].factor[d];
            // The rings are written only here: what they held has been read.
            const int position = s.position + t;
            if (t >= (int)s.commit) {
                float *record = ring.records + ((u64)(s.slot * heads + blockIdx.x) * ring.record_ring + position % ring.record_ring) * 3 * DIM + d;
                record[0] = rows[b].qkv[1][d];
                record[DIM] = rows[b].decay[d];
                record[2 * DIM] = rows[b].update[d];
            }
            if (t >= (int)s.rows - ring.column_ring) {
                float *column_to = ring.columns + ((u64)(s.slot * heads + blockIdx.x) * ring.column_ring + position % ring.column_ring) * 3 * DIM + d;
#pragma unroll
                for (int p = 0; p < 3; p++) column_to[p * DIM] = proj[row * proj_stride + p * heads * DIM + blockIdx.x * DIM + d];
            }
        }
        if (range.base + GROUPS >= range.to) break;
        __syncthreads();
        if (threadIdx.x == 0) range.base += GROUPS;
        __syncthreads();
    }
}
