// Kimi delta attention, one row after the other: convolution, norms, gates, delta rule, gated norm and rings in one kernel.
//
// Maths, for a head with state S [key, value] (DIM x DIM):
//   q, k, v = silu(conv(raw q, k, v));  q <- q / |q| / sqrt(DIM);  k <- k / |k|;  beta = sigmoid(b)
//   e = exp(bound sigmoid(exp(A_log) (f + dt_bias)));   S <- diag(e) S;   u = beta (v - S^T k);   o = S^T q + (k . q) u
//   S <- S + k u^T;   out = o / rms(o) * weight * sigmoid(z)
// The output is taken from the decayed state and u, so that one pass over S gives both sums of a row.
//
// Layout. A slot's layer holds per head: state [DIM, DIM], records [RECORDS, 3, DIM] (key, decay, update), columns
// [COLUMNS, 3, DIM] (raw q, k, v). The state includes the first `commit` rows of a segment; the others leave records, which a
// later step folds in by the same two operations an element in the same order, so that folding gives the bits that the rule
// had. The state is read once and written once a step, however many rows there are.
//
// A block takes the heads of segments in turn, with all their value columns: every thread of the rule has 8 keys x 4 columns of
// S in registers. Warps are DIM / 32 groups of 32 columns; the DIM / 32 warps of a group have the keys between them and meet at
// a named barrier once a row. All sums have one order, whatever the number of rows or segments. Two groups of DIM threads
// prepare rows (their numbers are asked for two rows ahead) and finish them, one thread brings states two deep.
//
// Limits: a head of a sequence moves 128 KiB of state, 1.5 KB of columns and as much of a record a row, so many sequences are
// bound by memory; one row runs at 92 % of the rate of a copy. Three rows are bound by their preparation (82 %).
// Versions, 256 sequences x 3 rows (1 row), 32 heads, on one H200: a block a head that does all by itself 525 us (511);
// pipelined with loads in the preparation 775 (419); numbers asked for ahead 494 (334); short exponentials, remainders by
// multiplication, a block stays with one head 402 (327). Devices without bulk copies take the first one, at the end of the file.
//
// DIM: width of a head (a multiple of 32, at most 128); TAPS: taps of the convolution.
#include "kda.cuh"

// Groups of columns, warps of a group, and rows that are prepared at a time.
#define GROUPS (DIM / 32)
#define THREADS (DIM * GROUPS)

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

// The thread's number, read anew: what follows from it need not be kept in registers meanwhile.
DEVICE int thread() {
    int tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}

DEVICE void meet(int group) {
    if (GROUPS == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(DIM) : "memory");
}

// Sums of four columns over the four key parts of a warp (lane bits 3 and 4); lane l has column 4 (l % 8) + 2 (l / 16) + l / 8 % 2.
DEVICE float scatter_sum(const float (&x)[4], int lane) {
    const bool high = lane & 16, odd = lane & 8;
    const float a = (high ? x[2] : x[0]) + __shfl_xor_sync(FULL, high ? x[0] : x[2], 16);
    const float b = (high ? x[3] : x[1]) + __shfl_xor_sync(FULL, high ? x[1] : x[3], 16);
    return (odd ? b : a) + __shfl_xor_sync(FULL, odd ? a : b, 8);
}

// Of thread `tid`: keys `key` .. key + 7, columns `column` .. column + 3 of S; the warp's group of columns and part of the keys;
// where the sums go that it holds.
struct Place {
    int lane, group, key, column, own;
    __device__ Place(int tid) {
        lane = tid & 31;
        group = (tid >> 5) / GROUPS;
        const int key_warp = (tid >> 5) % GROUPS;
        key = 8 * (4 * key_warp + (lane >> 3));
        column = 32 * group + 4 * (lane & 7);
        own = DIM * key_warp + column + 2 * (lane >> 4) + (lane >> 3 & 1);
    }
};

#if __CUDA_ARCH__ >= 900

// Rows that are prepared or in work, states that are on their way.
#define SLOTS 6
#define BUFFERS 2
#ifndef PRODUCERS
#define PRODUCERS 2
#endif
// Tokens (rows or records) that a group of producers has asked for ahead of the one it prepares, and numbers of each thread.
#define AHEAD 2
#define NUMBERS (3 * TAPS + 3)
#define CONSTANTS (3 * TAPS + 1)
#define FOLD 1
#define SAVE 2
#define FIRST 4
#define FRESH 8
#define END 16

// A row, prepared, and what the warps leave of it; or a record to fold in (key, decay, update).
struct Row {
    float qkv[3][DIM], decay[DIM], factor[DIM], update[DIM], raw[3][DIM];
    // Sums of the output over the keys of each warp of a group.
    float o[GROUPS][DIM];
    float beta, product;
    u32 flags, row, unit;
    // Places in the rings, or -1.
    int record, column, pad;
};

// What is known of a token that has been asked for.
struct Token {
    u32 flags, row, unit;
    int record, column, head;
};

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u64 *b, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
DEVICE void arrive(u64 *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
DEVICE void wait(u64 *b, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(b)), "r"(parity)
            : "memory");
}

// The rows of a segment that a launch does: records to fold, rows [from, to), the state kept behind `save` rows.
struct Work {
    int fold, from, to, save;
    bool fresh;
};
DEVICE Work work_of(const Segment &s, int part) {
    Work w = {(int)s.fold, 0, (int)s.rows, (int)s.commit, s.position == s.fold};
    if (part > 0) {
        const Chunks c = chunks_of(s);
        if (part == 1 && c.count > 0) w.to = w.save = c.first;
        if (part == 2) {
            w.from = c.count > 0 ? c.first + CHUNK * c.count : w.to;
            w.fold = 0;
            w.fresh = false;
            if (w.from == w.save) w.save = -1;
        }
    }
    return w;
}

// The heads of segments of a block in turn, and the records and rows of each.
struct Cursor {
    const Segment *segments;
    u32 heads, magic;
    int part, items, item, index, count, head;
    Segment s;
    Work w;
    __device__ Cursor(const Segment *list, int h, u32 by, int p, int n)
        : segments(list), heads(h), magic(by), part(p), items(n) {
        item = blockIdx.x;
        index = 0;
        find();
    }
    // The first item from here on that has something to do.
    __device__ void find() {
        for (; item < items; item += gridDim.x) {
            const u32 segment = quotient(item, heads, magic);
            head = item - segment * heads;
            s = segments[segment];
            asm volatile("prefetch.global.L1 [%0];" ::"l"(segments + segment + gridDim.x / heads) : "memory");
            w = work_of(s, part);
            count = w.fold + w.to - w.from;
            if (count > 0) return;
        }
    }
    __device__ void next_item() {
        item += gridDim.x;
        find();
    }
    __device__ void advance(int by) {
        index += by;
        while (item < items && index >= count) {
            index -= count;
            next_item();
        }
    }
    __device__ bool more() const { return item < items; }
    __device__ u32 unit() const { return s.slot * heads + head; }
};

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
            barrier_init(full + i, DIM);
            barrier_init(empty + i, GROUPS * GROUPS);
        }
        for (int i = 0; i < BUFFERS; i++) {
            barrier_init(state_full + i, 1);
            barrier_init(state_empty + i, GROUPS * GROUPS);
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
            wait(state_empty + buffer, parity);
            if (at.w.fresh) arrive(state_full + buffer);
            else {
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(state_full + buffer)),
                             "r"(4 * DIM * DIM)
                             : "memory");
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
            if (finish) wait(empty + n % SLOTS, n / SLOTS - 1 & 1);
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
                arrive(full + n % SLOTS);
            } else if (n == total) {
                if (d == 0) place.flags = END;
                arrive(full + n % SLOTS);
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
            wait(full + slot, n / SLOTS & 1);
            Row *now = rows + slot;
            const u32 flags = now->flags;
            if (flags & END) break;
            if (flags & FIRST) {
                const u32 buffer = items % BUFFERS;
                wait(state_full + buffer, items / BUFFERS & 1);
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
                if (lane == 0) arrive(state_empty + buffer);
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
            if (lane == 0) arrive(empty + slot);
        }
    }
}

#else

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
#endif
