// The choice of the pools with the best scores, ties going to the lower pool, and the tail of tokens behind the last pool.
//
// A row is a cluster's (or a block's). The bits of a score, made monotone, are narrowed by 11, 11 and 10 bits with histograms in
// shared memory; the blocks of a cluster add what their own has to the sums of all of them, so that one meeting is enough for each of
// the three. Up to BATCH scores stay in registers meanwhile, longer rows are read again. Warps own runs of pools, so
// that places in the list follow from two counts. The list depends on the scores alone, not on the number of blocks.
//
// Limits: a cluster is at most eight blocks.
// Constants: KPOOL tokens of a pool, CLUSTER blocks of a row, PER scores of a thread.
#include "common.cuh"
#include "async.cuh"

// Bits whose unsigned order is that of the scores; NaN counts as the lowest.
DEVICE u32 ordered(float score) {
    if (score != score) score = -INFINITY;
    const u32 bits = __float_as_uint(score + 0.0f);
    return (bits >> 31) ? ~bits : bits | 0x80000000u;
}

#define THREADS 1024
#define WARPS (THREADS / 32)
#define BATCH (CLUSTER * THREADS * PER)
// Bins of the three histograms.
#define BINS (2048 + 2048 + 1024)

// The blocks of a cluster (or the block) meet; what they wrote to shared memory is seen.
DEVICE void all_meet() {
    if (CLUSTER > 1)
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    else
        __syncthreads();
}
DEVICE u32 rank_in_cluster() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return CLUSTER > 1 ? r : 0;
}

// Adds to a word of a block's shared memory.
DEVICE void add_to(const u32 *own, u32 rank, u32 n) {
    asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nred.relaxed.cluster.shared::cluster.add.u32 [a], %2;\n}" ::"r"(
                     shared_address(own)),
                 "r"(rank), "r"(n)
                 : "memory");
}

// A word of a block's shared memory.
DEVICE u32 word_of(const u32 *own, u32 rank) {
    if (CLUSTER == 1) return *own;
    u32 v;
    asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %1, %2;\nld.shared::cluster.u32 %0, [a];\n}"
                 : "=r"(v)
                 : "r"(shared_address(own)), "r"(rank)
                 : "memory");
    return v;
}

// Grid (rows times CLUSTER), 1024 threads.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    choose_pools(const Segment *segments, const u32 *row_segment, int first_row, const float *scores, int stride, int keep,
                 u32 *tokens, int width, u32 *lens) {
    __shared__ u32 bins[(CLUSTER > 1 ? 2 : 1) * BINS], warps[WARPS], equals[WARPS], counts[2];
    __shared__ u32 chosen, rest;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, rank = rank_in_cluster();
    for (int i = tid; i < (CLUSTER > 1 ? 2 : 1) * BINS; i += THREADS) bins[i] = 0;
    after_previous();
    let_next_begin();
    const int local = blockIdx.x / CLUSTER, row = first_row + local;
    const Segment s = segments[row_segment[row]];
    const int position = s.position + row - s.first_row, pools = (position + 1) / KPOOL;
    u32 *out = tokens + (u64)row * width;
    if (pools <= keep) {
        for (int i = rank * THREADS + tid; i <= position; i += CLUSTER * THREADS) out[i] = i;
        if (rank == 0 && tid == 0) lens[row] = position + 1;
        return;
    }
    const float *score = scores + (u64)local * stride;
    // A warp of a batch holds a run of `each` times 32 pools, lane l every 32nd.
    const bool held = pools <= BATCH;
    const int each = held ? (pools + CLUSTER * THREADS - 1) / (CLUSTER * THREADS) : PER;
    u32 bits[PER];
    auto load = [&](int start) {
        const int at = start + 32 * each * (rank * WARPS + warp) + lane;
#pragma unroll
        for (int part = 0; part < PER; part += PER < 16 ? PER : 16) {
            float v[16];
#pragma unroll
            for (int j = 0; j < min_of(PER, 16); j++)
                v[j] = part + j < each && at + 32 * (part + j) < pools ? score[at + 32 * (part + j)] : 0.0f;
            // No score has the bits 0: they stand for none.
#pragma unroll
            for (int j = 0; j < min_of(PER, 16); j++)
                bits[part + j] = part + j < each && at + 32 * (part + j) < pools ? ordered(v[j]) : 0;
        }
    };
    if (held) load(0);
    all_meet();
    u32 prefix = 0, mask = 0, left = keep;
#pragma unroll 1
    for (int pass = 0; pass < 3; pass++) {
        const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        const int count = pass < 2 ? 2048 : 1024;
        u32 *own = bins + 2048 * pass;
#pragma unroll 1
        for (int start = 0; start < pools; start += BATCH) {
            if (!held) load(start);
#pragma unroll
            for (int j = 0; j < PER; j++)
                if (bits[j] && (bits[j] & mask) == prefix) atomicAdd(&own[(bits[j] >> shift) & (count - 1)], 1);
        }
        __syncthreads();
        // The bin, from the top, in which the `left`th lies.
        const int top = count - 1 - (pass < 2 ? 2 * tid : tid);
        if (CLUSTER > 1) {
            for (int k = 0; k < (pass < 2 ? 2 : 1); k++) {
                const u32 v = own[top - k];
                if (v)
                    for (int c = 0; c < CLUSTER; c++) add_to(own + BINS + top - k, c, v);
            }
            all_meet();
            own += BINS;
        }
        const u32 n[2] = {own[top], pass < 2 ? own[top - 1] : 0};
        const u32 sum = n[0] + n[1];
        u32 upto = sum;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const u32 v = __shfl_up_sync(FULL, upto, d);
            if (lane >= d) upto += v;
        }
        if (lane == 31) warps[warp] = upto;
        __syncthreads();
        upto += __reduce_add_sync(FULL, lane < warp ? warps[lane] : 0);
        if (upto >= left && upto - sum < left) {
            const bool second = upto - sum + n[0] < left;
            chosen = top - second;
            rest = left - (upto - sum + (second ? n[0] : 0));
        }
        __syncthreads();
        prefix |= chosen << shift;
        mask |= (u32)(count - 1) << shift;
        left = rest;
    }
    // Those above the threshold, and the first `left` that equal it, ascending.
    u32 written = 0, seen = 0;
#pragma unroll 1
    for (int start = 0; start < pools; start += BATCH) {
        if (!held) load(start);
        const int at = start + 32 * each * (rank * WARPS + warp) + lane;
        u32 a = 0, e = 0;
#pragma unroll
        for (int j = 0; j < PER; j++) {
            a += bits[j] > prefix;
            e += bits[j] == prefix;
        }
        a = __reduce_add_sync(FULL, a);
        e = __reduce_add_sync(FULL, e);
        if (lane == 0) {
            warps[warp] = a;
            equals[warp] = e;
        }
        __syncthreads();
        const u32 all_a = warps[lane], all_e = equals[lane];
        u32 block_a = __reduce_add_sync(FULL, all_a), block_e = __reduce_add_sync(FULL, all_e);
        a = written + __reduce_add_sync(FULL, lane < warp ? all_a : 0);
        e = seen + __reduce_add_sync(FULL, lane < warp ? all_e : 0);
        if (CLUSTER > 1) {
            if (tid == 0) {
                counts[0] = block_a;
                counts[1] = block_e;
            }
            all_meet();
            const u32 other_a = lane < CLUSTER ? word_of(counts, lane) : 0;
            const u32 other_e = lane < CLUSTER ? word_of(counts + 1, lane) : 0;
            a += __reduce_add_sync(FULL, lane < rank ? other_a : 0);
            e += __reduce_add_sync(FULL, lane < rank ? other_e : 0);
            block_a = __reduce_add_sync(FULL, other_a);
            block_e = __reduce_add_sync(FULL, other_e);
        }
        const u32 below = (1u << lane) - 1;
#pragma unroll
        for (int j = 0; j < PER; j++) {
            const bool above = bits[j] > prefix, equal = bits[j] == prefix;
            const u32 above_mask = __ballot_sync(FULL, above), equal_mask = __ballot_sync(FULL, equal);
            if (!(above_mask | equal_mask)) continue;
            const u32 before = e + __popc(equal_mask & below);
            if (above || (equal && before < left)) {
                const u32 place = (a + __popc(above_mask & below) + (before < left ? before : left)) * KPOOL;
#pragma unroll
                for (int k = 0; k < KPOOL; k++) out[place + k] = (at + 32 * j) * KPOOL + k;
            }
            a += __popc(above_mask);
            e += __popc(equal_mask);
        }
        written += block_a;
        seen += block_e;
        all_meet();
    }
    if (rank == 0) {
        for (int i = pools * KPOOL + tid; i <= position; i += THREADS) out[keep * KPOOL + i - pools * KPOOL] = i;
        if (tid == 0) lens[row] = keep * KPOOL + position + 1 - pools * KPOOL;
    }
}
