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
// prepare batches of up to three rows in turn and finish them; a warp brings what a batch needs by bulk copies, two batches deep,
// another one states, two deep.
//
// Limits: a head of a sequence moves 128 KiB of state, 1.5 KB of columns and as much of a record a row, so many sequences are
// bound by memory: reading and writing states alone, with nothing else in the kernel, takes 280 us of the 350 below.
// Versions, 256 sequences x 3 rows (1 row), 32 heads, on one H200: a block a head that does all by itself 525 us (511);
// pipelined with loads in the preparation 775 (419); numbers asked for ahead 494 (334); short exponentials, remainders by
// multiplication, a block stays with one head 402 (327); in another program, where that one takes 413 (335): rows prepared three
// at a time from bulk copies 372 (336), states without a hint that they are evicted first 350 (314). Devices without bulk copies
// take the first one, in `kda_plain.cuh`, others `kda_pipeline.cuh`.
//
// DIM: width of a head (a multiple of 32, at most 128); TAPS: taps of the convolution.
#include "kda.cuh"

// Groups of columns, warps of a group, and rows that are prepared at a time.
#define GROUPS (DIM / 32)
#define THREADS (DIM * GROUPS)

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
#include "kda_pipeline.cuh"
#else
#include "kda_plain.cuh"
#endif
