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
// Limits: bytes (six f32 a channel and row) 355 us for 16384 rows and 32 heads; the chain 256 x 1 us of products. What a team has
// to wait for is memory (with every row from one place the convolution takes less than half of its time), barriers, and its thread
// that says that an image is there.
//
// Versions, 16384 rows, 32 heads, on one H200: two kernels in windows through memory, mma products, bf16 pairs 2423 us; halves, one
// exponential a row, the inverse by blocks and the walk on warpgroup products with S transposed, two kernels 689 + 1191 (its gate
// stored single numbers, which the compiler had made of 16 bytes); one launch 898; rows asked for four ahead, outputs in 16 bytes
// 767; seven warps for the gate, which have z's part ready before outputs come, the state's decay and outputs beside products,
// places freed by the thread that brings images, nearly all rows of a chunk under way at once 724 (16 heads 638, before 756),
// with six places sometimes 910. Slower: rows brought to the second-level cache first, a task ahead or just before (a third;
// images are pushed out), the same asked for by bulk copies 870, more than eight places, one operand of W and q (128 columns: the
// compiler then waits for each product).
//
// DIM is 128 here; TAPS: taps of the convolution.
#include "kda.cuh"
#include "wgmma.cuh"
#include "async.cuh"
#include "fragments.cuh"

// Images of a walker that may lie in memory.
#define PLACES 8

#include "kda_image.cuh"
#include "kda_rows.cuh"
#include "kda_pairs.cuh"
#include "kda_solve.cuh"
#include "kda_walk.cuh"

// Tasks are the chunks of the walkers' first heads, chunk after chunk, then of their second ones, and so on.
struct Tasks {
    u32 before;
    int turn, heads, longest;

    // The turn that a task belongs to; tasks must be asked for in order. False behind the last one.
    __device__ bool reach(const Args &in, u32 task) {
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
};

DEVICE void team_sync(int team) { meet(1 + team, 256); }

// A chunk to prepare: the segment and its row, the head, its walker, images of this walker before it. No segment: there are no more.
struct Plan {
    int segment, row, head, walker;
    u32 number;
};
// What a team knows of its tasks. `number`, `walker`: where the image in work belongs, `stored`: the one on its way to memory.
struct Team {
    Plan plan;
    Tasks tasks;
    u32 next, number, stored_number;
    int walker, stored_walker;
};

// The first task from `task` on that is a chunk; others are taken meanwhile. One thread.
DEVICE void make_plan(const Args &in, Team &team, u32 task) {
    Tasks tasks = team.tasks;
    Plan plan = {-1, 0, 0, 0, 0};
    for (; tasks.reach(in, task); task = atomicAdd(in.counters, 1)) {
        const int chunk = tasks.chunk_of(task), walker = tasks.walker_of(task), item = tasks.turn * in.walkers + walker;
        const int segment = item / in.heads;
        const Chunks chunks = chunks_of(in.segments[segment]);
        if (chunk >= chunks.count) continue;
        u32 number = chunk;
        for (int i = walker; i < item; i += in.walkers) number += chunks_of(in.segments[i / in.heads]).count;
        plan = {segment, chunks.first + CHUNK * chunk, item - segment * in.heads, walker, number};
        break;
    }
    team.tasks = tasks;
    team.plan = plan;
}

// A team takes tasks until there are none. The first rows of the next one are asked for while this one is solved.
DEVICE void prepare_chunks(const Args &in, u32 base, int tid, int id, Team &team) {
    const int warp = tid >> 5, lane = tid & 31, block = warp >> 1;
    clear_pairs(base, tid);
    // The image that is on its way has arrived.
    auto show = [&]() {
        if (team.stored_walker < 0) return;
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        copies_ordered();
        store_flag(flag_of(in, team.stored_walker, team.stored_number), team.stored_number + 1);
        team.stored_walker = -1;
    };
    if (tid == 0) {
        team.tasks = {0, 0, 0, -1};
        team.stored_walker = -1;
        make_plan(in, team, atomicAdd(in.counters, 1));
    }
    team_sync(id);
    Rows rows;
    if (team.plan.segment >= 0) rows.begin(in, in.segments[team.plan.segment], team.plan.row, team.plan.head, tid);
    while (team.plan.segment >= 0) {
        if (tid == 0) {
            team.number = team.plan.number;
            team.walker = team.plan.walker;
        }
        convolve(in, in.segments[team.plan.segment], team.plan.row, team.plan.head, base, tid, rows, [&]() {
            if (tid == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            team_sync(id);
        });
        u32 next = 0;
        if (tid == 0) show();
        if (tid == 32) next = atomicAdd(in.counters, 1);
        team_sync(id);
        Pairs sums = {};
        near_pairs(sums, base, warp, lane);
        team_sync(id);
        // This warp has nothing in front of it.
        if (tid == 32) make_plan(in, team, next);
        scales(base, tid);
        far_pairs(sums, base, warp, lane);
        if (warp & 1) give(sums.a, share_of(base, block, false, lane), block);
        else give(sums.p, share_of(base, block, true, lane), block);
        team_sync(id);
        if (warp & 1) end_p(sums, base, block, lane);
        else end_a(sums, base, block, lane);
        team_sync(id);
        if (team.plan.segment >= 0) rows.begin(in, in.segments[team.plan.segment], team.plan.row, team.plan.head, tid);
        solve(base, warp, lane);
        shared_written();
        team_sync(id);
        if (tid == 0) {
            // The place is free when the walker has taken what was there.
            const u32 number = team.number;
            while (number >= PLACES && load_flag(progress_of(in, team.walker)) + PLACES <= number) __nanosleep(100);
            copies_ordered();
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(
                             image_of(in, team.walker, number)),
                         "r"(base), "n"(IMAGE_BYTES)
                         : "memory");
            team.stored_walker = team.walker;
            team.stored_number = number;
        }
    }
    if (tid == 0) show();
}

// Counters as `chunks` needs them, which waits for ever otherwise; one block. A launch, so that the step's work can be noted and
// repeated.
KERNEL clear(u32 *counters, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) counters[i] = 0;
}

// One block a multiprocessor, all of them resident; 512 threads. A walker's give registers to those that hold the state.
extern "C" __global__ void __launch_bounds__(512, 1) chunks(const __grid_constant__ Args in) {
    extern __shared__ __align__(1024) u8 dynamic[];
    __shared__ __align__(8) Walk walk;
    __shared__ Team teams[2];
    const int tid = threadIdx.x, walker = blockIdx.x;
    const u32 base = shared_address(dynamic);
    if (walker >= in.walkers) {
        const int team = tid >> 8;
        prepare_chunks(in, base + team * TEAM_BYTES, tid & 255, team, teams[team]);
        return;
    }
    if (tid == 0) walk_begin(walk);
    __syncthreads();
    if (tid >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        if (tid < 256 + 32 * GATERS) norm_outputs(in, walk, base, walker, tid - 256);
        else if (tid == 256 + 32 * GATERS) fetch_images(in, walk, base, walker);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
        walk_chunks(in, walk, base, walker, tid);
    }
}
