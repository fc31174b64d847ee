// Kimi delta attention over whole chunks of 64 rows on tensor cores (compute capability 9.0), in one launch.
//
// Maths, a head, rows i of a chunk, G the sum of log-decays from the chunk's first row on, S the state in front of it:
//   A[i][j] = -beta_i sum_d k_i k_j exp(G_i - G_j)  (j < i);   P[i][j] = sum_d q_i k_j exp(G_i - G_j)  (j <= i)
//   T = (I - A)^-1;   W = T (beta k exp(G));   U = T (beta v);   V = U - W S
//   o = (q exp(G)) S + P V;   S <- diag(exp(G_63)) S + (k exp(G_63 - G))^T V;   out = o / rms(o) * weight * sigmoid(z)
// A row loses at most e^-5, a chunk e^-320: only exponentials of sums over at most 16 rows are ever positive. Decays are
// multiplied up along 16 rows, so that a row takes one exponential, and blocks of 16 rows differ by one vector.
//
// Layout. `walkers` blocks walk through the chunks of a head each (kda_walk.cuh), which is a chain; all others are two teams
// that prepare chunks of all these heads (kda_rows.cuh, kda_pairs.cuh, kda_solve.cuh), chunk after chunk, and leave
// what the chain needs as an image (kda_image.cuh) in a ring of PLACES a walker, small enough to stay in the second-level cache.
// Numbers in memory say which images are there and which have been taken. Tasks are taken in order, so the oldest one
// that waits for a place waits for a walker whose images are all there or under way: nobody waits for ever, with any number of
// blocks that are all resident.
//
// Accuracy: everything is a half where it enters a product (its rounding 2^-12; A and W are at most 1), sums and the state are
// f32, A's diagonal blocks tf32. Against the recurrence in f64: 4e-4 to 7e-4, 1.7e-3 with 64 equal keys and no decay; bound
// 3e-3. v, q, k and what becomes of them must be below 65504.
//
// Limits: bytes (six f32 a channel and row) 355 us for 16384 rows and 32 heads; the chain 256 x 1 us of products. Teams and
// walkers are about even at 750 us, both by latency: rows from one place (742) or additions for exponentials (764) change little.
//
// Versions, 16384 rows, 32 heads, on one H200: two kernels in windows through memory, mma products, bf16 pairs 2423 us; halves, one
// exponential a row, the inverse by blocks and the walk on warpgroup products with S transposed, two kernels 689 + 1191 (its
// gate stored single numbers, which the compiler had made of 16 bytes); one launch 898; rows asked for four ahead, outputs in
// 16 bytes 767. Slower: rows brought to the second-level cache first, a task ahead or just before (a third; images are pushed
// out), more than eight places, one operand of W and q (128 columns: the compiler then waits for each product).
//
// DIM is 128 here; TAPS: taps of the convolution.
#include "kda.cuh"
#include "wgmma.cuh"
#include "async.cuh"
#include "fragments.cuh"

// Images of a walker that may lie in memory.
#define PLACES 6

#include "kda_image.cuh"
#include "kda_rows.cuh"
#include "kda_pairs.cuh"
#include "kda_solve.cuh"
#include "kda_walk.cuh"

// Tasks are the chunks of the walkers' first heads, chunk after chunk, then of their second ones, and so on.
struct Tasks {
    const Args &in;
    u32 before = 0;
    int turn = 0, heads = 0, longest = -1;

    // The turn that a task belongs to; tasks must be asked for in order. False behind the last one.
    __device__ bool reach(u32 task) {
        const int items = in.segment_count * in.heads;
        for (;; turn++) {
            heads = min_of(items - turn * in.walkers, in.walkers);
            if (heads <= 0) return false;
            if (longest < 0) {
                const int from = turn * in.walkers;
                longest = 0;
                for (int i = from / in.heads; i <= (from + heads - 1) / in.heads; i++)
                    longest = max_of(longest, chunks_of(in.segments[i]).count);
            }
            if (holds(task)) return true;
            before += longest * heads;
            longest = -1;
        }
    }
    __device__ bool holds(u32 task) const { return task - before < (u32)(longest * heads); }
    __device__ int chunk_of(u32 task) const { return (task - before) / heads; }
    __device__ int walker_of(u32 task) const { return (task - before) % heads; }
    __device__ int item_of(u32 task) const { return turn * in.walkers + walker_of(task); }
};

DEVICE void team_sync(int team) { meet(1 + team, 256); }

// A team takes tasks until there are none.
DEVICE void prepare_chunks(const Args &in, u32 base, int tid, int team, u32 (&task_of)[3]) {
    const int warp = tid >> 5, lane = tid & 31;
    Tasks tasks = {in};
    clear_pairs(base, tid);
    // Thread 0 alone: the next task; the image that is on its way, and the flag that will say so.
    u32 next = 0, stored = 0, *publish = nullptr;
    if (tid == 0) next = atomicAdd(in.counters, 1);
    auto show = [&]() {
        if (!publish) return;
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        copies_ordered();
        store_flag(publish, stored);
        publish = nullptr;
    };
    for (;;) {
        if (tid == 0) task_of[0] = next;
        team_sync(team);
        const u32 task = task_of[0];
        if (!tasks.reach(task)) break;
        const int chunk = tasks.chunk_of(task), walker = tasks.walker_of(task), item = tasks.item_of(task);
        const Segment s = in.segments[item / in.heads];
        const Chunks chunks = chunks_of(s);
        if (chunk >= chunks.count) {
            if (tid == 0) {
                show();
                next = atomicAdd(in.counters, 1);
            }
            team_sync(team);
            continue;
        }
        if (tid == 0) {
            // Images of this walker before this one.
            u32 number = chunk;
            for (int i = walker; i < item; i += in.walkers) number += chunks_of(in.segments[i / in.heads]).count;
            task_of[1] = number;
            task_of[2] = walker;
        }
        convolve(in, s, chunks.first + CHUNK * chunk, item % in.heads, base, tid, [&]() {
            if (tid == 0 && publish) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            team_sync(team);
        });
        if (tid == 0) {
            show();
            next = atomicAdd(in.counters, 1);
        }
        team_sync(team);
        const int block = warp >> 1;
        Pairs sums = {};
        near_pairs(sums, base, warp, lane);
        team_sync(team);
        scales(base, tid);
        far_pairs(sums, base, warp, lane);
        if (warp & 1) give(sums.a, share_of(base, block, false, lane), block);
        else give(sums.p, share_of(base, block, true, lane), block);
        team_sync(team);
        if (warp & 1) end_p(sums, base, block, lane);
        else end_a(sums, base, block, lane);
        team_sync(team);
        solve(base, warp, lane);
        shared_written();
        team_sync(team);
        if (tid == 0) {
            const u32 number = task_of[1], walker = task_of[2];
            // The place is free when the walker has taken what was there.
            while (number >= PLACES && load_flag(progress_of(in, walker)) + PLACES <= number) __nanosleep(100);
            copies_ordered();
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(
                             image_of(in, walker, number)),
                         "r"(base), "n"(IMAGE_BYTES)
                         : "memory");
            publish = flag_of(in, walker, number);
            stored = number + 1;
        }
    }
    if (tid == 0) show();
}

// One block a multiprocessor, all of them resident; 512 threads.
extern "C" __global__ void __launch_bounds__(512, 1) chunks(const __grid_constant__ Args in) {
    extern __shared__ __align__(1024) u8 dynamic[];
    __shared__ __align__(8) Walk walk;
    __shared__ u32 task_of[2][3];
    const int tid = threadIdx.x, walker = blockIdx.x;
    const u32 base = shared_address(dynamic);
    if (walker >= in.walkers) {
        const int team = tid >> 8;
        prepare_chunks(in, base + team * TEAM_BYTES, tid & 255, team, task_of[team]);
        return;
    }
    if (tid == 0) walk_begin(walk);
    __syncthreads();
    if (tid >= 384) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (tid == 384) fetch_images(in, walk, base, walker);
    } else if (tid >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        norm_outputs(in, walk, base, walker, tid - 256);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
        walk_chunks(in, walk, base, walker, tid);
    }
}
