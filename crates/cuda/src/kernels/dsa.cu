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

// Norms of the query residual and the latent (to its page); the index key's LayerNorm to scratch. A block of 256 a row.
KERNEL write_rows(const Segment *segments, const u32 *row_segment, const u32 *pages, const float *proj, int proj_stride,
                  int q_lora, int latent, const float *q_weight, float q_eps, const float *kv_weight, float kv_eps,
                  const float *k_weight, const float *k_bias, float k_eps, int indexer, float *q_residual, int q_stride,
                  void *latents, int half, float *keys) {
    __shared__ float room[8];
    after_previous();
    let_next_begin();
    const int row = blockIdx.x;
    const Segment s = segments[row_segment[row]];
    const int position = s.position + row - s.first_row;
    const float *x = proj + (u64)row * proj_stride;
    float square = 0.0f;
    for (int i = threadIdx.x; i < q_lora; i += 256) square = fmaf(x[i], x[i], square);
    float scale = 1.0f / sqrtf(block_sum<256>(square, room) / q_lora + q_eps);
    for (int i = threadIdx.x; i < q_lora; i += 256) q_residual[(u64)row * q_stride + i] = x[i] * scale * q_weight[i];

    x += q_lora;
    square = 0.0f;
    for (int i = threadIdx.x; i < latent; i += 256) square = fmaf(x[i], x[i], square);
    scale = 1.0f / sqrtf(block_sum<256>(square, room) / latent + kv_eps);
    const u64 place = ((u64)pages[s.first_page + position / PAGE] * PAGE + position % PAGE) * latent;
    for (int i = threadIdx.x; i < latent; i += 256) {
        const float v = x[i] * scale * kv_weight[i];
        if (half)
            ((u16 *)latents)[place + i] = narrow_half(v, 0.0f);
        else
            ((float *)latents)[place + i] = v;
    }

    if (!indexer) return;
    x += latent;
    const int d = threadIdx.x;
    const float v = d < DIM ? x[d] : 0.0f;
    const float mean = block_sum<256>(v, room) / DIM, centred = d < DIM ? v - mean : 0.0f;
    scale = 1.0f / sqrtf(block_sum<256>(centred * centred, room) / DIM + k_eps);
    if (d < DIM) keys[(u64)row * DIM + d] = fmaf(centred * scale, k_weight[d], k_bias[d]);
}

// Keys of the pools that a row completes. Grid (rows), DIM threads. `gate_column` is the gate's place in the projection.
KERNEL write_pools(const Segment *segments, const u32 *row_segment, const u32 *pages, const float *proj, int proj_stride,
                   int gate_column, const float *keys, const float *ape, const float *tails, int ring, void *pool_keys,
                   int half) {
    const int row = blockIdx.x, d = threadIdx.x;
    after_previous();
    let_next_begin();
    const Segment s = segments[row_segment[row]];
    const int position = s.position + row - s.first_row;
    if ((position + 1) % KPOOL != 0) return;
    const float *tail = tails + (u64)s.slot * ring * 2 * DIM;
    float gate[KPOOL], key[KPOOL], top = -INFINITY;
#pragma unroll
    for (int j = 0; j < KPOOL; j++) {
        const int p = position + 1 - KPOOL + j;
        if (p >= (int)s.position) {
            const u64 from = s.first_row + p - s.position;
            key[j] = keys[from * DIM + d];
            gate[j] = proj[from * proj_stride + gate_column + d];
        } else {
            key[j] = tail[p % ring * 2 * DIM + d];
            gate[j] = tail[(p % ring * 2 + 1) * DIM + d];
        }
        gate[j] += ape[j * DIM + d];
        top = gate[j] > top || j == 0 ? gate[j] : top;
    }
    float sum = 0.0f, acc = 0.0f;
#pragma unroll
    for (int j = 0; j < KPOOL; j++) {
        const float e = expf(gate[j] - top);
        sum += e;
        acc = fmaf(e, key[j], acc);
    }
    const int pool = position % PAGE / KPOOL;
    const u64 page = (u64)pages[s.first_page + position / PAGE] * POOLS * DIM;
    if (half)  // see index.cu
        ((u16 *)pool_keys)[page + d / 64 * (POOLS * 64) + pool * 64 + ((d % 64 / 8) ^ (pool % 8)) * 8 + d % 8] =
            narrow_half(acc / sum, 0.0f);
    else
        ((float *)pool_keys)[page + pool * DIM + d] = acc / sum;
}

// Keys and gates of a segment's last rows to the slot's ring. Grid (ring, segments), DIM threads.
KERNEL write_tails(const Segment *segments, const float *proj, int proj_stride, int gate_column, const float *keys,
                   float *tails, int ring) {
    after_previous();
    let_next_begin();
    const Segment s = segments[blockIdx.y];
    const int keep = min_of(s.rows, ring), d = threadIdx.x;
    if ((int)blockIdx.x >= keep) return;
    const int t = s.rows - keep + blockIdx.x;
    const u64 row = s.first_row + t;
    float *to = tails + ((u64)s.slot * ring + (s.position + t) % ring) * 2 * DIM + d;
    to[0] = keys[row * DIM + d];
    to[DIM] = proj[row * proj_stride + gate_column + d];
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
