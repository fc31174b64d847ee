// Sparse attention, the part that writes the cache and chooses tokens.
//
// A row's normed index key and its pool gate lie in a scratch row; of positions before the segment they come from the slot's
// ring. A pool's key is K[d] = sum_j softmax_j(gate_j[d] + ape_j[d]) key_j[d]. Scores are true f32, summed over heads in
// ascending order; the best pools are found by a radix selection on ordered bits, ties going to the lower pool. With caches of
// halves index.cu scores and chooses.
// PAGE: tokens a page; KPOOL, DIM, HEADS: the indexer's (DIM a multiple of 32, at most 256).
#include "common.cuh"

#define POOLS (PAGE / KPOOL)
#define TILE 32
#define SHORT 4
// Larger pools leave no registers to ask for their rows ahead.
#define AHEAD (KPOOL <= 4)

// What writing a step's rows takes.
struct Rows {
    const float *proj, *q_weight, *kv_weight, *k_weight, *k_bias;
    float *q_residual;
    void *latents;
    int proj_stride, q_lora, latent, indexer, q_stride, half;
    float q_eps, kv_eps, k_eps;
};

// A thread's part of the weights, which may be asked for before the launch in front has ended: of the first 256 times QUERY columns of the
// residual and 256 times LATENTS of the latent. Wider ones are read when they are wanted.
#define QUERY 6
#define LATENTS 2
struct Held {
    float q[QUERY], kv[LATENTS], k, bias;
};

DEVICE Held hold(const Rows &p, int thread) {
    Held w;
#pragma unroll
    for (int j = 0; j < QUERY; j++) w.q[j] = thread + 256 * j < p.q_lora ? p.q_weight[thread + 256 * j] : 0.0f;
#pragma unroll
    for (int j = 0; j < LATENTS; j++) w.kv[j] = thread + 256 * j < p.latent ? p.kv_weight[thread + 256 * j] : 0.0f;
    w.k = p.indexer && thread < DIM ? p.k_weight[thread] : 0.0f;
    w.bias = p.indexer && thread < DIM ? p.k_bias[thread] : 0.0f;
    return w;
}

// Norms of a row's query residual and latent (to its place in the cache), by 256 threads that `sum` adds over; the index key's
// LayerNorm to `key`.
template <class Sum>
DEVICE void write_row(const Rows &p, const Held &w, int row, u64 place, float *key, int thread, Sum sum) {
    const float *q = p.proj + (u64)row * p.proj_stride, *c = q + p.q_lora, *k = c + p.latent;
    float x[QUERY], y[LATENTS];
#pragma unroll
    for (int j = 0; j < QUERY; j++) x[j] = thread + 256 * j < p.q_lora ? q[thread + 256 * j] : 0.0f;
#pragma unroll
    for (int j = 0; j < LATENTS; j++) y[j] = thread + 256 * j < p.latent ? c[thread + 256 * j] : 0.0f;
    const float own = p.indexer && thread < DIM ? k[thread] : 0.0f;
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < QUERY; j++) square = fmaf(x[j], x[j], square);
    for (int i = thread + 256 * QUERY; i < p.q_lora; i += 256) square = fmaf(q[i], q[i], square);
    float scale = 1.0f / sqrtf(sum(square) / p.q_lora + p.q_eps);
    float *residual = p.q_residual + (u64)row * p.q_stride;
#pragma unroll
    for (int j = 0; j < QUERY; j++)
        if (thread + 256 * j < p.q_lora) residual[thread + 256 * j] = x[j] * scale * w.q[j];
    for (int i = thread + 256 * QUERY; i < p.q_lora; i += 256) residual[i] = q[i] * scale * p.q_weight[i];

    square = 0.0f;
#pragma unroll
    for (int j = 0; j < LATENTS; j++) square = fmaf(y[j], y[j], square);
    for (int i = thread + 256 * LATENTS; i < p.latent; i += 256) square = fmaf(c[i], c[i], square);
    scale = 1.0f / sqrtf(sum(square) / p.latent + p.kv_eps);
    auto write = [&](int i, float v) {
        if (p.half)
            ((u16 *)p.latents)[place * p.latent + i] = narrow_half(v, 0.0f);
        else
            ((float *)p.latents)[place * p.latent + i] = v;
    };
#pragma unroll
    for (int j = 0; j < LATENTS; j++)
        if (thread + 256 * j < p.latent) write(thread + 256 * j, y[j] * scale * w.kv[j]);
    for (int i = thread + 256 * LATENTS; i < p.latent; i += 256) write(i, c[i] * scale * p.kv_weight[i]);

    if (!p.indexer) return;
    const float mean = sum(own) / DIM, centred = thread < DIM ? own - mean : 0.0f;
    scale = 1.0f / sqrtf(sum(centred * centred) / DIM + p.k_eps);
    if (thread < DIM) key[thread] = fmaf(centred * scale, w.k, w.bias);
}

DEVICE u64 place_of(const Segment &s, const u32 *pages, int position) {
    return (u64)pages[s.first_page + position / PAGE] * PAGE + position % PAGE;
}

// Rows of segments of any length; keys go to scratch. A block of 256 a row.
KERNEL write_rows(const Segment *segments, const u32 *row_segment, const u32 *pages, const __grid_constant__ Rows p, float *keys) {
    __shared__ float room[8];
    const Held w = hold(p, threadIdx.x);
    after_previous();
    let_next_begin();
    const int row = blockIdx.x;
    const Segment s = segments[row_segment[row]];
    write_row(p, w, row, place_of(s, pages, s.position + row - s.first_row), keys + (u64)row * DIM, threadIdx.x,
              [&](float v) { return block_sum<256>(v, room); });
}

// What keys of pools and the ring take: `gate_column` is the gate's place in the projection, `keys` are rows of DIM.
struct Pools {
    const float *proj, *ape;
    float *tails;
    void *pool_keys;
    int proj_stride, gate_column, ring, half;
};

// Column d of a pool that ends at a position of the segment, but for the keys of the segment's own rows.
struct Pool {
    float gate[KPOOL], key[KPOOL];
};

DEVICE Pool begin_pool(const Pools &p, const Segment &s, int position, int d) {
    const float *tail = p.tails + (u64)s.slot * p.ring * 2 * DIM;
    Pool pool;
#pragma unroll
    for (int j = 0; j < KPOOL; j++) {
        const int at = position + 1 - KPOOL + j;
        const bool own = at >= (int)s.position;
        pool.key[j] = own ? 0.0f : tail[at % p.ring * 2 * DIM + d];
        pool.gate[j] = own ? p.proj[(u64)(s.first_row + at - s.position) * p.proj_stride + p.gate_column + d]
                           : tail[(at % p.ring * 2 + 1) * DIM + d];
        pool.gate[j] += p.ape[j * DIM + d];
    }
    return pool;
}

// The pool's key; the segment's first row has keys[0].
DEVICE void write_pool(const Pools &p, Pool &pool, const Segment &s, const u32 *pages, const float *keys, int position, int d) {
    float top = -INFINITY;
#pragma unroll
    for (int j = 0; j < KPOOL; j++) {
        const int at = position + 1 - KPOOL + j;
        if (at >= (int)s.position) pool.key[j] = keys[(u64)(at - s.position) * DIM + d];
        top = pool.gate[j] > top || j == 0 ? pool.gate[j] : top;
    }
    float sum = 0.0f, acc = 0.0f;
#pragma unroll
    for (int j = 0; j < KPOOL; j++) {
        const float e = expf(pool.gate[j] - top);
        sum += e;
        acc = fmaf(e, pool.key[j], acc);
    }
    const int number = position % PAGE / KPOOL;
    const u64 page = (u64)pages[s.first_page + position / PAGE] * POOLS * DIM;
    if (p.half)  // see index.cu
        ((u16 *)p.pool_keys)[page + d / 64 * (POOLS * 64) + number * 64 + ((d % 64 / 8) ^ (number % 8)) * 8 + d % 8] =
            narrow_half(acc / sum, 0.0f);
    else
        ((float *)p.pool_keys)[page + number * DIM + d] = acc / sum;
}

// Column d of the key and the gate of a segment's row t to the slot's ring.
DEVICE void write_tail(const Pools &p, const Segment &s, const float *keys, int t, int d) {
    float *to = p.tails + ((u64)s.slot * p.ring + (s.position + t) % p.ring) * 2 * DIM + d;
    to[0] = keys[(u64)t * DIM + d];
    to[DIM] = p.proj[(u64)(s.first_row + t) * p.proj_stride + p.gate_column + d];
}

// Keys of the pools that a row completes. Grid (rows), DIM threads.
KERNEL write_pools(const Segment *segments, const u32 *row_segment, const u32 *pages, const __grid_constant__ Pools p,
                   const float *keys) {
    after_previous();
    let_next_begin();
    const int row = blockIdx.x;
    const Segment s = segments[row_segment[row]];
    const int position = s.position + row - s.first_row;
    if ((position + 1) % KPOOL != 0) return;
    Pool pool = begin_pool(p, s, position, threadIdx.x);
    write_pool(p, pool, s, pages, keys + (u64)s.first_row * DIM, position, threadIdx.x);
}

// Keys and gates of a segment's last rows to the slot's ring. Grid (ring, segments), DIM threads.
KERNEL write_tails(const Segment *segments, const __grid_constant__ Pools p, const float *keys) {
    after_previous();
    let_next_begin();
    const Segment s = segments[blockIdx.y];
    const int keep = min_of(s.rows, p.ring);
    if ((int)blockIdx.x < keep) write_tail(p, s, keys + (u64)s.first_row * DIM, s.rows - keep + blockIdx.x, threadIdx.x);
}

// All three for segments of at most four rows, a block a segment: 256 threads a row, keys in shared memory.
extern "C" __global__ void __launch_bounds__(256 * SHORT)
    write_short(const Segment *segments, const u32 *pages, const __grid_constant__ Rows p, const __grid_constant__ Pools pools) {
    __shared__ float room[SHORT][8], keys[SHORT * DIM];
    const int t = threadIdx.x >> 8, thread = threadIdx.x & 255;
    const Held w = hold(p, thread);
    after_previous();
    let_next_begin();
    const Segment s = segments[blockIdx.x];
    const int position = s.position + t;
    const bool active = t < (int)s.rows, writes = active && thread < DIM, last = writes && (position + 1) % KPOOL == 0;
    Pool pool;
    if (AHEAD && last) pool = begin_pool(pools, s, position, thread);
    if (active)
        write_row(p, w, s.first_row + t, place_of(s, pages, position), keys + t * DIM, thread, [&](float v) {
            v = warp_sum(v);
            if ((thread & 31) == 0) room[t][thread >> 5] = v;
            asm volatile("bar.sync %0, 256;" ::"r"(t + 1) : "memory");
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) sum += room[t][w];
            asm volatile("bar.sync %0, 256;" ::"r"(t + 1) : "memory");
            return sum;
        });
    __syncthreads();
    if (!AHEAD) {
        if (last) pool = begin_pool(pools, s, position, thread);
        __syncthreads();
    }
    if (last) write_pool(pools, pool, s, pages, keys, position, thread);
    // What the ring held of positions before has been read.
    if (writes && t + pools.ring >= (int)s.rows) write_tail(pools, s, keys, t, thread);
}

// scores[row, pool] = sum_h w[h] relu(scale q[h] . K[pool]). Grid (tiles of 32 pools, rows), 128 threads.
KERNEL score(const Segment *segments, const u32 *row_segment, const u32 *pages, int first_row, const float *query,
             int query_stride, int query_start, const float *proj, int proj_stride, int weight_column, float factor,
             float scale, const float *pool_keys, int keep, float *scores, int score_stride) {
    __shared__ __align__(16) float key[TILE][DIM + 4];
    __shared__ __align__(16) float q[HEADS][DIM];
    __shared__ float parts[HEADS][TILE];
    after_previous();
    let_next_begin();
    const int row = first_row + blockIdx.y, tid = threadIdx.x;
    const Segment s = segments[row_segment[row]];
    const int position = s.position + row - s.first_row, pools = (position + 1) / KPOOL, first = blockIdx.x * TILE;
    if (pools <= keep || first >= pools) return;
    for (int i = tid; i < HEADS * DIM; i += 128) q[i / DIM][i % DIM] = query[(u64)row * query_stride + query_start + i];
    for (int i = tid; i < TILE * DIM; i += 128) {
        const int pool = min_of(first + i / DIM, pools - 1);
        key[i / DIM][i % DIM] = pool_keys[((u64)pages[s.first_page + pool / POOLS] * POOLS + pool % POOLS) * DIM + i % DIM];
    }
    __syncthreads();
    const int pool = tid & 31;
    for (int h = tid >> 5; h < HEADS; h += 4) {
        float sum = 0.0f;
#pragma unroll 8
        for (int d = 0; d < DIM; d += 4) {
            const float4 a = *(const float4 *)&key[pool][d], b = *(const float4 *)&q[h][d];
            sum = fmaf(a.x, b.x, sum);
            sum = fmaf(a.y, b.y, sum);
            sum = fmaf(a.z, b.z, sum);
            sum = fmaf(a.w, b.w, sum);
        }
        sum *= scale;
        parts[h][pool] = sum > 0.0f || sum != sum ? sum : 0.0f;
    }
    __syncthreads();
    if (tid >= TILE || first + pool >= pools) return;
    float total = 0.0f;
    for (int h = 0; h < HEADS; h++)
        total = fmaf(proj[(u64)row * proj_stride + weight_column + h] * factor, parts[h][pool], total);
    scores[(u64)blockIdx.y * score_stride + first + pool] = total + 0.0f;
}

// Bits whose unsigned order is that of the scores; NaN counts as the lowest.
DEVICE u32 ordered(float score) {
    if (score != score) score = -INFINITY;
    const u32 bits = __float_as_uint(score + 0.0f);
    return (bits >> 31) ? ~bits : bits | 0x80000000u;
}

// Chooses the best pools of a row and adds the tail. Grid (rows), 256 threads.
KERNEL choose(const Segment *segments, const u32 *row_segment, int first_row, const float *scores, int score_stride,
              int keep, u32 *tokens, int width, u32 *lens) {
    __shared__ u32 bins[256];
    __shared__ u32 chosen_bin, rank_left, warp_above[8], warp_equal[8];
    after_previous();
    let_next_begin();
    const int row = first_row + blockIdx.x, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const Segment s = segments[row_segment[row]];
    const int position = s.position + row - s.first_row, pools = (position + 1) / KPOOL;
    u32 *out = tokens + (u64)row * width;
    if (pools <= keep) {
        for (int i = tid; i <= position; i += 256) out[i] = i;
        if (tid == 0) lens[row] = position + 1;
        return;
    }
    const float *score = scores + (u64)blockIdx.x * score_stride;
    u32 prefix = 0, mask = 0, left = keep;
    for (int shift = 24; shift >= 0; shift -= 8) {
        bins[tid] = 0;
        __syncthreads();
        for (int i = tid; i < pools; i += 256) {
            const u32 bits = ordered(score[i]);
            if ((bits & mask) == prefix) atomicAdd(&bins[(bits >> shift) & 255], 1);
        }
        __syncthreads();
        if (tid == 0) {
            u32 above = 0;
            int bin = 255;
            for (; bin > 0 && above + bins[bin] < left; bin--) above += bins[bin];
            chosen_bin = bin;
            rank_left = left - above;
        }
        __syncthreads();
        prefix |= chosen_bin << shift;
        mask |= 255u << shift;
        left = rank_left;
        __syncthreads();
    }
    // Pools above the threshold, and the first `left` equal to it, ascending.
    u32 written = 0, equals = 0;
    for (int start = 0; start < pools; start += 256) {
        const int i = start + tid;
        const u32 bits = i < pools ? ordered(score[i]) : 0;
        const bool above = i < pools && bits > prefix, equal = i < pools && bits == prefix;
        const u32 above_mask = __ballot_sync(FULL, above), equal_mask = __ballot_sync(FULL, equal);
        if (lane == 0) {
            warp_above[warp] = __popc(above_mask);
            warp_equal[warp] = __popc(equal_mask);
        }
        __syncthreads();
        u32 a = 0, e = 0, all_a = 0, all_e = 0;
        for (int w = 0; w < 8; w++) {
            if (w < warp) {
                a += warp_above[w];
                e += warp_equal[w];
            }
            all_a += warp_above[w];
            all_e += warp_equal[w];
        }
        const u32 below = (1u << lane) - 1;
        a += __popc(above_mask & below);
        e += __popc(equal_mask & below);
        const u32 room = left > equals ? left - equals : 0;
        if (above || (equal && e < room)) {
            const u32 place = (written + a + (e < room ? e : room)) * KPOOL;
#pragma unroll
            for (int j = 0; j < KPOOL; j++) out[place + j] = i * KPOOL + j;
        }
        written += all_a + (all_e < room ? all_e : room);
        equals += all_e;
        __syncthreads();
    }
    for (int i = pools * KPOOL + tid; i <= position; i += 256) out[keep * KPOOL + i - pools * KPOOL] = i;
    if (tid == 0) lens[row] = keep * KPOOL + position + 1 - pools * KPOOL;
}
