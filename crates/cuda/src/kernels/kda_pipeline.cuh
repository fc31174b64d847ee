// The delta rule row after row, pipelined (compute capability 9.0 on): one warp brings states, one what rows need, two groups of
// producers prepare and finish batches of rows in turn, the others hold the state; see `kda.cu`.
#include "wgmma.cuh"
#include "async.cuh"
#include "kda_cursor.cuh"

#define ROLES (THREADS + PRODUCERS * DIM + 64)

// What one thread of a group of producers makes of its channel of a batch, and the sums over its warp of q^2, k^2 and q k.
struct Prepared {
    float v[BATCH][3], decay[BATCH], factor[BATCH], sums[BATCH][3];
};
template <int N>
DEVICE void prepare(Prepared &x, const Coming &from, const float *of_head, int d, int missing, float rate, float bound, float scale) {
#pragma unroll
    for (int p = 0; p < 3; p++) {
        float w[TAPS], raw[TAPS - 1 + N];
#pragma unroll
        for (int j = 0; j < TAPS; j++) w[j] = of_head[(p * TAPS + j) * DIM];
#pragma unroll
        for (int j = 0; j < TAPS - 1 + N; j++) raw[j] = j < TAPS - 1 && j < missing ? 0.0f : from.raw[j][p][d];
#pragma unroll
        for (int r = 0; r < N; r++) {
            float sum = w[0] * raw[r];
#pragma unroll
            for (int j = 1; j < TAPS; j++) sum = fmaf(w[j], raw[r + j], sum);
            x.v[r][p] = sum * quick_sigmoid(sum);
        }
    }
#pragma unroll
    for (int r = 0; r < N; r++) {
        x.decay[r] = quick_exp(bound * quick_sigmoid(rate * (from.gates[r][0][d] + of_head[3 * TAPS * DIM])));
        x.factor[r] = scale * quick_sigmoid(from.gates[r][1][d]);
        x.sums[r][0] = warp_sum(__fmul_rn(x.v[r][0], x.v[r][0]));
        x.sums[r][1] = warp_sum(__fmul_rn(x.v[r][1], x.v[r][1]));
        x.sums[r][2] = warp_sum(__fmul_rn(x.v[r][0], x.v[r][1]));
    }
}
// Outputs of the first rows of a batch before their norm, and sums over the warp of their squares.
template <int N>
DEVICE void outputs(float (&o)[BATCH], float (&squares)[BATCH], const Batch &batch, int d) {
#pragma unroll
    for (int r = 0; r < N; r++) {
        o[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) o[r] += batch.rows[r].o[i][d];
        o[r] = fmaf(batch.rows[r].update[d], batch.product[r], o[r]);
        squares[r] = warp_sum(__fmul_rn(o[r], o[r]));
    }
}

// A grid of any size takes the heads of all segments in turn. The last warps bring states and what rows need to shared memory, PRODUCERS groups
// of DIM threads prepare rows and finish them, the others hold the state and do the rule. `part`: 0 all rows; 1 the rows in
// front of the whole chunks, 2 those behind them.
extern "C" __global__ void __launch_bounds__(ROLES, 1)
    delta(const Segment *segments, int count, const float *proj, int proj_stride, const float *gates, int gates_stride,
          const u8 *taps, int bf16, int taps_pitch, const float *a_log, const float *dt_bias, float bound,
          const float *weight, float eps, const __grid_constant__ Ring ring, int heads, int part, float *out, int out_stride) {
    extern __shared__ __align__(128) float dynamic[];
    float *states = dynamic, *seen_sums = states + BUFFERS * DIM * DIM, *constants = seen_sums + 2 * GROUPS * DIM;
    Coming *coming = (Coming *)(constants + PRODUCERS * CONSTANTS * DIM);
    Batch *batches = (Batch *)(coming + PRODUCERS);
    __shared__ __align__(8) u64 here[PRODUCERS], used[PRODUCERS], full[PRODUCERS], done[PRODUCERS], state_full[BUFFERS], state_empty[BUFFERS];
    __shared__ float room[PRODUCERS][2][4 * BATCH][GROUPS];
    if (threadIdx.x == 0) {
        for (int i = 0; i < PRODUCERS; i++) {
            barrier_init(shared_address(here + i), 1);
            barrier_init(shared_address(used + i), GROUPS);
            barrier_init(shared_address(full + i), DIM);
            barrier_init(shared_address(done + i), GROUPS * GROUPS);
        }
        for (int i = 0; i < BUFFERS; i++) {
            barrier_init(shared_address(state_full + i), 1);
            barrier_init(shared_address(state_empty + i), GROUPS * GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_begin();

    if (threadIdx.x >= THREADS + PRODUCERS * DIM + 32) {
        // States come early: they are not what the launch in front of this one writes.
        if (threadIdx.x % 32 != 0) return;
        Cursor at(segments, heads, ring.head_magic, part, count * heads);
        u32 buffer = 0, parity = 1;
        for (; at.more(); at.next_item()) {
            barrier_wait(shared_address(state_empty + buffer), parity);
            if (at.w.fresh) barrier_arrive(shared_address(state_full + buffer));
            else {
                barrier_expect(shared_address(state_full + buffer), 4 * DIM * DIM);
                copy_bulk(shared_address(states + buffer * DIM * DIM), ring.state + (u64)at.unit() * DIM * DIM, 4 * DIM * DIM,
                          shared_address(state_full + buffer));
            }
            if (++buffer == BUFFERS) {
                buffer = 0;
                parity ^= 1;
            }
        }
    } else if (threadIdx.x >= THREADS + PRODUCERS * DIM) {
        const int lane = threadIdx.x % 32;
        Cursor at(segments, heads, ring.head_magic, part, count * heads);
        // Whether 16 bytes may be copied at a time.
        const bool aligned = (((u64)proj | (u64)gates) & 15) == 0 && (proj_stride & 3) == 0 && (gates_stride & 3) == 0;
        after_previous();
        // Batch n is group n % PRODUCERS's; behind the last one each of them is told that there are no more.
        for (int n = 0, ends = 0; ends < PRODUCERS; n++) {
            const int group = n % PRODUCERS;
            Coming &to = coming[group];
            if (n >= PRODUCERS) {
                barrier_wait(shared_address(used + group), n / PRODUCERS - 1 & 1);
                // The columns of the ring are written only now: what they held has been read.
                const int row = lane;
                if (row < to.plan.rows && row >= to.plan.columns) {
                    float *column = ring.columns + ((u64)to.plan.unit * ring.column_ring + column_at(ring, to.plan.position + row)) * 3 * DIM;
                    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(column),
                                 "r"(shared_address(to.raw[TAPS - 1 + row])), "r"(3 * DIM * 4)
                                 : "memory");
                }
                asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
                __syncwarp();
            }
            const u32 arrived = shared_address(here + group);
            if (!at.more()) {
                ends++;
                if (lane == 0) {
                    to.plan.flags = END;
                    to.plan.rows = to.plan.folds = 0;
                    barrier_arrive(arrived);
                }
                continue;
            }
            const Plan plan = at.plan(ring);
            const float *row = proj + (u64)plan.row * proj_stride + plan.head * DIM;
            const float *gate = gates + (u64)plan.row * gates_stride + plan.head * DIM;
            // Piece `i` of what comes: where from, where to, and its length; none where nothing has to come.
            auto piece = [&](int i, const float *&from, float *&place) {
                if (i < 3 * WINDOW) {
                    const int w = i / 3, p = i - 3 * w, before = TAPS - 1 - w;
                    place = to.raw[w][p];
                    if (w < plan.missing || w >= TAPS - 1 + plan.rows) return 0;
                    if (before > plan.first)
                        from = ring.columns + ((u64)plan.unit * ring.column_ring + column_at(ring, plan.position - before)) * 3 * DIM + p * DIM;
                    else from = row - (long long)before * proj_stride + p * heads * DIM;
                    return plan.rows > 0 ? DIM : 0;
                }
                i -= 3 * WINDOW;
                if (i < 2 * BATCH) {
                    from = gate + (u64)(i >> 1) * gates_stride + (i & 1) * heads * DIM;
                    place = to.gates[i >> 1][i & 1];
                    return i >> 1 < plan.rows ? DIM : 0;
                }
                i -= 2 * BATCH;
                if (i < BATCH) {
                    from = proj + (u64)(plan.row + i) * proj_stride + 3 * heads * DIM + (plan.head & ~3);
                    place = to.beta[i];
                    return i < plan.rows ? 4 : 0;
                }
                from = ring.records + ((u64)plan.unit * ring.record_ring + record_at(ring, plan.position - 1)) * 3 * DIM;
                place = to.record[0];
                return i == BATCH && plan.folds ? 3 * DIM : 0;
            };
            const float *from = proj;
            float *place = 0;
            if (lane == 0) to.plan = plan;
            if (aligned) {
                if (lane == 0) {
                    int floats = plan.folds * 3 * DIM;
                    if (plan.rows > 0) floats += (TAPS - 1 + plan.rows - max_of(plan.missing, 0)) * 3 * DIM + plan.rows * (2 * DIM + 4);
                    barrier_expect(arrived, 4 * floats);
                }
                __syncwarp();
                for (int i = lane; i < 3 * WINDOW + 3 * BATCH + 1; i += 32) {
                    const int floats = piece(i, from, place);
                    if (floats > 0) copy_bulk(shared_address(place), from, 4 * floats, arrived);
                }
            } else {
                for (int i = 0; i < 3 * WINDOW + 3 * BATCH + 1; i++) {
                    const int floats = piece(i, from, place);
                    if (floats == 4) {
                        if (lane == 0) place[plan.head & 3] = from[plan.head & 3];
                    } else {
                        for (int j = lane; j < floats; j += 32) place[j] = from[j];
                    }
                }
                shared_written();
                __syncwarp();
                if (lane == 0) barrier_arrive(arrived);
            }
            at.advance(plan.folds + plan.rows);
        }
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    } else if (threadIdx.x >= THREADS) {
        const int tid = threadIdx.x - THREADS, producer = tid / DIM, d = tid % DIM, warp = tid / 32 % GROUPS, lane = tid % 32;
        const Coming &from = coming[producer];
        Batch &batch = batches[producer];
        // Taps and dt_bias of the head.
        float *of_head = constants + producer * CONSTANTS * DIM + d;
        const float scale = weight[d];
        int head = -1;
        float rate = 0.0f;
        // Batches of this group in turn: the one in front is finished when the next one has been read.
        for (u32 turn = 0;; turn++) {
            barrier_wait(shared_address(here + producer), turn & 1);
            const u32 flags = from.plan.flags;
            const int rows = from.plan.rows;
            if (rows > 0 && from.plan.head != head) {
                head = from.plan.head;
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
            Prepared x;
            if (rows > 1) prepare<BATCH>(x, from, of_head, d, from.plan.missing, rate, bound, scale);
            else if (rows == 1) prepare<1>(x, from, of_head, d, from.plan.missing, rate, bound, scale);
            float record[3], beta = 0.0f;
            const u32 word = d < PLAN_WORDS ? ((const u32 *)&from.plan)[d] : 0;
            const bool fold = from.plan.folds > 0;
#pragma unroll
            for (int i = 0; i < 3; i++) record[i] = from.record[i][d];
            if (d < BATCH) beta = from.beta[d][from.plan.head & 3];
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(used + producer));

            // What is known of the batch in front; it is overwritten behind the barrier below.
            int old_rows = 0, old_head = 0, old_keep = 0, old_position = 0;
            u32 old_row = 0, old_unit = 0;
            if (turn > 0) {
                barrier_wait(shared_address(done + producer), turn - 1 & 1);
                const Plan &old = batch.plan;
                old_rows = old.rows;
                old_head = old.head;
                old_keep = old.keep;
                old_position = old.position;
                old_row = old.row;
                old_unit = old.unit;
            }
            float o[BATCH], squares[BATCH];
            if (old_rows > 1) outputs<BATCH>(o, squares, batch, d);
            else if (old_rows == 1) outputs<1>(o, squares, batch, d);
            float(*mine)[GROUPS] = room[producer][turn & 1];
            if (lane == 0) {
#pragma unroll
                for (int r = 0; r < BATCH; r++) {
#pragma unroll
                    for (int i = 0; i < 3; i++)
                        if (r < rows) mine[4 * r + i][warp] = x.sums[r][i];
                    if (r < old_rows) mine[4 * r + 3][warp] = squares[r];
                }
            }
            asm volatile("bar.sync %0, %1;" ::"r"(1 + GROUPS + producer), "n"(DIM) : "memory");
            auto total = [&](int i) {
                float sum = 0.0f;
#pragma unroll
                for (int k = 0; k < GROUPS; k++) sum += mine[i][k];
                return sum;
            };
#pragma unroll
            for (int r = 0; r < BATCH; r++)
                if (r < old_rows) {
                    const Row &place = batch.rows[r];
                    out[(u64)(old_row + r) * out_stride + old_head * DIM + d] =
                        o[r] * quick_inverse_root(total(4 * r + 3) * (1.0f / DIM) + eps) * place.factor[d];
                    // The ring is written only now: what it held has been read.
                    if (r >= old_keep) {
                        float *left = ring.records + ((u64)old_unit * ring.record_ring + record_at(ring, old_position + r)) * 3 * DIM + d;
                        left[0] = place.k[d];
                        left[DIM] = place.decay[d];
                        left[2 * DIM] = place.update[d];
                    }
                }
#pragma unroll
            for (int r = 0; r < BATCH; r++)
                if (r < rows) {
                    Row &place = batch.rows[r];
                    const float q_scale = (1.0f / sqrtf((float)DIM)) * quick_inverse_root(total(4 * r) + 1e-6f);
                    const float k_scale = quick_inverse_root(total(4 * r + 1) + 1e-6f);
                    place.q[d] = x.v[r][0] * q_scale;
                    place.k[d] = x.v[r][1] * k_scale;
                    place.v[d] = x.v[r][2];
                    place.decay[d] = x.decay[r];
                    place.factor[d] = x.factor[r];
                    if (d == 0) batch.product[r] = total(4 * r + 2) * (q_scale * k_scale);
                }
            if (fold) {
#pragma unroll
                for (int i = 0; i < 3; i++) batch.record[i][d] = record[i];
            }
            if (d < PLAN_WORDS) ((u32 *)&batch.plan)[d] = word;
            if (d < BATCH) batch.beta[d] = quick_sigmoid(beta);
            barrier_arrive(shared_address(full + producer));
            if (flags & END) break;
        }
    } else {
        const Place p(threadIdx.x);
        const int lane = threadIdx.x % 32;
        float S[8][4];
        u32 items = 0, rows = 0;
#pragma unroll 1
        for (u32 n = 0;; n++) {
            const u32 slot = n % PRODUCERS;
            barrier_wait(shared_address(full + slot), n / PRODUCERS & 1);
            Batch *batch = batches + slot;
            const u32 flags = batch->plan.flags;
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
            // A record, then rows.
            const int count = batch->plan.rows, save = batch->plan.save;
#pragma unroll 1
            for (int token = batch->plan.folds ? -1 : 0; token < count; token++) {
                Row *now = batch->rows + token;
                const float *keys = now->k;
                float u[4];
                if (token < 0) {
                    keys = batch->record[0];
                    const float4 u4 = *(const float4 *)(batch->record[2] + p.column);
                    u[0] = u4.x;
                    u[1] = u4.y;
                    u[2] = u4.z;
                    u[3] = u4.w;
#pragma unroll
                    for (int i = 0; i < 8; i += 4) {
                        const float4 e4 = *(const float4 *)(batch->record[1] + p.key + i);
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
                        const float4 k4 = *(const float4 *)(now->k + p.key + i), q4 = *(const float4 *)(now->q + p.key + i);
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
                    float *sums = seen_sums + (rows++ & 1) * GROUPS * DIM;
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
                    const float4 v4 = *(const float4 *)(now->v + p.column);
                    const float beta = batch->beta[token];
                    u[0] = beta * (v4.x - u[0]);
                    u[1] = beta * (v4.y - u[1]);
                    u[2] = beta * (v4.z - u[2]);
                    u[3] = beta * (v4.w - u[3]);
                    if (p.key == 0) *(float4 *)(now->update + p.column) = make_float4(u[0], u[1], u[2], u[3]);
                }
#pragma unroll
                for (int i = 0; i < 8; i += 4) {
                    const float4 k4 = *(const float4 *)(keys + p.key + i);
                    const float ks[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
                    for (int j = 0; j < 4; j++)
#pragma unroll
                        for (int c = 0; c < 4; c++) S[i + j][c] = fmaf(ks[j], u[c], S[i + j][c]);
                }
                if (token + 1 == save) {
                    float *to = ring.state + (u64)batch->plan.unit * DIM * DIM + p.key * DIM + p.column;
#pragma unroll
                    for (int i = 0; i < 8; i++) *(float4 *)(to + i * DIM) = make_float4(S[i][0], S[i][1], S[i][2], S[i][3]);
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(done + slot));
        }
    }
}
