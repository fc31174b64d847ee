// The delta rule row after row, pipelined (compute capability 9.0 on): one warp brings states, groups of producers prepare and
// finish rows, the others hold the state; see `kda.cu`.
#include "wgmma.cuh"
#include "async.cuh"
#include "kda_cursor.cuh"

#define ROLES (THREADS + PRODUCERS * DIM + 32)

// A grid of any size takes the heads of all segments in turn. The last warp brings states to shared memory, PRODUCERS groups
// of DIM threads prepare rows and finish them, the others hold the state and do the rule. `part`: 0 all rows; 1 the rows in
// front of the whole chunks, 2 those behind them.
extern "C" __global__ void __launch_bounds__(ROLES, 1)
    delta(const Segment *segments, int count, const float *proj, int proj_stride, const float *gates, int gates_stride,
          const u8 *taps, int bf16, int taps_pitch, const float *a_log, const float *dt_bias, float bound,
          const float *weight, float eps, const __grid_constant__ Ring ring, int heads, int part, float *out, int out_stride) {
    extern __shared__ __align__(128) float dynamic[];
    float *states = dynamic, *seen_sums = states + BUFFERS * DIM * DIM;
    float *coming = seen_sums + 2 * GROUPS * DIM;
    float *constants = coming + PRODUCERS * AHEAD * NUMBERS * DIM;
    Row *rows = (Row *)(constants + PRODUCERS * CONSTANTS * DIM);
    __shared__ __align__(8) u64 full[SLOTS], empty[SLOTS], state_full[BUFFERS], state_empty[BUFFERS];
    __shared__ float room[PRODUCERS][2][4][GROUPS];
    __shared__ Token tokens[PRODUCERS][AHEAD + 1];
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(shared_address(full + i), DIM);
            barrier_init(shared_address(empty + i), GROUPS * GROUPS);
        }
        for (int i = 0; i < BUFFERS; i++) {
            barrier_init(shared_address(state_full + i), 1);
            barrier_init(shared_address(state_empty + i), GROUPS * GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_begin();

    if (threadIdx.x >= THREADS + PRODUCERS * DIM) {
        // States come early: they are not what the launch in front of this one writes.
        if (threadIdx.x % 32 != 0) return;
        Cursor at(segments, heads, ring.head_magic, part, count * heads);
        const u64 policy = once();
        u32 buffer = 0, parity = 1;
        for (; at.more(); at.next_item()) {
            barrier_wait(shared_address(state_empty + buffer), parity);
            if (at.w.fresh) barrier_arrive(shared_address(state_full + buffer));
            else {
                barrier_expect(shared_address(state_full + buffer), 4 * DIM * DIM);
                asm volatile(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                        shared_address(states + buffer * DIM * DIM)),
                    "l"(ring.state + (u64)at.unit() * DIM * DIM), "r"(4 * DIM * DIM), "r"(shared_address(state_full + buffer)),
                    "l"(policy)
                    : "memory");
            }
            if (++buffer == BUFFERS) {
                buffer = 0;
                parity ^= 1;
            }
        }
    } else if (threadIdx.x >= THREADS) {
        const int tid = threadIdx.x - THREADS, producer = tid / DIM, d = tid % DIM, warp = tid / 32 % GROUPS;
        Cursor at(segments, heads, ring.head_magic, part, count * heads);
        at.advance(producer);
        // Token n of the block (a record or a row) is in slot n % SLOTS and this group's when n % PRODUCERS is its number. Its
        // numbers come to places of this thread alone, so that nobody has to be waited for.
        int total = 1 << 30, asked = producer;
        const u32 own = shared_address(coming + producer * AHEAD * NUMBERS * DIM + d);
        auto number = [&](int turn, int i) { return own + 4 * DIM * (turn % AHEAD * NUMBERS + i); };
        auto bring = [&](u32 to, const float *from) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
        };
        auto get = [&](int turn, int i) { return coming[(producer * AHEAD + turn % AHEAD) * NUMBERS * DIM + i * DIM + d]; };
        // Asks for the cursor's token and moves on.
        auto ask = [&]() {
            const int turn = asked / PRODUCERS;
            if (at.more()) {
                const int head = at.head, t = at.w.from + at.index - at.w.fold, position = at.s.position + t;
                const u32 unit = at.unit(), row = at.s.first_row + t;
                const bool fold = at.index < at.w.fold;
                const float *here = proj + (u64)row * proj_stride + head * DIM + d;
                const float *columns = ring.columns + (u64)unit * ring.column_ring * 3 * DIM + d;
                if (fold) {
                    const int p = (int)at.s.position - at.w.fold + at.index;
                    const float *record = ring.records + ((u64)unit * ring.record_ring + record_at(ring, p)) * 3 * DIM + d;
#pragma unroll
                    for (int i = 0; i < 3; i++) bring(number(turn, i), record + i * DIM);
                } else {
#pragma unroll
                    for (int before = TAPS - 1; before >= 0; before--) {
                        const float *from = here - (u64)before * proj_stride;
                        int step = heads * DIM;
                        if (before > t) {
                            from = columns + (u64)(column_at(ring, position - before)) * 3 * DIM;
                            step = DIM;
                        }
#pragma unroll
                        for (int p = 0; p < 3; p++) {
                            const int i = p * TAPS + TAPS - 1 - before;
                            if (before <= position) bring(number(turn, i), from + p * step);
                            else asm volatile("st.shared.f32 [%0], %1;" ::"r"(number(turn, i)), "f"(0.0f) : "memory");
                        }
                    }
                    const float *gate = gates + (u64)row * gates_stride + head * DIM + d;
                    bring(number(turn, 3 * TAPS), gate);
                    bring(number(turn, 3 * TAPS + 1), gate + heads * DIM);
                    bring(number(turn, 3 * TAPS + 2), proj + (u64)row * proj_stride + 3 * heads * DIM + head);
                }
                if (d == 0) {
                    Token &token = tokens[producer][turn % (AHEAD + 1)];
                    token.row = row;
                    token.unit = unit;
                    token.head = head;
                    token.record = !fold && t >= (int)at.s.commit ? record_at(ring, position) : -1;
                    token.column = !fold && t >= (int)at.s.rows - ring.column_ring ? column_at(ring, position) : -1;
                    // Folded rows are committed even when no row of this step is.
                    const bool save = fold ? at.index + 1 == at.w.fold && at.w.save == at.w.from : t + 1 == at.w.save;
                    token.flags = (fold ? FOLD : 0) | (save ? SAVE : 0) | (at.index == 0 ? FIRST : 0) | (at.w.fresh ? FRESH : 0);
                }
                at.advance(PRODUCERS);
                asked += PRODUCERS;
            } else if (total == 1 << 30) total = asked - at.index;
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
        auto group_sync = [&]() { asm volatile("bar.sync %0, %1;" ::"r"(1 + GROUPS + producer), "n"(DIM) : "memory"); };
        after_previous();
#pragma unroll
        for (int i = 0; i < AHEAD; i++) ask();
        group_sync();

        int head = -1;
        float rate = 0.0f;
        // Taps and dt_bias of the head.
        float *of_head = constants + producer * CONSTANTS * DIM + d;
        const float scale = weight[d];
        for (int n = producer; n - SLOTS < total; n += PRODUCERS) {
            const int turn = n / PRODUCERS;
            const bool more = n < total, finish = n >= SLOTS && n - SLOTS < total;
            Row &place = rows[n % SLOTS];
            const Token token = tokens[producer][turn % (AHEAD + 1)];
            const bool fold = token.flags & FOLD;
            float v[3] = {0.0f, 0.0f, 0.0f}, raw[3] = {0.0f, 0.0f, 0.0f}, e = 0.0f, factor = 0.0f, beta = 0.0f;
            asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
            if (more && fold) {
                v[1] = get(turn, 0);
                e = get(turn, 1);
                factor = get(turn, 2);
            } else if (more) {
                if (token.head != head) {
                    head = token.head;
#pragma unroll
                    for (int p = 0; p < 3; p++)
#pragma unroll
                        for (int j = 0; j < TAPS; j++) {
                            const u64 i = (u64)((p * heads + head) * DIM + d) * taps_pitch + j;
                            of_head[(p * TAPS + j) * DIM] = bf16 ? widen(((const u16 *)taps)[i]) : ((const float *)taps)[i];
                        }
                    rate = expf(a_log[head]);
                    of_head[3 * TAPS * DIM] = dt_bias[head * DIM + d];
                }
#pragma unroll
                for (int p = 0; p < 3; p++) {
                    float sum = 0.0f;
#pragma unroll
                    for (int j = 0; j < TAPS; j++) {
                        const float w = of_head[(p * TAPS + j) * DIM];
                        raw[p] = get(turn, p * TAPS + j);
                        sum = j == 0 ? w * raw[p] : fmaf(w, raw[p], sum);
                    }
                    v[p] = sum * quick_sigmoid(sum);
                }
                e = quick_exp(bound * quick_sigmoid(rate * (get(turn, 3 * TAPS) + of_head[3 * TAPS * DIM])));
                factor = scale * quick_sigmoid(get(turn, 3 * TAPS + 1));
                beta = get(turn, 3 * TAPS + 2);
            }
            if (finish) barrier_wait(shared_address(empty + n % SLOTS), n / SLOTS - 1 & 1);
            const bool output = finish && !(place.flags & FOLD);
            // The slot is written anew behind the barrier below.
            const u32 old_row = place.row, old_unit = place.unit;
            const int old_record = place.record, old_column = place.column;
            float o = 0.0f;
            if (output) {
#pragma unroll
                for (int i = 0; i < GROUPS; i++) o += place.o[i][d];
                o = fmaf(place.update[d], place.product, o);
            }
            const float sums[4] = {warp_sum(v[0] * v[0]), warp_sum(v[1] * v[1]), warp_sum(v[0] * v[1]), warp_sum(o * o)};
            float(*mine)[GROUPS] = room[producer][turn & 1];
            if (tid % 32 == 0) {
#pragma unroll
                for (int i = 0; i < 4; i++) mine[i][warp] = sums[i];
            }
            group_sync();
            float total_of[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int k = 0; k < GROUPS; k++) total_of[i] += mine[i][k];
            if (output) {
                out[(u64)old_row * out_stride + remainder(old_unit, heads, ring.head_magic) * DIM + d] =
                    o * quick_inverse_root(total_of[3] * (1.0f / DIM) + eps) * place.factor[d];
                // The rings are written only now: what they held has been read.
                if (old_record >= 0) {
                    float *record = ring.records + ((u64)old_unit * ring.record_ring + old_record) * 3 * DIM + d;
                    record[0] = place.qkv[1][d];
                    record[DIM] = place.decay[d];
                    record[2 * DIM] = place.update[d];
                }
                if (old_column >= 0) {
                    float *column = ring.columns + ((u64)old_unit * ring.column_ring + old_column) * 3 * DIM + d;
#pragma unroll
                    for (int p = 0; p < 3; p++) column[p * DIM] = place.raw[p][d];
                }
            }
            if (more) {
                const float q_scale = (1.0f / sqrtf((float)DIM)) * quick_inverse_root(total_of[0] + 1e-6f);
                const float k_scale = quick_inverse_root(total_of[1] + 1e-6f);
                place.qkv[0][d] = v[0] * q_scale;
                place.qkv[1][d] = fold ? v[1] : v[1] * k_scale;
                place.qkv[2][d] = v[2];
#pragma unroll
                for (int p = 0; p < 3; p++) place.raw[p][d] = raw[p];
                place.decay[d] = e;
                if (fold) place.update[d] = factor;
                else place.factor[d] = factor;
                if (d == 0) {
                    place.beta = quick_sigmoid(beta);
                    place.product = total_of[2] * (q_scale * k_scale);
                    place.flags = token.flags;
                    place.row = token.row;
                    place.unit = token.unit;
                    place.record = token.record;
                    place.column = token.column;
                }
                barrier_arrive(shared_address(full + n % SLOTS));
            } else if (n == total) {
                if (d == 0) place.flags = END;
                barrier_arrive(shared_address(full + n % SLOTS));
            }
            // The places of this token are free for another.
            ask();
        }
    } else {
        const Place p(threadIdx.x);
        const int lane = threadIdx.x % 32;
        float S[8][4];
        u32 items = 0;
#pragma unroll 1
        for (u32 n = 0;; n++) {
            const u32 slot = n % SLOTS;
            barrier_wait(shared_address(full + slot), n / SLOTS & 1);
            Row *now = rows + slot;
            const u32 flags = now->flags;
            if (flags & END) break;
            if (flags & FIRST) {
                const u32 buffer = items % BUFFERS;
                barrier_wait(shared_address(state_full + buffer), items / BUFFERS & 1);
                items++;
                const float *from = states + buffer * DIM * DIM + p.key * DIM + p.column;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float4 v = flags & FRESH ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *(const float4 *)(from + i * DIM);
                    S[i][0] = v.x;
                    S[i][1] = v.y;
                    S[i][2] = v.z;
                    S[i][3] = v.w;
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(shared_address(state_empty + buffer));
            }
            float u[4];
            if (flags & FOLD) {
                // Rows in a row alternate between two places of sums; whoever skips one has to be waited for.
                meet(p.group);
                const float4 u4 = *(const float4 *)(now->update + p.column);
                u[0] = u4.x;
                u[1] = u4.y;
                u[2] = u4.z;
                u[3] = u4.w;
#pragma unroll
                for (int i = 0; i < 8; i += 4) {
                    const float4 e4 = *(const float4 *)(now->decay + p.key + i);
                    const float es[4] = {e4.x, e4.y, e4.z, e4.w};
#pragma unroll
                    for (int j = 0; j < 4; j++)
#pragma unroll
                        for (int c = 0; c < 4; c++) S[i + j][c] *= es[j];
                }
            } else {
                float seen[4] = {0.0f, 0.0f, 0.0f, 0.0f}, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < 8; i += 4) {
                    const float4 e4 = *(const float4 *)(now->decay + p.key + i);
                    const float4 k4 = *(const float4 *)(now->qkv[1] + p.key + i), q4 = *(const float4 *)(now->qkv[0] + p.key + i);
                    const float es[4] = {e4.x, e4.y, e4.z, e4.w}, ks[4] = {k4.x, k4.y, k4.z, k4.w};
                    const float qs[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
                    for (int j = 0; j < 4; j++)
#pragma unroll
                        for (int c = 0; c < 4; c++) {
                            S[i + j][c] *= es[j];
                            seen[c] = fmaf(S[i + j][c], ks[j], seen[c]);
                            o[c] = fmaf(S[i + j][c], qs[j], o[c]);
                        }
                }
                float *sums = seen_sums + (n & 1) * GROUPS * DIM;
                const int own = Place(thread()).own;
                sums[own] = scatter_sum(seen, lane);
                now->o[0][own] = scatter_sum(o, lane);
                meet(p.group);
#pragma unroll
                for (int c = 0; c < 4; c++) u[c] = 0.0f;
#pragma unroll
                for (int w = 0; w < GROUPS; w++) {
                    const float4 sum4 = *(const float4 *)(sums + w * DIM + p.column);
                    u[0] += sum4.x;
                    u[1] += sum4.y;
                    u[2] += sum4.z;
                    u[3] += sum4.w;
                }
                const float4 v4 = *(const float4 *)(now->qkv[2] + p.column);
                const float beta = now->beta;
                u[0] = beta * (v4.x - u[0]);
                u[1] = beta * (v4.y - u[1]);
                u[2] = beta * (v4.z - u[2]);
                u[3] = beta * (v4.w - u[3]);
                if (p.key == 0) *(float4 *)(now->update + p.column) = make_float4(u[0], u[1], u[2], u[3]);
            }
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                const float4 k4 = *(const float4 *)(now->qkv[1] + p.key + i);
                const float ks[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++) S[i + j][c] = fmaf(ks[j], u[c], S[i + j][c]);
            }
            if (flags & SAVE) {
                const u64 policy = once();
                float *to = ring.state + (u64)now->unit * DIM * DIM + p.key * DIM + p.column;
#pragma unroll
                for (int i = 0; i < 8; i++) store_once(to + i * DIM, make_float4(S[i][0], S[i][1], S[i][2], S[i][3]), policy);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(empty + slot));
        }
    }
}
